"""The GPU's steps on the CPU, lane after lane: to see without a GPU that they give the CPU engine's bits.

The lanes of a step, and the nodes of a window, run in either order; what depended on it would show.
"""

from __future__ import annotations

import numpy as np

from congestion.engine.gpu import in_order, switch
from congestion.engine.gpu.convert import to_state, to_tables
from congestion.engine.gpu.host import run_host
from congestion.engine.gpu.store import with_room
from congestion.engine.gpu.tables import DONE, ERROR, GIVEN, GO, SHORT, TAKEN, WINDOWS, room_of
from congestion.engine.gpu.window import first_tx, is_due
from congestion.engine.tables import NEVER, State
from congestion.kernels.jit import entry, kernel


def run_by_loops(state: State, until: int, lanes: int = 4, backwards: bool = False) -> tuple[State, int]:
    """Run as `engine.run.run`, by the steps of the GPU."""
    s, reserve = to_tables(state)
    room = np.zeros(room_of(int(s.node["num_ports"].max())), dtype=np.int32)
    while True:
        begin = int(_run(s, room, until, reserve, lanes, -1 if backwards else 1))
        if s.clock[ERROR]:
            raise OverflowError("more packets on a link than its rate and delay let it hold")
        if s.clock[GO] == DONE:
            return to_state(s, state), begin
        s = with_room(s, reserve)


@entry
def _run(s, room, until, reserve, lanes, turn):  # type: ignore[no-untyped-def]
    """Run the GPU's steps on the CPU, lane after lane; return when the next window would begin; clock[GO] says why."""
    clock, many, parity = s.clock, len(s.node), 0
    for n in range(many):
        first_tx(s, n)
    while True:
        begin = NEVER
        for n in range(many):
            begin = min(begin, s.next_time[n], s.soon[parity * many + n])
        clock[GO] = DONE if begin == NEVER or begin >= until else 0
        if clock[GO] == 0 and clock[GIVEN] - clock[TAKEN] < reserve:
            clock[GO] = SHORT
        if clock[GO] or clock[ERROR]:
            return begin
        end = begin + s.run[0].window
        s.run[0].time = end
        clock[WINDOWS] += 1
        for i in range(many):
            n = i if turn > 0 else many - 1 - i
            if is_due(s, n, parity, end):
                if s.node[n].is_switch:
                    _run_switch(s, room, n, end, parity, lanes, turn)
                else:
                    run_host(s, n, end, parity)
        parity = 1 - parity


@kernel
def _run_switch(s, room, n, end, parity, lanes, turn):  # type: ignore[no-untyped-def]
    """Run a switch's window as a warp of `lanes` lanes would, each step lane after lane in the order of `turn`."""
    first, behind = (0, lanes) if turn > 0 else (lanes - 1, -1)
    for lane in range(first, behind, turn):
        switch.clear(s, room, 0, n, lane, lanes)
    num_bytes, frames, soonest, near, shared = 0, 0, NEVER, False, 0
    for lane in range(first, behind, turn):
        part = switch.take(s, room, 0, n, lane, lanes, end)
        num_bytes, frames, soonest = num_bytes + part[0], frames + part[1], min(soonest, part[2])
    for lane in range(first, behind, turn):
        near |= switch.look(s, room, 0, n, lane, lanes, num_bytes, frames)
    if near:
        for lane in range(first, behind, turn):
            in_order.rank(s, room, 0, n, lane, lanes)
        in_order.run_in_order(s, 0, room, 0, n, end)
        for lane in range(first, behind, turn):
            soonest = min(soonest, in_order.tell(s, n, lane, lanes, parity)[0])
    else:
        for lane in range(first, behind, turn):
            switch.deal(s, room, 0, n, lane, lanes)
        for lane in range(first, behind, turn):
            soonest = min(soonest, switch.run_ports(s, room, 0, n, lane, lanes, end, parity)[0])
        for lane in range(first, behind, turn):
            shared += switch.settle(s, room, 0, n, lane, lanes)
        s.node[n].shared = shared
    s.next_time[n] = soonest

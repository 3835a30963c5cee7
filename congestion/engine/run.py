"""The loop over windows: each node that has something to do runs alone to the window's end, by the worker that has it.

A worker is a thread with a range of nodes. Between windows the workers meet twice: when all have written what they
send, and when all have seen what was sent to theirs. Neither their number nor their speed changes what happens.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from congestion.engine.host import run_host
from congestion.engine.lists import first
from congestion.engine.packets import flow_of
from congestion.engine.switch import run_switch
from congestion.engine.tables import CHUNK, FULL, NEVER, State, aligned
from congestion.jit import entry, inlined, kernel
from congestion.machine import meet, prefetch


def run(s: State, until: int) -> tuple[State, int]:
    """Let everything happen that begins before `until` ps; the state then, and when the next thing would, NEVER: none.

    A window that has begun is run to its end.
    """
    while True:
        s.arrived[0] = 0
        if len(s.worker) == 1:
            begin = _run(s, until, 0)
        else:
            with ThreadPoolExecutor(len(s.worker)) as pool:
                begin, *_ = pool.map(partial(_run, s, until), range(len(s.worker)))
        if begin != FULL:
            return s, begin
        s = _with_room(s)


def _with_room(s: State) -> State:
    """The same with free chunks shared out evenly, and twice as many chunks if that is not enough."""
    many, workers = len(s.following), len(s.worker)
    free = np.concatenate([s.free[k, : s.worker["num_free"][k]] for k in range(workers)])
    entry_, following = s.entry, s.following
    if len(free) < workers * (3 * (many - len(free)) + int(s.run["most_new_chunks"][0])) + workers:
        entry_ = aligned(2 * many * CHUNK, s.entry.dtype)
        entry_[: many * CHUNK] = s.entry
        following = np.empty(2 * many, dtype=s.following.dtype)
        following[:many] = s.following
        free = np.concatenate([np.arange(2 * many - 1, many - 1, -1, dtype=np.uint32), free])
    shared = np.empty((workers, len(following)), dtype=np.uint32)
    for k in range(workers):
        mine = free[k::workers]
        shared[k, : len(mine)] = mine
        s.worker["num_free"][k] = len(mine)
    return s._replace(entry=entry_, following=following, free=shared)


@entry
def _run(s, until, k):  # type: ignore[no-untyped-def]
    worker, num_workers = s.worker[k], len(s.worker)
    window, large = s.run[0].window, s.run[0].large
    while True:
        meet(s.arrived, num_workers)
        _publish(s, k)
        meet(s.arrived, num_workers)
        begin, in_use, least_free = NEVER, len(s.following), NEVER
        for each in range(num_workers):
            begin = min(begin, s.worker[each].begin)
            in_use -= s.worker[each].free_before
            least_free = min(least_free, s.worker[each].free_before)
        if begin == NEVER or begin >= until:
            return begin
        if least_free < 3 * in_use + s.run[0].most_new_chunks:
            return FULL
        end = begin + window
        worker.soonest = NEVER
        if k == 0:
            s.run[0].time = end
        for i in range(worker.first, worker.stop):
            n = s.owned[i]
            node = s.node[n]
            if large:
                _prefetch_host(s, s.owned[min(i + 4, worker.stop - 1)], s.owned[min(i + 2, worker.stop - 1)])
            if s.awake[n] or node.next_time < end:
                s.awake[n] = 0
                if node.is_switch:
                    run_switch(s, k, n, end)
                else:
                    run_host(s, k, n, end)


@inlined
def _prefetch_host(s, far, near):  # type: ignore[no-untyped-def]
    """What hosts touch first whose turn comes soon: what arrives, and once that is here the flow that it is of."""
    node = s.node[far]
    if not node.is_switch:
        wire = s.wire[node.first_port]
        prefetch(s.entry, wire.head * CHUNK + wire.head_at)
    node = s.node[near]
    if not node.is_switch and node.num_ports:
        wire = s.wire[node.first_port]
        if wire.taken < s.visible[node.first_port]:
            f = flow_of(s.entry[wire.head * CHUNK + wire.head_at].word)
            prefetch(s.flow, f)
            prefetch(s.receiver, f)


@kernel
def _publish(s, k):  # type: ignore[no-untyped-def]
    """Have worker `k`'s nodes see what was sent to them, and say when the next thing happens to any of them."""
    worker, large = s.worker[k], s.run[0].large
    begin = worker.soonest
    for i in range(worker.first, worker.stop):
        n = s.owned[i]
        node = s.node[n]
        s.awake[n] |= s.wake[n]
        s.wake[n] = 0
        begin = min(begin, node.next_time)
        for p in range(node.first_port, node.first_port + node.num_ports):
            wire = s.wire[p]
            s.visible[p] = wire.put
            if large and wire.taken < wire.put:
                first(s, k, wire)
    worker.begin = begin
    worker.free_before = worker.num_free

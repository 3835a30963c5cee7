"""Samples of a run at equal intervals of simulated time, written down by the loop over windows itself.

A look from Python costs some hundred microseconds, in which a small fabric runs for as many microseconds of simulated
time. The first worker takes it while the others wait. Not covered: what is made of looks
(`congestion.simulation.samples`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from congestion.engine.tables import NEVER, Ints, Rows, State
from congestion.kernels.jit import kernel
from congestion.kernels.machine import has

_CELLS = 1 << 19  # ports times looks that are kept until they are read: 25 bytes each
_MOST_ROWS = 1 << 12

PLAN = np.dtype(
    [
        ("next", "i8"),  # time of the next look, ps
        ("every", "i8"),
        ("row", "i8"),  # that it goes to
        ("time", "i8"),  # of the look before
    ]
)


class Looks(NamedTuple):
    """Times to look, and what was seen.

    plan: (1,) PLAN; acked: (num_flows,) packets that each flow had acknowledged at the last look; and a row a look:
    time: (rows,) ps; flows: (rows, 4) of packets acknowledged since the look before the sum over all flows, then of
    those that were under way their number, sum, and sum of squares; by port, (rows, num_ports): tx_bytes, paused_ps
    until then (the sum over its classes), queue_bytes, and stopped, whether one of its classes is.
    """

    plan: Rows
    acked: Ints
    time: Ints
    flows: NDArray[np.float64]
    tx_bytes: Ints
    paused_ps: Ints
    queue_bytes: Ints
    stopped: NDArray[np.uint8]

    def read(self) -> Looks:
        """Return copies of the filled rows, and mark all rows as free again."""
        plan = self.plan[0]
        rows = {name: getattr(self, name)[: plan["row"]].copy() for name in self._fields[2:]}
        plan["row"] = 0
        return Looks(plan=self.plan.copy(), acked=self.acked.copy(), **rows)


def looks_of(state: State, next_ps: int, every_ps: int, last_ps: int, acked: Ints) -> Looks:
    """Create looks without a row; the next one is due at `next_ps`, the last one was at `last_ps` and saw `acked`."""
    many = len(state.port)
    return _looks(min(max(_CELLS // many, 1), _MOST_ROWS), many, (next_ps, every_ps, 0, last_ps), acked.copy())


def no_looks(state: State) -> Looks:
    """Empty looks, for a run that nobody looks at."""
    return _looks(0, len(state.port), (NEVER, 0, 0, 0), np.zeros(0, dtype=np.int64))


def look_at(state: State, time_ps: int, last_ps: int, acked: Ints) -> Looks:
    """One look from outside of a run, as `take` takes it within one."""
    flow, port, lane = state.flow, state.port, state.lane if len(state.lane) else state.port
    looks = _looks(1, len(port), (time_ps, 0, 1, time_ps), flow["unacked"].astype(np.int64))
    moved = looks.acked - acked
    open_ = (flow["start"] < time_ps) & (flow["num_waits"] == 0)
    under_way = moved[open_ & ((flow["finish"] < 0) | (flow["finish"] > last_ps))].astype(float)
    looks.flows[0] = moved.sum(), len(under_way), under_way.sum(), (under_way**2).sum()
    is_paused = (lane["paused"] > 0).reshape(len(port), -1)
    since = np.maximum(time_ps - lane["paused_at"].reshape(len(port), -1), 0)
    looks.time[0] = time_ps
    looks.tx_bytes[0], looks.queue_bytes[0] = port["tx_bytes"], port["queue_bytes"]
    looks.paused_ps[0] = (lane["paused_ps"].reshape(len(port), -1) + is_paused * since).sum(axis=1)
    looks.stopped[0] = is_paused.any(axis=1)
    return looks


def _looks(rows: int, num_ports: int, plan: tuple[int, int, int, int], acked: Ints) -> Looks:
    """Return empty tables for `rows` looks at `num_ports` ports."""
    ints: Any = {name: np.empty((rows, num_ports), dtype=np.int64) for name in ("tx_bytes", "paused_ps", "queue_bytes")}
    return Looks(
        plan=np.array([plan], dtype=PLAN),
        acked=acked,
        time=np.empty(rows, dtype=np.int64),
        flows=np.empty((rows, 4)),
        stopped=np.empty((rows, num_ports), dtype=np.uint8),
        **ints,
    )


@kernel
def take(s, looks, time):  # type: ignore[no-untyped-def]
    """Write the next row: the run as it is when all that begins before `time` has happened."""
    plan = looks.plan[0]
    row, last = plan.row, plan.time
    total, many, under_way, squares = 0.0, 0.0, 0.0, 0.0
    for f in range(len(s.flow)):
        flow = s.flow[f]
        moved = float(flow.unacked - looks.acked[f])
        looks.acked[f] = flow.unacked
        total += moved
        if flow.start < time and flow.num_waits == 0 and (flow.finish < 0 or flow.finish > last):
            many += 1.0
            under_way += moved
            squares += moved * moved
    looks.flows[row, 0] = total
    looks.flows[row, 1] = many
    looks.flows[row, 2] = under_way
    looks.flows[row, 3] = squares
    num_classes = s.run[0].num_classes if has(s.features, "classes") else 1
    for p in range(len(s.port)):
        port = s.port[p]
        looks.tx_bytes[row, p] = port.tx_bytes
        looks.queue_bytes[row, p] = port.queue_bytes
        stopped, paused_ps = np.uint8(0), np.int64(0)
        for number in range(num_classes):
            lane = s.lane[p * num_classes + number] if has(s.features, "classes") else port
            paused_ps += lane.paused_ps
            if lane.paused:
                stopped = np.uint8(1)
                paused_ps += max(time - lane.paused_at, 0)
        looks.stopped[row, p] = stopped
        looks.paused_ps[row, p] = paused_ps
    looks.time[row] = time
    plan.row = row + 1
    plan.time = time
    plan.next = plan.next + plan.every

"""Tables that the GPU's steps take: those of `engine.tables`, but for lists and what workers have to themselves."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from congestion.engine.tables import Ints, Rows

CHUNK = 32  # entries of a queue's chunk: a warp's threads take free ones rarely

# A wire: a ring of entries that its reader empties, a time of 0 where there is none.
WIRE = np.dtype(
    [
        ("first", "i8"),  # of its entries, in `ring`
        ("size", "u4"),
        ("head", "u4"),  # the reader's
        ("last", "i8"),  # as `arrivals` has it
        ("began", "i8"),
        ("earliest", "i8"),  # the writer's: when the first packet arrives that it sent in this window; NEVER: none
        ("tail", "u4"),
    ],
    align=True,
)

# Places in `clock`, a cache line apart: chunks ever taken and given back, the soonest that anybody knows of, what the
# next window is, when that would begin, blocks at the barrier and how often it opened, an error, and windows so far.
_LINE = 16
TAKEN, GIVEN, NEXT, GO, BEGIN, ARRIVED, GENERATION, ERROR, WINDOWS, CLOCK = range(0, 10 * _LINE, _LINE)
DONE, SHORT, BROKEN = -1, -2, -3  # what stands in GO instead of a window's begin


class Tables(NamedTuple):
    """All tables of a run on a GPU. Names that `State` has too mean the same, but for these.

    queue_head, queue_tail: places in `entry`, (num_chunks * CHUNK,); following: (num_chunks,) the next chunk; free:
    (num_chunks,) a ring of free chunks, taken at clock[TAKEN] and given back at clock[GIVEN]; wire: (num_ports,) WIRE;
    ring: entries of all wires; soon: (2 * num_nodes,) by parity of windows, the first arrival of what was sent to a
    node in the window before; seen_from: (num_ports + 1,) where each port's part of `seen` and `order` begins; due:
    (warps, most ports); switches, hosts: nodes.
    """

    features: Rows
    run: Rows
    size: Ints
    pace: Ints
    port: Rows
    lane: Rows
    weight: Ints
    class_of: NDArray[np.uint8]
    kind: Rows
    node: Rows
    flow: Rows
    receiver: Rows
    dcqcn: Rows
    dcqcn_flow: Rows
    swift: Rows
    swift_flow: Rows
    nscc: Rows
    nscc_flow: Rows
    hybrid: Rows
    hybrid_flow: Rows
    plugin: Rows
    plugin_flow: Rows
    law_view: Rows
    sent: NDArray[np.int64]
    rtt: Rows
    cause: Ints
    timeouts: Ints
    acked: NDArray[np.uint64]
    received: NDArray[np.uint64]
    flap_from: Ints
    flap: Ints
    flowlet: NDArray[np.int64]
    spray: NDArray[np.uint32]
    watchdog: Rows
    waiting_from: NDArray[np.int64]
    waiting: NDArray[np.uint32]
    path: NDArray[np.uint32]
    by_host: NDArray[np.uint32]
    active: NDArray[np.uint32]
    next_time: Ints
    wire: Rows
    queue_head: NDArray[np.uint32]
    queue_tail: NDArray[np.uint32]
    ring: Rows
    entry: Rows
    following: NDArray[np.uint32]
    free: NDArray[np.uint32]
    soon: Ints
    seen_from: Ints
    seen: Rows
    order: NDArray[np.uint32]
    next_tx: Ints
    switches: NDArray[np.uint32]
    hosts: NDArray[np.uint32]
    clock: Ints


# Tables that are as the CPU's engine has them.
SAME = tuple(name for name in Tables._fields[: Tables._fields.index("wire")])


def room_of(num_ports: int) -> int:
    """Numbers of `room` that a switch of so many ports needs."""
    return 4 * num_ports

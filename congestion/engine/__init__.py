"""The packet engine: windowed, data-oriented, exact to the picosecond; flows by the rules of ns-3's HPCC simulator.

Time goes in windows of the smallest link delay, so what one node sends in a window reaches no other in it, and nodes
can be run one after another (`run`), each on its own wires in and ports out (`switch`, `host`). A wire is a list a
directed link, written by its sender and read by its receiver up to the window's end; packets are put there when their
transmission begins, so arrivals are in order. Idle time is jumped over by each node's next time. The state is a few
integer tables (`tables`); drawn numbers are hashes, so no order of drawing matters.

Order of events: time; then arrivals; then starts of flows; then ports and NICs, by port. In ns-3 the order within a
moment is that of scheduling: arrivals are ordered by as much of it as their wires show (`switch`), then by in-link.

What the kernels are compiled for is in the type of `features`: most runs know nothing of losses, flaps, timers, PFC
watchdogs and several paths a flow (`plain`), others have all of them (`extras`), and those with classes of traffic
queues for each (`classes`). Each is compiled when first needed and kept.

Where the time goes: an array that is looked at row by row costs its reference count, which `jit` omits; the tables
are handed from function to function by value, hence inlined. Not covered: more than one cable a host, a limit to the
buffer of one class without PFC (but `drop_tail`), a PFC watchdog with classes of traffic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from netlayer import lazy_names

if TYPE_CHECKING:
    from congestion.engine.packets import hash_random as hash_random
    from congestion.engine.packets import serialise as serialise
    from congestion.engine.tables import ACK as ACK
    from congestion.engine.tables import ACK_PATH as ACK_PATH
    from congestion.engine.tables import DATA as DATA
    from congestion.engine.tables import FLOW_SHIFT as FLOW_SHIFT
    from congestion.engine.tables import HOP_MASK as HOP_MASK
    from congestion.engine.tables import HOP_SHIFT as HOP_SHIFT
    from congestion.engine.tables import MARK_BIT as MARK_BIT
    from congestion.engine.tables import NEVER as NEVER
    from congestion.engine.tables import SEQ_MASK as SEQ_MASK
    from congestion.engine.tables import SEQ_SHIFT as SEQ_SHIFT
    from congestion.engine.tables import Ints as Ints
    from congestion.engine.tables import Rows as Rows
    from congestion.engine.tables import State as State

__all__ = [
    "ACK",
    "ACK_PATH",
    "DATA",
    "FLOW_SHIFT",
    "HOP_MASK",
    "HOP_SHIFT",
    "MARK_BIT",
    "NEVER",
    "SEQ_MASK",
    "SEQ_SHIFT",
    "Ints",
    "Rows",
    "State",
    "hash_random",
    "serialise",
]

__getattr__ = lazy_names(
    __name__,
    {
        "ACK": ".tables",
        "ACK_PATH": ".tables",
        "DATA": ".tables",
        "FLOW_SHIFT": ".tables",
        "HOP_MASK": ".tables",
        "HOP_SHIFT": ".tables",
        "MARK_BIT": ".tables",
        "NEVER": ".tables",
        "SEQ_MASK": ".tables",
        "SEQ_SHIFT": ".tables",
        "Ints": ".tables",
        "Rows": ".tables",
        "State": ".tables",
        "hash_random": ".packets",
        "serialise": ".packets",
    },
)

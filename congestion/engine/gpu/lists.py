"""First in, first out, where the two ends of a list are threads of a GPU.

A wire's reader and writer run in the same window, and look at nothing of each other's but the entries: one that is put
now arrives in a later window, so the reader stops before it whether it sees it yet or not. A queue is its port's alone.
Free chunks are taken from one end of a ring and given back at the other: what is taken in a window was given back in an
earlier one, as long as the window begins with as many free chunks as can be taken in it.
"""

from __future__ import annotations

import numpy as np

from congestion.engine.gpu.atomics import add
from congestion.engine.gpu.tables import CHUNK, ERROR, GIVEN, TAKEN
from congestion.engine.tables import NEVER
from congestion.kernels.jit import inlined

_PLACES = np.uint32(CHUNK - 1)
_SHIFT = np.uint32(CHUNK.bit_length() - 1)


@inlined
def send_on(s, wire, time, word):  # type: ignore[no-untyped-def]
    """Put a packet on a wire, on which it arrives at `time`."""
    entry = s.ring[wire.first + wire.tail]
    if entry.time:  # never read: more packets are on the wire than its rate and delay let it hold
        s.clock[ERROR] = 1
    entry.word = word
    entry.time = time
    behind = np.uint32(wire.tail + np.uint32(1))
    wire.tail = behind if behind < wire.size else np.uint32(0)
    wire.earliest = min(wire.earliest, time)


@inlined
def arrival_on(s, wire):  # type: ignore[no-untyped-def]
    """Return when the next packet arrives, NEVER where none is known of; exact before the window's end."""
    time = s.ring[wire.first + wire.head].time
    return time if time else NEVER


@inlined
def take_off(s, wire):  # type: ignore[no-untyped-def]
    """The packet that arrives next."""
    entry = s.ring[wire.first + wire.head]
    entry.time = 0
    behind = np.uint32(wire.head + np.uint32(1))
    wire.head = behind if behind < wire.size else np.uint32(0)
    return entry.word


@inlined
def put(s, k, tail, time, word):  # type: ignore[no-untyped-def]  # noqa: ARG001  (as `engine.lists`)
    """Write an entry at a queue's `tail`; where the tail is then."""
    entry = s.entry[tail]
    entry.time = time
    entry.word = word
    behind = np.uint32(tail + np.uint32(1))
    if behind & _PLACES == 0:
        chunk = s.free[add(s.clock, TAKEN, 1) % len(s.free)]
        s.following[tail >> _SHIFT] = chunk
        behind = np.uint32(chunk << _SHIFT)
    return behind


@inlined
def after(s, k, head):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return where a queue's head is once the entry there is taken."""
    behind = np.uint32(head + np.uint32(1))
    if behind & _PLACES == 0:
        chunk = np.uint32(head >> _SHIFT)
        behind = np.uint32(s.following[chunk] << _SHIFT)
        s.free[add(s.clock, GIVEN, 1) % len(s.free)] = chunk
    return behind

"""First in, first out: wires and queues as lists of chunks out of one store.

A list is two cursors, the places of its first entry and of the next one to be put; equal, it is empty. A wire's tail is
moved by the node that sends, its head by the one that receives, in one window by two threads: an entry is there before
the tail tells of it, and what a reader finds that was put in this window is due in a later one. A chunk is given back
by its reader when its last entry is passed; by then the writer has gone on to the next one. Chunks that were used last
are used next: the store stays as small as what is in flight, and warm in the cache.
"""

from __future__ import annotations

import numpy as np

from congestion.engine.tables import CHUNK
from congestion.kernels.jit import inlined

_CHUNK, _PLACES = np.uint32(CHUNK), np.uint32(CHUNK - 1)
_SHIFT = np.uint32(CHUNK.bit_length() - 1)


@inlined
def put(s, k, tail, time, word):  # type: ignore[no-untyped-def]
    """Write an entry at `tail`; where the tail is then. Worker `k` has a free chunk for it."""
    entry = s.entry[tail]
    entry.time = time
    entry.word = word
    behind = np.uint32(tail + np.uint32(1))
    return behind if behind & _PLACES else _extended(s, k, tail)


@inlined
def _extended(s, k, tail):  # type: ignore[no-untyped-def]
    worker = s.worker[k]
    worker.num_free -= 1
    chunk = s.free[np.uint32(k), np.uint32(worker.num_free)]
    s.following[tail >> _SHIFT] = chunk
    return np.uint32(chunk << _SHIFT)


@inlined
def after(s, k, head):  # type: ignore[no-untyped-def]
    """Return where the head is once the entry there is taken."""
    behind = np.uint32(head + np.uint32(1))
    return behind if behind & _PLACES else _left(s, k, head)


@inlined
def _left(s, k, head):  # type: ignore[no-untyped-def]
    worker = s.worker[k]
    chunk = np.uint32(head >> _SHIFT)
    s.free[np.uint32(k), np.uint32(worker.num_free)] = chunk
    worker.num_free += 1
    return np.uint32(s.following[chunk] << _SHIFT)

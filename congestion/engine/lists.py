"""First in, first out: wires and queues as lists of chunks out of one store.

A wire is written at its tail by the node that sends and read at its head by the one that receives, in one window by two
threads. They touch different fields; the reader goes no further than `visible`, a copy of `put` that is made between
windows. A chunk is given back by its reader once the next one is entered, so the writer never holds one that is free.
Chunks that were used last are used next: the store stays as small as what is in flight, and warm in the cache.
"""

from __future__ import annotations

from congestion.engine.tables import CHUNK
from congestion.jit import inlined

_CHUNK = CHUNK


@inlined
def _extend(s, k, fifo):  # type: ignore[no-untyped-def]
    worker = s.worker[k]
    worker.num_free -= 1
    chunk = s.free[k, worker.num_free]
    s.following[fifo.tail] = chunk
    fifo.tail = chunk
    fifo.tail_at = 0


@inlined
def put(s, k, fifo, time, word):  # type: ignore[no-untyped-def]
    """Append to a list; worker `k` has a free chunk for it."""
    if fifo.tail_at == _CHUNK:
        _extend(s, k, fifo)
    entry = s.entry[fifo.tail * _CHUNK + fifo.tail_at]
    entry.time = time
    entry.word = word
    fifo.tail_at += 1
    fifo.put += 1


@inlined
def _advance(s, k, fifo):  # type: ignore[no-untyped-def]
    worker = s.worker[k]
    chunk = fifo.head
    fifo.head = s.following[chunk]
    fifo.head_at = 0
    s.free[k, worker.num_free] = chunk
    worker.num_free += 1


@inlined
def first(s, k, fifo):  # type: ignore[no-untyped-def]
    """The entry at the head of a list that has one."""
    if fifo.head_at == _CHUNK:
        _advance(s, k, fifo)
    return s.entry[fifo.head * _CHUNK + fifo.head_at]


@inlined
def drop_first(fifo):  # type: ignore[no-untyped-def]
    fifo.head_at += 1
    fifo.taken += 1

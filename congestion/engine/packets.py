"""What switches and hosts share: sizes, serialisation, the wire between two nodes, queues, and drawn numbers.

A wire is a ring of (arrival, packet) a directed link, in time order, since one sender writes it. Queues are lists in
one pool with a free list, so that what is in use stays warm in the cache.
"""

from __future__ import annotations

import numba
import numpy as np

from congestion.engine.columns import (
    ACK_WIRE,
    DATA_WIRE,
    DELAY,
    DST,
    FLOW_MASK,
    FLOW_SHIFT,
    FREE,
    FRESH,
    LAST_BIT,
    LAST_WIRE,
    LOSS_SCALED,
    NEVER,
    NEXT_TIME,
    ON_WIRE,
    PFC,
    PFC_WIRE,
    QHEAD,
    QTAIL,
    RATE,
    RING_BASE,
    RING_FULL,
    RING_HEAD,
    RING_MASK,
    RING_TAIL,
    RX_COUNT,
    SEED,
    STATUS,
    TRUNCATE,
    TX_ACK,
    TX_BYTES,
    TX_DATA,
    TX_PKTS,
)


@numba.njit(forceinline=True)
def serialise(c, size, rate):  # type: ignore[no-untyped-def]
    """Time of `size` bytes at `rate` bit/s, ps; whole ns where the run truncates as ns-3 does."""
    took = size * 8_000_000_000_000 // rate
    return took // 1000 * 1000 if c[TRUNCATE] else took


@numba.njit(forceinline=True)
def size_of(s, word):  # type: ignore[no-untyped-def]
    kind = word & 3
    if kind == 0:
        return s.flow[(word >> FLOW_SHIFT) & FLOW_MASK, LAST_WIRE] if word & LAST_BIT else s.c[DATA_WIRE]
    return s.c[PFC_WIRE] if kind == PFC else s.c[ACK_WIRE]


@numba.njit(forceinline=True)
def send(s, link, now, word, size):  # type: ignore[no-untyped-def]
    """Put a packet on the wire from `now`; the time at which its last bit has left."""
    row = s.link[link]
    if size == s.c[DATA_WIRE]:
        took = row[TX_DATA]
    elif size == s.c[ACK_WIRE]:
        took = row[TX_ACK]
    else:
        took = serialise(s.c, size, row[RATE])
    arrival = now + took + row[DELAY]
    if row[RING_TAIL] - row[RING_HEAD] > row[RING_MASK]:
        s.c[STATUS] = RING_FULL
        return now + took
    if row[RING_TAIL] == row[RING_HEAD]:  # start over: the same few cache lines while the wire is nearly empty
        row[RING_TAIL] = row[RING_HEAD] = 0
    slot = row[RING_BASE] + (row[RING_TAIL] & row[RING_MASK])
    s.wire[slot, 0], s.wire[slot, 1] = arrival, word
    row[RING_TAIL] += 1
    s.c[ON_WIRE] += 1
    if word & 3 != PFC:
        row[TX_PKTS] += 1
        row[TX_BYTES] += size
    dst = row[DST]
    if arrival < s.node[dst, NEXT_TIME]:
        s.node[dst, NEXT_TIME] = arrival
    return now + took


@numba.njit(forceinline=True)
def next_arrival(s, link):  # type: ignore[no-untyped-def]
    row = s.link[link]
    return s.wire[row[RING_BASE] + (row[RING_HEAD] & row[RING_MASK]), 0] if row[RING_HEAD] < row[RING_TAIL] else NEVER


@numba.njit(forceinline=True)
def receive(s, link):  # type: ignore[no-untyped-def]
    """Take the next packet off a wire that has one; -1 where the link's error rate took it.

    PFC frames are spared: a lost resume would stop the link for good.
    """
    row = s.link[link]
    word = s.wire[row[RING_BASE] + (row[RING_HEAD] & row[RING_MASK]), 1]
    row[RING_HEAD] += 1
    s.c[ON_WIRE] -= 1
    if s.c[LOSS_SCALED] and word & 3 != PFC:
        row[RX_COUNT] += 1
        if drawn(s.c[SEED], link, row[RX_COUNT]) < s.c[LOSS_SCALED]:
            return -1
    return word


@numba.njit(forceinline=True)
def drawn(seed, first, second):  # type: ignore[no-untyped-def]
    """A number of 0..2^53 from three, by SplitMix64: random in effect, the same in whatever order it is drawn."""
    mixed = np.uint64(seed) ^ (np.uint64(first) * np.uint64(0x9E37_79B9_7F4A_7C15))
    for word in (np.uint64(second), np.uint64(0)):
        mixed = (mixed ^ word) + np.uint64(0x9E37_79B9_7F4A_7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
        mixed = mixed ^ (mixed >> np.uint64(31))
    return np.int64(mixed >> np.uint64(11))


@numba.njit(forceinline=True)
def enqueue(s, link, word, in_link):  # type: ignore[no-untyped-def]
    slot = s.c[FREE]
    if slot >= 0:
        s.c[FREE] = (s.pool[slot, 1] & 0xFFFF_FFFF) - 1
    else:
        slot = s.c[FRESH]
        s.c[FRESH] += 1
    s.pool[slot, 0], s.pool[slot, 1] = word, in_link << 32
    row = s.link[link]
    if row[QHEAD] < 0:
        row[QHEAD] = slot
    else:
        s.pool[row[QTAIL], 1] |= slot + 1
    row[QTAIL] = slot


@numba.njit(forceinline=True)
def dequeue(s, link):  # type: ignore[no-untyped-def]
    """Word and in-link of a queue's first packet; the queue must not be empty."""
    row = s.link[link]
    slot = row[QHEAD]
    word, rest = s.pool[slot, 0], s.pool[slot, 1]
    row[QHEAD] = (rest & 0xFFFF_FFFF) - 1
    s.pool[slot, 1] = s.c[FREE] + 1
    s.c[FREE] = slot
    return word, rest >> 32

"""A switch in one window: FIFO ports, ECN at dequeue, a shared buffer with PFC by dynamic thresholds.

Order of events: time, then arrivals by in-link, then ports that become free, by port. An arrival at a port that has
been free starts at once. Where no threshold can be reached in the window, ports do not know of each other and each is
run on its own (`_run_ports`); else all of the switch's events are run in their order (`_run_in_order`). Both give the
same. A PFC frame passes the queue, not the packet under way. Left out: priorities, and a limit to the buffer where
PFC is off. The rules and their figures are those of ns-3's HPCC switch.
"""

from __future__ import annotations

import numba

from congestion.engine.columns import (
    ACK_PATH,
    BUSY,
    COUNT,
    DROPS,
    ECN_ON,
    FIRST,
    FLOW_MASK,
    FLOW_SHIFT,
    HEADROOM,
    HEADROOM_USED,
    HI,
    HOP_MASK,
    HOP_SHIFT,
    IN_BYTES,
    KMAX,
    KMIN,
    MARK_BIT,
    MARKS,
    MAXQ,
    NEVER,
    NEXT_TIME,
    NUM_HI,
    NUM_PAUSED,
    PAUSE_SENT,
    PAUSED,
    PAUSES,
    PFC,
    PFC_ON,
    PFC_WIRE,
    POOL_BYTES,
    QBYTES,
    QHEAD,
    RESERVE,
    RESUME_OFFSET,
    SEED,
    SEQ_MASK,
    SEQ_SHIFT,
    SHARED,
    SHIFT,
    WINDOW_BYTES,
)
from congestion.engine.packets import dequeue, drawn, enqueue, next_arrival, receive, send, size_of

_ONE = float(1 << 53)


@numba.njit
def run_switch(s, node, end):  # type: ignore[no-untyped-def]
    """All that happens at `node` before `end`."""
    begin, stop = s.in_start[node], s.in_start[node + 1]
    count, total, frames = _collect(s, begin, stop, end)
    if s.c[PFC_ON] and (frames or s.node[node, NUM_PAUSED] or s.node[node, NUM_HI] or _near(s, node, total)):
        _run_in_order(s, node, count, end)
    else:
        _run_ports(s, node, count, end)
    soonest = NEVER
    for place in range(begin, stop):
        link = s.in_links[place]
        soonest = min(soonest, next_arrival(s, link), _next_start(s, link ^ 1))
    s.node[node, NEXT_TIME] = soonest


@numba.njit(forceinline=True)
def _collect(s, begin, stop, end):  # type: ignore[no-untyped-def]
    """Take what arrives in the window off the wires: how many packets, bytes, PFC frames."""
    count, total, frames = 0, 0, 0
    for place in range(begin, stop):
        link = s.in_links[place]
        s.link[link, WINDOW_BYTES] = 0
        while True:
            arrival = next_arrival(s, link)
            if arrival >= end:
                break
            word = receive(s, link)
            if word < 0:
                s.link[link, DROPS] += 1
                continue
            size = size_of(s, word)
            if word & 3 == PFC:
                frames += 1
            else:
                s.link[link, WINDOW_BYTES] += size
                total += size
            seen = s.seen[count]
            seen[0], seen[1], seen[2], seen[3] = arrival, word, link, _out_link(s, word, link)
            count += 1
    return count, total, frames


@numba.njit(forceinline=True)
def _out_link(s, word, link):  # type: ignore[no-untyped-def]
    if word & 3 == PFC:
        return link ^ 1  # the port that it stops
    hop = ((word >> HOP_SHIFT) & HOP_MASK) + 1 + (ACK_PATH if word & 3 else 0)
    return s.path[(word >> FLOW_SHIFT) & FLOW_MASK, hop]


@numba.njit(forceinline=True)
def _near(s, node, total):  # type: ignore[no-untyped-def]
    """Whether an ingress could reach its threshold if nothing left the switch."""
    left = s.node[node, POOL_BYTES] - s.node[node, SHARED] - total
    for place in range(s.in_start[node], s.in_start[node + 1]):
        row = s.link[s.in_links[place]]
        if row[IN_BYTES] + row[WINDOW_BYTES] - s.c[RESERVE] >= left >> row[SHIFT]:
            return True
    return False


@numba.njit(forceinline=True)
def _run_ports(s, node, count, end):  # type: ignore[no-untyped-def]
    begin, stop = s.in_start[node], s.in_start[node + 1]
    for place in range(begin, stop):
        s.link[s.in_links[place] ^ 1, COUNT] = 0
    for k in range(count):
        s.link[s.seen[k, 3], COUNT] += 1
    first = 0
    for place in range(begin, stop):
        out = s.in_links[place] ^ 1
        s.link[out, FIRST] = first
        first += s.link[out, COUNT]
    for k in range(count):
        row = s.link[s.seen[k, 3]]
        s.order[row[FIRST]] = k
        row[FIRST] += 1
    for place in range(begin, stop):
        out = s.in_links[place] ^ 1
        last = s.link[out, FIRST]
        if s.link[out, COUNT] or s.link[out, QHEAD] >= 0:
            _sort(s, last - s.link[out, COUNT], last)
            _run_port(s, node, out, last - s.link[out, COUNT], last, end)


@numba.njit(forceinline=True)
def _sort(s, begin, stop):  # type: ignore[no-untyped-def]
    """Insertion sort of `order` by arrival, stable; few arrive at a port in a window, and nearly in order."""
    for i in range(begin + 1, stop):
        k = s.order[i]
        arrival = s.seen[k, 0]
        j = i
        while j > begin and s.seen[s.order[j - 1], 0] > arrival:
            s.order[j] = s.order[j - 1]
            j -= 1
        s.order[j] = k


@numba.njit(forceinline=True)
def _run_port(s, node, out, begin, stop, end):  # type: ignore[no-untyped-def]
    row = s.link[out]
    for i in range(begin, stop):
        seen = s.seen[s.order[i]]
        now, word, in_link = seen[0], seen[1] + (1 << HOP_SHIFT), seen[2]
        while row[QHEAD] >= 0 and not row[PAUSED] and row[BUSY] < now:
            _start_next(s, node, out, row[BUSY])
        size = size_of(s, word)
        row[MAXQ] = max(row[MAXQ], row[QBYTES] + size)
        if row[QHEAD] < 0 and row[BUSY] < now and not row[PAUSED]:
            row[BUSY] = send(s, out, now, _marked(s, out, word), size)
        else:
            row[QBYTES] += size
            _hold(s, node, in_link, size)
            enqueue(s, out, word, in_link)
    while row[QHEAD] >= 0 and not row[PAUSED] and row[BUSY] < end:
        _start_next(s, node, out, row[BUSY])


@numba.njit(forceinline=True)
def _start_next(s, node, out, now):  # type: ignore[no-untyped-def]
    word, in_link = dequeue(s, out)
    size = size_of(s, word)
    s.link[out, QBYTES] -= size
    _release(s, node, in_link, size)
    s.link[out, BUSY] = send(s, out, now, _marked(s, out, word), size)
    return in_link


@numba.njit(forceinline=True)
def _marked(s, out, word):  # type: ignore[no-untyped-def]
    """The packet with its ECN mark, by the queue behind it: all above Kmax, in proportion above Kmin (RED)."""
    row = s.link[out]
    queue = row[QBYTES]
    if queue <= row[KMIN] or not s.c[ECN_ON]:
        return word
    if queue <= row[KMAX]:
        share = s.marking[0] * (queue - row[KMIN]) / (row[KMAX] - row[KMIN])
        flow, sequence = (word >> FLOW_SHIFT) & FLOW_MASK, (word >> SEQ_SHIFT) & SEQ_MASK
        if drawn(s.c[SEED], flow, sequence << 8 | word & (HOP_MASK << HOP_SHIFT) | word & 3) >= share * _ONE:
            return word
    row[MARKS] += 1
    return word if word & 3 else word | MARK_BIT  # on an ACK that bit is the CNP


@numba.njit(forceinline=True)
def _hold(s, node, in_link, size):  # type: ignore[no-untyped-def]
    """Count a packet at its ingress: headroom once the threshold is passed, else reserve and shared pool."""
    if not s.c[PFC_ON]:
        return
    row = s.link[in_link]
    over = row[IN_BYTES] + size - s.c[RESERVE]
    if over > 0 and over > _threshold(s, node, in_link):
        row[HEADROOM_USED] += size
        return
    row[IN_BYTES] += size
    if over > 0:
        s.node[node, SHARED] += min(size, over)


@numba.njit(forceinline=True)
def _release(s, node, in_link, size):  # type: ignore[no-untyped-def]
    if not s.c[PFC_ON]:
        return
    row = s.link[in_link]
    from_headroom = min(row[HEADROOM_USED], size)
    rest = size - from_headroom
    s.node[node, SHARED] -= min(rest, max(row[IN_BYTES] - s.c[RESERVE], 0))
    row[HEADROOM_USED] -= from_headroom
    row[IN_BYTES] -= rest


@numba.njit(forceinline=True)
def _threshold(s, node, in_link):  # type: ignore[no-untyped-def]
    return max(s.node[node, POOL_BYTES] - s.node[node, SHARED], 0) >> s.link[in_link, SHIFT]


@numba.njit(forceinline=True)
def _shared_of(s, in_link):  # type: ignore[no-untyped-def]
    return max(s.link[in_link, IN_BYTES] - s.c[RESERVE], 0)


@numba.njit(forceinline=True)
def _next_start(s, out):  # type: ignore[no-untyped-def]
    """When a busy port will begin its next packet, NEVER where it has none that may go."""
    row = s.link[out]
    return row[BUSY] if row[HI] or (row[QHEAD] >= 0 and not row[PAUSED]) else NEVER


@numba.njit
def _run_in_order(s, node, count, end):  # type: ignore[no-untyped-def]
    begin, stop = s.in_start[node], s.in_start[node + 1]
    for k in range(count):
        s.order[k] = k
    _sort(s, 0, count)
    for i in range(count + 1):
        until = s.seen[s.order[i], 0] if i < count else end
        while True:
            soonest, port = NEVER, -1
            for place in range(begin, stop):
                start = _next_start(s, s.in_links[place] ^ 1)
                if start < soonest:
                    soonest, port = start, s.in_links[place] ^ 1
            if soonest >= until:
                break
            _serve(s, node, port, soonest)
        if i < count:
            _arrive(s, node, s.seen[s.order[i]])


@numba.njit
def _arrive(s, node, seen):  # type: ignore[no-untyped-def]
    now, word, in_link, out = seen[0], seen[1], seen[2], seen[3]
    if word & 3 == PFC:
        s.link[out, PAUSED] = 1 if word & MARK_BIT else 0
        _kick(s, node, out, now)
        return
    size = size_of(s, word)
    row = s.link[in_link]
    threshold = _threshold(s, node, in_link)
    if size + row[HEADROOM_USED] > row[HEADROOM] and size + _shared_of(s, in_link) > threshold:
        row[DROPS] += 1
        return
    _hold(s, node, in_link, size)
    if not row[PAUSE_SENT] and (row[HEADROOM_USED] > 0 or _shared_of(s, in_link) >= _threshold(s, node, in_link)):
        row[PAUSES] += 1
        s.node[node, NUM_PAUSED] += 1
        _signal(s, node, in_link, 1, now)
    port = s.link[out]
    port[MAXQ] = max(port[MAXQ], port[QBYTES] + size)
    port[QBYTES] += size
    enqueue(s, out, word + (1 << HOP_SHIFT), in_link)
    _kick(s, node, out, now)


@numba.njit
def _signal(s, node, in_link, pause, now):  # type: ignore[no-untyped-def]
    """Queue a pause or resume frame to the sender of `in_link`. The two take turns, so a count tells which they are."""
    s.link[in_link, PAUSE_SENT] = pause
    s.link[in_link ^ 1, HI] += 1
    s.node[node, NUM_HI] += 1
    _kick(s, node, in_link ^ 1, now)


@numba.njit
def _kick(s, node, out, now):  # type: ignore[no-untyped-def]
    if s.link[out, BUSY] < now and _next_start(s, out) < NEVER:
        _serve(s, node, out, now)


@numba.njit
def _serve(s, node, out, now):  # type: ignore[no-untyped-def]
    """Begin the next packet of a free port: a PFC frame first, else the queue's head."""
    row = s.link[out]
    if row[HI]:
        last = s.link[out ^ 1, PAUSE_SENT]
        pause = last if row[HI] & 1 else 1 - last
        row[HI] -= 1
        s.node[node, NUM_HI] -= 1
        row[BUSY] = send(s, out, now, PFC | (MARK_BIT if pause else 0), s.c[PFC_WIRE])
        return
    in_link = _start_next(s, node, out, now)
    if s.link[in_link, PAUSE_SENT] and s.link[in_link, HEADROOM_USED] == 0:
        shared = _shared_of(s, in_link)
        if shared == 0 or shared + s.c[RESUME_OFFSET] <= _threshold(s, node, in_link):
            s.node[node, NUM_PAUSED] -= 1
            _signal(s, node, in_link, 0, now)

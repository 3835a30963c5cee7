"""A host in one window: one NIC, ACKs before data, flows in turn, each paced by its rate; go-back-N with NACKs.

Order of events: time, then arrivals, then starts of flows, then the NIC. PFC stops data, not ACKs. There is no
retransmit timer: a flow whose last packet or last ACK is lost does not end, as in ns-3's HPCC. Left out: windows.
"""

from __future__ import annotations

import numba

from congestion.control.dcqcn import advance, on_cnp
from congestion.engine.columns import (
    ACK,
    ACK_WIRE,
    AVAILABLE,
    BUSY,
    DATA,
    DATA_WIRE,
    DCQCN_ON,
    DROPS,
    EXPECTED,
    FINISH,
    FIRST_FLOW,
    FLOW_MASK,
    FLOW_RATE,
    FLOW_SHIFT,
    LAST_BIT,
    LAST_NACK,
    LAST_WIRE,
    MARK_BIT,
    NACK,
    NACK_AFTER,
    NACK_GAP,
    NEVER,
    NEXT,
    NEXT_TIME,
    NOW,
    NUM_ACTIVE,
    NUM_FLOWS,
    NUM_PACKETS,
    NUM_STARTED,
    OUT,
    PAUSED,
    PFC,
    QHEAD,
    RESENT,
    ROBIN,
    SEQ_MASK,
    SEQ_SHIFT,
    START,
    UNA,
)
from congestion.engine.packets import dequeue, enqueue, next_arrival, receive, send, serialise


@numba.njit
def run_host(s, node, end):  # type: ignore[no-untyped-def]
    """All that happens at `node` before `end`."""
    host = s.node[node]
    link = host[OUT]
    while True:
        arrival, start, ready = next_arrival(s, link ^ 1), _next_start(s, host), _next_send(s, host, link)
        event = min(arrival, start)
        if min(event, ready) >= end:
            break
        if ready < event:
            _send_next(s, host, link, ready)
            continue
        host[NOW] = event
        if arrival <= start:
            _arrive(s, link, event)
        else:
            s.active[host[FIRST_FLOW] + host[NUM_ACTIVE]] = s.by_host[host[FIRST_FLOW] + host[NUM_STARTED]]
            host[NUM_ACTIVE] += 1
            host[NUM_STARTED] += 1
    host[NEXT_TIME] = min(event, ready)


@numba.njit(forceinline=True)
def _next_start(s, host):  # type: ignore[no-untyped-def]
    if host[NUM_STARTED] == host[NUM_FLOWS]:
        return NEVER
    return s.flow[s.by_host[host[FIRST_FLOW] + host[NUM_STARTED]], START]


@numba.njit(forceinline=True)
def _next_send(s, host, link):  # type: ignore[no-untyped-def]
    """When the NIC can begin its next packet as things stand."""
    free = max(s.link[link, BUSY], host[NOW])
    if s.link[link, QHEAD] >= 0:
        return free
    if s.link[link, PAUSED]:
        return NEVER
    soonest = NEVER
    for k in range(host[FIRST_FLOW], host[FIRST_FLOW] + host[NUM_ACTIVE]):
        flow = s.flow[s.active[k]]
        if flow[NEXT] < flow[NUM_PACKETS] and flow[AVAILABLE] < soonest:
            soonest = flow[AVAILABLE]
            if soonest <= free:
                return free
    return soonest


@numba.njit(forceinline=True)
def _send_next(s, host, link, now):  # type: ignore[no-untyped-def]
    if s.link[link, QHEAD] >= 0:
        word, _ = dequeue(s, link)
        s.link[link, BUSY] = send(s, link, now, word, s.c[ACK_WIRE])
        return
    f = _next_flow(s, host, now)
    flow = s.flow[f]
    sequence = flow[NEXT]
    flow[NEXT] += 1
    last = sequence + 1 == flow[NUM_PACKETS]
    size = flow[LAST_WIRE] if last else s.c[DATA_WIRE]
    word = DATA | (LAST_BIT if last else 0) | sequence << SEQ_SHIFT | f << FLOW_SHIFT
    s.link[link, BUSY] = send(s, link, now, word, size)
    if s.c[DCQCN_ON]:
        advance(s.c, s.marking[1], s.flow, s.alpha, f, now)
    flow[AVAILABLE] = now + serialise(s.c, size, flow[FLOW_RATE])


@numba.njit(forceinline=True)
def _next_flow(s, host, now):  # type: ignore[no-untyped-def]
    """Round robin over flows that may send now; finished ones that are met leave the circle, as in ns-3's HPCC."""
    first, count = host[FIRST_FLOW], host[NUM_ACTIVE]
    finished, found = count, -1
    for step in range(1, count + 1):
        k = (host[ROBIN] + step) % count
        flow = s.flow[s.active[first + k]]
        if flow[NEXT] < flow[NUM_PACKETS]:
            if flow[AVAILABLE] <= now:
                found = k
                break
        elif flow[UNA] >= flow[NUM_PACKETS]:
            finished = min(finished, k)
    picked = s.active[first + found]
    kept = finished
    for k in range(finished, count):
        f = s.active[first + k]
        if s.flow[f, UNA] < s.flow[f, NUM_PACKETS]:
            if k == found:
                found = kept
            s.active[first + kept] = f
            kept += 1
    host[NUM_ACTIVE] = kept
    host[ROBIN] = found
    return picked


@numba.njit(forceinline=True)
def _arrive(s, link, now):  # type: ignore[no-untyped-def]
    word = receive(s, link ^ 1)
    if word < 0:
        s.link[link ^ 1, DROPS] += 1
        return
    kind, f, sequence = word & 3, (word >> FLOW_SHIFT) & FLOW_MASK, (word >> SEQ_SHIFT) & SEQ_MASK
    if kind == PFC:
        s.link[link, PAUSED] = 1 if word & MARK_BIT else 0
    elif kind == DATA:
        answer = _answer(s, s.flow[f], sequence, now)
        if answer:
            mark = word & MARK_BIT
            enqueue(s, link, answer | mark | s.flow[f, EXPECTED] << SEQ_SHIFT | f << FLOW_SHIFT, 0)
    else:
        _acknowledge(s, f, kind, sequence, now)
        if word & MARK_BIT and s.c[DCQCN_ON] and s.flow[f, FINISH] < 0:
            on_cnp(s.c, s.marking[1], s.flow, s.alpha, f, now)


@numba.njit(forceinline=True)
def _answer(s, flow, sequence, now):  # type: ignore[no-untyped-def]
    """Kind of the answer to a data packet, 0 for none: a NACK for a gap, once until it is closed or is old."""
    if sequence == flow[EXPECTED]:
        flow[EXPECTED] += 1
        return ACK
    if sequence > flow[EXPECTED] and (now >= flow[NACK_AFTER] or flow[LAST_NACK] != flow[EXPECTED]):
        flow[NACK_AFTER] = now + s.c[NACK_GAP]
        flow[LAST_NACK] = flow[EXPECTED]
        return NACK
    return 0


@numba.njit(forceinline=True)
def _acknowledge(s, f, kind, sequence, now):  # type: ignore[no-untyped-def]
    flow = s.flow[f]
    flow[UNA] = max(flow[UNA], sequence)
    if flow[UNA] >= flow[NUM_PACKETS] and flow[FINISH] < 0:
        flow[FINISH] = now
    if kind == NACK:
        flow[RESENT] += max(flow[NEXT] - flow[UNA], 0)
        flow[NEXT] = flow[UNA]

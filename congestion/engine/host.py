"""A host in one window: one NIC, ACKs before data, flows in turn, each paced by its rate; go-back-N with NACKs.

Order of events: time, then arrivals, then starts of flows, then the NIC. PFC stops data, not ACKs. There is no
retransmit timer: a flow whose last packet or last ACK is lost does not end, as in ns-3's HPCC. Left out: windows.
"""

from __future__ import annotations

import numpy as np

from congestion.control import laws
from congestion.engine.lists import drop_first, first, put
from congestion.engine.packets import flow_of, receive, send, serialise
from congestion.engine.tables import (
    ACK,
    DATA,
    FLOW_SHIFT,
    LAST_BIT,
    MARK_BIT,
    NACK,
    NEVER,
    PFC,
    SEQ_MASK,
    SEQ_SHIFT,
)
from congestion.jit import inlined, kernel


@kernel
def run_host(s, k, n, end):  # type: ignore[no-untyped-def]
    """All that happens at host `n` before `end`, by worker `k`."""
    node = s.node[n]
    p = node.first_port
    wire, visible = s.wire[p], s.visible[p]
    while True:
        arrival = first(s, k, wire).time if wire.taken < visible else NEVER
        start = _next_start(s, node)
        event = min(arrival, start)
        ready = _next_send(s, node, p)
        if min(event, ready) >= end:
            break
        if ready < event:
            _send_next(s, k, node, p, ready)
            continue
        node.now = event
        if arrival <= start:
            _arrive(s, k, p, event)
        else:
            s.active[node.first_flow + node.num_active] = s.by_host[node.first_flow + node.num_started]
            node.num_active += 1
            node.num_started += 1
    node.next_time = min(event, ready)


@inlined
def _next_start(s, node):  # type: ignore[no-untyped-def]
    if node.num_started == node.num_flows:
        return NEVER
    return s.flow[s.by_host[node.first_flow + node.num_started]].start


@inlined
def _next_send(s, node, p):  # type: ignore[no-untyped-def]
    """When the NIC can begin its next packet as things stand."""
    port = s.port[p]
    free = max(port.busy, node.now)
    if port.queued:
        return free
    if port.paused:
        return NEVER
    soonest = NEVER
    for i in range(node.first_flow, node.first_flow + node.num_active):
        flow = s.flow[s.active[i]]
        if flow.next < flow.num_packets and flow.available < soonest:
            soonest = flow.available
            if soonest <= free:
                return free
    return soonest


@inlined
def _send_next(s, k, node, p, now):  # type: ignore[no-untyped-def]
    port = s.port[p]
    if port.queued:
        queue = s.queue[p]
        word = first(s, k, queue).word
        drop_first(queue)
        port.queued -= 1
        send(s, k, port, now, word, s.run[0].ack_wire_bytes)
        return
    f = _next_flow(s, node, now)
    flow = s.flow[f]
    sequence = np.int64(flow.next)
    flow.next += 1
    last = sequence + 1 == flow.num_packets
    size = np.int64(flow.last_wire_bytes) if last else s.run[0].data_wire_bytes
    send(s, k, port, now, DATA | (LAST_BIT if last else 0) | sequence << SEQ_SHIFT | np.int64(f) << FLOW_SHIFT, size)
    laws.advance(s, f, now)
    if flow.rate_bps == port.rate:
        flow.available = port.busy
    else:
        flow.available = now + serialise(s.run[0], size, flow.rate_bps)


@inlined
def _next_flow(s, node, now):  # type: ignore[no-untyped-def]
    """Round robin over flows that may send now; finished ones that are met leave the circle, as in ns-3's HPCC."""
    base, count = node.first_flow, node.num_active
    finished, found = count, -1
    turn = node.robin
    for _ in range(count):
        turn = turn + 1 if turn + 1 < count else 0
        flow = s.flow[s.active[base + turn]]
        if flow.next < flow.num_packets:
            if flow.available <= now:
                found = turn
                break
        elif flow.unacked >= flow.num_packets:
            finished = min(finished, turn)
    picked = s.active[base + found]
    if finished < count:
        found = _leave(s, node, finished, found)
    node.robin = found
    return picked


@kernel
def _leave(s, node, finished, found):  # type: ignore[no-untyped-def]
    """Finished flows from place `finished` on leave the circle; where the flow at `found` is then."""
    base, kept = node.first_flow, finished
    for i in range(finished, node.num_active):
        f = s.active[base + i]
        if s.flow[f].unacked < s.flow[f].num_packets:
            if i == found:
                found = kept
            s.active[base + kept] = f
            kept += 1
    node.num_active = kept
    return found


@inlined
def _arrive(s, k, p, now):  # type: ignore[no-untyped-def]
    word = receive(s, k, p)
    if word < 0:
        return
    kind, f, sequence = word & 3, flow_of(word), (word >> SEQ_SHIFT) & SEQ_MASK
    port = s.port[p]
    if kind == PFC:
        port.paused = 1 if word & MARK_BIT else 0
    elif kind == DATA:
        row = s.receiver[f]
        answer = _answer(s, row, sequence, now)
        if answer:
            expected = np.int64(row.expected)
            put(s, k, s.queue[p], 0, answer | word & MARK_BIT | expected << SEQ_SHIFT | np.int64(f) << FLOW_SHIFT)
            port.queued += 1
    else:
        _acknowledge(s, f, kind, sequence, now)
        if word & MARK_BIT and s.flow[f].finish < 0:
            laws.on_cnp(s, f, now)


@inlined
def _answer(s, row, sequence, now):  # type: ignore[no-untyped-def]
    """Kind of the answer to a data packet, 0 for none: a NACK for a gap, once until it is closed or is old."""
    if sequence == row.expected:
        row.expected += 1
        return ACK
    if sequence > row.expected and (now >= row.nack_after or row.last_nack != row.expected):
        row.nack_after = now + s.run[0].nack_gap
        row.last_nack = row.expected
        return NACK
    return 0


@inlined
def _acknowledge(s, f, kind, sequence, now):  # type: ignore[no-untyped-def]
    flow = s.flow[f]
    flow.unacked = max(np.int64(flow.unacked), sequence)
    if flow.unacked >= flow.num_packets and flow.finish < 0:
        flow.finish = now
    if kind == NACK:
        flow.resent += max(flow.next - flow.unacked, 0)
        flow.next = flow.unacked

"""A host in one window: one NIC, ACKs before data, flows in turn, each held to its pace and window; go-back-N,
or selective repeat, which finds a loss by its timer alone: where packets take many paths, a gap says nothing.

Order of events: time, then arrivals, then starts of flows, then retransmit timers, then the NIC. PFC stops data, not
ACKs; but where there are classes of traffic a pause stops all that is of its class, and the NIC serves classes as a
switch does (`classes`). A flow may wait for others that end at its host: their data have all arrived there, or their
last ACK has. A flow whose retries run out has failed, as a queue pair in error: it sends no more and never finishes.
Without a timer (`timeout` 0) a flow whose last packet or last ACK is lost does not end, as in ns-3's HPCC.
"""

from __future__ import annotations

import numpy as np

from congestion.control import laws
from congestion.engine.classes import choose, class_of, lane_of, spend, waiting_classes
from congestion.engine.lists import after, put
from congestion.engine.packets import flow_of, hash_random, is_lost, number_of, path_bits, pause, send, serialise
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
from congestion.kernels.jit import inlined, kernel
from congestion.kernels.machine import has, load_shared

# hash_random gives 53 bits: times a share over _ONE it is a number below that share.
_ONE = float(1 << 53)


@kernel
def run_host(s, k, n, end):  # type: ignore[no-untyped-def]
    """Run all that happens at host `n` before `end`, by worker `k`."""
    node = s.node[n]
    p = node.first_port
    # The sender's worker appends to this wire in the window too; what it adds arrives after `end`, by lookahead, so one
    # look at the tail is enough.
    tail = load_shared(s.wire_tail, p)
    while True:
        head = s.wire_head[p]
        arrival = s.entry[head].time if head != tail else NEVER
        start = _next_start(s, node)
        event = min(arrival, start, node.timer)
        ready = _next_send(s, node, p)
        # Strictly before: an event at `end` belongs to the next window, where all of that moment are together.
        if min(event, ready) >= end:
            break
        # At one moment events come first: an ACK that arrives now may open the window of the flow whose turn it is.
        if ready < event:
            _send_next(s, k, node, p, ready)
            continue
        node.now = event
        if arrival == event:
            word = s.entry[head].word
            s.wire_head[p] = after(s, k, head)
            _arrive(s, k, node, p, word, event)
        elif start == event:
            _start_next(s, node)
        else:
            _expire(s, node, event)
    # The engine skips this host in windows that end before that.
    s.next_time[n] = min(event, ready)


@inlined
def _next_start(s, node):  # type: ignore[no-untyped-def]
    if node.num_started == node.num_known:
        return NEVER
    # by_host is sorted by start, so the first that has not begun is the next one.
    return s.flow[s.by_host[node.first_flow + node.num_started]].start


@inlined
def _start_next(s, node):  # type: ignore[no-untyped-def]
    f = s.by_host[node.first_flow + node.num_started]
    s.active[node.first_flow + node.num_active] = f
    node.num_active += 1
    node.num_started += 1
    laws.start(s, f)
    _set_limit(s, node, s.flow[f])


@inlined
def _set_limit(s, node, flow):  # type: ignore[no-untyped-def]
    """A window that is less than a packet lets one go when none is in flight: what is slower than that is paced."""
    # num_ready counts flows with a packet to send; it is kept by differences, for a scan would cost each event.
    was_ready = flow.next < flow.limit
    limit = np.int64(flow.num_packets)
    if flow.window_bytes != NEVER:
        limit = min(limit, flow.unacked + max(flow.window_bytes // s.run[0].mtu_bytes, 1))
    if s.run[0].sent_mask >= 0:  # the times of so many packets are remembered
        limit = min(limit, flow.unacked + s.run[0].sent_mask + 1)
    flow.limit = limit
    node.num_ready += np.int64(flow.next < limit) - np.int64(was_ready)


@inlined
def _move(node, flow, sequence):  # type: ignore[no-untyped-def]
    """Packet `sequence` is the next to be sent."""
    node.num_ready += np.int64(sequence < flow.limit) - np.int64(flow.next < flow.limit)
    flow.next = sequence


@inlined
def _next_send(s, node, p):  # type: ignore[no-untyped-def]
    """Return when the NIC can begin its next packet as things stand."""
    port = s.port[p]
    # A link that was idle is free now, not when its last packet ended.
    free = max(port.busy, node.now)
    # ACKs wait in the port's own queue, go before data, and are not paced.
    if waiting_classes(s, p) if has(s.features, "classes") else s.queue_head[p] != s.queue_tail[p]:
        return free
    if port.paused or node.num_ready == 0:
        return NEVER
    soonest, turn, count = NEVER, np.int64(node.round_robin_index), np.int64(node.num_active)
    for _ in range(count):  # from the one whose turn it is: it mostly may go
        turn = turn + 1 if turn + 1 < count else np.int64(0)
        flow = s.flow[s.active[node.first_flow + np.uint32(turn)]]
        if flow.next < flow.limit and flow.available < soonest:
            if has(s.features, "classes") and _is_stopped(s, p, s.active[node.first_flow + np.uint32(turn)]):
                continue
            # Not yet: its pace says when, and another flow's may be sooner.
            soonest = flow.available
            if soonest <= free:
                return free
    return soonest


@inlined
def _send_next(s, k, node, p, now):  # type: ignore[no-untyped-def]
    """Send what waits first at a host's port: an ACK, else the next packet of the flow whose turn it is."""
    port, run = s.port[p], s.run[0]
    lane = _waiting_lane(s, p)
    head = s.queue_head[lane]
    if head != s.queue_tail[lane]:
        word = s.entry[head].word
        s.queue_head[lane] = after(s, k, head)
        send(s, k, port, now, word, run.ack_wire_bytes)
        return
    f = _next_flow_by_class(s, node, p, now) if has(s.features, "classes") else _next_flow(s, node, now)
    flow = s.flow[f]
    # What lies below `sent_to` was sent before: go-back-N, or a timer, has taken `next` back.
    sequence = np.int64(flow.next)
    following = sequence + 1
    if sequence < flow.sent_to:
        flow.resent += 1
    else:
        flow.sent_to = following
    # Selective repeat does not send again what was acknowledged on its own.
    while has(s.features, "extras") and run.selective and following < flow.num_packets and _has(s.acked, f, following):
        following += 1
    _move(node, flow, following)
    last = sequence + 1 == flow.num_packets
    size = np.int64(flow.last_wire_bytes) if last else run.data_wire_bytes
    # The last packet may be shorter, and switches know its size by that bit alone.
    word = DATA | (LAST_BIT if last else 0) | path_bits(s, f, sequence, DATA)
    send(s, k, port, now, word | sequence << SEQ_SHIFT | np.int64(f) << FLOW_SHIFT, size)
    # A ring of send times, for round trips: `limit` keeps a flow from lapping it.
    if run.sent_mask >= 0:
        s.sent[f, sequence & run.sent_mask] = now
    # One timer a flow, for its oldest packet in flight; later packets leave it as it is.
    if has(s.features, "extras") and run.timeout and flow.timeout_at == NEVER:
        flow.timeout_at = now + s.timeouts[flow.retries]
        node.timer = min(node.timer, flow.timeout_at)
    # Timers of the law that were due meanwhile fire first: they may change the rate that paces what follows.
    laws.advance(s, f, now)
    # At line rate the port is the pace: rounding of a computed gap would leave holes between packets.
    if flow.rate_bps == s.kind[port.kind].rate:
        flow.available = port.busy
    else:
        flow.available = now + serialise(run, size, flow.rate_bps)


@inlined
def _next_flow(s, node, now):  # type: ignore[no-untyped-def]
    """Choose in turn among flows that may send now; finished ones that are met leave the circle, as in ns-3's HPCC."""
    base, count = node.first_flow, node.num_active
    finished, next_turn = count, -1
    turn = node.round_robin_index
    for _ in range(count):
        turn = turn + 1 if turn + 1 < count else 0
        flow = s.flow[s.active[base + turn]]
        if flow.next < flow.limit:
            if flow.available <= now:
                next_turn = turn
                break
        elif flow.unacked >= flow.num_packets:
            finished = min(finished, turn)
    # Before the circle is packed, which moves flows to other places.
    picked = s.active[base + next_turn]
    if finished < count:
        next_turn = _leave(s, node, finished, next_turn)
    node.round_robin_index = next_turn
    return picked


@inlined
def _is_stopped(s, p, f):  # type: ignore[no-untyped-def]
    return s.lane[lane_of(s, p, s.class_of[f])].paused


@inlined
def _waiting_lane(s, p):  # type: ignore[no-untyped-def]
    """The queue of ACKs to be served: of those that may go the highest class'."""
    if not has(s.features, "classes"):
        return np.int64(p)
    waiting, its_class = waiting_classes(s, p), s.run[0].num_classes - 1
    # Bit c of `waiting` is class c: the highest bit that is set is served.
    while its_class and not waiting >> its_class & 1:
        its_class -= 1
    return lane_of(s, p, its_class) if waiting else lane_of(s, p, 0)


@kernel
def _next_flow_by_class(s, node, p, now):  # type: ignore[no-untyped-def]
    """Return the flow whose turn it is, of the class that the NIC serves next; finished flows leave before."""
    base, may_go, finished = node.first_flow, np.int64(0), np.int64(node.num_active)
    for i in range(np.int64(node.num_active)):
        f = s.active[base + np.uint32(i)]
        flow = s.flow[f]
        if flow.next < flow.limit:
            if flow.available <= now and not _is_stopped(s, p, f):
                # The scheduler chooses a class first, and then in turn among the flows of that class.
                may_go |= np.int64(1) << np.int64(s.class_of[f])
        elif flow.unacked >= flow.num_packets:
            finished = min(finished, np.int64(i))
    if finished < node.num_active:
        _leave(s, node, finished, -1)
    its_class = choose(s, p, may_go)
    lane = s.lane[lane_of(s, p, its_class)]
    turn, count = np.int64(lane.turn), np.int64(node.num_active)
    f = s.active[base]
    for _ in range(count):
        turn = turn + 1 if turn + 1 < count else np.int64(0)
        f = s.active[base + np.uint32(turn)]
        flow = s.flow[f]
        if s.class_of[f] == its_class and flow.next < flow.limit and flow.available <= now:
            break
    lane.turn = turn
    last = flow.next + 1 == flow.num_packets
    # Deficit round robin pays by the bytes on the wire.
    spend(s, lane_of(s, p, its_class), its_class, flow.last_wire_bytes if last else s.run[0].data_wire_bytes)
    return f


@kernel
def _leave(s, node, finished, place):  # type: ignore[no-untyped-def]
    """Finished flows from place `finished` on leave the circle; where the flow at `place` is then."""
    base, kept = node.first_flow, finished
    for i in range(finished, node.num_active):
        f = s.active[base + i]
        if s.flow[f].unacked < s.flow[f].num_packets:
            if i == place:
                place = kept
            s.active[base + kept] = f
            kept += 1
    node.num_active = kept
    return place


@inlined
def _arrive(s, k, node, p, word, now):  # type: ignore[no-untyped-def]
    """Take in a packet at a host: pause the port, queue an ACK or NACK for data, or count an ACK for its flow."""
    if is_lost(s, p, word, now):
        return
    # A PFC frame has its class where a packet has its sequence number.
    kind, f, sequence = word & 3, flow_of(word), (word >> SEQ_SHIFT) & SEQ_MASK
    port = s.port[p]
    if kind == PFC:
        pause(s.lane[lane_of(s, p, sequence)] if has(s.features, "classes") else port, word, now)
    elif kind == DATA:
        row = s.receiver[f]
        # Compared below: only the packet that completes the flow releases those that wait for its data.
        before = row.expected
        selective = has(s.features, "extras") and s.run[0].selective
        answer = _take_any(s, f, row, sequence) if selective else _answer(s, row, sequence, now)
        if answer:
            says = sequence + 1 if selective else np.int64(row.expected)
            # The receiver sends the ECN mark back on the answer: ns-3's HPCC has no CNP packets of their own.
            mark = _echo(s, f, row, word, now)
            word = answer | mark | path_bits(s, f, says, answer)
            word |= says << SEQ_SHIFT | np.int64(f) << FLOW_SHIFT
            lane = lane_of(s, p, class_of(s, word)) if has(s.features, "classes") else np.int64(p)
            s.queue_tail[lane] = put(s, k, s.queue_tail[lane], 0, word)
            if before < row.expected and row.expected == s.flow[f].num_packets:
                _release_waiting(s, node, f, s.flow[f].dst, now)
    else:
        _acknowledge(s, node, f, kind, sequence, word & MARK_BIT, now)


@inlined
def _has(bits, f, sequence):  # type: ignore[no-untyped-def]
    return (bits[f, sequence >> 6] >> np.uint64(sequence & 63)) & np.uint64(1)


@inlined
def _add(bits, f, sequence):  # type: ignore[no-untyped-def]
    bits[f, sequence >> 6] |= np.uint64(1) << np.uint64(sequence & 63)


@inlined
def _take_any(s, f, row, sequence):  # type: ignore[no-untyped-def]
    """Selective repeat keeps what comes in any order, and answers each packet by its own number."""
    _add(s.received, f, sequence)
    while row.expected < s.flow[f].num_packets and _has(s.received, f, np.int64(row.expected)):
        row.expected += 1
    return ACK


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
    # What is here already was sent again by a timer: say so, or it is sent for ever.
    return ACK if sequence < row.expected and has(s.features, "extras") and s.run[0].timeout else 0


@inlined
def _echo(s, f, row, word, now):  # type: ignore[no-untyped-def]
    """The mark that goes back with an answer: one an interval where notices are that rare."""
    mark = word & MARK_BIT
    if not has(s.features, "extras"):
        row.cnps += mark != 0
        return mark
    if mark and s.run[0].deaf_scaled and hash_random(s.run[0].seed, number_of(s, f), -2) < s.run[0].deaf_scaled:
        return np.int64(0)
    if mark and s.run[0].cnp_gap:
        if now < row.cnp_after:
            return np.int64(0)
        row.cnp_after = now + s.run[0].cnp_gap
    row.cnps += mark != 0
    return mark


@inlined
def _acknowledge(s, node, f, kind, sequence, mark, now):  # type: ignore[no-untyped-def]
    """Count an ACK or NACK for its flow: progress, timer, end of the flow, round-trip time, and the law's reaction."""
    flow, run = s.flow[f], s.run[0]
    # Answers to packets that were sent twice come after the end, too.
    if flow.finish >= 0 or flow.failed:
        return
    acked = _progress(s, f, flow, sequence)
    if acked > 0:
        # Progress: a queue pair gives up only after so many timeouts in a row.
        flow.retries = 0
        if has(s.features, "extras") and run.timeout:
            flow.timeout_at = now + run.timeout if flow.next > flow.unacked else NEVER
            _move(node, flow, max(flow.next, flow.unacked))
    if flow.unacked >= flow.num_packets:
        flow.finish = now
        _release_waiting(s, node, f, flow.src, now)
        return
    # An ACK names the packet behind the one that it answers.
    rtt = now - s.sent[f, (sequence - 1) & run.sent_mask] if run.sent_mask >= 0 else np.int64(0)
    if has(s.features, "extras") and run.measure_rtt and acked > 0:
        seen = s.rtt[f]
        seen.count += 1
        seen.total += rtt
        seen.most = max(seen.most, rtt)
    if has(s.features, "extras") and run.rtt_noise:
        rtt += np.int64(hash_random(run.seed, -1 - number_of(s, f), sequence) * (run.rtt_noise / _ONE))
    # Go-back-N: all from the gap on is sent again, though some of it may have arrived.
    if kind == NACK:
        _move(node, flow, flow.unacked)
        laws.on_loss(s, f, now)
    laws.on_ack(s, f, now, mark != 0, rtt, max(acked, 0) * run.mtu_bytes)
    _set_limit(s, node, flow)


@inlined
def _progress(s, f, flow, sequence):  # type: ignore[no-untyped-def]
    """Packets that an ACK tells of for the first time: up to `sequence`, or the one before it in selective repeat."""
    if not has(s.features, "extras") or not s.run[0].selective:
        news = sequence - flow.unacked
        flow.unacked = max(np.int64(flow.unacked), sequence)
        return news
    if _has(s.acked, f, sequence - 1):
        return np.int64(0)
    _add(s.acked, f, sequence - 1)
    while flow.unacked < flow.num_packets and _has(s.acked, f, np.int64(flow.unacked)):
        flow.unacked += 1
    return np.int64(1)


@inlined
def _release_waiting(s, node, f, host, now):  # type: ignore[no-untyped-def]
    """Flow `f` is done as far as `host` sees: flows that begin there and waited for it."""
    if s.waiting_from[f] < s.waiting_from[f + 1]:
        _count_down(s, node, f, host, now)


@kernel
def _count_down(s, node, f, host, now):  # type: ignore[no-untyped-def]
    """Count flow `f` off for this host's flows that wait for it; what waits for nothing more starts after its delay."""
    for i in range(s.waiting_from[f], s.waiting_from[f + 1]):
        later = s.waiting[i]
        flow = s.flow[later]
        # Each host counts for the flows that begin at it, so that no two workers write one counter.
        if flow.src != host:
            continue
        flow.num_waits -= 1
        if flow.num_waits:
            continue
        flow.start = now + flow.delay
        # Insertion keeps by_host sorted by start among those that have not begun.
        place = node.first_flow + node.num_known
        while place > node.first_flow + node.num_started and s.flow[s.by_host[place - 1]].start > flow.start:
            s.by_host[place] = s.by_host[place - 1]
            place -= 1
        s.by_host[place] = later
        node.num_known += 1


@kernel
def _expire(s, node, now):  # type: ignore[no-untyped-def]
    """Send again from the first packet that is not acknowledged, for each flow whose timer has run out."""
    run = s.run[0]
    node.timer = NEVER
    for i in range(node.first_flow, node.first_flow + node.num_active):
        flow = s.flow[s.active[i]]
        if flow.timeout_at <= now:
            flow.timeout_at = NEVER
            # As a queue pair in error (IBV_WC_RETRY_EXC_ERR): `next` at the limit means that it never sends again.
            if flow.retries == run.most_retries:
                flow.failed = 1
                _move(node, flow, flow.limit)
                continue
            flow.retries += 1
            _move(node, flow, flow.unacked)
            laws.on_loss(s, s.active[i], now)
            _set_limit(s, node, flow)
        node.timer = min(node.timer, flow.timeout_at)

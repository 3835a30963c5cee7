"""A switch in one window: FIFO ports, ECN at dequeue, a shared buffer with PFC by dynamic thresholds.

Order of events: time, then arrivals, the one first whose sender began to send later, then by port; then ports that
become free, by port. An arrival at a port that has been free starts at once. Where no threshold can be reached in the
window, ports do not know of each other and each is run on its own (`_run_ports`); else all of the switch's events are
run in their order (`_run_in_order`). Both give the same. A PFC frame passes the queue, not the packet under way. Left
out: priorities, and classes of traffic. The rules and their figures are those of ns-3's HPCC switch.
"""

from __future__ import annotations

import numpy as np

from congestion.engine.lists import drop_first, first, put
from congestion.engine.packets import drawn, flow_of, path_of, pause, receive, send, serialise, size_of
from congestion.engine.tables import (
    ACK_PATH,
    CHUNK,
    FLOW_MASK,
    FLOW_SHIFT,
    FLOWLET,
    HOP_MASK,
    HOP_SHIFT,
    MARK_BIT,
    NEVER,
    PATH_SHIFT,
    PFC,
    SEQ_MASK,
    SEQ_SHIFT,
)
from congestion.jit import inlined, kernel
from congestion.machine import prefetch

_ONE = float(1 << 53)
_HOP = 1 << HOP_SHIFT
_AHEAD = 3  # ports


@kernel
def run_switch(s, k, n, end):  # type: ignore[no-untyped-def]
    """All that happens at switch `n` before `end`, by worker `k`."""
    node = s.node[n]
    count, total, frames, soonest = _collect(s, k, node, end)
    limited = s.run[0].pfc or s.run[0].drop_tail
    if limited and (frames or node.num_paused or node.num_frames or _near(node, total)):
        _run_in_order(s, k, node, count, end)
        for p in range(node.first_port, node.first_port + node.num_ports):
            soonest = min(soonest, _next_start(s.port[p]))
    else:
        soonest = min(soonest, _run_ports(s, k, node, count, end))
    node.next_time = soonest


@inlined
def _collect(s, k, node, end):  # type: ignore[no-untyped-def]
    """Take what arrives in the window off the wires: how many, bytes, PFC frames; and what arrives next."""
    count, soonest = _take(s, k, node, end)
    total, frames = 0, 0
    counts = s.counts[k]
    for place in range(node.num_ports):
        counts[place] = 0
    for i in range(count):
        seen = s.seen[k, i]
        word = seen.word
        if word & 3 == PFC:
            frames += 1
            seen.out = seen.port  # which it stops
        else:
            total += seen.size
            if s.run[0].routing == FLOWLET and word & (HOP_MASK << HOP_SHIFT | 3) == 0:
                word = seen.word = word | _least_loaded(s, k, node, flow_of(word), seen.time) << PATH_SHIFT
            hop = ((word >> HOP_SHIFT) & HOP_MASK) + 1 + (ACK_PATH if word & 3 else 0)
            seen.out = s.path[path_of(s, word), np.uint32(hop)]
        counts[seen.out - node.first_port] += 1
    return count, total, frames, soonest


@kernel
def _least_loaded(s, k, node, f, now):  # type: ignore[no-untyped-def]
    """Path of a packet at its flow's first switch: the last one's, or after a gap that of the shortest queue.

    By queues at the window's beginning and what came for them since, as a switch that looks at them now and then.
    """
    run, last = s.run[0], s.flowlet
    if now - last[f, 1] > run.flowlet_gap:
        least, first_one = NEVER, drawn(run.seed, np.int64(f), now) % run.num_paths
        for i in range(run.num_paths):
            path = (first_one + i) % run.num_paths
            p = s.path[np.int64(f) * run.num_paths + path, 1]
            load = s.port[p].queue_bytes + s.counts[k, p - node.first_port] * run.data_wire_bytes
            if load < least:
                least = load
                last[f, 0] = path
    last[f, 1] = now
    return last[f, 0]


@inlined
def _take(s, k, node, end):  # type: ignore[no-untyped-def]
    count, soonest, large = 0, NEVER, s.run[0].large
    stop = node.first_port + node.num_ports
    for p in range(node.first_port, stop):
        wire = s.wire[p]
        visible = s.visible[p]
        if large:
            later = s.wire[min(p + _AHEAD, stop - 1)]
            prefetch(s.entry, later.head * CHUNK + later.head_at)
        while wire.taken < visible:
            entry = first(s, k, wire)
            arrival = entry.time
            if arrival >= end:
                soonest = min(soonest, arrival)
                break
            size = size_of(s, entry.word)
            _follow(s, wire, s.kind[s.port[p].kind], arrival, size)
            word = receive(s, k, p, arrival)
            if word < 0:
                continue
            if large:
                prefetch(s.path_line, flow_of(word))
            seen = s.seen[k, count]
            seen.time = arrival
            seen.began = wire.began
            seen.size = size
            seen.word = word
            seen.port = p
            count += 1
    return count, soonest


@inlined
def _follow(s, wire, kind, arrival, size):  # type: ignore[no-untyped-def]
    """Since when the sender has sent without a gap. Of two arrivals at one moment the one whose sender began later is
    first: ns-3 and htsim run events of one moment in the order in which they were scheduled, and what lets a sender
    begin (an arrival, a resume) is scheduled before the end of a packet that another sends by then."""
    run = s.run[0]
    if size == run.data_wire_bytes:
        took = kind.tx_data
    elif size == run.ack_wire_bytes:
        took = kind.tx_ack
    else:
        took = serialise(run, size, kind.rate)
    if arrival - took > wire.last:
        wire.began = arrival - took
    wire.last = arrival


@inlined
def _near(node, total):  # type: ignore[no-untyped-def]
    """Whether an ingress could reach its threshold if nothing left the switch and all of it were one port's."""
    held = node.shared + total
    return held >= (node.pool_bytes - held) >> node.max_shift


@inlined
def _run_ports(s, k, node, count, end):  # type: ignore[no-untyped-def]
    """Each port on its own; when the next one begins a packet."""
    counts, order = s.counts[k], s.order[k]
    begin = 0
    for place in range(node.num_ports):  # where each port's begin
        here = counts[place]
        counts[place] = begin
        begin += here
    for i in range(count):
        place = s.seen[k, i].out - node.first_port
        order[counts[place]] = i
        counts[place] += 1
    begin, soonest, large = 0, NEVER, s.run[0].large
    for place in range(node.num_ports):
        stop = counts[place]
        port = s.port[node.first_port + place]
        if large:
            _prefetch_port(s, node, place)
        if stop > begin:
            _sort(s, k, begin, stop)
        elif not port.queued:
            continue
        _run_port(s, k, node, node.first_port + place, begin, stop, end)
        soonest = min(soonest, _next_start(port))
        begin = stop
    return soonest


@inlined
def _prefetch_port(s, node, place):  # type: ignore[no-untyped-def]
    """What ports behind `place` will touch first: their queue's head, and the tail of the wire that they send on."""
    last = node.first_port + node.num_ports - 1
    p = min(node.first_port + place + _AHEAD, last)
    port = s.port[p]
    wire = s.wire[port.peer]
    prefetch(s.entry, wire.tail * CHUNK + wire.tail_at)
    if port.queued:
        queue = s.queue[p]
        prefetch(s.entry, queue.head * CHUNK + queue.head_at)
    prefetch(s.wire, s.port[min(p + _AHEAD, last)].peer)


@inlined
def _sort(s, k, begin, stop):  # type: ignore[no-untyped-def]
    """Insertion sort of `order` by arrival, stable; few arrive at a port in a window, and nearly in order."""
    order = s.order[k]
    for i in range(begin + 1, stop):
        which = order[i]
        seen = s.seen[k, which]
        j = i
        while j > begin and _is_before(seen, s.seen[k, order[j - 1]]):
            order[j] = order[j - 1]
            j -= 1
        order[j] = which


@inlined
def _is_before(one, other):  # type: ignore[no-untyped-def]
    return one.time < other.time or (one.time == other.time and one.began > other.began)


@inlined
def _run_port(s, k, node, p, begin, stop, end):  # type: ignore[no-untyped-def]
    port = s.port[p]
    for i in range(begin, stop):
        seen = s.seen[k, s.order[k, i]]
        now, size = seen.time, seen.size
        while port.queued and port.busy < now and not port.paused:
            _start_next(s, k, node, p, port.busy)
        word = seen.word + _HOP
        port.max_queue_bytes = max(port.max_queue_bytes, port.queue_bytes + size)
        if port.queued == 0 and port.busy < now and not port.paused:
            send(s, k, port, now, _marked(s, port, word), size)
        else:
            _hold(s, node, s.port[seen.port], size)
            _enqueue(s, k, p, word, size, seen.port)
    while port.queued and port.busy < end and not port.paused:
        _start_next(s, k, node, p, port.busy)


@inlined
def _enqueue(s, k, p, word, size, in_port):  # type: ignore[no-untyped-def]
    port = s.port[p]
    port.queue_bytes += size
    port.queued += 1
    put(s, k, s.queue[p], np.int64(in_port), word)


@inlined
def _start_next(s, k, node, p, now):  # type: ignore[no-untyped-def]
    """Begin the packet at the head of a queue; the port that it had come in by."""
    port, queue = s.port[p], s.queue[p]
    entry = first(s, k, queue)
    word, in_port = entry.word, np.uint32(entry.time)
    drop_first(queue)
    size = size_of(s, word)
    port.queued -= 1
    port.queue_bytes -= size
    _release(s, node, s.port[in_port], size)
    send(s, k, port, now, _marked(s, port, word), size)
    return in_port


@inlined
def _marked(s, port, word):  # type: ignore[no-untyped-def]
    """The packet with its ECN mark, by the queue behind it: all above Kmax, in proportion above Kmin (RED)."""
    queue, kind = port.queue_bytes, s.kind[port.kind]
    if queue <= kind.kmin or not s.run[0].ecn:
        return word
    if queue <= kind.kmax:
        share = s.run[0].pmax * (queue - kind.kmin) / (kind.kmax - kind.kmin)
        flow, sequence = (word >> FLOW_SHIFT) & FLOW_MASK, (word >> SEQ_SHIFT) & SEQ_MASK
        if drawn(s.run[0].seed, flow, sequence << 8 | word & (HOP_MASK << HOP_SHIFT) | word & 3) >= share * _ONE:
            return word
    port.marks += 1
    return word if word & 3 else word | MARK_BIT  # on an ACK that bit is the CNP


@inlined
def _hold(s, node, ingress, size):  # type: ignore[no-untyped-def]
    """Count a packet at its ingress: headroom once the threshold is passed, else reserve and shared pool."""
    if not s.run[0].pfc:
        node.shared += size
        return
    over = ingress.in_bytes + size - s.run[0].reserve_bytes
    if over > 0 and over > _threshold(s, node, ingress):
        ingress.headroom_used += size
        return
    ingress.in_bytes += size
    if over > 0:
        node.shared += min(size, over)


@inlined
def _release(s, node, ingress, size):  # type: ignore[no-untyped-def]
    if not s.run[0].pfc:
        node.shared -= size
        return
    from_headroom = min(ingress.headroom_used, size)
    rest = size - from_headroom
    node.shared -= min(rest, max(ingress.in_bytes - s.run[0].reserve_bytes, 0))
    ingress.headroom_used -= from_headroom
    ingress.in_bytes -= rest


@inlined
def _threshold(s, node, ingress):  # type: ignore[no-untyped-def]
    return max(node.pool_bytes - node.shared, 0) >> s.kind[ingress.kind].shift


@inlined
def _shared_of(s, ingress):  # type: ignore[no-untyped-def]
    return max(ingress.in_bytes - s.run[0].reserve_bytes, 0)


@inlined
def _next_start(port):  # type: ignore[no-untyped-def]
    """When a busy port will begin its next packet, NEVER where it has none that may go."""
    return port.busy if port.frames or (port.queued and not port.paused) else NEVER


@kernel
def _run_in_order(s, k, node, count, end):  # type: ignore[no-untyped-def]
    begin, stop = node.first_port, node.first_port + node.num_ports
    for i in range(count):
        s.order[k, i] = i
    _sort(s, k, 0, count)
    for i in range(count + 1):
        until = s.seen[k, s.order[k, i]].time if i < count else end
        while True:
            soonest, chosen = NEVER, begin
            for p in range(begin, stop):
                start = _next_start(s.port[p])
                if start < soonest:
                    soonest, chosen = start, p
            if soonest >= until:
                break
            _serve(s, k, node, chosen, soonest)
        if i < count:
            _arrive(s, k, node, s.seen[k, s.order[k, i]])


@inlined
def _arrive(s, k, node, seen):  # type: ignore[no-untyped-def]
    now, word, size = seen.time, seen.word, seen.size
    port, ingress = s.port[seen.out], s.port[seen.port]
    if word & 3 == PFC:
        pause(port, word, now)
        _kick(s, k, node, seen.out, now)
        return
    if _has_no_room(s, node, port, ingress, size):
        ingress.drops += 1
        return
    _hold(s, node, ingress, size)
    if s.run[0].pfc and not ingress.pause_sent and _is_full(s, node, ingress):
        ingress.pauses += 1
        node.num_paused += 1
        _signal(s, k, node, seen.port, 1, now)
    port.max_queue_bytes = max(port.max_queue_bytes, port.queue_bytes + size)
    _enqueue(s, k, seen.out, word + _HOP, size, seen.port)
    _kick(s, k, node, seen.out, now)


@inlined
def _has_no_room(s, node, port, ingress, size):  # type: ignore[no-untyped-def]
    """With PFC where both the headroom and the ingress' share are taken; without, where the queue's share is."""
    if not s.run[0].pfc:
        return port.queue_bytes + size > _threshold(s, node, port)
    over_headroom = size + ingress.headroom_used > s.kind[ingress.kind].headroom
    return over_headroom and size + _shared_of(s, ingress) > _threshold(s, node, ingress)


@inlined
def _is_full(s, node, ingress):  # type: ignore[no-untyped-def]
    return ingress.headroom_used > 0 or _shared_of(s, ingress) >= _threshold(s, node, ingress)


@inlined
def _signal(s, k, node, p, stops, now):  # type: ignore[no-untyped-def]
    """A pause or resume frame for the sender at port `p`. The two take turns, so a count tells which they are."""
    port = s.port[p]
    port.pause_sent = stops
    port.frames += 1
    node.num_frames += 1
    if port.busy < now:
        _send_frame(s, k, node, port, now)


@inlined
def _send_frame(s, k, node, port, now):  # type: ignore[no-untyped-def]
    stops = port.pause_sent if port.frames & 1 else 1 - port.pause_sent
    port.frames -= 1
    node.num_frames -= 1
    send(s, k, port, now, PFC | (MARK_BIT if stops else 0), s.run[0].pfc_wire_bytes)


@inlined
def _kick(s, k, node, p, now):  # type: ignore[no-untyped-def]
    port = s.port[p]
    if port.busy < now and _next_start(port) < NEVER:
        _serve(s, k, node, p, now)


@inlined
def _serve(s, k, node, p, now):  # type: ignore[no-untyped-def]
    """Begin the next packet of a free port: a PFC frame first, else the queue's head."""
    port = s.port[p]
    if port.frames:
        _send_frame(s, k, node, port, now)
        return
    in_port = _start_next(s, k, node, p, now)
    ingress = s.port[in_port]
    if ingress.pause_sent and ingress.headroom_used == 0:
        shared = _shared_of(s, ingress)
        if shared == 0 or shared + s.run[0].resume_offset_bytes <= _threshold(s, node, ingress):
            node.num_paused -= 1
            _signal(s, k, node, in_port, 0, now)

"""A switch in one window, by the lanes of a warp: each step is done by all of them before the next begins.

A lane takes what arrives at its ports and counts it where it leaves; the places behind those counts are taken in any
order, and sorted by a key that no two packets share. Then a lane runs its ports as senders, as if there were no others.
Where an ingress could reach its threshold, by its own bytes and the whole switch's, one lane runs all events in their
order (`in_order`). `room` is the warp's: four int32 a
port from `base` on. What a step gives back is one lane's part: a sum, a minimum or whether any has it.
"""

from __future__ import annotations

import numpy as np

from congestion.engine import lists, packets
from congestion.engine import switch as rules
from congestion.engine.buffer import marked
from congestion.engine.gpu.atomics import add, least
from congestion.engine.gpu.lists import after, arrival_on, put, send_on, take_off
from congestion.engine.packets import flow_of, hash_random, is_lost, next_in_turn, number_of, path_of, size_of, tx_time
from congestion.engine.tables import ACK_PATH, FLOWLET, HOP_MASK, HOP_SHIFT, NEVER, PATH_SHIFT, PFC, SPRAY
from congestion.kernels.jit import inlined, kernel
from congestion.kernels.machine import has

_HOP = 1 << HOP_SHIFT
_DELAY = packets._DELAY


@inlined
def send(s, k, port, now, word, size):  # type: ignore[no-untyped-def]  # noqa: ARG001  (as `packets.send`)
    """Put a packet on the wire from `now`; the port is busy until its last bit has left."""
    busy = port.busy = now + tx_time(s, port.kind, word, size)
    send_on(s, s.wire[port.peer], busy + s.pace[port.kind, _DELAY], word)
    if word & 3 != PFC:
        port.tx_packets += 1
        port.tx_bytes += size


# The rules, with our lists and wires below them.
GRAFTS = {lists.after: after, lists.put: put, packets.send: send}
_is_before, _next_start, _follow = rules._is_before, rules._next_start, rules._follow


@inlined
def publish(s, p, parity):  # type: ignore[no-untyped-def]
    """Tell the node behind port `p` of what was sent there in this window; when the first of that arrives."""
    port = s.port[p]
    wire = s.wire[port.peer]
    earliest = wire.earliest
    if earliest < NEVER:
        least(s.soon, (1 - parity) * len(s.node) + port.to, earliest)
        wire.earliest = NEVER
    return earliest


@inlined
def clear(s, room, base, n, lane, lanes):  # type: ignore[no-untyped-def]
    for i in range(lane, np.int64(s.node[n].num_ports), lanes):
        room[base + i] = 0


@kernel
def take(s, room, base, n, lane, lanes, end):  # type: ignore[no-untyped-def]
    """Take what arrives in the window off the wires: its bytes, its PFC frames, and when the next packet comes."""
    node = s.node[n]
    many = np.int64(node.num_ports)
    first_place, step_by = lane, lanes
    if has(s.features, "extras") and (
        s.run[0].routing == FLOWLET or s.run[0].routing == SPRAY
    ):  # which look at what came before: one lane does it all
        first_place, step_by = (0, 1) if lane == 0 else (many, 1)
    num_bytes, frames, soonest = 0, 0, NEVER
    for place in range(first_place, many, step_by):
        more, stops, following = _take_port(s, room, base, node, place, end)
        num_bytes += more
        frames += stops
        soonest = min(soonest, following)
    return num_bytes, frames, soonest


@inlined
def _take_port(s, room, base, node, place, end):  # type: ignore[no-untyped-def]
    """Take what arrives by `end` at one port into `s.seen`, and count it by output port in `room`.

    Returns:
        Bytes of packets, number of PFC frames, and when the next packet arrives.
    """
    many = np.int64(node.num_ports)
    p = node.first_port + place
    wire, kind, at = s.wire[p], s.port[p].kind, s.seen_from[p]
    count, num_bytes, frames = 0, 0, 0
    arrival = arrival_on(s, wire)
    while arrival < end:
        word = take_off(s, wire)
        size = size_of(s, word)
        _follow(wire, arrival, tx_time(s, kind, word, size))
        if not is_lost(s, p, word, arrival):
            seen = s.seen[at + count]
            seen.time = arrival
            seen.began = wire.began
            seen.size = size
            seen.port = p
            if word & 3 == PFC:
                frames += 1
                seen.out = p  # which it stops
            else:
                num_bytes += size
                if (
                    has(s.features, "extras")
                    and s.run[0].routing == FLOWLET
                    and word & (HOP_MASK << HOP_SHIFT | 3) == 0
                ):
                    word |= _least_loaded(s, room, base, node, flow_of(word), arrival) << PATH_SHIFT
                if has(s.features, "extras") and s.run[0].routing == SPRAY:
                    seen.out = next_in_turn(s, s.port[s.port[p].peer].to, word)
                else:
                    hop = ((word >> HOP_SHIFT) & HOP_MASK) + 1 + (ACK_PATH if word & 3 else 0)
                    seen.out = s.path[path_of(s, word), np.uint32(hop)]
            seen.word = word
            add(room, base + np.int64(seen.out - node.first_port), 1)
            count += 1
        arrival = arrival_on(s, wire)
    room[base + 2 * many + place] = count
    room[base + 3 * many + place] = num_bytes
    return num_bytes, frames, arrival


@inlined
def _least_loaded(s, room, base, node, f, now):  # type: ignore[no-untyped-def]
    """Choose a path as `engine.switch` does, by our counts."""
    run, last = s.run[0], s.flowlet
    if now - last[f, 1] > run.flowlet_gap:
        shortest, first_one = NEVER, hash_random(run.seed, number_of(s, f), now) % run.num_paths
        for i in range(run.num_paths):
            path = (first_one + i) % run.num_paths
            p = s.path[np.int64(f) * run.num_paths + path, 1]
            load = s.port[p].queue_bytes + room[base + np.int64(p - node.first_port)] * run.data_wire_bytes
            if load < shortest:
                shortest = load
                last[f, 0] = path
    last[f, 1] = now
    return last[f, 0]


@kernel
def look(s, room, base, n, lane, lanes, num_bytes, frames):  # type: ignore[no-untyped-def]
    """Whether a threshold could be reached; and where each port's part of the order begins.

    Args:
        num_bytes, frames: of all lanes.
    """
    node, run = s.node[n], s.run[0]
    many = np.int64(node.num_ports)
    shared = node.shared + num_bytes
    free = max(node.pool_bytes - shared, 0)
    near = np.int64(frames) + node.num_paused + node.num_frames
    if not run.pfc:
        near += np.int64(shared >= free >> node.max_shift)
    if run.pfc:
        for place in range(lane, many, lanes):
            ingress = s.port[node.first_port + place]
            worst = max(ingress.in_bytes - run.reserve_bytes, 0) + room[base + 3 * many + place]
            kind = s.kind[ingress.kind]
            near += np.int64(worst >= min(free << kind.lift >> kind.shift, run.xoff_bytes))
        near += np.int64(shared > node.pool_bytes)
        if has(s.features, "extras"):
            near += np.int64(run.watchdog_after != 0)
    begin = 0
    for place in range(many):  # nothing but `room`: lanes that read memory here would wait for each other's turn
        if place % lanes == lane:
            room[base + many + place] = begin
        begin += room[base + place]
    if has(s.features, "classes"):
        return True
    return near != 0 and (run.pfc != 0 or (has(s.features, "extras") and run.drop_tail != 0))


@kernel
def deal(s, room, base, n, lane, lanes):  # type: ignore[no-untyped-def]
    """Write the index of each arrival into `s.order`, grouped by output port, in any order within a group."""
    node = s.node[n]
    many = np.int64(node.num_ports)
    start = s.seen_from[node.first_port]
    for place in range(lane, many, lanes):
        at = s.seen_from[node.first_port + place]
        for i in range(at, at + room[base + 2 * many + place]):
            out = np.int64(s.seen[i].out - node.first_port)
            s.order[start + add(room, base + many + out, 1)] = i
        room[base + 3 * many + place] = 0  # from here on: what its packets in queues here grow by


@inlined
def is_first(s, one, other):  # type: ignore[no-untyped-def]
    """Whether `one` is before `other`; arrivals that the rules do not tell apart go by their in-ports."""
    a, b = s.seen[one], s.seen[other]
    return _is_before(a, b) or (one < other and not _is_before(b, a))


@kernel
def run_ports(s, room, base, n, lane, lanes, end, parity):  # type: ignore[no-untyped-def]
    """Run each port on its own; return when one goes on here, and when what was sent arrives there."""
    node = s.node[n]
    many = np.int64(node.num_ports)
    start, soonest, sent = s.seen_from[node.first_port], NEVER, NEVER
    for place in range(lane, many, lanes):
        p = node.first_port + place
        stop = start + room[base + many + place]
        begin = stop - room[base + place]
        if begin == stop and s.queue_head[p] == s.queue_tail[p]:
            continue
        _sort(s, begin, stop)
        _run_port(s, room, base + 3 * many, node, p, begin, stop, end)
        soonest = min(soonest, _next_start(s, p))
        sent = min(sent, publish(s, p, parity))
    return soonest, sent


@inlined
def _sort(s, begin, stop):  # type: ignore[no-untyped-def]
    for i in range(begin + 1, stop):
        which = s.order[i]
        j = i
        while j > begin and is_first(s, which, s.order[j - 1]):
            s.order[j] = s.order[j - 1]
            j -= 1
        s.order[j] = which


@inlined
def _run_port(s, room, grown, node, p, begin, stop, end):  # type: ignore[no-untyped-def]
    """Run a port as `engine.switch` does; `room[grown:]`: what each ingress holds more than at the window's begin."""
    port, pfc = s.port[p], s.run[0].pfc
    for i in range(begin, stop):
        seen = s.seen[s.order[i]]
        now, size = seen.time, seen.size
        while s.queue_head[p] != s.queue_tail[p] and port.busy < now and not port.paused:
            _start_next(s, room, grown, node, p, port)
        port.max_queue_bytes = max(port.max_queue_bytes, port.queue_bytes + size)
        free = port.busy < now
        if port.busy == now:  # arrivals of a moment are all there before the port begins its next packet
            free = i + 1 == stop or s.seen[s.order[i + 1]].time > now
        if free and s.queue_head[p] == s.queue_tail[p] and not port.paused:
            send(s, 0, port, now, seen.word + _HOP, size)
        else:
            if pfc:
                add(room, grown + np.int64(seen.port - node.first_port), size)
            port.queue_bytes += size
            s.queue_tail[p] = put(s, 0, s.queue_tail[p], np.int64(seen.port), seen.word + _HOP)
    while s.queue_head[p] != s.queue_tail[p] and port.busy < end and not port.paused:
        _start_next(s, room, grown, node, p, port)


@inlined
def _start_next(s, room, grown, node, p, port):  # type: ignore[no-untyped-def]
    """Send the first packet of the queue of port `p`; its bytes leave the queue and, with PFC, its ingress port."""
    head = s.queue_head[p]
    entry = s.entry[head]
    word, in_port = entry.word, entry.time
    s.queue_head[p] = after(s, 0, head)
    size = size_of(s, word)
    port.queue_bytes -= size
    if s.run[0].pfc:
        add(room, grown + in_port - np.int64(node.first_port), -size)
    send(s, 0, port, port.busy, marked(s, port, word), size)


@inlined
def settle(s, room, base, n, lane, lanes):  # type: ignore[no-untyped-def]
    """Settle what the switch holds by ingress; return the part of it that is in the shared pool."""
    node, run = s.node[n], s.run[0]
    many = np.int64(node.num_ports)
    shared = 0
    for place in range(lane, many, lanes):
        port = s.port[node.first_port + place]
        if run.pfc:
            port.in_bytes += room[base + 3 * many + place]
            shared += max(port.in_bytes - run.reserve_bytes, 0)
        else:
            shared += port.queue_bytes
    return shared

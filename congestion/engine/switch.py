"""A switch in one window: FIFO ports, ECN at dequeue, a shared buffer with PFC by dynamic thresholds.

Order of events: time, then arrivals, in the order of ns-3 as far as a wire shows it (`_follow`), then by port
(`port_order`); then ports that become free, by port. An arrival at a port that has been free starts at once. Where no
threshold can be reached in the window, ports do not know of each other and each is run on its own (`_run_ports`); else
all of the switch's events are run in their order (`_run_in_order`). Both give the same. A PFC frame passes the queue,
not the packet under way. Several classes of traffic are in `classes`. The rules and their figures are those of ns-3's
HPCC switch.
"""

from __future__ import annotations

import numpy as np

from congestion.engine.buffer import has_no_room, hold, is_full, is_lossless, marked, may_go_on, release
from congestion.engine.lists import after, put
from congestion.engine.packets import (
    flow_of,
    hash_random,
    is_lost,
    next_in_turn,
    number_of,
    path_of,
    pause,
    send,
    size_of,
    tx_time,
)
from congestion.engine.tables import (
    ACK_PATH,
    DROP,
    FLOWLET,
    FORWARD,
    HOP_MASK,
    HOP_SHIFT,
    MARK_BIT,
    NEVER,
    PATH_SHIFT,
    PFC,
    SPRAY,
)
from congestion.kernels.jit import inlined, kernel
from congestion.kernels.machine import has, load_shared, prefetch

_HOP = 1 << HOP_SHIFT
_AHEAD = np.uint64(3)  # ports
# Bits of CAME's `began`: how long this packet takes, how long the one before it, and since when there was no gap; in
# 1,024 ps, for a division would cost more.
_NS, _BEFORE, _SINCE = 10, 12, 38
_LONGEST = (1 << _BEFORE) - 1


@kernel
def run_switch(s, k, n, end):  # type: ignore[no-untyped-def]
    """Run all that happens at switch `n` before `end`, by worker `k`."""
    node = s.node[n]
    count, total, frames, soonest = collect(s, k, node, end)
    # Whether anything in this window may depend on other ports: only then is the dearer order of events needed.
    limited = s.run[0].pfc or (has(s.features, "extras") and s.run[0].drop_tail)
    watched = has(s.features, "extras") and s.run[0].watchdog_after
    if limited and (frames or node.num_paused or node.num_frames or watched or _near(s, node, total)):
        soonest = min(soonest, _run_in_order(s, k, node, count, end))
    else:
        soonest = min(soonest, _run_ports(s, k, node, count, end))
    s.next_time[n] = soonest


@inlined
def collect(s, k, node, end):  # type: ignore[no-untyped-def]
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
            # A frame acts on the port that it came in by, whatever its path says.
            seen.out = seen.port  # which it stops
        else:
            total += seen.size
            # Hop 0 and data: the flow's first switch chooses, and writes the path into the packet for the others.
            if has(s.features, "extras") and s.run[0].routing == FLOWLET and word & (HOP_MASK << HOP_SHIFT | 3) == 0:
                word = seen.word = word | _least_loaded(s, k, node, flow_of(word), seen.time) << PATH_SHIFT
            if has(s.features, "extras") and s.run[0].routing == SPRAY:
                seen.out = next_in_turn(s, s.port[s.port[seen.port].peer].to, word)
            else:
                # A flow's path was computed before the run; ACKs have a path of their own behind it.
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
    # After so long a gap the packets on the old path should have left it, and a new path reorders little.
    if now - last[f, 1] > run.flowlet_gap:
        # From a drawn path on, so that flows that see equal queues do not all take the first one.
        least, first_one = NEVER, hash_random(run.seed, number_of(s, f), now) % run.num_paths
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
    """Take packets that arrive before `end` off the wires into `s.seen[k]`; return how many, and the next arrival."""
    count, soonest, large = 0, NEVER, s.run[0].large
    stop = node.first_port + node.num_ports
    busy, num_busy = s.busy[k], np.uint32(0)
    for p in range(node.first_port, stop):
        # Without a branch: the place is written each time, and kept where the wire holds something.
        busy[num_busy] = p
        num_busy = np.uint32(num_busy + np.uint32(s.wire_head[p] != s.wire_tail[p]))
    for i in range(num_busy):
        p = busy[i]
        if large:
            prefetch(s.entry, s.wire_head[busy[min(i + _AHEAD, np.uint64(num_busy - 1))]])
        head, tail = s.wire_head[p], load_shared(s.wire_tail, p)
        arrivals, kind = s.arrivals[p], s.port[p].kind
        while head != tail:
            entry = s.entry[head]
            arrival, word = entry.time, entry.word
            # A wire is in order of time: what comes behind this is later still.
            if arrival >= end:
                soonest = min(soonest, arrival)
                break
            head = after(s, k, head)
            size = size_of(s, word)
            # Before loss is drawn: a packet that is lost has kept its wire busy, too.
            _follow(arrivals, arrival, tx_time(s, kind, word, size))
            if is_lost(s, p, word, arrival):
                continue
            if large:
                prefetch(s.path_line, flow_of(word))
            seen = s.seen[k, count]
            seen.time = arrival
            seen.began = arrivals.began
            seen.size = size
            seen.word = word
            seen.port = p
            count += 1
        s.wire_head[p] = head
    return count, soonest


@inlined
def _follow(arrivals, arrival, tx_time):  # type: ignore[no-untyped-def]
    """Order arrivals of one moment: the one with the larger `began` is first.

    ns-3 and htsim run events of one moment in the order in which they were scheduled. An arrival is, when its sender
    begins: so the packet that takes longer is before the others. Of those that began at one moment it is the order of
    what let them begin. That was the end of the packet before it on that wire, scheduled when that began: again the one
    that took longer is first. Or it was an arrival or a resume, where the sender was idle: that was on a wire, and so
    scheduled before any of these. Of senders that are alike even in that the one that was idle last is first.
    """
    began, is_first = arrivals.began, arrival - tx_time > arrivals.last
    before = _LONGEST if is_first else began >> _BEFORE + _SINCE
    since = (arrival - tx_time) >> _NS if is_first else began
    arrivals.began = min(tx_time >> _NS, _LONGEST) << _BEFORE + _SINCE | before << _SINCE | since & (1 << _SINCE) - 1
    arrivals.last = arrival


@inlined
def _near(s, node, total):  # type: ignore[no-untyped-def]
    """Whether an ingress could reach its threshold if nothing left the switch and all of it were one port's.

    An alpha above 1 counts as 1 here: that is near too early, which costs time and changes nothing.
    """
    # A miss would change results; a false alarm only costs the slower way.
    shared = node.shared + total
    return shared >= min((node.pool_bytes - shared) >> node.max_shift, s.run[0].xoff_bytes)


@inlined
def _run_ports(s, k, node, count, end):  # type: ignore[no-untyped-def]
    """Run each port on its own; return when the next one begins a packet."""
    counts, order = s.counts[k], s.order[k]
    busy, num_busy, begin = s.busy[k], np.uint32(0), np.uint32(0)
    # A counting sort by egress port: `counts` first holds sizes, then where each port's packets begin.
    for place in range(node.num_ports):  # where each port's begin, and who has anything to do
        here, p = counts[place], node.first_port + place
        counts[place] = begin
        begin = np.uint32(begin + here)
        busy[num_busy] = place
        num_busy = np.uint32(num_busy + np.uint32((here != 0) | (s.queue_head[p] != s.queue_tail[p])))
    for i in range(count):
        place = s.seen[k, i].out - node.first_port
        order[counts[place]] = i
        # Ends up one behind the port's last packet, which is where the next port's begin.
        counts[place] += 1
    begin, soonest, large = np.uint32(0), NEVER, s.run[0].large
    for i in range(num_busy):
        place = busy[i]
        stop, p = counts[place], node.first_port + place
        if large:
            _prefetch_port(s, node, busy[min(i + _AHEAD, np.uint64(num_busy - 1))])
        # By ingress they came sorted; by egress several wires are mixed.
        sort(s, k, begin, stop)
        _run_port(s, k, node, p, begin, stop, end)
        soonest = min(soonest, _next_start(s, p))
        begin = stop
    return soonest


@inlined
def _prefetch_port(s, node, place):  # type: ignore[no-untyped-def]
    """Prefetch what a port will touch first: its queue's head, and the tail of the wire that it sends on."""
    p = node.first_port + place
    prefetch(s.entry, s.wire_tail[s.port[p].peer])
    prefetch(s.entry, s.queue_head[p])


@inlined
def sort(s, k, begin, stop):  # type: ignore[no-untyped-def]
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
    """Run one port by itself to the window's end: send or queue the packets order[begin:stop], then send what waits."""
    port, order = s.port[p], s.order[k]
    for i in range(begin, stop):
        seen = s.seen[k, order[i]]
        now, size = seen.time, seen.size
        # What has begun before this arrival: a start at the same moment waits, for arrivals go first.
        while s.queue_head[p] != s.queue_tail[p] and port.busy < now and not port.paused:
            _start_next(s, k, node, p, port.busy)
        port.max_queue_bytes = max(port.max_queue_bytes, port.queue_bytes + size)
        free = port.busy < now
        if port.busy == now:  # arrivals of a moment are all there before the port begins its next packet
            free = i + 1 == stop or s.seen[k, order[i + 1]].time > now
        if free and s.queue_head[p] == s.queue_tail[p] and not port.paused:
            send(s, k, port, now, seen.word + _HOP, size)  # unmarked, as the queue behind it is empty
        else:
            # Buffer is charged to the ingress, whose sender a pause would stop.
            hold(s, node, s.port[seen.port], size)
            _enqueue(s, k, p, seen.word + _HOP, size, seen.port)
    while s.queue_head[p] != s.queue_tail[p] and port.busy < end and not port.paused:
        _start_next(s, k, node, p, port.busy)


@inlined
def _enqueue(s, k, p, word, size, in_port):  # type: ignore[no-untyped-def]
    s.port[p].queue_bytes += size
    s.queue_tail[p] = put(s, k, s.queue_tail[p], np.int64(in_port), word)


@inlined
def _start_next(s, k, node, p, now):  # type: ignore[no-untyped-def]
    """Begin the packet at the head of a queue; the port that it had come in by."""
    port, head = s.port[p], s.queue_head[p]
    entry = s.entry[head]
    word, in_port = entry.word, np.uint32(entry.time)
    s.queue_head[p] = after(s, k, head)
    size = size_of(s, word)
    port.queue_bytes -= size
    release(s, node, s.port[in_port], size)
    # ECN is decided at dequeue, by the queue that is left behind the packet, as in ns-3.
    send(s, k, port, now, marked(s, port, word), size)
    return in_port


@inlined
def _next_start(s, p):  # type: ignore[no-untyped-def]
    """Return when a busy port will begin its next packet, NEVER where it has none that may go."""
    port = s.port[p]
    if has(s.features, "extras") and s.run[0].watchdog_after and port.paused and not port.frames:
        return _next_of_paused(s, p)
    return port.busy if port.frames or (s.queue_head[p] != s.queue_tail[p] and not port.paused) else NEVER


@inlined
def _next_of_paused(s, p):  # type: ignore[no-untyped-def]
    """Return when a paused port with a PFC watchdog acts: the watchdog strikes, or lets it send in spite of that."""
    port, run = s.port[p], s.run[0]
    if s.queue_head[p] == s.queue_tail[p]:
        return NEVER
    if s.watchdog[p].until == NEVER:
        return port.busy if run.watchdog_action == FORWARD else NEVER
    return port.paused_at + run.watchdog_after


@kernel
def _run_in_order(s, k, node, count, end):  # type: ignore[no-untyped-def]
    return in_order(s, k, node, count, end, _next_start, _serve, _arrive)


@inlined
def in_order(s, k, node, count, end, next_start, serve, arrive):  # type: ignore[no-untyped-def]
    """Run the whole switch to `end` in order of time, arrivals and ports' starts alike; return the next start.

    `next_tx` is when each port starts its next packet.
    """
    # A table of one start a port, searched each time: a switch has tens of ports, and a heap would cost more.
    next_tx = s.next_tx[k]
    for i in range(count):
        s.order[k, i] = i
    sort(s, k, 0, count)
    for place in range(node.num_ports):
        next_tx[place] = next_start(s, node.first_port + place)
    for i in range(count + 1):
        until = s.seen[k, s.order[k, i]].time if i < count else end
        while True:
            soonest, chosen = NEVER, 0
            for place in range(node.num_ports):
                if next_tx[place] < soonest:
                    soonest, chosen = next_tx[place], place
            # At one moment the arrival goes before ports' starts.
            if soonest >= until:
                break
            serve(s, k, node, node.first_port + np.uint32(chosen), soonest)
        if i < count:
            arrive(s, k, node, s.seen[k, s.order[k, i]])
    return soonest


@inlined
def _arrive(s, k, node, seen):  # type: ignore[no-untyped-def]
    """Take in a packet of one event: pause a port, drop, or queue it and start the port if idle; may send a pause."""
    now, word, size = seen.time, seen.word, seen.size
    port, ingress = s.port[seen.out], s.port[seen.port]
    if word & 3 == PFC:
        pause(port, word, now)
        if has(s.features, "extras") and s.run[0].watchdog_after:
            _follow_storm(s, seen.out, now)
        _kick(s, k, node, seen.out, now)
        return
    if has(s.features, "extras") and s.run[0].watchdog_after and _in_storm(s, seen.out, seen.port, now):
        s.watchdog[seen.out].drops += 1
        ingress.drops += 1
        return
    if has_no_room(s, node, port, ingress, size):
        ingress.drops += 1
        # Drops on a lossless ingress are an error of the buffer's settings, and are named in the result.
        s.cause[seen.port, 2] += np.int64(is_lossless(s, ingress) != 0)
        return
    hold(s, node, ingress, size)
    # After the packet is in: XOFF is crossed by it, and what is still on the wire needs the headroom.
    if s.run[0].pfc and not ingress.pause_sent and is_full(s, node, ingress):
        ingress.pauses += 1
        _lay_to_longest(s, node)
        node.num_paused += 1
        _signal(s, k, node, seen.port, 1, now)
    port.max_queue_bytes = max(port.max_queue_bytes, port.queue_bytes + size)
    _enqueue(s, k, seen.out, word + _HOP, size, seen.port)
    _kick(s, k, node, seen.out, now)


@kernel
def _lay_to_longest(s, node):  # type: ignore[no-untyped-def]
    """A pause is due to the port with the longest queue: it holds most of the buffer that an ingress has no more of."""
    longest = np.int64(node.first_port)
    for p in range(np.int64(node.first_port), np.int64(node.first_port) + node.num_ports):
        if s.port[p].queue_bytes > s.port[longest].queue_bytes:
            longest = np.int64(p)
    s.cause[longest, s.port[longest].paused] += 1


@inlined
def _signal(s, k, node, p, stops, now):  # type: ignore[no-untyped-def]
    """A pause or resume frame for the sender at port `p`. The two take turns, so a count tells which they are."""
    port = s.port[p]
    port.pause_sent = stops
    port.frames += 1
    node.num_frames += 1
    # An idle port sends the frame at once; a busy one next, before its queue.
    if port.busy < now:
        _send_frame(s, k, node, port, now)
    s.next_tx[k, p - node.first_port] = _next_start(s, p)


@inlined
def _send_frame(s, k, node, port, now):  # type: ignore[no-untyped-def]
    # They take turns: of an odd number that wait the first is like the last, which `pause_sent` names.
    stops = port.pause_sent if port.frames & 1 else 1 - port.pause_sent
    port.frames -= 1
    node.num_frames -= 1
    send(s, k, port, now, PFC | (MARK_BIT if stops else 0), s.run[0].pfc_wire_bytes)


@inlined
def _kick(s, k, node, p, now):  # type: ignore[no-untyped-def]
    next_tx = _next_start(s, p)
    s.next_tx[k, p - node.first_port] = next_tx
    if next_tx < now:
        _serve(s, k, node, p, now)


@inlined
def _serve(s, k, node, p, now):  # type: ignore[no-untyped-def]
    """Begin the next packet of a free port: a PFC frame first, else the queue's head."""
    port = s.port[p]
    place = p - node.first_port
    if port.frames:
        _send_frame(s, k, node, port, now)
        s.next_tx[k, place] = _next_start(s, p)
        return
    if has(s.features, "extras") and s.run[0].watchdog_after and port.paused and s.watchdog[p].until != NEVER:
        _strike(s, k, node, p, now)
        return
    # Room is made on the ingress that the packet came by, whose sender may then go on.
    in_port = _start_next(s, k, node, p, now)
    s.next_tx[k, place] = _next_start(s, p)
    if may_go_on(s, node, s.port[in_port]):
        node.num_paused -= 1
        _signal(s, k, node, in_port, 0, now)


@inlined
def _follow_storm(s, p, now):  # type: ignore[no-untyped-def]
    """A PFC frame came at port `p`: a storm lasts until its port was not paused for the time to restore."""
    storm = s.watchdog[p]
    if storm.until > now:
        storm.until = NEVER if s.port[p].paused else now + s.run[0].watchdog_restore


@inlined
def _in_storm(s, out, come_in, now):  # type: ignore[no-untyped-def]
    """Whether a packet meets a storm: as SONiC's watchdog drops it, going out by its port or coming in by it."""
    return s.run[0].watchdog_action == DROP and max(s.watchdog[out].until, s.watchdog[come_in].until) > now


@kernel
def _strike(s, k, node, p, now):  # type: ignore[no-untyped-def]
    """The watchdog of port `p` finds it paused for too long while a packet waits: a storm, and what is done then."""
    storm = s.watchdog[p]
    storm.until = NEVER
    storm.storms += 1
    if s.run[0].watchdog_action == DROP:
        while s.queue_head[p] != s.queue_tail[p]:
            entry = s.entry[s.queue_head[p]]
            word, in_port = entry.word, np.uint32(entry.time)
            s.queue_head[p] = after(s, k, s.queue_head[p])
            size = size_of(s, word)
            s.port[p].queue_bytes -= size
            release(s, node, s.port[in_port], size)
            storm.drops += 1
            s.port[in_port].drops += 1
            if may_go_on(s, node, s.port[in_port]):
                node.num_paused -= 1
                _signal(s, k, node, in_port, 0, now)
    s.next_tx[k, p - node.first_port] = _next_start(s, p)

"""Several classes of traffic: a queue a class at each port, pauses by class, strict priority and weighted turns.

A class has rows of its own (`lane`) for what a port of one class keeps in its row: queue, ingress, pauses. Strict
classes go first, the highest number first; those with a weight share what is left by deficit round robin, a turn a
full packet times the weight (surplus round robin: the last packet of a turn may overdraw it, which the next one pays).
A pause frame names its class and stops all packets of it, ACKs too; it passes every queue. Lossy classes drop where a
queue is above its share of the free pool. All of a switch's events are run in their order.
"""

from __future__ import annotations

import numpy as np

from congestion.engine.buffer import has_no_room, hold, is_full, is_lossless, marked, may_go_on, release
from congestion.engine.lists import after, put
from congestion.engine.packets import flow_of, pause, send, size_of
from congestion.engine.switch import collect, in_order
from congestion.engine.tables import HOP_SHIFT, MARK_BIT, NEVER, PFC, SEQ_MASK, SEQ_SHIFT
from congestion.kernels.jit import inlined, kernel

_HOP = 1 << HOP_SHIFT


@kernel
def run_switch(s, k, n, end):  # type: ignore[no-untyped-def]
    """Run all that happens at switch `n` before `end`, by worker `k`."""
    node = s.node[n]
    count, _, _, soonest = collect(s, k, node, end)
    s.next_time[n] = min(soonest, in_order(s, k, node, count, end, _next_start, _serve, _arrive))


@inlined
def lane_of(s, p, its_class):  # type: ignore[no-untyped-def]
    """Number of a class' row and queue at port `p`."""
    return np.int64(p) * s.run[0].num_classes + its_class


@inlined
def class_of(s, word):  # type: ignore[no-untyped-def]
    if word & 3 == PFC:
        return (word >> SEQ_SHIFT) & SEQ_MASK
    ack_class = s.run[0].ack_class
    return ack_class if word & 3 and ack_class >= 0 else np.int64(s.class_of[flow_of(word)])


@inlined
def _waits(s, lane):  # type: ignore[no-untyped-def]
    """Whether a class has a packet in its queue that may go."""
    return s.queue_head[lane] != s.queue_tail[lane] and not s.lane[lane].paused


@inlined
def _next_start(s, p):  # type: ignore[no-untyped-def]
    """Return when a busy port will begin its next packet, NEVER where it has none that may go."""
    return s.port[p].busy if s.port[p].frames or waiting_classes(s, p) else NEVER


@inlined
def waiting_classes(s, p):  # type: ignore[no-untyped-def]
    """Bits of the classes whose queue at port `p` has a packet that may go."""
    bits = np.int64(0)
    for its_class in range(s.run[0].num_classes):
        if _waits(s, lane_of(s, p, its_class)):
            bits |= np.int64(1) << its_class
    return bits


@kernel
def choose(s, p, classes):  # type: ignore[no-untyped-def]
    """The class that port `p` serves next, of those whose bits are set: one at least."""
    port, many = s.port[p], s.run[0].num_classes
    for its_class in range(many - 1, -1, -1):
        if classes >> its_class & 1 and not s.weight[its_class]:
            return its_class
    turn = np.int64(port.turn)
    while not (classes >> turn & 1) or s.lane[lane_of(s, p, turn)].deficit <= 0:
        if not classes >> turn & 1:  # who does not use its turn keeps nothing of it
            lane = s.lane[lane_of(s, p, turn)]
            lane.deficit = min(np.int64(lane.deficit), np.int64(0))
        turn = turn + 1 if turn + 1 < many else np.int64(0)
        lane = s.lane[lane_of(s, p, turn)]
        if classes >> turn & 1:
            lane.deficit += s.weight[turn] * s.run[0].data_wire_bytes
    port.turn = turn
    return turn


@inlined
def spend(s, lane, its_class, size):  # type: ignore[no-untyped-def]
    """A packet of a class that has turns was sent."""
    if s.weight[its_class]:
        s.lane[lane].deficit -= size


@inlined
def _arrive(s, k, node, seen):  # type: ignore[no-untyped-def]
    """Take in a packet of one event: pause a class, drop, or queue it in its class, and start the port if idle."""
    now, word, size, out = seen.time, seen.word, seen.size, seen.out
    its_class = class_of(s, word)
    if word & 3 == PFC:
        pause(s.lane[lane_of(s, out, its_class)], word, now)
        _kick(s, k, node, out, now)
        return
    place, behind = lane_of(s, out, its_class), lane_of(s, seen.port, its_class)
    queue, ingress = s.lane[place], s.lane[behind]
    if has_no_room(s, node, queue, ingress, size):
        ingress.drops += 1
        s.port[seen.port].drops += 1
        s.cause[seen.port, 2] += np.int64(is_lossless(s, ingress) != 0)
        return
    hold(s, node, ingress, size)
    if is_lossless(s, ingress) and not ingress.pause_sent and is_full(s, node, ingress):
        ingress.pauses += 1
        s.port[seen.port].pauses += 1
        _lay_to_longest(s, node, its_class)
        node.num_paused += 1
        _signal(s, k, node, seen.port, its_class, 1, now)
    queue.queue_bytes += size
    queue.max_queue_bytes = max(queue.max_queue_bytes, queue.queue_bytes)
    port = s.port[out]
    port.queue_bytes += size
    port.max_queue_bytes = max(port.max_queue_bytes, port.queue_bytes)
    s.queue_tail[place] = put(s, k, s.queue_tail[place], np.int64(seen.port), word + _HOP)
    _kick(s, k, node, out, now)


@kernel
def _lay_to_longest(s, node, its_class):  # type: ignore[no-untyped-def]
    """A pause is due to the port with the longest queue of the class."""
    longest = np.int64(node.first_port)
    for p in range(np.int64(node.first_port), np.int64(node.first_port) + node.num_ports):
        if s.lane[lane_of(s, p, its_class)].queue_bytes > s.lane[lane_of(s, longest, its_class)].queue_bytes:
            longest = np.int64(p)
    s.cause[longest, s.lane[lane_of(s, longest, its_class)].paused] += 1


@inlined
def _kick(s, k, node, p, now):  # type: ignore[no-untyped-def]
    next_tx = _next_start(s, p)
    s.next_tx[k, p - node.first_port] = next_tx
    if next_tx < now:
        _serve(s, k, node, p, now)


@inlined
def _signal(s, k, node, p, its_class, stops, now):  # type: ignore[no-untyped-def]
    """A pause or resume frame of a class for the sender at port `p`."""
    lane, port = s.lane[lane_of(s, p, its_class)], s.port[p]
    lane.pause_sent = stops
    lane.frames += 1
    port.frames += 1
    node.num_frames += 1
    if port.busy < now:
        _send_frame(s, k, node, p, now)
    s.next_tx[k, p - node.first_port] = _next_start(s, p)


@kernel
def _send_frame(s, k, node, p, now):  # type: ignore[no-untyped-def]
    """Send the port's PFC frame of the highest class that has one waiting."""
    its_class = np.int64(s.run[0].num_classes - 1)
    while not s.lane[lane_of(s, p, its_class)].frames:
        its_class -= 1
    lane, port = s.lane[lane_of(s, p, its_class)], s.port[p]
    stops = lane.pause_sent if lane.frames & 1 else 1 - lane.pause_sent
    lane.frames -= 1
    port.frames -= 1
    node.num_frames -= 1
    word = PFC | (MARK_BIT if stops else 0) | its_class << SEQ_SHIFT
    send(s, k, port, now, word, s.run[0].pfc_wire_bytes)


@kernel
def _serve(s, k, node, p, now):  # type: ignore[no-untyped-def]
    """Begin the next packet of a free port: a PFC frame first, else that of the class whose turn it is."""
    port, place = s.port[p], p - node.first_port
    if port.frames:
        _send_frame(s, k, node, p, now)
        s.next_tx[k, place] = _next_start(s, p)
        return
    its_class = choose(s, p, waiting_classes(s, p))
    number = lane_of(s, p, its_class)
    queue, head = s.lane[number], s.queue_head[number]
    word, in_port = s.entry[head].word, np.uint32(s.entry[head].time)
    s.queue_head[number] = after(s, k, head)
    size = size_of(s, word)
    spend(s, number, its_class, size)
    queue.queue_bytes -= size
    port.queue_bytes -= size
    ingress = s.lane[lane_of(s, in_port, its_class)]
    release(s, node, ingress, size)
    before = queue.marks
    send(s, k, port, now, marked(s, queue, word), size)
    port.marks += queue.marks - before
    s.next_tx[k, place] = _next_start(s, p)
    if may_go_on(s, node, ingress):
        node.num_paused -= 1
        _signal(s, k, node, in_port, its_class, 0, now)

"""A conventional simulator to compare ours with: a binary heap of events, compiled, each event one packet at one node.

Same packets, same rules, same order of events, so completion times must be equal to the picosecond; it shares with the
engine the input tables, DCQCN and the drawn numbers, and none of its loops. FIFO ports, ECN at dequeue, line rate or
DCQCN. A port has an event only while packets wait at it. Not covered: PFC, loss, more than one flow a host.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from congestion.control import dcqcn
from congestion.control.registry import DCQCN, NONE
from congestion.engine.packets import hash_random, serialise
from congestion.engine.tables import (
    ACK,
    ACK_PATH,
    DATA,
    FLOW_SHIFT,
    HOP_MASK,
    HOP_SHIFT,
    MARK_BIT,
    NEVER,
    SEQ_MASK,
    SEQ_SHIFT,
    Ints,
    Rows,
    State,
)
from congestion.kernels.jit import entry, inlined, kernel

_START, _FREE = 1, 2  # order of events at one moment, behind arrivals: they have minus their port's `order`
_LONGEST = 4_095  # time on a wire, in 1,024 ps
_HOP = 1 << HOP_SHIFT
_ONE = float(1 << 53)
_EVENT = np.dtype([("time", "i8"), ("kind", "i8"), ("who", "i8"), ("word", "i8")])  # who: a port, or a flow that starts
_PORT = np.dtype(
    [
        ("busy", "i8"),
        ("order", "i8"),  # among arrivals at one moment the larger is first: this packet's time, the last one's, began
        ("queue_bytes", "i8"),
        ("next_look", "i8"),  # when it looks next, NEVER for none
        ("last", "i8"),  # of its events that are in the heap
        ("flow", "i4"),  # that a host's port sends
        ("queued", "i4"),
        ("head", "i4"),
        ("tail", "i4"),
        ("is_switch", "i8"),
    ]
)
_TALLY = np.dtype([("events", "i8"), ("free", "i8"), ("hops", "i8"), ("marks", "i8")])


class Tables(NamedTuple):
    """Tables of a run that the heap reads: each that a kernel is handed is code to compile at each of its calls."""

    run: Rows
    node: Rows
    port: Rows
    kind: Rows
    flow: Rows
    path: NDArray[np.uint32]
    dcqcn: Rows
    dcqcn_flow: Rows


class Heap(NamedTuple):
    """event: the heap; port: what a port knows; word, behind: packets that wait, and the next in line of each or of
    the free ones; tally: (1,) events in the heap, first free place, and what is counted."""

    event: Rows
    port: Rows
    word: Ints
    behind: Ints
    tally: Rows


def simulate_by_heap(s: State) -> Rows:
    """Run the flows of a fresh state to their end; `s.flow["finish"]` has the times, the result the counters.

    Raises:
        ValueError: the state needs what is not covered.
    """
    run = s.run[0]
    if run["pfc"] or run["losses"] or run["law"] not in (NONE, DCQCN) or run["cnp_gap"]:
        raise ValueError("the heap engine has no PFC, no loss, no pause between notices, and no law but DCQCN")
    if s.node["num_flows"].max() > 1:
        raise ValueError("the heap engine has one flow a host")
    heap = _heap_of(s)
    _run(Tables(*(getattr(s, name) for name in Tables._fields)), heap)
    return heap.tally


def _heap_of(s: State) -> Heap:
    flow, port = s.flow, np.zeros(len(s.port), dtype=_PORT)
    port["busy"], port["next_look"], port["last"], port["flow"] = -1, NEVER, -1, -1
    peer, src = s.port["peer"], flow["src"]
    owner = s.port["to"][peer]
    port["is_switch"] = s.node["is_switch"][owner]
    nic = s.node["first_port"][src]
    port["flow"][nic] = np.arange(len(flow))
    packets = int(flow["num_packets"].sum())  # in flight is each or its ACK
    event = np.zeros(packets + 2 * len(port) + len(flow), dtype=_EVENT)
    return Heap(event, port, np.zeros(packets, dtype=np.int64), np.arange(1, packets + 1), np.zeros(1, dtype=_TALLY))


@entry
def _run(s, h):  # type: ignore[no-untyped-def]
    """Handle events in the order of their times, from the flows' starts on, until none is left."""
    for f in range(len(s.flow)):
        _push(h, s.flow[f].start, _START, f, 0)
    while h.tally[0].events:
        top = h.event[0]
        now, kind, who, word = top.time, top.kind, top.who, top.word
        _pop(h)
        if kind <= 0:
            if h.port[who].is_switch:
                _arrive_at_switch(s, h, now, word)
            else:
                _arrive_at_host(s, h, who, now, word)
        elif kind == _START:
            if s.run[0].law == DCQCN:
                dcqcn.start(s.dcqcn[0], s.dcqcn_flow[who], s.flow[who])
            _ask(h, s.node[s.flow[who].src].first_port, now)
        elif h.port[who].next_look == now:  # else it has looked already, for it was asked to look sooner
            h.port[who].next_look = NEVER
            if h.port[who].is_switch:
                _start_next(s, h, who, now)
            else:
                _serve_host(s, h, who, now)


@inlined
def _before(time, kind, who, other):  # type: ignore[no-untyped-def]
    if time != other.time:
        return time < other.time
    return kind < other.kind if kind != other.kind else who < other.who


@kernel
def _push(h, time, kind, who, word):  # type: ignore[no-untyped-def]
    place = h.tally[0].events
    h.tally[0].events += 1
    while place:
        above = (place - 1) >> 1
        if not _before(time, kind, who, h.event[above]):
            break
        _copy(h.event[place], h.event[above])
        place = above
    new = h.event[place]
    new.time, new.kind, new.who, new.word = time, kind, who, word


@kernel
def _pop(h):  # type: ignore[no-untyped-def]
    h.tally[0].events -= 1
    many = h.tally[0].events
    last, place = h.event[many], 0
    while 2 * place + 1 < many:
        below = 2 * place + 1
        if below + 1 < many:
            right = h.event[below + 1]
            if _before(right.time, right.kind, right.who, h.event[below]):
                below += 1
        if _before(last.time, last.kind, last.who, h.event[below]):
            break
        _copy(h.event[place], h.event[below])
        place = below
    _copy(h.event[place], last)


@inlined
def _copy(to, of):  # type: ignore[no-untyped-def]
    to.time, to.kind, to.who, to.word = of.time, of.kind, of.who, of.word


@inlined
def _ask(h, p, when):  # type: ignore[no-untyped-def]
    """Have port `p` look at `when`, if it does not sooner."""
    port = h.port[p]
    if when < port.next_look:
        port.next_look = when
        if when != port.last:
            _push(h, when, _FREE, np.int64(p), 0)
            port.last = max(port.last, when)


@inlined
def _size(s, word):  # type: ignore[no-untyped-def]
    if word & 3 == ACK:
        return s.run[0].ack_wire_bytes
    flow = s.flow[word >> FLOW_SHIFT]
    last = ((word >> SEQ_SHIFT) & SEQ_MASK) + 1 == flow.num_packets
    return np.int64(flow.last_wire_bytes) if last else s.run[0].data_wire_bytes


@inlined
def _send(s, h, p, now, word, size):  # type: ignore[no-untyped-def]
    port = s.port[p]
    kind = s.kind[port.kind]
    if size == s.run[0].data_wire_bytes:
        tx_time = kind.tx_data
    else:
        tx_time = kind.tx_ack if word & 3 else serialise(s.run[0], size, kind.rate)
    before, since = _LONGEST, (now + kind.delay) >> 10
    if now <= h.port[p].busy:
        before, since = h.port[p].order >> 50, h.port[p].order
    h.port[p].order = min(tx_time >> 10, _LONGEST) << 50 | before << 38 | since & ((1 << 38) - 1)
    h.port[p].busy = now + tx_time
    h.tally[0].hops += 1
    _push(h, h.port[p].busy + kind.delay, -h.port[p].order, np.int64(port.peer), word)


@inlined
def _enqueue(h, p, word, size):  # type: ignore[no-untyped-def]
    port, place = h.port[p], h.tally[0].free
    h.tally[0].free = h.behind[place]
    h.word[place] = word
    if port.queued:
        h.behind[port.tail] = place
    else:
        port.head = place
    port.tail = place
    port.queued += 1
    port.queue_bytes += size


@inlined
def _dequeue(s, h, p):  # type: ignore[no-untyped-def]
    port = h.port[p]
    place = port.head
    word = h.word[place]
    port.head = h.behind[place]
    h.behind[place] = h.tally[0].free
    h.tally[0].free = place
    port.queued -= 1
    port.queue_bytes -= _size(s, word)
    return word


# Switch.


@inlined
def _arrive_at_switch(s, h, now, word):  # type: ignore[no-untyped-def]
    word += _HOP
    hop = (word >> HOP_SHIFT) & HOP_MASK
    p = s.path[word >> FLOW_SHIFT, hop + (ACK_PATH if word & 3 else 0)]
    size = _size(s, word)
    if h.port[p].busy < now:  # then nobody waits
        _send(s, h, p, now, _marked(s, h, p, word), size)
    else:
        _enqueue(h, p, word, size)
        _ask(h, p, h.port[p].busy)


@inlined
def _start_next(s, h, p, now):  # type: ignore[no-untyped-def]
    word = _dequeue(s, h, p)
    _send(s, h, p, now, _marked(s, h, p, word), _size(s, word))
    if h.port[p].queued:
        _ask(h, p, h.port[p].busy)


@inlined
def _marked(s, h, p, word):  # type: ignore[no-untyped-def]
    queue, kind = h.port[p].queue_bytes, s.kind[s.port[p].kind]
    if queue <= kind.kmin or not s.run[0].ecn:
        return word
    if queue <= kind.kmax:
        share = s.run[0].pmax * (queue - kind.kmin) / (kind.kmax - kind.kmin)
        number = ((word >> SEQ_SHIFT) & SEQ_MASK) << 8 | (word & (HOP_MASK << HOP_SHIFT)) | word & 3
        if hash_random(s.run[0].seed, word >> FLOW_SHIFT, number) >= share * _ONE:
            return word
    h.tally[0].marks += 1
    return word if word & 3 else word | MARK_BIT


# Host.


@inlined
def _arrive_at_host(s, h, p, now, word):  # type: ignore[no-untyped-def]
    f, sequence = word >> FLOW_SHIFT, (word >> SEQ_SHIFT) & SEQ_MASK
    if word & 3 == DATA:
        ack = ACK | (word & MARK_BIT) | (sequence + 1) << SEQ_SHIFT | f << FLOW_SHIFT
        _enqueue(h, p, ack, s.run[0].ack_wire_bytes)
        _ask(h, p, max(now, h.port[p].busy))
        return
    flow = s.flow[f]
    flow.unacked = sequence
    if sequence == flow.num_packets:
        flow.finish = now
    elif s.run[0].law == DCQCN:
        dcqcn.on_ack(s.dcqcn[0], s.dcqcn_flow[f], flow, now, word & MARK_BIT != 0, np.int64(0), s.run[0].mtu_bytes)


@inlined
def _serve_host(s, h, p, now):  # type: ignore[no-untyped-def]
    """Send an ACK, else a packet that the pace allows, and look again when there can be another."""
    port = h.port[p]
    flow = s.flow[port.flow]
    started = port.flow >= 0 and flow.start <= now
    if port.busy <= now and port.queued:
        word = _dequeue(s, h, p)
        _send(s, h, p, now, word, s.run[0].ack_wire_bytes)
    elif port.busy <= now and started and flow.next < flow.num_packets and flow.available <= now:
        word = DATA | np.int64(flow.next) << SEQ_SHIFT | np.int64(port.flow) << FLOW_SHIFT
        flow.next += 1
        size = _size(s, word)
        _send(s, h, p, now, word, size)
        if s.run[0].law == DCQCN:
            dcqcn.advance(s.dcqcn[0], s.dcqcn_flow[port.flow], flow, now)
        line_rate = flow.rate_bps == flow.line_rate_bps
        flow.available = port.busy if line_rate else now + serialise(s.run[0], size, flow.rate_bps)
    if port.queued:
        _ask(h, p, port.busy)
    elif started and flow.next < flow.num_packets:
        _ask(h, p, max(port.busy, flow.available))

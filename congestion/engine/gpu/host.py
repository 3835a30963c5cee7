"""A host in one window, by one thread: the rules of `engine.host`, with our lists and wires below them."""

from __future__ import annotations

from typing import Any

from congestion.engine import host as rules
from congestion.engine.gpu.graft import graft
from congestion.engine.gpu.lists import arrival_on, take_off
from congestion.engine.gpu.switch import GRAFTS, publish
from congestion.kernels.jit import kernel

_done: dict[Any, Any] = {}
_send_next, _arrive = graft(rules._send_next, GRAFTS, _done), graft(rules._arrive, GRAFTS, _done)
_next_start, _next_send = rules._next_start, rules._next_send
_start_next, _expire = rules._start_next, rules._expire


@kernel
def run_host(s, n, end, parity):  # type: ignore[no-untyped-def]
    """Run all that happens at host `n` before `end`; return when the next event is, there or where it has sent to."""
    node = s.node[n]
    p = node.first_port
    wire = s.wire[p]
    while True:
        arrival = arrival_on(s, wire)
        start = _next_start(s, node)
        event = min(arrival, start, node.timer)
        ready = _next_send(s, node, p)
        if min(event, ready) >= end:
            break
        if ready < event:
            _send_next(s, 0, node, p, ready)
            continue
        node.now = event
        if arrival == event:
            _arrive(s, 0, node, p, take_off(s, wire), event)
        elif start == event:
            _start_next(s, node)
        else:
            _expire(s, node, event)
    s.next_time[n] = min(event, ready)
    return min(s.next_time[n], publish(s, p, parity))

"""A switch's events of a window in their order, where ports are not independent: near a pause, or with several classes.

The order is found by all lanes of the warp, the events are run by one, by the rules of `engine.switch` or `classes`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from congestion.engine import classes
from congestion.engine import switch as rules
from congestion.engine.gpu.graft import graft
from congestion.engine.gpu.switch import GRAFTS, is_first, publish
from congestion.engine.tables import NEVER
from congestion.kernels.jit import inlined, kernel
from congestion.kernels.machine import has

_done: dict[Any, Any] = {}
_arrive, _serve = graft(rules._arrive, GRAFTS, _done), graft(rules._serve, GRAFTS, _done)
_arrive_of_class, _serve_of_class = graft(classes._arrive, GRAFTS, _done), graft(classes._serve, GRAFTS, _done)


@kernel
def rank(s, room, base, n, lane, lanes):  # type: ignore[no-untyped-def]
    """The order of all arrivals: each behind as many as come before it."""
    node = s.node[n]
    many = np.int64(node.num_ports)
    start = s.seen_from[node.first_port]
    for place in range(lane, many, lanes):
        at = s.seen_from[node.first_port + place]
        for i in range(at, at + room[base + 2 * many + place]):
            before = np.int64(0)
            for other in range(many):
                its = s.seen_from[node.first_port + other]
                for j in range(its, its + room[base + 2 * many + other]):
                    before += np.int64(j != i and is_first(s, j, i))
            s.order[start + before] = i


@kernel
def run_in_order(s, k, room, base, n, end):  # type: ignore[no-untyped-def]
    """Run all events of the switch by one lane, as `engine.switch` has it; `s.next_tx[k]` is the warp's."""
    node, next_tx = s.node[n], s.next_tx[k]
    many = np.int64(node.num_ports)
    start, count = s.seen_from[node.first_port], np.int64(0)
    for place in range(many):
        count += room[base + 2 * many + place]
        next_tx[place] = _start_of(s, node.first_port + place)
    for i in range(count + 1):
        until = s.seen[s.order[start + i]].time if i < count else end
        while True:
            soonest, chosen = NEVER, 0
            for place in range(many):
                if next_tx[place] < soonest:
                    soonest, chosen = next_tx[place], place
            if soonest >= until:
                break
            if has(s.features, "classes"):
                _serve_of_class(s, k, node, node.first_port + np.uint32(chosen), soonest)
            else:
                _serve(s, k, node, node.first_port + np.uint32(chosen), soonest)
        if i < count:
            if has(s.features, "classes"):
                _arrive_of_class(s, k, node, s.seen[s.order[start + i]])
            else:
                _arrive(s, k, node, s.seen[s.order[start + i]])


@inlined
def _start_of(s, p):  # type: ignore[no-untyped-def]
    return classes._next_start(s, p) if has(s.features, "classes") else rules._next_start(s, p)


@inlined
def tell(s, n, lane, lanes, parity):  # type: ignore[no-untyped-def]
    """Return, after the events in order, when a port goes on here, and when what was sent arrives there."""
    node = s.node[n]
    soonest, sent = NEVER, NEVER
    for place in range(lane, np.int64(node.num_ports), lanes):
        p = node.first_port + place
        soonest = min(soonest, _start_of(s, p))
        sent = min(sent, publish(s, p, parity))
    return soonest, sent

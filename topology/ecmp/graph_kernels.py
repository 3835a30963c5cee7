"""Inner loops of `graph_routing`, compiled: search, next-hop sets, and the even spread of many flows.

Arrays as `graph.Graph` has them: `start`, `links` (links out of each node), `link_dst`, `is_switch`. `distance` counts
links from each switch to the place of a destination, `reach` is one row of it, FAR where there is no way.
"""

from __future__ import annotations

import numba
import numpy as np

FAR = 32_767


@numba.njit(cache=True)
def search(start, links, link_dst, is_switch, roots, distance):  # type: ignore[no-untyped-def]
    """Breadth first from `roots` over switches, backwards: `links` lead into each node, `link_dst` says where from."""
    queue = np.empty(len(is_switch), np.int64)
    queue[: len(roots)] = roots
    head, tail = 0, len(roots)
    while head < tail:
        node = queue[head]
        head += 1
        for position in range(start[node], start[node + 1]):
            near = link_dst[links[position]]
            if is_switch[near] and distance[near] == FAR:
                distance[near] = distance[node] + 1
                queue[tail] = near
                tail += 1


@numba.njit(cache=True)
def _next_reach(start, links, link_dst, is_switch, reach, node, dst):  # type: ignore[no-untyped-def]
    """Distance that the next hop must have: -1 the destination itself, -2 there is no way."""
    best = FAR
    for position in range(start[node], start[node + 1]):
        near = link_dst[links[position]]
        if near == dst:
            return -1
        if is_switch[near] and reach[near] < best:
            best = reach[near]
    return np.int64(best) if best < FAR else -2


@numba.njit(cache=True)
def _leads(is_switch, reach, near, dst, next_reach):  # type: ignore[no-untyped-def]
    return near == dst if next_reach == -1 else next_reach >= 0 and is_switch[near] and reach[near] == next_reach


@numba.njit(cache=True)
def hops(start, links, link_dst, is_switch, distance, key, src, dst):  # type: ignore[no-untyped-def]
    """Return the number of links of each flow's shortest path, (num_flows,); 0 to itself, -1 where there is no path."""
    hops = np.zeros(len(src), np.int64)
    for flow in range(len(src)):
        if src[flow] != dst[flow]:
            next_reach = _next_reach(start, links, link_dst, is_switch, distance[key[flow]], src[flow], dst[flow])
            hops[flow] = next_reach + 2 if next_reach >= -1 else -1
    return hops


@numba.njit(cache=True)
def groups(start, links, link_dst, is_switch, distance, key, nodes, dst):  # type: ignore[no-untyped-def]
    """Return for each flow how many links at `nodes` lead on to `dst`, and the node at the first one's end."""
    sizes = np.zeros(len(nodes), np.int64)
    first = np.full(len(nodes), -1, np.int64)
    for flow in range(len(nodes)):
        node, reach = nodes[flow], distance[key[flow]]
        if node == dst[flow]:
            continue
        next_reach = _next_reach(start, links, link_dst, is_switch, reach, node, dst[flow])
        for position in range(start[node], start[node + 1]):
            near = link_dst[links[position]]
            if _leads(is_switch, reach, near, dst[flow], next_reach):
                sizes[flow] += 1
                if first[flow] == -1:
                    first[flow] = near
    return sizes, first


@numba.njit(cache=True)
def pick(start, links, link_dst, is_switch, distance, key, nodes, dst, choice):  # type: ignore[no-untyped-def]
    """Return for each flow the link number `choice` of those at `nodes` that lead on to `dst`; -1: it is there."""
    picked = np.full(len(nodes), -1, np.int64)
    for flow in range(len(nodes)):
        node, reach = nodes[flow], distance[key[flow]]
        if node == dst[flow]:
            continue
        next_reach = _next_reach(start, links, link_dst, is_switch, reach, node, dst[flow])
        left = choice[flow]
        for position in range(start[node], start[node + 1]):
            near = link_dst[links[position]]
            if _leads(is_switch, reach, near, dst[flow], next_reach):
                if left == 0:
                    picked[flow] = links[position]
                    break
                left -= 1
    return picked


@numba.njit(cache=True)
def _share(start, links, link_dst, is_switch, reach, node, dst, amount, amount_at, totals):  # type: ignore[no-untyped-def]
    """Split the amount at `node` evenly over its next-hop set; False where that set is empty."""
    next_reach = _next_reach(start, links, link_dst, is_switch, reach, node, dst)
    size = 0
    for position in range(start[node], start[node + 1]):
        size += _leads(is_switch, reach, link_dst[links[position]], dst, next_reach)
    for position in range(start[node], start[node + 1]):
        near = link_dst[links[position]]
        if _leads(is_switch, reach, near, dst, next_reach):
            totals[links[position]] += amount / size
            amount_at[near] += amount / size
    return size > 0


@numba.njit(cache=True)
def spread(start, links, link_dst, is_switch, reach, roots, order, src, dst, amounts, totals):  # type: ignore[no-untyped-def]
    """Add flows that share `reach` to `totals`: all hang on one root, or all have one destination.

    `order` holds the switches above the roots, farthest first, so that a switch is emptied once it is full.
    """
    amount_at = np.zeros(len(is_switch))
    arrived = np.zeros(len(is_switch))
    for flow in range(len(src)):
        before = amount_at[dst[flow]]
        if _share(start, links, link_dst, is_switch, reach, src[flow], dst[flow], amounts[flow], amount_at, totals):
            arrived[dst[flow]] += amounts[flow] if amount_at[dst[flow]] == before else 0.0
    for node in order:
        if amount_at[node] > 0:
            _share(start, links, link_dst, is_switch, reach, node, -1, amount_at[node], amount_at, totals)
    for flow in range(len(src)):
        for root in roots:
            amount = arrived[dst[flow]] if len(roots) == 1 else amount_at[root]
            if amount > 0:
                _share(start, links, link_dst, is_switch, reach, root, dst[flow], amount, amount_at, totals)
            if len(roots) > 1:
                amount_at[root] = 0.0
        arrived[dst[flow]] = 0.0

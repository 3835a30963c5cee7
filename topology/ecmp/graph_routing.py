"""Shortest-path ECMP over any fabric: next-hop sets, the links of each flow, and the load of an even spread.

Every node forwards towards the destination over all links that lie on a shortest path; a hash picks one of them, in
order of the next nodes' ids. Distances are kept once a place where destinations hang (a ToR), not once a host. With
`up_down` a path that has gone down never rises again, as BGP's AS numbers have it in a CLOS (RFC 7938): after failures
a ToR then relays nothing for others. Not covered: weighted groups, failures that the routing protocol has not yet
seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from topology.ecmp import graph_kernels as kernels
from topology.ecmp.hashing import Ecmp, Stage
from topology.ecmp.routing import NO_LINK
from topology.fabric.graph import Floats, Graph, Ints

UNREACHABLE = -1

Distances = NDArray[np.int16]


class Step(NamedTuple):
    """One hop of all flows, arrays of one length; a flow that has arrived is in a group of one.

    `level` is the height of `node` over the hosts; `upward` says whether the next hop is higher.
    """

    hop: int
    node: Ints
    level: Ints
    upward: NDArray[np.bool_]
    group_size: Ints


Choose = Callable[[Step], Ints]


class _Ways(NamedTuple):
    """Directed links as the kernels walk them; `back_*` are the same links from their far ends.

    With `up_down` every node is two states: n while a path may still rise, n + num_nodes once it has gone down; and
    every link two: k from the first state, k + num_links from the second.
    """

    start: Ints
    links: Ints
    link_dst: Ints
    is_switch: NDArray[np.bool_]
    back_start: Ints
    back_links: Ints
    link_src: Ints


class Routes:
    """Next hops of a graph towards a set of destinations.

    Args:
        graph: the fabric.
        dst: the destinations, node ids of hosts; may repeat.
        alive: a mask over links, both directions of a cable alike; None: all.
        up_down: no path rises again once it has gone down; heights are those of the whole graph.
    """

    def __init__(
        self, graph: Graph, dst: Ints, *, alive: NDArray[np.bool_] | None = None, up_down: bool = False
    ) -> None:
        self.graph = graph
        ways = _up_down(graph, alive) if up_down else _any_way(graph, alive)
        self._start, self._links, self._link_dst, self._switch = ways[:4]
        # What lies between the two states of a node, and between those of a link.
        self._lower_node, self._lower_link = (graph.num_nodes, graph.num_links) if up_down else (0, 0)
        self.key, self._anchors = _anchors(graph, dst, self._start, self._links)
        self._distance = _distances(ways, self._anchors, self._lower_node)

    @property
    def reach(self) -> Distances:
        """Links from each node to the nearest anchor of a key, shape (num_keys, num_nodes); FAR: none reached."""
        return self._distance[:, : self.graph.num_nodes]

    @property
    def anchors(self) -> list[Ints]:
        """The switches that the destinations of each key hang on."""
        return self._anchors

    def hops(self, src: Ints, dst: Ints) -> Ints:
        """Return the links of each shortest path, 0 from a host to itself, UNREACHABLE where there is none."""
        hops = kernels.hops(
            self._start,
            self._links,
            self._link_dst,
            self._switch,
            self._distance,
            self.key[dst],
            src,
            dst + self._lower_node,
        )
        return np.where(src == dst, 0, hops)

    def groups(self, node: Ints, dst: Ints) -> tuple[Ints, Ints]:
        """Return the size of each flow's next-hop set at `node`, and the node that its first leads to (or -1)."""
        sizes, first = kernels.groups(
            self._start,
            self._links,
            self._link_dst,
            self._switch,
            self._distance,
            self.key[dst],
            node,
            dst + self._lower_node,
        )
        return np.asarray(sizes), np.where(first < 0, -1, first % self.graph.num_nodes)

    def members(self, node: int, dst: int) -> Ints:
        """The links of one next-hop set, in the order in which a choice counts them."""
        return self.sets(np.array([node]), np.array([dst]))[1]

    def sets(self, node: Ints, dst: Ints) -> tuple[Ints, Ints]:
        """Sizes of the next-hop sets at `node` towards `dst`, pair by pair, and the links of all of them in turn."""
        sizes = self.groups(node, dst)[0]
        place = np.arange(sizes.sum(), dtype=np.int64) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return sizes, self._pick(np.repeat(node, sizes), np.repeat(dst, sizes), place)

    def route(self, src: Ints, dst: Ints, choose: Choose | Ints) -> Ints:
        """Return link ids, shape (num_flows, most hops), NO_LINK after a path's end and where there is no path.

        Args:
            src, dst: hosts; no flow may end where it begins.
            choose: picks a member (taken modulo the group) for every flow at one hop; or hash values, one a flow or
                one a flow and hop, used alike by all switches.

        Raises:
            ValueError: a flow's two ends are one host.
        """
        if np.any(src == dst):
            raise ValueError("a flow begins and ends at one host")
        pick = _from_values(choose) if isinstance(choose, np.ndarray) else choose
        hops = self.hops(src, dst)
        paths = np.full((len(src), max(int(hops.max(initial=0)), 1)), NO_LINK, dtype=np.int64)
        arrived = dst + self._lower_node
        state = np.where(hops == UNREACHABLE, arrived, src).astype(np.int64)
        level = self.graph.level
        for hop in range(paths.shape[1]):
            sizes, first = self.groups(state, dst)
            moving, node = state != arrived, state % self.graph.num_nodes
            group = np.where(moving, sizes, 1)
            upward = moving & (level[first] > level[node])
            choice = np.asarray(pick(Step(hop, node, level[node], upward, group))) % group
            links = self._pick(state, dst, choice)[moving]
            paths[moving, hop] = links % self.graph.num_links
            state[moving] = self._link_dst[links]
        return paths

    def spread(self, src: Ints, dst: Ints, amounts: Floats) -> Floats:
        """Sum of `amounts` a link, shape (num_links,), if each next-hop set shared every flow evenly.

        What ECMP does on average over hashes. A flow without a path adds nothing.

        Raises:
            ValueError: the routes are `up_down`.
        """
        if self._lower_node:
            raise ValueError("an even spread is known for plain shortest paths alone")
        graph = self.graph
        totals = np.zeros(graph.num_links)
        # Destinations on one and the same switch share their way there; those on several differ in it.
        single = np.array([len(roots) == 1 for roots in self._anchors])
        batch = np.where(single[self.key[dst]], self.key[dst], len(single) + dst)
        order = np.argsort(batch, kind="stable")
        begin = np.flatnonzero(np.diff(batch[order])) + 1
        for flows in np.split(order, begin) if len(order) else ():
            key = self.key[dst[flows[0]]]
            reach = self._distance[key]
            above = np.flatnonzero((reach > 0) & (reach < kernels.FAR))
            kernels.spread(
                self._start,
                self._links,
                graph.link_dst,
                self._switch,
                reach,
                self._anchors[key],
                above[np.argsort(-reach[above], kind="stable")],
                src[flows],
                dst[flows],
                amounts[flows],
                totals,
            )
        return totals

    def _pick(self, node: Ints, dst: Ints, choice: Ints) -> Ints:
        """Return the link that each flow leaves `node` by: number `choice` of those on a shortest path to `dst`."""
        return np.asarray(
            kernels.pick(
                self._start,
                self._links,
                self._link_dst,
                self._switch,
                self._distance,
                self.key[dst],
                node,
                dst + self._lower_node,
                choice,
            )
        )


def by_ecmp(ecmp: Ecmp) -> Choose:
    """The choices of a `hashing.Ecmp` that was made for the same flows; a stage follows from height and direction.

    On a fabric that was built as a `Clos` these are the choices that `routing.route` makes.
    """

    def choose(step: Step) -> Ints:
        """Return each flow's choice among its next hops, hashed as switches of that stage and group size do."""
        stage = np.where(
            step.upward,
            np.where(step.level < 2, Stage.TOR_UP, Stage.SPINE_UP),
            np.where(step.level < 3, Stage.SPINE_DOWN, Stage.CORE_DOWN),
        )
        picked = np.zeros(len(step.node), dtype=np.int64)
        cases = np.unique(np.stack([stage, step.group_size])[:, step.group_size > 1], axis=1)
        for number, size in cases.T.tolist():
            here = (stage == number) & (step.group_size == size)
            picked[here] = ecmp.choose(Stage(number), step.node, size)[here]
        return picked

    return choose


def _from_values(values: Ints) -> Choose:
    def choose(step: Step) -> Ints:
        return values if values.ndim == 1 else np.asarray(values[:, step.hop])

    return choose


def _any_way(graph: Graph, alive: NDArray[np.bool_] | None) -> _Ways:
    """Every living link; a cable has two directions, so links out serve as links in."""
    start, links = graph.out_links
    if alive is not None:
        links = links[alive[links]]
        start = _starts(graph.link_src[links], graph.num_nodes)
    return _Ways(start, links, graph.link_dst, graph.is_switch, start, links, graph.link_dst)


def _up_down(graph: Graph, alive: NDArray[np.bool_] | None) -> _Ways:
    """Living links between states, see `_Ways`: from the second state of a node none leads up."""
    nodes, level = graph.num_nodes, graph.level
    src, dst = graph.link_src, graph.link_dst
    falls = (level[dst] < level[src]) | ~graph.is_switch[dst]  # a host ends a path, whatever it hangs on
    state_src = np.concatenate([src, src + nodes])
    state_dst = np.concatenate([np.where(falls, dst + nodes, dst), dst + nodes])
    usable = np.concatenate([np.ones(len(src), dtype=np.bool_), falls | (level[dst] == level[src])])
    if alive is not None:
        usable &= np.tile(alive, 2)
    kept = np.flatnonzero(usable)
    # Members of a group stand in order of the next node, whatever its state, then of the link: as in `Graph.out_links`.
    out = kept[np.lexsort((kept, state_dst[kept] % nodes, state_src[kept]))]
    back = kept[np.argsort(state_dst[kept], kind="stable")]
    return _Ways(
        _starts(state_src[out], 2 * nodes),
        out,
        state_dst,
        np.tile(graph.is_switch, 2),
        _starts(state_dst[back], 2 * nodes),
        back,
        state_src,
    )


def _starts(sorted_nodes: Ints, num_nodes: int) -> Ints:
    """Begin of each node's run in an array of nodes that is sorted; one entry more than nodes."""
    return np.concatenate([[0], np.cumsum(np.bincount(sorted_nodes, minlength=num_nodes))]).astype(np.int64)


def _anchors(graph: Graph, dst: Ints, start: Ints, links: Ints) -> tuple[Ints, list[Ints]]:
    """Key of each destination (-1 for other nodes), and for each key the switches that its destinations hang on."""
    key = np.full(graph.num_nodes, -1, dtype=np.int64)
    known: dict[tuple[int, ...], int] = {}
    anchors: list[Ints] = []
    nodes = np.unique(dst)
    count = start[nodes + 1] - start[nodes]
    neighbour = graph.link_dst[links % graph.num_links]
    if len(nodes) and (count == 1).all() and graph.is_switch[near := neighbour[start[nodes]]].all():
        # One cable a host: the same as below, at once. Keys count in the order in which nodes come upon them.
        switches, first, place = np.unique(near, return_index=True, return_inverse=True)
        order = np.argsort(first)
        key[nodes] = np.argsort(order)[place]
        return key, [switches[one : one + 1] for one in order.tolist()]
    for node in nodes.tolist():
        near = np.unique(neighbour[start[node] : start[node + 1]])
        near = near[graph.is_switch[near]]
        hangs_on = tuple(near.tolist())
        if hangs_on not in known:
            known[hangs_on] = len(anchors)
            anchors.append(near)
        key[node] = known[hangs_on]
    return key, anchors


def _distances(ways: _Ways, anchors: list[Ints], lower_node: int) -> Distances:
    """Links from each switch to the nearest anchor of a key, shape (num_keys, num_states); FAR: none reached."""
    distance = np.full((len(anchors), len(ways.is_switch)), kernels.FAR, dtype=np.int16)
    for key, roots in enumerate(anchors):
        # A path may end at its last switch in either state.
        ends = np.concatenate([roots, roots + lower_node]) if lower_node else roots
        distance[key, ends] = 0
        kernels.search(ways.back_start, ways.back_links, ways.link_src, ways.is_switch, ends, distance[key])
    return distance

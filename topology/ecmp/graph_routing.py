"""Shortest-path ECMP over any fabric: next-hop sets, the links of each flow, and the load of an even spread.

Every node forwards towards the destination over all links that lie on a shortest path; a hash picks one of them, in
order of the next nodes' ids. Distances are kept once a place where destinations hang (a ToR), not once a host. Not
covered: weighted groups, routing policy (no valleys), failures that the routing protocol has not yet seen.
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


class Routes:
    """Next hops of a graph towards a set of destinations.

    Args:
        graph: the fabric.
        dst: the destinations, node ids of hosts; may repeat.
    """

    def __init__(self, graph: Graph, dst: Ints) -> None:
        self.graph = graph
        self._start, self._links = graph.out_links
        self.key, self._anchors = _anchors(graph, dst)
        self._switch = graph.is_switch
        self._distance = _distances(self._start, self._links, graph.link_dst, graph.is_switch, self._anchors)

    def hops(self, src: Ints, dst: Ints) -> Ints:
        """Return the links of each shortest path, 0 from a host to itself, UNREACHABLE where there is none."""
        hops = kernels.hops(
            self._start, self._links, self.graph.link_dst, self._switch, self._distance, self.key[dst], src, dst
        )
        return np.asarray(hops)

    def groups(self, node: Ints, dst: Ints) -> tuple[Ints, Ints]:
        """Return the size of each flow's next-hop set at `node`, and the node that its first leads to (or -1)."""
        sizes, first = kernels.groups(
            self._start, self._links, self.graph.link_dst, self._switch, self._distance, self.key[dst], node, dst
        )
        return np.asarray(sizes), np.asarray(first)

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
        node = np.where(hops == UNREACHABLE, dst, src).astype(np.int64)
        level = self.graph.level
        for hop in range(paths.shape[1]):
            sizes, first = self.groups(node, dst)
            moving = node != dst
            group = np.where(moving, sizes, 1)
            upward = moving & (level[first] > level[node])
            choice = np.asarray(pick(Step(hop, node, level[node], upward, group))) % group
            links = self._pick(node, dst, choice)
            paths[moving, hop] = links[moving]
            node[moving] = self.graph.link_dst[links[moving]]
        return paths

    def spread(self, src: Ints, dst: Ints, amounts: Floats) -> Floats:
        """Sum of `amounts` a link, shape (num_links,), if each next-hop set shared every flow evenly.

        What ECMP does on average over hashes. A flow without a path adds nothing.
        """
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
                self.graph.link_dst,
                self._switch,
                self._distance,
                self.key[dst],
                node,
                dst,
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


def _anchors(graph: Graph, dst: Ints) -> tuple[Ints, list[Ints]]:
    """Key of each destination (-1 for other nodes), and for each key the switches that its destinations hang on."""
    start, links = graph.out_links
    key = np.full(graph.num_nodes, -1, dtype=np.int64)
    known: dict[tuple[int, ...], int] = {}
    anchors: list[Ints] = []
    for node in np.unique(dst).tolist():
        near = np.unique(graph.link_dst[links[start[node] : start[node + 1]]])
        near = near[graph.is_switch[near]]
        place = tuple(near.tolist())
        if place not in known:
            known[place] = len(anchors)
            anchors.append(near)
        key[node] = known[place]
    return key, anchors


def _distances(
    start: Ints, links: Ints, link_dst: Ints, is_switch: NDArray[np.bool_], anchors: list[Ints]
) -> Distances:
    """Links from each switch to the nearest anchor of a key, shape (num_keys, num_nodes); FAR: none reached."""
    distance = np.full((len(anchors), len(is_switch)), kernels.FAR, dtype=np.int16)
    for key, roots in enumerate(anchors):
        distance[key, roots] = 0
        kernels.search(start, links, link_dst, is_switch, roots, distance[key])
    return distance

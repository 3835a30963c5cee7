"""A fabric that somebody has wired, behind `Fabric`: a `Graph`, and what follows from its cables and names.

Servers: NICs named `server/nic`; without such names the hosts on one NVSwitch (SimAI), or as many consecutive hosts as
a cluster has NICs a server. NVLink makes no flow, so cables to NVSwitches are omitted. Heights over the hosts stand
for tiers: switches of height 1 are ToRs, 2 spines, above that core. Servers whose NICs hang on the same ToRs are a ToR
set, ToRs that share spines a pod (one pod where nothing is above the spines), NICs of a server that share ToRs a rail.
Where the whole fabric needs no path that rises after it fell, none is taken after failures either. Not covered: optics,
for no format says which links share one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from netlayer.errors import ConfigError
from topology.ecmp.graph_kernels import FAR
from topology.ecmp.graph_routing import UNREACHABLE, Routes, by_ecmp
from topology.ecmp.routing import NO_LINK
from topology.fabric.graph import Graph
from topology.fabric.interface import Bools, Floats, Ints, PartKind
from topology.importers.cables import natural_key

if TYPE_CHECKING:
    from topology.ecmp.hashing import Ecmp

_NVSWITCH = "nvswitch"
_HOLE = -1
# A rail has its NICs on a ToR where they are at least this share of the most common ones there: a swapped cable or two
# do not join two rails.
_RAIL_SHARE = 0.25
_PAIRS_AT_ONCE = 1 << 22
_NAMED = 2  # ToRs of a rail


@dataclass(frozen=True, eq=False)
class ImportedFabric:
    """A `Fabric` over a graph. Where servers differ in their NICs, the numbers of missing ones are no NICs.

    Args:
        source: the graph as imported.
        graph: the same without cables to NVSwitches.
        node_of_nic: node of each NIC, server after server; -1 where a server has fewer than the others.
        nics_per_server: of the largest.
        hosts_per_server: what `of` was called with.
        grouped_by: how hosts were found to be NICs of one server, in words.
    """

    source: Graph
    graph: Graph
    node_of_nic: Ints
    nics_per_server: int
    hosts_per_server: int
    grouped_by: str

    @classmethod
    def of(cls, graph: Graph, nics_per_server: int = 1) -> ImportedFabric:
        """The fabric of a graph; `nics_per_server` counts where neither names nor NVSwitches tell servers apart.

        Raises:
            ConfigError: no host has a cable to a switch, or `nics_per_server` does not divide the hosts.
        """
        fabric, nvswitch_of = without_nvlink(graph)
        cabled = np.bincount(fabric.link_src, minlength=graph.num_nodes) > 0
        hosts = [node for node in graph.hosts.tolist() if cabled[node]]
        if not hosts:
            raise ConfigError("--fabric", None, "has no host with a cable", "give a fabric with servers")
        servers, grouped_by = _servers(graph, hosts, nvswitch_of, nics_per_server)
        width = max(map(len, servers))
        node_of_nic = np.full((len(servers), width), _HOLE, dtype=np.int64)
        for server, nodes in enumerate(servers):
            node_of_nic[server, : len(nodes)] = nodes
        return cls(graph, fabric, node_of_nic.ravel(), width, nics_per_server, grouped_by)

    # Sizes

    @property
    def num_links(self) -> int:
        return self.graph.num_links

    @property
    def num_nics(self) -> int:
        return len(self.node_of_nic)

    @property
    def num_servers(self) -> int:
        return self.num_nics // self.nics_per_server

    # Links and their tiers

    @property
    def link_src(self) -> Ints:
        return self.graph.link_src

    @property
    def link_dst(self) -> Ints:
        return self.graph.link_dst

    @property
    def link_bps(self) -> Floats:
        return self.graph.link_bps

    @cached_property
    def _heights(self) -> list[tuple[int, int]]:
        """The pairs of heights that links join, in the order in which a path meets them: up, level, down."""
        level = self.graph.level
        pairs = set(zip(level[self.link_src].tolist(), level[self.link_dst].tolist(), strict=True))
        return sorted(pairs, key=lambda pair: (np.sign(pair[0] - pair[1]), pair[0] if pair[0] <= pair[1] else -pair[0]))

    @cached_property
    def link_tier(self) -> NDArray[np.int16]:
        level, num_heights = self.graph.level, int(self.graph.level.max()) + 2
        number = np.full((num_heights, num_heights), -1, dtype=np.int16)
        for tier, (low, high) in enumerate(self._heights):
            number[low, high] = tier  # an unreached switch is at -1, the last row
        return number[level[self.link_src], level[self.link_dst]]

    @cached_property
    def tier_labels(self) -> list[str]:
        return [f"{_height_label(one)}-{_height_label(other)}" for one, other in self._heights]

    @cached_property
    def nic_tiers(self) -> list[int]:
        return [tier for tier, pair in enumerate(self._heights) if 0 in pair]

    @cached_property
    def hashed_tiers(self) -> list[int]:
        return [tier for tier, pair in enumerate(self._heights) if min(pair) > 0]

    @property
    def core_tier(self) -> int | None:
        return self._heights.index((2, 3)) if (2, 3) in self._heights else None

    @cached_property
    def cable_links(self) -> list[slice | Ints]:
        """The first link of each cable, a pair of heights at a time."""
        level = self.graph.level
        ends = np.sort(np.stack([level[self.graph.a], level[self.graph.b]]), axis=0)
        return [np.flatnonzero((pair == ends.T).all(axis=1)) for pair in np.unique(ends, axis=1).T]

    def tier_links(self, tier: int) -> Ints:
        return np.flatnonzero(self.link_tier == tier)

    def links_on(self, paths: Ints, tiers: Sequence[int]) -> Ints:
        """The paths with NO_LINK in place of the links of other tiers."""
        chosen = np.isin(self.link_tier, tiers)
        return np.where((paths != NO_LINK) & chosen[paths], paths, NO_LINK)

    # NICs

    @cached_property
    def nics(self) -> Ints:
        return np.flatnonzero(self.node_of_nic != _HOLE)

    @cached_property
    def nvswitch_of(self) -> dict[int, int]:
        """NVSwitch of each host that is on one."""
        return _nvswitches(self.source)

    @cached_property
    def nic_of_node(self) -> Ints:
        """NIC of each node, -1 for switches."""
        nic = np.full(self.graph.num_nodes, -1, dtype=np.int64)
        nic[self.node_of_nic[self.nics]] = self.nics
        return nic

    @cached_property
    def nic_bps(self) -> Floats:
        """The rate of all of a NIC's cables."""
        rates = np.bincount(self.link_src, weights=self.link_bps, minlength=self.graph.num_nodes)
        return np.where(self.node_of_nic == _HOLE, 0.0, rates[self.node_of_nic])

    def nic_nodes(self, nic: Ints) -> Ints:
        return self.node_of_nic[nic]

    @cached_property
    def server_names(self) -> list[str]:
        """The part of its first NIC's name that its NICs share: `srv7` of `srv7/eth0`."""
        first = self.node_of_nic.reshape(self.num_servers, -1)[:, 0]
        return [self.graph.names[node].partition("/")[0] for node in first.tolist()]

    def nic_name(self, nic: int) -> str:
        return self.graph.names[int(self.node_of_nic[nic])]

    def address_of(self, nic: Ints) -> NDArray[np.uint32]:
        return self.graph.address_of(self.node_of_nic[nic])

    def tor_of(self, nic: Ints) -> Ints:
        return self._routes.key[self.node_of_nic[nic]]

    def network_of(self, nic: Ints) -> Ints:
        """Number of the part of the graph that a NIC is in, in order of the parts' first NICs."""
        return _first_seen(_components(self.graph.num_nodes, self.graph.a, self.graph.b)[self.node_of_nic[self.nics]])[
            np.searchsorted(self.nics, nic)
        ]

    def hops(self, src_nic: Ints, dst_nic: Ints) -> Ints:
        return np.maximum(self._routes.hops(self.node_of_nic[src_nic], self.node_of_nic[dst_nic]), 0)

    def leaves_pod(self, src_nic: Ints, dst_nic: Ints) -> Bools:
        src, dst = (self._pod_of_nic[nic] for nic in (src_nic, dst_nic))
        return np.asarray((src != dst) & (self.hops(src_nic, dst_nic) > 0))

    # Where servers stand

    @cached_property
    def full_servers(self) -> Bools:
        """Servers with as many NICs as any: those that can hold ranks."""
        return np.asarray((self.node_of_nic.reshape(self.num_servers, -1) != _HOLE).all(axis=1))

    @cached_property
    def rail_of(self) -> Ints:
        """Rail of each NIC of a server: NICs of one rail share ToRs."""
        width, served = self.nics_per_server, self._nics_on_tor
        joined = [np.flatnonzero(row >= max(_RAIL_SHARE * row.max(), 1)) for row in served[served.any(axis=1)]]
        a = np.concatenate([one[:-1] for one in joined])
        b = np.concatenate([one[1:] for one in joined])
        return _first_seen(_components(width, a, b))

    @cached_property
    def _nics_on_tor(self) -> Ints:
        """NICs under each switch by their place in full servers, shape (num_nodes, nics_per_server)."""
        server, place = np.divmod(self.nics, self.nics_per_server)
        by_key = np.zeros((len(self._routes.anchors), self.nics_per_server), dtype=np.int64)
        np.add.at(by_key, (self.tor_of(self.nics), place), self.full_servers[server])
        counts = np.zeros((self.graph.num_nodes, self.nics_per_server), dtype=np.int64)
        for key, tors in enumerate(self._routes.anchors):
            counts[tors] += by_key[key]
        return counts

    @cached_property
    def tor_set(self) -> Ints:
        keys = np.where(self.node_of_nic == _HOLE, -1, self.tor_of(np.arange(self.num_nics)))
        return _first_seen(np.unique(keys.reshape(self.num_servers, -1), axis=0, return_inverse=True)[1].ravel())

    @cached_property
    def pod(self) -> Ints:
        pods = self._pod_of_nic.reshape(self.num_servers, -1)
        return _first_seen(np.unique(pods, axis=0, return_inverse=True)[1].ravel())

    @property
    def tor_set_width(self) -> int:
        return int(np.bincount(self.tor_set).max())

    @cached_property
    def set_distance(self) -> Floats:
        """Mean links above the NICs between ToR sets; empty where pods and ToR sets say the same."""
        first = np.unique(self.tor_set, return_index=True)[1]
        keys = self.tor_of(np.arange(self.num_nics)).reshape(self.num_servers, -1)[first]
        above = np.stack([self._routes.reach[:, anchors].min(axis=1, initial=FAR) for anchors in self._routes.anchors])
        joined = above < FAR  # rails that no switch joins have no distance
        above = np.where(joined, above, 0)
        sums, counts = np.zeros((2, len(first), len(first))), np.zeros((2, len(first), len(first)))
        for one, rail in enumerate(self.rail_of.tolist()):
            for other, other_rail in enumerate(self.rail_of.tolist()):
                if one == other or rail != other_rail:
                    pairs = keys[:, one][:, None], keys[:, other][None, :]
                    sums[int(rail != other_rail)] += above[pairs]
                    counts[int(rail != other_rail)] += joined[pairs]
        distance = sums / np.maximum(counts, 1)
        pod = self.pod[first]
        level = np.where(pod[:, None] != pod, 4.0, 2.0)
        closed = np.stack([np.where(np.eye(len(first), dtype=bool), 0.0, level), level])
        same = np.array_equal(distance[counts > 0], closed[counts > 0])
        return np.empty((2, 0, 0)) if same else distance

    @cached_property
    def _pod_of_nic(self) -> Ints:
        """Number of the switches that share spines with a NIC's ToRs; -1 where there is no NIC."""
        level, graph = self.graph.level, self.graph
        inside = (level[graph.a] > 0) & (level[graph.b] > 0)
        if (level > 2).any():
            inside &= (level[graph.a] < 3) & (level[graph.b] < 3)
        part = _components(graph.num_nodes, graph.a[inside], graph.b[inside])
        ends = np.array([part[anchors[0]] if len(anchors) else -1 for anchors in self._routes.anchors])
        return np.where(self.node_of_nic == _HOLE, -1, ends[self.tor_of(np.arange(self.num_nics))])

    # Paths

    @cached_property
    def _routes(self) -> Routes:
        """Ways to every NIC through the whole fabric."""
        return Routes(self.graph, self.node_of_nic[self.nics])

    @cached_property
    def up_down(self) -> bool:
        """Whether no path between two NICs of the whole fabric has to rise after it fell."""
        ordered = Routes(self.graph, self.node_of_nic[self.nics], up_down=True)
        tors = np.unique(np.concatenate(self._routes.anchors))
        return np.array_equal(ordered.reach[:, tors], self._routes.reach[:, tors])

    def route(self, src_nic: Ints, dst_nic: Ints, ecmp: Ecmp, alive: Bools | None = None) -> tuple[Ints, Bools]:
        """Paths as `Fabric.route` gives them: column t is the link of hop t."""
        if np.any(src_nic == dst_nic):
            raise ValueError("a flow begins and ends at one NIC")
        src, dst = self.node_of_nic[src_nic], self.node_of_nic[dst_nic]
        whole = alive is None or bool(alive.all())
        routes = self._routes if whole else Routes(self.graph, dst, alive=alive, up_down=self.up_down)
        reached = routes.hops(src, dst) != UNREACHABLE
        if whole and not reached.all():
            lost = np.flatnonzero(~reached)
            ends = f"{self.nic_name(src_nic[lost[0]])} to {self.nic_name(dst_nic[lost[0]])}"
            rule = f"{len(lost)} of {len(reached)} flows have no path in this fabric: the first from {ends}"
            raise ConfigError("--fabric", None, rule, "leave such flows out, or fix the fabric")
        paths = routes.route(src, dst, by_ecmp(ecmp))
        # As wide in every case, so that one flow's paths under several hashes can stand side by side.
        width = max(int(self.hops(src_nic, dst_nic).max(initial=2)), paths.shape[1])
        return np.pad(paths, ((0, 0), (0, width - paths.shape[1])), constant_values=NO_LINK), reached

    # Failures

    @cached_property
    def _parts(self) -> dict[PartKind, Ints]:
        """Cables, or nodes, of each kind."""
        level = self.graph.level
        ends = level[self.graph.a], level[self.graph.b]
        below, above = np.minimum(*ends), np.maximum(*ends)
        return {
            "nic-link": np.flatnonzero(below == 0),
            "tor-link": np.flatnonzero((below == 1) & (above == 2)),
            "core-link": np.flatnonzero((below >= 2) & (above > below)),
            "peer-link": np.flatnonzero((below >= 1) & (above == below)),
            "tor": np.flatnonzero(level == 1),
            "spine": np.flatnonzero(level == 2),
            "core": np.flatnonzero(level >= 3),
            "rail": np.arange(int(self.rail_of.max()) + 1),
            "optic-down": np.empty(0, dtype=np.int64),
            "optic-up": np.empty(0, dtype=np.int64),
        }

    def count(self, kind: PartKind) -> int:
        return len(self._parts[kind])

    def part_links(self, kind: PartKind, number: int) -> Ints:
        part = int(self._parts[kind][number])
        if kind.endswith("-link"):
            return np.array([part, part + self.graph.num_cables])
        nodes = np.zeros(self.graph.num_nodes, dtype=np.bool_)
        nodes[self._tors_of_rail(part) if kind == "rail" else part] = True
        return np.flatnonzero(nodes[self.link_src] | nodes[self.link_dst])

    def part_name(self, kind: PartKind, number: int) -> str:
        part = int(self._parts[kind][number])
        if kind.endswith("-link"):
            return self.graph.link_name(part).replace(" -> ", " - ")
        nodes = self._tors_of_rail(part).tolist() if kind == "rail" else [part]
        more = f" and {len(nodes) - _NAMED} more" if len(nodes) > _NAMED else ""
        return ", ".join(self.graph.names[node] for node in nodes[:_NAMED]) + more

    def find_part(self, name: str, field: str) -> list[tuple[PartKind, int]]:
        """Return the part that a device's name means, or the cables between two devices, given as A,B.

        Raises:
            ConfigError: there is none; `field` says where it was asked for.
        """
        if "," in name:
            cables = np.flatnonzero(self.graph.cables_between(name, field))
            kinds: tuple[PartKind, ...] = ("nic-link", "tor-link", "core-link", "peer-link")
        else:
            cables = np.array([self.graph.find(name, field)])
            kinds = ("tor", "spine", "core")
        parts = [(kind, int(place)) for kind in kinds for place in np.flatnonzero(np.isin(self._parts[kind], cables))]
        if not parts:
            raise ConfigError(field, name, "is no switch that a host reaches", "name a switch, or a cable as A,B")
        return parts

    def unreachable_pairs(self, alive: Bools) -> tuple[int, int]:
        total = self._joined_pairs
        return total - _count_pairs(self, Routes(self.graph, self._ends, alive=alive, up_down=self.up_down)), total

    @cached_property
    def _joined_pairs(self) -> int:
        return _count_pairs(self, self._routes)

    @property
    def _ends(self) -> Ints:
        return self.node_of_nic[self.nics]

    def _tors_of_rail(self, rail: int) -> Ints:
        """ToRs of whose NICs most are of the rail."""
        served = self._nics_on_tor
        return np.flatnonzero(served.any(axis=1) & (self.rail_of[served.argmax(axis=1)] == rail))

    # In words

    def describe(self) -> str:
        """Return one line that says what was inferred."""
        names: tuple[tuple[PartKind, str], ...] = (("tor", "ToRs"), ("spine", "spines"), ("core", "core switches"))
        switches = [f"{self.count(kind)} {label}" for kind, label in names if self.count(kind)]
        partly = self.num_servers - int(self.full_servers.sum())
        fewer = f", {partly} of them with fewer and without ranks" if partly else ""
        rails, pods = int(self.rail_of.max()) + 1, int(self.pod.max()) + 1
        return (
            f"{self.num_servers:,} servers of {self.nics_per_server} NICs ({self.grouped_by}{fewer}), "
            f"{', '.join(switches) or 'no switch'}; inferred: {int(self.tor_set.max()) + 1} ToR sets, {rails} rails, "
            f"{pods} pods" + ("" if self.up_down else "; paths may rise after they fell, as some must")
        )


def without_nvlink(graph: Graph) -> tuple[Graph, dict[int, int]]:
    """Return the graph without cables to NVSwitches, and the NVSwitch of each host that is on one."""
    nvswitch_of = _nvswitches(graph)
    return (replace(graph, **_columns(graph, ~_on_nvswitch(graph))) if nvswitch_of else graph), nvswitch_of


def _nvswitches(graph: Graph) -> dict[int, int]:
    """NVSwitch of each host: a switch of that name whose cables all go to hosts; hosts on several have the first's."""
    on = _on_nvswitch(graph)
    if not on.any():
        return {}
    part = _components(graph.num_nodes, graph.a[on], graph.b[on])
    ends = np.unique(np.concatenate([graph.a[on], graph.b[on]]))
    return {node: int(part[node]) for node in ends.tolist() if not graph.is_switch[node]}


def _on_nvswitch(graph: Graph) -> Bools:
    """A mask of the cables between hosts and NVSwitches."""
    named = np.array([name.startswith(_NVSWITCH) for name in graph.names]) & graph.is_switch
    up = np.zeros(graph.num_nodes, dtype=np.bool_)
    up[graph.link_src[graph.is_switch[graph.link_dst]]] = True  # a switch with another one: it is of the fabric
    inside = named & ~up
    return inside[graph.a] | inside[graph.b]


def _columns(graph: Graph, cables: Bools) -> dict[str, Any]:
    """The fields of a graph that are one a cable, of some cables."""
    kept = np.flatnonzero(cables)
    ports = {name: tuple(getattr(graph, name)[cable] for cable in kept.tolist()) for name in ("a_port", "b_port")}
    return {name: getattr(graph, name)[kept] for name in ("a", "b", "bps", "latency_ns")} | ports


def _servers(
    graph: Graph, hosts: Sequence[int], nvswitch_of: dict[int, int], nics_per_server: int
) -> tuple[list[list[int]], str]:
    """Nodes of each server's NICs, and by what they were told apart."""
    if nvswitch_of:
        groups: dict[Any, list[int]] = defaultdict(list)
        for node in hosts:
            groups[nvswitch_of.get(node, (node,))].append(node)
        return sorted(groups.values()), "by NVSwitch"
    ordered = sorted(hosts, key=lambda node: natural_key(graph.names[node]))
    if any("/" in graph.names[node] for node in hosts):
        groups = defaultdict(list)
        for node in ordered:
            groups[graph.names[node].partition("/")[0]].append(node)
        return list(groups.values()), "by name"
    if len(ordered) % nics_per_server:
        rule = f"must divide the {len(ordered)} hosts of --fabric, whose names do not tell servers apart"
        raise ConfigError("cluster.nics_per_server", nics_per_server, rule, "give the NICs of a server")
    servers = np.array(ordered).reshape(-1, nics_per_server).tolist()
    return servers, "a host is one" if nics_per_server == 1 else "consecutive hosts, by cluster.nics_per_server"


def _count_pairs(fabric: ImportedFabric, routes: Routes) -> int:
    """Ordered pairs of NICs of different servers that `routes` joins."""
    nodes, server = fabric.node_of_nic[fabric.nics], fabric.nics // fabric.nics_per_server
    graph = fabric.graph
    if not graph.is_switch[graph.link_dst[~graph.is_switch[graph.link_src]]].all():
        return _count_one_by_one(routes, nodes, server)  # hosts on one cable have no switch to be counted by
    key = routes.key[nodes]
    reach = [routes.reach[:, anchors].min(axis=1, initial=FAR) < FAR for anchors in routes.anchors]
    joined = np.stack(reach).astype(np.int64)  # [source's key, destination's key]
    size = np.bincount(key, minlength=len(joined))
    inside = 0
    order = np.argsort(server, kind="stable")
    for keys in np.split(key[order], np.flatnonzero(np.diff(server[order])) + 1):
        for one, number in Counter(keys.tolist()).items():
            inside += number * int(joined[one, keys].sum())
    return int(size @ joined @ size) - inside


def _count_one_by_one(routes: Routes, nodes: Ints, server: Ints) -> int:
    step = max(1, _PAIRS_AT_ONCE // max(len(nodes), 1))
    total = 0
    for first in range(0, len(nodes), step):
        some = slice(first, first + step)
        src, dst = np.repeat(nodes[some], len(nodes)), np.tile(nodes, len(nodes[some]))
        apart = np.repeat(server[some], len(nodes)) != np.tile(server, len(nodes[some]))
        total += int(((routes.hops(src, dst) != UNREACHABLE) & apart).sum())
    return total


def _components(num_nodes: int, a: Ints, b: Ints) -> Ints:
    """A number a node, the same for nodes that the pairs (a, b) join: the least of them."""
    label = np.arange(num_nodes, dtype=np.int64)
    while True:
        least = np.minimum(label[a], label[b])
        after = label.copy()
        np.minimum.at(after, a, least)
        np.minimum.at(after, b, least)
        after = after[after]
        if np.array_equal(after, label):
            return label
        label = after


def _first_seen(values: Ints) -> Ints:
    """The values numbered from 0 in the order in which they first occur."""
    _, first, place = np.unique(values, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[place.ravel()]


def _height_label(height: int) -> str:
    return "host" if height == 0 else f"switch{height}" if height > 0 else "unreached"

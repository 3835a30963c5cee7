"""Any fabric as arrays: named hosts and switches, and the cables between their ports.

A cable is two directed links: link k runs from end a to end b of cable k, link k + num_cables back. Hosts send and
receive and never relay. `Clos` is the arithmetic form of one regular fabric; this form holds what was imported, and
everything that is written out. Not covered: routes (graph_routing), LAGs as one link (each member is a cable of its
own).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netlayer.errors import ConfigError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_UNREACHED = -1


@dataclass(frozen=True, eq=False)
class Graph:
    """A fabric. Arrays over nodes are indexed by node id, arrays over cables by cable.

    Args:
        names: one a node; unique.
        is_switch: False for a host (one NIC, or all of a host where its format knows no NICs).
        a, b: node ids of a cable's two ends.
        bps, latency_ns: rate of one direction and propagation of each cable.
        a_port, b_port: port names, empty where the format has none.
        host_ip: IPv4 address of each node, 0 for switches; None where the format knows none.
    """

    names: tuple[str, ...]
    is_switch: NDArray[np.bool_]
    a: Ints
    b: Ints
    bps: Floats
    latency_ns: Floats
    a_port: tuple[str, ...]
    b_port: tuple[str, ...]
    host_ip: NDArray[np.uint32] | None = None

    @property
    def num_nodes(self) -> int:
        return len(self.names)

    @property
    def num_cables(self) -> int:
        return len(self.a)

    @property
    def num_links(self) -> int:
        """Directed links: a cable counts twice."""
        return 2 * len(self.a)

    @property
    def hosts(self) -> Ints:
        """Node ids of the hosts."""
        return np.flatnonzero(~self.is_switch)

    @cached_property
    def link_src(self) -> Ints:
        return np.concatenate([self.a, self.b])

    @cached_property
    def link_dst(self) -> Ints:
        return np.concatenate([self.b, self.a])

    @cached_property
    def link_bps(self) -> Floats:
        return np.tile(self.bps, 2)

    @cached_property
    def node_ids(self) -> dict[str, int]:
        """Node id of each name."""
        return {name: node for node, name in enumerate(self.names)}

    @cached_property
    def out_links(self) -> tuple[Ints, Ints]:
        """(start, links): the links out of node n are links[start[n]:start[n + 1]], in order of the node at their other
        end, then of link id: what a switch takes does not hang on the order of a file's lines.
        """
        start = np.zeros(self.num_nodes + 1, dtype=np.int64)
        np.cumsum(np.bincount(self.link_src, minlength=self.num_nodes), out=start[1:])
        return start, np.lexsort((self.link_dst, self.link_src))

    @cached_property
    def level(self) -> Ints:
        """Height over the hosts: 0 a host, 1 a switch with a host below, and so on; -1 where no host is reached."""
        level = np.where(self.is_switch, _UNREACHED, 0).astype(np.int64)
        height = 0
        while True:
            next_nodes = self.link_dst[level[self.link_src] == height]
            next_nodes = next_nodes[level[next_nodes] == _UNREACHED]
            if not len(next_nodes):
                return level
            height += 1
            level[next_nodes] = height

    @cached_property
    def addresses(self) -> NDArray[np.uint32]:
        """An IPv4 address a node, for hashes; where none is known 11.x.y.1, as HPCC's simulator gives them."""
        if self.host_ip is not None:
            return self.host_ip
        node = np.arange(self.num_nodes, dtype=np.int64)
        return (0x0B00_0001 + (node // 256 << 16) + (node % 256 << 8)).astype(np.uint32)

    def address_of(self, node: Ints) -> NDArray[np.uint32]:
        """The addresses of nodes, as `Clos.address_of` gives them of NICs."""
        return np.asarray(self.addresses[node])

    def nic_nodes(self, nic: Ints) -> Ints:
        """The nodes themselves, by which flows over a graph name their hosts."""
        return nic

    def link_name(self, link: int) -> str:
        """`leaf1:Ethernet0 -> spine2:Ethernet8`; ports only where they are known."""
        cable = link % self.num_cables
        ends = [
            _end(self.names[self.a[cable]], self.a_port[cable]),
            _end(self.names[self.b[cable]], self.b_port[cable]),
        ]
        return " -> ".join(ends if link < self.num_cables else ends[::-1])

    def find(self, name: str, field: str) -> int:
        """The node of this name.

        Raises:
            ConfigError: there is none; `field` says where it was asked for.
        """
        node = self.node_ids.get(name)
        if node is None:
            rule = f"is no device of this fabric of {self.num_nodes} devices"
            raise ConfigError(field, name, rule, f"names look like {self.names[0]}, {self.names[-1]}")
        return node

    def cables_between(self, link: str, field: str) -> NDArray[np.bool_]:
        """Return a mask of the cables that join two devices, by their names as A,B; shape (num_cables,).

        Raises:
            ConfigError: there is none; `field` says where it was asked for.
        """
        ends = [name.strip() for name in link.split(",")]
        if len(ends) != 2:
            raise ConfigError(field, link, "is no pair of names", "give A,B")
        one, other = (self.find(name, field) for name in ends)
        joins = ((self.a == one) & (self.b == other)) | ((self.a == other) & (self.b == one))
        if not joins.any():
            near = np.unique(np.concatenate([self.b[self.a == one], self.a[self.b == one]]))
            remedy = f"cables of {ends[0]} go to {', '.join(self.names[node] for node in near[:8].tolist())}"
            raise ConfigError(field, link, "is no cable of this fabric", remedy)
        return np.asarray(joins)


def checked(graph: Graph, source: object) -> Graph:
    """The graph, once it is certain that it can be wired; `source` is the file or folder that errors name.

    Raises:
        ConfigError: no cable, two devices of one name, a cable from a device to itself, two cables in one port, a rate
            that is not positive, or a device without any cable.
    """
    if not graph.num_cables:
        raise ConfigError("fabric", source, "has no link", "give files that describe at least one cable")
    if len(graph.node_ids) != graph.num_nodes:
        twice = next(name for name in graph.names if graph.names.count(name) > 1)
        raise ConfigError("fabric", source, f"has two devices of the name {twice}", "rename one of them")
    loops = np.flatnonzero(graph.a == graph.b)
    if len(loops):
        rule = f"link {graph.link_name(int(loops[0]))} begins and ends at one device"
        raise ConfigError("fabric", source, rule, "remove it")
    if not (np.isfinite(graph.bps) & (graph.bps > 0)).all():
        slow = int(np.flatnonzero(~(graph.bps > 0) | ~np.isfinite(graph.bps))[0])
        raise ConfigError("fabric", source, f"link {graph.link_name(slow)} has no rate", "give its rate")
    _check_ports(graph, source)
    cabled = np.bincount(graph.link_src, minlength=graph.num_nodes)
    if not cabled.all():
        alone = np.flatnonzero(cabled == 0)
        rule = f"{len(alone)} devices have no link, the first is {graph.names[alone[0]]}"
        raise ConfigError("fabric", source, rule, "remove them, or add their links")
    return graph


def describe(graph: Graph) -> list[dict[str, Any]]:
    """One row a level: devices, links upwards and their rates, capacity upwards, ports in use."""
    level = graph.level
    rows: list[dict[str, Any]] = []
    used = np.bincount(graph.link_src, minlength=graph.num_nodes)
    rise = level[graph.link_dst] > level[graph.link_src]
    for height in np.unique(level).tolist():
        nodes = level == height
        up = rise & nodes[graph.link_src]
        rates = graph.link_bps[up]
        rows.append(
            {
                "level": "host" if height == 0 else f"switch {height}" if height > 0 else "switch, no host reached",
                "count": int(nodes.sum()),
                "ports_min": int(used[nodes].min()),
                "ports_max": int(used[nodes].max()),
                "up_links": int(up.sum()),
                "up_link_bps_min": float(rates.min()) if len(rates) else 0.0,
                "up_link_bps_max": float(rates.max()) if len(rates) else 0.0,
                "up_bps": float(rates.sum()),
            }
        )
    return rows


def parallel_pairs(graph: Graph) -> tuple[int, int]:
    """(pairs of devices with several cables, the cables of the widest)."""
    ends = np.sort(np.stack([graph.a, graph.b]), axis=0)
    _, counts = np.unique(ends, axis=1, return_counts=True)
    return int((counts > 1).sum()), int(counts.max())


def _end(name: str, port: str) -> str:
    return f"{name}:{port}" if port else name


def _check_ports(graph: Graph, source: object) -> None:
    owners: dict[tuple[int, str], int] = {}
    for nodes, ports in ((graph.a, graph.a_port), (graph.b, graph.b_port)):
        for cable, (node, port) in enumerate(zip(nodes.tolist(), ports, strict=True)):
            other = owners.setdefault((node, port), cable) if port else cable
            if other != cable:
                rule = f"{graph.link_name(cable)} and {graph.link_name(other)} share the port {port} of "
                raise ConfigError("fabric", source, rule + graph.names[node], "remove the link that is not there")

"""The fabric as it stands in the hall: every variant with names, ports and cables, ready to be written out.

A plant is one `Clos`, or in a rail-only network one `Clos` a rail: there no switch joins two rails, and traffic
between them crosses NVLink inside a server (Wang et al., Rail-only, 2023). Each part is a `Clos` of its own, so
routing and load work on it unchanged. Left out: where racks stand and how long a cable is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from netlayer.config import ClusterConfig
from topology.clos import Clos, Ints, Tier
from topology.graph import Graph, join

# Propagation and forwarding of one link where nothing is known: what HPCC and htsim take.
LATENCY_NS = 1000.0


@dataclass(frozen=True, eq=False)
class Plant:
    """The parts of a fabric; `rail_only` says that each is one rail."""

    cluster: ClusterConfig
    parts: tuple[Clos, ...]
    rail_only: bool

    @classmethod
    def build(cls, cluster: ClusterConfig, *, rail_only: bool = False) -> Plant:
        """The plant of `cluster`; with `rail_only` its rails share no switch.

        Raises:
            ConfigError: see `design.plan`.
        """
        if not rail_only:
            return cls(cluster, (Clos.build(cluster),), rail_only=False)
        return cls(cluster, (Clos.build(rail_cluster(cluster)),) * cluster.rails, rail_only=True)

    @property
    def variant(self) -> str:
        """What a network engineer calls it."""
        tiers = f"{self.cluster.tiers}-tier"
        if self.rail_only:
            return f"rail-only, {self.cluster.rails} rails of {tiers} CLOS"
        return f"{tiers} CLOS, rail-optimised" if self.cluster.rails > 1 else f"{tiers} CLOS"

    @property
    def num_nics(self) -> int:
        return sum(part.design.num_nics for part in self.parts)

    def nic_of(self, rail: int) -> Ints:
        """The NIC of the whole cluster (server * nics_per_server + n) behind each NIC of part `rail`."""
        nic = np.arange(self.parts[rail].design.num_nics, dtype=np.int64)
        if not self.rail_only:
            return nic
        server, local = np.divmod(nic, self.parts[rail].design.nics_per_server)
        return np.asarray(server * self.cluster.nics_per_server + rail + local * self.cluster.rails)

    def graph(self) -> Graph:
        """All parts as one graph; of a single `Clos` it keeps the node ids, and cable k is its upward link k."""
        return join([self._part_graph(index) for index in range(len(self.parts))])

    def _part_graph(self, index: int) -> Graph:
        part = self.parts[index]
        up = part.num_links // 2
        a_port, b_port = ports(part, self.nic_of(index), self.cluster.nics_per_server)
        return Graph(
            names=tuple(self._names(index)),
            is_switch=np.arange(part.num_nodes) >= part.design.num_nics,
            a=part.link_src[:up],
            b=part.link_dst[:up],
            bps=part.link_bps[:up],
            latency_ns=np.full(up, LATENCY_NS),
            a_port=tuple(a_port),
            b_port=tuple(b_port),
        )

    def _names(self, index: int) -> list[str]:
        """One a node: `srv0007/nic3`, `tor-s04-r3` (set, rail), `spine-p1-05` (pod, plane), `core-05-2`."""
        design = self.parts[index].design
        prefix = f"r{index}-" if self.rail_only else ""
        server, local = np.divmod(self.nic_of(index), self.cluster.nics_per_server)
        tor_set, rail = np.divmod(np.arange(design.num_tors), design.rails)
        pod, plane = np.divmod(np.arange(design.num_spines), design.spines_per_pod)
        core_plane, core = np.divmod(np.arange(design.num_cores), max(design.cores_per_plane, 1))
        return [
            *(f"srv{one:04d}/nic{nic}" for one, nic in zip(server.tolist(), local.tolist(), strict=True)),
            *(f"tor-s{one:02d}-r{other + index}" for one, other in zip(tor_set.tolist(), rail.tolist(), strict=True)),
            *(f"{prefix}spine-p{one}-{other:02d}" for one, other in zip(pod.tolist(), plane.tolist(), strict=True)),
            *(f"{prefix}core-{one:02d}-{other}" for one, other in zip(core_plane.tolist(), core.tolist(), strict=True)),
        ]


def rail_cluster(cluster: ClusterConfig) -> ClusterConfig:
    """One rail of a rail-only network as a cluster of its own: every server with the NICs of that rail."""
    nics = cluster.nics_per_server // cluster.rails
    return cluster.model_copy(update={"nics_per_server": nics, "rails": 1, "name": f"{cluster.name}, one rail"})


def ports(part: Clos, nic: Ints, nics_per_server: int) -> tuple[list[str], list[str]]:
    """Port of each upward link at its lower and its upper end, as printed on a switch: `7`, or `7/2` for part 2 of 7.

    A switch counts its ports from 1: first those that face down, then those that face up. Those down go to the devices
    below in order, those up to the devices above in order.
    """
    design = part.design
    lower = [_numbered(nic % nics_per_server, 1, 0)]
    upper = [_numbered(_order_under_tor(part), design.lanes_per_port, 0)]

    tor, uplink = np.divmod(np.arange(_count(part, Tier.TOR_SPINE)), max(design.tor_uplinks, 1))
    lanes, parallel = design.uplink_lanes, design.links_per_tor_spine
    lower.append(_numbered(uplink, lanes, design.tor_ports_down))
    upper.append(_numbered(tor % design.tors_per_pod * parallel + uplink % parallel, lanes, 0))

    spine, uplink = np.divmod(np.arange(_count(part, Tier.SPINE_CORE)), max(design.spine_uplinks, 1))
    parallel = max(design.links_per_spine_core, 1)
    lower.append(_numbered(uplink, 1, design.spine_ports_down))
    upper.append(_numbered(spine // design.spines_per_pod * parallel + uplink % parallel, 1, 0))
    return _labels(lower, [False, lanes > 1, False]), _labels(upper, [design.lanes_per_port > 1, lanes > 1, False])


def _order_under_tor(part: Clos) -> Ints:
    """The place of each NIC among those of its ToR: by server, then by NIC."""
    design = part.design
    server, local = np.divmod(np.arange(design.num_nics, dtype=np.int64), design.nics_per_server)
    under = design.nics_per_server // design.rails
    return np.asarray(server % design.servers_per_tor_set * under + local // design.rails)


def _numbered(place: Ints, lanes: int, before: int) -> tuple[Ints, Ints]:
    """(port, lane), both from 1, of the place-th link behind `before` ports."""
    return before + place // lanes + 1, place % lanes + 1


def _labels(tiers: list[tuple[Ints, Ints]], broken_out: list[bool]) -> list[str]:
    labels: list[str] = []
    for (port, lane), broken in zip(tiers, broken_out, strict=True):
        if broken:
            labels += [f"{one}/{other}" for one, other in zip(port.tolist(), lane.tolist(), strict=True)]
        else:
            labels += [str(one) for one in port.tolist()]
    return labels


def _count(part: Clos, tier: Tier) -> int:
    links = part.tier_links(tier)
    return int(links.stop) - int(links.start)

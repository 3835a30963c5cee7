"""The fabric as it is installed: every variant with names, ports and cables, ready to be written out.

Not covered: where racks stand and how long a cable is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from netlayer.config.tree import ClusterConfig
from topology.fabric.clos import Clos, Ints, Tier, nic_name
from topology.fabric.graph import Graph

__all__ = ["LATENCY_NS", "CablePlan", "nic_name", "ports"]

# Propagation and forwarding of one link where nothing is known: what HPCC and htsim take.
LATENCY_NS = 1000.0


@dataclass(frozen=True, eq=False)
class CablePlan:
    """A cluster's fabric, and the cluster that it was planned from."""

    cluster: ClusterConfig
    fabric: Clos

    @classmethod
    def build(cls, cluster: ClusterConfig, *, rail_only: bool = False) -> CablePlan:
        """The plant of `cluster`; `rail_only` is `cluster.rail_only` for one that does not say it.

        Raises:
            ConfigError: see `design.plan`.
        """
        if rail_only:
            cluster = cluster.model_copy(update={"rail_only": True})
        return cls(cluster, Clos.build(cluster))

    @property
    def variant(self) -> str:
        """Name that a network engineer uses for it."""
        tiers = f"{self.cluster.tiers}-tier"
        if self.cluster.rail_only:
            return f"rail-only, {self.cluster.rails} rails of {tiers} CLOS"
        return f"{tiers} CLOS, rail-optimised" if self.cluster.rails > 1 else f"{tiers} CLOS"

    def graph(self) -> Graph:
        """The same fabric as a graph: its nodes keep their ids, and cable k is upward link k."""
        fabric = self.fabric
        up = fabric.num_links // 2
        a_port, b_port = ports(fabric)
        host_ip = np.zeros(fabric.num_nodes, dtype=np.uint32)
        host_ip[: fabric.design.num_nics] = fabric.address_of(np.arange(fabric.design.num_nics))
        return Graph(
            names=tuple(self._names()),
            is_switch=np.arange(fabric.num_nodes) >= fabric.design.num_nics,
            a=fabric.link_src[:up],
            b=fabric.link_dst[:up],
            bps=fabric.link_bps[:up],
            latency_ns=np.full(up, LATENCY_NS),
            a_port=tuple(a_port),
            b_port=tuple(b_port),
            host_ip=host_ip,
        )

    def _names(self) -> list[str]:
        """One a node: `srv0007/nic3`, `tor-s04-r3` (set, rail), `spine-p1-05` (pod, plane), `core-05-2`.

        In a rail-only network spines and core switches begin with their rail: `r3-spine-p1-05`.
        """
        design = self.fabric.design
        nics = [nic_name(nic, design.nics_per_server) for nic in range(design.num_nics)]
        tors = [""] * design.num_tors
        for rail in range(design.rails):
            for tor_set, tor in enumerate(self.fabric.tors_of_rail(rail).tolist()):
                tors[tor] = f"tor-s{tor_set:02d}-r{rail}"
        spines, cores = [], []
        for network in range(design.num_networks):
            prefix = f"r{network}-" if design.num_networks > 1 else ""
            for pod in range(design.pods_per_network):
                spines += [f"{prefix}spine-p{pod}-{plane:02d}" for plane in range(design.spines_per_pod)]
            for plane in range(design.spines_per_pod):
                cores += [f"{prefix}core-{plane:02d}-{core}" for core in range(design.cores_per_plane)]
        return [*nics, *tors, *spines, *cores]


def ports(fabric: Clos) -> tuple[list[str], list[str]]:
    """Port of each upward link at its lower and its upper end, as printed on a switch: `7`, or `7/2` for part 2 of 7.

    A switch counts its ports from 1: first those that face down, then those that face up. Those down go to the devices
    below in order, those up to the devices above in order.
    """
    design = fabric.design
    lower = [_numbered(np.arange(design.num_nics) % design.nics_per_server, 1, 0)]
    upper = [_numbered(_order_under_tor(fabric), design.lanes_per_port, 0)]

    tor, uplink = np.divmod(np.arange(_count(fabric, Tier.TOR_SPINE)), max(design.tor_uplinks, 1))
    lanes, parallel = design.uplink_lanes, design.links_per_tor_spine
    lower.append(_numbered(uplink, lanes, design.tor_ports_down))
    upper.append(_numbered(tor % design.tors_per_pod * parallel + uplink % parallel, lanes, 0))

    spine, uplink = np.divmod(np.arange(_count(fabric, Tier.SPINE_CORE)), max(design.spine_uplinks, 1))
    parallel = max(design.links_per_spine_core, 1)
    lower.append(_numbered(uplink, 1, design.spine_ports_down))
    pod = spine // design.spines_per_pod % design.pods_per_network
    upper.append(_numbered(pod * parallel + uplink % parallel, 1, 0))
    return _labels(lower, [False, lanes > 1, False]), _labels(upper, [design.lanes_per_port > 1, lanes > 1, False])


def _order_under_tor(fabric: Clos) -> Ints:
    """The place of each NIC among those of its ToR: by server, then by NIC."""
    design = fabric.design
    server, local = np.divmod(np.arange(design.num_nics, dtype=np.int64), design.nics_per_server)
    under = design.nics_per_server // design.rails
    return np.asarray(server % design.servers_per_tor_set * under + local // design.rails)


def _numbered(place: Ints, lanes: int, before: int) -> tuple[Ints, Ints]:
    """Return (port, lane), both from 1, of the place-th link after `before` ports."""
    return before + place // lanes + 1, place % lanes + 1


def _labels(tiers: list[tuple[Ints, Ints]], broken_out: list[bool]) -> list[str]:
    labels: list[str] = []
    for (port, lane), broken in zip(tiers, broken_out, strict=True):
        if broken:
            labels += [f"{one}/{other}" for one, other in zip(port.tolist(), lane.tolist(), strict=True)]
        else:
            labels += [str(one) for one in port.tolist()]
    return labels


def _count(fabric: Clos, tier: Tier) -> int:
    links = fabric.tier_links(tier)
    return int(links.stop) - int(links.start)

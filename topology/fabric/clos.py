"""The fabric as arrays: NICs, ToRs, spines and core switches, and every directed link between them.

Nodes and links are integers in closed form, so a path is arithmetic and no dictionary grows with the cluster: links of
one tier are consecutive, and inside a tier ordered by the lower switch, then by its uplink. Not covered: which uplink a
flow takes (routing), and links inside a server.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from netlayer.config.tree import ClusterConfig
from netlayer.errors import ConfigError
from topology.fabric.design import Design, plan
from topology.fabric.interface import Bools, Floats, PartKind

if TYPE_CHECKING:
    from topology.ecmp.hashing import Ecmp

logger = logging.getLogger(__name__)

Ints = NDArray[np.int64]


class Tier(IntEnum):
    """Tiers of directed links, in the order in which a path crosses them."""

    NIC_TOR = 0
    TOR_SPINE = 1
    SPINE_CORE = 2
    CORE_SPINE = 3
    SPINE_TOR = 4
    TOR_NIC = 5

    @property
    def label(self) -> str:
        """`tor-spine`: from, to."""
        return self.name.lower().replace("_", "-")


# Tiers whose links a hash chooses.
HASHED_TIERS = (Tier.TOR_SPINE, Tier.SPINE_CORE, Tier.CORE_SPINE, Tier.SPINE_TOR)
_CABLES: dict[PartKind, tuple[Tier, Tier]] = {
    "nic-link": (Tier.NIC_TOR, Tier.TOR_NIC),
    "tor-link": (Tier.TOR_SPINE, Tier.SPINE_TOR),
    "core-link": (Tier.SPINE_CORE, Tier.CORE_SPINE),
}


@dataclass(frozen=True, eq=False)
class Clos:
    """A planned fabric, a `Fabric`. Arrays over links are indexed by link id; `link_src` and `link_dst` hold node ids.

    NIC n of server s is node s * nics_per_server + n; ToRs, spines and core switches follow. ToRs count by set, then
    rail; spines by pod, then plane; core switches by plane; in a rail-only network all of them by rail first. The
    methods below take and give such indices, each kind from 0, as arrays of any one shape; `*_nodes` give node ids.
    """

    design: Design
    link_src: Ints
    link_dst: Ints
    link_bps: Floats
    link_tier: NDArray[np.int8]
    tier_start: Ints

    @classmethod
    def build(cls, cluster: ClusterConfig) -> Clos:
        """The fabric of `cluster`.

        Raises:
            ConfigError: see `design.plan`.
        """
        design = plan(cluster)
        if cluster.aoc_split and design.lanes_per_port == 1:
            logger.warning("cluster.aoc_split has no effect: a NIC is as fast as a switch port")
        up = [_nic_links(design), _tor_links(design), _spine_links(design)]
        # Tier t is the mirror of tier 5 - t, link by link: `nic_link`, `tor_link` and `spine_link` need one formula for
        # both directions.
        down = [(upper, lower) for lower, upper in reversed(up)]
        sizes = [len(src) for src, _ in up + down]
        rates = [design.nic_bps, design.tor_uplink_bps, design.spine_uplink_bps]
        return cls(
            design=design,
            link_src=np.concatenate([src for src, _ in up + down]),
            link_dst=np.concatenate([dst for _, dst in up + down]),
            link_bps=np.repeat(np.array(rates + rates[::-1], dtype=np.float64), sizes),
            link_tier=np.repeat(np.arange(len(Tier), dtype=np.int8), sizes),
            # An entry more than tiers: the last tier too ends where the next one would begin.
            tier_start=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        )

    @property
    def num_links(self) -> int:
        """Directed links: a cable counts twice."""
        return len(self.link_src)

    @property
    def num_nodes(self) -> int:
        return _first_core(self.design) + self.design.num_cores

    @property
    def bisection_bps(self) -> float:
        """Capacity from one half of the servers to the other, one direction; of an odd number, the smaller half's."""
        # One half has half of a tier's links, so a tier gives half of its capacity. That is the division at the end;
        # the NICs' figure is of one half already, and is doubled for it.
        wide = [2 * self.half_of_nics_bps]
        if self.design.num_tor_sets > 1:  # under one set every rail reaches every server below its spines
            wide.append(self.tier_bps(Tier.TOR_SPINE))
        if self.design.pods_per_network > 1:
            wide.append(self.tier_bps(Tier.SPINE_CORE))
        return min(wide) / 2

    @property
    def half_of_nics_bps(self) -> float:
        """Rate at which the NICs of half the servers, rounded down, can send; of a single server half its NICs."""
        servers = self.design.num_servers
        # Of three servers one faces two, and neither side gets more than that one's NICs: a third, not half.
        share = 0.5 if servers == 1 else servers // 2 / servers
        return self.tier_bps(Tier.NIC_TOR) * share

    @property
    def num_nics(self) -> int:
        return self.design.num_nics

    @property
    def num_servers(self) -> int:
        return self.design.num_servers

    @property
    def nics_per_server(self) -> int:
        return self.design.nics_per_server

    @property
    def tier_labels(self) -> list[str]:
        return [tier.label for tier in Tier]

    @property
    def nic_tiers(self) -> tuple[Tier, ...]:
        return Tier.NIC_TOR, Tier.TOR_NIC

    @property
    def hashed_tiers(self) -> tuple[Tier, ...]:
        return HASHED_TIERS

    @property
    def core_tier(self) -> Tier:
        return Tier.SPINE_CORE

    @property
    def cable_links(self) -> list[slice | Ints]:
        """The upward links, tier by tier."""
        return [self.tier_links(tier) for tier in (Tier.NIC_TOR, Tier.TOR_SPINE, Tier.SPINE_CORE)]

    def tier_links(self, tier: int) -> slice:
        """The links of one tier."""
        return slice(int(self.tier_start[tier]), int(self.tier_start[tier + 1]))

    def links_on(self, paths: Ints, tiers: Sequence[int]) -> Ints:
        """The columns of these tiers: `route` gives every tier its own."""
        return paths[..., list(tiers)]

    @property
    def nics(self) -> Ints:
        return np.arange(self.design.num_nics, dtype=np.int64)

    @cached_property
    def nic_bps(self) -> Floats:
        return np.full(self.design.num_nics, self.design.nic_bps, dtype=np.float64)

    @property
    def rail_of(self) -> Ints:
        return np.arange(self.design.nics_per_server, dtype=np.int64) % self.design.rails

    def nic_nodes(self, nic: Ints) -> Ints:
        """The NICs themselves: nodes begin with them."""
        return nic

    def nic_name(self, nic: int) -> str:
        return nic_name(nic, self.design.nics_per_server)

    @property
    def full_servers(self) -> Bools:
        return np.ones(self.design.num_servers, dtype=np.bool_)

    @cached_property
    def tor_set(self) -> Ints:
        return np.arange(self.design.num_servers, dtype=np.int64) // self.design.servers_per_tor_set

    @cached_property
    def pod(self) -> Ints:
        """Pod of each server, in each of the networks."""
        return self.tor_set // self.design.tor_sets_per_pod

    @property
    def tor_set_width(self) -> int:
        return self.design.servers_per_tor_set

    @property
    def set_distance(self) -> Floats:
        return np.empty((2, 0, 0))

    def tier_bps(self, tier: int) -> float:
        """Capacity of one tier, all its links together."""
        return float(self.link_bps[self.tier_links(tier)].sum())

    def tor_of(self, nic: Ints) -> Ints:
        """The ToR that a NIC hangs on: its server's set, its own rail."""
        return _tor_of(self.design, nic)

    def tors_of_rail(self, rail: int) -> Ints:
        """All ToRs of a rail, in order of their sets."""
        return _tor(self.design, np.arange(self.design.num_tor_sets, dtype=np.int64), rail)

    def network_of(self, nic: Ints) -> Ints:
        """Return the index of a NIC's network, of those that no switch joins: its rail if rail-only, else 0."""
        # There are as many networks as rails, or one: the same remainder is the rail, or 0.
        return np.asarray(nic % self.design.nics_per_server % self.design.num_networks)

    def check_joined(self, src_nic: Ints, dst_nic: Ints) -> None:
        """Refuse flows between networks that no switch joins.

        Raises:
            ConfigError: in a rail-only network a flow would cross from rail to rail.
        """
        apart = np.flatnonzero(self.network_of(src_nic) != self.network_of(dst_nic))
        if len(apart):
            rule = (
                f"{len(apart)} of {len(src_nic)} flows would cross from rail to rail, which no switch joins: the first "
                f"from NIC {src_nic[apart[0]]} to NIC {dst_nic[apart[0]]}"
            )
            remedy = "keep flows on their rail (NVLink crosses it), or set cluster.rail_only = false"
            raise ConfigError("cluster.rail_only", "true", rule, remedy)

    def pod_of(self, tor: Ints) -> Ints:
        """The pod of a ToR."""
        # In both numberings, by set and by rail first, the ToRs of a pod are consecutive.
        return tor // self.design.tors_per_pod

    def address_of(self, nic: Ints) -> NDArray[np.uint32]:
        """IPv4 address of a NIC: the odd one of its server's pair of addresses in 10.<NIC of the server>.0.0/16.

        The even one is that of the ToR's port, so that every port is a subnet of its own (/31, RFC 3021).
        """
        server, local = np.divmod(nic, self.design.nics_per_server)
        # Two bytes hold the pairs of 32,768 servers, which is why `design.plan` takes no more.
        return np.asarray(10 << 24 | local << 16 | 2 * server + 1, dtype=np.uint32)

    def hops(self, src_nic: Ints, dst_nic: Ints) -> Ints:
        """Links of a path: 2 under one ToR, 4 inside a pod, 6 through the core; 0 to itself, or where there is none."""
        src_tor, dst_tor = self.tor_of(src_nic), self.tor_of(dst_nic)
        src_pod, dst_pod = self.pod_of(src_tor), self.pod_of(dst_tor)
        joined = src_pod // self.design.pods_per_network == dst_pod // self.design.pods_per_network
        # Each level at which the ends differ (NIC, ToR, pod) costs a link up and one down.
        turns = (src_nic != dst_nic).astype(np.int64) + (src_tor != dst_tor)
        return np.asarray(2 * joined * (turns + (src_pod != dst_pod)))

    def leaves_pod(self, src_nic: Ints, dst_nic: Ints) -> Bools:
        """Whether the path goes through the core."""
        return np.asarray(self.hops(src_nic, dst_nic) == len(Tier))

    def route(self, src_nic: Ints, dst_nic: Ints, ecmp: Ecmp, alive: Bools | None = None) -> tuple[Ints, Bools]:
        """Paths as `Fabric.route` gives them: column t is the flow's link of `Tier` t."""
        # Imported on use: both modules compute with this one.
        from topology.ecmp.routing import route
        from topology.failures.survivors import route_around

        if alive is None or alive.all():
            return route(self, src_nic, dst_nic, ecmp), np.ones(len(src_nic), dtype=np.bool_)
        return route_around(self, src_nic, dst_nic, ecmp, alive)

    def unreachable_pairs(self, alive: Bools) -> tuple[int, int]:
        """Ordered pairs of NICs of different servers with no path, and all that the whole fabric joins."""
        from topology.failures.survivors import unreachable_pairs

        return unreachable_pairs(self, alive)

    def count(self, kind: PartKind) -> int:
        """Return the number of parts of a kind."""
        design = self.design
        if kind in _CABLES:
            return self._count_links(_CABLES[kind][0])
        counts: dict[PartKind, int] = {
            "optic-down": int(_filled_ports(self).sum()),
            "optic-up": design.num_tors * design.tor_ports_up,
            "tor": design.num_tors,
            "spine": design.num_spines,
            "core": design.num_cores,
            "rail": design.rails,
            "peer-link": 0,
        }
        return counts[kind]

    def part_links(self, kind: PartKind, number: int) -> Ints:
        """Directed links that die with a part; an optic is one port of a ToR, with every lane of it."""
        if kind == "optic-down":
            return self._cables("nic-link", _port_nics(self, number))
        if kind == "optic-up":
            return self._cables("tor-link", _port_uplinks(self, number))
        if kind in _CABLES:
            return self._cables(kind, np.array([number]))
        if kind == "rail":
            nodes = self.tor_nodes(self.tors_of_rail(number))
        else:
            by_kind = {"tor": self.tor_nodes, "spine": self.spine_nodes, "core": self.core_nodes}
            nodes = by_kind[kind](np.array([number]))
        dead = np.zeros(self.num_nodes, dtype=np.bool_)
        dead[nodes] = True
        return np.flatnonzero(dead[self.link_src] | dead[self.link_dst])

    def part_name(self, _kind: PartKind, _number: int, /) -> str:
        """Empty: its kind and number are what a part of a plan is known by."""
        return ""

    def tor_nodes(self, tor: Ints) -> Ints:
        return tor + self.design.num_nics

    def spine_nodes(self, spine: Ints) -> Ints:
        return spine + _first_spine(self.design)

    def core_nodes(self, core: Ints) -> Ints:
        return core + _first_core(self.design)

    def core_of(self, spine: Ints, core: Ints) -> Ints:
        """Return the number among all core switches of the `core`-th that a spine reaches."""
        return _core_of(self.design, spine, core)

    def nic_link(self, nic: Ints, tier: Tier) -> Ints:
        """The link between a NIC and its ToR; `tier` gives the direction."""
        return nic + int(self.tier_start[tier])

    def tor_link(self, tor: Ints, uplink: Ints, tier: Tier) -> Ints:
        """The link between a ToR and a spine; uplink u goes to spine u // links_per_tor_spine of the pod."""
        return tor * self.design.tor_uplinks + uplink + int(self.tier_start[tier])

    def spine_link(self, spine: Ints, uplink: Ints, tier: Tier) -> Ints:
        """The link between a spine and the core; uplink u goes to core u // links_per_spine_core of the plane."""
        return spine * self.design.spine_uplinks + uplink + int(self.tier_start[tier])

    def describe(self) -> list[dict[str, Any]]:
        """One row a level: how many, ports of each, links and capacity upwards, hops of a path that turns there."""
        design = self.design
        # From below, so that a row's place is its height. Of a level: name, count, ports in all, down and up, and the
        # tier of its uplinks. A server's ports are its NICs, and all of them face up.
        ports = (
            ("server", design.num_servers, design.nics_per_server, 0, design.nics_per_server, Tier.NIC_TOR),
            ("tor", design.num_tors, design.radix, design.tor_ports_down, design.tor_ports_up, Tier.TOR_SPINE),
            ("spine", design.num_spines, design.radix, design.spine_ports_down, design.spine_ports_up, Tier.SPINE_CORE),
            ("core", design.num_cores, design.radix, design.core_ports, 0, None),
        )
        return [
            {
                "level": level,
                "count": count,
                "ports_down": down,
                "ports_up": up,
                "ports_left": radix - down - up,
                "up_links": self._count_links(tier),
                "up_link_bps": self._link_rate(tier),
                "up_bps": self.tier_bps(tier) if tier is not None else 0.0,
                "path_hops": 2 * height,
            }
            for height, (level, count, radix, down, up, tier) in enumerate(ports)
            if count
        ]

    def summary(self) -> dict[str, Any]:
        """The whole in one row."""
        design = self.design
        return {
            "servers": design.num_servers,
            "nics": design.num_nics,
            "tor_sets": design.num_tor_sets,
            "rails": design.rails,
            "pods": design.num_pods,
            "switches": design.num_tors + design.num_spines + design.num_cores,
            "links": self.num_links,
            "bisection_bps": self.bisection_bps,
        }

    def _cables(self, kind: PartKind, index: Ints) -> Ints:
        """Both links of the cables at these places of their tier."""
        return np.concatenate([index + int(self.tier_start[tier]) for tier in _CABLES[kind]])

    def _count_links(self, tier: Tier | None) -> int:
        return 0 if tier is None else int(self.tier_start[tier + 1] - self.tier_start[tier])

    def _link_rate(self, tier: Tier | None) -> float:
        # A tier has one rate, so its first link stands for all; in two tiers the core's tiers have no first link.
        return 0.0 if tier is None or not self._count_links(tier) else float(self.link_bps[self.tier_start[tier]])


def nic_name(nic: int, nics_per_server: int) -> str:
    """`srv0007/nic3`."""
    server, local = divmod(nic, nics_per_server)
    return f"srv{server:04d}/nic{local}"


def _first_spine(design: Design) -> int:
    return design.num_nics + design.num_tors


def _first_core(design: Design) -> int:
    return _first_spine(design) + design.num_spines


def _tor(design: Design, tor_set: Ints, rail: Ints | int) -> Ints:
    # Rail by rail where each rail has its own network: then a pod's ToRs are consecutive there too, see `pod_of`.
    by_rail = rail * design.num_tor_sets + tor_set
    return np.asarray(by_rail if design.num_networks > 1 else tor_set * design.rails + rail)


def _tor_of(design: Design, nic: Ints) -> Ints:
    server, local = np.divmod(nic, design.nics_per_server)
    return _tor(design, server // design.servers_per_tor_set, local % design.rails)


def _core_of(design: Design, spine: Ints, core: Ints) -> Ints:
    network = spine // (design.spines_per_pod * design.pods_per_network)
    # Spines count by pod, then plane: the remainder is the plane in its network. Another network has other core
    # switches, so its planes count on.
    plane = network * design.spines_per_pod + spine % design.spines_per_pod
    return np.asarray(plane * design.cores_per_plane + core)


def _filled_ports(fabric: Clos) -> Ints:
    """Downlink ports of each ToR that have a NIC: fewer where its ToR set is partly filled."""
    nics = np.bincount(fabric.tor_of(np.arange(fabric.design.num_nics)), minlength=fabric.design.num_tors)
    return -(-nics // fabric.design.lanes_per_port)


def _port_nics(fabric: Clos, port: int) -> Ints:
    """NICs on one of all filled downlink ports, ToR after ToR: filled in order of server, then of the NIC in it."""
    design, ends = fabric.design, np.cumsum(_filled_ports(fabric))
    tor = int(np.searchsorted(ends, port, side="right"))
    inside = port - (int(ends[tor - 1]) if tor else 0)
    nics = np.flatnonzero(fabric.tor_of(np.arange(design.num_nics)) == tor)
    return nics[inside * design.lanes_per_port : (inside + 1) * design.lanes_per_port]


def _port_uplinks(fabric: Clos, port: int) -> Ints:
    """Uplinks on an uplink port: one with the split, as many as there are lanes without."""
    design = fabric.design
    links = design.tor_uplinks // design.tor_ports_up
    return port * links + np.arange(links)


def _nic_links(design: Design) -> tuple[Ints, Ints]:
    nic = np.arange(design.num_nics, dtype=np.int64)
    return nic, _tor_of(design, nic) + design.num_nics


def _tor_links(design: Design) -> tuple[Ints, Ints]:
    tor, uplink = np.divmod(np.arange(design.num_tors * design.tor_uplinks, dtype=np.int64), design.tor_uplinks)
    # Parallel links to one spine are neighbours: `route` reads a flow's plane off its uplink by the same division.
    spine = tor // design.tors_per_pod * design.spines_per_pod + uplink // design.links_per_tor_spine
    return tor + design.num_nics, spine + _first_spine(design)


def _spine_links(design: Design) -> tuple[Ints, Ints]:
    width = max(design.spine_uplinks, 1)  # two tiers: no links, and nothing to divide by
    spine, uplink = np.divmod(np.arange(design.num_spines * design.spine_uplinks, dtype=np.int64), width)
    core = _core_of(design, spine, uplink // max(design.links_per_spine_core, 1))
    return spine + _first_spine(design), core + _first_core(design)

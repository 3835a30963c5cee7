"""Fabrics by name, for scenarios and for files that name none: star, dumbbell, two-tier CLOS, fat tree.

Hosts come first, then switches tier by tier; every cable has one rate both ways. What a cluster file describes comes
from `topology`. Not covered: links of several rates in one tier, failures.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from pydantic import Field

from netlayer.config.tree import BitsPerSecond, Section
from netlayer.errors import ConfigError
from topology.fabric.graph import Graph, Ints

Hosts = Annotated[int, Field(ge=0, le=1_000_000, description="hosts; 0: as many as the scenario needs")]


class _Links(Section):
    """Fields of all fabrics."""

    bps: BitsPerSecond = Field(200_000_000_000, description="rate of a host's link; '400G' is understood")
    latency_ns: float = Field(1_000.0, gt=0, le=10**9, description="propagation of every link")


class Star(_Links):
    """All hosts under one switch."""

    hosts: Hosts = 0


class Dumbbell(_Links):
    """Two switches, half of the hosts under each, and one trunk between them."""

    hosts: Hosts = 0
    trunk_bps: int = Field(0, ge=0, le=10**15, description="rate of the trunk, bit/s; 0: all hosts of a side at once")


class Clos(_Links):
    """Leaves and spines, every leaf to every spine by one link."""

    hosts: Hosts = 0
    hosts_per_leaf: int = Field(8, ge=1, le=4_096, description="hosts under a leaf")
    spines: int = Field(4, ge=1, le=4_096, description="spines, and so uplinks of a leaf")
    uplink_bps: BitsPerSecond = Field(400_000_000_000, description="rate of a link between leaf and spine")


class FatTree(_Links):
    """Three tiers of k-port switches, k^3 / 4 hosts, all links alike (Al-Fares et al., SIGCOMM 2008).

    Wired as htsim does it: aggregation switch i of the k / 2 of a pod to core switches i, i + k / 2, i + k.
    """

    k: int = Field(0, ge=0, le=160, description="ports of a switch, even; 0: as many as the scenario's hosts need")


Fabric = Star | Dumbbell | Clos | FatTree
FABRICS: dict[str, type[Fabric]] = {"star": Star, "dumbbell": Dumbbell, "clos": Clos, "fat-tree": FatTree}


def build_fabric(fabric: Fabric, least_hosts: int = 0) -> Graph:
    """The fabric as a graph, with room for `least_hosts`.

    Raises:
        ConfigError: it has fewer hosts than that, none at all, or an odd number of ports a switch.
    """
    if isinstance(fabric, FatTree):
        return _fat_tree(fabric, _ports(fabric.k, least_hosts))
    hosts = fabric.hosts or least_hosts
    _check_room("fabric.hosts", hosts, least_hosts)
    host = np.arange(hosts, dtype=np.int64)
    if isinstance(fabric, Star):
        return _graph(fabric, hosts, [("switch", 1)], [(host, np.full(hosts, hosts), fabric.bps)])
    if isinstance(fabric, Dumbbell):
        side = -(-hosts // 2)
        trunk = (np.array([hosts]), np.array([hosts + 1]), fabric.trunk_bps or side * fabric.bps)
        return _graph(fabric, hosts, [("switch", 2)], [(host, hosts + host // side, fabric.bps), trunk])
    leaves = -(-hosts // fabric.hosts_per_leaf)
    leaf, spine = np.divmod(np.arange(leaves * fabric.spines, dtype=np.int64), fabric.spines)
    down = (host, hosts + host // fabric.hosts_per_leaf, fabric.bps)
    up = (hosts + leaf, hosts + leaves + spine, fabric.uplink_bps)
    return _graph(fabric, hosts, [("leaf", leaves), ("spine", fabric.spines)], [down, up])


def _ports(k: int, least_hosts: int) -> int:
    """Ports a switch of the fat tree: as given, else the least that leave room."""
    if not k:
        k = 2
        while k**3 // 4 < least_hosts:
            k += 2
    if k % 2:
        raise ConfigError("fabric.k", k, "must be even", f"set {k + 1}")
    _check_room("fabric.k", k, least_hosts, k**3 // 4)
    return k


def _check_room(field: str, value: int, least_hosts: int, hosts: int | None = None) -> None:
    hosts = value if hosts is None else hosts
    if hosts < max(least_hosts, 2):
        rule = f"leaves room for {hosts} hosts, {max(least_hosts, 2)} are due"
        raise ConfigError(field, value, rule, "raise it, or lower the scenario's hosts")


def _fat_tree(fabric: FatTree, k: int) -> Graph:
    half, hosts = k // 2, k**3 // 4
    tors = aggs = k * half
    host = np.arange(hosts, dtype=np.int64)
    lower, place = np.divmod(np.arange(tors * half, dtype=np.int64), half)
    first_agg, first_core = hosts + tors, hosts + tors + aggs
    levels = [
        (host, hosts + host // half, fabric.bps),
        (hosts + lower, first_agg + lower // half * half + place, fabric.bps),
        (first_agg + lower, first_core + lower % half + half * place, fabric.bps),
    ]
    return _graph(fabric, hosts, [("tor", tors), ("agg", aggs), ("core", half * half)], levels)


def _graph(fabric: _Links, hosts: int, switches: list[tuple[str, int]], levels: list[tuple[Ints, Ints, int]]) -> Graph:
    """Cables level by level: lower ends, upper ends, rate."""
    counts = [("host", hosts), *switches]
    names = tuple(f"{kind}{index}" for kind, count in counts for index in range(count))
    sizes = [len(lower) for lower, _, _ in levels]
    without: tuple[Any, ...] = ("",) * sum(sizes)
    return Graph(
        names=names,
        is_switch=np.arange(len(names)) >= hosts,
        a=np.concatenate([lower for lower, _, _ in levels]).astype(np.int64),
        b=np.concatenate([upper for _, upper, _ in levels]).astype(np.int64),
        bps=np.repeat(np.array([bps for *_, bps in levels], dtype=np.float64), sizes),
        latency_ns=np.full(sum(sizes), fabric.latency_ns),
        a_port=without,
        b_port=without,
    )

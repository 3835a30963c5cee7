"""Spread of flows over equal next hops, by a hash or a substitute for one, under one name.

`spray` sends every packet (or flowlet, of which a flow has many) over the members in turn, so that each carries an
equal share of every flow. `adaptive` gives each flow, as it comes, to the member that the switch has loaded least; a
switch sees its own ports alone, so flows still meet further down. Not covered: reordering, which spraying costs, and
flows that move later (DLB's inactivity timer).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numba as nb
import numpy as np
from numpy.typing import NDArray

from topology.ecmp.hashes import mix64
from topology.ecmp.hashing import FIVE_TUPLE, HASHES, Ecmp, Field, HashName, Headers, Stage
from topology.ecmp.load import Load, demand_bps, link_demand, load
from topology.ecmp.routing import NO_LINK
from topology.fabric.clos import Clos, Ints, Tier
from topology.traffic.job import Flows

Floats = NDArray[np.float64]

SpreadName = Literal["spray", "adaptive"]
BalanceName = HashName | SpreadName
BALANCES: tuple[BalanceName, ...] = (*HASHES, *get_args(SpreadName))


def balance(
    name: BalanceName,
    fabric: Clos,
    flows: Flows,
    headers: Headers,
    seed: int,
    *,
    fields: Sequence[Field] = FIVE_TUPLE,
) -> Load:
    """The load of the flows where every switch spreads them by `name`; `fields` are what a hash takes.

    Raises:
        ValueError: the name or a field is unknown.
    """
    if name == "spray":
        return spray(fabric, flows)
    return load(fabric, flows, chooser(name, fabric, flows, headers, seed, fields=fields))


def chooser(
    name: BalanceName,
    fabric: Clos,
    flows: Flows,
    headers: Headers,
    seed: int,
    *,
    fields: Sequence[Field] = FIVE_TUPLE,
) -> Ecmp:
    """Return the chooser of a group's member for each flow, for `routing.route`; spraying has none.

    Raises:
        ValueError: the name is unknown, or that of spraying; a field is unknown.
    """
    if name == "adaptive":
        return Adaptive(fabric, flows, seed)
    if name == "spray" or name not in HASHES:
        raise ValueError(f"hash {name!r}: one of {', '.join(BALANCES)}; a sprayed flow has no one path")
    return Ecmp(name, headers, seed, fields=fields)


class Adaptive(Ecmp):
    """The choices of switches that give each flow, in the order of the array, to their least loaded member.

    Args:
        fabric: whose switches choose.
        flows: which arrive one after another; each weighs what it asks for (`load.demand_bps`).
        seed: where a switch begins to look among equals.
    """

    def __init__(self, fabric: Clos, flows: Flows, seed: int) -> None:
        src_tor, dst_tor = fabric.tor_of(flows.src_nic), fabric.tor_of(flows.dst_nic)
        src_pod, dst_pod = fabric.pod_of(src_tor), fabric.pod_of(dst_tor)
        demand, nowhere = demand_bps(fabric, flows), np.zeros(len(flows), dtype=np.int64)
        weights = {False: demand * (src_tor != dst_tor), True: demand * (src_pod != dst_pod)}
        # Downwards a switch has a group for each pod or ToR that it leads to.
        self._target = {Stage.CORE_DOWN: dst_pod, Stage.SPINE_DOWN: dst_tor}
        self._nowhere, self._weights = nowhere, weights
        self._first = mix64(np.arange(len(flows), dtype=np.uint64) ^ np.uint64(seed & (1 << 63) - 1))

    def choose(self, stage: Stage, switch: Ints, group_size: int) -> Ints:
        """The member that each flow takes at its switch; a flow that does not cross this stage weighs nothing."""
        if group_size == 1:
            return self._nowhere
        target = self._target.get(stage, self._nowhere)
        _, group = np.unique(switch * (int(target.max(initial=0)) + 1) + target, return_inverse=True)
        weight = self._weights[stage in (Stage.SPINE_UP, Stage.CORE_DOWN)]
        first = (self._first % np.uint64(group_size)).astype(np.int64)
        return np.asarray(_least_loaded(group, weight, first, group_size))


def spray(fabric: Clos, flows: Flows) -> Load:
    """Return the load where every flow is spread in equal shares over all members of every group on its way.

    Members of a group carry alike, so a path names one link of each group, and `pool_bps` gives that link the capacity
    of them all.
    """
    fabric.check_joined(flows.src_nic, flows.dst_nic)
    design, flow_bps = fabric.design, demand_bps(fabric, flows)
    src_tor, dst_tor = fabric.tor_of(flows.src_nic), fabric.tor_of(flows.dst_nic)
    src_pod, dst_pod = fabric.pod_of(src_tor), fabric.pod_of(dst_tor)
    core_links = design.spines_per_pod * design.spine_uplinks
    groups = {
        Tier.TOR_SPINE: (src_tor, design.tor_uplinks, src_tor != dst_tor),
        Tier.SPINE_TOR: (dst_tor, design.tor_uplinks, src_tor != dst_tor),
        Tier.SPINE_CORE: (src_pod, core_links, src_pod != dst_pod),
        Tier.CORE_SPINE: (dst_pod, core_links, src_pod != dst_pod),
    }
    paths = np.full((len(flows), len(Tier)), NO_LINK, dtype=np.int64)
    paths[:, Tier.NIC_TOR] = fabric.nic_link(flows.src_nic, Tier.NIC_TOR)
    paths[:, Tier.TOR_NIC] = fabric.nic_link(flows.dst_nic, Tier.TOR_NIC)
    for tier, (group, size, crosses) in groups.items():
        paths[crosses, tier] = (group * size + fabric.tier_links(tier).start)[crosses]
    pooled = link_demand(fabric, flows, paths, flow_bps)
    link_bps, pool_bps = pooled.copy(), fabric.link_bps.copy()
    for tier, (_, size, _) in groups.items():
        span = fabric.tier_links(tier)
        if span.stop > span.start:
            link_bps[span] = np.repeat(pooled[span].reshape(-1, size)[:, 0] / size, size)
            pool_bps[span] = np.repeat(fabric.link_bps[span].reshape(-1, size).sum(axis=1), size)
    return Load(fabric, paths, flow_bps, link_bps, pool_bps)


@nb.njit(cache=True)
def _least_loaded(group: Ints, weight: Floats, first: Ints, group_size: int) -> Ints:
    """Give each flow in turn its group's least loaded member, of equals the first from `first` on."""
    carried = np.zeros((group.max() + 1 if len(group) else 0, group_size))
    chosen = np.empty(len(group), np.int64)
    for flow in range(len(group)):
        row, best = carried[group[flow]], first[flow]
        for step in range(1, group_size):
            member = (first[flow] + step) % group_size
            if row[member] < row[best]:
                best = member
        row[best] += weight[flow]
        chosen[flow] = best
    return chosen

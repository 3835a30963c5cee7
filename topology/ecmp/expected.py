"""Collisions in closed form, for an ideal hash: every flow takes each member of its ECMP group with equal chance.

A flow's way to its spine and on to a core switch is uniform over all uplinks of its pod, so each tier is one draw: over
a ToR's uplinks, or over a pod's. The load of one link is then a sum of binomials, one for each rate among the flows;
only loads up to the link's capacity are followed, for what lies above is the rest. Not covered: a flow in collision on
any tier of its path, for the tiers of one path are not independent.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topology.ecmp.load import ECMP_TIERS, TOLERANCE, demand_bps
from topology.fabric.clos import Clos, Ints, Tier
from topology.traffic.job import Flows

Floats = NDArray[np.float64]

_NEGLIGIBLE = 1e-16
# Shares of the flows and of their demand below this are rounding: they come out of differences.
_ROUNDING = 1e-12
# A link's capacity in steps: flows of 1, 1/2, ... 1/10 of a NIC are whole numbers of them on links of 1, 2 or 4 NICs.
_STEPS = 10_080


@dataclass(frozen=True)
class Expected:
    """Expected collisions of one group or one tier; shares are 0 where there are no flows."""

    num_flows: int
    num_colliding: float
    excess_bps: float
    total_bps: float

    @property
    def share(self) -> float:
        """Expected share of the flows that are in collision."""
        return self.num_colliding / self.num_flows if self.num_flows else 0.0

    @property
    def excess(self) -> float:
        """Expected demand above capacity over total demand."""
        return self.excess_bps / self.total_bps if self.total_bps else 0.0


def expected_collisions(
    num_flows: Sequence[int], flow_bps: Sequence[float], num_links: int, link_bps: float
) -> Expected:
    """Compute the expected collisions of flows thrown at random on `num_links` equal links of `link_bps`.

    With X_k ~ Bin(n_k, 1/m) flows of rate r_k on a link of capacity c, N = sum X_k and X = sum r_k X_k: m E[N; X > c]
    flows collide, and the links' expected excess is m E[max(X - c, 0)] = m (E[X; X > c] - c P(X > c)).

    Args:
        num_flows: n_k, flows of each rate.
        flow_bps: r_k, the rates.
        num_links: m, members of the group.
        link_bps: c, capacity of a member.
    """
    there = [(int(count), float(rate)) for count, rate in zip(num_flows, flow_bps, strict=True) if count]
    return _expected(tuple(there), num_links, float(link_bps))


@functools.lru_cache(maxsize=8192)
def _expected(kinds: tuple[tuple[int, float], ...], num_links: int, link_bps: float) -> Expected:
    """Compute the expected collisions of one group of equal links.

    Args:
        kinds: (number of flows, rate of each in bit/s).
    """
    flows, total = sum(count for count, _ in kinds), sum(count * rate for count, rate in kinds)
    if total <= link_bps * (1 + TOLERANCE):
        return Expected(flows, 0.0, 0.0, total)
    fits, fit_flows, fit_bps = _fitting(kinds, num_links, link_bps)
    colliding = flows - num_links * fit_flows
    excess = total - num_links * (fit_bps + link_bps * (1 - fits))
    return Expected(
        num_flows=flows,
        num_colliding=colliding if colliding > _ROUNDING * flows else 0.0,
        excess_bps=excess if excess > _ROUNDING * total else 0.0,
        total_bps=total,
    )


def expected_load(fabric: Clos, flows: Flows) -> dict[Tier, Expected]:
    """Expected collisions of these flows, tier by tier, under an ideal hash; demands as in `load.demand_bps`."""
    rates, rate_index = np.unique(demand_bps(fabric, flows), return_inverse=True)
    return {tier: _expected_tier(fabric, tier, flows, rates, rate_index) for tier in ECMP_TIERS}


def _expected_tier(fabric: Clos, tier: Tier, flows: Flows, rates: Floats, rate_index: Ints) -> Expected:
    """Add up the expected collisions of all groups of one tier; groups with the same flows are computed once.

    Args:
        rates: the distinct demands of flows, bit/s.
        rate_index: which of them each flow has.
    """
    group, crosses, num_links = _groups(fabric, tier, flows)
    cells = group[crosses] * len(rates) + rate_index[crosses]
    counts = np.bincount(cells, minlength=(int(group.max(initial=0)) + 1) * len(rates)).reshape(-1, max(len(rates), 1))
    kinds, times = np.unique(counts, axis=0, return_counts=True)
    link_bps = fabric.design.tor_uplink_bps if tier in _TOR_TIERS else fabric.design.spine_uplink_bps
    parts = [expected_collisions(kind.tolist(), rates.tolist(), num_links, link_bps) for kind in kinds if kind.any()]
    weights = [int(time) for kind, time in zip(kinds, times, strict=True) if kind.any()]
    return Expected(
        num_flows=sum(weight * part.num_flows for weight, part in zip(weights, parts, strict=True)),
        num_colliding=sum(weight * part.num_colliding for weight, part in zip(weights, parts, strict=True)),
        excess_bps=sum(weight * part.excess_bps for weight, part in zip(weights, parts, strict=True)),
        total_bps=sum(weight * part.total_bps for weight, part in zip(weights, parts, strict=True)),
    )


_TOR_TIERS = (Tier.TOR_SPINE, Tier.SPINE_TOR)


def _groups(fabric: Clos, tier: Tier, flows: Flows) -> tuple[Ints, NDArray[np.bool_], int]:
    """The ECMP group of each flow in this tier, which flows cross it, and the members of a group.

    Upwards a group is the flow's own ToR or pod, downwards the one it goes to.
    """
    ends = (flows.src_nic, flows.dst_nic)
    tors = [fabric.tor_of(nic) for nic in ends]
    pods = [fabric.pod_of(tor) for tor in tors]
    design, downwards = fabric.design, tier in (Tier.CORE_SPINE, Tier.SPINE_TOR)
    if tier in _TOR_TIERS:
        return tors[downwards], tors[0] != tors[1], design.tor_uplinks
    return pods[downwards], pods[0] != pods[1], design.spines_per_pod * design.spine_uplinks


def _fitting(kinds: tuple[tuple[int, float], ...], num_links: int, link_bps: float) -> tuple[float, float, float]:
    """Return one link's P(X <= c), E[N; X <= c] and E[X; X <= c], for N flows of demand X, kinds as (flows, rate).

    Loads are distinguished in steps of c. Each kind's load is rounded down to them: what fills a link exactly is
    never taken for more; the moments are of the loads themselves.
    """
    state = np.zeros((3, _STEPS + 1))  # a row each for the chance, the flows and the demand, by load
    state[0, 0] = 1.0
    for count, rate in kinds:
        most = min(count, int(link_bps / rate * (1 + TOLERANCE)))
        chances = _binomial(count, num_links)[: most + 1]
        after = np.zeros_like(state)
        for flows in np.flatnonzero(chances > _NEGLIGIBLE).tolist():
            step = int(flows * rate / link_bps * _STEPS * (1 + TOLERANCE))
            kept = chances[flows] * state[:, : _STEPS + 1 - step]
            after[:, step:] += kept
            after[1:, step:] += np.outer([flows, flows * rate], kept[0])
        state = after
    fits, fit_flows, fit_bps = state.sum(axis=1).tolist()
    return fits, fit_flows, fit_bps


def _binomial(count: int, num_links: int) -> Floats:
    """P(X = 0..count) for X ~ Bin(count, 1/num_links), by logarithms: it neither overflows nor underflows."""
    if num_links == 1:
        return np.append(np.zeros(count), 1.0)
    flows = np.arange(1, count + 1)
    choose = np.concatenate([[0.0], np.cumsum(np.log((count - flows + 1) / flows))])
    hits = np.arange(count + 1)
    log_chance: Floats = choose - hits * np.log(num_links) + (count - hits) * np.log1p(-1 / num_links)
    return np.exp(log_chance)

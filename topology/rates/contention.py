"""Cost of collisions: the rate that each flow reaches, how much slower than alone, and the links to blame.

*Uncongested* is the max-min rate that a flow has where the NICs alone bound it, as over a fabric that never blocks;
*slowdown* is that over its rate. Max-min fairness may give a flow more in a congested fabric, where its rivals are held
elsewhere: a slowdown below 1 is no error. Not covered: what congestion control adds to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topology.ecmp.load import Load
from topology.ecmp.routing import NO_LINK
from topology.fabric.clos import Clos, Ints, Tier
from topology.fabric.interface import Fabric
from topology.rates.kernels import most_crowded
from topology.rates.max_min import Rates, completion_bound_s, completion_s, flows_on_links, max_min
from topology.traffic.job import Flows

Floats = NDArray[np.float64]

_SHOWN_FLOWS = 32  # of a link, so that a row stays short where thousands share it; `flows` counts all


@dataclass(frozen=True, eq=False)
class Contention:
    """Rates of the flows of a load, and those they would have if only NICs bounded them."""

    loaded: Load
    rates: Rates
    free: Rates

    @property
    def slowdown(self) -> Floats:
        """Uncongested rate over rate, a flow."""
        return self.free.flow_bps / self.rates.flow_bps

    def slowdowns(self, tiers: Sequence[int] | None = None) -> tuple[float, float]:
        """Mean and worst slowdown of the flows that cross one of these tiers, by default of all that a hash chooses.

        (1, 1) where none does.
        """
        # Flows under one ToR meet no hash: counted in, they would make it look better than it is.
        fabric = self.loaded.fabric
        tiers = fabric.hashed_tiers if tiers is None else tiers
        crosses = (fabric.links_on(self.loaded.paths, tiers) != NO_LINK).any(axis=1)
        slowdown = self.slowdown[crosses]
        return (float(slowdown.mean()), float(slowdown.max())) if len(slowdown) else (1.0, 1.0)

    def times(self, flows: Flows, resolution: float = 1e-2) -> dict[str, float]:
        """Seconds until the last flow ends: at fair rates, uncongested, and the bound that no schedule beats.

        `slowdown` is the mean over the flows of how long each takes, over how long it takes uncongested.
        """
        return times(self.rates, self.free, flows, resolution)

    def bottlenecks(self, most: int = 10) -> list[dict[str, Any]]:
        """Return the links between switches that hold most flows back, worst first, and which flows share them.

        `links` is 1, or where packets are sprayed the members of the group that its first link stands for.
        """
        fabric = self.loaded.fabric
        num_held_back = np.bincount(self.rates.bottleneck, minlength=fabric.num_links)
        # What a NIC holds back would be held back in any fabric: that is its uncongested rate, and no link to blame.
        for tier in fabric.nic_tiers:
            num_held_back[fabric.tier_links(tier)] = 0
        # Stable: of links that are equally bad the lowest id comes first, in every run.
        order = np.argsort(-num_held_back, kind="stable")[:most]
        start, members = flows_on_links(self.rates.paths, fabric.num_links)
        return [self._row(int(link), members[start[link] : start[link + 1]]) for link in order if num_held_back[link]]

    def _row(self, link: int, flows: Ints) -> dict[str, Any]:
        fabric = self.loaded.fabric
        held_back = flows[self.rates.bottleneck[flows] == link]
        return {
            "link": link,
            # A sprayed group's first link stands for all with the capacity of all, so the quotient is their number.
            "links": round(float(self.loaded.capacity_bps[link] / fabric.link_bps[link])),
            "tier": fabric.tier_labels[int(fabric.link_tier[link])],
            "src_node": int(fabric.link_src[link]),
            "dst_node": int(fabric.link_dst[link]),
            "flows": len(flows),
            "held_back": len(held_back),
            "fair_bps": float(self.rates.flow_bps[held_back].max()),
            "slowdown": float(self.slowdown[flows].max()),
            "first_flows": flows[:_SHOWN_FLOWS].tolist(),
        }


def busiest(fabric: Clos, flows: Flows) -> tuple[Ints, float]:
    """Return the flows that are under way together when they crowd most, and that time in seconds.

    Load, collisions and rates are of flows that run together. Of flows with starts those of this one instant are
    taken, with the ends that they would have uncongested; flows without starts are all under way at 0. Flows between
    ToRs crowd where they leave by one ToR or arrive by one: most pairs of such flows under way, most to collide.
    """
    if flows.start_s is None or not len(flows):
        return np.arange(len(flows)), 0.0
    # A tenth of a flow's duration is enough to tell which flows meet, and saves most refills of the rates.
    ends = completion_s(_nic_rates(fabric, flows), flows.num_bytes, resolution=0.1, start_s=flows.start_s)
    # A flow of no bytes, or so short that a late start swallows its time, ends at its start: `most_crowded` would take
    # it off before it is there, and no instant would have it under way.
    ends = np.maximum(ends, np.nextafter(flows.start_s, np.inf))
    tors = fabric.tor_of(flows.src_nic), fabric.tor_of(flows.dst_nic)
    hashed = tors[0] != tors[1] if (tors[0] != tors[1]).any() else np.ones(len(flows), dtype=bool)
    begin, end, up, down = (each[hashed] for each in (flows.start_s, ends, *tors))
    at_s = float(most_crowded(begin, end, up, down, fabric.design.num_tors))
    return np.flatnonzero((flows.start_s <= at_s) & (ends > at_s)), at_s


def times(rates: Rates, free: Rates, flows: Flows, resolution: float = 1e-2) -> dict[str, float]:
    """See `Contention.times`; `free` are the uncongested rates."""
    if not len(flows):
        return {"completion_s": 0.0, "uncongested_s": 0.0, "bound_s": 0.0, "slowdown": 1.0}
    ends, best = (
        completion_s(each, flows.num_bytes, resolution=resolution, start_s=flows.start_s) for each in (rates, free)
    )
    begins = np.zeros(len(flows)) if flows.start_s is None else flows.start_s
    takes, alone = ends - begins, best - begins
    paths, capacity_bps = rates.paths, rates.capacity_bps
    return {
        "completion_s": float(ends.max()),
        "uncongested_s": float(best.max()),
        "bound_s": completion_bound_s(paths, capacity_bps, flows.num_bytes, start_s=flows.start_s),
        # A flow of no bytes takes no time in either: it is not slower, and 0 / 0 is no number.
        "slowdown": float(np.divide(takes, alone, out=np.ones(len(flows)), where=alone > 0).mean()),
    }


def contend(loaded: Load, free: Rates | None = None) -> Contention:
    """Rate the flows of a load; `free` are their uncongested rates where they are known already."""
    rates = max_min(loaded.paths, loaded.capacity_bps)
    return Contention(loaded, rates, free or uncongested(loaded.fabric, loaded.paths))


def uncongested(fabric: Fabric, paths: Ints) -> Rates:
    """The rates that flows would have over a fabric whose NICs alone bound them."""
    return max_min(fabric.links_on(paths, fabric.nic_tiers), fabric.link_bps)


def _nic_rates(fabric: Clos, flows: Flows) -> Rates:
    ends = fabric.nic_link(flows.src_nic, Tier.NIC_TOR), fabric.nic_link(flows.dst_nic, Tier.TOR_NIC)
    return max_min(np.stack(ends, axis=1), fabric.link_bps)

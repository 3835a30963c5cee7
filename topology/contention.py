"""What collisions cost: the rate that each flow reaches, how much slower than alone, and the links to blame.

*Uncongested* is the max-min rate that a flow has where the NICs alone bound it, as over a fabric that never blocks;
*slowdown* is that over its rate. Max-min fairness may give a flow more in a congested fabric, where its rivals are held
elsewhere: a slowdown below 1 is no error. Left out: what congestion control adds to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topology.clos import Clos, Ints, Tier
from topology.load import ECMP_TIERS, Load
from topology.rates import Rates, completion_bound_s, completion_s, flows_on_links, max_min
from topology.routing import NO_LINK
from topology.traffic import Flows

Floats = NDArray[np.float64]

_NIC_TIERS = (Tier.NIC_TOR, Tier.TOR_NIC)
_SHOWN_FLOWS = 32


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

    def slowdowns(self, tiers: Sequence[Tier] = ECMP_TIERS) -> tuple[float, float]:
        """Mean and worst slowdown of the flows that cross one of these tiers; (1, 1) where none does."""
        crosses = (self.loaded.paths[:, list(tiers)] != NO_LINK).any(axis=1)
        slowdown = self.slowdown[crosses]
        return (float(slowdown.mean()), float(slowdown.max())) if len(slowdown) else (1.0, 1.0)

    def times(self, flows: Flows, resolution: float = 1e-2) -> dict[str, float]:
        """Seconds until the last flow ends: at fair rates, uncongested, and the bound that no schedule beats."""
        if not len(flows):
            return {"completion_s": 0.0, "uncongested_s": 0.0, "bound_s": 0.0, "slowdown": 1.0}
        ends, free = (
            float(completion_s(each, flows.num_bytes, resolution=resolution, start_s=flows.start_s).max())
            for each in (self.rates, self.free)
        )
        bound = completion_bound_s(self.rates.paths, self.rates.capacity_bps, flows.num_bytes)
        return {
            "completion_s": ends,
            "uncongested_s": free,
            "bound_s": bound,
            "slowdown": ends / free if free else 1.0,
        }

    def bottlenecks(self, most: int = 10) -> list[dict[str, Any]]:
        """The links between switches that hold most flows back, worst first, and which flows share them."""
        fabric = self.loaded.fabric
        held = np.bincount(self.rates.bottleneck, minlength=fabric.num_links)
        for tier in _NIC_TIERS:
            held[fabric.tier_links(tier)] = 0
        order = np.argsort(-held, kind="stable")[:most]
        start, members = flows_on_links(self.rates.paths, fabric.num_links)
        return [self._row(int(link), members[start[link] : start[link + 1]]) for link in order if held[link]]

    def _row(self, link: int, flows: Ints) -> dict[str, Any]:
        fabric = self.loaded.fabric
        held = flows[self.rates.bottleneck[flows] == link]
        return {
            "link": link,
            "tier": Tier(int(fabric.link_tier[link])).label,
            "src_node": int(fabric.link_src[link]),
            "dst_node": int(fabric.link_dst[link]),
            "flows": len(flows),
            "held_back": len(held),
            "fair_bps": float(self.rates.flow_bps[held].max()),
            "slowdown": float(self.slowdown[flows].max()),
            "first_flows": flows[:_SHOWN_FLOWS].tolist(),
        }


def contend(loaded: Load, free: Rates | None = None) -> Contention:
    """Rate the flows of a load; `free` are their uncongested rates where they are known already."""
    rates = max_min(loaded.paths, loaded.capacity_bps)
    return Contention(loaded, rates, free or uncongested(loaded.fabric, loaded.paths))


def uncongested(fabric: Clos, paths: Ints) -> Rates:
    """The rates that flows would have over a fabric whose NICs alone bound them."""
    return max_min(paths[:, list(_NIC_TIERS)], fabric.link_bps)

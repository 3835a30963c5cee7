"""Use of the members of every ECMP group: actual against expected share.

A group is what a switch chooses among: all uplinks of a ToR or spine, or the parallel links down to one switch. An
ideal hash gives each of m members 1/m; n equal flows then deviate by sqrt((m - 1) / n) of that (binomial). Not covered:
groups that no flow meets, and sprayed packets, whose every group is even.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topology.ecmp.load import ECMP_TIERS, Load
from topology.ecmp.routing import NO_LINK
from topology.fabric.clos import Clos, Ints, Tier

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Members:
    """The used groups of one tier.

    Args:
        first_link: of each group; its members' links are consecutive.
        share: of the group's demand, a member: shape (num_groups, group_size), rows sum to 1.
        num_flows: of each group.
    """

    tier: Tier
    first_link: Ints
    share: Floats
    num_flows: Ints

    @property
    def expected(self) -> float:
        """Share that each member should carry."""
        return 1 / int(self.share.shape[1])

    @property
    def deviation(self) -> Floats:
        """Actual over expected share, less 1."""
        return self.share / self.expected - 1

    def to_row(self) -> dict[str, Any]:
        """Return the columns of a record; deviations are root mean squares over members, averaged over groups."""
        spread = np.sqrt((self.deviation**2).mean(axis=1))
        ideal = np.sqrt((self.share.shape[1] - 1) / self.num_flows)
        return {
            "tier": self.tier.label,
            "groups": len(self.share),
            "members": self.share.shape[1],
            "expected_share": self.expected,
            "max_share": float(self.share.max(initial=0.0)),
            "unused_members": int((self.share == 0).sum()),
            "deviation": float(spread.mean()) if len(spread) else 0.0,
            "binomial_deviation": float(ideal.mean()) if len(ideal) else 0.0,
        }


def members(loaded: Load) -> list[Members]:
    """Return tiers whose links are chosen, but those with groups of one member; none where packets are sprayed.

    None either on an imported fabric, whose groups of one tier have no one size.
    """
    fabric = loaded.fabric
    if loaded.pool_bps is not None or not isinstance(fabric, Clos):
        return []
    tiers = [_tier_members(fabric, loaded, tier) for tier in ECMP_TIERS]
    return [each for each in tiers if each.share.shape[1] > 1]


def _tier_members(fabric: Clos, loaded: Load, tier: Tier) -> Members:
    """Return the ECMP groups of one tier that carry flows: each member's share of its group's demand, and the flows."""
    span, size = fabric.tier_links(tier), _group_size(fabric, tier)
    demand = loaded.link_bps[span].reshape(-1, size)
    column = loaded.paths[:, tier]
    group = (column[column != NO_LINK] - span.start) // size
    num_flows = np.bincount(group, minlength=len(demand))
    total = demand.sum(axis=1)
    used = total > 0
    first = span.start + np.flatnonzero(used) * size
    return Members(tier, first, demand[used] / total[used, None], np.maximum(num_flows[used], 1))


def _group_size(fabric: Clos, tier: Tier) -> int:
    design = fabric.design
    sizes = {
        Tier.TOR_SPINE: design.tor_uplinks,
        Tier.SPINE_CORE: design.spine_uplinks,
        Tier.CORE_SPINE: design.links_per_spine_core,
        Tier.SPINE_TOR: design.links_per_tor_spine,
    }
    return max(1, sizes[tier])

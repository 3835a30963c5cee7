"""The load that hashed flows put on every link, and its collisions.

A *collision* is a flow on a link whose hashed demand exceeds its capacity; its size is the *excess* (demand above
capacity over total demand). Sharing a link alone is no collision. Between switches a flow asks for an even share of its
NICs, of the fuller one, so that what collides there collides by ECMP; on the NICs' own links it asks for its sender's
share alone, so that many who send to one NIC collide on that NIC's downlink (incast). Evaluate flows that run at one
time together, such as both directions of the pipeline, and phases that follow one another apart: two phases in one load
would each get half of every NIC. Not covered: starts, and the rate that the flows then reach (both in contention).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topology.ecmp.hashing import Ecmp
from topology.ecmp.routing import NO_LINK, route
from topology.fabric.clos import Clos, Ints, Tier
from topology.rates.max_min import sum_over_links
from topology.traffic.job import Flows

Floats = NDArray[np.float64]

# Tiers whose links a hash chooses.
ECMP_TIERS = (Tier.TOR_SPINE, Tier.SPINE_CORE, Tier.CORE_SPINE, Tier.SPINE_TOR)
# Rates are sums of fractions of a NIC; a link is over only where rounding cannot have made it so.
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Collisions:
    """Collisions on a set of links; shares are 0 where no flow crosses them.

    Args:
        num_flows: flows that cross at least one of the links.
        num_colliding: of these, flows on at least one link whose demand exceeds its capacity.
        num_overloaded: such links.
        excess: demand above capacity over total demand, summed over the links.
        utilisation, max_utilisation: demand over capacity, of all links together and of the fullest.
    """

    num_links: int
    num_flows: int
    num_colliding: int
    num_overloaded: int
    excess: float
    utilisation: float
    max_utilisation: float

    @property
    def share(self) -> float:
        """Share of the crossing flows that are in collision."""
        return self.num_colliding / self.num_flows if self.num_flows else 0.0


@dataclass(frozen=True, eq=False)
class Load:
    """Flows on their paths: `paths` as `routing.route` gives them, `flow_bps` a flow's demand, `link_bps` a link's.

    Where packets are sprayed a path names one link for its whole group, and `pool_bps` is what all the group carries.
    """

    fabric: Clos
    paths: Ints
    flow_bps: Floats
    link_bps: Floats
    pool_bps: Floats | None = None

    @property
    def capacity_bps(self) -> Floats:
        """Capacity that a path finds at each of its links."""
        return self.fabric.link_bps if self.pool_bps is None else self.pool_bps

    def collisions(self, tiers: Sequence[Tier] = ECMP_TIERS) -> Collisions:
        """Count and size over the links of these tiers together."""
        spans = [self.fabric.tier_links(tier) for tier in tiers]
        demand = np.concatenate([self.link_bps[span] for span in spans])
        capacity = np.concatenate([self.fabric.link_bps[span] for span in spans])
        over = np.maximum(demand - capacity, 0.0)
        # The same bound as in `_overloaded`, or a link would have excess and no colliding flow.
        over[over <= TOLERANCE * capacity] = 0.0
        paths = self.paths[:, list(tiers)]
        total = float(demand.sum())
        return Collisions(
            num_links=len(demand),
            num_flows=int((paths != NO_LINK).any(axis=1).sum()),
            # Per flow, not per link: a flow on two full links collides once.
            num_colliding=int(self._overloaded()[paths].any(axis=1).sum()),
            num_overloaded=int((over > 0).sum()),
            excess=float(over.sum()) / total if total else 0.0,
            # Tiers of the core are empty in a fabric of two tiers.
            utilisation=total / float(capacity.sum()) if len(demand) else 0.0,
            max_utilisation=float((demand / capacity).max()) if len(demand) else 0.0,
        )

    def _overloaded(self) -> NDArray[np.bool_]:
        """Whether each link is over capacity; one entry more, False, is where NO_LINK points."""
        over = self.link_bps > self.fabric.link_bps * (1 + TOLERANCE)
        return np.append(over, False)


def load(fabric: Clos, flows: Flows, ecmp: Ecmp) -> Load:
    """Route the flows and add up their demand; `ecmp` was made for the flows' headers."""
    return place(fabric, flows, route(fabric, flows.src_nic, flows.dst_nic, ecmp))


def place(fabric: Clos, flows: Flows, paths: Ints) -> Load:
    """Add up the demand of flows whose paths are known, shape (num_flows, 6) as `routing.route` gives them."""
    flow_bps = demand_bps(fabric, flows)
    return Load(fabric, paths, flow_bps, link_demand(fabric, flows, paths, flow_bps))


def demand_bps(fabric: Clos, flows: Flows) -> Floats:
    """Return each flow's demand between switches: its NIC's rate over the flows there, at its fuller end."""
    sending = np.bincount(flows.src_nic, minlength=fabric.design.num_nics)
    receiving = np.bincount(flows.dst_nic, minlength=fabric.design.num_nics)
    # Eight that send to one NIC ask for an eighth each: at full rate the fabric would be blamed for their incast.
    return fabric.design.nic_bps / np.maximum(sending[flows.src_nic], receiving[flows.dst_nic])


def link_demand(fabric: Clos, flows: Flows, paths: Ints, flow_bps: Floats) -> Floats:
    """Demand of every link: `flow_bps` between switches; on the NICs' own links what the senders offer."""
    demand, num_nics = sum_per_link(fabric, paths, flow_bps), fabric.design.num_nics
    offered = fabric.design.nic_bps / np.bincount(flows.src_nic, minlength=num_nics)[flows.src_nic]
    # Links of both tiers are in the order of their NICs, so a count by NIC is one by link. The receiver's bound is left
    # out here, so that its downlink shows the incast.
    for tier, nic in ((Tier.NIC_TOR, flows.src_nic), (Tier.TOR_NIC, flows.dst_nic)):
        demand[fabric.tier_links(tier)] = np.bincount(nic, weights=offered, minlength=num_nics)
    return demand


def sum_per_link(fabric: Clos, paths: Ints, amounts: Floats) -> Floats:
    """Sum of `amounts`, one a flow, over the flows on each link: shape (num_links,)."""
    return sum_over_links(paths, amounts, fabric.num_links)

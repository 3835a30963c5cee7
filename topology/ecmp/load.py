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
from topology.fabric.clos import HASHED_TIERS, Clos
from topology.fabric.interface import Fabric, Floats, Ints
from topology.rates.max_min import sum_over_links
from topology.traffic.job import Flows

ECMP_TIERS = HASHED_TIERS
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
    """Flows on their paths: `paths` as `Fabric.route` gives them, `flow_bps` a flow's demand, `link_bps` a link's.

    Where packets are sprayed a path names one link for its whole group, and `pool_bps` is what all the group carries.
    """

    fabric: Fabric
    paths: Ints
    flow_bps: Floats
    link_bps: Floats
    pool_bps: Floats | None = None

    @property
    def capacity_bps(self) -> Floats:
        """Capacity that a path finds at each of its links."""
        return self.fabric.link_bps if self.pool_bps is None else self.pool_bps

    def collisions(self, tiers: Sequence[int] | None = None) -> Collisions:
        """Count and size over the links of these tiers together; of all that a hash chooses where None."""
        tiers = self.fabric.hashed_tiers if tiers is None else tiers
        if not tiers:  # no two switches are cabled to each other
            return Collisions(0, 0, 0, 0, 0.0, 0.0, 0.0)
        spans = [self.fabric.tier_links(tier) for tier in tiers]
        demand = np.concatenate([self.link_bps[span] for span in spans])
        capacity = np.concatenate([self.fabric.link_bps[span] for span in spans])
        over = np.maximum(demand - capacity, 0.0)
        # The same bound as in `_overloaded`, or a link would have excess and no colliding flow.
        over[over <= TOLERANCE * capacity] = 0.0
        paths = self.fabric.links_on(self.paths, tiers)
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


def place(fabric: Fabric, flows: Flows, paths: Ints) -> Load:
    """Add up the demand of flows whose paths are known, shape (num_flows, width) as `Fabric.route` gives them."""
    flow_bps = demand_bps(fabric, flows)
    return Load(fabric, paths, flow_bps, link_demand(fabric, flows, paths, flow_bps))


def demand_bps(fabric: Fabric, flows: Flows) -> Floats:
    """Return each flow's demand between switches: its NIC's rate over the flows there, at its fuller end."""
    # Eight that send to one NIC ask for an eighth each: at full rate the fabric would be blamed for their incast.
    shares = [
        fabric.nic_bps[nic] / np.bincount(nic, minlength=fabric.num_nics)[nic] for nic in (flows.src_nic, flows.dst_nic)
    ]
    return np.minimum(*shares)


def link_demand(fabric: Fabric, flows: Flows, paths: Ints, flow_bps: Floats) -> Floats:
    """Demand of every link: `flow_bps` between switches; on the NICs' own links what the senders offer."""
    demand = sum_per_link(fabric, paths, flow_bps)
    sending = np.bincount(flows.src_nic, minlength=fabric.num_nics)
    offered = fabric.nic_bps[flows.src_nic] / sending[flows.src_nic]
    # The receiver's bound is omitted here, so that its downlink shows the incast.
    for tier in fabric.nic_tiers:
        links = fabric.tier_links(tier)
        demand[links] = sum_per_link(fabric, fabric.links_on(paths, [tier]), offered)[links]
    return demand


def sum_per_link(fabric: Fabric, paths: Ints, amounts: Floats) -> Floats:
    """Sum of `amounts`, one a flow, over the flows on each link: shape (num_links,)."""
    return sum_over_links(paths, amounts, fabric.num_links)

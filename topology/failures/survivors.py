"""Routes over what is left of a fabric: ECMP groups shrink to the members that still lead to the destination.

A switch drops an uplink from its group for a destination when the link is dead or nothing beyond it leads there, as BGP
withdraws a route; the hash is then taken modulo the members that are left, so the group's other flows move too. Not
covered: resilient hashing, which moves only the flows of the dead member, and the seconds until routes converge.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topology.ecmp.hashing import Ecmp, Stage
from topology.ecmp.routing import NO_LINK
from topology.fabric.clos import Clos, Ints, Tier

Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Reach:
    """Links that each switch can still use; T ToRs, U uplinks, P planes, S spines, C cores a plane.

    `tor_up` (T, U) uplinks; `tor_down` (T, P, links) from the spine of each plane; `spine_up` (S, C, links);
    `spine_down` (S, C, links) from the core switches; `pods` (P, pods, pods) whether a plane joins two pods.
    """

    tor_up: Bools
    tor_down: Bools
    spine_up: Bools
    spine_down: Bools
    pods: Bools

    @classmethod
    def of(cls, fabric: Clos, alive: Bools) -> Reach:
        """Return the reach with only the links of the mask `alive`."""
        design = fabric.design
        per_tor = (design.num_tors, design.spines_per_pod, design.links_per_tor_spine)
        per_spine = (design.num_spines, design.cores_per_plane, design.links_per_spine_core)
        spine_up, spine_down = (alive[fabric.tier_links(tier)].reshape(per_spine) for tier in _CORE_TIERS)
        by_pod = (design.num_pods, design.spines_per_pod, design.cores_per_plane)
        up, down = (_any(links).reshape(by_pod).transpose(1, 0, 2) for links in (spine_up, spine_down))
        network = np.arange(design.num_pods) // design.pods_per_network
        return cls(
            tor_up=alive[fabric.tier_links(Tier.TOR_SPINE)].reshape(design.num_tors, design.tor_uplinks),
            tor_down=alive[fabric.tier_links(Tier.SPINE_TOR)].reshape(per_tor),
            spine_up=spine_up,
            spine_down=spine_down,
            pods=_any(up[:, :, None, :] & down[:, None, :, :]) & (network[:, None] == network),
        )

    def uplinks(self, src_tor: Ints, dst_tor: Ints, src_pod: Ints, dst_pod: Ints) -> Bools:
        """Uplinks of the source's ToR that lead to the destination's, shape (num_pairs, U)."""
        onward = _any(self.tor_down)[dst_tor]
        onward &= (src_pod == dst_pod)[:, None] | self.pods[:, src_pod, dst_pod].T
        return np.asarray(self.tor_up[src_tor] & onward.repeat(self.tor_down.shape[2], axis=1))


_CORE_TIERS = (Tier.SPINE_CORE, Tier.CORE_SPINE)


def route_around(fabric: Clos, src_nic: Ints, dst_nic: Ints, ecmp: Ecmp, alive: Bools) -> tuple[Ints, Bools]:
    """Paths as `routing.route` gives them, over living links alone, and whether each flow has one.

    Args:
        fabric: the whole fabric.
        src_nic, dst_nic: endpoints of the flows.
        ecmp: the switches' choices, made for the headers of the same flows.
        alive: a mask over links.

    A flow without a path has NO_LINK everywhere.
    """
    reach, design = Reach.of(fabric, alive), fabric.design
    src_tor, dst_tor = fabric.tor_of(src_nic), fabric.tor_of(dst_nic)
    src_pod, dst_pod = fabric.pod_of(src_tor), fabric.pod_of(dst_tor)
    leaves_tor, leaves_pod = src_tor != dst_tor, src_pod != dst_pod
    nic_up, nic_down = fabric.nic_link(src_nic, Tier.NIC_TOR), fabric.nic_link(dst_nic, Tier.TOR_NIC)
    members = reach.uplinks(src_tor, dst_tor, src_pod, dst_pod)
    reached = alive[nic_up] & alive[nic_down] & (members.any(axis=1) | ~leaves_tor)

    uplink = _pick(ecmp, Stage.TOR_UP, fabric.tor_nodes(src_tor), members)
    plane = uplink // design.links_per_tor_spine
    src_spine, dst_spine = (pod * design.spines_per_pod + plane for pod in (src_pod, dst_pod))
    parallel = _pick(ecmp, Stage.SPINE_DOWN, fabric.spine_nodes(dst_spine), reach.tor_down[dst_tor, plane])
    paths = np.full((len(src_nic), len(Tier)), NO_LINK, dtype=np.int64)
    paths[:, Tier.NIC_TOR], paths[:, Tier.TOR_NIC] = nic_up, nic_down
    downlink = plane * design.links_per_tor_spine + parallel
    paths[leaves_tor, Tier.TOR_SPINE] = fabric.tor_link(src_tor, uplink, Tier.TOR_SPINE)[leaves_tor]
    paths[leaves_tor, Tier.SPINE_TOR] = fabric.tor_link(dst_tor, downlink, Tier.SPINE_TOR)[leaves_tor]
    if leaves_pod.any():
        up, down = _through_core(fabric, reach, (src_spine, dst_spine), ecmp)
        paths[leaves_pod, Tier.SPINE_CORE] = up[leaves_pod]
        paths[leaves_pod, Tier.CORE_SPINE] = down[leaves_pod]
    paths[~reached] = NO_LINK
    return paths, reached


def unreachable_pairs(fabric: Clos, alive: Bools) -> tuple[int, int]:
    """Ordered pairs of NICs of different servers with no path, and all that the whole fabric joins.

    Pairs of two dead NICs count: what is asked is which transfers cannot be made.
    """
    design = fabric.design
    sends, receives = alive[fabric.tier_links(Tier.NIC_TOR)], alive[fabric.tier_links(Tier.TOR_NIC)]
    nic = np.arange(design.num_nics)
    home = fabric.tor_of(nic)
    reach = Reach.of(fabric, alive)
    joined = _tors_joined(fabric, reach)
    from_tor, to_tor = (np.bincount(home[live], minlength=design.num_tors) for live in (sends, receives))
    good = int(from_tor @ joined.astype(np.int64) @ to_tor) - _inside_servers(fabric, home, joined, sends, receives)
    total = design.num_nics * (design.num_nics - design.nics_per_server) // design.num_networks
    return total - good, total


def _inside_servers(fabric: Clos, home: Ints, joined: Bools, sends: Bools, receives: Bools) -> int:
    """Pairs with a path that begin and end in one server, which NVLink serves."""
    per_server = (fabric.design.num_servers, fabric.design.nics_per_server)
    tor, out, back = home.reshape(per_server), sends.reshape(per_server), receives.reshape(per_server)
    pairs = joined[tor[:, :, None], tor[:, None, :]] & out[:, :, None] & back[:, None, :]
    return int(pairs.sum())


def _tors_joined(fabric: Clos, reach: Reach) -> Bools:
    """Whether a path leads from each ToR to each other, shape (T, T)."""
    tors = np.arange(fabric.design.num_tors)
    pod = fabric.pod_of(tors)
    up, down = _any(reach.tor_up.reshape(reach.tor_down.shape)), _any(reach.tor_down)
    joined = np.eye(len(tors), dtype=np.bool_)
    for plane in range(fabric.design.spines_per_pod):
        between = (pod[:, None] == pod[None, :]) | reach.pods[plane][pod[:, None], pod[None, :]]
        joined |= np.outer(up[:, plane], down[:, plane]) & between
    return joined


def _through_core(fabric: Clos, reach: Reach, spines: tuple[Ints, Ints], ecmp: Ecmp) -> tuple[Ints, Ints]:
    """The link up to a core switch that still leads to the other spine, and the link from there down to it."""
    (src_spine, dst_spine), design = spines, fabric.design
    onward = reach.spine_up[src_spine] & _any(reach.spine_down)[dst_spine][:, :, None]
    uplink = _pick(ecmp, Stage.SPINE_UP, fabric.spine_nodes(src_spine), onward.reshape(len(src_spine), -1))
    core = uplink // design.links_per_spine_core
    node = fabric.core_nodes(fabric.core_of(src_spine, core))
    parallel = _pick(ecmp, Stage.CORE_DOWN, node, reach.spine_down[dst_spine, core])
    downlink = core * design.links_per_spine_core + parallel
    return (
        fabric.spine_link(src_spine, uplink, Tier.SPINE_CORE),
        fabric.spine_link(dst_spine, downlink, Tier.CORE_SPINE),
    )


def _any(links: Bools) -> Bools:
    """Whether any of the parallel links, the last axis, is there."""
    return np.asarray(links.any(axis=-1))


def _pick(ecmp: Ecmp, stage: Stage, switch: Ints, members: Bools) -> Ints:
    """The member that each flow takes among those of its row; 0 where there is none."""
    sizes = members.sum(axis=1)
    chosen = np.zeros(len(switch), dtype=np.int64)
    for size in np.unique(sizes[sizes > 0]):
        of_size = sizes == size
        chosen[of_size] = ecmp.choose(stage, switch, int(size))[of_size]
    if members.all():
        return chosen
    # The chosen-th True of each row: where the running count first reaches it.
    running = np.cumsum(members, axis=1, dtype=np.int16)
    return np.asarray((running > chosen[:, None]).argmax(axis=1), dtype=np.int64)

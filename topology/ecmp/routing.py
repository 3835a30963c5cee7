"""The links that each flow crosses: up by ECMP as far as it must, down by the one way there is.

In a CLOS the way down is fixed but for parallel links between the same two switches; the upper switch hashes over
those too. Not covered: failed links, weighted groups, and packets of one flow on different paths.
"""

from __future__ import annotations

import numpy as np

from topology.ecmp.hashing import Ecmp, Stage
from topology.fabric.clos import Clos, Ints, Tier

# As an index it is the last entry: tables over links that paths index have one more for it (`Load._overloaded`).
NO_LINK = -1


def route(fabric: Clos, src_nic: Ints, dst_nic: Ints, ecmp: Ecmp) -> Ints:
    """Link ids, shape (num_flows, 6): column t is the flow's link of `Tier` t, or NO_LINK where it turns below.

    Args:
        fabric: the fabric.
        src_nic, dst_nic: endpoints; no flow may end where it begins.
        ecmp: the switches' choices, made for the headers of the same flows.

    Raises:
        ValueError: a flow's two ends are one NIC.
        ConfigError: in a rail-only network a flow would cross from rail to rail.
    """
    if np.any(src_nic == dst_nic):
        raise ValueError("a flow begins and ends at one NIC")
    fabric.check_joined(src_nic, dst_nic)
    design = fabric.design
    src_tor, dst_tor = fabric.tor_of(src_nic), fabric.tor_of(dst_nic)
    src_pod, dst_pod = fabric.pod_of(src_tor), fabric.pod_of(dst_tor)
    # Flows that turn below choose too, without an effect: the masks drop their links, and they change no other's
    # choice.
    uplink = ecmp.choose(Stage.TOR_UP, fabric.tor_nodes(src_tor), design.tor_uplinks)
    plane = uplink // design.links_per_tor_spine
    # A core switch joins the spines of one plane, so the first uplink fixes the spine in the other pod as well.
    src_spine, dst_spine = (pod * design.spines_per_pod + plane for pod in (src_pod, dst_pod))
    parallel = ecmp.choose(Stage.SPINE_DOWN, fabric.spine_nodes(dst_spine), design.links_per_tor_spine)
    downlink = plane * design.links_per_tor_spine + parallel

    paths = np.full((len(src_nic), len(Tier)), NO_LINK, dtype=np.int64)
    paths[:, Tier.NIC_TOR] = fabric.nic_link(src_nic, Tier.NIC_TOR)
    paths[:, Tier.TOR_NIC] = fabric.nic_link(dst_nic, Tier.TOR_NIC)
    leaves_tor = src_tor != dst_tor
    paths[leaves_tor, Tier.TOR_SPINE] = fabric.tor_link(src_tor, uplink, Tier.TOR_SPINE)[leaves_tor]
    paths[leaves_tor, Tier.SPINE_TOR] = fabric.tor_link(dst_tor, downlink, Tier.SPINE_TOR)[leaves_tor]
    leaves_pod = src_pod != dst_pod
    # Two tiers have no pods to leave, and no core: groups of 0 members, by which a hash cannot be divided.
    if leaves_pod.any():
        up, down = _through_core(fabric, src_spine, dst_spine, ecmp)
        paths[leaves_pod, Tier.SPINE_CORE] = up[leaves_pod]
        paths[leaves_pod, Tier.CORE_SPINE] = down[leaves_pod]
    return paths


def _through_core(fabric: Clos, src_spine: Ints, dst_spine: Ints, ecmp: Ecmp) -> tuple[Ints, Ints]:
    """The link up to a core switch of the plane, and the link from there to the other pod's spine of the plane."""
    design = fabric.design
    uplink = ecmp.choose(Stage.SPINE_UP, fabric.spine_nodes(src_spine), design.spine_uplinks)
    # The core switch is fixed by the uplink; what it chooses itself is one of its parallel links to the other spine.
    core = uplink // design.links_per_spine_core
    node = fabric.core_nodes(fabric.core_of(src_spine, core))
    parallel = ecmp.choose(Stage.CORE_DOWN, node, design.links_per_spine_core)
    downlink = core * design.links_per_spine_core + parallel
    return (
        fabric.spine_link(src_spine, uplink, Tier.SPINE_CORE),
        fabric.spine_link(dst_spine, downlink, Tier.CORE_SPINE),
    )

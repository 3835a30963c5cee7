import numpy as np
import pytest

from tests.topology.fabrics import cluster
from topology.clos import Clos, Tier
from topology.contention import Contention, contend
from topology.load import place
from topology.members import members
from topology.routing import NO_LINK
from topology.traffic import Flows, Kind


def _four_flows() -> tuple[Flows, Contention]:
    """Four flows at NIC rate 200 between two ToRs: three on one uplink of 400, the fourth on another."""
    fabric = Clos.build(cluster(tiers=2, pods=1))
    src, dst = np.arange(4), np.arange(32, 36)
    flows = Flows(src, dst, np.full(4, 25.0), np.full(4, Kind.FILE, np.int8))
    paths = np.full((4, len(Tier)), NO_LINK, dtype=np.int64)
    paths[:, Tier.NIC_TOR], paths[:, Tier.TOR_NIC] = (
        fabric.nic_link(src, Tier.NIC_TOR),
        fabric.nic_link(dst, Tier.TOR_NIC),
    )
    for tier in (Tier.TOR_SPINE, Tier.SPINE_TOR):
        paths[:, tier] = fabric.tor_link(np.full(4, int(tier == Tier.SPINE_TOR)), np.array([5, 5, 5, 6]), tier)
    return flows, contend(place(fabric, flows, paths))


def test_three_on_a_link_for_two_are_slower_by_half() -> None:
    flows, held = _four_flows()
    np.testing.assert_allclose(held.slowdown, [1.5, 1.5, 1.5, 1])
    assert held.slowdowns() == (pytest.approx(1.375), pytest.approx(1.5))
    assert held.slowdowns([Tier.SPINE_CORE]) == (1.0, 1.0)
    times = held.times(flows, resolution=0)
    assert times == pytest.approx({"completion_s": 1.5, "uncongested_s": 1.0, "bound_s": 1.5, "slowdown": 1.5})


def test_the_link_to_blame_is_named_with_its_flows() -> None:
    _, held = _four_flows()
    fabric = held.loaded.fabric
    (row,) = held.bottlenecks()
    assert row["link"] in held.loaded.paths[0]
    assert (row["tier"], row["flows"], row["held_back"], row["first_flows"]) == ("tor-spine", 3, 3, [0, 1, 2])
    assert row["src_node"] == fabric.tor_nodes(np.array([0]))[0]
    assert (row["fair_bps"], row["slowdown"]) == (pytest.approx(400 / 3), pytest.approx(1.5))


def test_shares_of_a_group_by_hand() -> None:
    _, held = _four_flows()
    (uplinks,) = [each for each in members(held.loaded) if each.tier == Tier.TOR_SPINE]
    assert uplinks.share.shape == (1, held.loaded.fabric.design.tor_uplinks)
    assert sorted(uplinks.share[0])[-3:] == [0, 0.25, 0.75]
    row = uplinks.row()
    assert (row["max_share"], row["unused_members"], row["groups"]) == (0.75, row["members"] - 2, 1)
    assert row["binomial_deviation"] == pytest.approx(np.sqrt((row["members"] - 1) / 4))
    assert uplinks.first_link.tolist() == [held.loaded.fabric.tier_links(Tier.TOR_SPINE).start]

import dataclasses

import numpy as np
import pytest

from tests.topology.fabrics import cluster
from topology.ecmp.load import place
from topology.ecmp.members import members
from topology.ecmp.routing import NO_LINK
from topology.fabric.clos import Clos, Tier
from topology.rates.contention import Contention, busiest, contend
from topology.traffic.job import Flows, Kind


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
    assert times == pytest.approx({"completion_s": 1.5, "uncongested_s": 1.0, "bound_s": 1.5, "slowdown": 1.375})


def test_starts_neither_hide_a_slowdown_nor_pass_for_time_taken() -> None:
    """The four flows again, all 1000 s after a first one that is alone."""
    flows, held = _four_flows()
    late = dataclasses.replace(flows.where(np.array([0, 0, 1, 2, 3])), start_s=np.array([0.0, 1e3, 1e3, 1e3, 1e3]))
    times = contend(place(held.loaded.fabric, late, held.loaded.paths[[0, 0, 1, 2, 3]])).times(late, resolution=0)
    assert times["completion_s"] == times["bound_s"] == pytest.approx(1001.5)
    assert times["slowdown"] == pytest.approx((1 + 3 * 1.5 + 1) / 5)


def test_of_flows_with_starts_those_of_the_busiest_instant_are_taken() -> None:
    fabric = Clos.build(cluster(tiers=2, pods=1))
    src, dst = np.array([0, 1, 2, 3, 4, 0]), np.array([32, 33, 34, 35, 5, 36])
    start_s = np.array([0.0, 50.0, 50.5, 50.9, 50.95, 51.95])  # a second each; the fifth stays under its ToR
    flows = Flows(src, dst, np.full(6, 25.0), np.full(6, Kind.FILE, np.int8), start_s)
    among, at_s = busiest(fabric, flows)
    assert (among.tolist(), at_s) == ([1, 2, 3], 50.9)
    assert busiest(fabric, dataclasses.replace(flows, start_s=None))[0].tolist() == list(range(6))
    assert busiest(fabric, dataclasses.replace(flows, start_s=np.zeros(6)))[0].tolist() == list(range(6))
    assert busiest(fabric, flows.where(np.zeros(0, dtype=np.int64)))[0].tolist() == []


def test_a_crowd_under_one_tor_counts_more_than_many_flows_apart() -> None:
    fabric = Clos.build(cluster(tiers=2, pods=1))
    apart = np.arange(4) * 32  # one flow a ToR, 4 at a time, then 3 that share both ToRs
    src, dst = np.r_[apart, 0, 1, 2], np.r_[np.roll(apart, 1), 32, 33, 34]
    start_s = np.r_[np.zeros(4), np.full(3, 1000.0)]
    flows = Flows(src, dst, np.full(7, 25.0), np.full(7, Kind.FILE, np.int8), start_s)
    among, at_s = busiest(fabric, flows)
    assert (among.tolist(), at_s) == ([4, 5, 6], 1000.0)


def test_flows_that_never_meet_do_not_collide() -> None:
    """Three on one uplink for two, a second each, ten seconds apart."""
    flows, held = _four_flows()
    apart = dataclasses.replace(flows, start_s=np.arange(4) * 10.0)
    among, _ = busiest(held.loaded.fabric, apart)
    assert held.loaded.collisions().share > 0
    assert place(held.loaded.fabric, apart.where(among), held.loaded.paths[among]).collisions().share == 0


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
    row = uplinks.to_row()
    assert (row["max_share"], row["unused_members"], row["groups"]) == (0.75, row["members"] - 2, 1)
    assert row["binomial_deviation"] == pytest.approx(np.sqrt((row["members"] - 1) / 4))
    assert uplinks.first_link.tolist() == [held.loaded.fabric.tier_links(Tier.TOR_SPINE).start]

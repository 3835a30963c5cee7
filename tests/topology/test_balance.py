import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netlayer.config.tree import ClusterConfig
from tests.topology.fabrics import cluster, clusters
from topology.ecmp.balance import BALANCES, Adaptive, balance, chooser, spray
from topology.ecmp.hashing import Stage
from topology.ecmp.load import ECMP_TIERS
from topology.ecmp.members import members
from topology.fabric.clos import Clos, Tier
from topology.rates.contention import contend
from topology.traffic.job import Flows, headers, permutation


def _permutation(**changes: object) -> tuple[Clos, Flows]:
    fabric = Clos.build(cluster(servers=512, rails=2, nics_per_server=2, **changes))
    return fabric, permutation(fabric, 0)


def test_spraying_never_collides_and_fills_members_alike() -> None:
    fabric, flows = _permutation()
    loaded = spray(fabric, flows)
    found = loaded.collisions()
    assert (found.num_colliding, found.excess) == (0, 0)
    assert found.num_flows == len(flows)
    uplinks = loaded.link_bps[fabric.tier_links(Tier.TOR_SPINE)]
    np.testing.assert_allclose(uplinks, fabric.design.tor_uplink_bps)
    assert members(loaded) == []  # a group's members are even by definition
    held = contend(loaded)
    held.rates.certify()
    np.testing.assert_allclose(held.slowdown, 1)


def test_a_bottleneck_of_sprayed_flows_is_a_whole_group() -> None:
    fabric, flows = _permutation(oversubscription=2)
    held = contend(spray(fabric, flows))
    (row, *_) = [row for row in held.bottlenecks() if row["tier"] == Tier.TOR_SPINE.label]
    assert row["links"] == fabric.design.tor_uplinks
    hashed = contend(balance("random", fabric, flows, headers(fabric, flows, 0), 0))
    assert {row["links"] for row in hashed.bottlenecks()} == {1}


@given(clusters(), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_sprayed_bytes_are_conserved_tier_by_tier(tree: ClusterConfig, seed: int) -> None:
    fabric = Clos.build(tree)
    flows = permutation(fabric, seed)
    loaded = spray(fabric, flows)
    hashed = balance("random", fabric, flows, headers(fabric, flows, seed), seed)
    for tier in Tier:
        span = fabric.tier_links(tier)
        assert loaded.link_bps[span].sum() == pytest.approx(hashed.link_bps[span].sum())
    contend(loaded).rates.certify()


def test_adaptive_switches_fill_their_own_uplinks_without_collision() -> None:
    fabric, flows = _permutation()
    tuples = headers(fabric, flows, 0)
    adaptive, hashed = (balance(name, fabric, flows, tuples, 0) for name in ("adaptive", "random"))
    for tier in (Tier.TOR_SPINE, Tier.SPINE_CORE):
        assert adaptive.collisions([tier]).excess == 0 < hashed.collisions([tier]).excess
    assert adaptive.collisions([Tier.SPINE_TOR]).excess > 0  # further down, no switch can see it
    assert adaptive.collisions(ECMP_TIERS).excess < hashed.collisions(ECMP_TIERS).excess
    assert np.array_equal(adaptive.paths, balance("adaptive", fabric, flows, tuples, 0).paths)
    assert not np.array_equal(adaptive.paths, balance("adaptive", fabric, flows, tuples, 1).paths)


def test_a_flow_that_stays_below_weighs_nothing_above() -> None:
    fabric = Clos.build(cluster(tiers=2, pods=1))
    ends = np.array([0, 1, 2, 3])
    flows = Flows(ends, np.array([1, 2, 32, 33]), np.ones(4), np.zeros(4, np.int8))
    chosen = Adaptive(fabric, flows, 0).choose(Stage.TOR_UP, fabric.tor_nodes(fabric.tor_of(ends)), 2)
    assert chosen[2] != chosen[3]


def test_unknown_names_are_refused() -> None:
    fabric, flows = _permutation()
    with pytest.raises(ValueError, match="'md5'"):
        balance("md5", fabric, flows, headers(fabric, flows, 0), 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no one path"):
        chooser("spray", fabric, flows, headers(fabric, flows, 0), 0)


@pytest.mark.parametrize("name", BALANCES)
def test_every_balance_is_rated(name: str) -> None:
    fabric, flows = _permutation()
    held = contend(balance(name, fabric, flows, headers(fabric, flows, 3), 3))  # type: ignore[arg-type]
    held.rates.certify()
    mean, worst = held.slowdowns()
    assert 1 <= mean <= worst

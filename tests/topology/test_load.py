import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netlayer.config.tree import ClusterConfig
from tests.topology.fabrics import cluster, clusters
from topology.ecmp.balance import BalanceName, balance
from topology.ecmp.hashing import Ecmp
from topology.ecmp.load import Load, demand_bps, load, place, sum_per_link
from topology.ecmp.routing import NO_LINK
from topology.fabric.clos import Clos, Ints, Tier
from topology.traffic.job import Flows, Kind, headers, permutation


def _flows(src: list[int] | Ints, dst: list[int] | Ints) -> Flows:
    num_bytes = np.arange(1.0, len(src) + 1)
    return Flows(np.asarray(src), np.asarray(dst), num_bytes, np.full(len(src), Kind.PP_FORWARD, np.int8))


def _random_flows(fabric: Clos, seed: int) -> Flows:
    src, dst = np.random.default_rng(seed).integers(0, fabric.design.num_nics, (2, 200))
    return _flows(src[src != dst], dst[src != dst])


@given(clusters(), st.integers(0, 99))
def test_what_flows_into_a_switch_flows_out_of_it(tree: ClusterConfig, seed: int) -> None:
    fabric = Clos.build(tree)
    flows = _random_flows(fabric, seed)
    loaded = load(fabric, flows, Ecmp("random", headers(fabric, flows, seed), seed))
    for amounts in (loaded.flow_bps, flows.num_bytes):
        on_link = sum_per_link(fabric, loaded.paths, amounts)
        received = np.bincount(fabric.link_dst, weights=on_link, minlength=fabric.num_nodes)
        sent = np.bincount(fabric.link_src, weights=on_link, minlength=fabric.num_nodes)
        np.testing.assert_allclose(sent[fabric.design.num_nics :], received[fabric.design.num_nics :])
        assert sent[: fabric.design.num_nics].sum() == pytest.approx(amounts.sum())
        assert received[: fabric.design.num_nics].sum() == pytest.approx(amounts.sum())


@given(clusters(), st.integers(0, 99))
def test_no_nic_is_asked_to_send_more_than_its_rate(tree: ClusterConfig, seed: int) -> None:
    fabric = Clos.build(tree)
    flows = _random_flows(fabric, seed)
    loaded = load(fabric, flows, Ecmp("random", headers(fabric, flows, seed), seed))
    edge = loaded.collisions([Tier.NIC_TOR])
    assert edge.max_utilisation <= 1 + 1e-9
    assert edge.num_colliding == 0
    sent, received = (loaded.link_bps[fabric.tier_links(tier)].sum() for tier in (Tier.NIC_TOR, Tier.TOR_NIC))
    assert sent == pytest.approx(received)


@pytest.mark.parametrize("name", ["random", "spray"])
def test_eight_that_send_to_one_collide_on_its_downlink(name: BalanceName) -> None:
    """Each offers its NIC's 200, 1600 for a downlink of 200; the fabric in between carries an eighth of each."""
    fabric = Clos.build(cluster())
    flows = _flows(list(range(1, 9)), [64] * 8)
    loaded = balance(name, fabric, flows, headers(fabric, flows, 0), 0)
    incast = loaded.collisions([Tier.TOR_NIC])
    assert (incast.share, incast.excess, incast.max_utilisation) == (1.0, 7 / 8, 8.0)
    assert loaded.collisions([Tier.NIC_TOR]).share == 0
    assert loaded.collisions().share == 0
    assert loaded.link_bps[fabric.tier_links(Tier.TOR_SPINE)].sum() == pytest.approx(200)


def test_flows_of_a_nic_share_its_rate_at_the_fuller_end() -> None:
    fabric = Clos.build(cluster())
    demand = demand_bps(fabric, _flows([0, 0, 1, 2, 9], [64, 65, 64, 64, 90]))
    np.testing.assert_allclose(demand, [200 / 3, 100, 200 / 3, 200 / 3, 200])


def test_collisions_and_excess_by_hand() -> None:
    """Three flows at NIC rate 200 on one uplink of 400, a fourth on another: 200 too much out of 800."""
    fabric = Clos.build(cluster(tiers=2, pods=1))
    flows = _flows([0, 1, 2, 3], [32, 33, 34, 35])
    paths = np.full((4, len(Tier)), NO_LINK, dtype=np.int64)
    for tier, uplinks in ((Tier.TOR_SPINE, [5, 5, 5, 6]), (Tier.SPINE_TOR, [5, 5, 4, 6])):
        paths[:, tier] = fabric.tor_link(np.full(4, int(tier == Tier.SPINE_TOR)), np.array(uplinks), tier)
    loaded = place(fabric, flows, paths)
    found = loaded.collisions([Tier.TOR_SPINE])
    assert (found.num_flows, found.num_colliding, found.num_overloaded) == (4, 3, 1)
    assert (found.share, found.excess, found.max_utilisation) == (0.75, 0.25, 1.5)
    assert found.utilisation == pytest.approx(800 / (64 * 400))
    assert loaded.collisions([Tier.SPINE_TOR]).share == 0  # two flows that fill a link exactly do not collide
    assert loaded.collisions().excess == pytest.approx(200 / 1600)
    assert loaded.collisions().share == 0.75


def test_rates_that_round_do_not_collide() -> None:
    """Six flows of a third of a NIC fill one uplink of two NICs."""
    fabric = Clos.build(cluster())
    third = np.full(6, 200 / 3)
    over = Load(fabric, np.zeros((6, 6), dtype=np.int64), third, np.full(fabric.num_links, third.sum() * (1 + 1e-15)))
    assert over.collisions([Tier.TOR_SPINE]).num_overloaded == 0


def test_no_flows_is_no_load() -> None:
    fabric = Clos.build(cluster())
    none = _flows(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    found = load(fabric, none, Ecmp("crc16", headers(fabric, none, 0), 0)).collisions()
    assert (found.num_flows, found.share, found.excess, found.utilisation) == (0, 0.0, 0.0, 0.0)


def test_a_permutation_fills_both_ends_of_the_fabric() -> None:
    fabric = Clos.build(cluster())
    flows = permutation(fabric, 1)
    loaded = load(fabric, flows, Ecmp("crc32c", headers(fabric, flows, 1), 1))
    assert loaded.collisions([Tier.TOR_SPINE]).utilisation == pytest.approx(1.0)
    assert loaded.collisions([Tier.NIC_TOR]).utilisation == 1.0

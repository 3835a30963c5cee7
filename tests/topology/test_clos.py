import logging

import networkx as nx
import numpy as np
import pytest
from hypothesis import given

from netlayer.config.file import load_config
from netlayer.config.tree import ClusterConfig
from tests.topology.fabrics import EXAMPLES, cluster, clusters, megascale
from topology.fabric.clos import Clos, Tier


def test_describe_counts_megascale() -> None:
    fabric = Clos.build(megascale().cluster)
    rows = {row["level"]: row for row in fabric.describe()}
    assert {level: row["count"] for level, row in rows.items()} == {
        "server": 1536,
        "tor": 192,
        "spine": 192,
        "core": 128,
    }
    assert rows["core"]["ports_left"] == 16
    assert rows["tor"]["up_bps"] == rows["spine"]["up_bps"] == 12_288 * 200e9
    assert [row["path_hops"] for row in fabric.describe()] == [0, 2, 4, 6]
    assert fabric.summary()["bisection_bps"] == 12_288 * 200e9 / 2
    assert fabric.num_links == 2 * (12_288 + 2 * 6_144)


def test_two_tiers_have_no_core() -> None:
    fabric = Clos.build(cluster(tiers=2, pods=1))
    assert [row["level"] for row in fabric.describe()] == ["server", "tor", "spine"]
    assert fabric.tier_bps(Tier.SPINE_CORE) == 0


@given(clusters())
def test_every_link_has_its_reverse_in_the_mirrored_tier(tree: ClusterConfig) -> None:
    fabric = Clos.build(tree)
    for tier in Tier:
        there, back = fabric.tier_links(tier), fabric.tier_links(Tier(len(Tier) - 1 - tier))
        assert np.array_equal(fabric.link_src[there], fabric.link_dst[back])
        assert np.array_equal(fabric.link_bps[there], fabric.link_bps[back])
        assert (fabric.link_tier[there] == tier).all()


@given(clusters())
def test_wires_join_what_the_numbering_says(tree: ClusterConfig) -> None:
    fabric = Clos.build(tree)
    nics = np.arange(fabric.design.num_nics)
    up = fabric.nic_link(nics, Tier.NIC_TOR)
    assert np.array_equal(fabric.link_src[up], nics)
    assert np.array_equal(fabric.link_dst[up], fabric.tor_nodes(fabric.tor_of(nics)))
    pairs = np.stack([fabric.link_src, fabric.link_dst])[:, fabric.tier_links(Tier.TOR_SPINE)]
    _, parallel = np.unique(pairs, axis=1, return_counts=True)
    assert set(parallel) == {fabric.design.links_per_tor_spine}


def test_bisection_is_that_of_the_narrowest_tier() -> None:
    assert Clos.build(cluster()).bisection_bps == 128 * 200 / 2
    assert Clos.build(cluster(oversubscription=2)).bisection_bps == 128 * 200 / 4


def test_uplinks_do_not_bound_the_servers_of_one_tor_set() -> None:
    """Each rail's ToR reaches every server: half of the NICs send to the other half below all uplinks."""
    one_set = cluster(
        servers=8,
        gpus_per_server=8,
        nics_per_server=8,
        rails=8,
        servers_per_tor_set=8,
        oversubscription=4,
        tiers=2,
        pods=1,
    )
    fabric = Clos.build(one_set)
    assert fabric.bisection_bps == 64 * 200 / 2 > fabric.tier_bps(Tier.TOR_SPINE) / 2


def test_a_rail_is_a_prefix_and_every_nic_has_the_odd_address_of_a_pair() -> None:
    fabric = Clos.build(cluster(nics_per_server=2, rails=2))
    addresses = fabric.address_of(np.arange(fabric.design.num_nics))
    assert len(set(addresses.tolist())) == fabric.design.num_nics
    assert addresses[5] == (10 << 24) + (1 << 16) + 2 * 2 + 1


@given(clusters(rail_only=True))
def test_a_rail_only_network_has_each_rails_switches_to_itself(tree: ClusterConfig) -> None:
    fabric = Clos.build(tree)
    design = fabric.design
    rail = np.full(fabric.num_nodes, -1)
    rail[: design.num_nics] = fabric.network_of(np.arange(design.num_nics))
    for tier in (Tier.NIC_TOR, Tier.TOR_SPINE, Tier.SPINE_CORE):
        span = fabric.tier_links(tier)
        rail[fabric.link_dst[span]] = rail[fabric.link_src[span]]
    assert np.array_equal(rail[fabric.link_src], rail[fabric.link_dst])
    assert (rail >= 0).all()
    tors = [fabric.tors_of_rail(one) for one in range(tree.rails)]
    assert all((rail[fabric.tor_nodes(of_rail)] == one).all() for one, of_rail in enumerate(tors))
    whole = Clos.build(tree.model_copy(update={"nics_per_server": tree.nics_per_server // tree.rails, "rails": 1}))
    assert fabric.num_links == tree.rails * whole.num_links
    assert fabric.bisection_bps == tree.rails * whole.bisection_bps


def test_one_server_is_a_fabric_too(caplog: pytest.LogCaptureFixture) -> None:
    fabric = Clos.build(load_config(EXAMPLES / "laptop.toml").cluster)
    assert fabric.summary()["servers"] == 1
    assert not caplog.records


def test_a_split_without_effect_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Clos.build(cluster(nic_bps=400, servers_per_tor_set=16))
    assert "aoc_split has no effect" in caplog.text


@pytest.mark.parametrize("servers", [2, 3, 4, 5, 7])
@pytest.mark.parametrize("oversubscription", [1, 2])
def test_bisection_is_no_more_than_the_largest_flow_between_two_halves(servers: int, oversubscription: int) -> None:
    tree = cluster(
        servers=servers,
        servers_per_tor_set=8,
        pods=1,
        tiers=2,
        gpus_per_server=4,
        nics_per_server=4,
        rails=4,
        oversubscription=oversubscription,
    )
    fabric = Clos.build(tree)
    net = nx.DiGraph()
    for src, dst, bps in zip(fabric.link_src.tolist(), fabric.link_dst.tolist(), fabric.link_bps.tolist(), strict=True):
        net.add_edge(src, dst, capacity=net.get_edge_data(src, dst, {"capacity": 0.0})["capacity"] + bps)
    # NICs of a server reach one another inside it.
    nics, half = 4, servers // 2
    for server in range(servers):
        for nic in range(server * nics, (server + 1) * nics):
            net.add_edge(*(("from", nic) if server < half else (nic, "to")))
    assert fabric.bisection_bps <= nx.maximum_flow_value(net, "from", "to") * (1 + 1e-9)

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netlayer.config.tree import ClusterConfig
from netlayer.errors import ConfigError
from tests.topology.fabrics import cluster, clusters
from topology.ecmp.hashing import HASHES, Ecmp, HashName, Headers
from topology.ecmp.routing import NO_LINK, route
from topology.fabric.clos import Clos, Ints, Tier


def _ecmp(fabric: Clos, src: Ints, dst: Ints, name: HashName = "random") -> Ecmp:
    ports = (0xC000 + np.arange(len(src)) % 0x4000).astype(np.uint16)
    return Ecmp(name, Headers(fabric.address_of(src), fabric.address_of(dst), ports), seed=1)


@given(clusters(), st.sampled_from(HASHES))
def test_every_pair_is_joined_by_a_path_of_the_formulas_length(tree: ClusterConfig, name: HashName) -> None:
    fabric = Clos.build(tree)
    nics = np.arange(min(fabric.design.num_nics, 60)) * max(1, fabric.design.num_nics // 60)
    src, dst = (grid.ravel() for grid in np.meshgrid(nics, nics, indexing="ij"))
    src, dst = src[src != dst], dst[src != dst]
    paths = route(fabric, src, dst, _ecmp(fabric, src, dst, name))
    assert np.array_equal((paths != NO_LINK).sum(axis=1), fabric.hops(src, dst))
    at = src.copy()
    for tier in Tier:
        crossed = paths[:, tier] != NO_LINK
        link = paths[crossed, tier]
        assert (fabric.link_tier[link] == tier).all()
        assert np.array_equal(fabric.link_src[link], at[crossed])
        at[crossed] = fabric.link_dst[link]
    assert np.array_equal(at, dst)


def test_hops_are_0_2_4_and_6() -> None:
    fabric = Clos.build(cluster())
    assert fabric.hops(np.array([0, 0, 0, 0]), np.array([0, 1, 32, 64])).tolist() == [0, 2, 4, 6]


def test_many_flows_reach_every_link_between_the_tiers() -> None:
    fabric = Clos.build(cluster(aoc_split=False))
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, 64, 20_000), rng.integers(64, 128, 20_000)
    paths = route(fabric, src, dst, _ecmp(fabric, src, dst))
    for tier in Tier:
        span = fabric.tier_links(tier)
        assert len(np.unique(paths[:, tier])) == (span.stop - span.start) / 2  # one pod sends, one receives


def test_a_flow_to_itself_is_refused() -> None:
    fabric = Clos.build(cluster())
    ends = np.array([3])
    with pytest.raises(ValueError, match="begins and ends at one NIC"):
        route(fabric, ends, ends, _ecmp(fabric, ends, ends))


def test_a_rail_only_network_refuses_flows_from_rail_to_rail() -> None:
    fabric = Clos.build(cluster(nics_per_server=2, rails=2, rail_only=True))
    src, dst = np.array([0, 0, 1]), np.array([2, 7, 100])
    rule = "cluster.rail_only = true: 2 of 3 flows would cross from rail to rail, which no switch joins: the first from"
    with pytest.raises(ConfigError, match=rule):
        route(fabric, src, dst, _ecmp(fabric, src, dst))
    assert fabric.hops(src, dst).tolist() == [2, 0, 0]

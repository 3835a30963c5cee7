import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netlayer.config.tree import ClusterConfig
from netlayer.errors import ConfigError
from tests.topology.fabrics import clusters, megascale
from tests.topology.jobs import small
from topology.ecmp.hashing import Ecmp
from topology.ecmp.routing import NO_LINK, route
from topology.fabric.clos import Clos, Tier
from topology.failures.faults import (
    KINDS,
    Failure,
    FailureKind,
    alive_links,
    count,
    lost_capacity,
    parse_failure,
    random_failures,
    single_failures,
)
from topology.failures.survivors import route_around, unreachable_pairs
from topology.traffic.job import headers, permutation

FABRIC = Clos.build(small().cluster)


CLUSTERS = st.one_of(clusters(), clusters(rail_only=True))


@given(cluster=CLUSTERS, seed=st.integers(0, 9))
def test_with_nothing_failed_the_routes_are_those_of_the_whole_fabric(cluster: ClusterConfig, seed: int) -> None:
    fabric = Clos.build(cluster)
    flows = permutation(fabric, seed)
    ecmp = Ecmp("crc16", headers(fabric, flows, seed), seed)
    alive = np.ones(fabric.num_links, dtype=np.bool_)
    paths, reached = route_around(fabric, flows.src_nic, flows.dst_nic, ecmp, alive)
    assert reached.all()
    assert np.array_equal(paths, route(fabric, flows.src_nic, flows.dst_nic, ecmp))


@given(cluster=CLUSTERS, seed=st.integers(0, 99), share=st.floats(0.0, 0.9))
def test_routes_use_living_links_and_are_missing_only_where_no_way_is_left(
    cluster: ClusterConfig, seed: int, share: float
) -> None:
    fabric = Clos.build(cluster)
    flows = permutation(fabric, seed)
    if not len(flows):
        return
    alive = np.random.default_rng(seed).random(fabric.num_links) >= share
    ecmp = Ecmp("random", headers(fabric, flows, seed), seed)
    paths, reached = route_around(fabric, flows.src_nic, flows.dst_nic, ecmp, alive)
    assert alive[paths[paths != NO_LINK]].all()
    assert (paths[~reached] == NO_LINK).all()
    hops = (paths != NO_LINK).sum(axis=1)
    assert np.array_equal(hops[reached], fabric.hops(flows.src_nic, flows.dst_nic)[reached])
    for flow in range(min(len(flows), 4)):
        assert reached[flow] == _joined(fabric, alive, int(flows.src_nic[flow]), int(flows.dst_nic[flow]))


def _joined(fabric: Clos, alive: np.ndarray, src: int, dst: int) -> bool:
    """Up and then down over living links, by search: what a valley-free route can reach."""
    front, live = {src}, np.flatnonzero(alive)
    height = {0: set(front)}
    for level, tier in enumerate((Tier.NIC_TOR, Tier.TOR_SPINE, Tier.SPINE_CORE), start=1):
        links = live[fabric.link_tier[live] == tier]
        front = {int(fabric.link_dst[link]) for link in links if int(fabric.link_src[link]) in front}
        height[level] = front
    reached = height[3]
    for level, tier in ((2, Tier.CORE_SPINE), (1, Tier.SPINE_TOR), (0, Tier.TOR_NIC)):
        links = live[fabric.link_tier[live] == tier]
        reached = {int(fabric.link_dst[link]) for link in links if int(fabric.link_src[link]) in reached}
        reached |= height[level] if level else set()
    return dst in reached


@pytest.mark.parametrize("kind", [kind for kind in KINDS if count(FABRIC, kind)])
def test_a_part_takes_its_links_along(kind: FailureKind) -> None:
    alive = alive_links(FABRIC, [Failure(kind, count(FABRIC, kind) - 1)])
    dead = int((~alive).sum())
    design = FABRIC.design
    links = {
        "nic-link": 2,
        "tor-link": 2,
        "core-link": 2,
        "optic-down": 2 * design.lanes_per_port,
        "optic-up": 2,
        "tor": 2 * (design.nics_per_tor + design.tor_uplinks),
        "spine": 2 * (design.tors_per_pod * design.links_per_tor_spine + design.spine_uplinks),
        "core": 2 * design.num_pods * design.links_per_spine_core,
        "rail": 2 * design.num_tors * (design.nics_per_tor + design.tor_uplinks),
    }
    assert dead == links[kind]
    assert lost_capacity(FABRIC, alive)[0] > 0


@given(cluster=CLUSTERS, seed=st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_every_part_that_can_fail_takes_something_along(cluster: ClusterConfig, seed: int) -> None:
    """Also where the last ToR set is partly filled: a port without a cable is no part."""
    fabric = Clos.build(cluster)
    taken = np.zeros(fabric.num_links, dtype=np.int64)
    for kind in KINDS:
        for failure in single_failures(fabric, kind, None if kind == "optic-down" else 3, seed):
            alive = alive_links(fabric, [failure])
            assert lost_capacity(fabric, alive)[0] > 0
            taken += ~alive if kind == "optic-down" else 0
    for tier in (Tier.NIC_TOR, Tier.TOR_NIC):  # each NIC hangs on one port
        assert (taken[fabric.tier_links(tier)] == 1).all()


def test_unreachable_pairs_are_those_of_a_dead_tor() -> None:
    fabric = Clos.build(megascale().cluster)
    pairs, total = unreachable_pairs(fabric, alive_links(fabric, [Failure("tor", 0)]))
    nics, lost = fabric.design.num_nics, fabric.design.nics_per_tor
    assert total == nics * (nics - 8)
    # Every lost NIC misses all NICs of other servers, both ways; pairs of two lost ones count once a direction.
    assert pairs == 2 * lost * (nics - 8) - lost * (lost - 1)
    spine = alive_links(fabric, [Failure("spine", 3)])
    assert unreachable_pairs(fabric, spine) == (0, total)


def test_in_a_rail_only_network_a_rail_fails_alone_and_pairs_across_rails_were_never_joined() -> None:
    fabric = Clos.build(megascale().cluster.model_copy(update={"rail_only": True}))
    nics = fabric.design.num_nics
    assert unreachable_pairs(fabric, alive_links(fabric, [])) == (0, nics * (nics // 8 - 1))
    pairs, total = unreachable_pairs(fabric, alive_links(fabric, [Failure("rail", 5)]))
    assert pairs * 8 == total


def test_a_sweep_takes_every_part_or_draws_them_by_seed() -> None:
    assert len(single_failures(FABRIC, "spine", None, 0)) == count(FABRIC, "spine")
    drawn = single_failures(FABRIC, "tor-link", 5, 1)
    assert len(set(drawn)) == 5
    assert drawn == single_failures(FABRIC, "tor-link", 5, 1)
    several = random_failures(FABRIC, ["tor", "spine"], 6, 0)
    assert len(set(several)) == 6
    assert {failure.kind for failure in several} <= {"tor", "spine"}
    with pytest.raises(ConfigError, match="lower it"):
        random_failures(FABRIC, ["tor"], 100, 0)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("leaf:3", "is no failure"),
        ("spine", "is no"),
        ("spine:\u00b2", "is no"),
        ("spine:" + "9" * 5000, "is no"),
        ("tor:99", "has 4"),
    ],
)
def test_unknown_parts_are_refused(text: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        parse_failure(text, FABRIC)

import numpy as np
import pytest
from hypothesis import given, settings

from netlayer.config.tree import ClusterConfig
from netlayer.errors import ConfigError
from tests.topology.fabrics import cluster, clusters, megascale
from topology.ecmp.graph_routing import UNREACHABLE, Routes
from topology.fabric.cable_plan import CablePlan
from topology.fabric.clos import Clos
from topology.fabric.graph import checked


@given(clusters())
def test_its_graph_is_the_clos(tree: ClusterConfig) -> None:
    cable_plan, fabric = CablePlan.build(tree), Clos.build(tree)
    graph = checked(cable_plan.graph(), "test")
    up = fabric.num_links // 2
    assert np.array_equal(graph.a, fabric.link_src[:up])
    assert np.array_equal(graph.b, fabric.link_dst[:up])
    assert np.array_equal(graph.bps, fabric.link_bps[:up])
    assert len(graph.hosts) == fabric.design.num_nics


@given(clusters())
def test_every_port_is_one_links_end_and_exists(tree: ClusterConfig) -> None:
    graph = CablePlan.build(tree).graph()
    ends = [*zip(graph.a.tolist(), graph.a_port, strict=True), *zip(graph.b.tolist(), graph.b_port, strict=True)]
    assert len(set(ends)) == len(ends)
    ports: dict[int, dict[int, float]] = {}
    for (node, port), rate in zip(ends, [*graph.bps, *graph.bps], strict=True):
        number = int(port.partition("/")[0])
        ports.setdefault(node, {}).setdefault(number, 0.0)
        ports[node][number] += rate
    for node, used in ports.items():
        if graph.is_switch[node]:
            assert min(used) >= 1
            assert max(used) <= tree.switch_radix
            assert max(used.values()) <= tree.switch_port_bps


def test_megascale_is_named_for_people() -> None:
    graph = CablePlan.build(megascale().cluster).graph()
    assert graph.link_name(8) == "srv0001/nic0:1 -> tor-s00-r0:1/2"
    assert graph.link_name(12_288 + 32 * 33) == "tor-s04-r1:33 -> spine-p1-00:2"
    assert graph.link_name(2 * 12_288 - 1) == "spine-p5-31:64 -> core-31-3:48"


def test_without_the_split_uplink_ports_are_broken_out_at_both_ends() -> None:
    graph = CablePlan.build(cluster(aoc_split=False)).graph()
    first = 128
    assert [graph.link_name(first + one) for one in (0, 1)] == [
        "tor-s00-r0:17/1 -> spine-p0-00:1/1",
        "tor-s00-r0:17/2 -> spine-p0-00:1/2",
    ]


@settings(deadline=None)
@given(clusters(rail_only=True))
def test_rail_only_keeps_rails_apart_and_each_rail_whole(tree: ClusterConfig) -> None:
    graph = checked(CablePlan.build(tree).graph(), "test")
    nics = graph.hosts
    assert np.array_equal(nics, np.arange(tree.servers * tree.nics_per_server))
    src, dst = np.divmod(np.arange(len(nics) ** 2), len(nics))
    rail = nics % tree.nics_per_server % tree.rails
    assert np.array_equal(Routes(graph, nics).hops(src, dst) != UNREACHABLE, rail[src] == rail[dst])


def test_rail_only_names_say_the_rail() -> None:
    graph = CablePlan.build(cluster(nics_per_server=2, rails=2, rail_only=True)).graph()
    assert graph.names[256:264] == tuple(f"tor-s0{tor_set}-r{rail}" for rail in (0, 1) for tor_set in range(4))
    spines = [name for name in graph.names if "spine" in name]
    assert spines[0] == "r0-spine-p0-00"
    assert spines[-1].startswith("r1-spine-p1-")
    assert graph.names[-1].startswith("r1-core-")


def test_variants_have_their_names() -> None:
    tree = cluster(nics_per_server=2, rails=2, servers=64)
    assert CablePlan.build(cluster()).variant == "3-tier CLOS"
    assert CablePlan.build(tree.model_copy(update={"tiers": 2, "pods": 1})).variant == "2-tier CLOS, rail-optimised"
    for cable_plan in (
        CablePlan.build(tree, rail_only=True),
        CablePlan.build(tree.model_copy(update={"rail_only": True})),
    ):
        assert cable_plan.variant == "rail-only, 2 rails of 3-tier CLOS"


def test_a_rail_that_cannot_be_wired_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.pods"):
        CablePlan.build(cluster(nics_per_server=2, rails=2, pods=3), rail_only=True)

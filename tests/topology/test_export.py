import dataclasses
import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from netlayer.config.tree import ClusterConfig
from netlayer.errors import ConfigError
from tests.topology.fabrics import cluster, clusters, megascale
from tests.topology.graphs import diamond, same, write
from topology.fabric.cable_plan import CablePlan
from topology.fabric.export import (
    from_networkx,
    hpcc_text,
    htsim_nodes,
    htsim_text,
    read_graphml,
    to_networkx,
    write_graphml,
)
from topology.fabric.graph import Graph, parallel_pairs
from topology.importers import read_fabric


def test_an_address_that_is_none_is_one_line(tmp_path: Path) -> None:
    net = to_networkx(CablePlan.build(cluster(servers=4, servers_per_tor_set=2, core_switches_per_plane=1)).graph())
    assert net.nodes["srv0003/nic0"]["address"] == "10.0.0.7"
    net.nodes["srv0003/nic0"]["address"] = "10.0.0.999"
    with pytest.raises(ConfigError, match=r"10\.0\.0\.999"):
        from_networkx(net)
    del net.nodes["srv0003/nic0"]["address"]
    assert from_networkx(net).host_ip is None


@settings(deadline=None)
@given(clusters())
def test_networkx_and_back_is_the_same_graph(tree: ClusterConfig) -> None:
    graph = CablePlan.build(tree).graph()
    net = to_networkx(graph)
    assert net.number_of_edges() == graph.num_cables
    assert same(from_networkx(net), graph)


@settings(deadline=None, max_examples=20)
@given(tree=clusters())
def test_graphml_and_back_is_the_same_graph(tmp_path_factory: pytest.TempPathFactory, tree: ClusterConfig) -> None:
    path = tmp_path_factory.mktemp("graphml") / "fabric.graphml"
    graph = CablePlan.build(tree).graph()
    write_graphml(graph, path)
    assert same(read_fabric([path]), graph)
    assert [file.name for file in path.parent.iterdir()] == ["fabric.graphml"]


def test_names_that_xml_minds_come_back(tmp_path: Path) -> None:
    graph = dataclasses.replace(diamond(), names=("<a>", "b&c", '"d"', "é", "s 4", "s'5", "s6"))
    write_graphml(graph, tmp_path / "f.graphml")
    assert same(read_graphml(tmp_path / "f.graphml"), graph)
    with pytest.raises(ConfigError, match="is no usable device name"):
        read_fabric([tmp_path / "f.graphml"])


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("<graphml", "is no GraphML"),
        ("<a/>", "is no GraphML"),
        (
            '<graphml xmlns="http://graphml.graphdrawing.org/xmlns"><graph edgedefault="undirected"><node id="a"/>'
            '<node id="b"/><edge source="a" target="b"/></graph></graphml>',
            "lacks an attribute",
        ),
    ],
)
def test_damaged_graphml_is_one_line(tmp_path: Path, text: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        read_graphml(write(tmp_path / "f.graphml", text))


@settings(deadline=None)
@given(tree=clusters())
def test_hpcc_and_back_has_one_link_a_pair_and_the_same_capacity(
    tmp_path_factory: pytest.TempPathFactory, tree: ClusterConfig
) -> None:
    graph = CablePlan.build(tree).graph()
    path = write(tmp_path_factory.mktemp("hpcc") / "topo.txt", hpcc_text(graph))
    found = read_fabric([path])
    assert parallel_pairs(found) == (0, 1)
    assert np.array_equal(found.is_switch, graph.is_switch)
    assert _capacity(found) == _capacity(graph)


def _capacity(graph: Graph) -> dict[tuple[int, int], float]:
    """Rate between each two devices, all their cables together."""
    pairs: dict[tuple[int, int], float] = {}
    for a, b, bps in zip(graph.a.tolist(), graph.b.tolist(), graph.bps.tolist(), strict=True):
        ends = min(a, b), max(a, b)
        pairs[ends] = pairs.get(ends, 0.0) + bps
    return pairs


@settings(deadline=None)
@given(tree=clusters())
def test_htsim_and_back_is_the_same_wiring(tmp_path_factory: pytest.TempPathFactory, tree: ClusterConfig) -> None:
    sets = -(-tree.servers // tree.servers_per_tor_set)
    cable_plan = CablePlan.build(tree.model_copy(update={"servers": sets * tree.servers_per_tor_set}))
    path = write(tmp_path_factory.mktemp("htsim") / "fabric.topo", htsim_text(cable_plan.fabric))
    ours, theirs = cable_plan.graph(), read_fabric([path])
    node = htsim_nodes(cable_plan.fabric)
    cables = [np.stack([ours.a, ours.b, ours.bps, ours.latency_ns])]
    cables.append(np.stack([node[theirs.a], node[theirs.b], theirs.bps, theirs.latency_ns]))
    one, other = (columns[:, np.lexsort(columns)] for columns in cables)
    assert np.array_equal(one, other)
    assert np.array_equal(ours.is_switch[node], theirs.is_switch)


def test_hpcc_has_parallel_links_as_one_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        text = hpcc_text(diamond())
    assert "1 pairs of devices have up to 2 parallel links, written as one link of their summed rate" in caplog.text
    assert "3 5 200Gbps 1000ns 0" in text.splitlines()
    assert text.startswith("7 4 7\n")


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"servers": 127, "nic_bps": "200G", "switch_port_bps": "400G"}, "partly filled"),
        ({"nic_bps": 200}, r"whole Gb/s"),
        ({"nics_per_server": 2, "rails": 2, "rail_only": True}, "a network of every rail"),
        ({"oversubscription": 4 / 3, "nic_bps": "200G", "switch_port_bps": "400G"}, "must be whole for htsim"),
    ],
)
def test_what_htsim_cannot_say_is_one_line(changes: dict[str, object], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        htsim_text(CablePlan.build(cluster(**changes)).fabric)


def test_megascale_in_htsims_words() -> None:
    text = htsim_text(CablePlan.build(megascale().cluster).fabric)
    for line in ("Nodes 12288", "Podsize 2048", "Radix_Down 48", "Bundle 8"):
        assert line in text.splitlines()

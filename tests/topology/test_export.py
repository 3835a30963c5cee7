import dataclasses
import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from netlayer.config import ClusterConfig
from netlayer.errors import ConfigError
from tests.topology.fabrics import cluster, clusters, megascale
from tests.topology.graphs import diamond, same, write
from topology.export import (
    from_networkx,
    hpcc_text,
    htsim_nodes,
    htsim_text,
    read_graphml,
    to_networkx,
    write_graphml,
)
from topology.importers import read_fabric
from topology.plant import Plant


@settings(deadline=None)
@given(clusters())
def test_networkx_and_back_is_the_same_graph(tree: ClusterConfig) -> None:
    graph = Plant.build(tree).graph()
    net = to_networkx(graph)
    assert net.number_of_edges() == graph.num_cables
    assert same(from_networkx(net), graph)


@settings(deadline=None, max_examples=20)
@given(tree=clusters())
def test_graphml_and_back_is_the_same_graph(tmp_path_factory: pytest.TempPathFactory, tree: ClusterConfig) -> None:
    path = tmp_path_factory.mktemp("graphml") / "fabric.graphml"
    graph = Plant.build(tree).graph()
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
def test_hpcc_and_back_is_the_same_wiring(tmp_path_factory: pytest.TempPathFactory, tree: ClusterConfig) -> None:
    graph = Plant.build(tree).graph()
    path = write(tmp_path_factory.mktemp("hpcc") / "topo.txt", hpcc_text(graph))
    assert same(read_fabric([path], parallel=True), graph, names=False)


@settings(deadline=None)
@given(tree=clusters())
def test_htsim_and_back_is_the_same_wiring(tmp_path_factory: pytest.TempPathFactory, tree: ClusterConfig) -> None:
    sets = -(-tree.servers // tree.servers_per_tor_set)
    plant = Plant.build(tree.model_copy(update={"servers": sets * tree.servers_per_tor_set}))
    path = write(tmp_path_factory.mktemp("htsim") / "fabric.topo", htsim_text(plant.parts[0]))
    ours, theirs = plant.graph(), read_fabric([path])
    node = htsim_nodes(plant.parts[0])
    cables = [np.stack([ours.a, ours.b, ours.bps, ours.latency_ns])]
    cables.append(np.stack([node[theirs.a], node[theirs.b], theirs.bps, theirs.latency_ns]))
    one, other = (columns[:, np.lexsort(columns)] for columns in cables)
    assert np.array_equal(one, other)
    assert np.array_equal(ours.is_switch[node], theirs.is_switch)


def test_hpcc_says_that_it_cannot_keep_parallel_links(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        hpcc_text(diamond())
    assert "1 pairs of devices have up to 2 parallel links" in caplog.text


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"servers": 127, "nic_bps": "200G", "switch_port_bps": "400G"}, "partly filled"),
        ({"nic_bps": 200}, r"whole Gb/s"),
        ({"oversubscription": 4 / 3, "nic_bps": "200G", "switch_port_bps": "400G"}, "must be whole for htsim"),
    ],
)
def test_what_htsim_cannot_say_is_one_line(changes: dict[str, object], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        htsim_text(Plant.build(cluster(**changes)).parts[0])


def test_megascale_in_htsims_words() -> None:
    text = htsim_text(Plant.build(megascale().cluster).parts[0])
    for line in ("Nodes 12288", "Podsize 2048", "Radix_Down 48", "Bundle 8"):
        assert line in text.splitlines()

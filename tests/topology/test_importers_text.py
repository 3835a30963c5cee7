"""HPCC's topo.txt and htsim's .topo."""

from pathlib import Path

import pytest

from netlayer.errors import ConfigError
from tests.topology.graphs import write
from topology.fabric.graph import describe
from topology.importers import detect, read_fabric

HPCC = "4 1 3\n3\n0 3 200Gbps 1000ns 0\n1 3 100Gbps 1us 0\n2 3 200Gbps 0.001ms 0.5\n"
HTSIM = """# comment
Nodes 32
tiers 2
Podsize 32

Tier 0
Downlink_speed_Gbps 100
Radix_Down 8
Radix_Up 2
Downlink_Latency_ns 1000
Switch_Latency_ns 0
Oversubscribed 4

Tier 1
Downlink_speed_Gbps 100
Radix_Down 4
Downlink_Latency_ns 600
"""


def test_hpcc_keeps_its_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "any.name", HPCC)
    assert detect(path) == "hpcc"
    graph = read_fabric([path])
    assert graph.names == ("host0", "host1", "host2", "switch3")
    assert graph.bps.tolist() == [200e9, 100e9, 200e9]
    assert graph.latency_ns.tolist() == [1000, 1000, 1000]
    assert graph.addresses[:2].tolist() == [0x0B000001, 0x0B000101]


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("4 1 3", "4 1 9", "line 1: promises 9 links, the file has 3"),
        ("4 1 3", "4 1 -1", "line 1: holds a number below 0"),
        ("4 1 3", "4 2 3", "line 2: has 1 numbers, 2 are due"),
        ("4 1 3", "999999999 1 3", "999999999 nodes"),
        ("4 1 3\n3", "4 2 3\n3 3", "names a switch twice"),
        ("\n3\n", "\n4\n", "node 4 is outside 0..3"),
        ("1 3 100Gbps", "1 7 100Gbps", "line 4: node 7 is outside 0..3"),
        ("1 3 100Gbps", "1 3 fast", "is not a rate"),
        ("1us", "1 hour", "is no delay"),
        ("1 3 100Gbps 1us 0", "1 3", "a link is"),
        ("1 3 100Gbps 1us", "x 3 100Gbps 1us", "must be whole numbers"),
        ("1 3 100Gbps", "1 1 100Gbps", "begins and ends at one device"),
        ("1 3 100Gbps", "3 0 100Gbps", "line 4: repeats the link 3 0 of line 3"),
        (HPCC, "4 1 3\n", "ends before its first link"),
    ],
)
def test_a_damaged_topo_is_one_line(tmp_path: Path, old: str, new: str, rule: str) -> None:
    path = write(tmp_path / "topo.txt", HPCC.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        read_fabric([path], "hpcc")
    assert rule in str(caught.value).replace(" = ", " ")


def test_a_repeated_pair_is_parallel_on_request(tmp_path: Path) -> None:
    text = HPCC.replace("4 1 3", "4 1 4") + "3 0 200Gbps 1us 0\n"
    assert read_fabric([write(tmp_path / "topo.txt", text)], parallel=True).num_cables == 4


def test_htsim_leaf_and_spine(tmp_path: Path) -> None:
    path = write(tmp_path / "any", HTSIM)
    assert detect(path) == "htsim"
    graph = read_fabric([path])
    assert [(row["count"], row["up_links"]) for row in describe(graph)] == [(32, 32), (4, 8), (2, 0)]
    assert graph.link_name(8) == "host8 -> tor1"
    assert graph.latency_ns[[0, -1]].tolist() == [1000, 600]


def test_htsim_bundles_and_core(tmp_path: Path) -> None:
    tiers = [
        "Nodes 432\nTiers 3\nPodsize 36",
        "Tier 0\nDownlink_speed_Gbps 100\nRadix_Down 6\nRadix_Up 6\nDownlink_Latency_ns 1000",
        "Tier 1\nDownlink_speed_Gbps 100\nRadix_Down 6\nRadix_Up 6\nDownlink_Latency_ns 1000",
        "Tier 2\nDownlink_speed_Gbps 100\nRadix_Down 36\nDownlink_Latency_ns 600000\nBundle 3",
    ]
    graph = read_fabric([write(tmp_path / "z.topo", "\n\n".join(tiers))])
    assert [(row["count"], row["up_links"]) for row in describe(graph)] == [(432, 432), (72, 432), (72, 432), (12, 0)]
    last = [graph.link_name(link) for link in range(graph.num_cables - 6, graph.num_cables)]
    assert last == ["agg71 -> core5"] * 3 + ["agg71 -> core11"] * 3


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("Nodes 32", "Nodes 33", "Nodes 33 must be a multiple of Podsize 32"),
        ("Nodes 32", "Nodes many", "line 2: must read `word number`"),
        ("Nodes 32", "Knots 32", "Knots is not known here"),
        ("Nodes 32", "Nodes 32\nNodes 32", "line 3: gives nodes a second time"),
        ("Nodes 32", "Nodes 32000000\nPodsize 32", "gives podsize a second time"),
        ("tiers 2", "tiers 3", "Tiers 3 with 2 tiers below"),
        ("Tier 1", "Tier 2", "opens tier 2, tier 1 is due"),
        ("Radix_Down 8", "Radix_Down 7", "Podsize (32) must be a multiple of Radix_Down of tier 0 (7)"),
        ("Radix_Down 8\n", "", "tier 0 gives no radix_down of 1 or more"),
        ("Radix_Up 2", "Radix_Up 3", "Radix_Up of tier 0 is 3, the other counts need 2"),
        ("Oversubscribed 4", "Oversubscribed 3", "must be a multiple of uplink rate"),
        ("Oversubscribed 4", "Oversubscribed 0", "at least 1"),
        ("Oversubscribed 4", "Bundle 2", "hosts have one link"),
        ("Downlink_speed_Gbps 100\nRadix_Down 8", "Downlink_speed_Gbps 0\nRadix_Down 8", "no downlink_speed_gbps"),
        ("Radix_Down 4", "Radix_Down 2", "Radix_Up of tier 0 is 2, the other counts need 4"),
    ],
)
def test_a_damaged_tree_is_one_line(tmp_path: Path, old: str, new: str, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_fabric([write(tmp_path / "t.topo", HTSIM.replace(old, new, 1))], "htsim")
    assert rule in str(caught.value)


def test_one_fabric_is_one_file(tmp_path: Path) -> None:
    path = write(tmp_path / "topo.txt", HPCC)
    with pytest.raises(ConfigError, match="hpcc is one file a fabric"):
        read_fabric([path, path])

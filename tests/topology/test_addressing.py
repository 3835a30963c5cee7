import csv
import ipaddress

from hypothesis import given

from netlayer.config import ClusterConfig
from tests.topology.fabrics import cluster, clusters, megascale
from tests.topology.graphs import diamond
from topology.addressing import addresses_csv, cables_csv, switches_csv
from topology.audit import part_rows
from topology.clos import Clos
from topology.plant import Plant


def _rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines()))


@given(clusters())
def test_the_cable_list_uses_every_port_once_and_counts_the_cables(tree: ClusterConfig) -> None:
    plant = Plant.build(tree)
    rows = _rows(cables_csv(plant.graph(), plant))
    ends = [(row[f"{end}_device"], row[f"{end}_port"]) for row in rows for end in "ab"]
    assert len(set(ends)) == len(ends)
    parts = {row["item"]: row["count"] for row in part_rows(plant)}
    assert {int(row["cable"]) for row in rows} == set(range(1, parts["nic_cable"] + parts["fibre"] + 1))


def test_a_breakout_cable_has_as_many_lines_as_ends() -> None:
    plant = Plant.build(megascale().cluster)
    rows = _rows(cables_csv(plant.graph(), plant))
    assert len(rows) == 24_576
    ends = [row for row in rows if row["cable"] == "1"]
    assert [(row["a_device"], row["b_device"], row["b_port"]) for row in ends] == [
        ("srv0000/nic0", "tor-s00-r0", "1/1"),
        ("srv0001/nic0", "tor-s00-r0", "1/2"),
    ]
    assert {row["kind"] for row in ends} == {"AOC 400 Gb/s to 2 x 200 Gb/s"}
    assert rows[-1]["rate_gbps"] == "400"


@given(clusters())
def test_addresses_are_those_of_the_clos_and_differ(tree: ClusterConfig) -> None:
    plant, fabric = Plant.build(tree), Clos.build(tree)
    rows = _rows(addresses_csv(plant))
    found = [int(ipaddress.ip_interface(row["address"]).ip) for row in rows]
    graph = plant.graph()
    assert found == fabric.address_of(graph.hosts).tolist()
    assert all(ipaddress.ip_interface(row["address"]).ip in ipaddress.ip_network(row["subnet"]) for row in rows)
    assert [row["tor"] for row in rows] == [graph.names[node] for node in graph.b[: len(rows)].tolist()]
    assert [row["tor_port"] for row in rows] == list(graph.b_port[: len(rows)])


def test_switches_have_loopbacks_and_as_numbers() -> None:
    rows = _rows(switches_csv(Plant.build(megascale().cluster)))
    assert len({row["loopback"] for row in rows}) == len(rows) == 512
    numbers = {level: {row["asn"] for row in rows if row["level"] == level} for level in ("tor", "spine", "core")}
    assert [len(numbers[level]) for level in ("tor", "spine", "core")] == [192, 6, 1]
    assert len(set.union(*numbers.values())) == 199


def test_rail_only_lists_every_nic_once() -> None:
    plant = Plant.build(cluster(nics_per_server=2, rails=2), rail_only=True)
    rows = _rows(addresses_csv(plant))
    assert [(row["server"], row["nic"]) for row in rows[:3]] == [("srv0000", "0"), ("srv0000", "1"), ("srv0001", "0")]
    assert rows[1]["tor"] == "tor-s00-r1"
    assert len({row["address"] for row in rows}) == 256
    assert len({row["switch"] for row in _rows(switches_csv(plant))}) == len(_rows(switches_csv(plant)))


def test_an_imported_fabric_has_one_cable_a_link() -> None:
    rows = _rows(cables_csv(diamond()))
    assert [row["cable"] for row in rows] == [str(number) for number in range(1, 9)]
    assert rows[0]["kind"] == ""

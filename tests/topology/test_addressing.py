import csv
import ipaddress

from hypothesis import given
from hypothesis import strategies as st

from netlayer.config.tree import ClusterConfig
from tests.topology.fabrics import cluster, clusters, megascale
from tests.topology.graphs import diamond
from topology.fabric.addressing import addresses_csv, cables_csv, switches_csv
from topology.fabric.audit import part_rows
from topology.fabric.cable_plan import CablePlan
from topology.fabric.clos import Clos


def _rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines()))


@given(clusters())
def test_the_cable_list_uses_every_port_once_and_counts_the_cables(tree: ClusterConfig) -> None:
    cable_plan = CablePlan.build(tree)
    rows = _rows(cables_csv(cable_plan.graph(), cable_plan))
    ends = [(row[f"{end}_device"], row[f"{end}_port"]) for row in rows for end in "ab"]
    assert len(set(ends)) == len(ends)
    parts = {row["item"]: row["count"] for row in part_rows(cable_plan)}
    assert {int(row["cable"]) for row in rows} == set(range(1, parts["nic_cable"] + parts["fibre"] + 1))


def test_a_breakout_cable_has_as_many_lines_as_ends() -> None:
    cable_plan = CablePlan.build(megascale().cluster)
    rows = _rows(cables_csv(cable_plan.graph(), cable_plan))
    assert len(rows) == 24_576
    ends = [row for row in rows if row["cable"] == "1"]
    assert [(row["a_device"], row["b_device"], row["b_port"]) for row in ends] == [
        ("srv0000/nic0", "tor-s00-r0", "1/1"),
        ("srv0001/nic0", "tor-s00-r0", "1/2"),
    ]
    assert {row["kind"] for row in ends} == {"AOC 400 Gb/s to 2 x 200 Gb/s"}
    assert rows[-1]["rate_gbps"] == "400"


@given(st.one_of(clusters(), clusters(rail_only=True)))
def test_every_nic_and_its_port_share_a_subnet_of_two(tree: ClusterConfig) -> None:
    cable_plan, fabric = CablePlan.build(tree), Clos.build(tree)
    rows = _rows(addresses_csv(cable_plan))
    nics = [ipaddress.ip_interface(row["address"]) for row in rows]
    ports = [ipaddress.ip_interface(row["tor_port_address"]) for row in rows]
    graph = cable_plan.graph()
    assert [int(nic.ip) for nic in nics] == fabric.address_of(graph.hosts).tolist()
    assert len({one.ip for one in (*nics, *ports)}) == 2 * len(rows)
    for row, nic, port in zip(rows, nics, ports, strict=True):
        assert nic.network == port.network
        assert nic.network.prefixlen == 31
        assert row["gateway"] == str(port.ip)
        assert nic.ip in ipaddress.ip_network(row["rail_prefix"])
    assert [row["tor"] for row in rows] == [graph.names[node] for node in graph.b[: len(rows)].tolist()]
    assert [row["tor_port"] for row in rows] == list(graph.b_port[: len(rows)])


def test_a_line_of_the_plan_can_be_typed_into_a_server_and_a_tor() -> None:
    row = _rows(addresses_csv(CablePlan.build(megascale().cluster)))[65 * 8 + 3]
    assert row == {
        "server": "srv0065",
        "nic": "3",
        "rail": "3",
        "address": "10.3.0.131/31",
        "gateway": "10.3.0.130",
        "rail_prefix": "10.3.0.0/16",
        "tor": "tor-s01-r3",
        "tor_port": "1/2",
        "tor_port_address": "10.3.0.130/31",
        "pod": "0",
    }


def test_switches_have_loopbacks_and_as_numbers() -> None:
    rows = _rows(switches_csv(CablePlan.build(megascale().cluster)))
    assert len({row["loopback"] for row in rows}) == len(rows) == 512
    numbers = {level: {row["asn"] for row in rows if row["level"] == level} for level in ("tor", "spine", "core")}
    assert [len(numbers[level]) for level in ("tor", "spine", "core")] == [192, 6, 1]
    assert len(set.union(*numbers.values())) == 199


def test_rail_only_lists_every_nic_once() -> None:
    cable_plan = CablePlan.build(cluster(nics_per_server=2, rails=2), rail_only=True)
    rows = _rows(addresses_csv(cable_plan))
    assert [(row["server"], row["nic"]) for row in rows[:3]] == [("srv0000", "0"), ("srv0000", "1"), ("srv0001", "0")]
    assert rows[1]["tor"] == "tor-s00-r1"
    assert len({row["address"] for row in rows}) == 256
    assert len({row["switch"] for row in _rows(switches_csv(cable_plan))}) == len(_rows(switches_csv(cable_plan)))


def test_an_imported_fabric_has_one_cable_a_link() -> None:
    rows = _rows(cables_csv(diamond()))
    assert [row["cable"] for row in rows] == [str(number) for number in range(1, 9)]
    assert rows[0]["kind"] == ""

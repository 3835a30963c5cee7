"""What SONiC and LLDP report of a built fabric, read back; and what cannot be."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from netlayer.config.tree import ClusterConfig
from netlayer.errors import ConfigError
from tests.topology.fabrics import clusters
from tests.topology.graphs import write
from tests.topology.reports import ends, neighbour, write_lldp, write_sonic
from topology.fabric.cable_plan import CablePlan
from topology.fabric.graph import Graph
from topology.importers import read_fabric


def _wiring(graph: Graph) -> list[Any]:
    return sorted(ends(graph))


# Two ToRs that neighbour nine of the ten other devices: all hosts and the spine, and no management switch.
SMALL = ClusterConfig(servers=8, gpus_per_server=1, nics_per_server=2, rails=2, tiers=2, servers_per_tor_set=8, pods=1)


@settings(deadline=None, max_examples=25)
@given(tree=clusters(), form=st.sampled_from(["sonic", "lldp", "json0"]))
@example(tree=SMALL, form="lldp")
def test_reports_of_a_fabric_give_the_fabric(
    tmp_path_factory: pytest.TempPathFactory, tree: ClusterConfig, form: str
) -> None:
    folder = tmp_path_factory.mktemp(form)
    graph = CablePlan.build(tree).graph()
    if form == "sonic":
        write_sonic(graph, folder)
    else:
        write_lldp(graph, folder, json0=form == "json0")
    found = read_fabric([folder])
    assert _wiring(found) == _wiring(graph)
    assert set(found.names) == set(graph.names)


def _sonic(name: str, neighbours: dict[str, Any], ports: dict[str, Any] | None = None, **more: Any) -> str:
    tree = {
        "DEVICE_METADATA": {"localhost": {"hostname": name}},
        "PORT": ports or {"Ethernet0": {"speed": "400000", "alias": "etp1"}, "Ethernet8": {"speed": "400000"}},
        "DEVICE_NEIGHBOR": neighbours,
        **more,
    }
    return json.dumps(tree)


def _to(name: str, port: str) -> dict[str, str]:
    return {"name": name, "port": port}


def test_sonic_reads_aliases_and_roles_of_neighbours(tmp_path: Path) -> None:
    roles = {"spine1": {"type": "SpineRouter"}, "srv1": {"type": "Server"}}
    leaf = _sonic("leaf1", {"etp1": _to("srv1", "mlx5_0")}, DEVICE_NEIGHBOR_METADATA=roles)
    old = {"leaf1": {"local_port": "Ethernet0", "port": "Ethernet8"}}
    graph = read_fabric([write(tmp_path / "leaf1.json", leaf)])
    assert [graph.link_name(0), graph.level.tolist()] == ["srv1/mlx5_0:mlx5_0 -> leaf1:Ethernet0", [0, 1]]
    two = {"Ethernet0": _to("srv1", "mlx5_0"), "Ethernet8": _to("spine1", "etp1")}
    files = [write(tmp_path / "leaf1.json", _sonic("leaf1", two, DEVICE_NEIGHBOR_METADATA=roles))]
    files.append(write(tmp_path / "spine1.json", _sonic("spine1", old)))
    assert read_fabric(files).link_name(1) == "leaf1:Ethernet8 -> spine1:Ethernet0"


SONIC_FAULTS = [
    ({"a": '{"PORT": {}'}, "is no JSON"),
    ({"a": "[1, 2]"}, "holds no JSON object"),
    ({"a": "[" * 100_000}, "is no JSON"),
    ({"a": '{"PORT": {}}'}, "no DEVICE_METADATA.localhost.hostname"),
    ({"a": '{"PORT": [], "DEVICE_METADATA": {"localhost": {"hostname": "x"}}}'}, "PORT is no table"),
    ({"a": _sonic("a", {"Ethernet4": _to("b", "Ethernet0")})}, "names the port Ethernet4, PORT does not"),
    ({"a": _sonic("a", {"Ethernet0": "b"})}, "DEVICE_NEIGHBOR|Ethernet0 is no table"),
    ({"a": _sonic("a", {"Ethernet0": {"port": "Ethernet0"}})}, "is no usable neighbour of Ethernet0"),
    ({"a": _sonic("a", {}, {"Ethernet0": {"speed": "fast"}})}, "which is no number of Mb/s"),
    ({"a": _sonic("a", {}), "b": _sonic("a", {})}, "is the host name in"),
    ({"a": _sonic("a", {"Ethernet0": _to("srv", "nic0")}, {"Ethernet0": {}})}, "has no known rate"),
    ({"a": _sonic("a", {})}, "has no link"),
    ({"a": _sonic("=cmd()", {})}, "is no usable host name"),
    ({"a": _sonic("a\u001b[31m", {})}, "is no usable host name"),
    (
        {"a": _sonic("a", {"Ethernet0": _to("b", "Ethernet0")}), "b": _sonic("b", {})},
        "a:Ethernet0: sees b:Ethernet0, whose own file does not list it: a dangling link",
    ),
    (
        {
            "a": _sonic("a", {"Ethernet0": _to("b", "Ethernet0")}),
            "b": _sonic("b", {"Ethernet0": _to("c", "Ethernet0")}),
        },
        r"a:Ethernet0: sees b:Ethernet0 in .*a\.json, but b:Ethernet0 sees c:Ethernet0 in .*b\.json",
    ),
    (
        {
            "a": _sonic("a", {"Ethernet0": _to("b", "Ethernet99")}),
            "b": _sonic("b", {"Ethernet0": _to("a", "Ethernet0")}),
        },
        r"FILES: .*a\.json: puts Ethernet0 on b:Ethernet99, a port that .*b\.json does not have",
    ),
    (
        {
            "a": _sonic("a", {"Ethernet0": _to("b", "Ethernet8")}),
            "b": _sonic("b", {"Ethernet0": _to("a", "Ethernet0")}),
        },
        r"a:Ethernet0: sees b:Ethernet8 in .*a\.json, but b:Ethernet0 sees a:Ethernet0 in .*b\.json",
    ),
    (
        {"a": _sonic("a", {"Ethernet0": _to("s", "n"), "Ethernet8": _to("s", "n")})},
        "s:n: is the far end of two links: a:Ethernet0 and a:Ethernet8",
    ),
    (
        {
            "a": _sonic("a", {"Ethernet0": _to("b", "Ethernet0")}),
            "b": _sonic("b", {"Ethernet0": _to("a", "Ethernet0")}, {"Ethernet0": {"speed": "100000"}}),
        },
        r"has 100000000000 bit/s at one end and 400000000000 at the other \(.*a\.json, .*b\.json\)",
    ),
]


@pytest.mark.parametrize(("files", "rule"), SONIC_FAULTS)
def test_damaged_configurations_are_one_line(tmp_path: Path, files: dict[str, str], rule: str) -> None:
    paths = [write(tmp_path / f"{name}.json", text) for name, text in files.items()]
    with pytest.raises(ConfigError) as caught:
        read_fabric(paths, "sonic")
    text = str(caught.value).replace(" = ", ": ", 1)
    assert rule in text or re.search(rule, text)
    assert str(caught.value).isprintable()


def _lldp(*interfaces: dict[str, Any]) -> str:
    return json.dumps({"lldp": {"interface": list(interfaces)}})


def _pair(tmp_path: Path, one: str, other: str) -> list[Path]:
    return [write(tmp_path / "leaf1.json", one), write(tmp_path / "srv1.json", other)]


LEAF_SEES_SRV = {"swp1": neighbour("srv1", "eth2", 200e9, forwards=False)}
SRV_SEES_LEAF = {"eth2": neighbour("leaf1", "swp1", 200e9, forwards=True)}


def test_a_host_that_announces_a_bridge_is_a_host_by_name(tmp_path: Path) -> None:
    bridging = {"swp1": neighbour("srv1", "eth2", 200e9, forwards=True)}
    graph = read_fabric(_pair(tmp_path, _lldp(bridging), _lldp(SRV_SEES_LEAF)), hosts=["srv*"])
    assert graph.names == ("srv1/eth2", "leaf1")


def test_domains_and_missing_names_are_resolved(tmp_path: Path) -> None:
    far = {"eth2": neighbour("leaf1.dc.example", "swp1", 200e9, forwards=True)}
    graph = read_fabric(_pair(tmp_path, _lldp(LEAF_SEES_SRV), _lldp(far)))
    assert graph.link_name(0) == "srv1/eth2:eth2 -> leaf1:swp1"
    nameless = {**far["eth2"], "chassis": {"id": {"type": "mac", "value": "mac of leaf1.dc.example"}}}
    nameless["port"] = {**nameless["port"], "id": {"type": "ifname", "value": "swp2"}, "descr": "swp2"}
    leaf = _lldp(LEAF_SEES_SRV, {"swp2": neighbour("srv1", "eth3", 200e9, forwards=False)})
    graph = read_fabric(_pair(tmp_path, leaf, _lldp(far, {"eth3": nameless})))
    assert graph.num_cables == 2


def test_an_alias_of_a_port_is_matched_from_the_other_side(tmp_path: Path) -> None:
    alias = {"eth2": neighbour("leaf1", "etp1", 200e9, forwards=True)}
    graph = read_fabric(_pair(tmp_path, _lldp(LEAF_SEES_SRV), _lldp(alias)))
    assert graph.link_name(0) == "srv1/eth2:eth2 -> leaf1:swp1"


def test_a_dangling_link_is_left_out_on_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gone = {"swp9": neighbour("srv1", "eth9", 200e9, forwards=False)}
    files = _pair(tmp_path, _lldp(LEAF_SEES_SRV, gone), _lldp(SRV_SEES_LEAF))
    with pytest.raises(ConfigError, match=r"leaf1:swp9: sees srv1:eth9.*--skip-dangling"):
        read_fabric(files)
    with caplog.at_level(logging.WARNING):
        assert read_fabric(files, skip_dangling=True).num_cables == 1
    assert "1 links omitted" in caplog.text


@pytest.mark.parametrize(
    ("medium", "bps"),
    [
        ("10GigBaseLR - R fiber over 1310 nm optics", 10e9),
        ("10GigBaseSR - R fiber over 850 nm optics", 10e9),
        ("10GigBaseT", 10e9),
        ("40GbaseSR4", 40e9),
        ("100GbaseCR4 - 4-pair", 100e9),
        ("400GBASE-DR4", 400e9),
        ("2.5GBaseT", 2.5e9),
        ("2p5GbaseT", 2.5e9),
        ("2.5GigBaseT", 2.5e9),
        ("5GBaseT", 5e9),
        ("1000BaseTFD - Four-pair Category 5 UTP, full duplex mode", 1e9),
        ("100BaseTXFD", 100e6),
        ("10BaseT", 10e6),
    ],
)
def test_a_negotiated_rate_is_read_as_devices_spell_it(tmp_path: Path, medium: str, bps: float) -> None:
    text = _lldp(LEAF_SEES_SRV).replace("200GbaseCR4 - 4-pair", medium)
    assert read_fabric([write(tmp_path / "leaf1.json", text)], default_bps=4e9).bps.tolist() == [bps]


def _quiet(*rows: tuple[str, str, str]) -> str:
    """A table of (own port, neighbour, its port) whose neighbours announce no capability."""
    tables = [{port: neighbour(name, far, 4e9, forwards=True)} for port, name, far in rows]
    for table in tables:
        for row in table.values():
            del next(iter(row["chassis"].values()))["capability"]
    return _lldp(*tables)


def _quiet_fabric(folder: Path) -> list[Path]:
    """Two hosts of two NICs, two ToRs, one spine; nobody announces what it is."""
    tables = {
        "srv0": [("eth0", "tor0", "p1"), ("eth1", "tor1", "p1")],
        "srv1": [("eth0", "tor0", "p2"), ("eth1", "tor1", "p2")],
        "tor0": [("p1", "srv0", "eth0"), ("p2", "srv1", "eth0"), ("p3", "spine0", "p1")],
        "tor1": [("p1", "srv0", "eth1"), ("p2", "srv1", "eth1"), ("p3", "spine0", "p2")],
        "spine0": [("p1", "tor0", "p3"), ("p2", "tor1", "p3")],
    }
    return [write(folder / f"{device}.json", _quiet(*rows)) for device, rows in tables.items()]


def test_without_capabilities_the_names_of_hosts_tell_switches(tmp_path: Path) -> None:
    files = _quiet_fabric(tmp_path)
    graph = read_fabric(files, hosts=["srv*"])
    assert graph.names == ("srv0/eth0", "srv0/eth1", "srv1/eth0", "srv1/eth1", "spine0", "tor0", "tor1")
    assert graph.level.tolist() == [0, 0, 0, 0, 2, 1, 1]
    with pytest.raises(
        ConfigError, match=r"device = spine0: announces no capability .* 4 others .*; .*--host-names 'srv\*'"
    ):
        read_fabric(files)
    with pytest.raises(ConfigError, match="5 devices: describe no switch"):
        read_fabric(files, hosts=["*"])


def test_a_switch_whose_neighbours_are_hosts_needs_no_word_of_its_own(tmp_path: Path) -> None:
    leaf = _lldp(LEAF_SEES_SRV, {"swp2": neighbour("spine1", "p1", 200e9, forwards=True)})
    graph = read_fabric([write(tmp_path / "leaf1.json", leaf)])
    assert graph.names == ("srv1/eth2", "leaf1", "spine1")


def test_a_rate_that_nobody_reports_must_be_given(tmp_path: Path) -> None:
    silent = json.loads(_lldp(LEAF_SEES_SRV).replace("200GbaseCR4", "unknown"))
    files = [write(tmp_path / "leaf1.json", json.dumps(silent))]
    with pytest.raises(ConfigError, match=r"has no known rate; pass --rate"):
        read_fabric(files)
    assert read_fabric(files, default_bps=4e9).bps.tolist() == [4e9]


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("leaf1.json", '{"lldp": 3}', "an interface that is no object"),
        ("leaf1.json", '{"lldp": {"interface": [3]}}', "an interface that is no object"),
        ("leaf1.json", '{"lldp": {"interface": {"swp1": 3}}}', "an interface that is no object"),
        ("leaf1.json", '{"lldp": {"interface": {"swp1": {}}}}', "gives swp1 a neighbour without a port"),
        (
            "leaf1.json",
            '{"lldp": {"interface": {"swp1": {"chassis": {"id": {"value": "02:00"}}, "port": {"descr": "p"}}}}}',
            "neighbour = 02:00: on leaf1:swp1 is an unknown host",
        ),
        ("leaf1.json", _lldp(LEAF_SEES_SRV, LEAF_SEES_SRV), "leaf1.json: towards srv1 and srv1"),
        ("=leaf\n1.json", _lldp(LEAF_SEES_SRV), "is no usable host name"),
        ("leaf1.json", _lldp({"swp1": neighbour("srv1\x1b[2J", "eth2", 1e9, forwards=False)}), "no usable neighbour"),
    ],
)
def test_damaged_tables_are_one_line(tmp_path: Path, name: str, text: str, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_fabric([write(tmp_path / name, text)], "lldp")
    assert rule in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("a.json", '{"other": 1}', "has no format that is known"),
        ("a.txt", "hello\n", "has no format that is known"),
        ("a.txt", "", "has no format that is known"),
        ("a\x1b[31m\n.txt", "hello\n", "has no format that is known"),
    ],
)
def test_a_file_of_no_format_is_one_line(tmp_path: Path, name: str, text: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as caught:
        read_fabric([write(tmp_path / name, text)])
    assert str(caught.value).isprintable()


def test_files_that_are_none_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    for path, rule in ((tmp_path / "no.json", "is no file"), (tmp_path / "bytes.txt", "not UTF-8")):
        with pytest.raises(ConfigError, match=rule):
            read_fabric([path])
    with pytest.raises(ConfigError, match=r"holds no \*\.json"):
        read_fabric([tmp_path])

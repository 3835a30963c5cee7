"""What real rooms report beside the fabric: management switches, NICs' own LLDP agents, swapped cables, notes."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, ClassVar

import pytest

from netlayer.errors import ConfigError
from tests.topology.graphs import write
from tests.topology.reports import ends
from topology.fabric.addressing import cables_csv
from topology.fabric.graph import Graph
from topology.importers import read_fabric
from topology.importers.servers import find_servers

Cable = tuple[str, str, str, str, str]
STATION = [{"type": "Station", "enabled": True}]
ROUTER = [{"type": "Bridge", "enabled": True}, {"type": "Router", "enabled": True}]


def leaf_spine(rails: int = 1, servers: int = 3) -> list[Cable]:
    """Two spines, a ToR a rail and `servers` servers with a NIC on each; for one rail, two ToRs of two racks."""
    tors = [f"leaf{number}" for number in range(max(rails, 2))]
    cables = [
        (tor, f"Ethernet{60 + spine}", f"core{spine}", f"Ethernet{at}", "400GbaseCR8")
        for at, tor in enumerate(tors)
        for spine in range(2)
    ]
    for server in range(servers):
        for rail in range(rails):
            tor = tors[rail] if rails > 1 else tors[server % 2]
            cables.append((f"gpu{server}", f"ib{rail}", tor, f"Ethernet{server}", "400GbaseCR8"))
    return cables


def write_lldp(folder: Path, cables: list[Cable], more: dict[str, list[dict[str, Any]]] | None = None) -> Path:
    """One file a device that has one; `oob` has none, as a switch that nobody asks."""
    reports: dict[str, list[dict[str, Any]]] = {}
    for a, a_port, b, b_port, medium in cables:
        for near, port, far, far_port in ((a, a_port, b, b_port), (b, b_port, a, a_port)):
            row = {
                "chassis": {
                    far: {"id": {"type": "local", "value": far}, "capability": STATION if far[:3] == "gpu" else ROUTER}
                },
                "port": {"id": {"type": "ifname", "value": far_port}, "descr": far_port, "ttl": "120"},
            }
            if medium:
                row["port"]["auto-negotiation"] = {"supported": True, "enabled": True, "current": medium}
            reports.setdefault(near, []).append({port: row})
    for device, rows in (more or {}).items():
        reports[device] += rows
    folder.mkdir()
    for device, rows in reports.items():
        if not device.startswith("oob"):
            (folder / f"{device}.json").write_text(json.dumps({"lldp": {"interface": rows}}), encoding="utf-8")
    return folder


def wiring(graph: Graph) -> list[Any]:
    return sorted(ends(graph))


def servers_that_forward(folder: Path, servers: int) -> Path:
    """`leaf_spine`, in which so many servers have a bridge for containers, and lldpd's own description of a host."""
    write_lldp(folder, leaf_spine())
    for path in folder.glob("leaf*.json"):
        text = path.read_text(encoding="utf-8")
        tree = json.loads(text)
        for row in tree["lldp"]["interface"]:
            for each in row.values():
                for name, chassis in each["chassis"].items():
                    if name in [f"gpu{number}" for number in range(servers)]:
                        chassis["capability"] = ROUTER
                        chassis["descr"] = "Ubuntu 24.04.2 LTS Linux 6.8.0-53-generic #55-Ubuntu SMP x86_64"
        path.write_text(json.dumps(tree), encoding="utf-8")
    return folder


class TestServersThatForward:
    def test_they_are_named_where_they_are_taken_as_switches(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder = servers_that_forward(tmp_path / "all", 2)
        read_fabric([folder])
        assert "2 devices are taken as switches" in caplog.text
        assert "(first gpu0: Ubuntu 24.04.2 LTS Linux" in caplog.text
        assert "no host:" not in caplog.text
        caplog.clear()
        named = read_fabric([folder], hosts=["gpu*"])
        assert wiring(named) == wiring(read_fabric([write_lldp(tmp_path / "plain", leaf_spine())]))
        assert not caplog.text

    def test_a_fabric_without_a_host_is_said_to_have_none(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        read_fabric([servers_that_forward(tmp_path / "all", 3)])
        assert "no host: all devices announce that they forward" in caplog.text
        assert "--host-names" in caplog.text


class TestManagement:
    @pytest.mark.parametrize(
        ("medium", "port", "reason"),
        [("1000BaseTFD", "eth9", "run at 1 Gb/s"), ("", "mgmt0", "end at management ports")],
    )
    def test_switch_of_slow_cables_or_management_ports_is_left_out(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, medium: str, port: str, reason: str
    ) -> None:
        plain = read_fabric([write_lldp(tmp_path / "plain", leaf_spine())])
        devices = ("leaf0", "leaf1", "core0", "core1", "gpu0", "gpu1", "gpu2")
        cables = [(device, port, "oob", f"Ethernet{at}", medium) for at, device in enumerate(devices)]
        with caplog.at_level(logging.WARNING):
            found = read_fabric([write_lldp(tmp_path / "all", [*leaf_spine(), *cables])])
        assert wiring(found) == wiring(plain)
        assert "oob omitted as an out-of-band management switch" in caplog.text
        assert reason in caplog.text

    def test_ports_that_are_named_for_one_gigabit_tell_it_where_no_rate_is_reported(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        cables = [(*cable[:4], "") for cable in leaf_spine()]
        plain = read_fabric([write_lldp(tmp_path / "plain", cables)], default_bps=4e11)
        devices = ("leaf0", "leaf1", "core0", "core1", "gpu0", "gpu1", "gpu2")
        more = [(device, "eth9", "oob", f"GigabitEthernet1/0/{at}", "") for at, device in enumerate(devices)]
        read = read_fabric([write_lldp(tmp_path / "all", [*cables, *more])], default_bps=4e11)
        assert wiring(read) == wiring(plain)
        assert "oob omitted as an out-of-band management switch: its cables run at 1 Gb/s or less" in caplog.text

    def test_one_cable_without_a_rate_hides_no_management_switch(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        devices = ("leaf0", "leaf1", "core0", "core1", "gpu0", "gpu1", "gpu2")
        more = [(name, "eth9", "oob", f"Ethernet{at}", "1000BaseTFD" if at else "") for at, name in enumerate(devices)]
        cables = [(*cable[:4], "") for cable in leaf_spine()]
        plain = read_fabric([write_lldp(tmp_path / "plain", cables)], default_bps=4e11)
        assert wiring(read_fabric([write_lldp(tmp_path / "all", [*cables, *more])], default_bps=4e11)) == wiring(plain)
        assert "oob omitted as an out-of-band management switch" in caplog.text

    def test_keep_takes_it_in(self, tmp_path: Path) -> None:
        cables = [
            (device, "eth9", "oob", f"Ethernet{at}", "1000BaseTFD") for at, device in enumerate(("leaf0", "leaf1"))
        ]
        folder = write_lldp(tmp_path / "all", [*leaf_spine(), *cables])
        assert "oob" in read_fabric([folder], keep=["oo?"]).names

    def test_what_nothing_tells_is_asked(self, tmp_path: Path) -> None:
        devices = ("leaf0", "leaf1", "core0", "core1", "gpu0", "gpu1", "gpu2")
        cables = [
            (device, "Ethernet9" if device[:3] != "gpu" else "eth9", "oob", f"Ethernet{at}", "")
            for at, device in enumerate(devices)
        ]
        folder = write_lldp(tmp_path / "all", [*leaf_spine(), *cables])
        with pytest.raises(
            ConfigError, match=r"device = oob: neighbours 7 of 7 .*management switch\?; pass --exclude 'oob'"
        ):
            read_fabric([folder], default_bps=1e9)
        plain = read_fabric([write_lldp(tmp_path / "plain", leaf_spine())])
        assert wiring(read_fabric([folder], exclude=["oob*"])) == wiring(plain)

    def test_pair_of_switches_with_a_peer_link_is_no_management(self, tmp_path: Path) -> None:
        cables = [*leaf_spine(), ("leaf0", "Ethernet90", "leaf1", "Ethernet90", "400GbaseCR8")]
        assert {"leaf0", "leaf1"} <= set(read_fabric([write_lldp(tmp_path / "all", cables)]).names)

    def test_pattern_that_matches_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"--exclude = mgmt\*: matches no device"):
            read_fabric([write_lldp(tmp_path / "all", leaf_spine())], exclude=["mgmt*"])


class TestNicAgents:
    AGENT: ClassVar[dict[str, Any]] = {
        "chassis": {"id": {"type": "mac", "value": "02:00:00:00:00:77"}},
        "port": {"id": {"type": "mac", "value": "02:00:00:00:00:77"}, "ttl": "120"},
    }

    def test_agent_beside_its_host_is_passed_over(self, tmp_path: Path) -> None:
        plain = read_fabric([write_lldp(tmp_path / "plain", leaf_spine())])
        folder = write_lldp(tmp_path / "all", leaf_spine(), {"leaf0": [{"Ethernet0": self.AGENT}]})
        assert wiring(read_fabric([folder])) == wiring(plain)

    def test_agent_alone_is_asked_or_left_out_with_a_word(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder = write_lldp(tmp_path / "all", leaf_spine(), {"leaf0": [{"Ethernet7": self.AGENT}]})
        with pytest.raises(ConfigError, match=r"on leaf0:Ethernet7 is an unknown host.*--skip-dangling"):
            read_fabric([folder])
        read_fabric([folder], skip_dangling=True)
        assert "1 links omitted: only an agent without a name is heard there, first leaf0:Ethernet7" in caplog.text


class TestSonicWithoutFilesOfSpines:
    @pytest.fixture
    def tors(self, tmp_path: Path) -> list[Path]:
        files = []
        for tor in range(2):
            near = {f"Ethernet{8 * host}": {"name": f"gpu{2 * tor + host}", "port": "mlx5_0"} for host in range(2)}
            near |= {
                f"Ethernet{64 + 8 * spine}": {"name": f"core{spine}", "port": f"Ethernet{tor}"} for spine in range(2)
            }
            tree = {
                "DEVICE_METADATA": {"localhost": {"hostname": f"leaf{tor}"}},
                "PORT": {port: {"speed": "400000"} for port in near},
                "DEVICE_NEIGHBOR": near,
            }
            files.append(write(tmp_path / f"leaf{tor}.json", json.dumps(tree)))
        return files

    def test_unknown_kind_is_asked(self, tors: list[Path]) -> None:
        with pytest.raises(ConfigError, match=r"neighbour = core0: has no file .*host or switch\?.*--host-names"):
            read_fabric(tors)

    def test_hosts_are_honoured(self, tors: list[Path]) -> None:
        graph = read_fabric(tors, hosts=["gpu*"])
        assert {name for name, switch in zip(graph.names, graph.is_switch, strict=True) if switch} == {
            "leaf0",
            "leaf1",
            "core0",
            "core1",
        }


class TestHpccAndSimai:
    NOTES = "3 1 2\n2\n0 2 100Gbps 0.001ms 0\n1 2 100Gbps 0.001ms 0\n\nwhat follows is never read\nfirst src dst rate\n"

    def test_notes_behind_the_links(self, tmp_path: Path) -> None:
        assert read_fabric([write(tmp_path / "t.txt", self.NOTES)]).num_cables == 2

    def test_one_more_link_is_no_note(self, tmp_path: Path) -> None:
        text = self.NOTES + "0 1 100Gbps 0.001ms 0\n"
        with pytest.raises(ConfigError, match="promises 2 links, line 7 of the text is one more"):
            read_fabric([write(tmp_path / "t.txt", text)])

    def test_links_of_nodes_that_the_file_has_not_are_passed_over_with_a_warning(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        text = self.NOTES + "2 3 100Gbps 0.001ms 0\n4 5 100Gbps 0.001ms 0\n"
        assert read_fabric([write(tmp_path / "t.txt", text)]).num_cables == 2
        assert "2 lines behind the 2 links that it promises are passed over" in caplog.text

    def test_simai_header(self, tmp_path: Path) -> None:
        lines = ["6 2 2 1 6 H100", "2 4 5"]  # GPUs 0, 1 | 3: a server each; NVSwitches 2, 4; ToR 5
        lines += [
            f"{a} {b} {rate}Gbps 0.000025ms 0"
            for a, b, rate in ((0, 2, 900), (1, 2, 900), (3, 4, 900), (0, 5, 400), (1, 5, 400), (3, 5, 400))
        ]
        graph = read_fabric([write(tmp_path / "t.txt", "\n".join(lines) + "\n")])
        assert graph.names == ("host0", "host1", "nvswitch2", "host3", "nvswitch4", "switch5")
        assert graph.bps.tolist() == [9e11, 9e11, 9e11, 4e11, 4e11, 4e11]


class TestCableTable:
    def test_table_that_a_fabric_wrote_gives_the_fabric(self, tmp_path: Path) -> None:
        graph = read_fabric([write_lldp(tmp_path / "all", leaf_spine(rails=2))])
        table = write(tmp_path / "cables.csv", cables_csv(graph))
        assert wiring(read_fabric([table])) == wiring(graph)

    def test_switch_with_one_cable_is_no_host(self, tmp_path: Path) -> None:
        lines = ["a_device,a_port,b_device,b_port,speed", "leaf,Ethernet1/1,gpu0,eth0,400G"]
        text = "\n".join([*lines, "leaf,Ethernet49/1,core,Ethernet1/1,800"])
        graph = read_fabric([write(tmp_path / "c.csv", text)])
        assert dict(zip(graph.names, graph.is_switch.tolist(), strict=True)) == {
            "gpu0/eth0": False,
            "core": True,
            "leaf": True,
        }
        assert sorted(graph.bps.tolist()) == [4e11, 8e11]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("from,to,speed\na,b,fast\n", r"line 2: fast is no rate"),
            ("from,to\n", "has no line of a cable"),
            ("from,to,from_port,to_port,speed\nleaf,core,1,1,400\nleaf,srv,2,1,400\n", "host or switch"),
        ],
    )
    def test_bad_table_is_one_line(self, tmp_path: Path, text: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            read_fabric([write(tmp_path / "c.csv", text)])


class TestServers:
    def test_swapped_cables_are_named(self, tmp_path: Path) -> None:
        cables = leaf_spine(rails=3, servers=5)
        assert list(find_servers(read_fabric([write_lldp(tmp_path / "good", cables)])).asymmetries()) == []
        swap = {("gpu3", "ib0"): "leaf2", ("gpu3", "ib2"): "leaf0"}
        swapped = [(a, a_port, swap.get((a, a_port), b), b_port, medium) for a, a_port, b, b_port, medium in cables]
        servers = find_servers(read_fabric([write_lldp(tmp_path / "bad", swapped)]))
        assert list(servers.asymmetries()) == [
            "gpu3: ib0 ends at leaf2, not leaf0, ib2 ends at leaf0, not leaf2, as on 4 of 5 servers beside it"
        ]
        assert [(row["nic"], row["switches"]) for row in servers.rows()] == [("ib0", 2), ("ib1", 1), ("ib2", 2)]

    def test_cable_to_another_group_and_a_missing_one(self, tmp_path: Path) -> None:
        cables = leaf_spine(rails=3, servers=6)
        at = cables.index(("gpu2", "ib0", "leaf0", "Ethernet2", "400GbaseCR8"))
        moved = [*cables[:at], ("gpu2", "ib0", "leaf1", "Ethernet40", "400GbaseCR8"), *cables[at + 1 :]]
        missing = [cable for cable in moved if cable[:2] != ("gpu5", "ib1")]
        lines = list(find_servers(read_fabric([write_lldp(tmp_path / "bad", missing)])).asymmetries())
        assert lines[0].startswith("gpu2: ib0 ends at leaf1, not leaf0")
        assert lines[1] == "5 of 6 servers have 3 NICs; gpu5 2"

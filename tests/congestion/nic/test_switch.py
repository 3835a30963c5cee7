"""The switch side of a profile: golden files, the schema, the merge into a switch's own file, the headroom."""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from congestion.nic.profile import build_profile, load_profile
from congestion.nic.switch import SwitchPlan, check_ports, plan_switch
from congestion.nic.switch_buffers import Asic, cell_occupancy, headroom
from congestion.nic.switch_cli import switch
from congestion.nic.switch_schema import check_tables
from congestion.nic.switch_sonic import merge, switch_json, tables_of
from congestion.nic.switch_text import cisco
from netlayer.config import ClusterConfig
from netlayer.errors import ConfigError
from tests.congestion.nic.sonic_yang import refusals
from tests.topology.reports import ends, write_sonic
from topology.importers import read_fabric
from topology.plant import Plant

GOLDEN = Path(__file__).parent / "switch_golden"
PROFILES = sorted((Path(__file__).parents[3] / "examples" / "profiles").glob("*.toml"))
PROFILE = build_profile({"switch": {"kmin_bytes": 800_000, "kmax_bytes": 3_200_000, "pmax_percent": 20}})
PORTS = {"sonic": ("Ethernet0",), "nvue": ("swp1-32",), "arista": ("Ethernet1-32",), "cisco": ("Ethernet1/1-32",)}
MODELS = os.environ.get("NETLAYER_SONIC_YANG", "")


def plan_of(profile: Any = PROFILE, ports: tuple[str, ...] = ("Ethernet0", "Ethernet8"), **more: Any) -> SwitchPlan:
    return plan_switch(profile, ports, **{"rate_bps": 400_000_000_000, **more})


def run(folder: Path, form: str, *more: str, profile: str = "") -> Result:
    path = folder / "profile.toml"
    path.write_text(profile or "[switch]\nkmin_bytes = 800000\nkmax_bytes = 3200000\npmax_percent = 20\n")
    return CliRunner().invoke(switch, ["--profile", str(path), "--format", form, *more])


@pytest.mark.parametrize("form", ["sonic", "nvue", "arista", "cisco"])
def test_the_files_are_the_golden_ones(tmp_path, form):
    out = tmp_path / "out"
    asked = ["--ports", ",".join(PORTS[form]), "--hash-seed", "5", "--hash-offset", "4", "--out", str(out)]
    result = run(tmp_path, form, *asked)
    assert result.exit_code == 0, result.output
    names = ["config_db.json", "switch.json"] if form == "sonic" else [f"{form}.txt"]
    assert sorted(path.name for path in out.iterdir()) == names
    for name in names:
        assert (out / name).read_text() == (GOLDEN / name).read_text()


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("form", ["sonic", "nvue", "arista", "cisco"])
def test_every_example_profile_can_be_written(path, form):
    asked = ["--profile", str(path), "--format", form, "--ports", PORTS[form][0]]
    result = CliRunner().invoke(switch, asked)
    assert result.exit_code == 0, result.output
    pauses = {"sonic": "pfc_enable", "nvue": "qos pfc", "arista": "priority-flow-control on", "cisco": "pause pfc-cos"}
    assert (pauses[form] in result.stdout) == bool(load_profile(path).pfc.priorities)


def test_nics_and_switch_agree():
    plan = plan_of(build_profile({"traffic": {"dscp": 24, "priority": 4}, "pfc": {"priorities": [4]}}))
    tables = tables_of(plan)
    assert tables["DSCP_TO_TC_MAP"]["NETLAYER"]["24"] == "4"
    assert tables["DSCP_TO_TC_MAP"]["NETLAYER"]["48"] == "6"
    assert tables["PORT_QOS_MAP"]["Ethernet8"]["pfc_enable"] == "4"
    assert tables["TC_TO_PRIORITY_GROUP_MAP"]["NETLAYER"] == {str(one): "4" if one == 4 else "0" for one in range(8)}
    assert tables["QUEUE"]["Ethernet0|6"] == {"scheduler": "NETLAYER_CNP"}
    assert "WRED_PROFILE" not in tables  # the profile says nothing of marking


def test_a_lossy_fabric_has_no_pause_in_it():
    tables = tables_of(plan_of(build_profile({"pfc": {"priorities": []}})))
    assert not {"BUFFER_PROFILE", "BUFFER_PG", "PFC_WD", "MAP_PFC_PRIORITY_TO_QUEUE"} & tables.keys()
    assert all("pfc_enable" not in row for row in tables["PORT_QOS_MAP"].values())


def test_headroom_is_the_sum_of_its_terms():
    room = headroom(400_000_000_000, 40, 9238, 9238, Asic(small_share=0.0))
    cable = 2 * 40 / 198e6 * 400e9 / 8
    exact = 9238 + 9238 + cable + 819 + 905 * 64
    assert room.xoff_bytes == -(-exact // 1024) * 1024
    assert room.size_bytes == room.xoff_bytes + 19 * 1024


def test_headroom_is_sonics_for_its_own_example():
    # buffer_headroom_mellanox.lua by hand: 100G, 40 m, MTU 9100, lossless MTU 1024, Spectrum-2, half small packets
    occupancy = 0.5 + 0.5 * 144 / 64
    cable = 2 * 40 * 100_000 * 1e9 / 198e6 / (8 * 1024)
    sonics = -(-(1024 + (9100 + cable + 819.2 + 394 * 64) * occupancy) // 1024) * 1024
    ours = headroom(100_000_000_000, 40, 9100, 1024, Asic(cell_bytes=144)).xoff_bytes
    assert 0 <= ours - sonics <= 1024


@given(cable_m=st.integers(1, 100_000), mtu=st.integers(1280, 9216), small=st.floats(0, 1), cell=st.integers(64, 1024))
def test_headroom_grows_with_everything_it_is_for(cable_m, mtu, small, cell):
    asic = Asic(cell_bytes=cell, small_share=small)
    rates = [headroom(rate * 10**9, cable_m, mtu, mtu, asic).xoff_bytes for rate in (100, 200, 400, 800)]
    assert rates == sorted(rates)
    assert headroom(400 * 10**9, cable_m + 1000, mtu, mtu, asic).xoff_bytes > rates[2]
    assert cell_occupancy(asic) >= 1


def test_a_fragment_without_ports_of_its_own_is_checked():
    tables = tables_of(plan_of(hash_seed=0))
    for table, key, field, value in (
        ("WRED_PROFILE", "NETLAYER_DATA", "green_drop_probability", "120"),
        ("WRED_PROFILE", "NETLAYER_DATA", "green_max_threshold", "1"),
        ("PFC_WD", "Ethernet0", "detection_time", "50"),
        ("QUEUE", "Ethernet0|3", "wred_profile", "nope"),
        ("DSCP_TO_TC_MAP", "NETLAYER", "64", "1"),
        ("PORT_QOS_MAP", "Ethernet0", "pfc_enable", "3;4"),
        ("BUFFER_PROFILE", "NETLAYER_lossless_400G_40m", "pool", "no pool"),
        ("CABLE_LENGTH", "AZURE", "Ethernet0", "40"),
        ("SWITCH_HASH", "GLOBAL", "ecmp_hash", ["PORT"]),
        ("SCHEDULER", "NETLAYER_DATA", "weight", "0"),
    ):
        damaged = copy.deepcopy(tables)
        damaged[table][key][field] = value
        with pytest.raises(ConfigError, match=f"^{table}") as caught:
            check_tables(damaged)
        assert field in str(caught.value)


@pytest.mark.slow
@pytest.mark.skipif(not (MODELS and shutil.which("yanglint")), reason="no yanglint, or no NETLAYER_SONIC_YANG")
@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_sonics_own_models_take_the_tables(path, tmp_path):
    """NETLAYER_SONIC_YANG: the folder yang-models of sonic-buildimage, its templates rendered into it."""
    tables = tables_of(plan_of(load_profile(path)))
    assert refusals(tables, Path(MODELS), tmp_path) == ""
    tables["DSCP_TO_TC_MAP"]["NETLAYER"]["64"] = "1"
    assert "Invalid DSCP" in refusals(tables, Path(MODELS), tmp_path)


@pytest.fixture(scope="module")
def switches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sonic")
    cluster = ClusterConfig(servers=4, servers_per_tor_set=4, tiers=2)
    write_sonic(Plant.build(cluster).graph(), folder)
    return folder


def test_merged_files_are_still_the_same_fabric(switches, tmp_path):
    before = read_fabric([switches])
    for path in switches.glob("*.json"):
        base = json.loads(path.read_text())
        speeds = {row["speed"] for row in base["PORT"].values()}
        for speed in speeds:
            ports = tuple(port for port, row in base["PORT"].items() if row["speed"] == speed)
            base = merge(base, plan_of(ports=ports, rate_bps=int(speed) * 10**6))
        (tmp_path / path.name).write_text(json.dumps(base))
    after = read_fabric([tmp_path])
    assert sorted(ends(after)) == sorted(ends(before))


def test_a_merge_keeps_what_the_plan_does_not_name():
    base = {
        "PORT": {"Ethernet0": {"speed": "400000"}, "Ethernet8": {"speed": "400000"}},
        "WRED_PROFILE": {"AZURE_LOSSLESS": {"ecn": "ecn_all"}},
        "PORT_QOS_MAP": {"Ethernet0": {"dscp_to_tc_map": "AZURE", "tc_to_dscp_map": "AZURE"}},
        "TC_TO_DSCP_MAP": {"AZURE": {"3": "26"}},
        "VLAN": {"Vlan10": {}},
    }
    merged = merge(base, plan_of(ports=("Ethernet0",)))
    assert merged["WRED_PROFILE"].keys() == {"AZURE_LOSSLESS", "NETLAYER_DATA"}
    assert merged["PORT_QOS_MAP"]["Ethernet0"]["tc_to_dscp_map"] == "AZURE"
    assert merged["PORT_QOS_MAP"]["Ethernet0"]["dscp_to_tc_map"] == "NETLAYER"
    assert merged["VLAN"] == {"Vlan10": {}}
    assert "Ethernet8|3" not in merged["QUEUE"]
    assert base["WRED_PROFILE"].keys() == {"AZURE_LOSSLESS"}
    assert merge(merged, plan_of(ports=("Ethernet0",))) == merged


def test_ranges_of_a_base_are_split_where_the_plan_has_rows_of_its_own():
    base = {
        "PORT": {"Ethernet0": {}, "Ethernet8": {}},
        "SCHEDULER": {"old": {"type": "DWRR", "weight": "20"}},
        "WRED_PROFILE": {"OLD": {"ecn": "ecn_all"}},
        "QUEUE": {
            f"{port}|{queues}": {"scheduler": "old", "wred_profile": "OLD"}
            for port in ("Ethernet0", "Ethernet8")
            for queues in ("3-4", "8-9")
        },
        "BUFFER_PROFILE": {"pg_lossless": {"pool": "ingress_lossless_pool", "size": "1"}},
        "BUFFER_PG": {f"{port}|{groups}": {"profile": "pg_lossless"} for port in ("Ethernet0", "Ethernet8")
                      for groups in ("0", "3-4")},
    }  # fmt: skip
    merged = merge(base, plan_of(ports=("Ethernet0",)))
    rest = {f"Ethernet0|{one}" for one in range(8)} | {"Ethernet0|8-9", "Ethernet8|3-4", "Ethernet8|8-9"}
    assert merged["QUEUE"].keys() == rest
    assert merged["QUEUE"]["Ethernet0|3"] == {"scheduler": "NETLAYER_DATA", "wred_profile": "NETLAYER_DATA"}
    assert merged["QUEUE"]["Ethernet0|4"] == {"scheduler": "NETLAYER_REST", "wred_profile": "OLD"}
    profiles = {key: row["profile"] for key, row in merged["BUFFER_PG"].items()}
    assert profiles == {
        "Ethernet0|0": "pg_lossless",
        "Ethernet0|3": "NETLAYER_lossless_400G_40m",
        "Ethernet0|4": "pg_lossless",
        "Ethernet8|0": "pg_lossless",
        "Ethernet8|3-4": "pg_lossless",
    }


def test_a_hash_of_the_base_is_left_alone_until_one_is_asked_for():
    own = {"GLOBAL": {"ecmp_hash": ["SRC_IP"], "lag_hash": ["DST_IP"], "ecmp_hash_algorithm": "CRC"}}
    base = {"PORT": {"Ethernet0": {}}, "SWITCH_HASH": own}
    assert merge(base, plan_of(ports=("Ethernet0",)))["SWITCH_HASH"] == own
    row = merge(base, plan_of(ports=("Ethernet0",), hash_seed=0))["SWITCH_HASH"]["GLOBAL"]
    assert row == {**own["GLOBAL"], "ecmp_hash": ["SRC_IP", "DST_IP", "IP_PROTOCOL", "L4_SRC_PORT", "L4_DST_PORT"]}
    assert "SWITCH_HASH" not in tables_of(plan_of())


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ({"PORT": {"Ethernet4": {}}}, "is no port of --base"),
        ({"PORT": {"Ethernet0": {"speed": "100000"}}}, "run once a speed"),
        ({"PORT": {"Ethernet0": {}}, "QUEUE": []}, "is no table"),
        ({"PORT": {"Ethernet0": {}}, "BUFFER_POOL": {"other": {}}}, "pool"),
        ({"PORT": {"Ethernet0": {}}, "QUEUE": {"Ethernet9|3": {}}}, "has a key that SONiC does not take"),
    ],
)
def test_a_base_that_does_not_fit_is_refused(base, said):
    with pytest.raises(ConfigError) as caught:
        merge(base, plan_of(ports=("Ethernet0",)))
    assert said in str(caught.value)


def test_a_hash_goes_into_its_own_file():
    assert switch_json(plan_of()) == []
    row = switch_json(plan_of(hash_seed=0, hash_offset=4))[0]["SWITCH_TABLE:switch"]
    assert row == {"ecmp_hash_seed": "0", "lag_hash_seed": "0", "ecmp_hash_offset": "4", "lag_hash_offset": "4"}


@pytest.mark.parametrize("port", ["Ethernet0; reload", "Ethernet0\nreload", "", "eth0", "Ethernet٣", "../x"])
@pytest.mark.parametrize("form", ["sonic", "nvue", "arista", "cisco"])
def test_no_port_name_can_carry_a_command(port, form):
    with pytest.raises(ConfigError, match="--ports"):
        check_ports([port], form)


@pytest.mark.parametrize(
    ("profile", "more", "said"),
    [
        ("[cnp]\npriority = 3\n", [], "CNPs would queue behind it"),
        ("[cnp]\ndscp = 26\n", [], "could not tell the two priorities 6 and 3 apart"),
        ("[switch]\nkmin_bytes = 5\n", [], "switch.kmax_bytes: is missing"),
        ("[traffic]\necn = false\n[switch]\nkmin_bytes = 5\nkmax_bytes = 9\npmax_percent = 1\n", [], "no effect"),
        ("", ["--rate", "123G"], "has no response time for that rate"),
        ("", ["--rate", "fast"], "is not a rate"),
        ("", ["--cable-m", "0"], "must be 1..100000 metres"),
        ("", ["--mtu", "100"], "must be 1280..9216"),
        ("", ["--json", "-"], "stdout has the configuration already"),
        ("", ["--base", "/nowhere"], "cannot be read"),
    ],
)
def test_what_cannot_be_is_one_clear_line(tmp_path, profile, more, said):
    result = run(tmp_path, "sonic", "--ports", "Ethernet0", *more, profile=profile)
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)


@pytest.mark.parametrize(
    ("form", "more", "said"),
    [
        ("arista", ["--hash-seed", "6"], "above 5"),
        ("cisco", ["--hash-offset", "64"], "above 63"),
        ("cisco", ["--hash-seed", "0"], "not in 1..4294967295"),
        ("nvue", ["--base", "x.json"], "has no effect with --format nvue"),
        ("sonic", [], "--ports"),
    ],
)
def test_what_a_system_does_not_take_is_said(tmp_path, form, more, said):
    ports = [] if form == "sonic" else ["--ports", PORTS[form][0]]
    result = run(tmp_path, form, *ports, *more)
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)


def test_a_rotation_of_zero_is_written():
    text = cisco(plan_of(ports=("Ethernet1/1",), hash_offset=0))
    assert "ip load-sharing address source-destination port source-destination rotate 0\n" in text


@given(order=st.permutations(range(8)), num_lossless=st.integers(0, 8))
def test_nx_os_shares_out_all_of_its_bandwidth_and_names_each_class_once(order, num_lossless):
    data, cnp = order[:2]
    profile = build_profile(
        {"traffic": {"priority": data}, "cnp": {"priority": cnp}, "pfc": {"priorities": sorted(order[:num_lossless])}}
    )
    lines = cisco(plan_of(profile, ports=("Ethernet1/1",))).splitlines()
    assert sum(int(line.split()[-1]) for line in lines if "bandwidth remaining percent" in line) == 100
    classes = [line for line in lines if line.startswith("  class type network-qos")]
    assert len(classes) == len(set(classes)) == len({*order[:num_lossless], 0})
    assert [line for line in lines if "pfc-cos" in line] == [
        f"    pause pfc-cos {one}" for one in sorted(order[:num_lossless], key=lambda one: (one == 0, one))
    ]


@pytest.mark.parametrize("form", ["sonic", "nvue", "arista", "cisco"])
def test_whose_figures_the_headroom_is_made_of_is_said_where_the_chip_is_another(tmp_path, form):
    result = run(tmp_path, form, "--ports", PORTS[form][0])
    assert ("Spectrum-4" in result.stdout) == ("Spectrum-4" in result.stderr) == (form in ("arista", "cisco"))


def test_the_arithmetic_is_shown_and_recorded(tmp_path):
    file = tmp_path / "plan.json"
    result = run(tmp_path, "nvue", "--ports", "swp1", "--out", str(tmp_path / "out"), "--json", str(file))
    assert "905 pause quanta * 512 / 8" in result.stdout
    plan = json.loads(file.read_text())["plan"]
    assert plan["lossless_headroom"]["xoff_bytes"] == 186_368
    assert plan["marking"] == {"kmin_bytes": 800_000, "kmax_bytes": 3_200_000, "pmax_percent": 20}


def test_a_base_gives_the_ports(tmp_path):
    base = tmp_path / "config_db.json"
    base.write_text(json.dumps({"PORT": {f"Ethernet{8 * one}": {"speed": "200000"} for one in range(12)}}))
    result = run(tmp_path, "sonic", "--base", str(base), "--rate", "200G")
    assert result.exit_code == 0, result.output
    written = json.loads(result.stdout)
    assert list(written["PORT_QOS_MAP"]) == [f"Ethernet{8 * one}" for one in range(12)]

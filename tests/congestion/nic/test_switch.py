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

from congestion.nic.commands.switch import switch
from congestion.nic.profile.file import build_profile, load_profile
from congestion.nic.switches.buffers import cell_occupancy, find_headroom, headroom
from congestion.nic.switches.chips import CHIPS, Asic, find_chip
from congestion.nic.switches.plan import CHIP_NAMES, SwitchPlan, check_ports, plan_switch
from congestion.nic.switches.schema import check_tables
from congestion.nic.switches.sonic import merge, notes_on, switch_json, tables_of
from congestion.nic.switches.text import arista, cisco, nvue
from netlayer.config.tree import ClusterConfig
from netlayer.errors import ConfigError
from tests.congestion.nic.sonic_yang import refusals
from tests.topology.reports import ends, write_sonic
from topology.fabric.cable_plan import CablePlan
from topology.importers import read_fabric

GOLDEN = Path(__file__).parent / "switch_golden"
PROFILES = sorted((Path(__file__).parents[3] / "examples" / "profiles").glob("*.toml"))
PROFILE = build_profile({"switch": {"kmin_bytes": 800_000, "kmax_bytes": 3_200_000, "pmax_percent": 20}})
PORTS = {"sonic": ("Ethernet0",), "nvue": ("swp1-32",), "arista": ("Ethernet1-32",), "cisco": ("Ethernet1/1-32",)}
MODELS = os.environ.get("NETLAYER_SONIC_YANG", "")


def plan_of(profile: Any = PROFILE, ports: tuple[str, ...] = ("Ethernet0", "Ethernet8"), **more: Any) -> SwitchPlan:
    about = {"rate_bps": 400_000_000_000, "cable_m": 40, "chip": "spectrum-4", **more}
    room = find_headroom(CHIPS[about["chip"]], about["rate_bps"], about["cable_m"], 9238)
    return plan_switch(profile, ports, **{"room": room, **about})


def run(folder: Path, form: str, *more: str, profile: str = "") -> Result:
    path = folder / "profile.toml"
    path.write_text(profile or "[switch]\nkmin_bytes = 800000\nkmax_bytes = 3200000\npmax_percent = 20\n")
    chip = [] if {"--chip", "--headroom-bytes", "--no-chip"}.intersection(more) else ["--chip", "spectrum-4"]
    asked = [word for word in more if word != "--no-chip"]
    return CliRunner().invoke(switch, ["--profile", str(path), "--format", form, *chip, *asked])


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
    asked = ["--profile", str(path), "--format", form, "--ports", PORTS[form][0], "--chip", "spectrum-4"]
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
    exact = 9238 + 9238 + cable + 819 + 905 * 64 + 6000
    assert room.xoff_bytes == -(-exact // 1024) * 1024
    assert room.size_bytes == room.xoff_bytes + 19 * 1024


@pytest.mark.parametrize(
    ("rate_g", "cable_m", "xoff", "xon", "size"),
    [(400, 40, 283_648, 19_456, 303_104), (200, 40, 157_696, 19_456, 177_152), (800, 40, 362_496, 38_912, 410_624)],
)
def test_headroom_is_that_of_nvidias_own_table_for_the_sn5600(rate_g, cable_m, xoff, xon, size):
    # device/mellanox/x86_64-nvidia_sn5600-r0/ACS-SN5600: MTU 9100, lossless MTU 1024, all packets small
    room = headroom(rate_g * 10**9, cable_m, 9100, 1024, many_lanes=rate_g == 800)
    assert (room.xoff_bytes, room.xon_bytes, room.size_bytes) == (xoff, xon, size)


@pytest.mark.parametrize(
    ("chip", "cable_m", "low", "high"),
    [
        ("spectrum-2", 40, 55_296, 300_000),
        ("spectrum-3", 40, 144_384, 300_000),
        ("spectrum-4", 40, 283_648, 300_000),
        ("tomahawk-3", 40, 201_930, 201_930),
        ("tomahawk-4", 40, 424_434, 424_434),
        ("tomahawk-5", 40, 612_140, 612_140),
        ("tomahawk-5", 300, 839_216, 839_216),
        ("tomahawk-5", 41, 475_136, 475_136),  # the table with the nearest longer cable
        ("trident-4", 5, 470_004, 470_004),
    ],
)
def test_a_chip_has_at_least_the_headroom_of_its_public_tables(chip, cable_m, low, high):
    rate = 200 if chip == "spectrum-2" else 400
    room = find_headroom(CHIPS[chip], rate * 10**9, cable_m, 9238)
    assert low <= room.xoff_bytes <= high
    assert all(xoff <= room.xoff_bytes for xoff, source in room.others if source.endswith(f"({cable_m} m)"))
    assert room.source


@pytest.mark.parametrize("name", CHIPS)
def test_more_cable_is_never_less_headroom_in_a_table(name):
    for table in CHIPS[name].tables:
        if "C128" in table.source:  # as published: 2,000 m need less than 1,500 there
            continue
        for row in table.xoff_bytes.values():
            assert sorted(row.values()) == [row[length] for length in sorted(row)], table.source
    assert name in CHIP_NAMES
    assert set(CHIPS) == set(CHIP_NAMES)


@pytest.mark.parametrize(
    ("platform", "chip"),
    [
        ("x86_64-nvidia_sn5600-r0", "spectrum-4"),
        ("x86_64-mlnx_msn4700-r0", "spectrum-3"),
        ("x86_64-arista_7060x6_64pe", "tomahawk-5"),
        ("x86_64-dellemc_s5448f-r0", "trident-4"),
        ("x86_64-kvm_x86_64-r0", None),
    ],
)
def test_the_chip_of_a_platform_is_known(platform, chip):
    found = find_chip(platform)
    assert (found.name if found else None) == chip


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
    write_sonic(CablePlan.build(cluster).graph(), folder)
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
        ("", ["--rate", "400G", "--chip", "spectrum-2"], "has no port of 400 Gb/s"),
        ("", ["--rate", "10G", "--chip", "tomahawk-6", "--cable-m", "600"], "the longest cable at that speed is 500 m"),
        (
            "",
            ["--cable-m", "5000", "--chip", "tomahawk-5"],
            "the longest cable at that speed is 500 m; give its headroom",
        ),
        ("", ["--no-chip"], "--chip: is missing: PFC headroom differs from chip to chip; give --chip (spectrum-1,"),
        ("", ["--headroom-bytes", "400000"], "says nothing without --cell-bytes"),
        ("", ["--no-chip", "--cell-bytes", "256"], "says nothing without --headroom-bytes"),
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


@pytest.mark.parametrize("form", ["nvue", "arista", "cisco"])
def test_no_headroom_is_made_up_where_the_chip_is_not_named(tmp_path, form):
    result = run(tmp_path, form, "--ports", PORTS[form][0], "--no-chip")
    assert result.exit_code == 0, result.output
    assert "headroom of a lossless priority" not in result.stdout
    assert "PFC headroom is not written" in result.stdout
    assert "PFC headroom is not written" in result.stderr
    named = run(tmp_path, form, "--ports", PORTS[form][0], "--chip", "tomahawk-5")
    assert "xoff 612140" in named.stdout
    assert "7060X6-64PE-O128S2" in named.stdout


@pytest.mark.parametrize(
    ("form", "ports", "number"),
    [("nvue", "swp1-32,swp33s0-1", 34), ("arista", "Ethernet1/1,Ethernet2-4", 4), ("cisco", "Ethernet1/1-32", 32)],
)
def test_the_headroom_in_all_counts_each_port_of_a_range(tmp_path, form, ports, number):
    result = run(tmp_path, form, "--ports", ports)
    assert result.exit_code == 0, result.output
    assert f"priorities: 1, ports: {number}; in all" in result.stderr
    assert f"{311_296 * number:,} B" in result.stderr


def test_a_range_that_ends_before_it_begins_is_refused(tmp_path):
    result = run(tmp_path, "nvue", "--ports", "swp32-1")
    assert str(result.exception).startswith("--ports = swp32-1: ends before it begins")


def test_eos_text_says_whose_chips_it_is_for(tmp_path):
    result = run(tmp_path, "arista", "--ports", "Ethernet1", "--chip", "tomahawk-4")
    assert "Broadcom XGS (Trident, Tomahawk" in result.stdout
    assert "not for DNX (Jericho" in result.stdout
    assert "Broadcom XGS" in result.stderr


def test_nvue_gives_lossless_priorities_a_pool_before_it_pauses_them(tmp_path):
    lines = run(tmp_path, "nvue", "--ports", "swp1").stdout.splitlines()
    pools = [line for line in lines if line.startswith("nv set qos traffic-pool")]
    assert [line.split()[4:] for line in pools] == [
        ["default-lossy", "memory-percent", "50"],
        ["default-lossless", "memory-percent", "50"],
    ]
    assert lines.index(pools[1]) < lines.index("nv set qos pfc NETLAYER switch-priority 3")
    lossy = run(tmp_path, "nvue", "--ports", "swp1", profile="[pfc]\npriorities = []\n")
    assert "traffic-pool" not in lossy.stdout


@given(order=st.permutations(range(8)))
def test_nvue_gives_every_class_but_the_strict_one_a_share_and_all_of_them_100(order):
    data, cnp = order[:2]
    profile = build_profile({"traffic": {"priority": data}, "cnp": {"priority": cnp}, "pfc": {"priorities": [data]}})
    shares: dict[int, int] = {}
    for line in nvue(plan_of(profile, ports=("swp1",))).splitlines():
        if line.startswith("nv set qos egress-scheduler NETLAYER traffic-class") and "bw-percent" in line:
            *_, classes, _, percent = line.split()
            shares |= dict.fromkeys(map(int, classes.split(",")), int(percent))
    assert shares.keys() == set(range(8)) - {cnp}
    assert (sum(shares.values()), shares[data], min(shares.values())) == (100, 90, 1)


def test_every_system_gives_up_on_a_pause_after_200_ms_and_drops_instead_of_closing_the_port():
    """NVUE acts after `robustness` polls of at least 100 ms; EOS' own action is errdisable."""
    lines = nvue(plan_of(ports=("swp1",))).splitlines()
    polls = {line.split()[-2]: int(line.split()[-1]) for line in lines if line.startswith("nv set qos pfc-watchdog")}
    assert polls["polling-interval"] >= 100
    assert polls["polling-interval"] * polls["robustness"] == 200
    assert "nv set interface swp1 qos pfc-watchdog state enable" in lines
    eos = arista(plan_of(ports=("Ethernet1/1",)))
    assert "priority-flow-control pause watchdog default timeout 0.20\n" in eos
    assert "priority-flow-control pause watchdog action drop\n" in eos
    assert "   priority-flow-control pause watchdog\n" in eos  # of the ports of the profile
    row = tables_of(plan_of())["PFC_WD"]["Ethernet0"]
    assert (row["detection_time"], row["action"]) == ("200", "drop")


def test_nvue_says_that_the_switchs_own_roce_mode_goes_first():
    assert "# for Cumulus Linux 5.6 and later; where `nv set qos roce` is on, first: nv unset qos roce" in nvue(
        plan_of(ports=("swp1",))
    )


def traditional(**changed: Any) -> dict[str, Any]:
    """A small switch with SONiC's traditional buffer model, priorities 3 and 4 lossless."""
    pg = {"Ethernet0|0": "ingress_lossy_profile", "Ethernet0|3-4": "pg_lossless_400000_40m_profile"}
    return {
        "DEVICE_METADATA": {"localhost": {"buffer_model": "traditional"}},
        "PORT": {"Ethernet0": {"speed": "400000", "lanes": "1,2,3,4"}, "Ethernet8": {"speed": "400000"}},
        "BUFFER_POOL": {
            "ingress_lossless_pool": {"type": "ingress", "mode": "dynamic", "size": "9000000", "xoff": "4000000"},
            "egress_lossless_pool": {"type": "egress", "mode": "static", "size": "9000000"},
        },
        "BUFFER_PROFILE": {
            "ingress_lossy_profile": {"pool": "ingress_lossless_pool", "size": "0", "dynamic_th": "3"},
            "egress_lossless_profile": {"pool": "egress_lossless_pool", "size": "0", "static_th": "9000000"},
            "egress_lossy_profile": {"pool": "egress_lossless_pool", "size": "1518", "dynamic_th": "3"},
            "pg_lossless_400000_40m_profile": {
                "pool": "ingress_lossless_pool", "xon": "18432", "xoff": "100000", "size": "18432", "dynamic_th": "0",
            },
        },
        "BUFFER_PG": {key: {"profile": profile} for key, profile in pg.items()},
        "BUFFER_QUEUE": {"Ethernet0|0-4": {"profile": "egress_lossy_profile"}},
        "CABLE_LENGTH": {"OTHER": {"Ethernet0": "5m", "Ethernet8": "5m"}},
        **changed,
    }  # fmt: skip


def test_with_the_traditional_model_the_profile_has_the_name_that_is_left_as_it_is():
    base = traditional()
    plan = plan_of(ports=("Ethernet0",), chip="tomahawk-5")
    merged = merge(base, plan)
    name = "pg_lossless_400000_40m_profile"  # what buffermgrd looks for: speed and cable of the port
    assert merged["BUFFER_PG"]["Ethernet0|3"] == {"profile": name}
    assert merged["CABLE_LENGTH"] == {"OTHER": {"Ethernet8": "5m"}, "AZURE": {"Ethernet0": "40m"}}
    row = merged["BUFFER_PROFILE"][name]
    assert (row["xoff"], row["size"], row["xon"], row["xon_offset"]) == ("612140", "18796", "0", "3556")
    assert not any(key.startswith("NETLAYER") for key in merged["BUFFER_PROFILE"])
    assert merged["BUFFER_QUEUE"]["Ethernet0|3"] == {"profile": "egress_lossless_profile"}
    assert merged["BUFFER_QUEUE"]["Ethernet0|2"] == {"profile": "egress_lossy_profile"}
    assert merge(merged, plan) == merged
    notes = " ".join(notes_on(base, plan))
    assert "has xoff 100000, the plan 612140: the plan replaces it" in notes
    assert "traditional buffer model" in notes
    assert "Ethernet0|3-4: keeps lossless headroom" in notes


def test_with_the_traditional_model_groups_are_the_ranges_that_sonic_writes():
    profile = build_profile({"pfc": {"priorities": [2, 3, 4, 6]}, "cnp": {"priority": 7}})
    merged = merge(traditional(), plan_of(profile, ports=("Ethernet0", "Ethernet8"), chip="trident-4"))
    assert set(merged["BUFFER_PG"]) == {
        "Ethernet0|0", "Ethernet0|2-4", "Ethernet0|6", "Ethernet8|2-4", "Ethernet8|6",
    }  # fmt: skip


def test_more_headroom_than_planned_is_kept():
    base = traditional()
    base["BUFFER_PROFILE"]["pg_lossless_400000_40m_profile"]["xoff"] = "700000"
    plan = plan_of(ports=("Ethernet0",), chip="tomahawk-5")
    assert merge(base, plan)["BUFFER_PROFILE"]["pg_lossless_400000_40m_profile"]["xoff"] == "700000"
    assert "the larger one is kept" in " ".join(notes_on(base, plan))


@pytest.mark.parametrize(
    ("metadata", "name"),
    [
        ({"localhost": {"buffer_model": "dynamic"}}, "NETLAYER_lossless_400G_40m"),
        ({"localhost": {"hostname": "tor0"}}, "pg_lossless_400000_40m_profile"),  # what buffermgrd takes it for
    ],
)
def test_the_buffer_model_of_the_base_decides(metadata, name):
    merged = merge(traditional(DEVICE_METADATA=metadata), plan_of(ports=("Ethernet0",)))
    assert merged["BUFFER_PG"]["Ethernet0|3"] == {"profile": name}


def test_size_holds_the_headroom_only_where_no_pool_does():
    pools = traditional()["BUFFER_POOL"]
    plan = plan_of(ports=("Ethernet0",))
    with_pool = merge(traditional(), plan)["BUFFER_PROFILE"]["pg_lossless_400000_40m_profile"]
    del pools["ingress_lossless_pool"]["xoff"]
    without = merge(traditional(BUFFER_POOL=pools), plan)["BUFFER_PROFILE"]["pg_lossless_400000_40m_profile"]
    assert int(without["size"]) == int(with_pool["size"]) + int(with_pool["xoff"])
    tomahawk = plan_of(ports=("Ethernet0",), chip="tomahawk-5")
    assert "has no xoff, and tomahawk-5 takes its headroom out of that" in " ".join(
        notes_on(traditional(BUFFER_POOL=pools), tomahawk)
    )
    pools["ingress_lossless_pool"]["mode"] = "static"
    static = merge(traditional(BUFFER_POOL=pools), plan)["BUFFER_PROFILE"]["pg_lossless_400000_40m_profile"]
    assert static["static_th"] == "9000000"
    assert "dynamic_th" not in static


def test_a_base_of_an_older_release_refers_to_rows_in_brackets():
    base = traditional()
    for row in base["BUFFER_PROFILE"].values():
        row["pool"] = f"[BUFFER_POOL|{row['pool']}]"
    for row in base["BUFFER_PG"].values():
        row["profile"] = f"[BUFFER_PROFILE|{row['profile']}]"
    assert merge(base, plan_of(ports=("Ethernet0",)))["BUFFER_PG"]["Ethernet0|3"]
    base["BUFFER_PG"]["Ethernet0|0"]["profile"] = "[BUFFER_PROFILE|nothing]"
    with pytest.raises(ConfigError, match="is not what SONiC takes"):
        merge(base, plan_of(ports=("Ethernet0",)))


@pytest.mark.parametrize(
    ("platform", "more", "said"),
    [
        ("x86_64-nvidia_sn5600-r0", ["--no-chip"], ""),
        ("x86_64-nvidia_sn5600-r0", ["--chip", "tomahawk-5"], "is not the chip of x86_64-nvidia_sn5600-r0"),
        ("x86_64-somebody_s9000-r0", ["--no-chip"], "is a platform whose switch chip is not known here; give --chip ("),
        ("x86_64-somebody_s9000-r0", ["--headroom-bytes", "400000", "--cell-bytes", "256"], ""),
    ],
)
def test_the_chip_is_that_of_the_base_or_asked_for(tmp_path, platform, more, said):
    base = tmp_path / "config_db.json"
    base.write_text(json.dumps(traditional(DEVICE_METADATA={"localhost": {"platform": platform}})))
    result = run(tmp_path, "sonic", "--base", str(base), *more)
    if said:
        assert isinstance(result.exception, ConfigError)
        assert said in str(result.exception)
        return
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout)["BUFFER_PROFILE"]["pg_lossless_400000_40m_profile"]
    assert int(row["xoff"]) == (400_128 if "--headroom-bytes" in more else 291_840)


def test_the_arithmetic_is_shown_and_recorded(tmp_path):
    file = tmp_path / "plan.json"
    result = run(tmp_path, "nvue", "--ports", "swp1", "--out", str(tmp_path / "out"), "--json", str(file))
    assert "905 pause quanta * 512 / 8" in result.stdout
    plan = json.loads(file.read_text())["plan"]
    assert plan["lossless_headroom"]["xoff_bytes"] == 291_840
    assert plan["chip"] == "spectrum-4"
    assert "another public table for the chip: xoff" in result.stdout
    assert plan["marking"] == {"kmin_bytes": 800_000, "kmax_bytes": 3_200_000, "pmax_percent": 20}


def test_a_base_gives_the_ports(tmp_path):
    base = tmp_path / "config_db.json"
    base.write_text(json.dumps({"PORT": {f"Ethernet{8 * one}": {"speed": "200000"} for one in range(12)}}))
    result = run(tmp_path, "sonic", "--base", str(base), "--rate", "200G")
    assert result.exit_code == 0, result.output
    written = json.loads(result.stdout)
    assert list(written["PORT_QOS_MAP"]) == [f"Ethernet{8 * one}" for one in range(12)]

"""`netlayer nic fabric`: scripts and switch files of a cluster file, run on hosts made of files."""

from __future__ import annotations

import csv
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from congestion.nic.cli import nic
from congestion.nic.profile.plan_switches import group_switches, port_name
from congestion.nic.switches.schema import check_tables
from netlayer.config.file import example, load_config
from netlayer.config.tree import ClusterConfig
from netlayer.errors import CheckFailed, ConfigError
from tests.congestion.nic.programs import install_programs
from tests.congestion.nic.simulated import build_host, names_of, pci_of

BIG, PROFILE = str(example("megascale-12288")), str(example("profiles/tuned-dcqcn"))
_TOOLS = ("mlnx_qos", "ethtool", "mlxreg", "mlxconfig")
SMALL = '[cluster]\nservers = {}\nnics_per_server = {}\nnic_bps = "400G"\nservers_per_tor_set = 32\naoc_split = false\n'


def cluster_file(folder: Path, servers: int = 1, nics: int = 1) -> str:
    path = folder / "cluster.toml"
    path.write_text(SMALL.format(servers, nics))
    return str(path)


def run(*words: str, profile: str = PROFILE) -> Result:
    return CliRunner().invoke(nic, ["fabric", "--profile", profile, *words])


def good(*words: str, profile: str = PROFILE) -> Result:
    result = run(*words, profile=profile)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def run_script(script: Path, root: Path, tools: Path) -> subprocess.CompletedProcess[str]:
    """A script on a host made of files."""
    environ = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    text = script.read_text().replace("/sys/", f"{root}/sys/")
    return subprocess.run(["bash", "-c", text], env=environ, capture_output=True, text=True, check=False)


def inventory(folder: Path, **hosts: dict[str, Any] | None) -> str:
    path = folder / "inventory.json"
    rows = {
        host: {"exit_code": 0 if result else 255, "said": "no route", "result": result}
        for host, result in hosts.items()
    }
    path.write_text(json.dumps({"hosts": rows}))
    return str(path)


def look(root: Path) -> dict[str, Any]:
    printed = CliRunner().invoke(nic, ["inventory", "--root", str(root), "--json", "-"])
    return json.loads(printed.stdout)


def test_the_paper_s_fabric_is_one_script_and_a_file_a_level(tmp_path):
    out = tmp_path / "out"
    result = good(
        "--cluster", BIG, "--nic", "ConnectX-6", "--switches", "sonic", "--chip", "spectrum-4", "--out", str(out)
    )
    assert "331,776" not in result.stdout  # that is the other profile's
    assert "srv0000 ... srv1535 (1,536)" in result.stdout
    assert "ports of 200 Gb/s, 400 Gb/s mark at the same thresholds" in result.stderr
    files = sorted(path.name for path in out.iterdir())
    assert files == ["nics-1.hosts", "nics-1.sh", "sonic-core.json", "sonic-spine.json", "sonic-tor.json", "writes.csv"]
    rows = list(csv.DictReader((out / "writes.csv").read_text().splitlines()))
    assert len(rows) == 1536 * 8
    assert {row["writes"] for row in rows} == {"16"}
    tor = json.loads((out / "sonic-tor.json").read_text())
    check_tables(tor)
    assert len(tor["PORT_QOS_MAP"]) == 64 + 32
    assert sorted(tor["BUFFER_PROFILE"]) == ["NETLAYER_lossless_200G_40m", "NETLAYER_lossless_400G_40m"]
    assert len(tor["CABLE_LENGTH"]["AZURE"]) == 96


@pytest.mark.parametrize(("vendor", "words"), [
    ("mlx5", ["--nic", "ConnectX-7", *(word for tool in _TOOLS for word in ("--tool", tool))]),
    ("ofed", ["--nic", "ConnectX-6 Dx", "--surface", "ofed-ecn"]),
    ("bnxt", ["--nic", "broadcom"]),
    ("irdma", ["--nic", "intel"]),
])  # fmt: skip
def test_a_script_sets_what_verify_wants(tmp_path, vendor, words):
    root, tools = build_host(tmp_path / "root", vendor), install_programs(tmp_path / "tools")
    out = tmp_path / "out"
    name = names_of([vendor])[0]
    profile = tmp_path / "profile.toml"
    profile.write_text(Path(PROFILE).read_text().replace("hybrid", "dcqcn").replace('fallback = "dcqcn"\n', ""))
    good("--cluster", cluster_file(tmp_path), *words, "--device", name, "--out", str(out), profile=str(profile))
    done = run_script(out / "nics-1.sh", root, tools)
    assert done.returncode == 0, (done.stdout, done.stderr)
    shared = ["--profile", str(profile), "--root", str(root), "--tools", str(tools), "--partial"]
    verified = CliRunner().invoke(nic, ["verify", *shared])
    assert verified.exit_code == 0, (verified.output, verified.exception)
    assert run_script(out / "nics-1.sh", root, tools).returncode == 0


def test_a_script_says_what_was_there_before(tmp_path):
    root, tools, out = build_host(tmp_path / "root", "mlx5"), install_programs(tmp_path / "tools"), tmp_path / "out"
    good("--cluster", cluster_file(tmp_path), "--nic", "ConnectX-7", "--out", str(out))
    said = run_script(out / "nics-1.sh", root, tools).stdout
    assert "cc_params/rp_ai_rate: 5 -> 1000\n" in said
    assert "before: ethtool -a eth0\nPause parameters for eth0:" in said


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("ports/1/rate", "100 Gb/sec (2X HDR)", "mlx5_1 has 100 Gb/sec (2X HDR), not 400 Gb/sec"),
        ("ports/1/state", "1: DOWN", "mlx5_1 is not up"),
        ("ports/1/link_layer", "InfiniBand", "mlx5_1 is InfiniBand, no RoCE"),
        ("device/device", "0x101d", "mlx5_1 is not of model 0x1021"),
        ("device/vendor", "0x14e4", "mlx5_1 is of vendor 0x14e4, not 0x15b3"),
        ("ports/1/gid_attrs/ndevs/0", "$(touch owned)", "mlx5_1 has no network device"),
    ],
)
def test_a_script_refuses_another_nic_before_the_first_write(tmp_path, file, text, said):
    root, tools, out = (
        build_host(tmp_path / "root", "mlx5", "mlx5"),
        install_programs(tmp_path / "tools"),
        tmp_path / "out",
    )
    place = inventory(tmp_path, a=look(root))
    good("--cluster", cluster_file(tmp_path, nics=2), "--inventory", place, "--out", str(out))
    (root / f"sys/class/infiniband/mlx5_1/{file}").write_text(f"{text}\n")
    done = run_script(out / "nics-1.sh", root, tools)
    assert done.returncode == 1
    assert said in done.stderr
    assert (root / f"sys/kernel/debug/mlx5/{pci_of(0)}/cc_params/rp_ai_rate").read_text() == "5\n"


def test_a_key_of_the_other_port_is_never_written(tmp_path):
    root, tools, out = (
        build_host(tmp_path / "root", "mlx5", "mlx5"),
        install_programs(tmp_path / "tools"),
        tmp_path / "out",
    )
    profile = tmp_path / "profile.toml"
    words = ["--cluster", cluster_file(tmp_path), "--nic", "ConnectX-7", "--device", "mlx5_1", "--out"]
    profile.write_text("name = 'volatile'\n")
    good(*words, str(out), profile=str(profile))
    assert run_script(out / "nics-1.sh", root, tools).returncode == 0
    profile.write_text("name = 'kept'\n[firmware]\npersist = true\n")
    good(*words, str(out / "2"), profile=str(profile))
    done = run_script(out / "2/nics-1.sh", root, tools)
    assert f"mlx5_1 is {pci_of(1)}, another port of its NIC than planned for" in done.stderr


def test_a_script_may_come_on_stdin(tmp_path):
    root, tools, out = build_host(tmp_path / "root", "mlx5"), install_programs(tmp_path / "tools"), tmp_path / "out"
    program = tools / "ethtool"
    program.write_text(program.read_text().replace("\n", "\ncat > /dev/null\n", 1))  # it would take the rest
    good("--cluster", cluster_file(tmp_path), "--nic", "ConnectX-7", "--out", str(out))
    text = (out / "nics-1.sh").read_text().replace("/sys/", f"{root}/sys/")
    environ = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-s"], input=text, env=environ, capture_output=True, text=True, check=True)
    assert "roce_slow_restart_en=0" in done.stdout


def test_a_script_of_which_a_part_arrived_does_nothing(tmp_path):
    root, tools, out = build_host(tmp_path / "root", "mlx5"), install_programs(tmp_path / "tools"), tmp_path / "out"
    good("--cluster", cluster_file(tmp_path), "--nic", "ConnectX-7", "--out", str(out))
    text = (out / "nics-1.sh").read_text().replace("/sys/", f"{root}/sys/")
    environ = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    most = text.rpartition("run mlxreg")[0]
    done = subprocess.run(["bash", "-s"], input=most, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert (root / f"sys/kernel/debug/mlx5/{pci_of(0)}/cc_params/rp_ai_rate").read_text() == "5\n"


def test_what_a_file_says_is_a_number_or_a_fault_and_never_run(tmp_path):
    root, tools, out = build_host(tmp_path / "root", "mlx5"), install_programs(tmp_path / "tools"), tmp_path / "out"
    good("--cluster", cluster_file(tmp_path), "--nic", "ConnectX-7", "--out", str(out))
    answer = f"a[$(touch {tmp_path}/owned)]"
    script = (out / "nics-1.sh").read_text().replace("now=$(cat", f"now='{answer}' #")
    (out / "nics-1.sh").write_text(script)
    done = run_script(out / "nics-1.sh", root, tools)
    assert "does not hold" in done.stderr
    assert not (tmp_path / "owned").exists()


def test_an_earlier_plan_is_not_mixed_with(tmp_path):
    words = ["--cluster", cluster_file(tmp_path), "--nic", "ConnectX-7", "--out", str(tmp_path / "out")]
    good(*words)
    error = run(*words).exception
    assert isinstance(error, ConfigError)
    assert "holds an earlier plan" in str(error)


def test_a_program_that_is_not_there_stops_the_script_at_once(tmp_path):
    root, out = build_host(tmp_path / "root", "mlx5"), tmp_path / "out"
    good("--cluster", cluster_file(tmp_path), "--nic", "ConnectX-7", "--tool", "mstreg", "--out", str(out))
    done = run_script(out / "nics-1.sh", root, install_programs(tmp_path / "tools"))
    assert "error: mstreg is not installed" in done.stderr


def test_a_value_that_does_not_hold_stops_the_script(tmp_path):
    root, tools, out = build_host(tmp_path / "root", "mlx5"), install_programs(tmp_path / "tools"), tmp_path / "out"
    good("--cluster", cluster_file(tmp_path), "--nic", "ConnectX-7", "--out", str(out))
    file = root / f"sys/kernel/debug/mlx5/{pci_of(0)}/cc_params/rp_ai_rate"
    file.unlink()
    file.symlink_to("/dev/null")
    done = run_script(out / "nics-1.sh", root, tools)
    assert done.returncode == 1
    assert "rp_ai_rate is not there" in done.stderr


def test_hosts_are_grouped_and_those_that_differ_are_named(tmp_path):
    whole, half = build_host(tmp_path / "whole", "mlx5", "mlx5"), build_host(tmp_path / "half", "mlx5", "mlx5")
    (half / "sys/class/infiniband/mlx5_1/ports/1/rate").write_text("200 Gb/sec (4X HDR)\n")
    place = inventory(tmp_path, a=look(whole), b=look(half), c=look(whole), gone=None)
    out = tmp_path / "out"
    result = run("--cluster", cluster_file(tmp_path, 4, 2), "--inventory", place, "--out", str(out), "--json", "-")
    assert isinstance(result.exception, CheckFailed)
    tree = json.loads(result.stdout)
    assert [group["hosts"] for group in tree["hosts"]] == [["a", "c"], ["b"]]
    assert tree["hosts"][0]["nics"][0]["devices"] == ["mlx5_0"]  # its PCI functions are the two ports of a NIC
    assert tree["differs"] == {
        "gone": ["no inventory: no route"],
        "b": ["NICs at 400 Gb/s: 1 of 2", "mlx5_1: 200 Gb/s"],
    }
    assert (out / "nics-2.hosts").read_text() == "b\n"
    assert "mlx5_1" not in (out / "nics-2.sh").read_text()


def test_a_host_without_the_fabrics_nics_gets_no_script(tmp_path):
    root, out = build_host(tmp_path / "root", "mlx5"), tmp_path / "out"
    (root / "sys/class/infiniband/mlx5_0/ports/1/state").write_text("1: DOWN\n")
    result = run(
        "--cluster", cluster_file(tmp_path), "--inventory", inventory(tmp_path, a=look(root)), "--out", str(out)
    )
    assert isinstance(result.exception, CheckFailed)
    assert [path.name for path in out.iterdir()] == ["writes.csv"]


def test_a_nic_too_old_for_selective_repeat_is_not_told_of_it(tmp_path):
    words = ["--cluster", cluster_file(tmp_path), "--json", "-", "--nic"]
    tree = json.loads(good(*words, "ConnectX-5", profile=str(example("profiles/lossy-ztr"))).stdout)
    nics = tree["hosts"][0]["nics"][0]
    assert "ConnectX-5 does not have it, ConnectX-6 Dx and later do" in [one["why"] for one in nics["cannot"]]
    assert "selective_repeat_forced_en" not in [step["name"] for step in nics["steps"]]
    tree = json.loads(good(*words, "ConnectX-7", profile=str(example("profiles/lossy-ztr"))).stdout)
    assert "selective_repeat_forced_en" in [step["name"] for step in tree["hosts"][0]["nics"][0]["steps"]]


def test_an_answer_of_another_release_keeps_no_other_host_from_its_plan(tmp_path):
    whole = look(build_host(tmp_path / "root", "mlx5"))
    other = {"devices": [{key: value for key, value in whole["devices"][0].items() if key != "closed"}]}
    place = inventory(tmp_path, a=whole, b=other, c={"devices": None})
    result = run("--cluster", cluster_file(tmp_path, 3), "--inventory", place, "--json", "-")
    assert isinstance(result.exception, CheckFailed)
    tree = json.loads(result.stdout)
    assert [group["hosts"] for group in tree["hosts"]] == [["a"]]
    said = "no inventory: its answer has {}: is the same release of netlayer there?"
    assert tree["differs"] == {
        "b": [said.format("a device whose keys are not those of an inventory")],
        "c": [said.format("no devices")],
    }


def test_what_cannot_be_had_is_said_for_all_at_once(tmp_path):
    result = good(
        "--cluster", cluster_file(tmp_path, 3), "--nic", "broadcom", profile=str(example("profiles/lossy-ztr"))
    )
    assert "law = rttcc" in result.stdout
    assert "nothing was written: give --out" in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--nic: says what hosts have; give one of ConnectX-4"),
        (["--nic", "ConnectX-9"], "--nic = ConnectX-9"),
        (["--nic", "ConnectX-7", "--surface", "bnxt-configfs"], "is none of ConnectX-7; give mlx5-debugfs or ofed-ecn"),
        (["--nic", "ConnectX-7", "--device", "mlx5_0", "--device", "mlx5_1"], "are 2 names, cluster.nics_per_server"),
        (["--nic", "ConnectX-7", "--device", "$(id)"], "is no name of a device"),
        (["--nic", "ConnectX-7", "--tool", "rm"], "--tool = rm"),
        (["--inventory", "none.json"], "there is no such file"),
        (["--inventory", PROFILE], "cannot be read"),
        (["--nic", "intel", "--inventory", PROFILE], "--nic: has no effect with --inventory"),
        (["--nic", "intel", "--cable-m", "5"], "--cable-m = 5: has no effect without --switches"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_clear_line(tmp_path, words, said):
    result = run("--cluster", cluster_file(tmp_path), *words)
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)


@pytest.mark.parametrize(
    ("key", "value"),
    [("name", "a; id"), ("vendor", "acme"), ("model", "$(id)"), ("pci", "x"), ("netdev", "`id`"), ("surfaces", ["rm"]),
     ("rate_mbps", "1; id"), ("state", 4), ("gids", [{}]), ("gpus", 1), ("driver", None), ("firmware", "\x1b[2J")],
)  # fmt: skip
def test_a_hostile_inventory_is_refused(tmp_path, key, value):
    result = look(build_host(tmp_path / "root", "mlx5"))
    result["devices"][0][key] = value
    refused = run("--cluster", cluster_file(tmp_path), "--inventory", inventory(tmp_path, a=result)).exception
    assert isinstance(refused, ConfigError)
    assert "host 'a': has a device that is none" in str(refused)


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"hosts": {}}', '{"hosts": {"a": 1}}', '{"hosts": {"-x": {"result": {}}}}', "[" * 100_000]
)
def test_what_is_no_inventory_is_refused(tmp_path, text):
    path = tmp_path / "inventory.json"
    path.write_text(text)
    assert isinstance(run("--cluster", cluster_file(tmp_path), "--inventory", str(path)).exception, ConfigError)


def test_amd_needs_its_host(tmp_path):
    place = inventory(tmp_path, a=look(build_host(tmp_path / "root", "ionic")))
    error = run("--cluster", cluster_file(tmp_path), "--inventory", place).exception
    assert isinstance(error, ConfigError)
    assert "netlayer nic plan --hosts HOSTS" in str(error)


def test_ports_have_the_names_of_each_system():
    names = {form: port_name(form, "7/2", 200 * 10**9, 400 * 10**9) for form in ("sonic", "nvue", "arista", "cisco")}
    assert names == {"sonic": "Ethernet52", "nvue": "swp7s1", "arista": "Ethernet7/5", "cisco": "Ethernet1/7/2"}
    names = {form: port_name(form, "7", 400 * 10**9, 400 * 10**9) for form in ("sonic", "nvue", "arista", "cisco")}
    assert names == {"sonic": "Ethernet48", "nvue": "swp7", "arista": "Ethernet7/1", "cisco": "Ethernet1/7"}
    with pytest.raises(ConfigError, match="into 16 parts"):
        port_name("sonic", "1/1", 25 * 10**9, 400 * 10**9)


def test_every_switch_is_in_one_group():
    cluster = load_config(example("megascale-12288")).cluster.model_copy(update={"servers": 1500})
    groups = group_switches(cluster)
    names = [name for group in groups for name in group.names]
    assert len(names) == len(set(names)) == 192 + 192 + 128
    assert [(group.level, len(group.names)) for group in groups if group.level == "tor"] == [("tor", 184), ("tor", 8)]
    two = ClusterConfig(servers=2, tiers=2)
    assert {group.level for group in group_switches(two)} == {"tor", "spine"}


@pytest.mark.parametrize("form", ["nvue", "arista", "cisco"])
def test_each_system_takes_its_own_file(tmp_path, form):
    out = tmp_path / "out"
    good("--cluster", BIG, "--nic", "ConnectX-6", "--switches", form, "--chip", "spectrum-4", "--out", str(out))
    assert port_name(form, "1/1", 200 * 10**9, 400 * 10**9) in (out / f"{form}-tor.txt").read_text()

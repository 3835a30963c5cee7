"""`netlayer nic inventory | plan | apply | verify | rollback` as their user runs them: files, programs, exit codes."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from congestion.nic.cli import nic
from netlayer.config.file import example
from netlayer.errors import CheckFailed, ConfigError, HardwareMissing
from tests.congestion.nic.programs import install_programs
from tests.congestion.nic.simulated import build_host, pci_of, snapshot

PROFILE = str(example("profiles/tuned-dcqcn"))
CC = f"sys/kernel/debug/mlx5/{pci_of(0)}/cc_params"


class Place:
    """A host's files, its programs and its journal, and the commands on them."""

    def __init__(self, folder: Path, *vendors: str) -> None:
        self.folder, self.root = folder, build_host(folder / "root", *vendors)
        self.tools, self.state = install_programs(folder / "tools"), folder / "state"

    def words(self, command: str, *more: str) -> list[str]:
        profile = [] if command in ("inventory", "rollback") else ["--profile", PROFILE]
        state = ["--state", str(self.state)] if command in ("apply", "rollback") else []
        return [command, *profile, "--root", str(self.root), "--tools", str(self.tools), *state, *more]

    def run(self, command: str, *more: str) -> Result:
        return CliRunner().invoke(nic, self.words(command, *more))

    def good(self, command: str, *more: str) -> Result:
        result = self.run(command, *more)
        assert result.exit_code == 0, (result.output, result.exception)
        return result

    def wait(self) -> None:
        """Until no program of a killed command runs: it holds the lock on."""
        with (self.state / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)

    def snapshot(self) -> dict[str, Any]:
        return snapshot(self.root)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, "mlx5")


def test_plan_apply_verify_rollback_with_programs_of_their_own(place):
    before = place.snapshot()
    shown = place.good("plan")
    assert "rp_ai_rate" in shown.stdout
    assert "1000" in shown.stdout
    assert place.snapshot() == before
    assert isinstance(place.run("verify").exception, CheckFailed)
    done = place.good("apply", "--apply")
    assert "mlx5_0 rp_ai_rate: 5 -> 1000 Mb/s" in done.stdout
    assert "undo it with: netlayer nic rollback --apply" in done.stderr
    assert "of 19 values differ" in place.good("verify").stdout
    assert "everything is as the profile wants it" in place.good("apply", "--apply").stdout
    assert "would be restored" in place.good("rollback").stdout
    assert place.good("verify")
    undone = place.good("rollback", "--apply")
    assert f"{CC}/rp_ai_rate: 5" in undone.stdout
    assert place.snapshot() == before
    assert "there is no change to undo" in place.good("rollback", "--apply").stdout


def test_without_apply_nothing_is_done_and_that_is_said(place):
    before = place.snapshot()
    result = place.good("apply")
    assert "nothing was changed: give --apply to do it" in result.stderr
    assert place.snapshot() == before
    assert not place.state.exists()


def test_verify_names_what_differs_and_exits_1(place):
    place.good("apply", "--apply")
    (place.root / CC / "rp_hai_rate").write_text("50\n")
    result = place.run("verify", "--json", str(place.folder / "verify.json"))
    assert isinstance(result.exception, CheckFailed)
    assert str(result.exception) == "1 of 19 values differ; first: mlx5_0 rp_hai_rate: 50, not 10000"
    assert json.loads((place.folder / "verify.json").read_text())["summary"] == "1 of 19 values differ"


def test_inventory_as_json_is_alone_on_stdout(place):
    devices = json.loads(place.good("inventory", "--json", "-").stdout)["devices"]
    assert [device["name"] for device in devices] == ["mlx5_0"]
    assert "mlnx_qos" in devices[0]["surfaces"]
    assert "ConnectX-7" in place.good("inventory").stdout


def test_a_host_without_nics_is_missing_hardware(tmp_path):
    error = CliRunner().invoke(nic, ["inventory", "--root", str(tmp_path)]).exception
    assert isinstance(error, HardwareMissing)
    assert "load the NIC's driver" in str(error)


def test_a_nic_that_is_not_there_is_named_with_those_that_are(place):
    error = place.run("plan", "--device", "mlx5_7").exception
    assert isinstance(error, ConfigError)
    assert "there are: mlx5_0" in str(error)


def test_without_programs_they_are_said_not_to_have_run(tmp_path):
    root = build_host(tmp_path / "root", "mlx5")
    shared = ["--profile", PROFILE, "--root", str(root)]
    done = CliRunner().invoke(nic, ["apply", *shared, "--state", str(tmp_path / "state"), "--apply"])
    assert done.exit_code == 0, done.exception
    assert "left: mlx5_0: pfc, dscp 26, dscp 48, pause, " in done.stderr
    checked = CliRunner().invoke(nic, ["verify", *shared])
    assert checked.exit_code == 0
    assert "not checked: mlx5_0: pfc, dscp 26, dscp 48, pause, " in checked.stderr


def test_what_several_devices_lack_alike_is_one_line(tmp_path):
    root = build_host(tmp_path / "root", "mlx5", "mlx5", "bnxt")
    done = CliRunner().invoke(nic, ["verify", "--profile", PROFILE, "--root", str(root), "--partial"])
    lines = [line for line in done.stderr.splitlines() if "not run under --root" in line]
    assert [line.split(": ")[2] for line in lines] == ["bnxt_re2", "mlx5_0, mlx5_1"]


def test_another_roots_journal_needs_a_folder(tmp_path):
    root = build_host(tmp_path / "root", "mlx5")
    error = CliRunner().invoke(nic, ["apply", "--profile", PROFILE, "--root", str(root), "--apply"]).exception
    assert isinstance(error, ConfigError)
    assert str(error).startswith("--state: is needed with another --root")


def test_a_script_does_what_the_plan_says_and_holds_its_undoing(place):
    text = place.good("plan", "--script").stdout
    assert f"put /{CC}/rp_ai_rate 1000\n" in text
    assert f"#   printf '%s\\n' 5 > /{CC}/rp_ai_rate\n" in text
    here = text.replace("/sys/", f"{place.root}/sys/")
    environ = os.environ | {"PATH": f"{place.tools}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", here], check=True, env=environ, capture_output=True)
    assert place.good("verify").exit_code == 0
    undo = here.partition("# To undo:")[2].replace("#   ", "")
    subprocess.run(["bash", "-ec", undo], check=True, env=environ, capture_output=True)
    assert isinstance(place.run("verify").exception, CheckFailed)
    assert (place.root / CC / "rp_ai_rate").read_text() == "5\n"


def test_a_script_takes_a_program_s_word_that_it_was_so_already(place):
    program = place.tools / "ethtool"
    program.write_text(program.read_text().replace("exit 0\n", '[ "$1" != -A ] || exit 78\n'))
    text = place.good("plan", "--script").stdout.replace("/sys/", f"{place.root}/sys/")
    environ = os.environ | {"PATH": f"{place.tools}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", text], check=True, env=environ, capture_output=True)


def test_a_script_and_json_do_not_share_stdout(place):
    assert "--script prints" in place.run("plan", "--script", "--json", "-").stderr


def test_ctrl_c_on_the_way_is_undone(place):
    before = place.snapshot()
    script = (place.tools / "mlxreg").read_text()
    stopped = 'case "$*" in *--set*) kill -INT $PPID; sleep 5;; esac\n'
    (place.tools / "mlxreg").write_text(script.replace("\n", f"\n{stopped}", 1))
    command = [sys.executable, "-m", "netlayer", "nic", *place.words("apply", "--apply")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 130, done.stderr
    assert place.snapshot() == before
    assert [path.name for path in place.state.glob("*.json")] == ["undone-1.json"]


def test_a_killed_command_is_undone_by_the_next(place):
    before = place.snapshot()
    whole = (place.tools / "mlxreg").read_text()
    deadly = whole.replace("\n", '\ncase "$*" in *--set*) kill -KILL $PPID;; esac\n', 1)
    (place.tools / "mlxreg").write_text(deadly)
    command = [sys.executable, "-m", "netlayer", "nic", *place.words("apply", "--apply")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == -9
    place.wait()
    (place.tools / "mlxreg").write_text(whole)
    assert place.snapshot() != before
    refused = place.run("apply", "--apply").exception
    assert isinstance(refused, ConfigError)
    assert "run `netlayer nic rollback --apply` first" in str(refused)
    place.good("rollback", "--apply")
    assert place.snapshot() == before
    assert isinstance(place.run("verify").exception, CheckFailed)
    place.good("apply", "--apply")
    place.good("verify")


def test_a_program_that_outlives_its_command_keeps_others_away(place):
    before = place.snapshot()
    go, whole = place.folder / "go", (place.tools / "mlxreg").read_text()
    waiting = f'case "$*" in *--set*) kill -KILL $PPID; while [ ! -e {go} ]; do sleep 0.02; done;; esac\n'
    (place.tools / "mlxreg").write_text(whole.replace("\n", f"\n{waiting}", 1))
    command = [sys.executable, "-m", "netlayer", "nic", *place.words("apply", "--apply")]
    quiet = subprocess.DEVNULL  # a pipe would be held open by what outlives the command
    assert subprocess.run(command, stdout=quiet, stderr=quiet, check=False).returncode == -9
    try:
        refused = place.run("rollback", "--apply").exception
    finally:
        go.touch()
    assert isinstance(refused, ConfigError)
    assert "another change of this host runs" in str(refused)
    place.wait()
    (place.tools / "mlxreg").write_text(whole)
    place.good("rollback", "--apply")
    assert place.snapshot() == before
    assert isinstance(place.run("verify").exception, CheckFailed)


def test_verify_of_what_cannot_be_had_is_no_success(tmp_path):
    place = Place(tmp_path, "mlx5")
    words = place.words("verify")
    words[words.index("--profile") + 1] = "-"
    swift = "law = 'swift'\nlink_pause = false\n"
    CliRunner().invoke(nic, [*words, "--partial"], input=swift)
    changing = ["apply", *words[1:], "--state", str(place.state), "--apply", "--partial"]
    assert CliRunner().invoke(nic, changing, input=swift).exit_code == 0
    error = CliRunner().invoke(nic, words, input=swift).exception
    assert isinstance(error, CheckFailed)
    assert "0 of 6 values differ, but 1 thing of the profile cannot be had; first: mlx5_0 law = swift" in str(error)
    assert CliRunner().invoke(nic, [*words, "--partial"], input=swift).exit_code == 0


def test_a_rollback_names_another_hands_value_and_takes_force(place):
    before = place.snapshot()
    place.good("apply", "--apply")
    (place.root / CC / "rp_ai_rate").write_text("777\n")
    error = place.run("rollback", "--apply").exception
    assert isinstance(error, CheckFailed)
    assert "changed since by another hand: 777 (--force" in str(error)
    place.good("rollback", "--apply", "--force")
    assert place.snapshot() == before


def test_a_hostile_device_is_said_and_left_alone(place):
    (place.root / "sys/class/infiniband/--yes").mkdir()
    result = place.good("plan", "--json", "-")
    assert "warning: '--yes' is no name of a device: omitted" in result.stderr
    assert json.loads(result.stdout)["devices"] == ["mlx5_0"]


def test_a_link_out_of_the_root_ends_in_one_line(place):
    (place.root / f"{CC}/rp_ai_rate").unlink()
    (place.root / f"{CC}/rp_ai_rate").symlink_to("/etc/hostname")
    for command in ("plan", "apply", "verify"):
        error = place.run(command).exception
        assert isinstance(error, ConfigError)
        assert "leads out of the root" in str(error)


@pytest.fixture
def fleet(tmp_path: Path) -> tuple[list[str], dict[str, Path]]:
    """An ssh that runs the words here; hosts `a` and `b` have roots of their own, `gone` cannot be reached."""
    roots = {host: build_host(tmp_path / host, "mlx5") for host in ("a", "b")}
    ssh = tmp_path / "ssh"
    ssh.write_text(
        "#!/bin/bash\n"
        'while [ "$1" != -- ]; do shift; done\n'
        'if [ "$2" = gone ]; then echo "ssh: connect to host gone: No route to host" >&2; exit 255; fi\n'
        'if [ "$2" = slow ]; then exec sleep 60; fi\n'
        f'printf "%s\\n" "$3" >> {tmp_path}/asked\n'
        f'eval "${{3//@/{tmp_path}/$2}}"\n'
    )
    ssh.chmod(0o755)
    remote = f"{Path(sys.executable).parent / 'netlayer'}"
    return ["--ssh-command", str(ssh), "--remote", remote, "--root", "@", "--state", "/unused"], roots


def run_fleet(words: Sequence[str], command: str, *more: str) -> Result:
    given = list(words) if command == "apply" else list(words[:-2])
    return CliRunner().invoke(nic, [command, "--profile", PROFILE, *given, *more])


def test_hosts_are_asked_over_ssh_and_shown_in_one_table(fleet, tmp_path):
    words, _ = fleet
    result = run_fleet(words, "plan", "--hosts", "a,b,gone", "--json", str(tmp_path / "all.json"))
    assert result.exit_code == 1
    assert "8 changes" in result.stdout
    assert "unreachable" in result.stdout
    assert "No route to host" in result.stdout
    assert "1 of 3 hosts failed: gone" in result.stderr
    hosts = json.loads((tmp_path / "all.json").read_text())["hosts"]
    assert [host["exit_code"] for host in hosts.values()] == [0, 0, 255]
    assert hosts["a"]["result"]["steps"]


def test_what_runs_there_may_be_several_words(fleet):
    words, _ = fleet
    words[words.index("--remote") + 1] = f"{sys.executable} -m netlayer"
    assert run_fleet(words, "plan", "--hosts", "a").exit_code == 0


@pytest.mark.parametrize("remote", ["'", "", " "])
def test_a_remote_command_that_is_none_is_refused(remote):
    error = CliRunner().invoke(nic, ["inventory", "--hosts", "a", "--remote", remote]).exception
    assert isinstance(error, ConfigError)
    assert "--remote" in str(error)


def test_a_file_of_hosts_is_read_and_a_late_one_is_given_up(fleet, tmp_path):
    words, _ = fleet
    (tmp_path / "hosts").write_text("# rack 1\ngone\n\nslow slots=8  # never answers\n")
    result = run_fleet(words, "verify", "--hosts", str(tmp_path / "hosts"), "--ssh-limit", "1")
    assert result.exit_code == 1
    assert "2 of 2 hosts failed: gone, slow" in result.stderr
    assert "late" in result.stdout
    assert "it may still be at work" in result.stdout


def test_one_kind_of_failure_keeps_its_exit_code(fleet):
    words, _ = fleet
    assert run_fleet(words, "plan", "--hosts", "a,b", "--device", "none").exit_code == 2


def test_a_profile_from_stdin_goes_to_every_host(fleet, tmp_path):
    words, _ = fleet
    given = ["plan", "--profile", "-", *words[:-2], "--hosts", "a,b", "--json", "-"]
    result = CliRunner().invoke(nic, given, input="name = 'piped'\nlink_pause = false\n")
    assert [host["result"]["profile"] for host in json.loads(result.stdout)["hosts"].values()] == ["piped", "piped"]


def test_a_profile_that_is_wrong_reaches_no_host(fleet, tmp_path):
    words, _ = fleet
    (tmp_path / "bad.toml").write_text("law = 'cubic'\n")
    given = ["plan", "--profile", str(tmp_path / "bad.toml"), *words[:-2], "--hosts", "a"]
    assert isinstance(CliRunner().invoke(nic, given).exception, ConfigError)
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("command", ["none-of-that", "'"])
def test_an_ssh_that_is_none_is_said(command):
    result = CliRunner().invoke(nic, ["plan", "--profile", PROFILE, "--hosts", "a", "--ssh-command", command])
    assert result.exit_code == 1
    assert "No such file" in result.stdout or "is no command" in str(result.exception)


def test_words_for_another_host_are_quoted(fleet, tmp_path):
    words, _ = fleet
    run_fleet(words, "plan", "--hosts", "a", "--device", f"x; touch {tmp_path}/owned")
    assert not (tmp_path / "owned").exists()
    assert "'x; touch" in (tmp_path / "asked").read_text()


@pytest.mark.parametrize("hosts", ["-oProxyCommand=x", "a,-b", "", "a b", "a;b", "$(id)"])
def test_what_is_no_host_is_refused(hosts):
    error = CliRunner().invoke(nic, ["plan", "--profile", PROFILE, "--hosts", hosts]).exception
    assert isinstance(error, ConfigError)
    assert str(error).startswith("--hosts")


def test_a_profile_from_stdin_is_taken(place):
    words = place.words("plan", "--json", "-")
    words[words.index("--profile") + 1] = "-"
    result = CliRunner().invoke(nic, words, input="name = 'piped'\n")
    assert json.loads(result.stdout)["profile"] == "piped"


@pytest.mark.parametrize("command", ["inventory", "plan", "apply", "verify", "rollback"])
def test_help_has_examples(command):
    result = CliRunner().invoke(nic, [command, "--help"])
    assert result.exit_code == 0
    assert f"netlayer nic {command}" in result.stdout


def test_the_old_name_of_hosts_is_taken_with_a_warning(fleet):
    words, _ = fleet
    result = run_fleet(words, "plan", "--ssh", "a,b")
    assert result.exit_code == 0
    assert "warning: --ssh HOSTS is now --hosts HOSTS" in result.stderr

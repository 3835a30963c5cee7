"""`netlayer accept` over real gloo ranks: planted faults, stopped and killed workers, hosts, outputs, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from click.testing import CliRunner, Result

from bench.accept.agents.faults import InjectedFault, parse_faults
from bench.accept.agents.fleet import Fleet
from bench.accept.agents.links import Link, start_local
from bench.accept.cli import accept
from bench.accept.judge.logs import judge_files
from bench.accept.phases.work import work_for
from bench.accept.run import Settings, members_of, run
from bench.accept.run_output import drain_lists, sentence, tickets
from netlayer.errors import ConfigError, HardwareMissing, NetlayerError

pytestmark = pytest.mark.quiet

RANKS = 4
SLEEP = {"bytes": 1 << 20, "repeats": 3, "budget_s": 0.1}
FAKE_SSH = """#!/bin/sh
[ "$1" = mistyped ] && { echo "ssh: Could not resolve hostname $1: Name or service not known" >&2; exit 255; }
[ "$1" = nowhere ] && { echo "no route to $1" >&2; exit 255; }
exec sh -c "$2"
"""


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Link]:
    with (tmp_path_factory.mktemp("accept") / "log").open("wb") as log:
        link = start_local(range(RANKS), log)
        yield link
        link.close()


def settings(faults: list[InjectedFault], *chosen: str, limit_s: float = 4.0) -> Settings:
    return Settings(members_of([("localhost", RANKS)], 1), "gloo", work_for("gloo", limit_s), faults, chosen)


def begin(link: Link, *faults: InjectedFault) -> Fleet:
    fleet, link.began = Fleet([link]), False
    worker = {"device": "cpu", "environ": {"GLOO_SOCKET_IFNAME": "lo"}, "faults": [one.to_json() for one in faults]}
    assert fleet.begin(dict.fromkeys(range(RANKS), worker), {"OMP_NUM_THREADS": "1"}, False) == []
    return fleet


def worker_pids(link: Link, fleet: Fleet) -> list[int]:
    """Return the process ids of all ranks' workers, freshly started because a task exceeded its time limit."""
    assert link.process is not None
    fleet.run("all_reduce", {**SLEEP, "repeats": 100_000, "budget_s": 60}, [range(RANKS)], 0.3)
    fleet.run("gemm", {"size": 8, "repeats": 1, "budget_s": 1}, [(RANKS - 1,)], 5.0)  # by then all are replaced
    return sorted(child.pid for child in psutil.Process(link.process.pid).children())[-RANKS:]


def command(*arguments: object) -> Result:
    return CliRunner().invoke(accept, [str(word) for word in arguments])


def error_of(*arguments: object) -> NetlayerError:
    result = command(*arguments).exception
    assert isinstance(result, NetlayerError)
    return result


@pytest.mark.parametrize(
    ("fault", "chosen", "phase"),
    [
        (InjectedFault("hang", (2,), 3), ("neighbours", "all_reduce"), "neighbours"),
        pytest.param(InjectedFault("hang", (1,), 5), ("pairs",), "pairs", marks=pytest.mark.slow),
        (InjectedFault("corrupt", (3,), 1), ("all_reduce", "train"), "all_reduce"),
        (InjectedFault("corrupt", (0,), 1), ("pairs",), "pairs"),
        (InjectedFault("corrupt", (1,), 1), ("train",), "train"),
        pytest.param(InjectedFault("slowlink", (0, 2), 30), ("pairs",), "pairs", marks=pytest.mark.slow),
    ],
)
def test_a_planted_fault_is_named_and_the_rest_goes_on(
    fault: InjectedFault, chosen: tuple[str, ...], phase: str, link: Link
) -> None:
    link.began = False
    result = run(settings([fault], *chosen), [link])
    failed = {(one.ranks, one.phase) for one in result.trial.suspects if one.verdict == "FAIL"}
    assert failed == {(fault.ranks, phase)}, result.trial.findings
    assert result.done == list(chosen)
    if len(fault.ranks) == 1:
        assert fault.ranks[0] not in result.trial.alive
        assert "Next:" in tickets(result)[f"node{fault.ranks[0]}"]
    assert not drain_lists(result.trial)  # as it is a dry run


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("fault", "chosen"),
    [
        (InjectedFault("hang", (2,), 3), ("neighbours", "all_reduce")),
        (InjectedFault("corrupt", (3,), 1), ("neighbours", "all_reduce")),
        (InjectedFault("slowlink", (0, 2), 30), ("pairs",)),
    ],
    ids=["hang", "corrupt", "slow link"],
)
def test_a_planted_fault_is_named_on_nccl_and_the_rest_goes_on(
    fault: InjectedFault, chosen: tuple[str, ...], link: Link
) -> None:
    link.began = False
    gpus = torch.cuda.device_count()
    shared_gpus = gpus if gpus < RANKS else 0
    work = work_for("nccl", 6.0, virtual_nodes=True, shares_gpus=bool(shared_gpus))
    members = members_of([("localhost", RANKS)], 1)
    result = run(Settings(members, "nccl", work, [fault], chosen, virtual_nodes=True, shared_gpus=shared_gpus), [link])
    if fault.kind == "slowlink" and not shared_gpus:  # four nodes without known bounds are too few to flag one
        assert not result.trial.suspects
        return
    assert {one.ranks for one in result.trial.suspects if one.verdict == "FAIL"} == {fault.ranks}, result.trial.findings
    assert result.done == list(chosen)
    if len(fault.ranks) == 1:
        alive = [rank for rank in range(RANKS) if rank not in fault.ranks]
        assert {row["rank"] for row in result.trial.rows if row["phase"] == "all_reduce"} >= set(alive)


@pytest.mark.slow
def test_a_stopped_worker_and_a_killed_one_are_seen_from_outside(link: Link) -> None:
    fleet = begin(link)
    everyone = tuple(range(RANKS))
    os.kill(worker_pids(link, fleet)[1], signal.SIGSTOP)
    [outcome] = fleet.run("all_reduce", SLEEP, [everyone], 2.0)
    assert outcome.where[1].state == "T"
    [outcome] = fleet.run("all_reduce", SLEEP, [everyone], 10.0)
    assert not outcome.failed  # a fresh one has taken its place
    os.kill(worker_pids(link, fleet)[3], signal.SIGKILL)
    [outcome] = fleet.run("all_reduce", SLEEP, [everyone], 10.0)
    assert list(outcome.dead) == [3]
    [outcome] = fleet.run("all_reduce", SLEEP, [everyone], 10.0)
    assert not outcome.failed


def test_a_soak_goes_on_with_the_same_work_and_judges_drift(link: Link) -> None:
    link.began = False
    result = run(replace(settings([], "all_reduce"), soak_s=4.0), [link])
    soaked = [row for row in result.trial.rows if row["phase"] == "soak"]
    assert {row["rank"] for row in soaked if row["check"] == "gemm"} == set(range(RANKS))
    assert max(row["cycle"] for row in soaked) >= 1
    [finding] = [finding for finding in result.trial.findings if finding.file == "soak" and "drift" in finding.check]
    assert "cycles" in finding.figure


def test_groups_that_share_no_rank_run_at_once_and_one_failure_leaves_the_other(link: Link) -> None:
    fleet = begin(link, InjectedFault("hang", (3,), 1))
    good, bad = fleet.run("all_reduce", SLEEP, [(0, 1), (2, 3)], 2.0)
    assert [row["rank"] for row in good.rows or []] == [0, 1]
    assert {rank: where.launched for rank, where in bad.where.items()} == {2: 1, 3: 0}


def test_an_error_of_a_probe_is_an_outcome(link: Link) -> None:
    [outcome] = begin(link).run("gemm", {"size": -1, "repeats": 1, "budget_s": 1}, [(0,)], 5.0)
    assert "must be above zero" in outcome.errors[0]


def test_nothing_is_left_when_the_agent_is_killed(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        link = start_local(range(RANKS), log)
        assert link.process is not None
        begin(link)
        workers = [child.pid for child in psutil.Process(link.process.pid).children()]
        assert len(workers) == RANKS
        link.process.kill()
        link.close()
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_command_writes_what_it_found(tmp_path: Path) -> None:
    out = {option: tmp_path / f"run.{option}" for option in ("json", "junit")}
    outputs = [word for option in out for word in (f"--{option}", out[option])]
    phases = [word for name in ("gemm", "pairs") for word in ("--only", name)]
    result = command("--ranks", 4, "--backend", "gloo", "--inject", "slow:2:1.5", *phases, *outputs, "--out", tmp_path)
    assert result.exit_code == 1, result.output
    assert "FAIL: faulty: node2 (gemm)" in result.stdout
    rows = json.loads(out["json"].read_text())["rows"]
    assert (rows[0]["table"], rows[0]["verdict"], rows[0]["stopped"]) == ("overall", "FAIL", "")
    assert [row["ranks"] for row in rows if row["table"] == "accused"] == [[2]]
    assert {row["phase"] for row in rows if row["table"] == "measured"} == {"gemm", "pairs"}
    suite = ET.parse(out["junit"]).getroot()
    assert suite.get("failures") == "1"
    assert "no drain list for ranks" in result.stdout
    assert not list(tmp_path.glob("drain-*"))
    assert "node2" in (tmp_path / "ticket-node2.txt").read_text()


def test_an_injected_fault_that_no_phase_shows_is_an_exit_code_of_its_own() -> None:
    result = command("--ranks", 4, "--backend", "gloo", "--inject", "slowlink:0-2:300", "--only", "gemm")
    assert result.exit_code == 4, result.output
    assert "not found: slowlink:0-2:300; " in result.stderr


@pytest.mark.slow
def test_the_page_has_the_heat_map_and_its_pictures_beside_it(tmp_path: Path) -> None:
    result = command("--ranks", 4, "--backend", "gloo", "--only", "pairs", "--html", tmp_path / "run 1.html")
    assert result.exit_code == 0, result.output
    assert "plots/run-1-pairs.png" in (tmp_path / "run 1.html").read_text()
    assert (tmp_path / "plots" / "run-1-pairs.png").stat().st_size > 1000


@pytest.mark.slow
def test_hosts_are_reached_by_the_ssh_given_and_a_host_that_is_not_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(FAKE_SSH)
    ssh.chmod(0o755)
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 slots=2  # two ranks\nnowhere\nlocalhost\nmistyped\n")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    arguments = (
        "--hosts",
        hosts,
        "--ssh-command",
        ssh,
        "--backend",
        "gloo",
        "--only",
        "all_reduce",
        "--only",
        "all_to_all",
    )
    result = command(*arguments, "--only", "preflight", "--json", "-")
    assert result.exit_code == 1, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [row["label"] for row in rows if row["table"] == "accused"] == ["nowhere", "mistyped"]
    [start] = [row for row in rows if row["table"] == "finding" and row["subject"] == "nowhere"]
    assert (start["phase"], start["figure"]) == ("start", "its agent did not start: no route to nowhere")
    [line] = next(row["lines"] for row in rows if row["table"] == "drain")
    assert "nodename=nowhere " in line
    groups = {tuple(row["group"]) for row in rows if row["table"] == "measured"}
    assert groups == {(0, 1), (0, 1, 3)}


def start_command(path: Path) -> subprocess.Popen[bytes]:
    arguments = ["-m", "netlayer", "accept", "--ranks", "4", "--backend", "gloo", "--json", str(path), "--soak", "1"]
    return subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_for(process: subprocess.Popen[bytes], text: bytes) -> list[psutil.Process]:
    """Wait until the process writes `text` to stderr, and return all processes below it."""
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return psutil.Process(process.pid).children(recursive=True)
    raise AssertionError(f"never wrote {text!r}")


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "phase"), [(signal.SIGINT, b"soak ..."), (signal.SIGTERM, b"copy ...")])
def test_a_signal_ends_it_with_what_was_measured_and_leaves_no_process(
    signum: int, phase: bytes, tmp_path: Path
) -> None:
    process = start_command(tmp_path / "run.json")
    below = wait_for(process, phase)
    time.sleep(1)
    process.send_signal(signum)
    wait_for(process, b"interrupted: judging")
    process.send_signal(signum)  # whoever is impatient loses nothing
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"stopped early (interrupted)" in stdout
    rows = json.loads((tmp_path / "run.json").read_text())["rows"]
    assert (rows[0]["stopped"], rows[0]["verdict"] in ("WARN", "FAIL")) == ("interrupted", True)
    assert any(row.get("check") == "gemm" for row in rows)
    assert not [one for one in below if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
def test_nothing_is_left_when_the_command_is_killed(tmp_path: Path) -> None:
    process = start_command(tmp_path / "run.json")
    below = wait_for(process, b"gemm ...")
    process.kill()
    process.communicate()
    gone, alive = psutil.wait_procs(below, timeout=15)
    assert not alive, gone


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["slow:3:0.2", "hang:3", "corrupt:3", "slowlink:2-3:200", ""])
def test_eight_ranks_with_all_phases(fault: str, tmp_path: Path) -> None:
    arguments = ("--inject", fault) if fault else ()
    result = command("--ranks", 8, "--backend", "gloo", *arguments, "--json", tmp_path / "run.json")
    suspects = [row for row in json.loads((tmp_path / "run.json").read_text())["rows"] if row["table"] == "accused"]
    ranks = [[2, 3]] if fault.startswith("slowlink") else [[3]] if fault else []
    assert [list(one) for one in {tuple(row["ranks"]) for row in suspects}] == ranks, result.stdout
    assert result.exit_code == (1 if any(row["verdict"] == "FAIL" for row in suspects) else 0)


@pytest.mark.slow
def test_ranks_of_a_launcher_join_the_run_of_the_first(tmp_path: Path) -> None:
    """Start the same command once per rank, as torchrun does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [sys.executable, "-m", "netlayer", "accept", "--backend", "gloo", "--inject", "corrupt:1"]
    arguments += ["--only", "all_reduce", "--json", str(tmp_path / "run.json")]
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    ranks = [
        subprocess.Popen(
            arguments,
            env={**os.environ, **places, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(3)
    ]
    printed = [rank.communicate(timeout=90)[0].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 0, 0], printed
    rows = json.loads((tmp_path / "run.json").read_text())["rows"]
    assert [row["ranks"] for row in rows if row["table"] == "accused"] == [[1]]


BAD_OPTIONS: list[tuple[tuple[object, ...], str]] = [
    (("--inject", "slow"), "--inject = slow: must be one of slow, hang"),
    (("--inject", "hang:3-4"), "--inject = hang:3-4: must be one of"),
    (("--inject", "slowlink:3"), "must be one of"),
    (("--inject", "slowlink:2-2"), "each once"),
    (("--inject", "slow:9"), "must name ranks of 0..3"),
    (("--inject", "ctas:0-1:2"), "--inject = ctas:0-1:2: has no effect on gloo"),
    (("--inject", "slow:1:0"), "its amount must be above 0"),
    (("--only", "gem"), "--only = gem: must be one of preflight, verbs, gemm"),
    (("--ranks-per-node", "3"), "--ranks = 4: must be a multiple of --ranks-per-node = 3"),
    (("--hosts", "/none"), "--ranks = 4: has no effect with --hosts"),
    (("--ssh-command", "rsh"), "--ssh-command = rsh: has no effect without --hosts"),
    (("--limit", "nan"), "--limit = nan: must be a number"),
    (("--soak", "nan"), "--soak = nan: must be a number"),
    (("--nccl-tests", "/none"), "--nccl-tests = /none: has no effect without --runner nccl-tests"),
    *(
        (
            ("--runner", "nccl-tests", *arguments),
            f"{arguments[0]} = {arguments[1]}: has no effect with --runner nccl-tests",
        )
        for arguments in (("--inject", "hang:3"), ("--soak", "1.0"), ("--only", "gemm"), ("--limit", "9.0"))
    ),
    (("--json", "/none/x"), "--json = /none/x: cannot be written"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_OPTIONS)
def test_a_bad_option_is_one_line_and_exit_2(arguments: tuple[object, ...], message: str) -> None:
    error = error_of("--ranks", 4, "--backend", "gloo", *arguments)
    assert isinstance(error, ConfigError)
    assert message in str(error)


def test_what_a_launcher_has_said_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert "--ranks = 2: has no effect under" in str(error_of("--ranks", 2))
    assert "--hosts = /none: has no effect under" in str(error_of("--hosts", "/none"))


def test_hosts_that_cannot_be_read() -> None:
    assert "--hosts = /none: cannot be read" in str(error_of("--hosts", "/none", "--backend", "gloo"))


def test_missing_hardware_is_exit_3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("bench.accept.command.usable_gpus", list)
    for arguments in (
        ("--backend", "nccl"),
        ("--backend", "gloo", "--ranks", 2, "--runner", "nccl-tests", "--nccl-tests", tmp_path),
    ):
        error = error_of(*arguments)
        assert isinstance(error, HardwareMissing)
        assert error.exit_code == 3


def test_options_of_the_run_before_a_sub_command_are_refused(tmp_path: Path) -> None:
    result = command("--ranks", 4, "judge", tmp_path)
    assert result.exit_code == 2
    assert "--ranks" in result.output


def test_amounts_have_defaults() -> None:
    faults = parse_faults(["slow:3", "hang:1", "slowlink:0-2"], 4)
    assert [fault.amount for fault in faults] == [0.2, 3, 10]


def nccl_like(folder: Path, script: str) -> Path:
    path = folder / "all_reduce_perf"
    path.write_text(script)
    path.chmod(0o755)
    return path


def test_our_own_scripts_are_not_taken_for_nccl_tests(tmp_path: Path) -> None:
    from bench.accept.nccl_tests import find_binaries

    nccl_like(tmp_path, "#!/usr/bin/env python\n")
    with pytest.raises(HardwareMissing, match="no compiled all_reduce_perf"):
        find_binaries(tmp_path)


def test_the_genuine_runner_judges_the_tables(tmp_path: Path, link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a script in place of nccl-tests that prints one of its tables."""
    from bench.accept import nccl_tests

    log = Path(__file__).parent / "logs" / "nccl_mpirun_nvls_off.txt"
    path = nccl_like(tmp_path, f"#!/bin/sh\ncat {log}\n")
    monkeypatch.setattr(nccl_tests, "find_binaries", lambda _folder: {"all_reduce_perf": path})
    begin(link)
    result = nccl_tests.run_nccl_tests(settings([]), [link], tmp_path)
    assert {finding.subject for finding in result.trial.findings} == {"localhost"}
    expected = [finding.verdict for finding in judge_files([log]).findings]
    assert sorted(map(str, (finding.verdict for finding in result.trial.findings))) == sorted(map(str, expected))
    first_row: dict[str, Any] = result.trial.rows[0]
    assert first_row["code"] == 0
    hung = log.with_name("nccl_hung.txt")
    path.write_text(f"#!/bin/sh\ncat {hung}\necho 'a peer was lost' >&2\nexit 1\n")
    [first, *_] = nccl_tests.run_nccl_tests(settings([]), [link], tmp_path).trial.findings
    assert first.figure == "has no end; its last figures are of 4 MiB: a peer was lost"
    path.write_text("#!/bin/sh\nexit 3\n")
    result = nccl_tests.run_nccl_tests(settings([]), [link], tmp_path)
    assert [finding.figure for finding in result.trial.findings] == ["ended with code 3, no output"]
    assert sentence(result).startswith("faulty: localhost (all_reduce_perf); ")
    assert f"nodename={os.uname().nodename} " in drain_lists(result.trial)["Slurm"][0]


@pytest.mark.parametrize("option", ["--ssh", "--ssh-command", "--html", "--limit"])
def test_an_option_of_the_run_before_a_sub_command_is_named_as_it_was_written(option: str) -> None:
    result = CliRunner().invoke(accept, [option, "3", "judge", "x.log"])
    assert result.exit_code == 2
    assert f"options of the run stand before no sub-command: {option}" in result.output

"""Self-checks of a node: wrong numbers fail them, one that hangs is ended, and what is not made is named."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from collectives import health
from collectives.health.host import HostCheck
from congestion.verbs import measure
from congestion.verbs.device import Device
from netlayer.errors import CheckFailed, HardwareMissing
from trainer.resilience import processes, self_check
from trainer.resilience.executor import SelfCheck
from trainer.resilience.messages import CheckResult


def starting(program: str) -> Callable[[IO[bytes], IO[bytes]], subprocess.Popen[bytes]]:
    def start(stdout: IO[bytes], stderr: IO[bytes]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", program]
        return subprocess.Popen(command, stdout=stdout, stderr=stderr, start_new_session=True)

    return start


def make(program: str, limit_s: float = 60.0, retries: int = 0) -> SelfCheck:
    return SelfCheck(1, starting(program), limit_s, retries)


def results_of(check: SelfCheck) -> list[CheckResult]:
    deadline_s = time.monotonic() + 60
    while (results := check.results()) is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    return results


_DISK = """print('netlayer-check {"name": "disk", "passed": true, "detail": "", "seconds": 1.0}', flush=True)"""
_BAD = """print('netlayer-check {"name": "gemm", "passed": false, "detail": "wrong", "seconds": 1.0}', flush=True)"""
_BEGINS = """print('netlayer-check {"begins": "devices"}', flush=True)"""
_DONE = """print('netlayer-check {"done": true}')"""


@pytest.mark.parametrize(
    ("program", "ending"),
    [
        (f"{_DISK}\n{_BEGINS}\nimport time; time.sleep(60)", "devices: not done within"),
        (f"{_DISK}\n{_BEGINS}\nraise SystemExit('no torch here')", "devices: exit code 1: no torch here"),
        (f"{_DISK}\n{_BEGINS}\nimport os; os.kill(os.getpid(), 9)", "devices: exit code -9"),
        (f"{_DISK}\n{_BEGINS}", "devices: exit code 0"),
    ],
)
def test_a_check_that_cannot_be_made_says_nothing_of_the_node(program: str, ending: str) -> None:
    results = results_of(make(program, 3.0 if "not done" in ending else 60.0))
    assert [(each.name, each.passed, each.is_unclear) for each in results] == [
        ("disk", True, False),
        ("self_check", None, True),
    ]
    assert ending in results[1].detail


def test_a_check_that_does_not_die_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[int]()
    check = SelfCheck(1, starting("import time; time.sleep(60)"), 0.0, meanwhile=lambda: told.append(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", lambda _group, _signal: None)  # it hangs in the kernel
        patch.setattr(processes, "_KILLED_S", 0.1)
        [result] = check.results() or []
    assert result.is_unclear
    assert told
    told.clear()
    check.end()
    assert told == []
    check._process.kill()
    check._process.wait()


def test_a_failure_that_was_seen_counts_whatever_comes_of_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "tries"
    note = f"open({str(file)!r}, 'a').write('x')"
    results = results_of(make(f"{note}\n{_BAD}\nraise SystemExit(3)", retries=3))
    assert [(each.name, each.passed) for each in results] == [("gemm", False), ("self_check", None)]
    assert file.read_text() == "x"  # and is not tried away


def test_an_unclear_check_is_tried_again_a_bounded_number_of_times(tmp_path: Path) -> None:
    file = tmp_path / "tries"
    note = f"file = open({str(file)!r}, 'a+'); file.write('x'); file.seek(0); tries = len(file.read())"
    second = results_of(make(f"{note}\nif tries < 2: raise SystemExit(1)\n{_DISK}\n{_DONE}", retries=2))
    assert [(each.name, each.passed) for each in second] == [("disk", True)]
    assert file.read_text() == "xx"
    file.unlink()
    never = results_of(make(f"{note}\nraise SystemExit(1)", retries=2))
    assert [each.is_unclear for each in never] == [True]
    assert file.read_text() == "xxx"


def test_results_are_read_behind_what_a_library_prints() -> None:
    lines = f"{_DISK}\nprint('NCCL version 2.27\\nnetlayer-check [')\n{_DONE}\nprint('[]')"
    assert [(each.name, each.passed) for each in results_of(make(lines))] == [("disk", True)]


def test_wrong_numbers_of_a_device_fail_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    good = list(self_check.device_checks(1, "gloo"))
    assert [(each.name, each.passed) for each in good] == [("gemm", True), ("copy", True)]
    gemm = health.gemm

    def broken(*arguments: object, **options: object) -> object:
        rows = gemm(*arguments, **options)  # type: ignore[arg-type]
        return [{**row, "ok": False, "wrong": 3} for row in rows]

    monkeypatch.setattr(health, "gemm", broken)
    bad = list(self_check.device_checks(1, "gloo"))
    assert [(each.name, each.passed) for each in bad] == [("gemm", False), ("copy", True)]
    assert "wrong numbers came out" in bad[0].detail


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        ("CUDA error: uncorrectable ECC error encountered\nmore", False),
        # Of somebody else's process, or of a program: no fault of the device.
        ("CUDA out of memory. Tried to allocate 64.00 MiB.", None),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", None),
    ],
)
def test_an_error_fails_a_device_only_where_it_speaks_of_hardware(
    text: str, passed: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_arguments: object, **_options: object) -> object:
        raise RuntimeError(text)

    monkeypatch.setattr(health, "copy", lost)
    [check] = self_check.device_checks(1, "gloo")
    assert (check.passed, check.is_unclear) == (passed, passed is None)
    assert check.detail == f"cpu:0: {text.splitlines()[0]}"


@pytest.mark.parametrize(
    ("state", "outcome", "passed", "is_unclear"),
    [
        ("ACTIVE", None, True, False),
        ("ACTIVE", CheckFailed("7 bytes are wrong"), False, False),
        ("ACTIVE", measure.QpError("transport retries exceeded", 12), None, True),
        ("ACTIVE", HardwareMissing("pyverbs cannot be imported"), None, False),
        ("DOWN", None, None, False),
    ],
)
def test_an_rdma_device_fails_by_wrong_bytes_alone(
    state: str, outcome: Exception | None, passed: bool | None, is_unclear: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pair(name: str, plan: measure.Plan) -> list[object]:
        assert (name, plan.sizes) == ("mlx5_0", (1 << 16,))
        if outcome is not None:
            raise outcome
        return []

    monkeypatch.setattr(measure, "devices", lambda: [Device("mlx5_0", state, "400 Gb/sec", "Ethernet", ())])
    monkeypatch.setattr(measure, "measure_pair", pair)
    [check] = self_check.nic_checks()
    assert (check.name, check.passed, check.is_unclear) == ("nic_loopback", passed, is_unclear)


def test_what_is_not_checked_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(self_check, "host_checks", lambda _folder: [HostCheck("disk", True, "good")])
    self_check.main(str(tmp_path), "host", 1, "gloo")
    checks, _, is_done = self_check.read_output(capsys.readouterr().out.encode())
    assert is_done
    assert [check.name for check in checks if check.passed is None] == ["neighbours"]
    assert self_check.group_checks(tmp_path, 1, "gloo")[0].detail == "one rank on this node"


@pytest.mark.slow  # half a minute: two ranks that load torch
def test_the_ranks_of_a_node_check_their_collectives(tmp_path: Path) -> None:
    checks = self_check.group_checks(tmp_path, 2, "gloo")
    assert [(each.name, each.passed) for each in checks] == [("all_reduce", True)] * 2 + [("all_to_all", True)] * 2

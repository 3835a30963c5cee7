"""Self-checks of a node: wrong numbers fail them, one that hangs is ended, and what is not made is named."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from collectives import health
from collectives.health.host import HostCheck
from trainer.resilience import self_check
from trainer.resilience.executor import SelfCheck


def test_a_check_that_takes_too_long_is_ended_and_has_failed(tmp_path: Path) -> None:
    check = SelfCheck(1, tmp_path, "full", 2, "gloo", 0.0)
    results = check.results()
    assert results is not None
    assert [(each.name, each.passed) for each in results] == [("self_check", False)]
    assert "not done within 0 s" in results[0].detail


def test_a_check_that_fails_to_run_has_failed(tmp_path: Path) -> None:
    check = SelfCheck(1, tmp_path, "host", -1, "gloo", 60.0)
    check._process.kill()
    deadline_s = time.monotonic() + 30
    while (results := check.results()) is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    assert [(each.name, each.passed) for each in results] == [("self_check", False)]


def test_results_are_read_behind_what_a_library_prints(tmp_path: Path) -> None:
    for output, passed in ((b"NCCL version 2.27\n", [True]), (b"[]\nnot ours", [False]), (b"", [False])):
        check = SelfCheck(1, tmp_path, "host", -1, "gloo", 60.0)
        check._process.kill()
        check._process.wait()
        check._process.returncode = 0
        check._output.seek(0)
        check._output.truncate()
        row = b'[{"name": "disk", "passed": true, "detail": "", "seconds": 1.0}]\n'
        check._output.write(output + row if passed == [True] else output)
        results = check.results()
        assert results is not None
        assert [each.passed for each in results] == passed


def test_wrong_numbers_of_a_device_fail_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    good = self_check.device_checks(1, "gloo")
    assert [(each.name, each.passed) for each in good] == [("gemm", True), ("copy", True)]
    gemm = health.gemm

    def broken(*arguments: object, **options: object) -> object:
        rows = gemm(*arguments, **options)  # type: ignore[arg-type]
        return [{**row, "ok": False, "wrong": 3} for row in rows]

    monkeypatch.setattr(health, "gemm", broken)
    bad = self_check.device_checks(1, "gloo")
    assert [(each.name, each.passed) for each in bad] == [("gemm", False), ("copy", True)]
    assert "wrong numbers came out" in bad[0].detail


def test_an_error_of_the_device_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_arguments: object, **_options: object) -> object:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nmore")

    monkeypatch.setattr(health, "copy", lost)
    [check] = self_check.device_checks(1, "gloo")
    assert check.passed is False
    assert check.detail == "cpu:0: CUDA error: uncorrectable ECC error encountered"


def test_what_is_not_checked_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(self_check, "host_checks", lambda _folder: [HostCheck("disk", True, "good")])
    self_check.main(str(tmp_path), "host", 1, "gloo")
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert [name for name, row in rows.items() if row["passed"] is None] == ["nic_loopback", "neighbours"]
    assert self_check.group_checks(tmp_path, 1, "gloo")[0].detail == "one rank on this node"


@pytest.mark.slow  # half a minute: two ranks that load torch
def test_the_ranks_of_a_node_check_their_collectives(tmp_path: Path) -> None:
    checks = self_check.group_checks(tmp_path, 2, "gloo")
    assert [(each.name, each.passed) for each in checks] == [("all_reduce", True)] * 2 + [("all_to_all", True)] * 2

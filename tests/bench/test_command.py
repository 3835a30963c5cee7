"""What a `*_perf` command does around its measurements: files, exit codes, and an end before the end."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import pytest

from bench.perf import command as command_module
from bench.perf.collectives.all_reduce import COLLECTIVE as ALL_REDUCE
from bench.perf.command import run_command
from bench.perf.options import PerfOptions, Request
from bench.perf.table import LiveTable, PerfRow
from netlayer.errors import ConfigError
from netlayer.results import RunRecord
from tests.bench import canned
from tests.forked import start_module

_ALL_REDUCE_PERF = """
from bench.perf.collectives.all_reduce import command
from netlayer.cli import run
run(command, "all_reduce_perf")
"""


def request(tmp_path: Path, **options: object) -> Request:
    given = PerfOptions(min_bytes=64, max_bytes=64, iters=1, **options)  # type: ignore[arg-type]
    return Request(given, 2, "gloo", tmp_path / "a.json", tmp_path / "a.csv")


def num_rows(file: Path) -> int:
    return len(list(csv.DictReader(file.read_text().splitlines())))


def alternating(num_rows: int, **changes: object) -> list[dict[str, Any]]:
    return [canned.row(in_place=bool(number % 2), **changes) for number in range(num_rows)]


def breaks_off(rows: int, error: BaseException) -> object:
    """In place of `_start_ranks`: reports so many rows, then ends."""

    def start(_collective: object, asked: Request, _backend: str, table: LiveTable) -> NoReturn:
        record = canned.record([], **asdict(asked.options))
        table.start(record)
        for row in alternating(rows):
            table.add(record, PerfRow.from_row(row))
        raise error

    return start


def test_what_was_measured_before_ctrl_c_is_in_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_module, "_start_ranks", breaks_off(5, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        run_command(ALL_REDUCE, request(tmp_path, cycles=0))
    tree = json.loads((tmp_path / "a.json").read_text())
    assert (len(tree["results"]), tree["errors"]) == (2, ["interrupted"])  # the fifth row is half a line
    assert num_rows(tmp_path / "a.csv") == 4
    assert (
        f"note: interrupted; 2 lines are in {tmp_path / 'a.json'} and {tmp_path / 'a.csv'}" in capsys.readouterr().err
    )


def test_where_nothing_was_measured_no_file_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_module, "_start_ranks", breaks_off(1, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        run_command(ALL_REDUCE, request(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_missed_bandwidth_is_said_with_threshold_and_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def finish(_collective: object, asked: Request, *_: object) -> RunRecord:
        return canned.record(alternating(2, bus_bw_gbs=50.0), **asdict(asked.options))

    monkeypatch.setattr(command_module, "_start_ranks", finish)
    assert run_command(ALL_REDUCE, request(tmp_path, min_bw_gbs=50.0))
    assert "error" not in capsys.readouterr().err
    (tmp_path / "a.json").unlink()
    assert not run_command(ALL_REDUCE, request(tmp_path, min_bw_gbs=100.0))
    said = "error: mean bus bandwidth = 50 GB/s: is below 0.9 x NCCL_TESTS_MIN_BW = 90 GB/s"
    assert said in capsys.readouterr().err


def test_ranks_far_beyond_cores_and_memory_are_said_before_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(command_module, "available_memory_bytes", lambda: 24 << 30)
    assert command_module._starting(2, "gloo") == "starting 2 ranks"
    many = command_module._starting(200, "gloo")
    assert many.startswith("starting 200 ranks on 2 cores: they take turns, so that the start takes about 250 s")
    assert "about 31 GiB in them, and 24 GiB are free" in many


def test_a_csv_file_that_cannot_be_written_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    script = _ALL_REDUCE_PERF
    done = subprocess.run(
        [sys.executable, "-c", script, "--csv", str(tmp_path / "nope" / "a.csv")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: --csv = {tmp_path / 'nope' / 'a.csv'}: cannot be written")
    assert done.stdout == ""


def test_ctrl_c_in_a_run_without_end_keeps_its_figures(tmp_path: Path) -> None:
    script = _ALL_REDUCE_PERF
    flags = ["-g", "2", "--backend", "gloo", "-b", "64", "-e", "64", "-N", "0", "--csv", str(tmp_path / "a.csv")]
    here, there = os.pipe()
    errors = tmp_path / "errors"
    with os.fdopen(here) as output, os.fdopen(there, "wb") as stdout, errors.open("wb") as stderr:
        running = start_module("tests.program", script, *flags, stdout=stdout, stderr=stderr)
        stdout.close()
        for line in output:
            if not line.startswith("#") and line.strip():
                break
        running.send_signal(signal.SIGINT)
        output.read()
    assert running.wait(60) == 130
    assert "note: interrupted" in errors.read_text()
    assert num_rows(tmp_path / "a.csv") >= 2


def test_a_flag_that_is_refused_is_all_that_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="local_register"):
        run_command(ALL_REDUCE, request(tmp_path, local_register=2))
    assert capsys.readouterr() == ("", "")

"""`netlayer bench compare`: ratio, spread and verdict of two records."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bench.compare import compare
from netlayer.errors import ConfigError
from netlayer.results import RunRecord, Source


def write(path: Path, rows: list[dict[str, Any]], source: Source = "measured") -> Path:
    path.write_text(RunRecord("bench.all_reduce", source, rows, "2026-01-01", "2026-01-01").to_json())
    return path


def row(size: int, bus_bw: float, scatter: float = 0.0, seed: int = 0) -> dict[str, Any]:
    draw = random.Random(seed)
    times = [100 * draw.gauss(1, scatter) for _ in range(21)] if scatter else [100.0] * 21
    return {"size": size, "in_place": False, "bus_bw_gbs": bus_bw, "time_us": 1e4 / bus_bw, "iterations_us": times}


def command(*words: object) -> Result:
    return CliRunner().invoke(compare, [str(word) for word in words])


def test_each_row_is_judged_by_ratio_and_spread(tmp_path: Path) -> None:
    a = write(tmp_path / "a", [row(8, 100), row(16, 100), row(32, 100), row(64, 100, 0.5), row(128, 1)])
    b = write(tmp_path / "b", [row(8, 80), row(16, 125), row(32, 98), row(64, 93, 0.5), row(256, 1)])
    found = command(a, b, "--json", "-")
    assert found.exit_code == 1
    rows = json.loads(found.stdout)["rows"]
    assert [one["verdict"] for one in rows] == ["worse", "better", "same", "same"]
    assert rows[0]["ratio"] == pytest.approx(0.8)
    assert rows[3]["spread"] > 0.07


def test_less_time_is_better(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", [row(8, 100)]), write(tmp_path / "b", [row(8, 200)])
    found = command(a, b, "--by", "time_us")
    assert found.exit_code == 0
    assert found.stdout.splitlines()[-1] == "0 worse, 1 better, 0 same"
    assert command(b, a, "--by", "time_us").exit_code == 1
    assert command(b, a, "--by", "time_us", "--within", 1).exit_code == 0


def test_rows_alike_count_by_their_median(tmp_path: Path) -> None:
    a = write(tmp_path / "a", [row(8, value) for value in (99, 100, 101, 100, 3)])
    b = write(tmp_path / "b", [row(8, value) for value in (100, 99, 101, 100, 900)])
    assert command(a, b).exit_code == 0


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    a, same = write(tmp_path / "a", [row(8, 1)]), write(tmp_path / "same", [row(16, 1)])
    simulated = write(tmp_path / "s", [row(8, 1)], "simulated")
    nothing = write(tmp_path / "n", [{"name": "x"}])
    for words, said in (
        ((a, simulated), "compare records of one source"),
        ((a, nothing), "measures nothing that A does"),
        ((a, same), "no row of both records has it"),
        ((a, a, "--by", "nope"), "no row of both records has it; both measure bus_bw_gbs, time_us"),
        ((a, tmp_path / "none"), "cannot be read"),
    ):
        error = command(*words).exception
        assert isinstance(error, ConfigError)
        assert said in str(error)

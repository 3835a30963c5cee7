"""The benchmark of checkpoints' stalls, on two gloo ranks and a tiny model."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.checkpoint_stall import USUAL_WAYS, SaveRow, command, net_ratio, read_ways, table, verdicts, written_ratio
from bench.checkpoint_training import PARTS_WAYS
from netlayer.errors import NetlayerError
from trainer.checkpoint.writer import SLOW


@pytest.mark.slow(minutes=2)
def test_both_ways_save_in_turns(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    words = ["--folder", str(tmp_path / "out"), "--ranks", "2", "--backend", "gloo", "--model", "1m", "--layers", "2"]
    result = CliRunner().invoke(
        command, [*words, "--turns", "2", "--micro-batches", "1", "--json", str(record)], catch_exceptions=False
    )
    assert result.exit_code == 0
    rows = json.loads(record.read_text())["rows"]
    assert [(row["way"], row["turn"]) for row in rows] == [(way, turn) for turn in range(2) for way in USUAL_WAYS]
    assert all(row["save_s"] > 0 and row["gib"] > 0 for row in rows)
    assert [path.name[:5] for path in (tmp_path / "out" / "ours").iterdir()] == ["step-"] * 2


@pytest.mark.slow(minutes=3)
def test_every_part_is_measured_by_itself(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    options = ["--ranks", "2", "--backend", "gloo", "--model", "1m", "--layers", "2", "--micro-batches", "1"]
    options += ["--turns", "1", "--ways", "parts", "--write-gbps", "0.05", "--json", str(record)]
    result = CliRunner().invoke(command, ["--folder", str(tmp_path / "out"), *options], catch_exceptions=False)
    assert result.exit_code == 0
    rows = {row["way"]: row for row in json.loads(record.read_text())["rows"]}
    assert list(rows) == list(PARTS_WAYS)
    assert all(rows[way]["writer_cpu_s"] == 0 for way in ("none", "copy"))
    assert all(row["writer_cpu_s"] > 0 for way, row in rows.items() if way not in ("none", "copy"))
    assert all(row["copied_step"] > 0 for way, row in rows.items() if way != "none")
    assert rows["limited"]["save_s"] > rows["limited"]["gib"] / 2 * 2**30 / 0.05e9  # two ranks at once
    assert list((tmp_path / "out" / "parts").glob("*/*")) == []


@pytest.mark.parametrize(("ways", "code"), [("ours,theirs", 2), ("nvrx", 3), ("bytecheckpoint", 3)])
def test_a_way_that_is_none_or_not_installed_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ways: str, code: int
) -> None:
    monkeypatch.setattr("bench.checkpoint_stall.importlib.util.find_spec", lambda _name: None)
    with pytest.raises(NetlayerError, match="--ways") as failed:
        CliRunner().invoke(command, ["--folder", str(tmp_path), "--ways", ways], catch_exceptions=False)
    assert failed.value.exit_code == code


def test_a_table_has_a_line_for_each_way() -> None:
    saves = [("ours", 0.1), ("ours", 0.2), ("theirs", 3.0)]
    rows = [SaveRow(way, turn, 10.0, stall, 1.0, 1.5, 2.0, 0.5) for turn, (way, stall) in enumerate(saves)]
    assert [line.split()[0] for line in table(rows).splitlines()] == ["way", "ours", "theirs"]
    assert "0.150" in table(rows)


def test_a_device_that_becomes_slower_by_itself_is_not_the_saves_doing() -> None:
    """Steps of 100, 110 and 120 ms before, after and before the next save: nothing but the drift."""
    row = SaveRow("ours", 0, 100.0, 0.1, 1.1, 1.1, 2.0, 0.5)
    assert net_ratio(row, replace(row, step_ms=120.0)) == pytest.approx(1.0)
    assert net_ratio(row, row) == pytest.approx(1.1)


def test_steps_beside_which_a_save_is_written_are_told_from_the_others() -> None:
    after = [1.5, 1.5, 1.2, 1.2, 1.2, 1.0]  # a copy of two steps, and writes of three
    row = SaveRow("ours", 0, 100.0, 0.1, 1.2, 1.5, 2.0, 0.5, after, copied_step=2, saved_step=5)
    assert written_ratio(row) == 1.2
    assert written_ratio(replace(row, saved_step=0)) == 1.2  # it went on
    assert math.isnan(written_ratio(replace(row, copied_step=0)))
    assert math.isnan(written_ratio(replace(row, copied_step=2, saved_step=2)))


def saves(ours: float, none: float | None, stall_s: float = 0.03) -> list[SaveRow]:
    """Two saves as ours, after which steps are longer by a share, each behind one without a save where there is any."""
    pairs = [("none", none, 0.0)] * (none is not None) + [("ours", ours, stall_s)]
    return [
        SaveRow(way, turn, 100.0, stall, 1 + longer, 1.5, 2.0, 0.5) for turn in range(2) for way, longer, stall in pairs
    ]


@pytest.mark.parametrize(
    ("rows", "stall", "steps"),
    [
        (saves(0.004, 0.001), "held", "held"),
        (saves(0.09, 0.002, 0.31), "missed", "missed"),
        (saves(0.03, 0.025), "held", "cannot tell"),  # as long without a save
        (saves(0.003, -0.018), "held", "cannot tell"),  # 2% may hide in what comes without a save
        (saves(0.03, None), "held", "cannot tell"),
        (saves(0.003, None), "held", "cannot tell"),
        (saves(0.03, None)[:1], "held", "cannot tell"),  # and none follows that says whether the device became slower
        (saves(0.0, 0.0, 0.2), "missed", "held"),  # in the median
    ],
)
def test_the_bars_are_judged_beside_what_comes_without_a_save(rows: list[SaveRow], stall: str, steps: str) -> None:
    lines = verdicts(rows)
    assert f": {stall}" in lines[0]
    assert f": {steps}" in lines[1]
    assert not verdicts([row for row in rows if row.way == "none"])


def test_saves_at_an_interval_have_verdicts_of_their_own() -> None:
    rows = saves(0.004, 0.001)
    short = [replace(row, way="third", interval_steps=7, skipped=2) for row in rows if row.way == "ours"]
    lines = verdicts([*rows, *short, rows[0]])
    assert [line.partition(",")[0] for line in lines] == ["ours", "ours", "third", "third"]
    assert "one due every 7 steps, 4 skipped" in table(short)


def test_an_interval_needs_a_save_that_shows_it() -> None:
    assert read_ways("none,ours,third", "gloo") == ["none", "ours", "third"]
    with pytest.raises(NetlayerError, match=r"--ways.*third.*needs a save of ours before it.*name ours first"):
        read_ways("none,third,ours", "gloo")


@pytest.mark.slow(minutes=3)
def test_at_a_third_of_what_storage_sustains_saves_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "record.json"
    options = ["--ranks", "2", "--backend", "gloo", "--model", "1m", "--layers", "2", "--micro-batches", "1"]
    options += ["--turns", "1", "--ways", "ours,third", "--json", str(record)]
    monkeypatch.setenv(SLOW, "0.05")  # a save takes several steps
    result = CliRunner().invoke(command, ["--folder", str(tmp_path / "out"), *options], catch_exceptions=False)
    assert result.exit_code == 0
    rows = json.loads(record.read_text())["rows"]
    assert [row["way"] for row in rows] == ["ours", "third", "third", "third"]
    assert len({row["interval_steps"] for row in rows[1:]}) == 1
    assert sum(row["skipped"] for row in rows) >= 2

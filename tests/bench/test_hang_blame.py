"""Faults in training runs, end to end on gloo: the right rank is named, and nobody in a healthy run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench import hang_blame
from bench.hang_blame import LAYOUTS, HangRow, job_of, measure, measure_healthy, table
from trainer.data.prepare import Corpus
from trainer.train import prepare


@pytest.fixture(autouse=True)
def _quick_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_blame, "_MODEL", {**hang_blame._MODEL, "hidden": 32, "ffn_hidden": 64, "seq_len": 32})


def corpus_of(layout: str, folder: Path) -> Corpus:
    return prepare(job_of(layout), hang_blame._ranks(layout), 0, folder)


@pytest.mark.parametrize(
    ("layout", "kind", "line"),
    [
        ("tp2 pp2 vpp2", "stop", "is stopped (SIGSTOP), last seen at step"),
        ("dp2", "kill", "killed by SIGKILL"),
        ("pp2", "exception", "ArithmeticError"),
    ],
)
def test_the_rank_with_the_fault_is_named(layout: str, kind: str, line: str, tmp_path: Path) -> None:
    row = measure(layout, kind, random.Random(0), corpus_of(layout, tmp_path), tmp_path)
    assert row.right, row
    assert line in row.message


@pytest.mark.slow
def test_nobody_is_named_in_a_run_that_takes_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_blame, "_SLEEP_S", 4.0)
    row = measure_healthy("dp2", random.Random(0), tmp_path)
    assert row.right, row


def test_the_table_counts_by_layout_and_fault() -> None:
    rows = [
        HangRow("dp2", "stop", 0, [0], True, 0.5, step=7, after_s=1.0, after_steps=2.0),
        HangRow("dp2", "stop", 1, [], False, 0.5, step=7, after_s=2.0, after_steps=4.0),
        HangRow("tp2", "none", 0, [], True, 0.5),
    ]
    columns = ["layout", "fault", "rank", "step", "named", "right", "step_s", "after_s", "after_steps", "message"]
    assert list(rows[0].to_row()) == columns
    lines = table(rows).splitlines()
    assert lines[2] == "| dp2 | stop | 2 | 1 | 0.50 | 1.50 (2.00) | 3.0 (4.0) |"
    assert lines[3] == "| all in turn | none | 1 | 1 (nobody) | | | |"


def test_layouts_are_jobs() -> None:
    assert {layout: job_of(layout).parallel.layout.world_size for layout in LAYOUTS} == {
        layout: hang_blame._ranks(layout) for layout in LAYOUTS
    }
    assert len(LAYOUTS) == 8

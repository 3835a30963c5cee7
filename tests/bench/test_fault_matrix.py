"""Counts of a fault matrix's report: from its records, and nothing of them typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import bench.fault_matrix.__main__ as fault_matrix
from bench.fault_matrix.report import BEGIN, END, lower_bound, main
from bench.fault_matrix.rows import FaultRow
from netlayer.errors import CheckFailed, ConfigError
from netlayer.results import RunRecord

Losses = dict[int, float]


def row(run: int, kind: str, **more: Any) -> dict[str, Any]:
    known = {"kind": kind, "handled": True, "right": True, "nodes": ["n"], "blamed": ["n"], "error": "", "run": run}
    return known | {
        "losses_equal": 5,
        "losses": 5,
        "effective_share": 0.1,
        "exit_code": 0,
        "found_as": ["killed"],
        **more,
    }


def record(rows: list[dict[str, Any]], path: Path) -> Path:
    made = RunRecord("x", "measured", rows, "2026-01-01T00:00:00Z", "2026-01-01T00:00:01Z", {}, {}, {}, [])
    path.write_text(made.to_json())
    return path


def test_the_counts_are_those_of_all_records(tmp_path: Path) -> None:
    times = {"detect_s": 1.0, "diagnose_s": 2.0, "resume_s": 3.0, "catch_up_s": 7.0}
    first = record([row(0, "kill", **times), row(0, "kill", **times | {"resume_s": 9.0})], tmp_path / "1.json")
    lost = row(0, "cut", handled=False, right=False, error="not within 240 s", losses_equal=4)
    second = record([lost], tmp_path / "2.json")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):  # written anew as a whole
        CliRunner().invoke(main, [str(page), str(first), str(second)], catch_exceptions=False)
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n- **3 faults of 2 kinds, in 2 runs, up to 2 in a row.**")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    assert "Handled alone: 2 of 3" in text
    assert "1 of 2 runs have those of a run without faults" in text
    assert "| SIGKILL of a rank | 2 of 2 | 2 of 2 | killed | 1.0, 1.0 | 2.0, 2.0 | 6.0, 9.0 |" in text
    assert "- a host's network cut: not within 240 s" in text


def test_a_page_without_a_place_for_counts_stays_as_it_is(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n")
    with pytest.raises(ConfigError, match="has no place for the counts"):
        CliRunner().invoke(main, [str(page), str(record([], tmp_path / "1.json"))], catch_exceptions=False)
    assert page.read_text() == "text\n"


def test_the_bound_is_that_of_the_literature() -> None:
    """No failure in 39 trials: 0.05 ** (1 / 39); "rule of three" in its exact form."""
    assert lower_bound(39, 39) == pytest.approx(0.05 ** (1 / 39), abs=1e-9)
    assert lower_bound(0, 10) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("error", "raised"),
    [(KeyboardInterrupt(), click.Abort), (CheckFailed("a run without faults: exit code 1"), CheckFailed)],
)
def test_the_network_and_its_redis_end_with_a_run_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, raised: type[Exception]
) -> None:
    closed: list[bool] = []

    class Hosts:
        url = "redis://10.77.0.1:6379"

        def __init__(self, _folder: Path, num_hosts: int) -> None:
            assert num_hosts == 6

        def close(self) -> None:
            closed.append(True)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(fault_matrix, "Network", Hosts)
    monkeypatch.setattr(fault_matrix, "enter", lambda: None)
    monkeypatch.setattr(fault_matrix, "_healthy", fail)
    arguments = ["--network", "--kinds", "cut", "--chain", "2", "--out", str(tmp_path)]
    with pytest.raises(raised):
        fault_matrix.main.main(arguments, standalone_mode=False)
    assert closed == [True]


def test_a_run_that_was_stopped_in_time_goes_on_until_its_chain_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three calls: two faults of the first run, its third one, and the run after it; losses are those of all steps."""
    calls: list[tuple[str, int, list[str]]] = []

    def run(folder: Path, _config: object, kinds: list[str], number: int, *rest: Any) -> tuple[list[FaultRow], Losses]:
        before = list(rest[-1])
        calls.append((folder.name, len(before), list(kinds)))
        rows = before + [FaultRow.from_row(row(number, kind)) for kind in kinds[: 1 if before else 2]]
        return rows, {step: float(step) for step in range(10 * len(rows))}

    monkeypatch.setattr(fault_matrix, "_run", run)
    monkeypatch.setattr(fault_matrix, "_healthy", lambda *_: {step: float(step) for step in range(100)})
    arguments = ["--kinds", "kill", "--chain", "3", "--cases", "5", "--steps", "100", "--end-early"]
    fault_matrix.main.main([*arguments, "--out", str(tmp_path)], standalone_mode=False)
    assert calls == [("run-0", 0, ["kill"] * 3), ("run-0", 2, ["kill"]), ("run-1", 0, ["kill"] * 2)]
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [each["run"] for each in rows] == [0, 0, 0, 1, 1]
    assert [(each["losses_equal"], each["losses"]) for each in rows] == [(30, 30)] * 3 + [(20, 20)] * 2


def test_rows_of_earlier_records_are_read_and_written_as_they_are() -> None:
    files = sorted((Path(__file__).parents[2] / "reports").glob("fault_matrix_cpu_*.json"))
    records = [one for one in (json.loads(file.read_text()) for file in files) if one["name"] == "bench.fault_matrix"]
    rows = [each for one in records for each in one["rows"]]
    assert rows
    for each in rows:
        assert FaultRow.from_row(each).to_row() == each

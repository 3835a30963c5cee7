"""The bench of small messages: what it concludes, and a run on gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.small_messages.command import command
from bench.small_messages.rows import format_row, format_summary, judge, summarise
from collectives.small.table import DEFAULT_TABLE, TuningTable
from netlayer.errors import CheckFailed, ConfigError
from netlayer.results import load_record


def row(system: str, us: float, num_bytes: int = 1024, **changes: Any) -> dict[str, Any]:
    return {
        "table": "time",
        "kind": "all_reduce",
        "num_bytes": num_bytes,
        "system": system,
        "variant": "",
        "wrong": False,
        "median_us": us,
        "p99_us": us,
        "bus_bw_gbs": num_bytes / us / 1e3,
        "round_medians_us": [us],
        "host_bound": False,
        **changes,
    }


def test_ours_is_compared_with_the_best_of_the_others_at_each_size() -> None:
    rows = [row("ours", 3), row("nccl", 12), row("torch_symmetric", 6, variant="one_shot"), row("nccl_windows", 9)]
    [compared, mean, overall] = summarise(rows)
    assert (compared["best_other"], compared["speed_up"]) == ("torch_symmetric one_shot", 2)
    assert compared["bus_bw_of_nccl"] is None
    assert (mean["kind"], mean["speed_up"]) == ("all_reduce", pytest.approx(2))
    assert (overall["kind"], overall["num_sizes"]) == ("all", 1)


def test_the_geometric_mean_is_of_small_messages_alone_and_large_ones_show_bandwidth() -> None:
    rows = [row("ours", 1), row("nccl", 8), row("ours", 2, 4096), row("nccl", 4, 4096)]
    rows += [row("ours", 10, 1 << 20), row("nccl", 10, 1 << 20), row("ours", 95, 64 << 20), row("nccl", 100, 64 << 20)]
    found = summarise(rows)
    assert found[-1]["speed_up"] == pytest.approx(4)  # of 8 and 2
    shares = {one["num_bytes"]: one["bus_bw_of_nccl"] for one in found if one["table"] == "speed_up"}
    assert shares == {1024: None, 4096: None, 1 << 20: None, 64 << 20: pytest.approx(100 / 95)}


def test_wrong_data_is_not_compared_and_fails() -> None:
    wrong = row("nccl", 1) | {"wrong": True}
    rows = [row("ours", 3), wrong, row("torch_symmetric", 6)]
    rows += summarise(rows)
    assert rows[3]["best_other"] == "torch_symmetric"
    with pytest.raises(CheckFailed, match="all_reduce of 1024 bytes by nccl"):
        judge(rows, None)
    assert "WRONG DATA" in format_row(wrong)


def test_a_threshold_holds_or_fails_and_is_never_passed_unmeasured() -> None:
    rows = [{"table": "skipped", "system": "other", "reason": "too old"}, row("ours", 4), row("nccl", 5)]
    rows += summarise(rows)
    judge(rows, None)
    judge(rows, 1.25)
    with pytest.raises(CheckFailed, match=r"1\.250, below 1\.3"):
        judge(rows, 1.3)
    with pytest.raises(CheckFailed, match="nothing to compare"):
        judge([row("ours", 4)], 1.0)


def test_a_person_reads_whether_windows_were_used() -> None:
    rows = [row("ours", 3), row("nccl", 12), row("nccl_windows", 9)]
    kernels = [{"table": "kernel", "kind": "all_reduce", "num_bytes": 1024, "kernel": None, "on_windows": None}]
    assert "not known of 1" in format_summary([*rows, *kernels, *summarise(rows)])[-1]
    seen = [{**kernels[0], "kernel": f"nccl{name}", "on_windows": name == "Sym"} for name in ("Sym", "Dev")]
    assert "1 of 2" in format_summary([*rows, *seen, *summarise(rows)])[-1]
    assert "ncclSym" in format_row(seen[0])


def test_a_time_of_the_host_is_called_so() -> None:
    assert "host-bound" not in format_row(row("ours", 3))
    assert "host-bound" in format_row(row("ours", 3, host_bound=True))


def test_a_run_that_ran_out_of_time_fails() -> None:
    out = {"table": "skipped", "system": "all_gather of 1 MiB", "reason": "not begun", "out_of_time": True}
    with pytest.raises(CheckFailed, match="before all_gather of 1 MiB and 1 more"):
        judge([row("ours", 4), row("nccl", 5), out, out], None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sizes", "1000"], "multiple of 1 KiB"),
        (["--sizes", "1K,x"], "size"),
        (["--max-bytes", "0"], "multiple of 1 KiB"),
        (["--rounds", "2"], "rounds"),
    ],
)
def test_options_out_of_range_are_refused(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 2
    assert words in result.output


def test_options_without_effect_are_refused(tmp_path: Path) -> None:
    for arguments in (["--set", "job.parallel.dp=4"], ["--tune", "a.json", "--table", "b.json"]):
        with pytest.raises(ConfigError):
            CliRunner().invoke(command, arguments, catch_exceptions=False)
    with pytest.raises(ConfigError, match="cannot be read"):
        CliRunner().invoke(command, ["--backend", "gloo", "--table", str(tmp_path / "no.json")], catch_exceptions=False)


def test_on_gloo_the_one_system_there_is_measured_and_said_so(tmp_path: Path) -> None:
    saved, tuned = tmp_path / "small.json", tmp_path / "table.json"
    arguments = ["--backend", "gloo", "--out", str(tmp_path / "out"), "--json", str(saved), "--tune", str(tuned)]
    arguments += ["--sizes", "1K,3K", "--launches", "2", "--replays", "5", "--max-bytes", "2K"]
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "nothing to compare" in result.output
    record = load_record(saved)
    timed = [one for one in record.rows if one["table"] == "time"]
    assert [(one["kind"], one["num_bytes"]) for one in timed] == [
        (kind, size) for size in (1024, 3072) for kind in ("all_reduce", "all_gather", "reduce_scatter")
    ]
    assert {(one["system"], one["variant"], one["wrong"]) for one in timed} == {("ours", "torch.distributed", False)}
    assert all(one["num_replays"] == 15 and one["median_us"] <= one["p99_us"] for one in timed)
    assert {one["system"] for one in record.rows if one["table"] == "skipped"} >= {"nccl", "nccl_windows"}
    written = (tmp_path / "out" / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in written if '"time"' in line] == timed
    assert TuningTable.load(tuned).to_json() == record.config["table"] != DEFAULT_TABLE.to_json()


def test_what_is_not_begun_in_time_is_left_out_and_said(tmp_path: Path) -> None:
    arguments = ["--backend", "gloo", "--out", str(tmp_path), "--sizes", "1K", "--limit-s", "0.001"]
    result = CliRunner().invoke(command, arguments)
    assert isinstance(result.exception, CheckFailed)
    [record] = (tmp_path / "records").glob("*.json")
    skipped = [one for one in load_record(record).rows if one.get("out_of_time")]
    assert [one["system"] for one in skipped] == [
        f"{kind} of 1 KiB" for kind in ("all_reduce", "all_gather", "reduce_scatter")
    ]


def test_help_shows_examples_and_needs_no_torch() -> None:
    result = CliRunner().invoke(command, ["--help"])
    assert "python -m bench.small_messages --json small.json" in result.output
    code = "import sys, bench.small_messages; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

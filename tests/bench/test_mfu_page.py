"""The page of `bench.mfu` from made records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.mfu.page import build_page, command, label
from bench.mfu.rows import FORMULA, MfuRun, summarise, with_figures
from bench.publish import REPORTS
from netlayer.config.tree import JobConfig, build_config
from netlayer.errors import ConfigError
from netlayer.results import RunRecord, load_record

H200, CPU = "NVIDIA H200", "CPU"
PROFILE = {
    "system": "ours",
    "run": "profile",
    "launch_ms": 104.4,
    "kinds": [
        {"kind": "matrix products", "ms": 250.0, "ms_all": 250.0, "kernels": 198.0},
        {"kind": "loss", "ms": 1.0, "ms_all": 1.0, "kernels": 4.0},
        {"kind": "norms, activations, sums", "ms": 25.0, "ms_all": 27.0, "kernels": 268.0},
        {"kind": "idle", "ms": 2.5, "ms_all": 2.5, "kernels": 0.0},
    ],
    "least_ms": {"matrix products": 170.0},
}
GPU_LINES = [
    "2026/11/24 18:54:43.424, 0, 345, 73.42, 37",
    "2026/11/24 18:54:43.429, 1, 345, 73.22, 34",
    "2026/11/24 18:54:44.424, 0, 1980, [N/A], 37",
    "2026/11/24 18:54:44.429, 1, 1980, 612.10, 34",
]


def job_of(dtype: str) -> JobConfig:
    tree = {
        "model": {"preset": "7b", "dtype": dtype},
        "parallel": {"dp": 2},
        "batch": {"micro_batch_size": 4, "global_batch_size": 8},
    }
    return build_config({"cluster": {"gpus_per_server": 2}, "job": tree}).job


def record_of(device: str = H200, more: tuple[dict[str, Any], ...] = (), gpus: tuple[str, ...] = ()) -> RunRecord:
    dtype = "bfloat16" if device == H200 else "float32"
    job = job_of(dtype)
    times = [("ours", 320.0), ("fsdp2", 350.0), ("ours", 322.0), ("fsdp2", 352.0)]
    runs = [
        MfuRun(
            system=system,
            run=1 + index // 2,
            change="",
            left_gib=None,
            step_ms=step_ms,
            each_ms=[step_ms, step_ms + 1],
            memory_gib=40.0 if device == H200 else None,
            losses=[11.0, 10.9],
        )
        for index, (system, step_ms) in enumerate(times)
    ]
    rows = [with_figures(run, job, device) for run in runs]
    return RunRecord(
        name="bench.mfu",
        source="measured",
        rows=[*rows, *summarise(runs, {"ours": job, "fsdp2": job}, device), *more],
        started_utc="2026-11-24T18:54:43Z",
        ended_utc="2026-11-24T18:56:43Z",
        arguments={
            "model": "7b",
            "layout": "dp2",
            "peers": ["fsdp2"],
            "set": ["a.b=c d"],
            "channels": 2,
            "profile": True,
        },
        config={
            "job": job.model_dump(mode="json"),
            "peak_flops": 989.5e12 if device == H200 else None,
            "mfu_formula": FORMULA,
            "gpus": list(gpus),
            "ended_early_by": "",
        },
        environment={"commit": "abc"},
        devices=[device] * 2,
    )


def test_the_page_shows_runs_kinds_of_time_steps_and_cards() -> None:
    report = build_page([record_of(more=(PROFILE,), gpus=tuple(GPU_LINES))])
    assert [plot.name for plot in report.plots] == ["systems", "time", "steps", "power", "clock"]
    time = str(report.plots[1].spec)
    assert "data sheet's least" in time
    assert "26.0" in time, "kinds that share a colour are added up"
    page = report.html()
    for said in (
        "MFU, causal",
        "1.093",
        "104.4 ms of ours",
        "--set &#39;a.b=c d&#39; --peers fsdp2 --profile",
        "989.5",
    ):
        assert said in page, said
    assert "Not whole" not in page


def test_without_a_peak_systems_are_compared_by_tokens() -> None:
    report = build_page([record_of(CPU)])
    assert [plot.name for plot in report.plots] == ["systems", "steps"]
    assert "tokens/s/GPU" in report.html()
    assert "MFU, causal" not in report.html()
    assert "No peak is known of this device" in report.html()


def records_of_the_reports() -> list[RunRecord]:
    records = [load_record(path) for path in sorted(REPORTS.glob("trainer_*.*.json"))]
    return [record for record in records if record.name == "bench.mfu"]


def assert_drawn(record: RunRecord) -> None:
    assert "systems" in {plot.name for plot in build_page([record]).plots}, record.started_utc


def test_records_of_the_reports_can_be_drawn_older_ones_too() -> None:
    """One of each form: with the same columns, keys and kinds of rows."""
    forms = {}
    for record in records_of_the_reports():
        rows = frozenset((row["run"] if isinstance(row["run"], str) else "number", *sorted(row)) for row in record.rows)
        forms.setdefault((rows, *sorted(record.config), *sorted(record.arguments)), record)
    assert len(forms) > 5
    for record in forms.values():
        assert_drawn(record)


@pytest.mark.slow
def test_all_records_of_the_reports_can_be_drawn() -> None:
    for record in records_of_the_reports():
        assert_drawn(record)


def test_what_failed_is_said_on_top() -> None:
    failed = {"system": "mcore", "run": "failed", "reason": "no memory left"}
    assert "Not whole: mcore failed: no memory left" in build_page([record_of(more=(failed,))]).html()


def test_several_records_are_held_side_by_side(tmp_path: Path) -> None:
    paths = [str(record_of().save(tmp_path)) for _ in range(2)]
    done = CliRunner().invoke(command, [*paths, "--out", str(tmp_path / "page")])
    assert done.exit_code == 0, done.output
    names = {path.stem for path in (tmp_path / "page" / "plots").glob("*.png")}
    assert names == {"overview", "systems_1", "systems_2", "steps_1", "steps_2"}
    assert label(record_of()) in (tmp_path / "page" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["bench.operators", "bench.mfu"])
def test_what_is_no_comparison_is_one_line(tmp_path: Path, name: str) -> None:
    record = replace(record_of(), name=name, rows=record_of().rows[:4])
    said = "is a record of bench.operators" if name == "bench.operators" else "has no median of any system"
    with pytest.raises(ConfigError, match=said):
        CliRunner().invoke(command, [str(record.save(tmp_path)), "--out", str(tmp_path)], catch_exceptions=False)

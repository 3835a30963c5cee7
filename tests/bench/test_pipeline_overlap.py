"""The pipeline bench: what its figures mean on made-up times, and a run on gloo; how fast that was is not judged."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.overlap.pipeline import (
    TINY,
    Measured,
    Settings,
    Timed,
    default_settings,
    make_row,
    make_runs,
    make_schedules,
    measure,
    step_times,
)
from collectives.watch.recorder import Span
from collectives.watch.trace import RankTrace
from netlayer.errors import CheckFailed

SMALL = dataclasses.replace(TINY, tokens=8, hidden=8, micro_batches=4, steps=2, rounds=1)


def made_up(settings: Settings, stage: int, step_s: float, waits_s: float) -> Measured:
    """A stage of two: 1 s a forward, 2 s a backward, 4 micro-batches; half of each send lies under computation."""
    spans = [
        Span("forward", "compute", 0, 100, {"phase": "steady"}),
        Span("send", "send forward", 50, 150, {"phase": "steady"}),
    ]
    timed = Timed([(10.0, 10.0 + step_s)] * 3, waits_s, RankTrace(stage, spans), 2**30)
    return Measured(
        schedule=make_schedules(settings, 2)[1],
        max_ctas=4,
        by_peers=False,
        systems={"decoupled": timed, "coupled": dataclasses.replace(timed, steps=[(10.0, 10.0 + 2 * step_s)] * 3)},
        compute_s=[12.0, 12.0],
        forward_s=[1.0],
        backward_s=[2.0],
        transfer_s=0.5,
        message_bytes=256,
    )


def test_figures_of_made_up_times() -> None:
    row = make_row(SMALL, "decoupled", [made_up(SMALL, 0, 17.0, 3.0), made_up(SMALL, 1, 16.0, 4.0)]).to_row()
    assert (row["schedule"], row["stages"], row["chunks"], row["micro_batches"]) == ("eager_1f1b", 2, 1, 4)
    assert row["step_ms"] == row["step_p99_ms"] == pytest.approx(17_000)
    assert row["compute_ms"] == pytest.approx(12_000)
    assert row["bubble"] == pytest.approx(17 / 12 - 1)
    assert row["bubble_formula"] == 0.25
    assert (row["max_ctas"], row["transfer_bw_gbs"]) == (4, pytest.approx(256 / 0.5 / 1e9))
    # 12 s, a quarter more, and one transfer of half a second down and one up: on paper and by the formula.
    assert row["formula_ms"] == row["expected_ms"] == pytest.approx(16_000)
    assert row["step_over_expected"] == row["step_over_formula"] == pytest.approx(17 / 16)
    assert row["speedup_over_coupled"] == pytest.approx(2.0)
    assert row["exposed_comm"] == pytest.approx(3.5 / 17)
    assert row["exposed_beyond_bubble"] == pytest.approx(2 / 17)
    assert row["contention"] == pytest.approx(((17 - 12 - 3) + (16 - 12 - 4)) / 2 / 17)
    assert (row["sends_hidden_steady"], row["sends_hidden_warm_up"]) == (0.5, None)
    assert row["memory_gib"] == 1.0


def test_a_step_lasts_from_the_first_stage_to_the_last() -> None:
    assert step_times([[(1.0, 3.0), (5.0, 6.0)], [(1.5, 4.0), (4.5, 5.5)]]) == [3.0, 1.5]


def test_settings_must_fit_a_schedule() -> None:
    with pytest.raises(ValueError, match="layers = 2: must be a multiple of chunks = 3"):
        make_schedules(dataclasses.replace(SMALL, chunks=(3,)), 2)
    with pytest.raises(ValueError, match="multiple of the 3 stages"):
        make_schedules(SMALL, 3)


def test_all_schedules_run_with_the_first_limit_and_the_last_with_every_limit() -> None:
    runs = make_runs(dataclasses.replace(SMALL, max_ctas=(4, 2, None)), 2)
    assert [(schedule.name, limit) for schedule, limit in runs] == [
        ("1f1b", 4),
        ("eager_1f1b", 4),
        ("interleaved_1f1b", 4),
        ("interleaved_1f1b", 2),
        ("interleaved_1f1b", None),
    ]


@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_the_defaults_fit_any_number_of_stages(backend: Any, ranks: int) -> None:
    settings = default_settings(backend, ranks)
    assert make_runs(settings, ranks)
    assert settings.micro_batches < 16 + ranks


def test_two_stages_on_gloo(tmp_path: Path) -> None:
    said: list[str] = []
    rows = measure(ranks=2, backend="gloo", log_dir=tmp_path, seed=3, on_progress=said.append, settings=SMALL)
    assert [(row["schedule"], row["system"]) for row in rows] == [
        (schedule, system)
        for schedule in ("1f1b", "eager_1f1b", "interleaved_1f1b")
        for system in ("decoupled", "coupled")
    ]
    assert len(said) == 6
    assert len({row["trace"] for row in rows}) == 6
    json.dumps(rows)
    for row in rows:
        assert row["message_bytes"] == 8 * 8 * 4
        assert len(row["steps_ms"]) == 2
        assert min(row["step_ms"], row["compute_ms"]) > 0
        assert 0 <= row["exposed_comm"] <= 1
        assert row["expected_ms"] > 0
        events = json.loads(Path(row["trace"]).read_text())["traceEvents"]
        assert {event["pid"] for event in events} == {0, 1}
        assert {"X", "M", "s", "f"} == {event["ph"] for event in events}
        phases = {event["args"].get("phase") for event in events if event["ph"] == "X"}
        assert {"warm-up", "steady", "cool-down"} <= phases


def test_gradients_that_are_off_end_the_run(tmp_path: Path) -> None:
    strict = dataclasses.replace(SMALL, tolerance=-1.0, chunks=(1,))
    with pytest.raises(CheckFailed, match=r"1f1b: stage 0: gradients are .* off one process's, above -1"):
        measure(ranks=2, backend="gloo", log_dir=tmp_path, settings=strict)


@pytest.mark.gpu
@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs 2 CUDA devices, found {torch.cuda.device_count()}")
def test_two_stages_on_nccl(tmp_path: Path) -> None:
    settings = Settings(tokens=256, hidden=256, micro_batches=4, steps=2, rounds=1)
    rows = measure(ranks=2, backend="nccl", log_dir=tmp_path, settings=settings)
    assert [row["max_ctas"] for row in rows] == [0] * 6 + [4, 4, None, None]
    assert [row["path"] for row in rows] == ["peer"] * 6 + ["group"] * 4
    assert all(row["step_ms"] > 0 and row["memory_gib"] > 0 for row in rows)

"""`bench.overlap`: what its figures mean, what it refuses, and one small comparison from end to end."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.overlap import legs as overlap_legs
from bench.overlap.command import command
from bench.overlap.dp import PREFETCHES
from bench.overlap.legs import Run, measure_techniques
from bench.overlap.rows import Communication, Timing, check_losses, dp_line, dp_rows
from bench.overlap.settings import (
    NCCL_ALONE,
    SYSTEMS,
    TECHNIQUES,
    DpSettings,
    Technique,
    channel_environment,
    make_settings,
    on_gloo,
)
from netlayer.errors import CheckFailed, ConfigError
from netlayer.results import load_record

NONE = dict.fromkeys(("layers", "hidden", "heads", "seq", "micro", "vocab", "dtype", "lr"))


def settings(**given: object) -> DpSettings:
    return make_settings(**{**NONE, "model": "7b", "systems": (), "compiled": True, **given})


def test_rows_hold_each_system_against_the_larger_of_computation_and_communication() -> None:
    communication = Communication(num_bytes=1_000_000_000, all_gather_s=0.02, reduce_scatter_s=0.04, ranks=4)
    timings = {
        "ours": Timing([[0.104], [0.112, 0.108]], exposed=[0.004, 0.006, 0.005], memory_bytes=2**31),
        "fsdp2": Timing([[0.135]]),
    }
    computes = {True: Timing([[0.102]]), False: Timing([[0.1]])}
    tried = {1: Timing([[0.12]]), 4: Timing([[0.11]])}
    rows = dp_rows(settings(), 2, timings, computes, {False: communication}, "NVIDIA H200", tried, 4)
    alone, _, _, one, four, ours, fsdp2 = rows
    assert {row["channels"] for row in rows} == {2}
    # nccl-tests: bytes over time, times (n - 1) / n.
    assert alone["all_gather_bus_bw"] == pytest.approx(37.5e9)
    assert alone["reduce_scatter_bus_bw"] == pytest.approx(18.75e9)
    assert ours["step_ms"] == pytest.approx(108)
    assert ours["rounds_ms"] == [104.0, 110.0]
    assert ours["rounds_spread"] == pytest.approx(6 / 108)
    assert ours["step_p99_ms"] == pytest.approx(112)
    assert ours["iterations_exposed_ms"] == pytest.approx([4, 6, 5])
    assert ours["exposed_p99_ms"] == pytest.approx(6)
    assert [(row["prefetch"], row["step_ms"]) for row in (one, four)] == [(1, 120), (4, 110)]
    assert ours["prefetch"] == 4
    # Of FSDP2 only this is known: how much longer than the computation.
    assert (fsdp2["beyond_compute_ms"], fsdp2["beyond_compute"]) == (pytest.approx(35), pytest.approx(35 / 135))
    assert ours["ideal_ms"] == fsdp2["ideal_ms"] == pytest.approx(100)  # the faster computation, above 60 ms
    assert ours["ratio_to_ideal"] == pytest.approx(1.08)
    assert ours["exposed_comm"] == pytest.approx(0.005 / 0.108)
    # 108 - 5 exposed - 102 of the variant that steps in the backward pass
    assert ours["contention_ms"] == pytest.approx(1.0)
    assert ours["faster_than_fsdp2"] == pytest.approx(0.25)
    assert ours["tokens_per_s"] == pytest.approx(4 * 4 * 2048 / 0.108)
    assert ours["memory_gib"] == 2.0
    assert ours["mfu_full"] == pytest.approx(ours["flops_full"] / (0.108 * 4 * 989.5e12))
    assert "exposed_comm" not in fsdp2
    assert "exposed and contention 25.9%" in dp_line(fsdp2)
    assert "host-bound" not in dp_line(ours)
    assert "host-bound" in dp_line({**ours, "host_bound": True})
    assert all(math.isfinite(row["step_ms"]) and dp_line(row) for row in rows)


def test_losses_that_agree_and_move_show_the_same_work() -> None:
    assert check_losses({"ours": [7.0, 6.0], "fsdp2": [7.01, 6.02]}, 0.05) is None


@pytest.mark.parametrize(
    ("losses", "says"),
    [
        ({"ours": [7.0, 6.0], "fsdp2": [7.0, 6.2]}, "not the same work"),
        ({"ours": [7.0, 6.0], "fsdp2": [7.0, math.nan]}, "not the same work"),
        ({"ours": [7.0, 6.99], "fsdp2": [7.0, 6.99]}, "show nothing"),
    ],
)
def test_losses_that_show_nothing_or_differ_are_named(losses: dict[str, list[float]], says: str) -> None:
    wrong = check_losses(losses, 0.05)
    assert wrong is not None
    assert says in wrong


def test_single_sizes_replace_those_of_the_named_one() -> None:
    model = settings(layers=2, hidden=64, heads=2, dtype="float32").model
    assert (model.layers, model.hidden, model.ffn_hidden, model.heads) == (2, 64, 256, 2)
    assert (model.vocab_size, model.seq_len, model.dtype) == (50304, 2048, "float32")


@pytest.mark.parametrize(
    ("given", "says"),
    [({"heads": 7}, "must divide the width"), ({"systems": ("fsdp2",)}, "compared with nothing")],
)
def test_what_cannot_be_compared_is_a_config_error(given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        settings(**given)


def test_channels_are_held_by_nccls_own_variables() -> None:
    assert channel_environment(0) == {}
    held = {"NCCL_MAX_NCHANNELS": "2", "NCCL_MIN_NCHANNELS": "1", "NCCL_MAX_CTAS": "2", "NCCL_MIN_CTAS": "1"}
    held["NCCL_CTA_POLICY"] = "0"
    assert channel_environment(2) == held


def test_what_only_nccl_has_is_left_out_on_gloo() -> None:
    assert set(SYSTEMS) - set(on_gloo(settings(), ()).systems) == set(NCCL_ALONE)
    with pytest.raises(ConfigError, match=r"ours_windows.*needs NCCL"):
        on_gloo(settings(), ("ours", "ours_windows"))


@pytest.mark.parametrize("channels", ["", "1,1", "-1", "two"])
def test_channels_are_different_numbers(channels: str) -> None:
    result = CliRunner().invoke(command, ["--channels", channels])
    assert result.exit_code == 2
    assert "with commas between" in result.output


def test_options_without_effect_are_refused() -> None:
    result = CliRunner().invoke(command, ["--set", "job.model.layers=2"])
    assert isinstance(result.exception, ConfigError)
    assert "have no effect" in str(result.exception)


def test_settings_of_dp_without_effect_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    arguments = ["--technique", "pp", "--micro", "2", "--no-compile", "--seed", "1", "--limit-min", "0"]
    CliRunner().invoke(command, [*arguments, "--backend", "gloo", "--out", str(tmp_path)])
    said = [record.message for record in caplog.records if "no effect" in record.message]
    assert said == [f"{option} has no effect on pp: it is dp's" for option in ("--micro", "--compile")]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Legs that were measured, which take no time here and give one row each."""
    legs: list[tuple[str, int]] = []

    def measure(_run: Run, technique: Technique, limit: int) -> list[dict[str, object]]:
        legs.append((technique, limit))
        if (technique, limit) == ("pp", 0):
            raise CheckFailed("gradients are off")
        return [{"technique": technique, "channels": limit, "system": "ours", "x": 1.0}]

    monkeypatch.setattr(overlap_legs, "measure_leg", measure)
    monkeypatch.setattr(overlap_legs, "dp_line", str)
    monkeypatch.setattr(overlap_legs, "format_summary", lambda rows: map(str, rows))
    return legs


def run_in(out: Path, within_s: float | None = None) -> Run:
    return Run(settings(), ranks=4, backend="gloo", out=out, arguments={}, within_s=within_s)


def test_all_is_every_technique_and_dp_with_each_limit_in_records_of_their_own(
    tmp_path: Path, measured: list[tuple[str, int]]
) -> None:
    rows, wrong = measure_techniques(run_in(tmp_path), TECHNIQUES, (0, 2, 1))
    assert measured == [("tp", 0), ("small", 0), ("pp", 0), ("dp", 0), ("dp", 2), ("dp", 1)]
    # A leg that fails is a row that says why, and the others go on.
    assert [row.get("skipped") for row in rows] == [None, None, "gradients are off", None, None, None]
    assert [str(error) for error in wrong] == ["gradients are off"]
    records = {record.name: record.rows for record in map(load_record, (tmp_path / "records").glob("*.json"))}
    assert set(records) == {"bench.overlap.tp", "bench.overlap.pp", "bench.overlap.dp"}  # small saves its own
    assert [row["channels"] for row in records["bench.overlap.dp"]] == [0, 2, 1]


def test_legs_that_would_end_too_late_are_left_out_and_said(
    tmp_path: Path, measured: list[tuple[str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    rows, wrong = measure_techniques(run_in(tmp_path, within_s=0.0), ("tp", "dp"), (0, 1))
    assert measured == []
    assert [row["skipped"] for row in rows] == [str(error) for error in wrong]
    assert "dp, NCCL held to 1 channels: no time left" in capsys.readouterr().err


def test_what_was_measured_is_kept_where_a_run_is_interrupted(
    tmp_path: Path, measured: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = overlap_legs.measure_leg

    def interrupt(run: Run, technique: Technique, limit: int) -> list[dict[str, object]]:
        if limit == 2:
            raise KeyboardInterrupt
        return measure(run, technique, limit)

    monkeypatch.setattr(overlap_legs, "measure_leg", interrupt)
    with pytest.raises(KeyboardInterrupt):
        measure_techniques(run_in(tmp_path), ("dp",), (0, 2, 1))
    [record] = map(load_record, (tmp_path / "records").glob("*.json"))
    assert [row["channels"] for row in record.rows] == [0]
    assert measured == [("dp", 0)]


def test_the_command_fails_where_a_leg_did_and_writes_all_rows(tmp_path: Path, measured: list[tuple[str, int]]) -> None:
    file = tmp_path / "all.json"
    arguments = ["--technique", "all", "--backend", "gloo", "--out", str(tmp_path / "out"), "--json", str(file)]
    result = CliRunner().invoke(command, arguments)
    assert isinstance(result.exception, CheckFailed)
    assert [row["technique"] for row in load_record(file).rows] == list(TECHNIQUES) == [name for name, _ in measured]


@pytest.mark.usefixtures("measured")
def test_where_stdout_is_the_record_nothing_else_is_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, ["--backend", "gloo", "--json", "-", "--out", str(tmp_path)])
    assert json.loads(result.stdout)["rows"][0]["x"] == 1.0
    assert "'x': 1.0" in result.stderr


def test_help_shows_the_one_command_for_everything() -> None:
    result = CliRunner().invoke(command, ["--help"])
    assert "python -m bench.overlap --technique all" in result.output
    assert "within 8 minutes" in result.output


@pytest.mark.parametrize("technique", ["tp", "small"])
def test_short_techniques_run_by_the_command(tmp_path: Path, technique: str) -> None:
    arguments = ["--technique", technique, "--backend", "gloo", "--ranks", "2", "--out", str(tmp_path)]
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    [record] = map(load_record, (tmp_path / "records").glob("*.json"))
    assert record.name == {"tp": "bench.overlap.tp", "small": "bench.small_messages"}[technique]
    assert len(record.rows) > 5


def test_two_ranks_compare_ours_with_fsdp2(tmp_path: Path) -> None:
    file = tmp_path / "overlap.json"
    small = "--layers 2 --hidden 32 --heads 2 --seq 16 --vocab 64 --micro 2 --lr 0.01 --backend gloo --ranks 2"
    run = "--steps 2 --rounds 2 --warmup 0 --no-compile --tolerance 0.001"
    arguments = [*small.split(), *run.split(), "--out", str(tmp_path / "out"), "--json", str(file)]
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    record = load_record(file)
    assert record.source == "measured"
    systems = ("ours", "ours_step_after_backward", "ours_overlap_off", "fsdp2")
    rows = {row["system"]: row for row in record.rows}
    assert set(systems) < set(rows)
    assert all(len(rows[system]["iterations_ms"]) == 2 for system in systems)
    tried = {row["prefetch"]: row["step_ms"] for name, row in rows.items() if name.startswith("ours, prefetch")}
    assert tuple(tried) == PREFETCHES
    assert rows["ours"]["prefetch"] == min(tried, key=tried.__getitem__)
    assert len(rows["ours"]["iterations_exposed_ms"]) == 2
    assert all(len(row["iterations_exposed_ms"]) == 2 for row in rows.values() if "prefetch" in row)
    computes = [rows[f"compute alone, step {when} backward"] for when in ("in", "after")]
    assert all(len(row["rounds_ms"]) == 2 for row in (rows["fsdp2"], *computes))
    assert record.name == "bench.overlap.dp"
    assert [load_record(path).rows for path in (tmp_path / "out" / "records").glob("*.json")] == [record.rows]
    assert set(rows["ours"]["losses"]) == {f"{system}, round {turn}" for system in ("ours", "fsdp2") for turn in (1, 2)}
    assert json.dumps(record.arguments)
    assert all(system in result.output for system in systems)

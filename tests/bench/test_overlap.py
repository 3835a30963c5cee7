"""`bench.overlap`: what its figures mean, what it refuses, and one small comparison from end to end."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.overlap import command
from bench.overlap_rows import Communication, Timing, check_losses, dp_line, dp_rows
from bench.overlap_settings import DpSettings, channel_environment, make_settings
from netlayer.errors import ConfigError
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
    rows = dp_rows(settings(), 2, timings, computes, communication, "NVIDIA H200")
    alone, _, _, ours, fsdp2 = rows
    assert {row["channels"] for row in rows} == {2}
    # nccl-tests: bytes over time, times (n - 1) / n.
    assert alone["all_gather_bus_bw"] == pytest.approx(37.5e9)
    assert alone["reduce_scatter_bus_bw"] == pytest.approx(18.75e9)
    assert ours["step_ms"] == pytest.approx(108)
    assert ours["rounds_ms"] == [104.0, 110.0]
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
    assert channel_environment(2) == {"NCCL_MAX_NCHANNELS": "2", "NCCL_MIN_NCHANNELS": "1"}


@pytest.mark.parametrize("channels", ["", "1,1", "-1", "two"])
def test_channels_are_different_numbers(channels: str) -> None:
    result = CliRunner().invoke(command, ["--channels", channels])
    assert result.exit_code == 2
    assert "with commas between" in result.output


def test_options_without_effect_are_refused() -> None:
    result = CliRunner().invoke(command, ["--set", "job.model.layers=2"])
    assert isinstance(result.exception, ConfigError)
    assert "have no effect" in str(result.exception)


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
    assert set(rows["ours"]["losses"]) == {f"{system}, round {turn}" for system in ("ours", "FSDP2") for turn in (1, 2)}
    assert json.dumps(record.arguments)
    assert all(system in result.output for system in systems)

"""`python -m bench.mfu.floor` on a CPU: its parts, of the shapes that a rank has, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from bench.mfu.floor import _attention, _block_products, command, measure
from netlayer.config.tree import JobConfig, build_config

CPU = torch.device("cpu")
SHAPE = {"layers": 2, "hidden": 32, "heads": 4, "ffn_hidden": 64, "vocab_size": 96, "seq_len": 32, "kv_heads": 2}


def job_of(parallel: dict[str, int], **model: Any) -> JobConfig:
    job = {
        "model": {**SHAPE, **model},
        "parallel": {"dp": 1, **parallel},
        "batch": {"micro_batch_size": 1, "global_batch_size": 1},
        "optimizer": {"max_grad_norm": 0.0},
    }
    ranks = parallel.get("tp", 1) * parallel.get("cp", 1)
    return build_config({"cluster": {"gpus_per_server": ranks}, "job": job}).job


def test_a_record_has_every_part_and_the_tokens_a_second_of_all(tmp_path: Path) -> None:
    settings = [
        f"model.{key}={value}" for key, value in {**SHAPE, "attention_window": 8, "window_pattern": "wf"}.items()
    ]
    options = [argument for setting in settings for argument in ("--set", setting)]
    fixed = ["--device", "cpu", "--seconds", "0", "--layout", "cp2", "--out", str(tmp_path), "--json", "-"]
    result = CliRunner().invoke(command, [*fixed, *options])
    assert result.exit_code == 0, result.output
    rows = {row["part"]: row for row in json.loads(result.stdout)["rows"]}
    assert rows.keys() == {"products", "attention", "attention, window 8", "head", "all"}
    parts = sum(row["ms"] for part, row in rows.items() if part != "all")
    assert rows["all"]["ms"] == pytest.approx(parts)
    assert rows["all"]["tokens_per_s_per_device"] == pytest.approx(1e3 * 32 / (2 * parts))


def test_products_are_of_a_ranks_own_rows_and_columns() -> None:
    """Operations of all products of a block, as torch counts them: all but those that add up in place."""
    from torch.utils.flop_counter import FlopCounterMode

    found = []
    for parallel in ({}, {"tp": 2}, {"cp": 2}):
        with FlopCounterMode(display=False) as counter:
            for call in _block_products(job_of(parallel), CPU):
                call()
        found.append(counter.get_total_flops())
    weights = 32 * (32 + 2 * 16) + 32 * 32 + 2 * 32 * 64
    assert found == [2 * 2 * 32 * weights, 2 * 32 * weights, 2 * 32 * weights]


@pytest.mark.parametrize("window", [0, 8])
def test_attention_of_context_parallel_ranks_runs_in_parts(window: int) -> None:
    calls = _attention(job_of({"cp": 4}), window, CPU)
    assert len(calls) == (8 if window == 0 else 1)  # own and three others', forward and backward
    for call in calls:
        call()


def test_factors_in_8_bits_make_the_same_parts() -> None:
    rows = measure(job_of({}, fp8="tensorwise"), CPU, "CPU", 0)
    assert [row["part"] for row in rows] == ["products", "attention", "head", "all"]
    assert rows[-1]["fp8"] == "tensorwise"
    assert rows[-1]["mfu_full"] is None


def test_a_layout_that_is_none_is_one_line() -> None:
    result = CliRunner().invoke(command, ["--layout", "cp0", "--device", "cpu"])
    assert "--layout = cp0: has a degree of 0" in str(result.exception)

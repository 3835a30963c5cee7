"""`bench.mfu`: its arithmetic, its refusals, and a comparison on two CPU ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.mfu import check_losses, command, read_layout, summarise, table
from netlayer.config import build_config
from netlayer.errors import CheckFailed, ConfigError

JOB = build_config(
    {
        "cluster": {"gpus_per_server": 4},
        "job": {
            "model": {"preset": "7b", "dtype": "bfloat16"},
            "parallel": {"dp": 4},
            "batch": {"micro_size": 4, "global_size": 16},
        },
    }
).job


def row(system: str, run: int, step_ms: float, losses: tuple[float, ...] = (11.0, 10.9)) -> dict[str, Any]:
    return {
        "system": system,
        "run": run,
        "step_ms": step_ms,
        "each_ms": [step_ms] * 9 + [step_ms + 10],
        "memory_gib": 40.0 + run,
        "losses": list(losses),
    }


def test_layouts_are_read() -> None:
    assert read_layout("dp8") == {"tp": 1, "pp": 1, "dp": 8, "vpp": 1}
    assert read_layout("tp2pp2vp2dp3") == {"tp": 2, "pp": 2, "dp": 3, "vpp": 2}


@pytest.mark.parametrize("text", ["", "8", "dp", "dp2dp4", "dp2 tp2", "ep2"])
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be degrees"):
        read_layout(text)


def test_figures_are_those_of_the_peers_table() -> None:
    """FSDP2 on 8 GPUs at 659.8 ms has MFU 0.541 full and 0.521 causal; on 4 the step's work is half."""
    rows = [row("ours", 1, 650.0), row("fsdp2", 1, 659.8), row("ours", 2, 640.0), row("fsdp2", 2, 669.8)]
    rows += [row("ours", 3, 645.0), row("fsdp2", 3, 649.8)]
    ours, fsdp2 = summarise(rows, JOB, "NVIDIA H200")
    assert fsdp2["mfu_full"] == pytest.approx(0.541, abs=0.002)
    assert fsdp2["mfu_causal"] == pytest.approx(0.521, abs=0.002)
    assert fsdp2["mfu_done"] == pytest.approx(fsdp2["mfu_causal"], rel=1e-3)
    assert fsdp2["tokens_per_s_gpu"] == pytest.approx(12_415, abs=5)
    assert ours["step_ms"] == 645.0
    assert ours["spread"] == pytest.approx(10 / 645)
    assert fsdp2["over_ours"] == pytest.approx(659.8 / 645)
    assert ours["memory_gib"] == 43.0
    head, first, second = table([*rows, ours, fsdp2])
    assert len(head) == len(first) == len(second)


def test_without_ours_there_is_no_ratio() -> None:
    [only] = summarise([row("fsdp2", 1, 650.0)], JOB, "CPU")
    assert only["over_ours"] is only["mfu_full"] is None
    assert list(table([only]))[1].endswith(" -")


def test_other_losses_are_other_work() -> None:
    check_losses([row("ours", 1, 1.0), row("fsdp2", 1, 1.0, (11.0, 10.91))], 0.05)
    for losses in ((11.0, 10.8), (11.0, float("nan"))):
        with pytest.raises(CheckFailed, match="losses of fsdp2, run 1, differ"):
            check_losses([row("ours", 1, 1.0), row("fsdp2", 1, 1.0, losses)], 0.05)


def test_two_ranks_compare_ours_with_fsdp2(tmp_path: Path) -> None:
    words = ["--runs", "1", "--steps", "2", "--warmup", "2", "--set", "model.layers=1", "--backend", "gloo"]
    done = subprocess.run(
        [sys.executable, "-m", "bench.mfu", *words, "--out", str(tmp_path), "--json", "-"],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [(each["system"], each["run"]) for each in rows] == [
        ("ours", 1),
        ("fsdp2", 1),
        ("ours", "median"),
        ("fsdp2", "median"),
    ]
    assert rows[0]["losses"] == pytest.approx(rows[1]["losses"], abs=1e-4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--systems", "deepspeed"], "must be among ours, fsdp2"),
        (["--layout", "tp2"], "is data parallel alone"),
        (["--model", "8b"], "must be one of 1m"),
    ],
)
def test_what_cannot_be_compared_is_one_line(tmp_path: Path, words: list[str], said: str) -> None:
    result = CliRunner().invoke(command, [*words, "--out", str(tmp_path / "out")])
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)

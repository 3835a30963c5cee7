"""`bench.data_idle`: it runs on gloo with a tiny model, and says what the loaders read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from bench.data_idle.command import command, read_systems
from bench.data_idle.files import sparse, written
from bench.data_idle.rows import IdleRow, ResumeRow, medians, missed_limits
from netlayer.errors import ConfigError
from trainer.data.dataset import MegatronTokens


def row(system: str = "loader", run: int = 1, **changes: float | None) -> IdleRow:
    values = {
        "step_ms": 100.0,
        "idle_ms": 0.1,
        "idle_share": 0.001,
        "wait_ms": 0.1,
        "cores": 0.01,
        "copies": 1.0,
        "first_batch_s": 0.5,
    }
    return IdleRow(system, run, **{**values, **changes})  # type: ignore[arg-type]


def test_a_row_a_system_has_the_medians_of_its_runs() -> None:
    rows = [row(run=run, idle_ms=idle, copies=None) for run, idle in ((1, 5.0), (2, 1.0), (3, 2.0))]
    assert medians([*rows, row("torch")]) == [row(run=3, idle_ms=2.0, copies=None), row("torch")]


def test_each_limit_of_ours_is_judged_and_none_of_the_others() -> None:
    assert missed_limits([row(), row("torch", idle_share=0.5, cores=1.0)], [ResumeRow(10**6, 10**12, 1.5)]) == []
    missed = missed_limits([row(idle_share=0.01, cores=0.2, copies=2.0)], [ResumeRow(10**6, 10**12, 2.5)])
    assert missed == [
        "steps are idle for 1.00% of their time, above 0.2%",
        "the loader takes 0.200 cores a GPU, above 0.03",
        "the loader reads 2.00 copies, above one",
        "the first batch at step 1,000,000 takes 2.5 s, above 2 s",
    ]


def test_its_datasets_are_whole_and_go_with_the_block(tmp_path: Path) -> None:
    with written(tmp_path / "a", 50_000, 300, 0) as prefix:
        tokens = MegatronTokens(prefix)
        assert all(check.is_good for check in tokens.checks())
        assert (tokens.num_tokens, tokens.extremes[0] > 0, tokens.vocab_size <= 300) == (50_000, True, True)
        assert 50 < tokens.num_documents <= 98
    with sparse(tmp_path / "b", 10**9) as prefix:
        tokens = MegatronTokens(prefix)
        assert (tokens.num_tokens, tokens.num_documents) == (10**9, 953)
        np.testing.assert_array_equal(tokens.read(10**9 - 3, 3), 0)
    assert list(tmp_path.iterdir()) == []


def test_systems_are_named_or_all_that_are_there() -> None:
    assert read_systems("torch, loader") == ("torch", "loader")
    assert {"loader", "no_prefetch", "torch"} <= set(read_systems("all"))
    with pytest.raises(ConfigError, match="--systems = dali: is none of loader, no_prefetch, torch, megatron"):
        read_systems("loader,dali")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_it_runs_on_gloo_and_one_copy_is_read(tmp_path: Path, ranks: int) -> None:
    arguments = [
        "--ranks",
        str(ranks),
        "--runs",
        "1",
        "--steps",
        "4",
        "--warmup",
        "2",
        "--tokens",
        "200000",
        "--backend",
        "gloo",
    ]
    small = ["--set", "job.model.layers=1", "--set", "job.model.hidden=32", "--set", "job.model.heads=2"]
    late = ["--systems", "loader,no_prefetch,torch", "--resume-tokens", str(10**10)]
    output = ["--out", str(tmp_path / "out"), "--json", str(tmp_path / "record.json")]
    result = CliRunner().invoke(command, [*arguments, *small, *late, *output], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["source"] == "measured"
    idle = {each["system"]: each for each in record["rows"] if each["table"] == "idle"}
    assert set(idle) == {"loader", "no_prefetch", "torch"}
    # Rows of the four timed steps, and of those that the loader reads ahead of or after them.
    timed = 4
    for name in ("loader", "no_prefetch"):
        steps = idle[name]["copies"] * timed
        assert steps == pytest.approx(round(steps)), (name, steps)
    assert idle["no_prefetch"]["copies"] == 1
    assert 0 <= idle["loader"]["copies"] * timed <= timed + 8
    assert idle["torch"]["copies"] > 0
    [resumed] = [each for each in record["rows"] if each["table"] == "resume"]
    assert (resumed["step"], resumed["tokens"]) == (1_000_000, 10**10)
    assert "first batch after a resume at step 1,000,000 of 10,000,000,000 tokens" in result.output
    assert not list((tmp_path / "out" / "datasets").rglob("*.bin"))

"""`netlayer train --dry-run`: what a job is, without ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from netlayer import environ
from netlayer.config.file import load_config
from netlayer.environ import Gpu
from netlayer.errors import ConfigError
from netlayer.workload.comm_bytes import stage_collectives
from netlayer.workload.memory import estimate_stage
from netlayer.workload.model_size import num_parameters, stage_elements
from trainer.commands.train import train

FLAGSHIP = Path("examples/megascale-12288.toml")
AS_IT_IS = "--set", "job.model.recompute=none", "--set", "job.parallel.zero=1"
"""What would step down is set."""


def dry_run(*words: object) -> Result:
    result = CliRunner(catch_exceptions=False).invoke(train, ["--dry-run", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result


def test_a_job_of_12288_ranks_is_shown_on_a_machine_without_any(tmp_path: Path) -> None:
    config, file = load_config(FLAGSHIP), tmp_path / "record.json"
    shown = dry_run(FLAGSHIP, "--json", file).stdout
    assert f"{num_parameters(config.job.model):,} parameters on 12288 ranks" in shown
    assert "zero_bubble_interleaved_1f1b" in shown
    assert "proved complete, in order, free of deadlock" in shown
    assert "it fits: a rank will hold about" in shown
    record = json.loads(file.read_text())
    assert record["source"] == "predicted"
    stages = [row for row in record["rows"] if row["table"] == "stage"]
    assert [row["parameters"] for row in stages] == [stage_elements(config.job, stage) for stage in range(8)]
    collectives = [row for row in record["rows"] if row["table"] == "collective"]
    assert len(collectives) == sum(len(stage_collectives(config.job, stage)) for stage in range(8))
    [schedule] = [row for row in record["rows"] if row["table"] == "schedule"]
    assert 0 < schedule["bubble"] < schedule["bubble_formula"]  # gradients of weights fill gaps


def test_what_does_not_fit_is_refused_with_the_change_that_would() -> None:
    """Where defaults alone do not do it: these step down, as they will where it runs."""
    with pytest.raises(ConfigError, match=r"a GPU has 30\.0 GiB; set job\.parallel\.zero = 3: then a rank holds"):
        dry_run(FLAGSHIP, "--set", "cluster.gpu_memory_bytes=30GiB", *AS_IT_IS)
    shown = dry_run(FLAGSHIP, "--set", "cluster.gpu_memory_bytes=30GiB").stdout
    assert "a GPU has 30.0 GiB, for which it sets job." in shown.splitlines()[-1]


@pytest.mark.parametrize("size", ["37GiB", "40GiB"])
def test_stages_that_do_not_fit_are_named_and_the_job_is_refused_for_them(size: str, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    words = ["--dry-run", str(FLAGSHIP), "--set", f"cluster.gpu_memory_bytes={size}", "--json", str(file), *AS_IT_IS]
    result = CliRunner().invoke(train, words)
    fits = [row["fits"] for row in json.loads(file.read_text())["rows"] if row["table"] == "stage"]
    assert "fits" in result.stdout
    assert set(fits) == ({True} if size == "40GiB" else {True, False})
    assert isinstance(result.exception, ConfigError) == (not all(fits))


def test_groups_of_several_hosts_have_no_windows() -> None:
    """Nor the memory for them."""
    config = load_config(FLAGSHIP)
    shown = dry_run(FLAGSHIP).stdout
    assert estimate_stage(config.job, 0).windows > 0
    assert "windows" not in shown.splitlines()[-1]


def test_where_no_memory_is_named_a_job_of_several_servers_is_not_judged() -> None:
    shown = dry_run(FLAGSHIP, "--set", "cluster.gpu_memory_bytes=0").stdout
    assert "whether it fits is not said: set cluster.gpu_memory_bytes" in shown


def test_a_job_of_one_machine_is_judged_by_it() -> None:
    shown = dry_run("examples/laptop.toml").stdout
    assert "schedule: none, for job.parallel.pp is 1" in shown
    assert "a rank will hold about" in shown


def test_tables_are_of_the_job_as_the_gpus_of_this_machine_let_it_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environ, "usable_gpus", lambda: [Gpu(0, "a card", 48_000, "1")] * 8)

    def preview(gpu_memory: str) -> tuple[list[str], list[dict[str, Any]]]:
        file = tmp_path / f"{gpu_memory}.json"
        words = "examples/h200x8.toml", "--set", f"cluster.gpu_memory_bytes={gpu_memory}", "--json", file
        return dry_run(*words).stdout.splitlines(), json.loads(file.read_text())["rows"]

    (*table, line), rows = preview("0")
    assert "for which it sets job.model.recompute = selective and job.parallel.zero = 3" in line
    assert [row["fits"] for row in rows if row["table"] == "stage"] == [True]
    (*named_table, _), named_rows = preview("48000MiB")
    assert (table, rows) == (named_table, named_rows)
    # As it was asked for, it would not fit: the card that has room for that shows more.
    _, wide_rows = preview("141GiB")
    held, wide_held = ([row["memory_bytes"] for row in each if row["table"] == "stage"] for each in (rows, wide_rows))
    assert max(held) < 48_000 * 2**20 < max(wide_held)


@pytest.mark.parametrize(("option", "value"), [("--resume", "runs/a"), ("--trace", "3"), ("--out", "runs/b")])
def test_options_of_a_run_are_refused(option: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} = {value}: has no effect with --dry-run"):
        dry_run("examples/laptop.toml", option, value)


def test_the_record_on_stdout_stands_there_alone() -> None:
    assert json.loads(dry_run("examples/laptop.toml", "--json", "-").stdout)["name"] == "train-dry-run"


def test_a_job_of_several_servers_is_not_started_here_and_the_preview_is_named() -> None:
    with pytest.raises(ConfigError, match="or preview with --dry-run"):
        CliRunner(catch_exceptions=False).invoke(train, [str(FLAGSHIP)])


def test_it_needs_no_torch() -> None:
    code = "import sys, trainer.commands.dry_run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

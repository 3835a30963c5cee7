"""Whole runs over real processes, and what is refused before any starts."""

from __future__ import annotations

import json
import logging
import pwd
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from netlayer.config.file import load_config
from netlayer.config.tree import EvaluationConfig, JobConfig, NcclConfig
from netlayer.errors import CheckFailed, ConfigError, HardwareMissing, RankFailed
from netlayer.launch.launcher import launch
from netlayer.launch.rank import RankContext, RankEnv
from netlayer.store.meeting import meeting_place
from trainer.data.prepare import Corpus
from trainer.loop import RankInfo, Row, Trainer, run
from trainer.plan import Plan, prepare, resolve
from trainer.train import Outcome, Progress, TrainResult, train
from trainer.worker import meet

from . import targets
from .conftest import tiny_job


@dataclass(frozen=True)
class Run:
    result: TrainResult
    progress: list[Progress]
    out: Path


def run_ranks(job: JobConfig, corpus: Corpus, ranks: int, out: Path) -> Run:
    progress: list[Progress] = []
    with meeting_place() as place:
        url = place.init_method("training")
        plan = resolve(job, corpus, ranks=ranks, init_method=url, backend="gloo", out=out, seed=0)
        result = train(plan, progress.append)
    return Run(result, progress, out)


@pytest.fixture(scope="module")
def two_ranks(text_folder: Path, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_ranks(tiny_job(text_folder, ranks=2), corpus, 2, tmp_path_factory.mktemp("two"))


def test_two_ranks_have_the_losses_of_one(two_ranks: Run, text_folder: Path, corpus: Corpus) -> None:
    steps: list[Row] = []
    evaluations: list[Row] = []
    alone = Trainer(tiny_job(text_folder), corpus, 0, RankInfo(0, 1, torch.device("cpu")))
    run(alone, EvaluationConfig(), steps.append, evaluations.append)
    assert len(steps) == 20
    for key in ("loss", "grad_norm", "lr"):
        expected = [row[key] for row in steps]
        assert [row[key] for row in two_ranks.result.steps] == pytest.approx(expected, abs=1e-4)
    assert [row["validation_loss"] for row in two_ranks.result.evaluations] == pytest.approx(
        [row["validation_loss"] for row in evaluations], abs=1e-4
    )


def test_two_ranks_have_the_same_losses_again_to_the_bit(
    two_ranks: Run, text_folder: Path, corpus: Corpus, tmp_path: Path
) -> None:
    again = run_ranks(tiny_job(text_folder, ranks=2, overlap={"dp": False}), corpus, 2, tmp_path)
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in again.result.steps] == [row[key] for row in two_ranks.result.steps]


def test_rows_are_in_files_and_were_reported(two_ranks: Run) -> None:
    for name, rows in (("metrics", two_ranks.result.steps), ("validation", two_ranks.result.evaluations)):
        lines = (two_ranks.out / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line) for line in lines] == list(rows)
    told = [(progress.stage, progress.done, progress.total) for progress in two_ranks.progress]
    steps = [("training", step, 20) for step in range(1, 20)]
    # The row of a step that an evaluation follows has the seconds of that.
    assert told == [("validating", 0, 20), *steps, ("validating", 20, 20), ("training", 20, 20)]


def test_result_says_what_was_trained(two_ranks: Run, corpus: Corpus) -> None:
    result = two_ranks.result
    assert result.corpus == corpus.facts
    assert len(result.devices) == 2
    assert result.num_parameters == 2 * 300 * 32 + 16 * 32 + 2 * (4 * 32**2 + 4 * 32 + 2 * 32 * 64 + 96 + 4 * 32) + 64
    assert result.validation_fall > 0.1
    assert all(0 < row["exposed_comm"] < 1 for row in result.steps)


def test_a_loss_that_is_no_number_names_its_rank_alone(text_folder: Path, corpus: Corpus, tmp_path: Path) -> None:
    with meeting_place() as place:
        plan = Plan(tiny_job(text_folder, ranks=2), corpus, place.init_method("poisoned"), "gloo", tmp_path, 0)
        with pytest.raises(CheckFailed, match=r"step 3: the loss is nan on rank 1 \(tp=0, pp=0, dp=1\);"):
            launch(targets.poisoned_on_rank_1, 2, args=(plan,), log_dir=tmp_path)


def test_a_rank_that_fails_is_named_with_its_place_and_step(
    text_folder: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launched(*_: object, on_message: Callable[[int, Progress], None], **__: object) -> list[Outcome]:
        on_message(0, Progress("training", 12, 20, {}))
        raise RankFailed(
            1, "ValueError: a broken sample", "log", 'Trace\n  File "/a/b/batches.py", line 7, in draw\n  x'
        )

    monkeypatch.setattr("trainer.train.launch", launched)
    said = r"rank 1 \(tp=0, pp=0, dp=1; host .*; after step 12; in batches\.py:7 in draw\) failed: ValueError: a broken"
    with pytest.raises(RankFailed, match=said):
        train(Plan(tiny_job(text_folder, 2), corpus, "", "gloo", tmp_path, 0))


def test_nccl_without_a_gpu_for_every_rank_is_refused(
    text_folder: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    plan = Plan(tiny_job(text_folder, ranks=2), corpus, "", "nccl", tmp_path, 0)
    with pytest.raises(HardwareMissing, match="2 ranks want a GPU each, 1 found"):
        meet(RankContext(RankEnv(rank=1, world_size=2, local_rank=1, local_world_size=2)), plan)


def test_ranks_of_nccl_are_told_what_the_job_wants_of_it(
    text_folder: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"NCCL_CONF_FILE": "/nowhere", "NCCL_IB_RETRY_CNT": "6"}.items():
        monkeypatch.setenv(name, value)
    told: dict[str, object] = {}

    def launched(*_: object, **options: object) -> list[Outcome]:
        told.update(options)
        return [Outcome((), (), 0, "a GPU")] * 2

    monkeypatch.setattr("trainer.train.launch", launched)
    job = tiny_job(text_folder, ranks=2).model_copy(update={"nccl": NcclConfig(timeout=20)})
    result = train(resolve(job, corpus, ranks=2, init_method="", backend="nccl", out=tmp_path, seed=0))
    assert told["env"] == {"NCCL_IB_TIMEOUT": "20"}
    assert {row["name"]: row["action"] for row in result.nccl_settings} == {
        "NCCL_IB_TIMEOUT": "set",
        "NCCL_IB_RETRY_CNT": "kept",
    }


def test_another_number_of_ranks_is_refused(text_folder: Path, corpus: Corpus, tmp_path: Path) -> None:
    job = tiny_job(text_folder, ranks=2)
    with pytest.raises(ConfigError, match=r"tp x pp x dp = 2: must equal the number of ranks started, 3"):
        resolve(job, corpus, ranks=3, init_method="", backend="gloo", out=tmp_path, seed=0)


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("a few words", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"job\.data\.folder = .*: gives \d+ tokens to train on"):
        prepare(tiny_job(tmp_path), 1, 0, tmp_path)


def test_a_cache_that_cannot_be_written_is_replaced_by_the_output_folder(
    text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with caplog.at_level(logging.WARNING):
        corpus = prepare(tiny_job(text_folder), 1, 0, tmp_path)
    assert corpus.folder.parent == tmp_path
    assert "cannot be used as a cache" in caplog.text


def test_a_user_without_a_home_has_the_output_folder_for_a_cache(
    text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # a uid of a container, that has no name
    with caplog.at_level(logging.WARNING):
        corpus = prepare(tiny_job(text_folder), 1, 0, tmp_path)
    assert corpus.folder.parent == tmp_path
    assert "(there is no home folder); this run's tokens go to" in caplog.text


def test_the_launching_process_needs_no_torch() -> None:
    code = "import sys, trainer.train; sys.exit('torch' in sys.modules or 'tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_default_job_lowers_held_out_loss_by_more_than_40_percent(tmp_path: Path) -> None:
    job = load_config().job
    result = run_ranks(job, prepare(job, 2, 0, tmp_path), 2, tmp_path).result
    assert result.validation_fall > 0.4

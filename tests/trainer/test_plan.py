"""What is decided before the loop: one plan, from a job and what a command line says."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from unittest import mock

import pytest

from netlayer.config.tree import Config
from netlayer.errors import ConfigError
from netlayer.launch.rank import RankEnv
from trainer.commands import memory
from trainer.data.prepare import Corpus
from trainer.plan import Plan, check_memory, draft, prepare, resolve
from trainer.train import Work

from .conftest import tiny_job


@pytest.fixture
def config(text_folder: Path) -> Config:
    job = tiny_job(text_folder, 2, optimizer={"steps": 6}, checkpoint={"every_steps": 4})
    return Config.model_validate({"cluster": {"gpus_per_server": 2}, "job": job.model_dump()})


def test_a_plan_has_the_text_and_reaches_a_rank_as_it_is(config: Config, corpus: Corpus, tmp_path: Path) -> None:
    plan = resolve(config.job, ranks=2, init_method="here", backend="gloo", out=tmp_path, seed=0)
    assert plan.corpus.facts.train_tokens == corpus.facts.train_tokens
    assert (plan.ranks, plan.nccl) == (2, ())
    assert pickle.loads(pickle.dumps(plan)) == plan
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.seed = 1  # type: ignore[misc]


def test_a_variable_that_nccl_would_misread_is_refused_before_the_text(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_CONF_FILE", "/nowhere")
    monkeypatch.setenv("NCCL_IB_TIMEOUT", "twenty")
    prepared = mock.Mock()
    monkeypatch.setattr("trainer.plan.prepare", prepared)
    with pytest.raises(ConfigError, match="NCCL_IB_TIMEOUT"):
        resolve(config.job, ranks=2, init_method="here", backend="nccl", out=tmp_path, seed=0)
    assert not prepared.called


def test_a_draft_holds_what_the_command_line_says(config: Config, tmp_path: Path, corpus: Corpus) -> None:
    start = draft(config, seed=3, trace="last")
    assert (start.backend, start.ranks, start.seed, start.trace) == ("gloo", 2, 3, range(6, 7))
    assert "a rank will hold about" in start.memory
    plan = start.resolve(tmp_path, "here")
    kept = (plan.job, plan.seed, plan.trace, plan.out, plan.init_method)
    assert kept == (config.job, 3, start.trace, tmp_path, "here")
    assert (plan.stops_gently, plan.is_shared, plan.continues) == (True, True, False)


@pytest.mark.parametrize("out", [None, Path("somewhere")])
def test_ranks_of_a_launcher_share_a_folder_only_if_it_was_named(config: Config, out: Path | None) -> None:
    job = config.job.model_copy(update={"checkpoint": config.job.checkpoint.model_copy(update={"every_steps": 0})})
    start = draft(config.model_copy(update={"job": job}), RankEnv(1, 2, 1, 2, "torchrun"), seed=0, out=out)
    assert start.is_shared == (out is not None)


def test_names_of_before_the_plan_still_lead_to_it() -> None:
    assert Work is Plan
    assert memory.check_memory is check_memory
    from trainer.train import check_supported
    from trainer.train import prepare as former

    assert former is prepare
    assert callable(check_supported)

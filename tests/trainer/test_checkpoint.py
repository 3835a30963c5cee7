"""Checkpoints: the same losses to the bit after a restart, in another layout but for rounding; none half-written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from netlayer.config import EvaluationConfig, JobConfig
from netlayer.errors import ConfigError
from netlayer.launch import launch
from netlayer.meeting import meeting_place
from tests.trainer import layout_ranks
from tests.trainer.test_layouts import LLAMA, job_of
from trainer.checkpoint_meta import find
from trainer.data.prepare import Corpus
from trainer.loop import Place, Trainer, run

from .conftest import tiny_job

ALONE = Place(0, 1, torch.device("cpu"))


def train(job: JobConfig, corpus: Corpus, out: Path, resume: Path | None = None, seed: int = 0) -> list[float]:
    trainer = Trainer(job, corpus, seed, ALONE)
    if resume:
        trainer.resume(find(resume))
    losses: list[float] = []
    run(trainer, EvaluationConfig(), lambda row: losses.append(row["loss"]), lambda _row: None, out)
    return losses


def job_for(text_folder: Path, steps: int = 8, **model: object) -> JobConfig:
    sections = {"optimizer": {"steps": steps}, "checkpoint": {"every_steps": 3, "keep": 2}, "model": model}
    return tiny_job(text_folder, **sections)


def test_losses_after_a_restart_are_the_same_to_the_bit(text_folder: Path, corpus: Corpus, tmp_path: Path) -> None:
    job = job_for(text_folder)
    whole = train(job, corpus, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000006", "step-000008"]
    # Another seed: the checkpoint's own goes before it.
    assert train(job, corpus, tmp_path / "again", tmp_path / "step-000006", seed=5) == whole[6:]


def test_a_run_is_gone_on_from_its_newest_checkpoint(text_folder: Path, corpus: Corpus, tmp_path: Path) -> None:
    train(job_for(text_folder), corpus, tmp_path / "checkpoints")
    (tmp_path / "checkpoints" / ".step-000009.part").mkdir()  # a run that was killed while it wrote
    assert find(tmp_path).step == 8
    assert find(tmp_path / "checkpoints").path.name == "step-000008"


def test_bfloat16_goes_on_with_its_masters(text_folder: Path, corpus: Corpus, tmp_path: Path) -> None:
    job = job_for(text_folder, dtype="bfloat16")
    whole = train(job, corpus, tmp_path)
    assert train(job, corpus, tmp_path / "again", tmp_path / "step-000006") == whole[6:]


def test_what_is_no_checkpoint_or_is_damaged_is_one_line(text_folder: Path, corpus: Corpus, tmp_path: Path) -> None:
    job = job_for(text_folder, steps=3)
    train(job, corpus, tmp_path)
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        find(tmp_path / "nowhere")
    other = job_for(text_folder, steps=3, hidden=64)
    with pytest.raises(ConfigError, match="is of a model with hidden = 32, and the job has 64"):
        train(other, corpus, tmp_path, tmp_path)
    file = tmp_path / "step-000003" / "tp0-pp0.pt"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ConfigError, match=r"tp0-pp0\.pt: is damaged"):
        train(job, corpus, tmp_path, tmp_path)
    file.unlink()
    with pytest.raises(ConfigError, match=r"lacks tp0-pp0\.pt"):
        find(tmp_path)
    (tmp_path / "step-000003" / "meta.json").write_text(json.dumps({"format": 1}))
    with pytest.raises(ConfigError, match=r"is damaged .* in meta\.json"):
        find(tmp_path)


@pytest.mark.parametrize("model", [LLAMA])
def test_any_layout_goes_on_from_any_other(tmp_path: Path, model: dict[str, object]) -> None:
    """Written by one process and gone on with by several, and the other way round."""
    alone = job_of({}, model, {})
    expected = layout_ranks.train(alone, 0, 4)
    layout_ranks.train(alone, 0, 2, save=tmp_path / "alone")
    spread = [job_of({"tp": 2, "pp": 2}, model, {}), job_of({"tp": 2, "dp": 2}, model, {})]
    with meeting_place() as place:
        url = place.init_method("checkpoint")
        steps = [(tmp_path / "alone", tmp_path / "first"), (tmp_path / "first", tmp_path / "second")]
        arguments = (spread, 3, url, steps)
        first, second = launch(layout_ranks.go_on, 4, args=arguments, log_dir=tmp_path / "logs")[0]
    assert first.losses == pytest.approx(expected.losses[2:3], abs=1e-10)
    assert second.losses == pytest.approx(expected.losses[3:4], abs=1e-10)
    last = layout_ranks.train(alone, 0, 4, resume=tmp_path / "first")
    assert last.losses == pytest.approx(expected.losses[3:], abs=1e-10)
    for name, value in expected.parameters.items():
        torch.testing.assert_close(last.parameters[name], value, rtol=1e-8, atol=1e-11)

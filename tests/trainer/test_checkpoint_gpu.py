"""Snapshots of a GPU's state at a limited rate, while steps overwrite it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.trainer.test_checkpoint_beside import job_of
from trainer.checkpoint.distcp import file_of
from trainer.checkpoint.snapshot import ShardPlan, Staging
from trainer.data.prepare import Corpus
from trainer.loop import RankInfo, Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with CUDA"),
]


@pytest.mark.parametrize("gbps", [0.0, 1e-4, 10.0])
def test_a_snapshot_holds_one_step_at_any_rate(gbps: float, text_folder: Path, corpus: Corpus) -> None:
    """1e-4: a copy that has not begun when the update comes is launched then."""
    job = job_of(text_folder)
    job = job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"copy_gbps": gbps})})
    trainer = Trainer(job, corpus, 0, RankInfo(0, 1, torch.device("cuda", 0)))
    trainer.step(1)
    plan = ShardPlan(trainer.model, trainer.optimizer, file_of(0))
    staging = Staging(plan, trainer.model, trainer.optimizer)
    for step in range(2, 6):
        before = [source.value().clone() for source in plan.sources]
        lost = staging.take()
        trainer.step(step)
        staging.wait()
        assert staging.is_copied
        assert not float(lost)
        for source, value in zip(plan.sources, before, strict=True):
            held = staging.buffer[source.start : source.start + source.num_bytes].view(value.dtype)
            assert torch.equal(held, value.cpu()), (step, source.name)
    staging.close()

"""What the ranks of these tests run: importable by a fresh interpreter."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch

from netlayer.config.tree import EvaluationConfig
from netlayer.launch.rank import RankContext
from trainer.checkpoint import restore
from trainer.checkpoint.meta import find
from trainer.checkpoint.save import NoRoom
from trainer.checkpoint.writer import KILL
from trainer.loop import Trainer, run
from trainer.plan import Plan
from trainer.worker import meet


def poisoned_on_rank_1(context: RankContext, plan: Plan) -> None:
    """Two good steps, then rank 1 alone computes a loss that is no number."""
    trainer = Trainer(plan.job, plan.corpus, plan.seed, *meet(context, plan))
    for step in range(1, 3):
        trainer.step(step)
    if context.env.rank == 1:
        trainer.model.chunks[0].module.register_forward_hook(lambda _module, _args, loss: loss * torch.nan)
    trainer.step(3)


def full_on_rank_1(context: RankContext, plan: Plan) -> list[str]:
    """What a save says on this rank where rank 1 alone finds the disk full; the next one finds room."""
    trainer = Trainer(plan.job, plan.corpus, plan.seed, *meet(context, plan))
    said = []
    sync = os.fsync
    for step in (1, 2):
        trainer.step(step)
        full = mock.patch("os.fsync", side_effect=OSError(errno.ENOSPC, "full"))
        with full if (step, context.env.rank) == (1, 1) else mock.patch("os.fsync", side_effect=sync):
            try:
                said.append(f"step {step}: {trainer.save(plan.out / 'checkpoints').name}")
            except NoRoom as exc:
                said.append(f"step {step}: {exc}")
        trainer.model.wait_for_all()
        left = sorted(str(path.relative_to(plan.out)) for path in Path(plan.out).rglob("*step-*"))
        trainer.model.wait_for_all()
        said.append(f"there: {', '.join(left)}")
    trainer.close()
    return said


def killed(context: RankContext, plan: Plan, url: str, moment: str) -> None:
    """Train alone, and be killed at a moment of a save."""
    torch.set_num_threads(1)
    os.environ[KILL] = moment
    trainer = Trainer(plan.job, plan.corpus, plan.seed, *meet(context, replace(plan, init_method=url)))
    run(trainer, EvaluationConfig(), lambda _row: None, lambda _row: None, plan.out)


@dataclass(frozen=True)
class SavedAndRestored:
    """Losses of a run that saves beside the training, those of one that resumes from step 6, and what it has read."""

    losses: list[float]
    again: list[float]
    restored: restore.Restored


def saved_and_restored(context: RankContext, plan: Plan, url: str) -> SavedAndRestored:
    torch.set_num_threads(1)
    place, groups = meet(context, replace(plan, init_method=url))
    losses, again = list[float](), list[float]()
    trainer = Trainer(plan.job, plan.corpus, plan.seed, place, groups)
    folder = plan.out / "checkpoints"
    run(trainer, EvaluationConfig(), lambda row: losses.append(row["loss"]), lambda _row: None, folder)
    trainer.close()
    other = Trainer(plan.job, plan.corpus, plan.seed, place, groups)
    restored = restore.load(find(folder / "step-000006"), other.model, other.optimizer)
    other.resume(find(folder / "step-000006"))
    run(other, EvaluationConfig(), lambda row: again.append(row["loss"]), lambda _row: None)
    other.close()
    return SavedAndRestored(losses, again, restored)

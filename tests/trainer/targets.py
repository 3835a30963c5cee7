"""What the ranks of these tests run: importable by a fresh interpreter."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest import mock

import torch

from netlayer.launch.rank import RankContext
from trainer.checkpoint.save import NoRoom
from trainer.loop import Trainer
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

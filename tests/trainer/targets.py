"""What the ranks of these tests run: importable by a fresh interpreter."""

from __future__ import annotations

import torch

from netlayer.rank import RankContext
from trainer.loop import Trainer
from trainer.train import Work
from trainer.worker import meet


def poisoned_on_rank_1(context: RankContext, work: Work) -> None:
    """Two good steps, then rank 1 alone computes a loss that is no number."""
    trainer = Trainer(work.job, work.corpus, work.seed, *meet(context, work))
    for step in range(1, 3):
        trainer.step(step)
    if context.env.rank == 1:
        trainer.model.chunks[0].module.register_forward_hook(lambda _module, _args, loss: loss * torch.nan)
    trainer.step(3)

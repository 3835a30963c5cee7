"""What ranks do in the tests of weights that travel in 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from collectives.sharded.float8 import Float8Bucket
from netlayer.config.tree import JobConfig
from netlayer.launch.rank import RankContext
from netlayer.rendezvous import create_groups
from tests.trainer import layout_ranks
from tests.trainer.layout_ranks import CPU, State, Trained
from trainer.optim import build_optimizer
from trainer.parallel import ParallelModel
from trainer.replicas import ReplicaCheck


@dataclass(frozen=True)
class Read:
    """Losses of four steps, between which parameters are read and written, and what was there.

    Args:
        state: the module's own state after the first step, in the dtype of the computation.
        masters: at the same time.
        last: masters at the end.
        held: buckets that had memory for their parameters: at the start, after replicas were compared, after the state
            was read, a step later.
        views: of the parameters, held since the third step: what they show at the end.
    """

    losses: list[float]
    state: State
    masters: State
    last: State
    held: list[int]
    views: State


def reads(context: RankContext, jobs: Sequence[JobConfig], url: str) -> list[Read]:
    with layout_ranks._world(context, url):
        return [_reads(job, context.env.rank) for job in jobs]


def _take_step(model: ParallelModel, optimizer: Any, job: JobConfig, step: int) -> float:
    """Train one step; return its mean loss."""
    model.start_step(step)
    loss = model.accumulate(layout_ranks.batches(job, step, model.data_rank))
    model.finish_gradients()
    optimizer.step()
    optimizer.zero_grad()
    return layout_ranks.mean_loss(model, loss)


def _reads(job: JobConfig, rank: int) -> Read:
    model = ParallelModel(job, 3, rank, CPU, create_groups(job.parallel.layout))
    optimizer = model.optimizer(lambda chunk: build_optimizer(job.optimizer, chunk))
    [chunk] = model.chunks
    state, masters, views, losses, held = State(), State(), State(), [], []

    def note_held() -> None:
        held.append(sum(isinstance(bucket, Float8Bucket) and bucket.is_readable for bucket in chunk.buckets))

    note_held()
    for step in range(1, 5):
        losses.append(_take_step(model, optimizer, job, step))
        if step == 1:
            ReplicaCheck(model, 0, "cpu", 0).compare(step)
            note_held()
            state = {name: tensor.clone() for name, tensor in chunk.module.state_dict().items()}
            masters = chunk.full_state_dict()
            note_held()
        if step == 2:
            note_held()
            with torch.no_grad():  # the next step computes with it, and it is what the optimiser goes on from
                weight = dict(chunk.module.named_parameters())["blocks.1.up.weight"]
                weight.mul_(2)
        if step == 3:
            views = chunk.module.state_dict()
    last = chunk.full_state_dict()
    shown = {name: view.clone() for name, view in views.items()}
    model.close()
    return Read(losses, state, masters, last, held, shown)


def offsets(context: RankContext, job: JobConfig, url: str) -> list[list[int]]:
    """Return where the parts of weights that travel in 8 bits (values, scales) lie in each bucket's memory, bytes."""
    with layout_ranks._world(context, url):
        model = ParallelModel(job, 3, context.env.rank, CPU, create_groups(job.parallel.layout))
        buckets = [bucket for bucket in model.chunks[0].buckets if isinstance(bucket, Float8Bucket)]
        parts = [[part for index in range(len(each.plan.slots)) for part in each.weight(index)] for each in buckets]
        model.close()
        return [[part.storage_offset() * part.element_size() for part in of_bucket] for of_bucket in parts]


def holds_views(context: RankContext, job: JobConfig, url: str) -> list[float]:
    """Train three steps while each rank holds a view of another weight that travels in 8 bits; return the losses."""
    with layout_ranks._world(context, url):
        rank = context.env.rank
        model = ParallelModel(job, 3, rank, CPU, create_groups(job.parallel.layout))
        optimizer = model.optimizer(lambda chunk: build_optimizer(job.optimizer, chunk))
        losses, held = [], None
        for step in range(1, 5):
            losses.append(_take_step(model, optimizer, job, step))
            if step == 1:
                weights = dict(model.chunks[0].module.named_parameters())
                views = {name: weights[name].data for name in ("blocks.1.qkv.weight", "blocks.2.up.weight")}
                held = views.pop(("blocks.1.qkv.weight", "blocks.2.up.weight")[rank])
                views.clear()
        assert held is not None
        model.close()
        return losses


def resumes(context: RankContext, jobs: Sequence[JobConfig], folders: Sequence[Path], url: str) -> list[list[Trained]]:
    """Four steps of each job at once, and from a checkpoint after two, into a job of the other setting too."""
    with layout_ranks._world(context, url):
        rank, results = context.env.rank, []
        for job, folder in zip(jobs, folders, strict=True):
            layout_ranks.train(job, rank, 2, save=folder)
            whole = layout_ranks.train(job, rank, 4)
            results.append([whole, *(layout_ranks.train(other, rank, 4, resume=folder) for other in jobs)])
        return results


def random(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02

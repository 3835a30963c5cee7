"""Ranks that train by LAMB: every layout asked for, and data parallel with steps inside the backward pass."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from collectives.watch.recorder import Recorder
from netlayer.config.tree import JobConfig
from netlayer.launch.rank import RankContext
from netlayer.layout import ParallelLayout
from netlayer.rendezvous import create_groups, open_world
from tests.collectives.settings import shard
from tests.trainer import layout_ranks
from tests.trainer.layout_ranks import State
from trainer.model.gpt import build_model
from trainer.optim import Lamb, build_optimizer
from trainer.optim.build import whole_norms
from trainer.parallel import ParallelModel, further_groups

Counts = Counter[tuple[str, str]]


@dataclass(frozen=True)
class Trained:
    """Parameters after some steps of every job; of the first one, pure data parallel, stepped in the backward pass.

    `counts` has the collectives of one step of every job, by group and kind, with AdamW and with LAMB.
    """

    parameters: list[State]
    in_backward: State
    counts: list[tuple[Counts, Counts]]


def run_rank(context: RankContext, jobs: Sequence[JobConfig], steps: int, url: str) -> Trained:
    torch.set_num_threads(1)
    env = context.env
    open_world(ParallelLayout(dp=env.world_size), backend="gloo", init_method=url, rank=env.rank)
    try:
        return Trained(
            [layout_ranks.train(job, env.rank, steps).parameters for job in jobs],
            stepped_in_backward(jobs[0], env.rank, steps),
            [(counted(job, env.rank, "adamw"), counted(job, env.rank, "lamb")) for job in jobs],
        )
    finally:
        dist.destroy_process_group()


def counted(job: JobConfig, rank: int, name: str) -> Counts:
    """Collectives of an update, with the gathers that follow it."""
    recorder = Recorder()
    groups = create_groups(job.parallel.layout, more=further_groups(job))
    model = ParallelModel(job, 3, rank, torch.device("cpu"), groups, recorder)
    config = job.optimizer.model_copy(update={"name": name})
    optimizer = model.optimizer(lambda chunk: build_optimizer(config, chunk))
    model.start_step(1)
    model.accumulate(layout_ranks.batches(job, 1, model.place.dp))
    model.finish_gradients()
    recorder.begin_step(1)
    optimizer.step()
    model.wait_parameters()
    return recorder.end_step().counts()


def stepped_in_backward(job: JobConfig, rank: int, steps: int) -> State:
    model = build_model(job.model, 3, torch.device("cpu")).double()
    sharded = shard(model, units=model.units, bucket_bytes=2000, reduce_dtype="float64")
    config = job.optimizer
    optimizer = sharded.optimizer(
        Lamb,
        options=lambda _name, shape: {"adapt": len(shape) > 1, "weight_decay": config.weight_decay * (len(shape) > 1)},
        step_in_backward=True,
        norms=whole_norms(sharded),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )
    for step in range(1, steps + 1):
        batches = layout_ranks.batches(job, step, rank)
        for index, (tokens_BT, targets_BT) in enumerate(batches):
            with contextlib.nullcontext() if index == len(batches) - 1 else sharded.no_sync():
                (sharded(tokens_BT, targets_BT) / len(batches)).backward()
        optimizer.step()
    return dict(sharded.full_state_dict())

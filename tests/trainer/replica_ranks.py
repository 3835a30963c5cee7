"""Ranks that train three replicas, and compare them; one of them then loses a bit, and another computes wrong."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from netlayer.config.tree import JobConfig
from netlayer.errors import CheckFailed
from netlayer.launch.rank import RankContext
from netlayer.rendezvous import create_groups, open_world
from tests.trainer.layout_ranks import batches
from trainer.optim import build_optimizer
from trainer.parallel import ParallelModel
from trainer.replicas import ReplicaCheck

FLIPPED, WRONG = 1, 2


def run_rank(context: RankContext, job: JobConfig, url: str) -> tuple[list[float], list[float], list[str]]:
    """Return losses without and with comparisons between the steps, and what comparisons said of two faults."""
    torch.set_num_threads(1)
    open_world(job.parallel.layout, backend="gloo", init_method=url, rank=context.env.rank)
    try:
        plain, _ = _train(job, context.env.rank, compares=False)
        compared, lines = _train(job, context.env.rank, compares=True)
        return plain, compared, lines
    finally:
        dist.destroy_process_group()


def _train(job: JobConfig, rank: int, *, compares: bool) -> tuple[list[float], list[str]]:
    model = ParallelModel(job, 3, rank, torch.device("cpu"), create_groups(job.parallel.layout))
    optimizer = model.optimizer(lambda chunk: build_optimizer(job.optimizer, chunk))
    check, losses = ReplicaCheck(model, 0, "CPU", 0), list[float]()
    for step in range(1, 5):
        model.start_step(step)
        losses.append(float(model.accumulate(batches(job, step, model.data_rank, cp=model.place.cp))))
        model.finish_gradients()
        optimizer.step()
        optimizer.zero_grad()
        if compares:
            assert not check.compare(step)
    lines = _faults(model, check, rank) if compares else []
    model.close()
    return losses, lines


def _faults(model: ParallelModel, check: ReplicaCheck, rank: int) -> list[str]:
    bucket = model.chunks[0].buckets[0]
    element = (bucket.rank + 1) % bucket.plan.world_size * bucket.plan.shard_numel  # gathered from another rank
    word = bucket.unsharded_N.detach().numpy().view("int32")[element : element + 1]
    word ^= rank == FLIPPED  # the lowest bit of the fraction
    lines = [_line(check, 5)]
    word ^= rank == FLIPPED
    evaluate = model.evaluate

    times = 3  # both of one comparison, and the first of the next

    def wrong(given: object) -> Tensor:
        nonlocal times
        times -= 1
        return evaluate(given) * (1 + 2**-20 * (rank == WRONG and times >= 0))  # type: ignore[arg-type]

    model.evaluate = wrong  # type: ignore[method-assign, assignment]
    return [*lines, _line(check, 6), _line(check, 7)]


def _line(check: ReplicaCheck, step: int) -> str:
    try:
        return check.compare(step)
    except CheckFailed as exc:
        return str(exc)

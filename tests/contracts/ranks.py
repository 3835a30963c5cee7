"""What ranks of a job hold and carry, as the trainer's own buffers and recorder have it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.sharded.bucket import Bucket
from collectives.sharded.float8 import Float8Bucket
from collectives.watch.recorder import Recorder, StepComm
from netlayer.config.tree import JobConfig
from netlayer.launch.rank import RankContext
from netlayer.layout import ParallelLayout
from netlayer.rendezvous import create_groups, open_world
from tests.trainer.layout_ranks import batches
from trainer.notes import NotesInFlight
from trainer.optim import build_optimizer
from trainer.parallel import ParallelModel, further_groups
from trainer.step import Steps

Carried = dict[tuple[str, str], int]
"""Bytes of a step by the recorder's group and kind."""


@dataclass(frozen=True)
class Seen:
    """Of one rank and one step: what was carried, and in how many collectives; what the rank holds.

    Args:
        parameters, masters, gradients: without the padding of buckets; gradients of the shards.
        narrow: whether the backend has no reduce-scatter of a dtype in use, and carries twice the bytes.
    """

    stage: int
    carried: Carried
    times: dict[tuple[str, str], int]
    parameters: int
    masters: float
    gradients: float
    moments: int
    narrow: bool


def run(context: RankContext, jobs: Sequence[JobConfig], url: str) -> list[Seen]:
    torch.set_num_threads(1)
    rank = context.env.rank
    open_world(ParallelLayout(dp=context.env.world_size), backend="gloo", init_method=url, rank=rank)
    try:
        return [_seen(job, rank) for job in jobs]
    finally:
        dist.destroy_process_group()


def _seen(job: JobConfig, rank: int) -> Seen:
    device = torch.device("cpu")
    recorder = Recorder(device)
    model = ParallelModel(
        job, 3, rank, device, create_groups(job.parallel.layout, more=further_groups(job)), recorder=recorder
    )
    optimizer = model.optimizer(
        lambda chunk: build_optimizer(job.optimizer, chunk, step_in_backward=job.overlap.step_in_backward)
    )
    steps = Steps(model, optimizer, job.optimizer.max_grad_norm or math.inf)
    comm = None
    for step in (1, 2):  # the first has no gathers: the parameters are there
        recorder.begin_step(step)
        steps.begin(step)
        stepped = steps.run(step, batches(job, step, model.data_rank, cp=model.place.cp), 1e-3)
        assert stepped.grad_norm is not None
        NotesInFlight(model, stepped.loss, stepped.grad_norm, False).read()
        comm = recorder.end_step()
    assert comm is not None
    buckets = [bucket for chunk in model.chunks for bucket in chunk.buckets]
    moments = [
        value.nbytes
        for each in optimizer.each
        for state in each.state.values()
        for name, value in state.items()
        if name != "step"
    ]
    comms = [model._data_comms[1], *([] if model.exchange is None else [model.exchange.comm])]
    seen = Seen(
        stage=model.place.pp,
        carried=_carried(comm),
        times=dict(comm.counts()),
        parameters=sum(bucket.plan.numel * _width(bucket) for bucket in buckets if _stays(bucket)),
        masters=sum(_without_padding(bucket, bucket.master_S) for bucket in buckets if not bucket.shares_storage),
        gradients=sum(_without_padding(bucket, bucket.grad_S) for bucket in buckets),
        moments=sum(moments),
        narrow=any(any(comm._emulated.values()) for comm in comms),
    )
    model.close()
    return seen


def _stays(bucket: Bucket) -> bool:
    """Tables are of units whose parameters come and go, but are handed out."""
    if isinstance(bucket, Float8Bucket):
        return not bucket.frees
    return not bucket.reshards or not bucket.plan.slots[0].name.startswith("blocks.")


def _width(bucket: Bucket) -> int:
    return 1 if isinstance(bucket, Float8Bucket) else bucket.unsharded_N.element_size()


def _without_padding(bucket: Bucket, shard_S: Tensor) -> float:
    """Bytes of a shard, in the mean over those of the bucket."""
    return shard_S.nbytes * bucket.plan.numel / bucket.plan.padded_numel


def _carried(comm: StepComm) -> Carried:
    found: Counter[tuple[str, str]] = Counter()
    for each in comm.collectives:
        found[each.group, each.kind] += each.num_bytes
    return dict(found)

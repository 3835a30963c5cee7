"""The ranks of `bench.mfu`: systems take turns, each built anew, checked by its losses, then timed.

A run of a system is its warm-up and `steps` steps with one synchronisation at each end. Left out: what the figures mean
(`bench.mfu`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from bench import mfu_profile
from bench.control import Control
from bench.overlap_steps import StepTimer
from bench.peers.fsdp2 import Fsdp2
from netlayer.config import JobConfig
from netlayer.rank import RankContext
from netlayer.rendezvous import Groups
from trainer.optim import build_optimizer
from trainer.parallel import MicroBatch, SplitModel
from trainer.worker import meet_at

Row = dict[str, Any]
_TIMEOUT = timedelta(minutes=10)
PROFILED = 3
"""Steps of a profile."""
_NAMED = 40


class System(Protocol):
    def step(self, batches: Sequence[MicroBatch]) -> Tensor:
        """One optimiser step over this rank's micro-batches; its part of the mean loss, on the device."""

    def close(self) -> None:
        """Give back what it holds beside memory."""


@dataclass(frozen=True)
class Order:
    """What all ranks do.

    Args:
        job: the layout and the model; the same for every system.
        systems: in turn.
        runs: of each.
        steps: timed in a run, after `warmup` others.
        profiles: folder for a trace of each system's last run on rank 0, whose kernels are told; None: none.
    """

    job: JobConfig
    systems: tuple[str, ...]
    runs: int
    steps: int
    warmup: int
    seed: int
    profiles: Path | None = None


class Ours:
    """`trainer.parallel.SplitModel`."""

    def __init__(self, job: JobConfig, seed: int, rank: int, device: torch.device, groups: Groups) -> None:
        self.job = job
        self.model = SplitModel(job, seed, rank, device, groups)
        self.optimizer = self.model.optimizer(lambda chunk: build_optimizer(job.optimizer, chunk))
        self._step = 0

    def step(self, batches: Sequence[MicroBatch]) -> Tensor:
        self._step += 1
        self.model.start_step(self._step)
        loss = self.model.accumulate(batches)
        self.model.finish_gradients()
        if self.job.optimizer.clip_norm:
            self.model.clip_grad_norm_(self.job.optimizer.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def close(self) -> None:
        self.model.close()


def run_rank(context: RankContext, order: Order, init_method: str, backend: str) -> list[Row]:
    """All runs; rank 0's rows say what the slowest rank took."""
    place, groups = meet_at(context, order.job, init_method, backend)
    control = Control(context.env, _TIMEOUT)
    rows: list[Row] = []
    for turn in range(order.runs):
        for name in order.systems:
            context.report(f"run {turn + 1} of {order.runs}: {name}")
            build = _builder(name, order, place.rank, place.device, groups)
            is_last = turn == order.runs - 1 and order.profiles is not None
            row, kernels = _measure(name, build, order, place.device, control, profiles=is_last)
            rows.append({"system": name, "run": turn + 1, **row})
            context.report(rows[-1])
            if kernels:
                context.report({"system": name, "run": "profile", **kernels})
    dist.destroy_process_group()
    return rows


def _builder(name: str, order: Order, rank: int, device: torch.device, groups: Groups) -> Callable[[], System]:
    if name == "fsdp2":
        return lambda: Fsdp2(order.job, order.seed, device)
    return lambda: Ours(order.job, order.seed, rank, device, groups)


def _measure(
    name: str, build: Callable[[], System], order: Order, device: torch.device, control: Control, *, profiles: bool
) -> tuple[Row, Row]:
    """What a run took, and with `profiles` what ran in it on rank 0."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    each, losses, kernels = _run(name, build(), order, device, control, profiles=profiles)
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    mean_s = sum(each) / len(each)
    [slowest], [most] = control.average([mean_s], 3), control.average([float(memory)], 3)
    row = {
        "step_ms": slowest * 1e3,
        "each_ms": [seconds * 1e3 for seconds in each],
        "memory_gib": most / 2**30,
        "losses": _mean_losses(losses, order.job, control),
    }
    return row, kernels


def _run(
    name: str, system: System, order: Order, device: torch.device, control: Control, *, profiles: bool
) -> tuple[list[float], list[float], Row]:
    """Seconds of each timed step, the losses before them, and the profile."""
    batches = _batches(order.job, order.seed, device)
    losses = [float(system.step(batches)) for _ in range(order.warmup)]
    each = StepTimer(device, control).measure(lambda _: system.step(batches), order.steps).seconds
    kernels = _profile(name, system, batches, order) if profiles else {}
    system.close()
    return each, losses, kernels


def _profile(name: str, system: System, batches: Sequence[MicroBatch], order: Order) -> Row:
    """Every rank takes the steps; rank 0 tells."""
    is_first = dist.get_rank() == 0
    trace = order.profiles / f"{name}.trace.json.gz" if is_first and order.profiles is not None else None
    kernels = mfu_profile.profile(lambda: system.step(batches), PROFILED, trace)
    if not is_first:
        return {}
    return {
        "kinds": mfu_profile.shares(kernels, PROFILED),
        "most_time": mfu_profile.most_time(kernels, PROFILED, _NAMED),
    }


def _mean_losses(losses: list[float], job: JobConfig, control: Control) -> list[float]:
    """Over data-parallel ranks, of the ranks that have a loss: the last stage's."""
    layout, each = job.parallel.layout, control.gather(losses)
    last = [each[layout.rank(pp=layout.pp - 1, dp=dp)] for dp in range(layout.dp)]
    return [sum(values) / len(values) for values in zip(*last, strict=True)]


def _batches(job: JobConfig, seed: int, device: torch.device) -> list[MicroBatch]:
    """The same tokens for every system: what they are does not matter to the time."""
    layout = job.parallel.layout
    dp = layout.coordinates(dist.get_rank()).dp
    generator = torch.Generator().manual_seed(seed)
    shape = job.batch.global_size, job.model.seq_len + 1
    tokens = torch.randint(job.model.vocab_size, shape, generator=generator)
    own = tokens.chunk(layout.dp)[dp].to(device)
    return [(part[:, :-1], part[:, 1:]) for part in torch.split(own, job.batch.micro_size)]

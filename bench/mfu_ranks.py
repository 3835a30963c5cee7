"""The ranks of `bench.mfu`: systems take turns, each built anew, checked by its losses, then timed.

A run of a system is its warm-up and `steps` steps with one synchronisation at each end. Left out: what the figures mean
(`bench.mfu_rows`).
"""

from __future__ import annotations

import gc
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import mfu_profile
from bench.control import Control
from bench.mfu_systems import Entry, System
from bench.overlap_steps import StepTimer
from netlayer.config import JobConfig
from netlayer.rank import RankContext
from trainer.loop import Place
from trainer.parallel import MicroBatch
from trainer.worker import meet_at

Row = dict[str, Any]
_TIMEOUT = timedelta(minutes=10)
PROFILED = 3
"""Steps of a profile."""
_NAMED = 40


@dataclass(frozen=True)
class Order:
    """What all ranks of some processes do.

    Args:
        work: the number of a run, from 1, and whose it is, in this order; their layouts are the same.
        steps: timed in a run, after `warmup` others.
        last_run: its number.
        profiles: folder for a trace of each system's last run on rank 0, whose kernels are told; None: none.
    """

    work: tuple[tuple[int, Entry], ...]
    steps: int
    warmup: int
    seed: int
    last_run: int
    profiles: Path | None = None


def run_rank(context: RankContext, order: Order, init_method: str, backend: str) -> list[Row]:
    """All of the work; rank 0's rows say what the slowest rank took."""
    place, groups = meet_at(context, order.work[0][1].job, init_method, backend)
    control = Control(context.env, _TIMEOUT)
    rows: list[Row] = []
    for run, entry in order.work:
        context.report(f"run {run} of {order.last_run}: {entry.name}")
        profiles = run == order.last_run and order.profiles is not None
        row, kernels = _measure(entry, order, place, groups, control, profiles=profiles)
        rows.append({"system": entry.name, "run": run, "change": entry.change, **row})
        context.report(rows[-1])
        if kernels:
            context.report({"system": entry.name, "run": "profile", **kernels})
    dist.destroy_process_group()
    return rows


def _measure(
    entry: Entry, order: Order, place: Place, groups: Any, control: Control, *, profiles: bool
) -> tuple[Row, Row]:
    """What a run took, and with `profiles` what ran in it on rank 0."""
    device = place.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    system = entry.build(order.seed, place.rank, device, groups)
    each, losses, kernels = _run(entry, system, order, device, control, profiles=profiles)
    del system
    if entry.job.model.compile:
        # Systems have blocks in common: the compiler would count their variants together, and at its limit give up.
        torch.compiler.reset()
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
        "losses": _mean_losses(losses, entry.job, control),
    }
    return row, kernels


def _run(
    entry: Entry, system: System, order: Order, device: torch.device, control: Control, *, profiles: bool
) -> tuple[list[float], list[float], Row]:
    """Seconds of each timed step, the losses before them, and the profile."""
    batches = _batches(entry.job, order.seed, device)
    losses = [float(system.step(batches)) for _ in range(order.warmup)]
    each = StepTimer(device, control).measure(lambda _: system.step(batches), order.steps).seconds
    kernels = _profile(entry.name, system, batches, order) if profiles else {}
    system.close()
    return each, losses, kernels


def _profile(name: str, system: System, batches: Sequence[MicroBatch], order: Order) -> Row:
    """Every rank takes the steps; rank 0 tells."""
    is_first = dist.get_rank() == 0
    file = f"{re.sub(r'[^A-Za-z0-9.=]+', '_', name)}.trace.json.gz"
    trace = order.profiles / file if is_first and order.profiles is not None else None
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

"""The ranks of `bench.mfu`: systems take turns, each built anew, checked by its losses, then timed.

A run of a system is its warm-up and `steps` steps with one synchronisation at each end. What is measured is reported at
once, so that it is kept whatever comes after it. Not covered: what the figures mean (`bench.mfu.rows`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend

from bench.backends import Control
from bench.mfu import profile as mfu_profile
from bench.mfu.rows import Begun, MfuProfile, MfuRun
from bench.mfu.systems import Entry, Ours, System
from bench.overlap.steps import StepTimer
from netlayer.config.tree import JobConfig
from netlayer.launch.rank import RankContext
from trainer.data.batches import cut_windows, own_chunks, split_windows
from trainer.loop import RankInfo
from trainer.ops.attention import FULL_ORDER
from trainer.parallel import MicroBatch
from trainer.worker import init_process_groups

_TIMEOUT = timedelta(minutes=10)
PROFILED = 3
"""Steps of a profile."""
_NAMED = 40


@dataclass(frozen=True)
class Order:
    """Order to all ranks of one set of processes.

    Args:
        work: the number of a run, from 1, and whose it is, in this order; their layouts are the same.
        steps: timed in a run, after `warmup` others.
        last_run: its number.
        limit_s: a turn that takes longer hangs: the rank ends itself.
        end_s: no turn begins that would not end before this moment of `time.monotonic`; infinity: all do.
        longest_s: what a turn took before.
        prefers_flash: attention by flash where ours would choose another kernel.
        profiles: folder for a trace of each system's last run on rank 0, whose kernels are reported; None: none.
    """

    work: tuple[tuple[int, Entry], ...]
    steps: int
    warmup: int
    seed: int
    last_run: int
    limit_s: float
    end_s: float
    longest_s: float = 0.0
    prefers_flash: bool = False
    profiles: Path | None = None


def run_rank(context: RankContext, order: Order, init_method: str, backend: str) -> None:
    """Do all of the work, as far as there is time for it; rank 0's rows have the times of the slowest rank."""
    with _at_most(order.limit_s):
        place, groups = init_process_groups(context, order.work[0][1].job, init_method, backend)
        control = Control(context.env, _TIMEOUT)
    if order.prefers_flash:
        _prefer_flash()
    longest_s, free_gib = order.longest_s, _free_gib(place.device)
    for run, entry in order.work:
        begin_s = time.monotonic()
        [left_s] = control.average([order.end_s - begin_s - longest_s], 0)  # rank 0 says it for all
        if left_s < 0:
            break
        context.report(Begun(run, entry.name))
        with _at_most(order.limit_s):
            left_gib = None if free_gib is None else free_gib - (_free_gib(place.device) or 0.0)
        _take_turn(context, run, entry, order, place, groups, control, left_gib)
        longest_s = max(longest_s, time.monotonic() - begin_s)
    dist.destroy_process_group()


def _take_turn(
    context: RankContext,
    run: int,
    entry: Entry,
    order: Order,
    place: RankInfo,
    groups: Any,
    control: Control,
    left_gib: float | None,
) -> None:
    """Build, measure, report, and give back all memory."""
    device = place.device
    system = entry.build(order.seed, place.rank, device, groups)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    batches = make_batches(entry.job, order.seed, device)
    context.report(_measure(run, entry, system, batches, order, left_gib, device, control))
    if run == order.last_run and order.profiles is not None:
        context.report(_profile(entry.name, system, batches, order))
    system.close()
    del system, batches
    if entry.job.model.compile:
        # Systems have blocks in common: the compiler would count their variants together, and at its limit give up.
        torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _measure(
    run: int,
    entry: Entry,
    system: System,
    batches: Sequence[MicroBatch],
    order: Order,
    left_gib: float | None,
    device: torch.device,
    control: Control,
) -> MfuRun:
    """Measure one run: the losses of its warm-up steps, then the times of its steps."""
    losses = [float(system.step(batches)) for _ in range(order.warmup)]
    each = StepTimer(device, control).measure(lambda _: system.step(batches), order.steps).seconds
    is_cuda = device.type == "cuda"
    peak_gib = torch.cuda.max_memory_allocated(device) / 2**30 if is_cuda else 0.0
    slowest_s, most_gib = control.average([sum(each) / len(each), peak_gib], 3)
    ours = system.model if isinstance(system, Ours) else None
    return MfuRun(
        system=entry.name,
        run=run,
        change=entry.change,
        left_gib=left_gib,
        step_ms=slowest_s * 1e3,
        each_ms=[seconds * 1e3 for seconds in each],
        memory_gib=most_gib if is_cuda else None,  # what is resident on a CPU is of all systems in turn, of no one
        losses=_mean_losses(losses, entry.job, control),
        in_windows=None if ours is None else ours.has_windows,
        by_peers=None if ours is None else ours.has_peer_reduce,
    )


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """A rank that takes longer says in its log where it is, and ends: no exception reaches one inside a library."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _prefer_flash() -> None:
    """Prefer flash attention in all systems: ours and its peers share one attention function."""
    FULL_ORDER.sort(key=lambda kernel: kernel != SDPBackend.FLASH_ATTENTION)


def _free_gib(device: torch.device) -> float | None:
    """Return what the card has free: communicators and memory that peers write to are not in torch's own count."""
    return torch.cuda.mem_get_info(device)[0] / 2**30 if device.type == "cuda" else None


def _profile(name: str, system: System, batches: Sequence[MicroBatch], order: Order) -> MfuProfile:
    """Every rank takes the steps; rank 0 tells."""
    is_first = dist.get_rank() == 0
    file = f"{re.sub(r'[^A-Za-z0-9.=]+', '_', name)}.trace.json.gz"
    trace = order.profiles / file if is_first and order.profiles is not None else None
    launch_ms = mfu_profile.launch_ms(lambda: system.step(batches), PROFILED)
    kernels = mfu_profile.profile(lambda: system.step(batches), PROFILED, trace)
    kinds = mfu_profile.shares(kernels, PROFILED)
    return MfuProfile(name, launch_ms, kinds, mfu_profile.most_time(kernels, PROFILED, _NAMED))


def _mean_losses(losses: list[float], job: JobConfig, control: Control) -> list[float]:
    """Over data- and context-parallel ranks, of those that have a loss: the last stage's."""
    layout, each = job.parallel.layout, control.gather(losses)
    first = layout.rank(pp=layout.pp - 1)
    # Of each tensor-parallel group of the last stage the first has the loss.
    last = each[first : first + layout.tp * layout.gradient_ranks : layout.tp]
    return [sum(values) / len(values) for values in zip(*last, strict=True)]


def make_batches(job: JobConfig, seed: int, device: torch.device) -> list[MicroBatch]:
    """The same tokens for every system: what they are does not matter to the time."""
    layout = job.parallel.layout
    place = layout.coordinates(dist.get_rank())
    generator = torch.Generator().manual_seed(seed)
    shape = job.batch.global_batch_size, job.model.seq_len + 1
    tokens = torch.randint(job.model.vocab_size, shape, generator=generator)
    chunks = own_chunks(job.model.seq_len, place.cp, layout.cp)
    own_rows = tokens.chunk(layout.data_ranks)[layout.data_rank(place)].numpy()
    own = torch.from_numpy(cut_windows(own_rows, chunks)).to(device)
    return [split_windows(part, chunks) for part in torch.split(own, job.batch.micro_batch_size)]

"""The ranks of `bench.data_idle`: systems take turns under one model, and a late resume is timed at the end."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

from bench.data_idle.rows import DTYPE, Backend, IdleRow, Order, ResumeRow
from bench.data_idle.systems import OPENERS
from netlayer.launch.rank import RankContext
from trainer.checkpoint.meta import Meta
from trainer.data.mixture import Mixture, prepare_mixture
from trainer.feed import Feed, SampleFeed
from trainer.loop import Launched, RankInfo, Trainer
from trainer.parallel import Batches, ParallelModel
from trainer.worker import init_process_groups


def run_rank(context: RankContext, order: Order, init_method: str, backend: Backend) -> None:
    """Let the systems take turns under one model; rank 0 reports the rows."""
    place, groups = init_process_groups(context, order.job, init_method, backend)
    mixture = prepare_mixture(order.job)
    trainer = Trainer(order.job, mixture, order.seed, place, groups)
    trainer.open_feed = lambda: None  # type: ignore[method-assign]  # each turn opens its own
    step = 0
    for run in range(1, order.runs + 1):
        # Another one begins each time: what a turn leaves behind (caches, clocks) hits all alike.
        first = (run - 1) % len(order.systems)
        for name in (*order.systems[first:], *order.systems[:first]):
            row = _take_turn(name, run, step, order, mixture, trainer)
            step += order.warmup + order.steps
            if context.env.rank == 0:
                context.report(row)
    trainer.model.wait_parameters()
    trainer.close()
    if order.resume_step:
        resumed = _resume(order, trainer.model, place)
        if context.env.rank == 0:
            context.report(resumed)
    if dist.is_initialized():
        dist.destroy_process_group()


def _take_turn(name: str, run: int, step: int, order: Order, mixture: Mixture, trainer: Trainer) -> IdleRow:
    """Train some steps on the batches of one system; return what they cost, of the rank that waits longest."""
    begin_s = time.perf_counter()
    inner = OPENERS[name](order, mixture, trainer.model)
    inner.open(order.seed, 0, None)
    feed = _TimedFeed(inner, step, trainer.place.device)
    trainer.feed = feed
    rows: list[dict[str, Any]] = []
    under_way: list[Launched] = []
    usage, begin, first_batch_s, before = _Usage(), 0.0, 0.0, 0
    for number in range(1, order.warmup + order.steps + 1):
        if number == order.warmup + 1:
            usage.begin()
            before = _counted_bytes(inner)
            begin = time.perf_counter()
        # As in the training's loop: a step is launched before the numbers of the one before are read.
        under_way.append(trainer.launch(step + number))
        if number == 1:
            first_batch_s = feed.first_s - begin_s
        if len(under_way) > 1:
            rows.append(trainer.read(under_way.pop(0))[0])
    rows.append(trainer.read(under_way.pop())[0])
    window_s = time.perf_counter() - begin
    cpu_s, num_bytes = usage.end()
    if name == "no_prefetch":
        num_bytes = _counted_bytes(inner) - before
    trainer.exclude_time()
    feed.close()
    own = {
        "step_ms": [row["step_ms"] for row in rows[order.warmup :]],
        "idle_ms": feed.idle_ms()[order.warmup :],
        "wait_ms": feed.waits_ms()[order.warmup :],
        "cpu_s": cpu_s,
        "bytes": num_bytes,
        "first_batch_s": first_batch_s,
        "window_s": window_s,
    }
    ranks = _gather(own)
    worst = max(ranks, key=lambda rank: sum(rank["idle_ms"]))
    job = order.job
    machine_bytes = order.steps * job.batch.global_batch_size * (job.model.seq_len + 1) * np.dtype(DTYPE).itemsize
    return IdleRow(
        system=name,
        run=run,
        step_ms=statistics.median(worst["step_ms"]),
        idle_ms=statistics.mean(worst["idle_ms"]),
        idle_share=sum(worst["idle_ms"]) / sum(worst["step_ms"]),
        wait_ms=max(statistics.mean(rank["wait_ms"]) for rank in ranks),
        cores=sum(rank["cpu_s"] for rank in ranks) / worst["window_s"] / len(ranks),
        copies=None if name == "megatron" else sum(rank["bytes"] for rank in ranks) / machine_bytes,
        first_batch_s=max(rank["first_batch_s"] for rank in ranks),
    )


def _resume(order: Order, model: ParallelModel, place: RankInfo) -> ResumeRow:
    """Open the data of a run that resumes late, as its ranks do, and wait for its first batch."""
    job = order.resume_job
    mixture = prepare_mixture(job)
    data = {"num_samples": order.resume_step * job.batch.global_batch_size}
    meta = Meta(Path(), order.resume_step, order.seed, 1, 1, {}, {}, {}, data=data)
    _gather(None)  # all begin at once
    begin_s = time.perf_counter()
    feed = SampleFeed(job, mixture, model)
    feed.open(order.seed, order.resume_step, meta)
    feed.training(order.resume_step + 1)
    if place.device.type == "cuda":
        torch.cuda.synchronize(place.device)
    first_batch_s = max(_gather(time.perf_counter() - begin_s))
    feed.close()
    return ResumeRow(order.resume_step, mixture.facts.train_tokens, first_batch_s)


class _TimedFeed:
    """A feed whose steps are counted from another one, with the time that each of its batches takes."""

    def __init__(self, inner: Feed, step: int, device: torch.device) -> None:
        self._inner, self._step, self._is_cuda = inner, step, device.type == "cuda"
        # By step: what it asks for ahead, at the end of the one before, and what it begins with.
        self._events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[]]
        self.wait_ms: list[float] = [0.0]
        self.first_s = 0.0

    def open(self, seed: int, steps_done: int, resumed: Meta | None) -> None:
        """Do nothing: it is open."""

    def training(self, step: int) -> Batches:
        with self._timed():
            batches = self._inner.training(step - self._step)
        self.first_s = self.first_s or time.perf_counter()
        self._events.append([])
        self.wait_ms.append(0.0)
        return batches

    def next_counts(self, step: int) -> torch.Tensor | None:
        with self._timed():
            return self._inner.next_counts(step - self._step)

    def note_counts(self, counts_2: torch.Tensor | None) -> None:
        self._inner.note_counts(counts_2)

    @property
    def waits(self) -> bool:
        return self._inner.waits

    def waits_ms(self) -> list[float]:
        """Return the milliseconds of each step for which the host waited."""
        return self.wait_ms[: len(self._events) - 1]

    def idle_ms(self) -> list[float]:
        """Return the time of each step in which the device, or on a CPU the host, had nothing but its batch to do."""
        if not self._is_cuda:
            return self.waits_ms()
        torch.cuda.synchronize()
        return [sum(begin.elapsed_time(end) for begin, end in pairs) for pairs in self._events[:-1]]

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        events, begin_s = self._pair(), time.perf_counter()
        if events is not None:
            events[0].record()
        yield
        if events is not None:
            events[1].record()
        self.wait_ms[-1] += (time.perf_counter() - begin_s) * 1e3

    def evaluation(self, global_batches: int) -> Iterator[tuple[str, Batches]]:
        return self._inner.evaluation(global_batches)

    def state(self, steps_done: int) -> None:
        """Return nothing: no checkpoint is written."""

    def close(self) -> None:
        self._inner.close()

    def _pair(self) -> tuple[torch.cuda.Event, torch.cuda.Event] | None:
        if not self._is_cuda:
            return None
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._events[-1].append(pair)
        return pair


class _Usage:
    """CPU seconds, and bytes read from files, of this rank's loader processes; the seconds also of its copying threads.

    A rank without such a process reads in its main thread, where its waits say what that costs.
    """

    def begin(self) -> None:
        self._children = psutil.Process().children(recursive=True)
        self._before = self._read()

    def end(self) -> tuple[float, int]:
        after = self._read()
        return after[0] - self._before[0], after[1] - self._before[1]

    def _read(self) -> tuple[float, int]:
        seconds = sum(sum(process.cpu_times()[:2]) for process in self._children)
        copying = {
            thread.native_id
            for thread in threading.enumerate()
            if thread.name == "batches" or "pin_memory" in thread.name
        }
        seconds += sum(
            thread.user_time + thread.system_time for thread in psutil.Process().threads() if thread.id in copying
        )
        return seconds, sum(_bytes_read(process.pid) for process in self._children)


def _bytes_read(pid: int) -> int:
    """Return the bytes that a process has had from read calls: of files, for sockets are received from."""
    for line in Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines():
        if line.startswith("rchar"):
            return int(line.split()[1])
    return 0


def _counted_bytes(feed: Feed) -> int:
    """Return the bytes that our feed has counted itself; 0 of another one."""
    return feed.bytes_read if isinstance(feed, SampleFeed) else 0


def _gather(value: Any) -> list[Any]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values

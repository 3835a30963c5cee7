"""One rank's training loop: a step, an evaluation, and what is noted of each.

A step launches its all-gathers before it loads data, reduces gradients under the last backward pass, and meets the host
once, at its end, to read the losses of all ranks. Left out: tensor and pipeline parallelism, checkpoints, recovery.

Shapes: B sequences, T positions, N samples of this rank, R ranks.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from collectives.recorder import Recorder
from collectives.sharded import ShardedDataParallel
from netlayer.config import EvaluationConfig, JobConfig
from netlayer.errors import CheckFailed
from trainer.data.batches import even_starts, micro_batches, rank_slice, sample_starts
from trainer.data.prepare import Corpus
from trainer.flops import peak_flops, step_flops, utilisation
from trainer.model import build_model
from trainer.optim import build_optimizer, learning_rate, set_learning_rate

logger = logging.getLogger(__name__)

Row = dict[str, Any]
COLLECT_EVERY_STEPS = 50


@dataclass(frozen=True)
class Place:
    """Which rank this is, of how many, and the device that it computes on."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def device_name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        threads = torch.get_num_threads()
        return f"CPU, {threads} thread{'s' * (threads > 1)}"


class Trainer:
    """The model, its optimiser and its data on one rank. Every rank calls the same methods in the same order.

    Args:
        job: resolved configuration; tp = pp = 1.
        corpus: tokens, the same on every rank.
        seed: of the initial parameters and of the samples.
        place: this rank. A process group of all ranks exists already, unless there is one rank alone.
    """

    def __init__(self, job: JobConfig, corpus: Corpus, seed: int, place: Place) -> None:
        self.job, self.seed, self.place = job, seed, place
        self.slice = rank_slice(job.batch.global_size, job.batch.micro_size, place.rank, place.world_size)
        self.train_tokens, self.validation_tokens = corpus.train_tokens(), corpus.validation_tokens()
        model = build_model(job.model, seed, place.device)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.recorder = Recorder(place.device)
        self.model = ShardedDataParallel(
            model,
            bucket_bytes=round(job.overlap.bucket_mib * 2**20),
            prefetch=job.overlap.prefetch,
            overlap=job.overlap.dp,
            param_dtype=getattr(torch, job.model.dtype),
            recorder=self.recorder,
        )
        self.optimizer = build_optimizer(job.optimizer, self.model)
        self.flops = step_flops(job.model, job.batch.global_size)
        self.peak = peak_flops(place.device_name, job.model.dtype)

    def step(self, step: int) -> Row:
        """One optimiser step, counted from 1; what `_row` says of it.

        Raises:
            CheckFailed: the loss of a rank, or the gradient, is not finite.
        """
        start = time.perf_counter()
        self.recorder.begin_step(step)
        self.model.start_step()
        lr = learning_rate(self.job.optimizer, step)
        set_learning_rate(self.optimizer, lr)
        loss = self._accumulate_gradients(step)
        grad_norm = self.model.clip_grad_norm_(self.job.optimizer.clip_norm or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad()
        losses, norm = self._losses_of_ranks(loss), float(grad_norm)
        comm = self.recorder.end_step()
        seconds = time.perf_counter() - start
        _check_finite(step, losses, norm)
        return self._row(step, sum(losses) / len(losses), lr, norm, seconds, comm.exposed_comm)

    @torch.no_grad()
    def evaluate(self, global_batches: int) -> float:
        """Mean loss of `global_batches * global_size` windows spread evenly over the held-out text: always the same."""
        share = self.slice.count * global_batches
        count = share * self.place.world_size
        starts = even_starts(len(self.validation_tokens), self.job.model.seq_len, count)
        total = torch.zeros((), device=self.place.device)
        own = starts[self.place.rank * share : (self.place.rank + 1) * share]
        for tokens_BT, targets_BT in self._micro_batches(self.validation_tokens, own):
            total += self.model(tokens_BT, targets_BT)
        losses = self._losses_of_ranks(total / (share // self.slice.micro_size))
        return sum(losses) / len(losses)

    def _accumulate_gradients(self, step: int) -> Tensor:
        """Forward and backward of this rank's share, a micro-batch at a time; the mean loss, still on the device."""
        samples = range(self.slice.first, self.slice.first + self.slice.count)
        starts = sample_starts(len(self.train_tokens), self.job.model.seq_len, self.seed, step, samples)
        total = torch.zeros((), device=self.place.device)
        last = self.slice.num_micro_batches - 1
        for index, (tokens_BT, targets_BT) in enumerate(self._micro_batches(self.train_tokens, starts)):
            with contextlib.nullcontext() if index == last else self.model.no_sync():
                loss = self.model(tokens_BT, targets_BT) / self.slice.num_micro_batches
                loss.backward()
            total += loss.detach()
        return total

    def _micro_batches(
        self, tokens: NDArray[np.integer], starts_N: NDArray[np.int64]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        return micro_batches(tokens, starts_N, self.job.model.seq_len, self.slice.micro_size, self.place.device)

    def _losses_of_ranks(self, loss: Tensor) -> list[float]:
        """The loss of every rank, in order of rank: their mean is the same on all, to the bit. Waits for the device."""
        losses_R = torch.zeros(self.place.world_size, device=self.place.device)
        losses_R[self.place.rank] = loss
        self.model.reduce_lane.all_reduce(losses_R)
        losses: list[float] = losses_R.tolist()
        return losses

    def _row(self, step: int, loss: float, lr: float, grad_norm: float, seconds: float, exposed_comm: float) -> Row:
        """`step_ms` is wall time on this rank; `memory_gib` the peak on a GPU, what is resident on a CPU."""
        ranks = self.place.world_size
        return {
            "step": step,
            "loss": loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "step_ms": seconds * 1e3,
            "tokens_per_s": self.job.batch.global_size * self.job.model.seq_len / seconds,
            "exposed_comm": exposed_comm,
            "memory_gib": _memory_bytes(self.place.device) / 2**30,
            "mfu_full": utilisation(self.flops.full, seconds, self.peak, ranks),
            "mfu_causal": utilisation(self.flops.causal, seconds, self.peak, ranks),
        }


def run(
    trainer: Trainer, evaluation: EvaluationConfig, on_step: Callable[[Row], None], on_evaluation: Callable[[Row], None]
) -> None:
    """Train to the end of the job; each row is handed over as soon as it is known."""

    def evaluate(step: int) -> None:
        on_evaluation({"step": step, "validation_loss": trainer.evaluate(evaluation.global_batches)})

    steps = trainer.job.optimizer.steps
    with _collected_by_hand() as collect:
        evaluate(0)
        for step in range(1, steps + 1):
            on_step(trainer.step(step))
            if step % evaluation.every_steps == 0 or step == steps:
                evaluate(step)
            if step % COLLECT_EVERY_STEPS == 0:
                collect()
    trainer.model.wait_parameters()  # the last step has launched gathers: let none be under way when ranks part


@contextlib.contextmanager
def _collected_by_hand() -> Iterator[Callable[[], object]]:
    """Garbage is collected where every rank does so at once, not when a rank's own counters say (MegaScale 6.3)."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield gc.collect
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def _check_finite(step: int, losses: list[float], grad_norm: float) -> None:
    lost = {rank: loss for rank, loss in enumerate(losses) if not math.isfinite(loss)}
    if lost:
        where = ", ".join(f"{loss} on rank {rank}" for rank, loss in lost.items())
        raise CheckFailed(f"step {step}: the loss is {where}; lower job.optimizer.lr, or look at this step's data")
    if not math.isfinite(grad_norm):
        raise CheckFailed(f"step {step}: the gradient norm is {grad_norm}; lower job.optimizer.lr")


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    resident: int = psutil.Process().memory_info().rss
    return resident

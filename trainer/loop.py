"""One rank's training loop: a step, an evaluation, and what is noted of each.

A step launches its all-gathers before it loads data, reduces gradients under the last backward pass, and meets the host
once, at its end, to read the losses of all ranks. Left out: how the model is spread (`trainer.parallel`), recovery.

Shapes: B sequences, T positions, N samples of this rank, R data-parallel ranks.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from collectives.recorder import Recorder
from netlayer.config import EvaluationConfig, JobConfig
from netlayer.errors import CheckFailed
from netlayer.rendezvous import Groups
from trainer import checkpoint
from trainer.checkpoint_meta import Meta
from trainer.data.batches import Slice, even_starts, micro_batches, rank_slice, sample_starts
from trainer.data.prepare import Corpus
from trainer.flops import peak_flops, step_flops, utilisation
from trainer.linears import padded
from trainer.memory import num_parameters
from trainer.optim import batch_size, build_optimizer, learning_rate
from trainer.parallel import MicroBatch, SplitModel

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
        job: resolved configuration.
        corpus: tokens, the same on every rank.
        seed: of the initial parameters and of the samples.
        place: this rank.
        groups: of `open_world`; None: one rank alone.
    """

    def __init__(self, job: JobConfig, corpus: Corpus, seed: int, place: Place, groups: Groups | None = None) -> None:
        self.job, self.seed, self.place = job, seed, place
        self.train_tokens, self.validation_tokens = corpus.train_tokens(), corpus.validation_tokens()
        self.num_parameters = num_parameters(job.model)
        self.recorder = Recorder(place.device)
        self.model = SplitModel(job, seed, place.rank, place.device, groups, self.recorder)
        self.dp = self.model.place.dp
        if place.rank == 0 and job.model.vocab_size % job.parallel.tp:
            rows = padded(job.model.vocab_size, job.parallel.tp)
            logger.info("the vocabulary of %d is padded to %d, a multiple of tp", job.model.vocab_size, rows)
        self.optimizer = self.model.optimizer(lambda chunk: build_optimizer(job.optimizer, chunk))
        self.steps_done = 0
        self.peak = peak_flops(place.device_name, job.model.dtype)

    def resume(self, meta: Meta) -> None:
        """Go on from a checkpoint: the next step is the one behind it, with the samples that it would have had.

        Raises:
            ConfigError: it is of another model, or damaged.
        """
        checkpoint.load(meta, self.model, self.optimizer)
        self.seed, self.steps_done = meta.seed, meta.step

    def save(self, folder: Path) -> None:
        """Write a checkpoint of the steps taken so far; every rank calls it."""
        path = checkpoint.save(self.model, self.optimizer, self.steps_done, self.seed, folder)
        logger.info("checkpoint: %s", path)

    def step(self, step: int) -> Row:
        """One optimiser step, counted from 1; what `_row` says of it.

        Raises:
            CheckFailed: the loss of a rank, or the gradient, is not finite.
        """
        start = time.perf_counter()
        self.recorder.begin_step(step)
        self.model.start_step(step)
        lr = learning_rate(self.job.optimizer, step)
        self.optimizer.set_learning_rate(lr)
        loss = self.model.accumulate(self._training_batches(step))
        self.model.finish_gradients()
        grad_norm = self.model.clip_grad_norm_(self.job.optimizer.clip_norm or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad()
        losses, norm = self._losses_of_ranks(loss), float(grad_norm)
        comm = self.recorder.end_step()
        seconds = time.perf_counter() - start
        _check_finite(step, self._by_rank(losses), norm)
        self.steps_done = step
        return self._row(step, sum(losses) / len(losses), lr, norm, seconds, comm.exposed_comm)

    def evaluate(self, global_batches: int) -> float:
        """Mean loss of `global_batches * global_size` windows spread evenly over the held-out text: always the same."""
        share = self._slice(self.job.batch.global_size).count * global_batches
        starts = even_starts(len(self.validation_tokens), self.job.model.seq_len, share * self.job.parallel.dp)
        own = starts[self.dp * share : (self.dp + 1) * share]
        losses = self._losses_of_ranks(self.model.evaluate(self._micro_batches(self.validation_tokens, own)))
        return sum(losses) / len(losses)

    def _training_batches(self, step: int) -> list[MicroBatch]:
        own = self._slice(batch_size(self.job.batch, step))
        samples = range(own.first, own.first + own.count)
        starts = sample_starts(len(self.train_tokens), self.job.model.seq_len, self.seed, step, samples)
        return self._micro_batches(self.train_tokens, starts)

    def _slice(self, sequences: int) -> Slice:
        return rank_slice(sequences, self.job.batch.micro_size, self.dp, self.job.parallel.dp)

    def _micro_batches(self, tokens: NDArray[np.integer], starts_N: NDArray[np.int64]) -> list[MicroBatch]:
        sizes = self.job.model.seq_len, self.job.batch.micro_size
        return list(micro_batches(tokens, starts_N, *sizes, self.place.device))

    def _losses_of_ranks(self, loss: Tensor) -> list[float]:
        """The loss of every data-parallel rank, in order: their mean is the same on all, to the bit.

        Waits for the device.
        """
        losses_R = torch.zeros(self.job.parallel.dp, dtype=loss.dtype, device=self.place.device)
        if self.model.is_last and self.model.place.tp == 0:
            losses_R[self.dp] = loss
        self.model.world.all_reduce(losses_R)
        losses: list[float] = losses_R.tolist()
        return losses

    def _by_rank(self, losses: list[float]) -> dict[int, float]:
        """Each loss by the rank that computed it."""
        layout = self.job.parallel.layout
        return {layout.rank(pp=layout.pp - 1, dp=dp): loss for dp, loss in enumerate(losses)}

    def _row(self, step: int, loss: float, lr: float, grad_norm: float, seconds: float, exposed_comm: float) -> Row:
        """`step_ms` is wall time on this rank; `memory_gib` the peak on a GPU, what is resident on a CPU."""
        ranks, sequences = self.place.world_size, batch_size(self.job.batch, step)
        flops = step_flops(self.job.model, sequences)
        return {
            "step": step,
            "loss": loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "step_ms": seconds * 1e3,
            "tokens_per_s": sequences * self.job.model.seq_len / seconds,
            "exposed_comm": exposed_comm,
            "memory_gib": _memory_bytes(self.place.device) / 2**30,
            "mfu_full": utilisation(flops.full, seconds, self.peak, ranks),
            "mfu_causal": utilisation(flops.causal, seconds, self.peak, ranks),
        }


def run(
    trainer: Trainer,
    evaluation: EvaluationConfig,
    on_step: Callable[[Row], None],
    on_evaluation: Callable[[Row], None],
    checkpoints: Path | None = None,
) -> None:
    """Train to the end of the job; each row is handed over as soon as it is known.

    Args:
        checkpoints: folder for those that the job asks for.
    """
    save_every = trainer.job.checkpoint.every_steps if checkpoints else 0

    def evaluate(step: int) -> None:
        on_evaluation({"step": step, "validation_loss": trainer.evaluate(evaluation.global_batches)})

    steps = trainer.job.optimizer.steps
    with _collected_by_hand() as collect:
        evaluate(trainer.steps_done)
        for step in range(trainer.steps_done + 1, steps + 1):
            on_step(trainer.step(step))
            if checkpoints and save_every and (step % save_every == 0 or step == steps):
                trainer.save(checkpoints)
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


def _check_finite(step: int, losses: dict[int, float], grad_norm: float) -> None:
    lost = {rank: loss for rank, loss in losses.items() if not math.isfinite(loss)}
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

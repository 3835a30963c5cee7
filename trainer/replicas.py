"""Comparison of the data-parallel replicas of a model: a number that differs without an error is a fault of hardware.

Every so many steps (job.watch.compare_replicas_every), with no step under way, two things are compared to the bit:

- the parameters that each replica has gathered, by a sum of their words as integers, which any single flipped bit
  changes: memory, a link or a copy that damages data;
- the loss of one batch that is the same on all replicas, computed once more by each: a unit that computes wrong, again
  and again. It is the forward pass of a micro-batch, on every node at once in place of one step on another node.

What is found must repeat: a single flip that is gone when it is looked for is out of reach, as is one in what a single
rank owns (a reduced gradient, a shard of the optimizer's state), which reaches all replicas alike. Replicas that
compute with different algorithms differ without a fault: losses are compared on GPUs of one name alone, and with
algorithms that are measured at the start they may have to be skipped (job.watch.compare_losses).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from netlayer.errors import CheckFailed
from netlayer.layout import ParallelLayout, describe_ranks
from netlayer.workload.schedule import micro_batches
from trainer.data.batches import cut_windows, own_chunks, split_windows
from trainer.parallel import ParallelModel

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Differences:
    """Ranks that differ from the replicas that are in the majority; `is_known` is False where none are."""

    ranks: tuple[int, ...]
    is_known: bool


class ReplicaCheck:
    """Compares the replicas of a model. Every rank calls `compare` at the same steps.

    Args:
        model: this rank's part.
        seed: of the batch that all replicas compute.
        device_name: of this rank: losses are compared only where all are the same.
        step: after which the model is, which counts as one at which they agree.
    """

    def __init__(self, model: ParallelModel, seed: int, device_name: str, step: int) -> None:
        self._model, self._seed, self._agreed = model, seed, step
        names = model.world.all_gather_text(device_name, "names of devices")
        self.compares_losses = model.job.watch.compare_losses and len(set(names)) == 1

    @torch.no_grad()
    def compare(self, step: int) -> None:
        """Compare, and raise on all ranks alike where replicas differ; the host waits.

        Raises:
            CheckFailed: they do; names the ranks, and the last step after which they agreed.
        """
        model = self._model
        own = [self._parameters(), self._loss(step) if self.compares_losses else 0]
        rows = model.world.all_gather_ints(own, "replicas")
        for name, values in zip(("parameters", "losses of the same batch"), zip(*rows, strict=True), strict=True):
            odd = differences(values, model.layout)
            if odd.ranks:
                raise CheckFailed(_line(step, name, odd, self._agreed, model.layout))
        self._agreed = step

    def _parameters(self) -> int:
        """Sum of the words of all gathered parameters; 0 where each rank keeps its shard alone."""
        self._model.wait_parameters()
        buckets = list(itertools.chain.from_iterable(chunk.buckets for chunk in self._model.chunks))
        if any(bucket.reshards for bucket in buckets):
            return 0
        return sum(digest(bucket.unsharded_N) for bucket in buckets)

    def _loss(self, step: int) -> int:
        """Word of this rank's loss, of its part of sequences, of a batch from the seed: the same on every replica."""
        job = self._model.job
        draw = torch.Generator().manual_seed(self._seed + step)
        shape = (job.batch.micro_batch_size, job.model.seq_len + 1)
        chunks = own_chunks(job.model.seq_len, self._model.place.cp, job.parallel.cp)
        rows = cut_windows(torch.randint(job.model.vocab_size, shape, generator=draw).numpy(), chunks)
        batch = split_windows(torch.from_numpy(rows).to(self._model.device), chunks)
        num = micro_batches(job) if self._model.pipeline is not None else 1
        return digest(self._model.evaluate([batch] * num).reshape(1))


def digest(numbers: Tensor) -> int:
    """Return the sum of the words of a tensor as integers, which any one flipped bit changes."""
    return int(numbers.detach().contiguous().view(_WORDS[numbers.element_size()]).sum(dtype=torch.int64))


def differences(values: Sequence[int], layout: ParallelLayout) -> Differences:
    """Return the ranks whose value differs from that of most replicas of the same part of the model.

    Args:
        values: one a rank.
        layout: which ranks are replicas of each other: those that differ in their part of a batch alone.
    """
    odd: list[int] = []
    unclear: list[int] = []
    stage = layout.tp * layout.cp * layout.data_ranks
    for pp, first in itertools.product(range(layout.pp), range(layout.tp * layout.cp)):
        ranks = range(pp * stage + first, (pp + 1) * stage, layout.tp * layout.cp)
        [(most, num), *others] = Counter(values[rank] for rank in ranks).most_common()
        if num > len(ranks) / 2:
            odd += [rank for rank in ranks if values[rank] != most]
        elif others:
            unclear += ranks
    return Differences(tuple(unclear or odd), not unclear)


def _line(step: int, name: str, odd: Differences, agreed: int, layout: ParallelLayout) -> str:
    if odd.is_known:
        where = ", ".join(f"rank {rank} ({layout.describe([rank])}) has other {name}" for rank in odd.ranks)
    else:
        where = f"{describe_ranks(odd.ranks)} differ in {name}, and none of them are in the majority"
    return f"step {step}: replicas that agreed after step {agreed} differ: {where}"

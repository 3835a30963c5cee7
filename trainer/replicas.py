"""Comparison of the data-parallel replicas of a model: a number that differs without an error is a fault of hardware.

Every so many steps (job.watch.compare_replicas_every), with no step under way, two things are compared to the bit:

- the parameters that each replica has gathered, by a sum of their words as integers, which any single flipped bit
  changes: memory, a link or a copy that damages data;
- the loss of one batch that is the same on all replicas, computed once more by each: a unit that computes wrong, again
  and again. It is the forward pass of a micro-batch, on every node at once in place of one step on another node.

What differs is read and computed once more, and a rank is accused only if it is odd both times: a kernel that adds in
another order from run to run may differ once. Out of reach is a single flip that is gone when it is looked for, and one
in what a single rank owns (a reduced gradient, a shard of the optimizer's state), which reaches all replicas alike.
Replicas that compute with different algorithms differ without a fault: losses are compared on GPUs of one name alone,
and with algorithms that are measured at the start they may have to be skipped (job.watch.compare_losses).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from collectives.sharded.float8 import Float8Bucket
from netlayer.errors import CheckFailed
from netlayer.layout import ParallelLayout, describe_ranks
from netlayer.workload.memory import frees_parameters
from netlayer.workload.schedule import micro_batches
from trainer.data.batches import cut_windows, own_chunks, split_windows
from trainer.parallel import ParallelModel

_SUMMED_AT_ONCE = 2**22  # words: 32 MiB as int64
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Differences:
    """Ranks that differ from the replicas that are in the majority, each time; `is_known` is False where none are."""

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
    def compare(self, step: int) -> str:
        """Compare, and raise on all ranks alike where replicas differ twice in a row; the host waits.

        Returns:
            A line for the user where they differed, and not in the same ranks when it was done once more; else "".

        Raises:
            CheckFailed: they do; names the ranks, and the last step after which they agreed.
        """
        layout, first = self._model.layout, self._read(step)
        doubtful = [name for name, values in first.items() if differences([values], layout).ranks]
        again = self._read(step) if doubtful else {}
        for name in doubtful:
            odd = differences([first[name], again[name]], layout)
            if odd.ranks:
                raise CheckFailed(_line(step, name, odd, self._agreed, layout))
        self._agreed = step
        if not doubtful:
            return ""
        once = "; ".join(f"{describe_ranks(differences([first[name]], layout).ranks)} in {name}" for name in doubtful)
        return f"step {step}: replicas differed once, and not when compared again ({once}): nobody is accused"

    def _read(self, step: int) -> dict[str, tuple[int, ...]]:
        """Return what is compared, a number a rank, by name; the same on all ranks."""
        own = [self._parameters(), self._loss(step) if self.compares_losses else 0]
        columns = zip(*self._model.world.all_gather_ints(own, "replicas"), strict=True)
        return dict(zip(("parameters", "losses of the same batch"), columns, strict=True))

    def _parameters(self) -> int:
        """Sum of the words of all gathered parameters; 0 where each rank keeps its shard alone."""
        self._model.wait_parameters()
        buckets = list(itertools.chain.from_iterable(chunk.buckets for chunk in self._model.chunks))
        if frees_parameters(self._model.job):
            return 0
        scales = [bucket.scales_K for bucket in buckets if isinstance(bucket, Float8Bucket)]
        return sum(digest(values) for values in (*(bucket.gathered_N for bucket in buckets), *scales))

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
    flat = numbers.detach().contiguous().view(_WORDS[numbers.element_size()]).flatten()
    # Part by part: torch widens what it sums first, which is eight times the memory of weights in 8 bits.
    return int(torch.stack([part.sum(dtype=torch.int64) for part in torch.split(flat, _SUMMED_AT_ONCE)]).sum())


def differences(readings: Sequence[Sequence[int]], layout: ParallelLayout) -> Differences:
    """Return the ranks whose value differs from that of most replicas of the same part of the model, in each reading.

    Args:
        readings: one value a rank, each.
        layout: which ranks are replicas of each other: those that differ in their part of a batch alone.
    """
    odd: list[int] = []
    unclear: list[int] = []
    stage = layout.tp * layout.cp * layout.data_ranks
    for pp, first in itertools.product(range(layout.pp), range(layout.tp * layout.cp)):
        ranks = range(pp * stage + first, (pp + 1) * stage, layout.tp * layout.cp)
        each = [_odd([values[rank] for rank in ranks]) for values in readings]
        if None in each and all(indices is None or indices for indices in each):
            unclear += ranks
        elif None not in each:
            odd += [rank for index, rank in enumerate(ranks) if all(index in (indices or ()) for indices in each)]
    return Differences(tuple(sorted(unclear or odd)), not unclear)


def _odd(values: Sequence[int]) -> list[int] | None:
    """Return the indices of values that are not those of the majority; None where there is no majority."""
    most, num = Counter(values).most_common(1)[0]
    return [index for index, value in enumerate(values) if value != most] if num > len(values) / 2 else None


def _line(step: int, name: str, odd: Differences, agreed: int, layout: ParallelLayout) -> str:
    if odd.is_known:
        where = ", ".join(f"rank {rank} ({layout.describe([rank])}) has other {name}" for rank in odd.ranks)
    else:
        where = f"{describe_ranks(odd.ranks)} differ in {name}, and none of them are in the majority"
    return f"step {step}: replicas that agreed after step {agreed} differ: {where}"

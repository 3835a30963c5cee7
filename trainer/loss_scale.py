"""Weight of a batch's loss where some of its targets do not count.

[Note: targets that do not count] A loss is the mean over the targets that count in the whole batch, on all ranks: a
mean of means would weigh a target by who else is in its micro-batch, and losses would depend on the layout. So each
rank's sum is divided by its rows, and multiplied by rows / targets of the batch. Where batches are read ahead the ranks
add these two up beside the notes of the step before (`Feed.next_counts`), so they cost no collective; else one small
all-reduce does, under the forward pass of the first micro-batch: no step begins with a wait for the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from collectives.transport.communicator import Work
from trainer.parallel import ParallelModel


class LossScale:
    """Rows / targets of a batch, made with its micro-batches and known once the ranks have added up."""

    __slots__ = ("_counts_2", "_scale", "_work")

    def __init__(self) -> None:
        self._work: Work | None = None
        self._counts_2: Tensor | None = None
        self._scale: Tensor | None = None

    def take(self, counts_2: Tensor) -> None:
        """Take what the ranks have added up."""
        self._counts_2 = counts_2

    def add_up(self, model: ParallelModel, counts_2: Tensor | None) -> None:
        """Begin to add up now; the call waits for it. Every rank calls this.

        Args:
            counts_2: this rank's targets, and how many of them count, on its device, where it is the one of those with
                the same targets to add them, else zeros; the sum overwrites them. None: it has none to add.
        """
        counts = model.zero().new_zeros(2) if counts_2 is None else counts_2
        self._counts_2, self._work = counts, model.world.start_all_reduce(counts)
        if not model.is_last:
            # It has no loss to scale: what it computes waits for nothing.
            stream = model.world.stream
            with torch.cuda.stream(stream):
                self._work.wait()
            if stream is not None:
                counts.record_stream(stream)  # nobody holds them any more, and the sum may still be under way

    def __call__(self) -> Tensor:
        """Return it, on the device."""
        if self._scale is None:
            assert self._counts_2 is not None
            if self._work is not None:
                self._work.wait()
            self._scale = self._counts_2[0] / self._counts_2[1].clamp(min=1)
        return self._scale


def counting(model: ParallelModel) -> Callable[[int, int], Tensor]:
    """Return what gives `counts_2` of `LossScale`, in memory of the host: zeros but on the rank that has the loss."""
    # Of tensor-parallel ranks, which hold the same targets, the first counts them; each context-parallel one its own.
    counts, dtype, is_cuda = model.is_last and model.place.tp == 0, model.zero().dtype, model.device.type == "cuda"

    def count(number: int, num_targets: int) -> Tensor:
        return torch.tensor([number, num_targets] if counts else [0, 0], dtype=dtype, pin_memory=is_cuda)

    return count

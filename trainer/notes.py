"""The numbers of a step on their way from the device to the host, which reads them while the next step runs.

One all-reduce carries the losses, whether a rank was asked to stop, and what the next step's batch is to be told of all
ranks (`trainer.feed`); one copy into pinned memory brings all of it.
Not covered: what is made of the numbers (`trainer.loop`).

Shapes: D data-parallel ranks, W ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.parallel import ParallelModel


@dataclass(frozen=True)
class Notes:
    """Numbers of a step from all ranks; all but `own_square` are the same on all of them, to the bit: each has all
    others' numbers, in the order of ranks.

    Args:
        losses: of each data-parallel index.
        num_asked: how many ranks had been asked to stop when they launched the step's end.
        num_done, num_failed: how many ranks were through with their stage of a save then, and how many had failed.
        num_lost: on how many ranks the state that is saved is not finite.
        grad_norm: of all gradients, before clipping.
        own_square: this rank's part of its square.
    """

    losses: list[float]
    num_asked: int
    num_done: int
    num_failed: int
    num_lost: int
    grad_norm: float
    own_square: float

    @property
    def loss(self) -> float:
        return sum(self.losses) / len(self.losses)


class NotesInFlight:
    """Notes that the device may still be working on.

    Args:
        model: whose step it was.
        loss: of this data-parallel rank, on the device; zero but on the last stage.
        grad_norm: as `ParallelModel.grad_norm` gave it.
        is_asked: whether this rank was asked to stop.
        save: what `Saver.own_state` gave.
        counts_2: what `Feed.next_counts` gave: it travels with the rest, and attribute `counts_2` is its sum.
    """

    def __init__(
        self,
        model: ParallelModel,
        loss: Tensor,
        grad_norm: Tensor,
        is_asked: bool,
        save: tuple[float, float, Tensor | None] = (0.0, 0.0, None),
        counts_2: Tensor | None = None,
    ) -> None:
        is_done, has_failed, lost = save
        # Filled on the device, one by one: a copy of a list would make the host wait for the step.
        flags = [loss.new_full((1,), value) for value in (float(is_asked), is_done, has_failed)]
        lost = loss.new_zeros(1) if lost is None else lost.to(loss.dtype).view(1)
        self._num_counts = 0 if counts_2 is None else len(counts_2)
        counts = [] if counts_2 is None else [counts_2]
        shared = torch.cat([*counts, spread_losses(model, loss), *flags, lost])
        model.world.all_reduce(shared)
        self.counts_2 = None if counts_2 is None else shared[: self._num_counts]
        own = torch.stack([grad_norm, model.own_square]).to(shared)
        self._numbers, self._arrived = _to_host(torch.cat([shared, own]))

    def read(self) -> Notes:
        """Waits for the device where it is not there yet."""
        if self._arrived is not None:
            self._arrived.synchronize()
        numbers = self._numbers.tolist()[self._num_counts :]
        *losses, num_asked, num_done, num_failed, num_lost, grad_norm, own_square = numbers
        stops, done, failures, lost = (round(each) for each in (num_asked, num_done, num_failed, num_lost))
        return Notes(losses, stops, done, failures, lost, grad_norm, own_square)


def spread_losses(model: ParallelModel, loss: Tensor) -> Tensor:
    """Zeros of shape (D,) with the loss of this rank in its place, to be added up: on one rank of each D and part of
    its sequences, divided by the number of parts."""
    losses_D = loss.new_zeros(model.layout.data_ranks)
    if model.is_last and model.place.tp == 0:
        losses_D[model.data_rank] = loss / model.layout.cp
    return losses_D


def every_ranks(model: ParallelModel, own: float) -> list[float]:
    """A number of every rank, in order; every rank calls it, and the host waits."""
    numbers_W = model.zero().new_zeros(model.layout.world_size)
    numbers_W[model.layout.rank(**model.place._asdict())] = own
    model.world.all_reduce(numbers_W)
    numbers: list[float] = numbers_W.tolist()
    return numbers


def _to_host(numbers: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """The copy, and the event after which it is whole; None: at once."""
    if numbers.device.type != "cuda":
        return numbers, None
    copy = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return copy, event

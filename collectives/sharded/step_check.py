"""Comparison of the ranks' steps and settings, before a round of reductions averages gradients of different steps.

[Note: what a check costs] A rank that skips a step alone launches the same collectives as the others, only for other
data: nothing that is exchanged anyway would tell. So each rank sends the step that it is at, in a gather of its own
before a round of reductions: not with the gradients (a rank sees its own slice of their sum alone), nor with the
parameters (a shard has no room that would not tear parameters apart). Rounds 1, 2, 4, 8 and each 16th are checked: what
has gone apart stays apart, so it is found all the same, and 15 of 16 rounds have no collective more. On CUDA nobody
waits for it: the numbers are looked at in the next round, when they have come long ago. The first round waits, for what
ranks do differently may hang there. A watch hears of it, a recorder does not. Nothing is compared inside the capture of
a CUDA graph, or on a muted communicator.

[Note: which step] The announced one (`ShardedDataParallel.start_step`, `Watch.begin_step`, `Recorder.begin_step`).
Where not every rank announces one: the steps taken so far, and the forward passes in training that no backward pass
followed, which is what a step omitted after its forward pass looks like. A rank that omits the forward pass too
is noticed only where steps are announced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from collectives.alike import spread
from collectives.transport.communicator import Communicator
from netlayer.errors import CheckFailed

__all__ = ["StepCheck", "StepState", "announced_step", "is_checked", "raise_difference"]

CHECKED_EVERY = 16
UNANNOUNCED = -1


class StepState(NamedTuple):
    """Step and settings of one rank.

    Args:
        announced: the step that the caller has announced, or `UNANNOUNCED`.
        counted: the step by this rank's own count.
        prefetch, overlap, step_in_backward: as in `ShardedDataParallel`, now.
        gather_in_backward: the share in millionths; 0 without `step_in_backward`.
    """

    announced: int
    counted: int
    prefetch: int
    overlap: int
    step_in_backward: int
    gather_in_backward: int


def announced_step(step: int | None, comm: Communicator) -> int:
    """Return the step that was announced to the wrapper (None: none was), else to the communicator's watch or
    recorder."""
    # The wrapper's own word first: a watch or a recorder may be shared with other wrappers, of other steps.
    of_watch = None if comm.track is None else comm.track.watch.step
    of_recorder = None if comm.recorder is None else comm.recorder.step
    return next((each for each in (step, of_watch, of_recorder) if each is not None), UNANNOUNCED)


class StepCheck:
    """Compares the places of all ranks before a round of reductions: [Note: what a check costs].

    Args:
        comm: of the reductions.
        place: where this rank is; asked when a round is checked.
    """

    def __init__(self, comm: Communicator, place: Callable[[], StepState]) -> None:
        self._comm, self._step_state = comm, place
        self._num_reductions = 0
        self._coming: tuple[Tensor, torch.cuda.Event, object] | None = None
        """Numbers of an earlier round on their way to the host, the event after that, and what is read until then."""

    def begin_round(self) -> None:
        """Compare the places of all ranks; every rank calls it before the first reduction of a round.

        Raises:
            CheckFailed: ranks are at different steps.
            ValueError: ranks run with different settings.
        """
        # Before anything is sent: a difference that is known already must not cost another round.
        self._look_at_earlier()
        self._num_reductions += 1
        comm = self._comm
        if comm.world_size == 1 or comm.muted or comm.is_capturing or not is_checked(self._num_reductions):
            return
        numbers = torch.empty(comm.world_size * len(StepState._fields), dtype=torch.int64, device=comm.device)
        # From pinned memory: a copy from other memory lets the host wait for all that the stream does by now.
        own = torch.tensor(self._step_state(), dtype=numbers.dtype, device="cpu", pin_memory=numbers.is_cuda)

        # On the communicator's stream, so after whatever still reads the memory that torch gives out again.
        def prepare() -> None:
            numbers.chunk(comm.world_size)[comm.rank].copy_(own, non_blocking=True)

        work = comm.all_gather(numbers, prepare, is_recorded=False)
        # On the CPU nothing comes by itself; and the first round must be judged before what may hang is launched.
        if comm.stream is None or self._num_reductions == 1:
            work.wait()
            self._judge(numbers)
            return
        on_host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)

        def bring() -> None:
            on_host.copy_(numbers, non_blocking=True)

        work.then(bring, comm.stream)
        assert work.done_event is not None
        # Both are read on the device until the event: they must not be freed, and used again, before.
        self._coming = on_host, work.done_event, (numbers, own)

    def _look_at_earlier(self) -> None:
        if self._coming is not None and not self._comm.is_capturing:
            numbers, landed, _ = self._coming
            self._coming = None
            landed.synchronize()
            self._judge(numbers)

    def _judge(self, numbers: Tensor) -> None:
        states = [StepState(*row) for row in numbers.view(self._comm.world_size, -1).tolist()]
        if len(set(states)) > 1:
            raise_difference(states, self._comm.ranks)


def is_checked(number: int) -> bool:
    """Whether the round of this number, counted from 1, is checked: see [Note: what a check costs]."""
    return number % CHECKED_EVERY == 0 or (number < CHECKED_EVERY and number & (number - 1) == 0)


def raise_difference(states: Sequence[StepState], ranks: Sequence[int]) -> None:
    """Raise what `StepCheck.begin_round` raises, if these places of these ranks differ."""
    # Settings first: ranks whose settings differ may be at different steps because of that.
    for field in StepState._fields[2:]:
        values = [getattr(place, field) for place in states]
        if len(set(values)) > 1:
            texts = [_format_setting(field, value) for value in values]
            raise ValueError(f"ranks differ in their settings: {spread(field, texts, ranks)}; give every rank the same")
    # A rank's own count is compared only where some rank has no announced step.
    are_announced = all(place.announced != UNANNOUNCED for place in states)
    steps = [place.announced if are_announced else place.counted for place in states]
    if len(set(steps)) > 1:
        hint = (
            "" if are_announced else ", and run forward passes that are not trained on under torch.no_grad() or eval()"
        )
        raise CheckFailed(
            f"ranks train different steps: {spread('step', steps, ranks)}; gradients of different steps may have been "
            f"averaged since the last check, so load a checkpoint; skip a step on every rank or on none{hint}"
        )


def _format_setting(field: str, value: int) -> str:
    if field == "gather_in_backward":
        return f"{value / 1e6:g}"
    return str(value) if field == "prefetch" else str(bool(value))

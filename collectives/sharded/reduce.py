"""Reduce-scatters of gradients, launched while the backward pass goes on (MegaScale 3.2).

A round is one reduce-scatter of every bucket. Each backward pass outside `no_sync` is one round: a bucket is launched
when all its gradients have come; the others are launched at the end of the pass, with zeros for parameters without a
gradient. A `BackwardStep` may step the optimiser bucket by bucket after the reductions of a step's last pass.
Not covered: what a reduce-scatter itself is (`collectives.sharded.collectives`), and ranks that run different programs:
every rank must run the same number of such passes between two calls of `finish`.

[Note: launch order] A backend matches collectives by the order in which each rank launches them. Autograd may complete
buckets in any order, and in another one on another rank (branches, unused parameters). So buckets are launched strictly
from the last to the first, about the order in which gradients come; one that is ready early waits for its turn. Gathers
may share the communicator: all that were begun are launched before a round, and those inside it at its fixed points.

[Note: slots] Operators may write gradients straight into the buffer that is sent (`collectives.sharded.slot`). In a
round that is the send buffer of the bucket that is launched next, in the dtype of the reduction: its memory is free
then, on every rank the same. Gradients of other buckets are copied at their launch. Where gradients add up over passes,
the slot is in the wide sum on this rank. A rank alone has one place: the gradient that the optimiser reads.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from collectives.sharded.bucket import Bucket
from collectives.sharded.collectives import ReduceScatter, StepCheck, StepState, announced_step
from collectives.sharded.gather import ParameterGather, inside_backward
from collectives.sharded.gradient import ReducedPieces
from collectives.sharded.slot import DeferredWeightGrads, GradientSlot, Promise, SlotSource, Write, set_slot_source
from collectives.transport.communicator import Work
from collectives.transport.current_stream import current_stream

if TYPE_CHECKING:
    from collectives.sharded.optimizer_steps import BackwardStep
    from collectives.sharded.wrapped import ReshardHooks

logger = logging.getLogger(__name__)


class GradientState(Enum):
    """State of a step's gradients."""

    EMPTY = auto()  # none has come since gradients were dropped, or since the last step
    ADDING = auto()  # a backward pass runs whose gradients add up on this rank
    REDUCING = auto()  # a backward pass runs whose gradients are reduced, bucket by bucket: a round
    STEPPING = auto()  # the same, and the optimiser steps each bucket
    ADDED = auto()  # what passes after the last round have left is on this rank alone
    REDUCED = auto()  # all of them are on the shards, or on their way there
    FINISHED = auto()  # the same, and the pieces hold them
    STEPPED = auto()  # the backward pass has taken the step that they are for
    STEP_FINISHED = auto()  # the same, and it was waited for


_IN_ROUND = frozenset({GradientState.REDUCING, GradientState.STEPPING})
_IN_BACKWARD = _IN_ROUND | {GradientState.ADDING}
_FINISHED = frozenset({GradientState.FINISHED, GradientState.STEP_FINISHED})
_STEPPED = frozenset({GradientState.STEPPED, GradientState.STEP_FINISHED})


class ReduceScatterQueue:
    """Reduce-scatters of buckets, under way or complete, in the order of their launch.

    Args:
        reduce_scatter: launches one.
        in_flight: that may be under way.
        overlap: False: each is waited for at once.
    """

    def __init__(self, reduce_scatter: ReduceScatter, in_flight: int, overlap: bool) -> None:
        self._reduce_scatter, self.in_flight, self.overlap = reduce_scatter, in_flight, overlap
        self._works: deque[tuple[Bucket, Work]] = deque()

    def launch(self, bucket: Bucket, adds: bool) -> Work:
        """Send the gradients of a bucket, as `ReduceScatter` does. `launch_rest_of_previous` comes next."""
        work = self._reduce_scatter(bucket, adds)
        # Before anything lands: that may raise, and these gradients are on the wire by then.
        self._works.append((bucket, work))
        return work

    def launch_rest_of_previous(self) -> None:
        """Complete the reduction before the last: by now, after the last one's sends, its parts have arrived.

        What lands may raise, and what was sent is still to be added: so it is no part of `launch`.
        """
        if len(self._works) > 1:
            self._works[-2][1].launch_rest()

    def launch_rest(self) -> None:
        """Complete the last reduction too: none follows it."""
        if self._works:
            self._works[-1][1].launch_rest()

    def wait_for_room(self, limit: int | None = None) -> None:
        """Wait until at most so many reduce-scatters are in flight; None: as `in_flight` and `overlap` allow."""
        limit = limit if limit is not None else self.in_flight if self.overlap else 0
        while len(self._works) > limit:
            self._wait_first()

    def wait_all(self) -> None:
        """Wait until all gradients are reduced, on the current stream."""
        while self._works:
            self._wait_first()
        # No fill follows soon that would let go of what the last one has read.
        self._reduce_scatter.comm.free_filled()

    def as_they_come(self, buckets: Sequence[Bucket]) -> Iterator[Sequence[Bucket]]:
        """Yield these buckets: first those whose gradients are there, then each of the others after its wait."""
        under_way = [bucket for bucket, _ in self._works]
        yield [bucket for bucket in buckets if bucket not in under_way]
        while self._works:
            bucket = self._wait_first()
            # Reduced again in a later round: only after the last one its gradients are complete.
            if all(bucket is not later for later, _ in self._works):
                yield [bucket]
        self._reduce_scatter.comm.free_filled()

    def _wait_first(self) -> Bucket:
        bucket, work = self._works.popleft()
        work.wait()
        return bucket


class GradientReduce:
    """Turns gradients on parameters into means (or sums) over ranks on the pieces of the shards.

    Args:
        buckets: in order of first use.
        reduce_scatter: by which gradients travel.
        in_flight: reduce-scatters that may be under way; their buffers are all the memory that reduction takes.
        overlap: False: each is waited for at once.
        stage: of ZeRO; 2 and 3: every backward pass is a round, 1: those outside `no_sync` are.
        gather: of the same buckets: what is to be gathered is launched before the first reduction of a round, and steps
            are compared there; None: there are no gathers, and nothing is compared.
        skips_unused: whether a parameter that has a gradient on no rank has none for the optimiser; False: zeros.
        source: held weakly; reaches the reduced gradients for whom asks a parameter for its `.grad`.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        reduce_scatter: ReduceScatter,
        in_flight: int,
        overlap: bool,
        stage: int = 1,
        gather: ParameterGather | None = None,
        skips_unused: bool = False,
        source: ReducedPieces | None = None,
    ) -> None:
        self._replicas, self._gather = reduce_scatter.replicas, gather
        self.reshard: ReshardHooks | None = None
        """Frees a bucket's parameters when its gradients have come."""
        self._skips_unused = skips_unused
        self._source = None if source is None else weakref.ref(source)
        self._used_by_all: tuple[Work, Tensor, Tensor] | None = None
        """In flight: which parameters have a gradient on some rank; and, on CUDA, a host copy of this rank's own."""
        self.buckets, self.comm, self.stage = buckets, reduce_scatter.comm, stage
        self.reduce_scatter = reduce_scatter
        self.reduce_scatters = ReduceScatterQueue(reduce_scatter, in_flight, overlap)
        self._step_check = StepCheck(self.comm, self._step_state)
        self.step: int | None = None
        """The step that the caller has announced."""
        self.is_last = True
        """Whether the next backward pass is the last of a step, as far as one knows; False inside `no_sync`."""
        self.post_reduce_hook: BackwardStep | None = None
        self.state = GradientState.EMPTY
        self._writers: set[torch.cuda.Stream] = set()  # streams in which slots were given
        self._waiting: list[DeferredWeightGrads] = []
        """What backward passes have left of this step, and nobody has computed."""
        self._into: DeferredWeightGrads | None = None
        """Where the backward pass that runs now leaves it."""
        self._promises: list[Promise] = []  # of the backward pass that runs now, kept or not
        # What adds up on this rank over several passes would lose digits in a narrow dtype of the wire.
        self._local_dtype = torch.promote_types(reduce_scatter.dtype, torch.float32)
        self._missing = [0] * len(buckets)
        self._next = -1
        self._num_reductions = 0
        """Rounds of this step."""
        self.num_finished = self.num_skipped = 0
        """Steps whose gradients were finished, and forward passes in training that no backward pass followed."""
        self._num_forwards = 0
        self._reduced: set[int] = set()
        self._advised = False

    @property
    def broken(self) -> bool:
        """Whether a backward pass raised before its end."""
        return self._in_backward and not inside_backward()

    @property
    def finished(self) -> bool:
        """Whether the pieces hold the gradients of this step, or its step was taken and waited for."""
        return self.state in _FINISHED

    @property
    def stepped(self) -> bool:
        """Whether the backward pass has taken the step that these gradients are for."""
        return self.state in _STEPPED

    @property
    def _in_backward(self) -> bool:
        return self.state in _IN_BACKWARD

    def note_forward(self) -> None:
        """Note that a forward pass has begun whose backward pass reduces: outside `no_sync`, with gradients."""
        self._num_forwards += self.is_last

    def watch(self, parameter: nn.Parameter, index: int, position: int) -> None:
        """Hook the gradients of the parameter at `position` in bucket `index`, and let operators write them in place.

        Autograd calls a hook on a tensor once a backward pass, when all that leads to it was computed: with None where
        the gradient was written into its slot, or none came. (The hook after the accumulation is not called then
        by every torch.)

        Hooks hold this object weakly: the garbage collector does not see what a tensor's hook holds, so a cycle through
        one (hook, reducer, bucket, parameter, hook) would keep the buffers for ever.
        """
        owner = weakref.ref(self)

        def before(gradient: Tensor | None) -> None:
            if (reduce := owner()) is not None:
                # Nothing is to be added to what stands for a reduced gradient.
                reduce.buckets[index].note_cleared(True, (position,))
                # `after` is not called by every torch where nothing is accumulated.
                if gradient is None:
                    reduce._on_gradient(index)

        def after(parameter: Tensor) -> None:
            # Where torch calls it all the same, `before` has counted the parameter.
            if parameter.grad is not None and (reduce := owner()) is not None:
                reduce._on_gradient(index)

        def give() -> GradientSlot | None:
            reduce = owner()
            return None if reduce is None else reduce._slot(index, position)

        def defers() -> bool:
            reduce = owner()
            return reduce is not None and reduce._into is not None

        def defer(write: Write) -> bool:
            reduce = owner()
            return reduce is not None and reduce._defer(index, position, write)

        def promise(write: Write) -> Promise | None:
            reduce = owner()
            return None if reduce is None else reduce._promise(index, position, write)

        parameter.register_hook(before)  # type: ignore[no-untyped-call]
        parameter.register_post_accumulate_grad_hook(after)  # type: ignore[no-untyped-call]
        set_slot_source(parameter, SlotSource(give, defers, defer, promise))

    def _slot(self, index: int, position: int) -> GradientSlot | None:
        """Return the slot for a parameter's gradient, or None; the first call begins the backward pass."""
        # An operator may ask for its slot before autograd calls the first hook.
        if not self._in_backward:
            self._begin_backward()
        self._open(index)
        slot = self.buckets[index].slot(position)
        if slot is not None and self.comm.device.type == "cuda":
            # Operators may run on several streams of autograd: the reduction has to follow all of them.
            self._writers.add(current_stream(self.comm.device))
        return slot

    @contextmanager
    def being_last(self, value: bool) -> Iterator[None]:
        """Mark the backward passes in the block as a step's last ones, or not."""
        before, self.is_last = self.is_last, value
        try:
            yield
        finally:
            self.is_last = before

    @contextmanager
    def deferring(self) -> Iterator[DeferredWeightGrads]:
        """Have backward passes in the block defer weight gradients of linears; computing them later may be a round.

        Raises:
            ValueError: every pass is a round, from stage 2 on; or the optimiser steps in the backward pass; or this is
                inside another one.
        """
        if self.stage >= 2:
            raise ValueError(
                f"weights' gradients cannot be postponed in stage {self.stage}, which reduces every pass; use stage 1"
            )
        if self.post_reduce_hook is not None:
            raise ValueError("weights' gradients cannot be postponed where step_in_backward steps them; build without")
        if self._into is not None:
            raise ValueError("weights' gradients are postponed already: one backward pass in each defer_weight_grads()")
        deferred = DeferredWeightGrads(self._compute)
        was_last, self.is_last, self._into = self.is_last, False, deferred
        self._waiting.append(deferred)
        try:
            yield deferred
        except BaseException:  # of a pass that did not complete nothing is wanted
            if deferred in self._waiting:
                self._waiting.remove(deferred)
            raise
        finally:
            self.is_last, self._into = was_last, None

    def _defer(self, index: int, position: int, write: Write) -> bool:
        """Keep a weight gradient's product for later; return False if the gradient has no place."""
        assert self._into is not None
        if not self._in_backward:
            self._begin_backward()
        self._open(index)
        has_place = self.buckets[index].is_wide_enough
        if has_place:
            self._into.add(index, position, write)
        return has_place

    def _promise(self, index: int, position: int, write: Write) -> Promise | None:
        """Let a gradient come later in this backward pass; its bucket waits for it. None if it has no slot."""
        if not self._in_backward:
            self._begin_backward()
        self._open(index)
        if not self.buckets[index].is_wide_enough:
            return None
        # Awaited as one more gradient, so that the bucket is not launched without it.
        self._missing[index] += 1

        @torch.no_grad()
        def keep() -> None:
            slot = self._slot(index, position)
            assert slot is not None, "it had a place when it was promised"
            write(slot)
            self._on_gradient(index)

        promise = Promise(keep)
        self._promises.append(promise)
        return promise

    @torch.no_grad()
    def _compute(self, deferred: DeferredWeightGrads) -> None:
        """Compute a pass's postponed weight gradients, bucket by bucket, and launch each bucket's reduction in a round.

        Raises:
            RuntimeError: they were computed or dropped before.
        """
        if deferred not in self._waiting:
            raise RuntimeError("these weights' gradients were computed or dropped before: compute each pass's once")
        self._waiting.remove(deferred)
        before = self.state
        # Until it is through: what raises here leaves it broken.
        self.state = GradientState.REDUCING if self.is_last else GradientState.ADDING
        if self.is_last:
            self._begin_reduction()
        # From the last to the first, as in every round: see [Note: launch order].
        for index in reversed(range(len(self.buckets))):
            for position, write in deferred.take(index):
                slot = self._slot(index, position)
                assert slot is not None, "it had a place when it was postponed"
                write(slot)
            if self.state is GradientState.REDUCING:
                self._launch_next()
        if self.state is GradientState.REDUCING:
            self._end_reduction()
        self._join_writers()
        if self.state is GradientState.ADDING:
            self.state = before

    def _check_nothing_waits(self) -> None:
        if self._waiting:
            raise RuntimeError(
                f"weights' gradients of {len(self._waiting)} backward passes were postponed and not computed: "
                "call compute() of each before the step's gradients are reduced"
            )

    def _open(self, index: int) -> None:
        """Open the memory where gradients of this bucket add up, if it is free; see [Note: slots]."""
        bucket = self.buckets[index]
        if bucket.local_N is not None:
            return
        if self.reduce_scatter.is_local(bucket):
            bucket.open(bucket.grad_S, holds_all=self._adds(index))
        elif self.state not in _IN_ROUND:
            bucket.open_new(self._local_dtype)
        # The others have no memory yet in a round: see [Note: slots].
        elif index == self._next:
            self.reduce_scatter.acquire(bucket)

    def _fold(self, index: int) -> None:
        self._join_writers()
        if self.reduce_scatter.is_local(self.buckets[index]):
            self._open(index)
        self.buckets[index].fold_gradients(self._local_dtype)

    def _join_writers(self) -> None:
        """Make the current stream wait for the streams that have written into slots."""
        if self._writers:
            here = current_stream(self.comm.device)
            for stream in self._writers - {here}:
                here.wait_stream(stream)
            self._writers.clear()

    def _on_gradient(self, index: int) -> None:
        """Count a gradient of a bucket; when all are there, launch its reduction, or add it to the sum."""
        if not self._in_backward:
            self._begin_backward()
        self._missing[index] -= 1
        if self._missing[index] < 0:
            raise RuntimeError(
                f"a gradient of bucket {index} came after the bucket was complete: a backward pass inside another one "
                "(checkpoint with use_reentrant=True) is not supported here; use use_reentrant=False"
            )
        if self._missing[index] > 0:
            return
        if self.state in _IN_ROUND:
            self._launch_while_ready()
        else:
            self._fold(index)
        if self.reshard is not None:
            self.reshard.gradients_complete(index)

    def finish(self, waits: bool = True) -> None:
        """Hand the gradients to the pieces; a second call does nothing.

        Args:
            waits: for every reduction. False: the caller does, before it reads the gradients (`as_they_come`).

        Raises:
            RuntimeError: the backward pass before it raised. Its round is completed for the other ranks' sake, and its
                gradients are dropped.
        """
        if self.broken:
            loss = self._loss()
            self.abandon()
            raise RuntimeError(f"the backward pass did not complete: {loss}")
        cleared = self._take_cleared(hides=False)
        if self.finished:
            if waits:
                self.reduce_scatters.wait_all()
            return
        # Passes since the last round were under `no_sync`, or this rank had none: the others wait for its part.
        if self.state in (GradientState.EMPTY, GradientState.ADDED):
            self._begin_reduction()
            if self.reshard is not None:
                self.reshard.take_part(self._launch_down_to)
            self._end_reduction()
            self._show_reduced()
        if waits:
            self.reduce_scatters.wait_all()
        unused = self._unused_on_all()
        for bucket in self.buckets if not self.stepped else ():
            for piece in bucket.pieces:
                if (bucket.plan.index, piece.position) not in unused | cleared:
                    piece.parameter.grad = piece.grad
        # The next round adds to these sums only where their gradients are still on the pieces (`keep_reduced`).
        self._reduced.clear()
        self._num_reductions = 0
        self.state = GradientState.STEP_FINISHED if self.stepped else GradientState.FINISHED
        self.num_finished, self._num_forwards = self.num_finished + 1, 0

    def begin_step(self) -> None:
        """Begin a step: the gradients to come belong to it."""
        for bucket in self.buckets if self.stepped else ():
            bucket.used.clear()
        if self.state is GradientState.STEPPED:
            self.state = GradientState.REDUCED
        elif self.finished:
            self.state = GradientState.EMPTY

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, finished or not; every rank must call it at the same place."""
        if self.broken:
            self.abandon()
        # Reductions in flight still write into what is dropped here.
        self.reduce_scatters.wait_all()
        self._waiting.clear()
        for bucket in self.buckets:
            bucket.forget()
            bucket.used.clear()
            for piece in bucket.pieces:
                if set_to_none:
                    piece.parameter.grad = None
                elif piece.parameter.grad is not None:
                    piece.parameter.grad.zero_()
        self._reduced.clear()
        self._num_reductions, self.state = 0, GradientState.EMPTY

    def abandon(self) -> None:
        """Complete the round of a backward pass that raised, so that ranks stay in step, and drop its gradients."""
        logger.warning("a backward pass did not complete: %s", self._loss())
        self._promises.clear()  # nobody else holds them
        # The others go through the whole round: this rank launches its part, and drops what comes.
        if self.reshard is not None:
            self.reshard.take_part(self._launch_down_to)
        if self.state in _IN_ROUND:
            self._end_reduction()
        self.state = GradientState.EMPTY
        self.zero_grad()

    def _loss(self) -> str:
        if self.state is GradientState.STEPPING:
            return "the step was taken with the gradients that had come; load a checkpoint"
        return "its gradients are dropped; skip this step"

    def _begin_backward(self) -> None:
        """Begin a backward pass at its first gradient: count what is missing, and begin a round if it is one.

        Raises:
            RuntimeError: the step was taken already, inside an earlier pass.
        """
        if self.stepped:
            for bucket in self.buckets:
                bucket.drop_gradients()
            raise RuntimeError(
                "a second backward pass outside no_sync() in one step: with step_in_backward the first has taken the "
                "step already; put all but the last one under no_sync(), and call optimizer.step() after it"
            )
        self._take_cleared(hides=True)
        reduces = self.is_last or self.stage >= 2
        steps = self.is_last and self.post_reduce_hook is not None
        self.state = GradientState.STEPPING if steps else GradientState.REDUCING if reduces else GradientState.ADDING
        # This pass belongs to the last of the forward passes; none came for those before it.
        self.num_skipped += max(0, self._num_forwards - 1)
        self._num_forwards = 0
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        if steps and self.post_reduce_hook is not None:
            self.post_reduce_hook.begin()
        if reduces:
            self._begin_reduction()
        # The engine calls it when this backward pass is through, and not if it raises.
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        """End a backward pass: launch what is left in a round, else add up what came."""
        # At the latest now: the launches below send what is there.
        for promise in self._promises:
            promise()
        self._promises.clear()
        if self.state in _IN_ROUND:
            # The other ranks may wait for gathers of units that this pass has not used, before their next reduction.
            if self.reshard is not None:
                self.reshard.end_backward()
            self._end_reduction()
            if self._num_reductions > 1 and self.stage == 1 and not self._advised:
                self._advised = True
                logger.info("gradients are reduced each backward pass; put all but a step's last one under no_sync()")
            self._show_reduced()
        else:
            # Complete buckets were folded as they came; of the others some parameters got no gradient in this pass.
            for index, bucket in enumerate(self.buckets):
                if bucket.has_gradients():
                    self._fold(index)
            self._join_writers()
            self.state = GradientState.ADDED

    def _show_reduced(self) -> None:
        """Let `parameter.grad` reach the reduced gradients; not of parameters without a gradient on any rank."""
        unused, source = self._unused_on_all(), None if self._source is None else self._source()
        for bucket in self.buckets:
            index, positions = bucket.plan.index, range(len(bucket.parameters))
            if source is not None:
                bucket.show_reduced((p for p in positions if (index, p) not in unused), source)
        if unused and self.stepped:
            index, position = min(unused)
            raise RuntimeError(
                f"{self.buckets[index].plan.slots[position].name} had no gradient on any rank, and step_in_backward "
                'has stepped it as one with zeros: wrap with unused="zero" if that is meant, or build the optimiser '
                "without step_in_backward"
            )

    def _exchange_used(self) -> None:
        """Exchange which parameters have a gradient; a rank that has all of them never waits for the others."""
        comm, replicas = self.comm, self._replicas
        if self._used_by_all is not None:
            self._used_by_all[0].wait()  # of a round before: it has landed long ago
            self._used_by_all = None
        is_alone = comm.world_size == 1 and replicas is None
        if not self._skips_unused or is_alone or comm.muted or comm.is_capturing:
            return
        is_used = [position in bucket.used for bucket in self.buckets for position in range(len(bucket.parameters))]
        on_cuda = comm.device.type == "cuda"
        # Pinned: a copy from other memory would make the host wait for what the device has to do by now.
        own = torch.tensor(is_used, dtype=torch.uint8, device="cpu", pin_memory=on_cuda)
        shared = own.to(comm.device, non_blocking=True) if on_cuda else own
        work = comm.start_all_reduce(shared, torch.distributed.ReduceOp.MAX, is_recorded=False)
        if replicas is not None:
            # On the side stream, so that the computation goes on; every rank takes part, whoever asks for the answer.
            with torch.cuda.stream(self.reduce_scatter.stream):
                work.wait()
                work = replicas.start_all_reduce(shared, torch.distributed.ReduceOp.MAX, is_recorded=False)
        # `own` too, until the copy has read it.
        self._used_by_all = work, shared, own

    def _unused_on_all(self) -> set[tuple[int, int]]:
        """Return (bucket, position) of parameters without a gradient on any rank, where those are skipped."""
        unused = {
            (bucket.plan.index, position)
            for bucket in self.buckets
            if self._skips_unused and len(bucket.used) < len(bucket.parameters)
            for position in range(len(bucket.parameters))
            if position not in bucket.used
        }
        if not unused or (self.comm.world_size == 1 and self._replicas is None):
            return unused
        if self._used_by_all is None:  # nobody can tell inside the capture of a CUDA graph
            return set()
        # From here the host waits: only on a rank that lacks a gradient itself.
        work, shared, _ = self._used_by_all
        work.wait()
        places = ((bucket.plan.index, p) for bucket in self.buckets for p in range(len(bucket.parameters)))
        return unused & {place for place, is_used in zip(places, shared.tolist(), strict=True) if not is_used}

    def _take_cleared(self, hides: bool) -> set[tuple[int, int]]:
        """Drop and return (bucket, position) of reduced gradients whose `.grad` the program has set to None.

        Args:
            hides: take away what stands for the other ones, for new gradients to come.
        """
        cleared = set()
        for bucket in self.buckets:
            bucket.note_cleared(hides)
            cleared |= {(bucket.plan.index, position) for position in bucket.cleared}
        if cleared:
            # Reductions in flight would write the gradients that somebody has forgotten once more.
            self.reduce_scatters.wait_all()
            for bucket in self.buckets:
                bucket.forget_cleared()
        return cleared

    def _begin_reduction(self) -> None:
        self._check_nothing_waits()
        # Gathers are launched and steps compared before any reduction: one order of collectives on all ranks.
        if self._gather is not None:
            self._gather.launch_all()
            # In stage 3 a rank may come here after gathers that this one launches later: of units it does not use.
            self._step_check.begin_round(waits=self.reshard is None)
        self._next = len(self.buckets) - 1

    def _launch_down_to(self, index: int) -> None:
        """Launch the reductions of all buckets after this one, for ranks that may need gathers to fill theirs."""
        is_late = self.reshard is not None and self.reshard.gradients_come_late
        # Without overlap as many as with it: the other ranks may come to one only after gathers that are to follow.
        limit = len(self.buckets) if is_late else self.reduce_scatters.in_flight
        while self._next > index:
            self._launch_next(limit)

    def _launch_while_ready(self) -> None:
        while self._next >= 0 and self._missing[self._next] == 0:
            self._launch_next()

    def _end_reduction(self) -> None:
        """Launch the reductions that are left, and complete the optimiser's step where it is in the backward pass."""
        self._step_check.end_round()
        while self._next >= 0:
            self._launch_next()
        self.reduce_scatters.launch_rest()
        # At a fixed place, after the reductions: it goes on the same communicator.
        self._exchange_used()
        is_stepping = self.state is GradientState.STEPPING
        if is_stepping and self.post_reduce_hook is not None:
            self.post_reduce_hook.complete()
        self.state = GradientState.STEPPED if is_stepping else GradientState.REDUCED
        self._num_reductions += 1

    def _launch_next(self, limit: int | None = None) -> None:
        """Launch the reduction of the next bucket; a step inside the backward pass follows it. See `wait_for_room`."""
        index, bucket = self._next, self.buckets[self._next]
        self._next -= 1
        self._join_writers()
        is_local = self.reduce_scatter.is_local(bucket)
        if is_local:
            self._open(index)
        # Not asked of one that stays: that may write into the shard, where its gradients are already.
        work = self.reduce_scatters.launch(bucket, adds=not is_local and self._adds(index))
        self._reduced.add(index)
        # After this bucket's sends: by then, ranks in step have sent what the bucket before is summed of.
        self.reduce_scatters.launch_rest_of_previous()
        if self.state is GradientState.STEPPING and self.post_reduce_hook is not None:
            self.post_reduce_hook.reduced(index, work)
        # Last: the next bucket may be filled while as many as allowed are in flight.
        self.reduce_scatters.wait_for_room(limit)

    def _adds(self, index: int) -> bool:
        """Whether a reduction of this bucket adds to one of the same step, or to what the user has left there."""
        return index in self._reduced or self.buckets[index].keep_reduced()

    def _step_state(self) -> StepState:
        """Return this rank's step and settings, for all ranks to compare."""
        hook = self.post_reduce_hook
        return StepState(
            announced=announced_step(self.step, self.comm),
            # A forward that no backward pass followed looks like a step omitted: [Note: which step] of `collectives`.
            counted=self.num_finished + 1 + self.num_skipped,
            prefetch=(None if self._gather is None else self._gather.prefetch) or 0,
            overlap=self.reduce_scatters.overlap,
            step_in_backward=hook is not None,
            # A whole number, for these travel as int64.
            gather_in_backward=0 if hook is None else round(hook.share * 1e6),
        )

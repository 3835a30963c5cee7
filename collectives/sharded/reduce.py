"""Reduce-scatters of gradients, launched while the backward pass goes on (MegaScale 3.2).

A round is one reduce-scatter of every bucket. Each backward pass outside `no_sync` is one round: a bucket is launched
when all its gradients have come, what is then left is launched at the end of the pass, with zeros for parameters that
got no gradient. A `BackwardStep` may step the optimiser bucket by bucket after the reductions of a step's last pass.
Not covered: what a reduce-scatter itself is (`collectives.sharded.reduce_scatter`), and telling ranks apart, so every
rank must run the same number of such passes between two calls of `finish`.

[Note: launch order] A backend matches collectives by the order in which each rank launches them. Autograd may complete
buckets in any order, and in another one on another rank (branches, unused parameters). So buckets are launched strictly
from the last to the first, about the order in which gradients come; one that is ready early waits for its turn. Gathers
may share the communicator: all that were begun are launched before a round, and those inside it at its fixed points.

[Note: slots] Operators may write gradients straight to where they leave from (`collectives.sharded.slot`). In a round
that is what will travel, in the dtype of the reduction, for the bucket alone that is launched next: its memory is then
the one that is free, on every rank the same; what comes for others is copied at their launch. Where gradients add up
over passes it is the wide sum on this rank. One rank alone has but one place: what the optimiser reads.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from collectives.sharded.backward_step import BackwardStep
from collectives.sharded.bucket import Bucket
from collectives.sharded.gradient import ReducedPieces
from collectives.sharded.reduce_scatter import ReduceScatterBuffers, ReduceScatterQueue
from collectives.sharded.reshard import Reshard
from collectives.sharded.slot import DeferredWeightGrads, GradientSlot, Promise, SlotSource, Write, set_slot_source
from collectives.transport.communicator import Communicator, Work
from collectives.transport.current_stream import current_stream

logger = logging.getLogger(__name__)


class GradientReduce:
    """Turns gradients on parameters into means (or sums) over ranks on the pieces of the shards.

    Args:
        buckets: in order of first use.
        comm: which nothing else uses but calls from the same place in every rank's program.
        dtype: of the sums on the wire.
        in_flight: reduce-scatters that may be under way; their buffers are all the memory that reduction takes.
        overlap: False: each is waited for at once.
        stage: of ZeRO; 2 and 3: every backward pass is a round, 1: those outside `no_sync` are.
        before_reduction: called before the first launch of a round; what it raises, a backward pass raises.
        reduce_buffers: the memory that gradients travel in, and what reduces them; None: allocated, and the
            communicator's backend.
        mean: over ranks; False: sums, of losses that were divided by the number of ranks.
        skips_unused: whether a parameter that has a gradient on no rank has none for the optimiser; False: zeros.
        source: held weakly; reaches the reduced gradients for whom asks a parameter for its `.grad`.
        replicas: of ranks that hold the same shard; None: there are no replicas.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        comm: Communicator,
        dtype: torch.dtype,
        in_flight: int,
        overlap: bool,
        stage: int = 1,
        before_reduction: Callable[[], None] = lambda: None,
        reduce_buffers: ReduceScatterBuffers | None = None,
        mean: bool = True,
        skips_unused: bool = False,
        source: ReducedPieces | None = None,
        replicas: Communicator | None = None,
    ) -> None:
        self._replicas = replicas
        self.reshard: Reshard | None = None
        """Frees a bucket's parameters when its gradients have come."""
        self._skips_unused = skips_unused
        self._source = None if source is None else weakref.ref(source)
        self._used_by_all: tuple[Work, Tensor, Tensor] | None = None
        """In flight: which parameters have a gradient on some rank; and, on CUDA, a host copy of this rank's own."""
        self.buckets, self.comm, self.stage = buckets, comm, stage
        self.reduce_scatters = ReduceScatterQueue(
            comm, dtype, in_flight, overlap, reduce_buffers or ReduceScatterBuffers(), mean, replicas
        )
        self.is_last = True
        """Whether the next backward pass is the last of a step, as far as one knows; False inside `no_sync`."""
        self.post_reduce_hook: BackwardStep | None = None
        self.stepped = False
        """Whether the follower has taken the step that these gradients are for."""
        self._before_reduction = before_reduction
        self._writers: set[torch.cuda.Stream] = set()
        """Streams in which slots were given."""
        self._waiting: list[DeferredWeightGrads] = []
        """What backward passes have left of this step, and nobody has computed."""
        self._into: DeferredWeightGrads | None = None
        """Where the backward pass that runs now leaves it."""
        self._promises: list[Promise] = []
        """Of the backward pass that runs now, kept or not."""
        # What adds up on this rank over several passes would lose digits in a narrow dtype of the wire.
        self._local_dtype = torch.promote_types(dtype, torch.float32)
        self._in_backward = False
        self._reduces = False
        self._steps_in_backward = False
        self._missing = [0] * len(buckets)
        self._next = -1
        self._num_reductions = 0
        self._unreduced = False
        self._finished = False
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
        """Whether the pieces hold the gradients of this step."""
        return self._finished

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
        """Return the place for a parameter's gradient, or None; begin the backward pass if that is its first one."""
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
        """A backward pass inside leaves the gradients of linears' weights; it is no round, what computes them may be.

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
        """Let a gradient come later in this backward pass: its bucket is not complete before; None: it has no place."""
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
        self._in_backward, self._reduces = True, self.is_last  # until it is through: what raises here leaves it broken
        if self._reduces:
            self._begin_reduction()
        # From the last to the first, as in every round: see [Note: launch order].
        for index in reversed(range(len(self.buckets))):
            for position, write in deferred.take(index):
                slot = self._slot(index, position)
                assert slot is not None, "it had a place when it was postponed"
                write(slot)
            if self._reduces:
                self._launch_next()
        if self._reduces:
            self._end_reduction()
        self._join_writers()
        self._in_backward = False

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
        if self.reduce_scatters.is_local(bucket):
            bucket.open(bucket.grad_S, holds_all=self._adds(index))
        elif not self._reduces:
            bucket.open_new(self._local_dtype)
        # The others have no memory yet in a round: see [Note: slots].
        elif index == self._next:
            self.reduce_scatters.acquire_send_buffer(bucket)

    def _fold(self, index: int) -> None:
        self._join_writers()
        if self.reduce_scatters.is_local(self.buckets[index]):
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
        if self._reduces:
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
        if self._finished:
            if waits:
                self.reduce_scatters.wait_all()
            return
        # Passes since the last round were under `no_sync`, or this rank had none: the others wait for its part.
        if self._unreduced or self._num_reductions == 0:
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
        self._num_reductions, self._finished = 0, True
        self.num_finished, self._num_forwards = self.num_finished + 1, 0

    def begin_step(self) -> None:
        """Begin a step: the gradients to come belong to it."""
        for bucket in self.buckets if self.stepped else ():
            bucket.used.clear()
        self._finished = self.stepped = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, finished or not; every rank does so at the same place."""
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
        self._num_reductions, self._unreduced, self._finished, self.stepped = 0, False, False, False

    def abandon(self) -> None:
        """Complete the round of a backward pass that raised, so that ranks stay in step, and drop its gradients."""
        logger.warning("a backward pass did not complete: %s", self._loss())
        self._promises.clear()  # nobody else holds them
        # The others go through the whole round: this rank launches its part, and drops what comes.
        if self.reshard is not None:
            self.reshard.take_part(self._launch_down_to)
        if self._reduces:
            self._end_reduction()
        self._in_backward = self._steps_in_backward = False
        self.zero_grad()

    def _loss(self) -> str:
        if self._steps_in_backward:
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
        self._in_backward, self._finished = True, False
        # This pass belongs to the last of the forward passes; none came for those before it.
        self.num_skipped += max(0, self._num_forwards - 1)
        self._num_forwards = 0
        self._reduces = self.is_last or self.stage >= 2
        self._steps_in_backward = self.is_last and self.post_reduce_hook is not None
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        if self._steps_in_backward and self.post_reduce_hook is not None:
            self.post_reduce_hook.begin()
        if self._reduces:
            self._begin_reduction()
        # The engine calls it when this backward pass is through, and not if it raises.
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        """End a backward pass: launch what is left in a round, else add up what came."""
        # At the latest now: the launches below send what is there.
        for promise in self._promises:
            promise()
        self._promises.clear()
        if self._reduces:
            self._end_reduction()
            self._advise()
        else:
            self._unreduced = True
            # Complete buckets were folded as they came; of the others some parameters got no gradient in this pass.
            for index, bucket in enumerate(self.buckets):
                if bucket.has_gradients():
                    self._fold(index)
            self._join_writers()
        is_round, self._in_backward, self._steps_in_backward = self._reduces, False, False
        if is_round:
            self._show_reduced()

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
        """Let all ranks know which parameters have a gradient; whoever has all of them never waits for the answer."""
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
            with torch.cuda.stream(self.reduce_scatters.stream):
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
        """Forget the reduced gradients of parameters whose `.grad` somebody has set to None: their (bucket, position).

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
        self._before_reduction()
        self._next = len(self.buckets) - 1

    def _launch_down_to(self, index: int) -> None:
        """Launch the reductions of all buckets after this one."""
        while self._next > index:
            self._launch_next()

    def _launch_while_ready(self) -> None:
        while self._next >= 0 and self._missing[self._next] == 0:
            self._launch_next()

    def _end_reduction(self) -> None:
        """Launch the reductions that are left, and complete the optimiser's step where it is in the backward pass."""
        while self._next >= 0:
            self._launch_next()
        self.reduce_scatters.launch_rest()
        # At a fixed place, after the reductions: it goes on the same communicator.
        self._exchange_used()
        if self._steps_in_backward and self.post_reduce_hook is not None:
            self.post_reduce_hook.complete()
            self.stepped = True
        self._num_reductions += 1
        self._unreduced = False

    def _launch_next(self) -> None:
        """Launch the reduction of the next bucket, and let a step inside the backward pass follow it."""
        index, bucket = self._next, self.buckets[self._next]
        self._next -= 1
        self._join_writers()
        is_local = self.reduce_scatters.is_local(bucket)
        if is_local:
            self._open(index)
        # Not asked of one that stays: that may write into the shard, where its gradients are already.
        work = self.reduce_scatters.launch(bucket, adds=not is_local and self._adds(index))
        self._reduced.add(index)
        # After this bucket's sends: by then, ranks in step have sent what the bucket before is summed of.
        self.reduce_scatters.launch_rest_of_previous()
        if self._steps_in_backward and self.post_reduce_hook is not None:
            self.post_reduce_hook.reduced(index, work)
        # Last: the next bucket may be filled while as many as allowed are in flight.
        self.reduce_scatters.wait_for_room()

    def _adds(self, index: int) -> bool:
        """Whether a reduction of this bucket adds to one of the same step, or to what the user has left there."""
        return index in self._reduced or self.buckets[index].keep_reduced()

    def _advise(self) -> None:
        if self._num_reductions > 1 and self.stage == 1 and not self._advised:
            self._advised = True
            logger.info("gradients are reduced once per backward pass; put all but a step's last one under no_sync()")


def inside_backward() -> bool:
    """Whether autograd runs a backward pass on this thread right now."""
    return torch._C._current_graph_task_id() != -1

"""Reduce-scatters of gradients, launched while the backward pass goes on (MegaScale 3.2).

A round is one reduce-scatter of every bucket. Each backward pass outside `no_sync` is one round: a bucket is launched
when all its gradients have come, what is then left is launched at the end of the pass, with zeros for parameters that
got no gradient. A `BackwardStep` may step the optimiser bucket by bucket behind the reductions of a step's last pass.
Left out: telling ranks apart, so every rank must run the same number of such passes between two calls of `finish`.

[Note: launch order] A backend matches collectives by the order in which each rank launches them. Autograd may complete
buckets in any order, and in another one on another rank (branches, unused parameters). So buckets are launched strictly
from the last to the first, about the order in which gradients come; one that is ready early waits for its turn. Gathers
may share the communicator: all that were begun are launched before a round, and those inside it at its fixed points.

[Note: slots] Operators may write gradients straight to where they leave from (`collectives.slot`). In a round that is
what will travel, in the dtype of the reduction, for the bucket alone that is launched next: its memory is then the one
that is free, on every rank the same; what comes for others is copied at their launch. Where gradients add up over
passes it is the wide sum on this rank. One rank alone has but one place: what the optimiser reads.

[Note: float16] It ends at 65,504, which a sum over ranks soon passes where their mean does not. So gradients are
divided before the sum, by a power of two no less than the number of ranks (it rounds nothing but what is subnormal),
and the rest of the mean's factor comes after it. Other dtypes have room, and are divided once, after the sum.

[Note: means] Where NCCL divides by a power of two as it adds, that loses nothing and saves a pass over each shard; from
windows it would take its slower kernels for that. `PeerReduce` divides as it adds. So elsewhere sums come, and are
scaled as they are stored. Whoever divides the loss by the number of ranks wants no more than the sum (`mean=False`):
nothing is scaled then.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from collectives.backward_step import BackwardStep
from collectives.bucket import Bucket, Handover
from collectives.lane import Flight, Lane
from collectives.peer_reduce import PeerReduce
from collectives.postponed import Postponed
from collectives.slot import GradientSlot, Promise, SlotSource, Write, set_slot_source
from collectives.windows import Windows

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Travel:
    """How gradients travel, and where their sums stay.

    Args:
        buffers: for the largest bucket whole and for its shard (where that does not stay in `grad_S`), one more than
            are in flight, which take turns; empty: gradients travel in memory that is allocated for them.
        gradients: where reduced ones stay, by the index of a bucket; of others in memory that is allocated for them.
        by: reduces in place of the lane's backend, into float32.
        windows: in which all that lies; kept as long.
    """

    buffers: Sequence[tuple[Tensor, Tensor]] = ()
    gradients: Mapping[int, Tensor] = field(default_factory=dict)
    by: PeerReduce | None = None
    windows: Windows | None = None

    def close(self) -> None:
        """Give all of it back, once the device has come here. Every rank does so at the same point; twice is once."""
        for memory in (self.by, self.windows):
            if memory is not None:
                memory.close()


class GradientReduce:
    """Turns gradients on parameters into means (or sums) over ranks on the pieces of the shards.

    Args:
        buckets: in order of first use.
        lane: which nothing else uses but calls from the same place in every rank's program.
        dtype: of the sums on the wire.
        in_flight: reduce-scatters that may be under way; their buffers are all the memory that reduction takes.
        overlap: False: each is waited for at once.
        stage: of ZeRO; 2: every backward pass is a round, 1: those outside `no_sync` are.
        before_round: called before the first launch of a round; what it raises, a backward pass raises.
        travel: the memory that gradients travel in, and what reduces them; None: allocated, and the lane's backend.
        mean: over ranks; False: sums, of losses that were divided by the number of ranks.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        lane: Lane,
        dtype: torch.dtype,
        in_flight: int,
        overlap: bool,
        stage: int = 1,
        before_round: Callable[[], None] = lambda: None,
        travel: Travel | None = None,
        mean: bool = True,
    ) -> None:
        self.buckets, self.lane, self.dtype = buckets, lane, dtype
        self.in_flight, self.overlap, self.stage = in_flight, overlap, stage
        self.is_last = True
        """Whether the next backward pass is the last of a step, as far as one knows; False inside `no_sync`."""
        self.follower: BackwardStep | None = None
        self.stepped = False
        """Whether the follower has taken the step that these gradients are for."""
        self._before_round = before_round
        travel = travel or Travel()
        self._buffers = deque(travel.buffers)
        self._claimed: tuple[Tensor, Tensor] | None = None
        """Of the buffers, the pair that the next bucket to be launched fills already."""
        self._writers: set[torch.cuda.Stream] = set()
        """Streams in which slots were given."""
        self._waiting: list[Postponed] = []
        """What backward passes have left of this step, and nobody has computed."""
        self._into: Postponed | None = None
        """Where the backward pass that runs now leaves it."""
        self._promises: list[Promise] = []
        """Of the backward pass that runs now, kept or not."""
        self._by, self._sum_dtype = travel.by, dtype if travel.by is None else torch.float32
        """The second: in which sums come."""
        divides = travel.by is not None or (lane.divides_on_the_way and not travel.buffers)
        self._gets_means = mean and divides  # [Note: means]
        has_to_divide = mean and not self._gets_means
        is_short = has_to_divide and dtype == torch.float16  # [Note: float16]
        self._divisor = 1 << (lane.world_size - 1).bit_length() if is_short else 1
        self._scale = self._divisor / lane.world_size if has_to_divide else 1.0
        self.stream = lane.behind
        """What makes the mean of a sum, and a step, runs there."""
        self._local_dtype = torch.promote_types(dtype, torch.float32)
        self._flights: deque[tuple[int, Flight]] = deque()
        """Of the buckets of these indices, in the order of their launch."""
        self._in_backward = False
        self._is_round = False
        self._follows = False
        self._missing = [0] * len(buckets)
        self._next = -1
        self._num_rounds = 0
        self._unreduced = False
        self._finished = False
        self.num_finished = self.num_left_out = 0
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
        """A forward pass has begun whose backward pass reduces: outside `no_sync`, with gradients, in training."""
        self._num_forwards += self.is_last

    def watch(self, parameter: nn.Parameter, index: int, position: int) -> None:
        """Hear of the gradients of a parameter, at `position` in bucket `index`, and let operators write them there.

        Autograd calls a hook on a tensor once a backward pass, when all that leads to it was computed: with None where
        the gradient was written into its slot, or none came. (The hook behind the accumulation is not called then
        by every torch.)

        Hooks hold this object weakly: the garbage collector does not see what a tensor's hook holds, so a cycle through
        one (hook, reducer, bucket, parameter, hook) would keep the buffers for ever.
        """
        owner = weakref.ref(self)

        def before(gradient: Tensor | None) -> None:
            if gradient is None and (reduce := owner()) is not None:
                reduce._on_gradient(index)

        def after(parameter: Tensor) -> None:
            if parameter.grad is not None and (reduce := owner()) is not None:
                reduce._on_gradient(index)

        def give() -> GradientSlot | None:
            reduce = owner()
            return None if reduce is None else reduce._slot(index, position)

        def postpones() -> bool:
            reduce = owner()
            return reduce is not None and reduce._into is not None

        def postpone(write: Write) -> bool:
            reduce = owner()
            return reduce is not None and reduce._postpone(index, position, write)

        def promise(write: Write) -> Promise | None:
            reduce = owner()
            return None if reduce is None else reduce._promise(index, position, write)

        parameter.register_hook(before)  # type: ignore[no-untyped-call]
        parameter.register_post_accumulate_grad_hook(after)  # type: ignore[no-untyped-call]
        set_slot_source(parameter, SlotSource(give, postpones, postpone, promise))

    def _slot(self, index: int, position: int) -> GradientSlot | None:
        if not self._in_backward:
            self._begin_backward()
        self._open(index)
        slot = self.buckets[index].slot(position)
        if slot is not None and self.lane.device.type == "cuda":
            self._writers.add(torch.cuda.current_stream(self.lane.device))
        return slot

    @contextmanager
    def postponing(self) -> Iterator[Postponed]:
        """A backward pass inside leaves the gradients of linears' weights; it is no round, what computes them may be.

        Raises:
            ValueError: every pass is a round, in stage 2; or the optimiser steps in the backward pass; or this is
                inside another one.
        """
        if self.stage == 2:
            raise ValueError("weights' gradients cannot be postponed in stage 2, which reduces every pass; use stage 1")
        if self.follower is not None:
            raise ValueError("weights' gradients cannot be postponed where step_in_backward steps them; build without")
        if self._into is not None:
            raise ValueError("weights' gradients are postponed already: one backward pass in each weights_postponed()")
        postponed = Postponed(self._compute)
        was_last, self.is_last, self._into = self.is_last, False, postponed
        self._waiting.append(postponed)
        try:
            yield postponed
        except BaseException:  # of a pass that did not complete nothing is wanted
            if postponed in self._waiting:
                self._waiting.remove(postponed)
            raise
        finally:
            self.is_last, self._into = was_last, None

    def _postpone(self, index: int, position: int, write: Write) -> bool:
        """Take a product for later; False: it has no place."""
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
    def _compute(self, postponed: Postponed) -> None:
        if postponed not in self._waiting:
            raise RuntimeError("these weights' gradients were computed or dropped before: compute each pass's once")
        self._waiting.remove(postponed)
        self._in_backward, self._is_round = True, self.is_last  # until it is through: what raises here leaves it broken
        if self._is_round:
            self._begin_round()
        for index in reversed(range(len(self.buckets))):
            for position, write in postponed.take(index):
                slot = self._slot(index, position)
                assert slot is not None, "it had a place when it was postponed"
                write(slot)
            if self._is_round:
                self._launch_next()
        if self._is_round:
            self._end_round()
        self._join_writers()
        self._in_backward = False

    def _check_nothing_waits(self) -> None:
        if self._waiting:
            raise RuntimeError(
                f"weights' gradients of {len(self._waiting)} backward passes were postponed and not computed: "
                "call compute() of each before the step's gradients are reduced"
            )

    def _open(self, index: int) -> None:
        """Have a place where gradients of this bucket add up, if one is free; see [Note: slots]."""
        bucket = self.buckets[index]
        if bucket.local_N is not None:
            return
        if self._stays(bucket):
            bucket.open(bucket.grad_S, holds_all=index in self._reduced or bucket.keep_reduced())
        elif not self._is_round:
            bucket.open_new(self._local_dtype)
        elif index == self._next and self._buffers:
            self._claimed = self.buffers_for(bucket)
            bucket.open(self._claimed[0])
        elif index == self._next:
            bucket.open_new(self.dtype)

    def _stays(self, bucket: Bucket) -> bool:
        """Whether gradients travel nowhere, and lose nothing where the optimiser reads them."""
        wide = bucket.grad_S.dtype
        return self.lane.world_size == 1 and torch.promote_types(wide, self.dtype) == wide

    def _fold(self, index: int) -> None:
        self._join_writers()
        if self._stays(self.buckets[index]):
            self._open(index)
        self.buckets[index].fold_gradients(self._local_dtype)

    def _join_writers(self) -> None:
        """What was written into slots is there, once the current stream comes here."""
        if self._writers:
            here = torch.cuda.current_stream(self.lane.device)
            for stream in self._writers - {here}:
                here.wait_stream(stream)
            self._writers.clear()

    def _on_gradient(self, index: int) -> None:
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
        if self._is_round:
            self._launch_while_ready()
        else:
            self._fold(index)

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
        if self._finished:
            if waits:
                self.wait_all()
            return
        if self._unreduced or self._num_rounds == 0:
            self._begin_round()
            self._end_round()
        if waits:
            self.wait_all()
        for piece in (piece for bucket in self.buckets if not self.stepped for piece in bucket.pieces):
            piece.parameter.grad = piece.grad
        self._reduced.clear()
        self._num_rounds, self._finished = 0, True
        self.num_finished, self._num_forwards = self.num_finished + 1, 0

    def begin_step(self) -> None:
        """The shards are published again: the gradients to come belong to another step."""
        self._finished = self.stepped = False

    def drop(self, set_to_none: bool = True) -> None:
        """Forget all gradients, finished or not; every rank does so at the same place."""
        if self.broken:
            self.abandon()
        self.wait_all()
        self._waiting.clear()
        for bucket in self.buckets:
            bucket.forget()
            for piece in bucket.pieces:
                if set_to_none:
                    piece.parameter.grad = None
                elif piece.parameter.grad is not None:
                    piece.parameter.grad.zero_()
        self._reduced.clear()
        self._num_rounds, self._unreduced, self._finished, self.stepped = 0, False, False, False

    def abandon(self) -> None:
        """After a backward pass that raised: complete its round, so that ranks stay in step, and drop its gradients."""
        logger.warning("a backward pass did not complete: %s", self._loss())
        self._promises.clear()  # nobody else holds them
        if self._is_round:
            self._end_round()
        self._in_backward = self._follows = False
        self.drop()

    def _loss(self) -> str:
        if self._follows:
            return "the step was taken with the gradients that had come; load a checkpoint"
        return "its gradients are dropped; skip this step"

    def _begin_backward(self) -> None:
        if self.stepped:
            for bucket in self.buckets:
                bucket.drop_gradients()
            raise RuntimeError(
                "a second backward pass outside no_sync() in one step: with step_in_backward the first has taken the "
                "step already; put all but the last one under no_sync(), and call optimizer.step() after it"
            )
        self._in_backward, self._finished = True, False
        self.num_left_out += max(0, self._num_forwards - 1)
        self._num_forwards = 0
        self._is_round = self.is_last or self.stage == 2
        self._follows = self.is_last and self.follower is not None
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        if self._follows and self.follower is not None:
            self.follower.begin()
        if self._is_round:
            self._begin_round()
        # The engine calls it when this backward pass is through, and not if it raises.
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        for promise in self._promises:
            promise()
        self._promises.clear()
        if self._is_round:
            self._end_round()
            self._advise()
        else:
            self._unreduced = True
            for index, bucket in enumerate(self.buckets):
                if any(parameter.grad is not None for parameter in bucket.parameters):
                    self._fold(index)
            self._join_writers()
        self._in_backward = self._follows = False

    def _begin_round(self) -> None:
        self._check_nothing_waits()
        self._before_round()
        self._next = len(self.buckets) - 1

    def _launch_while_ready(self) -> None:
        while self._next >= 0 and self._missing[self._next] == 0:
            self._launch_next()

    def _end_round(self) -> None:
        while self._next >= 0:
            self._launch_next()
        if self._flights:
            self._flights[-1][1].land()  # nothing comes behind it
        if self._follows and self.follower is not None:
            self.follower.complete()
            self.stepped = True
        self._num_rounds += 1
        self._unreduced = False

    def _launch_next(self) -> None:
        index, bucket = self._next, self.buckets[self._next]
        self._next -= 1
        self._join_writers()
        flight = self._stay(index) if self._stays(bucket) else self._leave(index)
        self._reduced.add(index)
        self._flights.append((index, flight))  # first: what lands may raise, and what was sent is still to be added
        if len(self._flights) > 1:
            self._flights[-2][1].land()  # behind the sends of this one, by when the peers have come so far
        if self._follows and self.follower is not None:
            self.follower.reduced(index, flight)
        while len(self._flights) > (self.in_flight if self.overlap else 0):
            self._wait_first()

    def _stay(self, index: int) -> Flight:
        """One rank alone: the gradients are where the optimiser reads them, or are put there."""
        self._open(index)
        self.buckets[index].hand_over(self.buckets[index].grad_S.dtype).fill()
        return Flight(self.lane, None, None, None, None, ())

    def _leave(self, index: int) -> Flight:
        bucket = self.buckets[index]
        add = index in self._reduced or bucket.keep_reduced()
        leaving, output_S = self._prepare(bucket, add)
        flight = self.lane.reduce_scatter(
            output_S, leaving.buffer, leaving.fill, leaving.read, self._gets_means, self._by
        )
        if self._scale != 1 or output_S is not bucket.grad_S:
            flight.follow(functools.partial(bucket.store_reduced, output_S, self._scale, add), self.stream)
        return flight

    def buffers_for(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Memory for the gradients of a bucket on their way, and for their sum: that nothing under way uses."""
        plan = bucket.plan
        if self._buffers:
            self._buffers.rotate(1)
            whole_N, shard_S = self._buffers[0]
            has_room = len(shard_S) >= plan.shard_numel
            return whole_N[: plan.padded_numel], shard_S[: plan.shard_numel] if has_room else bucket.grad_S
        whole_N = bucket.full_N.new_empty(plan.padded_numel, dtype=self.dtype)
        return whole_N, whole_N.new_empty(plan.shard_numel)

    def _prepare(self, bucket: Bucket, add: bool) -> tuple[Handover, Tensor]:
        """The gradients to send, and where their sum goes."""
        whole_N = shard_S = None
        if self._buffers:
            whole_N, shard_S = self._claimed or self.buffers_for(bucket)
            self._claimed = None
        leaving = bucket.hand_over(self.dtype, self._divisor, whole_N)
        if not add and self._sum_dtype == bucket.grad_S.dtype:
            return leaving, bucket.grad_S  # nothing to add to, and no cast: the sum lands where the optimiser reads it
        if shard_S is None or shard_S is bucket.grad_S:
            shard_S = leaving.buffer.new_empty(bucket.plan.shard_numel, dtype=self._sum_dtype)
        return leaving, shard_S

    def as_they_come(self) -> Iterator[Sequence[Bucket]]:
        """All buckets: first those whose gradients are there, then each of the others when it was waited for."""
        under_way = {index for index, _ in self._flights}
        yield [bucket for bucket in self.buckets if bucket.plan.index not in under_way]
        while self._flights:
            index = self._wait_first()
            if all(index != later for later, _ in self._flights):
                yield [self.buckets[index]]
        self.lane.free_filled()

    def wait_all(self) -> None:
        """Have all gradients there, once the current stream comes here."""
        while self._flights:
            self._wait_first()
        self.lane.free_filled()

    def _wait_first(self) -> int:
        index, flight = self._flights.popleft()
        flight.wait()
        return index

    def _advise(self) -> None:
        if self._num_rounds > 1 and not self._advised:
            self._advised = True
            logger.info("gradients are reduced once per backward pass; put all but a step's last one under no_sync()")


def inside_backward() -> bool:
    """Whether autograd runs a backward pass on this thread right now."""
    return torch._C._current_graph_task_id() != -1

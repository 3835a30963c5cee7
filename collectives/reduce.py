"""Reduce-scatters of gradients, launched while the backward pass goes on (MegaScale 3.2).

A round is one reduce-scatter of every bucket. Each backward pass outside `no_sync` is one round: a bucket is launched
when all its gradients have come, what is then left is launched at the end of the pass, with zeros for parameters that
got no gradient. Left out: telling ranks apart, so every rank must run the same number of such passes between two calls
of `finish`.

[Note: launch order] A backend matches collectives by the order in which each rank launches them. Autograd may complete
buckets in any order, and in another one on another rank (branches, unused parameters). So buckets are launched strictly
from the last to the first, about the order in which gradients come; one that is ready early waits for its turn.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from collectives.bucket import Bucket
from collectives.lane import Flight, Lane

logger = logging.getLogger(__name__)


class GradientReduce:
    """Turns gradients on parameters into means over ranks on the pieces of the shards.

    Args:
        buckets: in order of first use.
        lane: which nothing else uses but calls from the same place in every rank's program.
        dtype: of the sums on the wire.
        in_flight: reduce-scatters that may be under way; their buffers are all the memory that reduction takes.
        overlap: False: each is waited for at once.
    """

    def __init__(
        self, buckets: Sequence[Bucket], lane: Lane, dtype: torch.dtype, in_flight: int, overlap: bool
    ) -> None:
        self.buckets, self.lane, self.dtype = buckets, lane, dtype
        self.in_flight = in_flight if overlap else 0
        self.sync = True
        """Whether the next backward pass is a round; False inside `no_sync`."""
        self._local_dtype = torch.promote_types(dtype, torch.float32)
        self._flights: deque[Flight] = deque()
        self._in_backward = False
        self._is_round = False
        self._missing = [0] * len(buckets)
        self._next = -1
        self._num_rounds = 0
        self._unreduced = False
        self._finished = False
        self._reduced: set[int] = set()
        self._advised = False

    @property
    def broken(self) -> bool:
        """Whether a backward pass raised before its end."""
        return self._in_backward and not inside_backward()

    def on_gradient(self, index: int, _parameter: Tensor) -> None:
        """A parameter of bucket `index` has its gradient of this backward pass."""
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
            self.buckets[index].fold_gradients(self._local_dtype)

    def finish(self) -> None:
        """Wait for every reduction and hand the gradients to the pieces; a second call does nothing.

        Raises:
            RuntimeError: the backward pass before it raised. Its round is completed for the other ranks' sake, and its
                gradients are dropped.
        """
        if self.broken:
            self.abandon()
            raise RuntimeError("the backward pass did not complete: its gradients are dropped; skip this step")
        if self._finished:
            return
        if self._unreduced or self._num_rounds == 0:
            self._begin_round()
            self._end_round()
        self._wait_all()
        for bucket in self.buckets:
            for piece in bucket.pieces:
                piece.parameter.grad = piece.grad
        self._reduced.clear()
        self._num_rounds, self._finished = 0, True

    def begin_step(self) -> None:
        """The shards are published again: the gradients to come belong to another step."""
        self._finished = False

    def drop(self, set_to_none: bool = True) -> None:
        """Forget all gradients, finished or not; every rank does so at the same place."""
        if self.broken:
            self.abandon()
        self._wait_all()
        for bucket in self.buckets:
            bucket.local_N = None
            bucket.drop_gradients()
            for piece in bucket.pieces:
                if set_to_none:
                    piece.parameter.grad = None
                elif piece.parameter.grad is not None:
                    piece.parameter.grad.zero_()
        self._reduced.clear()
        self._num_rounds, self._unreduced, self._finished = 0, False, False

    def abandon(self) -> None:
        """After a backward pass that raised: complete its round, so that ranks stay in step, and drop its gradients."""
        logger.warning("a backward pass did not complete: the gradients of this step are dropped")
        if self._is_round:
            self._end_round()
        self._in_backward = False
        self.drop()

    def _begin_backward(self) -> None:
        self._in_backward, self._is_round, self._finished = True, self.sync, False
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        if self._is_round:
            self._begin_round()
        # The engine calls it when this backward pass is through, and not if it raises.
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        if self._is_round:
            self._end_round()
            self._advise()
        else:
            self._unreduced = True
            for bucket in self.buckets:
                if any(parameter.grad is not None for parameter in bucket.parameters):
                    bucket.fold_gradients(self._local_dtype)
        self._in_backward = False

    def _begin_round(self) -> None:
        self._next = len(self.buckets) - 1

    def _launch_while_ready(self) -> None:
        while self._next >= 0 and self._missing[self._next] == 0:
            self._launch_next()

    def _end_round(self) -> None:
        while self._next >= 0:
            self._launch_next()
        self._num_rounds += 1
        self._unreduced = False

    def _launch_next(self) -> None:
        index, bucket = self._next, self.buckets[self._next]
        self._next -= 1
        add = index in self._reduced or bucket.keep_reduced()
        self._reduced.add(index)
        input_N = bucket.take_gradients(self.dtype)
        # Nothing to add to, and no cast: the sum lands where the optimiser reads it.
        in_place = not add and self.dtype == bucket.grad_S.dtype
        output_S = bucket.grad_S if in_place else input_N.new_empty(bucket.plan.shard_numel)

        def store() -> None:
            bucket.store_reduced(output_S, 1.0 / self.lane.world_size, add)

        self._flights.append(self.lane.reduce_scatter(output_S, input_N, store))
        while len(self._flights) > self.in_flight:
            self._flights.popleft().wait()

    def _wait_all(self) -> None:
        while self._flights:
            self._flights.popleft().wait()

    def _advise(self) -> None:
        if self._num_rounds > 1 and not self._advised:
            self._advised = True
            logger.info("gradients are reduced once per backward pass; put all but a step's last one under no_sync()")


def inside_backward() -> bool:
    """Whether autograd runs a backward pass on this thread right now."""
    return torch._C._current_graph_task_id() != -1

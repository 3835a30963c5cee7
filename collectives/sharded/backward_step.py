"""The optimiser's step inside the backward pass: a bucket is stepped when its reduction has landed, then gathered.

Without it a step is: backward with its reduce-scatters, optimiser, forward with its all-gathers; where the network is
the slower one, the forward pass (a third of the computation) waits for gathers (half of the communication). With it a
share of the gathers moves under the backward pass. Elementwise optimisers only, and nothing that needs all gradients
before the first update (clipping by the global norm); the numbers are those of the plain step, bit by bit.

[Note: which gathers move] With f and b the seconds of forward and backward, r and g those of all reduce-scatters and
all-gathers, and a share x of the gathers moved, a step takes max(b, r + x g) + max(f, (1 - x) g). With b = 2 f,
x = (2 - r/g) / 3 makes that max(f + b, r + g), whichever is larger. The buckets that move are spread evenly over the
model: a forward pass that found its last layers gathered and its first ones not would wait for the first ones.

[Note: order] Reductions are launched from the last bucket to the first, and feed nothing but their own update; what is
waited for first in the next forward pass, the first buckets, is reduced last. So the gather of a bucket that moves is
launched right after the next reduction (its update runs meanwhile); all others follow the last reduction, in the order
of the forward pass. On one communicator that is the order on the wire. The end of a step is exposed, whatever is done:
the last gradients can only be reduced after the backward pass, and are the first to be gathered before the next one. So
nothing stands between the last reductions: the first buckets do not move.

Overwriting a bucket's parameters is safe once their gradients are complete: autograd has then run all that led there.
What reads them later in the same pass all the same fails: saved tensors by their version, recomputation by
`ParameterGather.wait_for`, from the update on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from collectives.sharded.bucket import Bucket, BucketPlan
from collectives.sharded.gather import ParameterGather
from collectives.transport.communicator import Work

# A layer's backward pass has two products for the forward's one: gradients of its inputs and of its weights.
BACKWARD_SHARE = 2 / 3
"""Of a step's computation that is the backward pass, without recomputation."""
NUM_UNMOVED = 4
"""Buckets at the front whose gathers never move: they would delay the last reductions."""


class BackwardStep:
    """Steps the optimiser after the reductions of a step's last backward pass, at the same places on every rank.

    Args:
        buckets: in order of first use.
        gather: publishes what was stepped.
        step: steps every piece that has a gradient.
        share: of the gathers' bytes that moves under the backward pass, 0..1.
        lag: reductions launched between a bucket's own and its gather.
        stream: the updates run there; None on the CPU.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        gather: ParameterGather,
        step: Callable[[], object],
        share: float,
        lag: int,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._buckets, self._gather, self._step, self._lag, self._stream = buckets, gather, step, lag, stream
        self._early_buckets = choose_early([bucket.plan for bucket in buckets], share)
        self._lagging: deque[tuple[int, Work]] = deque()
        self._updated_events: dict[int, torch.cuda.Event] = {}

    def begin(self) -> None:
        """Begin a backward pass, at its first gradient: wait for all gathers, then take over what users wrote.

        A gather may read a shard no longer when that shard is stepped, and a step would overwrite what users have
        written into parameters since the last one.
        """
        self._lagging.clear()
        # First, for `sync_masters` omits a bucket whose gather is under way.
        self._gather.wait_all()
        self._gather.sync_masters(unseen=self._gather.compares_each_step)

    def reduced(self, index: int, work: Work) -> None:
        """Step a bucket after its reduction, which was just launched, and gather the one that is due."""
        work.then(lambda: self._update(self._buckets[index]), self._stream)
        self._lagging.append((index, work))
        # A gather right after its own reduction would hold up the wire until the update is through.
        while len(self._lagging) > self._lag:
            self._gather_or_defer(*self._lagging.popleft())

    def complete(self) -> None:
        """End the pass: gather the last early buckets, and start the gathers of all others."""
        while self._lagging:
            self._gather_or_defer(*self._lagging.popleft())
        # These in the order of the forward pass, and all after the last reduction: see [Note: order].
        self._gather.unshard_rest(self._updated_events)
        self._updated_events = {}

    def _gather_or_defer(self, bucket_index: int, reduction: Work) -> None:
        """Gather a bucket now if it is an early one; else keep the event after its update, for `unshard_rest`.

        On the CPU, which has no events, the update runs here, in the wait for the reduction.
        """
        if reduction.done_event is None:
            reduction.wait()
        if bucket_index in self._early_buckets:
            self._gather.gather_early(bucket_index, reduction.done_event)
        elif reduction.done_event is not None:
            self._updated_events[bucket_index] = reduction.done_event

    def _update(self, bucket: Bucket) -> None:
        """Step the parameters of one bucket alone, and put its new shard where the all-gather takes it from."""
        # Before the update: from here on its parameters are neither of this step nor, until gathered, of the next.
        self._gather.stepping(bucket.plan.index)
        # An optimiser omits what has no gradient: that is how it steps one bucket.
        for piece in bucket.pieces:
            piece.parameter.grad = piece.grad
        self._step()
        for piece in bucket.pieces:
            # Else the step of the next bucket would step this one again.
            piece.parameter.grad = None
        bucket.copy_in_shard()


def choose_early(plans: Sequence[BucketPlan], share: float) -> frozenset[int]:
    """Return the buckets to gather under the backward pass: `share` of the bytes, spread evenly after the first ones.

    Raises:
        ValueError: `share` is not in 0..1.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"gather_in_backward = {share}: must lie in 0..1; give None for the balanced share")
    early, owed = [], 0.0
    for plan in plans:
        num_bytes = plan.padded_numel * plan.dtype.itemsize
        # What is owed is carried on, so that the moved buckets are spread evenly, whatever their sizes.
        owed += share * num_bytes
        # Sums of floats fall short by rounding: without the tolerance a share of 1 would leave buckets out.
        if plan.index >= NUM_UNMOVED and owed >= num_bytes * (1 - 1e-9):
            early.append(plan.index)
            owed -= num_bytes
    return frozenset(early)


def balanced_share(param_dtype: torch.dtype, reduce_dtype: torch.dtype) -> float:
    """Return the share that balances both passes, for a backward pass of twice the forward's time: the note above."""
    ratio = reduce_dtype.itemsize / param_dtype.itemsize
    # x = (2 - r/g) / 3. Below 0 the reductions alone take longer than the backward pass: no gather moves.
    return min(1.0, max(0.0, BACKWARD_SHARE * (1 + ratio) - ratio))

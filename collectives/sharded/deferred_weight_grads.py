"""Weights' gradients that a backward pass leaves for later: products that nobody waits for (Qi et al., ICLR'24).

A pipeline stage sends its input's gradient on, and computes its weights' where it would wait else:

    with sharded.defer_weight_grads() as postponed:
        loss.backward()  # gradients of inputs, and of all weights that are not a linear's
    ...
    postponed.compute()

The products keep what they read: of each linear its input, and its output's gradient. Only operators that write into
slots (`collectives.sharded.slot`) postpone anything; what others make comes in the backward pass, as ever. `compute`
runs on its caller's stream, which must be that of the backward pass, or after it. Not covered: reducing what was
computed (`collectives.sharded.reduce`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from collectives.sharded.slot import Write


class DeferredWeightGrads:
    """Weight gradients that one backward pass has deferred.

    Args:
        compute: has all of it computed, and reduced where the pass was the last of a step; given this.
    """

    def __init__(self, compute: Callable[[DeferredWeightGrads], None]) -> None:
        self._compute = compute
        self._writes: dict[int, list[tuple[int, Write]]] = defaultdict(list)

    def add(self, index: int, position: int, write: Write) -> None:
        """Add a deferred write for the parameter at `position` in bucket `index`."""
        self._writes[index].append((position, write))

    def take(self, index: int) -> list[tuple[int, Write]]:
        """Take the (position, write) pairs of a bucket, in the order of the backward pass; they are forgotten here."""
        return self._writes.pop(index, [])

    def compute(self) -> None:
        """Outside `no_sync`, or inside `last_backward`: and reduce all of the step, bucket by bucket.

        Raises:
            RuntimeError: it was computed before, or dropped (`zero_grad`); or others of the step still wait.
        """
        self._compute(self)

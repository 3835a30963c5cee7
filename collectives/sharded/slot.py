"""Slots into which an operator may write a parameter's gradient itself, in place of handing it to autograd.

A `ShardedDataParallel` lets gradients travel in one flat buffer a bucket, mostly in another dtype than they are
computed in. A product that writes there spares a copy, a cast and the memory between, and what it adds up stays in the
wide dtype (Megatron-LM's gradient accumulation fusion, for buckets). In its backward pass an operator asks for a slot,
writes there, and returns None for the parameter; without a slot it returns the gradient, as ever. Either way the bucket
learns from autograd when a parameter has all of its gradients: it may be used several times, in either way.

What writes may also wait, until the end of the pass (`promise`) or longer (`DeferredWeightGrads`): then the slot is
asked for when its turn comes.

[Note: deferred weight gradients] A pipeline stage sends its input's gradient on, and computes its weights' where it
would wait else, products that nobody waits for (Qi et al., ICLR'24):

    with sharded.defer_weight_grads() as postponed:
        loss.backward()  # gradients of inputs, and of all weights that are not a linear's
    ...
    postponed.compute()

The products keep what they read: of each linear its input, and its output's gradient. Only operators that write into
slots postpone anything; what others make comes in the backward pass, as ever. `compute` runs on its caller's stream,
which must be that of the backward pass, or after it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass(frozen=True)
class GradientSlot:
    """A place that must be written, in the current stream, before whoever asked for it returns.

    Args:
        view: contiguous, of the parameter's shape, and of its dtype or a wider one.
        adds: whether it holds gradients already, to be added to; else what it holds is nothing.
    """

    view: Tensor
    adds: bool


Write = Callable[[GradientSlot], None]
"""Fills a slot."""


class Promise:
    """A slot that will be filled before the end of the backward pass: when this is called, else there.

    It is gone with its pass: hold it weakly.
    """

    def __init__(self, keep: Callable[[], None]) -> None:
        self._keep: Callable[[], None] | None = keep
        self._pass = torch._C._current_graph_task_id()

    @property
    def is_due(self) -> bool:
        """Whether its backward pass is the one that runs now."""
        return self._pass == torch._C._current_graph_task_id()

    def __call__(self) -> None:
        """Fill it, in the current stream; twice is once."""
        keep, self._keep = self._keep, None
        if keep is not None:
            keep()


class SlotSource:
    """Source of one parameter's gradient slots.

    Args:
        give: a slot, to be written at once; None where none is free.
        defers: whether the backward pass leaves for later what it can.
        defer: takes what writes; False: there is no place for it.
        promise: takes what writes; None: likewise.
    """

    def __init__(
        self,
        give: Callable[[], GradientSlot | None],
        defers: Callable[[], bool],
        defer: Callable[[Write], bool],
        promise: Callable[[Write], Promise | None] = lambda _write: None,
    ) -> None:
        self._give, self._defers, self._defer, self._promise = give, defers, defer, promise

    def slot(self, accumulator: object) -> GradientSlot | None:
        """Return a slot, when called in a backward pass; None: there is none, return the gradient.

        Args:
            accumulator: autograd's node of the parameter, one of the function's `next_functions`.
        """
        return self._give() if _will_accumulate(accumulator) else None

    def write(self, accumulator: object, write: Write) -> bool:
        """Have `write` fill a slot, now or, where the pass postpones that, later; return False where there is no slot.

        What it reads must stay as it is until then.
        """
        if self._defers():
            return _will_accumulate(accumulator) and self._defer(write)
        slot = self.slot(accumulator)
        if slot is not None:
            write(slot)
        return slot is not None

    def promise(self, accumulator: object, write: Write) -> Promise | None:
        """Have `write` fill a slot before this backward pass ends; None: as in `slot`, or the pass postpones it anyway.

        What it reads must stay as it is until then.
        """
        if self._defers() or not _will_accumulate(accumulator):
            return None
        return self._promise(write)

    @property
    def defers(self) -> bool:
        """Whether `write` would fill a slot later, after the backward pass."""
        return self._defers()


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


# Beside the parameters, and not an attribute of theirs: that would be saved with them.
_sources: MutableMapping[Tensor, SlotSource] = WeakTensorKeyDictionary()


def set_slot_source(parameter: Tensor, source: SlotSource) -> None:
    """Set the source of this parameter's slots; the source must not hold the parameter."""
    _sources[parameter] = source


def slot_source(parameter: Tensor) -> SlotSource | None:
    """Return the source of a parameter's slots; None for a parameter that is in no bucket."""
    return _sources.get(parameter)


def _will_accumulate(accumulator: object) -> bool:
    """Whether this pass is to leave a gradient on the parameter; `torch.autograd.grad` hands it to its caller."""
    try:
        return bool(torch._C._will_engine_execute_node(accumulator))  # type: ignore[arg-type]
    except RuntimeError:  # so it refuses to say of a leaf that the caller of `grad` asks for
        return False

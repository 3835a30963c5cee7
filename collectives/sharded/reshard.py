"""Hooks by which units free their parameters and gather them again: ZeRO stage 3, FSDP2's `reshard_after_forward`.

A unit's buckets are freed after its forward pass, and again when all their gradients have come in the backward pass,
which begins with gathering them: at the first gradient of one of the unit's outputs. Those of a few units are held at a
time (`collectives.sharded.gather`, [Note: buckets that reshard]). The last unit stays between the two passes: it is the
first that the backward pass needs. Parameters outside the units stay too.

[Note: what stays] A unit may hand out its parameters (a token table that is read by an embedding and a head), or others
may read them: no gradient of the unit's outputs precedes their use in the backward pass. Such buckets stay until the
shards change.

Not covered: units that are used past their outputs (a loss that a unit keeps as an attribute): the backward pass then
raises torch's RuntimeError that a tensor has another version than the one it has saved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from collectives.sharded.bucket import Bucket
from collectives.sharded.gather import ParameterGather
from collectives.sharded.guard import CompanionHook


class Reshard:
    """Has units free their parameters after use, and gather them before their backward pass.

    Args:
        buckets: of the wrapper.
        gather: of these buckets; says which of them reshard.
        owners: modules, and the buckets that each waits for.
        units: those of the modules that free theirs, in order of use.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        gather: ParameterGather,
        owners: Mapping[nn.Module, Sequence[int]],
        units: Sequence[nn.Module],
    ) -> None:
        self._buckets, self._gather = buckets, gather
        self._units = [unit for unit in units if unit in owners]
        gather.unit_of = {index: number for number, unit in enumerate(self._units) for index in owners[unit]}
        gather.last_unit = frozenset(owners[self._units[-1]])
        self._owners = owners
        self._pass = -1
        """The backward pass, by autograd's number, that has begun here; -1: none."""

    def attach_hooks(self) -> None:
        """Have every unit free its buckets after its forward, and others keep what they use of them."""
        for module, indices in self._owners.items():
            if module in self._units:
                is_last = module is self._units[-1]
                free: Any = CompanionHook(functools.partial(self._after_unit, indices, is_last))
                module.register_forward_hook(free)
            # First of all that wait: it then stays, whatever the other hooks do.
            elif self._gather.reshards.intersection(indices):
                keep: Any = CompanionHook(functools.partial(self._keep, indices))
                module.register_forward_pre_hook(keep)

    def gradients_complete(self, index: int) -> None:
        """Free a bucket in the backward pass: all that led to its gradients has run."""
        self._gather.free((index,))

    def take_part(self, before_wait: Callable[[int], None]) -> None:
        """Complete, for the other ranks' sake, a backward pass that raised here, or that this rank had none of.

        Args:
            before_wait: launches the reductions of later buckets than the one that it is given.
        """
        if self._gather.in_backward:
            self._gather.end_backward(before_wait)
        else:
            self._gather.pass_nothing(before_wait)

    def _keep(self, indices: Sequence[int], *_: object) -> None:
        self._gather.keep(indices)

    def _after_unit(self, indices: Sequence[int], is_last: bool, *called: object) -> None:
        """Free a unit's buckets after its forward pass, and hook the start of its backward pass."""
        # Recomputation: the backward pass that has gathered them goes on to use them.
        if torch._C._current_graph_task_id() != -1:
            return
        tensors = [leaf for leaf in tree_leaves(called[-1]) if isinstance(leaf, Tensor)]
        storages = {self._buckets[index].unsharded_N.untyped_storage()._cdata for index in indices}
        if any(_storage_of(tensor) in storages for tensor in tensors):
            self._gather.keep(indices)  # [Note: what stays]
            return
        if torch.is_grad_enabled():
            for tensor in tensors:
                if tensor.requires_grad:
                    tensor.register_hook(functools.partial(self._before_backward, indices))  # type: ignore[no-untyped-call]
            if is_last:
                return
        self._gather.free(indices)

    def _before_backward(self, indices: Sequence[int], _gradient: Tensor) -> None:
        """Make a unit's parameters current before its backward pass; begin the pass, if it is its first unit."""
        number = torch._C._current_graph_task_id()
        if number != self._pass:
            self._pass = number
            self._gather.begin_backward()
            # The engine calls it when this backward pass is through, and not if it raises.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self._gather.wait_for(indices)

    def _end_backward(self) -> None:
        self._pass = -1
        self._gather.end_backward()


def _storage_of(tensor: Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # of no strided memory, or of several
        return None

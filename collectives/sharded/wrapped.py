"""Checks of what a program does with a wrapper and its module, and the waits of the module's parts for parameters.

What would train something else is refused. Not covered: reading and writing single parameters
(`collectives.sharded.guard`).
"""

from __future__ import annotations

import copy
import functools
import logging
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from collectives.sharded.bucket import Bucket
from collectives.sharded.gather import ParameterGather
from collectives.sharded.guard import CompanionHook, Unsharded
from collectives.sharded.reduce import inside_backward

logger = logging.getLogger(__name__)

_FORWARDS_WITHOUT_OPTIMIZER = 4


class StandIn(nn.parallel.DistributedDataParallel):
    """Stands where programs expect a DistributedDataParallel.

    It is a subclass of torch's, so that whoever unwraps one, or takes `module.` from its names (torch's distributed
    checkpoints, Accelerate, loops of one's own), does so here. It has nothing of its workings, and does not call its
    `__init__`: what only these could do is refused.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Unsharded:
        """The module alone, which drives no collective, behind the same names: what a mean of models needs."""
        return Unsharded(copy.deepcopy(self.module, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return Unsharded, (self.module,)

    def join_hook(self, *_: Any, **__: Any) -> NoReturn:
        """torch's `Join` for ranks with fewer batches: refused, because all of them reduce every step."""
        raise RuntimeError(
            "Join: ranks with uneven numbers of batches are not supported; give every rank as many (drop_last=True), "
            "or let a rank that has run out call finish_gradients() and optimizer.step() without a backward pass"
        )

    join = join_hook

    def _refuse_comm_hook(self, *_: object, **__: object) -> NoReturn:
        raise RuntimeError(
            "communication hooks of DistributedDataParallel are not called here: give reduce_dtype for gradients in "
            "another dtype on the wire"
        )

    register_comm_hook = _register_builtin_comm_hook = _register_fused_optim = _refuse_comm_hook

    # What others read of a DistributedDataParallel.
    static_graph = find_unused_parameters = False
    device_ids = output_device = None

    def _set_static_graph(self) -> None:
        """Nothing to set: no graph is assumed, static or not."""

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {}


class WrappedModule:
    """Has the parts of a module wait for what they compute with, and checks that it stays as it was wrapped.

    Args:
        buckets: of its parameters.
        parameters: all of the module, held to notice those that are replaced or added later.
        frozen: those among them that are in no bucket.
        owners: modules to wait before, and the buckets that they need.
        gather: of the buckets.
        start_step: publishes changed shards.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        parameters: Sequence[nn.Parameter],
        frozen: Sequence[nn.Parameter],
        owners: Mapping[nn.Module, Sequence[int]],
        gather: ParameterGather,
        start_step: Callable[[], None],
    ) -> None:
        self._buckets, self._parameters, self._frozen = buckets, parameters, frozen
        self._owners, self._gather, self._start_step = owners, gather, start_step
        self._called: set[nn.Module] = set()
        self.upfront: Sequence[int] = [index for index in range(len(buckets)) if index not in gather.reshards]
        """Buckets to wait for before any forward; all of them until one has shown which modules it calls."""
        self.seen_forward = False
        self.asked_for_shards = False
        """Whether an optimiser may hold the shards."""
        self._num_forwards = 0

    def attach_hooks(self) -> None:
        """Have every owner wait for its buckets before its forward."""
        for module, indices in self._owners.items():
            # First of all hooks: another one may read the parameters (weight norm).
            hook: Any = CompanionHook(functools.partial(self._before_module, indices))
            module.register_forward_pre_hook(hook, prepend=True)

    def _before_module(self, indices: Sequence[int], module: nn.Module, _args: object) -> None:
        """Wait for a module's buckets before its forward pass; start the step if the wrapper's own was bypassed."""
        # By these calls `learn_order` knows which buckets have a hook that waits for them.
        if not self.seen_forward:
            self._called.add(module)
        # The common case, so it must cost next to nothing: no lock, no look at the buckets.
        if self._gather.is_unsharded:
            return
        if inside_backward():  # recomputation
            self._gather.wait_for(indices)
            return
        if self._gather.needs_unshard:  # called past the wrapper's own forward, as `sharded.module.encode(x)` is
            self._start_step()
        self._gather.wait_for(self.upfront)
        self._gather.wait_for(indices)

    def learn_order(self) -> None:
        """Note, after the first forward, the buckets that need an early wait: an owner of theirs was not called."""
        if self.seen_forward:
            return
        self.seen_forward = True
        uncalled = [indices for module, indices in self._owners.items() if module not in self._called]
        # Of those that reshard, whoever reads one past a hook waits for it then: all of them together may not fit.
        self.upfront = sorted({index for indices in uncalled for index in indices} - self._gather.reshards)
        self._called.clear()

    def check_unchanged(self, module: nn.Module) -> None:
        """Raise RuntimeError if the module was moved or cast, or has other or unfrozen parameters."""
        self._gather.check_unchanged()
        # The module would compute with other memory than the gathers write to.
        if not all(bucket.is_in_place() for bucket in self._buckets):
            raise RuntimeError(
                "the module was moved or cast, or a parameter's data replaced, after wrapping: do that before"
            )
        # By identity: `==` on parameters compares their values, on the device.
        now = tuple(module.parameters())
        if len(now) != len(self._parameters) or any(map(operator.is_not, now, self._parameters)):
            raise RuntimeError(
                "parameters of the module were replaced, added or removed after wrapping: do that before"
            )
        # It is in no bucket, so nobody would reduce its gradient.
        if any(parameter.requires_grad for parameter in self._frozen):
            raise RuntimeError(
                "a parameter that was frozen when the module was wrapped requires a gradient now: wrap it unfrozen, "
                "and set its .grad to None before each step that shall leave it alone"
            )

    def check_same(self, fn: Callable[[Tensor], Tensor], buffers: Iterable[Tensor]) -> None:
        """Raise RuntimeError if `fn` would move or cast a parameter or one of these buffers."""
        for tensor in (*self._parameters, *self._frozen, *buffers):
            # An empty tensor shows a change of dtype or device at no cost; `share_memory()` returns the same one.
            probe = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            values = tensor.detach()
            is_same = fn(probe) is probe and not probe.is_shared()  # type: ignore[no-untyped-call]
            if not is_same or fn(values) is not values:
                raise RuntimeError(
                    "parameters are views of communication buffers: move or cast the module before wrapping it"
                )

    def warn_of_no_optimizer(self) -> None:
        """Count a forward, and warn once where several have passed and no optimiser can hold the shards."""
        self._num_forwards += torch.is_grad_enabled()
        if self._num_forwards == _FORWARDS_WITHOUT_OPTIMIZER and not self.asked_for_shards:
            logger.warning(
                "nobody has asked for the shards in %d forwards: take the optimiser from model.optimizer(kind, ...); "
                "one that is built on model.parameters() finds no gradients and trains nothing",
                self._num_forwards - 1,
            )

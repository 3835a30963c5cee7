"""Hooks on a wrapped module: its parts wait for their parameters and free them, and it stays as it was wrapped.

What would train something else is refused. Not covered: reading and writing single parameters
(`collectives.sharded.gather`).

[Note: what reshards] ZeRO stage 3, FSDP2's `reshard_after_forward`: a unit's buckets are freed after its forward pass,
and again when all their gradients have come in the backward pass, which begins with gathering them: at the first
gradient of one of the unit's outputs. Those of a few units are held at a time (`collectives.sharded.reshard`, [Note:
buckets that reshard]). The last unit stays between the two passes: it is the first that the backward pass needs.
Parameters outside the units stay too. Not covered: units that are used past their outputs (a loss that a unit keeps as
an attribute): the backward pass then raises torch's RuntimeError that a tensor has another version than it has saved.

[Note: what stays] A unit may hand out its parameters (a token table that is read by an embedding and a head), or others
may read them: no gradient of the unit's outputs precedes their use in the backward pass. Such buckets stay until the
shards change.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from collectives.sharded.bucket import Bucket
from collectives.sharded.gather import ParameterGather, inside_backward
from collectives.sharded.reshard import ReshardingGather

logger = logging.getLogger(__name__)

_FORWARDS_WITHOUT_OPTIMIZER = 4


class CompanionHook:
    """A hook on a module that stays behind where that is copied or pickled: a copy is a module as any other.

    What travels in its place does nothing, and is of the standard library: a pickle loads without this package.

    Args:
        function: the hook; a compiler does not look into it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        if "__call__" not in vars(CompanionHook):  # a compiler comes with the first hook, not with the import
            disable: Any = torch.compiler.disable
            type.__setattr__(CompanionHook, "__call__", disable(CompanionHook._call))

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __deepcopy__(self, _memo: object) -> Callable[..., None]:
        return contextlib.nullcontext().__exit__  # takes anything, returns None

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


class Unsharded(nn.Module):
    """Copy or pickle of a wrapper: its module, under the same names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


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


class ReshardHooks:
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
        gather: ReshardingGather,
        owners: Mapping[nn.Module, Sequence[int]],
        units: Sequence[nn.Module],
    ) -> None:
        self._buckets, self._gather = buckets, gather
        self._units = [unit for unit in units if unit in owners]
        of_units = ((number, index) for number, unit in enumerate(self._units) for index in owners[unit])
        gather.unit_of = {index: number for number, index in of_units if index in gather.reshards}
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

    @property
    def gradients_come_late(self) -> bool:
        """Whether gradients may be complete only after later gathers: of what is read past hooks, or goes unused."""
        return self._gather.gradients_come_late

    def take_part(self, before_wait: Callable[[int], None]) -> None:
        """Complete, for the other ranks' sake, a backward pass that raised here, or that this rank had none of.

        Args:
            before_wait: launches the reductions of later buckets than the one that it is given.
        """
        if self._gather.in_backward:
            self._gather.abandon_backward(before_wait)
        else:
            self._gather.pass_nothing(before_wait)

    def _keep(self, indices: Sequence[int], *_: object) -> None:
        self._gather.keep(indices)

    def _after_unit(self, indices: Sequence[int], is_last: bool, *called: object) -> None:
        """Free a unit's buckets after its forward pass, and hook the start of its backward pass."""
        # Recomputation: the backward pass that has gathered them goes on to use them.
        if torch._C._current_graph_task_id() != -1:
            return
        tensors = list(_tensors_in(called[-1]))
        storages = {self._buckets[index].unsharded_N.untyped_storage()._cdata for index in indices}
        if any(_storage_of(tensor) in storages for tensor in tensors):
            self._gather.keep(indices)  # [Note: what stays]
            return
        if torch.is_grad_enabled():
            for tensor in tensors:
                # A write in place into a view replaces its part of the graph, with the hook, but not the base's.
                for each in (tensor, tensor._base):
                    if each is not None and each.grad_fn is not None:
                        each.register_hook(functools.partial(self._before_backward, indices))  # type: ignore[no-untyped-call]
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
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        self._gather.wait_for(indices)
        # Of gradients that are to be differentiated themselves: nothing tells when that pass reads these parameters.
        if torch.is_grad_enabled():
            self._gather.keep(indices)

    def end_backward(self) -> None:
        """End the pass for the gathers, if one has begun here; a second call does nothing."""
        self._pass = -1
        self._gather.note_unused()
        self._gather.end_backward()


def _tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors of what a module returns: in containers that torch knows, and in dataclasses."""
    waiting, seen = [value], set[int]()
    while waiting:
        for leaf in tree_leaves(waiting.pop()):
            if isinstance(leaf, Tensor):
                yield leaf
            elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type) and id(leaf) not in seen:
                seen.add(id(leaf))  # one may hold another that holds it
                waiting += [getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)]


def _storage_of(tensor: Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # of no strided memory, or of several
        return None

"""Attaches a monitor to a model in any wrapper: forward and backward passes, optimiser steps, FSDP2's collectives.

    monitor = Monitor(...)
    attached = attach(monitor, model, optimizer)      # model: plain, DDP, FSDP2, ...
    for step, batch in enumerate(batches, 1):
        monitor.step(step)
        loss = model(batch).loss
        loss.backward()
        optimizer.step()

Our own wrappers need no hooks for their collectives: give them a `Recorder`, and the monitor `follow`s it. DDP's
all-reduces and what a program calls of torch.distributed are seen where `collectives=True` asks for it
(`collectives.watch.c10d`). What is not seen: what a graph or `torch.compile` takes in whole.

[Note: the end of a backward pass] A backward pass begins at the gradient of the model's output and ends with the last
of autograd's final callbacks: those of the wrappers (DDP's wait for its reductions, FSDP2's for its scatters) are
queued during the pass, so ours queues itself once more when it is called, and comes after them. Between its two calls
lies the wait for the last reductions, and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from collectives.watch.c10d import TimedCollectives
from collectives.watch.monitor import Monitor
from collectives.watch.recorder import Recorder

logger = logging.getLogger(__name__)

_Segment = contextlib.AbstractContextManager[None]


class Attachment:
    """Hooks of a monitor in a model; `remove` takes them out.

    Args:
        monitor: gets the segments.
        model: the outermost module, the one that the training calls.
        optimizer: whose steps are timed; None: none.
        recorder: times the collectives of FSDP2 where the model has some; None: one of its own.
        collectives: time DDP's all-reduces and the collectives of torch.distributed that the program calls, too. Not
            beside our own wrappers, whose collectives the monitor has from their recorder.
    """

    def __init__(
        self,
        monitor: Monitor,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        recorder: Recorder | None = None,
        *,
        collectives: bool = False,
    ) -> None:
        self._monitor = monitor
        self._reduction = "all_reduce" if isinstance(model, nn.parallel.DistributedDataParallel) else ""
        self._waiting: _Segment | None = None
        self._forward: list[_Segment] = []
        self._backward: _Segment | None = None
        self._stepping: _Segment | None = None
        self._step: int | None = None
        self._num_forward = self._num_backward = 0
        self._removes: list[Callable[[], None]] = [
            model.register_forward_pre_hook(self._before_forward).remove,
            model.register_forward_hook(self._after_forward, always_call=True).remove,
        ]
        if optimizer is not None:
            self._removes += [
                optimizer.register_step_pre_hook(self._before_step).remove,
                optimizer.register_step_post_hook(self._after_step).remove,
            ]
        parameter = next(model.parameters(), None)
        device = "cpu" if parameter is None else parameter.device
        self.recorder = recorder or Recorder(device)
        self._c10d = TimedCollectives(monitor, self.recorder) if collectives else None
        self.num_timed = self._time_collectives(model)
        """Groups of FSDP2 whose collectives are timed."""
        if self.num_timed:
            self._reduction = "reduce_scatter"
        if self._c10d is not None:
            if isinstance(model, nn.parallel.DistributedDataParallel):
                self._c10d.hook_ddp(model)
            self._c10d.replace_functions()
            self._removes.append(self._c10d.remove)
        if self.num_timed or self._c10d is not None:
            monitor.follow(self.recorder)

    def remove(self) -> None:
        """Take all hooks out again. Twice is once."""
        while self._removes:
            self._removes.pop()()

    def _numbered(self) -> None:
        """Count micro-batches of each step from 0."""
        step = self._monitor.open_step
        if step != self._step:
            self._step, self._num_forward, self._num_backward = step, 0, 0

    def _before_forward(self, *_: object) -> None:
        self._numbered()
        facts: dict[str, Any] = {} if torch.is_grad_enabled() else {"grad": False}
        segment = self._monitor.segment("forward", micro_batch=self._num_forward, **facts)
        segment.__enter__()
        self._forward.append(segment)
        self._num_forward += 1

    def _after_forward(self, _model: nn.Module, _args: object, output: object) -> None:
        if self._forward:  # a forward pass that raised may have left none
            self._forward.pop().__exit__(None, None, None)
        if torch.is_grad_enabled():
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._begin_backward)  # type: ignore[no-untyped-call]

    def _begin_backward(self, _grad: Tensor) -> None:
        """Begin the segment of the backward pass that comes to the first of the model's outputs."""
        if self._backward is not None:
            return
        self._numbered()
        segment = self._monitor.segment("backward", micro_batch=self._num_backward)
        segment.__enter__()
        self._backward = segment
        self._num_backward += 1
        queue = torch.autograd.Variable._execution_engine.queue_callback

        def computed() -> None:
            if self._reduction:
                self._waiting = self._monitor.segment("wait", self._reduction)
                self._waiting.__enter__()
            queue(self._end_backward)

        queue(computed)

    def _end_backward(self) -> None:
        if self._waiting is not None:
            self._waiting.__exit__(None, None, None)
            self._waiting = None
        if self._backward is not None:
            self._backward.__exit__(None, None, None)
            self._backward = None

    def _before_step(self, *_: object) -> None:
        self._stepping = self._monitor.segment("optimizer")
        self._stepping.__enter__()

    def _after_step(self, *_: object) -> None:
        if self._stepping is not None:
            self._stepping.__exit__(None, None, None)
            self._stepping = None

    def _time_collectives(self, model: nn.Module) -> int:
        """Time the all-gathers and reduce-scatters of every FSDP2 group below the model; return how many groups."""
        number = 0
        for group in _fsdp_groups(model):
            for name, kind in (("_all_gather_comm", "all_gather"), ("_reduce_scatter_comm", "reduce_scatter")):
                comm = getattr(group, name, None)
                if comm is not None and not hasattr(comm, "_netlayer_class"):
                    self._time_comm(comm, kind)
            number += 1
        return number

    def _time_comm(self, comm: Any, kind: str) -> None:
        plain, recorder, c10d = type(comm), self.recorder, self._c10d

        def timed(self: Any, output_tensor: Tensor, input_tensor: Tensor, group: Any, *args: Any, **kwargs: Any) -> Any:
            if "fsdp" not in recorder.groups and group is not None:
                recorder.groups["fsdp"] = torch.distributed.get_process_group_ranks(group)
            whole = max(output_tensor.nbytes, input_tensor.nbytes)
            capturing = output_tensor.is_cuda and torch.cuda.is_current_stream_capturing()
            timed_here = contextlib.nullcontext() if capturing else recorder.launching("fsdp", kind, whole)
            with contextlib.nullcontext() if c10d is None else c10d.untimed(), timed_here:
                return plain.__call__(self, output_tensor, input_tensor, group, *args, **kwargs)

        # A class of its own, so that FSDP2 finds an instance of the class that it expects.
        comm.__class__ = type(plain.__name__, (plain,), {"__call__": timed, "_netlayer_class": plain})

        def restore() -> None:
            comm.__class__ = plain

        self._removes.append(restore)


def attach(
    monitor: Monitor,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    recorder: Recorder | None = None,
    *,
    collectives: bool = False,
) -> Attachment:
    """Have a monitor time a model's passes and an optimiser's steps; arguments as in `Attachment`."""
    return Attachment(monitor, model, optimizer, recorder, collectives=collectives)


def _tensors(output: object) -> list[Tensor]:
    """Tensors of a model's output, whatever holds them."""
    leaves: Sequence[object] = torch.utils._pytree.tree_leaves(output)
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        # Outputs of transformers and the like are dataclasses or dictionaries of their own.
        values = getattr(output, "values", None)
        leaves = list(values()) if callable(values) else list(getattr(output, "__dict__", {}).values())
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _fsdp_groups(model: nn.Module) -> list[Any]:
    """FSDP2's groups of parameters below a module; torch has no public name for them."""
    groups: list[Any] = []
    for module in model.modules():
        state_of = getattr(module, "_get_fsdp_state", None)
        if callable(state_of):
            state = state_of()
            several = getattr(state, "_fsdp_param_groups", None)
            groups += several if several is not None else filter(None, [getattr(state, "_fsdp_param_group", None)])
    return groups

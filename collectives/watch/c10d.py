"""Times the collectives of programs that call torch.distributed themselves, and the all-reduces of its DDP.

DDP launches its all-reduces in C++; a communication hook that does what DDP would do sees them. What a program calls
by `torch.distributed.all_reduce` and the like is seen by functions in their place. Not covered: names that a program
imported before (`from torch.distributed import all_reduce`), functional collectives (DTensor), sends and receives, and
what a program coalesces: torch launches that when the block ends.

[Note: ends] A synchronous call ends when the host (CPU) or the current stream (CUDA) has waited for it, so it is a wait
as well. An asynchronous one ends when its future does: gloo calls back at that moment, and with NCCL the callback runs
on a stream that waits for the collective.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

from collectives.clock import take_mark

if TYPE_CHECKING:
    from collectives.watch.monitor import Monitor
    from collectives.watch.recorder import Collective, Recorder

logger = logging.getLogger(__name__)

# Function of torch.distributed: its kind in events, and the argument that is or holds the whole buffer.
_FUNCTIONS = {
    "all_reduce": ("all_reduce", "tensor"),
    "all_gather_into_tensor": ("all_gather", "output_tensor"),
    "all_gather_single": ("all_gather", "output_tensor"),  # the two names of torch 2.13 for those beside them
    "all_gather": ("all_gather", "tensor_list"),
    "reduce_scatter_tensor": ("reduce_scatter", "input"),
    "reduce_scatter_single": ("reduce_scatter", "input"),
    "reduce_scatter": ("reduce_scatter", "input_list"),
    "all_to_all_single": ("all_to_all", "input"),
    "all_to_all": ("all_to_all", "input_tensor_list"),
    "broadcast": ("broadcast", "tensor"),
    "reduce": ("reduce", "tensor"),
    "barrier": ("barrier", ""),
}


class TimedCollectives:
    """Has a monitor see torch.distributed's collectives until `remove`.

    Args:
        monitor: gets the waits of synchronous calls.
        recorder: gets the collectives; the monitor follows it.
    """

    def __init__(self, monitor: Monitor, recorder: Recorder) -> None:
        self._monitor, self._recorder = monitor, recorder
        self._local = threading.local()
        self._is_on = True
        self._plain: dict[str, Callable[..., Any]] = {}

    def replace_functions(self) -> None:
        """Put timed functions in the place of torch.distributed's."""
        for name, (kind, buffer) in _FUNCTIONS.items():
            plain = getattr(dist, name, None)
            if plain is None:
                continue
            self._plain[name] = plain
            setattr(dist, name, self._timed(plain, kind, buffer))

    def hook_ddp(self, model: nn.Module) -> bool:
        """Time the all-reduces of a DistributedDataParallel; False where the model has a hook of its own.

        torch takes one hook a model, and keeps it: after `remove` it reduces on, untimed.
        """
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        assert isinstance(model, nn.parallel.DistributedDataParallel)
        if getattr(model, "_comm_hooks", None):
            logger.warning("DDP's all-reduces are not timed: the model has a communication hook already")
            return False
        group = model.process_group
        self._recorder.groups["ddp"] = dist.get_process_group_ranks(group)

        def reduce_timed(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
            if not self._is_on:
                return allreduce_hook(state, bucket)
            with (
                self._inside(),
                self._recorder.launching("ddp", "all_reduce", bucket.buffer().nbytes, ends_later=True) as collective,
            ):
                future = allreduce_hook(state, bucket)

            def done(reduced: torch.futures.Future[Tensor]) -> Tensor:
                _mark_end(collective, bucket.buffer())
                return reduced.value()

            return future.then(done)

        # torch compares the annotations with classes, and here they are texts.
        reduce_timed.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[Tensor]}
        model.register_comm_hook(group, reduce_timed)
        return True

    def remove(self) -> None:
        """Put torch's functions back. Twice is once."""
        self._is_on = False
        for name, plain in self._plain.items():
            setattr(dist, name, plain)
        self._plain.clear()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Have the functions called in the block not timed once more."""
        self._local.depth = getattr(self._local, "depth", 0) + 1
        try:
            yield
        finally:
            self._local.depth -= 1

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Leave what the block calls to whoever times it otherwise."""
        with self._inside():
            yield

    def _timed(self, plain: Callable[..., Any], kind: str, buffer: str) -> Callable[..., Any]:
        """Return a function that does what `plain` does, and is timed; `buffer` is the argument with its bytes."""
        names = list(inspect.signature(plain).parameters)

        @functools.wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            arguments = dict(zip(names, args, strict=False)) | kwargs
            whole = arguments.get(buffer)
            group = arguments.get("group") or dist.group.WORLD
            # No group: one that this rank is not in, or none yet, of which torch has its own to say.
            is_seen = isinstance(group, dist.ProcessGroup) and not _is_coalescing(group) and not _is_capturing(whole)
            if getattr(self._local, "depth", 0) or not is_seen:
                return plain(*args, **kwargs)
            role, num_bytes = self._role(group), _num_bytes(whole)
            with self._inside():
                if arguments.get("async_op"):
                    with self._recorder.launching(role, kind, num_bytes, ends_later=True) as collective:
                        work = plain(*args, **kwargs)
                    if work is not None:
                        work.get_future().add_done_callback(lambda _: _mark_end(collective, whole))
                    return work
                with (
                    self._monitor.segment("wait", kind),
                    self._recorder.launching(role, kind, num_bytes, ends_later=True) as collective,
                ):
                    result = plain(*args, **kwargs)
                    _mark_end(collective, whole)
                return result

        return call

    def _role(self, group: Any) -> str:
        """Name of a group for events; its ranks are noted the first time."""
        if group is dist.group.WORLD:
            role = "world"
        else:
            text = getattr(group, "group_desc", "")
            role = text if text and text != "undefined" else f"group {getattr(group, 'group_name', '')}".rstrip()
        if role not in self._recorder.groups:
            self._recorder.groups[role] = dist.get_process_group_ranks(group)
        return role


def _mark_end(collective: Collective, buffer: object) -> None:
    """Note the end of a collective: [Note: ends]."""
    tensors = _tensors(buffer)
    collective.end = take_mark(bool(tensors) and tensors[0].is_cuda)


def _num_bytes(buffer: object) -> int:
    return sum(tensor.nbytes for tensor in _tensors(buffer))


def _tensors(buffer: object) -> list[Tensor]:
    each: Sequence[object] = buffer if isinstance(buffer, list | tuple) else [buffer]
    return [one for one in each if isinstance(one, Tensor)]


def _is_coalescing(group: dist.ProcessGroup) -> bool:
    """Whether the group only collects calls now, to launch them together: what they return is no work to follow."""
    return group in dist.distributed_c10d._world.pg_coalesce_state


def _is_capturing(buffer: object) -> bool:
    tensors = _tensors(buffer)
    return bool(tensors) and tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()

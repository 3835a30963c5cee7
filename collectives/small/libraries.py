"""The paths that other libraries offer for small collectives, on memory that was registered for them before.

- `NcclWindows`: NCCL on symmetric windows of ours, so with a copy before and after (NCCL >= 2.27).
- `TorchSymmetric`: torch's own symmetric-memory kernels on a buffer of ours, with a copy before.

Not covered: multicast (torch's multimem operations; NCCL uses its own as the user has set it).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.small.path import Calls, Kind, Path, Plain
from collectives.transport.symmetric import meet
from collectives.transport.windows import ALIGNMENT_BYTES, Windows

_TORCH_ONE_SHOT_BYTES = 128 * 1024  # torch's one-shot kernel is the faster one up to here


class NcclWindows(Path):
    """NCCL on memory that its communicator has registered as symmetric windows.

    Tensors made by `source` and `out` lie in that memory; with them nothing is copied.

    Raises:
        ValueError, RuntimeError, TypeError: NCCL or torch cannot; `open_paths` says why.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, max_bytes: int) -> None:
        self._plain, self._max_bytes = Plain(group), -(-max_bytes // 512) * 512
        self.calls: Calls = {
            "all_reduce": self._all_reduce,
            "all_gather": self._all_gather,
            "reduce_scatter": self._reduce_scatter,
        }
        self._num_ranks = dist.get_world_size(group)
        dist.barrier(group, device_ids=[torch.cuda.current_device()])  # makes the communicator, where nothing else has
        self._windows = Windows(group, device, 2 * self._max_bytes)
        self._memory = self._windows.memory

    def source(self, num_bytes: int, dtype: torch.dtype) -> Tensor:
        """The window to send from, or to all-reduce in."""
        return self._memory[:num_bytes].view(dtype)

    def out(self, num_bytes: int, dtype: torch.dtype) -> Tensor:
        """The window to receive in."""
        return self._memory[self._max_bytes :][:num_bytes].view(dtype)

    def _fits(self, kind: Kind, dtype: torch.dtype, num_bytes: int) -> bool:
        del kind, dtype
        return num_bytes <= self._max_bytes and num_bytes % (self._num_ranks * ALIGNMENT_BYTES) == 0

    def _all_reduce(self, tensor: Tensor, _source: Tensor) -> None:
        source = self._source_of(tensor)
        self._plain.all_reduce(source)
        if source is not tensor:
            tensor.copy_(source.view_as(tensor))

    def _all_gather(self, out: Tensor, part: Tensor) -> None:
        self._staged(out, part, self._plain.all_gather)

    def _reduce_scatter(self, out: Tensor, whole: Tensor) -> None:
        self._staged(out, whole, self._plain.reduce_scatter)

    def _staged(self, out: Tensor, source: Tensor, call: Callable[[Tensor, Tensor], None]) -> None:
        inside = out if self._owns(out) else self.out(out.nbytes, out.dtype)
        call(inside, self._source_of(source))
        if inside is not out:
            out.copy_(inside.view_as(out))

    def _source_of(self, tensor: Tensor) -> Tensor:
        return tensor if self._owns(tensor) else self.source(tensor.nbytes, tensor.dtype).copy_(tensor.view(-1))

    def _owns(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self._memory.untyped_storage().data_ptr()


class TorchSymmetric(Path):
    """torch's kernels over symmetric memory: for all-reduce, and for reduce-scatter over 2, 4 or 8 ranks.

    Its only all-gather without multicast is one by copy engines, for large messages: it is not offered here.
    """

    alignment_bytes = 16

    def __init__(self, group: dist.ProcessGroup, device: torch.device, max_bytes: int) -> None:
        from torch.distributed import _symmetric_memory as symm_mem

        self._name, self._num_ranks, self._max_bytes = group.group_name, dist.get_world_size(group), max_bytes
        self._memory = symm_mem.empty(max_bytes, dtype=torch.uint8, device=device)
        meet(self._memory, group)
        self.calls: Calls = {"all_reduce": self._all_reduce}
        if self._unrolled:
            self.calls = {**self.calls, "reduce_scatter": self._reduce_scatter}

    def source(self, num_bytes: int, dtype: torch.dtype) -> Tensor:
        """The memory that peers read."""
        return self._memory[:num_bytes].view(dtype)

    def _fits(self, kind: Kind, dtype: torch.dtype, num_bytes: int) -> bool:
        if dtype not in (torch.bfloat16, torch.float32) or not 0 < num_bytes <= self._max_bytes:
            return False
        return num_bytes % (4 if kind == "all_reduce" else 16 * self._num_ranks) == 0

    def _all_reduce(self, tensor: Tensor, _source: Tensor) -> None:
        source, out = self.source(tensor.nbytes, tensor.dtype).copy_(tensor.view(-1)), tensor.view(-1)
        if tensor.nbytes <= _TORCH_ONE_SHOT_BYTES or not self._unrolled:
            torch.ops.symm_mem.one_shot_all_reduce_out(source, "sum", self._name, out)
        else:
            torch.ops.symm_mem.two_shot_all_reduce_out(source, "sum", self._name, out)

    def _reduce_scatter(self, out: Tensor, whole: Tensor) -> None:
        source = self.source(whole.nbytes, whole.dtype).copy_(whole.view(-1))
        torch.ops.symm_mem.reduce_scatter_out(source, self._name, False, out.view(-1))

    @property
    def _unrolled(self) -> bool:
        """Whether torch has compiled its two-shot kernels for this number of ranks."""
        return self._num_ranks in (2, 4, 8)

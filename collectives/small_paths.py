"""The ways that a small collective can take on one host, behind one interface; `tuning` says which is best where.

- `one_shot`: our kernel; every rank sends all that a peer needs, and sums what it hears itself. One trip over the link.
- `two_shot`: our kernel for all-reduce; each rank sums its part and sends the result around. Fewer bytes, two trips.
- `nccl`: torch.distributed as it is, on a group of gloo as on one of NCCL.
- `nccl_windows`: NCCL on symmetric windows of ours, so with a copy before and after (NCCL >= 2.27).
- `torch_symmetric`: torch's own symmetric-memory kernels on a buffer of ours, with a copy before.

Left out: multicast (torch's multimem operations; NCCL uses its own as the user has set it), and reductions but the sum.

[Note: rounds] Why kinds, sizes and types may follow each other in any order on the one window of our kernels:
1. A line of the window is (half, source, unit). Block b of any kernel touches the units from b * THREADS on, in a
   second leg the same behind capacity / 2, where no first leg gets to. THREADS is the same in every launch, so blocks
   of different index never share a line: each index is a protocol of its own, with a counter of its own.
2. All ranks launch the same kinds and sizes in the same order, so the same grids: counter b means the same launch on
   all of them. A launch whose grid ends before b leaves b's lines and counter alone.
3. A block that takes part has at least one unit, and ends round e only when it has a line of round e from every peer.
   The peer's block sent that line after its own round e - 1 was over for all its threads (the barrier before the
   counter, and the order of kernels on a stream). So a rank that writes in round e + 1 knows that all peers have read
   all that they will of round e - 1, the last one with the same half. A second leg comes later still.
4. A line that a round did not write holds the flag of an older round, which is never the one waited for. (Counters
   have 32 bits: a stale line could pass only if it was last written exactly 2**32 rounds of its block before.)
5. A block waits for the same block of the peers alone, and a GPU starts blocks in the order of their index, so a grid
   that does not fit at once still makes progress.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.symmetric import Window, why_unusable

Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PathName = Literal["one_shot", "two_shot", "nccl", "nccl_windows", "torch_symmetric"]
PATHS: tuple[PathName, ...] = get_args(PathName)

THREADS = 128  # of a block, in every launch: see [Note: rounds]
UNIT_BYTES = 8
LINE_BYTES = 16  # a unit on its way, with its flag twice

_BY_PEERS: tuple[PathName, ...] = ("one_shot", "two_shot", "torch_symmetric")
_KERNEL_TYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_REDUCTIONS = ("all_reduce_small", "reduce_scatter_small", "all_reduce_two_shot")
_KERNELS = ("all_gather_small_bytes", *(f"{name}_{kind}" for name in _REDUCTIONS for kind in _KERNEL_TYPES.values()))
_TORCH_ONE_SHOT_BYTES = 128 * 1024  # torch's one-shot kernel is the faster one up to here

# torch 2.13 renamed these two and warns at the old names; 2.11 knows only those.
_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Path(ABC):
    """One way. Tensors are contiguous and begin at a multiple of `alignment_bytes`; work goes to the current stream."""

    alignment_bytes = 1

    @abstractmethod
    def takes(self, kind: Kind, dtype: torch.dtype, num_bytes: int) -> bool:
        """Whether it can do this, the same on every rank; `num_bytes` of the whole buffer."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> None:
        """Sum, in place."""

    @abstractmethod
    def all_gather(self, out: Tensor, part: Tensor) -> None:
        """`part` of rank r into slice r of every rank's `out`."""

    @abstractmethod
    def reduce_scatter(self, out: Tensor, whole: Tensor) -> None:
        """Sum of slice r of all ranks' `whole` into rank r's `out`."""


class Plain(Path):
    """torch.distributed, which has the last word on what it takes."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def takes(self, kind: Kind, dtype: torch.dtype, num_bytes: int) -> bool:
        del kind, dtype, num_bytes
        return True

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        dist.all_reduce(tensor, op=op, group=self.group)

    def all_gather(self, out: Tensor, part: Tensor) -> None:
        _gather_single(out.view(-1), part.view(-1), group=self.group)

    def reduce_scatter(self, out: Tensor, whole: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        _scatter_single(out.view(-1), whole.view(-1), op=op, group=self.group)


class SmallWindow:
    """The window and the counters that all our kernels of one group share; see [Note: rounds].

    Its size is 64 times the messages' over 8 ranks, 32 times over 4: 8 MiB for 256 KiB there.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, max_bytes: int) -> None:
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.most_units = -(-max_bytes // UNIT_BYTES)
        self.capacity = 2 * self.most_units
        self.rounds = torch.zeros(-(-self.most_units // THREADS), dtype=torch.int32, device=device)
        self._window = Window(group, 2 * self.num_ranks * self.capacity * LINE_BYTES, device)
        # Each kernel once, so that none is loaded inside the capture of a graph, and one that fails does so here.
        scratch = torch.zeros(self.num_ranks * UNIT_BYTES, dtype=torch.uint8, device=device)
        for kernel in _KERNELS:
            self.launch(kernel, scratch, scratch, 1)
        torch.cuda.synchronize(device)

    def launch(self, kernel: str, source: Tensor, out: Tensor, units: int) -> None:
        """Run a kernel of `peer.cu` on the current stream; `units` of 8 bytes a rank, as it counts them."""
        assert 0 < units <= self.most_units
        self._window.launch(
            kernel,
            -(-units // THREADS),
            THREADS,
            self._window.own,
            self.rank,
            source.data_ptr(),
            out.data_ptr(),
            units,
            self.capacity,
            self.rounds.data_ptr(),
        )


class OneShot(Path):
    """Our kernels with one trip. Sums are taken in float32 in the order of the ranks: the same bits on all of them."""

    alignment_bytes = UNIT_BYTES

    def __init__(self, window: SmallWindow) -> None:
        self._window, self.num_ranks = window, window.num_ranks

    def takes(self, kind: Kind, dtype: torch.dtype, num_bytes: int) -> bool:
        known = kind == "all_gather" or dtype in _KERNEL_TYPES
        return known and self._has_room(num_bytes, 1 if kind == "all_reduce" else self.num_ranks)

    def all_reduce(self, tensor: Tensor) -> None:
        kernel = f"all_reduce_small_{_KERNEL_TYPES[tensor.dtype]}"
        self._window.launch(kernel, tensor, tensor, tensor.nbytes // UNIT_BYTES)

    def all_gather(self, out: Tensor, part: Tensor) -> None:
        self._window.launch("all_gather_small_bytes", part, out, part.nbytes // UNIT_BYTES)

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> None:
        kernel = f"reduce_scatter_small_{_KERNEL_TYPES[whole.dtype]}"
        self._window.launch(kernel, whole, out, out.nbytes // UNIT_BYTES)

    def _has_room(self, num_bytes: int, num_parts: int) -> bool:
        """Whether a message in so many parts is one of whole units, and not too many."""
        units, rest = divmod(num_bytes, UNIT_BYTES * num_parts)
        return rest == 0 and 0 < units * num_parts <= self._window.most_units


class TwoShot(OneShot):
    """Our all-reduce with two trips; on the window of the others."""

    def takes(self, kind: Kind, dtype: torch.dtype, num_bytes: int) -> bool:
        return kind == "all_reduce" and dtype in _KERNEL_TYPES and self._has_room(num_bytes, self.num_ranks)

    def all_reduce(self, tensor: Tensor) -> None:
        kernel = f"all_reduce_two_shot_{_KERNEL_TYPES[tensor.dtype]}"
        self._window.launch(kernel, tensor, tensor, tensor.nbytes // UNIT_BYTES // self.num_ranks)


class NcclWindows(Path):
    """NCCL on memory that its communicator has registered as symmetric windows.

    Tensors made by `source` and `out` lie in that memory; with them nothing is copied.

    Raises:
        RuntimeError, TypeError: NCCL or torch cannot; `open_paths` says why.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, max_bytes: int) -> None:
        self._plain, self._max_bytes = Plain(group), -(-max_bytes // 512) * 512
        backend: Any = group._get_backend(device)
        self._pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(self._pool):
            self._memory = torch.zeros(2 * self._max_bytes, dtype=torch.uint8, device=device)
        dist.barrier(group)  # makes the communicator, where nothing else has
        backend.register_mem_pool(self._pool, symm=True)  # raises where it fails

    def source(self, num_bytes: int, dtype: torch.dtype) -> Tensor:
        """The window to send from, or to all-reduce in."""
        return self._memory[:num_bytes].view(dtype)

    def out(self, num_bytes: int, dtype: torch.dtype) -> Tensor:
        """The window to receive in."""
        return self._memory[self._max_bytes :][:num_bytes].view(dtype)

    def takes(self, kind: Kind, dtype: torch.dtype, num_bytes: int) -> bool:
        del kind, dtype
        return num_bytes <= self._max_bytes

    def all_reduce(self, tensor: Tensor) -> None:
        source = self._source_of(tensor)
        self._plain.all_reduce(source)
        if source is not tensor:
            tensor.copy_(source.view_as(tensor))

    def all_gather(self, out: Tensor, part: Tensor) -> None:
        self._staged(out, part, self._plain.all_gather)

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> None:
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
    """torch's kernels over symmetric memory: for all-reduce, and for reduce-scatter over 2, 4 or 8 ranks."""

    alignment_bytes = 16

    def __init__(self, group: dist.ProcessGroup, device: torch.device, max_bytes: int) -> None:
        from torch.distributed import _symmetric_memory as symm_mem

        self._name, self._num_ranks, self._max_bytes = group.group_name, dist.get_world_size(group), max_bytes
        self._memory = symm_mem.empty(max_bytes, dtype=torch.uint8, device=device)
        symm_mem.rendezvous(self._memory, group)

    def source(self, num_bytes: int, dtype: torch.dtype) -> Tensor:
        """The memory that peers read."""
        return self._memory[:num_bytes].view(dtype)

    def takes(self, kind: Kind, dtype: torch.dtype, num_bytes: int) -> bool:
        if dtype not in (torch.bfloat16, torch.float32) or not 0 < num_bytes <= self._max_bytes:
            return False
        if kind == "all_reduce":
            return num_bytes % 4 == 0
        return kind == "reduce_scatter" and self._unrolled and num_bytes % (16 * self._num_ranks) == 0

    def all_reduce(self, tensor: Tensor) -> None:
        source, out = self.source(tensor.nbytes, tensor.dtype).copy_(tensor.view(-1)), tensor.view(-1)
        if tensor.nbytes <= _TORCH_ONE_SHOT_BYTES or not self._unrolled:
            torch.ops.symm_mem.one_shot_all_reduce_out(source, "sum", self._name, out)
        else:
            torch.ops.symm_mem.two_shot_all_reduce_out(source, "sum", self._name, out)

    def all_gather(self, out: Tensor, part: Tensor) -> None:
        raise NotImplementedError("torch's only all-gather without multicast is one by copy engines")

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> None:
        source = self.source(whole.nbytes, whole.dtype).copy_(whole.view(-1))
        torch.ops.symm_mem.reduce_scatter_out(source, self._name, False, out.view(-1))

    @property
    def _unrolled(self) -> bool:
        """Whether torch has compiled its two-shot kernels for this number of ranks."""
        return self._num_ranks in (2, 4, 8)


def open_paths(
    names: Sequence[PathName], group: dist.ProcessGroup, device: torch.device, max_bytes: int
) -> tuple[dict[PathName, Path], dict[PathName, str]]:
    """Those of `names` that can be had, and why the others cannot. Every rank calls it, and gets the same.

    Args:
        max_bytes: the largest message.
    """
    paths: dict[PathName, Path] = {"nccl": Plain(group)}
    left_out: dict[PathName, str] = {}
    by_peers = [name for name in _BY_PEERS if name in names]
    no_peers = why_unusable(group, device) if by_peers else None
    if no_peers is not None:
        left_out |= dict.fromkeys(by_peers, no_peers)
    elif by_peers:
        if "torch_symmetric" in by_peers:
            paths["torch_symmetric"] = TorchSymmetric(group, device, max_bytes)
        if by_peers != ["torch_symmetric"]:
            window = SmallWindow(group, device, max_bytes)
            paths |= {"one_shot": OneShot(window), "two_shot": TwoShot(window)}
    if "nccl_windows" in names:
        windows = _open_windows(group, device, max_bytes)
        if isinstance(windows, str):
            left_out["nccl_windows"] = windows
        else:
            paths["nccl_windows"] = windows
    return paths, left_out


def _open_windows(group: dist.ProcessGroup, device: torch.device, max_bytes: int) -> NcclWindows | str:
    """The windows; or, on every rank alike, why one of them has none."""
    windows, reason = None, None
    try:
        if device.type != "cuda":
            raise RuntimeError(f"the device is {device.type}, not cuda")
        windows = NcclWindows(group, device, max_bytes)
    except (RuntimeError, TypeError, AttributeError) as exc:  # an old NCCL, an old torch, another backend
        reason = f"{type(exc).__name__}: {str(exc).partition(chr(10))[0]}"
    reasons: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reasons, reason, group=group)
    found = next((f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why is not None), None)
    if found is not None or windows is None:
        return found or "it could not be opened"
    return windows

"""Systems of `bench.small_messages`: ours, and the others' ways to the same result.

Every system makes trials of a collective and a size: tensors where it wants them, and the call. Ours and plain NCCL use
ordinary memory; NCCL's windows and torch's operations use memory that was registered for them before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from bench.small_messages.command import Settings
from bench.small_messages.rows import NCCL, OURS
from collectives.small.libraries import NcclWindows, TorchSymmetric
from collectives.small.messages import SmallCollectives
from collectives.small.path import Kind, PathName, Plain
from collectives.small.paths import open_paths
from collectives.small.table import TuningTable
from collectives.small.trial import Trial, buffer_sizes, trial_of

DTYPE = torch.bfloat16


class System(ABC):
    """One of the systems that are compared."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)

    @abstractmethod
    def trials(self, kind: Kind, num_bytes: int) -> dict[str, Trial]:
        """Make the trials by variant; none where the system lacks the collective."""

    def tensors(self, kind: Kind, num_bytes: int) -> tuple[Tensor, Tensor]:
        """Return a rank's source and output tensors, in ordinary memory."""
        source, out = (
            torch.empty(size // DTYPE.itemsize, dtype=DTYPE, device=self.device)
            for size in buffer_sizes(kind, num_bytes, self.num_ranks)
        )
        return source, out


class Ours(System):
    def __init__(self, group: dist.ProcessGroup, device: torch.device, max_bytes: int, table: TuningTable) -> None:
        super().__init__(group, device)
        self.small = SmallCollectives(group, device, max_bytes, table)

    def trials(self, kind: Kind, num_bytes: int) -> dict[str, Trial]:
        source, out = self.tensors(kind, num_bytes)
        calls: dict[Kind, Callable[[], None]] = {
            "all_reduce": lambda: self.small.all_reduce(source),
            "all_gather": lambda: self.small.all_gather(out, source),
            "reduce_scatter": lambda: self.small.reduce_scatter(out, source),
        }
        out = source if kind == "all_reduce" else out
        path = self.small.path_of(kind, max(source.nbytes, out.nbytes), DTYPE)
        variant = "torch.distributed" if path == "nccl" else path
        return {variant: Trial(kind, source, out, calls[kind], self.rank, self.num_ranks)}


class PlainNccl(System):
    def trials(self, kind: Kind, num_bytes: int) -> dict[str, Trial]:
        return {"": trial_of(Plain(self.group), kind, *self.tensors(kind, num_bytes), self.group)}


class OnWindows(System):
    """NCCL, with both tensors in windows."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, windows: NcclWindows) -> None:
        super().__init__(group, device)
        self._windows = windows

    def trials(self, kind: Kind, num_bytes: int) -> dict[str, Trial]:
        source_bytes, out_bytes = buffer_sizes(kind, num_bytes, self.num_ranks)
        source, out = self._windows.source(source_bytes, DTYPE), self._windows.out(out_bytes, DTYPE)
        return {"": trial_of(self._windows, kind, source, out, self.group)}


class TorchOperations(System):
    """torch's operations over symmetric memory, but for those that need multicast; one variant each."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, memory: TorchSymmetric) -> None:
        super().__init__(group, device)
        self._memory = memory

    def trials(self, kind: Kind, num_bytes: int) -> dict[str, Trial]:
        ops, group_name = torch.ops.symm_mem, self.group.group_name
        source = self._memory.source(buffer_sizes(kind, num_bytes, self.num_ranks)[0], DTYPE)
        _, out = self.tensors(kind, num_bytes)

        def make(out: Tensor, launch: Callable[[], None]) -> Trial:
            return Trial(kind, source, out, launch, self.rank, self.num_ranks)

        if kind == "all_reduce":
            return {
                "one_shot": make(out, lambda: ops.one_shot_all_reduce_out(source, "sum", group_name, out)),
                "two_shot": make(source, lambda: ops.two_shot_all_reduce_(source, "sum", group_name)),
            }
        if kind == "all_gather":
            return {"low_contention": self._new(make, lambda: ops._low_contention_all_gather(source, group_name))}
        trials = {
            "low_contention": self._new(make, lambda: ops._low_contention_reduce_scatter(source, "sum", group_name))
        }
        if self._memory.takes(kind, DTYPE, source.nbytes):
            trials["one_kernel"] = make(out, lambda: ops.reduce_scatter_out(source, group_name, False, out))
        return trials

    def _new(self, make: Callable[[Tensor, Callable[[], None]], Trial], call: Callable[[], Tensor]) -> Trial:
        """Make the trial of an operation that allocates its output and runs on a stream of its own."""

        def launch() -> None:
            trial.out = torch.ops._c10d_functional.wait_tensor(call())

        trial = make(torch.empty(0, dtype=DTYPE, device=self.device), launch)
        return trial


def open_systems(
    group: dist.ProcessGroup, device: torch.device, settings: Settings, table: TuningTable
) -> tuple[dict[str, System], dict[str, str]]:
    """Open the systems that this group has, in the order of their turns, and say why others are skipped."""
    ours = Ours(group, device, settings.max_bytes, table)
    systems: dict[str, System] = {OURS: ours}
    skipped: dict[str, str] = {}
    if ours.small.why_plain is not None:
        reason = f"all of it is torch.distributed here, as `{NCCL}` would be ({ours.small.why_plain})"
        skipped["kernels of ours"] = reason
    if device.type != "cuda":
        return systems, skipped | dict.fromkeys(
            (NCCL, "nccl_windows", "torch_symmetric"), f"the device is {device.type}"
        )
    systems[NCCL] = PlainNccl(group, device)
    peers: tuple[PathName, ...] = ("nccl_windows", "torch_symmetric")
    paths, reasons = open_paths(peers, group, device, max(settings.sizes))
    windows, memory = (paths.get(name) for name in peers)
    if isinstance(windows, NcclWindows):
        systems["nccl_windows"] = OnWindows(group, device, windows)
    if isinstance(memory, TorchSymmetric):
        systems["torch_symmetric"] = TorchOperations(group, device, memory)
    return systems, skipped | {str(name): reason for name, reason in reasons.items()}

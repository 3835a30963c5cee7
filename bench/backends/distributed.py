"""torch.distributed as a bench's library: `gloo` on CPUs, `torch` for NCCL as torch calls it.

Not covered: NCCL called directly (`nccl`), and with it the flags and types that torch.distributed does not pass on.
"""

from __future__ import annotations

import os
import platform
import time
from abc import abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from bench.backends.base import Backend, Device, Facts
from collectives.torch_names import all_gather_single, reduce_scatter_single
from netlayer.errors import ConfigError, HardwareMissing
from netlayer.launch.rank import RankEnv

OPS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "avg": dist.ReduceOp.AVG,
}
_COPIES = ("all_reduce", "broadcast", "reduce")


class DistributedBackend(Backend):
    """The collectives of torch.distributed, whatever library is below."""

    dtypes = ("int8", "uint8", "int32", "int64", "half", "float", "double", "bfloat16")
    ops = tuple(OPS)

    def __init__(self, env: RankEnv, device: torch.device, timeout: timedelta | None) -> None:
        super().__init__(env, device)
        self.group = self._make_group(timeout)

    @abstractmethod
    def _make_group(self, timeout: timedelta | None) -> dist.ProcessGroup:
        """A group of all ranks whose calls fail after `timeout`; None leaves that to the library."""

    def all_reduce(self, recv: Tensor, send: Tensor, op: str) -> None:
        self.copy(recv, send)
        dist.all_reduce(recv, OPS[op], group=self.group)

    def all_gather(self, recv: Tensor, send: Tensor) -> None:
        all_gather_single(recv, send, group=self.group)

    def reduce_scatter(self, recv: Tensor, send: Tensor, op: str) -> None:
        reduce_scatter_single(recv, send, OPS[op], group=self.group)

    def alltoall(self, recv: Tensor, send: Tensor) -> None:
        dist.all_to_all_single(recv, send, group=self.group)

    def alltoallv(self, recv: Tensor, send: Tensor, received: Sequence[int], sent: Sequence[int]) -> None:
        into, out_of = recv[: sum(received)], send[: sum(sent)]
        dist.all_to_all_single(into, out_of, list(received), list(sent), group=self.group)

    def exchange(self, recv: Tensor, source: int, send: Tensor, to: int) -> None:
        pair = [dist.P2POp(dist.isend, send, to, self.group), dist.P2POp(dist.irecv, recv, source, self.group)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    def copy(self, recv: Tensor, send: Tensor) -> None:
        if recv.data_ptr() != send.data_ptr():
            recv.copy_(send)

    def broadcast(self, recv: Tensor, send: Tensor, root: int) -> None:
        if self.rank == root:
            self.copy(recv, send)
        dist.broadcast(recv, root, group=self.group)

    def reduce(self, recv: Tensor, send: Tensor, op: str, root: int) -> None:
        self.copy(recv, send)
        dist.reduce(recv, root, OPS[op], group=self.group)

    def gather(self, recv: Tensor, send: Tensor, root: int) -> None:
        parts = list(recv.tensor_split(self.ranks)) if self.rank == root else None
        dist.gather(send, parts, root, group=self.group)

    def scatter(self, recv: Tensor, send: Tensor, root: int) -> None:
        parts = list(send.tensor_split(self.ranks)) if self.rank == root else None
        dist.scatter(recv, parts, root, group=self.group)

    @classmethod
    def emulation(cls, collective: str, op: str, in_place: bool) -> str:
        del op
        if collective in _COPIES and not in_place:
            return "copy, then in place: torch.distributed has no out-of-place call"
        return ""

    def facts(self) -> Facts:
        return Facts(f"{self.name}, torch {torch.__version__}")


class GlooBackend(DistributedBackend):
    """Backend of CPUs and sockets."""

    name = "gloo"
    launches_ahead = False
    library_version = 0

    def __init__(self, env: RankEnv, timeout: timedelta | None) -> None:
        super().__init__(env, torch.device("cpu"), timeout)
        self._local_ranks = env.local_world_size

    def _make_group(self, timeout: timedelta | None) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
        return group

    @classmethod
    def emulation(cls, collective: str, op: str, in_place: bool) -> str:
        notes = [super().emulation(collective, op, in_place)]
        if collective == "reduce_scatter":
            notes.append("all_reduce of a copy: torch's gloo has no reduce-scatter")
        if op == "avg":
            notes.append("sum, then a division: gloo has no average")
        return "; ".join(filter(None, notes))

    @classmethod
    def refusal(cls, dtype: str, op: str) -> str:
        if op == "avg" and "int" in dtype and dtype in cls.dtypes:
            return "torch's gloo averages floating types only"
        return super().refusal(dtype, op)

    def describe(self) -> Device:
        return Device(0, "0000:00:00", _proc_value("/proc/cpuinfo", "model name") or platform.processor() or "cpu")

    def free_bytes(self) -> int | None:
        available = _proc_value("/proc/meminfo", "MemAvailable").removesuffix(" kB")
        return int(available) * 1024 // self._local_ranks if available.isdigit() else None

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def synchronise(self) -> None:
        """Nothing is under way: every call returned with its data there."""


class TorchBackend(DistributedBackend):
    """One GPU a rank, NCCL through torch.distributed."""

    name = "torch"
    launches_ahead = True

    def __init__(self, env: RankEnv, timeout: timedelta | None) -> None:
        index = local_gpu(env)
        torch.cuda.set_device(index)
        super().__init__(env, torch.device("cuda", index), timeout)
        self._timeout_s = timeout.total_seconds() if timeout else None
        major, minor, patch = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]
        self.library_version = major * 10000 + minor * 100 + patch

    def _make_group(self, timeout: timedelta | None) -> dist.ProcessGroup:
        del timeout  # `synchronise` sees to it
        group: dist.ProcessGroup = dist.new_group(backend="nccl", device_id=self.device)
        return group

    def describe(self) -> Device:
        card = torch.cuda.get_device_properties(self.device)
        numbers = [int(getattr(card, name, 0)) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
        return Device(self.device.index, "{:04x}:{:02x}:{:02x}".format(*numbers), card.name)

    def free_bytes(self) -> int | None:
        return torch.cuda.mem_get_info(self.device)[0]

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(begin.elapsed_time(end)) / 1e3

    def synchronise(self) -> None:
        if self._timeout_s is None:
            torch.cuda.synchronize(self.device)
            return
        # torch's own watchdog would end the process, with a page of text and no word of what was set.
        done, deadline_s = self.mark(), time.monotonic() + self._timeout_s
        while not done.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"NCCL timed out after {self._timeout_s:g} s")


def local_gpu(env: RankEnv) -> int:
    """The GPU of this rank.

    Raises:
        HardwareMissing: there are fewer GPUs here than ranks.
    """
    index, number = first_gpu() + env.local_rank, torch.cuda.device_count()
    if index >= number:
        gpus = f"{number} GPU" + "s" * (number != 1)
        raise HardwareMissing(f"rank {env.rank} needs GPU {index}, but {os.uname().nodename} has {gpus}")
    return index


def first_gpu() -> int:
    """NCCL_TESTS_DEVICE: the GPU of local rank 0; the others follow."""
    text = os.environ.get("NCCL_TESTS_DEVICE", "0")
    if not text.isdigit():
        raise ConfigError("NCCL_TESTS_DEVICE", text, "must be the number of a GPU", "unset it or give 0")
    return int(text)


def _proc_value(file: str, key: str) -> str:
    """The value behind `key` in a file of /proc; empty where there is none."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except OSError:
        return ""
    values = [line.partition(":")[2].strip() for line in text.splitlines() if line.partition(":")[0].strip() == key]
    return values[0] if values else ""

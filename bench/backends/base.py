"""Ground of every bench's ranks: their control group, the interface of a library, and torch.distributed as one.

`Control` is how ranks meet and agree on figures, apart from what is measured. `Backend` is a library that carries the
bytes: its collectives, its clock, its device and its limits. Collectives are enqueued in order on one stream, as
nccl-tests does: where there is no stream (gloo), a call returns once its data is there. What a library lacks and we
make up from other calls is named by `emulation`; what it cannot do at all is refused before a rank starts.
`GlooBackend` runs on CPUs, `TorchBackend` is NCCL as torch.distributed calls it. Not covered: NCCL called directly
(`nccl`), and with it the flags and types that torch.distributed does not pass on.
"""

from __future__ import annotations

import os
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bench.perf.collectives.collective import UNKNOWN
from bench.perf.options import DIRECT_FLAGS, PerfOptions, flag_name
from collectives.torch_names import all_gather_single, reduce_scatter_single
from netlayer.errors import ConfigError, HardwareMissing
from netlayer.launch.rank import RankEnv
from netlayer.store.meeting import register_schemes

if TYPE_CHECKING:
    from bench.perf.collectives.collective import Collective

# In the order of nccl-tests' `-d all`.
DTYPES = {
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "uint32": torch.uint32,
    "int64": torch.int64,
    "uint64": torch.uint64,
    "half": torch.float16,
    "float": torch.float32,
    "double": torch.float64,
    "bfloat16": torch.bfloat16,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
}
Launch = Callable[[], object]
OPS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "avg": dist.ReduceOp.AVG,
}
LARGEST_FACTOR = 2  # of `premultiplier`
_COPIES = ("all_reduce", "broadcast", "reduce")
_LEAST_MEETING_S = 60  # a peer may still be importing torch
_START_AHEAD_S = 500e-6  # ranks leave an all-reduce of sockets at most so far apart
_CLOCKS_APART_S = 5.0


class Control:
    """A process group on gloo, as the driver uses it; its calls fail where a peer is silent for `timeout`."""

    def __init__(self, env: RankEnv, timeout: timedelta | None) -> None:
        self.rank, self.ranks = env.rank, env.world_size
        self._one_host = env.local_world_size == env.world_size
        # On gloo on every machine: agreement must not run on what is measured, and works where that hangs.
        self._group = dist.new_group(backend="gloo", timeout=timeout)

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(self._group)

    def start_together(self) -> None:
        """Return on all ranks of one host at the same moment, within about a microsecond; on several hosts at once.

        Ranks leave a barrier of sockets, or a wait for their GPUs, up to 100 µs apart: a third of the time of 20 small
        calls.
        """
        if not self._one_host:
            return
        # The monotonic clock is the host's, so the ranks agree on a point of it that lies ahead of all of them.
        now_s = time.monotonic()
        latest = torch.tensor([now_s, -now_s], dtype=torch.float64)
        dist.all_reduce(latest, dist.ReduceOp.MAX, group=self._group)
        newest_s, oldest_s = float(latest[0]), -float(latest[1])
        if newest_s - oldest_s > _CLOCKS_APART_S:  # containers with time namespaces of their own
            return
        while time.monotonic() < newest_s + _START_AHEAD_S:
            pass

    def sum(self, value: int) -> int:
        """The sum over ranks."""
        tensor = torch.tensor(value)
        dist.all_reduce(tensor, group=self._group)
        return int(tensor)

    def least(self, value: int) -> int:
        """The least of all ranks."""
        tensor = torch.tensor(value)
        dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self._group)
        return int(tensor)

    def average(self, values: Sequence[float], average: int) -> list[float]:
        """Combine each value over ranks by nccl-tests' `-a`: 0 rank 0's, 1 the mean, 2 the least, 3 the greatest."""
        # float64: a time in microseconds of a long run would lose its tenths in float32.
        tensor = torch.tensor(values, dtype=torch.float64)
        if average == 0:
            dist.broadcast(tensor, 0, group=self._group)
        elif average == 1:
            dist.all_reduce(tensor, group=self._group)
            tensor /= self.ranks
        else:
            dist.all_reduce(tensor, dist.ReduceOp.MIN if average == 2 else dist.ReduceOp.MAX, group=self._group)
        return [float(value) for value in tensor]

    def gather(self, value: object) -> list[Any]:
        """One small object of each rank, in rank order, on all ranks."""
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value, group=self._group)
        return values


@contextmanager
def meet(env: RankEnv, url: str, timeout: timedelta | None) -> Iterator[Control]:
    """The default process group of all ranks, and what they agree by.

    Args:
        url: an init_method of torch.distributed; `redis://` and `unix://` are netlayer's.
        timeout: how long a rank waits for its peers; None leaves it to torch.
    """
    register_schemes(url)
    patience = None if timeout is None else max(timeout, timedelta(seconds=_LEAST_MEETING_S))
    dist.init_process_group("gloo", init_method=url, rank=env.rank, world_size=env.world_size, timeout=patience)
    yield Control(env, timeout)
    # After an error the process ends: to leave the group in order would mean to wait for peers that may hang.
    dist.destroy_process_group()


class Call(NamedTuple):
    """The arguments of one collective; in place, `send` is `recv` or a view of it, or the other way round.

    `part_count` is the elements of one part, as the collective counts them.
    """

    recv: Tensor
    send: Tensor
    op: str
    root: int
    part_count: int = 0


@dataclass(frozen=True)
class Device:
    """Device of a rank; `bus` is the PCI address as nccl-tests prints it."""

    index: int
    bus: str
    name: str


@dataclass
class AlgorithmChoice:
    """Algorithm and protocol that a library logged for the calls listened to; `unknown` where it logged none."""

    algorithm: str = UNKNOWN
    protocol: str = UNKNOWN


@dataclass(frozen=True)
class Facts:
    """Description of a backend for the table's head: one line, and NVLS as the library logged it."""

    line: str
    nvls: str = UNKNOWN


class Backend(ABC):
    """One rank's access to a library. The default process group must exist."""

    name: ClassVar[str]  # as in --backend
    launches_ahead: ClassVar[bool]  # a call returns before it is done
    always_marks: ClassVar[bool] = True  # a mark costs nothing next to a call, so single calls are always timed
    honours: ClassVar[frozenset[str]] = frozenset()  # of the flags that most libraries lack
    dtypes: ClassVar[tuple[str, ...]]
    ops: ClassVar[tuple[str, ...]]
    library_version: int  # NCCL's, as 22705 for 2.27.5; 0 where it is not NCCL

    def __init__(self, env: RankEnv, device: torch.device) -> None:
        self.rank, self.ranks, self.device = env.rank, env.world_size, device
        # Between hosts the wire bandwidth of some algorithms is not known, see `wire_share`.
        self.one_host = env.local_world_size == env.world_size

    @classmethod
    def open(cls, env: RankEnv, timeout: timedelta | None, options: PerfOptions) -> Backend:
        """The backend of this rank, as the options want it."""
        # The flags that change how a library is opened are NCCL's own, and `check` has refused them.
        del options
        return cls(env, timeout)  # type: ignore[arg-type]

    @abstractmethod
    def all_reduce(self, recv: Tensor, send: Tensor, op: str) -> None: ...

    @abstractmethod
    def all_gather(self, recv: Tensor, send: Tensor) -> None: ...

    @abstractmethod
    def reduce_scatter(self, recv: Tensor, send: Tensor, op: str) -> None: ...

    @abstractmethod
    def broadcast(self, recv: Tensor, send: Tensor, root: int) -> None: ...

    @abstractmethod
    def reduce(self, recv: Tensor, send: Tensor, op: str, root: int) -> None: ...

    @abstractmethod
    def gather(self, recv: Tensor, send: Tensor, root: int) -> None: ...

    @abstractmethod
    def scatter(self, recv: Tensor, send: Tensor, root: int) -> None: ...

    @abstractmethod
    def alltoall(self, recv: Tensor, send: Tensor) -> None: ...

    @abstractmethod
    def alltoallv(self, recv: Tensor, send: Tensor, received: Sequence[int], sent: Sequence[int]) -> None:
        """Run `alltoall` with element counts per rank: `received[i]` from rank i, `sent[i]` to it."""

    @abstractmethod
    def exchange(self, recv: Tensor, source: int, send: Tensor, to: int) -> None:
        """Send to one rank while receiving from one, which may be the same."""

    @abstractmethod
    def copy(self, recv: Tensor, send: Tensor) -> None:
        """A copy on this rank, in order with the collectives; none where both are the same memory."""

    def sendrecv(self, recv: Tensor, send: Tensor) -> None:
        # A ring, as in nccl-tests: every link carries one message each way.
        self.exchange(recv, (self.rank - 1) % self.ranks, send, (self.rank + 1) % self.ranks)

    def bind(self, collective: Collective, call: Call) -> Launch:
        """A function that starts this call; what can be worked out beforehand is."""
        return partial(collective.launch, self, call)

    def chain(self, launches: Sequence[Launch]) -> Launch:
        """Return one function that starts these in order; what it does between two of them counts as their time."""

        # Bound once, so that a timed loop pays for no look-up.
        def launch_all() -> None:
            for launch in launches:
                launch()

        return launch_all

    def batch(self, launches: Sequence[Launch]) -> Launch:
        """Several calls as one launch; only where `-m` is honoured."""
        raise NotImplementedError(f"{self.name} groups no calls")

    def capture(self, launches: Sequence[Launch]) -> Launch:
        """Several calls as one graph; only where `-G` is honoured."""
        raise NotImplementedError(f"{self.name} has no graphs")

    @contextmanager
    def listen(self) -> Iterator[AlgorithmChoice]:
        """Note the library's choices for the calls within: on rank 0, and only where it logs them."""
        yield AlgorithmChoice()

    @classmethod
    def emulation(cls, collective: str, op: str, in_place: bool) -> str:
        """Name the operation that the library lacks for this call and what runs instead; empty if it runs the call."""
        del collective, op, in_place
        return ""

    @classmethod
    def refusal(cls, dtype: str, op: str) -> str:
        """Why the library cannot do this type, or reduce it with this operator (or `none`); empty where it can."""
        if dtype not in cls.dtypes:
            return f"{cls.name} has no {dtype}; use --backend nccl"
        if op not in (*cls.ops, "none"):  # none: nothing is reduced
            return f"{cls.name} has no {op}; use --backend nccl"
        return ""

    @classmethod
    def check(cls, options: PerfOptions) -> None:
        """See that every flag can be honoured.

        Raises:
            ConfigError: one cannot, by this library or by the version that is there.
        """
        # The time to launch would be that of the whole call.
        if options.cpu_time and not cls.launches_ahead:
            rule = f"{cls.name} returns from a call when it is done: there is no time to launch"
            raise ConfigError(flag_name("cpu_time"), options.cpu_time, rule, "omit it, or use --backend nccl")
        for name, default in DIRECT_FLAGS.items():
            value = getattr(options, name)
            # Refused, not ignored: a figure under a flag that did nothing would be read as one with it.
            if value != default and name not in cls.honours:
                rule = f"{cls.name} has nothing of the kind"
                raise ConfigError(flag_name(name), value, rule, f"use --backend nccl, or omit it ({default})")

    def allocate(self, num_bytes: int) -> Tensor:
        """A buffer for sending or receiving, as bytes.

        Zeroed: what lies in fresh memory may be subnormal floats, which are slow to add on a CPU.
        """
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def close(self) -> None:
        """Give back what the library holds; only after a run that went well."""
        return  # most hold nothing that the end of the process does not give back

    @abstractmethod
    def facts(self) -> Facts:
        """Return the description of this backend."""

    @abstractmethod
    def describe(self) -> Device:
        """The device of this rank."""

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Memory that this rank may still take on its device; None where nobody knows."""

    @abstractmethod
    def mark(self) -> Any:
        """A point in the order of calls, for `seconds`."""

    @abstractmethod
    def seconds(self, begin: Any, end: Any) -> float:
        """Time between two marks; only after `synchronise`."""

    @abstractmethod
    def synchronise(self) -> None:
        """Wait until all that was launched is done."""


def premultiplier(rank: int) -> int:
    """Return the factor of `mulsum` for a rank's input: exact in every type, and not the same for all."""
    return 1 + rank % LARGEST_FACTOR


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
        # A mean of whole numbers is none: the division that stands in for it would round.
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
        # Before the group is made: NCCL takes the device that is current.
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

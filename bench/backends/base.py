"""Interface of a library that carries a bench's bytes: its collectives, its clock, its device and its limits.

Collectives are enqueued in order on one stream, as nccl-tests does: where there is no stream (gloo), a call returns
once its data is there. What a library lacks and we make up from other calls is named by `emulation`; what it cannot
do at all is refused before a rank starts. Not covered: the libraries themselves, one file each next to this one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from bench.perf.algorithms import UNKNOWN
from bench.perf.options import DIRECT_FLAGS, PerfOptions, flag_name
from netlayer.errors import ConfigError
from netlayer.launch.rank import RankEnv

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
class Heard:
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
    def listen(self) -> Iterator[Heard]:
        """Note the library's choices for the calls within: on rank 0, and only where it logs them."""
        yield Heard()

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
        if options.cpu_time and not cls.launches_ahead:
            rule = f"{cls.name} returns from a call when it is done: there is no time to launch"
            raise ConfigError(flag_name("cpu_time"), options.cpu_time, rule, "leave it out, or use --backend nccl")
        for name, default in DIRECT_FLAGS.items():
            value = getattr(options, name)
            if value != default and name not in cls.honours:
                rule = f"{cls.name} has nothing of the kind"
                raise ConfigError(flag_name(name), value, rule, f"use --backend nccl, or leave it out ({default})")

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

"""NCCL called directly: CuPy for streams, events and graphs, ctypes for NCCL, and no torch while the clock runs.

Each call is worked out beforehand into C functions and their arguments (`bind`), so that timed calls are one loop over
them, which is compiled where numba is installed (`compiled_loop`). Buffers come from ncclMemAlloc, as in nccl-tests,
and the communicator is set as there. Not covered: several GPUs in one process, and device kernels (`-D`), which are
CUDA C++ compiled against NCCL's headers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from bench.backends import nccl_versions
from bench.backends.base import DTYPES, AlgorithmChoice, Backend, Call, Device, Facts, Launch, local_gpu
from bench.backends.communicator import Communicator
from bench.backends.compiled_loop import CCall, compile_calls, is_compiled
from bench.backends.gpu import Gpu
from bench.backends.nccl_log import NcclLog, read_algorithm, read_nvls
from bench.perf.options import OP_NAMES, PerfOptions
from collectives.transport import libnccl
from collectives.transport.libnccl import DATA_TYPES, RED_OPS, Libnccl, show_version
from netlayer.launch.rank import RankEnv

if TYPE_CHECKING:
    from bench.perf.collectives.collective import Collective

_TORCH_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class NcclBackend(Backend):
    """Backend with one GPU per rank that calls NCCL through its C interface."""

    name = "nccl"
    launches_ahead = True
    always_marks = False  # an event between two small calls is seen in their time
    honours = frozenset({"agg_iters", "blocking", "stream_null", "cudagraph", "local_register", "cta_policy"})
    dtypes = tuple(DTYPES)
    ops = OP_NAMES

    def __init__(
        self,
        env: RankEnv,
        timeout: timedelta | None = None,
        options: PerfOptions | None = None,
        library: Libnccl | None = None,
        gpu: Gpu | None = None,
    ) -> None:
        options = options or PerfOptions()
        self._library = library or libnccl.load()
        self._gpu = gpu or Gpu(local_gpu(env), null_stream=bool(options.stream_null))
        super().__init__(env, self._gpu.device)
        self.library_version = self._library.version
        # A list only while `bind` runs a collective: C calls then go there, and are not made.
        self._tape: list[CCall] | None = None
        # The C calls of each launch that `bind` and `batch` made, for `chain`.
        self._steps: WeakKeyDictionary[Launch, list[CCall]] = WeakKeyDictionary()
        self._log = NcclLog(self._library.reset_log)
        # NCCL says whether it can use NVLS only while it makes a communicator.
        with self._log.record("INIT") as lines:
            self._communicator = Communicator(
                self._library,
                self._gpu,
                env,
                register=options.local_register,
                cta_policy=options.cta_policy,
                timeout_s=timeout.total_seconds() if timeout else None,
            )
        self._nvls = read_nvls(lines)
        self._comm, self._stream = self._communicator.handle, ctypes.c_void_p(self._gpu.stream)

    @classmethod
    def open(cls, env: RankEnv, timeout: timedelta | None, options: PerfOptions) -> NcclBackend:
        return cls(env, timeout, options)

    def all_reduce(self, recv: Tensor, send: Tensor, op: str) -> None:
        self._do("ncclAllReduce", *_both(send, recv, send.numel()), self._op(send, op), self._comm, self._stream)

    def all_gather(self, recv: Tensor, send: Tensor) -> None:
        self._do("ncclAllGather", *_both(send, recv, send.numel()), self._comm, self._stream)

    def reduce_scatter(self, recv: Tensor, send: Tensor, op: str) -> None:
        self._do("ncclReduceScatter", *_both(send, recv, recv.numel()), self._op(send, op), self._comm, self._stream)

    def broadcast(self, recv: Tensor, send: Tensor, root: int) -> None:
        self._do("ncclBroadcast", *_both(send, recv, send.numel()), root, self._comm, self._stream)

    def reduce(self, recv: Tensor, send: Tensor, op: str, root: int) -> None:
        self._do("ncclReduce", *_both(send, recv, send.numel()), self._op(send, op), root, self._comm, self._stream)

    def gather(self, recv: Tensor, send: Tensor, root: int) -> None:
        # New in 2.28, as are scatter and alltoall; before, grouped sends and receives do the same, as in nccl-tests.
        if self._library.has("ncclGather"):
            self._do("ncclGather", *_both(send, recv, send.numel()), root, self._comm, self._stream)
            return
        with self._group():
            self._send(send, root)
            for peer, part in enumerate(recv.tensor_split(self.ranks) if self.rank == root else ()):
                self._receive(part, peer)

    def scatter(self, recv: Tensor, send: Tensor, root: int) -> None:
        if self._library.has("ncclScatter"):
            self._do("ncclScatter", *_both(send, recv, recv.numel()), root, self._comm, self._stream)
            return
        with self._group():
            for peer, part in enumerate(send.tensor_split(self.ranks) if self.rank == root else ()):
                self._send(part, peer)
            self._receive(recv, root)

    def alltoall(self, recv: Tensor, send: Tensor) -> None:
        part = send.numel() // self.ranks
        if self._library.has("ncclAlltoAll"):
            self._do("ncclAlltoAll", *_both(send, recv, part), self._comm, self._stream)
        else:
            self.alltoallv(recv, send, [part] * self.ranks, [part] * self.ranks)

    def alltoallv(self, recv: Tensor, send: Tensor, received: Sequence[int], sent: Sequence[int]) -> None:
        outgoing = torch.split(send[: sum(sent)], list(sent))
        incoming = torch.split(recv[: sum(received)], list(received))
        with self._group():
            for peer in range(self.ranks):
                # Both sides know the counts: neither posts a message of no elements.
                if sent[peer]:
                    self._send(outgoing[peer], peer)
                if received[peer]:
                    self._receive(incoming[peer], peer)

    def exchange(self, recv: Tensor, source: int, send: Tensor, to: int) -> None:
        # In one group: ranks that all send first, and receive only then, would wait for each other.
        with self._group():
            self._send(send, to)
            self._receive(recv, source)

    def copy(self, recv: Tensor, send: Tensor) -> None:
        # In place the data lies there already; a copy onto itself would still be launched and timed.
        if recv.data_ptr() != send.data_ptr() and send.nbytes:
            self._play((*self._gpu.copier(recv.data_ptr(), send.data_ptr(), send.nbytes), "cudaMemcpyAsync"))

    def bind(self, collective: Collective, call: Call) -> Launch:
        steps: list[CCall] = []
        self._tape = steps
        try:
            collective.launch(self, call)
        finally:
            self._tape = None
        return self._player(steps)

    def chain(self, launches: Sequence[Launch]) -> Launch:
        steps = [step for launch in launches for step in self._steps[launch]]
        if (run := compile_calls(steps)) is None:
            return super().chain(launches)
        check = self._library.check

        def launch_all() -> None:
            status, place = run()
            if status:
                check(status, steps[place][2])

        return launch_all

    def batch(self, launches: Sequence[Launch]) -> Launch:
        begin, end = ((self._library.function(name), (), name) for name in ("ncclGroupStart", "ncclGroupEnd"))
        return self._player([begin, *(step for launch in launches for step in self._steps[launch]), end])

    def capture(self, launches: Sequence[Launch]) -> Launch:
        return self._gpu.capture(launches)

    @contextmanager
    def listen(self) -> Iterator[AlgorithmChoice]:
        choice = AlgorithmChoice()
        with self._log.record("TUNING") as lines:
            yield choice
            self.synchronise()
        # The lines are there only now, after the block: what the caller was given is filled in.
        logged = read_algorithm(lines)
        choice.algorithm, choice.protocol = logged.algorithm, logged.protocol

    @classmethod
    def refusal(cls, dtype: str, op: str) -> str:
        return nccl_versions.refusal(dtype, op, libnccl.load().version) or super().refusal(dtype, op)

    @classmethod
    def check(cls, options: PerfOptions) -> None:
        super().check(options)
        nccl_versions.check(options, libnccl.load().version)

    def allocate(self, num_bytes: int) -> Tensor:
        # New in 2.19; before, memory of torch, as nccl-tests took plain cudaMalloc then.
        if not self._library.has("ncclMemAlloc"):
            return super().allocate(num_bytes)
        return self._gpu.adopt(self._communicator.allocate(num_bytes), num_bytes)

    def close(self) -> None:
        self.synchronise()
        self._communicator.close()

    def facts(self) -> Facts:
        loop = "a compiled loop" if is_compiled() else "a loop in Python"
        line = f"nccl, NCCL {show_version(self.library_version)} called directly by {loop}, {self._gpu.library}"
        return Facts(line, nvls=self._nvls)

    def describe(self) -> Device:
        return self._gpu.describe()

    def free_bytes(self) -> int | None:
        return self._gpu.free_bytes()

    def mark(self) -> Any:
        return self._gpu.mark()

    def seconds(self, begin: Any, end: Any) -> float:
        return self._gpu.seconds(begin, end)

    def synchronise(self) -> None:
        self._communicator.synchronise()

    def _op(self, tensor: Tensor, op: str) -> int:
        # mulsum's operator holds this rank's factor, so it is made for the communicator; the others are constants.
        return self._communicator.mulsum(_TORCH_NAMES[tensor.dtype]) if op == "mulsum" else RED_OPS[op]

    def _send(self, tensor: Tensor, peer: int) -> None:
        self._do("ncclSend", *_one(tensor), peer, self._comm, self._stream)

    def _receive(self, tensor: Tensor, peer: int) -> None:
        self._do("ncclRecv", *_one(tensor), peer, self._comm, self._stream)

    @contextmanager
    def _group(self) -> Iterator[None]:
        self._do("ncclGroupStart")
        yield
        self._do("ncclGroupEnd")

    def _do(self, name: str, *arguments: Any) -> None:
        self._play((self._library.function(name), arguments, name))

    def _play(self, step: CCall) -> None:
        """Make the C call now, or record it while `bind` collects a call's steps."""
        if self._tape is not None:
            self._tape.append(step)
        else:
            self._player([step])()

    def _player(self, steps: list[CCall]) -> Launch:
        check = self._library.check
        # Most collectives are one C call: a loop over steps would add to the time of a small one.
        if len(steps) == 1:
            [(one_function, one_arguments, one_name)] = steps

            def launch_one() -> None:
                # NCCL's success is 0, and CuPy raises by itself: `check` on each call would cost more than this test.
                if status := one_function(*one_arguments):
                    check(status, one_name)

            self._steps[launch_one] = steps
            return launch_one

        def launch() -> None:
            for function, arguments, name in steps:
                if status := function(*arguments):
                    check(status, name)

        self._steps[launch] = steps
        return launch


def _both(send: Tensor, recv: Tensor, count: int) -> tuple[Any, ...]:
    """The first four arguments of most collectives, as C values: made once, they cost no time in the loop."""
    kind = ctypes.c_int(DATA_TYPES[_TORCH_NAMES[send.dtype]])
    return ctypes.c_void_p(_address(send)), ctypes.c_void_p(_address(recv)), ctypes.c_size_t(count), kind


def _one(tensor: Tensor) -> tuple[Any, ...]:
    kind = ctypes.c_int(DATA_TYPES[_TORCH_NAMES[tensor.dtype]])
    return ctypes.c_void_p(_address(tensor)), ctypes.c_size_t(tensor.numel()), kind


def _address(tensor: Tensor) -> int:
    """Return the tensor's address, also if it is empty: `data_ptr` is then 0, which NCCL_CHECK_POINTERS rejects."""
    return tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.itemsize

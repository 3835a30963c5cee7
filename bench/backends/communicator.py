"""An NCCL communicator with its memory, buffer registrations, custom operators, and the wait for its work.

It is configured as nccl-tests configures its own, so that the two can be compared. Not covered: the collectives
(`nccl`).
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from bench.backends.base import DTYPES, premultiplier
from bench.backends.gpu import Gpu
from collectives.transport import libnccl
from collectives.transport.libnccl import DATA_TYPES, Libnccl
from netlayer.launch.rank import RankEnv

REGISTER, SYMMETRIC = 1, 2  # of -R
_NVLINK_CENTRIC_SINCE = 22800


class Communicator:
    """All ranks of a run, one GPU each.

    Args:
        register: as `-R`: 0 nothing, 1 every buffer (ncclCommRegister), 2 every buffer as a symmetric window.
        cta_policy: as `-x`; negative leaves it to NCCL.
        timeout_s: how long to wait for ranks to meet and for work to be done; None is for ever.
    """

    def __init__(
        self, library: Libnccl, gpu: Gpu, env: RankEnv, *, register: int, cta_policy: int, timeout_s: float | None
    ) -> None:
        self._library, self._gpu, self._timeout_s = library, gpu, timeout_s
        self._rank, self._ranks, self._register = env.rank, env.world_size, register
        self._mulsums: dict[str, int] = {}
        self._memory: list[int] = []
        self._handles: list[ctypes.c_void_p] = []
        self.handle = ctypes.c_void_p()
        unique_id, config = self._agree(), libnccl.new_config(library.version)
        if cta_policy >= 0:
            config.CTAPolicy = cta_policy
        if library.version >= _NVLINK_CENTRIC_SINCE:
            config.nvlinkCentricSched = 1

        def connect() -> None:
            gpu.use()
            comm, settings = ctypes.byref(self.handle), ctypes.byref(config)
            library.call("ncclCommInitRankConfig", comm, self._ranks, unique_id, self._rank, settings)

        _within(timeout_s, connect)

    def _agree(self) -> libnccl.UniqueId:
        """Create the communicator's unique id on rank 0 and broadcast it over the default process group."""
        unique_id = libnccl.UniqueId()
        if self._rank == 0:
            self._library.call("ncclGetUniqueId", ctypes.byref(unique_id))
        objects = [bytes(unique_id)]
        dist.broadcast_object_list(objects, 0)
        return libnccl.UniqueId.from_buffer_copy(objects[0])

    def allocate(self, num_bytes: int) -> int:
        """Allocate with ncclMemAlloc, register the buffer as `register` says, and return its address."""
        address = ctypes.c_void_p()
        self._library.call("ncclMemAlloc", ctypes.byref(address), num_bytes)
        assert address.value is not None
        self._memory.append(address.value)
        handle = ctypes.c_void_p()
        arguments = (self.handle, address, num_bytes, ctypes.byref(handle))
        if self._register == SYMMETRIC:
            self._library.call("ncclCommWindowRegister", *arguments, libnccl.WIN_COLL_SYMMETRIC)
        elif self._register == REGISTER:
            self._library.call("ncclCommRegister", *arguments)
        if self._register:
            self._handles.append(handle)
        return address.value

    def mulsum(self, dtype: str) -> int:
        """Return a sum operator that first multiplies this rank's input; created once per dtype.

        nccl-tests creates one per call.
        """
        if dtype not in self._mulsums:
            scalar = torch.tensor([premultiplier(self._rank)]).to(DTYPES[dtype]).view(torch.uint8).tolist()
            op, scalar_bytes = ctypes.c_int(), ctypes.create_string_buffer(bytes(scalar))
            self._library.call(
                "ncclRedOpCreatePreMulSum",
                ctypes.byref(op),
                ctypes.cast(scalar_bytes, ctypes.c_void_p),
                DATA_TYPES[dtype],
                libnccl.SCALAR_HOST_IMMEDIATE,
                self.handle,
            )
            self._mulsums[dtype] = op.value
        return self._mulsums[dtype]

    def synchronise(self) -> None:
        """Wait as nccl-tests does: poll the stream and NCCL's asynchronous error in turn, to notice a dead peer.

        Raises:
            RuntimeError: NCCL reports an error, or the timeout has passed; the communicator is aborted.
        """
        done, error, check = self._gpu.done, ctypes.c_int(), self._library.check
        ask, reference = self._library.function("ncclCommGetAsyncError"), ctypes.byref(error)
        begin_s = time.monotonic()
        while not done():
            check(ask(self.handle, reference), "ncclCommGetAsyncError")
            if error.value not in (libnccl.SUCCESS, libnccl.IN_PROGRESS):
                self._abort()
                check(error.value, "NCCL, in the background")
            if self._timeout_s is not None and time.monotonic() - begin_s > self._timeout_s:
                self._abort()
                raise RuntimeError(f"NCCL timed out after {self._timeout_s:g} s")

    def close(self) -> None:
        """Free registrations, operators and memory, then the communicator; all work must be complete."""
        ends = "ncclCommWindowDeregister" if self._register == SYMMETRIC else "ncclCommDeregister"
        for handle in self._handles:
            self._library.call(ends, self.handle, handle)
        for op in self._mulsums.values():
            self._library.call("ncclRedOpDestroy", op, self.handle)
        for address in self._memory:
            self._library.call("ncclMemFree", address)
        self._library.call("ncclCommDestroy", self.handle)
        self._handles, self._memory, self._mulsums = [], [], {}

    def _abort(self) -> None:
        """Stop the kernels that still run on the GPU, so that the process can exit."""
        self._library.call("ncclCommAbort", self.handle)


def _within(limit_s: float | None, wait: Callable[[], None]) -> None:
    """Run `wait` in a thread and give up after `limit_s` (None waits for ever)."""
    if limit_s is None:
        wait()
        return
    failures: list[BaseException] = []

    def run() -> None:
        try:
            wait()
        except Exception as exc:  # noqa: BLE001 - raised below, in the thread that asked
            failures.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        raise RuntimeError(f"NCCL timed out after {limit_s:g} s while its ranks met")
    if failures:
        raise failures[0]

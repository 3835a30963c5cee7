"""Memory that a group's communicator has registered as symmetric windows (NCCL >= 2.27).

From a buffer in a window NCCL moves data straight to the peer, with no copy through a buffer of its own, so each of its
few blocks moves more, above all beside computation: on H200, held to two blocks, gathers ran at 50 GB/s beside matrix
products where plain ones ran at 25, and reductions at 30 against 22.

A part that a rank gives or gets must begin at a multiple of `ALIGNMENT_BYTES`: NCCL 2.28.9 gave wrong sums where it did
not. NCCL's kernels find a peer's buffer at the place of the own one, so everything lies in one allocation, laid out
alike on all ranks: where single ones came to lie would differ by rank. Not covered: giving parts back.

NCCL keeps a registration as long as its communicator, whoever made that: `close` ends it, and so does the garbage
collector, later (`collectives.transport.leftovers`).

[Note: groups that end first] torch does not forget a pool with the group that it was registered with: to free the
pool's memory, also at the end of the process, then asks the dead communicator, and ends the process (torch 2.11). So no
pool is let go before it is forgotten. With a group that was aborted torch forgets its pools, and must not be asked to
do so again: that is known here where the watchdog aborted it. Who aborts a group himself, or destroys it in an `atexit`
function that was registered before this module was imported, closes its windows first.
"""

from __future__ import annotations

import atexit
import contextlib
import weakref
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ErrorType

from collectives.transport.communicator import Communicator
from collectives.transport.leftovers import Leftover, release_left
from collectives.transport.nodes import host_id

ALIGNMENT_BYTES = 16
_STRIDE = 512  # of what is taken
_FIRST_WITH_COPY_ENGINES = (2, 28)


def are_worth_it(group: dist.ProcessGroup | None, comm: Communicator, *, has_room: bool = True) -> bool:
    """Whether training is faster from windows: all ranks of `group` are on one host, and its copy engines gather.

    On two H200 a step of a 7B model took 1.4% less time. Every rank of `comm` calls it; those of a group hear the same.

    Args:
        group: data-parallel ranks; None: there is one.
        comm: all of them are in it, and others may be.
        has_room: this rank has the memory for them.
    """
    if comm.device.type != "cuda":
        return False
    can = group is not None and has_room and _gathers_by_copy_engines(group, comm.device)
    answers = dict(zip(comm.ranks, comm.all_gather_text(f"{can} on {host_id()}", "windows"), strict=True))
    return can and len({answers[rank] for rank in dist.get_process_group_ranks(group)}) == 1


def _gathers_by_copy_engines(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether NCCL is new enough, and the GPU one that its memory for windows is made for (NVSwitch's)."""
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    if "cuda:nccl" not in dist.get_backend_config(group) or version < _FIRST_WITH_COPY_ENGINES:
        return False
    return bool(group._get_backend(device).supports_tensor_alloc(device))


class Windows:
    """Memory for a group's collectives. All ranks make it with the same size, and take the same from it.

    Args:
        group: on NCCL; a collective has run on it, or it has no communicator yet.
        device: of the memory.
        num_bytes: in all; `room` says what a tensor takes.

    Raises:
        ValueError: the group's backend has no windows.
        RuntimeError, TypeError: NCCL or torch cannot.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, num_bytes: int) -> None:
        if device.type != "cuda" or "cuda:nccl" not in dist.get_backend_config(group):
            actual = f"the device is {device.type} and the backend {dist.get_backend_config(group)}"
            raise ValueError(f"windows: only NCCL on CUDA has them, and {actual}; omit them")
        release_left()
        backend: Any = group._get_backend(device)
        self._pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(self._pool):
            self.memory = torch.zeros(max(num_bytes, _STRIDE), dtype=torch.uint8, device=device)
        backend.register_mem_pool(self._pool, symm=True)
        self._leftover = Leftover(self, _Registration(group, backend, self._pool, device).end)
        self._used_bytes = 0

    def close(self) -> None:
        """End the registration, once the device has come here. Twice does no harm.

        Every rank does so at the same point of its program. What was taken is memory as any other afterwards: kept as
        long as tensors lie in it, and no longer to be given to the group's collectives.
        """
        self._leftover.release()

    @staticmethod
    def room(numel: int, dtype: torch.dtype) -> int:
        """Return the bytes that a tensor takes, aligned."""
        return -(-numel * dtype.itemsize // _STRIDE) * _STRIDE

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a zeroed tensor [numel] of the memory; no other call returns that part."""
        start, self._used_bytes = self._used_bytes, self._used_bytes + self.room(numel, dtype)
        if self._used_bytes > max(self.memory.numel(), _STRIDE):
            raise ValueError(f"windows of {self.memory.numel()} bytes have no room for {numel} of {dtype} more")
        return self.memory[start : start + numel * dtype.itemsize].view(dtype)


class _Registration:
    """Registration of a pool with a group's communicator; it keeps the pool until it has ended."""

    _open: ClassVar[weakref.WeakSet[_Registration]] = weakref.WeakSet()
    """Weak: where the process ends, pools go before their groups, or torch ends it for that (torch 2.11)."""

    def __init__(self, group: dist.ProcessGroup, backend: Any, pool: Any, device: torch.device) -> None:
        self._group, self._backend, self._pool, self._device = weakref.ref(group), backend, pool, device
        self._open.add(self)

    def end(self) -> None:
        """Deregister, once the device has come here; of a communicator that is gone, only forget the pool."""
        torch.cuda.synchronize(self._device)
        if self._group_lives:
            self._open.discard(self)
            self._backend.deregister_mem_pool(self._pool)
        else:
            self._forget()

    def _forget(self) -> None:
        self._open.discard(self)
        get_error = getattr(self._backend, "get_error", None)  # some torches have it, for some backends
        if get_error is None or get_error() == ErrorType.SUCCESS:
            with contextlib.suppress(RuntimeError):  # raised after that: there is no communicator to deregister with
                self._backend.deregister_mem_pool(self._pool)

    @property
    def _group_lives(self) -> bool:
        group = self._group()
        return group is not None and group in dist.distributed_c10d._world.pg_map

    @classmethod
    def end_of_process(cls) -> None:
        """Forget registrations of dead groups. Those of living groups stay: to end one is to wait for the peers."""
        for registration in [one for one in cls._open if not one._group_lives]:
            registration._forget()


atexit.register(_Registration.end_of_process)

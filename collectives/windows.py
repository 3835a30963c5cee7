"""Memory that a group's communicator has registered as symmetric windows (NCCL >= 2.27).

From a buffer in a window NCCL moves data straight to the peer, with no copy through a buffer of its own, so each of its
few blocks moves more, above all beside computation: on H200, held to two blocks, gathers ran at 50 GB/s beside matrix
products where plain ones ran at 25, and reductions at 30 against 22.

A part that a rank gives or gets must begin at a multiple of `ALIGNMENT_BYTES`: NCCL 2.28.9 gave wrong sums where it
did not. Left out: windows that are opened one by one as buffers come and go; allocate all, then register.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

ALIGNMENT_BYTES = 16


class Windows:
    """Tensors made inside `allocating()`, and `register`ed together. All ranks make the same ones in the same order.

    Args:
        group: on NCCL; a collective has run on it before `register`, or it has no communicator yet.
        device: of the tensors.

    Raises:
        ValueError: the group's backend has no windows.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        if device.type != "cuda" or "cuda:nccl" not in dist.get_backend_config(group):
            found = f"the device is {device.type} and the backend {dist.get_backend_config(group)}"
            raise ValueError(f"windows: only NCCL on CUDA has them, and {found}; leave them out")
        self._backend: Any = group._get_backend(device)
        self._pool = torch.cuda.MemPool(self._backend.mem_allocator)

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """CUDA tensors made by this thread inside lie in the memory to be registered."""
        with torch.cuda.use_mem_pool(self._pool):
            yield

    def register(self) -> None:
        """Register all that was allocated; every rank calls it.

        Raises:
            RuntimeError, TypeError: NCCL or torch cannot.
        """
        self._backend.register_mem_pool(self._pool, symm=True)

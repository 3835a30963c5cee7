"""Memory that a group's communicator has registered as symmetric windows (NCCL >= 2.27).

From a buffer in a window NCCL moves data straight to the peer, with no copy through a buffer of its own, so each of its
few blocks moves more, above all beside computation: on H200, held to two blocks, gathers ran at 50 GB/s beside matrix
products where plain ones ran at 25, and reductions at 30 against 22.

A part that a rank gives or gets must begin at a multiple of `ALIGNMENT_BYTES`: NCCL 2.28.9 gave wrong sums where it did
not. NCCL's kernels find a peer's buffer at the place of the own one, so everything lies in one allocation, laid out
alike on all ranks: where single ones came to lie would differ by rank. Left out: giving parts back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ALIGNMENT_BYTES = 16
_STRIDE = 512  # of what is taken


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
            found = f"the device is {device.type} and the backend {dist.get_backend_config(group)}"
            raise ValueError(f"windows: only NCCL on CUDA has them, and {found}; leave them out")
        backend: Any = group._get_backend(device)
        self._pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(self._pool):
            self.memory = torch.zeros(max(num_bytes, _STRIDE), dtype=torch.uint8, device=device)
        backend.register_mem_pool(self._pool, symm=True)
        self._taken = 0

    @staticmethod
    def room(numel: int, dtype: torch.dtype) -> int:
        """Bytes that a tensor takes."""
        return -(-numel * dtype.itemsize // _STRIDE) * _STRIDE

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor [numel] in the memory, zeroed, of nobody else."""
        start, self._taken = self._taken, self._taken + self.room(numel, dtype)
        return self.memory[start : start + numel * dtype.itemsize].view(dtype)

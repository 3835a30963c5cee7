"""The two buffers of a rank, and the calls that use stretches of them, laid out as in nccl-tests."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.backends import DTYPES, Backend, Call
from bench.collective import Collective

_WIDEST_BYTES = 8  # of one element, for --unalign


class Buffers:
    """A send and a receive buffer for sizes up to `max_bytes`, both beginning at element `unalign`."""

    def __init__(self, backend: Backend, max_bytes: int, unalign: int) -> None:
        self._rank, self._ranks = backend.rank, backend.ranks
        self._max_bytes, self._unalign = max_bytes, unalign
        num_bytes = max_bytes + _WIDEST_BYTES * unalign
        # Zeroed: what lies in fresh memory may be subnormal floats, which are slow to add on a CPU.
        self._send = torch.zeros(num_bytes, dtype=torch.uint8, device=backend.device)
        self._recv = torch.zeros(num_bytes, dtype=torch.uint8, device=backend.device)

    def calls(
        self, collective: Collective, count: int, case: tuple[str, str, int], in_place: bool, most: int
    ) -> list[Call]:
        """Up to `most` calls, each on a stretch of its own as far as the buffers reach, so that no cache flatters.

        Args:
            count: elements of one part.
            case: type, operator and root by name.
        """
        dtype, op, root = DTYPES[case[0]], case[1], case[2]
        parts = collective.buffer_parts(self._ranks)
        stride_bytes = max(parts) * count * dtype.itemsize
        fitting = self._max_bytes // stride_bytes if stride_bytes else 1
        calls = []
        for number in range(min(fitting, most)):
            start = number * stride_bytes + self._unalign * dtype.itemsize
            if in_place:
                send, recv = self._share(_view(self._recv, start, max(parts) * count, dtype), parts)
            else:
                send = _view(self._send, start, parts[0] * count, dtype)
                recv = _view(self._recv, start, parts[1] * count, dtype)
            calls.append(Call(recv, send, op, root))
        return calls

    def _share(self, whole: Tensor, parts: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Send and receive buffer in place: the smaller one is this rank's part of the larger one."""
        if parts[0] == parts[1]:
            return whole, whole
        own = whole.tensor_split(self._ranks)[self._rank]
        return (own, whole) if parts[0] < parts[1] else (whole, own)


def _view(buffer: Tensor, start_bytes: int, count: int, dtype: torch.dtype) -> Tensor:
    return buffer[start_bytes : start_bytes + count * dtype.itemsize].view(dtype)

"""The two buffers of a rank, and the calls that use stretches of them, laid out as in nccl-tests."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.backends import DTYPES, Backend, Call
from bench.perf.collectives.collective import Collective

_WIDEST_BYTES = 8  # of one element, for --unalign


class Buffers:
    """A send and a receive buffer for sizes up to `max_bytes`, both beginning at element `unalign`."""

    def __init__(self, backend: Backend, max_bytes: int, unalign: int) -> None:
        self._rank, self._ranks = backend.rank, backend.ranks
        self._max_bytes, self._unalign = max_bytes, unalign
        # One allocation serves all types, so the shift is as wide as the widest element wants.
        num_bytes = max_bytes + _WIDEST_BYTES * unalign
        self._send = backend.allocate(num_bytes)
        self._recv = backend.allocate(num_bytes)

    def calls(
        self, collective: Collective, count: int, case: tuple[str, str, int], in_place: bool, most: int
    ) -> list[Call]:
        """Up to `most` calls, each on a stretch of its own as far as the buffers reach, so that no cache flatters.

        Args:
            count: elements of one part.
            case: type, operator and root by name.
        """
        dtype, op, root = DTYPES[case[0]], case[1], case[2]
        extents = collective.elements(count, dtype.itemsize, self._ranks)
        stride_bytes = max(extents) * dtype.itemsize
        # A share that was rounded down to nothing still makes one call, of no bytes.
        fitting = self._max_bytes // stride_bytes if stride_bytes else 1
        calls = []
        for number in range(min(fitting, most)):
            start = number * stride_bytes + self._unalign * dtype.itemsize
            if in_place:
                send, recv = self._share(_view(self._recv, start, max(extents), dtype), extents)
            else:
                send = _view(self._send, start, extents[0], dtype)
                recv = _view(self._recv, start, extents[1], dtype)
            calls.append(Call(recv, send, op, root, count))
        return calls

    def _share(self, whole: Tensor, extents: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Send and receive buffer in place: the smaller one is this rank's part of the larger one."""
        least = min(extents)
        if least * self._ranks != max(extents) or self._ranks == 1:  # of one length, or as near to it as a vector is
            return whole[: extents[0]], whole[: extents[1]]
        own = whole[self._rank * least :][:least]
        return (own, whole) if extents[0] < extents[1] else (whole, own)


def _view(buffer: Tensor, start_bytes: int, count: int, dtype: torch.dtype) -> Tensor:
    return buffer[start_bytes : start_bytes + count * dtype.itemsize].view(dtype)

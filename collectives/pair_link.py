"""Two ranks and NCCL between them, called directly: many messages as one launch, and graphs of small ones.

torch launches each message from the host, which takes longer than the message where that is small, and a third of its
time where it has 16 MiB. Here a launch is one group of NCCL with as many messages as fill some milliseconds, so that
the time between two events on the device is that of the link; what the host takes to launch is told apart.

[Note: one communicator a pair] It can be made anew for every series, which makes series independent of how NCCL has
laid its channels the first time, and a fault between two ranks ends in their own communicator.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from collectives import libnccl

_UINT8 = libnccl.DATA_TYPES["uint8"]
Swap = Callable[[Tensor], Tensor]
"""Gives this rank's bytes to its partner and returns the partner's."""


class Tap(Protocol):
    """Stands between a measurement and NCCL: counts what is launched, and may change it (planted faults)."""

    def max_ctas(self, peer: int) -> int | None:
        """Thread blocks that the communicator with this rank of the group may have; None leaves it to NCCL."""
        ...

    def before(self, peer: int, send: Tensor | None, num: int) -> Tensor | None:
        """Called ahead of each launch of `num` messages; returns what is sent in place of `send`."""
        ...

    def after(self) -> None:
        """Called when the launch has returned."""
        ...


class PairLink:
    """One rank's end of a communicator of two, on the current CUDA device.

    Args:
        swap: by which the two agree where to meet.
        place: 0 for one of the two, 1 for the other.
        max_ctas: as of NCCL's config.
        library: NCCL; by default the one of this process.

    Raises:
        NcclError: the communicator cannot be made.
    """

    def __init__(
        self, swap: Swap, place: int, max_ctas: int | None = None, library: libnccl.Libnccl | None = None
    ) -> None:
        self._library = library or libnccl.load()
        self._peer = 1 - place
        unique_id, config = libnccl.UniqueId(), libnccl.new_config(self._library.version)
        if place == 0:
            self._library.call("ncclGetUniqueId", ctypes.byref(unique_id))
        # Through an integer array: a field of c_char ends at its first zero byte.
        theirs = swap(torch.frombuffer(bytearray(bytes(unique_id)), dtype=torch.uint8))
        if place == 1:
            unique_id = libnccl.UniqueId.from_buffer_copy(bytes(theirs.tolist()))
        if max_ctas is not None:
            config.minCTAs, config.maxCTAs = 1, max_ctas
        self._comm = ctypes.c_void_p()
        arguments = (ctypes.byref(self._comm), 2, unique_id, place, ctypes.byref(config))
        self._library.call("ncclCommInitRankConfig", *arguments)
        self._function, self._check = self._library.function, self._library.check

    def launch(self, send: Tensor | None, recv: Tensor | None, num: int = 1) -> None:
        """One group of `num` messages each way that is asked for, on the current stream; bytes of the whole tensors."""
        stream = ctypes.c_void_p(_current_stream())
        self._check(self._function("ncclGroupStart")(), "ncclGroupStart")
        for name, tensor in (("ncclSend", send), ("ncclRecv", recv)):
            if tensor is None:
                continue
            function, at, count = self._function(name), ctypes.c_void_p(tensor.data_ptr()), tensor.nbytes
            for _ in range(num):
                self._check(function(at, count, _UINT8, self._peer, self._comm, stream), name)
        self._check(self._function("ncclGroupEnd")(), "ncclGroupEnd")

    def close(self) -> None:
        """Give the communicator back; its work must be done, and graphs that hold some of it must be gone."""
        self._library.call("ncclCommDestroy", self._comm)

    def abort(self) -> None:
        """End it and what it runs, whatever the partner does."""
        self._library.call("ncclCommAbort", self._comm)


def _current_stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)

"""Point-to-point NCCL communicator of two ranks, called directly through ctypes.

torch launches every message from the host. That takes longer than a small message itself, and a third of the time of
a 16 MiB one. Here one launch is one NCCL group with as many messages as fill some milliseconds, so that the time
between two CUDA events is the time of the link; the host's launch time is measured separately.

[Note: one communicator a pair] It can be created anew for every series, so that a series does not depend on how NCCL
placed its channels the first time, and a fault between two ranks breaks only their own communicator.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from collectives.transport import libnccl

_UINT8 = libnccl.DATA_TYPES["uint8"]
ExchangeWithPeer = Callable[[Tensor], Tensor]
"""Function that sends this rank's bytes to its peer and returns the peer's."""


class Tap(Protocol):
    """Hook around each launch of a measurement: counts launches, and may change the data (injected faults)."""

    def max_ctas(self, peer: int) -> int | None:
        """Return the CTA limit of the communicator with rank `peer` of the group; None leaves it to NCCL."""
        ...

    def before(self, peer: int, send: Tensor | None, num: int) -> Tensor | None:
        """Run before each launch of `num` messages; return the tensor to send instead of `send`."""
        ...

    def after(self) -> None:
        """Run after the launch has returned."""
        ...


class PairLink:
    """One rank's end of a communicator of two, on the current CUDA device.

    Args:
        exchange: sends the ncclUniqueId to the peer, and returns the peer's.
        rank_in_pair: rank in the communicator, 0 or 1; that of 0 has the id that counts.
        max_ctas: `maxCTAs` of ncclConfig_t; None leaves it to NCCL.
        library: NCCL; by default the one of this process.

    Raises:
        NcclError: the communicator cannot be created.
    """

    def __init__(
        self,
        exchange: ExchangeWithPeer,
        rank_in_pair: int,
        max_ctas: int | None = None,
        library: libnccl.Libnccl | None = None,
    ) -> None:
        self._library = library or libnccl.load()
        self._peer = 1 - rank_in_pair
        unique_id, config = libnccl.UniqueId(), libnccl.new_config(self._library.version)
        if rank_in_pair == 0:
            self._library.call("ncclGetUniqueId", ctypes.byref(unique_id))
        # Sent as integers: reading a c_char field would stop at its first zero byte.
        received = exchange(torch.frombuffer(bytearray(bytes(unique_id)), dtype=torch.uint8))
        if rank_in_pair == 1:
            unique_id = libnccl.UniqueId.from_buffer_copy(bytes(received.tolist()))
        if max_ctas is not None:
            config.minCTAs, config.maxCTAs = 1, max_ctas
        self._comm = ctypes.c_void_p()
        arguments = (ctypes.byref(self._comm), 2, unique_id, rank_in_pair, ctypes.byref(config))
        self._library.call("ncclCommInitRankConfig", *arguments)
        self._function, self._check = self._library.function, self._library.check

    def launch(self, send: Tensor | None, recv: Tensor | None, num: int = 1) -> None:
        """Launch one NCCL group on the current stream: `num` sends of `send` and `num` receives into `recv`.

        None skips that direction. Every message has the bytes of the whole tensor.
        """
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
        """Destroy the communicator; its work must be complete, and CUDA graphs that captured it must be reset."""
        self._library.call("ncclCommDestroy", self._comm)

    def abort(self) -> None:
        """Abort the communicator and its kernels, whatever the peer does."""
        self._library.call("ncclCommAbort", self._comm)


def _current_stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)

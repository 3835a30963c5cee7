"""One GPU through CuPy: its stream, events, graphs, and memory of others as a tensor.

What is timed goes through here and through NCCL alone. Tensors are torch's views of the same memory, for filling and
checking; torch works on the same stream, so that its order with NCCL needs no waiting. Not covered: NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from bench.backends.base import Device, Launch

_NOT_READY = 600  # cudaErrorNotReady
_DEVICE_TO_DEVICE = 3


class Gpu:
    """The device of this rank, current in this thread."""

    def __init__(self, index: int, null_stream: bool) -> None:
        import cupy  # here: a machine without a GPU need not have it

        self._cupy, self._runtime = cupy, cupy.cuda.runtime
        self.index = index
        self.use()
        self._stream = cupy.cuda.Stream.null if null_stream else cupy.cuda.Stream(non_blocking=True)
        self.stream = int(self._stream.ptr)
        if not null_stream:
            torch.cuda.set_stream(torch.cuda.ExternalStream(self.stream, device=self.device))  # type: ignore[no-untyped-call]

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index)

    @property
    def library(self) -> str:
        return f"CuPy {self._cupy.__version__}"

    def use(self) -> None:
        """Make the device current in the calling thread."""
        torch.cuda.set_device(self.index)
        self._cupy.cuda.Device(self.index).use()

    def adopt(self, address: int, num_bytes: int) -> Tensor:
        """Memory at an address as bytes, zeroed; whoever made it frees it."""
        cuda = self._cupy.cuda
        memory = cuda.UnownedMemory(address, num_bytes, owner=None, device_id=self.index)
        array = self._cupy.ndarray((num_bytes,), dtype="uint8", memptr=cuda.MemoryPointer(memory, 0))
        self._runtime.memsetAsync(address, 0, num_bytes, self.stream)
        self._stream.synchronize()
        tensor: Tensor = from_dlpack(array)
        assert tensor.data_ptr() == address
        return tensor

    def copier(self, to: int, source: int, num_bytes: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A copy on the device, as a function and its arguments."""
        return self._runtime.memcpyAsync, (to, source, num_bytes, _DEVICE_TO_DEVICE, self.stream)

    def capture(self, launches: Sequence[Launch]) -> Launch:
        """Capture the launches into one graph and return its launch; nothing runs yet."""
        # Only this thread is watched: NCCL's own may allocate while it connects.
        self._stream.begin_capture(self._runtime.streamCaptureModeThreadLocal)
        try:
            for launch in launches:
                launch()
        finally:
            graph = self._stream.end_capture()
        stream = self._stream
        return lambda: graph.launch(stream)

    def done(self) -> bool:
        """Whether all is done that was put on the stream."""
        status = self._runtime.streamQuery(self.stream)
        if status not in (0, _NOT_READY):
            self._stream.synchronize()  # which raises CUDA's own words
        return bool(status == 0)

    def mark(self) -> Any:
        event = self._cupy.cuda.Event()
        event.record(self._stream)
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        return float(self._cupy.cuda.get_elapsed_time(begin, end)) / 1e3

    def free_bytes(self) -> int:
        return int(self._runtime.memGetInfo()[0])

    def describe(self) -> Device:
        bus = str(self._runtime.deviceGetPCIBusId(self.index)).rpartition(".")[0].lower()
        return Device(self.index, bus, self._runtime.getDeviceProperties(self.index)["name"].decode())

"""Memory of an NVIDIA GPU that a NIC reads and writes by itself (GPUDirect), through the driver's own library.

Either the kernel module nvidia_peermem lets a NIC register a GPU's addresses, or the GPU gives out a dma-buf, whose
addresses count from 0. Which of both a host has is looked for; without either it is said. No CUDA toolkit and no torch
is needed. Never run with a NIC and a GPU in one host: neither was at hand.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from congestion.verbs.device import load_pyverbs
from netlayer.errors import HardwareMissing

_PEER_MODULES = (Path("/sys/module/nvidia_peermem"), Path("/sys/module/nv_peer_mem"))
_LIBRARY = "libcuda.so.1"
_DMA_BUF_SUPPORTED = 124  # CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
_DMA_BUF_FD = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
_PAGE_BYTES = 65_536  # a dma-buf covers whole pages of the GPU
_REMEDY = "skip the GPU, or use a host with an NVIDIA GPU and driver"


@contextmanager
def open_gpu_memory(gpu: int | str | None, num_bytes: int) -> Iterator[GpuMemory | None]:
    """Memory of the GPU of that index or PCI address; None, and nothing is touched, where it is None.

    Raises:
        HardwareMissing: no driver, no such GPU, or it is out of memory.
    """
    if gpu is None:
        yield None
        return
    memory = GpuMemory(gpu, num_bytes)
    try:
        yield memory
    finally:
        memory.close()


class GpuMemory:
    """Bytes on a GPU, which a NIC reads and writes without the host.

    Raises:
        HardwareMissing: as `open_gpu_memory`.
    """

    kind = "gpu"

    def __init__(self, gpu: int | str, num_bytes: int) -> None:
        self._cuda = _load_cuda()
        self._num_bytes = -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
        self._pointer, self._descriptor = ctypes.c_uint64(), -1
        self._device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        if isinstance(gpu, str):  # an index counts the visible ones, by speed: a NIC's neighbour goes by its address
            self._call("cuDeviceGetByPCIBusId", ctypes.byref(self._device), gpu.encode())
        else:
            self._call("cuDeviceGet", ctypes.byref(self._device), gpu)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        try:
            self._call("cuCtxSetCurrent", self._context)
            self._call("cuMemAlloc_v2", ctypes.byref(self._pointer), ctypes.c_size_t(self._num_bytes))
        except HardwareMissing:
            self.close()
            raise

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._pointer.value:
            self._call("cuMemFree_v2", self._pointer)
            self._pointer = ctypes.c_uint64()
        if self._context.value:
            self._call("cuDevicePrimaryCtxRelease_v2", self._device)
            self._context = ctypes.c_void_p()

    def register(self, pd: Any) -> Any:
        """A memory region over it.

        Raises:
            HardwareMissing: neither nvidia_peermem nor dma-buf is there.
        """
        from congestion.verbs.queue_pair import access_flags

        regions = load_pyverbs("mr")
        if any(path.exists() for path in _PEER_MODULES):
            return regions.MR(pd, self._num_bytes, access_flags(), address=self._pointer.value)
        if not self.has_dma_buf():
            raise HardwareMissing(
                "GPUDirect is missing: no module nvidia_peermem, and the GPU gives out no dma-buf; "
                "run: modprobe nvidia_peermem, or use NVIDIA's open kernel modules"
            )
        handle = ctypes.c_int(-1)
        size = ctypes.c_size_t(self._num_bytes)
        self._call(
            "cuMemGetHandleForAddressRange", ctypes.byref(handle), self._pointer, size, _DMA_BUF_FD, ctypes.c_uint64(0)
        )
        self._descriptor = handle.value
        return regions.DmaBufMR(pd, self._num_bytes, access_flags(), self._descriptor, 0)

    def has_dma_buf(self) -> bool:
        """Whether the driver gives out descriptors of this GPU's memory."""
        supported = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(supported), _DMA_BUF_SUPPORTED, self._device)
        return bool(supported.value)

    def fill(self, data: bytes, offset: int) -> None:
        self._check(len(data), offset)
        self._call("cuMemcpyHtoD_v2", self._at(offset), data, ctypes.c_size_t(len(data)))

    def read(self, num_bytes: int, offset: int) -> bytes:
        self._check(num_bytes, offset)
        buffer = ctypes.create_string_buffer(num_bytes)
        self._call("cuMemcpyDtoH_v2", buffer, self._at(offset), ctypes.c_size_t(num_bytes))
        return buffer.raw

    def _at(self, offset: int) -> ctypes.c_uint64:
        return ctypes.c_uint64(self._pointer.value + offset)

    def _check(self, num_bytes: int, offset: int) -> None:
        if not 0 <= offset <= offset + num_bytes <= self._num_bytes:
            raise ValueError(f"{num_bytes} bytes at {offset}: not within the buffer of {self._num_bytes}")

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(text))
            message = (text.value or b"?").decode()
            raise HardwareMissing(f"{name}: {message} ({code}); {_REMEDY}")


def _load_cuda() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as exc:
        raise HardwareMissing(f"{_LIBRARY} cannot be loaded ({exc}); {_REMEDY}") from exc

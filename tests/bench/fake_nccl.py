"""Stand-ins for NCCL and its GPU on a machine without one: `fake_nccl.c`, and CPU memory."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.backends import Device, Launch
from collectives.transport.libnccl import Libnccl

SOURCE = Path(__file__).with_name("fake_nccl.c")
needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc on the PATH")


def build(folder: Path) -> Path:
    """Compile the library and return its path; a warning is an error."""
    library = folder / "libnccl-fake.so"
    line = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", str(library), str(SOURCE)]
    subprocess.run(line, check=True, capture_output=True, text=True)
    return library


class FakeNccl(Libnccl):
    """The fake library, which records the calls it gets."""

    def __init__(self, path: Path, version: int = 22809, fail_at: int = -1) -> None:
        self._fake = ctypes.CDLL(str(path))
        self._fake.fake_words.restype = ctypes.c_char_p
        self._fake.fake_reset(version, fail_at)
        super().__init__(str(path))

    def calls(self) -> list[str]:
        """List all calls so far, one line each."""
        return str(self._fake.fake_words().decode()).splitlines()

    def break_off(self, status: int) -> None:
        """Report this status as NCCL's asynchronous error from now on."""
        self._fake.fake_asynchronous_error(status)


class FakeGpu:
    """Stand-in for `bench.backends.gpu.Gpu` on the CPU: work is complete as soon as it is launched."""

    index, stream, device, library = 0, 0x57, torch.device("cpu"), "CuPy of the test"

    def __init__(self) -> None:
        self.graphs: list[int] = []  # calls in each
        self.stuck = False

    def use(self) -> None:
        """There is one."""

    def adopt(self, address: int, num_bytes: int) -> torch.Tensor:
        memory = (ctypes.c_ubyte * num_bytes).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8).zero_()

    def copier(self, to: int, source: int, num_bytes: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return lambda *arguments: ctypes.memmove(*arguments) and None, (to, source, num_bytes)

    def capture(self, launches: Sequence[Launch]) -> Launch:
        self.graphs.append(len(launches))
        return lambda: [launch() for launch in launches]

    def done(self) -> bool:
        return not self.stuck

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def free_bytes(self) -> int:
        return 1 << 24

    def describe(self) -> Device:
        return Device(0, "0000:00:00", "Fake GPU")

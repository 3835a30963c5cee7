"""Checks of a host that need no torch: disk, memory, clock, and what the GPUs say of their memory errors.

Each gives a `HostCheck`, and says where it could not look. Not covered: GEMM, copies and collectives
(`collectives.health.checks`), and the kernel's log, which whoever watches it over time knows better.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

_DISK_BYTES = 16 << 20
_LEAST_FREE_BYTES = 64 << 20
_MEMORY_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
_TIME_ERROR = 5  # of adjtimex(2): the clock is not synchronised
_SMI_S = 30.0


@dataclass(frozen=True)
class HostCheck:
    """One check: passed, failed, or not made (None); `detail` says what was found, or why nothing was."""

    name: str
    passed: bool | None
    detail: str
    seconds: float = 0.0


def host_checks(folder: Path) -> list[HostCheck]:
    """Make all of them; `folder` is on the disk that is tried."""
    checks: Sequence[Callable[[], HostCheck]] = (lambda: disk(folder), memory, clock, gpu_memory_errors)
    return [_timed(check) for check in checks]


def disk(folder: Path, num_bytes: int = _DISK_BYTES) -> HostCheck:
    """Write a file, have the disk take it, and read it back."""
    chunk, digest = os.urandom(_CHUNK_BYTES), hashlib.sha256()
    try:
        free = shutil.disk_usage(folder).free
        if free < _LEAST_FREE_BYTES:
            return HostCheck("disk", False, f"{free >> 20} MiB free in {folder}")
        with tempfile.TemporaryFile(dir=folder) as file:
            for _ in range(max(1, num_bytes // _CHUNK_BYTES)):
                file.write(chunk)
                digest.update(chunk)
            file.flush()
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):  # or it would be read from memory alone
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            same = hashlib.file_digest(file, "sha256").digest() == digest.digest()
    except OSError as exc:
        name = errno.errorcode.get(exc.errno or 0, "an error")
        return HostCheck("disk", False, f"{folder}: {exc.strerror} ({name})")
    return HostCheck(
        "disk", same, "what was read is what was written" if same else "what was read is not what was written"
    )


def memory(num_bytes: int = _MEMORY_BYTES) -> HostCheck:
    """Fill memory with patterns and read it twice."""
    try:
        block = bytearray(os.urandom(_CHUNK_BYTES)) * max(1, num_bytes // _CHUNK_BYTES)
    except MemoryError:
        return HostCheck("memory", False, f"{num_bytes >> 20} MiB cannot be had")
    copy = bytes(block)
    digests = {hashlib.sha256(each).digest() for each in (block, copy, block)}
    passed = len(digests) == 1
    detail = f"{num_bytes >> 20} MiB " + ("read alike three times" if passed else "read differently")
    return HostCheck("memory", passed, detail)


def clock() -> HostCheck:
    """Whether the kernel says that its clock is synchronised. One that is not fails nothing: events only lose order."""
    if sys.platform != "linux":
        return HostCheck("clock", None, f"no adjtimex on {sys.platform}")
    libc = ctypes.CDLL(None, use_errno=True)
    status = libc.adjtimex(ctypes.create_string_buffer(512))  # modes = 0: nothing is changed
    if status < 0:
        return HostCheck("clock", None, f"adjtimex: {os.strerror(ctypes.get_errno())}")
    if status == _TIME_ERROR:
        return HostCheck("clock", None, "no time service keeps it, as far as the kernel knows")
    return HostCheck("clock", True, "synchronised")


def gpu_memory_errors() -> HostCheck:
    """Errors of GPU memory that ECC could not correct, since the driver was loaded, and rows that wait for a reset."""
    name, program = "gpu_memory_errors", shutil.which("nvidia-smi")
    if program is None:
        return HostCheck(name, None, "no nvidia-smi")
    query = "ecc.errors.uncorrected.volatile.total,remapped_rows.pending,remapped_rows.failure"
    command = [program, f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_S, check=False)
    except subprocess.TimeoutExpired:
        return HostCheck(name, False, f"nvidia-smi did not answer within {_SMI_S:g} s")
    except OSError as exc:
        return HostCheck(name, None, f"nvidia-smi: {exc.strerror}")
    if answer.returncode:
        last = (answer.stderr or answer.stdout).strip().rpartition("\n")[2][:200]
        return HostCheck(name, False, f"nvidia-smi: exit code {answer.returncode}: {last}")
    bad = []
    for gpu, line in enumerate(answer.stdout.splitlines()):
        counts = [field.strip() for field in line.split(",")]
        # "[N/A]" is a GPU without ECC, "Yes" of older drivers a row that waits.
        if any(field not in ("0", "No") and not field.startswith("[") for field in counts):
            bad.append(f"GPU {gpu}: {', '.join(counts)}")
    return HostCheck(
        name, not bad, "; ".join(bad) + f" ({query})" if bad else f"{len(answer.stdout.splitlines())} GPUs"
    )


def _timed(check: Callable[[], HostCheck]) -> HostCheck:
    begin_s = time.perf_counter()
    return replace(check(), seconds=time.perf_counter() - begin_s)

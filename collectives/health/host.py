"""Checks of a host that need no torch: disk, memory, clock, and what the GPUs say of their memory errors.

Each gives a `HostCheck`, and says where it could not look. A check fails only by what it has seen to be wrong: a disk
that is full (it may be one that all nodes share), or a tool that does not answer, is no fault of the node. Not covered:
GEMM, copies and collectives (`collectives.health.checks`), and the kernel's log, which whoever watches it over time
knows better.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from netlayer.environ import Gpu, visible_gpus

_DISK_BYTES = 16 << 20
_LEAST_FREE_BYTES = 64 << 20
_MEMORY_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
_TIME_ERROR = 5  # of adjtimex(2): the clock is not synchronised
_SMI_S = 30.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
# A GPU that the driver itself has lost, of nvidia-smi's messages; its other errors are those of the tool.
_LOST_GPU = re.compile(r"GPU is lost|Unable to determine the device handle for GPU|fallen off the bus", re.IGNORECASE)
_ADDRESS = re.compile(r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.[0-9a-fA-F])?")


@dataclass(frozen=True)
class HostCheck:
    """One check: passed, failed, or not made (None); `detail` says what was found, or why nothing was.

    Args:
        is_unclear: it should have been made, and could not be: neither a failure nor a check that does not apply.
    """

    name: str
    passed: bool | None
    detail: str
    seconds: float = 0.0
    is_unclear: bool = False


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
            return HostCheck("disk", None, f"{free >> 20} MiB free in {folder}: not tried", is_unclear=True)
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
        is_full = exc.errno in _FULL
        return HostCheck("disk", None if is_full else False, f"{folder}: {exc.strerror} ({name})", is_unclear=is_full)
    return HostCheck(
        "disk", same, "what was read is what was written" if same else "what was read is not what was written"
    )


def memory(num_bytes: int = _MEMORY_BYTES) -> HostCheck:
    """Fill memory with patterns and read it twice."""
    try:
        block = bytearray(os.urandom(_CHUNK_BYTES)) * max(1, num_bytes // _CHUNK_BYTES)
    except MemoryError:
        return HostCheck("memory", None, f"{num_bytes >> 20} MiB cannot be had: others have it", is_unclear=True)
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
    """Errors of GPU memory that ECC could not correct, since the driver was loaded, and rows that wait for a reset.

    Only of the GPUs that CUDA_VISIBLE_DEVICES leaves to this process: another one's are no fault of its ranks.
    """
    name = "gpu_memory_errors"
    query = "uuid,ecc.errors.uncorrected.volatile.total,remapped_rows.pending,remapped_rows.failure"
    try:
        own, rows = _own_rows(query)
    except FileNotFoundError:
        return HostCheck(name, None, "no nvidia-smi")
    except _NoAnswer as exc:
        is_lost = _LOST_GPU.search(str(exc)) is not None
        return HostCheck(name, False if is_lost else None, f"nvidia-smi: {exc}", is_unclear=not is_lost)
    bad = []
    for gpu, [_, *counts] in rows.items():
        # "[N/A]" is a GPU without ECC, "Yes" of older drivers a row that waits.
        if any(field not in ("0", "No") and not field.startswith("[") for field in counts):
            bad.append(f"GPU {gpu}: {', '.join(counts)}")
    if bad and own is None:
        return HostCheck(name, None, f"{'; '.join(bad)}; which GPUs are this node's cannot be told", is_unclear=True)
    return HostCheck(name, not bad, "; ".join(bad) + f" ({query})" if bad else f"{len(rows)} GPUs")


def own_gpu_addresses() -> frozenset[str] | None:
    """PCI addresses of the GPUs that CUDA_VISIBLE_DEVICES leaves to this process; None: they are not known."""
    try:
        own, rows = _own_rows("uuid,pci.bus_id")
    except (FileNotFoundError, _NoAnswer):
        return None
    return None if own is None else frozenset(pci_addresses(" ".join(row[1] for row in rows.values())))


def pci_addresses(line: str) -> list[str]:
    """Addresses of PCI devices in a line, as domain:bus:device in small letters: functions of a device are one."""
    return [f"{(each[1] or '')[-4:].rjust(4, '0')}:{each[2]}:{each[3]}".lower() for each in _ADDRESS.finditer(line)]


class _NoAnswer(Exception):
    """nvidia-smi gave none; the text says why."""


def _own_rows(query: str) -> tuple[frozenset[str] | None, dict[int, list[str]]]:
    """Ask nvidia-smi, and return the UUIDs of this process's GPUs (None: not known) and their rows by GPU.

    Args:
        query: fields, `uuid` first.

    Raises:
        FileNotFoundError: there is no nvidia-smi.
        _NoAnswer: it has failed, or takes too long.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        raise FileNotFoundError("nvidia-smi")
    command = [program, f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_S, check=False)
    except subprocess.TimeoutExpired:
        raise _NoAnswer(f"no answer within {_SMI_S:g} s") from None
    except OSError as exc:
        raise _NoAnswer(str(exc.strerror)) from None
    if answer.returncode:
        last = (answer.stderr or answer.stdout).strip().rpartition("\n")[2][:200]
        raise _NoAnswer(f"exit code {answer.returncode}: {last}")
    rows = {gpu: [cell.strip() for cell in line.split(",")] for gpu, line in enumerate(answer.stdout.splitlines())}
    gpus = [Gpu(gpu, "", 0, "", row[0]) for gpu, row in rows.items()]
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    own = frozenset(gpu.uuid for gpu in (gpus if variable is None else visible_gpus(gpus, variable)))
    if any(uuid.startswith("MIG-") for uuid in own):
        return None, rows  # a part of a GPU, and the UUID does not say of which
    return own, {gpu: row for gpu, row in rows.items() if row[0] in own}


def _timed(check: Callable[[], HostCheck]) -> HostCheck:
    begin_s = time.perf_counter()
    return replace(check(), seconds=time.perf_counter() - begin_s)

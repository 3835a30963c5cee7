"""Whether NCCL ran its kernels for symmetric windows, or took memory that was registered as any other.

Registering memory may succeed and change nothing, for NCCL chooses its kernels by size and by what it supports. So a
profiler sees one call of each collective and size: NCCL's kernels for windows have names that begin with `ncclSym`, all
others are `ncclDevKernel_...`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.small_messages.rows import KernelRow
from bench.small_messages.systems import System
from collectives.small.path import Kind

logger = logging.getLogger(__name__)

_PREFIXES = ("ncclSym", "ncclDev")


def windows_rows(system: System, done: Sequence[tuple[Kind, int]], device: torch.device) -> list[KernelRow]:
    """A row of each collective and size: `on_windows`, None where the profiler did not see it. Every rank calls it."""
    calls = [trial.launch for kind, num_bytes in done for trial in system.trials(kind, num_bytes).values()]
    seen = kernel_names(calls, device)
    if seen is None:
        logger.warning("the profiler does not show one NCCL kernel a call: whether windows are used is not known")
    rows = []
    for index, (kind, num_bytes) in enumerate(done):
        kernel = None if seen is None else seen[index]
        on_windows = None if kernel is None else kernel.startswith("ncclSym")
        rows.append(KernelRow(kind, num_bytes, kernel, on_windows))
    return rows


def kernel_names(calls: Sequence[Callable[[], None]], device: torch.device) -> list[str] | None:
    """NCCL's kernel of each call by the profiler; None where it has not seen exactly one a call."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for call in calls:
            call()
        torch.cuda.synchronize(device)
    seen: list[Any] = [event for event in profile.events() or [] if event.name.startswith(_PREFIXES)]
    on_device = [event for event in seen if event.device_type.name == "CUDA"]
    on_device.sort(key=lambda event: event.time_range.start)
    return [event.name for event in on_device] if len(on_device) == len(calls) else None

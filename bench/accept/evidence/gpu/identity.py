"""Identity of GPUs across tools, so that their findings can be combined.

A GPU is `GPU 3` (dcgmi, nvlink), `GPU 3 (00000000:5D:00.0)` (nvidia-smi, which has both) or `GPU 0000:5d:00` (kernel).
An RDMA device is `mlx5_2` everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_BUS = re.compile(r"\b(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.[0-9a-fA-F])?\b")
_GPU = re.compile(r"^GPU (?:(\d{1,4})\b(?!:))?")


class GpuName(NamedTuple):
    """GPU identity from a subject: index on the node and normalised bus id; -1 and empty if not given."""

    number: int
    bus: str


def normal_bus(text: str) -> str:
    """Normalise a bus id: `0000:5d:00` for `00000000:5D:00.0`, `0000:5d:00` and `5d:00.0`; empty if there is none."""
    match = _BUS.search(text)
    if match is None:
        return ""
    domain = int(match[1], 16) if match[1] else 0
    return f"{domain:04x}:{match[2]}:{match[3]}".lower()


def gpu_name(subject: str) -> GpuName | None:
    """Parse the GPU identity from a finding's subject; None if it is about something else."""
    match = _GPU.match(subject)
    if match is None:
        return None
    bus = normal_bus(subject.partition(" ")[2] if match[1] is None else subject.partition("(")[2])
    if match[1] is None and not bus:
        return None
    return GpuName(int(match[1]) if match[1] else -1, bus)


def gpu_indices(subjects: Iterable[str]) -> dict[str, int]:
    """Return the GPU index of each bus id, from subjects that have both (those of nvidia-smi)."""
    names = [name for subject in subjects if (name := gpu_name(subject))]
    return {name.bus: name.number for name in names if name.bus and name.number >= 0}

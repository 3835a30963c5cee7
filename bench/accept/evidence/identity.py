"""Names that one part has in several tools, so that what they say of it can be joined.

A GPU is `GPU 3` (dcgmi, nvlink), `GPU 3 (00000000:5D:00.0)` (nvidia-smi, which knows both) or `GPU 0000:5d:00` (the
kernel). An RDMA device is `mlx5_2` everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_BUS = re.compile(r"\b(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.[0-9a-fA-F])?\b")
_GPU = re.compile(r"^GPU (?:(\d{1,4})\b(?!:))?")


class GpuName(NamedTuple):
    """What a subject tells of a GPU: its number on the node and its normal bus id; -1 and empty where it does not."""

    number: int
    bus: str


def normal_bus(text: str) -> str:
    """Return `0000:5d:00` for `00000000:5D:00.0`, `0000:5d:00` and `5d:00.0`; empty where no bus id stands in it."""
    match = _BUS.search(text)
    if match is None:
        return ""
    domain = int(match[1], 16) if match[1] else 0
    return f"{domain:04x}:{match[2]}:{match[3]}".lower()


def gpu_name(subject: str) -> GpuName | None:
    """Return what a finding's subject tells of a GPU; None where it is about something else."""
    match = _GPU.match(subject)
    if match is None:
        return None
    bus = normal_bus(subject.partition(" ")[2] if match[1] is None else subject.partition("(")[2])
    if match[1] is None and not bus:
        return None
    return GpuName(int(match[1]) if match[1] else -1, bus)


def gpu_indices(subjects: Iterable[str]) -> dict[str, int]:
    """Return the number of each bus id, from the subjects that name both, as those of nvidia-smi do."""
    names = [name for subject in subjects if (name := gpu_name(subject))]
    return {name.bus: name.number for name in names if name.bus and name.number >= 0}

"""Whether this machine has the memory that a job will take, asked before any rank starts."""

from __future__ import annotations

from typing import Literal

from netlayer import environ
from netlayer.config.tree import JobConfig
from netlayer.workload.fit import check_room, in_room, with_overlap
from netlayer.workload.memory import estimate, gib
from netlayer.workload.model_size import num_parameters as num_parameters


def check_memory(job: JobConfig, ranks: int, backend: Literal["gloo", "nccl"]) -> str:
    """Refuse a job that does not fit, before any rank starts; one line that says what it will take.

    Raises:
        ConfigError: the ranks together need more than this machine has free, or one more than its GPU has.
    """
    there, where = _room(backend)
    job = with_overlap(job, windows=False) if backend == "gloo" else in_room(job, there)
    needed = estimate(job)
    sharing = 1 if backend == "nccl" else ranks
    line = f"a rank will hold about {needed}"
    if sharing > 1:
        line += f"; {ranks} ranks {gib(needed.total * ranks)}"
    if not there:
        return line
    line += f"; {where} {gib(there)}"
    check_room(job, line, there, sharing)
    return line


def _room(backend: Literal["gloo", "nccl"]) -> tuple[int, str]:
    """Bytes that ranks can take: of the smallest GPU, or of this machine; 0 where nobody says."""
    if backend == "gloo":
        return environ.available_memory_bytes(), "free here are"
    sizes = [gpu.memory_mib for gpu in environ.usable_gpus() if gpu.memory_mib]
    return min(sizes, default=0) * 2**20, "the GPU has"

"""Rows of `bench.data_idle`, what its ranks are ordered to do, and its limits."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from netlayer.config.tree import JobConfig

Backend = Literal["gloo", "nccl"]
SYSTEMS = ("loader", "no_prefetch", "torch", "megatron")
MAX_IDLE_SHARE, MAX_CORES, MAX_FIRST_BATCH_S = 0.002, 0.03, 2.0
"""Limits for `loader` on GPUs: idle share of a step, cores a GPU, seconds to the first batch."""
WEIGHTS = {"web": 0.7, "code": 0.3}
DTYPE = "uint16"


@dataclass(frozen=True)
class IdleRow:
    """One turn of a system; times are of the rank that waits longest.

    Args:
        step_ms: median of the timed steps.
        idle_ms: mean a step; `idle_share` is the sum over that of the steps.
        wait_ms: mean a step for which the host waited.
        cores: of loader processes and copying threads, a rank.
        copies: of the samples that were trained on; None: not counted.
        first_batch_s: from opening the data to the first batch.
    """

    system: str
    run: int
    step_ms: float
    idle_ms: float
    idle_share: float
    wait_ms: float
    cores: float
    copies: float | None
    first_batch_s: float


@dataclass(frozen=True)
class ResumeRow:
    """First batch of a run that resumes: seconds, of the slowest rank."""

    step: int
    tokens: int
    first_batch_s: float


@dataclass(frozen=True)
class Order:
    """Order to all ranks: what they measure."""

    job: JobConfig
    resume_job: JobConfig
    prefixes: dict[str, Path]
    systems: tuple[str, ...]
    runs: int
    steps: int
    warmup: int
    resume_step: int
    seed: int
    cache: Path


def medians(rows: Sequence[IdleRow]) -> list[IdleRow]:
    """Return one row a system: the median of each column over its runs."""
    result = []
    for name in dict.fromkeys(row.system for row in rows):
        own = [dataclasses.asdict(row) for row in rows if row.system == name]
        values: dict[str, Any] = {
            key: None if own[0][key] is None else statistics.median(row[key] for row in own)
            for key in own[0]
            if key not in ("system", "run")
        }
        result.append(IdleRow(system=name, run=len(own), **values))
    return result


def missed_limits(rows: Sequence[IdleRow], resumed: Sequence[ResumeRow]) -> list[str]:
    """Return a phrase for each limit that our loader misses."""
    missed = []
    for row in (row for row in rows if row.system == "loader"):
        if row.idle_share >= MAX_IDLE_SHARE:
            missed.append(f"steps are idle for {row.idle_share:.2%} of their time, above {MAX_IDLE_SHARE:.1%}")
        if row.cores >= MAX_CORES:
            missed.append(f"the loader takes {row.cores:.3f} cores a GPU, above {MAX_CORES:g}")
        if row.copies is not None and round(row.copies, 1) > 1:
            missed.append(f"the loader reads {row.copies:.2f} copies, above one")
    missed += [
        f"the first batch at step {row.step:,} takes {row.first_batch_s:.1f} s, above {MAX_FIRST_BATCH_S:g} s"
        for row in resumed
        if row.first_batch_s >= MAX_FIRST_BATCH_S
    ]
    return missed

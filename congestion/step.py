"""A whole training step on the network: phases that repeat are simulated a few times, and the rest of them skipped.

A step of a large job is the same few phases a hundred times over: buckets of an all-gather, micro-batches of the
pipeline, buckets of a reduce-scatter. All phases are simulated in one run, in their order, each repeated `exact` times
at most, and in a second run half as often: what the longer run takes longer is the time of the repetitions that it has
more. (Ranks drift apart in the first ones and catch up in the last, in both runs alike.) A repetition that is skipped
takes so long, and as bounds no less and no more than any that was seen; both hold as far as those to come are like
those. The result is predicted, not simulated.

Left out: computation between phases, and so its overlap; phases at once are written with +.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from congestion.files import Ints
from netlayer.config import JobConfig
from netlayer.errors import ConfigError
from netlayer.workload import schedule
from topology import traffic

MOST_REPEATS = 1_000_000


@dataclass(frozen=True)
class Segment:
    """Phases at once (joined by +), so often in turn."""

    phases: str
    repeats: int

    def __str__(self) -> str:
        return f"{self.phases}*{self.repeats}"


@dataclass(frozen=True)
class Repeated:
    """A segment, as far as it was simulated.

    Args:
        took_ps: of each repetition that was simulated, from the end of what came before it.
        fewer_ps: the same of the run with fewer repetitions.
    """

    segment: Segment
    took_ps: tuple[int, ...]
    fewer_ps: tuple[int, ...]

    @property
    def skipped(self) -> int:
        return self.segment.repeats - len(self.took_ps)

    @property
    def seen_ps(self) -> tuple[int, ...]:
        """Those that a skipped one is like; the first one takes over from another phase."""
        return self.took_ps[1:] or self.took_ps

    @property
    def each_ps(self) -> float:
        """Of a repetition among many."""
        more = len(self.took_ps) - len(self.fewer_ps)
        if not more:
            return sum(self.seen_ps) / len(self.seen_ps)
        found = (sum(self.took_ps) - sum(self.fewer_ps)) / more
        return min(max(found, min(self.seen_ps)), max(self.seen_ps))

    @property
    def total_ps(self) -> float:
        return sum(self.took_ps) + self.skipped * self.each_ps

    @property
    def bounds_ps(self) -> tuple[int, int]:
        whole = sum(self.took_ps)
        return whole + self.skipped * min(self.seen_ps), whole + self.skipped * max(self.seen_ps)

    def row(self) -> dict[str, Any]:
        """For tables, in seconds."""
        low, high = self.bounds_ps
        return {
            "phases": self.segment.phases,
            "repeats": self.segment.repeats,
            "simulated": len(self.took_ps),
            "first_s": self.took_ps[0] / 1e12,
            "each_s": self.each_ps / 1e12,
            "least_s": min(self.seen_ps) / 1e12,
            "most_s": max(self.seen_ps) / 1e12,
            "total_s": self.total_ps / 1e12,
            "low_s": low / 1e12,
            "high_s": high / 1e12,
        }


def read_step(text: str) -> tuple[Segment, ...]:
    """`all-gather*82,pipeline*32`: phases as `scenario.phases` takes them, each with how often it comes.

    Raises:
        ConfigError: a part is not of that form.
    """
    segments = []
    for part in text.split(","):
        match = re.fullmatch(r"([a-z+\- ]+?)\s*(?:\*\s*(\d+))?", part.strip())
        repeats = int(match[2] or 1) if match else 0
        if match is None or not 1 <= repeats <= MOST_REPEATS:
            rule = f"is not PHASES or PHASES*N with N from 1 to {MOST_REPEATS:,}"
            raise ConfigError("--step", part, rule, "write for example all-gather*82,pipeline*32,reduce-scatter*82")
        segments.append(Segment(match[1].strip(), repeats))
    return tuple(segments)


def step_of(job: JobConfig, bucket_bytes: int, micro_batches: int) -> tuple[Segment, ...]:
    """The job's own: buckets of parameters gathered, micro-batches through the pipeline, buckets of gradients reduced.

    Stages with fewer parameters than the largest one get as many buckets as that.

    Args:
        bucket_bytes: of parameters, in the computation's dtype; 0: all in one.
        micro_batches: that the pipeline sends in a repetition; 0: all.
    """
    most = int(traffic.parameter_bytes(job).max())
    buckets = math.ceil(most / bucket_bytes) if bucket_bytes else 1
    in_step = schedule.micro_batches(job)
    found = []
    if job.parallel.dp > 1:
        found += [Segment("all-gather", buckets)]
    if job.parallel.pp > 1:
        found += [Segment("pipeline", math.ceil(in_step / micro_batches) if micro_batches else 1)]
    if job.parallel.dp > 1:
        found += [Segment("reduce-scatter", buckets)]
    if not found:
        rule = "sends nothing between servers, with dp and pp of 1"
        raise ConfigError("job.parallel", job.parallel.dp, rule, "give a job of several servers")
    return tuple(found)


def phases_of(segments: Sequence[Segment], exact: int) -> str:
    """What is simulated of them, as `scenario.phases` takes it; `exact` 0: all."""
    return ",".join(phase for one in segments for phase in [one.phases] * _simulated(one, exact))


def took_ps(
    segments: Sequence[Segment], exact: int, finish_ps: Ints, num_flows: Sequence[int]
) -> list[tuple[int, ...]]:
    """The run of `phases_of` taken apart: what each repetition of each segment took.

    Args:
        finish_ps: of each flow, in the order of the phases.
        num_flows: of a single repetition of each segment.
    """
    found, first, before = [], 0, 0
    for segment, many in zip(segments, num_flows, strict=True):
        times = _simulated(segment, exact)
        mine = finish_ps[first : first + times * many].reshape(times, many)
        ends = np.maximum.accumulate(np.append(before, mine.max(axis=1)))
        found.append(tuple(np.diff(ends).tolist()))
        first, before = first + times * many, int(ends[-1])
    if first != len(finish_ps):
        raise ValueError(f"{len(finish_ps)} flows, the segments have {first}")
    return found


def _simulated(segment: Segment, exact: int) -> int:
    return min(segment.repeats, exact) if exact else segment.repeats

"""A whole training step on the network: phases that repeat themselves exactly are simulated until they do, and skipped.

A step of a large job is the same few phases a hundred times over: buckets of an all-gather, micro-batches of the
pipeline, buckets of a reduce-scatter. All phases are simulated in one run, in their order, each repeated a few times. A
segment is skipped where its repetitions were seen to repeat: every flow of each of them starts and ends the same time
after its like, to the picosecond, over three periods, and nothing in them was left to chance (no queue came to where
packets are marked by a drawn number, for a law that hears of marks). All that happens after a state follows from it, so
what is left of the segment is those periods again, and then its end as it was simulated: the sum is that of the whole.

That argument needs repetitions in which no rank has come to the segment's end, for there the whole would go on as
before, and this run does not: those count that were over by then. A segment in which none are seen to repeat is
simulated with more repetitions, and whole in the end: under DCQCN a pipeline's micro-batches never repeat. Flows keep
the numbers by which their marks would be drawn in the whole.

Not covered: computation between phases, and so its overlap; phases at once are written with +. Losses, adaptive
routing, timers and classes of traffic, with which all is simulated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from congestion.simulation.files import Ints
from netlayer.config.tree import JobConfig
from netlayer.errors import ConfigError
from netlayer.workload import schedule
from topology.traffic import job as traffic

if TYPE_CHECKING:
    from congestion.simulation.simulate import Outcome, Progress, Simulation

MOST_REPEATS = 1_000_000
_HEARS_NO_MARK = ("none", "swift")
_PERIODS = 3  # that are alike, to be taken for repeating
_MOST_PERIOD = 8  # repetitions
_SAY_S = 0.25  # between two words about the progress
_MORE = 3  # times as many in the next run
_ENOUGH = 20  # repetitions, for what came before to be over: if marks are drawn then, they always are
_SLICE_WINDOWS, _MOST_SLICES = 10, 2_000  # until a slice doubles


@dataclass(frozen=True)
class Segment:
    """Phases at once (joined by +), this many times in turn."""

    phases: str
    repeats: int

    def __str__(self) -> str:
        return f"{self.phases}*{self.repeats}"


@dataclass(frozen=True)
class Repeated:
    """A segment, as far as it was simulated.

    Args:
        took_ps: of each repetition that was simulated, from the end of what came before it.
        period: repetitions after which all is as before; 0: they were not seen to repeat.
        period_ps: how long those take.
        is_random: marks may have been drawn in it.
    """

    segment: Segment
    took_ps: tuple[int, ...]
    period: int = 0
    period_ps: int = 0
    is_random: bool = False

    @property
    def skipped(self) -> int:
        return self.segment.repeats - len(self.took_ps)

    @property
    def is_exact(self) -> bool:
        """Whether what is skipped is known: whole periods, or nothing."""
        return not self.skipped or (self.period > 0 and self.skipped % self.period == 0)

    @property
    def seen_ps(self) -> tuple[int, ...]:
        """Times that a skipped repetition may be like; the first one takes over from another phase."""
        return self.took_ps[1:] or self.took_ps

    @property
    def each_ps(self) -> float:
        """Time of a repetition that is skipped, or would be."""
        return self.period_ps / self.period if self.period else sum(self.seen_ps) / len(self.seen_ps)

    @property
    def total_ps(self) -> float:
        return sum(self.took_ps) + self.skipped * self.each_ps

    @property
    def bounds_ps(self) -> tuple[float, float]:
        """The total where it is known; else as if no skipped repetition were shorter or longer than any seen."""
        whole = sum(self.took_ps)
        if self.is_exact:
            return self.total_ps, self.total_ps
        return whole + self.skipped * min(self.seen_ps), whole + self.skipped * max(self.seen_ps)

    def to_row(self) -> dict[str, Any]:
        """Return a row for tables, in seconds."""
        low, high = self.bounds_ps
        return {
            "phases": self.segment.phases,
            "repeats": self.segment.repeats,
            "simulated": len(self.took_ps),
            "period": self.period or None,
            "skipped_as": ("repeats exactly" if self.is_exact else "guessed") if self.skipped else "nothing",
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
    segments = []
    if job.parallel.dp > 1:
        segments += [Segment("all-gather", buckets)]
    if job.parallel.pp > 1:
        segments += [Segment("pipeline", math.ceil(in_step / micro_batches) if micro_batches else 1)]
    if job.parallel.dp > 1:
        segments += [Segment("reduce-scatter", buckets)]
    if not segments:
        rule = "sends nothing between servers, with dp and pp of 1"
        raise ConfigError("job.parallel", job.parallel.dp, rule, "give a job of several servers")
    return tuple(segments)


def phases_of(segments: Sequence[Segment], counts: Sequence[int]) -> str:
    """Return what is simulated of the segments, each this many times, as `scenario.phases` takes it."""
    return ",".join(
        phase for one, count in zip(segments, counts, strict=True) for phase in [one.phases] * min(one.repeats, count)
    )


def numbers_of(segments: Sequence[Segment], counts: Sequence[int], num_flows: Sequence[int]) -> Ints:
    """The row of each flow in the whole, by which its marks are drawn: half of a segment is its begin, half its end.

    Args:
        num_flows: of a single repetition of each segment.
    """
    numbers, first = [], 0
    for segment, count, many in zip(segments, counts, num_flows, strict=True):
        last = count // 2
        repeats = np.r_[0 : count - last, segment.repeats - last : segment.repeats]
        numbers.append((first + repeats[:, None] * many + np.arange(many)).ravel())
        first += segment.repeats * many
    return np.concatenate(numbers)


@dataclass(frozen=True, eq=False)
class Timeline:
    """Record of a run by which to tell whether it repeats itself, flows in the order of the phases.

    Args:
        start_ps, finish_ps: of each flow.
        is_plain: nothing hangs on the clock or on how much was sent before: losses, adaptive routing, timers, classes.
        drawn_ps: intervals in which a mark may have been drawn that somebody hears of, shape (many, 2).
    """

    start_ps: Ints
    finish_ps: Ints
    is_plain: bool = True
    drawn_ps: Ints | tuple[()] = ()


def repeated(
    segments: Sequence[Segment], counts: Sequence[int], num_flows: Sequence[int], seen: Timeline
) -> list[Repeated]:
    """Cut a simulated run of several segments (`phases_of`) into these: durations of their repetitions, in ps.

    For each segment it is also found whether its repetitions are alike, so that those that were not simulated take as
    long.

    Args:
        counts: simulated repetitions of each segment.
        num_flows: of one repetition of each segment.
        seen: the run, flows in the order of segments and repetitions.
    """
    if sum(count * many for count, many in zip(counts, num_flows, strict=True)) != len(seen.finish_ps):
        raise ValueError(f"{len(seen.finish_ps)} flows, not those of the segments")
    parts, first, before = [], 0, 0
    for segment, count, many in zip(segments, counts, num_flows, strict=True):
        stop = first + count * many
        start, finish = (each[first:stop].reshape(count, many) for each in (seen.start_ps, seen.finish_ps))
        ends = np.maximum.accumulate(np.append(before, finish.max(axis=1)))
        took_ps = tuple(np.diff(ends).tolist())
        leaves = min(int(finish[-1].min()), int(seen.start_ps[stop:].min(initial=finish[-1].min())))
        drawn = np.array(seen.drawn_ps, dtype=np.int64).reshape(-1, 2)
        period = _period(start, finish, leaves, drawn) if seen.is_plain else (0, 0)
        middle = count // 2  # before, what came before may be under way, and behind, what comes next
        is_random = not seen.is_plain or _meets(drawn, int(start[middle].min()), int(finish[middle].max()))
        parts.append(Repeated(segment, took_ps, *period, is_random))
        first, before = stop, int(ends[-1])
    return parts


def _period(start: Ints, finish: Ints, leaves: int, drawn: Ints) -> tuple[int, int]:
    """The least number of repetitions after which all is as before, and how long they take; (0, 0): none is seen.

    Args:
        start, finish: (repetitions, flows of one).
        leaves: when the first rank may have come to the segment's end.
    """
    over = int((np.maximum.accumulate(finish.max(axis=1)) < leaves).sum())
    for period in range(1, min(_MOST_PERIOD, over // _PERIODS) + 1):
        since = over - _PERIODS * period
        times = np.concatenate([start[since:over], finish[since:over]], axis=1)
        shifts = times[period:] - times[:-period]
        begin, end = int(times.min()), int(times.max())
        if shifts.min() == shifts.max() and not _meets(drawn, begin, end):
            return period, int(shifts[0, 0])
    return 0, 0


def _meets(intervals: Ints, begin: int, end: int) -> bool:
    return bool(((intervals[:, 0] <= end) & (intervals[:, 1] >= begin)).any())


def next_counts(parts: Sequence[Repeated], counts: Sequence[int], within: float) -> list[int] | None:
    """Return how often to simulate each segment next; None: what is skipped is known, or bound well enough.

    Args:
        within: share of the step by which it may differ from what is said, by what was seen; 0: it is to be known.
    """
    total = sum(one.total_ps for one in parts)
    low, high = (sum(one.bounds_ps[end] for one in parts) for end in (0, 1))
    if all(one.is_exact for one in parts):
        return None
    # Bounds of no width are no proof: times that happened to be alike so far are known only where they repeat exactly.
    if within and max(high - total, total - low) <= within * total:
        return None
    new_counts = []
    for one, count in zip(parts, counts, strict=True):
        more = count
        if not one.is_exact:
            more = count + one.skipped % one.period if one.period else _MORE * count
            if 2 * more > one.segment.repeats or (one.is_random and not one.period and count >= _ENOUGH):
                more = one.segment.repeats
        new_counts.append(more)
    return new_counts


def watch(simulation: Simulation, law: str, say: Callable[[Progress], None] | None = None) -> tuple[Outcome, Timeline]:
    """Run to the end, and look in between whether queues grew to where marks are drawn."""
    state = simulation.state
    hears, is_plain = law not in _HEARS_NO_MARK, "plain" in (state.features.dtype.names or ())
    if not (hears and is_plain):
        outcome = simulation.run(say=say)
        return outcome, Timeline(outcome.start_ps, outcome.finish_ps, is_plain)
    drawn, slice_ps, num_slices, said_s = [], _SLICE_WINDOWS * int(state.run["window"][0]), 0, 0.0
    largest, kmin = np.zeros(len(state.port), dtype=np.int64), state.kind["kmin"][state.port["kind"]]
    while not (simulation.completed or simulation.interrupted):
        before = simulation.time_ps
        simulation.run_on(slice_ps)
        if say and simulation.wall_s >= said_s + _SAY_S:
            said_s = simulation.wall_s
            say(simulation.progress())
        port = simulation.state.port
        if (port["max_queue_bytes"] > kmin).any():
            drawn.append((before, simulation.time_ps))
        np.maximum(largest, port["max_queue_bytes"], out=largest)
        port["max_queue_bytes"] = port["queue_bytes"]  # on a GPU without effect: then all that follows counts
        num_slices += 1
        slice_ps *= 1 + (num_slices % _MOST_SLICES == 0)
    simulation.state.port["max_queue_bytes"] = largest
    outcome = simulation.outcome()
    return outcome, Timeline(
        outcome.start_ps, outcome.finish_ps, is_plain, np.array(drawn, dtype=np.int64).reshape(-1, 2)
    )

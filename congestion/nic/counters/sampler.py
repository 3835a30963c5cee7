"""Samples on a schedule that does not drift: the k-th is due at start + k * period, whatever the one before took.

A sample that is a whole period late is omitted and counted, not made up for. Its time is when its reading began. They
are handed on in stretches that end with a reading of all counters, so that nothing waits for what alarms look at.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from congestion.nic.counters.reader import NUM_LATE, Ints, Samples, Schedule

SLOW_PERIOD_NS = 200_000_000  # between two readings of the slow counters, where the period is shorter
SLOW_EVERY = 20  # samples between them at most
Sink = Callable[[Ints, Ints, bool], None]


class Readable(Protocol):
    """Source of samples: `Reader`, or a test's own."""

    columns: list[str]

    def read(self, schedule: Schedule, tick: int, num: int, into: Samples) -> tuple[int, int]: ...


@dataclass
class Sampled:
    """Figures of a run of the sampler; true after each stretch.

    Args:
        num_samples: taken.
        skipped: samples that were due while an earlier one was still being read or written.
        cpu_s: of the whole process, over the run.
        late_us: how many samples began so many microseconds after they were due; shape (NUM_LATE,).
    """

    num_samples: int = 0
    skipped: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    late_us: Ints = field(default_factory=lambda: np.zeros(NUM_LATE, dtype=np.int64))

    @property
    def cpu_share(self) -> float:
        """CPU time of the whole process as a share of one core."""
        return self.cpu_s / self.wall_s if self.wall_s else 0.0

    def late_at(self, share: float) -> float:
        """Return how late that share of the samples was at most, in seconds, rounded up to a microsecond."""
        return (int(np.searchsorted(np.cumsum(self.late_us), share * self.late_us.sum())) + 1) / 1e6


def slow_every(period_ns: int) -> int:
    """Return the number of samples from one reading of the slow counters to the next."""
    return max(1, min(SLOW_EVERY, SLOW_PERIOD_NS // period_ns))


def sample(
    reader: Readable,
    sink: Sink,
    period_ns: int,
    *,
    num_samples: int | None = None,
    sampled: Sampled | None = None,
    clock: Callable[[], int] = time.monotonic_ns,
    stopped: Callable[[], bool] = lambda: False,
) -> Sampled:
    """Read every `period_ns` and hand what was read to `sink`, until `num_samples` are taken.

    Args:
        sink: gets times of day, shape (samples,), values, shape (samples, columns), and whether the last one is of all
            counters, after each stretch: the first sample alone, then as many as `slow_every` says. Both arrays are
            filled anew when it returns.
        sampled: filled while it runs, so that who interrupts it knows how far it came.
        stopped: true once no more is wanted; a signal ends a stretch, and it is asked.
        clock: of a test.

    Raises:
        ValueError: a period below a millisecond.
    """
    if period_ns < 1_000_000:
        raise ValueError(f"period_ns = {period_ns}: at least 1,000,000, a millisecond")
    done = sampled if sampled is not None else Sampled()
    every = slow_every(period_ns)
    room = Samples(every, len(reader.columns), done.late_us)
    schedule, cpu_s = Schedule(clock(), period_ns), time.process_time()
    epoch_ns = time.time_ns() - schedule.start_ns
    tick = 0
    while (num_samples is None or done.num_samples < num_samples) and not stopped():
        num = every - (done.num_samples - 1) % every if done.num_samples else 1
        num = num if num_samples is None else min(num, num_samples - done.num_samples)
        num_taken, tick = reader.read(schedule, tick, num, room)
        done.num_samples += num_taken
        done.skipped = tick - done.num_samples
        if num_taken:
            done.wall_s = (int(room.time_ns[num_taken - 1]) - schedule.start_ns) / 1e9
            sink(room.time_ns[:num_taken] + epoch_ns, room.values[:num_taken], num_taken == num)
            tick = schedule.next_tick(tick - 1, clock())
        done.cpu_s = time.process_time() - cpu_s
    return done

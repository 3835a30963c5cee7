"""Samples on a schedule that does not drift: the k-th is due at start + k * period, whatever the one before took.

A sample that is a whole period late is left out and counted, not made up for. Its time is when its reading began.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

SLOW_PERIOD_NS = 200_000_000  # between two readings of the slow counters, where the period is shorter
SLOW_EVERY = 20  # samples between them at most
Sink = Callable[[int, Sequence[int]], None]


class Readable(Protocol):
    """What is sampled: `Reader`, or a test's own."""

    def read(self, *, slow: bool = True) -> list[int]: ...


@dataclass
class Sampled:
    """What a run of the sampler did; true to the moment at any time.

    Args:
        taken: samples.
        left_out: samples that were due while an earlier one was still being read or written.
        cpu_s: of the whole process, over the run.
    """

    taken: int = 0
    left_out: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    worst_late_s: float = field(default=0.0)

    @property
    def cpu_share(self) -> float:
        """Of one core."""
        return self.cpu_s / self.wall_s if self.wall_s else 0.0


def slow_every(period_ns: int) -> int:
    """How many samples there are from one reading of the slow counters to the next."""
    return max(1, min(SLOW_EVERY, SLOW_PERIOD_NS // period_ns))


def sample(
    reader: Readable,
    sink: Sink,
    period_ns: int,
    *,
    num_samples: int | None = None,
    sampled: Sampled | None = None,
    clock: Callable[[], int] = time.monotonic_ns,
    sleep: Callable[[float], object] = time.sleep,
    stopped: Callable[[], bool] = lambda: False,
) -> Sampled:
    """Read every `period_ns` and hand each sample to `sink` with its time of day, until `num_samples` are taken.

    Args:
        sampled: filled while it runs, so that who interrupts it knows how far it came.
        sleep: how to wait; with an event's, who sets it ends the wait.
        stopped: true once no more is wanted.
        clock: of a test.

    Raises:
        ValueError: a period below a millisecond.
    """
    if period_ns < 1_000_000:
        raise ValueError(f"period_ns = {period_ns}: at least 1,000,000, a millisecond")
    done = sampled if sampled is not None else Sampled()
    every = slow_every(period_ns)
    start, cpu = clock(), time.process_time()
    epoch = time.time_ns() - start
    tick = 0
    while (num_samples is None or done.taken < num_samples) and not stopped():
        due = start + tick * period_ns
        wait = due - clock()
        if wait > 0:
            sleep(wait / 1e9)
            if stopped():
                break
        now = clock()
        done.worst_late_s = max(done.worst_late_s, (now - due) / 1e9)
        sink(epoch + now, reader.read(slow=done.taken % every == 0))
        done.taken += 1
        done.wall_s, done.cpu_s = (now - start) / 1e9, time.process_time() - cpu
        tick += 1
        behind = (clock() - start) // period_ns + 1 - tick  # whole periods that have passed since it was due
        if behind > 0:
            done.left_out += behind
            tick += behind
    return done

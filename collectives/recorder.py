"""What communication costs a step: counts, bytes and times of every collective, and how long the computation waited.

`exposed_comm` is the share of a step (0..1) in which the compute stream waits for a communication, by events: on CUDA
two events around each wait, on the CPU the time that the host is blocked in it. Reading a time is what waits for the
events, never the step itself. Left out: contention (a step with its communication removed must run for that), and what
a collective costs beside a computation that it hides behind.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    Mark = int | torch.cuda.Event
    """A point in time: nanoseconds of the host's clock, or an event on the compute stream."""


@dataclass(slots=True)
class Collective:
    """One collective on this rank; host times are of `time.perf_counter_ns`, 0 where it has not come to that yet.

    Args:
        group: name of the lane it ran on: `gather`, `reduce`.
        kind: `all_gather`, `reduce_scatter`, `all_reduce`.
        num_bytes: size of the whole buffer, as nccl-tests count it: what a rank holds after a gather or before a
            reduce-scatter.
        step: the step it was launched in; None outside any.
    """

    group: str
    kind: str
    num_bytes: int
    step: int | None
    launch_start_ns: int = 0
    launch_end_ns: int = 0
    wait_start_ns: int = 0
    wait_end_ns: int = 0


@dataclass
class StepComm:
    """Communication of one step. On CUDA the first time read waits for the step's end on the device, and only that.

    A collective counts in the step that launched it; a wait in the step that waited: gathers prefetched for the next
    step are counted here and exposed there.
    """

    step: int
    collectives: list[Collective] = field(default_factory=list)
    _marks: list[Mark] = field(default_factory=list, repr=False)
    _waits: list[tuple[Mark, Mark]] = field(default_factory=list, repr=False)

    @property
    def num_collectives(self) -> int:
        return len(self.collectives)

    @property
    def num_bytes(self) -> int:
        return sum(collective.num_bytes for collective in self.collectives)

    def counts(self) -> Counter[tuple[str, str]]:
        """Number of collectives launched in this step, by (group, kind)."""
        return _count(self.collectives)

    def ready(self) -> bool:
        """Whether reading a time would not wait."""
        return all(isinstance(mark, int) or mark.query() for mark in self._marks)  # type: ignore[no-untyped-call]

    @cached_property
    def step_s(self) -> float:
        """Seconds from `begin_step` to `end_step`, on the compute stream."""
        start, end = self._marks
        return _seconds(start, end)

    @cached_property
    def exposed_s(self) -> float:
        """Seconds in which the compute stream waited for a communication."""
        return sum(_seconds(start, end) for start, end in self._waits)

    @property
    def exposed_comm(self) -> float:
        """Share of the step in which the compute stream waited, 0..1."""
        return self.exposed_s / self.step_s if self.step_s > 0 else 0.0


class Recorder:
    """Records the collectives of one rank; give None where a recorder is asked for to record nothing, at no cost.

    Args:
        device: where the computation runs; a CUDA device is timed by events.
        num_kept: steps kept in `steps`; older ones are dropped.
    """

    def __init__(self, device: torch.device | str = "cpu", num_kept: int = 64) -> None:
        self.steps: deque[StepComm] = deque(maxlen=num_kept)
        self._by_events = str(device).startswith("cuda")
        self._counts: Counter[tuple[str, str]] = Counter()
        self._open: StepComm | None = None

    def begin_step(self, step: int) -> None:
        """Open a step. One that is still open (it raised) is dropped."""
        self._open = StepComm(step)
        self._open._marks.append(self._mark())

    def end_step(self) -> StepComm:
        """Close the step and return what is known of it; its times may still be on their way (`ready`)."""
        if self._open is None:
            raise RuntimeError("end_step() without begin_step()")
        done, self._open = self._open, None
        done._marks.append(self._mark())
        self.steps.append(done)
        return done

    def counts(self) -> Counter[tuple[str, str]]:
        """Number of collectives by (group, kind), inside and outside steps, since the start or `reset`."""
        return Counter(self._counts)

    def reset(self) -> None:
        """Forget counts and steps; an open step goes on."""
        self._counts.clear()
        self.steps.clear()

    @contextmanager
    def launching(self, group: str, kind: str, num_bytes: int) -> Iterator[Collective]:
        """Around the call that launches a collective; fields as in `Collective`."""
        collective = Collective(group, kind, num_bytes, self._open.step if self._open else None)
        self._counts[group, kind] += 1
        if self._open:
            self._open.collectives.append(collective)
        collective.launch_start_ns = time.perf_counter_ns()
        yield collective
        collective.launch_end_ns = time.perf_counter_ns()

    @contextmanager
    def waiting(self, collective: Collective) -> Iterator[None]:
        """Around what makes the computation wait: the host's wait, or the wait put into the compute stream."""
        collective.wait_start_ns = time.perf_counter_ns()
        start = self._mark()
        yield
        if self._open:
            self._open._waits.append((start, self._mark()))
        collective.wait_end_ns = time.perf_counter_ns()

    def _mark(self) -> Mark:
        if not self._by_events:
            return time.perf_counter_ns()
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _count(collectives: Iterable[Collective]) -> Counter[tuple[str, str]]:
    return Counter((collective.group, collective.kind) for collective in collectives)


def _seconds(start: Mark, end: Mark) -> float:
    if isinstance(start, int) or isinstance(end, int):
        assert isinstance(start, int)
        assert isinstance(end, int)
        return (end - start) * 1e-9
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3

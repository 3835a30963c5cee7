"""What communication costs a step: counts, bytes and times of every collective, and how long the computation waited.

`exposed_comm` is the share of a step (0..1) in which the compute stream waits for a communication, by events: on CUDA
two events around each wait, on the CPU the time that the host is blocked in it. Reading a time is what waits for the
events, never the step itself. All times, of host and device, are on the time base of `collectives.clock`. Left out:
contention (a step with its communication removed must run for that), and what a collective costs beside a computation
that it hides behind.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from collectives.clock import TimeBase, seconds_between, take_mark

if TYPE_CHECKING:
    import torch

    from collectives.clock import Mark

Label = str | int | float
Labels = Mapping[str, Label]
STEP, COMPUTE, WAIT = "step", "compute", "wait"
"""Lanes of a trace that are not the lane of a collective: steps, computations, and where computation waits."""
_RENEW_AFTER_S = 60.0  # see [Note: precision] in clock.py


@dataclass(slots=True)
class Collective:
    """One collective, send or receive on this rank; times in ns, 0 or None where it has not come to that yet.

    Args:
        group: name of the lane it ran on (`gather`, `reduce`), or of the channel (`pipeline forward`).
        kind: `all_gather`, `reduce_scatter`, `all_reduce`, `send`, `recv`.
        num_bytes: size of the whole buffer, as nccl-tests count it: what a rank holds after a gather or before a
            reduce-scatter.
        step: the step it was launched in; None outside any.
        launch_start_ns, launch_end_ns: the host in the call that launches it.
        wait_start_ns, wait_end_ns: the host in the call that waits for it.
        lane: what runs one after the other with it: a stream on CUDA; the group where nothing else is said.
        labels: more about it, for a trace: peer, micro-batch, phase.
        flow: the same text on a send and on its receive, in all steps alike; "" where there is no such pair.
        start, end: when it ran. On CUDA events on the lane's stream, from when it could start there. On the CPU the
            end is when somebody noticed: whoever waited for it, unless the lane watches its collectives.
    """

    group: str
    kind: str
    num_bytes: int
    step: int | None
    launch_start_ns: int = 0
    launch_end_ns: int = 0
    wait_start_ns: int = 0
    wait_end_ns: int = 0
    lane: str = ""
    labels: Labels = field(default_factory=dict)
    flow: str = ""
    start: Mark | None = None
    end: Mark | None = None


class Span(NamedTuple):
    """Something with a beginning and an end, on the host's clock: one slice of a trace. Picklable."""

    name: str
    lane: str
    start_ns: int
    end_ns: int
    labels: dict[str, Label]
    flow: str = ""


class _Busy(NamedTuple):
    """A computation, or a wait, on the compute stream."""

    name: str
    labels: Labels
    start: Mark
    end: Mark


@dataclass
class StepComm:
    """Communication of one step. On CUDA the first time read waits for the step's end on the device, and only that.

    A collective counts in the step that launched it; a wait in the step that waited: gathers prefetched for the next
    step are counted here and exposed there.
    """

    step: int
    collectives: list[Collective] = field(default_factory=list)
    _marks: list[Mark] = field(default_factory=list, repr=False)
    _waits: list[_Busy] = field(default_factory=list, repr=False)
    _computed: list[_Busy] = field(default_factory=list, repr=False)
    _time_base: TimeBase | None = field(default=None, repr=False)

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
        return seconds_between(start, end)

    @cached_property
    def exposed_s(self) -> float:
        """Seconds in which the compute stream waited for a communication."""
        return sum(seconds_between(wait.start, wait.end) for wait in self._waits)

    @property
    def exposed_comm(self) -> float:
        """Share of the step in which the compute stream waited, 0..1."""
        return self.exposed_s / self.step_s if self.step_s > 0 else 0.0

    def spans(self) -> list[Span]:
        """The step, its computations, its waits and its collectives, on the host's clock; waits for all of them.

        A collective that nobody has waited for yet is left out on the CPU, where nobody knows when it ends.
        """
        assert self._time_base is not None
        ns = self._time_base.ns
        spans = [Span(f"step {self.step}", STEP, ns(self._marks[0]), ns(self._marks[1]), {"step": self.step})]
        for lane, busy in [(COMPUTE, one) for one in self._computed] + [(WAIT, one) for one in self._waits]:
            spans.append(Span(busy.name, lane, ns(busy.start), ns(busy.end), {"step": self.step, **busy.labels}))
        for one in self.collectives:
            end = one.end if one.end is not None else one.wait_end_ns
            if one.start is not None and end:
                labels = {"step": self.step, "group": one.group, "bytes": one.num_bytes, **one.labels}
                flow = f"{one.flow} step {one.step}" if one.flow else ""
                spans.append(Span(one.kind, one.lane or one.group, ns(one.start), ns(end), labels, flow))
        return spans


class Recorder:
    """Records the collectives of one rank; give None where a recorder is asked for to record nothing, at no cost.

    Args:
        device: where the computation runs; a CUDA device is timed by events, four for a collective.
        num_kept: steps kept in `steps`; older ones are dropped.
    """

    def __init__(self, device: torch.device | str = "cpu", num_kept: int = 64) -> None:
        self.steps: deque[StepComm] = deque(maxlen=num_kept)
        self._by_events = str(device).startswith("cuda")
        self._counts: Counter[tuple[str, str]] = Counter()
        self._open: StepComm | None = None
        self._time_base: TimeBase | None = None

    def begin_step(self, step: int) -> None:
        """Open a step. One that is still open (it raised) is dropped. On CUDA waits for the device once a minute.

        Raises:
            RuntimeError: the current stream is captured into a CUDA graph; so does `end_step`.
        """
        if self._time_base is None or self._time_base.age_s > _RENEW_AFTER_S:
            self.align()
        self._open = StepComm(step, _time_base=self._time_base)
        self._open._marks.append(self._step_mark())

    def end_step(self) -> StepComm:
        """Close the step and return what is known of it; its times may still be on their way (`ready`)."""
        if self._open is None:
            raise RuntimeError("end_step() without begin_step()")
        done, self._open = self._open, None
        done._marks.append(self._step_mark())
        self.steps.append(done)
        return done

    def align(self) -> TimeBase:
        """Compare the device's clock with the host's now, for the steps to come; waits for the current stream."""
        self._time_base = TimeBase(self._by_events)
        return self._time_base

    def counts(self) -> Counter[tuple[str, str]]:
        """Number of collectives by (group, kind), inside and outside steps, since the start or `reset`."""
        return Counter(self._counts)

    def reset(self) -> None:
        """Forget counts and steps; an open step goes on."""
        self._counts.clear()
        self.steps.clear()

    @contextmanager
    def launching(
        self,
        group: str,
        kind: str,
        num_bytes: int,
        *,
        lane: str = "",
        labels: Labels | None = None,
        flow: str = "",
    ) -> Iterator[Collective]:
        """Around the call that launches a collective, on CUDA inside its stream; arguments as in `Collective`."""
        step = self._open.step if self._open else None
        collective = Collective(group, kind, num_bytes, step, lane=lane, labels=labels or {}, flow=flow)
        self._counts[group, kind] += 1
        if self._open:
            self._open.collectives.append(collective)
        collective.launch_start_ns = time.perf_counter_ns()
        collective.start = take_mark(True) if self._by_events else collective.launch_start_ns
        yield collective
        if self._by_events:
            collective.end = take_mark(True)
        collective.launch_end_ns = time.perf_counter_ns()

    @contextmanager
    def waiting(self, collective: Collective) -> Iterator[None]:
        """Around what makes the computation wait: the host's wait, or the wait put into the compute stream."""
        collective.wait_start_ns = time.perf_counter_ns()
        with self._timing(f"wait for {collective.kind}", collective.labels, self._open._waits if self._open else None):
            yield
        collective.wait_end_ns = time.perf_counter_ns()

    @contextmanager
    def computing(self, name: str, **labels: Label) -> Iterator[None]:
        """Around a computation, to show it in a trace; outside a step nothing is recorded."""
        with self._timing(name, labels, self._open._computed if self._open else None):
            yield

    @contextmanager
    def _timing(self, name: str, labels: Labels, spans: list[_Busy] | None) -> Iterator[None]:
        if spans is None:
            yield
            return
        start = take_mark(self._by_events)
        yield
        end = take_mark(self._by_events)
        if start is not None and end is not None:
            spans.append(_Busy(name, labels, start, end))

    def _step_mark(self) -> Mark:
        mark = take_mark(self._by_events)
        if mark is None:
            raise RuntimeError("a step begins and ends outside the capture of a CUDA graph")
        return mark


def _count(collectives: Iterable[Collective]) -> Counter[tuple[str, str]]:
    return Counter((collective.group, collective.kind) for collective in collectives)

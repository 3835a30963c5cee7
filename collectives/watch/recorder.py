"""Cost of communication in a step: counts, bytes and times of every collective, and how long the computation waited.

`exposed_comm` is the share of a step (0..1) in which the compute stream waits for a communication, by events: on CUDA
one before each wait, and one after it or where the collective ends; on the CPU the time that the host is blocked in it.
Reading a time is what waits for the events, never the step itself. All times, of host and device, are on the time base
of `collectives.clock`. Not covered: contention (a step with its communication removed must run for that), and what a
collective costs beside a computation that it hides behind.

[Note: what is exposed] A wait counts from when the collective it is for could start, and before that only while another
collective was under way. What is left of it waits for computation: the optimiser's update stands between a reduction
and the gather that a forward pass waits for, and a step with its communication removed waits for that update too. For
the same reason a wait ends with the collective; for the update after a reduction a computation waits apart. A wait
that only bounds the memory of gradients on their way counts like any other.

[Note: cost of a record] A tensor-parallel step has thousands of collectives and waits, each recorded by the thread that
launches the kernels. So what is recorded is the object that times its own block (`with recorder.launching(...) as
collective`): one object with slots and two marks at most, no generator, and the capture of a graph is asked for once,
at the beginning.
"""

from __future__ import annotations

import itertools
import sys
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from collectives.clock import (
    PooledEvent,
    TimeBase,
    device_events,
    has_happened,
    is_before,
    seconds_between,
    union,
    wait_for,
)
from collectives.watch.processor import ProcessorLaps

if TYPE_CHECKING:
    import torch

    from collectives.clock import DeviceEvents, Mark

Label = str | int | float
Labels = Mapping[str, Label]
STEP, COMPUTE, WAIT = "step", "compute", "wait"
"""Lanes of a trace that are not the lane of a collective: steps, computations, and where computation waits."""
_RENEW_AFTER_S = 60.0  # see [Note: precision] in clock.py
_NUM_EARLIER = 1024  # collectives before a step that may be under way in it: a bound where steps never begin


_NO_LABELS: Labels = {}


class Collective:
    """One collective, send or receive on this rank; times in ns, 0 or None where it has not come to that yet.

    As a context manager around the call that launches it: `Recorder.launching`.

    Args:
        group: name of the communicator it ran on (`gather`, `reduce`), or of the channel (`pipeline forward`).
        kind: `all_gather`, `reduce_scatter`, `all_reduce`, `send`, `recv`.
        num_bytes: size of the whole buffer, as nccl-tests count it: what a rank holds after a gather or before a
            reduce-scatter.
        step: the step it was launched in; None outside any.
        lane: what runs one after the other with it: a stream on CUDA; the group where nothing else is said.
        labels: more about it, for a trace: peer, micro-batch, phase.
        flow: the same text on a send and on its receive, in all steps alike; "" where there is no such pair.
        seq: number of it in its group and kind, from 1: equal on all ranks that launch the same ones.

    Attributes:
        launch_start_ns, launch_end_ns: the host in the call that launches it.
        wait_start_ns, wait_end_ns: the host in the call that waits for it.
        start, end: when it ran. On CUDA events on the stream, from when it could start there. On the CPU the
            end is when it was noticed: by the wait for it, unless the communicator watches its collectives.
        placed: the end on the clock of whoever has read it, and by which time base, for the waits that end with it.
    """

    __slots__ = (
        "_can_capture",
        "_ends_later",
        "_recorder",
        "_stream",
        "end",
        "flow",
        "group",
        "kind",
        "labels",
        "lane",
        "launch_end_ns",
        "launch_start_ns",
        "num_bytes",
        "placed",
        "seq",
        "start",
        "step",
        "wait_end_ns",
        "wait_start_ns",
    )

    def __init__(
        self,
        group: str,
        kind: str,
        num_bytes: int,
        step: int | None,
        lane: str = "",
        labels: Labels | None = None,
        flow: str = "",
        seq: int = 0,
    ) -> None:
        self.group, self.kind, self.num_bytes, self.step = group, kind, num_bytes, step
        self.lane, self.labels, self.flow, self.seq = lane, labels or _NO_LABELS, flow, seq
        self.launch_start_ns = self.launch_end_ns = self.wait_start_ns = self.wait_end_ns = 0
        self.start: Mark | None = None
        self.end: Mark | None = None
        self.placed: tuple[TimeBase, int] | None = None

    @property
    def ended(self) -> Mark | None:
        """Return the time of the collective's end, or of its wait if its own end is not known."""
        return self.end if self.end is not None else self.wait_end_ns or None

    # Set by `Recorder.launching`, for the block alone.
    _recorder: Recorder
    _stream: torch.cuda.Stream | None
    _ends_later: bool
    _can_capture: bool

    def __enter__(self) -> Self:
        events = self._recorder._events
        self.launch_start_ns = now_ns = time.perf_counter_ns()
        if events is None:
            self.start = now_ns
        else:
            self.start = events.take(self._stream) if self._can_capture else events.take_unchecked(self._stream)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        recorder, stream = self._recorder, self._stream
        del self._recorder, self._stream  # what is kept, or sent to another process, is the record alone
        if kind is not None:
            return
        # Its beginning was not captured: nor is its end.
        if recorder._events is not None and not self._ends_later and self.start is not None:
            self.end = recorder._events.take_unchecked(stream)
        self.launch_end_ns = time.perf_counter_ns()
        if recorder._open is None and recorder.observer is not None:
            recorder.observer.add_collective(self)


class Span(NamedTuple):
    """Interval with a beginning and an end on the host's clock: one slice of a trace. Picklable."""

    name: str
    lane: str
    start_ns: int
    end_ns: int
    labels: dict[str, Label]
    flow: str = ""


class _Timed:
    """Begin and end of a block on the compute stream; dropped outside a step and in a capture."""

    __slots__ = ("_can_capture", "_recorder", "_start", "end", "start")

    start: Mark
    end: Mark

    def __enter__(self) -> None:
        recorder = self._recorder
        if recorder._open is None:
            self._start = None
        elif recorder._events is None:
            self._start = time.perf_counter_ns()
        else:
            self._start = recorder._events.take() if self._can_capture else recorder._events.take_unchecked()

    def __exit__(self, kind: object, *_: object) -> None:
        recorder, start = self._recorder, self._start
        del self._recorder, self._start
        if kind is None and start is not None:
            events = recorder._events
            self.start, self.end = start, time.perf_counter_ns() if events is None else self._end(events)
            if recorder._open is not None:
                self._keep(recorder._open)

    def _end(self, events: DeviceEvents) -> PooledEvent:
        return events.take_unchecked()

    def _keep(self, comm: StepComm) -> None:
        raise NotImplementedError

    _recorder: Recorder
    _start: Mark | None
    _can_capture: bool


class Computation(_Timed):
    """Computation on the compute stream."""

    __slots__ = ("labels", "name")

    def __init__(self, recorder: Recorder, name: str, labels: Labels) -> None:
        self._recorder, self.name, self.labels, self._can_capture = recorder, name, labels, True

    def _keep(self, comm: StepComm) -> None:
        comm._computed.append(self)


class Wait(_Timed):
    """Wait of the compute stream for a collective.

    Its end is, where it is known, the mark that the stream waits for: it lies before `start` where nobody had to wait.
    """

    __slots__ = ("_begin_ns", "_until", "collective")

    _begin_ns: int | None

    def __init__(
        self, recorder: Recorder, collective: Collective, can_capture: bool, until: PooledEvent | None = None
    ) -> None:
        self._recorder, self.collective, self._can_capture, self._until = recorder, collective, can_capture, until

    def __enter__(self) -> None:
        self.collective.wait_start_ns = time.perf_counter_ns()
        super().__enter__()
        # On CUDA only the stream waits.
        self._begin_ns = None if self._recorder._events is not None else self._recorder._processor.wait_ns()

    def __exit__(self, kind: object, *rest: object) -> None:
        recorder = self._recorder
        if recorder._events is None:
            recorder._processor.omit_since(self._begin_ns)
        super().__exit__(kind, *rest)
        if kind is None:
            self.collective.wait_end_ns = time.perf_counter_ns()

    def _end(self, events: DeviceEvents) -> PooledEvent:
        return events.take_unchecked() if self._until is None else self._until

    def _keep(self, comm: StepComm) -> None:
        comm._waits.append(self)


def wait_times(
    waits: Sequence[Wait], base: TimeBase, times: Callable[[Sequence[Mark]], list[int]]
) -> tuple[list[int], list[int]]:
    """Return begins and ends of waits that are over; of those that end with their collective by `Collective.placed`.

    Args:
        base: by which that must have been read.
        times: gives the time of each mark.
    """
    ends, marks = list[int | None](), [wait.start for wait in waits]
    for wait in waits:
        one = wait.collective
        if one.placed is not None and one.placed[0] is base and wait.end is one.end:
            ends.append(one.placed[1])
        else:
            ends.append(None)
            marks.append(wait.end)
    all_times = times(marks)
    others = iter(all_times[len(waits) :])
    return all_times[: len(waits)], [next(others) if end is None else end for end in ends]


@dataclass
class StepComm:
    """Communication of one step. On CUDA the first time read waits for the step's end on the device, and only that.

    A collective counts in the step that launched it; a wait in the step that waited: gathers prefetched for the next
    step are counted here and exposed there.
    """

    step: int
    collectives: list[Collective] = field(default_factory=list)
    processor_wait_ns: int | None = None
    """For which the host's thread was ready and had no processor, on the CPU outside of waits; None: not known."""
    processor_wait_before_ns: int = 0
    """The same since the end of the step before."""
    _marks: list[Mark] = field(default_factory=list, repr=False)
    _waits: list[Wait] = field(default_factory=list, repr=False)
    _computed: list[Computation] = field(default_factory=list, repr=False)
    _earlier: Sequence[Collective] = field(default=(), repr=False)
    """Launched before the step, and not waited for by then."""
    _time_base: TimeBase | None = field(default=None, repr=False)

    @property
    def num_collectives(self) -> int:
        return len(self.collectives)

    @property
    def num_bytes(self) -> int:
        return sum(collective.num_bytes for collective in self.collectives)

    def counts(self) -> Counter[tuple[str, str]]:
        """Return the number of collectives launched in this step, by (group, kind)."""
        return _count(self.collectives)

    @property
    def marks(self) -> Sequence[Mark]:
        """Begin and end of the step on the compute stream."""
        return self._marks

    @property
    def computations(self) -> Sequence[Computation]:
        """Return the computations of the step, with begins and ends."""
        return self._computed

    @property
    def waits(self) -> Sequence[Wait]:
        """Waits of the compute stream in it, or of the host on the CPU, whole: [Note: what is exposed]."""
        return self._waits

    def open_wait(self) -> Collective | None:
        """Return the collective that the compute stream (on the CPU the host) waits for now; None: none is known.

        Raises:
            RuntimeError: a mark was captured into a CUDA graph.
        """
        for wait in tuple(self._waits):
            if not isinstance(wait.end, int) and has_happened(wait.start) and not has_happened(wait.end):
                return wait.collective
        launched = (*self._earlier, *tuple(self.collectives))
        is_host = isinstance(self._marks[0], int)
        opened = (one for one in launched if is_host and one.wait_start_ns and not one.wait_end_ns)
        return next(opened, None)

    def ready(self) -> bool:
        """Whether reading a time would not wait."""
        return all(map(has_happened, self._marks))

    @cached_property
    def step_s(self) -> float:
        """Seconds from `begin_step` to `end_step`, on the compute stream."""
        start, end = self._marks
        return seconds_between(start, end)

    def seconds_after(self, earlier: StepComm) -> float:
        """Seconds from the end of an earlier step to the end of this one, on the compute stream."""
        return seconds_between(earlier._marks[1], self._marks[1])

    @property
    def exposed_s(self) -> float:
        """Seconds in which the compute stream waited for a communication, so far: [Note: what is exposed]."""
        return self._exposed_at_end_s if len(self._marks) > 1 else self._exposed_s()

    @cached_property
    def _exposed_at_end_s(self) -> float:
        # Whatever was waited for has ended by then, and every wait has begun.
        wait_for(self._marks[-1])
        return self._exposed_s()

    def _exposed_s(self) -> float:
        exposed_s = 0.0
        for wait in self._waits:
            waited_s = seconds_between(wait.start, wait.end)
            if waited_s > 0:  # else the collective had ended before
                exposed_s += max(0.0, waited_s - self._idle_s(wait))
        return exposed_s

    @property
    def exposed_comm(self) -> float:
        """Share of the step in which the compute stream waited, 0..1."""
        return self.exposed_s / self.step_s if self.step_s > 0 else 0.0

    def spans(self) -> list[Span]:
        """Return the step, its computations, waits and collectives on the host's clock; waits for all of them.

        A collective without a wait so far is omitted on the CPU, where its end is not known.
        """
        assert self._time_base is not None
        ns = self._time_base.ns
        spans = [Span(f"step {self.step}", STEP, ns(self._marks[0]), ns(self._marks[1]), {"step": self.step})]
        for done in self._computed:
            spans.append(Span(done.name, COMPUTE, ns(done.start), ns(done.end), {"step": self.step, **done.labels}))
        for wait in self._waits:
            labels = {"step": self.step, **wait.collective.labels}
            begin_ns = ns(wait.start)
            spans.append(Span(f"wait for {wait.collective.kind}", WAIT, begin_ns, max(begin_ns, ns(wait.end)), labels))
        for one in self.collectives:
            end = one.ended
            if one.start is not None and end is not None:
                labels = {"step": self.step, "group": one.group, "bytes": one.num_bytes, **one.labels}
                flow = f"{one.flow} step {one.step}" if one.flow else ""
                spans.append(Span(one.kind, one.lane or one.group, ns(one.start), ns(end), labels, flow))
        return spans

    def _idle_s(self, wait: Wait) -> float:
        """Return the seconds of a wait before its collective could start, in which no other one was under way.

        The wait is over.
        """
        start = wait.collective.start
        if start is not None and is_before(start, wait.start):  # of hundreds of waits a step nearly all
            return 0.0
        assert self._time_base is not None
        ns = self._time_base.ns
        start_ns, end_ns = ns(wait.start), ns(wait.end)
        begun_ns = end_ns if start is None else min(ns(start), end_ns)
        if begun_ns <= start_ns:
            return 0.0
        return (begun_ns - start_ns - self._under_way.within(start_ns, begun_ns)) * 1e-9

    @cached_property
    def _under_way(self) -> _Busy:
        """Return the times with any collective in flight; one that outlives the step counts as endless."""
        assert self._time_base is not None
        ns, times = self._time_base.ns, []
        for one in (*self._earlier, *self.collectives):
            if one.start is not None and has_happened(one.start):
                end = one.ended
                times.append((ns(one.start), sys.maxsize if end is None or not has_happened(end) else ns(end)))
        return _Busy(times)


class _Busy:
    """Overlap of any span of time with a set of intervals: sorted once, then two look-ups a query."""

    def __init__(self, intervals: Iterable[tuple[int, int]]) -> None:
        self._merged = union(intervals)
        self._starts = [start for start, _ in self._merged]
        lengths = (end - start for start, end in self._merged)
        self._before = list(itertools.accumulate(lengths, initial=0))

    def within(self, start_ns: int, end_ns: int) -> int:
        """Return the nanoseconds of start..end that lie in the intervals."""
        return self._until(end_ns) - self._until(start_ns)

    def _until(self, time_ns: int) -> int:
        last = bisect_right(self._starts, time_ns) - 1
        if last < 0:
            return 0
        start, end = self._merged[last]
        return self._before[last] + min(time_ns, end) - start


class Observer(Protocol):
    """Receiver of what a recorder records, as it is recorded; its calls return at once."""

    def add_step(self, comm: StepComm) -> None:
        """Take a step that was closed; its last times, and ends of its collectives, may not be known yet."""

    def add_collective(self, collective: Collective) -> None:
        """Take a collective that was launched outside any step."""


class Recorder:
    """Recorder of the collectives of one rank. Functions that take a recorder take None too, and record nothing then.

    Args:
        device: where the computation runs; a CUDA device is timed by events: two for what is launched, and
            at most two for each wait (of a tensor-parallel exchange, for each part).
        num_kept: steps kept in `steps`; older ones are dropped.
    """

    def __init__(self, device: torch.device | str = "cpu", num_kept: int = 64) -> None:
        self.steps: deque[StepComm] = deque(maxlen=num_kept)
        self.observer: Observer | None = None
        """Gets every step and every collective outside of steps, too: `collectives.watch.monitor`."""
        self.groups: dict[str, Sequence[int]] = {}
        """Global ranks of the groups, by the names that collectives carry; who launches them notes it."""
        self._events: DeviceEvents | None = device_events(device) if str(device).startswith("cuda") else None
        self._numbers: dict[tuple[str, str], int] = {}
        self._at_reset: Counter[tuple[str, str]] = Counter()
        self._open: StepComm | None = None
        self._latest: deque[Collective] = deque(maxlen=_NUM_EARLIER)
        """Launched since the last step began."""
        self._time_base: TimeBase | None = None
        self._processor = ProcessorLaps()

    @property
    def step(self) -> int | None:
        """The step that is open; None between steps."""
        return self._open.step if self._open else None

    @property
    def open_step(self) -> StepComm | None:
        """Communication known so far of the step that is open; None between steps."""
        return self._open

    def begin_step(self, step: int) -> None:
        """Open a step. One that is still open (it raised) is dropped. No stream is waited for.

        Raises:
            RuntimeError: the current stream is captured into a CUDA graph; so does `end_step`.
        """
        if self._time_base is None or self._time_base.age_s > _RENEW_AFTER_S:
            self.align()
        earlier = [collective for collective in self._latest if not collective.wait_start_ns]
        self._latest.clear()
        self._open = StepComm(step, _earlier=earlier, _time_base=self._time_base)
        self._open.processor_wait_before_ns = self._processor.lap() or 0
        self._open._marks.append(self._step_mark())

    def end_step(self) -> StepComm:
        """Close the step and return what is known of it; its times may still be on their way (`ready`)."""
        if self._open is None:
            raise RuntimeError("end_step() without begin_step()")
        done, self._open = self._open, None
        done._marks.append(self._step_mark())
        done.processor_wait_ns = self._processor.lap()
        self.steps.append(done)
        if self.observer is not None:
            self.observer.add_step(done)
        return done

    def align(self) -> TimeBase:
        """Compare the device's clock with the host's now, for the steps to come; no stream is waited for."""
        self._time_base = TimeBase(self._events is not None, None if self._events is None else self._events.device)
        return self._time_base

    def counts(self) -> Counter[tuple[str, str]]:
        """Return the number of collectives by (group, kind), inside and outside steps, since the start or `reset`."""
        return Counter(self._numbers) - self._at_reset

    def reset(self) -> None:
        """Drop counts and steps; an open step goes on."""
        # The numbers go on: they are compared between ranks.
        self._at_reset = Counter(self._numbers)
        self.steps.clear()

    def launching(
        self,
        group: str,
        kind: str,
        num_bytes: int,
        *,
        lane: str = "",
        labels: Labels | None = None,
        flow: str = "",
        stream: torch.cuda.Stream | None = None,
        ends_later: bool = False,
        can_capture: bool = True,
    ) -> AbstractContextManager[Collective]:
        """Record the call in the block, which launches a collective; arguments as in `Collective`.

        On CUDA it runs on `stream`; None: on the one that is current.

        Args:
            ends_later: whoever launches it sets `end`; nobody waits for it by `waiting`.
            can_capture: the stream may be captured into a graph, where no mark can be taken; False: the caller has
                asked.
        """
        key, opened = (group, kind), self._open
        self._numbers[key] = seq = self._numbers.get(key, 0) + 1
        step = None if opened is None else opened.step
        collective = Collective(group, kind, num_bytes, step, lane, labels, flow, seq)
        collective._recorder, collective._stream = self, stream
        collective._ends_later, collective._can_capture = ends_later, can_capture
        self._latest.append(collective)
        if opened is not None:
            opened.collectives.append(collective)
        return collective

    def waiting(
        self, collective: Collective, *, can_capture: bool = True, until: PooledEvent | None = None
    ) -> AbstractContextManager[None]:
        """Record the wait in the block: the host's, or the one that it puts into the compute stream.

        Args:
            until: mark for which the stream waits, which is the wait's end then: nothing is launched for it.
        """
        return Wait(self, collective, can_capture, until)

    def arrival(self, collective: Collective, *, is_end: bool) -> PooledEvent | None:
        """Return a mark of the current stream for others to wait for; None: marks are no events.

        Args:
            collective: that has landed there.
            is_end: whether that is its end, and nothing was launched on the stream since: it has a mark then.
        """
        if is_end and isinstance(collective.end, PooledEvent):
            return collective.end
        return None if self._events is None else self._events.take_unchecked()

    def computing(self, name: str, **labels: Label) -> AbstractContextManager[None]:
        """Record the computation in the block, for a trace; outside a step nothing is recorded."""
        return Computation(self, name, labels)

    def _step_mark(self) -> Mark:
        mark = time.perf_counter_ns() if self._events is None else self._events.take()
        if mark is None:
            raise RuntimeError("a step begins and ends outside the capture of a CUDA graph")
        return mark


def _count(collectives: Iterable[Collective]) -> Counter[tuple[str, str]]:
    return Counter((collective.group, collective.kind) for collective in collectives)

"""Monitor of a training program: what each rank did, by events of the device, always on, never synchronising.

    monitor = Monitor(FileTransport(folder, origin), origin, device=device)
    for step, batch in enumerate(batches, 1):
        monitor.step(step)
        with monitor.segment("forward"):
            loss = model(batch)
        ...
    monitor.close()

The training thread takes marks (CUDA events on the current stream, the host's clock on the CPU) and puts them into a
ring; a thread asks once in a while which of them the device has come to, turns those into events of the schema
(`netlayer.observe.events`), and hands them to a transport. What a `Recorder` marks already is not marked again: the
monitor follows it. `collectives.watch.hooks` attaches a monitor to any module, DDP and FSDP2 among them.

[Note: never waiting] Nothing here synchronises a stream or the device. A mark is pooled (`collectives.clock`), the
thread only queries, and the device's clock is compared with the host's on a stream of its own. The ring holds a bounded
number of events: where the device, the disk or the server behind the transport hangs, the oldest go, and a mark
`dropped` says how many.

[Note: CUDA graphs] Marks inside a capture are not taken: an event that a replay records again could be overwritten
before it is read. So a replayed step is one segment, whose `timing` is `graph`, and what lies inside is not known.

[Note: capture modes] While a program captures a graph in torch's default mode (`global`), a query of any other thread
would make the capture fail, so this thread asks the CUDA runtime to exempt it, as NCCL's watchdog does.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collectives.clock import TimeBase, has_happened, take_mark
from collectives.watch.processor import ProcessorLaps
from netlayer.observe.events.clocks import RankClock
from netlayer.observe.events.schema import (
    PROCESSOR_WAIT,
    SEGMENTS,
    Counter,
    Event,
    Mark,
    Origin,
    Segment,
    format_ranks,
)
from netlayer.observe.events.transport import Transport

if TYPE_CHECKING:
    import torch

    from collectives.clock import Mark as TimeMark
    from collectives.watch.recorder import Collective, Recorder, StepComm

logger = logging.getLogger(__name__)

CAPACITY = 1 << 16
"""Events that the ring holds; a dense step has a few hundred."""
INTERVAL_S = 1.0
_BATCH = 512  # events: what is converted between two moments at which other threads may run
_RENEW_AFTER_S = 15.0  # age of a time base: [Note: precision] in collectives.clock
_LEAST_WAIT_NS = 2_000  # a wait for what was done already
_LEAST_GC_NS = 500_000
_LATEST_END_S = 10.0  # on the CPU an end that nobody waited for is not known
_CLOSE_S = 5.0
_GRAPH = "replay"
"""Name of the recorder's computation that is the replay of a graph."""

Sampler = Callable[[], Iterable[Counter | Mark]]


@dataclass(slots=True)
class _Timed:
    """A segment of the monitor's own."""

    segment: str
    name: str
    step: int | None
    micro_batch: int | None
    chunk: int | None
    lane: str
    timing: str
    start: TimeMark
    end: TimeMark
    attributes: Mapping[str, Any] | None
    processor_wait_ns: int | None = None


_Entry = Any  # _Timed, Mark, Counter, StepComm or Collective


class Monitor:
    """Records segments, marks and counters of this rank, and hands them to a transport from a thread of its own.

    Args:
        transport: takes the events.
        origin: rank and place that they carry.
        device: where the computation runs: CUDA is timed by events, the CPU by the host's clock.
        capacity: events that wait for the device or the transport at most; the oldest go first.
        interval_s: seconds between two batches.
        clock: of this rank; `collectives.watch.align` compares it with the other ranks'.
        samplers: called before every batch, from the monitor's thread, for counters.
    """

    def __init__(
        self,
        transport: Transport,
        origin: Origin,
        *,
        device: torch.device | str = "cpu",
        capacity: int = CAPACITY,
        interval_s: float = INTERVAL_S,
        clock: RankClock | None = None,
        samplers: Sequence[Sampler] = (),
    ) -> None:
        self.origin, self.clock, self.samplers = origin, clock or RankClock(), list(samplers)
        self.num_dropped = 0
        """Events that were lost in all."""
        self._num_unsaid = 0  # lost by the transport since the last batch
        self._transport, self._interval_s = transport, interval_s
        self._by_events = str(device).startswith("cuda")
        self._device = device
        self._ring = _Ring(capacity)
        self._head: _Entry | None = None
        self._step: int | None = None
        self._step_start: TimeMark | None = None
        self._recorders: list[Recorder] = []
        self._group_texts: dict[str, str | None] = {}
        self._time_base: TimeBase | None = None
        self._gc_start_ns = 0
        self._processor = ProcessorLaps()
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="netlayer-monitor", daemon=True)
        self._thread.start()
        gc.callbacks.append(self._on_collection)
        atexit.register(self.close)

    @property
    def open_step(self) -> int | None:
        """Step that is open now, here or on a recorder that it follows; None: none."""
        if self._step is not None:
            return self._step
        return next((each.step for each in self._recorders if each.step is not None), None)

    # What the training thread calls.

    def step(self, step: int) -> None:
        """Begin a step, and end the one before: segments from here on belong to it."""
        mark = take_mark(self._by_events)
        self._close_step(mark)
        self._step, self._step_start = step, mark

    def end_step(self) -> None:
        """End the step without beginning another, before work that is no step's."""
        self._close_step(take_mark(self._by_events))
        self._step = self._step_start = None

    @contextlib.contextmanager
    def segment(
        self,
        kind: str,
        name: str = "",
        *,
        micro_batch: int | None = None,
        chunk: int | None = None,
        step: int | None = None,
        lane: str = "",
        on_host: bool = False,
        timing: str = "",
        **attributes: Any,
    ) -> Iterator[None]:
        """Record the block; inside a graph's capture nothing is recorded.

        Args:
            kind: one of `SEGMENTS`; any other text is the name of a segment `other`.
            name: None: as `kind`.
            step: None: the step that is open.
            lane: what runs one after the other with it; empty: `compute`, or `host`.
            on_host: by the host's clock on CUDA too: loading data, writing files.
            timing: `graph` around the replay of a CUDA graph; empty: how it is timed.
            attributes: further facts.
        """
        by_events = self._by_events and not on_host
        waits = kind == "wait" and not by_events
        start = take_mark(by_events)
        try:
            with self._processor.without() if waits else contextlib.nullcontext():
                yield
        finally:
            end = take_mark(by_events) if start is not None else None
            if start is not None and end is not None:
                self._ring.add(
                    _Timed(
                        kind if kind in SEGMENTS else "other",
                        name or kind,
                        self.open_step if step is None else step,
                        micro_batch,
                        chunk,
                        lane or ("compute" if by_events or not on_host else "host"),
                        timing or ("device" if by_events else "host"),
                        start,
                        end,
                        attributes or None,
                    )
                )

    def mark(
        self, name: str, text: str | None = None, *, step: int | None = None, value: float | None = None, **facts: Any
    ) -> None:
        """Record a moment, now: one of `MARKS`, or any other name."""
        now_ns = self.clock.now_ns()
        step = self.open_step if step is None else step
        self._ring.add(Mark(self.origin, name, now_ns, step, text, value, attributes=facts or None))

    def counter(self, name: str, value: float, unit: str | None = None, *, since_ns: int | None = None) -> None:
        """Record a reading; `since_ns`, on the rank's clock: what was counted since then."""
        now_ns = self.clock.now_ns()
        start_ns = now_ns if since_ns is None else since_ns
        self._ring.add(Counter(self.origin, name, start_ns, now_ns, value, unit, self.open_step))

    def add(self, event: Counter | Mark) -> None:
        """Take an event that another thread has made, on this rank's clock."""
        self._ring.add(event)

    def follow(self, recorder: Recorder) -> None:
        """Take what a recorder records, too: steps, computations, collectives and waits. One monitor a recorder."""
        self._recorders.append(recorder)
        recorder.observer = self

    def add_step(self, comm: StepComm) -> None:
        """Take a recorded step: of `Recorder.observer`."""
        is_counted = comm.processor_wait_ns is not None
        self._ring.add(comm, 1 + is_counted + len(comm.collectives) + len(comm.waits) + len(comm.computations))

    def add_collective(self, collective: Collective) -> None:
        """Take a collective outside of the recorder's steps, of `Recorder.observer`; of this monitor's step, if any."""
        if collective.step is None:
            collective.step = self._step
        self._ring.add(collective)

    def flush(self, timeout_s: float = _CLOSE_S) -> bool:
        """Hand over all that the device has come to; wait at most so long for the rest. Return whether all is handed.

        Not for a training loop: it waits, though for no stream.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._hand_over(is_last=True)
                if self._head is None and not self._ring:
                    return True
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(0.01)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Hand over what is there, within a few seconds, and end the thread. Twice is once."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._on_collection)
        for recorder in self._recorders:
            recorder.observer = None
        self._close_step(take_mark(self._by_events))
        self._stop.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():  # in a transport that hangs: daemons end with the process
            logger.warning("the monitor's last events are lost: its transport does not answer")
            return
        if not self.flush(timeout_s):
            logger.warning("the monitor's last events are lost: the device has not come to them")
        self._transport.close()

    # What its thread does.

    def _run(self) -> None:
        if self._by_events:
            import torch

            torch.cuda.set_device(self._device)
            _exempt_from_captures()
        while not self._stop.wait(self._interval_s):
            with self._lock:
                try:
                    self._hand_over()
                except Exception:
                    # A program must not end for what only watches it.
                    logger.exception("the monitor lost a batch")

    def _hand_over(self, *, is_last: bool = False) -> None:
        """Convert what the device has come to, batch by batch, and hand it on."""
        if self._by_events and (self._time_base is None or self._time_base.age_s > _RENEW_AFTER_S):
            self._time_base = TimeBase(True, _as_device(self._device))
        events: list[Event] = []
        if self._num_unsaid:
            events.append(self._dropped(self._num_unsaid, "transport"))
            self._num_unsaid = 0
        for sampler in self.samplers:
            events += sampler()
        while True:
            if self._head is None:
                self._head = self._ring.take()
            if self._head is None or not self._is_ready(self._head, is_last=is_last):
                break
            entry, self._head = self._head, None
            events += self._events_of(entry)
            if len(events) >= _BATCH:
                self._send(events)
                events = []
        lost = self._ring.take_lost()
        if lost:
            self.num_dropped += lost
            events.append(self._dropped(lost, "ring"))
        if events:
            self._send(events)

    def _send(self, events: list[Event]) -> None:
        offset, error = self.clock.offset(events[-1].end_ns)
        if error is not None and self._time_base is not None:
            error += self._time_base.uncertainty_ns
        for event in events:
            event.clock_offset_ns, event.clock_error_ns = offset, error
        for first in range(0, len(events), _BATCH):
            time.sleep(0)  # lets go of the interpreter's lock: the training thread launches meanwhile
            lost = self._transport.send(events[first : first + _BATCH])
            self.num_dropped += lost
            self._num_unsaid += lost

    def _dropped(self, number: int, where: str) -> Mark:
        return Mark(self.origin, "dropped", self.clock.now_ns(), value=float(number), attributes={"where": where})

    def _is_ready(self, entry: _Entry, *, is_last: bool) -> bool:
        """Whether the device has come to its end; only queries."""
        if isinstance(entry, Mark | Counter):
            return True
        if isinstance(entry, _Timed):
            return has_happened(entry.end)
        if hasattr(entry, "collectives"):
            return self._is_step_ready(entry, is_last=is_last)
        return self._has_ended(entry, is_last=is_last)

    def _is_step_ready(self, comm: StepComm, *, is_last: bool) -> bool:
        end = comm.marks[1]
        if not has_happened(end):
            return False
        if isinstance(end, int):
            return all(self._has_ended(one, is_last=is_last) for one in comm.collectives)
        # What runs on a lane ends in the order of its launch: the last of each is enough.
        last = {one.lane or one.group: one for one in comm.collectives}
        ends = [one.end for one in last.values() if one.end is not None]
        return all(map(has_happened, [*ends, *(wait.end for wait in comm.waits[-1:])]))

    def _has_ended(self, collective: Collective, *, is_last: bool) -> bool:
        """Whether its end is known; on the CPU that is noticed by its wait, which may never come."""
        end = collective.ended
        if end is not None:
            return has_happened(end)
        return is_last or time.perf_counter_ns() - collective.launch_end_ns > _LATEST_END_S * 1e9

    def _events_of(self, entry: _Entry) -> list[Event]:
        if isinstance(entry, Mark | Counter):
            return [entry]
        if isinstance(entry, _Timed):
            segment = Segment(
                self.origin,
                entry.segment,
                entry.name,
                self._ns(entry.start),
                self._ns(entry.end),
                entry.step,
                entry.micro_batch,
                entry.chunk,
                entry.timing,
                entry.lane,
                attributes=entry.attributes,
            )
            return [segment, *self._waited_for_processor(segment, entry.processor_wait_ns)]
        if hasattr(entry, "collectives"):
            return list(self._step_events(entry))
        return [self._collective(entry)]

    def _step_events(self, comm: StepComm) -> Iterator[Event]:
        """Segments of a recorded step: itself, its computations, its waits and its collectives."""
        timing = "device" if self._by_events else "host"
        is_graph = any(done.name == _GRAPH for done in comm.computations)
        begin, end = comm.marks
        step = Segment(
            self.origin,
            "step",
            "step",
            self._ns(begin),
            self._ns(end),
            comm.step,
            timing="graph" if is_graph else timing,
            lane="step",
        )
        yield step
        yield from self._waited_for_processor(step, comm.processor_wait_ns, comm.processor_wait_before_ns)
        for done in comm.computations:
            labels = dict(done.labels)
            yield Segment(
                self.origin,
                done.name if done.name in SEGMENTS else "other",
                done.name,
                self._ns(done.start),
                self._ns(done.end),
                comm.step,
                _int(labels.pop("micro_batch", None)),
                _int(labels.pop("chunk", None)),
                "graph" if done.name == _GRAPH else timing,
                "compute",
                attributes=labels or None,
            )
        for wait in comm.waits:
            start_ns, end_ns = self._ns(wait.start), self._ns(wait.end)
            if end_ns - start_ns >= _LEAST_WAIT_NS:
                one = wait.collective
                yield Segment(
                    self.origin,
                    "wait",
                    one.kind,
                    start_ns,
                    end_ns,
                    comm.step,
                    timing=timing,
                    lane="compute",
                    group=one.group,
                    group_ranks=self._ranks_of(one.group),
                    seq=one.seq or None,
                    flow=one.flow or None,
                    bytes=one.num_bytes,
                )
        for one in comm.collectives:
            yield self._collective(one)

    def _waited_for_processor(self, step: Segment, wait_ns: int | None, before_ns: int = 0) -> Iterator[Counter]:
        """Counter of what the training thread waited for a processor in a step; none where that is not known."""
        if wait_ns is not None:
            facts = {"before_s": before_ns / 1e9, "timing": step.timing}
            times = step.start_ns, step.end_ns
            yield Counter(self.origin, PROCESSOR_WAIT, *times, wait_ns / 1e9, "s", step.step, attributes=facts)

    def _collective(self, one: Collective) -> Segment:
        """Segment of a collective; where its end is not known, that of its launch, and an attribute says so."""
        labels = dict(one.labels)
        end = one.ended
        if end is None:
            labels["end"] = "not seen"
            end = one.launch_end_ns
        start = one.launch_start_ns if one.start is None else one.start
        return Segment(
            self.origin,
            "collective",
            one.kind,
            self._ns(start),
            self._ns(end),
            one.step,
            _int(labels.pop("micro_batch", None)),
            _int(labels.pop("chunk", None)),
            "device" if self._by_events else "host",
            one.lane or one.group,
            one.group,
            self._ranks_of(one.group),
            one.seq or None,
            one.flow or None,
            one.num_bytes,
            _int(labels.pop("peer", None)),
            attributes=labels or None,
        )

    def _ranks_of(self, group: str) -> str | None:
        text = self._group_texts.get(group)
        if text is None:
            ranks = next((each.groups[group] for each in self._recorders if group in each.groups), None)
            if ranks is not None:
                text = self._group_texts[group] = format_ranks(ranks)
        return text

    def _ns(self, mark: TimeMark) -> int:
        """A mark that has happened, on the rank's clock."""
        if isinstance(mark, int):
            return self.clock.unix_ns(mark)
        assert self._time_base is not None
        return self.clock.unix_ns(self._time_base.ns(mark))

    def _close_step(self, mark: TimeMark | None) -> None:
        start, self._step_start = self._step_start, None
        waited_ns = self._processor.lap()
        if start is not None and mark is not None:
            timing = "device" if self._by_events else "host"
            self._ring.add(
                _Timed("step", "step", self._step, None, None, "step", timing, start, mark, None, waited_ns),
                1 + (waited_ns is not None),
            )

    def _on_collection(self, phase: str, info: Mapping[str, int]) -> None:
        """Time Python's garbage collection: it holds up whoever launches, and at other moments on every rank."""
        now_ns = time.perf_counter_ns()
        if phase == "start":
            self._gc_start_ns = now_ns
        elif now_ns - self._gc_start_ns >= _LEAST_GC_NS:
            facts = {"generation": info.get("generation"), "collected": info.get("collected")}
            self._ring.add(
                _Timed("gc", "gc", self.open_step, None, None, "host", "host", self._gc_start_ns, now_ns, facts)
            )


class _Ring:
    """Entries that wait to be converted; where they weigh more than the capacity, the oldest go and are counted."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: deque[tuple[_Entry, int]] = deque()
        self._weight = self._lost = 0
        # A lock that the same thread may take twice: garbage collection, which is timed, may begin inside.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: _Entry, weight: int = 1) -> None:
        """Append an entry, which stands for `weight` events."""
        with self._lock:
            self._entries.append((entry, weight))
            self._weight += weight
            while self._weight > self._capacity:
                _, gone = self._entries.popleft()
                self._weight -= gone
                self._lost += gone

    def take(self) -> _Entry | None:
        """Remove the oldest entry and return it; None: there is none."""
        with self._lock:
            if not self._entries:
                return None
            entry, weight = self._entries.popleft()
            self._weight -= weight
            return entry

    def take_lost(self) -> int:
        """Number of events that were lost since the last call."""
        with self._lock:
            lost, self._lost = self._lost, 0
            return lost


def _int(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _as_device(device: torch.device | str) -> torch.device:
    import torch

    return torch.device(device)


def _exempt_from_captures() -> None:
    """Let this thread query events while another one captures a CUDA graph: [Note: capture modes]."""
    relaxed = ctypes.c_int(2)  # cudaStreamCaptureModeRelaxed
    for line in Path("/proc/self/maps").read_text().splitlines() if Path("/proc/self/maps").exists() else ():
        path = line.rpartition(" ")[2]
        if "libcudart.so" in path:
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(path).cudaThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))
            return

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

[Note: cost] All that Python does here takes time from the thread that launches kernels: whoever has the interpreter's
lock keeps it for up to 5 ms while others wait, and every operation of torch, `record` too, lets go of it and must get
it back. So a mark costs one call (`collectives.clock`), a step reaches the ring as one entry, and the thread turns
marks into columns (`netlayer.observe.events.columns`), a few dozen at once with a pause after each portion. A pause is
a sleep that takes time: after `sleep(0)` the same thread would have the lock again before another one is awake. All
ranks hand over at the same moments of the run's clock, for in a step that is bound by the host, ranks that are held up
one after the other cost the sum of it; where a server takes the events, hosts take turns instead.

[Note: CUDA graphs] Marks inside a capture are not taken: an event that a replay records again could be overwritten
before it is read. So a replayed step is one segment, whose `timing` is `graph`, and what lies inside is not known.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import itertools
import logging
import threading
import time
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from collectives.clock import DeviceEvents, TimeBase, device_events, exempt_from_captures, has_happened
from collectives.watch.late_steps import LateSteps, is_over
from collectives.watch.processor import ProcessorLaps
from collectives.watch.recorder import wait_times
from collectives.watch.ring import Ring
from netlayer.observe.events.clocks import RankClock
from netlayer.observe.events.columns import EventColumns, Series, SeriesTable
from netlayer.observe.events.schema import (
    PROCESSOR_WAIT,
    SEGMENTS,
    Counter,
    Mark,
    Origin,
    format_ranks,
    to_json,
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
_BATCH = 4096  # events that are handed over at once
_PORTION = 64  # events that are converted between two pauses, about 0.2 ms: [Note: cost]
_PAUSE_S = 100e-6
_RENEW_AFTER_S = 15.0  # age of a time base: [Note: precision] in collectives.clock
_INT32 = 1 << 31  # numbers of micro-batches, chunks and peers lie below
_LEAST_WAIT_NS = 2_000  # a wait for what was done already
_LEAST_GC_NS = 500_000
_LATEST_END_S = 10.0  # on the CPU an end that nobody waited for is not known
_CLOSE_S = 5.0
_GRAPH = "replay"
"""Name of the recorder's computation that is the replay of a graph."""

Sampler = Callable[[], Iterable[Counter | Mark]]


class _Timed:
    """A segment of the monitor's own: of the block whose context manager it is, or with `start` and `end` set."""

    __slots__ = (
        "attributes",
        "chunk",
        "end",
        "lane",
        "micro_batch",
        "monitor",
        "name",
        "processor_wait_ns",
        "segment",
        "start",
        "step",
        "timing",
        "waited_ns",
    )

    def __init__(
        self,
        monitor: Monitor | None,
        segment: str,
        name: str,
        step: int | None,
        micro_batch: int | None,
        chunk: int | None,
        lane: str,
        timing: str,
        attributes: Mapping[str, Any] | None,
    ) -> None:
        self.monitor, self.segment, self.name, self.step = monitor, segment, name, step
        self.micro_batch, self.chunk, self.lane, self.timing = micro_batch, chunk, lane, timing
        self.attributes = attributes
        self.start: TimeMark | None = None
        self.end: TimeMark | None = None
        self.processor_wait_ns: int | None = None
        self.waited_ns: int | None = None
        """Of a wait on the host: the thread's wait for a processor when it began."""

    def __enter__(self) -> None:
        monitor = self.monitor
        assert monitor is not None
        self.start = monitor._now(self.timing)
        if self.segment == "wait" and self.timing == "host":
            self.waited_ns = monitor._processor.wait_ns()

    def __exit__(self, *_: object) -> None:
        monitor, self.monitor = self.monitor, None
        assert monitor is not None
        if self.waited_ns is not None:
            monitor._processor.omit_since(self.waited_ns)
        if self.start is not None:  # else in a graph's capture
            # Asked again: a capture may have begun in the block, whose end has no time then.
            self.end = monitor._now(self.timing)
            if self.end is None:
                return
            if self.step is None:
                self.step = monitor.open_step
            monitor._ring.add(self)


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
        self.thread_s = 0.0
        """Processor time of handing over so far, of the monitor's thread and of `flush`."""
        self._num_timed, self._num_unsaid = 0, 0  # segments handed over; lost by the transport since the last batch
        self._transport, self._interval_s = transport, interval_s
        self._has_server = getattr(transport, "has_server", False)
        self._events: DeviceEvents | None = device_events(device) if str(device).startswith("cuda") else None
        self._timing = "host" if self._events is None else "device"
        self._ring: Ring[_Entry] = Ring(capacity)
        self._head: _Entry | None = None
        self._step: int | None = None
        self._step_start: TimeMark | None = None
        self._recorders: list[Recorder] = []
        self._late_steps = LateSteps()
        self._group_texts: dict[str, str | None] = {}
        self._time_base, self._has_base = TimeBase(False), False
        self._table = SeriesTable()
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
        mark = self._now(self._timing)
        self._close_step(mark)
        self._step, self._step_start = step, mark

    def end_step(self) -> None:
        """End the step without beginning another, before work that is no step's."""
        self._close_step(self._now(self._timing))
        self._step = self._step_start = None

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
    ) -> AbstractContextManager[None]:
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
        return _Timed(
            self,
            kind if kind in SEGMENTS else "other",
            name or kind,
            step,
            micro_batch,
            chunk,
            lane or ("host" if on_host else "compute"),
            timing or ("host" if on_host else self._timing),
            attributes or None,
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
        self._close_step(self._now(self._timing))
        self._stop.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():  # in a transport that hangs: daemons end with the process
            logger.warning("the monitor's last events are lost: its transport does not answer")
            return
        try:
            if not self.flush(timeout_s):
                logger.warning("the monitor's last events are lost: the device has not come to them")
            self._transport.close()
        except Exception:
            # A run that went well must not fail for what only watched it.
            logger.exception("the monitor's last events are lost")

    # What its thread does.

    def _run(self) -> None:
        if self._events is not None:
            import torch

            torch.cuda.set_device(self._events.device)
            exempt_from_captures()
            with self._lock, contextlib.suppress(RuntimeError):  # then the first batch tries again, and says so
                self._refer()
        while not self._stop.wait(self._seconds_to_next()):
            with self._lock:
                try:
                    self._hand_over()
                except Exception:
                    # A program must not end for what only watches it.
                    logger.exception("the monitor lost a batch")

    def _seconds_to_next(self) -> float:
        """Return the seconds until all ranks hand over, or where a server takes it those of this host: [Note: cost]."""
        now_ns = self.clock.now_ns()
        interval_ns = round(self._interval_s * 1e9)
        turn = zlib.crc32((self.origin.host or "").encode("utf-8", "replace")) / 2**32 if self._has_server else 0.0
        since_ns = now_ns - (self.clock.offset(now_ns)[0] or 0) - round(turn * interval_ns)
        return (interval_ns - since_ns % interval_ns) * 1e-9

    def _hand_over(self, *, is_last: bool = False) -> None:
        """Convert what the device has come to, batch by batch, and hand it on."""
        begin_s = time.thread_time()
        try:
            self._convert(is_last=is_last)
        finally:
            self.thread_s += time.thread_time() - begin_s

    def _convert(self, *, is_last: bool) -> None:
        """Hand over whatever is ready, and what was lost; the rest stays."""
        if not self._has_base:
            self._refer()
        rows = self._new_rows()
        if self._num_unsaid:
            rows.add(self._dropped(self._num_unsaid, "transport"))
            self._num_unsaid = 0
        for event in itertools.chain.from_iterable(sampler() for sampler in self.samplers):
            rows.add(event)
        num_converted = 0
        while (entry := self._next_ready(is_last=is_last)) is not None:
            before = len(rows)
            self._add(rows, entry)
            num_converted += len(rows) - before
            if num_converted >= _PORTION:
                num_converted = 0
                time.sleep(_PAUSE_S)
            if len(rows) >= _BATCH:
                self._send(rows)
                rows = self._new_rows()
        self._add_late_steps(rows)
        lost = self._ring.take_lost()
        if lost:
            self.num_dropped += lost
            rows.add(self._dropped(lost, "ring"))
        if rows:
            self._send(rows)
        # Now, for what comes next is after it: times before a reference cost another call each.
        if self._time_base.age_s > _RENEW_AFTER_S:
            self._refer()

    def _refer(self) -> None:
        """Compare the device's clock with the host's."""
        if self._events is not None:
            self._time_base, self._has_base = TimeBase(True, self._events.device), True

    def _next_ready(self, *, is_last: bool) -> _Entry | None:
        """Take the oldest entry off the ring if the device has come to its end; None: it has not, or there is none."""
        if self._head is None:
            self._head = self._ring.take()
        while self._head is not None:
            try:
                if not self._is_ready(self._head, is_last=is_last):
                    return None
            except RuntimeError:
                # CUDA refuses to tell, of an event that a graph has captured, say: what follows shall not wait for it.
                self.num_dropped += 1
                self._ring.add(self._dropped(1, "device"))
                self._head = self._ring.take()
                continue
            entry, self._head = self._head, None
            return entry
        return None

    def _new_rows(self) -> EventColumns:
        if self._table.is_full:
            self._table = SeriesTable()
        return EventColumns(self.origin, self._table)

    def _send(self, rows: EventColumns) -> None:
        offset, error = self.clock.offset(rows.ends[-1])
        if error is not None:
            error += self._time_base.uncertainty_ns
        rows.clock_offset_ns, rows.clock_error_ns = offset, error
        time.sleep(_PAUSE_S)
        try:
            lost = self._transport.send(rows)
        except Exception:
            # Only this batch: what made it fail may be a series, so the next one begins a table without it.
            logger.exception("the monitor lost a batch")
            lost, self._table = len(rows), SeriesTable()
        self.num_dropped += lost
        self._num_unsaid += lost

    def _dropped(self, number: int, where: str) -> Mark:
        return Mark(self.origin, "dropped", self.clock.now_ns(), value=float(number), attributes={"where": where})

    def _is_ready(self, entry: _Entry, *, is_last: bool) -> bool:
        """Whether the device has come to its end; only queries."""
        if isinstance(entry, Mark | Counter):
            return True
        if isinstance(entry, _Timed):
            assert entry.end is not None
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

    def _add(self, rows: EventColumns, entry: _Entry) -> None:
        """Append the events of an entry, which is ready."""
        if isinstance(entry, Mark | Counter):
            rows.add(entry)
        elif isinstance(entry, _Timed):
            self._add_timed(rows, entry)
        elif hasattr(entry, "collectives"):
            self._add_step(rows, entry)
        else:
            self._add_collectives(rows, [entry])

    def _add_timed(self, rows: EventColumns, entry: _Timed) -> None:
        assert entry.start is not None
        assert entry.end is not None
        numbers = _int(entry.micro_batch), _int(entry.chunk)
        series = Series("segment", entry.name, entry.segment, *numbers, entry.timing, entry.lane)
        start_ns, end_ns = self._times([entry.start, entry.end])
        self._num_timed += 1
        if entry.attributes:
            rows.attributes[len(rows)] = to_json(entry.attributes)
        rows.append_segment(rows.table.number(series), entry.step, start_ns, end_ns)
        if entry.processor_wait_ns is not None:
            self._add_processor_wait(rows, entry.processor_wait_ns, 0, entry.timing)

    def _add_step(self, rows: EventColumns, comm: StepComm) -> None:
        """Append the segments of a recorded step: itself, its computations, its waits and its collectives."""
        table, step = rows.table, comm.step
        is_graph = any(done.name == _GRAPH for done in comm.computations)
        timing = "graph" if is_graph else self._timing
        rows.append_segment(
            table.number(Series("segment", "step", "step", timing=timing, lane="step")),
            step,
            *self._times(comm.marks),
        )
        if comm.processor_wait_ns is not None:
            self._add_processor_wait(rows, comm.processor_wait_ns, comm.processor_wait_before_ns, timing)
        self._add_parts(rows, comm, self._late_steps.handed(comm))

    def _add_late_steps(self, rows: EventColumns) -> None:
        """Append what has ended of steps that are open for long (`collectives.watch.late_steps`)."""
        opened: list[tuple[Hashable, StepComm | int | None]] = [(self, self._step)]
        opened += [(recorder, recorder.open_step) for recorder in self._recorders]
        for late in self._late_steps.look(opened):
            if late.comm is not None:
                with contextlib.suppress(RuntimeError):  # of an event that a graph has captured
                    self._add_parts(rows, late.comm, late.handed, is_late=True)
            # After the parts: whatever ended before the mark is in the record beside it.
            if mark := late.take_mark(self.origin, self.clock.now_ns, self._num_timed, self._ranks_of):
                rows.add(mark)

    def _add_parts(self, rows: EventColumns, comm: StepComm, handed: set[int], *, is_late: bool = False) -> None:
        """Append computations, waits and collectives of a step that were not handed over before.

        Args:
            handed: `id` of those that were; of a late step it grows.
            is_late: the step is open: what has no known end yet is left.
        """

        def pending(parts: Iterable[Any]) -> list[Any]:
            new = [part for part in tuple(parts) if id(part) not in handed]
            if is_late:
                new = list(filter(is_over, new))
                handed.update(map(id, new))
            return new

        for some in _portions(pending(comm.computations)):
            times = self._times([mark for done in some for mark in (done.start, done.end)])
            for done, start_ns, end_ns in zip(some, times[::2], times[1::2], strict=True):
                rows.append_segment(self._computation(rows.table, done.name, done.labels), comm.step, start_ns, end_ns)
        for some in _portions(pending(comm.collectives)):
            self._add_collectives(rows, some)
        for some in _portions(pending(comm.waits)):
            starts, ends = wait_times(some, self._time_base, self._times)
            long = [at for at in range(len(some)) if ends[at] - starts[at] >= _LEAST_WAIT_NS]
            waited_for = [some[at].collective for at in long]
            rows.series += [self._wait(rows.table, one) for one in waited_for]
            rows.starts += [starts[at] for at in long]
            rows.ends += [ends[at] for at in long]
            _append_sizes(rows, waited_for, [comm.step] * len(long))

    def _add_processor_wait(self, rows: EventColumns, wait_ns: int, before_ns: int, timing: str) -> None:
        """Append what the training thread waited for a processor in the step that was appended just now."""
        times = rows.starts[-1], rows.ends[-1]
        facts = {"before_s": before_ns / 1e9, "timing": timing}
        rows.add(Counter(self.origin, PROCESSOR_WAIT, *times, wait_ns / 1e9, "s", rows.steps[-1], attributes=facts))

    def _add_collectives(self, rows: EventColumns, some: Sequence[Collective]) -> None:
        """Append collectives; where an end is not known, that of the launch, and an attribute says so."""
        marks: list[TimeMark] = []
        for one in some:
            end = one.ended
            marks.append(one.launch_start_ns if one.start is None else one.start)
            marks.append(one.launch_end_ns if end is None else end)
        times = self._times(marks)
        rows.series += [self._series_of(rows.table, one) for one in some]
        rows.starts += times[::2]
        rows.ends += times[1::2]
        if self._events is not None:
            base = self._time_base
            for one, end_ns in zip(some, times[1::2], strict=True):
                one.placed = base, end_ns
        _append_sizes(rows, some, [one.step for one in some])

    def _computation(self, table: SeriesTable, name: str, labels: Mapping[str, Any]) -> int:
        key = name, *labels.items()
        number = table.by_key.get(key)
        if number is None:
            more = dict(labels)
            series = Series(
                "segment",
                name,
                name if name in SEGMENTS else "other",
                _int(more.pop("micro_batch", None)),
                _int(more.pop("chunk", None)),
                "graph" if name == _GRAPH else self._timing,
                "compute",
                attributes=to_json(more) if more else None,
            )
            number = table.by_key[key] = table.number(series)
        return number

    def _wait(self, table: SeriesTable, one: Collective) -> int:
        """Return the number of the series that holds the compute stream's waits for this kind of collective."""
        key = one.kind, one.group, one.flow, "wait"
        number = table.by_key.get(key)
        if number is None:
            ranks = self._ranks_of(one.group)
            series = Series(
                "segment", one.kind, "wait",
                timing=self._timing, lane="compute", group=one.group, group_ranks=ranks, flow=one.flow or None,
            )  # fmt: skip
            number = table.number(series)
            if ranks is not None:  # which somebody may note later
                table.by_key[key] = number
        return number

    def _series_of(self, table: SeriesTable, one: Collective) -> int:
        """Return the series of a collective; most are found by three texts."""
        is_seen = one.ended is not None
        key: Hashable = one.kind, one.group, one.lane
        if one.labels or one.flow or not is_seen:
            key = key, one.flow, is_seen, tuple(one.labels.items())
        number = table.by_key.get(key)
        if number is None:
            ranks, more = self._ranks_of(one.group), dict(one.labels)
            if not is_seen:
                more["end"] = "not seen"
            series = Series(
                "segment",
                one.kind,
                "collective",
                _int(more.pop("micro_batch", None)),
                _int(more.pop("chunk", None)),
                self._timing,
                one.lane or one.group,
                one.group,
                ranks,
                one.flow or None,
                _int(more.pop("peer", None)),
                attributes=to_json(more) if more else None,
            )
            number = table.number(series)
            if ranks is not None:
                table.by_key[key] = number
        return number

    def _ranks_of(self, group: str) -> str | None:
        text = self._group_texts.get(group)
        if text is None:
            ranks = next((each.groups[group] for each in self._recorders if group in each.groups), None)
            if ranks is not None:
                text = self._group_texts[group] = format_ranks(ranks)
        return text

    def _times(self, marks: Sequence[TimeMark]) -> list[int]:
        """Marks that have happened, on the rank's clock."""
        return self._time_base.ns_of_ended(marks, self.clock.anchor_ns)

    def _now(self, timing: str) -> TimeMark | None:
        """Take a mark; None while a graph is captured."""
        return time.perf_counter_ns() if timing == "host" or self._events is None else self._events.take()

    def _close_step(self, mark: TimeMark | None) -> None:
        start, self._step_start = self._step_start, None
        waited_ns = self._processor.lap()
        if start is not None and mark is not None:
            step = _Timed(None, "step", "step", self._step, None, None, "step", self._timing, None)
            step.start, step.end, step.processor_wait_ns = start, mark, waited_ns
            self._ring.add(step, 1 + (waited_ns is not None))

    def _on_collection(self, phase: str, info: Mapping[str, int]) -> None:
        """Time Python's garbage collection: it holds up whoever launches, and at other moments on every rank."""
        now_ns = time.perf_counter_ns()
        if phase == "start":
            self._gc_start_ns = now_ns
        elif now_ns - self._gc_start_ns >= _LEAST_GC_NS:
            facts = {"generation": info.get("generation"), "collected": info.get("collected")}
            collected = _Timed(None, "gc", "gc", self.open_step, None, None, "host", "host", facts)
            collected.start, collected.end = self._gc_start_ns, now_ns
            self._ring.add(collected)


def _append_sizes(rows: EventColumns, some: Sequence[Collective], steps: Sequence[int | None]) -> None:
    rows.steps += steps
    rows.seqs += [one.seq or None for one in some]
    rows.bytes += [one.num_bytes for one in some]


def _portions(records: Sequence[Any]) -> Iterable[Sequence[Any]]:
    """A few dozen at once, with a pause after each portion but the last: [Note: cost]."""
    for first in range(0, len(records), _PORTION):
        if first:
            time.sleep(_PAUSE_S)
        yield records[first : first + _PORTION]


def _int(value: object) -> int | None:
    """Return a number that its column can hold; None: it is none, and the batch would be lost for it."""
    if isinstance(value, int) and not isinstance(value, bool) and -_INT32 < value < _INT32:
        return value
    return None

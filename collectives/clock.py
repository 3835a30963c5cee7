"""One time base for what happens on the host and on the device: nanoseconds of `time.perf_counter_ns`.

A mark is a point in time: on the CPU the host's clock itself, on CUDA an event on the stream that is current. A time
base has one reference event of which the host's time is known, and places every other event by the device's own clock,
relative to that. Not covered: clocks of several hosts (`collectives.watch.trace` aligns those).

[Note: precision] CUDA reports the time between two events in milliseconds as a float of 24 bits: after a minute that is
4 us, after an hour 0.25 ms. So a time base must not grow old; `Recorder` takes a new one every minute.

[Note: never waiting] The reference is recorded on a stream that carries nothing else, where it happens within
microseconds while other streams compute, and the host asks for it (`query`) until it has: no stream is waited for. The
time that this took bounds the error, and the best of a few tries counts. Where the driver puts that stream behind
others into one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS), the bound says so. A query holds Python's lock, so after
the first microseconds the host sleeps between two of them.

[Note: cheap marks] A step takes thousands of marks on the thread that launches its kernels, so a mark is one pooled
event and one call of torch's C++ `record`: making an event costs the host more than recording it, `torch.cuda.Event`
puts a Python function around each method, and asking for the current device and stream builds objects. Events go back
to the pool of their device with the last reference to their mark. Where a stream waits for a mark that is taken anyway,
as it does for the end of a collective, that one mark orders the streams and is the time (`PooledEvent.keep`).

[Note: cheap times] torch's `elapsed_time` asks for both events first, and sets the device before and after: five calls
of the driver. The runtime's own function is one, and says itself when an event has not happened. It is called with
Python's lock held, as torch does: to let go of it for a microsecond wakes the thread that launches kernels, which finds
it taken again (a loop of small operators beside such a thread took 16% longer, 4% with the lock held for 64 marks).

[Note: capture modes] While a program captures a graph in torch's default mode (`global`), a query of any other thread
would make the capture fail, so such a thread asks the CUDA runtime to exempt it, as NCCL's watchdog does.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_MOST_POOLED = 1 << 15
_NUM_TRIES = 5
_GOOD_NS = 20_000  # an error below which no better one is looked for
_LONG_NS = 10_000_000  # tries that took so long in all end: the stream stands behind others
_SPIN_NS = 30_000  # for which an event is queried without a pause
_PAUSE_S = 50e-6


class DeviceEvents:
    """Pooled timing events of one CUDA device: [Note: cheap marks].

    Args:
        index: of the device.
    """

    def __init__(self, index: int) -> None:
        import torch

        from collectives.transport.current_stream import current_stream

        self.device = torch.device("cuda", index)
        self._cuda, self._current_stream = torch.cuda, current_stream
        self._free: deque[torch.cuda.Event] = deque(maxlen=_MOST_POOLED)
        self._record = _plain("record")
        self._side_stream: torch.cuda.Stream | None = None

    def take(self, stream: torch.cuda.Stream | None = None) -> PooledEvent | None:
        """Mark the stream, or the current one, now; None while the current one is captured into a graph."""
        return None if self._cuda.is_current_stream_capturing() else self.take_unchecked(stream)

    def take_unchecked(self, stream: torch.cuda.Stream | None = None) -> PooledEvent:
        """Mark the stream without asking whether a graph is captured: the caller has just taken another mark."""
        try:
            event = self._free.pop()
        except IndexError:
            event = self._cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._record(event, stream if stream is not None else self._current_stream(self.device))
        return PooledEvent(event, self._free)

    def side_stream(self) -> torch.cuda.Stream:
        """Return the stream that carries nothing but references."""
        if self._side_stream is None:
            self._side_stream = self._cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self._side_stream


class PooledEvent:
    """A recorded CUDA event, which goes back to its pool with the last reference to it."""

    __slots__ = ("_pool", "event")

    def __init__(self, event: torch.cuda.Event, pool: deque[torch.cuda.Event]) -> None:
        self.event, self._pool = event, pool

    def keep(self) -> torch.cuda.Event:
        """Return the event for somebody who may hold it for longer than this mark: it goes back to no pool."""
        self._pool = _NO_POOL
        return self.event

    def __del__(self) -> None:
        self._pool.append(self.event)


Mark = int | PooledEvent

_NO_POOL: deque[torch.cuda.Event] = deque(maxlen=0)
_devices: dict[int, DeviceEvents] = {}


def device_events(device: torch.device | str | None = None) -> DeviceEvents:
    """Return the events of a CUDA device; None, or a device without an index: of the current one."""
    import torch

    index = None if device is None else torch.device(device).index
    if index is None:
        index = torch.cuda.current_device()
    events = _devices.get(index)
    if events is None:
        events = _devices[index] = DeviceEvents(index)
    return events


def _plain(name: str) -> Callable[..., Any]:
    """Return a method of torch's C++ events without the Python function that `torch.cuda.Event` puts around it."""
    import torch

    base = torch._C._CudaEventBase
    owner = base if issubclass(torch.cuda.Event, base) and hasattr(base, name) else torch.cuda.Event
    method: Callable[..., Any] = getattr(owner, name)
    return method


def take_mark(by_events: bool, stream: torch.cuda.Stream | None = None) -> Mark | None:
    """Return a mark of now: the host's clock, or an event on `stream` (None: the current); None in a graph capture.

    Who takes many keeps a `DeviceEvents`.
    """
    return (
        device_events(None if stream is None else stream.device).take(stream) if by_events else time.perf_counter_ns()
    )


def seconds_between(start: Mark, end: Mark) -> float:
    """Return the seconds between two marks of one kind; waits until both have happened."""
    if isinstance(start, int) or isinstance(end, int):
        assert isinstance(start, int)
        assert isinstance(end, int)
        return (end - start) * 1e-9
    return _elapsed_ms(start, end) * 1e-3


def is_before(earlier: Mark, later: Mark) -> bool:
    """Whether a mark came before another one of its kind that has happened; waits until it has happened too.

    False where they lie too close for the device's clock.
    """
    if isinstance(earlier, int) or isinstance(later, int):
        assert isinstance(earlier, int)
        assert isinstance(later, int)
        return earlier < later
    return _elapsed_ms(earlier, later, waits_for=earlier) > 0


def _elapsed_ms(start: PooledEvent, end: PooledEvent, waits_for: PooledEvent | None = None) -> float:
    """Return the milliseconds from one event to another; waits for both, or for the one that is given alone."""
    runtime = runtime_clock()
    if runtime is not None and runtime.is_current(getattr(getattr(start.event, "device", None), "index", -1)):
        between_ms = runtime.elapsed_ms(start.event, [end])
        if between_ms is not None and between_ms[0] > 0:
            return between_ms[0]
    # Not happened, or of another device, or before the other, of which CUDA promises no negative time: by torch.
    for each in (start, end) if waits_for is None else (waits_for,):
        wait_for(each)
    return float(start.event.elapsed_time(end.event))


def has_happened(mark: Mark) -> bool:
    """Whether the device has reached the mark; never waits."""
    return isinstance(mark, int) or bool(mark.event.query())  # type: ignore[no-untyped-call]


def wait_for(mark: Mark) -> None:
    """Wait until a mark has happened."""
    if not isinstance(mark, int) and not mark.event.query():  # type: ignore[no-untyped-call]
        mark.event.synchronize()


def union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union of intervals: without overlap, in order."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def shared_ns(some: Iterable[tuple[int, int]], others: Sequence[tuple[int, int]]) -> int:
    """Return the nanoseconds that lie in both of two unions."""
    return sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in some for b in others)


class TimeBase:
    """Turns marks into nanoseconds of the host's clock.

    Args:
        by_events: whether marks are CUDA events; no stream is waited for, see [Note: never waiting].
        device: that the events are of; None: the current one.
    """

    def __init__(self, by_events: bool, device: torch.device | str | None = None) -> None:
        self.taken_ns = time.perf_counter_ns()
        self.uncertainty_ns = 0
        """How far device times may be off the host's clock, all by the same amount."""
        self._reference: PooledEvent | None = None
        self._elapsed_ms: Callable[[Any, Any], float] | None = None
        self._index = 0
        if by_events:
            events = device_events(device)
            self._index, self._elapsed_ms = events.device.index, _plain("elapsed_time")
            self._refer(events)

    @property
    def age_s(self) -> float:
        return (time.perf_counter_ns() - self.taken_ns) * 1e-9

    def ns(self, mark: Mark) -> int:
        """Nanoseconds on the host's clock; waits until the event has happened."""
        if isinstance(mark, int):
            return mark
        assert self._reference is not None
        assert self._elapsed_ms is not None
        wait_for(mark)
        since_ms = self._elapsed_ms(self._reference.event, mark.event)
        if since_ms <= 0:  # before the reference: CUDA does not promise negative times
            since_ms = -self._elapsed_ms(mark.event, self._reference.event)
        return self.taken_ns + round(since_ms * 1e6)

    def ns_of_ended(self, marks: Sequence[Mark], shift_ns: int = 0) -> list[int]:
        """The same of many marks that have happened, at one call of the runtime each; waits for one that has not.

        Args:
            shift_ns: added to all.
        """
        if self._reference is None:
            return [shift_ns + mark for mark in marks]  # type: ignore[operator]
        runtime = runtime_clock()
        if runtime is not None and runtime.is_current(self._index):
            since_ms = runtime.elapsed_ms(self._reference.event, marks)
            if since_ms and min(since_ms) > 0:
                base_ns = self.taken_ns + shift_ns
                return [base_ns + round(each_ms * 1e6) for each_ms in since_ms]
        return self.ns_by_torch(marks, shift_ns)

    def ns_by_torch(self, marks: Sequence[Mark], shift_ns: int = 0) -> list[int]:
        """Return what `ns_of_ended` does, by torch alone."""
        if self._reference is not None and self._elapsed_ms is not None:
            elapsed_ms, reference, base_ns = self._elapsed_ms, self._reference.event, self.taken_ns + shift_ns
            try:
                # No look at each mark: the host's clock has no `event`.
                times = [base_ns + round(elapsed_ms(reference, mark.event) * 1e6) for mark in marks]  # type: ignore[union-attr]
            except (AttributeError, RuntimeError):  # or one is on a stream of its own, which nobody has asked
                return [shift_ns + self.ns(mark) for mark in marks]
            # Before the reference CUDA does not promise negative times.
            return times if min(times, default=0) > base_ns else [shift_ns + self.ns(mark) for mark in marks]
        return [shift_ns + mark for mark in marks]  # type: ignore[operator]

    def _refer(self, events: DeviceEvents) -> None:
        stream, begin_ns = events.side_stream(), time.perf_counter_ns()
        for _ in range(_NUM_TRIES):
            before_ns = time.perf_counter_ns()
            reference = events.take_unchecked(stream)
            while not has_happened(reference):
                # A long time is a useless one, but some reference there must be.
                if time.perf_counter_ns() - before_ns > _SPIN_NS:
                    time.sleep(_PAUSE_S)
            after_ns = time.perf_counter_ns()
            error_ns = (after_ns - before_ns) // 2
            if self._reference is None or error_ns < self.uncertainty_ns:
                self._reference, self.taken_ns, self.uncertainty_ns = reference, (before_ns + after_ns) // 2, error_ns
            if self.uncertainty_ns <= _GOOD_NS or after_ns - begin_ns > _LONG_NS:
                return


class RuntimeClock:
    """Times of events by the CUDA runtime that torch has loaded: [Note: cheap times].

    Args:
        path: of the library.

    Raises:
        OSError, AttributeError: it is no such library.
    """

    def __init__(self, path: str) -> None:
        library = ctypes.PyDLL(path)  # keeps Python's lock
        self._elapsed, self._get_device = library.cudaEventElapsedTime, library.cudaGetDevice
        self._forget_error = library.cudaGetLastError
        self._elapsed.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        self._get_device.argtypes = (ctypes.c_void_p,)

    def is_current(self, index: int) -> bool:
        """Whether a device is the calling thread's: on another thread a call would set up another device."""
        device = ctypes.c_int(-1)
        if self._get_device(ctypes.byref(device)):
            self._forget_error()
        return device.value == index

    def elapsed_ms(self, reference: torch.cuda.Event, marks: Sequence[Mark]) -> list[float] | None:
        """Return the milliseconds from an event to each mark; None: one has not happened, or is no event.

        None is no error: whoever asks has torch for it.
        """
        elapsed, result, times = self._elapsed, ctypes.c_float(), list[float]()
        place = ctypes.addressof(result)
        try:
            start = reference.cuda_event
            for mark in marks:
                if elapsed(place, start, mark.event.cuda_event):  # type: ignore[union-attr]
                    self._forget_error()  # else the next launch of this thread would raise it
                    return None
                times.append(result.value)
        except AttributeError:  # the host's clock has no `event`
            return None
        return times


@cache
def runtime_clock() -> RuntimeClock | None:
    """Return the clock of the runtime that torch has loaded; None: there is none to be found."""
    path = _runtime_path()
    if path is not None:
        with contextlib.suppress(OSError, AttributeError):
            return RuntimeClock(path)
    return None


def _runtime_path() -> str | None:
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else ()
    return next((line.rpartition(" ")[2] for line in lines if "libcudart.so" in line), None)


def exempt_from_captures() -> None:
    """Let the calling thread query events while another one captures a CUDA graph: [Note: capture modes]."""
    relaxed, path = ctypes.c_int(2), _runtime_path()  # cudaStreamCaptureModeRelaxed
    if path is not None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(path).cudaThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))

"""One time base for what happens on the host and on the device: nanoseconds of `time.perf_counter_ns`.

A mark is a point in time: on the CPU the host's clock itself, on CUDA an event on the stream that is current. A time
base has one reference event of which the host's time is known, and places every other event by the device's own clock,
relative to that. Not covered: clocks of several hosts (`collectives.watch.trace` aligns those).

[Note: precision] CUDA reports the time between two events in milliseconds as a float of 24 bits: after a minute that is
4 us, after an hour 0.25 ms. So a time base must not grow old; `Recorder` takes a new one every minute.

[Note: never waiting] The reference is recorded on a stream that carries nothing else, where it happens within
microseconds while other streams compute, and the host asks for it (`query`) until it has: no stream is waited for. The
time that this took bounds the error, and the best of a few tries counts. Where the driver puts that stream behind
others into one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS), the bound says so.

[Note: pooled events] Making an event costs the host more than recording it, so events go back to a pool of their device
once nobody refers to their mark.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_MOST_POOLED = 8192
_NUM_TRIES = 5
_GOOD_NS = 20_000  # an error below which no better one is looked for
_LONGEST_TRY_S = 0.05

_pools: defaultdict[int, deque[torch.cuda.Event]] = defaultdict(partial(deque, maxlen=_MOST_POOLED))
_side_streams: dict[int, torch.cuda.Stream] = {}


class PooledEvent:
    """A recorded CUDA event, which goes back to its pool with the last reference to it: [Note: pooled events]."""

    __slots__ = ("_pool", "event")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._pool = _pools[stream.device.index]
        try:
            self.event = self._pool.pop()
        except IndexError:
            import torch

            self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it could not be made, or the interpreter ends
            self._pool.append(self.event)


Mark = int | PooledEvent


def take_mark(by_events: bool, stream: torch.cuda.Stream | None = None) -> Mark | None:
    """Now: on the host's clock, or by an event on a stream (None: the current one); None while a graph is captured."""
    if not by_events:
        return time.perf_counter_ns()
    import torch

    from collectives.transport.current_stream import current_stream

    if torch.cuda.is_current_stream_capturing():
        return None
    return PooledEvent(stream or current_stream())


def seconds_between(start: Mark, end: Mark) -> float:
    """Seconds from one mark to another of the same kind; waits until the later event has happened."""
    if isinstance(start, int) or isinstance(end, int):
        assert isinstance(start, int)
        assert isinstance(end, int)
        return (end - start) * 1e-9
    _wait(end)
    return float(start.event.elapsed_time(end.event)) * 1e-3


def is_before(earlier: Mark, later: Mark) -> bool:
    """Whether a mark came before another one of the same kind, which has happened; waits until it has too.

    False where they lie too close for the device's clock.
    """
    if isinstance(earlier, int) or isinstance(later, int):
        assert isinstance(earlier, int)
        assert isinstance(later, int)
        return earlier < later
    _wait(earlier)
    return bool(earlier.event.elapsed_time(later.event) > 0)


def has_happened(mark: Mark) -> bool:
    """Whether the device has come to it; never waits."""
    return isinstance(mark, int) or bool(mark.event.query())  # type: ignore[no-untyped-call]


def _wait(mark: PooledEvent) -> None:
    if not mark.event.query():  # type: ignore[no-untyped-call]
        mark.event.synchronize()


def union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same times without overlap, in order."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def shared_ns(some: Iterable[tuple[int, int]], others: Sequence[tuple[int, int]]) -> int:
    """Nanoseconds that lie in both of two unions."""
    return sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in some for b in others)


class TimeBase:
    """Turns marks into nanoseconds of the host's clock.

    Args:
        by_events: whether marks are CUDA events; no stream is waited for, see [Note: never waiting].
        device: that the events are of; None: the current one.
    """

    def __init__(self, by_events: bool, device: torch.device | None = None) -> None:
        self.taken_ns = time.perf_counter_ns()
        self.uncertainty_ns = 0
        """How far device times may be off the host's clock, all by the same amount."""
        self._reference: PooledEvent | None = None
        if by_events:
            self._refer(device)

    @property
    def age_s(self) -> float:
        return (time.perf_counter_ns() - self.taken_ns) * 1e-9

    def ns(self, mark: Mark) -> int:
        """Nanoseconds on the host's clock; waits until the event has happened."""
        if isinstance(mark, int):
            return mark
        assert self._reference is not None
        _wait(mark)
        since_ms = float(self._reference.event.elapsed_time(mark.event))
        if since_ms <= 0:  # before the reference: CUDA does not promise negative times
            since_ms = -float(mark.event.elapsed_time(self._reference.event))
        return self.taken_ns + round(since_ms * 1e6)

    def _refer(self, device: torch.device | None) -> None:
        import torch

        index = torch.cuda.current_device() if device is None or device.index is None else device.index
        if index not in _side_streams:
            _side_streams[index] = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
        for _ in range(_NUM_TRIES):
            before_ns = time.perf_counter_ns()
            reference = PooledEvent(_side_streams[index])
            while not has_happened(reference):
                # A long time is a useless one, but some reference there must be.
                if time.perf_counter_ns() - before_ns > _LONGEST_TRY_S * 1e9:
                    time.sleep(1e-3)
            after_ns = time.perf_counter_ns()
            error_ns = (after_ns - before_ns) // 2
            if self._reference is None or error_ns < self.uncertainty_ns:
                self._reference, self.taken_ns, self.uncertainty_ns = reference, (before_ns + after_ns) // 2, error_ns
            if self.uncertainty_ns <= _GOOD_NS:
                return

"""One time base for what happens on the host and on the device: nanoseconds of `time.perf_counter_ns`.

A mark is a point in time: on the CPU the host's clock itself, on CUDA an event on the stream that is current. A time
base has one reference event of which the host's time is known, and places every other event by the device's own clock,
relative to that. Not covered: clocks of several hosts (`collectives.watch.trace` aligns those).

[Note: precision] CUDA reports the time between two events in milliseconds as a float of 24 bits: after a minute that is
4 us, after an hour 0.25 ms. So a time base must not grow old; `Recorder` takes a new one every minute. Taking one waits
for the current stream, and knows the host's time of the event to about 10 us.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    Mark = int | torch.cuda.Event


def take_mark(by_events: bool, stream: torch.cuda.Stream | None = None) -> Mark | None:
    """Now: on the host's clock, or by an event on a stream (None: the current one); None while a graph is captured."""
    if not by_events:
        return time.perf_counter_ns()
    import torch

    from collectives.transport.current_stream import current_stream

    if torch.cuda.is_current_stream_capturing():
        return None
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream or current_stream())
    return event


def seconds_between(start: Mark, end: Mark) -> float:
    """Seconds from one mark to another of the same kind; waits until the later event has happened."""
    if isinstance(start, int) or isinstance(end, int):
        assert isinstance(start, int)
        assert isinstance(end, int)
        return (end - start) * 1e-9
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def is_before(earlier: Mark, later: Mark) -> bool:
    """Whether a mark came before another one of the same kind, which has happened; waits until it has too.

    False where they lie too close for the device's clock.
    """
    if isinstance(earlier, int) or isinstance(later, int):
        assert isinstance(earlier, int)
        assert isinstance(later, int)
        return earlier < later
    earlier.synchronize()
    return bool(earlier.elapsed_time(later) > 0)


def has_happened(mark: Mark) -> bool:
    """Whether the device has come to it; never waits."""
    return isinstance(mark, int) or bool(mark.query())  # type: ignore[no-untyped-call]


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
        by_events: whether marks are CUDA events; then this call waits for the current stream.
    """

    def __init__(self, by_events: bool) -> None:
        self.taken_ns = time.perf_counter_ns()
        self.uncertainty_ns = 0
        """How far device times may be off the host's clock, all by the same amount."""
        self._reference: torch.cuda.Event | None = None
        if by_events:
            self._refer()

    @property
    def age_s(self) -> float:
        return (time.perf_counter_ns() - self.taken_ns) * 1e-9

    def ns(self, mark: Mark) -> int:
        """Nanoseconds on the host's clock; waits until the event has happened."""
        if isinstance(mark, int):
            return mark
        assert self._reference is not None
        mark.synchronize()
        since_ms = float(self._reference.elapsed_time(mark))
        if since_ms <= 0:  # before the reference: CUDA does not promise negative times
            since_ms = -float(mark.elapsed_time(self._reference))
        return self.taken_ns + round(since_ms * 1e6)

    def _refer(self) -> None:
        import torch

        torch.cuda.current_stream().synchronize()  # an event on an idle stream happens when it is recorded
        reference = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        before_ns = time.perf_counter_ns()
        reference.record()
        reference.synchronize()
        after_ns = time.perf_counter_ns()
        self.taken_ns, self.uncertainty_ns = (before_ns + after_ns) // 2, (after_ns - before_ns) // 2
        self._reference = reference

"""Clock of a rank for its events: steady, set by the system's once, and compared with the run's reference clock.

[Note: one exchange] A rank sends a message to the reference and gets it back with the reference's time in it. The
reference read its clock at some moment between sending and receiving, so the offset lies within half the round trip of
the midpoint, whatever the two ways took. Of many exchanges the one with the shortest round trip bounds it best, and
every other one bounds it too: the offset lies where all intervals overlap.

[Note: drift] Two oscillators differ by some parts in a million (10 ppm are 36 ms an hour), so an offset grows old. From
several comparisons over time a line is fitted; its slope is the drift. Between and after the samples the error is that
of the line: the largest distance of a sample's interval from it, and beyond the last sample what the drift may have
changed meanwhile (`MAX_DRIFT_CHANGE_PPM`). With a single comparison the drift is unknown, and the error grows by
`MAX_DRIFT_PPM`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

MAX_DRIFT_PPM = 50.0
"""Bound on the rate by which two hosts' steady clocks part, in millionths: crystals keep 50, NTP slews below 500."""
MAX_DRIFT_CHANGE_PPM = 2.0
"""Bound on how much that rate changes within minutes, by temperature."""
_NUM_SAMPLES = 64


@dataclass(frozen=True, slots=True)
class Exchange:
    """One message to the reference and back.

    Args:
        sent_ns, received_ns: on this rank's clock.
        reference_ns: the reference's clock, read somewhere between the two.
    """

    sent_ns: int
    reference_ns: int
    received_ns: int


@dataclass(frozen=True, slots=True)
class ClockSample:
    """A comparison of this rank's clock with the reference.

    Args:
        at_ns: when, on this rank's clock.
        offset_ns: this clock minus the reference.
        error_ns: bound on the error of that.
        round_trip_ns: the shortest one.
    """

    at_ns: int
    offset_ns: int
    error_ns: int
    round_trip_ns: int


def estimate(exchanges: Sequence[Exchange]) -> ClockSample:
    """The offset that exchanges of a few milliseconds bound: [Note: one exchange].

    Raises:
        ValueError: there are none, or one was received before it was sent.
    """
    if not exchanges or any(one.received_ns < one.sent_ns for one in exchanges):
        raise ValueError("an exchange must be received after it was sent, and there must be one")
    # this - reference lies between sent - reference and received - reference, of each exchange.
    low = max(one.sent_ns - one.reference_ns for one in exchanges)
    high = min(one.received_ns - one.reference_ns for one in exchanges)
    best = min(exchanges, key=lambda one: one.received_ns - one.sent_ns)
    round_trip_ns = best.received_ns - best.sent_ns
    if low > high:  # a clock has jumped, or drifted by more than the shortest trip: the best exchange alone
        low, high = best.sent_ns - best.reference_ns, best.received_ns - best.reference_ns
    at_ns = (best.sent_ns + best.received_ns) // 2
    return ClockSample(at_ns, (low + high) // 2, (high - low + 1) // 2, round_trip_ns)


class RankClock:
    """Nanoseconds since 1970 on a steady clock, and the offset of that to the run's reference clock.

    Args:
        now_ns: a steady clock in nanoseconds, `time.perf_counter_ns`; times given to `unix_ns` are its readings.
        is_reference: this rank's clock is the reference: its offset is 0, without an error.
    """

    def __init__(self, now_ns: Callable[[], int] = time.perf_counter_ns, *, is_reference: bool = False) -> None:
        self._now_ns = now_ns
        self.anchor_ns = time.time_ns() - now_ns()
        """This clock minus the steady one."""
        self.samples: deque[ClockSample] = deque(maxlen=_NUM_SAMPLES)
        self._line: tuple[float, float, float] | None = None
        self._exact_ns: int | None = 0 if is_reference else None

    def now_ns(self) -> int:
        """Return the time on this rank's clock."""
        return self.anchor_ns + self._now_ns()

    def unix_ns(self, steady_ns: int) -> int:
        """A reading of the steady clock as a time on this rank's clock."""
        return self.anchor_ns + steady_ns

    def set_exact(self, offset_ns: int) -> None:
        """Set an offset that is known without an error: of two clocks that run on the same steady one."""
        self._exact_ns = offset_ns

    def add(self, sample: ClockSample) -> None:
        """Take a comparison with the reference into account: later offsets are better."""
        self.samples.append(sample)
        self._line = fit(self.samples)

    @property
    def drift_ppm(self) -> float | None:
        """Rate of this clock minus that of the reference, in millionths; None: not known yet."""
        return None if self._line is None or len(self.samples) < 2 else self._line[1] * 1e6

    def offset(self, at_ns: int) -> tuple[int | None, int | None]:
        """Return this clock minus the reference at a time on it, and the bound on the error; None: never compared."""
        if self._exact_ns is not None:
            return self._exact_ns, 0
        if self._line is None:
            return None, None
        at_zero, slope, error_ns = self._line
        first, last = self.samples[0], self.samples[-1]
        offset = at_zero + slope * (at_ns - first.at_ns)
        beyond_ns = max(at_ns - last.at_ns, first.at_ns - at_ns, 0)
        rate = MAX_DRIFT_PPM if len(self.samples) < 2 else MAX_DRIFT_CHANGE_PPM
        # A slope from samples that lie close together is as wrong as their errors over their distance.
        span_ns = last.at_ns - first.at_ns
        slope_error = min(2 * error_ns / span_ns, 2 * MAX_DRIFT_PPM * 1e-6) if span_ns else 0.0
        return round(offset), round(error_ns + beyond_ns * (rate * 1e-6 + slope_error) + 0.5)


def fit(samples: Iterable[ClockSample]) -> tuple[float, float, float]:
    """A line through the samples, better ones weighing more: offset at the first, slope, and bound on the error, ns."""
    points = list(samples)
    origin = points[0].at_ns
    weights = [1 / max(point.error_ns, 1) ** 2 for point in points]
    total = sum(weights)
    mean_x = sum(w * (point.at_ns - origin) for w, point in zip(weights, points, strict=True)) / total
    mean_y = sum(w * point.offset_ns for w, point in zip(weights, points, strict=True)) / total
    pairs = list(zip(weights, points, strict=True))
    spread = sum(w * (point.at_ns - origin - mean_x) ** 2 for w, point in pairs)
    slope = 0.0
    if spread > 0:
        slope = sum(w * (point.at_ns - origin - mean_x) * (point.offset_ns - mean_y) for w, point in pairs) / spread
    slope = max(-MAX_DRIFT_PPM * 1e-6, min(MAX_DRIFT_PPM * 1e-6, slope))  # noise of two samples is no drift
    at_zero = mean_y - slope * mean_x
    # The true offset is within each sample's error of it, so it is no further from the line than this.
    error_ns = max(abs(point.offset_ns - at_zero - slope * (point.at_ns - origin)) + point.error_ns for point in points)
    return at_zero, slope, error_ns

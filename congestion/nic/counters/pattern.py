"""The rhythm of training traffic: its period, and ports that move less a step than they did.

A training job repeats itself step by step, and so does what its NICs move: MegaScale (NSDI'24, section 4.2) takes a
decline of RDMA traffic for a sign before any error. What a port moves in any window of one period is the same wherever
the window lies; it is held against the port's own past and, which we add, the other ports: a step that is slower for
all is no NIC's fault. Not covered: which part of a step it was.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_FIRST = 256  # samples before the first attempt at a period
_MOST = 1 << 14  # samples that are kept
_LEAST_PERIOD = 4  # samples: a shorter one cannot be told from noise
_LEAST_CORRELATION = 0.3
_NEARLY = 0.85  # of the highest peak
_SAME = 0.1  # share by which a period may differ from what is taken for the same one
_CHECKS = 4  # a period
_HISTORY = 64  # checks that the usual amount is the median of
_ENOUGH = 16
_PAUSED = 0.3  # below this share of the usual for the middle port the job stands still, and nobody is judged


class Pattern:
    """Fed with what each port moved since the time before; says which ports are below their rhythm."""

    def __init__(self, num_ports: int) -> None:
        self.period: int | None = None  # samples
        self.ratio: Floats = np.full(num_ports, np.nan)  # of the last window to the usual one
        self.common = float("nan")  # the middle port's
        self._cumulated = np.zeros((_MOST, num_ports))
        self._num = 0
        self._next_attempt = _FIRST
        self._usual: deque[Floats] = deque(maxlen=_HISTORY)

    def update(self, moved: Floats) -> bool:
        """The next sample; True where a window was judged, so that `ratio` and `common` are new."""
        if self._num == _MOST:
            self._drop_half()
        self._cumulated[self._num] = self._cumulated[self._num - 1] + moved if self._num else moved
        self._num += 1
        if self._num >= self._next_attempt:
            self._next_attempt = min(2 * self._num, _MOST)
            self._look()
        if self.period is None or self._num <= self.period or self._num % max(1, self.period // _CHECKS):
            return False
        return self._judge(self._cumulated[self._num - 1] - self._cumulated[self._num - 1 - self.period])

    def below(self, share: float) -> NDArray[np.bool_]:
        """Ports whose last window is below `share` of the middle port's; none while the job stands still."""
        if not self.common >= _PAUSED:
            return np.zeros(len(self.ratio), dtype=bool)
        return np.nan_to_num(self.ratio, nan=1.0) < share * min(self.common, 1.0)

    def _look(self) -> None:
        """Find the period, or a better one: what was seen first may have been too short to hold a whole step."""
        if self.period is not None and not self.common > 1 - _PAUSED:
            return
        period = find_period(np.diff(self._cumulated[: self._num].sum(axis=1)))
        if period is not None and (self.period is None or abs(period - self.period) > _SAME * self.period):
            self.period = period
            self._usual.clear()

    def _judge(self, window: Floats) -> bool:
        known = len(self._usual) >= _ENOUGH
        kept = window
        if known:
            usual = np.median(np.array(self._usual), axis=0)
            self.ratio = np.divide(window, usual, out=np.full(len(window), np.nan), where=usual > 0)
            moving = self.ratio[~np.isnan(self.ratio)]
            self.common = float(np.median(moving)) if moving.size else float("nan")
            kept = np.where(self.below(1 - _PAUSED), usual, window)  # who is slow does not become used to it
        if not known or self.common > 1 - _PAUSED:
            self._usual.append(kept)
        return known

    def _drop_half(self) -> None:
        half = _MOST // 2
        self._cumulated[:half] = self._cumulated[half:]
        self._num = half


def find_period(moved: Floats) -> int | None:
    """The period of a series in samples, by its autocorrelation; None where it has none.

    The first peak that is nearly as high as the highest past the first valley: multiples of a period are as high.
    """
    centred = moved - moved.mean()
    num = len(centred)
    if num < 4 * _LEAST_PERIOD or not centred.any():
        return None
    spectrum = np.fft.rfft(centred, 2 * num)
    correlation = np.fft.irfft(np.abs(spectrum) ** 2)[: num // 3]
    correlation = correlation / correlation[0] * (num / (num - np.arange(len(correlation))))
    valley = int(np.argmax(np.diff(correlation) > 0))
    begin = max(valley, _LEAST_PERIOD)
    if begin >= len(correlation) - 1:
        return None
    inner = correlation[begin:-1]
    highest = float(inner.max())
    peaks = (inner >= correlation[begin - 1 : -2]) & (inner >= correlation[begin + 1 :])
    near = np.flatnonzero(peaks & (inner >= _NEARLY * highest))
    return begin + int(near[0]) if highest >= _LEAST_CORRELATION and near.size else None

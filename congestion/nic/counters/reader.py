"""All counters of a host, open, and read sample by sample on a schedule without Python in between.

Between two readings of the slow counters a compiled loop waits, reads and parses: at a hundred samples a second Python
itself, called back from sleep, would cost more than the readings. It holds no lock of Python's, makes no object, and a
signal ends it early. Values are what the files say at that moment: a pread at 0 of a file of sysfs asks the driver
again. Not covered: RDMA netlink, which gives a port's hw_counters, but not its port counters, by one call.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from congestion.kernels.jit import entry, kernel
from congestion.nic.counters.catalogue import MISSING, Counter
from congestion.nic.counters.ethtool import Ethtool
from netlayer.errors import HardwareMissing

Ints = NDArray[np.int64]
NUM_LATE = 100_001  # places of `late_us`, 0.1 s; the last one is for all that was later
_MOST_BYTES = 24  # of a counter's text: 20 digits and the end of the line
_LARGEST = int(np.iinfo(np.int64).max)
_NO_STATISTIC = 2**64 - 1  # what ionic gives for a statistic that its firmware does not fill
_MONOTONIC, _ABSOLUTE = 1, 1  # CLOCK_MONOTONIC and TIMER_ABSTIME of Linux
_pread: Any = types.ExternalFunction("pread", types.int64(types.int32, types.uintp, types.uintp, types.int64))
_gettime: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.uintp))
_sleep: Any = types.ExternalFunction("clock_nanosleep", types.int32(types.int32, types.int32, types.uintp, types.uintp))


@dataclass(frozen=True, eq=False)
class Schedule:
    """Times at which samples are due: the k-th at `start_ns` + k * `period_ns` of the monotonic clock."""

    start_ns: int
    period_ns: int

    def next_tick(self, tick: int, now_ns: int) -> int:
        """Return the first tick after `tick` that is not yet due."""
        return max(tick + 1, (now_ns - self.start_ns) // self.period_ns + 1)


class Samples:
    """Room for a stretch of samples, filled again and again.

    Args:
        time_ns: when each reading began, monotonic; shape (samples,).
        values: MISSING for what was not or cannot be read; shape (samples, columns).
        late_us: how many samples, of all so far, began so many microseconds after they were due; shape (NUM_LATE,).
    """

    def __init__(self, num_samples: int, num_columns: int, late_us: Ints) -> None:
        self.late_us = late_us
        self.time_ns: Ints = np.zeros(num_samples, dtype=np.int64)
        self.values: Ints = np.full((num_samples, num_columns), MISSING, dtype=np.int64)


class Reader:
    """All counters, open, as a context manager, which closes them.

    Args:
        columns: in the order of the values.
        unreadable: by column, why a counter that is there gave no number when it was opened.
    """

    def __init__(self, counters: Sequence[Counter], ethtool: Sequence[Ethtool] = ()) -> None:
        ordered = sorted(counters, key=lambda counter: not counter.is_fast)  # stable: fast ones first
        self._num_fast = sum(counter.is_fast for counter in ordered)
        self._ethtool = list(ethtool)
        self._open: list[int] = []
        self.columns = [counter.column for counter in ordered]
        self.columns += [column for statistics in self._ethtool for column in statistics.columns]
        self.unreadable: dict[str, str] = {}
        try:
            for counter in ordered:
                self._open.append(os.open(counter.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
                self._try(counter)
        except OSError as exc:
            self.close()
            raise HardwareMissing(f"{exc.filename}: cannot be opened ({exc.strerror}); read as root") from exc
        self._handles = np.array(self._open, dtype=np.int32)
        self._scales = np.array([counter.scale for counter in ordered], dtype=np.int64)
        self._text, self._timespec = np.zeros(_MOST_BYTES, dtype=np.uint8), np.zeros(2, dtype=np.int64)
        nothing = Samples(1, len(self.columns), np.zeros(NUM_LATE, dtype=np.int64))
        self.read(Schedule(0, 1), 0, 0, nothing)  # compiles, which no sample should wait for

    def _try(self, counter: Counter) -> None:
        """Read a counter once, to name it where its driver has it in sysfs and gives no number."""
        try:
            text = os.pread(self._open[-1], _MOST_BYTES, 0).strip()
        except OSError as exc:
            self.unreadable[counter.column] = exc.strerror or str(exc)
            return
        if not text.isdigit():
            self.unreadable[counter.column] = "is no number"
        elif int(text) == _NO_STATISTIC:
            self.unreadable[counter.column] = "the driver has no value for it"

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for handle in self._open:
            os.close(handle)
        for statistics in self._ethtool:
            statistics.close()
        self._open, self._ethtool = [], []

    def read(self, schedule: Schedule, tick: int, num: int, into: Samples) -> tuple[int, int]:
        """Take `num` samples from `tick` on; the last is of all counters, those before of the fast ones.

        Returns:
            How many were taken, fewer where a signal came, and the tick after the last of them.
        """
        arrays = self._handles, self._scales, self._num_fast, self._text, self._timespec
        into_arrays = into.time_ns, into.values, into.late_us
        num_taken, tick = _take(schedule.start_ns, schedule.period_ns, tick, num, *arrays, *into_arrays)
        if self._ethtool and num and num_taken == num:
            numbers = [number for statistics in self._ethtool for number in statistics.read()]
            into.values[num_taken - 1, len(self._open) :] = numbers
        return num_taken, tick


@kernel
def _parsed(text, num, scale):  # type: ignore[no-untyped-def]
    """The number that the first `num` bytes say, times `scale`, at most the largest there is; MISSING for no number."""
    value: Any = 0
    place = 0
    while place < num and 48 <= text[place] <= 57:
        digit = np.int64(text[place]) - 48
        value = value * 10 + digit if value <= (_LARGEST - digit) // 10 else _LARGEST
        place += 1
    if place == 0 or (place < num and text[place] != 10):
        return MISSING
    return value * scale if value <= _LARGEST // scale else _LARGEST


@entry
def _take(start_ns, period_ns, tick, num, handles, scales, num_fast, text, timespec, time_ns, values, late_us):  # type: ignore[no-untyped-def]
    for row in range(num):
        due_ns = start_ns + tick * period_ns
        timespec[0], timespec[1] = due_ns // 1_000_000_000, due_ns % 1_000_000_000
        if _sleep(_MONOTONIC, _ABSOLUTE, timespec.ctypes.data, 0) != 0:
            return row, tick
        _gettime(_MONOTONIC, timespec.ctypes.data)
        now_ns = timespec[0] * 1_000_000_000 + timespec[1]
        time_ns[row] = now_ns
        late_us[min((now_ns - due_ns) // 1000, late_us.size - 1)] += 1
        num_read = handles.size if row == num - 1 else num_fast
        for place in range(num_read):
            size = _pread(handles[place], text.ctypes.data, text.size, 0)
            values[row, place] = _parsed(text, size, scales[place])
        values[row, num_read:] = MISSING
        _gettime(_MONOTONIC, timespec.ctypes.data)
        now_ns = timespec[0] * 1_000_000_000 + timespec[1]
        tick = max(tick + 1, (now_ns - start_ns) // period_ns + 1)
    return num, tick

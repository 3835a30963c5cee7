"""Time for which the calling thread was ready to run and had no processor, as Linux's scheduler counts it.

On a host with more threads than processors, ranks are slow by turns for reasons that are none of theirs. What a rank
waited for a processor is known to the nanosecond (`run_delay` of `/proc/thread-self/schedstat`, the kernel's
Documentation/scheduler/sched-stats.rst), so a slow rank can be told from one whose processor was taken. Not covered:
the other threads of a process, and time that a hypervisor takes (steal), during which a thread counts as running.
"""

from __future__ import annotations

import contextlib
import os
import threading

SCHEDSTAT = "/proc/thread-self/schedstat"


class ProcessorWait:
    """Reads threads' waits for a processor, each its own, in about a microsecond."""

    def __init__(self, path: str = SCHEDSTAT) -> None:
        self._path = path
        self._local = threading.local()

    def ns(self) -> int | None:
        """Return the nanoseconds since the calling thread began; None: this kernel does not count them."""
        try:
            file = self._local.file
        except AttributeError:
            file = self._local.file = _File(self._path)
        return file.second_number()  # type: ignore[no-any-return]


class ProcessorLaps:
    """Laps of a thread's wait for a processor, without what lies in its waits for others."""

    def __init__(self) -> None:
        self._reader = ProcessorWait()
        self._thread = 0
        self._last_ns: int | None = None
        self._in_waits_ns = 0

    def lap(self) -> int | None:
        """Return the nanoseconds since the last lap; None: it is the first one of this thread, or nobody counts."""
        thread, now_ns = threading.get_ident(), self._reader.ns()
        last_ns = self._last_ns if thread == self._thread else None
        waits_ns, self._in_waits_ns = self._in_waits_ns, 0
        self._thread, self._last_ns = thread, now_ns
        return None if now_ns is None or last_ns is None else max(0, now_ns - last_ns - waits_ns)

    def wait_ns(self) -> int | None:
        """Return the calling thread's wait so far, for `omit_since`."""
        return self._reader.ns()

    def omit_since(self, begin_ns: int | None) -> None:
        """Leave out of the lap what the thread waited since then: it was in a wait for others."""
        end_ns = self._reader.ns()
        if begin_ns is not None and end_ns is not None and threading.get_ident() == self._thread:
            self._in_waits_ns += end_ns - begin_ns


class _File:
    """A file of numbers, open until it is forgotten: a thread's own goes with the thread."""

    def __init__(self, path: str) -> None:
        self._file: int | None = None
        # Opened by the thread, the link names its own file for as long as it lives.
        with contextlib.suppress(OSError):
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def second_number(self) -> int | None:
        if self._file is None:
            return None
        try:
            return int(os.pread(self._file, 96, 0).split()[1])
        except (OSError, ValueError, IndexError):
            return None

    def __del__(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)

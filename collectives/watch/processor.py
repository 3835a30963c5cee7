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


class ProcessorWait:
    """Reads the calling thread's wait for a processor, in about a microsecond; a thread of another reader is fine."""

    def __init__(self, path: str = "/proc/thread-self/schedstat") -> None:
        self._path = path
        self._file: int | None = None
        self._thread = 0

    def ns(self) -> int | None:
        """Return the nanoseconds since the thread began; None: this kernel does not count them."""
        if threading.get_ident() != self._thread:
            self._open()
        if self._file is None:
            return None
        try:
            return int(os.pread(self._file, 96, 0).split()[1])
        except (OSError, ValueError, IndexError):  # the reader's own thread has ended, or this is no such file
            self.close()
            return None

    def close(self) -> None:
        """Close its file; the next reading of another thread opens one again."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
        self._file = None

    def _open(self) -> None:
        self.close()
        self._thread = threading.get_ident()
        # Opened by the thread, the link names its own file for as long as it lives.
        with contextlib.suppress(OSError):
            self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        self.close()

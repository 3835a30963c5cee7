"""Waits for what another process writes into shared memory, without a core: asleep in the kernel until it says so.

A futex on a word of that memory, as pthread's condition variables have beneath, but without a lock: a process that is
killed holds nothing, and one that never wakes the others costs them the limit of their sleep. Where there is no futex
(other systems than Linux) a wait looks again after a while.

[Note: no wake-up is lost] Whoever waits sets the word, and only then looks; whoever wakes writes what is waited for,
and only then reads the word. So one of the two sees the other. On ARM a store may pass a load that follows it, and then
the limit ends the sleep.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None  # asm/unistd.h
_WAIT, _WAKE = 0, 1  # linux/futex.h
_MOST_POLL_S = 5e-3

_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class WakeUp:
    """A word of shared memory on which processes sleep.

    Args:
        cell: of that memory, shape (1,), int64, 0 at first.
        limit_s: after which a sleep ends by itself, and the condition is looked at again.
    """

    def __init__(self, cell: NDArray[np.int64], limit_s: float) -> None:
        self._word, self.limit_s = cell.view(np.int32)[:1], limit_s
        self._address = self._word.ctypes.data
        self.num_looks = 0
        """Number of times that this process has looked in vain."""

    def wait(self, condition: Callable[[], Any], idle: Callable[[], None] = lambda: None) -> None:
        """Sleep until a condition holds.

        Args:
            condition: on shared memory; whoever makes it true calls `wake` after it.
            idle: called before each sleep; what it raises ends the wait.
        """
        poll_s = 50e-6
        while not condition():
            self._word[0] = 1
            fence()
            if condition():  # [Note: no wake-up is lost]
                return
            self.num_looks += 1
            idle()
            if not self._sleep():
                time.sleep(min(poll_s, self.limit_s))
                poll_s = min(1.5 * poll_s, _MOST_POLL_S)

    def wake(self) -> None:
        """Have all processes that wait look again; call it after what they wait for is written."""
        fence()
        if self._word[0]:
            self._word[0] = 0
            if _FUTEX is not None:
                _libc.syscall(_FUTEX, ctypes.c_void_p(self._address), _WAKE, 2**31 - 1, None, None, 0)

    def _sleep(self) -> bool:
        """Sleep while the word is set, up to the limit; returns False where there is no futex."""
        if _FUTEX is None:
            return False
        limit = _Timespec(int(self.limit_s), int(self.limit_s % 1 * 1e9))
        # The word is compared and the sleep begun in one, so that a wake between the look and here is not missed.
        failed = _libc.syscall(_FUTEX, ctypes.c_void_p(self._address), _WAIT, 1, ctypes.byref(limit), None, 0)
        return failed == 0 or ctypes.get_errno() in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT)


_lock = threading.Lock()


def fence() -> None:
    """Order what this process reads and writes before and after: taking a lock is a barrier, and numpy has none."""
    with _lock:
        pass

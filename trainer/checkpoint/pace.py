"""Limits of the rates at which a checkpoint is copied to the host and written, so that neither crowds out the training.

A copy at full speed takes the way between a GPU and its host from whatever else uses it (gradients for other machines
pass there too), and a writer at full speed takes memory bandwidth, processors and disk. Limited, both take longer and
less of it at a time. Needs no torch: the process that writes starts in moments.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

_SOONEST_S = 1e-3
"""Shorter sleeps are saved up: a wake-up costs about as much."""


class Pace:
    """Holds one caller back to a rate.

    Args:
        rate_bps: bytes a second; 0: no limit.
        hurry: set by another thread when there is no limit any more; it ends a wait, too.
    """

    def __init__(self, rate_bps: float, hurry: threading.Event | None = None) -> None:
        self._rate_bps, self._hurry = rate_bps, hurry or threading.Event()
        self._due_s = 0.0

    def delay_s(self, num_bytes: int) -> float:
        """Count bytes that are on their way; return for how long no more may follow.

        A pause is not made up for: after it the rate is what it was.
        """
        if not self._rate_bps:
            return 0.0
        now_s = time.monotonic()
        self._due_s = max(self._due_s, now_s) + num_bytes / self._rate_bps
        return self._due_s - now_s

    def after(self, num_bytes: int) -> None:
        """Wait until more may follow these bytes."""
        delay_s = self.delay_s(num_bytes)
        if delay_s > _SOONEST_S:
            self._hurry.wait(delay_s)


class PacedCopies:
    """Launches copies in their order from a thread of its own, no faster than a rate, or at once where one is needed.

    Args:
        copies: bytes of each, and what launches it.
        rate_bps: bytes a second.
        prepare: called in the thread before its first copy.
    """

    def __init__(
        self,
        copies: Sequence[tuple[int, Callable[[], None]]],
        rate_bps: float,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self._copies, self._pace, self._prepare = copies, Pace(rate_bps), prepare
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._next = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="paced-copies", daemon=True)
        self._thread.start()

    @property
    def num_launched(self) -> int:
        """Return how many copies have been launched, the first ones of their order.

        Raises:
            Whatever a copy has raised in the thread.
        """
        if self._error is not None:
            raise self._error
        return self._next

    def launch(self, count: int) -> None:
        """Launch the first `count` copies now, those that are not yet.

        Raises:
            As `num_launched`.
        """
        if self.num_launched < count:
            with self._lock:
                while self._next < count:
                    self._launch_next()
        if self._next == len(self._copies):
            self._ended.set()

    def cancel(self) -> None:
        """Launch no more, and wait for the thread."""
        self._ended.set()
        self._thread.join()

    def _launch_next(self) -> int:
        num_bytes, copy = self._copies[self._next]
        copy()
        self._next += 1
        return num_bytes

    def _run(self) -> None:
        try:
            self._prepare()
            while not self._ended.is_set():
                with self._lock:
                    if self._next == len(self._copies):
                        return
                    num_bytes = self._launch_next()
                self._ended.wait(self._pace.delay_s(num_bytes))
        except BaseException as exc:  # noqa: BLE001  raised where somebody waits for the copies
            self._error = exc

"""Thread that reads counters of the hardware at an interval, and gives them to a monitor.

    with Sampler(monitor, [Nvml], every_s=1.0):
        train()

A reading may take milliseconds, or hang in a driver: only this thread waits for it. What is not there is said once, and
costs nothing from then on. Not covered: rates above a few readings a second (`netlayer nic watch`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from collectives.watch.monitor import Monitor
from netlayer.errors import HardwareMissing
from netlayer.observe.events.schema import Counter, Mark, Origin

logger = logging.getLogger(__name__)

_CLOSE_S = 2.0


class Source(Protocol):
    """Counters of some hardware."""

    def sample(self, origin: Origin, now_ns: int, step: int | None) -> Iterable[Counter | Mark]: ...

    def close(self) -> None: ...


class Sampler:
    """Reads sources from a thread of its own, as a context manager or until `close`.

    Args:
        monitor: gets the events.
        opens: functions that open a source, called by the thread; one that raises HardwareMissing is omitted.
        every_s: seconds between two readings.
    """

    def __init__(self, monitor: Monitor, opens: Sequence[Callable[[], Source]], every_s: float = 1.0) -> None:
        self._monitor, self._opens, self._every_s = monitor, opens, every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="netlayer-counters", daemon=True)
        self._thread.start()

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread; one that hangs in a driver is left behind, and ends with the process."""
        self._stop.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        sources = []
        for open_source in self._opens:
            try:
                sources.append(open_source())
            except HardwareMissing as exc:
                logger.info("no counters: %s", exc)
        while sources and not self._stop.wait(self._every_s):
            for source in list(sources):
                if not self._read(source):
                    sources.remove(source)
                    with contextlib.suppress(Exception):  # it has just failed
                        source.close()
        for source in sources:
            source.close()

    def _read(self, source: Source) -> bool:
        """Read a source; False where it fails: its counters end, and the training goes on."""
        monitor = self._monitor
        try:
            for event in source.sample(monitor.origin, monitor.clock.now_ns(), monitor.open_step):
                monitor.add(event)
        except Exception:
            logger.exception("counters of %s end here", type(source).__name__)
            return False
        return True

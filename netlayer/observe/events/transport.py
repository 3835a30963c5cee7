"""Ways by which events leave a process: files, Redis streams, Kafka. None of them ever makes the training wait.

A transport is called from the monitor's own thread; what it cannot hand on it drops, the oldest first, and counts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from netlayer.observe.events.schema import Event, Origin
from netlayer.observe.events.writer import MAX_FILE_BYTES, MAX_FILES, EventWriter

logger = logging.getLogger(__name__)


class Transport(Protocol):
    """Takes batches of events."""

    def send(self, events: Sequence[Event]) -> int:
        """Take a batch; return how many events were lost, now or since the last call."""

    def close(self) -> None:
        """Hand on what is left, within a few seconds. Twice is once."""


class FileTransport:
    """Files of one rank's stream; see `EventWriter`. A batch for which there is no room is lost.

    Args:
        folder, origin, max_file_bytes, max_files: as in `EventWriter`.

    Raises:
        ConfigError: the folder cannot be written.
    """

    def __init__(
        self, folder: Path, origin: Origin, *, max_file_bytes: int = MAX_FILE_BYTES, max_files: int = MAX_FILES
    ) -> None:
        self._writer = EventWriter(folder, origin, max_file_bytes=max_file_bytes, max_files=max_files)
        self._has_warned = False

    def send(self, events: Sequence[Event]) -> int:
        try:
            self._writer.write(events)
        except OSError as exc:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("events are lost: %s: %s", self._writer.folder, exc.strerror or exc)
            return len(events)
        self._has_warned = False
        return 0

    def close(self) -> None:
        try:
            self._writer.close()
        except OSError as exc:
            logger.warning("the last events may be lost: %s: %s", self._writer.folder, exc.strerror or exc)

"""Progress of one training process, in a small file that its executor reads: step, loss, times, and what takes long.

The file is named by the variable `NETLAYER_RUN_PROGRESS`; without it nothing is written. It is one line of fixed size
that is written over in place, without a sync: it is read by a process of the same host, and worth nothing after a
crash. A reader that catches it half written sees that by the digest, and takes the one before.
"""

from __future__ import annotations

import json
import math
import os
import time
import weakref
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "NETLAYER_RUN_PROGRESS"
_SIZE = 512


@dataclass
class Progress:
    """Progress of a rank; the meaning of each is that of `messages.RankStatus`, `at_ns` is of the monotonic clock.

    Args:
        left: exit code with which the training has ended, in a process that has not.
        waits: that process has given back what the training held, and waits for the next start.
        why_ends: reason why it ends, and does not wait.
    """

    step: int = 0
    phase: str = "starts"
    loss: float | None = None
    is_finite: bool = True
    step_ms: float | None = None
    exposed: float | None = None
    at_ns: int = 0
    left: int | None = None
    waits: bool = False
    why_ends: str = ""


class ProgressFile:
    """Writer of a rank's progress.

    Args:
        path: the file; made where it is missing.
        goes_on: begin with what it holds.
    """

    def __init__(self, path: Path, *, goes_on: bool = False) -> None:
        before = read(path) if goes_on else None
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, self._descriptor)  # a process may have several, one after the other
        self._progress = before or Progress()
        self._phases = [self._progress.phase] if self._progress.phase else []
        self._write()

    @staticmethod
    def of(environ: Mapping[str, str], *, goes_on: bool = False) -> ProgressFile | None:
        """The file that an executor has named; None: no executor is there."""
        path = environ.get(VARIABLE)
        return ProgressFile(Path(path), goes_on=goes_on) if path else None

    def begin(self) -> None:
        """The first step comes next: the start is over."""
        self._phases.clear()
        self._write()

    def end(self) -> None:
        """No step comes any more: what follows, the end of groups and processes, takes its time."""
        self._phases.append("ends")
        self._write()

    def leave(self, code: int, why_ends: str = "") -> None:
        """Tell that the training has ended, and the process has not.

        Args:
            why_ends: the process will end, too, for this reason (128 characters at most).
        """
        self._progress.left, self._progress.why_ends = code, why_ends[:128]
        self._write()

    def wait(self) -> None:
        """Tell that the process waits for the next start."""
        self._progress.waits = True
        self._write()

    def add_step(self, row: Mapping[str, Any]) -> None:
        """Tell of a step, by its row of metrics."""
        loss = row["loss"]
        is_finite = loss is None or math.isfinite(loss)
        now = self._progress
        now.step, now.loss, now.is_finite = row["step"], loss if is_finite else None, is_finite
        now.step_ms, now.exposed = row["step_ms"], row["exposed_comm"]
        self._write()

    @contextmanager
    def phase(self, phrase: str) -> Iterator[None]:
        """Tell that the block may take long, and why."""
        self._phases.append(phrase)
        self._write()
        try:
            yield
        finally:
            self._phases.remove(phrase)
            self._write()

    def _write(self) -> None:
        self._progress.phase = self._phases[-1][:64] if self._phases else ""
        self._progress.at_ns = time.monotonic_ns()
        body = json.dumps(asdict(self._progress)).encode()
        line = b"%08x %s" % (zlib.crc32(body), body)
        os.pwrite(self._descriptor, line.ljust(_SIZE)[:_SIZE], 0)


def read(path: Path) -> Progress | None:
    """Progress in a file; None: there is none, it is being written, or it is not of this format."""
    try:
        with path.open("rb") as file:
            crc, _, body = file.read(_SIZE).rstrip().partition(b" ")
        if int(crc, 16) != zlib.crc32(body):
            return None
        return Progress(**json.loads(body))
    except (OSError, ValueError, TypeError):
        return None

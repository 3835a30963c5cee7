"""Writers of a rank's checkpoints: this process, while the training waits, or one beside it.

Not covered: what is written when (`trainer.checkpoint.save`), and what the process does (`trainer.checkpoint.writer`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Protocol

from netlayer.launch.launcher import PASSED_ON
from trainer.checkpoint.snapshot import ShardPlan, Staging
from trainer.checkpoint.storage import Storage, open_storage
from trainer.checkpoint.writer import Command, Pieces, Reply, reply_of, run_command

logger = logging.getLogger(__name__)

_ENDS_S, _KILLED_S = 10.0, 5.0
_HELD_BACK = (*PASSED_ON, signal.SIGINT)
_PROGRAM = "import sys; from trainer.checkpoint.writer import main; main(sys.argv[1:])"


class Writer(Protocol):
    """Something that runs commands, one at a time."""

    def start(self, command: Command, location: str) -> None:
        """Begin one, in a folder or at a URL; `reply` has what became of it."""

    def reply(self, *, waits: bool) -> Reply | None:
        """Return the reply to the last command; None: it is still running."""

    def abort(self) -> None:
        """Have the command that runs end soon."""

    def hurry(self) -> None:
        """Have the command that runs go on without a limit of its rate."""

    def close(self) -> None:
        """End it."""


class InlineWriter:
    """Runs each command at once, in this process; elements come straight from the device.

    Args:
        location: of the checkpoints.
        pieces: of the items, each time anew.
        direct: as in `WriterProcess`.
    """

    def __init__(self, location: str, pieces: Callable[[], Iterator[Pieces]], *, direct: bool = True) -> None:
        # Opened now: a package that is missing is said before the first step.
        self._storages: dict[str, Storage] = {location: open_storage(location, direct=direct)}
        self._pieces, self._direct = pieces, direct
        self._reply: Reply | None = None

    def start(self, command: Command, location: str) -> None:
        if location not in self._storages:
            self._storages[location] = open_storage(location, direct=self._direct)
        storage = self._storages[location]
        run = lambda: run_command(storage, command, self._pieces, lambda _phase: None)  # noqa: E731
        self._reply = reply_of(0, storage, run)

    def reply(self, *, waits: bool) -> Reply | None:  # noqa: ARG002  (as WriterProcess)
        return self._reply

    def abort(self) -> None:
        """Nothing runs."""

    def hurry(self) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Nothing is open."""


class WriterProcess:
    """A process that runs commands: `trainer.checkpoint.writer`. One that has ended is started again.

    Args:
        plan: of what it writes.
        staging: where that lies.
        nice: niceness, relative to this process.
        direct: write past the page cache: `trainer.checkpoint.storage.LocalStorage`.
    """

    def __init__(self, plan: ShardPlan, staging: Staging, *, nice: int = 5, direct: bool = True) -> None:
        self._plan, self._staging, self._nice, self._direct = plan, staging, nice, direct
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._number = 0
        self._reply: Reply | None = None
        self._launch()

    def start(self, command: Command, location: str) -> None:
        self._number, self._reply = self._number + 1, None
        try:
            if self._process is None or self._process.poll() is not None:
                self.close()
                self._launch()
            assert self._pipe is not None
            self._pipe.send((self._number, command, location))
        except OSError as exc:
            self._reply = Reply(self._number, errno=-1, text=f"its writer cannot be started: {exc}")

    def reply(self, *, waits: bool) -> Reply | None:
        while self._reply is None:
            assert self._pipe is not None
            try:
                if not waits and not self._pipe.poll():
                    return None
                reply = self._pipe.recv()
            except (EOFError, OSError):
                code = self._process.wait() if self._process else 0
                end = f"signal {-code}" if code < 0 else f"exit code {code}"
                self._reply = Reply(self._number, errno=-1, text=f"its writer has ended with {end}")
            else:
                self._reply = reply if reply.number == self._number else None
        return self._reply

    def abort(self) -> None:
        if self._pipe is not None:
            with contextlib.suppress(OSError):
                self._pipe.send(self._number)

    def hurry(self) -> None:
        if self._pipe is not None:
            with contextlib.suppress(OSError):
                self._pipe.send(None)

    def close(self) -> None:
        self._pipe = self._process = None
        self._end()

    def _launch(self) -> None:
        """Start the process, and send it what stays the same from save to save."""
        ours, theirs = Pipe()
        settings = {
            "pipe": theirs.fileno(),
            "buffer": self._staging.file,
            "num_bytes": self._staging.num_bytes,
            "parent": os.getpid(),
            "nice": self._nice,
            "direct": self._direct,
        }
        # It inherits what is held back: these signals are the rank's to answer.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, json.dumps(settings)],
                pass_fds=(theirs.fileno(), self._staging.file),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        self._pipe = ours
        # Also where nobody closes this: a writer whose pipe ends is gone in a moment.
        self._end = weakref.finalize(self, _end_process, self._process, ours)
        ours.send(self._plan.framed)


def _end_process(process: subprocess.Popen[bytes], pipe: Connection) -> None:
    """End a writer, and wait for it; not for ever, for one that hangs in a dead file system would hold up the rank."""
    pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_ENDS_S)  # by itself: its pipe is closed
        return
    process.kill()
    try:
        process.wait(_KILLED_S)
    except subprocess.TimeoutExpired:
        # In the kernel, which ends it when the write that it waits for is over; the rank goes on without it.
        logger.warning("the writer of checkpoints (process %d) is blocked in the kernel, and is left", process.pid)

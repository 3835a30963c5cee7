"""A lock between processes that says who has it, and a wait for one that ends.

The kernel's lock (`flock`) on a small file goes with its holder, however that ends. The file says who that is: process,
host, since when, and how far it is; while it is held a thread touches it, so that a holder that was stopped, or that
hangs on another machine, is told from one that works. Left out: file systems without locks, where `exclusive` says so
and goes on without.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

logger = logging.getLogger(__name__)

OnWait = Callable[[str], None]
"""Called every `_ASK_EVERY_S` of a wait with who is waited for."""

_ASK_EVERY_S = 0.1
_SAY_EVERY_S = 30.0
_BEAT_EVERY_S = 2.0
_DEAD_AFTER_S = 30.0  # without a beat: many times what a busy machine or a network file system delays one
_STUCK_AFTER_S = 1800.0  # beats, but no progress
_MOST_BYTES = 4096

_own: dict[Path, int] = {}
"""Locks that this process holds, and the thread that took each."""


class LockBusy(Exception):
    """Somebody else has the lock; the text says who."""


@dataclass(frozen=True)
class Owner:
    """Who holds a lock, as the file says.

    Args:
        pid, host: of the process.
        since_s: seconds since the epoch.
        progress: how far it is, as a phrase; may be empty.
    """

    pid: int
    host: str
    since_s: float
    progress: str = ""

    def __str__(self) -> str:
        where = "" if self.host == socket.gethostname() else f" on {self.host}"
        own = " (this one)" if not where and self.pid == os.getpid() else ""
        doing = f", {self.progress}" if self.progress else ""
        return f"process {self.pid}{own}{where}, since {datetime.fromtimestamp(self.since_s, UTC):%H:%M:%S} UTC{doing}"


class Held:
    """A lock that this process has, or goes on without (`is_locked` says which)."""

    def __init__(self, descriptor: int | None) -> None:
        self.is_locked = descriptor is not None
        self._descriptor = descriptor
        self._owner = Owner(os.getpid(), socket.gethostname(), time.time())
        self.progress("")

    def progress(self, phrase: str) -> None:
        """Tell those who wait how far it is."""
        if self._descriptor is None or (phrase and phrase == self._owner.progress):
            return
        self._owner = Owner(self._owner.pid, self._owner.host, self._owner.since_s, phrase)
        text = json.dumps(asdict(self._owner)).encode()[:_MOST_BYTES]
        with contextlib.suppress(OSError):  # a full disk: those who wait then know no name
            os.pwrite(self._descriptor, text.ljust(os.fstat(self._descriptor).st_size), 0)


@contextlib.contextmanager
def claimed(file: Path) -> Iterator[Held]:
    """Hold the lock in the block, or raise at once.

    Raises:
        LockBusy: somebody has it, this process too.
        OSError: the file cannot be made.
    """
    with _taken(file, None) as held:
        yield held


@contextlib.contextmanager
def exclusive(file: Path, on_wait: OnWait | None = None) -> Iterator[Held]:
    """Hold the lock in the block, after a wait for who has it. The thread that has it enters again without one.

    The wait ends without the lock, with a warning, where its holder has shown no sign of life for half a minute, or no
    progress for half an hour: what is done in the block must then be harmless in two processes.

    Raises:
        OSError: the file cannot be made.
    """
    with _taken(file, on_wait or (lambda _owner: None)) as held:
        stop = threading.Event()
        if held.is_locked:
            threading.Thread(target=_beat, args=(file, stop), name="lock", daemon=True).start()
        try:
            yield held
        finally:
            stop.set()


@contextlib.contextmanager
def _taken(file: Path, on_wait: OnWait | None) -> Iterator[Held]:
    """Args: on_wait: None: do not wait."""
    key = file.parent.resolve() / file.name
    if key in _own and (on_wait is None or _own[key] == threading.get_ident()):
        if on_wait is None:
            raise LockBusy(f"process {os.getpid()} (this one)")
        yield Held(None)
        return
    descriptor = _take(file, on_wait)
    if descriptor is None:
        yield Held(None)
        return
    _own[key] = threading.get_ident()
    try:
        yield Held(descriptor)
    finally:
        del _own[key]
        with contextlib.suppress(OSError):
            file.unlink()  # while it is locked: who opened it meanwhile looks whether it is still there
        os.close(descriptor)


def _take(file: Path, on_wait: OnWait | None) -> int | None:
    """The descriptor that holds the lock; None: go on without it."""
    wait = _Wait(file)
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, file):
                return descriptor
            os.close(descriptor)  # of a holder that has ended: take the one that is there now
            continue
        except BlockingIOError:
            owner = _read(descriptor)
            os.close(descriptor)
        except OSError as exc:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                file.unlink()
            logger.warning("%s cannot be locked (%s): nothing keeps other processes out", file, exc)
            return None
        if on_wait is None:
            raise LockBusy(str(owner or "another process"))
        if wait.is_over(owner):
            return None
        on_wait(str(owner or "another process"))
        time.sleep(_ASK_EVERY_S)


class _Wait:
    """How long somebody has been waited for, by this machine's clock, and since when he has shown no sign."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._start_s = self._beat_s = self._moved_s = time.monotonic()
        self._said_s: float | None = None
        self._beat: int | None = None
        self._progress: tuple[int, str] | None = None

    def is_over(self, owner: Owner | None) -> bool:
        """Whether it is time to go on without; says so, and now and then for whom it waits."""
        now_s, who = time.monotonic(), str(owner or "another process")
        try:
            beat: int | None = self._file.stat().st_mtime_ns
        except OSError:  # the holder has just ended
            beat = None
        if beat != self._beat:
            self._beat, self._beat_s = beat, now_s
        progress = None if owner is None else (owner.pid, owner.progress)
        if progress != self._progress:
            self._progress, self._moved_s = progress, now_s
        silent_s, still_s = now_s - self._beat_s, now_s - self._moved_s
        if silent_s > _DEAD_AFTER_S or still_s > _STUCK_AFTER_S:
            sign, seconds = ("sign of life", silent_s) if silent_s > _DEAD_AFTER_S else ("progress", still_s)
            held = f"{self._file} is held by {who}"
            logger.warning("%s, which has shown no %s for %.0f s: going on without the lock", held, sign, seconds)
            return True
        if self._said_s is None or now_s - self._said_s > _SAY_EVERY_S:
            self._said_s = now_s
            logger.info("%s is held by %s: waiting since %.0f s", self._file, who, now_s - self._start_s)
        return False


def _is_at(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except OSError:
        return False


def _read(descriptor: int) -> Owner | None:
    """Who holds it; None where nobody has written, or is writing now."""
    try:
        record = json.loads(os.pread(descriptor, _MOST_BYTES, 0))
        return Owner(int(record["pid"]), str(record["host"]), float(record["since_s"]), str(record["progress"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _beat(file: Path, stop: threading.Event) -> None:
    while not stop.wait(_BEAT_EVERY_S):
        with contextlib.suppress(OSError):
            os.utime(file)

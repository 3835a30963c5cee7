"""Lock file between processes that names its holder, and a bounded wait for it.

The kernel's lock (`flock`) on a small file is released when its holder exits, however it exits. The file names the
holder: process, host, since when, and its progress. While the lock is held, a thread updates the file's modification
time (heartbeat), so that waiters can tell a stopped or remotely hung holder from a working one. On file systems without
locks, `exclusive` logs a warning and runs without the lock.
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
"""Callback, called every `_ASK_EVERY_S` seconds of a wait with the description of the holder."""

_ASK_EVERY_S = 0.1
_SAY_EVERY_S = 30.0
_BEAT_EVERY_S = 2.0
_DEAD_AFTER_S = 30.0  # without a heartbeat: far longer than a busy machine or a network file system delays one
_STUCK_AFTER_S = 1800.0  # heartbeats, but no progress
_MOST_BYTES = 4096

_own: dict[Path, int] = {}
"""Locks that this process holds, and the id of the thread that took each."""


class LockBusy(Exception):
    """The lock is held already; the text names the holder."""


@dataclass(frozen=True)
class Owner:
    """Holder of a lock, as recorded in its file.

    Args:
        pid, host: the process.
        since_s: time at which it took the lock, in seconds since the epoch.
        progress: its progress as a phrase; may be empty.
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


class LockHandle:
    """Result of taking a lock; `is_locked` is False if this process runs without it."""

    def __init__(self, descriptor: int | None) -> None:
        self.is_locked = descriptor is not None
        self._descriptor = descriptor
        self._owner = Owner(os.getpid(), socket.gethostname(), time.time())
        self.progress("")

    def progress(self, phrase: str) -> None:
        """Write this process's progress to the lock file, for the processes that wait."""
        if self._descriptor is None or (phrase and phrase == self._owner.progress):
            return
        self._owner = Owner(self._owner.pid, self._owner.host, self._owner.since_s, phrase)
        text = json.dumps(asdict(self._owner)).encode()[:_MOST_BYTES]
        with contextlib.suppress(OSError):  # a full disk: waiters then see no holder's name
            os.pwrite(self._descriptor, text.ljust(os.fstat(self._descriptor).st_size), 0)


@contextlib.contextmanager
def claimed(file: Path) -> Iterator[LockHandle]:
    """Hold the lock in the block, or raise at once.

    Raises:
        LockBusy: another process holds it, or this one does already.
        OSError: the file cannot be created.
    """
    with _locked(file, None) as lock:
        yield lock


def is_held(file: Path) -> bool:
    """Return whether a process holds the lock, without taking it: others may look at the same time."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False


@contextlib.contextmanager
def exclusive(file: Path, on_wait: OnWait | None = None) -> Iterator[LockHandle]:
    """Hold the lock in the block, after waiting for its holder. Re-entrant within one thread.

    If the holder gives no heartbeat for half a minute, or makes no progress for half an hour, the block runs without
    the lock, after a warning. So the block must be safe to run in two processes at once.

    Raises:
        OSError: the file cannot be created.
    """
    with _locked(file, on_wait or (lambda _owner: None)) as lock:
        stop = threading.Event()
        if lock.is_locked:
            threading.Thread(target=_beat, args=(file, stop), name="lock", daemon=True).start()
        try:
            yield lock
        finally:
            stop.set()


@contextlib.contextmanager
def _locked(file: Path, on_wait: OnWait | None) -> Iterator[LockHandle]:
    """Take and release the lock; if `on_wait` is None, raise LockBusy instead of waiting."""
    key = file.parent.resolve() / file.name
    if key in _own and (on_wait is None or _own[key] == threading.get_ident()):
        if on_wait is None:
            raise LockBusy(f"process {os.getpid()} (this one)")
        yield LockHandle(None)
        return
    descriptor = _take(file, on_wait)
    if descriptor is None:
        yield LockHandle(None)
        return
    _own[key] = threading.get_ident()
    try:
        yield LockHandle(descriptor)
    finally:
        del _own[key]
        with contextlib.suppress(OSError):
            file.unlink()  # while locked: a process that opened it meanwhile checks that it still exists (`_is_at`)
        os.close(descriptor)


def _take(file: Path, on_wait: OnWait | None) -> int | None:
    """Return the file descriptor that holds the lock; None to run without it."""
    wait = _Wait(file)
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, file):
                return descriptor
            os.close(descriptor)  # a former holder's file, unlinked meanwhile: open the current one
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
    """State of one wait: its start, and the last heartbeat and progress of the holder, by this machine's clock."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._start_s = self._heartbeat_s = self._progress_s = time.monotonic()
        self._logged_s: float | None = None
        self._mtime_ns: int | None = None
        self._progress: tuple[int, str] | None = None

    def is_over(self, owner: Owner | None) -> bool:
        """Return True if the holder counts as dead or stuck; log that, and every 30 s the holder waited for."""
        now_s, who = time.monotonic(), str(owner or "another process")
        try:
            mtime_ns: int | None = self._file.stat().st_mtime_ns
        except OSError:  # the holder has just released it
            mtime_ns = None
        if mtime_ns != self._mtime_ns:
            self._mtime_ns, self._heartbeat_s = mtime_ns, now_s
        progress = None if owner is None else (owner.pid, owner.progress)
        if progress != self._progress:
            self._progress, self._progress_s = progress, now_s
        silent_s, still_s = now_s - self._heartbeat_s, now_s - self._progress_s
        if silent_s > _DEAD_AFTER_S or still_s > _STUCK_AFTER_S:
            sign, seconds = ("sign of life", silent_s) if silent_s > _DEAD_AFTER_S else ("progress", still_s)
            message = f"{self._file} is held by {who}"
            logger.warning("%s, which has shown no %s for %.0f s: going on without the lock", message, sign, seconds)
            return True
        if self._logged_s is None or now_s - self._logged_s > _SAY_EVERY_S:
            self._logged_s = now_s
            logger.info("%s is held by %s: waiting since %.0f s", self._file, who, now_s - self._start_s)
        return False


def _is_at(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except OSError:
        return False


def _read(descriptor: int) -> Owner | None:
    """Read the holder from the lock file; None if it is empty or being written."""
    try:
        record = json.loads(os.pread(descriptor, _MOST_BYTES, 0))
        return Owner(int(record["pid"]), str(record["host"]), float(record["since_s"]), str(record["progress"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _beat(file: Path, stop: threading.Event) -> None:
    while not stop.wait(_BEAT_EVERY_S):
        with contextlib.suppress(OSError):
            os.utime(file)

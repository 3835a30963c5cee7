"""Starts ranks and commands as forks of one process that has imported torch and the trainer.

A fresh interpreter takes some three seconds of a core to import what a rank needs, more than most tests' ranks then
compute. `netlayer.launch` itself is tested with fresh interpreters, in tests/netlayer, and so is what a command imports
and how it ends. Linux alone: elsewhere every process is fresh.

[Note: whose child] A launcher reaps its ranks, so a rank has to be a child of the process that asked for it. The server
forks a process that forks the rank and ends at once; the kernel then gives the rank to the nearest process above that
asks for such orphans (PR_SET_CHILD_SUBREAPER, prctl(2)), and for that moment the asking process does.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn
from unittest import mock

from netlayer.launch import launcher
from netlayer.launch.rank import run_rank

_PRELOADED = ("torch._dynamo", "trainer.worker", "trainer.commands.train", "tests.trainer.layout_ranks")
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_MOST_BYTES = 1 << 17
_start_fresh = launcher._start


class _Request(NamedTuple):
    """One process.

    Args:
        parent: who asks for it, and will reap it.
        words: arguments of `run_rank`, or of the module.
        module: that is run as `python -m` does; "": a rank.
        kept: number that a third descriptor has in the process, where there is one; the others are its stdin, stdout
            and stderr.
        mask: signals that it begins with blocked.
    """

    parent: int
    words: list[str]
    module: str
    kept: int | None
    environ: dict[str, str]
    folder: str
    mask: set[int]


class Forked:
    """A process: as much of `subprocess.Popen` as a launcher and the tests ask for."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (timeout or 0.0)
        while timeout is not None and self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("forked", timeout)
            time.sleep(0.01)
        code = self._reap(0)
        assert code is not None
        return code

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class _Server:
    """The process that forks: started when it is first asked, and gone with this one."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def fork(self, request: _Request, fds: Sequence[int]) -> Forked:
        if self._socket is None:
            self._socket, there = _socket_pair()
            code = f"import sys; sys.path[:] = {sys.path}; from {__name__} import serve; serve({there.fileno()})"
            with there:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", code],
                    pass_fds=(there.fileno(),),
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                    start_new_session=True,  # Ctrl-C is for the tests: it ends with its socket
                )
            atexit.register(self.end)
        sent = pickle.dumps(tuple(request))
        assert len(sent) < _MOST_BYTES
        _ask_for_orphans(True)
        try:
            socket.send_fds(self._socket, [sent], fds)
            answer = self._socket.recv(64)
        finally:
            _ask_for_orphans(False)
        assert answer, "the process that forks has ended"
        return Forked(int(answer))

    def fork_server(self) -> None:
        """Have a fork of this process serve it."""
        self._socket, there = _socket_pair()
        if os.fork() == 0:
            self._socket.close()
            try:
                serve(there.detach())
            finally:
                os._exit(0)
        there.close()

    def end(self) -> None:
        assert self._socket is not None
        assert self._process is not None
        self._socket.close()
        self._process.wait()


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # a request is a packet


def _ask_for_orphans(wanted: bool) -> None:
    assert ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0) == 0


def serve(fd: int) -> None:
    """Fork a process for each request, until the other end is closed."""
    requests = socket.socket(fileno=fd)
    for module in _PRELOADED:
        importlib.import_module(module)
    gc.freeze()  # what is here stays: nobody need look through it
    while True:
        request, fds, _, _ = socket.recv_fds(requests, _MOST_BYTES, 16)
        if not request:
            return
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                requests.close()
                os.close(reading)
                os.close(writing)
                _be(_Request(*pickle.loads(request)), fds)
            os.write(writing, str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)  # now it is a child of who asked
        answer = os.read(reading, 64)
        for each in (*fds, reading, writing):
            os.close(each)
        requests.send(answer)


def _be(request: _Request, fds: list[int]) -> NoReturn:
    """Do what a fresh interpreter does that is started so."""
    while os.getppid() != request.parent:
        time.sleep(0.001)
    os.setsid()
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
    if request.kept is not None and request.kept != fds[3]:
        os.dup2(fds[3], request.kept)
    for fd in fds:
        if fd != request.kept:
            os.close(fd)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  (until the end)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environ)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.mask)
    if not request.module:
        _be_rank(request.words)
    _be_module(request.module, request.words)


def _be_rank(words: list[str]) -> NoReturn:
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # OpenMP read it when it was loaded
    sys.argv = ["-c", *words]
    sys.path[:] = json.loads(sys.stdin.buffer.readline())
    run_rank()
    os._exit(0)


def _be_module(module: str, words: list[str]) -> NoReturn:
    _server.fork_server()
    sys.argv = [module, *words]
    code = 0
    try:
        with forked_ranks():
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as exc:
        if isinstance(exc.code, str):
            print(exc.code, file=sys.stderr)
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except BaseException:  # noqa: BLE001  (as an interpreter does)
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


_server = _Server()


def _start(
    entry: Callable[[], None],
    arguments: list[str],
    stdin: IO[bytes] | int,
    stdout: IO[bytes] | int,
    environ: dict[str, str] | None = None,
    pass_fds: tuple[int, ...] = (),
) -> Any:
    """Stand in for `launcher._start`: the keeper is a fresh process, for it outlives who starts it."""
    if entry is not run_rank or environ is None or isinstance(stdin, int) or isinstance(stdout, int):
        return _start_fresh(entry, arguments, stdin, stdout, environ, pass_fds)
    [kept] = pass_fds
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    request = _Request(os.getpid(), arguments, "", kept, environ, str(Path.cwd()), set(map(int, mask)))
    return _server.fork(request, [stdin.fileno(), stdout.fileno(), stdout.fileno(), kept])


@contextlib.contextmanager
def forked_ranks() -> Iterator[None]:
    """Have ranks that are launched in the block forked."""
    if sys.platform != "linux":
        yield
        return
    with mock.patch.object(launcher, "_start", _start):
        yield


@contextlib.contextmanager
def fresh_ranks() -> Iterator[None]:
    """Have ranks that are launched in the block be fresh interpreters, for a test of what they import."""
    with mock.patch.object(launcher, "_start", _start_fresh):
        yield


def start_module(
    module: str,
    *words: object,
    stdout: IO[Any],
    stderr: IO[Any],
    env: Mapping[str, str] | None = None,
    cwd: os.PathLike[str] | str = ".",
) -> Forked | subprocess.Popen[bytes]:
    """Start `python -m module words` in a session of its own; ranks that it launches are forked too."""
    command = [module, *map(str, words)]
    environ = dict(os.environ if env is None else env)
    with Path(os.devnull).open("rb") as stdin:
        if sys.platform != "linux":
            return subprocess.Popen(
                [sys.executable, "-m", *command],
                stdin=stdin, stdout=stdout, stderr=stderr, env=environ, cwd=cwd, start_new_session=True,
            )  # fmt: skip
        request = _Request(os.getpid(), command[1:], module, None, environ, str(Path(cwd).absolute()), set())
        return _server.fork(request, [stdin.fileno(), stdout.fileno(), stderr.fileno()])


def run_module(
    module: str,
    *words: object,
    env: Mapping[str, str] | None = None,
    cwd: os.PathLike[str] | str = ".",
    timeout: float = 200.0,
) -> subprocess.CompletedProcess[str]:
    """Do as `python -m module words` does, and return its output as text."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = start_module(module, *words, stdout=stdout, stderr=stderr, env=env, cwd=cwd)
        try:
            code = process.wait(timeout)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        texts = []
        for file in (stdout, stderr):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess([module, *map(str, words)], code, *texts)

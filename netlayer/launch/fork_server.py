"""Process that has imported what others need, and forks them: Linux alone.

An import of torch and of the trainer takes seconds of a core in every process; a fork has them in milliseconds. The
server itself computes nothing, opens no device, and ends with whoever started it, once its imports are done. Not
covered: what a fork then does (`run_module`, or any function of one argument).

[Note: whose child] Who asks for a process reaps it, so it has to be its child. The server forks a process that forks
the wanted one and ends at once; the kernel then gives that to the nearest process above which asks for such orphans
(PR_SET_CHILD_SUBREAPER, prctl(2)), and for that moment the asking process does.

[Note: what may be forked] A fork has only the thread that forked, and a CUDA context does not outlive a fork. So the
server says, once its modules are there, why it must not be used: it has Python threads besides its own, or has a
device of NVIDIA's or an RDMA device open. Threads of OpenBLAS and Arrow are theirs to handle (pthread_atfork).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from netlayer.launch.keeper import kill_strays

MARK = "NETLAYER_FORK_MARK"
_PR_SET_NAME = 15  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_MOST_BYTES = 1 << 17
_ANSWER_S = 10.0  # for a fork; a server that does not answer is ended
_DEVICES = ("/dev/nvidia", "/dev/infiniband")
_READY = b"ready"


class ForkServerLost(Exception):
    """The server has ended, or does not answer: whatever it was asked for does not run."""


class Request(NamedTuple):
    """One process.

    Args:
        parent: who asks for it, and will reap it.
        entry: function of one argument, as `package.module:name`.
        argument: of it; pickled.
        name: of the process, for `ps -o comm`; 15 characters; empty: the server's.
        environ: all its variables.
        folder: in which it runs.
        mask: signals that it begins with blocked.
        kept: number that a fourth descriptor has in it, where there is one; the first are stdin, stdout and stderr.
    """

    parent: int
    entry: str
    argument: Any
    name: str
    environ: dict[str, str]
    folder: str
    mask: tuple[int, ...] = ()
    kept: int | None = None


class Forked:
    """A process: as much of `subprocess.Popen` as launchers need."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        end_s = time.monotonic() + (timeout or 0.0)
        while timeout is not None and self.poll() is None:
            if time.monotonic() > end_s:
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


class ForkServer:
    """A server and the connection to it; it loads its modules while its owner goes on.

    Args:
        modules: that it imports; those that are not installed are skipped.
        label: shown in its command line.
        environ: of the server, what a module reads when it is imported; a fork has that of its request.
        mark: value of `MARK` in its environment, and so in that which the kernel shows of every fork.
        sessions: of forks that were handed out under this mark, by servers before it too; it adds its own.
    """

    def __init__(
        self,
        modules: Sequence[str],
        label: str = "",
        environ: Mapping[str, str] | None = None,
        mark: str = "",
        sessions: set[int] | None = None,
    ) -> None:
        self.mark = mark
        self._socket, there = _socket_pair()
        self._refusal: str | None = None
        self._sessions = set[int]() if sessions is None else sessions  # each fork leads its own
        command = [sys.executable, "-m", __name__, str(there.fileno()), label, *modules]
        with there:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=(there.fileno(),),
                env={**(os.environ if environ is None else environ), MARK: mark},
                start_new_session=True,  # Ctrl-C is for its owner: it ends with its socket
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_loading(self) -> bool:
        """Whether its modules are still being imported."""
        self._look(0.0)
        return self._refusal is None

    @property
    def refusal(self) -> str:
        """Reason for which the server forks nothing; empty if it does, or is still loading."""
        self._look(0.0)
        return self._refusal or ""

    def fork(self, request: Request, fds: Sequence[int]) -> Forked:
        """Start a process, once the modules are loaded.

        Args:
            request: what it is.
            fds: that become its stdin, stdout and stderr, and one more with `request.kept`.

        Raises:
            ForkServerLost: it has ended or does not answer; it is ended then, and what it may have forked for this
                request. Earlier forks go on.
        """
        while self._refusal is None:
            self._look(1.0)
        if self._refusal:
            raise ForkServerLost(self._refusal)
        try:
            forked = fork_over(self._socket, request, fds)
        except ForkServerLost as exc:
            self._refusal = str(exc)
            self.end()
            if self.mark:
                kill_strays(self.mark, self._sessions)
            raise
        self._sessions.add(forked.pid)
        return forked

    def end(self) -> None:
        """End the server; its forks go on. Twice is once."""
        self._socket.close()
        self._refusal = self._refusal or "the fork server has ended"
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def _look(self, seconds: float) -> None:
        """Wait up to `seconds` for the server's first message, that it is ready or why it refuses, or for its end."""
        if self._refusal is not None:
            return
        readable = select.select([self._socket], [], [], seconds)[0]
        if not readable:
            return
        with contextlib.suppress(OSError):
            answer = self._socket.recv(1 << 12)
            if answer.startswith(_READY):
                self._refusal = answer.removeprefix(_READY).decode(errors="replace")
                return
        self._refusal = f"the fork server has ended (exit code {self._process.wait()})"


def fork_over(connection: socket.socket, request: Request, fds: Sequence[int]) -> Forked:
    """Ask a server that is ready for a process.

    Raises:
        ForkServerLost: it has ended, or does not answer.
    """
    data = pickle.dumps(tuple(request))
    if len(data) > _MOST_BYTES:
        raise ForkServerLost(f"a request of {len(data)} bytes; at most {_MOST_BYTES} are sent")
    connection.settimeout(_ANSWER_S)
    _adopt_orphans(True)
    try:
        socket.send_fds(connection, [data], fds)
        answer = connection.recv(64)
    except OSError as exc:
        raise ForkServerLost(f"the fork server does not answer ({exc})") from exc
    finally:
        _adopt_orphans(False)
    if not answer:
        raise ForkServerLost("the fork server has ended")
    return Forked(int(answer))


def run_module(arguments: Sequence[str]) -> NoReturn:
    """Do as `python -m arguments` does, and end the process."""
    sys.argv = list(arguments)
    code = 0
    try:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    except SystemExit as exc:
        if isinstance(exc.code, str):
            sys.stderr.write(f"{exc.code}\n")
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except BaseException:  # noqa: BLE001 - as an interpreter does
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    ctypes.CDLL(None).fflush(None)  # what NCCL has printed by C's stdio, which an interpreter's end would write too
    os._exit(code)


def serve(fd: int, modules: Sequence[str]) -> None:
    """Import modules, say so, and fork a process for each request, until the other end is closed."""
    requests = socket.socket(fileno=fd)
    requests.set_inheritable(False)
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as exc:
            if exc.name is None or not module.startswith(exc.name):  # what it needs is missing: each fork says so
                raise
    gc.collect()
    gc.freeze()  # what is here stays: no fork need look through it
    try:
        requests.send(_READY + _unsafe().encode()[:1000])
    except OSError:  # nobody wants it any more
        return
    answer_requests(requests)


def answer_requests(requests: socket.socket) -> None:
    """Fork a process for each request, until the other end is closed."""
    while True:
        data, fds, _, _ = socket.recv_fds(requests, _MOST_BYTES, 16)
        if not data:
            return
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            try:
                pid = os.fork()
                if pid == 0:
                    requests.close()
                    os.close(reading)
                    os.close(writing)
                    _become(Request(*pickle.loads(data)), fds)
                os.write(writing, str(pid).encode())
            finally:  # where no process can be had it must not go on as a second server
                os._exit(0)
        os.close(writing)  # so that the end of a process that has written nothing is seen
        os.waitpid(between, 0)  # now it is a child of who asked
        answer = os.read(reading, 64)
        for each in (*fds, reading):
            os.close(each)
        if not answer:
            return  # no process could be made: who asked starts its own
        requests.send(answer)


def _become(request: Request, fds: list[int]) -> NoReturn:
    """Set up the process as an interpreter would be that is started so, and run its entry."""
    try:
        until_s = time.monotonic() + _ANSWER_S
        while os.getppid() != request.parent:
            if time.monotonic() > until_s:  # who asked has died meanwhile
                os._exit(1)
            time.sleep(0.001)
        os.setsid()
        for number, fd in enumerate(fds[:3]):
            os.dup2(fd, number)
        if request.kept is not None and request.kept != fds[3]:
            os.dup2(fds[3], request.kept)
        for fd in fds:
            if fd != request.kept and fd > 2:
                os.close(fd)
        if request.name:
            ctypes.CDLL(None).prctl(_PR_SET_NAME, request.name.encode()[:15], 0, 0, 0)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - until the end
        os.chdir(request.folder)
        os.environ.clear()
        os.environ.update(request.environ)
        signal.pthread_sigmask(signal.SIG_SETMASK, set(request.mask))
        module, _, name = request.entry.partition(":")
        entry: Callable[[Any], object] = getattr(importlib.import_module(module), name)
        entry(request.argument)
    except BaseException:  # noqa: BLE001 - nobody is above this frame
        traceback.print_exc()
    os._exit(1)


def _unsafe() -> str:
    """Say why a fork of this process could not be relied on: [Note: what may be forked]; empty: it can."""
    others = [each.name for each in threading.enumerate() if each is not threading.current_thread()]
    if others:
        return f"the modules have started threads: {', '.join(others)}"
    for link in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            if (file := str(link.readlink())).startswith(_DEVICES):
                return f"the modules have opened {file}"
    return ""


def fork_copy() -> socket.socket:
    """Have a fork of this process serve it as a fork server does, and return the connection; for a fork itself."""
    here, there = _socket_pair()
    if os.fork() == 0:
        here.close()
        try:
            answer_requests(there)
        finally:
            os._exit(0)
    there.close()
    return here


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # a request is a packet


def _adopt_orphans(is_on: bool) -> None:
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0):
        raise OSError("PR_SET_CHILD_SUBREAPER is refused")


if __name__ == "__main__":
    sys.argv[0] = __name__
    # The functions of the module, not of `__main__`, which a fork replaces.
    from netlayer.launch import fork_server

    fork_server.serve(int(sys.argv[1]), sys.argv[3:])

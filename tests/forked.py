"""Starts ranks and commands as forks of one process that has imported torch and the trainer.

A fresh interpreter takes some three seconds of a core to import what a rank needs, more than most tests' ranks then
compute. `netlayer.launch` itself is tested with fresh interpreters, in tests/netlayer, and so is what a command imports
and how it ends. Linux alone: elsewhere every process is fresh. How processes are forked: `netlayer.launch.fork_server`;
here is what the forks do.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn
from unittest import mock

from netlayer.launch import fork_server, launcher
from netlayer.launch.fork_server import Forked, ForkServer, Request
from netlayer.launch.rank import run_rank

_PRELOADED = (
    "torch._dynamo", "trainer.worker", "trainer.commands.train", "tests.trainer.layout_ranks",
    # What a rank imports once it meets the others, writes events and saves.
    "netlayer.init_method", "netlayer.observe.events.writer", "netlayer.store.redis_store", "pandas", "pyarrow.compute",
    "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp.sharded_grad_scaler",
)  # fmt: skip
_start_fresh = launcher._start
_server: ForkServer | None = None
_connection: socket.socket | None = None
"""Of a fork, to the copy of itself that forks its ranks."""


def _fork(request: Request, fds: Sequence[int]) -> Forked:
    global _server
    if _connection is not None:
        return fork_server.fork_over(_connection, request, fds)
    if _server is None:
        environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        _server = ForkServer(_PRELOADED, "tests", environ)
        atexit.register(_server.end)
    return _server.fork(request, fds)


def be_rank(arguments: list[str]) -> NoReturn:
    """Be a rank of a launcher; its stdin holds what to run."""
    import torch

    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # OpenMP read it when it was loaded
    sys.argv = ["-c", *arguments]
    sys.path[:] = json.loads(sys.stdin.buffer.readline())
    run_rank()
    os._exit(0)


def be_module(arguments: list[str]) -> NoReturn:
    """Be a command; the ranks that it launches are forks of what it is now."""
    global _connection
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _connection = fork_server.fork_copy()
    with forked_ranks():
        fork_server.run_module(arguments)


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
    mask = tuple(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    entry_name = f"{__name__}:{be_rank.__name__}"
    name = f"rank {environ['RANK']}"  # for `ps`: the kernel shows the server's environment
    request = Request(os.getpid(), entry_name, arguments, name, environ, str(Path.cwd()), mask, kept)
    return _fork(request, [stdin.fileno(), stdout.fileno(), stdout.fileno(), kept])


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
    kept: int | None = None,
) -> Forked | subprocess.Popen[bytes]:
    """Start `python -m module words` in a session of its own; ranks that it launches are forked too.

    Args:
        module: run as `__main__`; `tests.program` runs its first word as `python -c` does.
        words: its arguments.
        stdout: file that it writes to; `stderr` likewise.
        env: all its variables; None: those of this process.
        cwd: folder in which it runs.
        kept: descriptor that it has too, under the same number.
    """
    command = [module, *map(str, words)]
    environ = dict(os.environ if env is None else env)
    with Path(os.devnull).open("rb") as stdin:
        if sys.platform != "linux":
            return subprocess.Popen(
                [sys.executable, "-m", *command],
                stdin=stdin, stdout=stdout, stderr=stderr, env=environ, cwd=cwd, start_new_session=True,
                pass_fds=() if kept is None else (kept,),
            )  # fmt: skip
        entry = f"{__name__}:{be_module.__name__}"
        request = Request(os.getpid(), entry, command, "", environ, str(Path(cwd).absolute()), (), kept)
        fds = [stdin.fileno(), stdout.fileno(), stderr.fileno()]
        return _fork(request, fds if kept is None else [*fds, kept])


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

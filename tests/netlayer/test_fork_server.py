"""The process that forks others: what a fork is, when it may not be used, and what is known of one that is gone."""

from __future__ import annotations

import errno
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from netlayer.launch.fork_server import (
    Forked,
    ForkServer,
    ForkServerLost,
    Request,
    answer_requests,
    fork_over,
    run_module,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone")
ENTRY = f"{run_module.__module__}:{run_module.__name__}"
Starts = Callable[..., ForkServer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starts]:
    servers: list[ForkServer] = []

    def start_server(*modules: str) -> ForkServer:
        path = os.pathsep.join([*sys.path, str(tmp_path)])
        mark = secrets.token_hex(8)  # of its own: all that carry the mark of a lost server are ended
        servers.append(ForkServer(modules, "of a test", {**os.environ, "PYTHONPATH": path}, mark))
        return servers[-1]

    yield start_server
    for server in servers:
        server.end()


def fork(server: ForkServer, module: str, folder: Path, *arguments: str, **environ: str) -> tuple[Forked, Path]:
    """Fork a module that runs as a command does; return it and the file of its output."""
    request = Request(os.getpid(), ENTRY, [module, *arguments], "a name", {**os.environ, **environ}, str(folder))
    output = folder / "output"
    with Path(os.devnull).open("rb") as stdin, output.open("wb") as stdout:
        return server.fork(request, [stdin.fileno(), stdout.fileno(), stdout.fileno()]), output


def test_a_fork_is_a_command_of_its_own_with_its_environment_and_exit_code(start: Starts, tmp_path: Path) -> None:
    (tmp_path / "imported.py").write_text("import os\nPID = os.getpid()\n")
    (tmp_path / "command.py").write_text(
        "import imported, os, sys\n"
        "print(imported.PID != os.getpid(), os.getsid(0) == os.getpid(), os.getppid(), sys.argv[1:], __name__)\n"
        "print(os.environ['ONE'], os.getcwd(), sys.stdin.read())\n"
        "sys.exit(7)\n"
    )
    server = start("imported", "no_such_module_here")
    forked, output = fork(server, "command", tmp_path, "x", ONE="1")
    assert forked.wait(60) == 7
    assert output.read_text().splitlines() == [f"True True {os.getpid()} ['x'] __main__", f"1 {tmp_path} "]
    assert forked.poll() == 7


def test_a_fork_that_fails_or_is_killed_says_so(start: Starts, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise ValueError('a reason')\n")
    (tmp_path / "waits.py").write_text("import time\ntime.sleep(100)\n")
    server = start("json")
    failed, output = fork(server, "fails", tmp_path)
    assert failed.wait(60) == 1
    assert "ValueError: a reason" in output.read_text()
    killed, _ = fork(server, "waits", tmp_path)
    killed.send_signal(9)
    assert killed.wait(60) == -9


def test_forks_outlive_a_server_that_is_lost_before_the_next(start: Starts, tmp_path: Path) -> None:
    """Else ranks that run would be killed for one that cannot be started, and their node be blamed for it."""
    (tmp_path / "waits.py").write_text("import time\ntime.sleep(100)\n")
    server = start("json")
    forked, _ = fork(server, "waits", tmp_path)
    next_one = ForkServer(["json"], "of a test", os.environ, server.mark, server._sessions)
    for each in (server, next_one):
        os.kill(each.pid, signal.SIGKILL)
        with pytest.raises(ForkServerLost):
            fork(each, "waits", tmp_path)
    next_one.end()
    assert forked.poll() is None
    forked.send_signal(signal.SIGKILL)
    assert forked.wait(60) == -signal.SIGKILL


def test_a_server_that_can_make_no_process_says_so_at_once(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = os.fork()
    if server == 0:  # its process in between can fork no more, as at a limit of processes
        ours.close()
        fork_once, left = os.fork, [1]

        def limited() -> int:
            if not left:
                raise BlockingIOError(errno.EAGAIN, "no more processes")
            left.pop()
            return fork_once()

        os.fork = limited
        answer_requests(theirs)
        os._exit(0)
    theirs.close()
    request = Request(os.getpid(), ENTRY, ["json"], "", dict(os.environ), str(tmp_path))
    start_s = time.monotonic()
    with Path(os.devnull).open("r+b") as null, pytest.raises(ForkServerLost):
        fork_over(ours, request, [null.fileno()] * 3)
    assert time.monotonic() - start_s < 9  # it did not wait until nobody answers
    assert os.waitpid(server, 0)[1] == 0
    ours.close()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "threads"),
        ("raise SystemExit(3)", "exit code 3"),
        ("import no_such_module_here", "exit code 1"),
    ],
)
def test_what_must_not_be_forked_is_refused(text: str, reason: str, start: Starts, tmp_path: Path) -> None:
    (tmp_path / "imported.py").write_text(text + "\n")
    server = start("imported")
    until_s = time.monotonic() + 60
    while server.is_loading:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    assert reason in server.refusal
    with pytest.raises(ForkServerLost, match=reason):
        fork(server, "json.tool", tmp_path)

"""Functions that the ranks of test_launch.py run, in a module without pytest."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from netlayer.errors import CollectiveTimeout, ConfigError
from netlayer.launch.launcher import PASSED_ON, RankContext

FOREVER_S = 600


class Unpicklable(Exception):
    def __init__(self, text: str, extra: object) -> None:  # pickle would call it with one argument
        super().__init__(text)
        self.extra = extra

    def __reduce__(self) -> Any:
        raise TypeError("not this one")


class GoneInParent:
    """Unpickles only in a rank."""

    def __reduce__(self) -> Any:
        return _only_in_rank, ()


def _only_in_rank() -> GoneInParent:
    if "RANK" not in os.environ:
        raise RuntimeError("no rank here")
    return GoneInParent()


def describe(context: RankContext, *args: object) -> dict[str, object]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "EXTRA")
    return {
        "env": context.env,
        "args": args,
        "environ": {name: os.environ.get(name) for name in names},
        "torch": "torch" in sys.modules,
        "stdin": sys.stdin.read() + os.read(0, 1).decode(),
        "session": os.getsid(0) == os.getpid(),
    }


def print_everywhere(context: RankContext) -> None:
    print("from python", context.env.rank)
    print("to stderr", file=sys.stderr)
    os.write(1, b"from a file descriptor\n")
    ctypes.CDLL(None).printf(b"from C\n")
    os.kill(os.getpid(), signal.SIGKILL)  # nothing is flushed on the way out


def report_steps(context: RankContext, steps: int) -> int:
    for step in range(steps):
        context.report((step, "x" * 1000))
    return steps


def return_bytes(context: RankContext, num_bytes: int) -> bytes:
    return bytes([context.env.rank]) * num_bytes


def fail(context: RankContext, culprit: int, how: str) -> object:
    """The culprit fails in the way named; the others wait for it in vain."""
    if context.env.rank != culprit:
        time.sleep(FOREVER_S)
    print("last words")
    ways: dict[str, Callable[[], object]] = {
        "raise": _raise,
        "unpicklable": _raise_unpicklable,
        "config": _raise_config,
        "return a lock": threading.Lock,
        "return what the parent cannot have": GoneInParent,
        "report what the parent cannot have": lambda: context.report(GoneInParent()),
        "exit": lambda: os._exit(3),
        "exit 0": lambda: os._exit(0),
        "sys.exit": lambda: sys.exit(0),
        "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
        "real-time signal": lambda: os.kill(os.getpid(), signal.SIGRTMIN + 5),
        "fork and report": lambda: _report_from_fork(context),
    }
    return ways[how]()


def _raise() -> None:
    raise ValueError("boom\nin two lines")


def _raise_unpicklable() -> None:
    raise Unpicklable("a lock inside", threading.Lock())


def _raise_config() -> None:
    raise ConfigError("job.parallel.tp", 3, "must divide 8", "choose 2 or 4")


def _report_from_fork(context: RankContext) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            context.report("mixed")
        except RuntimeError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    raise ValueError("refused in the fork")


def die_beside_a_complaint(context: RankContext, folder: str, complaint: str) -> None:
    """Rank 1 is killed; rank 0 has complained of it (in words of gloo) before its launcher can know."""
    started = Path(folder, "complains")
    if context.env.rank == 0:
        started.touch()
        raise RuntimeError(complaint)
    wait_for(started)
    os.kill(os.getpid(), signal.SIGKILL)


def close_before_failing(context: RankContext, folder: str) -> None:
    """Rank 0 fails, and tells its peer so in a `finally` that lasts: the peer's complaint comes first."""
    closed = Path(folder, "closed")
    if context.env.rank == 1:
        wait_for(closed)
        raise ConnectionResetError("rank 0 went away")
    try:
        raise ValueError("the cause")
    finally:
        closed.touch()
        time.sleep(0.5)


def ignore_sigterm(context: RankContext, folder: str) -> None:
    ready = Path(folder, "ready")
    if context.env.rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ready.touch()
        time.sleep(FOREVER_S)
    wait_for(ready)
    raise ValueError("now end the other")


def ignore_signals_and_report(context: RankContext) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    context.report("ready")
    time.sleep(FOREVER_S)


def with_grandchildren(context: RankContext, folder: str, returns: bool) -> None:
    """Starts a process in its own group, one that left it, and one forked that holds the rank's pipe open."""
    sleep = [sys.executable, "-c", f"import time; time.sleep({FOREVER_S})"]
    plain = subprocess.Popen(sleep)
    daemon = subprocess.Popen(sleep, start_new_session=True)
    fork = os.fork()
    if fork == 0:
        time.sleep(FOREVER_S)
    name = f"pids{context.env.rank}"
    Path(folder, f".{name}").write_text(f"{os.getpid()} {plain.pid} {daemon.pid} {fork}")
    Path(folder, f".{name}").rename(Path(folder, name))
    plain.returncode = daemon.returncode = 0  # or their objects would warn that they still run
    if not returns:
        time.sleep(FOREVER_S)


def wait_for(file: Path) -> None:
    deadline_s = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline_s, f"{file} did not appear"
        time.sleep(0.01)


_pools: list[ThreadPoolExecutor] = []


def leave_a_pool(context: RankContext) -> int:
    """Idle workers of an executor that nobody shuts down, as a compiler leaves them."""
    _pools.append(ThreadPoolExecutor(2))
    return _pools[0].submit(lambda: context.env.rank).result()


def wait_to_be_asked(context: RankContext) -> int:
    """Return the signal that a launcher with `asks_first` sends; it was blocked since the process started."""
    context.report("ready")
    return signal.sigwait(PASSED_ON)


def never_end(context: RankContext) -> None:
    context.report("ready")
    time.sleep(FOREVER_S)


def fail_from_a_thread(context: RankContext) -> None:
    """Hang on all ranks; all but the last one report from a thread that the last one is the culprit."""
    if context.env.rank < context.env.world_size - 1:
        error = CollectiveTimeout(f"rank {context.env.world_size - 1} holds up step 3", silent=(1,))
        threading.Timer(0.2, lambda: context.fail(error)).start()
    time.sleep(FOREVER_S)

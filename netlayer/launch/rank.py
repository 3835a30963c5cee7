"""One rank of many: which one is this process (`detect`), and what runs in a process that `launch` started.

A rank learns its place from its environment, whoever started it, and tells its launcher of progress, of its result or
of its failure through one pipe. Not covered: starting and ending ranks (`launch`) and their rendezvous.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import faulthandler
import json
import os
import pickle
import re
import runpy
import signal
import struct
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from netlayer import log
from netlayer.errors import EXIT_USAGE, CollectiveFailed, ConfigError, NetlayerError, RankFailed, StoreError

# Every process that a rank starts inherits this, so that those which left its process group are found as well.
LAUNCH_ID = "NETLAYER_LAUNCH_ID"

# What a rank sends: a header (kind, time.monotonic_ns(), number of bytes that follow), then a pickle. The clock is one
# for all processes of a machine.
HEADER = struct.Struct("!cqQ")
MESSAGE, RESULT, FAILURE = b"m", b"r", b"f"


@dataclass(frozen=True)
class RankEnv:
    """Rank and world size of a process; the defaults are those of a process that no launcher started."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launcher: Literal["netlayer", "torchrun", "slurm", "openmpi", "environ", "none"] = "none"


def detect(environ: Mapping[str, str]) -> RankEnv | None:
    """Read which rank this process is from what its launcher set; None where no launcher did.

    RANK and its companions come first (torchrun, `launch`, or set by hand: "environ"), because torchrun often runs in
    a Slurm step; then OpenMPI, because mpirun does too; then a Slurm step of more than one task. A batch script has
    SLURM_PROCID=0 and the tasks of the whole job as well but is one process: only srun sets SLURM_STEP_ID.

    Raises:
        ConfigError: a variable is missing, malformed or contradicts another one.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        launcher: Literal["torchrun", "netlayer", "environ"] = "environ"
        if "TORCHELASTIC_RUN_ID" in environ:
            launcher = "torchrun"
        elif LAUNCH_ID in environ:
            launcher = "netlayer"
        return RankEnv(*_read_ranks(environ, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), launcher)
    if "OMPI_COMM_WORLD_RANK" in environ:
        return RankEnv(*_read_ranks(environ, *(f"OMPI_COMM_WORLD_{name}" for name in _OMPI_NAMES)), "openmpi")
    if "SLURM_PROCID" in environ and ("SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ):
        return _read_slurm(environ)
    return None


def number(environ: Mapping[str, str]) -> int | None:
    """Return this process's rank; None if no launcher started it, or its variables are invalid."""
    try:
        env = detect(environ)
    except ConfigError:  # reported where the rank is needed
        return None
    return None if env is None else env.rank


def speaks(environ: Mapping[str, str]) -> bool:
    """Return True if this process prints messages that are the same on all ranks: rank 0, or a process without one."""
    return not number(environ)


def end_rank(line: str, code: int) -> NoReturn:
    """Exit with a line on stderr, for an error that all ranks have alike; usually only rank 0 prints it.

    With a usage error the other ranks wait first: the launcher sees rank 0 fail and ends them meanwhile. torchrun also
    shows the line in its summary.
    """
    if not speaks(os.environ) and code == EXIT_USAGE:
        time.sleep(_FIRST_SPEAKS_S)
    _write_last_line(line)
    sys.exit(code)


def _write_last_line(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):  # stderr has it
            Path(file).write_text(json.dumps({"message": message}), encoding="utf-8")


def _end_at_once(error: NetlayerError) -> None:
    """Exit with the error on stderr, from any thread and without waiting for the other threads."""
    _write_last_line(f"error: {error}")
    os._exit(error.exit_code)


def _ignore(message: object) -> None:
    """Discard a progress message."""


@dataclass(frozen=True)
class RankContext:
    """First argument of a rank's function: its rank, and functions that send progress or a failure to the launcher.

    `report(message)` sends a small picklable object to `on_message` of `launch`. It blocks while the launcher is busy
    with earlier messages, and works only in the rank's own process, not in one forked from it.

    `fail(error)` ends this process with an error that names the culprit. Callable from any thread, for a main thread
    that hangs where no exception reaches it.
    """

    env: RankEnv
    report: Callable[[object], None] = _ignore
    fail: Callable[[NetlayerError], None] = _end_at_once


class Blame(enum.IntEnum):
    """Class of a failure, ordered by closeness to the root cause; see the note at `Failure`."""

    KILLED = 0
    PLAIN = 1
    HUNG = 2
    NAMED = 3
    LOST_PEER = 4


@dataclass(frozen=True)
class Failure:
    """A sign that something went wrong in a rank.

    [Note: root cause] One failure makes others: peers of a dead rank see their connections close and fail too, and
    their reports may arrive first. So after the first sign the launcher waits a moment for more and blames, in order:

    1. KILLED, by SIGKILL: that comes from outside (an operator, the kernel out of memory), never from a peer;
    2. PLAIN, an exception or a death that does not look like a lost peer;
    3. HUNG, reported by a waiting rank about another rank that is still alive (`RankContext.fail`);
    4. NAMED, an exception that names the lost peer: CollectiveFailed with culprits;
    5. LOST_PEER, an exception that names none: ConnectionError, EOFError, TimeoutError, StoreError, gloo, NCCL errors.

    Within a class the earliest wins. An exception has the time at which it left `target`; a death has the time of the
    last poll that saw the rank alive, so it is never dated too late. While only LOST_PEER failures are known the
    launcher waits longer, since the cause may still be in a slow `finally`. A rank that hangs without ending does not
    report anything itself; only the HUNG reports of its peers tell it from them.
    """

    rank: int
    blame: Blame
    at_ns: int
    reason: str
    traceback: str
    error: bytes | None = None

    def precedence(self) -> tuple[int, int, int]:
        return self.blame, self.at_ns, self.rank


_FIRST_SPEAKS_S = 5.0
_OMPI_NAMES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
_SLURM_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def _read_ranks(
    environ: Mapping[str, str], rank: str, size: str, local: str, local_size: str
) -> tuple[int, int, int, int]:
    world_size = _read_int(environ, size, minimum=1)
    local_world_size = _read_int(environ, local_size, minimum=1, most=(size, world_size))
    return (
        _read_int(environ, rank, most=(f"{size} - 1", world_size - 1)),
        world_size,
        _read_int(environ, local, most=(f"{local_size} - 1", local_world_size - 1)),
        local_world_size,
    )


def _read_int(environ: Mapping[str, str], name: str, minimum: int = 0, most: tuple[str, int] | None = None) -> int:
    text = environ.get(name)
    remedy = "set all variables of the launcher, or unset them all"
    if text is None:
        raise ConfigError(name, None, "is not set, though other variables of its launcher are", remedy)
    if not text.isascii() or not text.isdigit() or int(text) < minimum:
        raise ConfigError(name, repr(text), f"must be a whole number of at least {minimum}", remedy)
    if most is not None and int(text) > most[1]:
        raise ConfigError(name, repr(text), f"must be at most {most[0]} = {most[1]}", remedy)
    return int(text)


def _read_slurm(environ: Mapping[str, str]) -> RankEnv | None:
    """A task of an srun step; None for a step of one task, such as an interactive shell, which may launch its own."""
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    world_size = _read_int(environ, size_name, minimum=1)
    if world_size == 1:
        return None
    rank = _read_int(environ, "SLURM_PROCID", most=(f"{size_name} - 1", world_size - 1))
    name, counts = _slurm_tasks_per_node(environ, world_size)
    if sum(counts) != world_size:
        raise ConfigError(
            name, repr(environ[name]), f"must add up to {size_name} = {world_size}", "start the ranks with srun"
        )
    # The node matters only where nodes hold different numbers of tasks.
    same = len(set(counts)) == 1
    node = 0 if same else _read_int(environ, "SLURM_NODEID", most=("number of nodes - 1", len(counts) - 1))
    local_rank = _read_int(environ, "SLURM_LOCALID", most=(f"{name} - 1", counts[node] - 1))
    return RankEnv(rank, world_size, local_rank, counts[node], "slurm")


def _slurm_tasks_per_node(environ: Mapping[str, str], world_size: int) -> tuple[str, list[int]]:
    """The variable that says how many tasks each node of the step has, and the numbers: "2(x3),1" is [2, 2, 2, 1]."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if name not in environ:
            continue
        parts = [_SLURM_COUNT.fullmatch(part) for part in environ[name].split(",")]
        if not all(parts):
            raise ConfigError(name, repr(environ[name]), "must read like 2(x3),1", "start the ranks with srun")
        return name, [int(part[1]) for part in parts if part is not None for _ in range(int(part[2] or 1))]
    # An option of the user rather than what Slurm did with it: nodes are filled, the last one gets the rest.
    name = "SLURM_NTASKS_PER_NODE"
    each = _read_int(environ, name, minimum=1)
    full, rest = divmod(world_size, each)
    return name, [each] * full + [rest] * bool(rest)


_importing_main = False


def refuse_while_importing_main() -> None:
    """A script without the guard would launch again in every rank, without end."""
    if _importing_main:
        rule = "was called while a rank imported the script"
        raise ConfigError("launch()", None, rule, 'put the call under if __name__ == "__main__":')


_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_IOLBF = 1  # stdio.h


def run_rank() -> None:
    """Entry of a rank's process: stdin holds what to run, stdout and stderr are its log already."""
    report_fd, launcher_pid = int(sys.argv[1]), int(sys.argv[2])
    # First of all: a launcher that is killed now would leave this process alone.
    _die_with(launcher_pid)
    _flush_every_line()
    faulthandler.enable(file=2)
    # Where was it when its peer failed? Written by C code even inside a collective; then the default action ends it.
    for signum in (signal.SIGTERM, signal.SIGUSR2):  # the second where the launcher `asks_first`
        faulthandler.register(signum, file=2, chain=True)
    # A program that the rank starts and leaves behind would hold the pipe open, and the launcher would wait for it.
    os.set_inheritable(report_fd, False)
    sys.argv, main, verbosity, work = pickle.load(sys.stdin.buffer)
    # stdin has served its purpose: what reads from it later gets the end of a file, and does not wait.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    env = detect(os.environ)
    assert env is not None
    log.configure(verbosity, env.rank)
    reporter = _Reporter(report_fd)
    try:
        result = _run_work(work, main, RankContext(env, reporter.report, reporter.fail))
    except BaseException as exc:  # noqa: BLE001 - SystemExit too: whatever ended the target, the launcher must hear
        with contextlib.suppress(OSError):  # the log may lie on a disk that is full
            traceback.print_exc()
        reporter.send(FAILURE, _describe(exc))
        _leave(1)
    # The last message: the launcher takes a rank that ends without one for dead.
    reporter.send(RESULT, result)
    _leave(0)


def _leave(code: int) -> NoReturn:
    """End as a program ends, but without tearing the interpreter down, as multiprocessing's children do.

    A thread of torch's gloo drops a finished work some time after `wait()` has returned, and takes the GIL for it; in
    an interpreter that is being torn down, that aborts the process: "terminate called without an active exception".
    """
    # What tells idle workers to end (those of concurrent.futures, and so of the compiler) runs before they are joined.
    for call in reversed(getattr(threading, "_threading_atexits", [])):
        call()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def _run_work(work: bytes, main: tuple[str, str] | None, context: RankContext) -> bytes:
    """Call a rank's pickled function with its context, and return its pickled result.

    Args:
        work: (function, arguments), pickled.
        main: how to import the launching program's `__main__`, which the function may come from; None: not needed.

    Raises:
        TypeError: the result cannot be pickled.
    """
    if main is not None:
        _import_main(*main)
    target, args = pickle.loads(work)
    result = target(context, *args)
    try:
        return pickle.dumps(result)
    except Exception as exc:
        raise TypeError(f"the return value of {target.__qualname__} cannot be pickled: {reason_of(exc)}") from exc


def _import_main(kind: str, where: str) -> None:
    """Import the launching program's `__main__` under that name, as multiprocessing does: pickles name what is in it.

    Args:
        kind: "module", or a file.
        where: the module's name, or the file's path.
    """
    global _importing_main
    _importing_main = True
    name = "__mp_main__"
    if kind == "module":
        names = runpy.run_module(where, run_name=name, alter_sys=True)
    else:
        names = runpy.run_path(where, run_name=name)
    module = types.ModuleType(name)
    module.__dict__.update(names)
    sys.modules["__main__"] = sys.modules[name] = module
    _importing_main = False


class _Reporter:
    """A rank's end of the pipe to its launcher."""

    def __init__(self, fd: int) -> None:
        self._fd, self._pid, self._lock = fd, os.getpid(), threading.Lock()

    def report(self, message: object) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("report() was called in a process forked from the rank: messages would mix")
        self.send(MESSAGE, pickle.dumps(message))

    def fail(self, error: NetlayerError) -> None:
        """Send the error to the launcher and exit, see `RankContext.fail`."""
        described = {"blame": Blame.HUNG, "reason": reason_of(error), "traceback": "", "error": _pickle_error(error)}
        self.send(FAILURE, pickle.dumps(described))
        with contextlib.suppress(OSError, ValueError):
            faulthandler.dump_traceback(2)  # into the log: where this rank itself was
        os._exit(1)

    def send(self, kind: bytes, body: bytes) -> None:
        remaining = memoryview(HEADER.pack(kind, time.monotonic_ns(), len(body)) + body)
        with self._lock:
            while remaining:
                remaining = remaining[os.write(self._fd, remaining) :]


def _die_with(launcher_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends (`launch` does not return before that).

    The keeper does the same and more, but later, and is itself a process that can be killed.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher_pid:  # it died before we asked
        os._exit(1)


def _flush_every_line() -> None:
    """Flush output at every line, of Python and C (NCCL_DEBUG), so that the log is complete after a SIGKILL."""
    sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    sys.stderr.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    if sys.platform == "linux":
        import ctypes

        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _IOLBF, ctypes.c_size_t(0))


def _describe(exc: BaseException) -> bytes:
    """Pickle the fields of a `Failure` as text, since the exception itself may not be picklable."""
    below_us = exc.__traceback__ and exc.__traceback__.tb_next
    text = "".join(traceback.format_exception(type(exc), exc, below_us))
    blame = Blame.LOST_PEER if _looks_like_lost_peer(exc) else Blame.PLAIN
    if isinstance(exc, CollectiveFailed) and exc.culprits:
        blame = Blame.NAMED
    return pickle.dumps({"blame": blame, "reason": reason_of(exc), "traceback": text, "error": _pickle_error(exc)})


def reason_of(exc: BaseException) -> str:
    return "".join(traceback.format_exception_only(exc)).strip()


def _pickle_error(exc: BaseException) -> bytes | None:
    if isinstance(exc, NetlayerError) and not isinstance(exc, RankFailed):  # whose rank is of another launch
        with contextlib.suppress(Exception):  # then the launcher raises RankFailed, which needs only text
            body = pickle.dumps(exc)
            pickle.loads(body)
            return body
    return None


_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket closed|timed out"
    r"|ncclRemoteError|remote process exited|communicator was aborted",
    re.IGNORECASE,
)


def _looks_like_lost_peer(exc: BaseException | None) -> bool:
    """Return True if the exception, or one of its causes, looks like the loss of a peer."""
    while exc is not None:
        if isinstance(exc, ConnectionError | EOFError | TimeoutError | StoreError):
            return True
        if isinstance(exc, RuntimeError | OSError) and _LOST_PEER.search(reason_of(exc)):  # torch raises these
            return True
        exc = exc.__cause__
    return False

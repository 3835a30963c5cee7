"""Training processes of one node: started, looked at, read, and ended, with all that they started.

Each has a session of its own and a log of its own; where the run keeps survivors it may outlive an incarnation
(`trainer.inprocess`), with all of its node or with none, else it is one's. It is a fork of a process that has torch and
the trainer imported, where there is one (`Warm`). What a rank started dies with it, daemons too, by a mark in the
environment; where the executor itself is killed, the keeper of `netlayer.launch` ends them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from netlayer.environ import code_digest
from netlayer.launch.fork_server import Forked, ForkServer, ForkServerLost, Request, run_module
from netlayer.launch.keeper import kill_strays
from trainer import inprocess
from trainer.resilience import progress
from trainer.resilience.messages import RankStatus

logger = logging.getLogger(__name__)

PRELOADED = ("torch._dynamo", "trainer.worker", "trainer.commands.train", "pandas")
"""Modules that a process of `netlayer train` has before its first step; pandas if it is there, for Arrow wants it."""
_MARK = "NETLAYER_RUN_MARK"
_BLOCKED_S = 10.0  # in the kernel, before it is told: a disk is slow now and then
_KILLED_S = 10.0
_KEEPER = "import sys; sys.path[:0] = [sys.argv.pop()]; from netlayer.launch.keeper import keep; keep()"
_MAX_READ = 1 << 18  # bytes of one log at a time
LOAD_S = 300.0
"""Seconds that a node's imports may take; file systems can be slow."""
_MOST_SERVERS = 3


@dataclass
class _Process:
    rank: int
    popen: subprocess.Popen[bytes] | Forked
    progress: Path
    started_s: float
    orders: int | None = None  # pipe to `trainer.inprocess`
    told_s: float | None = None  # when it was told to go on, until it has begun to
    was_signalled: bool = False
    alive_ns: int = 0
    ended_ns: int | None = None
    exit_code: int | None = None
    blocked_since_s: float | None = None


class LogReader:
    """New whole lines of a file that grows; what was in it before is not read."""

    def __init__(self, path: Path, rank: int | None) -> None:
        self.rank = rank
        self._path = path
        self._rest = b""
        with contextlib.suppress(OSError):
            self._at = path.stat().st_size
            return
        self._at = 0

    def lines(self) -> Iterator[str]:
        """Lines that came since the last call; what is not text is shown escaped."""
        try:
            with self._path.open("rb") as file:
                if self._at > os.fstat(file.fileno()).st_size:  # truncated, or another file of that name
                    self._at, self._rest = 0, b""
                file.seek(self._at)
                data = file.read(_MAX_READ)
        except OSError:
            return
        self._at += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-_MAX_READ:]
        for line in whole:
            yield line.decode(errors="backslashreplace")


class KernelLog:
    """New messages of the kernel, from `/dev/kmsg` or a file.

    Args:
        source: `auto`, `off`, or a path.

    `skipped` says why nothing is read; empty: it is.
    """

    def __init__(self, source: str) -> None:
        self.skipped = ""
        self._kmsg: int | None = None
        self._file: LogReader | None = None
        if source == "off":
            self.skipped = "job.resilience.kernel_log is off"
        elif source != "auto":
            self._file = LogReader(Path(source), None)
        else:
            try:
                self._kmsg = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                os.lseek(self._kmsg, 0, os.SEEK_END)
            except OSError as exc:
                self.skipped = f"/dev/kmsg cannot be read ({exc.strerror})"

    def lines(self) -> Iterator[str]:
        if self._file is not None:
            yield from self._file.lines()
        if self._kmsg is None:
            return
        for _ in range(1000):
            try:
                record = os.read(self._kmsg, 8192)
            except BrokenPipeError:  # overwritten before it was read: the next one is
                continue
            except OSError:  # nothing new
                return
            yield record.decode(errors="backslashreplace").partition(";")[2].partition("\n")[0]


class Warm:
    """Process of a node that has torch and the trainer imported, and forks what the node starts.

    One that is lost (killed for memory, say) is started again, for the next start, three times at most; where it forks
    nothing, whatever is started is a fresh interpreter.

    Args:
        modules: that it imports; none: there is no such process.
        label: shown in its command line.
        environ: of the training processes, as far as all have the same.
    """

    def __init__(self, modules: Sequence[str], label: str, environ: Mapping[str, str]) -> None:
        self.mark = secrets.token_hex(8)
        """In the environment that the kernel shows of it and of all its forks."""
        self._modules, self._label, self._environ = modules, label, environ
        self._server: ForkServer | None = None
        self._sessions = set[int]()  # of what was forked: it goes on when a server is lost
        self._num_started = 0
        self.code = ""
        """Digest of the files that it has loaded, or a fresh interpreter would load; empty: they cannot be read."""
        self._start()

    def _start(self) -> None:
        self._server = None
        self.code = _code_digest()  # before the imports: what changes during them is seen at the next look
        self._loading_s = time.monotonic()
        if self._modules and self._num_started < _MOST_SERVERS:
            self._num_started += 1
            self._server = ForkServer(self._modules, self._label, self._environ, self.mark, self._sessions)

    @property
    def pids(self) -> list[int]:
        """Its own process id, if it is there."""
        return [self._server.pid] if self._server else []

    @property
    def is_loading(self) -> bool:
        """Whether it will fork, and does not yet."""
        if self._server is None or not self._server.is_loading:
            return False
        if time.monotonic() - self._loading_s < LOAD_S:
            return True
        logger.warning("imports are not done after %g s: what is started is not forked", LOAD_S)
        self.end()
        return False

    def start(
        self,
        command: Sequence[str],
        name: str,
        environ: Mapping[str, str],
        stdout: IO[bytes],
        stderr: IO[bytes],
        stdin: int | None = None,
    ) -> subprocess.Popen[bytes] | Forked:
        """Start `python -m command` in a session of its own: as a fork, or, where that cannot be, afresh.

        Args:
            command: module and arguments.
            name: of the process, where it is a fork.
            environ: all its variables.
            stdin: descriptor; None: there is nothing to read.
        """
        if self._server is not None and not self._server.is_loading:
            entry = f"{run_module.__module__}:{run_module.__name__}"
            try:
                request = Request(os.getpid(), entry, list(command), name, dict(environ), str(Path.cwd()))
                with Path(os.devnull).open("rb") as null:
                    descriptors = [null.fileno() if stdin is None else stdin, stdout.fileno(), stderr.fileno()]
                    return self._server.fork(request, descriptors)
            except (ForkServerLost, OSError) as exc:  # the folder may be gone, too
                logger.warning("started afresh, not forked: %s", exc)
                self.end()
                self._start()
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=stdout,
            stderr=stderr,
            env=dict(environ),
            start_new_session=True,
        )

    def reload_if_changed(self) -> bool:
        """Have it import anew where files of our packages have changed since it did; True: they have.

        A fork that loads a module of its own else mixes the two, and a node that comes later has the new ones alone.
        """
        code = _code_digest()
        if code in ("", self.code):
            return False
        logger.warning("files of our packages have changed (%s, before %s): they are loaded anew", code, self.code)
        self.code = code
        if self._server is not None:
            self.end()
            self._num_started -= 1  # it was not lost
            self._start()
        return True

    def end(self) -> None:
        """End it; its forks go on."""
        if self._server is not None:
            self._server.end()
            self._server = None


class TrainingProcesses:
    """All training processes of a node in one incarnation, and those that go on in the next.

    Args:
        folder: of the node, for logs and progress.
        incarnation: number of the start.
        now_ns: clock of what is told of them, ns since 1970.
        warm: what starts them; None: all are fresh.
    """

    def __init__(
        self,
        folder: Path,
        incarnation: int,
        now_ns: Callable[[], int] = time.time_ns,
        warm: Warm | None = None,
    ) -> None:
        self.incarnation = incarnation
        self.readers: list[LogReader] = []
        self.is_draining = self.is_killed = self.is_suspended = False
        self.why_fresh = ""
        """Reason why none of them goes on, though they were asked to; empty: they do, or were not asked."""
        self._command: Sequence[str] = ()
        self._environ: Mapping[str, str] = {}
        self._keeps = False
        self._folder, self._now_ns = folder, now_ns
        self._warm = warm or Warm((), "", {})
        self._mark = self._warm.mark
        self._processes: list[_Process] = []
        self._keeper: subprocess.Popen[bytes] | None = None

    def start(
        self, command: Sequence[str], ranks: Sequence[int], environ: Mapping[str, str], *, keeps: bool = False
    ) -> None:
        """Start a process a rank.

        Args:
            command: module and arguments.
            ranks: global ranks, in order of their local ranks.
            environ: in which RANK and LOCAL_RANK are set for each.
            keeps: they can be suspended, and go on.
        """
        self._command, self._environ, self._keeps = command, environ, keeps
        self._folder.mkdir(parents=True, exist_ok=True)
        self._start_keeper()
        for local, rank in enumerate(ranks):
            self._processes.append(self._begin(local, rank))

    def suspend(self, limit_s: float, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Have them leave the training and wait for the next start, and kill what they have left; twice is once.

        Where one of them has ended, or does not wait within the limit, all are killed, and `why_fresh` is set: a node
        whose processes have different pasts might not agree in what torch counts in each.

        Args:
            meanwhile: called again and again while that takes its time.
        """
        if self.is_suspended or self.is_killed:
            return
        if not self._keeps:
            self.kill(meanwhile)
            return
        self._poll()
        for process in self._processes:
            if process.exit_code is None:
                process.was_signalled = True
                _send(process, f"{inprocess.LEAVE}\n")
        until_s = time.monotonic() + limit_s
        while self._are_awaited() and time.monotonic() < until_s:
            meanwhile()
            time.sleep(0.02)
        self._poll()
        if all(self._waits(each) for each in self._processes):
            kill_strays(self._mark, [*self._warm.pids, *(each.popen.pid for each in self._processes)])
            self.is_suspended = True
            return
        reasons = [reason for each in self._processes if (reason := self._why_not_kept(each, limit_s))]
        self.why_fresh = "; ".join(reasons[:2])
        logger.info("none of the processes is kept: %s", self.why_fresh)
        self.kill(meanwhile)

    def _are_awaited(self) -> bool:
        """Whether one may yet come to wait for the next start, and none has ended, which decides for all."""
        self._poll()
        if any(each.popen.poll() is not None for each in self._processes):
            return False
        return not all(self._waits(each) for each in self._processes)

    def _why_not_kept(self, process: _Process, limit_s: float) -> str:
        """Return why a process cannot go on; empty: it waits, or is only not so far because another one has ended."""
        latest, code = progress.read(process.progress), process.popen.poll()
        if latest is not None and latest.why_ends:
            return f"rank {process.rank}: {latest.why_ends}"
        if code is not None:
            return f"rank {process.rank} has ended with exit code {code}"
        is_late = not self._waits(process) and all(each.popen.poll() is None for each in self._processes)
        return f"rank {process.rank} does not wait after {limit_s:g} s" if is_late else ""

    def go_on(self, incarnation: int, ranks: Sequence[int], environ: Mapping[str, str]) -> None:
        """Start the next incarnation: in the processes that wait for it, or where one does not, in fresh ones alone."""
        are_kept = all(self._waits(each) for each in self._processes)
        pids = [each.popen.pid for each in self._processes]
        logger.info(
            "kept in incarnation %d: %s", incarnation, pids if are_kept else "none, for one has ended meanwhile"
        )
        if not are_kept:
            self.kill()
        self.incarnation, self._environ = incarnation, environ
        self.is_draining = self.is_suspended = self.is_killed = False
        before, processes = self._keeper, self._processes
        self.readers, self._processes = [], []
        self._start_keeper()
        if before is not None:  # only now: one of them has each process at any time
            before.kill()
            before.communicate()
        for local, rank in enumerate(ranks):
            start = self._tell_to_go_on(processes[local], local, rank) if are_kept else self._begin(local, rank)
            self._processes.append(start)

    def replace_silent(self, limit_s: float) -> None:
        """Start those afresh that were told to go on, and have ended or not begun within the limit.

        The others have begun, and peers may have met them: they stay. None of them has had windows in the memory of
        peers, so that a fresh one agrees with them in what torch counts.
        """
        for local, process in enumerate(self._processes):
            if process.told_s is None or process.progress.exists():
                continue
            if process.popen.poll() is not None or time.monotonic() - process.told_s > limit_s:
                logger.warning("process %d does not go on: rank %d is started afresh", process.popen.pid, process.rank)
                self._kill(process)
                wait_until(lambda popen=process.popen: popen.poll() is not None, lambda: None)  # type: ignore[misc]
                _close_orders(process)
                self.readers = [reader for reader in self.readers if reader.rank != process.rank]
                self._processes[local] = self._begin(local, process.rank)

    def _start_keeper(self) -> None:
        root = str(Path(__file__).parents[2])
        self._keeper = subprocess.Popen(
            [sys.executable, "-P", "-c", _KEEPER, self._mark, root],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _begin(self, local: int, rank: int) -> _Process:
        """Start a fresh process of a rank."""
        environ, log, progress_file = self._prepare(local, rank)
        command, orders, theirs = self._command, None, None
        if self._keeps:
            command = (inprocess.__name__, *command)
            theirs, orders = os.pipe()
            os.set_blocking(orders, False)
        try:
            with log.open("ab") as stdout:
                popen = self._warm.start(command, f"rank {rank}", environ, stdout, stdout, theirs)
        finally:
            if theirs is not None:
                os.close(theirs)
        self._list_for_keeper(popen.pid)
        return _Process(rank, popen, progress_file, time.monotonic(), orders, alive_ns=self._now_ns())

    def _tell_to_go_on(self, process: _Process, local: int, rank: int) -> _Process:
        """Have a process that waits go on as this rank, or start one afresh where it cannot be told."""
        environ, log, progress_file = self._prepare(local, rank)
        self._list_for_keeper(process.popen.pid)
        now_s = time.monotonic()
        kept = _Process(rank, process.popen, progress_file, now_s, process.orders, now_s, alive_ns=self._now_ns())
        if not _send(kept, json.dumps({**environ, inprocess.LOG: str(log)}) + "\n"):
            kept.told_s = -math.inf  # it is replaced at the next look
        return kept

    def _prepare(self, local: int, rank: int) -> tuple[dict[str, str], Path, Path]:
        """Return the variables, the log and the file of progress of a rank's process; the log is read from now on."""
        log = self._folder / f"rank{rank:05d}.{self.incarnation:04d}.log"
        progress_file = self._folder / f"rank{rank:05d}.progress"
        progress_file.unlink(missing_ok=True)
        own = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            progress.VARIABLE: str(progress_file),
            _MARK: self._mark,
        }
        self.readers.append(LogReader(log, rank))
        return {**self._environ, **own}, log, progress_file

    def _list_for_keeper(self, pid: int) -> None:
        assert self._keeper is not None
        assert self._keeper.stdin is not None
        with contextlib.suppress(OSError):
            self._keeper.stdin.write(b"%d\n" % pid)
            self._keeper.stdin.flush()

    def _waits(self, process: _Process) -> bool:
        """Whether a process has left the training, and waits for the next start."""
        if not self._keeps or process.told_s is not None or process.popen.poll() is not None:
            return False
        latest = progress.read(process.progress)
        return latest is not None and latest.waits

    def _kill(self, process: _Process) -> None:
        if process.popen.poll() is not None:
            return  # its id may be another's by now; what it has left is found by the mark
        if process.exit_code is None:
            process.was_signalled = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.popen.pid, signal.SIGKILL)

    @property
    def are_ended(self) -> bool:
        self._poll()
        return all(process.exit_code is not None for process in self._processes)

    def statuses(self) -> list[RankStatus]:
        """Return the status of each process."""
        self._poll()
        return [self._status(process) for process in self._processes]

    def wait(self, seconds: float) -> None:
        """Wait so long, or until one of them ends: which of several was first is told by when each was seen to end."""
        running = [process for process in self._processes if process.exit_code is None]
        watched = select.poll()
        descriptors: list[int] = []
        try:
            for process in running:
                # Not on every kernel, and a process that has just been reaped has none.
                with contextlib.suppress(OSError, AttributeError):
                    descriptors.append(os.pidfd_open(process.popen.pid))
                    watched.register(descriptors[-1], select.POLLIN)
            watched.poll(seconds * 1e3)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._poll()

    def drain(self) -> None:
        """Ask them to end after a step, with a checkpoint; twice is once, for a second SIGTERM means at once."""
        if self.is_draining:
            return
        self.is_draining = True
        for process in self._processes:
            if process.exit_code is None:
                process.popen.send_signal(signal.SIGTERM)

    def kill(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """End them and all that they started, at once, and wait until they are gone; twice is once.

        Args:
            meanwhile: called again and again while that takes its time.
        """
        self._poll()
        for process in self._processes:
            self._kill(process)
        wait_until(lambda: all(each.popen.poll() is not None for each in self._processes), meanwhile)
        self._poll()
        for process in self._processes:
            _close_orders(process)
        kill_strays(self._mark, self._warm.pids)
        self.is_killed = True
        if self._keeper is not None:
            # Killed before its stdin closes: to the keeper, that would mean that its owner has died.
            self._keeper.kill()
            self._keeper.communicate()
            self._keeper = None

    def _poll(self) -> None:
        now_ns = self._now_ns()  # before: one that is alive then was so at this time
        for process in self._processes:
            if process.exit_code is not None:
                continue
            if process.told_s is not None and process.progress.exists():
                process.told_s = None  # it has begun
            code = process.popen.poll()
            if code is None and self._keeps and process.told_s is None:  # one that goes on has ended as well
                latest = progress.read(process.progress)
                code = None if latest is None else latest.left
            if code is None:
                process.alive_ns = now_ns
            else:
                process.exit_code, process.ended_ns = code, self._now_ns()

    def _status(self, process: _Process) -> RankStatus:
        latest = progress.read(process.progress) or progress.Progress()
        code = process.exit_code
        quiet_s = time.monotonic() - (latest.at_ns / 1e9 if latest.at_ns else process.started_s)
        return RankStatus(
            rank=process.rank,
            pid=process.popen.pid,
            state="ended" if code is not None else self._state(process),
            exit_code=None if code is None else max(code, -128),
            ended_ns=process.ended_ns,
            alive_ns=None if code is None else process.alive_ns,
            was_ended=process.was_signalled,
            step=latest.step,
            phase=latest.phase,
            loss=latest.loss,
            is_finite=latest.is_finite,
            # Digits that mean nothing take a driver of thousands of ranks longer than those that do.
            step_ms=None if latest.step_ms is None else round(latest.step_ms, 3),
            exposed=None if latest.exposed is None else round(latest.exposed, 4),
            quiet_s=round(max(quiet_s, 0.0), 2),
        )

    def _state(self, process: _Process) -> Literal["running", "stopped", "blocked"]:
        try:
            stat = Path(f"/proc/{process.popen.pid}/stat").read_text(encoding="utf-8", errors="replace")
            letter = stat.rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return "running"
        if letter != "D":
            process.blocked_since_s = None
            return "stopped" if letter in "Tt" else "running"
        now_s = time.monotonic()
        process.blocked_since_s = process.blocked_since_s or now_s
        return "blocked" if now_s - process.blocked_since_s > _BLOCKED_S else "running"


def _send(process: _Process, line: str) -> bool:
    """Send a line to a process that can be kept; False: it does not take it."""
    data = line.encode()
    try:
        return process.orders is not None and os.write(process.orders, data) == len(data)
    except OSError:  # it has ended, or reads nothing
        return False


def _close_orders(process: _Process) -> None:
    if process.orders is not None:
        os.close(process.orders)
        process.orders = None


def _code_digest() -> str:
    """Return the digest of our packages' files; empty where they cannot be read now: an executor goes on without."""
    try:
        return code_digest()
    except OSError as exc:
        logger.warning("our packages' files cannot be read: %s", exc)
        return ""


def wait_until(is_so: Callable[[], bool], meanwhile: Callable[[], None]) -> None:
    """Wait until killed processes have ended, for ten seconds at most: one that hangs in the kernel may not end.

    Args:
        meanwhile: called again and again, for who waits must go on to send heartbeats.
    """
    until_s, pause_s = time.monotonic() + _KILLED_S, 0.01
    while not is_so() and time.monotonic() < until_s:
        meanwhile()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.2)


def read_tail(path: Path, num_lines: int) -> list[str]:
    """Last lines of a log, escaped where they are no text; none where it cannot be read."""

    def end_of(file: IO[bytes]) -> bytes:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _MAX_READ))
        return file.read()

    try:
        with path.open("rb") as file:
            return end_of(file).decode(errors="backslashreplace").splitlines()[-num_lines:]
    except OSError:
        return []

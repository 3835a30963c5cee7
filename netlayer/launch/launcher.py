"""Run one function as many ranks on this machine, and end them all together.

A launched rank is a fresh interpreter in a session of its own, with its output in a log file of its own. Whatever ends
the launcher ends the ranks and what they started. Not covered: other machines (torchrun, srun and mpirun reach those,
and `detect` reads what they set), the rendezvous of ranks, and restarts.

A program that works under every launcher reads:

    if (env := detect(os.environ)) is not None:
        result = target(RankContext(env), *args)
    else:
        results = launch(target, num_ranks, args=args, log_dir=log_dir)
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Concatenate, NoReturn, TypeVar

from netlayer.errors import ConfigError, NetlayerError, RankFailed
from netlayer.launch.keeper import keep, kill_strays
from netlayer.launch.rank import (
    HEADER,
    LAUNCH_ID,
    MESSAGE,
    RESULT,
    Blame,
    Failure,
    RankContext,
    RankEnv,
    detect,
    reason_of,
    refuse_while_importing_main,
    run_rank,
)

__all__ = ["PASSED_ON", "RankContext", "RankEnv", "detect", "launch"]

PASSED_ON = (signal.SIGTERM, signal.SIGUSR1)
"""What a launch that `asks_first` passes on."""
ECHO_S = 2.0
"""One of these that comes so soon after the first is the same request: a launcher and its system may both send it."""

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A stop signal does not wake `select` (PEP 475), nor does the end of a rank whose pipe a forked child still holds.
_POLL_S = 0.1
_SETTLE_S = 0.3  # see [Note: root cause] at `Failure`
_SETTLE_SYMPTOMS_S = 2.0
_KILLED_WAIT_S = 10.0  # SIGKILL works at once, but for a process that hangs inside the kernel


def launch(
    target: Callable[Concatenate[RankContext, ...], T],
    num_ranks: int,
    *,
    args: Sequence[object] = (),
    log_dir: Path | str,
    env: Mapping[str, str] | None = None,
    on_message: Callable[[int, Any], None] | None = None,
    grace_s: float = 5.0,
    verbosity: int = 1,
    asks_first: bool = False,
) -> list[T]:
    """Run `target(context, *args)` in `num_ranks` fresh processes and return what each returned, in rank order.

    Ranks get RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, an equal share of the cores as OMP_NUM_THREADS where it is
    not set, and no stdin. A rank counts as done when it has returned and its process has ended with exit code 0.

    When one fails, is killed, or this process gets SIGINT or SIGTERM, the others get SIGTERM (which also writes where
    they were into their logs) and after `grace_s` SIGKILL. Signals of the terminal do not reach the ranks, which have
    sessions of their own: this process decides, and a second signal cuts the grace short. Processes that ranks started
    are killed when their rank ends; nothing is left, even where this process itself is killed.

    Args:
        target: a function that a fresh interpreter can import; in a script, the call of `launch` must then stand under
            `if __name__ == "__main__":`.
        num_ranks: number of processes, all on this machine.
        args: further positional arguments of `target`, picklable.
        log_dir: folder for `rank0000.log` and so on; a file that exists is appended to.
        env: additional environment variables of the ranks.
        on_message: called as `on_message(rank, message)` in the calling thread for every `context.report`; it must be
            quick, for signals and failures wait for it.
        grace_s: seconds between SIGTERM and SIGKILL.
        verbosity: of the ranks' logs, as in `log.configure`.
        asks_first: the first SIGTERM or SIGUSR1 is passed on to the ranks, which end by themselves, however long that
            takes; after it SIGINT, and `ECHO_S` later SIGTERM and SIGUSR1 too, end them as said above, by SIGUSR2 in
            place of SIGTERM. Ranks begin with both signals of `PASSED_ON` blocked: the target unblocks them once it
            has handlers.

    Raises:
        RankFailed: a rank raised, died or ended without a result. A NetlayerError of a rank is raised itself instead,
            with the RankFailed as its cause, so that its exit code survives.
        ConfigError: `log_dir` cannot be written, or a script calls `launch` without the guard.
        KeyboardInterrupt, SystemExit: on SIGINT and on SIGTERM (exit code 143), after the ranks have ended; a handler
            installed by somebody else is called first.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
    refuse_while_importing_main()
    # Before any process is started: what cannot be pickled is an error of the caller.
    order = _pickle_order(target, tuple(args), verbosity)
    environ = _rank_environ(num_ranks, env)
    passed_on = PASSED_ON if asks_first else ()
    # Signals outermost: their owners get them, and may raise, only after `_Crew` has ended every rank.
    with _StopSignals(passed_on) as stop, _Crew(num_ranks, _make_log_dir(Path(log_dir)), grace_s, stop) as crew:
        crew.start(order, environ)
        logger.info("%d ranks started, logs in %s", num_ranks, log_dir)
        failure = crew.watch(on_message or (lambda _rank, _message: None))
    if failure is not None:
        _raise_failure(failure, crew.ranks[failure.rank].log_file)
    return [_unpickle(rank.result, rank, "its return value") for rank in crew.ranks]


class _StopSignals:
    """SIGINT and SIGTERM are noted while ranks run, and given to their owners once the ranks have ended.

    Raising at once could hit between starting a rank and noting that it exists. Handlers belong to the main thread;
    in any other thread nothing is installed.

    Args:
        passed_on: the first of these is for the ranks: `to_pass_on`.
    """

    def __init__(self, passed_on: Sequence[signal.Signals] = ()) -> None:
        self.seen: list[int] = []
        self.passed_on = passed_on
        self.to_pass_on: list[int] = []
        self._owners: dict[int, Any] = {}
        self._passed_s = 0.0

    def __enter__(self) -> _StopSignals:
        if threading.current_thread() is threading.main_thread():
            for signum in {signal.SIGINT, signal.SIGTERM, *self.passed_on}:
                owner = signal.getsignal(signum)
                if owner not in (signal.SIG_IGN, None):  # ignored on purpose (nohup, `&`), or not Python's to restore
                    self._owners[signum] = owner
                    signal.signal(signum, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, owner in self._owners.items():
            signal.signal(signum, owner)
        if self.seen:
            self._deliver(self.seen[0])

    def _note(self, signum: int, _frame: types.FrameType | None) -> None:
        """Handle a signal: pass the first of those for ranks on to them, and stop for any other.

        The same signal again stops too, unless it comes at once: then it is the echo of one sent to the whole group.
        """
        if signum in self.passed_on:
            now_s = time.monotonic()
            if not self.to_pass_on:
                self.to_pass_on.append(signum)
                self._passed_s = now_s
                return
            if now_s - self._passed_s < ECHO_S:
                return
        self.seen.append(signum)

    def _deliver(self, signum: int) -> NoReturn:
        owner = self._owners[signum]
        if callable(owner):
            owner(signum, None)
        if signum == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + signum)  # the default action would skip every `finally` of the caller


# Above what a pipe holds (64 KiB on Linux, pipe(7)): one read empties it.
_CHUNK_BYTES = 1 << 20


class _Rank:
    """One rank as its launcher sees it."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], inbox: int, log_file: Path, log_start: int) -> None:
        self.rank, self.process, self.inbox = rank, process, inbox
        self.log_file, self._log_start = log_file, log_start
        self.alive = True
        self.result: bytes | None = None
        self.failure: Failure | None = None
        self._bytes = bytearray()

    def receive(self) -> list[bytes] | None:
        """Take in what lies in the pipe, without waiting, and return new progress messages; None: nothing more."""
        try:
            chunk = os.read(self.inbox, _CHUNK_BYTES)
        except BlockingIOError:
            return None
        if not chunk:
            return None
        self._bytes += chunk
        messages = []
        while len(self._bytes) >= HEADER.size:
            kind, at_ns, length = HEADER.unpack_from(self._bytes)
            end = HEADER.size + length
            if len(self._bytes) < end:
                break
            body = bytes(self._bytes[HEADER.size : end])
            del self._bytes[:end]
            if kind == MESSAGE:
                messages.append(body)
            elif kind == RESULT:
                self.result = body
            else:
                self.failure = Failure(self.rank, at_ns=at_ns, **pickle.loads(body))
        return messages

    def has_exited(self) -> bool:
        """Whether it has exited, without reaping it: until then its process group cannot be another's."""
        if sys.platform == "darwin":  # no waitid there before Python 3.13
            return self.process.poll() is not None
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # somebody else has reaped it
            return True

    def kill_group(self) -> None:
        """SIGKILL for the rank and for what it started, which shares its process group unless it asked for another."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody left; macOS says EPERM for a zombie
            os.killpg(self.process.pid, signal.SIGKILL)

    def judge_death(self, alive_at_ns: int) -> None:
        """Reap it, and note a failure where it neither failed before nor ended well."""
        code = self.process.wait()
        if self.failure is None and (code != 0 or self.result is None):
            reason = f"killed by {_signal_name(-code)}" if code < 0 else f"exit code {code}"
            reason += " after it had returned" if self.result is not None else " before it returned"
            blame = Blame.KILLED if code == -signal.SIGKILL else Blame.PLAIN
            if blame == Blame.KILLED:
                reason += " (out of memory? see dmesg)"
            self.failure = Failure(self.rank, blame, alive_at_ns, reason, _tail(self.log_file, self._log_start))


class _Crew:
    """All ranks of one launch; leaving the `with` ends every one of them that still runs."""

    def __init__(self, num_ranks: int, log_dir: Path, grace_s: float, stop: _StopSignals) -> None:
        self.ranks: list[_Rank] = []
        self._num_ranks, self._log_dir, self._grace_s, self._stop = num_ranks, log_dir, grace_s, stop
        self._launch_id = os.urandom(8).hex()
        self._selector = selectors.DefaultSelector()
        self._alive_at_ns = time.monotonic_ns()
        self._first_sign_s: float | None = None

    def __enter__(self) -> _Crew:
        self._keeper = _start(keep, [self._launch_id], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        self._tell_keeper(_path_line())
        return self

    def __exit__(self, *_: object) -> None:
        # The target has a handler of its own for SIGTERM then, by which a rank may take long to end.
        end = signal.SIGUSR2 if self._stop.passed_on else signal.SIGTERM
        for rank in self.ranks:
            if rank.alive:
                rank.process.send_signal(end)
        self._wait_ended(self._grace_s, until_stop=True)
        for rank in self.ranks:
            if rank.alive:
                logger.warning("rank %d did not end %.3g s after %s: killed", rank.rank, self._grace_s, end.name)
                rank.kill_group()
        self._wait_ended(_KILLED_WAIT_S)
        # After the ranks, which could start others: daemons, and what has left its rank's process group.
        kill_strays(self._launch_id)
        for rank in self.ranks:
            if rank.alive:
                logger.error("rank %d (process %d) hangs inside the kernel: left", rank.rank, rank.process.pid)
            os.close(rank.inbox)
        self._selector.close()
        # Killed before its stdin closes: to the keeper, that would mean that its launcher has died.
        self._keeper.kill()
        self._keeper.communicate()

    def start(self, order: bytes, environ: dict[str, str]) -> None:
        # Behind the id of a launch around this one: that one finds these processes as strays of its own too.
        environ[LAUNCH_ID] = "/".join(filter(None, (os.environ.get(LAUNCH_ID), self._launch_id)))
        # A file, for each rank reads all of it; it is unlinked when all have it open.
        with tempfile.NamedTemporaryFile() as file:
            file.write(_path_line() + order)
            file.flush()
            for rank in range(self._num_ranks):
                self._start_rank(rank, Path(file.name), environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)})

    def _start_rank(self, rank: int, order_file: Path, environ: dict[str, str]) -> None:
        log_file = self._log_dir / f"rank{rank:04d}.log"
        inbox, report_fd = os.pipe()
        os.set_blocking(inbox, False)
        try:
            with order_file.open("rb") as stdin, log_file.open("ab") as stdout:
                # The end of a log that exists: a failure shows only what this launch has added.
                log_start = stdout.tell()
                arguments = [str(report_fd), str(os.getpid())]
                with _blocked(self._stop.passed_on):
                    process = _start(run_rank, arguments, stdin, stdout, environ, pass_fds=(report_fd,))
        except BaseException:
            os.close(inbox)
            raise
        finally:
            # The rank has its own by now; with ours open the pipe would never end.
            os.close(report_fd)
        self.ranks.append(_Rank(rank, process, inbox, log_file, log_start))
        self._selector.register(inbox, selectors.EVENT_READ, self.ranks[-1])
        self._tell_keeper(f"{process.pid}\n".encode())

    def _tell_keeper(self, line: bytes) -> None:
        assert self._keeper.stdin is not None
        self._keeper.stdin.write(line)
        self._keeper.stdin.flush()

    def watch(self, on_message: Callable[[int, Any], None]) -> Failure | None:
        """Wait until a rank has failed (its failure), or all have ended well or a stop signal came (None)."""
        is_passed_on = False
        while not self._stop.seen:
            if self._stop.to_pass_on and not is_passed_on:
                is_passed_on = True
                self._pass_on(self._stop.to_pass_on[0])
            failures = [rank.failure for rank in self.ranks if rank.failure is not None]
            if failures and self._settled(failures):
                first = min(failures, key=Failure.precedence)
                # Logged now, since ending the other ranks may take the whole grace period.
                logger.warning("%s; all ranks are ended", _in_words(first))
                return first
            if not self._any_alive():
                return None
            for rank, message in self._turn():
                on_message(rank.rank, _unpickle(message, rank, "a message of it"))
        return None

    def _pass_on(self, signum: int) -> None:
        logger.info("%s: passed on to the ranks; a second one ends them at once", signal.Signals(signum).name)
        for rank in self.ranks:
            if rank.alive:
                rank.process.send_signal(signum)

    def _settled(self, failures: list[Failure]) -> bool:
        self._first_sign_s = self._first_sign_s or time.monotonic()
        only_symptoms = all(failure.blame >= Blame.NAMED for failure in failures)
        wait_s = _SETTLE_SYMPTOMS_S if only_symptoms else _SETTLE_S
        return not self._any_alive() or time.monotonic() - self._first_sign_s >= wait_s

    def _any_alive(self) -> bool:
        return any(rank.alive for rank in self.ranks)

    def _turn(self) -> list[tuple[_Rank, bytes]]:
        """Wait a moment, take in what ranks sent, and notice which have ended. Returns their progress messages."""
        messages: list[tuple[_Rank, bytes]] = []
        for key, _ in self._selector.select(_POLL_S):
            received = key.data.receive()
            if received is None:
                # It was readable and gave nothing: the pipe has ended, and would be readable for ever.
                self._selector.unregister(key.fd)
            messages += [(key.data, message) for message in received or ()]
        # The end of a pipe is no proof of an end: a process forked from a rank holds the pipe as well.
        polled_at_ns = time.monotonic_ns()
        for rank in self.ranks:
            if rank.alive and rank.has_exited():
                rank.kill_group()
                while (received := rank.receive()) is not None:
                    messages += [(rank, message) for message in received]
                # Last, for it reaps: from then on the process group's number may be another's.
                rank.judge_death(self._alive_at_ns)
                rank.alive = False
        self._alive_at_ns = polled_at_ns
        return messages

    def _wait_ended(self, seconds: float, until_stop: bool = False) -> None:
        deadline_s = time.monotonic() + seconds
        while self._any_alive() and time.monotonic() < deadline_s and not (until_stop and len(self._stop.seen) > 1):
            self._turn()


def _in_words(failure: Failure) -> str:
    """Return the failure in one line that names the failed rank."""
    reason = " ".join(failure.reason.split())
    return reason.partition(": ")[2] if failure.blame in (Blame.HUNG, Blame.NAMED) else f"rank {failure.rank}: {reason}"


def _raise_failure(failure: Failure, log_file: Path) -> NoReturn:
    failed = RankFailed(failure.rank, failure.reason, str(log_file), failure.traceback)
    error = None
    if failure.error is not None:
        with contextlib.suppress(Exception):  # it came through pickle there; if not here, RankFailed says the same
            error = pickle.loads(failure.error)
    if not isinstance(error, NetlayerError):
        raise failed
    error.add_note(str(failed))
    raise error from failed


def _unpickle(body: bytes | None, rank: _Rank, what: str) -> Any:
    assert body is not None
    try:
        return pickle.loads(body)
    except Exception as exc:
        reason = f"{what} cannot be unpickled here: {reason_of(exc)}"
        raise RankFailed(rank.rank, reason, str(rank.log_file), traceback.format_exc()) from exc


def _make_log_dir(log_dir: Path) -> Path:
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError("log_dir", log_dir, f"cannot be made: {exc.strerror}", "name a folder you may write") from exc
    return log_dir


def _rank_environ(num_ranks: int, env: Mapping[str, str] | None) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    # Left by a torchrun around us, these would send torch's env:// rendezvous to the store of that torchrun's agent.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    sizes = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    # Later ones win: a caller may choose the threads, but not the sizes.
    return {"OMP_NUM_THREADS": str(max(1, cores // num_ranks))} | inherited | dict(env or {}) | sizes


def _pickle_order(target: Callable[..., object], args: tuple[object, ...], verbosity: int) -> bytes:
    """Pickle what a rank reads from stdin: (argv, import path of the main script or None, verbosity, target, args)."""
    try:
        # Pickled by itself: a rank has to import the main script before it can unpickle the target.
        work = pickle.dumps((target, args))
    except (pickle.PicklingError, AttributeError, TypeError) as exc:
        raise ValueError(f"target must be a function of a module, and args picklable: {exc}") from exc
    main = None
    if b"__main__" in work or b"__mp_main__" in work:  # else the script need not run again, nor have the guard
        main = _find_main()
        # A rank imports the script as __mp_main__, as multiprocessing does; what it sends back must be found here.
        sys.modules.setdefault("__mp_main__", sys.modules["__main__"])
    return pickle.dumps((sys.argv, main, verbosity, work))


def _find_main() -> tuple[str, str]:
    main = sys.modules["__main__"]
    if main.__spec__ is not None and main.__spec__.name != "__main__":
        return "module", main.__spec__.name
    path = getattr(main, "__file__", None)
    if path is None or not Path(path).exists():
        raise ValueError("target and args must come from files: an interactive session cannot be imported by a rank")
    return "path", str(Path(path).absolute())


def _start(
    entry: Callable[[], None],
    arguments: list[str],
    stdin: IO[bytes] | int,
    stdout: IO[bytes] | int,
    environ: dict[str, str] | None = None,
    pass_fds: tuple[int, ...] = (),
) -> subprocess.Popen[bytes]:
    """Run `entry` in a fresh interpreter and a session of its own; stdin begins with `_path_line`."""
    code = (
        "import json, sys; sys.path[:] = json.loads(sys.stdin.buffer.readline());"
        f"from {entry.__module__} import {entry.__name__}; {entry.__name__}()"
    )
    flags = [f"-W{option}" for option in sys.warnoptions] + ["-O"] * sys.flags.optimize
    return subprocess.Popen(
        [sys.executable, "-P", *flags, "-c", code, *arguments],  # -P: no json.py of the current folder
        stdin=stdin,
        stdout=stdout,
        stderr=stdout,
        env=environ,
        start_new_session=True,
        pass_fds=pass_fds,
    )


@contextlib.contextmanager
def _blocked(signals: Sequence[signal.Signals]) -> Iterator[None]:
    """A process that begins inside gets these once it unblocks them: before that it would die of one."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _path_line() -> bytes:
    return json.dumps([str(entry) for entry in sys.path]).encode() + b"\n"


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # real-time signals have no name of their own
        return f"signal {signum}"


def _tail(log_file: Path, start: int, num_lines: int = 40, num_bytes: int = 8192) -> str:
    """The end of a log: the only witness of a rank that died without a report, and where faulthandler writes."""
    with log_file.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - num_bytes))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-num_lines:])

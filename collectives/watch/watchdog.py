"""Watchdog for collectives: reports which one did not complete, in which group, at which step, and which rank is late.

    watch = Watch(timeout=timedelta(seconds=60), layout=layout)          # on every rank
    comm = Communicator("gather", group, device, watch=watch)             # or, around any call of torch.distributed:
    watch.track("dp", group)
    watch.begin_step(step)
    with watch.collective("dp", "all_reduce", tensor.nbytes):
        dist.all_reduce(tensor, group=group)

As long as collectives complete, it counts in memory and does not use the store. With `hang` the limit follows the step
time: a rank that holds up the others for about three steps is named, also across several groups, and each rank writes
heartbeats to the store. Not covered: single collectives inside a replayed CUDA graph (watch the replay as one), and
recovery: the error goes to the caller, or to the launcher.

[Note: how a rank learns of a failure]
1. The watch thread checks the pending collectives. Shortly before the timeout it collects reports of the group's ranks
   over the store (a roll call), logs the diagnosis as an error and passes the error to `on_failure`. It does so at once
   when the communicator reports a broken connection.
2. Where the host waits (gloo), the backend's exception is translated to CollectiveTimeout or PeerLost.
3. Where the host runs ahead (NCCL), the next launch or wait after the timeout raises. A host that is blocked in a
   synchronisation is ended by torch's own watchdog some time later; the diagnosis is in the log by then.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from collectives.watch.diagnosis import Answer, Entry, Report, Stuck, describe_group, diagnose
from collectives.watch.hang import Evidence, HangLimits, Pace, describe_rank, find_root, own_process, state_of
from collectives.watch.roll_call import STORE_ERRORS, RollCall
from collectives.watch.track import NEAR, Operation, Track, lost_or_late
from netlayer.errors import CollectiveFailed, CollectiveTimeout, PeerLost
from netlayer.layout import ParallelLayout
from netlayer.results import write_text

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LISTEN_AFTER_S = 0.5  # without a completed collective: fast steps never start the listener thread
_CLOSE_S = 1.0
_HANG_TICK_S = 0.1
_ASLEEP_S = 1.0
_ASK_AT, _ASK_AGAIN = 0.6, 0.2  # first query and interval, as shares of the limit: leaves time for the answers
_ASK_LESS = 0.1  # interval of later queries, as a share of the wait so far
_BEATS_PER_S = 500  # heartbeats of all ranks together
_LEAST_PATIENCE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_LOOKS = "looks for who is to blame"
_LONGEST_CHAIN = 128  # most ranks that one rank queries
_COMPILERS = ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/async_compile.py", "/torch/_inductor/graph.py")
_PACKAGES = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parent.parent}{os.sep}")
_CAPTURE = "/torch/cuda/graphs.py"
_ANSWERED = 0.97  # share of the timeout by which the diagnosis is logged in any case


class Watch:
    """Watchdog for the collectives of one rank during one run; every rank creates one.

    Args:
        store: store shared by all ranks; None: that of the default process group. A second watch in the same run
            needs its own PrefixStore.
        timeout: longest time a collective may take; at most the timeout of the process groups.
        layout: parallel layout of the job, for coordinates in messages.
        answer_s: seconds to wait for the answers of a roll call.
        on_failure: called with the error as soon as there is one, in the watch's thread; for example `context.report`.
        hang: time limits for a rank that holds up the others; None: only `timeout` counts. If given, it must be given
            on all ranks, they must call `begin_step`, and wrap long work between steps in `phase`.

    Raises:
        ValueError: the timeout is not above zero, or the layout has another world size.
    """

    def __init__(
        self,
        store: Store | None = None,
        *,
        timeout: timedelta,
        layout: ParallelLayout | None = None,
        answer_s: float = 2.0,
        on_failure: Callable[[CollectiveFailed], None] | None = None,
        hang: HangLimits | None = None,
    ) -> None:
        if timeout <= timedelta(0) or not answer_s > 0:
            raise ValueError(f"timeout and answer_s must be above zero, got {timeout} and {answer_s}")
        if layout is not None and layout.world_size != dist.get_world_size():
            raise ValueError(f"the layout is of {layout.world_size} ranks, the world has {dist.get_world_size()}")
        self.rank, self.timeout_s = dist.get_rank(), timeout.total_seconds()
        self.step: int | None = None
        """The training step under way; None where `begin_step` was not called."""
        self._layout, self._answer_s, self._on_failure = layout, answer_s, on_failure
        self._tracks: dict[str, Track] = {}
        self._hang, self._pace = hang, Pace()
        self._process, self._host = own_process(), socket.gethostname()
        self.waits_in: tuple[Operation, float] | None = None
        """Operation that blocks the main thread, and the time since when (monotonic seconds)."""
        self.moved_s = time.monotonic()
        """Time at which this rank last launched or completed a collective, or began a step or a phase."""
        self._phases: list[str] = []
        self._unheard_from: dict[int, float] = {}
        """Ranks that have not answered, and the time of the first unanswered query."""
        self._asked_s = self._awake_s = 0.0
        self._failure: tuple[Operation, CollectiveFailed] | None = None
        self._device: int | None = None
        """GPU of the thread that launches collectives, once CUDA is in use."""
        shared: Store = dist.distributed_c10d._get_default_store() if store is None else store
        self._roll_call = RollCall(shared, self.rank, self._report)
        self._stop = threading.Event()
        self._begun_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="collective-watch", daemon=True)
        self._thread.start()
        if hang is not None:
            self._roll_call.listen()
            every_s = max(hang.beat_s, dist.get_world_size() / _BEATS_PER_S)
            threading.Thread(target=self._beat, args=(every_s,), name="watch-beat", daemon=True).start()
        atexit.register(self.close)

    def begin_step(self, step: int) -> None:
        """Begin a training step: collectives launched from now on belong to it."""
        self.step = step
        self.moved_s = time.monotonic()
        self._pace.begin_step()

    @contextmanager
    def phase(self, phrase: str) -> Iterator[None]:
        """Mark long work outside the steps; other ranks that wait for it report a hang only after `timeout`.

        Args:
            phrase: description for messages, a verb in the third person such as `saves a checkpoint`.
        """
        begun_s = self.moved_s = time.monotonic()
        self._phases.append(phrase)
        try:
            yield
        finally:
            self._phases.pop()
            self.moved_s = time.monotonic()
            if not self._phases:
                self._pace.skip(self.moved_s - begun_s)

    def announce(self, error: Exception) -> None:
        """Publish this rank's error before it exits, so that the others can name it when their connections break."""
        at = "" if self.step is None else f" at step {self.step}"
        who, place = describe_rank(self.rank, self._host, self._layout), _place_of(error)
        line = f"{who} failed{at}{f' in {place}' if place else ''}: {type(error).__name__}: {error}"
        self._within(lambda: self._decide(PeerLost(line, silent=(self.rank,))), self._answer_s)

    def track(self, name: str, group: dist.ProcessGroup | None = None) -> Track:
        """Return the track (sequence counter) of a group under a name; creates it on the first call.

        Every rank numbers the collectives of a track by itself, so all members must launch the same ones in the same
        order. For point-to-point traffic in a group of more than two ranks, use one track a pair: `add_track`.

        Args:
            name: for messages and `collective`.
            group: process group; None: all ranks.
        """
        group = dist.group.WORLD if group is None else group
        assert group is not None
        key = f"{name}@{group.group_name}"
        return self.add_track(name, dist.get_process_group_ranks(group), key, backend_of(group))

    def add_track(self, name: str, ranks: Sequence[int], key: str = "", backend: Any = None) -> Track:
        """Return the track of these ranks; creates it on the first call.

        Args:
            name: for messages and `collective`.
            ranks: global ranks.
            key: identity of the track: equal on all its ranks, and different from every other track's.
            backend: `backend_of` the group, to see a broken communicator; None if there is none.
        """
        key = key or f"{name}@{','.join(map(str, ranks))}"
        if key not in self._tracks:
            self._tracks[key] = Track(self, name, key, ranks, backend)
        return self._tracks[key]

    def collective(self, name: str, kind: str, num_bytes: int, detail: str = "") -> AbstractContextManager[Operation]:
        """Return a context manager for one torch.distributed call on the group of the track with this name.

        For an asynchronous call, pass its handle to `operation.follow(work)` inside, and wait under `with operation:`.
        On CUDA the collective counts as complete when the current stream has passed the end of the block.

        Raises:
            ValueError: no track has this name, or several have it.
            CollectiveTimeout: this or an earlier collective did not complete in time.
            PeerLost: a connection broke.
        """
        matches = [track for track in self._tracks.values() if track.name == name]
        if len(matches) != 1:
            known = ", ".join(sorted({track.name for track in self._tracks.values()})) or "none"
            raise ValueError(
                f"group {name!r}: {len(matches)} tracks have this name (known: {known}); call track() once"
            )
        return matches[0].around(kind, num_bytes, detail)

    def check(self) -> None:
        """Raise if a collective is overdue. Cheap; every launch and every wait calls it.

        Raises:
            CollectiveFailed: a collective did not complete in time, or its communicator is broken.
        """
        if self._device is None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._device = torch.cuda.current_device()
        if self._failure is not None:
            raise self._failure[1]

    def close(self) -> None:
        """Stop the watch. May be called twice; called at exit."""
        atexit.unregister(self.close)
        self._stop.set()
        self._roll_call.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)

    def save_report(self, folder: Path) -> Path:
        """Write this rank's launched collectives and current state to `report_<rank>.json` in `folder`.

        `netlayer observe blame` reads such files. Returns the path.
        """
        path = folder / f"report_{self.rank}.json"
        write_text(path, self._report(time.time_ns()).to_json() + "\n")
        return path

    def call_roll_soon(self, stuck: Stuck) -> CollectiveFailed:
        """Collect the reports of a group's ranks and return the diagnosis, always within 2 * `answer_s` seconds."""
        call = self._call_roll if self._hang is None else self._find_cause
        with self.phase(_LOOKS):
            error = self._within(lambda: call(stuck, self._answer_s), 2 * self._answer_s)
        return diagnose(stuck, self.rank, None, self._layout) if error is None else error

    def is_of_peer(self, error: Exception) -> bool:
        """Return True if another rank may have caused this error: a failed collective, connection or timeout."""
        return isinstance(error, CollectiveFailed | ConnectionError | TimeoutError) or (
            isinstance(error, RuntimeError) and lost_or_late(str(error)) is not None
        )

    def cause_of(self, exception: Exception) -> CollectiveFailed | None:
        """Find the culprit of an `is_of_peer` error outside the watched collectives; None if no rank can be named."""
        reason = str(exception).partition("\n")[0]
        entry = Entry(0, "communication", 0, type(exception).__name__)
        stuck = Stuck("", "world", range(dist.get_world_size()), entry, (), self.step, 0.0, self.timeout_s, reason)

        def find() -> CollectiveFailed | None:
            try:
                error = self._verdict() or self._root_of(stuck, self._answer_s)
                error = self._verdict() or error
                return None if error is None else self._decide(error)
            except STORE_ERRORS as exc:
                logger.warning("the store does not work: %s", exc)
                return None

        with self.phase(_LOOKS):
            return self._within(find, 2 * self._answer_s)

    def _within(self, call: Callable[[], T], seconds: float) -> T | None:
        """Run a call that uses the store in a thread and return its result; None if it takes longer than `seconds`."""
        result: queue.SimpleQueue[T] = queue.SimpleQueue()
        threading.Thread(target=lambda: result.put(call()), daemon=True).start()
        try:
            return result.get(timeout=seconds)
        except queue.Empty:
            return None

    def _call_roll(self, stuck: Stuck, patience_s: float) -> CollectiveFailed:
        def has_given_up(report: Report) -> bool:
            return stuck.key in report.groups and report.groups[stuck.key].gave_up > 0

        peers = [rank for rank in stuck.ranks if rank != self.rank]
        answers: dict[int, Answer] | None = None
        try:
            answers = self._roll_call.collect(peers, patience_s, has_given_up)
        except STORE_ERRORS as exc:
            logger.warning("the store does not work: %s", exc)
        return diagnose(stuck, self.rank, answers, self._layout)

    def _find_cause(self, stuck: Stuck, patience_s: float) -> CollectiveFailed:
        """Name the culprit of a collective that failed on this rank: another rank's verdict, else an own search."""
        try:
            error = self._verdict() or self._root_of(stuck, patience_s)
            # A rank that fails publishes its error before it exits, which may have arrived only now.
            return self._verdict() or self._decide(error or self._call_roll(stuck, patience_s))
        except STORE_ERRORS as exc:
            logger.warning("the store does not work: %s", exc)
            return diagnose(stuck, self.rank, None, self._layout)

    def _root_of(self, stuck: Stuck, patience_s: float) -> CollectiveFailed | None:
        """Query the chain of ranks that wait for each other; None if no rank can be named yet."""
        assert self._hang is not None
        # In a group of thousands, query the ranks after this one: together all ranks are covered.
        after = sorted(stuck.ranks, key=lambda rank: (rank <= self.rank, rank))
        chain = [rank for rank in after if rank != self.rank][:_LONGEST_CHAIN]

        def follow(report: Report) -> Sequence[int]:
            unqueried = [rank for rank in report.waits_for if rank != self.rank and rank not in chain]
            unqueried = unqueried[: _LONGEST_CHAIN - len(chain)]
            chain.extend(unqueried)
            return unqueried

        begun_s = time.monotonic()
        answers = self._roll_call.collect(chain, patience_s, lambda _report: False, follow)
        now_s = time.monotonic()
        for rank in chain:
            if rank in answers and answers[rank].fresh:
                self._unheard_from.pop(rank, None)
            else:
                self._unheard_from.setdefault(rank, begun_s)
        silent = {rank: now_s - self._unheard_from[rank] for rank in chain if rank in self._unheard_from}
        on_host = {rank: answers[rank].report for rank in silent if rank in answers}
        states = {rank: state_of(report.process) for rank, report in on_host.items() if report.host == self._host}
        evidence = Evidence(chain, answers, silent, states)
        return find_root(stuck, evidence, self._hang, self._pace.step_s, self._layout)

    def _decide(self, error: CollectiveFailed) -> CollectiveFailed:
        """Publish this error unless another rank was first; return the first one, which all ranks then report."""
        return _as_error(self._roll_call.decide(_as_text(error)))

    def _verdict(self) -> CollectiveFailed | None:
        text = self._roll_call.verdict()
        return None if text is None else _as_error(text)

    def _run(self) -> None:
        """Look at all tracks at each tick until `close`; the body of the watch's thread."""
        device: int | None = None
        tick_s = min(max(self.timeout_s / 50, 0.05), 0.5)
        if self._hang is not None:
            tick_s = min(tick_s, _HANG_TICK_S)
        listen_after_s = min(_LISTEN_AFTER_S, self.timeout_s / 8)
        self._awake_s = looked_s = time.monotonic()
        while not self._stop.wait(tick_s):
            try:
                if device != self._device:
                    device = self._device
                    _use(device)
                now_s = time.monotonic()
                if (
                    now_s - looked_s > tick_s + _ASLEEP_S
                ):  # this process itself was stopped, so its waits so far prove nothing
                    self._awake_s = now_s
                    self._unheard_from.clear()
                tracks = list(self._tracks.values())
                for track in tracks:
                    self._look(track)
                quiet_from_s = min((track.quiet_from_s for track in tracks), default=self._begun_s)
                if time.monotonic() - quiet_from_s > listen_after_s:
                    self._roll_call.listen()
                if self._hang is not None:
                    self._look_for_hang(self._hang, tracks)
                looked_s = time.monotonic()
            except Exception:  # a bug in the watch must not end the training run
                logger.exception("the watch over collectives has stopped")
                return

    def _look_for_hang(self, hang: HangLimits, tracks: Sequence[Track]) -> None:
        """Search for the root cause once this rank has waited for most of the limit; log and report it once."""
        waiting = self._waiting(tracks)
        if waiting is None or self._failure is not None:
            self._unheard_from.clear()
            return
        operation, track, since_s = waiting
        now_s = time.monotonic()
        waited_s, limit_s = now_s - max(since_s, self._awake_s), hang.stopped_s(self._pace.step_s)
        # During a long phase of another rank, query less and less often.
        if waited_s < _ASK_AT * limit_s or now_s < self._asked_s + max(_ASK_AGAIN * limit_s, _ASK_LESS * waited_s):
            return
        patience_s = min(max(limit_s - waited_s, _LEAST_PATIENCE_S), self._answer_s)
        stuck = track.stuck(operation, "")
        error = None
        try:
            error = self._verdict() or self._root_of(replace(stuck, age_s=waited_s + patience_s), patience_s)
            if error is not None and self._waiting(tracks) == waiting:  # else it has gone on meanwhile
                error = self._decide(error)
                self._failure = operation, error
                operation.error = error
                logger.error("%s", error)
                self._end(error)
        except STORE_ERRORS as exc:
            logger.info("the store does not work: %s", exc)
        self._asked_s = time.monotonic()

    def _waiting(self, tracks: Sequence[Track]) -> tuple[Operation, Track, float] | None:
        """Return the operation the main thread waits in, else the oldest pending one on the GPU, its track, since when.

        Args:
            tracks: one a group: the collectives that this rank has launched there.
        """
        blocked = self.waits_in  # read once: the main thread may clear it at any time
        if blocked is not None:
            return blocked[0], blocked[0].track, blocked[1]
        if self._device is None:
            return None
        under_way = [oldest for track in tracks if (oldest := track.peek()) is not None]
        if not under_way:
            return None
        oldest = min(under_way, key=lambda operation: operation.launched_s)
        return oldest, oldest.track, oldest.launched_s

    def _beat(self, every_s: float) -> None:
        pause_s = every_s
        while not self._stop.wait(pause_s):
            try:
                self._roll_call.beat()
                pause_s = every_s
            except STORE_ERRORS as exc:
                logger.debug("no sign of life in the store: %s", exc)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _look(self, track: Track) -> None:
        operation = track.oldest()
        if self._failure is not None and self._failure[0].done:
            self._failure = None
        if operation is None:
            return
        lost, age_s = track.broken(), operation.age_s
        if operation.error is None and (lost or age_s > NEAR * self.timeout_s):
            patience_s = self._answer_s if lost else min(self._answer_s, max(_ANSWERED * self.timeout_s - age_s, 0.05))
            error = self._overdue(track.stuck(operation, lost), patience_s)
            if track.oldest() is operation:
                operation.error = error
                logger.error("%s", error)
                if lost or self._hang is None:
                    self._end(error)
        if operation.error is None or self._failure is not None:
            return
        age_s = operation.age_s
        if (
            self._hang is not None and age_s > _ANSWERED * self.timeout_s
        ):  # before torch's watchdog ends the process without a diagnosis
            self._end(operation.error)
        if lost or age_s > self.timeout_s:
            self._failure = operation, operation.error

    def _overdue(self, stuck: Stuck, patience_s: float) -> CollectiveFailed:
        """Diagnose a collective that has almost reached its timeout, independent of the step time."""
        try:
            root = None if self._hang is None else self._root_of(stuck, patience_s)
        except STORE_ERRORS as exc:
            logger.warning("the store does not work: %s", exc)
            root = None
        return self._call_roll(stuck, patience_s) if root is None else root

    def _end(self, error: CollectiveFailed) -> None:
        if self._on_failure is not None:
            self._on_failure(error)

    def _report(self, stamp: int) -> Report:
        tracks = list(self._tracks.values())
        waiting, main = self._waiting(tracks), threading.main_thread()
        phase = next(reversed(list(self._phases)), "") or _compilation(main)
        return Report(
            rank=self.rank,
            stamp=stamp,
            host=self._host,
            step=self.step,
            doing=self._doing(tracks),
            groups={track.key: track.progress() for track in tracks},
            process=self._process,
            place=_place(main),
            phase=phase,
            waits_for=() if waiting is None else waiting[1].ranks,
            idle_s=time.monotonic() - self.moved_s,
        )

    def _doing(self, tracks: Sequence[Track]) -> str:
        """Return what this rank does now, as a phrase for messages."""
        failed = [(operation, track) for track in tracks if (operation := track.given_up) is not None]
        under_way = [(operation, track) for track in tracks if (operation := track.peek()) is not None]
        if not failed and not under_way:
            return f"is in {_place(threading.main_thread())}"
        operation, track = min(failed or under_way, key=lambda pair: pair[0].launched_s)
        what = f"{operation.entry} of {describe_group(track.name, track.ranks, self._layout)}"
        return f"has given up on {what}" if failed else f"waits in {what} since {operation.age_s:.3g} s"


def timeout_of(group: dist.ProcessGroup | None, device: torch.device) -> timedelta | None:
    """Return the timeout of a group (None: the default group); None if its backend does not expose it.

    A new group does not inherit it.
    """
    try:
        backend = (group or dist.group.WORLD)._get_backend(device)  # type: ignore[union-attr]
    except RuntimeError:  # it has none for such a device
        return None
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def backend_of(group: dist.ProcessGroup) -> Any:
    """Return the NCCL backend of the group, which reports a broken communicator; None without one (gloo)."""
    if "cuda:nccl" not in dist.get_backend_config(group):
        return None
    return group._get_backend(torch.device("cuda"))


def _place(thread: threading.Thread) -> str:
    """Return "FILE:LINE in FUNCTION" of a thread: its innermost frame outside stdlib, torch and this package."""
    innermost = frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and _is_library(frame):
        frame = frame.f_back
    frame = frame or innermost
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else ""


def _place_of(error: Exception) -> str:
    """Return "FILE:LINE in FUNCTION" where an exception was raised, chosen as in `_place`."""
    frames = [step.tb_frame for step in _steps(error)]
    lines = [step.tb_lineno for step in _steps(error)]
    places = [(frame, line) for frame, line in zip(frames, lines, strict=True) if not _is_library(frame)]
    if not places:
        return ""
    frame, line = places[-1]
    return f"{Path(frame.f_code.co_filename).name}:{line} in {frame.f_code.co_name}"


def _steps(error: Exception) -> list[TracebackType]:
    steps, step = [], error.__traceback__
    while step is not None:
        steps.append(step)
        step = step.tb_next
    return steps


def _compilation(thread: threading.Thread) -> str:
    """Return "compiles" or "captures a CUDA graph" if the thread does so: either may take minutes on one rank alone."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.endswith(_COMPILERS) or "/triton/compiler/" in file:
            return "compiles"
        if file.endswith(_CAPTURE):
            return "captures a CUDA graph"
        frame = frame.f_back
    return ""


def _as_text(error: CollectiveFailed) -> str:
    kind = "lost" if isinstance(error, PeerLost) else "timeout"
    return json.dumps([kind, str(error), error.missing, error.silent, error.differing])


def _as_error(text: str) -> CollectiveFailed:
    kind, line, *culprits = json.loads(text)
    error = PeerLost if kind == "lost" else CollectiveTimeout
    return error(line, *(tuple(ranks) for ranks in culprits))


def _is_library(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    if file.startswith(("<", *_PACKAGES)):
        return True
    return file.startswith(sysconfig.get_path("stdlib")) and "-packages" not in file


def _use(device: int | None) -> None:
    """Set the GPU of this thread: a new thread uses GPU 0, and every rank would allocate a context there."""
    if device is not None:
        torch.cuda.set_device(device)
        _allow_queries_beside_captures()


def _allow_queries_beside_captures() -> None:
    """Let this thread query CUDA events while another one captures a graph, as torch's own watchdog does.

    In the default mode the query would make the capture fail. torch does not expose the call in Python.
    """
    import ctypes

    thread_local = ctypes.c_int(1)  # cudaStreamCaptureModeThreadLocal
    major = (torch.version.cuda or "").partition(".")[0]
    for library in (None, f"libcudart.so.{major}"):
        try:
            ctypes.CDLL(library).cudaThreadExchangeStreamCaptureMode(ctypes.byref(thread_local))
        except (OSError, AttributeError):
            continue
        return
    logger.warning("no CUDA runtime found by name: do not capture CUDA graphs while a collective watch runs")

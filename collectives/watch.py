"""A watch over collectives: when one does not complete, it says which, in which group, at which step, and who is late.

    watch = Watch(timeout=timedelta(seconds=60), layout=layout)          # on every rank
    lane = Lane("gather", group, device, watch=watch)                    # or, around any call of torch.distributed:
    watch.track("dp", group)
    watch.begin_step(step)
    with watch.collective("dp", "all_reduce", tensor.nbytes):
        dist.all_reduce(tensor, group=group)

In the good case it counts in memory and touches no store. With `hang` it follows the pace of the steps, too: a rank
that holds up the others for three of them is named, by whoever waits for it over any number of groups, and each rank
writes a sign of life to the store now and then. Left out: collectives inside a replayed CUDA graph (watch the replay as
one), and repair: the error goes to the caller, or to the launcher.

[Note: how a rank learns of it]
1. A thread looks at what is under way. Shortly before the timeout it calls the roll over the store, logs the line as an
   error and gives the error to `on_failure`; so it does at once when the communicator reports a broken connection.
2. Where the host waits (gloo), the backend's exception is translated: CollectiveTimeout or PeerLost, from its cause.
3. Where the host runs ahead (NCCL), the next launch or wait raises once the time is over. A host that is stuck in a
   synchronisation is ended by torch's own watchdog, some time after the timeout: the line is in the log by then.
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

from collectives.diagnosis import Answer, Entry, Report, Stuck, describe_group, diagnose
from collectives.hang import Evidence, HangLimits, Pace, describe_rank, find_root, own_process, state_of
from collectives.roll_call import STORE_ERRORS, RollCall
from collectives.track import NEAR, Operation, Track, lost_or_late
from netlayer.errors import CollectiveFailed, CollectiveTimeout, PeerLost
from netlayer.layout import ParallelLayout
from netlayer.results import write_text

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LISTEN_AFTER_S = 0.5  # without a completed collective: in a quick step no rank even listens
_CLOSE_S = 1.0
_HANG_TICK_S = 0.1
_ASLEEP_S = 1.0
_ASK_AT, _ASK_AGAIN = 0.6, 0.2  # of the limit: before it is over there is time for answers
_ASK_LESS = 0.1  # of the wait so far
_BEATS_PER_S = 500  # of all ranks together
_LEAST_PATIENCE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_LOOKS = "looks for who is to blame"
_LONGEST_CHAIN = 128  # ranks that are asked by one
_COMPILERS = ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/async_compile.py", "/torch/_inductor/graph.py")
_PACKAGES = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parent}{os.sep}")
_CAPTURE = "/torch/cuda/graphs.py"
_ANSWERED = 0.97  # share of the timeout by which the line is logged, come what may


class Watch:
    """Watches the collectives of one rank, for one run; every rank has one.

    Args:
        store: shared by all ranks; None: that of the default process group. A second watch of a run needs a
            PrefixStore of its own.
        timeout: how long a collective may take; at most the timeout of the process groups.
        layout: of the job, for coordinates in messages.
        answer_s: how long to wait for the answers of a roll call.
        on_failure: called with the error as soon as there is one, from the watch's thread; `context.report`, say.
        hang: how long a rank may hold up the others; None: `timeout` alone counts. With it all ranks give it, call
            `begin_step`, and put `phase` around what takes its time between steps.

    Raises:
        ValueError: the timeout is not above zero, or the layout is of another world size.
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
        """What the main thread is blocked in, and since when."""
        self.moved_s = time.monotonic()
        """When this rank last launched or completed a collective, or began a step or a phase."""
        self._phases: list[str] = []
        self._unheard_from: dict[int, float] = {}
        """Ranks that have not answered, and when they were first asked."""
        self._asked_s = self._awake_s = 0.0
        self._failure: tuple[Operation, CollectiveFailed] | None = None
        self._device: int | None = None
        """The GPU of whoever launches collectives, once CUDA is in use."""
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
        """Collectives launched from now on belong to this step."""
        self.step = step
        self.moved_s = time.monotonic()
        self._pace.begin_step()

    @contextmanager
    def phase(self, phrase: str) -> Iterator[None]:
        """Around what takes its time outside the steps: that the others wait for it is no hang before `timeout`.

        Args:
            phrase: what the rank does: `saves a checkpoint`.
        """
        begun_s = self.moved_s = time.monotonic()
        self._phases.append(phrase)
        try:
            yield
        finally:
            self._phases.pop()
            self.moved_s = time.monotonic()
            if not self._phases:
                self._pace.leave_out(self.moved_s - begun_s)

    def announce(self, error: Exception) -> None:
        """Say to the others why this rank ends, before its connections close: theirs will break for that reason."""
        at = "" if self.step is None else f" at step {self.step}"
        who, place = describe_rank(self.rank, self._host, self._layout), _place_of(error)
        line = f"{who} failed{at}{f' in {place}' if place else ''}: {type(error).__name__}: {error}"
        self._within(lambda: self._decide(PeerLost(line, silent=(self.rank,))), self._answer_s)

    def track(self, name: str, group: dist.ProcessGroup | None = None) -> Track:
        """The track of a group under a name; None: all ranks. The same name and group give the same track again.

        Ranks count each track for themselves, so all members must launch the same things on it. A group of more than
        two ranks in which some send to others needs a track for each pair: `add_track`.
        """
        group = dist.group.WORLD if group is None else group
        assert group is not None
        key = f"{name}@{group.group_name}"
        return self.add_track(name, dist.get_process_group_ranks(group), key, backend_of(group))

    def add_track(self, name: str, ranks: Sequence[int], key: str = "", backend: Any = None) -> Track:
        """A track by its ranks; `key` must be the same on all of them and of no other track; `backend_of` its group."""
        key = key or f"{name}@{','.join(map(str, ranks))}"
        if key not in self._tracks:
            self._tracks[key] = Track(self, name, key, ranks, backend)
        return self._tracks[key]

    def collective(self, name: str, kind: str, num_bytes: int, detail: str = "") -> AbstractContextManager[Operation]:
        """Around one call of torch.distributed on the group that `track` was given this name for.

        Of an asynchronous call, give the handle to `operation.follow(work)` inside, and wait under `with operation:`.
        On CUDA the collective counts as complete when the current stream has passed the end of the block.

        Raises:
            ValueError: no track has this name, or several have it.
            CollectiveTimeout: it did not complete in time, or an earlier one did not.
            PeerLost: a connection broke.
        """
        found = [track for track in self._tracks.values() if track.name == name]
        if len(found) != 1:
            known = ", ".join(sorted({track.name for track in self._tracks.values()})) or "none"
            raise ValueError(f"group {name!r}: {len(found)} tracks have this name (known: {known}); call track() once")
        return found[0].around(kind, num_bytes, detail)

    def check(self) -> None:
        """Raise where a collective is overdue. Costs nothing; every launch and every wait calls it.

        Raises:
            CollectiveFailed: it did not complete in time, or its communicator is broken.
        """
        if self._device is None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._device = torch.cuda.current_device()
        if self._failure is not None:
            raise self._failure[1]

    def close(self) -> None:
        """Stop watching. Safe to call twice; happens at exit."""
        atexit.unregister(self.close)
        self._stop.set()
        self._roll_call.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)

    def save_report(self, folder: Path) -> Path:
        """Write what this rank has launched and does now to `report_<rank>.json`, for `netlayer observe blame`."""
        path = folder / f"report_{self.rank}.json"
        write_text(path, self._report(time.time_ns()).to_json() + "\n")
        return path

    def call_roll_soon(self, stuck: Stuck) -> CollectiveFailed:
        """Call the roll of a group and return the diagnosis, soon, also where the store does not answer."""
        call = self._call_roll if self._hang is None else self._find_cause
        with self.phase(_LOOKS):
            found = self._within(lambda: call(stuck, self._answer_s), 2 * self._answer_s)
        return diagnose(stuck, self.rank, None, self._layout) if found is None else found

    def is_of_peer(self, error: Exception) -> bool:
        """Whether an error is what another rank has done to this one."""
        return isinstance(error, CollectiveFailed | ConnectionError | TimeoutError) or (
            isinstance(error, RuntimeError) and lost_or_late(str(error)) is not None
        )

    def cause_of(self, error: Exception) -> CollectiveFailed | None:
        """Who is to blame for an error of that kind outside the watched collectives; None where nobody is found."""
        reason = str(error).partition("\n")[0]
        entry = Entry(0, "communication", 0, type(error).__name__)
        stuck = Stuck("", "world", range(dist.get_world_size()), entry, (), self.step, 0.0, self.timeout_s, reason)

        def find() -> CollectiveFailed | None:
            try:
                found = self._verdict() or self._root_of(stuck, self._answer_s)
                found = self._verdict() or found
                return None if found is None else self._decide(found)
            except STORE_ERRORS as exc:
                logger.warning("the store does not work: %s", exc)
                return None

        with self.phase(_LOOKS):
            return self._within(find, 2 * self._answer_s)

    def _within(self, call: Callable[[], T], seconds: float) -> T | None:
        """What a call that uses the store gives; None where that takes longer."""
        given: queue.SimpleQueue[T] = queue.SimpleQueue()
        threading.Thread(target=lambda: given.put(call()), daemon=True).start()
        try:
            return given.get(timeout=seconds)
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
        """Who is to blame for a collective that has failed on this rank: what another rank has found, or a look."""
        try:
            found = self._verdict() or self._root_of(stuck, patience_s)
            # Whoever failed says so before it ends, but may have taken a moment for it.
            return self._verdict() or self._decide(found or self._call_roll(stuck, patience_s))
        except STORE_ERRORS as exc:
            logger.warning("the store does not work: %s", exc)
            return diagnose(stuck, self.rank, None, self._layout)

    def _root_of(self, stuck: Stuck, patience_s: float) -> CollectiveFailed | None:
        """Ask along the chain of ranks that wait for each other; None where nobody is to blame yet."""
        assert self._hang is not None
        # Of a group of thousands the next ones after this rank: somebody asks every one.
        after = sorted(stuck.ranks, key=lambda rank: (rank <= self.rank, rank))
        asked = [rank for rank in after if rank != self.rank][:_LONGEST_CHAIN]

        def follow(report: Report) -> Sequence[int]:
            more = [rank for rank in report.waits_for if rank != self.rank and rank not in asked]
            more = more[: _LONGEST_CHAIN - len(asked)]
            asked.extend(more)
            return more

        begun_s = time.monotonic()
        answers = self._roll_call.collect(asked, patience_s, lambda _report: False, follow)
        now_s = time.monotonic()
        for rank in asked:
            if rank in answers and answers[rank].fresh:
                self._unheard_from.pop(rank, None)
            else:
                self._unheard_from.setdefault(rank, begun_s)
        silent = {rank: now_s - self._unheard_from[rank] for rank in asked if rank in self._unheard_from}
        on_host = {rank: answers[rank].report for rank in silent if rank in answers}
        states = {rank: state_of(report.process) for rank, report in on_host.items() if report.host == self._host}
        evidence = Evidence(asked, answers, silent, states)
        return find_root(stuck, evidence, self._hang, self._pace.step_s, self._layout)

    def _decide(self, error: CollectiveFailed) -> CollectiveFailed:
        """Have all ranks name the same culprits: those of this error, or of an earlier one of another rank."""
        return _as_error(self._roll_call.decide(_as_text(error)))

    def _verdict(self) -> CollectiveFailed | None:
        text = self._roll_call.verdict()
        return None if text is None else _as_error(text)

    def _run(self) -> None:
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
                if now_s - looked_s > tick_s + _ASLEEP_S:  # this process was stopped itself: nobody else is late for it
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
            except Exception:  # a fault of the watch shall not end the training that it watches
                logger.exception("the watch over collectives has stopped")
                return

    def _look_for_hang(self, hang: HangLimits, tracks: Sequence[Track]) -> None:
        """Where this rank has waited for long, find out for whom, and say so once."""
        waiting = self._waiting(tracks)
        if waiting is None or self._failure is not None:
            self._unheard_from.clear()
            return
        operation, track, since_s = waiting
        now_s = time.monotonic()
        waited_s, limit_s = now_s - max(since_s, self._awake_s), hang.stopped_s(self._pace.step_s)
        # A long phase of another rank is asked about less and less often.
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
                operation.said = error
                logger.error("%s", error)
                self._end(error)
        except STORE_ERRORS as exc:
            logger.info("the store does not work: %s", exc)
        self._asked_s = time.monotonic()

    def _waiting(self, tracks: Sequence[Track]) -> tuple[Operation, Track, float] | None:
        """What this rank waits in, and since when: its main thread, or where the host runs ahead its device."""
        waits_in = self.waits_in  # once: the main thread takes it away at any time
        if waits_in is not None:
            return waits_in[0], waits_in[0].track, waits_in[1]
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
        if operation.said is None and (lost or age_s > NEAR * self.timeout_s):
            patience_s = self._answer_s if lost else min(self._answer_s, max(_ANSWERED * self.timeout_s - age_s, 0.05))
            error = self._overdue(track.stuck(operation, lost), patience_s)
            if track.oldest() is operation:
                operation.said = error
                logger.error("%s", error)
                if lost or self._hang is None:
                    self._end(error)
        if operation.said is None or self._failure is not None:
            return
        age_s = operation.age_s
        if self._hang is not None and age_s > _ANSWERED * self.timeout_s:  # ahead of what would end it without a word
            self._end(operation.said)
        if lost or age_s > self.timeout_s:
            self._failure = operation, operation.said

    def _overdue(self, stuck: Stuck, patience_s: float) -> CollectiveFailed:
        """Who is to blame for a collective whose time is almost over, whatever the pace of the steps."""
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
        """What this rank does, as a phrase."""
        given_up = [(operation, track) for track in tracks if (operation := track.given_up) is not None]
        under_way = [(operation, track) for track in tracks if (operation := track.peek()) is not None]
        if not given_up and not under_way:
            return f"is in {_place(threading.main_thread())}"
        operation, track = min(given_up or under_way, key=lambda pair: pair[0].launched_s)
        what = f"{operation.entry} of {describe_group(track.name, track.ranks, self._layout)}"
        return f"has given up on {what}" if given_up else f"waits in {what} since {operation.age_s:.3g} s"


def timeout_of(group: dist.ProcessGroup | None, device: torch.device) -> timedelta | None:
    """That of a group (None: of all ranks), which a new group would not have by itself; None where it does not tell."""
    try:
        backend = (group or dist.group.WORLD)._get_backend(device)  # type: ignore[union-attr]
    except RuntimeError:  # it has none for such a device
        return None
    found = getattr(getattr(backend, "options", None), "_timeout", None)
    return found if isinstance(found, timedelta) else None


def backend_of(group: dist.ProcessGroup) -> Any:
    """What can tell that a communicator of the group is broken; None where nothing can (gloo)."""
    if "cuda:nccl" not in dist.get_backend_config(group):
        return None
    return group._get_backend(torch.device("cuda"))


def _place(thread: threading.Thread) -> str:
    """What a thread executes: the innermost line that is neither Python's own, nor torch's, nor of this package."""
    innermost = frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and _is_library(frame):
        frame = frame.f_back
    shown = frame or innermost
    return f"{Path(shown.f_code.co_filename).name}:{shown.f_lineno} in {shown.f_code.co_name}" if shown else ""


def _place_of(error: Exception) -> str:
    """Where an exception was raised, by the innermost such line."""
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
    """`compiles` where a thread does, or captures a CUDA graph: either may take minutes on one rank alone."""
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
    """Have this thread ask that device for events: a new thread's is 0, whose memory each rank would take a part of."""
    if device is not None:
        torch.cuda.set_device(device)
        _allow_queries_beside_captures()


def _allow_queries_beside_captures() -> None:
    """Let this thread ask for events while another one captures a CUDA graph, as torch's own watchdog does.

    In the default mode the question would end the capture with an error. torch has no name for the call in Python.
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

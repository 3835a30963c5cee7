"""A watch over collectives: when one does not complete, it says which, in which group, at which step, and who is late.

    watch = Watch(timeout=timedelta(seconds=60), layout=layout)          # on every rank
    lane = Lane("gather", group, device, watch=watch)                    # or, around any call of torch.distributed:
    watch.track("dp", group)
    watch.begin_step(step)
    with watch.collective("dp", "all_reduce", tensor.nbytes):
        dist.all_reduce(tensor, group=group)

In the good case it counts in memory and touches no store. Left out: collectives inside a replayed CUDA graph (watch the
replay as one), and repair: the error goes to the caller, or to the launcher.

[Note: how a rank learns of it]
1. A thread looks at what is under way. Shortly before the timeout it calls the roll over the store, logs the line as an
   error and gives the error to `on_failure`; so it does at once when the communicator reports a broken connection.
2. Where the host waits (gloo), the backend's exception is translated: CollectiveTimeout or PeerLost, from its cause.
3. Where the host runs ahead (NCCL), the next launch or wait raises once the time is over. A host that is stuck in a
   synchronisation is ended by torch's own watchdog, some time after the timeout: the line is in the log by then.
"""

from __future__ import annotations

import atexit
import logging
import queue
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from collectives.diagnosis import Answer, Report, Stuck, describe_group, diagnose
from collectives.roll_call import STORE_ERRORS, RollCall
from collectives.track import NEAR, Operation, Track
from netlayer.errors import CollectiveFailed
from netlayer.layout import ParallelLayout
from netlayer.results import write_text

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger(__name__)

_LISTEN_AFTER_S = 0.5  # without a completed collective: in a quick step no rank even listens
_CLOSE_S = 1.0
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
        self._failure: tuple[Operation, CollectiveFailed] | None = None
        self._device: int | None = None
        """The GPU of whoever launches collectives, once CUDA is in use."""
        shared: Store = dist.distributed_c10d._get_default_store() if store is None else store
        self._roll_call = RollCall(shared, self.rank, self._report)
        self._stop = threading.Event()
        self._begun_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="collective-watch", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def begin_step(self, step: int) -> None:
        """Collectives launched from now on belong to this step."""
        self.step = step

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
        said: queue.SimpleQueue[CollectiveFailed] = queue.SimpleQueue()
        threading.Thread(target=lambda: said.put(self._call_roll(stuck, self._answer_s)), daemon=True).start()
        try:
            return said.get(timeout=2 * self._answer_s)
        except queue.Empty:
            return diagnose(stuck, self.rank, None, self._layout)

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

    def _run(self) -> None:
        device: int | None = None
        tick_s = min(max(self.timeout_s / 50, 0.05), 0.5)
        listen_after_s = min(_LISTEN_AFTER_S, self.timeout_s / 8)
        while not self._stop.wait(tick_s):
            try:
                if device != self._device:
                    device = self._device
                    _use(device)
                tracks = list(self._tracks.values())
                for track in tracks:
                    self._look(track)
                quiet_from_s = min((track.quiet_from_s for track in tracks), default=self._begun_s)
                if time.monotonic() - quiet_from_s > listen_after_s:
                    self._roll_call.listen()
            except Exception:  # a fault of the watch shall not end the training that it watches
                logger.exception("the watch over collectives has stopped")
                return

    def _look(self, track: Track) -> None:
        operation = track.oldest()
        if self._failure is not None and self._failure[0].done:
            self._failure = None
        if operation is None:
            return
        lost, age_s = track.broken(), operation.age_s
        if operation.said is None and (lost or age_s > NEAR * self.timeout_s):
            patience_s = self._answer_s if lost else min(self._answer_s, max(_ANSWERED * self.timeout_s - age_s, 0.05))
            error = self._call_roll(track.stuck(operation, lost), patience_s)
            if track.oldest() is operation:
                operation.said = error
                self._say(error)
        if operation.said is not None and (lost or operation.age_s > self.timeout_s) and self._failure is None:
            self._failure = operation, operation.said

    def _say(self, error: CollectiveFailed) -> None:
        logger.error("%s", error)
        if self._on_failure is not None:
            self._on_failure(error)

    def _report(self, stamp: int) -> Report:
        tracks = list(self._tracks.values())
        return Report(
            rank=self.rank,
            stamp=stamp,
            host=socket.gethostname(),
            step=self.step,
            doing=self._doing(tracks),
            groups={track.key: track.progress() for track in tracks},
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
    """What a thread executes: the innermost line that is neither Python's own nor torch's."""
    innermost = frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and _is_library(frame):
        frame = frame.f_back
    shown = frame or innermost
    return f"{Path(shown.f_code.co_filename).name}:{shown.f_lineno} in {shown.f_code.co_name}" if shown else ""


def _is_library(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    if file.startswith(("<", str(Path(torch.__file__).parent))):
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

"""Track of the collectives that one rank has launched in one group, and of those in flight: counted in memory, cheaply.

Each collective gets the next number of its group; ranks that launch the same things give them the same numbers. Not
covered: looking at the numbers (`watchdog`) and comparing them (`diagnosis`).
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from collectives.transport.current_stream import current_stream
from collectives.watch.diagnosis import Entry, GroupProgress, Stuck
from netlayer.errors import CollectiveFailed, CollectiveTimeout, PeerLost

if TYPE_CHECKING:
    from collectives.watch.watchdog import Watch

logger = logging.getLogger(__name__)

NEAR = 0.9
"""Share of the timeout after which a roll is called: what is left suffices to answer and to log."""

_NUM_RECENT = 8  # collectives whose kind and size are kept, to find out where ranks went apart

_LOST = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)( by peer)?|broken pipe|socket closed"
    r"|remote process exited|communicator was aborted|ncclRemoteError|ncclSystemError",
    re.IGNORECASE,
)
_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)


class Operation:
    """One collective on this rank. As a context it is around the call that launches it, or the wait for it."""

    __slots__ = ("done", "entry", "error", "is_done", "launched_s", "raised", "step", "track")

    def __init__(self, track: Track, entry: Entry) -> None:
        self.track, self.entry, self.step, self.launched_s = track, entry, track.watch.step, time.monotonic()
        self.done = self.raised = False
        self.is_done: Callable[[], bool] | None = None
        self.error: CollectiveFailed | None = None

    @property
    def age_s(self) -> float:
        """Seconds since its launch."""
        return time.monotonic() - self.launched_s

    def finish(self) -> None:
        """Mark it as complete on this rank."""
        self.done, self.is_done = True, None

    def until(self, is_done: Callable[[], bool]) -> None:
        """Take it as complete once `is_done()`, which the watch calls from its own thread: `event.query`."""
        self.is_done = is_done

    def follow(self, work: dist.Work) -> None:
        """Take it as complete once this handle is, without an error.

        A handle that learns of it by its wait only (gloo's isend and irecv) must be waited for within the timeout.
        """

        def is_done() -> bool:
            if not work.is_completed():
                return False
            try:
                work.wait()  # returns at once
            except RuntimeError:  # a matter of who waits for it
                return False
            return True

        self.is_done = is_done

    def settle(self) -> None:
        """The call has returned: its data is there, or the current stream is on its way to it."""
        if self.done or self.is_done is not None:
            return
        on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if on_cuda and not torch.cuda.is_current_stream_capturing():
            self.until(current_stream().record_event().query)
        else:
            self.finish()

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Wrap a call that blocks this thread until it is complete, where another thread waits for it itself."""
        self._block()
        try:
            yield
        finally:
            self._unblock()

    def _block(self) -> None:
        if threading.get_ident() == threading.main_thread().ident:
            self.track.watch.waits_in = self, time.monotonic()

    def _unblock(self) -> None:
        if threading.get_ident() == threading.main_thread().ident:
            self.track.watch.waits_in = None
            self.track.watch.moved_s = time.monotonic()

    def __enter__(self) -> Operation:
        self.track.watch.check()
        self._block()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unblock()
        if error is None:
            return
        self.raised = True
        self.finish()  # in the sense that it is no longer under way
        if isinstance(error, RuntimeError):
            failure = self.track.explain(self, str(error))
            if failure is not None:
                raise failure from error


class WatchedWork:
    """The handle of an asynchronous collective."""

    def __init__(self, operation: Operation, work: dist.Work) -> None:
        self._operation, self._work = operation, work

    def wait(self) -> None:
        """Block until it is complete; errors are translated."""
        with self._operation:
            self._work.wait()
        self._operation.finish()


class Track:
    """The collectives of one group on this rank; made by `Watch.track`. Launch them in the order of the backend.

    Args:
        watch: that looks at it.
        name: of the group, for messages.
        key: of the group, the same on all its ranks and of no other track.
        ranks: of the group, in the world.
        backend: of torch's group, where it can tell of a broken communicator (NCCL).
    """

    def __init__(self, watch: Watch, name: str, key: str, ranks: Sequence[int], backend: Any = None) -> None:
        self.watch, self.name, self.key, self.ranks = watch, name, key, tuple(ranks)
        self._backend = backend
        self._lock = threading.Lock()
        self._launched = 0
        self.given_up: Operation | None = None
        """The first collective that raised here."""
        self._under_way: deque[Operation] = deque()
        self._recent: deque[Entry] = deque(maxlen=_NUM_RECENT)
        self.quiet_from_s = time.monotonic()
        """When a collective last completed here, as far as it was noticed."""

    def launch(self, kind: str, num_bytes: int, detail: str = "") -> Operation:
        """Count a collective, just before the call that launches it.

        Args:
            kind: `all_gather`, `all_to_all`, `send`, ...; the same on every rank, but for `send` with `recv`.
            num_bytes: of the whole buffer, the same on every rank, but for kinds that begin with `all_to_all`.
            detail: what else shall stand in the line: `bucket 3`.

        Raises:
            CollectiveFailed: an earlier collective is overdue.
        """
        self.watch.check()
        with self._lock:
            self._launched += 1
            operation = Operation(self, Entry(self._launched, kind, num_bytes, detail))
            self.watch.moved_s = operation.launched_s
            self._under_way.append(operation)
            self._recent.append(operation.entry)
        return operation

    @contextmanager
    def around(self, kind: str, num_bytes: int, detail: str = "") -> Iterator[Operation]:
        """Track the call in the block, which launches a collective; arguments and errors as in `launch`."""
        operation = self.launch(kind, num_bytes, detail)
        with operation:
            yield operation
        operation.settle()

    def issue(
        self, kind: str, num_bytes: int, call: Callable[[], dist.Work | None], detail: str = ""
    ) -> dist.Work | None:
        """Launch a collective by `call`; of an asynchronous one, a handle to wait on (only that), which is watched."""
        operation = self.launch(
            kind, num_bytes, detail
        )  # as `around`, which costs a generator: there are many of these
        with operation:
            work = call()
            if work is not None:
                operation.follow(work)
        if work is None:
            operation.settle()
            return None
        return cast(dist.Work, WatchedWork(operation, work))

    def progress(self) -> GroupProgress:
        """Return this rank's progress, for a report."""
        with self._lock:
            given_up = self.given_up.entry.seq if self.given_up is not None else 0
            return GroupProgress(self._launched, tuple(self._recent), given_up)

    def oldest(self) -> Operation | None:
        """Return the operation longest in flight; forget completed ones. Queries the device: watch's thread only."""
        while (operation := self._first()) is not None:
            is_done = operation.is_done  # which the main thread takes away when it finishes the operation
            if not operation.done and (is_done is None or not is_done()):
                return operation
            operation.finish()
            self.quiet_from_s = time.monotonic()
            if operation.error is not None and not operation.raised:
                logger.warning("%s of group %s has completed after all", operation.entry, self.name)
            with self._lock:
                self._under_way.popleft()
        return None

    def peek(self) -> Operation | None:
        """Return the operation that is longest in flight, as last noticed."""
        with self._lock:
            return next((operation for operation in self._under_way if not operation.done), None)

    def broken(self) -> str:
        """Return the communicator's own report of a lost peer; empty where it knows of none."""
        get_error = getattr(self._backend, "get_error", None)
        error = "" if get_error is None else str(get_error()).rpartition(".")[2]
        return "" if error in ("", "SUCCESS", "TIMEOUT") else f"the communicator reports {error}"

    def explain(self, operation: Operation, message: str) -> CollectiveFailed | None:
        """The error for what a backend said of this collective; None where that is about no timeout and no peer."""
        if lost_or_late(message) is None:
            return None
        lost, timed_out = _LOST.search(message), _TIMED_OUT.search(message)
        self.given_up = self.given_up or operation
        # A peer that times out closes its connections: one that breaks at the end of the time is no cause.
        early = lost is not None and timed_out is None and operation.age_s < NEAR * self.watch.timeout_s
        stuck = self.stuck(operation, lost[0] if lost is not None and early else "")
        return self.watch.call_roll_soon(replace(stuck, timeout_s=min(stuck.age_s, stuck.timeout_s)))

    def stuck(self, operation: Operation, lost: str) -> Stuck:
        """Describe this collective for a diagnosis; `lost` as there."""
        return Stuck(
            key=self.key,
            group=self.name,
            ranks=self.ranks,
            entry=operation.entry,
            recent=self.progress().recent,
            step=operation.step,
            age_s=operation.age_s,
            timeout_s=self.watch.timeout_s,
            lost=lost,
        )

    def _first(self) -> Operation | None:
        with self._lock:
            return self._under_way[0] if self._under_way else None


def lost_or_late(message: str) -> type[CollectiveFailed] | None:
    """Return the error type for a backend's message; None where it is about no timeout and no peer."""
    if _TIMED_OUT.search(message):
        return CollectiveTimeout
    return PeerLost if _LOST.search(message) else None

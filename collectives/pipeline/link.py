"""One end of a one-way link between neighbouring pipeline stages: a communicator, and on CUDA a stream, of its own.

Messages of a link arrive in the order of their launch. Launching never waits, neither for the peer nor for a message in
the other direction, which has a link of its own. Not covered: which messages there are
(`collectives.pipeline.channel`).

[Note: memory] A tensor to send, and the buffer of a receive, belong to the compute stream. The link's stream starts
after the point of the compute stream at which the call was made: by then the tensor is written, and whoever had the
buffer's memory before has read it. A tensor to send is kept until it has left, however early its owner lets go of it; a
buffer is handed over after an event on which the compute stream waits. The host waits for nothing.

[Note: completion on the CPU] A send or receive of gloo is only known to be complete by waiting for it, once. A thread
of the link does that, one after the other, so that tensors are freed and times are noted when they are due.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.clock import PooledEvent
from collectives.transport.communicator import CommContext
from collectives.transport.current_stream import current_stream
from collectives.watch.recorder import Collective, Recorder
from collectives.watch.track import Operation
from collectives.watch.watchdog import Watch, backend_of
from netlayer.errors import CollectiveFailed, CollectiveTimeout, PeerLost
from netlayer.workload.messages import Direction, Message

Kind = Literal["send", "recv"]


class Transfer(Protocol):
    """A message under way."""

    def wait(self) -> None:
        """Make the computation wait until it has left, or has come: the compute stream on CUDA, else the host."""

    def done(self) -> bool:
        """Whether it has, as far as is known without waiting."""


class Link(CommContext):
    """The sending or the receiving end.

    Args:
        kind: which of the two.
        direction: of the messages.
        group: carries this link and direction alone, on this rank.
        stage, peer_stage: this and the neighbouring stage.
        peer: the global rank of the neighbour.
        device: of every tensor.
        recorder: notes every message.
        watch: says who is late where a message does not come.
        stream: that nothing else runs on meanwhile; None: on the CPU.

    A receive may be posted ahead of its use where `posts_ahead`.

    Where it is `muted`, noise comes in place of messages: a GPU draws less power, and so runs faster, on zeros or NaN.
    """

    posts_ahead = True

    def __init__(
        self,
        kind: Kind,
        direction: Direction,
        group: dist.ProcessGroup,
        stage: int,
        peer_stage: int,
        peer: int,
        device: torch.device,
        recorder: Recorder | None = None,
        watch: Watch | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.kind, self.direction, self.group = kind, direction, group
        self.stage, self.peer_stage, self.peer = stage, peer_stage, peer
        track = None
        if watch is not None:
            pair = sorted((dist.get_rank(), peer))
            track = watch.add_track(f"pipeline {self.route}", pair, backend=backend_of(group))
        super().__init__(device, recorder, track, stream)
        self._flying: deque[Transfer] = deque()
        self._watched: queue.SimpleQueue[_Watched | None] | None = None
        self._thread: threading.Thread | None = None
        self._end_thread: Callable[[], object] = lambda: None

    def launch(self, tensor: Tensor, message: Message) -> Transfer:
        """Send `tensor`, or receive into it; contiguous. Returns at once."""
        self.reap()
        transfer = self._launch_on_stream(tensor, message) if self.stream else self._launch_watched(tensor, message)
        self._flying.append(transfer)
        return transfer

    def reap(self) -> None:
        """Let go of the tensors of messages that are known to be done."""
        if self.is_capturing:
            return  # its events cannot be asked
        while self._flying and self._flying[0].done():
            self._flying.popleft()

    def wait_all(self) -> None:
        """Make the computation wait for every message launched so far."""
        while self._flying:
            self._flying.popleft().wait()

    def close(self) -> None:
        """End the link's thread, between steps. Twice does no harm."""
        self._end_thread()
        if self._thread is not None and not self._flying:  # else a step was interrupted, and it may wait for long
            self._thread.join()
        self._thread = self._watched = None

    def describe(self, message: Message) -> str:
        """A message of this link in words."""
        towards = "to" if self.kind == "send" else "from"
        return f"{self.kind} of the {message} {towards} stage {self.peer_stage} (rank {self.peer})"

    @property
    def route(self) -> str:
        """The link in words, the same at both ends: `forward 2-3`."""
        ends = (self.stage, self.peer_stage) if self.kind == "send" else (self.peer_stage, self.stage)
        return f"{self.direction} {ends[0]}-{ends[1]}"

    def _launch_on_stream(self, tensor: Tensor, message: Message) -> Transfer:
        assert self.stream is not None
        self.stream.wait_stream(current_stream(self.device))
        with torch.cuda.stream(self.stream):
            operation = self.counted(self.kind, tensor.nbytes, str(message))
            collective, _ = self._issue(tensor, message)
            landed = self.arrival(collective, is_end=True)
        if operation is not None:
            event: torch.cuda.Event = landed.keep() if isinstance(landed, PooledEvent) else landed
            operation.until(event.query)
        return _Streamed(self, tensor, collective, landed)

    def _launch_watched(self, tensor: Tensor, message: Message) -> Transfer:
        operation = self.counted(self.kind, tensor.nbytes, str(message))
        collective, work = self._issue(tensor, message)
        transfer = _Watched(self, message, tensor, collective, work, operation)
        if work is not None:
            self._watch_queue().put(transfer)
        return transfer

    def _issue(self, tensor: Tensor, message: Message) -> tuple[Collective | None, dist.Work | None]:
        if self.muted:
            if self.kind == "recv" and tensor.is_floating_point():
                tensor.normal_()
            return None, None
        with self.recording(
            f"pipeline {self.direction}",
            self.kind,
            tensor.nbytes,
            lane=f"{self.kind} {self.direction}",
            labels=self._labels(message),
            flow=f"{self.route}: {message}",
        ) as collective:
            return collective, self._call(tensor, message)

    def _call(self, tensor: Tensor, message: Message) -> dist.Work | None:
        # NCCL matches by order and ignores the tag; on gloo it keeps messages apart whatever their order.
        tag = message.chunk << 16 | message.micro_batch
        if self.kind == "send":
            work = dist.isend(tensor, self.peer, group=self.group, tag=tag)
        else:
            work = dist.irecv(tensor, self.peer, group=self.group, tag=tag)
        if self.stream is not None and work is not None:
            work.wait()  # makes the link's stream, which is current here, follow NCCL's own
        return work

    def _labels(self, message: Message) -> dict[str, str | int | float]:
        return {
            "phase": message.phase,
            "micro_batch": message.micro_batch,
            "chunk": message.chunk,
            "peer_stage": self.peer_stage,
            "peer": self.peer,
        }

    def _watch_queue(self) -> queue.SimpleQueue[_Watched | None]:
        if self._watched is None:
            self._watched = queue.SimpleQueue()
            name = f"{self.kind} {self.direction}"
            self._thread = threading.Thread(target=_watch, args=(self._watched,), name=name, daemon=True)
            self._thread.start()
            self._end_thread = weakref.finalize(self, self._watched.put, None)
        return self._watched


class _Streamed:
    """A message on a link's stream; see [Note: memory]."""

    def __init__(
        self, link: Link, tensor: Tensor, collective: Collective | None, landed: PooledEvent | torch.cuda.Event
    ) -> None:
        self._link, self._tensor, self._collective = link, tensor, collective
        self._mark = landed if isinstance(landed, PooledEvent) else None
        self._landed = landed.event if isinstance(landed, PooledEvent) else landed
        self._waited = False

    def wait(self) -> None:
        if not self._waited:
            with self._link.waiting(self._collective, self._mark):
                current_stream(self._link.device).wait_event(self._landed)
            self._waited = True

    def done(self) -> bool:
        # Once the compute stream waits, what is freed is used again after the transfer.
        return self._waited or bool(self._landed.query())  # type: ignore[no-untyped-call]


class _Watched:
    """A message that the link's thread waits for; see [Note: completion on the CPU]."""

    def __init__(
        self,
        link: Link,
        message: Message,
        tensor: Tensor,
        collective: Collective | None,
        work: dist.Work | None,
        operation: Operation | None,
    ) -> None:
        self._describe: Callable[[], str] = lambda: link.describe(message)
        self._waiting: Callable[[], AbstractContextManager[None]] = lambda: link.waiting(collective)
        self._tensor: Tensor | None = tensor
        self._collective, self._work, self._operation = collective, work, operation
        self._error: Exception | None = None
        self._landed = threading.Event()
        self._waited = False
        if work is None:
            self._landed.set()

    def wait(self) -> None:
        if self._waited:
            return
        awaited = nullcontext() if self._operation is None else self._operation.awaited()
        with self._waiting(), awaited:
            self._landed.wait()
        self._waited = True
        if self._error is not None:
            raise self._translated(self._error) from (self._error.__cause__ or self._error)

    def done(self) -> bool:
        return self._landed.is_set() and self._error is None  # an error stays, for whoever waits for all

    def complete(self, free_ns: int) -> int:
        """Wait for it: the link's thread. The one before was complete at `free_ns`; returns when this one was."""
        assert self._work is not None
        try:
            with self._operation or nullcontext():
                self._work.wait()
        except Exception as exc:  # noqa: BLE001 - raised where the message is waited for
            self._error = exc
        end_ns = time.perf_counter_ns()
        if self._collective is not None:
            if self._collective.kind == "recv":  # many may be posted; one comes at a time
                self._collective.start = max(self._collective.launch_start_ns, free_ns)
            self._collective.end = end_ns
        if self._operation is not None:
            self._operation.finish()
        self._work = self._tensor = None
        self._landed.set()
        return end_ns

    def _translated(self, error: Exception) -> CollectiveFailed:
        if isinstance(error, CollectiveFailed):  # the watch has
            return error
        step = f" in step {self._collective.step}" if self._collective and self._collective.step is not None else ""
        kind = CollectiveTimeout if "timed out" in str(error).lower() else PeerLost
        return kind(f"{self._describe()}{step} did not complete: {error}")


def _watch(transfers: queue.SimpleQueue[_Watched | None]) -> None:
    free_ns = 0
    while (transfer := transfers.get()) is not None:
        free_ns = transfer.complete(free_ns)
        del transfer  # with its tensor, not when the next one comes

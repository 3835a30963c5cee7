"""The communicator of one direction, with a stream of its own on CUDA, and the collectives that run on it.

Gathers of parameters and reductions of gradients need not queue behind each other, so each direction can have a process
group of its own (MegaScale 3.2). Not covered: the order of collectives, which belongs to who launches them, but a
communicator runs them in the order of their launch, and every rank must launch the same ones.

[Note: streams] On CUDA a collective is issued as a synchronous one inside the communicator's stream, which orders it on
that stream without blocking the host. What it reads was written on the compute stream, so the communicator waits for an
event of that stream first; what it writes is read there, so `Work.wait` makes the compute stream wait for the
communicator. Tensors that were allocated on the compute stream are kept until then: freed earlier, their memory could
be handed out again. The copy that fills a buffer to send runs on a side stream: neither the computation nor the
transfers before it wait for that copy. A communicator of one rank has no streams: its copies are part of the
computation. Several wrappers may share a communicator, where all ranks use them in one order
([Note: streams are few]).

[Note: streams are few] torch hands out streams from a pool of 32 a priority, round robin: the 33rd is the first again,
and NCCL's process groups draw from the same pools. Where a receive that spins and what its peer waits for lie on one
stream, a pipeline stands still. So a stream is opened when it is first needed, shared where the order of launches
allows it, and not opened where nothing travels.

[Note: works that ended] A thread of gloo's lets go of a collective's tensors after `wait` has returned, and takes
Python's lock for it where it is the last that holds them. In a program that ends at that moment it is aborted (SIGABRT,
"terminate called without an active exception"; torch 2.13, also without us). So a communicator holds the last few
handles. What gloo is given are tensors of the communicator's own over the caller's memory (`Lend`), emptied once they
were waited for: a handle that is held keeps nobody's memory, and is no holder where those of a parameter are counted
(`collectives.sharded.gather`, [Note: aliases]).

[Note: CUDA graphs] Everything here is events and streams, never a question to the device, so a step can be captured.
All streams fork from the capturing one by events and join it again where their works are waited for. Times cannot be
captured: a recorder hears nothing of a capture.

Shapes: N elements of a padded bucket, W ranks, S = N / W.
"""

from __future__ import annotations

import functools
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.arguments import as_device
from collectives.clock import PooledEvent
from collectives.torch_names import Collect, all_gather_single, reduce_scatter_single
from collectives.transport.current_stream import current_stream
from collectives.transport.leftovers import release_left
from collectives.transport.peer_reduce import PeerReduce
from collectives.transport.symmetric import Streams
from collectives.watch.recorder import Collective, Recorder
from collectives.watch.track import NEAR, Operation, Track, lost_or_late
from collectives.watch.watchdog import Watch, timeout_of
from netlayer.errors import CollectiveTimeout

logger = logging.getLogger(__name__)

Issue = Callable[[bool], "dist.Work | None"]
"""Starts a collective; told whether it shall return a handle to wait on."""
Lend = Callable[[Tensor], Tensor]
"""Returns a tensor over the same memory that a backend may hold for longer: [Note: works that ended]."""

_POLL_S = 0.001
_KEPT = 8  # several times as many as gloo has threads
_SOURCE_LINE = re.compile(r"^\[[^]]*\] ")  # of the backend, before what it says
_ASK = (
    "; a rank is late, has ended, skipped a step, or was left to call alone what all must call: the launcher, or the"
    " logs of all ranks, say which (in a program of your own, so does watch=Watch(...))"
)
_all_reduce: Collect = dist.all_reduce
_all_gather: Collect = dist.all_gather
_broadcast: Collect = dist.broadcast


class CommContext:
    """A stream that carries collectives, and their recorder and track.

    Args:
        device: of every tensor.
        recorder: notes each collective.
        track: of the watch, which says who is late where a collective does not complete.
        stream: which they run on; None: on the CPU, or where nothing travels.

    `muted` (for measurements) omits every collective and does all else: what is computed is then wrong, but takes
    the time that a step with its communication removed takes.
    """

    # Of the class, so that whoever measures mutes one object alone and no constructor has to pass it on.
    muted = False

    def __init__(
        self,
        device: torch.device | str,
        recorder: Recorder | None,
        track: Track | None,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self.device, self.recorder, self.track, self.stream = as_device(device), recorder, track, stream
        self._on_cuda = self.device.type == "cuda"

    @property
    def is_capturing(self) -> bool:
        """Whether a CUDA graph is captured now."""
        return self._on_cuda and torch.cuda.is_current_stream_capturing()

    def recording(
        self, group: str, kind: str, num_bytes: int, **more: Any
    ) -> AbstractContextManager[Collective | None]:
        """Record the call in the block, which launches a collective; arguments as in `Recorder.launching`."""
        # An event that a graph captures has no time that could be read.
        if self.recorder is None or self.is_capturing:
            return nullcontext()
        return self.recorder.launching(group, kind, num_bytes, can_capture=False, **more)

    def waiting(self, collective: Collective | None, until: PooledEvent | None = None) -> AbstractContextManager[None]:
        """Record the wait in the block, of the computation for a collective; None: it was not recorded.

        Args:
            until: as of `Recorder.waiting`.

        Raises:
            CollectiveFailed: a collective is overdue.
        """
        # Here too, and not by the watch's thread alone: only this thread can raise where the user sees it.
        if self.track is not None:
            self.track.watch.check()
        if self.recorder is None or collective is None or self.is_capturing:
            return nullcontext()
        return self.recorder.waiting(collective, can_capture=False, until=until)

    def arrival(self, collective: Collective | None, *, is_end: bool) -> PooledEvent | torch.cuda.Event:
        """Mark the communicator's stream, which is current, for others to wait for; arguments of `Recorder.arrival`.

        Of a collective that is recorded it is a mark whose time can be read, so that nothing else need be launched.
        """
        assert self.stream is not None
        mark = None
        if self.recorder is not None and collective is not None:
            mark = self.recorder.arrival(collective, is_end=is_end)
        return self.stream.record_event() if mark is None else mark

    def counted(self, kind: str, num_bytes: int, detail: str = "") -> Operation | None:
        """The collective that is launched next, for the watch; arguments and errors as in `Track.launch`."""
        # A replayed graph's collectives are in no order that the other ranks' counts could be compared with.
        if self.track is None or self.muted or self.is_capturing:
            return None
        return self.track.launch(kind, num_bytes, detail)


def new_stream(device: torch.device, priority: int = -1) -> torch.cuda.Stream | None:
    """Return a stream for transfers and what they wait for; None on the CPU. See [Note: streams are few].

    The GPU shall prefer the few blocks of a transfer to the many of a matmul that they compete with.

    Args:
        priority: 0 for what follows a transfer, and competes with the computation as its equal.
    """
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]


class Work:
    """A launched collective: `wait` for it, let functions `then` it, or take the event after all (`done_event`)."""

    def __init__(
        self,
        comm: Communicator,
        collective: Collective | None,
        work: dist.Work | None,
        landed: PooledEvent | torch.cuda.Event | None,
        then: Callable[[], None] | None,
        keep: Sequence[Tensor],
        kind: str = "collective",
        late: Callable[[], None] | None = None,
        lent: Sequence[Tensor] = (),
    ) -> None:
        self._lent = lent
        self._comm, self._collective, self._work, self._kind = comm, collective, work, kind
        self._arrive(landed)
        self._then, self._keep = [] if then is None else [then], keep
        # Until `launch_rest`, there is no event yet that a follower's stream could wait for.
        self._rest, self._callbacks = late, list[tuple[Callable[[], None], torch.cuda.Stream | None]]()
        self._joined: list[Work] = []
        self._done = False

    def _arrive(self, landed: PooledEvent | torch.cuda.Event | None) -> None:
        # Held: a mark goes back to its pool with the last reference to it.
        self._mark = landed if isinstance(landed, PooledEvent) else None
        event = landed.event if isinstance(landed, PooledEvent) else landed
        self._arrival_event: torch.cuda.Event | None = event
        self._done_event: torch.cuda.Event | None = event

    def launch_rest(self) -> None:
        """Launch on the communicator what was left for later, such as the sum of what peers sent. Twice does no
        harm."""
        if self._rest is None:
            return
        with torch.cuda.stream(self._comm.stream):
            self._rest()
            if self._comm.stream is not None:
                self._arrive(self._comm.arrival(self._collective, is_end=False))
        self._rest = None
        following, self._callbacks = self._callbacks, []
        # In the order in which they came: one may use what the one before has computed.
        for function, stream in following:
            self.then(function, stream)

    @property
    def done_event(self) -> torch.cuda.Event | None:
        """Event after it and after all that follows it; None on the CPU. Lands it, if it has not."""
        self.launch_rest()
        if self._mark is not None and self._done_event is self._mark.event:
            return self._mark.keep()  # the caller may hold it for longer than this work
        return self._done_event

    def then(self, function: Callable[[], None], stream: torch.cuda.Stream | None) -> None:
        """Run `function` when it has landed, before `wait` lets anyone go on: on `stream`, on the CPU inside `wait`."""
        if self._rest is not None:
            self._callbacks.append((function, stream))
            return
        if self._done_event is None or stream is None:
            self._then.append(function)
            return
        # By an event, on a side stream: neither the host nor the communicator's next transfer waits for `function`.
        stream.wait_event(self._done_event)
        with torch.cuda.stream(stream):
            function()
            # Whoever waits from now on waits for this too.
            self._done_event = stream.record_event()

    def then_launch(self, launch: Callable[[], Work], stream: torch.cuda.Stream | None) -> None:
        """Launch another collective when it has landed; what follows, and `wait`, waits for both. `stream`: of `then`.

        The wait of a side stream is no part of a record: it holds up no computation, the one in `wait` does.
        """

        def follow() -> None:
            other = launch()
            if stream is None or other.done_event is None:  # inside `wait`
                other.wait()
                return
            stream.wait_event(other.done_event)
            self._joined.append(other)

        self.then(follow, stream)

    @property
    def was_waited_for(self) -> bool:
        return self._done

    def wait(self) -> None:
        """Make the computation wait for it: the host on the CPU, the current stream on CUDA. Twice does no harm."""
        if self._done:
            return
        self.launch_rest()
        with self._comm.waiting(self._collective, self._mark):
            if self._arrival_event is not None:
                current_stream(self._comm.device).wait_event(self._arrival_event)
            elif self._work is not None:
                with self._comm.explaining(self._kind):
                    self._work.wait()
        for other in self._joined:
            other.wait()
        if self._done_event is not None:  # apart: what follows it is computation
            current_stream(self._comm.device).wait_event(self._done_event)
        for function in self._then:
            function()
        if self._work is not None:
            for tensor in self._lent:
                tensor.data = tensor.new_empty(0)
            self._comm.ended.append(self._work)
        self._lent = ()
        self._done, self._work, self._then, self._joined, self._keep = True, None, [], [], ()


class Communicator(CommContext):
    """One direction of traffic of a data-parallel group.

    Args:
        name: what records call it.
        group: the process group that only this communicator uses; None: a single rank, every collective is local.
        device: of every tensor.
        recorder: notes each collective.
        watch: says who is late where a collective does not complete.

    On gloo, whatever launches or waits raises CollectiveTimeout or PeerLost where a collective does not complete.
    """

    def __init__(
        self,
        name: str,
        group: dist.ProcessGroup | None,
        device: torch.device | str,
        recorder: Recorder | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.name, self.group = name, group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)
        track = None if watch is None or group is None else watch.track(name, group)
        # One rank transfers nothing, and its copies belong to the computation: torch's pools of streams are small.
        stream = None if self.world_size == 1 else new_stream(as_device(device))
        super().__init__(device, recorder, track, stream)
        self.ranks = [self.rank] if group is None else dist.get_process_group_ranks(group)
        """Of the group, by their numbers in the world."""
        if recorder is not None and group is not None:
            recorder.groups.setdefault(name, self.ranks)
        self.ended: deque[dist.Work] = deque(maxlen=_KEPT)
        """[Note: works that ended]"""
        self._filled: tuple[torch.cuda.Event, Sequence[Tensor]] | None = None
        """What the last fill reads, and the event after which that may be freed."""
        self.peer_streams: Streams | None = None
        """Of all `PeerReduce` that are opened for it, once there is one."""
        self._emulated: dict[torch.dtype, bool] = {}
        # Now, where all ranks are: it is a collective, and connects them before anything is timed.
        self._gathers_in_place = self.world_size == 1 or self._probe_gather()

    @functools.cached_property
    def post_reduce_stream(self) -> torch.cuda.Stream | None:
        """Stream for what follows a collective: the next transfer does not wait. None where there is no stream."""
        return None if self.world_size == 1 else new_stream(self.device, priority=0)

    @functools.cached_property
    def _copy_in_stream(self) -> torch.cuda.Stream | None:
        """Side stream for fills."""
        return None if self.world_size == 1 else new_stream(self.device)

    @functools.cached_property
    def divides_on_the_way(self) -> bool:
        """Whether a mean comes for the price of a sum, and is no other number: NCCL, over a power of two of ranks.

        NCCL scales what each rank gives, in its dtype.
        """
        is_power = self.world_size & (self.world_size - 1) == 0
        return self.stream is not None and is_power and "cuda:nccl" in dist.get_backend_config(self.group)

    def mark(self) -> torch.cuda.Event | None:
        """Record an event at this point of the compute stream; None on the CPU, where work is done when it returns."""
        return None if self.stream is None else current_stream(self.device).record_event()

    def all_gather(
        self,
        unsharded_N: Tensor,
        prepare: Callable[[], None] | None = None,
        after: torch.cuda.Event | None = None,
        *,
        is_recorded: bool = True,
    ) -> Work:
        """Gather every rank's own slice of `unsharded_N` on all ranks, in place.

        Args:
            unsharded_N: this rank has filled the slice that it owns.
            prepare: fills that slice; runs on the communicator.
            after: the point of the compute stream to start from; now, where it is None.
            is_recorded: False for agreements between ranks that are no part of a step.
        """

        def issue(lend: Lend, async_op: bool) -> dist.Work | None:
            shard_S = self._own(unsharded_N)
            # Not every backend may read where it writes: see `_probe_gather`.
            source_S = lend(shard_S if self._gathers_in_place else shard_S.clone())
            if self.stream is None:
                # As gloo would cut it itself, out of reach of whoever empties what it holds.
                parts = [lend(part) for part in unsharded_N.chunk(self.world_size)]
                return _all_gather(parts, source_S, group=self.group, async_op=async_op)
            return all_gather_single(unsharded_N, source_S, group=self.group, async_op=async_op)

        return self._launch("all_gather", unsharded_N, issue, prepare=prepare, after=after, is_recorded=is_recorded)

    def reduce_scatter(
        self,
        output_S: Tensor,
        input_N: Tensor,
        fill: Callable[[], None] | None = None,
        read: Sequence[Tensor] = (),
        mean: bool = False,
        by: PeerReduce | None = None,
        adds: bool = False,
    ) -> Work:
        """Sum the ranks' `input_N`; slice r goes to rank r's `output_S`.

        Args:
            output_S: where the sum goes.
            input_N: what this rank gives.
            fill: writes `input_N`, on the side stream; None: it is written.
            read: what `fill` reads; kept until it has run.
            mean: in place of the sum, where this communicator `divides_on_the_way`, or `by` is given.
            by: in place of the backend, into float32. Its sum is launched when the work lands.
            adds: to what `output_S` holds, by `by` alone.
        """
        op = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
        # Muted, a rank keeps its own part: the memory and the copies are as ever, and nothing is sent.
        local = self.world_size == 1 or self.muted
        # Of an empty bucket no rank sends anything.
        if by is not None and not local and input_N.numel():
            return self._reduce_by(by, output_S, input_N, self._fill(fill, read), mean, adds)
        if local or self.can_reduce_scatter(input_N.dtype):

            def issue(lend: Lend, async_op: bool) -> dist.Work | None:
                return reduce_scatter_single(lend(output_S), lend(input_N), op=op, group=self.group, async_op=async_op)

            def keep_own() -> None:
                shard_S = self._own(input_N)
                output_S.add_(shard_S) if adds else output_S.copy_(shard_S)

            then = keep_own if local else None
            after = self._fill(fill, read)
            return self._launch("reduce_scatter", input_N, issue, then=then, after=after, keep=(output_S,))
        # The backend has no reduce-scatter of this dtype: an all-reduce in a wide one gives the same sum.
        wide_N = torch.empty_like(input_N, dtype=torch.promote_types(input_N.dtype, torch.float32))

        def fill_wide() -> None:
            _call(fill)
            wide_N.copy_(input_N)

        def issue_wide(lend: Lend, async_op: bool) -> dist.Work | None:
            return _all_reduce(lend(wide_N), op=op, group=self.group, async_op=async_op)

        def launch_rest() -> None:
            output_S.copy_(self._own(wide_N))

        after = self._fill(fill_wide, (input_N, *read))
        return self._launch("reduce_scatter", wide_N, issue_wide, then=launch_rest, after=after, keep=(output_S,))

    def _reduce_by(
        self, by: PeerReduce, output_S: Tensor, input_N: Tensor, after: torch.cuda.Event | None, mean: bool, adds: bool
    ) -> Work:
        """Launch the sends of a reduce-scatter by copies between peers; the work adds up what came when it lands.

        Args:
            after: when `input_N` is complete; None: when what is queued now on the caller's stream is done.
            mean, adds: as of `reduce_scatter`.
        """
        if self.stream is not None:
            # What is sent is complete after its fill; without one, after the computation so far.
            self.stream.wait_event(after or self.mark())  # type: ignore[arg-type]
        counted = self.counted("reduce_scatter", input_N.nbytes)
        # Of this rank's own copies: what a late peer costs is in the wait for the work.
        recording = self.recording(self.name, "reduce_scatter", input_N.nbytes, stream=by.stream)
        with torch.cuda.stream(self.stream):
            by.wait_for_current_stream()
            with counted or nullcontext(), recording as collective:
                add = by.send(input_N)

        # Launched later, after the next bucket's sends: parts of peers in step have arrived by then, so nothing waits.
        def launch_rest() -> None:
            add(output_S, mean, adds)
            if counted is not None:
                counted.settle()

        return Work(self, collective, None, None, None, (input_N, output_S), "reduce_scatter", launch_rest)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """All-reduce in place, and wait."""
        self.start_all_reduce(tensor, op).wait()

    def start_all_reduce(
        self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, *, is_recorded: bool = True
    ) -> Work:
        """Start an all-reduce in place; leave `tensor` alone until the wait. `is_recorded` as in `all_gather`."""

        def issue(lend: Lend, async_op: bool) -> dist.Work | None:
            return _all_reduce(lend(tensor), op=op, group=self.group, async_op=async_op)

        return self._launch("all_reduce", tensor, issue, is_recorded=is_recorded)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Copy the values of rank `source` of the group into every rank's `tensor` (contiguous), and wait."""

        def issue(lend: Lend, async_op: bool) -> dist.Work | None:
            return _broadcast(lend(tensor), group=self.group, group_src=source, async_op=async_op)

        self._launch("broadcast", tensor, issue).wait()

    def all_gather_ints(self, values: Sequence[int], what: str) -> list[list[int]]:
        """All-gather `values`, the same number on each rank, in rank order; the host waits.

        For agreements between ranks that are no part of a step: it is watched, but not recorded.

        Args:
            what: they are about, for the watch's line.
        """
        own = torch.tensor(values, dtype=torch.int64, device=self.device)
        if self.world_size == 1 or self.muted or not values:
            return [list(values) for _ in range(self.world_size)]
        all_WC = own.new_empty(self.world_size * len(values))

        def issue(async_op: bool) -> dist.Work | None:
            return all_gather_single(all_WC, own, group=self.group, async_op=async_op)

        if self.stream is not None:  # in order with all that the communicator carries
            self.stream.wait_stream(current_stream(self.device))
        with torch.cuda.stream(self.stream), self.explaining("all_gather"):
            self._watched("all_gather", all_WC, issue, what)(False)
            rows: list[list[int]] = all_WC.view(self.world_size, -1).tolist()
        return rows

    def all_gather_text(self, text: str, what: str) -> list[str]:
        """All-gather `text`, in rank order; the host waits. Otherwise as `all_gather_ints`."""
        coded = text.encode()
        # Two rounds: texts are padded to the longest, and no rank knows that before the first.
        lengths = [length for [length] in self.all_gather_ints([len(coded)], what)]
        rows = self.all_gather_ints([*coded, *[0] * (max(lengths) - len(coded))], what)
        return [bytes(row[:length]).decode() for row, length in zip(rows, lengths, strict=True)]

    def wait_on_host(self) -> None:
        """Block the host until all that was launched has landed. Returns at once on the CPU, where each wait did.

        Raises:
            CollectiveTimeout: shortly before the group's timeout, at which the watchdog would end the process.
        """
        if self.stream is None or self.world_size == 1 or self.is_capturing:
            return
        landed, limit = self.stream.record_event(), timeout_of(self.group, self.device)
        begun_s = time.monotonic()
        # Polled: a synchronisation has no limit, and NCCL's own ends the process.
        while not landed.query():
            age_s = time.monotonic() - begun_s
            if limit is not None and age_s > NEAR * limit.total_seconds():
                raise CollectiveTimeout(f"{self.describe('a collective')} did not complete in {age_s:.3g} s{_ASK}")
            time.sleep(_POLL_S)
        # A quiet point: all of the communicator has landed, so what is freed here waits for no peer.
        release_left()

    def describe(self, kind: str) -> str:
        """Return a collective of this communicator in words."""
        return f"{kind} of group {self.name}, on rank {dist.get_rank()},"

    @contextmanager
    def explaining(self, kind: str) -> Iterator[None]:
        """Turn the backend's error about an incomplete collective in the block into our own. A watch says more.

        Raises:
            CollectiveTimeout, PeerLost: from the backend's own error.
        """
        try:
            yield
        except RuntimeError as exc:
            error = lost_or_late(str(exc))
            if error is None:
                raise
            reason = _SOURCE_LINE.sub("", str(exc)).partition(". ")[0]
            raise error(f"{self.describe(kind)} did not complete: {reason}{_ASK}") from exc

    def free_filled(self) -> None:
        """Let go of what fills have read."""
        if self._filled is not None:
            # The tensors are this stream's: handed out again before the fill has read them, it would read other values.
            current_stream(self.device).wait_event(self._filled[0])
            self._filled = None

    def _fill(self, fill: Callable[[], None] | None, read: Sequence[Tensor]) -> torch.cuda.Event | None:
        """Run `fill` after the computation so far; the event after it, None on the CPU or where there is nothing."""
        if fill is None or self._copy_in_stream is None:
            _call(fill)
            return None
        self.free_filled()  # one fill behind: done long ago, so nobody waits
        # The computation has written what the fill reads.
        self._copy_in_stream.wait_stream(current_stream(self.device))
        with torch.cuda.stream(self._copy_in_stream):
            fill()
        event: torch.cuda.Event = self._copy_in_stream.record_event()
        self._filled = event, read
        return event

    def _own(self, unsharded_N: Tensor) -> Tensor:
        return unsharded_N.chunk(self.world_size)[self.rank] if unsharded_N.numel() else unsharded_N

    def _launch(
        self,
        kind: str,
        buffer: Tensor,
        issue: Callable[[Lend, bool], dist.Work | None],
        *,
        prepare: Callable[[], None] | None = None,
        then: Callable[[], None] | None = None,
        after: torch.cuda.Event | None = None,
        keep: Sequence[Tensor] = (),
        is_recorded: bool = True,
    ) -> Work:
        """Launch one collective on the communicator's stream, and return its work.

        Args:
            kind: its name, for records and errors.
            buffer: kept until the work was waited for, with `keep`.
            issue: calls the backend, with what it lends it; told whether it shall return a handle.
            prepare: called before it on the communicator's stream; `then` after it.
            after: what it follows; None: all that is queued now on the caller's stream.
        """
        # Until it was waited for: see [Note: streams].
        keep = (buffer, *keep)
        if self.stream is None:
            lent: list[Tensor] = []

            def lend(tensor: Tensor) -> Tensor:
                # `.data`, and not `detach`, which holds what it was made of.
                lent.append(tensor.data)
                return lent[-1]

            _call(prepare)
            with self.explaining(kind):
                start = functools.partial(issue, lend)
                collective, work = self._issue(kind, buffer, start, async_op=True, is_recorded=is_recorded)
            return Work(self, collective, work, None, then, keep, kind, lent=lent)
        # A given point may lie far behind: a transfer shall not wait for computation that was queued since.
        after = after or self.mark()
        assert after is not None
        self.stream.wait_event(after)
        with torch.cuda.stream(self.stream):
            _call(prepare)
            start = functools.partial(issue, lambda tensor: tensor)  # nobody is handed a handle that would hold it
            collective, _ = self._issue(kind, buffer, start, async_op=False, is_recorded=is_recorded)
            # On the communicator and before the event: whoever waits for the work waits for this.
            _call(then)
            return Work(self, collective, None, self.arrival(collective, is_end=then is None), None, keep, kind)

    def _issue(
        self, kind: str, buffer: Tensor, issue: Issue, async_op: bool, is_recorded: bool = True
    ) -> tuple[Collective | None, dist.Work | None]:
        """Call the backend, seen by watch and recorder; one rank alone, a muted communicator and no bytes send
        nothing."""
        # Decided alike on every rank, so the numbers by which the watch compares them stay in step.
        if self.world_size == 1 or self.muted or buffer.numel() == 0:
            return None, None
        issue = self._watched(kind, buffer, issue)
        if not is_recorded:
            return None, issue(async_op)
        with self.recording(self.name, kind, buffer.numel() * buffer.element_size()) as collective:
            return collective, issue(async_op)

    def _watched(self, kind: str, buffer: Tensor, issue: Issue, detail: str = "") -> Issue:
        track, num_bytes = self.track, buffer.numel() * buffer.element_size()
        return (
            issue if track is None else lambda async_op: track.issue(kind, num_bytes, lambda: issue(async_op), detail)
        )

    def _probe_gather(self) -> bool:
        """Whether the backend gathers in place; also sets the communicator up, before the first step is timed."""
        # No rank's number: a slot that nobody has written shows.
        unsharded_N = torch.full((self.world_size,), -1, device=self.device)
        unsharded_N[self.rank] = self.rank
        try:
            self._watched(
                "all_gather",
                unsharded_N,
                lambda _: all_gather_single(unsharded_N, unsharded_N[self.rank : self.rank + 1], group=self.group),
            )(False)
        except (RuntimeError, ValueError) as exc:
            reason = str(exc)
        else:
            if unsharded_N.tolist() == list(range(self.world_size)):
                return True
            reason = "its result was wrong"
        logger.warning("communicator %s: no all-gather in place (%s); shards are copied first", self.name, reason)
        return False

    def can_reduce_scatter(self, dtype: torch.dtype) -> bool:
        """Whether the backend has a reduce-scatter of `dtype`; the first call tries it, on all ranks together."""
        if dtype not in self._emulated:
            self._emulated[dtype] = self.world_size > 1 and not self._probe_reduce_scatter(dtype)
        return not self._emulated[dtype]

    def _probe_reduce_scatter(self, dtype: torch.dtype) -> bool:
        """Return whether the backend can reduce-scatter this dtype, by trying it; every rank calls it."""
        input_N = torch.ones(self.world_size, dtype=dtype, device=self.device)
        try:
            output_S = torch.empty_like(input_N[:1])
            self._watched(
                "reduce_scatter", input_N, lambda _: reduce_scatter_single(output_S, input_N, group=self.group)
            )(False)
        except (RuntimeError, ValueError) as exc:
            logger.warning(
                "communicator %s: no reduce-scatter of %s (%s); an all-reduce in float32 stands in: twice the bytes",
                self.name,
                dtype,
                exc,
            )
            return False
        return True


def _call(function: Callable[[], None] | None) -> None:
    if function is not None:
        function()

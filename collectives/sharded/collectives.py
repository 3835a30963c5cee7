"""Collectives of a sharded model's gradients: their reduce-scatters, and the comparison of steps.

A `ReduceScatter` has three backends: gloo, NCCL with or without windows, and copy engines. Each chooses the buffers,
and launches the collective on a communicator. `collectives.sharded.reduce` decides which bucket is launched when; the
buffers of a bucket are in `collectives.sharded.bucket`, all-gathers of parameters in `collectives.sharded.gather`. The
comparison of steps, a collective before a round of reductions, stays here so that a gradient passes no further module.

[Note: float16] It ends at 65,504, which a sum over ranks soon passes where their mean does not. So gradients are
divided before the sum, by a power of two no less than the number of ranks (it rounds nothing but what is subnormal),
and the rest of the mean's factor comes after it. Other dtypes have room, and are divided once, after the sum.

[Note: means] Where NCCL divides by a power of two as it adds, that loses nothing and saves a pass over each shard; from
windows it would take its slower kernels for that. `PeerReduce` divides as it adds. All other backends return sums,
which are scaled as they are stored. A program that divides its loss by the number of ranks needs the sum
(`mean=False`), which is not scaled.

[Note: replicas] Where several groups hold the same shards, each sum is all-reduced among the ranks that hold the same
shard, in the dtype of the sum, before it is scaled and stored: bucket by bucket, after its reduce-scatter.

[Note: what a check costs] A rank that skips a step alone launches the same collectives as the others, only for other
data: no collective that runs anyway would show it. So each rank sends its step number in a gather of its own before a
round of reductions: not with the gradients (a rank sees only its own slice of their sum), nor with the parameters (a
shard has no room for it). Rounds 1, 2, 4, 8 and each 16th are checked: ranks that differ keep differing, so they are
found all the same, and 15 of 16 rounds have no further collective. On CUDA the host does not wait: it reads the numbers
in the next round, when they have arrived long ago. The first round waits, for ranks that differ there may hang. A watch
sees these gathers, a recorder does not. Nothing is compared inside the capture of a CUDA graph, or on a muted
communicator.

[Note: which step] The announced one (`ShardedDataParallel.start_step`, `Watch.begin_step`, `Recorder.begin_step`).
Where not every rank announces one: the steps taken so far, and the forward passes in training that no backward pass
followed, which is what a step omitted after its forward pass looks like. A rank that omits the forward pass too
is noticed only where steps are announced.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from collectives.alike import spread
from collectives.sharded.bucket import Bucket, BucketPlan
from collectives.sharded.gradient import CopyIn
from collectives.sharded.policies import MOST_OF_FREE, Choice
from collectives.transport.communicator import Communicator, Work
from collectives.transport.peer_reduce import DTYPES, PeerReduce
from collectives.transport.symmetric import why_unusable
from collectives.transport.windows import Windows
from netlayer.errors import CheckFailed
from netlayer.workload.buckets import COPIES_AT_ONCE, buffer_sizes


@dataclass(frozen=True)
class Reduction:
    """Choice of what is reduced over whom, whichever backend does it.

    Args:
        comm: which nothing else uses but calls from the same place in every rank's program.
        dtype: of gradients on the wire.
        mean: over ranks; False: sums.
        replicas: of ranks that hold the same shard; None: there are no replicas.
    """

    comm: Communicator
    dtype: torch.dtype
    mean: bool = True
    replicas: Communicator | None = None


class ReduceScatter(ABC):
    """Reduce-scatters of buckets' gradients, to means (or sums) over ranks on the shards.

    Args:
        reduction: what is reduced, and over whom.
        divides: the backend divides as it adds: [Note: means].
        sum_dtype: in which sums come; None: the dtype on the wire.
    """

    def __init__(self, reduction: Reduction, *, divides: bool = False, sum_dtype: torch.dtype | None = None) -> None:
        comm, dtype, mean, replicas = reduction.comm, reduction.dtype, reduction.mean, reduction.replicas
        self.comm, self.dtype, self.replicas = comm, dtype, replicas
        self._can_add = False
        # Copy engines' sums are wider than what travels.
        self._sum_dtype = sum_dtype or dtype
        num_replicas = 1 if replicas is None else replicas.world_size
        # A mean is over everyone that has gradients of the parameter, the replicas' ranks among them.
        num_ranks = comm.world_size * num_replicas
        self._gets_means = mean and divides  # [Note: means]
        has_to_divide = mean and not self._gets_means
        is_short = has_to_divide and dtype == torch.float16  # [Note: float16]
        self.divisor = 1 << (num_ranks - 1).bit_length() if is_short else 1
        """Of gradients, before their sum."""
        # What the shards' group has divided already is still to be divided by the replicas.
        to_divide = num_ranks if has_to_divide else num_replicas if mean else 1
        self.scale = self.divisor / to_divide
        """Of sums."""
        self.stream = comm.post_reduce_stream
        """What makes the mean of a sum, and a step, runs there."""
        self.gradients: Mapping[int, Tensor] = {}
        """Memory where reduced gradients stay, by the index of a bucket; of others any memory will do."""

    def is_local(self, bucket: Bucket) -> bool:
        """Whether nothing is sent: one rank alone, whose gradients lose no digits where the optimiser reads them."""
        # Where the optimiser's dtype holds all that would travel, adding up there loses nothing.
        wide = bucket.master_S.dtype
        return self.comm.world_size == 1 and self.replicas is None and torch.promote_types(wide, self.dtype) == wide

    def acquire(self, bucket: Bucket) -> None:
        """Open a bucket's gradients in what its reduce-scatter sends: autograd adds them up there.

        It is the bucket that is launched next.
        """
        bucket.open_new(self.dtype)

    def allocate(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Memory for the gradients of a bucket on their way, and for their sum: that nothing under way uses."""
        whole_N = bucket.unsharded_N.new_empty(bucket.plan.padded_numel, dtype=self.dtype)
        return whole_N, whole_N.new_empty(bucket.plan.shard_numel)

    def __call__(self, bucket: Bucket, adds: bool) -> Work:
        """Send the gradients of a bucket; they are gone from it.

        Args:
            bucket: of one that `is_local` the shard is open for its gradients.
            adds: to the reduced gradients that the shard holds, where they travel.
        """
        if self.is_local(bucket):
            # Most was added up where the optimiser reads it; what autograd has put elsewhere is copied there.
            assert bucket.local_N is bucket.grad_S, "open where gradients stay"
            bucket.copy_in(bucket.grad_S.dtype).fill()
            # A work all the same, so that callers wait for it as for any other.
            return Work(self.comm, None, None, None, None, ())
        # Allocated here if it is not: on the stream that reads it, and not on the one that writes a sum into it.
        _ = bucket.grad_S
        copy_in, shard_S = self._copy_in(bucket)
        has_grads_dtype = self._sum_dtype == bucket.grad_S.dtype
        if adds and self._can_add and has_grads_dtype and self.scale == 1 and self.replicas is None:
            return self._reduce(bucket.grad_S, copy_in, adds=True)
        if not adds and has_grads_dtype:
            output_S = bucket.grad_S  # nothing to add to, and no cast: the sum lands where the optimiser reads it
        elif shard_S is None or shard_S is bucket.grad_S:
            output_S = copy_in.buffer.new_empty(bucket.plan.shard_numel, dtype=self._sum_dtype)
        else:
            output_S = shard_S
        # The one collective of the bucket: all that follows waits for it on the side stream, not on the host.
        work = self._reduce(output_S, copy_in)
        if self.replicas is not None:
            # The side stream's wait for it holds up no computation, and is in no record.
            work.then_launch(functools.partial(self.replicas.start_all_reduce, output_S), self.stream)
        # Else the sum has landed where, and as, the optimiser reads it.
        if self.scale != 1 or output_S is not bucket.grad_S:
            work.then(functools.partial(bucket.store_reduced, output_S, self.scale, adds), self.stream)
        return work

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Give all memory back, once the device has come here. Every rank does so at the same point; twice is once."""

    def _copy_in(self, bucket: Bucket) -> tuple[CopyIn, Tensor | None]:
        """The gradients to send, and memory for their sum where there is some."""
        return bucket.copy_in(self.dtype, self.divisor), None

    @abstractmethod
    def _reduce(self, output_S: Tensor, copy_in: CopyIn, adds: bool = False) -> Work:
        """Launch the sum (or mean, where this backend divides) of the ranks' gradients into `output_S`.

        Args:
            adds: to what that holds, where the backend can (`_can_add`).
        """


class GlooReduceScatter(ReduceScatter):
    """Sums by gloo: where it has no reduce-scatter of the dtype, by an all-reduce in a wide one."""

    def _reduce(self, output_S: Tensor, copy_in: CopyIn, adds: bool = False) -> Work:  # noqa: ARG002
        return self.comm.reduce_scatter(output_S, copy_in.buffer, copy_in.fill, copy_in.read)


@dataclass
class _Buffer:
    """A buffer in a window, for a bucket whole [N] and for its shard [S]; the last work that has used it."""

    whole: Tensor
    shard: Tensor
    user: Work | None = None


class NcclReduceScatter(ReduceScatter):
    """Sums, or means over a power of two of ranks, by NCCL; from windows where it is given any.

    Args:
        windows: in which `buffers` and `gradients` lie; kept as long. None: gradients travel in memory that is
            allocated for them.
        buffers: for a bucket whole and for its shard, one more than are in flight, which take turns; some may be too
            small for some buckets.
        gradients: where reduced gradients stay, by the index of a bucket.
    """

    def __init__(
        self,
        reduction: Reduction,
        *,
        windows: Windows | None = None,
        buffers: Sequence[tuple[Tensor, Tensor]] = (),
        gradients: Mapping[int, Tensor] | None = None,
    ) -> None:
        super().__init__(reduction, divides=reduction.comm.divides_on_the_way and windows is None)
        self.windows, self.gradients = windows, gradients or {}
        self._buffers = [_Buffer(*buffer) for buffer in buffers]
        """Those that were taken last come last."""
        self._acquired: tuple[Tensor, Tensor] | None = None
        """Of the buffers, the pair that the next bucket to be launched fills already."""

    def acquire(self, bucket: Bucket) -> None:
        if not self._buffers:
            super().acquire(bucket)
            return
        # Kept, for buffers take turns: the one that is filled from now on must be the one that is sent.
        self._acquired = self.allocate(bucket)
        bucket.open(self._acquired[0])

    def allocate(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        if not self._buffers:
            return super().allocate(bucket)
        plan = bucket.plan
        # By the order of use alone, and not by what has landed: a peer looks for this one where its own lies.
        index = next(i for i, each in enumerate(self._buffers) if len(each.whole) >= plan.padded_numel)
        buffer = self._buffers.pop(index)
        self._buffers.append(buffer)
        # Whoever used it last may still be on its way: its sum must have been read before gradients come here.
        user, buffer.user = buffer.user, None
        if user is not None:
            user.wait()
        # The shard's part is sized by the buckets that need it: the sums of all others land in `grad_S`.
        has_room = len(buffer.shard) >= plan.shard_numel
        shard_S = buffer.shard[: plan.shard_numel] if has_room else bucket.grad_S
        return buffer.whole[: plan.padded_numel], shard_S

    def __call__(self, bucket: Bucket, adds: bool) -> Work:
        work = super().__call__(bucket, adds)
        # The buffer taken last is this bucket's, for `allocate` puts what it hands out at the end.
        if self._buffers and not self.is_local(bucket):
            self._buffers[-1].user = work
        return work

    def close(self) -> None:
        if self.windows is not None:
            self.windows.close()

    def _copy_in(self, bucket: Bucket) -> tuple[CopyIn, Tensor | None]:
        if not self._buffers:
            return super()._copy_in(bucket)
        # Where gradients were not added up in a buffer (they came from elsewhere), one is taken now.
        whole_N, shard_S = self._acquired or self.allocate(bucket)
        self._acquired = None
        return bucket.copy_in(self.dtype, self.divisor, whole_N), shard_S

    def _reduce(self, output_S: Tensor, copy_in: CopyIn, adds: bool = False) -> Work:  # noqa: ARG002
        return self.comm.reduce_scatter(output_S, copy_in.buffer, copy_in.fill, copy_in.read, self._gets_means)


class PeerReduceScatter(ReduceScatter):
    """Sums or means, in float32, of what copy engines have carried to the peers (`collectives.transport.peer_reduce`).

    Args:
        peers: carries and adds.
    """

    def __init__(self, reduction: Reduction, *, peers: PeerReduce) -> None:
        # The kernel that adds what peers have sent reads it once, and divides at no cost.
        super().__init__(reduction, divides=True, sum_dtype=torch.float32)
        self._peers, self._can_add = peers, True

    def close(self) -> None:
        self._peers.close()

    def _reduce(self, output_S: Tensor, copy_in: CopyIn, adds: bool = False) -> Work:
        mean = self._gets_means
        return self.comm.reduce_scatter(output_S, copy_in.buffer, copy_in.fill, copy_in.read, mean, self._peers, adds)


def open_reduce_scatter(
    reduction: Reduction,
    plans: Sequence[BucketPlan],
    master_dtypes: Sequence[torch.dtype],
    *,
    in_flight: int,
    adds: bool,
    windows: bool,
    peers: Choice,
) -> ReduceScatter:
    """Open the reduce-scatters of a module's gradients by the backend that its communicator and settings give.

    Args:
        reduction: what is reduced, and over whom.
        plans, master_dtypes: of the buckets.
        in_flight: reduce-scatters that may be under way.
        adds: sums are added to those of a pass before: then none stays where it lands.
        windows: gradients travel in NCCL's windows.
        peers: they are copied to the peers, whatever `windows` says; "auto": beside windows, where that can be had.

    Raises:
        ValueError: the peers' memory cannot be written to, or takes no `dtype`.
    """
    comm, dtype = reduction.comm, reduction.dtype
    # One rank alone exchanges nothing: windows and copies would only cost memory.
    if comm.group is not None and (windows if peers == "auto" else peers):
        reason = _why_no_copies(comm, plans, dtype, may_omit=peers == "auto")
        if reason is not None and peers is True:
            raise ValueError(f"peer_reduce: gradients cannot be copied to the peers ({reason}); omit it")
        peers = reason is None
    # One rank alone has no group: nothing travels, whatever was asked for.
    if comm.group is not None and peers is True:
        return PeerReduceScatter(reduction, peers=_open_peer_reduce(comm, plans, dtype))
    if comm.group is not None and windows:
        return _open_in_windows(reduction, plans, master_dtypes, in_flight + 1, adds)
    # By the device alone: the wrapper has refused groups whose backend cannot carry it.
    backend = GlooReduceScatter if comm.device.type == "cpu" else NcclReduceScatter
    return backend(reduction)


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that are free on a GPU, those that torch keeps for itself too; None: it is no GPU."""
    if device.type != "cuda":
        return None
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + kept


def _why_no_copies(
    comm: Communicator, plans: Sequence[BucketPlan], dtype: torch.dtype, *, may_omit: bool
) -> str | None:
    """Return why gradients cannot be copied to the peers, the same on all ranks, who all call it; None: they can.

    Args:
        may_omit: nobody has asked for copies, which may take a part of the free memory then (`policies`).
    """
    # Asked on every rank, whatever this rank has: it is collective.
    reason = why_unusable(comm.group, comm.device)
    if reason is None and dtype not in DTYPES:
        reason = f"gradients travel in {dtype}"
    if reason is not None or not may_omit:
        return reason
    # Each of the windows that take turns holds what all peers send of the largest bucket.
    needed = COPIES_AT_ONCE * max((plan.padded_numel for plan in plans), default=0) * dtype.itemsize
    free = free_bytes(comm.device)
    has_room = free is None or needed <= MOST_OF_FREE * free
    # Copies need both ends: one rank without room means that no rank copies.
    rooms = comm.all_gather_ints([int(has_room)], "copies to peers")
    return None if all(room for [room] in rooms) else "a GPU has no memory for copies beside"


def _open_peer_reduce(comm: Communicator, plans: Sequence[BucketPlan], dtype: torch.dtype) -> PeerReduce:
    """Open the reduction of gradients by copies to the peers, with buffers for the largest bucket."""
    assert comm.group is not None
    part_bytes = max((plan.shard_numel for plan in plans), default=0) * dtype.itemsize
    peers = PeerReduce(comm.group, comm.device, part_bytes, comm.peer_streams)
    # Streams are few: the next wrapper on this communicator shares them.
    comm.peer_streams = peers.streams
    return peers


def _open_in_windows(
    reduction: Reduction,
    plans: Sequence[BucketPlan],
    master_dtypes: Sequence[torch.dtype],
    count: int,
    adds: bool,
) -> NcclReduceScatter:
    """Register with NCCL one allocation for all buffers of the reduce-scatters: pairs of input and output, and shards.

    Args:
        count: of the buffers: one more than may be in flight, for the next bucket's gradients fill it meanwhile.
        adds: gradients add up in the masters' shards over passes, so none is reduced in place.
    """
    comm, dtype = reduction.comm, reduction.dtype
    assert comm.group is not None
    of_plans = zip(plans, master_dtypes, strict=True)
    # Sums that nothing is added to, in the masters' dtype, can land where the optimiser reads them.
    staying = {plan.index: plan.shard_numel for plan, master in of_plans if not adds and master == dtype}
    wholes = buffer_sizes([plan.padded_numel for plan in plans], count)
    shards = [
        # Room for a sum that is cast or added afterwards, of the largest bucket that this buffer may carry.
        max((p.shard_numel for p in plans if p.index not in staying and p.padded_numel <= whole), default=0)
        for whole in wholes
    ]
    sizes = list(zip(wholes, shards, strict=True))
    # One registration for all: each costs a collective and a mapping on every rank.
    num_bytes = sum(Windows.room(whole, dtype) + Windows.room(shard, dtype) for whole, shard in sizes)
    num_bytes += sum(Windows.room(numel, dtype) for numel in staying.values())
    windows = Windows(comm.group, comm.device, num_bytes)
    buffers = [(windows.take(whole, dtype), windows.take(shard, dtype)) for whole, shard in sizes]
    gradients = {index: windows.take(numel, dtype) for index, numel in staying.items()}
    return NcclReduceScatter(reduction, windows=windows, buffers=buffers, gradients=gradients)


CHECKED_EVERY = 16
UNANNOUNCED = -1


class StepState(NamedTuple):
    """Step and settings of one rank.

    Args:
        announced: the step that the caller has announced, or `UNANNOUNCED`.
        counted: the step by this rank's own count.
        prefetch, overlap, step_in_backward: as in `ShardedDataParallel`, now.
        gather_in_backward: the share in millionths; 0 without `step_in_backward`.
    """

    announced: int
    counted: int
    prefetch: int
    overlap: int
    step_in_backward: int
    gather_in_backward: int


def announced_step(step: int | None, comm: Communicator) -> int:
    """Return the step that was announced to the wrapper (None: none was), else to the communicator's watch or
    recorder."""
    # The wrapper's own word first: a watch or a recorder may be shared with other wrappers, of other steps.
    of_watch = None if comm.track is None else comm.track.watch.step
    of_recorder = None if comm.recorder is None else comm.recorder.step
    return next((each for each in (step, of_watch, of_recorder) if each is not None), UNANNOUNCED)


class StepCheck:
    """Compares the places of all ranks before a round of reductions: [Note: what a check costs].

    Args:
        comm: of the reductions.
        place: where this rank is; asked when a round is checked.
    """

    def __init__(self, comm: Communicator, place: Callable[[], StepState]) -> None:
        self._comm, self._step_state = comm, place
        self._num_reductions = 0
        self._coming: tuple[Tensor, torch.cuda.Event, object] | None = None
        """Numbers of an earlier round on their way to the host, the event after that, and what is read until then."""
        self._launched: tuple[Work, Tensor] | None = None
        """The gather of this round, and its numbers, where `end_round` waits for it."""

    def begin_round(self, waits: bool = True) -> None:
        """Compare the places of all ranks; every rank calls it before the first reduction of a round.

        Args:
            waits: where the host has to. False: `end_round` does, for the other ranks may come here only after other
                collectives, which this one has yet to launch.

        Raises:
            CheckFailed: ranks are at different steps.
            ValueError: ranks run with different settings.
        """
        # Before anything is sent: a difference that is known already must not cost another round.
        self._look_at_earlier()
        self._num_reductions += 1
        comm = self._comm
        if comm.world_size == 1 or comm.muted or comm.is_capturing or not is_checked(self._num_reductions):
            return
        numbers = torch.empty(comm.world_size * len(StepState._fields), dtype=torch.int64, device=comm.device)
        # From pinned memory: a copy from other memory lets the host wait for all that the stream does by now.
        own = torch.tensor(self._step_state(), dtype=numbers.dtype, device="cpu", pin_memory=numbers.is_cuda)

        # On the communicator's stream, so after whatever still reads the memory that torch gives out again.
        def prepare() -> None:
            numbers.chunk(comm.world_size)[comm.rank].copy_(own, non_blocking=True)

        work = comm.all_gather(numbers, prepare, is_recorded=False)
        # On the CPU nothing comes by itself; and the first round is to be judged before what may hang is launched.
        if comm.stream is None or self._num_reductions == 1:
            self._launched = work, numbers
            if waits:
                self.end_round()
            return
        on_host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)

        def bring() -> None:
            on_host.copy_(numbers, non_blocking=True)

        work.then(bring, comm.stream)
        assert work.done_event is not None
        # Both are read on the device until the event: they must not be freed, and used again, before.
        self._coming = on_host, work.done_event, (numbers, own)

    def end_round(self) -> None:
        """Wait for what `begin_round` has left; errors as there."""
        if self._launched is not None:
            (work, numbers), self._launched = self._launched, None
            work.wait()
            self._judge(numbers)

    def _look_at_earlier(self) -> None:
        if self._coming is not None and not self._comm.is_capturing:
            numbers, landed, _ = self._coming
            self._coming = None
            landed.synchronize()
            self._judge(numbers)

    def _judge(self, numbers: Tensor) -> None:
        states = [StepState(*row) for row in numbers.view(self._comm.world_size, -1).tolist()]
        if len(set(states)) > 1:
            raise_difference(states, self._comm.ranks)


def is_checked(number: int) -> bool:
    """Whether the round of this number, counted from 1, is checked: see [Note: what a check costs]."""
    return number % CHECKED_EVERY == 0 or (number < CHECKED_EVERY and number & (number - 1) == 0)


def raise_difference(states: Sequence[StepState], ranks: Sequence[int]) -> None:
    """Raise what `StepCheck.begin_round` raises, if these places of these ranks differ."""
    # Settings first: ranks whose settings differ may be at different steps because of that.
    for field in StepState._fields[2:]:
        values = [getattr(place, field) for place in states]
        if len(set(values)) > 1:
            texts = [_format_setting(field, value) for value in values]
            raise ValueError(f"ranks differ in their settings: {spread(field, texts, ranks)}; give every rank the same")
    # A rank's own count is compared only where some rank has no announced step.
    are_announced = all(place.announced != UNANNOUNCED for place in states)
    steps = [place.announced if are_announced else place.counted for place in states]
    if len(set(steps)) > 1:
        hint = (
            "" if are_announced else ", and run forward passes that are not trained on under torch.no_grad() or eval()"
        )
        raise CheckFailed(
            f"ranks train different steps: {spread('step', steps, ranks)}; gradients of different steps may have been "
            f"averaged since the last check, so load a checkpoint; skip a step on every rank or on none{hint}"
        )


def _format_setting(field: str, value: int) -> str:
    if field == "gather_in_backward":
        return f"{value / 1e6:g}"
    return str(value) if field == "prefetch" else str(bool(value))

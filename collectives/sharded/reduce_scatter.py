"""Queue of reduce-scatters: the gradients of a bucket leave a rank, their sums land, one bucket after another.

Which bucket leaves when is `collectives.sharded.reduce`'s; the buffers are `collectives.sharded.bucket`'s. Not covered:
gathers.

[Note: float16] It ends at 65,504, which a sum over ranks soon passes where their mean does not. So gradients are
divided before the sum, by a power of two no less than the number of ranks (it rounds nothing but what is subnormal),
and the rest of the mean's factor comes after it. Other dtypes have room, and are divided once, after the sum.

[Note: means] Where NCCL divides by a power of two as it adds, that loses nothing and saves a pass over each shard; from
windows it would take its slower kernels for that. `PeerReduce` divides as it adds. So elsewhere sums come, and are
scaled as they are stored. Whoever divides the loss by the number of ranks wants no more than the sum (`mean=False`):
nothing is scaled then.

[Note: replicas] Where several groups hold the same shards, each sum is all-reduced among the ranks that hold the same
shard, in the dtype of the sum, before it is scaled and stored: bucket by bucket, after its reduce-scatter.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from collectives.sharded.bucket import Bucket, CopyIn
from collectives.transport.communicator import Communicator, Work
from collectives.transport.peer_reduce import PeerReduce
from collectives.transport.windows import Windows


@dataclass(frozen=True)
class ReduceScatterBuffers:
    """Buffers in which gradients travel, and in which their sums stay.

    Args:
        buffers: for a bucket whole and for its shard (where that does not stay in `grad_S`), one more than are in
            flight, which take turns; some may be too small for some buckets. Empty: gradients travel in memory that is
            allocated for them.
        gradients: where reduced ones stay, by the index of a bucket; of others in memory that is allocated for them.
        by: reduces in place of the communicator's backend, into float32.
        windows: in which all that lies; kept as long.
    """

    buffers: Sequence[tuple[Tensor, Tensor]] = ()
    gradients: Mapping[int, Tensor] = field(default_factory=dict)
    by: PeerReduce | None = None
    windows: Windows | None = None

    def close(self) -> None:
        """Give all of it back, once the device has come here. Every rank does so at the same point; twice is once."""
        for memory in (self.by, self.windows):
            if memory is not None:
                memory.close()


class ReduceScatterQueue:
    """Reduce-scatters of buckets, under way or landed, in the order of their launch.

    Args:
        comm: which nothing else uses but calls from the same place in every rank's program.
        dtype: of the sums on the wire.
        in_flight: reduce-scatters that may be under way; their buffers are all the memory that reduction takes.
        overlap: False: each is waited for at once.
        reduce_buffers: the memory that gradients travel in, and what reduces them.
        mean: over ranks; False: sums.
        replicas: of ranks that hold the same shard; None: there are no replicas.
    """

    def __init__(
        self,
        comm: Communicator,
        dtype: torch.dtype,
        in_flight: int,
        overlap: bool,
        reduce_buffers: ReduceScatterBuffers,
        mean: bool = True,
        replicas: Communicator | None = None,
    ) -> None:
        self._replicas = replicas
        num_replicas = 1 if replicas is None else replicas.world_size
        num_ranks = comm.world_size * num_replicas
        self.comm, self.dtype, self.in_flight, self.overlap = comm, dtype, in_flight, overlap
        self._buffers = list(reduce_buffers.buffers)
        """Those that were taken last come last."""
        self._acquired: tuple[Tensor, Tensor] | None = None
        """Of the buffers, the pair that the next bucket to be launched fills already."""
        self._under_way: dict[Work, Tensor] = {}
        """Works that have not been waited for, and the buffer that each has."""
        self._by, self._sum_dtype = reduce_buffers.by, dtype if reduce_buffers.by is None else torch.float32
        """The second: in which sums come."""
        divides = reduce_buffers.by is not None or (comm.divides_on_the_way and not reduce_buffers.buffers)
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
        self._works: deque[tuple[Bucket, Work]] = deque()

    def is_local(self, bucket: Bucket) -> bool:
        """Whether nothing is sent: one rank alone, whose gradients lose no digits where the optimiser reads them."""
        wide = bucket.grad_S.dtype
        return self.comm.world_size == 1 and self._replicas is None and torch.promote_types(wide, self.dtype) == wide

    def acquire_send_buffer(self, bucket: Bucket) -> None:
        """Open a bucket's gradients in the buffer that its reduce-scatter sends: autograd adds them up there.

        It is the bucket that is launched next; without buffers its gradients get new memory.
        """
        if self._buffers:
            # Kept, for buffers take turns: the one that is filled from now on must be the one that is sent.
            self._acquired = self.buffers_for(bucket)
            bucket.open(self._acquired[0])
        else:
            bucket.open_new(self.dtype)

    def launch(self, bucket: Bucket, adds: bool) -> Work:
        """Send the gradients of a bucket; they are gone from it. `launch_rest_of_previous` comes next.

        Args:
            bucket: of one that `is_local` the shard is open for its gradients.
            adds: to the reduced gradients that the shard holds, where they travel.
        """
        work = self._keep_local(bucket) if self.is_local(bucket) else self._send(bucket, adds)
        # Before anything lands: that may raise, and these gradients are on the wire by then.
        self._works.append((bucket, work))
        return work

    def launch_rest_of_previous(self) -> None:
        """Land the last but one: after the sends of the last, by when parts of peers in step have arrived.

        What lands may raise, and what was sent is still to be added: so it is no part of `launch`.
        """
        if len(self._works) > 1:
            self._works[-2][1].launch_rest()

    def launch_rest(self) -> None:
        """Land the last one too: nothing comes after it."""
        if self._works:
            self._works[-1][1].launch_rest()

    def wait_for_room(self) -> None:
        """Wait until no more reduce-scatters are in flight than `in_flight` allows."""
        while len(self._works) > (self.in_flight if self.overlap else 0):
            self._wait_first()

    def wait_all(self) -> None:
        """Wait until all gradients are reduced, on the current stream."""
        while self._works:
            self._wait_first()
        # No fill follows soon that would let go of what the last one has read.
        self.comm.free_filled()

    def as_they_come(self, buckets: Sequence[Bucket]) -> Iterator[Sequence[Bucket]]:
        """Yield these buckets: first those whose gradients are there, then each of the others after its wait."""
        under_way = [bucket for bucket, _ in self._works]
        yield [bucket for bucket in buckets if bucket not in under_way]
        while self._works:
            bucket = self._wait_first()
            # Reduced again in a later round: only after the last one its gradients are complete.
            if all(bucket is not later for later, _ in self._works):
                yield [bucket]
        self.comm.free_filled()

    def buffers_for(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Memory for the gradients of a bucket on their way, and for their sum: that nothing under way uses."""
        plan = bucket.plan
        if self._buffers:
            # By the order of use alone, and not by what has landed: a peer looks for this one where its own lies.
            index = next(i for i, (whole_N, _) in enumerate(self._buffers) if len(whole_N) >= plan.padded_numel)
            whole_N, shard_S = self._buffers[index]
            self._buffers.append(self._buffers.pop(index))
            while any(whole_N is buffer for buffer in self._under_way.values()):
                self._wait_first()
            # The shard's part is sized by the buckets that need it: the sums of all others land in `grad_S`.
            has_room = len(shard_S) >= plan.shard_numel
            return whole_N[: plan.padded_numel], shard_S[: plan.shard_numel] if has_room else bucket.grad_S
        whole_N = bucket.unsharded_N.new_empty(plan.padded_numel, dtype=self.dtype)
        return whole_N, whole_N.new_empty(plan.shard_numel)

    def _keep_local(self, bucket: Bucket) -> Work:
        """Put the gradients of a single rank where the optimiser reads them, if they are not there already."""
        assert bucket.local_N is bucket.grad_S, "open where gradients stay"
        bucket.copy_in(bucket.grad_S.dtype).fill()
        # A work all the same, so that callers wait for it as for any other.
        return Work(self.comm, None, None, None, None, ())

    def _send(self, bucket: Bucket, adds: bool) -> Work:
        copy_in, output_S = self._prepare(bucket, adds)
        work = self.comm.reduce_scatter(
            output_S, copy_in.buffer, copy_in.fill, copy_in.read, self._gets_means, self._by
        )
        if self._replicas is not None:
            work.then(functools.partial(self._replicas.all_reduce, output_S), self.stream)
        # Else the sum has landed where, and as, the optimiser reads it.
        if self.scale != 1 or output_S is not bucket.grad_S:
            work.then(functools.partial(bucket.store_reduced, output_S, self.scale, adds), self.stream)
        if self._buffers:
            self._under_way[work] = self._buffers[-1][0]
        return work

    def _prepare(self, bucket: Bucket, adds: bool) -> tuple[CopyIn, Tensor]:
        """The gradients to send, and where their sum goes."""
        whole_N = shard_S = None
        if self._buffers:
            whole_N, shard_S = self._acquired or self.buffers_for(bucket)
            self._acquired = None
        copy_in = bucket.copy_in(self.dtype, self.divisor, whole_N)
        if not adds and self._sum_dtype == bucket.grad_S.dtype:
            return copy_in, bucket.grad_S  # nothing to add to, and no cast: the sum lands where the optimiser reads it
        if shard_S is None or shard_S is bucket.grad_S:
            shard_S = copy_in.buffer.new_empty(bucket.plan.shard_numel, dtype=self._sum_dtype)
        return copy_in, shard_S

    def _wait_first(self) -> Bucket:
        bucket, work = self._works.popleft()
        self._under_way.pop(work, None)
        work.wait()
        return bucket

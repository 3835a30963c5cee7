"""All-gathers of parameters in 8 bits: weights that products read in float8 travel as such, with their scales.

A product quantises its weight by scales that are of the whole weight, or of blocks of it. Here each rank quantises its
own shard before it travels: half of bfloat16's bytes, and half of its memory. The scales need the largest magnitudes
over all shards: one small all-reduce for all weights, once after each optimiser step (torchao's
`precompute_float8_dynamic_scale_for_fsdp` does so too). The masters are rounded to the dtype of the computation first,
as they are for a gather in that, so a product reads the same bits either way. Products ask `hold` for a weight.

[Note: other readers] A bucket that travels in 8 bits has no memory for its parameters in the dtype of the computation.
Whoever reads or writes one past `hold` (a state_dict, `.data`) gathers its bucket in that dtype, on every rank at the
same place as in ZeRO stage 3. It then stays until the shards change, and products read that, as without 8 bits; so what
was written there counts. Where somebody holds a view of it, it is gathered in both forms from then on. The wrapper's
`close()` leaves it as it is then.

Not covered: steps inside the backward pass, CUDA graphs; parameters that no product reads in 8 bits, which have buckets
of their own (`collectives.sharded.prepare.plan_module`).

Shapes: N padded elements of a bucket, S of a rank's shard; E elements of a piece of a weight, K scales of a weight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from collectives.sharded.bucket import Bucket, BucketPlan
from collectives.transport.communicator import Communicator
from netlayer.workload.buckets import aligned_scales


class Quantiser(Protocol):
    """Quantisation of weights, piece by piece, to what quantising each of them whole gives."""

    def scales_shape(self, shape: torch.Size) -> tuple[int, ...]:
        """Shape of a weight's scales; (): one for all of it."""

    def largest(self, pieces: Sequence[PieceOfWeight], dtype: torch.dtype) -> list[Tensor]:
        """Return the largest magnitudes of pieces rounded to `dtype`, float32, [K] each; 0 where a piece has none."""

    def scales(self, largest_K: Tensor) -> Tensor:
        """Return the scales for largest magnitudes of whole weights, float32, [K]."""

    def cast(self, piece: PieceOfWeight, dtype: torch.dtype, scale: Tensor, out_E: Tensor) -> None:
        """Write a piece, rounded to `dtype` first, in float8.

        Args:
            scale: of the whole weight, in its shape.
            out_E: float8, [E].
        """


@dataclass(frozen=True)
class PieceOfWeight:
    """Elements of a weight that lie one after the other.

    Args:
        values: [E], in the dtype of the masters.
        start: place of the first one in the weight.
        shape: of the whole weight.
    """

    values: Tensor
    start: int
    shape: torch.Size


@dataclass(frozen=True)
class Float8Weights:
    """Choice of the weights that products read in 8 bits: they have buckets of their own.

    Args:
        picks: says by name and shape which these are.
        quantiser: by which they travel in 8 bits too; None: they travel as all others.
    """

    picks: Callable[[str, torch.Size], bool]
    quantiser: Quantiser | None = None


class Float8Bucket(Bucket):
    """A bucket of weights whose gathers are in 8 bits.

    `gathered_N` holds all weights in 8 bits. The memory of the parameters, `unsharded_N`, is there while `is_readable`
    alone: see [Note: other readers].

    Args:
        plan, flat_N, parameters, rank, grad_S: as of a `Bucket`.
        quantiser: of the weights.
        memory_N: for the weights in 8 bits; None: as allocated here.
        frees: they are freed between uses (ZeRO stage 3).
    """

    def __init__(
        self,
        plan: BucketPlan,
        flat_N: Tensor,
        parameters: Sequence[nn.Parameter],
        rank: int,
        quantiser: Quantiser,
        memory_N: Tensor | None = None,
        grad_S: Tensor | None = None,
        frees: bool = False,
    ) -> None:
        super().__init__(plan, flat_N, parameters, rank, None, grad_S, reshards=True)
        self._quantiser, self.frees = quantiser, frees
        if memory_N is None:
            memory_N = torch.empty(0 if frees else plan.padded_numel, dtype=torch.uint8, device=flat_N.device)
        self._gathered_N, self._is_there = memory_N, not frees
        shapes = [quantiser.scales_shape(slot.shape) for slot in plan.slots]
        # Kept in one place: whoever is handed a scale reads that of the last gather.
        self._scale_places = [aligned_scales(torch.Size(shape).numel()) for shape in shapes]
        self.scales_K = torch.zeros(sum(self._scale_places), dtype=torch.float32, device=flat_N.device)
        self._scales = [
            view[: torch.Size(shape).numel()].view(shape)
            for view, shape in zip(torch.split(self.scales_K, self._scale_places), shapes, strict=True)
        ]
        self._wait: weakref.WeakMethod[Any] | None = None
        self.forget_readable()
        for position, parameter in enumerate(self.parameters):
            _weights[parameter] = weakref.ref(self), position

    @property
    def gathered_N(self) -> Tensor:  # noqa: N802  (by its shape)
        """[N], float8 as bytes."""
        if not self._is_there:
            raise RuntimeError("the weights of this bucket are freed: ZeRO stage 3 gathers them before their unit runs")
        return self._gathered_N

    def wait_by(self, wait: Callable[[int], None]) -> None:
        """Have `wait`, a method, called with the bucket's index before weights are read in 8 bits; held weakly."""
        self._wait = weakref.WeakMethod(wait)

    def own_pieces(self) -> list[PieceOfWeight]:
        """Return this rank's part of each weight that it has any of."""
        low = self.rank * self.plan.shard_numel
        pieces = []
        for index, start, end in self.plan.pieces(self.rank):
            slot = self.plan.slots[index]
            pieces.append(PieceOfWeight(self.master_S[start:end], low + start - slot.offset, slot.shape))
        return pieces

    def largest(self) -> Tensor:
        """Largest magnitudes of this rank's part of all weights, as `scales_K` lies; 0 where it has none."""
        largest_K = torch.zeros_like(self.scales_K)
        places = torch.split(largest_K, self._scale_places)
        indices = [index for index, _, _ in self.plan.pieces(self.rank)]
        of_pieces = self._quantiser.largest(self.own_pieces(), self.plan.dtype)
        for index, of_piece in zip(indices, of_pieces, strict=True):
            places[index][: len(of_piece)] = of_piece
        return largest_K

    def set_scales(self, largest_K: Tensor) -> None:
        """Set the scales for the largest magnitudes of all ranks' parts."""
        self.scales_K.copy_(self._quantiser.scales(largest_K))

    @torch.no_grad()
    def copy_in_shard(self) -> None:
        """Quantise the master shard where an all-gather in place takes it from."""
        gathered_S = self.plan.own(self.gathered_N, self.rank)
        pieces = zip(self.plan.pieces(self.rank), self.own_pieces(), strict=True)
        for (index, start, end), piece in pieces:
            out_E = gathered_S[start:end].view(torch.float8_e4m3fn)
            self._quantiser.cast(piece, self.plan.dtype, self._scales[index], out_E)
        # What comes after the last weight travels too, and shall not be what the allocator left there.
        filled = max((end for _, _, end in self.plan.pieces(self.rank)), default=0)
        gathered_S[filled:].zero_()

    def copy_in_readable(self) -> None:
        """Put the master shard where an all-gather in the dtype of the computation takes it from."""
        assert self.shard_S is not None
        self.shard_S.copy_(self.master_S)

    def free(self) -> None:
        """Free the weights in 8 bits, on the stream that has allocated them."""
        # Autograd has saved nothing of them: `HeldWeight` looks whether they are there.
        self._is_there = False
        self._gathered_N.untyped_storage().resize_(0)

    def allocate(self) -> None:
        """Allocate the weights in 8 bits again, on the current stream; values are undefined."""
        self._is_there = True
        if self._gathered_N.numel() != self.plan.padded_numel:
            self._gathered_N = self._gathered_N.new_empty(self.plan.padded_numel)
        self._gathered_N.untyped_storage().resize_(self.plan.padded_numel)

    def open_readable(self) -> None:
        """Allocate the parameters in the dtype of the computation; values are undefined."""
        self.unsharded_N.untyped_storage().resize_(self.unsharded_N.nbytes)

    def forget_readable(self) -> None:
        """Free the parameters in the dtype of the computation, of which nobody holds a view."""
        self.is_readable = False
        self.unsharded_N.untyped_storage().resize_(0)

    def sync_masters(self) -> None:
        """Take over what was written into the parameters, where there is memory for them."""
        if self.is_readable:
            super().sync_masters()

    def take_loaded(self) -> None:
        if self.is_readable:
            super().take_loaded()

    def hold(self, position: int) -> HeldWeight:
        """Hold the weight at `position` as it is now, once it has come."""
        wait = None if self._wait is None else self._wait()
        if wait is not None:
            wait(self.plan.index)
        return HeldWeight(self, position)

    def weight(self, position: int) -> tuple[Tensor, Tensor] | Tensor:
        """The weight in float8 with its scales, or as it is in the dtype of the computation, where that is there."""
        slot = self.plan.slots[position]
        if self.is_readable:
            return self.unsharded_N[slot.offset : slot.end].view(slot.shape)
        data = self.gathered_N[slot.offset : slot.end].view(torch.float8_e4m3fn).view(slot.shape)
        return data, self._scales[position]

    def version(self, position: int) -> int:
        """Number of changes of a weight so far, as autograd counts them."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.parameters[position]._version


class HeldWeight:
    """A weight of one forward pass, to be read in it and in its backward pass.

    Args:
        bucket, position: of the weight.
    """

    def __init__(self, bucket: Float8Bucket, position: int) -> None:
        self._bucket, self._position = bucket, position
        self._version = bucket.version(position)
        self.shape = bucket.plan.slots[position].shape

    def read(self) -> tuple[Tensor, Tensor] | Tensor:
        """Return it in float8, [N, K], with its scales; or as it is, where it has come in the computation's dtype.

        Raises:
            RuntimeError: it has changed since it was held, or was freed.
        """
        if self._bucket.version(self._position) != self._version:
            name = self._bucket.plan.slots[self._position].name
            raise RuntimeError(f"{name} has changed since the forward pass: run the backward pass before the step")
        return self._bucket.weight(self._position)


# Beside the parameters, and not an attribute of theirs: that would be saved with them.
_weights: MutableMapping[Tensor, tuple[weakref.ref[Float8Bucket], int]] = WeakTensorKeyDictionary()


def hold(weight: Tensor) -> HeldWeight | None:
    """Hold a parameter that travels in 8 bits, as the next product reads it; None: it does not travel so."""
    reference, position = _weights.get(weight, (None, 0))
    bucket = None if reference is None else reference()
    return None if bucket is None else bucket.hold(position)


@torch.no_grad()
def share_scales(buckets: Sequence[Float8Bucket], comm: Communicator) -> None:
    """Set the scales of all weights from the shards of all ranks: one all-reduce, which every rank calls."""
    largest = [bucket.largest() for bucket in buckets]
    all_K = torch.cat(largest)
    # A maximum may drop a NaN; by an infinite scale the weight is as little finite.
    all_K.nan_to_num_(nan=float("inf"), posinf=float("inf"))
    comm.all_reduce(all_K, dist.ReduceOp.MAX)
    parts = torch.split(all_K, [len(each) for each in largest])
    for bucket, largest_K in zip(buckets, parts, strict=True):
        bucket.set_scales(largest_K)

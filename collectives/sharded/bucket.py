"""Buckets: which parameters travel together, and the flat buffers that they live in.

A bucket is a run of parameters in the order that the forward pass uses them, padded so that every rank owns an equal
shard. Parameters become views of the bucket's flat buffer, so an all-gather lands where they are read; each rank keeps
its shard in float32 (or wider) for the optimiser (ZeRO stage 2; MegaScale 3.2). Not covered: splitting a parameter over
buckets (one that is larger than a bucket gets a bucket of its own): its gradient comes whole and is read whole, so
parts would travel one after the other for the same time.

Shapes: N padded elements of a bucket, W ranks, S = N / W elements of a rank's shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.utils import dlpack

from collectives.sharded.gradient import CopyIn, ReducedPieces, ShardedGradient
from collectives.sharded.slot import GradientSlot
from collectives.triton_support import HAS_TRITON, IS_INTERPRETED
from netlayer.workload.buckets import cut, shard_elements


@dataclass(frozen=True)
class Slot:
    """Position of one parameter in its bucket; `offset` in elements."""

    name: str
    shape: torch.Size
    offset: int

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class BucketPlan:
    """The layout of one bucket, the same on every rank.

    Args:
        index: position among the buckets, in order of first use.
        dtype: of the computation, one for the whole bucket.
        slots: its parameters, one after the other from element 0; the padding comes last.
        world_size: number of ranks that share it.
        align: a shard is a multiple of so many elements.
        whole_shard: elements of a shard where no parameter is cut: each lies in the shard of one rank, with padding
            after the last of every rank; None: parameters are cut where shards end.
        is_float8: parameters travel in 8 bits (`collectives.sharded.float8`).
    """

    index: int
    dtype: torch.dtype
    slots: tuple[Slot, ...]
    world_size: int
    align: int = 1
    whole_shard: int | None = None
    is_float8: bool = False

    @property
    def numel(self) -> int:
        """Elements up to the end of the last parameter, without the padding after it."""
        return self.slots[-1].end

    @cached_property  # asked for at every launch
    def shard_numel(self) -> int:
        if self.whole_shard is not None:
            return self.whole_shard
        return shard_elements(self.numel, self.world_size, self.align)

    @property
    def padded_numel(self) -> int:
        return self.shard_numel * self.world_size

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Yield (start, end) of the padding before, between and after the parameters."""
        end = 0
        for slot in self.slots:
            if slot.offset > end:
                yield end, slot.offset
            end = slot.end
        if end < self.padded_numel:
            yield end, self.padded_numel

    def own(self, flat_N: Tensor, rank: int) -> Tensor:
        """The shard of `rank`, a view of shape [S]."""
        return flat_N[rank * self.shard_numel : (rank + 1) * self.shard_numel]

    def views(self, flat_N: Tensor) -> list[Tensor]:
        """Return every parameter's part of a flat buffer, in its own shape."""
        return [flat_N[slot.offset : slot.end].view(slot.shape) for slot in self.slots]

    def pieces(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """Yield (index of the slot, start, end) of each parameter's part in the shard of `rank`, in its elements."""
        low = rank * self.shard_numel
        for index, slot in enumerate(self.slots):
            start, end = max(slot.offset, low), min(slot.end, low + self.shard_numel)
            if start < end:
                yield index, start - low, end - low


def plan_buckets(
    parameters: Sequence[tuple[str, torch.Size, torch.dtype]],
    bucket_bytes: int | None,
    world_size: int,
    units: Sequence[int] = (),
    align: int = 1,
    whole: Sequence[bool] = (),
    float8: Sequence[bool] = (),
) -> list[BucketPlan]:
    """Cut parameters, in the order given, into buckets of at most `bucket_bytes`.

    A bucket also ends where the dtype or the unit changes, and holds at least one parameter, however large. The padding
    is less than `world_size` elements a bucket, or less than `align` times that.

    Args:
        parameters: name, shape and dtype of the computation, in order of first use.
        bucket_bytes: largest size of a bucket without its padding, unless one parameter is larger; None: no limit.
        world_size: number of ranks that share each bucket.
        units: for each parameter, which part of the model it belongs to; empty: all to one.
        align: every shard is a multiple of so many elements.
        whole: for each parameter, whether it must lie in the shard of one rank; these have buckets of their own. Empty:
            none.
        float8: for each parameter, whether it travels in 8 bits: in buckets of their own. Empty: none does.
    """
    if (bucket_bytes is not None and bucket_bytes < 1) or world_size < 1:
        raise ValueError(f"bucket_bytes and world_size must be at least 1, got {bucket_bytes} and {world_size}")
    sizes = [shape.numel() * dtype.itemsize for _, shape, dtype in parameters]
    none = [False] * len(parameters)
    of_parts = zip(parameters, units or [0] * len(parameters), whole or none, float8 or none, strict=True)
    kinds = [(dtype, unit, is_whole, is_float8) for (_, _, dtype), unit, is_whole, is_float8 in of_parts]
    plans = []
    # By the same function as the estimators of memory and traffic: both must see the same buckets.
    for index, run in enumerate(cut(sizes, kinds, bucket_bytes)):
        # The first stands for all: a run ends where the kind changes.
        if kinds[run.start][2]:
            packed, shard = _pack_whole([p[:2] for p in parameters[run.start : run.stop]], world_size, align, index)
            plans.append(BucketPlan(index, kinds[run.start][0], packed, world_size, align, shard))
            continue
        slots: list[Slot] = []
        for name, shape, _ in parameters[run.start : run.stop]:
            slots.append(Slot(name, shape, slots[-1].end if slots else 0))
        is_float8 = kinds[run.start][3]
        plans.append(BucketPlan(index, kinds[run.start][0], tuple(slots), world_size, align, is_float8=is_float8))
    return plans


def _pack_whole(
    parameters: Sequence[tuple[str, torch.Size]], world_size: int, align: int, first_rank: int
) -> tuple[tuple[Slot, ...], int]:
    """Place whole parameters on ranks, the largest first, on the rank with least; return slots and a shard's size.

    Args:
        first_rank: which rank, modulo their number, has the largest: another one in each bucket.
    """
    loads = [0] * world_size
    placed: list[tuple[int, int, tuple[str, torch.Size]]] = []
    # Every rank's part gets as large as the fullest one's, so the largest go first, to where least lies.
    for name, shape in sorted(parameters, key=lambda parameter: -parameter[1].numel()):
        # Ties begin at another rank in each bucket, or the first ranks would step the large ones of all buckets.
        rank = min(range(world_size), key=lambda rank: (loads[rank], (rank - first_rank) % world_size))
        placed.append((rank, loads[rank], (name, shape)))
        loads[rank] += shape.numel()
    shard = -(-max(loads) // align) * align
    slots = (Slot(name, shape, rank * shard + start) for rank, start, (name, shape) in placed)
    # `gaps` walks them from the start of the bucket to its end.
    return tuple(sorted(slots, key=lambda slot: (slot.offset, slot.end))), shard


class GradientShard:
    """Memory of a bucket's reduced gradient, which may be given back between two steps.

    It is allocated at its first use, on the current stream; views keep the old memory alive.

    Args:
        like_S: a tensor of its shape, dtype and device.
        spans: start, end and shape of each piece.
        flat_S: memory that stays; None: as allocated here, of zeros.
    """

    def __init__(
        self, like_S: Tensor, spans: Sequence[tuple[int, int, Sequence[int]]], flat_S: Tensor | None = None
    ) -> None:
        self._like_S, self._spans, self._stays = like_S, spans, flat_S is not None
        self._flat_S: Tensor | None = torch.zeros_like(like_S) if flat_S is None else flat_S
        self._pieces: list[Tensor] | None = None

    @property
    def flat(self) -> Tensor:
        """[S]; newly allocated it holds nothing: a reduction writes all of it."""
        if self._flat_S is None:
            self._flat_S = torch.empty_like(self._like_S)
        return self._flat_S

    @property
    def pieces(self) -> Sequence[Tensor]:
        """Its pieces, the same tensors as long as the memory stays."""
        if self._pieces is None:
            flat_S = self.flat
            self._pieces = [flat_S[start:end].view(shape) for start, end, shape in self._spans]
        return self._pieces

    def release(self) -> None:
        """Free the memory, unless the caller owns it."""
        if not self._stays:
            self._flat_S = self._pieces = None


@dataclass(frozen=True)
class Piece:
    """One rank's part of one parameter, which an optimiser steps.

    Args:
        name, shape: of the whole parameter.
        position: of the parameter in its bucket.
        parameter: a view of the master shard: 1-D, or of the parameter's shape in a bucket that cuts none.
        gradient: of the bucket; `grad` are the same elements of it, which become `parameter.grad` once it is complete.
        number: of the piece in its bucket.
    """

    name: str
    shape: torch.Size
    position: int
    parameter: nn.Parameter
    gradient: GradientShard
    number: int

    @property
    def grad(self) -> Tensor:
        return self.gradient.pieces[self.number]


def _kernel_syncs(master_S: Tensor, shard_S: Tensor) -> bool:
    """Whether `collectives.sharded.sync_masters_kernel` can run on these tensors.

    Triton's interpreter rounds to bfloat16 otherwise than GPUs and torch do, so there it is left to torch.
    """
    dtypes = (torch.float16, torch.bfloat16) if master_S.is_cuda else (torch.float16,) if IS_INTERPRETED else ()
    return HAS_TRITON and master_S.dtype == torch.float32 and shard_S.dtype in dtypes


class Bucket:
    """The buffers of one bucket on this rank.

    `unsharded_N` holds the parameters that the module computes with. `master_S` is this rank's shard in the dtype of
    the optimiser; where that is the dtype of the computation too, it is this rank's slice of `unsharded_N` itself, so
    there is nothing to copy before an all-gather; else `shard_S` is that slice. `grad_S` is the reduced gradient.

    [Note: freed parameters] The memory of a bucket that `reshards` comes and goes: all views of `unsharded_N`, the
    parameters and what autograd has saved of them, are of one storage, which is resized to nothing and back. To read a
    freed one would end the process: so it has another version meanwhile, and autograd refuses what it has saved of it.
    The masters lie apart, in any dtype.

    Args:
        plan: the layout.
        flat_N: initial values, in the dtype of the masters; taken over as a buffer where the dtype allows.
        parameters: one for each slot of the plan; their storage moves into `unsharded_N`.
        rank: whose shard this is.
        unsharded_N: memory for the parameters; None: as allocated here.
        grad_S: memory for the reduced gradient, of zeros in the dtype of the masters; None: as allocated here.
        reshards: its unsharded parameters are freed between uses (ZeRO stage 3): see [Note: freed parameters].
    """

    def __init__(
        self,
        plan: BucketPlan,
        flat_N: Tensor,
        parameters: Sequence[nn.Parameter],
        rank: int,
        unsharded_N: Tensor | None = None,
        grad_S: Tensor | None = None,
        reshards: bool = False,
    ) -> None:
        self.plan, self.parameters, self.rank, self.reshards = plan, tuple(parameters), rank, reshards
        # Into memory that is there already where gathers have to land in a window.
        self.unsharded_N = flat_N.to(plan.dtype) if unsharded_N is None else unsharded_N.copy_(flat_N)
        self.rounds = plan.dtype != flat_N.dtype
        """Whether parameters are of another dtype than their masters."""
        self.shares_storage = not self.rounds and not reshards
        shard_S = plan.own(self.unsharded_N if self.shares_storage else flat_N, rank)
        # `.data` has a version counter of its own: it counts what an optimiser does, not what a gather does.
        self.master_S = shard_S.data if self.shares_storage else shard_S.clone()
        self.shard_S = None if self.shares_storage else plan.own(self.unsharded_N, rank)
        spans = [
            (start, end, (end - start,) if plan.whole_shard is None else plan.slots[index].shape)
            for index, start, end in plan.pieces(rank)
        ]
        self.gradient = GradientShard(self.master_S, spans, grad_S)
        self.local_N: Tensor | None = None
        """Where gradients of this rank add up that are not reduced yet: of those in `_written`, the rest is nothing."""
        self._written: set[int] = set()
        for parameter, view in zip(self.parameters, plan.views(self.unsharded_N), strict=True):
            # A storage each, though the memory is the bucket's: its count shows aliases (`gather`, [Note: aliases]). In
            # one storage, which all of them free together, it shows those of the whole bucket.
            parameter.data = view if reshards else own_storage(view)
            parameter.grad = None
        # As they are now: `is_in_place` compares with them later.
        self._addresses = self._places()
        self.note_holders()
        self._is_freed = False
        self._copied_in: int | None = None
        """Version of the masters that `shard_S` holds, where an optimiser has written it."""
        self._loaded: int | None = None
        """Version of the masters that were loaded themselves."""
        self.pieces = [
            # Views of the shard and not copies: an optimiser that steps the pieces has stepped the shard.
            Piece(
                plan.slots[index].name,
                plan.slots[index].shape,
                index,
                nn.Parameter(self.master_S[start:end].view(shape)),
                self.gradient,
                number,
            )
            for number, ((index, _, _), (start, end, shape)) in enumerate(zip(plan.pieces(rank), spans, strict=True))
        ]
        self.used: set[int] = set()
        """Positions of the parameters that have had a gradient on this rank since gradients were dropped."""
        self.cleared: set[int] = set()
        """Of those whose reduced gradient somebody has forgotten by `.grad = None`."""
        self._stand_ins: list[ShardedGradient] = []
        self._stand_in_at: set[int] = set()
        """Positions of the parameters that a stand-in was put on, as their `.grad`."""

    @property
    def gathered_N(self) -> Tensor:  # noqa: N802  (by its shape)
        """Memory that an all-gather of the parameters fills."""
        return self.unsharded_N

    is_readable = True
    """Whether there is memory for the parameters as the module has them, once they are gathered."""

    def note_holders(self) -> None:
        """Note the present holders of the parameters' memory; any that come later count as aliases."""
        self._num_holders = [num_holders(parameter) for parameter in self.parameters]

    def note_copied_in(self) -> None:
        """Note that an optimiser has written `shard_S` with the masters, after the backward pass.

        What is written into them after that is published all the same where autograd counts it: not through `.data`.
        """
        self._copied_in = self.master_S._version

    @property
    def steppable_shard(self) -> Tensor | None:
        """Return `shard_S` if an optimiser may write it with the masters; None if there is none, or it is freed."""
        return None if self.reshards else self.shard_S

    def copy_in_shard(self) -> None:
        """Copy the master shard to where an in-place all-gather reads it."""
        # An optimiser that has written `shard_S` with the masters spares this pass over the shard.
        if self.shard_S is not None and (self.reshards or self._copied_in != self.master_S._version):
            self.shard_S.copy_(self.master_S)

    def free(self) -> None:
        """Free the memory of the unsharded parameters, on the stream that has allocated it."""
        self._is_freed = True
        self.unsharded_N.untyped_storage().resize_(0)
        torch.autograd.graph.increment_version(self.parameters)

    def allocate(self) -> None:
        """Allocate freed memory of the unsharded parameters, on the current stream; values are undefined."""
        if not self._is_freed:
            return
        self._is_freed = False
        self.unsharded_N.untyped_storage().resize_(self.unsharded_N.nbytes)
        # The values of the graph's forward pass come back, unless the shards have changed: that has been counted too.
        before = tuple(parameter._version - 1 for parameter in self.parameters)
        torch._C._autograd._unsafe_set_version_counter(self.parameters, before)

    @torch.no_grad()
    def sync_masters(self) -> None:
        """Copy into the master shard what was written into the parameters.

        An element counts as written where it is not what its master rounds to: all others keep their precision.
        """
        if self.shard_S is None:
            return
        if _kernel_syncs(self.master_S, self.shard_S):
            # Imported here: Triton takes a second to load, and only a program on GPUs has it.
            from collectives.sharded.sync_masters_kernel import sync_written

            sync_written(self.master_S, self.shard_S)
            # Autograd does not see what a kernel writes, and gathers go by the version.
            torch.autograd.graph.increment_version(self.master_S)
        else:
            is_kept_S = self.shard_S == self.master_S.to(self.shard_S.dtype)
            torch.where(is_kept_S, self.master_S, self.shard_S, out=self.master_S)

    def note_masters_loaded(self) -> None:
        """Note that masters were loaded in full precision, so that loading the (rounded) parameters keeps them."""
        self._loaded = self.master_S._version

    def holds_masters(self) -> bool:
        """Whether this rank's slice of the parameters is what the masters round to."""
        # Freed parameters come from the masters, whatever these hold.
        if self.shard_S is None or self.reshards:
            return True
        return torch.equal(self.shard_S, self.master_S.to(self.shard_S.dtype))

    @torch.no_grad()
    def take_loaded(self) -> None:
        """Set the masters to the parameters, which were loaded."""
        if self.shard_S is None:
            return
        # Masters were loaded in full precision just before: only what now differs from them is newer.
        if self._loaded == self.master_S._version:
            self.sync_masters()
            self.note_masters_loaded()
        else:
            self.master_S.copy_(self.shard_S)

    @property
    def num_writes(self) -> int:
        """Number of writes into parameters that autograd counts: in place, and not through `.data`."""
        # Also of parameters that are not current: see `collectives.sharded.gather`.
        with torch._C.DisableTorchFunctionSubclass():
            return sum(parameter._version - self._is_freed for parameter in self.parameters)

    def is_in_place(self) -> bool:
        """Whether the module still computes with this buffer (`module.to()` would have moved it away)."""
        with torch._C.DisableTorchFunctionSubclass():
            # Otherwise asking a pending parameter for its address would wait for its gather.
            return self._places() == self._addresses

    def _places(self) -> tuple[tuple[int, int], ...]:
        """Return each parameter's address, or its storage and offset if the memory is freed and allocated again."""
        if self.reshards:
            return tuple((p.untyped_storage()._cdata, int(p.storage_offset())) for p in self.parameters)
        return tuple((p.data_ptr(), 0) for p in self.parameters)

    def has_aliases(self) -> bool:
        """Whether the program holds a tensor over the memory of a parameter, such as its `.data`."""
        with torch._C.DisableTorchFunctionSubclass():
            return any(
                num_holders(parameter) > usual
                for parameter, usual in zip(self.parameters, self._num_holders, strict=True)
                # An empty one has no storage of its own to count holders of.
                if parameter.numel()
            )

    def open(self, flat_N: Tensor, holds_all: bool = False) -> None:
        """Let gradients add up in `flat_N` from now on.

        Args:
            holds_all: whether it holds a gradient of every parameter already.
        """
        self.local_N = flat_N
        self._written = set(range(len(self.parameters))) if holds_all else set()

    def open_new(self, dtype: torch.dtype) -> None:
        """Let gradients add up in new memory from now on."""
        # Not zeroed: a first gradient is copied, and `_clear_rest` zeroes what has none before it travels.
        self.open(torch.empty(self.plan.padded_numel, dtype=dtype, device=self.unsharded_N.device))

    @property
    def is_wide_enough(self) -> bool:
        """Whether gradients add up in a dtype that loses no digits."""
        return self.local_N is not None and self.local_N.dtype == torch.promote_types(
            self.local_N.dtype, self.plan.dtype
        )

    def slot(self, position: int) -> GradientSlot | None:
        """Return the slot for a parameter's gradient; None: no buffer is open, or its dtype would lose digits."""
        if self.local_N is None or not self.is_wide_enough:
            return None
        place, adds = self.plan.slots[position], position in self._written
        # At once, for the operator writes before it returns: the next gradient of this parameter must be added.
        self._written.add(position)
        self.used.add(position)
        return GradientSlot(self.local_N[place.offset : place.end].view(place.shape), adds)

    @torch.no_grad()
    def fold_gradients(self, dtype: torch.dtype) -> None:
        """Move the parameters' gradients into `local_N` (added to what is there, else in `dtype`)."""
        if self.local_N is None:
            self.open_new(dtype)
        grads = self._grads()
        assert self.local_N is not None
        self._put(self.local_N, grads, self._written)
        present = {position for position, grad in enumerate(grads) if grad is not None}
        self._written |= present
        self.used |= present
        # Left there, autograd would add the next pass's to them, and they would be counted twice.
        self.drop_gradients()

    def copy_in(self, dtype: torch.dtype, divisor: int = 1, buffer_N: Tensor | None = None) -> CopyIn:
        """Hand over every gradient of this rank, to be divided by `divisor`: nothing is computed here, or kept.

        Args:
            buffer_N: to travel in, of `dtype`; None: what holds them already, or as allocated here.
        """
        if self.local_N is None and buffer_N is not None:
            self.open(buffer_N)
        elif self.local_N is None:
            self.open_new(dtype)
        # `fill` goes by these: when it runs, the bucket itself has forgotten them and may hold the next pass's.
        local_N, written, grads = self.local_N, self._written, self._grads()
        assert local_N is not None
        self.used |= {position for position, grad in enumerate(grads) if grad is not None}
        self.forget()
        # Without a buffer of the caller's they travel from where they added up, unless they must be cast.
        flat_N = buffer_N
        if flat_N is None:
            flat_N = local_N if local_N.dtype == dtype else torch.empty_like(local_N, dtype=dtype)

        @torch.no_grad()
        def fill() -> None:
            self._put(local_N, grads, written)
            self._clear_rest(local_N, grads, written)
            if divisor > 1:
                torch.div(local_N, divisor, out=flat_N)
            elif flat_N is not local_N:
                flat_N.copy_(local_N)

        # Kept by the caller until its stream has read them: freed earlier, their memory could be handed out again.
        apart = [] if local_N is flat_N else [local_N]
        return CopyIn(flat_N, fill, [*apart, *(grad for grad in grads if grad is not None)])

    def forget(self) -> None:
        """Drop all gradients that are not reduced yet."""
        self.local_N, self._written = None, set()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget the gradients on the parameters; what has added up stays."""
        self._stand_in_at.clear()
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self.parameters:
                parameter.grad = None

    def clear_gradients(self, positions: Collection[int], set_to_none: bool) -> None:
        """Forget the gradients of these parameters, on the parameters and of the pieces.

        Raises:
            RuntimeError: some have added up that are not reduced yet.
        """
        unreduced = [position for position in positions if self.local_N is not None and position in self._written]
        if unreduced:
            raise RuntimeError(
                f"gradients of {self.plan.slots[unreduced[0]].name} were left unreduced by no_sync(), which one of "
                "several optimisers cannot drop: call zero_grad() of the wrapper"
            )
        for piece in self.pieces:
            if piece.position in positions and piece.parameter.grad is not None:
                if set_to_none:
                    piece.parameter.grad = None
                else:
                    piece.parameter.grad.zero_()
        if set_to_none:
            with torch._C.DisableTorchFunctionSubclass():
                for position in positions:
                    self.parameters[position].grad = None

    @property
    def grad_S(self) -> Tensor:  # noqa: N802  (by its shape)
        """Reduced gradient, this rank's shard."""
        return self.gradient.flat

    def release_gradient(self) -> None:
        """Free the memory of the reduced gradient until the next one comes; not while a piece has one."""
        if all(piece.parameter.grad is None for piece in self.pieces):
            self.gradient.release()

    def keep_reduced(self) -> bool:
        """Whether pieces hold gradients that the next reduction must add to; if so, `grad_S` holds just those."""
        if all(piece.parameter.grad is None for piece in self.pieces):
            return False
        for piece in self.pieces:
            # The next sums are added to the shard as a whole, so what counts for nothing must be zero.
            if piece.parameter.grad is None:
                piece.grad.zero_()
            elif piece.parameter.grad is not piece.grad:  # the user put another tensor there
                piece.grad.copy_(piece.parameter.grad)
        return True

    def store_reduced(self, reduced_S: Tensor, scale: float, add: bool) -> None:
        """`grad_S` (+)= `scale * reduced_S`, rounded once; `reduced_S` may be `grad_S` itself where nothing is added.

        Args:
            reduced_S: sum or mean over the ranks, as it came.
            add: to what is there.
        """
        is_exact = math.frexp(scale)[0] == 0.5  # a power of two
        if add:
            self.grad_S.add_(reduced_S.to(self.grad_S.dtype), alpha=scale)
        elif scale == 1:
            self.grad_S.copy_(reduced_S)
        # In one pass: before a cast, only a power of two rounds nothing.
        elif is_exact or reduced_S.dtype == self.grad_S.dtype:
            torch.mul(reduced_S, scale, out=self.grad_S)
        else:
            self.grad_S.copy_(reduced_S).mul_(scale)

    def _grads(self) -> list[Tensor | None]:
        with torch._C.DisableTorchFunctionSubclass():
            grads = [parameter.grad for parameter in self.parameters]
        # A stand-in means a gradient that is reduced already: it must not travel again.
        return [None if isinstance(grad, ShardedGradient) else grad for grad in grads]

    def has_gradients(self) -> bool:
        """Whether a parameter has one that is not reduced."""
        return any(grad is not None for grad in self._grads())

    def show_reduced(self, positions: Iterable[int], source: ReducedPieces) -> None:
        """Let `.grad` of these parameters stand for the reduced gradients that `source` can reach."""
        if not self._stand_ins:
            places = ((self.plan.index, position) for position in range(len(self.parameters)))
            self._stand_ins = [
                ShardedGradient(parameter, source, place)
                for parameter, place in zip(self.parameters, places, strict=True)
            ]
        self._stand_in_at = set(positions)
        with torch._C.DisableTorchFunctionSubclass():
            for position in self._stand_in_at:
                self.parameters[position].grad = self._stand_ins[position]

    def note_cleared(self, hides: bool, positions: Iterable[int] | None = None) -> None:
        """Add to `cleared` the parameters whose `.grad` the program has set to None since `show_reduced`.

        Args:
            hides: take the stand-ins away, for new gradients to come.
            positions: to look at; None: all.

        Raises:
            RuntimeError: somebody has put another gradient there.
        """
        for position in list(self._stand_in_at) if positions is None else self._stand_in_at.intersection(positions):
            parameter = self.parameters[position]
            with torch._C.DisableTorchFunctionSubclass():
                grad = parameter.grad
            if grad is None:
                self._stand_in_at.discard(position)
                self.cleared.add(position)
            elif not isinstance(grad, ShardedGradient):
                raise RuntimeError(
                    f"a gradient was put on parameter {self.plan.slots[position].name} after the backward pass had "
                    "reduced it: change this rank's piece, by finish_gradients() and named_shards() of the wrapper"
                )
            elif hides:
                self._stand_in_at.discard(position)
                with torch._C.DisableTorchFunctionSubclass():
                    parameter.grad = None

    def forget_cleared(self) -> None:
        """Zero the reduced gradients that were cleared, before new ones are added to them."""
        for piece in self.pieces:
            if piece.position in self.cleared:
                piece.parameter.grad = None
                piece.grad.zero_()
        # Until a new gradient comes they count as unused, as a parameter without `.grad` does in plain torch.
        self.used -= self.cleared
        self.cleared.clear()

    def _put(self, flat_N: Tensor, grads: Sequence[Tensor | None], written: Set[int]) -> None:
        """Copy gradients into their places, or add them where something is."""
        if all(grad is None for grad in grads):  # the operators wrote them there
            return
        places = list(zip(self.plan.views(flat_N), grads, strict=True))
        kept = [places[position] for position in written]
        # The memory was not zeroed, so a first gradient is copied, and only later ones are added.
        fresh = [place for position, place in enumerate(places) if position not in written]
        _foreach(torch._foreach_copy_, fresh)
        _foreach(torch._foreach_add_, kept)

    def _clear_rest(self, flat_N: Tensor, grads: Sequence[Tensor | None], written: Set[int]) -> None:
        """Zero the places of parameters without a gradient, and the padding."""
        # Padding travels too, and may not add what the allocator left there.
        for start, end in [(self.plan.numel, None)] if self.plan.whole_shard is None else self.plan.gaps():
            flat_N[start:end].zero_()
        for position, slot in enumerate(self.plan.slots):
            if grads[position] is None and position not in written:
                flat_N[slot.offset : slot.end].zero_()


def _foreach(combine: Callable[..., object], places: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    """Call `combine` with the lists of views and of gradients, of the places that have a gradient."""
    present = [(view, grad) for view, grad in places if grad is not None]
    if present:
        combine(*zip(*present, strict=True))


def own_storage(view: Tensor) -> Tensor:
    """Return the same memory as a tensor with a storage of its own: saved alone it is as large as it looks."""
    return dlpack.from_dlpack(torch._C._to_dlpack(view)).view(view.shape) if view.numel() else view


def num_holders(parameter: Tensor) -> int:
    """Count the holders of the parameter's storage: one more with each other tensor over it."""
    return int(torch._C._storage_Use_Count(parameter.untyped_storage()._cdata))

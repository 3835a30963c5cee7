"""Buckets: which parameters travel together, and the flat buffers that they live in.

A bucket is a run of parameters in the order that the forward pass uses them, padded so that every rank owns an equal
shard. Parameters become views of the bucket's flat buffer, so an all-gather lands where they are read; each rank keeps
its shard in float32 (or wider) for the optimiser (ZeRO stage 2; MegaScale 3.2). Left out: splitting a parameter over
buckets (one that is larger than a bucket gets a bucket of its own).

Shapes: N padded elements of a bucket, W ranks, S = N / W elements of a rank's shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in its bucket; `offset` in elements."""

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
    """

    index: int
    dtype: torch.dtype
    slots: tuple[Slot, ...]
    world_size: int

    @property
    def numel(self) -> int:
        """Elements of parameters, without the padding."""
        return self.slots[-1].end

    @property
    def shard_numel(self) -> int:
        return -(-self.numel // self.world_size)

    @property
    def padded_numel(self) -> int:
        return self.shard_numel * self.world_size

    def own(self, flat_N: Tensor, rank: int) -> Tensor:
        """The shard of `rank`, a view of shape [S]."""
        return flat_N[rank * self.shard_numel : (rank + 1) * self.shard_numel]

    def views(self, flat_N: Tensor) -> list[Tensor]:
        """Every parameter's part of a flat buffer, in its own shape."""
        return [flat_N[slot.offset : slot.end].view(slot.shape) for slot in self.slots]

    def pieces(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """(index of the slot, start, end) of what lies in the shard of `rank`, in elements of the shard."""
        low = rank * self.shard_numel
        for index, slot in enumerate(self.slots):
            start, end = max(slot.offset, low), min(slot.end, low + self.shard_numel)
            if start < end:
                yield index, start - low, end - low


def plan_buckets(
    parameters: Sequence[tuple[str, torch.Size, torch.dtype]], bucket_bytes: int, world_size: int
) -> list[BucketPlan]:
    """Cut parameters, in the order given, into buckets of at most `bucket_bytes`.

    A bucket also ends where the dtype changes, and holds at least one parameter, however large. The padding is less
    than `world_size` elements a bucket.

    Args:
        parameters: name, shape and dtype of the computation, in order of first use.
        bucket_bytes: largest size of a bucket without its padding, unless one parameter is larger.
        world_size: number of ranks that share each bucket.
    """
    if bucket_bytes < 1 or world_size < 1:
        raise ValueError(f"bucket_bytes and world_size must be at least 1, got {bucket_bytes} and {world_size}")
    plans: list[BucketPlan] = []
    slots: list[Slot] = []
    for index, (name, shape, dtype) in enumerate(parameters):
        slots.append(Slot(name, shape, slots[-1].end if slots else 0))
        if not _fits(slots[-1].end, dtype, parameters[index + 1 : index + 2], bucket_bytes):
            plans.append(BucketPlan(len(plans), dtype, tuple(slots), world_size))
            slots = []
    return plans


def _fits(
    numel: int, dtype: torch.dtype, following: Sequence[tuple[str, torch.Size, torch.dtype]], bucket_bytes: int
) -> bool:
    """Whether the parameter that follows, if any, can join `numel` elements of `dtype`."""
    return any(
        other is dtype and (numel + shape.numel()) * dtype.itemsize <= bucket_bytes for _, shape, other in following
    )


@dataclass(frozen=True)
class Piece:
    """This rank's part of one parameter: what an optimiser steps.

    Args:
        name, shape: of the whole parameter.
        parameter: a 1-D view of the master shard.
        grad: the same elements of the reduced gradient; becomes `parameter.grad` once it is complete.
    """

    name: str
    shape: torch.Size
    parameter: nn.Parameter
    grad: Tensor


class Bucket:
    """The buffers of one bucket on this rank.

    `full_N` holds the parameters that the module computes with. `master_S` is this rank's shard in the dtype of the
    optimiser; where that is the dtype of the computation too, it is this rank's slice of `full_N` itself, so there is
    nothing to copy before an all-gather. `grad_S` is the reduced gradient.

    Args:
        plan: the layout.
        flat_N: initial values, in the dtype of the masters; taken over as a buffer where the dtype allows.
        parameters: one for each slot of the plan; their storage moves into `full_N`.
        rank: whose shard this is.
    """

    def __init__(self, plan: BucketPlan, flat_N: Tensor, parameters: Sequence[nn.Parameter], rank: int) -> None:
        self.plan, self.parameters, self.rank = plan, tuple(parameters), rank
        self.full_N = flat_N.to(plan.dtype)
        own_S = plan.own(flat_N, rank)
        self.shares_storage = self.full_N is flat_N
        # `.data` has a version counter of its own: it counts what an optimiser does, not what a gather does.
        self.master_S = own_S.data if self.shares_storage else own_S.clone()
        self.grad_S = torch.zeros_like(self.master_S)
        self.local_N: Tensor | None = None
        """Gradients of this rank that are not reduced yet (gradient accumulation)."""
        for parameter, view in zip(self.parameters, plan.views(self.full_N), strict=True):
            parameter.data = view
            parameter.grad = None
        self.pieces = [
            Piece(slot.name, slot.shape, nn.Parameter(self.master_S[start:end]), self.grad_S[start:end])
            for slot, start, end in ((plan.slots[index], start, end) for index, start, end in plan.pieces(rank))
        ]

    def publish(self) -> None:
        """Put the master shard where an all-gather in place takes it from."""
        if not self.shares_storage:
            self.plan.own(self.full_N, self.rank).copy_(self.master_S)

    def is_in_place(self) -> bool:
        """Whether the module still computes with this buffer (`module.to()` would have moved it away)."""
        return self.parameters[0].data_ptr() == self.full_N.data_ptr() or self.parameters[0].numel() == 0

    @torch.no_grad()
    def fold_gradients(self, dtype: torch.dtype) -> None:
        """Move the parameters' gradients into `local_N` (added to what is there, else in `dtype`); no gradient is 0."""
        fresh = self.local_N is None
        if self.local_N is None:
            self.local_N = torch.empty(self.plan.padded_numel, dtype=dtype, device=self.full_N.device)
            self.local_N[self.plan.numel :].zero_()
        present: list[tuple[Tensor, Tensor]] = []
        for view, parameter in zip(self.plan.views(self.local_N), self.parameters, strict=True):
            if parameter.grad is not None:
                present.append((view, parameter.grad))
            elif fresh:
                view.zero_()
        if present:
            views, grads = zip(*present, strict=True)
            combine: Callable[..., object] = torch._foreach_copy_ if fresh else torch._foreach_add_
            combine(views, grads)
        self.drop_gradients()

    def take_gradients(self, dtype: torch.dtype) -> Tensor:
        """Every gradient of this rank, shape [N], and forget them."""
        self.fold_gradients(dtype)
        assert self.local_N is not None
        flat_N, self.local_N = self.local_N, None
        return flat_N.to(dtype)

    def drop_gradients(self) -> None:
        """Forget the gradients on the parameters; what is folded stays."""
        for parameter in self.parameters:
            parameter.grad = None

    def keep_reduced(self) -> bool:
        """Whether pieces hold gradients that the next reduction must add to; if so, `grad_S` holds just those."""
        if all(piece.parameter.grad is None for piece in self.pieces):
            return False
        for piece in self.pieces:
            if piece.parameter.grad is None:
                piece.grad.zero_()
            elif piece.parameter.grad is not piece.grad:  # the user put another tensor there
                piece.grad.copy_(piece.parameter.grad)
        return True

    def store_reduced(self, reduced_S: Tensor, scale: float, add: bool) -> None:
        """`grad_S` (+)= `scale * reduced_S`; `reduced_S` may be `grad_S` itself where nothing is added."""
        if add:
            self.grad_S.add_(reduced_S, alpha=scale)
        else:
            self.grad_S.copy_(reduced_S).mul_(scale)

"""Stand-ins on a module's parameters, as `.grad`, when a backward pass has reduced and sharded their gradients.

The gradient itself lies in pieces on all ranks, and not on the parameter. A `ShardedGradient` has its shape and no
memory. torch's clipping works on it: norms are taken over all ranks, so every rank asks for them, and what is
multiplied or clamped in place is the rank's own piece. Whatever else reads or writes it raises, where an absent
gradient would pass for one that is zero. Setting `.grad = None` forgets the reduced gradient, as it does of any
parameter.

[Note: exact norms] On a CPU torch adds up the squares of a tensor in a few long sums of its own dtype: of 40 million
elements in float32 the norm comes out 0.24% too small, of pieces of them less. So norms are taken of short runs, and
then of these, and do not depend on how ranks cut a parameter. On a GPU torch sums in a tree: there it is torch's own.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class CopyIn:
    """Gradients of one bucket on their way to the other ranks.

    Args:
        buffer: what will travel, shape [N]; holds the gradients once `fill` has run.
        fill: copies them there, on the stream of whoever calls it.
        read: the tensors that `fill` reads: to be kept until it has run.
    """

    buffer: Tensor
    fill: Callable[[], None]
    read: Sequence[Tensor]


class ReducedPieces(Protocol):
    """Owner of the reduced gradients."""

    def reduced_pieces(self, places: Sequence[tuple[int, int]]) -> list[Tensor | None]:
        """Return this rank's pieces of the gradients at (bucket, position); None for one that it has no part of.

        Finishes the gradients of the step: collective, where the backward pass has left anything to reduce.
        """

    def reduce_norms(self, values: Tensor, op: torch.distributed.ReduceOp.RedOpType) -> None:
        """All-reduce in place."""


class ShardedGradient(Tensor):
    """The gradient of a parameter, at (bucket, position), of which this rank holds a piece or nothing."""

    _source: weakref.ref[ReducedPieces]
    place: tuple[int, int]

    @staticmethod
    def __new__(cls, parameter: nn.Parameter, source: ReducedPieces, place: tuple[int, int]) -> Self:
        made: Self = Tensor._make_wrapper_subclass(
            cls, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        made._source, made.place = weakref.ref(source), place
        return made

    def __init__(self, *_: object) -> None:
        super().__init__()

    @property
    def source(self) -> ReducedPieces:
        """Held weakly: the garbage collector does not see what a parameter's gradient holds."""
        source = self._source()
        if source is None:
            raise RuntimeError("these gradients are gone with the wrapper that reduced them")
        return source

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, _types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute norms and in-place operations on this rank's pieces; refuse all other operations."""
        name, first = func._schema.name.removeprefix("aten::"), args[0]
        if name == "detach":
            return first
        grads = [first] if isinstance(first, ShardedGradient) else first
        if not isinstance(grads, list | tuple) or not all(isinstance(grad, ShardedGradient) for grad in grads):
            raise RuntimeError(_REFUSAL.format(name))
        if name in _NORMS:
            order = args[1] if len(args) > 1 else (kwargs or {}).get("ord", 2)
            if len(args) <= 2 or args[2] is None:
                norms = _norms(grads, 2.0 if order is None else float(order))
                return norms if grads is first else norms[0]
        if name in _IN_PLACE and not any(isinstance(other, ShardedGradient) for other in args[1:]):
            _apply_in_place(func, grads, grads is not first, args[1:], kwargs or {})
            return first
        raise RuntimeError(_REFUSAL.format(name))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ShardedGradient(shape={list(self.shape)}, dtype={self.dtype})"


_REFUSAL = (
    "{} of a parameter's gradient: the gradients are reduced and lie in shards on all ranks; clip them by"
    " clip_grad_norm_() or clip_grad_value_() of the wrapper, step them by the optimiser of model.optimizer(kind, ...),"
    " and read this rank's by finish_gradients() and named_shards()"
)
_NORMS = frozenset({"_foreach_norm", "linalg_vector_norm", "norm"})
_IN_PLACE = frozenset(
    {"mul_", "div_", "zero_", "clamp_", "clamp_min_", "clamp_max_", "nan_to_num_"}
    | {"_foreach_mul_", "_foreach_div_", "_foreach_zero_", "_foreach_clamp_min_", "_foreach_clamp_max_"}
)
"""What does to a piece what it does to the whole."""


def _norms(grads: Sequence[ShardedGradient], order: float) -> list[Tensor]:
    """Return the norm of each whole gradient: norms of this rank's pieces, combined over ranks in float32 or wider."""
    source = grads[0].source
    pieces = source.reduced_pieces([grad.place for grad in grads])
    dtype = torch.promote_types(grads[0].dtype, torch.float32)
    values = torch.zeros(len(grads), dtype=dtype, device=grads[0].device)
    own = [(index, piece) for index, piece in enumerate(pieces) if piece is not None]
    if own:
        indices, tensors = zip(*own, strict=True)
        norms = each_norm(tensors) if order == 2 else torch._foreach_norm(list(tensors), order)
        values[list(indices)] = torch.stack([norm.to(dtype) for norm in norms])
    values = combine_norms(values, order, source.reduce_norms)
    return [value.to(grad.dtype) for value, grad in zip(values.unbind(), grads, strict=True)]


def combine_norms(
    values: Tensor, order: float, reduce: Callable[[Tensor, torch.distributed.ReduceOp.RedOpType], None]
) -> Tensor:
    """Combine this rank's norms with the other ranks' to norms over all; the same shape."""
    if math.isinf(order) and order > 0:
        reduce(values, torch.distributed.ReduceOp.MAX)
        return values
    if not order > 0 or math.isinf(order):
        raise ValueError(f"norm_type = {order}: must be above 0, or infinity")
    powers = values.pow(order)
    reduce(powers, torch.distributed.ReduceOp.SUM)
    return powers.pow(1 / order)


def clip_pieces(
    pieces: Sequence[nn.Parameter],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    zero: Tensor,
    reduce: Callable[[Tensor, torch.distributed.ReduceOp.RedOpType], None],
) -> Tensor:
    """Scale the gradients of this rank's pieces so that their norm over all ranks is at most `max_norm`.

    Returns the norm before. All ranks call it, also one that has no gradients.

    Args:
        pieces: parameters, of which some may have no gradient.
        max_norm, norm_type, error_if_nonfinite: as in `ShardedDataParallel.clip_grad_norm_`.
        zero: of the dtype and device to take the norm in; written to.
        reduce: all-reduces in place.

    Raises:
        RuntimeError: `error_if_nonfinite` does.
    """
    grads = [p.grad for p in pieces if p.grad is not None]
    norm = zero
    if grads:
        own = total_norm(grads) if norm_type == 2 else torch.nn.utils.get_total_norm(grads, norm_type)
        norm += own
    norm = combine_norms(norm, norm_type, reduce)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"the norm of order {norm_type} of all gradients is {norm.item()}, so nothing was clipped")
    # By the tensor, not its value: so the host does not wait for the device.
    torch.nn.utils.clip_grads_with_norm_(pieces, max_norm, norm)
    return norm


def _apply_in_place(
    func: Any, grads: Sequence[ShardedGradient], is_one: bool, others: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """Call `func` on this rank's reduced pieces of the gradients; those that it has no piece of are skipped.

    Args:
        is_one: `func` takes one tensor, not a list.
        others: its further arguments; lists have an entry for each gradient.
    """
    pieces = grads[0].source.reduced_pieces([grad.place for grad in grads])
    if is_one:
        if pieces[0] is not None:
            func(pieces[0], *others, **kwargs)
        return
    chosen = [index for index, piece in enumerate(pieces) if piece is not None]
    if chosen:
        # Another list among the arguments has an entry for each gradient.
        rest = [[other[i] for i in chosen] if isinstance(other, list | tuple) else other for other in others]
        func([pieces[index] for index in chosen], *rest, **kwargs)


_RUN = 1 << 17
"""Elements that a CPU adds up at once: the norm of random ones is within 1e-6, of equal ones within 1e-4."""


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of all elements of the tensors (one or more): a scalar."""
    return torch.nn.utils.get_total_norm([run for tensor in tensors for run in _runs(tensor)])


def each_norm(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the norm of each tensor: scalars."""
    if all(tensor.device.type != "cpu" for tensor in tensors):
        return torch._foreach_norm(list(tensors))
    return [total_norm([tensor]) for tensor in tensors]


def _runs(tensor: Tensor) -> Sequence[Tensor]:
    return torch.split(tensor.flatten(), _RUN) if tensor.device.type == "cpu" else (tensor,)

"""Rotary positions: pairs of values of queries and keys are turned by an angle that grows with the position.

Su et al., RoFormer (arXiv 2104.09864), 3.4.2; pairs are value i and i + K/2, as in GPT-NeoX. Frequencies may be lowered
for texts that are longer than those of the first training (`RopeScalingConfig`): all of them (Chen et al., position
interpolation, arXiv 2306.15595), or as Llama 3.1 does it: those that turn less than once within the original length. On
a GPU, outside torch.compile, one kernel turns all heads in one pass; elsewhere torch's own operators, the reference.

[Note: in place] Nobody needs plain queries and keys once they are turned: a linear's backward reads no output. But
they lie in one product with the values, which attention keeps, so turned ones elsewhere would be kept beside them.
`rotate_in_place` writes them where the plain ones were, unseen by autograd, whose gradient reads angles alone.

Shapes: T positions, B sequences, H heads, K values a head.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from collectives.triton_support import HAS_TRITON
from netlayer.config.tree import RopeScalingConfig
from netlayer.layout import context_chunks
from trainer.ops.backend import Operators, uses_triton

if HAS_TRITON:
    from trainer.ops.rotary_kernels import turn_in_place, turn_pairs


class Scaling(NamedTuple):
    """`RopeScalingConfig`, plain enough for a compiler to trace; see there."""

    rope_type: str
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


def scaling_of(config: RopeScalingConfig) -> Scaling | None:
    """Return the scaling of a model's frequencies; None where they stay as they are."""
    if config.rope_type == "default":
        return None
    low, high = config.low_freq_factor, config.high_freq_factor
    return Scaling(config.rope_type, config.factor, low, high, config.original_max_position_embeddings)


def rotate(
    x_TBHK: Tensor,
    base: float,
    scaling: Scaling | None = None,
    part: tuple[int, int] = (0, 1),
    operators: Operators = "auto",
) -> Tensor:
    """`x` with its pairs turned by position / base^(2 i / K), scaled; the first row is position 0.

    Args:
        part: rank and number of context-parallel ranks, whose rows are those of `context_chunks`.
        operators: one kernel, or torch's own.
    """
    arguments = x_TBHK.shape[0], x_TBHK.shape[-1], base, scaling, x_TBHK.device, part
    if uses_triton(operators, x_TBHK):
        return _Turned.apply(x_TBHK, *narrow_angles(*arguments))  # type: ignore[no-untyped-call, no-any-return]
    return _turn(x_TBHK, *_angles(*arguments))


def _turn(x_TBHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn by torch's operators, in float32 or wider."""
    wide = x_TBHK.to(torch.promote_types(x_TBHK.dtype, torch.float32))
    left, right = wide.chunk(2, dim=-1)
    cos, sin = cos.to(wide.dtype), sin.to(wide.dtype)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x_TBHK.dtype)


def rotate_in_place(
    x_TBHK: Tensor,
    base: float,
    scaling: Scaling | None = None,
    part: tuple[int, int] = (0, 1),
    operators: Operators = "auto",
) -> Tensor:
    """`rotate` that overwrites `x`; for an `x` whose values nothing reads after it, backward passes included.

    Not for inputs of `torch.utils.checkpoint`, which are read twice, nor where a compiler traces.
    """
    return _TurnedInPlace.apply(x_TBHK, base, scaling, part, operators)  # type: ignore[no-untyped-call, no-any-return]


class _TurnedInPlace(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TBHK: Tensor, base: float, scaling: Scaling | None, part: tuple[int, int], operators: Operators
    ) -> Tensor:
        ctx.arguments = x_TBHK.shape[0], x_TBHK.shape[-1], base, scaling, x_TBHK.device, part
        ctx.operators = operators
        if uses_triton(operators, x_TBHK):
            turn_in_place(x_TBHK, *narrow_angles(*ctx.arguments))
        else:
            x_TBHK.data.copy_(_turn(x_TBHK, *_angles(*ctx.arguments)))  # unseen, as the kernel's write is
        return x_TBHK.view_as(x_TBHK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TBHK: Tensor) -> tuple[Tensor | None, ...]:
        if uses_triton(ctx.operators, dy_TBHK):
            dx_TBHK = turn_pairs(dy_TBHK, *narrow_angles(*ctx.arguments), True)
        else:
            cos, sin = _angles(*ctx.arguments)
            dx_TBHK = _turn(dy_TBHK, cos, -sin)
        return dx_TBHK, None, None, None, None


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TBHK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        ctx.save_for_backward(cos_TK, sin_TK)
        return turn_pairs(x_TBHK, cos_TK, sin_TK, False)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TBHK: Tensor) -> tuple[Tensor | None, ...]:
        return turn_pairs(dy_TBHK, *ctx.saved_tensors, True), None, None


def frequencies(width: int, base: float, scaling: Scaling | None, device: torch.device | None = None) -> Tensor:
    """Angle from one position to the next of each pair, [K / 2], float64."""
    plain = base ** -(torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)
    if scaling is None:
        return plain
    lowered = plain / scaling.factor
    if scaling.rope_type == "linear":
        return lowered
    # Of the original length, how many whole turns: from low_freq_factor to high_freq_factor the share that stays as it
    # is rises from 0 to 1.
    turns = scaling.original_positions * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * lowered + kept * plain


@functools.lru_cache(maxsize=16)
def own_positions(num_own: int, rank: int, world_size: int, device: torch.device) -> Tensor:
    """Positions of the `num_own` rows of a context-parallel rank in their sequence, [t], int64; of one rank all."""
    if world_size == 1:
        return torch.arange(num_own, device=device)
    chunks = context_chunks(num_own * world_size, rank, world_size)
    return torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in chunks])


@functools.lru_cache(maxsize=16)
def _angles(
    num_positions: int, width: int, base: float, scaling: Scaling | None, device: torch.device, part: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Cosine and sine, [T, 1, 1, K / 2] each, float64: computed once."""
    positions_T = own_positions(num_positions, *part, device).double()
    angles = torch.outer(positions_T, frequencies(width, base, scaling, device))
    return angles.cos()[:, None, None], angles.sin()[:, None, None]


@functools.lru_cache(maxsize=16)
def narrow_angles(
    num_positions: int, width: int, base: float, scaling: Scaling | None, device: torch.device, part: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Cosine and sine for the kernel, [T, K / 2] each, float32."""
    cos, sin = (
        each.view(num_positions, width // 2).float()
        for each in _angles(num_positions, width, base, scaling, device, part)
    )
    return cos, sin

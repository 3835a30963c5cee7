"""Triton kernel of rotary positions: pairs of values of every head turned in one pass over memory, either way.

It reads rows that may lie apart (slices of one wide product), and keeps nothing: backward turns back.

[Note: a kernel of its own] In the epilogue of a QKV product by Triton (`bench.operators.rotary_gemm`) Llama 8B's
queries and keys were turned 14 us faster on an H200: 552 us beside 566, 0.05% of a layer's step, with pauses between
calls; at a step's power, in 8 bits and in a step it is not measured (reports/llama8b_202611.md). Attention's kernels
(cuDNN's, Flash's) read queries and keys as they lie.

Shapes: T positions, B sequences, H heads, K values a head.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.ops.backend import operator


@operator("netlayer::turn_pairs")
def turn_pairs(x_TBHK: Tensor, cos_TK: Tensor, sin_TK: Tensor, back: bool) -> Tensor:
    """Value i and i + K / 2 of every head, turned by the angle of its position and pair; dense.

    Args:
        x_TBHK: heads of a row lie together; rows may lie apart.
        cos_TK, sin_TK: [T, K / 2], float32, contiguous.
        back: by the opposite angle.
    """
    if _row_stride(x_TBHK) is None:
        x_TBHK = x_TBHK.contiguous()
    y_TBHK = torch.empty(x_TBHK.shape, dtype=x_TBHK.dtype, device=x_TBHK.device)
    _launch(x_TBHK, y_TBHK, cos_TK, sin_TK, back)
    return y_TBHK


@turn_pairs.register_fake
def _turned_shape(x_TBHK: Tensor, _cos_TK: Tensor, _sin_TK: Tensor, _back: bool) -> Tensor:
    return torch.empty(x_TBHK.shape, dtype=x_TBHK.dtype, device=x_TBHK.device)


def turn_in_place(x_TBHK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> None:
    """Turn pairs where they lie: a program reads all that it writes before it writes."""
    if _row_stride(x_TBHK) is None:
        x_TBHK.data.copy_(turn_pairs(x_TBHK, cos_TK, sin_TK, False))  # unseen by autograd, as the kernel's write is
    else:
        _launch(x_TBHK, x_TBHK, cos_TK, sin_TK, back=False)


def _row_stride(x_TBHK: Tensor) -> int | None:
    """Return how many elements lie from one row to the next; None: a row's heads lie apart, or rows unevenly."""
    positions, sequences, heads, width = x_TBHK.shape
    of_position, of_sequence, of_head, of_value = x_TBHK.stride()
    if of_value != 1 or (heads > 1 and of_head != width):
        return None
    if sequences == 1:  # the stride of a dimension of one means nothing: `view` gives it what it likes
        return of_position
    return of_sequence if positions == 1 or of_position == sequences * of_sequence else None


def _launch(x_TBHK: Tensor, y_TBHK: Tensor, cos_TK: Tensor, sin_TK: Tensor, back: bool) -> None:
    positions, sequences, heads, width = x_TBHK.shape
    half = width // 2
    _turn[(positions * sequences,)](
        x_TBHK,
        y_TBHK,
        cos_TK,
        sin_TK,
        _row_stride(x_TBHK),
        _row_stride(y_TBHK),
        sequences,
        heads,
        half,
        back,
        triton.next_power_of_2(heads),
        triton.next_power_of_2(half),
        num_warps=4,
    )


# One program a row of all heads: it reads its position's angles once.
@triton.jit
def _turn(
    x,
    y,
    cos,
    sin,
    stride,
    y_stride,
    num_sequences,
    num_heads,
    half,
    BACK: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head, pair = tl.arange(0, HEADS)[:, None], tl.arange(0, PAIRS)[None, :]
    mask = (head < num_heads) & (pair < half)
    angle = (row // num_sequences) * half + pair
    c = tl.load(cos + angle, mask=pair < half)
    s = tl.load(sin + angle, mask=pair < half)
    if BACK:
        s = -s
    at = head * 2 * half + pair
    left = tl.load(x + row * stride + at, mask=mask).to(tl.float32)
    right = tl.load(x + row * stride + at + half, mask=mask).to(tl.float32)
    out = y + row * y_stride + at
    tl.store(out, (left * c - right * s).to(y.dtype.element_ty), mask=mask)
    tl.store(out + half, (right * c + left * s).to(y.dtype.element_ty), mask=mask)

"""Triton kernel that merges a part of attention into output and log-sum-exp, in place, in one pass over both.

Shapes: B sequences, H heads, q queries, K values a head.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_ROWS = 32


def merge_in_place(y_BHqK: Tensor, lse_BHq: Tensor, part_BHqK: Tensor, part_lse_BHq: Tensor) -> None:
    """y, lse = those of both sets of keys; any strides, but the values of a head lie together."""
    sequences, heads, queries, width = y_BHqK.shape
    part_BHqK = part_BHqK if part_BHqK.stride(3) == 1 else part_BHqK.contiguous()
    strides = (*y_BHqK.stride()[:3], *part_BHqK.stride()[:3], *lse_BHq.stride(), *part_lse_BHq.stride())
    _merge[(triton.cdiv(queries, _ROWS), sequences * heads)](
        y_BHqK, part_BHqK, lse_BHq, part_lse_BHq, *strides, heads, queries, width, _ROWS, triton.next_power_of_2(width)
    )


@triton.jit
def _merge(
    y,
    part,
    lse,
    part_lse,
    y_b,
    y_h,
    y_q,
    part_b,
    part_h,
    part_q,
    lse_b,
    lse_h,
    lse_q,
    part_lse_b,
    part_lse_h,
    part_lse_q,
    num_heads,
    num_queries,
    width,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    sequence = (tl.program_id(1) // num_heads).to(tl.int64)
    head = (tl.program_id(1) % num_heads).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    is_row = row < num_queries
    mask = is_row[:, None] & (column < width)[None, :]
    at_lse = lse + sequence * lse_b + head * lse_h + row * lse_q
    own = tl.load(at_lse, mask=is_row, other=0.0)
    other = tl.load(part_lse + sequence * part_lse_b + head * part_lse_h + row * part_lse_q, mask=is_row, other=0.0)
    # The larger one is taken out, so that neither exponential exceeds 1.
    largest = tl.maximum(own, other)
    weight_own, weight_other = tl.exp(own - largest), tl.exp(other - largest)
    total = weight_own + weight_other
    tl.store(at_lse, largest + tl.log(total), mask=is_row)
    at_y = y + sequence * y_b + head * y_h + row[:, None] * y_q + column[None, :]
    at_part = part + sequence * part_b + head * part_h + row[:, None] * part_q + column[None, :]
    first = tl.load(at_y, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at_part, mask=mask, other=0.0).to(tl.float32)
    share = (weight_other / total)[:, None]
    tl.store(at_y, (first + (second - first) * share).to(y.dtype.element_ty), mask=mask)

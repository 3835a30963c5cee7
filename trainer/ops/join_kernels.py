"""A Triton kernel that joins the gradients of a product's outputs and sums their rows for the bias, in one pass.

The sums are added up in float32 by each program over its own rows (`sum_kernels`).

Shapes: M rows, N columns in all, n of a part, P programs a column of tiles.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.ops.backend import num_programs
from trainer.ops.sum_kernels import sum_programs

MOST_PARTS = 5
"""Queries, keys, values, and two halves of a gated MLP."""
_ROWS, _COLUMNS, _WARPS, _EACH = 2, 1024, 4, 8
"""On an H200, of 8,192 rows of three times 4,096: 113 us, where torch takes 105 to join and 64 to sum."""


def join_and_sum(parts_Mn: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the parts side by side, dense [M, N], and their sums over rows, [N], in the parts' dtype.

    Args:
        parts_Mn: up to MOST_PARTS, each with its last dimension dense.
    """
    first = parts_Mn[0]
    (num_rows, _), widths = first.shape, [part.shape[1] for part in parts_Mn]
    y_MN = first.new_empty(num_rows, sum(widths))
    columns = triton.cdiv(max(widths), _COLUMNS)
    programs = -(-num_programs(first, num_rows, _EACH) // (columns * len(widths)))
    partial_PN = first.new_empty(programs, sum(widths), dtype=torch.float32)
    unused = MOST_PARTS - len(widths)
    _join[(columns, programs, len(widths))](
        *parts_Mn,
        *[first] * unused,
        y_MN,
        partial_PN,
        *[part.stride(0) for part in parts_Mn],
        *[0] * unused,
        *widths,
        *[0] * unused,
        num_rows,
        sum(widths),
        triton.cdiv(num_rows, programs * _ROWS),
        _ROWS,
        _COLUMNS,
        num_warps=_WARPS,
    )
    return y_MN, sum_programs(partial_PN[None], first.dtype)[0]


# One program copies its rows of one part (`a` to `e`, the last axis of the grid) to that part's columns of `y`, and
# adds them up in `partial` (P, N).
@triton.jit
def _join(
    a,
    b,
    c,
    d,
    e,
    y,
    partial,
    a_stride,
    b_stride,
    c_stride,
    d_stride,
    e_stride,
    a_width,
    b_width,
    c_width,
    d_width,
    e_width,
    num_rows,
    width,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    part, begin = tl.program_id(2), 0
    if part == 0:
        _join_part(a, y, partial, a_stride, a_width, begin, num_rows, width, STEPS, ROWS, COLUMNS)
    begin += a_width
    if part == 1:
        _join_part(b, y, partial, b_stride, b_width, begin, num_rows, width, STEPS, ROWS, COLUMNS)
    begin += b_width
    if part == 2:
        _join_part(c, y, partial, c_stride, c_width, begin, num_rows, width, STEPS, ROWS, COLUMNS)
    begin += c_width
    if part == 3:
        _join_part(d, y, partial, d_stride, d_width, begin, num_rows, width, STEPS, ROWS, COLUMNS)
    begin += d_width
    if part == 4:
        _join_part(e, y, partial, e_stride, e_width, begin, num_rows, width, STEPS, ROWS, COLUMNS)


@triton.jit
def _join_part(
    x,
    y,
    partial,
    x_stride,
    x_width,
    begin,
    num_rows,
    width,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Columns `begin` and following of the whole are those of `x`."""
    program, programs = tl.program_id(1), tl.num_programs(1)
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    known = column < x_width
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(STEPS):
        row = ((program + step * programs) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
        inside = (row < num_rows) & known
        value = tl.load(x + row * x_stride + column, mask=inside, other=0)
        tl.store(y + row * width + begin + column, value, mask=inside)
        total += value.to(tl.float32)
    whole = tl.sum(total, 0)[None, :]
    tl.store(partial + program.to(tl.int64) * width + begin + column, whole, mask=known)

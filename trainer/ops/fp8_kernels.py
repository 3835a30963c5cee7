"""Triton kernels of quantisation to 8 bits: a tensor's largest magnitude, the cast by a scale, a transposition.

Shapes: [R, C] a matrix; E elements.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.ops.backend import as_rows, num_programs

_BLOCK, _TILE = 4096, 64
_TYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


def largest_magnitude(x_RC: Tensor) -> Tensor:
    """Largest absolute value, a scalar in float32; NaN where one is in there."""
    x_RC = as_rows(x_RC)
    rows, columns = x_RC.shape
    count = num_programs(x_RC, rows, 8)
    partial = x_RC.new_empty(count, dtype=torch.float32)
    _largest[(count,)](x_RC, partial, rows, columns, x_RC.stride(0), triton.cdiv(columns, _BLOCK), BLOCK=_BLOCK)
    return partial.amax()  # which keeps a NaN


def cast(x_RC: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale in `dtype`, contiguous; what rounding has put above its largest becomes that."""
    x_RC = as_rows(x_RC)
    rows, columns = x_RC.shape
    out_RC = torch.empty(rows, columns, dtype=dtype, device=x_RC.device)
    grid = (num_programs(x_RC, rows, 8),)
    steps, limit = triton.cdiv(columns, _BLOCK), torch.finfo(dtype).max
    _cast[grid](x_RC, out_RC, scale, limit, rows, columns, x_RC.stride(0), steps, _TYPES[dtype], BLOCK=_BLOCK)
    return out_RC


def transpose(x_RC: Tensor) -> Tensor:
    """[C, R], contiguous, of elements of one byte."""
    rows, columns = x_RC.shape
    out_CR = torch.empty(columns, rows, dtype=x_RC.dtype, device=x_RC.device)
    grid = (triton.cdiv(rows, _TILE), triton.cdiv(columns, _TILE))
    _transpose[grid](x_RC.view(torch.uint8), out_CR.view(torch.uint8), rows, columns, TILE=_TILE)
    return out_CR


# A program takes every so-manieth row; NaNs are kept, which a plain maximum would drop.
@triton.jit
def _largest(x, partial, num_rows, num_columns, stride, steps, BLOCK: tl.constexpr):
    offset = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        for step in range(steps):
            column = step * BLOCK + offset
            value = tl.load(x + tl.cast(row, tl.int64) * stride + column, mask=column < num_columns, other=0)
            value = tl.abs(value.to(tl.float32))
            largest = tl.maximum(largest, value, propagate_nan=tl.PropagateNan.ALL)
    # A reduction by maximum may drop NaNs: they are counted beside.
    lost = tl.max((largest != largest).to(tl.int32), 0)
    most = tl.max(tl.where(largest != largest, 0.0, largest), 0)
    tl.store(partial + tl.program_id(0), tl.where(lost > 0, float("nan"), most))


@triton.jit
def _cast(x, out, scale, limit, num_rows, num_columns, stride, steps, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    by = tl.load(scale)
    offset = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        wide_row = tl.cast(row, tl.int64)
        for step in range(steps):
            column = step * BLOCK + offset
            mask = column < num_columns
            value = tl.load(x + wide_row * stride + column, mask=mask, other=0).to(tl.float32) / by
            # By comparisons, not by minimum and maximum: a NaN stays one.
            value = tl.where(value > limit, limit, tl.where(value < -limit, -limit, value))
            tl.store(out + wide_row * num_columns + column, value.to(DTYPE), mask=mask)


@triton.jit
def _transpose(x, out, num_rows, num_columns, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    tile = tl.load(x + row[:, None] * num_columns + column[None, :], mask=mask)
    tl.store(out + column[:, None] * num_rows + row[None, :], tl.trans(tile), mask=tl.trans(mask))

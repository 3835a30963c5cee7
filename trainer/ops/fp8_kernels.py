"""Triton kernels of quantisation to 8 bits: the cast by a scale, a transposition, both in one pass.

Shapes: [R, C] a matrix; E elements of a part of one.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.ops.backend import as_rows, num_programs

_BLOCK, _TILE = 4096, 64
_TILE_ROWS, _TILE_COLUMNS = 128, 64
"""Of a cast that also transposes: 128 bytes of a row are read, and 128 of a column written."""
_TYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}
_WIDE_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def quantise_rows_and_columns(
    parts_Rc: Sequence[Tensor], amax: Tensor, dtype: torch.dtype, tiny: float, *, rows: bool, columns: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Return a matrix in `dtype`, [R, C], its transpose, [C, R], and their one scale, in one pass over it.

    The scale is the largest magnitude times the reciprocal of the largest number, as in `trainer.ops.fp8.scale_of`.

    Args:
        parts_Rc: the matrix, or several, that are joined side by side as they are cast.
        amax: largest magnitude of all, float32, [].
        tiny: least magnitude that is scaled to the largest number.
        rows, columns: whether the matrix is wanted, and its transpose; None else.
    """
    parts_Rc = [as_rows(part) for part in parts_Rc]
    num_rows, width = parts_Rc[0].shape[0], sum(part.shape[1] for part in parts_Rc)
    limit = torch.finfo(dtype).max
    scale = torch.empty_like(amax)  # not beside others: a product reads scales at multiples of 16 bytes
    out_RC = torch.empty(num_rows if rows else 0, width, dtype=dtype, device=amax.device)
    out_CR = torch.empty(width if columns else 0, num_rows, dtype=dtype, device=amax.device)
    begin = 0
    for part in parts_Rc:
        end = begin + part.shape[1]
        tiles = triton.cdiv(part.shape[1], _TILE_COLUMNS), triton.cdiv(num_rows, _TILE_ROWS)
        _cast_tile[tiles](
            part,
            out_RC[:, begin:end],
            out_CR[begin:end],
            amax,
            scale,
            tiny,
            1.0 / limit,
            limit,
            num_rows,
            part.shape[1],
            part.stride(0),
            width,
            _TYPES[dtype],
            GIVES_ROWS=rows,
            GIVES_COLUMNS=columns,
            ROWS=_TILE_ROWS,
            COLUMNS=_TILE_COLUMNS,
            num_warps=8,
        )
        begin = end
    return out_RC if rows else None, out_CR if columns else None, scale


def cast(x_RC: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale in `dtype`, contiguous; what rounding has put above its largest becomes that."""
    x_RC = as_rows(x_RC)
    rows, columns = x_RC.shape
    out_RC = torch.empty(rows, columns, dtype=dtype, device=x_RC.device)
    grid = (num_programs(x_RC, rows, 8),)
    steps, limit = triton.cdiv(columns, _BLOCK), torch.finfo(dtype).max
    _cast[grid](x_RC, out_RC, scale, limit, rows, columns, x_RC.stride(0), steps, _TYPES[dtype], BLOCK=_BLOCK)
    return out_RC


def cast_rounded(x_E: Tensor, through: torch.dtype, scale: Tensor, out_E: Tensor) -> None:
    """Write x / scale, with x rounded to `through` first, as `cast` has it.

    Args:
        x_E: float32 or narrower, contiguous.
        out_E: float8, contiguous.
    """
    count, limit = x_E.numel(), torch.finfo(out_E.dtype).max
    grid, dtypes = (triton.cdiv(count, _BLOCK),), (_WIDE_TYPES[through], _TYPES[out_E.dtype])
    if count:
        _cast_rounded[grid](x_E, out_E, scale, limit, count, *dtypes, BLOCK=_BLOCK)


def transpose(x_RC: Tensor) -> Tensor:
    """[C, R], contiguous, of elements of one byte."""
    rows, columns = x_RC.shape
    out_CR = torch.empty(columns, rows, dtype=x_RC.dtype, device=x_RC.device)
    grid = (triton.cdiv(rows, _TILE), triton.cdiv(columns, _TILE))
    _transpose[grid](x_RC.view(torch.uint8), out_CR.view(torch.uint8), rows, columns, TILE=_TILE)
    return out_CR


@triton.jit
def _in_range(value, by, limit):
    """Divide, and clamp to the limit, by comparisons: a NaN stays one."""
    value = value / by
    return tl.where(value > limit, limit, tl.where(value < -limit, -limit, value))


# One program a tile. The first one stores the scale, which all compute alike from the largest magnitude; a NaN is no
# less than any number.
@triton.jit
def _cast_tile(
    x,
    out,
    transposed,
    amax,
    scale,
    tiny,
    reciprocal,
    limit,
    num_rows,
    num_columns,
    stride,
    out_stride,
    DTYPE: tl.constexpr,
    GIVES_ROWS: tl.constexpr,
    GIVES_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    most = tl.load(amax)
    by = tl.where(most < tiny, tiny, most) * reciprocal
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale, by)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    value = tl.load(x + row[:, None] * stride + column[None, :], mask=mask, other=0).to(tl.float32)
    value = _in_range(value, by, limit).to(DTYPE)
    if GIVES_ROWS:
        tl.store(out + row[:, None] * out_stride + column[None, :], value, mask=mask)
    if GIVES_COLUMNS:
        tl.store(transposed + column[:, None] * num_rows + row[None, :], tl.trans(value), mask=tl.trans(mask))


@triton.jit
def _cast(x, out, scale, limit, num_rows, num_columns, stride, steps, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    by = tl.load(scale)
    offset = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        wide_row = tl.cast(row, tl.int64)
        for step in range(steps):
            column = step * BLOCK + offset
            mask = column < num_columns
            value = tl.load(x + wide_row * stride + column, mask=mask, other=0).to(tl.float32)
            tl.store(out + wide_row * num_columns + column, _in_range(value, by, limit).to(DTYPE), mask=mask)


@triton.jit
def _cast_rounded(x, out, scale, limit, count, THROUGH: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + place, mask=place < count, other=0).to(THROUGH).to(tl.float32)
    tl.store(out + place, _in_range(value, tl.load(scale), limit).to(DTYPE), mask=place < count)


@triton.jit
def _transpose(x, out, num_rows, num_columns, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    tile = tl.load(x + row[:, None] * num_columns + column[None, :], mask=mask)
    tl.store(out + column[:, None] * num_rows + row[None, :], tl.trans(tile), mask=tl.trans(mask))

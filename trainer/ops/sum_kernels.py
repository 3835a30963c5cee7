"""A Triton kernel that adds up what the programs of another one have summed, each over rows of its own.

In a fixed order, so that a run can be repeated, and by one kernel where torch needs two, a sum and a cast.

Shapes: V vectors of N values, P programs.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS, _WARPS = 64, 32, 4  # a tile of the programs' sums: lines of 128 bytes


def sum_programs(partial_VPN: Tensor, dtype: torch.dtype) -> Tensor:
    """Add up [V, P, N] over programs, in float32; return [V, N] in `dtype`."""
    vectors, programs, width = partial_VPN.shape
    sums_VN = partial_VPN.new_empty(vectors, width, dtype=dtype)
    _sum_programs[(triton.cdiv(width, _COLUMNS), vectors)](
        partial_VPN,
        sums_VN,
        programs,
        width,
        STEPS=triton.cdiv(programs, _ROWS),
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=_WARPS,
    )
    return sums_VN


@triton.jit
def _sum_programs(
    partial,
    sums,
    programs,
    width,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A vector a row of the grid."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    partial += tl.program_id(1).to(tl.int64) * programs * width
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(STEPS):
        row = step * ROWS + tl.arange(0, ROWS)[:, None]
        at = row.to(tl.int64) * width + column[None, :]
        total += tl.load(partial + at, mask=(row < programs) & inside[None, :], other=0)
    at = tl.program_id(1).to(tl.int64) * width + column
    tl.store(sums + at, tl.sum(total, 0).to(sums.dtype.element_ty), mask=inside)

"""Triton kernels of a tensor's largest magnitude (amax), for scales of 8-bit products.

A kernel that writes a tensor finds it in passing: of the values as they are stored, so that it is that of the tensor to
the bit. Magnitudes are compared as integers, whose order is theirs, with a NaN above infinity: a maximum of floats may
drop it. Whoever calls gives a scalar of zero, into which all programs take their maxima, in any order.

Shapes: [R, C] a matrix.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.ops.backend import as_rows, num_programs

_BLOCK = 4096


def largest_magnitude(*parts_RC: Tensor) -> Tensor:
    """Largest absolute value of one matrix or several, a scalar in float32; NaN where one is in there."""
    amax = parts_RC[0].new_zeros((), dtype=torch.float32)
    for x_RC in map(as_rows, parts_RC):
        rows, columns = x_RC.shape
        grid = (num_programs(x_RC, rows, 8),)
        _largest[grid](x_RC, amax, rows, columns, x_RC.stride(0), triton.cdiv(columns, _BLOCK), BLOCK=_BLOCK)
    return amax


@triton.jit
def magnitude(value):
    """Return magnitudes as integers: of floats, as they are stored."""
    return tl.abs(value.to(tl.float32)).to(tl.int32, bitcast=True)


@triton.jit
def keep_largest(amax, most):
    """Raise the scalar to a program's largest magnitude; nobody reads it before the kernel has ended."""
    tl.atomic_max(amax.to(tl.pointer_type(tl.int32), bitcast=True), most, sem="relaxed")


# A program takes every so-manieth row.
@triton.jit
def _largest(x, amax, num_rows, num_columns, stride, steps, BLOCK: tl.constexpr):
    offset = tl.arange(0, BLOCK)
    most = tl.zeros((BLOCK,), tl.int32)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        for step in range(steps):
            column = step * BLOCK + offset
            value = tl.load(x + tl.cast(row, tl.int64) * stride + column, mask=column < num_columns, other=0)
            most = tl.maximum(most, magnitude(value))
    keep_largest(amax, tl.max(most, 0))

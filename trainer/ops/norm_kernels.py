"""Triton kernels of LayerNorm and RMSNorm with the residual sum before them, as operators that torch.compile knows.

A program has whole rows in registers. Sums are in float32. Backward, each of a few hundred programs adds up the
weight's gradient over its own rows, and torch adds up the programs: in a fixed order, so that a run can be repeated.

Shapes: M rows, D columns, P programs.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.ops.backend import num_programs

_PROGRAMS_EACH = 2  # of a multiprocessor, backward: more would write more partial sums than they hide latency


@torch.library.custom_op("netlayer::norm_forward", mutates_args=())
def norm_forward(
    x_MD: Tensor, residual_MD: Tensor | None, weight_D: Tensor, bias_D: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalised rows, the sum (empty without a residual), mean (empty for RMSNorm) and 1 / deviation, float32.

    Args:
        bias_D: None: RMSNorm.
    """
    num_rows, width = x_MD.shape
    y_MD, total_MD, mean_M, scale_M = _forward_shapes(x_MD, residual_MD, weight_D, bias_D, eps)
    block = triton.next_power_of_2(width)
    _forward[(num_rows,)](
        x_MD,
        residual_MD,
        weight_D,
        bias_D,
        y_MD,
        total_MD,
        mean_M,
        scale_M,
        width,
        eps,
        HAS_RESIDUAL=residual_MD is not None,
        IS_RMS=bias_D is None,
        BLOCK=block,
        num_warps=_num_warps(block),
    )
    return y_MD, total_MD, mean_M, scale_M


@norm_forward.register_fake
def _forward_shapes(
    x_MD: Tensor, residual_MD: Tensor | None, _weight_D: Tensor, bias_D: Tensor | None, _eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scale_M = x_MD.new_empty(x_MD.shape[0], dtype=torch.float32)
    total_MD = torch.empty_like(x_MD) if residual_MD is not None else x_MD.new_empty(0)
    mean_M = torch.empty_like(scale_M) if bias_D is not None else scale_M.new_empty(0)
    return torch.empty_like(x_MD), total_MD, mean_M, scale_M


@torch.library.custom_op("netlayer::norm_backward", mutates_args=())
def norm_backward(
    dy_MD: Tensor, dtotal_MD: Tensor | None, total_MD: Tensor, weight_D: Tensor, mean_M: Tensor, scale_M: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the sum (with `dtotal_MD`, which came to it from elsewhere), weight, and bias (empty: RMSNorm)."""
    num_rows, width = dy_MD.shape
    is_rms = mean_M.numel() == 0
    dx_MD = torch.empty_like(total_MD)
    programs, block = num_programs(dy_MD, num_rows, _PROGRAMS_EACH), triton.next_power_of_2(width)
    partial_2PD = dy_MD.new_empty(1 if is_rms else 2, programs, width, dtype=torch.float32)
    _backward[(programs,)](
        dy_MD,
        dtotal_MD,
        total_MD,
        weight_D,
        mean_M,
        scale_M,
        dx_MD,
        partial_2PD,
        num_rows,
        width,
        STEPS=triton.cdiv(num_rows, programs),
        HAS_TOTAL=dtotal_MD is not None,
        IS_RMS=is_rms,
        BLOCK=block,
        num_warps=_num_warps(block),
    )
    sums = partial_2PD.sum(1).to(weight_D.dtype)
    return dx_MD, sums[0].clone(), weight_D.new_empty(0) if is_rms else sums[1].clone()


@norm_backward.register_fake
def _backward_shapes(
    _dy_MD: Tensor, _dtotal_MD: Tensor | None, total_MD: Tensor, weight_D: Tensor, mean_M: Tensor, _scale_M: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dbias = weight_D.new_empty(0) if mean_M.numel() == 0 else torch.empty_like(weight_D)
    return torch.empty_like(total_MD), torch.empty_like(weight_D), dbias


def _num_warps(block: int) -> int:
    return min(32, max(1, block // 512))


@triton.jit
def _forward(
    x,
    residual,
    weight,
    bias,
    y,
    total,
    mean,
    scale,
    width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    IS_RMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    value = tl.load(x + at, mask=inside, other=0).to(tl.float32)
    if HAS_RESIDUAL:
        # Normalised is what is stored: backward has only that.
        stored = (value + tl.load(residual + at, mask=inside, other=0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + at, stored, mask=inside)
        value = stored.to(tl.float32)
    if not IS_RMS:
        centre = tl.sum(value, 0) / width
        tl.store(mean + row, centre)
        value = tl.where(inside, value - centre, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, 0) / width + eps)
    tl.store(scale + row, inverse)
    result = value * inverse * tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    if not IS_RMS:
        result += tl.load(bias + column, mask=inside, other=0).to(tl.float32)
    tl.store(y + at, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    dy,
    dtotal,
    total,
    weight,
    mean,
    scale,
    dx,
    partial,
    num_rows,
    width,
    STEPS: tl.constexpr,
    HAS_TOTAL: tl.constexpr,
    IS_RMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    gain = tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    dgain = tl.zeros((BLOCK,), tl.float32)
    dshift = tl.zeros((BLOCK,), tl.float32)
    for step in range(STEPS):
        row = program + step * programs
        here = inside & (row < num_rows)
        at = row.to(tl.int64) * width + column
        value = tl.load(total + at, mask=here, other=0).to(tl.float32)
        slope = tl.load(dy + at, mask=here, other=0).to(tl.float32)
        inverse = tl.load(scale + row, mask=row < num_rows, other=0)
        if not IS_RMS:
            value = tl.where(here, value - tl.load(mean + row, mask=row < num_rows, other=0), 0.0)
        unit = value * inverse
        scaled = slope * gain
        along = tl.sum(scaled * unit, 0) / width
        result = scaled - unit * along
        if not IS_RMS:
            result -= tl.sum(scaled, 0) / width
            dshift += slope
        result = result * inverse
        dgain += slope * unit
        if HAS_TOTAL:
            result += tl.load(dtotal + at, mask=here, other=0).to(tl.float32)
        tl.store(dx + at, result.to(dx.dtype.element_ty), mask=here)
    at = program.to(tl.int64) * width + column
    tl.store(partial + at, dgain, mask=inside)
    if not IS_RMS:
        tl.store(partial + programs.to(tl.int64) * width + at, dshift, mask=inside)

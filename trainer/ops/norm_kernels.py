"""Triton kernels of LayerNorm and RMSNorm with the residual sum before them, as operators that torch.compile knows.

A program has whole rows in registers. Sums are in float32. Backward, each of a few hundred programs adds up the
gradients of vectors over its own rows (`sum_kernels`). Not covered: rows of more than 8192 values without registers
spilled.

Shapes: M rows, D columns, P programs.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.ops.amax_kernels import keep_largest, magnitude
from trainer.ops.backend import num_programs, operator
from trainer.ops.sum_kernels import sum_programs


@operator("netlayer::norm_forward")
def norm_forward(
    x_MD: Tensor,
    residual_MD: Tensor | None,
    residual_bias_D: Tensor | None,
    weight_D: Tensor,
    bias_D: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalised rows, the sum (empty without a residual), mean (empty for RMSNorm) and 1 / deviation, float32.

    Args:
        residual_bias_D: added to every row of the residual; None without one.
        bias_D: None: RMSNorm.
    """
    return launch_forward(x_MD, residual_MD, residual_bias_D, weight_D, bias_D, eps)


def launch_forward(
    x_MD: Tensor,
    residual_MD: Tensor | None,
    residual_bias_D: Tensor | None,
    weight_D: Tensor,
    bias_D: Tensor | None,
    eps: float,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `norm_forward`, and, where a scalar of zero is given, the largest magnitude of the normalised rows."""
    num_rows, width = x_MD.shape
    y_MD, total_MD, mean_M, scale_M = _forward_shapes(x_MD, residual_MD, residual_bias_D, weight_D, bias_D, eps)
    block = triton.next_power_of_2(width)
    _forward[(num_rows,)](
        x_MD,
        residual_MD,
        residual_bias_D,
        weight_D,
        bias_D,
        y_MD,
        total_MD,
        mean_M,
        scale_M,
        amax,
        width,
        eps,
        HAS_RESIDUAL=residual_MD is not None,
        HAS_RESIDUAL_BIAS=residual_bias_D is not None,
        IS_RMS=bias_D is None,
        FINDS_AMAX=amax is not None,
        BLOCK=block,
        num_warps=_num_warps(block),
    )
    return y_MD, total_MD, mean_M, scale_M


@norm_forward.register_fake
def _forward_shapes(
    x_MD: Tensor,
    residual_MD: Tensor | None,
    _residual_bias_D: Tensor | None,
    _weight_D: Tensor,
    bias_D: Tensor | None,
    _eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return empty outputs of `norm_forward`, for torch.compile."""
    scale_M = x_MD.new_empty(x_MD.shape[0], dtype=torch.float32)
    total_MD = torch.empty_like(x_MD) if residual_MD is not None else x_MD.new_empty(0)
    mean_M = torch.empty_like(scale_M) if bias_D is not None else scale_M.new_empty(0)
    return torch.empty_like(x_MD), total_MD, mean_M, scale_M


def norm_again(total_MD: Tensor, weight_D: Tensor, bias_D: Tensor | None, mean_M: Tensor, scale_M: Tensor) -> Tensor:
    """Return the normalised rows of `norm_forward` once more, to the bit, from the sum and what was kept of its rows.

    Args:
        total_MD: what was normalised.
        bias_D: None: RMSNorm.
    """
    num_rows, width = total_MD.shape
    y_MD, block = torch.empty_like(total_MD), triton.next_power_of_2(width)
    _again[(num_rows,)](
        total_MD,
        weight_D,
        bias_D,
        mean_M,
        scale_M,
        y_MD,
        width,
        IS_RMS=bias_D is None,
        BLOCK=block,
        num_warps=_num_warps(block),
    )
    return y_MD


@operator("netlayer::norm_backward")
def norm_backward(
    dy_MD: Tensor,
    dtotal_MD: Tensor | None,
    total_MD: Tensor,
    weight_D: Tensor,
    mean_M: Tensor,
    scale_M: Tensor,
    sums_dtotal: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of the sum (with `dtotal_MD`, which came to it from elsewhere), and of the vectors, a row each.

    The rows are those of the weight, of the bias but for RMSNorm, and, as `sums_dtotal` asks for it, of a vector that
    was added to every row of the sum.
    """
    plan = plan_backward(dy_MD)
    return launch_backward(dy_MD, dtotal_MD, total_MD, weight_D, mean_M, scale_M, sums_dtotal, plan)


@norm_backward.register_fake
def _backward_shapes(
    _dy_MD: Tensor,
    _dtotal_MD: Tensor | None,
    total_MD: Tensor,
    weight_D: Tensor,
    mean_M: Tensor,
    _scale_M: Tensor,
    sums_dtotal: bool,
) -> tuple[Tensor, Tensor]:
    """Return empty outputs of `norm_backward`, for torch.compile."""
    return torch.empty_like(total_MD), weight_D.new_empty(_num_vectors(mean_M, sums_dtotal), len(weight_D))


def _num_vectors(mean_M: Tensor, sums_dtotal: bool) -> int:
    """Return the number of vectors that have gradients; without a mean it is RMSNorm, which has no bias."""
    return 1 + (mean_M.numel() > 0) + sums_dtotal


class BackwardPlan(NamedTuple):
    """Split of rows over a GPU: it changes the time, and the order in which gradients are summed.

    Args:
        num_warps: of a program.
        each: programs of a multiprocessor.
        rows: that a program has at once.
        stages: steps whose loads are under way together, through shared memory; 1: a step loads when it begins.
    """

    num_warps: int
    each: int
    rows: int
    stages: int


def plan_backward(dy_MD: Tensor) -> BackwardPlan:
    """Return the plan for a width: eight warps a multiprocessor, with loads of up to three rows ahead.

    On an H200 4% (width 4,096) and 12% (2,048) faster than twice as many warps with loads of two.
    """
    block = triton.next_power_of_2(dy_MD.shape[1])
    num_warps = _num_warps(block)
    row_bytes = block * dy_MD.element_size()  # of three inputs; what is ahead of all of them is to fit in 96 KiB
    stages = next((stages for stages in (4, 3, 2) if 3 * (stages - 1) * row_bytes <= 96 * 1024), 1)
    return BackwardPlan(num_warps, each=max(1, 8 // num_warps), rows=1, stages=stages)


def launch_backward(
    dy_MD: Tensor,
    dtotal_MD: Tensor | None,
    total_MD: Tensor,
    weight_D: Tensor,
    mean_M: Tensor,
    scale_M: Tensor,
    sums_dtotal: bool,
    plan: BackwardPlan,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `norm_backward` with the kernel sizes of `plan`; return dx_MD and the gradients of V vectors, (V, D).

    Args:
        dy_MD: gradient of the normalised rows.
        dtotal_MD: gradient of the sum before them; None: there is none.
        total_MD: the sum that was normalised.
        mean_M: of each row; empty: RMSNorm.
        scale_M: 1 / deviation of each row.
        sums_dtotal: also return the sum of dx_MD over rows, which is the gradient of the residual's bias.
        amax: a scalar of zero, into which the largest magnitude of dx_MD is taken; None: nobody reads it.
    """
    num_rows, width = dy_MD.shape
    dx_MD = torch.empty_like(total_MD)
    programs = num_programs(dy_MD, triton.cdiv(num_rows, plan.rows), plan.each)
    partial_VPD = scale_M.new_empty(_num_vectors(mean_M, sums_dtotal), programs, width)
    _backward[(programs,)](
        dy_MD,
        dtotal_MD,
        total_MD,
        weight_D,
        mean_M,
        scale_M,
        dx_MD,
        partial_VPD,
        amax,
        num_rows,
        width,
        HAS_TOTAL=dtotal_MD is not None,
        IS_RMS=mean_M.numel() == 0,
        SUMS_TOTAL=sums_dtotal,
        FINDS_AMAX=amax is not None,
        STEPS=triton.cdiv(num_rows, programs * plan.rows),
        ROWS=plan.rows,
        BLOCK=triton.next_power_of_2(width),
        STAGES=plan.stages,
        num_warps=plan.num_warps,
    )
    return dx_MD, sum_programs(partial_VPD, weight_D.dtype)


def _num_warps(block: int) -> int:
    return min(32, max(1, block // 512))


# One program a row: total = x + residual (+ its bias), y = the normalised total; `mean` and `scale` (1 / deviation) are
# kept for the backward pass.
@triton.jit
def _forward(
    x,
    residual,
    residual_bias,
    weight,
    bias,
    y,
    total,
    mean,
    scale,
    amax,
    width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_RESIDUAL_BIAS: tl.constexpr,
    IS_RMS: tl.constexpr,
    FINDS_AMAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    value = tl.load(x + at, mask=inside, other=0).to(tl.float32)
    if HAS_RESIDUAL:
        # Normalised is what is stored: backward has only that.
        value += tl.load(residual + at, mask=inside, other=0).to(tl.float32)
        if HAS_RESIDUAL_BIAS:
            value += tl.load(residual_bias + column, mask=inside, other=0).to(tl.float32)
        stored = value.to(total.dtype.element_ty)
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
    normalised = result.to(y.dtype.element_ty)
    tl.store(y + at, normalised, mask=inside)
    if FINDS_AMAX:
        keep_largest(amax, tl.max(magnitude(tl.where(inside, normalised, 0.0)), 0))


# One program a row: y from the stored total, with the mean and scale that `_forward` stored; the same operations.
@triton.jit
def _again(total, weight, bias, mean, scale, y, width, IS_RMS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    value = tl.load(total + at, mask=inside, other=0).to(tl.float32)
    if not IS_RMS:
        value = tl.where(inside, value - tl.load(mean + row), 0.0)
    result = value * tl.load(scale + row) * tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    if not IS_RMS:
        result += tl.load(bias + column, mask=inside, other=0).to(tl.float32)
    tl.store(y + at, result.to(y.dtype.element_ty), mask=inside)


# A program takes every P-th block of ROWS rows: dx, with `dtotal` added, and in `partial` (V, P, D) its sums over rows
# for weight, bias and residual's bias. unit: the normalised row; slope: dy; scaled: slope * weight.
@triton.jit
def _backward(  # noqa: C901  (what is not wanted is not compiled)
    dy,
    dtotal,
    total,
    weight,
    mean,
    scale,
    dx,
    partial,
    amax,
    num_rows,
    width,
    HAS_TOTAL: tl.constexpr,
    IS_RMS: tl.constexpr,
    SUMS_TOTAL: tl.constexpr,
    FINDS_AMAX: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    gain = tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    dgain = tl.zeros((BLOCK,), tl.float32)
    dshift = tl.zeros((BLOCK,), tl.float32)
    dadded = tl.zeros((BLOCK,), tl.float32)
    most = tl.zeros((BLOCK,), tl.int32)
    for step in tl.range(STEPS, num_stages=STAGES):
        row = (program + step * programs) * ROWS + tl.arange(0, ROWS)[:, None]
        exists = row < num_rows
        here = inside[None, :] & exists
        at = row.to(tl.int64) * width + column[None, :]
        # All loads come before the sums over a row: no load is moved over the barrier that is in them.
        value = tl.load(total + at, mask=here, other=0).to(tl.float32)
        slope = tl.load(dy + at, mask=here, other=0).to(tl.float32)
        if HAS_TOTAL:
            beside = tl.load(dtotal + at, mask=here, other=0)
        inverse = tl.load(scale + row, mask=exists, other=0)
        if not IS_RMS:
            value = tl.where(here, value - tl.load(mean + row, mask=exists, other=0), 0.0)
        unit = value * inverse
        scaled = slope * gain[None, :]
        if IS_RMS:
            result = scaled - unit * (tl.sum(scaled * unit, 1, keep_dims=True) / width)
        else:
            along, level = tl.reduce((scaled * unit, scaled), 1, _add_pairs, keep_dims=True)
            result = scaled - unit * (along / width) - level / width
            dshift += tl.sum(slope, 0)
        dgain += tl.sum(slope * unit, 0)
        result = result * inverse
        if HAS_TOTAL:
            result += beside.to(tl.float32)
        if SUMS_TOTAL:  # of rows that exist: behind the last, loads gave zeros alone
            dadded += tl.sum(result, 0)
        result = result.to(dx.dtype.element_ty)
        tl.store(dx + at, result, mask=here)
        if FINDS_AMAX:
            most = tl.maximum(most, tl.max(magnitude(tl.where(here, result, 0.0)), 0))
    if FINDS_AMAX:
        keep_largest(amax, tl.max(most, 0))
    at = program.to(tl.int64) * width + column
    each = programs.to(tl.int64) * width
    tl.store(partial + at, dgain, mask=inside)
    if not IS_RMS:
        at += each
        tl.store(partial + at, dshift, mask=inside)
    if SUMS_TOTAL:
        tl.store(partial + at + each, dadded, mask=inside)


@triton.jit
def _add_pairs(left_a, left_b, right_a, right_b):
    return left_a + right_a, left_b + right_b

"""Triton kernels of bias + GeLU (its tanh form) and SwiGLU, as operators that torch.compile knows.

They read rows that may lie apart (slices of one wide product). Backward computes the activation again from its input,
so that nothing else is kept. The bias's gradient is added up in float32 by each program over its own rows
(`sum_kernels`).

Shapes: M rows, F columns, G = 2 F, P programs a column of tiles.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from collectives.triton_support import IS_INTERPRETED
from trainer.ops.amax_kernels import keep_largest, magnitude
from trainer.ops.backend import num_programs, operator
from trainer.ops.sum_kernels import sum_programs

_IS_INTERPRETED = tl.constexpr(IS_INTERPRETED)  # which has no library of the device
_ROWS, _COLUMNS, _WARPS = 4, 1024, 8
_SUM_ROWS, _SUM_COLUMNS, _SUM_EACH = 2, 2048, 4
"""Of GeLU's backward, where rows are summed too: on an H200, of 8,192 rows of 16,384, 198 us (with `tl.sigmoid` 213,
and 275 as above)."""


@operator("netlayer::gelu_forward")
def gelu_forward(x_MF: Tensor, bias_F: Tensor | None) -> Tensor:
    """gelu(x + bias), dense."""
    y_MF = x_MF.new_empty(x_MF.shape)
    _gelu_forward[_tiles(x_MF)](
        x_MF, bias_F, y_MF, *x_MF.shape, x_MF.stride(0), bias_F is not None, _ROWS, _COLUMNS, num_warps=_WARPS
    )
    return y_MF


@gelu_forward.register_fake
def _gelu_shape(x_MF: Tensor, _bias_F: Tensor | None) -> Tensor:
    return x_MF.new_empty(x_MF.shape)


@operator("netlayer::gelu_backward")
def gelu_backward(
    dy_MF: Tensor, x_MF: Tensor, bias_F: Tensor | None, gives_y: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x and of the bias (empty without one), and with `gives_y` the forward's output, else empty.

    The output is that of `gelu_forward` to the bit, for one more write: x is read anyway.
    """
    dx_MF = x_MF.new_empty(x_MF.shape)
    y_MF = x_MF.new_empty(x_MF.shape if gives_y else 0)
    columns = triton.cdiv(x_MF.shape[1], _SUM_COLUMNS)
    programs = -(-num_programs(x_MF, x_MF.shape[0], _SUM_EACH) // columns)
    partial_PF = x_MF.new_empty(0 if bias_F is None else programs, x_MF.shape[1], dtype=torch.float32)
    _gelu_backward[(columns, programs)](
        dy_MF,
        x_MF,
        bias_F,
        dx_MF,
        y_MF,
        partial_PF,
        *x_MF.shape,
        dy_MF.stride(0),
        x_MF.stride(0),
        triton.cdiv(x_MF.shape[0], programs * _SUM_ROWS),
        bias_F is not None,
        gives_y,
        _SUM_ROWS,
        _SUM_COLUMNS,
        num_warps=_WARPS,
    )
    dbias_F = x_MF.new_empty(0) if bias_F is None else sum_programs(partial_PF[None], bias_F.dtype)[0]
    return dx_MF, dbias_F, y_MF


@gelu_backward.register_fake
def _gelu_gradient_shapes(
    _dy_MF: Tensor, x_MF: Tensor, bias_F: Tensor | None, gives_y: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    dbias_F = x_MF.new_empty(0) if bias_F is None else torch.empty_like(bias_F)
    return x_MF.new_empty(x_MF.shape), dbias_F, x_MF.new_empty(x_MF.shape if gives_y else 0)


@operator("netlayer::swiglu_forward")
def swiglu_forward(gate_MF: Tensor, value_MF: Tensor) -> Tensor:
    """silu(gate) * value, dense."""
    return launch_swiglu_forward(gate_MF, value_MF)


def launch_swiglu_forward(gate_MF: Tensor, value_MF: Tensor, amax: Tensor | None = None) -> Tensor:
    """Compute `swiglu_forward`, and, where a scalar of zero is given, the largest magnitude of it."""
    y_MF = gate_MF.new_empty(gate_MF.shape)
    _swiglu_forward[_tiles(gate_MF)](
        gate_MF,
        value_MF,
        y_MF,
        amax,
        *gate_MF.shape,
        gate_MF.stride(0),
        value_MF.stride(0),
        amax is not None,
        _ROWS,
        _COLUMNS,
        num_warps=_WARPS,
    )
    return y_MF


@swiglu_forward.register_fake
def _swiglu_shape(gate_MF: Tensor, _value_MF: Tensor) -> Tensor:
    return gate_MF.new_empty(gate_MF.shape)


@operator("netlayer::swiglu_backward")
def swiglu_backward(dy_MF: Tensor, gate_MF: Tensor, value_MF: Tensor, gives_y: bool = False) -> tuple[Tensor, Tensor]:
    """Gradients of gate and value side by side, [M, 2 F], and with `gives_y` the forward's output, else empty.

    The product that both came from reads them so, without a pass that joins them (`trainer.ops.linear.join_gradients`).
    """
    return launch_swiglu_backward(dy_MF, gate_MF, value_MF, gives_y)


def launch_swiglu_backward(
    dy_MF: Tensor, gate_MF: Tensor, value_MF: Tensor, gives_y: bool, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `swiglu_backward`, and, where a scalar of zero is given, the largest magnitude of both gradients."""
    num_rows, width = gate_MF.shape
    dboth_MG = gate_MF.new_empty(num_rows, 2 * width)
    y_MF = gate_MF.new_empty(gate_MF.shape if gives_y else 0)
    _swiglu_backward[_tiles(gate_MF)](
        dy_MF,
        gate_MF,
        value_MF,
        dboth_MG,
        y_MF,
        amax,
        num_rows,
        width,
        dy_MF.stride(0),
        gate_MF.stride(0),
        value_MF.stride(0),
        gives_y,
        amax is not None,
        _ROWS,
        _COLUMNS,
        num_warps=_WARPS,
    )
    return dboth_MG, y_MF


@swiglu_backward.register_fake
def _swiglu_gradient_shapes(
    _dy_MF: Tensor, gate_MF: Tensor, _value_MF: Tensor, gives_y: bool = False
) -> tuple[Tensor, Tensor]:
    num_rows, width = gate_MF.shape
    return gate_MF.new_empty(num_rows, 2 * width), gate_MF.new_empty(gate_MF.shape if gives_y else 0)


def _tiles(x_MF: Tensor) -> tuple[int]:
    """Return the grid, on the one axis that CUDA does not end at 65,535; the columns of a row of tiles are adjacent."""
    return (triton.cdiv(x_MF.shape[1], _COLUMNS) * triton.cdiv(x_MF.shape[0], _ROWS),)


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)) by the chip's exponential and division: within 3e-7 of itself near 0, 4e-6 at -87, 0 below.

    With care for subnormals, as in `tl.sigmoid`, arithmetic takes GeLU's kernels longer than memory.
    """
    if _IS_INTERPRETED:
        return tl.sigmoid(x)
    return libdevice.fast_dividef(1.0, 1.0 + libdevice.fast_expf(-x))


@triton.jit
def _gelu_gate(x, square):
    """gelu(x) = x * gate: (1 + tanh(u)) / 2 = sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    return _sigmoid(x * (1.5957691216057308 + 0.07135481627260025 * square))


# y = gelu(x + bias); one program a tile of ROWS x COLUMNS. Strides are elements from row to row of `x`.
@triton.jit
def _gelu_forward(
    x, bias, y, num_rows, width, x_stride, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    tile, columns = tl.program_id(0), tl.cdiv(width, COLUMNS)
    row = (tile // columns * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    column = (tile % columns * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < num_rows) & (column < width)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + column, mask=column < width, other=0).to(tl.float32)
    result = value * _gelu_gate(value, value * value)
    tl.store(y + row * width + column, result.to(y.dtype.element_ty), mask=inside)


# dx = dy * gelu'(x + bias), and in `partial` (P, F) each program's sum of dx over its rows, for the bias; y again, as
# `_gelu_forward` computes it. A program takes every P-th block of ROWS rows of one tile of columns, STEPS of them.
@triton.jit
def _gelu_backward(
    dy,
    x,
    bias,
    dx,
    y,
    partial,
    num_rows,
    width,
    dy_stride,
    x_stride,
    STEPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GIVES_Y: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program, programs = tl.program_id(1), tl.num_programs(1)
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    known = column < width
    shift = tl.zeros((1, COLUMNS), tl.float32)
    if HAS_BIAS:
        shift = tl.load(bias + column, mask=known, other=0).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(STEPS):
        row = ((program + step * programs) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
        inside = (row < num_rows) & known
        value = tl.load(x + row * x_stride + column, mask=inside, other=0).to(tl.float32)
        if HAS_BIAS:
            value += shift
        slope = tl.load(dy + row * dy_stride + column, mask=inside, other=0).to(tl.float32)
        square = value * value
        gate = _gelu_gate(value, square)
        if GIVES_Y:
            tl.store(y + row * width + column, (value * gate).to(y.dtype.element_ty), mask=inside)
        # Far out the sigmoid's own slope, which is 0 there, comes first: x times the slope of its argument overflows.
        steep = (gate - gate * gate) * value * (1.5957691216057308 + 0.21406444881780073 * square)
        result = slope * (gate + steep)
        tl.store(dx + row * width + column, result.to(dx.dtype.element_ty), mask=inside)
        if HAS_BIAS:
            total += result
    if HAS_BIAS:
        whole = tl.sum(total, 0)[None, :]
        tl.store(partial + program.to(tl.int64) * width + column, whole, mask=known)


# y = gate * sigmoid(gate) * value; one program a tile of ROWS x COLUMNS.
@triton.jit
def _swiglu_forward(
    gate,
    value,
    y,
    amax,
    num_rows,
    width,
    gate_stride,
    value_stride,
    FINDS_AMAX: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tile, columns = tl.program_id(0), tl.cdiv(width, COLUMNS)
    row = (tile // columns * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    column = (tile % columns * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < num_rows) & (column < width)
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0).to(tl.float32)
    v = tl.load(value + row * value_stride + column, mask=inside, other=0).to(tl.float32)
    result = (g * _sigmoid(g) * v).to(y.dtype.element_ty)
    tl.store(y + row * width + column, result, mask=inside)
    if FINDS_AMAX:  # of what is stored; outside of it all are zero
        keep_largest(amax, tl.max(magnitude(result)))


# dgate and dvalue of y = gate * sigmoid(gate) * value, side by side, and y again; one program a tile of ROWS x COLUMNS.
@triton.jit
def _swiglu_backward(
    dy,
    gate,
    value,
    dboth,
    y,
    amax,
    num_rows,
    width,
    dy_stride,
    gate_stride,
    value_stride,
    GIVES_Y: tl.constexpr,
    FINDS_AMAX: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tile, columns = tl.program_id(0), tl.cdiv(width, COLUMNS)
    row = (tile // columns * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    column = (tile % columns * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < num_rows) & (column < width)
    slope = tl.load(dy + row * dy_stride + column, mask=inside, other=0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0).to(tl.float32)
    v = tl.load(value + row * value_stride + column, mask=inside, other=0).to(tl.float32)
    s = _sigmoid(g)
    if GIVES_Y:
        tl.store(y + row * width + column, (g * s * v).to(y.dtype.element_ty), mask=inside)
    at = dboth + row * (2 * width) + column
    dgate = (slope * v * s * (1.0 + g * (1.0 - s))).to(dboth.dtype.element_ty)
    dvalue = (slope * g * s).to(dboth.dtype.element_ty)
    tl.store(at, dgate, mask=inside)
    tl.store(at + width, dvalue, mask=inside)
    if FINDS_AMAX:
        keep_largest(amax, tl.max(tl.maximum(magnitude(dgate), magnitude(dvalue))))

"""GeLU (its tanh form) of x + bias, and SwiGLU: one pass over memory each way; backward starts from the input again.

On a GPU, outside torch.compile, the kernels of `activation_kernels`; elsewhere torch's own operators, the reference.

Hendrycks and Gimpel, GeLU (arXiv 1606.08415); Shazeer, GLU variants (arXiv 2002.05202).

Shapes: [..., F].
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from collectives.triton_support import HAS_TRITON
from trainer.ops.backend import Operators, as_rows, uses_triton

if HAS_TRITON:
    from trainer.ops.activation_kernels import gelu_backward, gelu_forward, swiglu_backward, swiglu_forward


def bias_gelu(x: Tensor, bias_F: Tensor | None = None, operators: Operators = "auto") -> Tensor:
    """gelu(x + bias), the tanh form.

    A linear before it that leaves its bias to this one saves a pass over the gradient: the bias's is summed here.
    """
    if uses_triton(operators, x):
        return _BiasGelu.apply(x, bias_F)  # type: ignore[no-untyped-call, no-any-return]
    return F.gelu(x if bias_F is None else x + bias_F, approximate="tanh")


def swiglu(gate: Tensor, value: Tensor, operators: Operators = "auto") -> Tensor:
    """silu(gate) * value."""
    if uses_triton(operators, gate):
        return _Swiglu.apply(gate, value)  # type: ignore[no-untyped-call, no-any-return]
    return F.silu(gate) * value


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias_F: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, bias_F)
        y: Tensor = gelu_forward(as_rows(x), bias_F)
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, bias_F = ctx.saved_tensors
        dx_MF, dbias_F = gelu_backward(as_rows(dy), as_rows(x), bias_F)
        return dx_MF.view(x.shape), None if bias_F is None else dbias_F


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(gate, value)
        y: Tensor = swiglu_forward(as_rows(gate), as_rows(value))
        return y.view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, value = ctx.saved_tensors
        dgate_MF, dvalue_MF = swiglu_backward(as_rows(dy), as_rows(gate), as_rows(value))
        return dgate_MF.view(gate.shape), dvalue_MF.view(gate.shape)

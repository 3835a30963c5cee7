"""GeLU (its tanh form) of x + bias, and SwiGLU: one pass over memory each way; backward starts from the input again.

On a GPU, outside torch.compile, the kernels of `activation_kernels`; elsewhere torch's own operators, the reference.

[Note: outputs that are not kept] The linear after an activation reads its output twice: for the product, and for its
weight's gradient. Between the two nobody needs to hold it, for the activation holds what it is computed from. With
`recomputes` the output comes with a way to have it once more (`Again`, `collectives.tensor.linear`): the linear calls
it in its backward pass with the output's gradient, and one kernel gives the output and the gradient of the input. So
recomputation costs one write of the output, and no kernel (`netlayer.workload.memory.saved_tensors` counts the bytes).

[Note: amax] For 8-bit products SwiGLU's kernels find the largest magnitude of what they write, of the output and of
both gradients together (`trainer.ops.fp8`, [Note: largest magnitudes]).

Hendrycks and Gimpel, GeLU (arXiv 1606.08415); Shazeer, GLU variants (arXiv 2002.05202).

Shapes: [..., F].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from collectives.tensor.linear import Again
from collectives.triton_support import HAS_TRITON
from trainer.ops.backend import Operators, as_rows, take_amax, uses_triton

if HAS_TRITON:
    from trainer.ops.activation_kernels import (
        gelu_backward,
        gelu_forward,
        launch_swiglu_backward,
        launch_swiglu_forward,
        swiglu_backward,
        swiglu_forward,
    )


def bias_gelu(
    x: Tensor, bias_F: Tensor | None = None, operators: Operators = "auto", *, recomputes: bool = False
) -> Tensor:
    """gelu(x + bias), the tanh form.

    A linear before it that leaves its bias to this one saves a pass over the gradient: the bias's is summed here.

    Args:
        recomputes: the output may be had again, by `again_of`, from the linear that alone reads it.
    """
    if recomputes or uses_triton(operators, x):
        return _BiasGelu.apply(x, bias_F, operators)  # type: ignore[no-untyped-call, no-any-return]
    return _plain_gelu(x, bias_F)


def swiglu(
    gate: Tensor,
    value: Tensor,
    operators: Operators = "auto",
    *,
    recomputes: bool = False,
    amax: Tensor | None = None,
    grad_amax: Tensor | None = None,
) -> Tensor:
    """silu(gate) * value.

    Args:
        recomputes: as in `bias_gelu`.
        amax: a scalar of zero, float32, set to the largest magnitude of the output; None: nobody reads it.
        grad_amax: what the linear that gave both inputs, which nobody else reads, gave beside them: gets the largest
            magnitude of their gradients as its own, where the kernels compute.
    """
    if recomputes or uses_triton(operators, gate):
        return _Swiglu.apply(gate, value, operators, amax, grad_amax)  # type: ignore[no-untyped-call, no-any-return]
    y = _plain_swiglu(gate, value)
    take_amax(y, amax)
    return y


def again_of(y: Tensor) -> Again | None:
    """Return what gives the output of an operator of `trainer.ops` once more; None: its reader has to keep it."""
    compute = getattr(y.grad_fn, "compute_again", None)
    return None if compute is None else functools.partial(compute, y.grad_fn)


def _plain_gelu(x: Tensor, bias_F: Tensor | None) -> Tensor:
    return F.gelu(x if bias_F is None else x + bias_F, approximate="tanh")


def _plain_swiglu(gate: Tensor, value: Tensor) -> Tensor:
    return F.silu(gate) * value


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias_F: Tensor | None, operators: Operators) -> Tensor:
        ctx.save_for_backward(x, bias_F)
        ctx.has_kernels, ctx.gradients, ctx.compute_again = uses_triton(operators, x), None, _compute_again
        ctx.backward_of = _gelu_backward
        y: Tensor = gelu_forward(as_rows(x), bias_F).view(x.shape) if ctx.has_kernels else _plain_gelu(x, bias_F)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *_take_gradients(ctx, dy), None


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, value: Tensor, operators: Operators, amax: Tensor | None, grad_amax: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(gate, value)
        ctx.has_kernels, ctx.gradients, ctx.compute_again = uses_triton(operators, gate), None, _compute_again
        ctx.backward_of, ctx.grad_amax = _swiglu_backward, None if grad_amax is None else grad_amax.detach()
        if not ctx.has_kernels:
            y = _plain_swiglu(gate, value)
            take_amax(y, amax)
            return y
        rows_MF = as_rows(gate), as_rows(value)
        y = swiglu_forward(*rows_MF) if amax is None else launch_swiglu_forward(*rows_MF, amax)
        return y.view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dgate, dvalue, amax = _take_gradients(ctx, dy)
        return dgate, dvalue, None, None, amax


def _compute_again(ctx: Any, dy: Tensor | None) -> Tensor:
    """Return the output, and leave the gradients of the inputs for the node's own backward pass, which comes next."""
    if dy is None:
        raise ValueError("an activation is computed again with the gradient of its output")
    y, ctx.gradients = ctx.backward_of(ctx, dy, gives_y=True)
    return y  # type: ignore[no-any-return]


def _take_gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients that `_compute_again` left, or compute them."""
    gradients, ctx.gradients = ctx.gradients, None
    if gradients is None:
        _, gradients = ctx.backward_of(ctx, dy, gives_y=False)
    return gradients  # type: ignore[no-any-return]


_Gradients = tuple[Tensor, tuple[Tensor | None, ...]]
"""The output, if it was asked for, and the gradients of the inputs; of SwiGLU also the largest magnitude of these."""


def _gelu_backward(ctx: Any, dy: Tensor, *, gives_y: bool) -> _Gradients:
    x, bias_F = ctx.saved_tensors
    if not ctx.has_kernels:
        return _plain_backward(_plain_gelu, dy, x, bias_F)
    dx_MF, dbias_F, y_MF = gelu_backward(as_rows(dy), as_rows(x), bias_F, gives_y)
    y = y_MF.view(x.shape) if gives_y else y_MF
    return y, (dx_MF.view(x.shape), None if bias_F is None else dbias_F)


def _swiglu_backward(ctx: Any, dy: Tensor, *, gives_y: bool) -> _Gradients:
    gate, value = ctx.saved_tensors
    if not ctx.has_kernels:
        y, gradients = _plain_backward(_plain_swiglu, dy, gate, value)
        return y, (*gradients, None)
    tensors = as_rows(dy), as_rows(gate), as_rows(value), gives_y
    amax, ctx.grad_amax = ctx.grad_amax, None  # which is zero once: a second backward pass leaves it to the linear
    dboth_MG, y_MF = swiglu_backward(*tensors) if amax is None else launch_swiglu_backward(*tensors, amax)
    y = y_MF.view(gate.shape) if gives_y else y_MF
    dgate, dvalue = dboth_MG.view(*gate.shape[:-1], 2 * gate.shape[-1]).chunk(2, -1)
    return y, (dgate, dvalue, amax)


def _plain_backward(function: Callable[..., Tensor], dy: Tensor, *inputs: Tensor | None) -> _Gradients:
    """Compute by torch's operators again, and back: the same bits as where autograd kept what they read."""
    with torch.enable_grad():
        leaves = [None if each is None else each.detach().requires_grad_() for each in inputs]
        y = function(*leaves)
    known = [each for each in leaves if each is not None]
    gradients = iter(torch.autograd.grad(y, known, dy.reshape(y.shape)))
    return y.detach(), tuple(None if each is None else next(gradients) for each in leaves)

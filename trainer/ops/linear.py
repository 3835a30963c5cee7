"""Linears that write their weights' gradients where they leave from (`collectives.sharded.slot`), where there is such a
place.

Of a product with several outputs the gradients come apart: they are joined and summed for the bias in one pass. An
input that can be had again (`Again`) is not kept. Not covered: compiled blocks, whose linears are torch's own (their
gradients come as ever), and second derivatives.

Shapes: M rows, K features in, N features out.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from collectives.sharded.slot import SlotSource, slot_source
from collectives.tensor.autotuned_gemm import can_tune
from collectives.tensor.gemm import multiply, weight_gradient
from collectives.tensor.linear import Again, as_one, join_by_torch
from collectives.triton_support import HAS_TRITON
from trainer.ops.backend import Operators, as_rows, autotunes_gemms, uses_triton
from trainer.ops.fp8 import Recipe, scaled_linear

if HAS_TRITON:
    from trainer.ops.join_kernels import MOST_PARTS, join_and_sum


def summed_linear(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    bias_N: Tensor | None,
    operators: Operators = "auto",
    fp8: Recipe | None = None,
    again: Sequence[Again | None] = (),
    amaxes: Sequence[Tensor | None] = (),
    grad_amax: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """x_0 W_0^T + x_1 W_1^T + ... + b: [..., K] for each K -> [..., N]; and `grad_amax`, where it is given.

    Args:
        fp8: how factors are scaled to 8 bits; None: they stay as they are.
        again: for each input what gives it once more in the backward pass; None: it is kept. Empty: all are. In 8 bits
            all are kept, as they are multiplied.
        amaxes, grad_amax: as in `trainer.ops.fp8.scaled_linear`, in 8 bits alone.
    """
    return _apply(inputs, weights, bias_N, None, operators, fp8, again or [None] * len(inputs), amaxes, grad_amax)


def joined_linear(
    x: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    splits: Sequence[int],
    operators: Operators = "auto",
    fp8: Recipe | None = None,
    again: Again | None = None,
    amax: Tensor | None = None,
    grad_amax: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """x W^T + b, cut: [..., K] -> [..., n] for each n of `splits`; from `fp8` on as in `summed_linear`."""
    cuts = splits if len(splits) > 1 else None
    return _apply((x,), (weight_NK,), bias_N, cuts, operators, fp8, [again], [amax], grad_amax)


def _apply(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    bias_N: Tensor | None,
    splits: Sequence[int] | None,
    operators: Operators,
    fp8: Recipe | None,
    again: Sequence[Again | None],
    amaxes: Sequence[Tensor | None],
    grad_amax: Tensor | None,
) -> tuple[Tensor, ...]:
    """Compute the sum of products, by `_Linear` where a gradient has a place of its own, or an input is not kept."""
    if fp8 is not None:
        join = functools.partial(join_gradients, operators=operators)
        return scaled_linear(inputs, weights, bias_N, splits, fp8, join, operators, amaxes, grad_amax)
    trains = torch.is_grad_enabled() and all(weight.requires_grad for weight in weights)
    sources = [slot_source(weight) for weight in weights] if trains and not torch.compiler.is_compiling() else []
    if not any(sources) and not (sources and any(again)):
        return _cut(_sum(inputs, weights, bias_N), splits)
    kept = [
        _Keep.apply(x, weight, each is None)  # type: ignore[no-untyped-call]
        for x, weight, each in zip(inputs, weights, again, strict=True)
    ]
    keepers = [x.grad_fn for x in kept]
    y: tuple[Tensor, ...] = _Linear.apply(  # type: ignore[no-untyped-call]
        keepers, sources, again, splits, operators, bias_N, *kept, *weights
    )
    return y


class _Keep(torch.autograd.Function):
    """Saves, ahead of the product, what its backward reads: recomputation has all of that before the product's turn."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor, keeps_x: bool) -> Tensor:
        ctx.save_for_backward(x if keeps_x else None, weight_NK)
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        return dx, None, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        keepers: Sequence[Any],
        sources: Sequence[SlotSource | None],
        again: Sequence[Again | None],
        splits: Sequence[int] | None,
        operators: Operators,
        bias_N: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the sum of `inputs` times `weights` plus the bias, cut into `splits` by columns.

        Args:
            keepers: nodes that keep each input and weight for the backward pass (`_Keep`).
            sources: of the places for the weights' gradients; None: autograd's own.
            again: what gives an input that is not kept.
        """
        inputs, weights = tensors[: len(keepers)], tensors[len(keepers) :]
        ctx.keepers, ctx.sources, ctx.again, ctx.operators = keepers, sources, again, operators
        ctx.shapes = [x.shape for x in inputs]
        if autotunes_gemms(operators) and can_tune(inputs[0], weights[0].t()):
            y = _tuned_sum(inputs, weights, bias_N)
        else:
            y = _sum(inputs, weights, bias_N)
        return _cut(y, splits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients of bias, inputs and weights; of a weight with a place it is written there, and None here."""
        count = len(ctx.keepers)
        needs_bias, *needs = ctx.needs_input_grad[5:]
        dy_MN, dbias_N = join_gradients(dys, needs_bias, ctx.operators)
        tuned = autotunes_gemms(ctx.operators)
        accumulators = [node for node, _ in ctx.next_functions[-count:]]
        dinputs: list[Tensor | None] = []
        dweights: list[Tensor | None] = []
        for index, (keeper, source) in enumerate(zip(ctx.keepers, ctx.sources, strict=True)):
            x, weight_NK = keeper.saved_tensors
            dx = multiply(dy_MN, weight_NK, tuned=tuned).view(ctx.shapes[index]) if needs[index] else None
            dinputs.append(dx)
            again = ctx.again[index]
            if again is not None:  # one kernel gives it, and the gradient behind dx (`activation`, [Note])
                x = again(dx)
            dweights.append(weight_gradient(dy_MN, x.flatten(0, -2), source, accumulators[index], tuned=tuned))
        return *[None] * 5, dbias_N, *dinputs, *dweights


def join_gradients(
    dys: Sequence[Tensor], has_bias: bool, operators: Operators = "auto"
) -> tuple[Tensor, Tensor | None]:
    """Join the gradients of a product's outputs, [..., n] each: return [M, N] and the bias's, in the same dtype."""
    parts_Mn = [as_rows(dy) for dy in dys]
    # Where they are one matrix already, its sum is all that is left to do.
    if (
        has_bias
        and as_one(parts_Mn) is None
        and uses_triton(operators, parts_Mn[0])
        and 1 < len(parts_Mn) <= MOST_PARTS
    ):
        return join_and_sum(parts_Mn)
    return join_by_torch(parts_Mn, has_bias)


def _cut(y: Tensor, splits: Sequence[int] | None) -> tuple[Tensor, ...]:
    """Cut `y` by columns; one output is `y` itself, for the gradient of a cut into one would be a copy."""
    return (y,) if splits is None else torch.split(y, list(splits), dim=-1)


def _sum(inputs: Sequence[Tensor], weights: Sequence[Tensor], bias_N: Tensor | None) -> Tensor:
    """Sum the products by torch's linear, which autograd and compilers know."""
    y = F.linear(inputs[0], weights[0], bias_N)
    for x, weight_NK in zip(inputs[1:], weights[1:], strict=True):
        y = torch.addmm(y.flatten(0, -2), x.flatten(0, -2), weight_NK.t()).view_as(y)
    return y


def _tuned_sum(inputs: Sequence[Tensor], weights: Sequence[Tensor], bias_N: Tensor | None) -> Tensor:
    """Sum the products by tuned ones, in training alone: its shapes recur, while sampling has a new one a token."""
    y_MN = multiply(inputs[0].flatten(0, -2), weights[0].t(), bias_N, tuned=True)
    for x, weight_NK in zip(inputs[1:], weights[1:], strict=True):
        multiply(x.flatten(0, -2), weight_NK.t(), out_MN=y_MN, adds=True, tuned=True)
    return y_MN.view(*inputs[0].shape[:-1], -1)

"""A linear that writes its weights' gradients where they leave from (`collectives.slot`), where there is such a place.

Left out: compiled blocks, whose linears are torch's own (their gradients come as ever), and second derivatives.

Shapes: M rows, K features in, N features out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from collectives.product import weight_gradient
from collectives.slot import SlotSource, slot_source


def summed_linear(inputs: Sequence[Tensor], weights: Sequence[Tensor], bias_N: Tensor | None) -> Tensor:
    """x_0 W_0^T + x_1 W_1^T + ... + b: [..., K] for each K -> [..., N]."""
    trains = torch.is_grad_enabled() and all(weight.requires_grad for weight in weights)
    if not trains or torch.compiler.is_compiling():
        return _sum(inputs, weights, bias_N)
    sources = [slot_source(weight) for weight in weights]
    if not any(sources):
        return _sum(inputs, weights, bias_N)
    kept = [_Keep.apply(x, weight) for x, weight in zip(inputs, weights, strict=True)]  # type: ignore[no-untyped-call]
    y: Tensor = _SummedLinear.apply([x.grad_fn for x in kept], sources, bias_N, *kept, *weights)  # type: ignore[no-untyped-call]
    return y


class _Keep(torch.autograd.Function):
    """Saves, ahead of the product, what its backward reads: recomputation has all of that before the product's turn."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_NK)
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        return dx, None


class _SummedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        keepers: Sequence[Any],
        sources: Sequence[SlotSource | None],
        bias_N: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        inputs, weights = tensors[: len(keepers)], tensors[len(keepers) :]
        ctx.keepers, ctx.sources = keepers, sources
        return _sum(inputs, weights, bias_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        count, dy_MN = len(ctx.keepers), dy.flatten(0, -2)
        _, _, needs_bias, *needs = ctx.needs_input_grad
        accumulators = [node for node, _ in ctx.next_functions[-count:]]
        dinputs: list[Tensor | None] = []
        dweights: list[Tensor | None] = []
        for index, (keeper, source) in enumerate(zip(ctx.keepers, ctx.sources, strict=True)):
            x, weight_NK = keeper.saved_tensors
            dinputs.append((dy_MN @ weight_NK).view(x.shape) if needs[index] else None)
            dweights.append(weight_gradient(dy_MN, x.flatten(0, -2), source, accumulators[index]))
        return None, None, dy_MN.sum(0) if needs_bias else None, *dinputs, *dweights


def _sum(inputs: Sequence[Tensor], weights: Sequence[Tensor], bias_N: Tensor | None) -> Tensor:
    y = F.linear(inputs[0], weights[0], bias_N)
    for x, weight_NK in zip(inputs[1:], weights[1:], strict=True):
        y = torch.addmm(y.flatten(0, -2), x.flatten(0, -2), weight_NK.t()).view_as(y)
    return y

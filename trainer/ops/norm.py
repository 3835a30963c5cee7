"""LayerNorm and RMSNorm with the residual sum before them: forward and backward one pass over memory each.

On a GPU, outside torch.compile, the kernels of `norm_kernels`; elsewhere torch's own operators, the reference. Besides
the sum, the kernels save the addition of two gradients: that of the stream arrives in the norm's backward. And the
linear before may leave its bias to them: the bias's gradient is summed where that of its output is made. With
`recomputes` the normalised rows can be had once more (`trainer.ops.activation.again_of`) from the sum, the mean and the
deviation, which are kept anyway: one read of the sum, and one write.

[Note: amax] For 8-bit products the kernels find the largest magnitude of what they write, of the normalised rows and of
the gradient that they give to the branch (`trainer.ops.fp8`, [Note: largest magnitudes]).

Ba et al., Layer Normalization (arXiv 1607.06450); Zhang and Sennrich, RMSNorm (arXiv 1910.07467).

Shapes: [..., D] activations, M rows of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from collectives.triton_support import HAS_TRITON
from trainer.ops.backend import Operators, sums_narrowly, take_amax, uses_triton

if HAS_TRITON:
    from trainer.ops.norm_kernels import (
        launch_backward,
        launch_forward,
        norm_again,
        norm_backward,
        norm_forward,
        plan_backward,
    )

EPS = 1e-5


class Norm(nn.Module):
    """LayerNorm, or RMSNorm where there is no bias, of a stream to which a branch may be added first."""

    def __init__(self, width: int, bias: bool, operators: Operators = "auto", eps: float = EPS) -> None:
        super().__init__()
        self.operators, self.eps = operators, eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(
        self,
        stream: Tensor,
        branch: Tensor | None = None,
        branch_bias_D: Tensor | None = None,
        *,
        recomputes: bool = False,
        amax: Tensor | None = None,
        grad_amax: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `add_norm`."""
        return add_norm(
            stream,
            branch,
            self.weight,
            self.bias,
            branch_bias_D,
            self.eps,
            self.operators,
            recomputes=recomputes,
            amax=amax,
            grad_amax=grad_amax,
        )


def add_norm(
    stream: Tensor,
    branch: Tensor | None,
    weight_D: Tensor,
    bias_D: Tensor | None,
    branch_bias_D: Tensor | None = None,
    eps: float = EPS,
    operators: Operators = "auto",
    *,
    recomputes: bool = False,
    amax: Tensor | None = None,
    grad_amax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalised stream + branch, and the sum itself, which goes on as the stream; [..., D] each.

    Use the returned stream and not the given one: its gradient is then added where the norm's is made.

    Args:
        branch: None: nothing is added.
        bias_D: None: RMSNorm.
        branch_bias_D: added to every row of the branch.
        recomputes: the normalised rows may be had again by the linear that alone reads them.
        amax: a scalar of zero, float32, set to the largest magnitude of the normalised rows; None: nobody reads it.
        grad_amax: what the linear that gave the branch, whose output nobody else reads, gave beside it: gets the
            largest magnitude of the branch's gradient as its own, where the kernels compute.
    """
    if uses_triton(operators, stream):
        if branch is None and torch.compiler.is_compiling():  # a compiled graph has no output that is its input
            return _Norm.apply(stream, None, None, weight_D, bias_D, eps, None, None)[0], stream  # type: ignore[no-untyped-call]
        y, total = _Norm.apply(  # type: ignore[no-untyped-call]
            stream, branch, branch_bias_D, weight_D, bias_D, eps, amax, grad_amax
        )
        return y, total
    total = add_branch(stream, branch, branch_bias_D)
    # torch's RMSNorm is several operators, whose gradients autograd would add to the stream's one by one: in another
    # order than where they come as one.
    is_composed = bias_D is None and not torch.compiler.is_compiling()
    if recomputes or is_composed:
        y = _PlainAgain.apply(total, weight_D, bias_D, eps)  # type: ignore[no-untyped-call]
    else:
        y = _plain_norm(total, weight_D, bias_D, eps)
    take_amax(y, amax)
    return y, total


def _plain_norm(total: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
    """Normalise by torch's operators."""
    if bias_D is None:
        return F.rms_norm(total, weight_D.shape, weight_D, eps)
    if sums_narrowly(total):
        return _WideSums.apply(total, weight_D, bias_D, eps)  # type: ignore[no-untyped-call, no-any-return]
    return F.layer_norm(total, weight_D.shape, weight_D, bias_D, eps)


def add_branch(stream: Tensor, branch: Tensor | None, branch_bias_D: Tensor | None = None) -> Tensor:
    """stream + (branch + bias), as `add_norm` does it where torch's operators compute."""
    if branch is None:
        return stream
    return stream + (branch if branch_bias_D is None else branch + branch_bias_D)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        stream: Tensor,
        branch: Tensor | None,
        branch_bias_D: Tensor | None,
        weight_D: Tensor,
        bias_D: Tensor | None,
        eps: float,
        amax: Tensor | None,
        grad_amax: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return norm(stream + branch) and the sum; without a branch, norm(stream) and the stream itself."""
        x_MD = stream.reshape(-1, stream.shape[-1]).contiguous()
        branch_MD = None if branch is None else branch.reshape(x_MD.shape).contiguous()
        tensors = x_MD, branch_MD, branch_bias_D, weight_D, bias_D, eps
        y_MD, total_MD, mean_M, scale_M = norm_forward(*tensors) if amax is None else launch_forward(*tensors, amax)
        ctx.set_materialize_grads(False)
        ctx.has_branch, ctx.has_branch_bias = branch is not None, branch_bias_D is not None
        ctx.save_for_backward(x_MD if branch is None else total_MD, weight_D, bias_D, mean_M, scale_M)
        ctx.compute_again, ctx.shape = _compute_again, stream.shape
        # Of another dtype, the branch's gradient is rounded once more on its way.
        takes_amax = grad_amax is not None and branch is not None and branch.dtype == stream.dtype
        ctx.grad_amax = grad_amax.detach() if takes_amax else None  # type: ignore[union-attr]
        return y_MD.view(stream.shape), stream if branch is None else total_MD.view(stream.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return gradients of stream, branch, branch bias, weight and bias; either output may be unused (None)."""
        total_MD, weight_D, _, mean_M, scale_M = ctx.saved_tensors
        if dy is None:
            has_bias = ctx.has_branch_bias and dtotal is not None
            dbranch_bias_D = dtotal.flatten(0, -2).sum(0) if has_bias else None  # type: ignore[union-attr]
            return dtotal, dtotal if ctx.has_branch else None, dbranch_bias_D, *[None] * 5
        dtotal_MD = None if dtotal is None else dtotal.reshape(total_MD.shape).contiguous()
        dy_MD = dy.reshape(total_MD.shape).contiguous()
        tensors = dy_MD, dtotal_MD, total_MD, weight_D, mean_M, scale_M, ctx.has_branch_bias
        amax, ctx.grad_amax = ctx.grad_amax, None  # which is zero once: a second backward pass leaves it to the linear
        if amax is None:
            dx_MD, dvectors_VD = norm_backward(*tensors)
        else:
            dx_MD, dvectors_VD = launch_backward(*tensors, plan_backward(dy_MD), amax)
        dx, vectors = dx_MD.view(dy.shape), iter(dvectors_VD.unbind())
        dweight_D = next(vectors)
        dbias_D = next(vectors) if mean_M.numel() else None
        return dx, dx if ctx.has_branch else None, next(vectors, None), dweight_D, dbias_D, None, None, amax


def _compute_again(ctx: Any, _dy: Tensor | None) -> Tensor:
    """Normalised rows from what a node keeps."""
    y: Tensor = norm_again(*ctx.saved_tensors)
    return y.view(ctx.shape)


class _PlainAgain(torch.autograd.Function):
    """Norm by torch's operators that keeps its input alone, and computes again, also for its own backward pass."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
        ctx.save_for_backward(total, weight_D, bias_D)
        ctx.eps, ctx.compute_again = eps, _plain_again
        return _plain_norm(total, weight_D, bias_D, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            leaves = [None if each is None else each.detach().requires_grad_() for each in ctx.saved_tensors]
            total, weight_D, bias_D = leaves
            assert total is not None
            assert weight_D is not None
            y = _plain_norm(total, weight_D, bias_D, ctx.eps)
        gradients = iter(torch.autograd.grad(y, [each for each in leaves if each is not None], dy))
        return *(None if each is None else next(gradients) for each in leaves), None


@torch.no_grad()
def _plain_again(ctx: Any, _dy: Tensor | None) -> Tensor:
    total, weight_D, bias_D = ctx.saved_tensors
    return _plain_norm(total, weight_D, bias_D, ctx.eps)


class _WideSums(torch.autograd.Function):
    """LayerNorm of a narrow dtype, whose backward computes in float32; no activation is kept in that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
        y, mean, scale = torch.native_layer_norm(x, weight_D.shape, weight_D.float(), bias_D.float(), eps)
        ctx.save_for_backward(x, weight_D, bias_D, mean, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_D, bias_D, mean, scale = ctx.saved_tensors
        wide = dy.float(), x.float(), weight_D.shape, mean, scale, weight_D.float(), bias_D.float()
        dx, dweight_D, dbias_D = torch.ops.aten.native_layer_norm_backward(*wide, [True, True, True])
        return dx.to(x.dtype), dweight_D.to(x.dtype), dbias_D.to(x.dtype), None

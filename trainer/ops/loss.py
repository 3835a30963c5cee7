"""Cross entropy of a projection to the vocabulary that never holds all logits, and knows its vocabulary in parts.

Rows are taken some at a time: their logits, loss, and gradients of input and weight, so that nothing is computed twice
and the logits of the next rows take the place of these. Where the vocabulary is spread over the ranks of a
tensor-parallel group, each computes with its own columns; per row they exchange two numbers.

On a GPU the softmax is two kernels (`loss_kernels`): one reads the logits in the dtype of the product, the other puts
their gradient in their place. In bfloat16 a logit is rounded to 8 bits either way, by the product, as where the head is
a plain linear before `F.cross_entropy`; all that follows, and every sum, is in float32.

Shapes: W ranks of the tensor-parallel group, m rows of a rank, M = W * m, c rows of a chunk, D hidden, V vocabulary
(padded), v = V / W.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from collectives.sharded.slot import slot_source
from collectives.tensor.exchange import TensorExchange
from collectives.tensor.gemm import add_matmul, multiply
from collectives.triton_support import HAS_TRITON
from netlayer.workload.memory import KERNEL_LOGITS_ROWS, LOGITS_ROWS
from trainer.ops.backend import Operators, autotunes_gemms, uses_triton

if HAS_TRITON:
    from trainer.ops.loss_kernels import put_gradient, softmax_statistics


def linear_cross_entropy(
    x_mD: Tensor,
    weight_vD: Tensor,
    targets_M: Tensor,
    *,
    vocab_size: int,
    exchange: TensorExchange | None = None,
    chunk_rows: int | None = None,
    operators: Operators = "auto",
    counts_all: bool = True,
) -> Tensor:
    """Mean of -log softmax(x weight^T)[target] over all M rows, nats, in float32 or wider; the same on all ranks.

    Args:
        x_mD: this rank's rows; rank r has rows r * m and following of the whole.
        weight_vD: this rank's part of the vocabulary; all of it without an exchange.
        targets_M: ids, of all rows.
        vocab_size: tokens; what is above pads the weight and is no class.
        exchange: of the tensor-parallel group.
        chunk_rows: whose logits are held at once; None: what suits the operators.
        operators: for the softmax, and for the products, where there is no exchange.
        counts_all: False: a row whose target is negative adds nothing, to the loss or to a gradient, and is still one
            of the M rows by which the sum is divided.
    """
    kernels = uses_triton(operators, x_mD)
    chunk_rows = chunk_rows or (KERNEL_LOGITS_ROWS if kernels else LOGITS_ROWS)
    trains = torch.is_grad_enabled() and (x_mD.requires_grad or weight_vD.requires_grad)
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        x_mD,
        weight_vD,
        targets_M,
        vocab_size,
        exchange,
        chunk_rows,
        trains,
        _softmax if kernels else _plain_softmax,
        trains and exchange is None and autotunes_gemms(operators),
        counts_all,
    )
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_mD: Tensor,
        weight_vD: Tensor,
        targets_M: Tensor,
        vocab_size: int,
        exchange: TensorExchange | None,
        chunk_rows: int,
        trains: bool,
        softmax: Callable[..., Tensor],
        tuned: bool,
        counts_all: bool,
    ) -> Tensor:
        """Return the mean cross-entropy; where it trains, also compute both gradients.

        Chunk by chunk: no other logits exist meanwhile.

        Args:
            x_mD: this rank's rows, gathered over `exchange` (M rows then).
            weight_vD: this rank's part of the vocabulary.
            chunk_rows: rows whose logits exist at a time.
            softmax: adds a chunk's loss to `loss`, and turns its logits into their gradient.
        """
        ctx.source = slot_source(weight_vD) if weight_vD.requires_grad else None
        gathering = None if exchange is None else exchange.gather(x_mD)
        x_MD = x_mD if gathering is None else _whole(gathering)
        first = 0 if exchange is None else exchange.rank * weight_vD.shape[0]
        loss = x_mD.new_zeros((), dtype=torch.promote_types(x_mD.dtype, torch.float32))
        dx_MD = torch.empty_like(x_MD) if trains else None
        dweight_vD = torch.empty_like(weight_vD, dtype=loss.dtype) if trains else None
        for begin in range(0, len(x_MD), chunk_rows):
            x_cD, targets_c = x_MD[begin : begin + chunk_rows], targets_M[begin : begin + chunk_rows]
            logits_cv = multiply(x_cD, weight_vD.t(), tuned=tuned)
            num_known = max(0, min(weight_vD.shape[0], vocab_size - first))
            counts_c = None if counts_all else targets_c >= 0
            dlogits_cv = softmax(
                logits_cv, targets_c - first, num_known, exchange, loss, 1 / len(x_MD), trains, counts_c
            )
            if dx_MD is None or dweight_vD is None:
                continue
            multiply(dlogits_cv, weight_vD, out_MN=dx_MD[begin : begin + chunk_rows], tuned=tuned)
            add_matmul(dweight_vD, dlogits_cv.t(), x_cD, is_first=begin == 0, tuned=tuned)
        if gathering is not None:
            gathering.close()
        if dx_MD is not None and dweight_vD is not None:
            dx_mD = dx_MD if exchange is None else scatter_sum(dx_MD, exchange)
            ctx.save_for_backward(dx_mD, dweight_vD)
        return loss / len(x_MD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients of the forward pass by `dloss`; write the weight's where it has a place."""
        dx_mD, dweight_vD = ctx.saved_tensors
        slot = ctx.source.slot(ctx.next_functions[1][0]) if ctx.source is not None else None
        # Of one dimension: a scalar would be rounded to the other's dtype first, 1/3 to a bfloat16 0.2% too large.
        # Either gradient is rounded once, as it is scaled, in the one pass over it.
        dloss_1 = dloss[None]
        dx_mD = torch.mul(dx_mD, dloss_1, out=torch.empty_like(dx_mD))
        if slot is not None and slot.adds:
            slot.view.addcmul_(dweight_vD, dloss_1)
            return dx_mD, *[None] * 9
        place = torch.empty_like(dweight_vD, dtype=dx_mD.dtype) if slot is None else slot.view
        torch.mul(dweight_vD, dloss_1, out=place)
        return dx_mD, place if slot is None else None, *[None] * 8


def _softmax(
    logits_cv: Tensor,
    local_c: Tensor,
    num_known: int,
    exchange: TensorExchange | None,
    loss: Tensor,
    scale: float,
    trains: bool,
    counts_c: Tensor | None,
) -> Tensor:
    """Add the rows' losses to `loss`, by the kernels, and put the logits' gradient times `scale` in their place.

    Args:
        local_c: column of each row's target, outside 0 .. v - 1 where another rank has it.
        num_known: columns that are tokens; those after pad.
        counts_c: whether a row counts; None: all do.
    """
    lse_c, target_c = _over_ranks(*softmax_statistics(logits_cv, local_c, num_known), exchange)
    loss += _sum(lse_c - target_c, counts_c)
    if trains:
        put_gradient(logits_cv, local_c, lse_c, num_known, scale)
        if counts_c is not None:
            logits_cv.mul_(counts_c[:, None])
    return logits_cv


def _plain_softmax(
    logits_cv: Tensor,
    local_c: Tensor,
    num_known: int,
    exchange: TensorExchange | None,
    loss: Tensor,
    scale: float,
    trains: bool,
    counts_c: Tensor | None,
) -> Tensor:
    """Do as `_softmax` by torch's operators: the reference."""
    wide_cv = logits_cv.to(loss.dtype)
    wide_cv[:, num_known:] = -torch.inf
    place_c1, is_own_c1 = _place(local_c, logits_cv.shape[1])
    target_c = torch.where(is_own_c1, wide_cv.gather(1, place_c1), 0).squeeze(1)
    lse_c, target_c = _over_ranks(wide_cv.logsumexp(1), target_c, exchange)
    loss += _sum(lse_c - target_c, counts_c)
    if not trains:
        return logits_cv
    probability_cv = wide_cv.sub_(lse_c[:, None]).exp_()
    if counts_c is not None:
        probability_cv.mul_(counts_c[:, None])
        is_own_c1 &= counts_c[:, None]
    return probability_cv.scatter_add_(1, place_c1, -is_own_c1.to(loss.dtype)).mul_(scale).to(logits_cv.dtype)


def _sum(loss_c: Tensor, counts_c: Tensor | None) -> Tensor:
    return loss_c.sum() if counts_c is None else torch.where(counts_c, loss_c, 0).sum()


def scatter_sum(partial_MC: Tensor, exchange: TensorExchange) -> Tensor:
    """Return this rank's rows of the sum over ranks, [m, C]."""
    scattering = exchange.scatter(len(partial_MC) // exchange.world_size, partial_MC.shape[1], partial_MC)
    view = partial_MC.view(exchange.world_size, -1, partial_MC.shape[1])
    for rows, part in scattering.parts():
        part.copy_(view[rows])
    return scattering.result()


def gather_rows(own_mC: Tensor, exchange: TensorExchange) -> Tensor:
    """Gather every rank's rows, [M, C], to keep."""
    gathering = exchange.gather(own_mC)
    whole_MC = _whole(gathering).clone()
    gathering.close()
    return whole_MC


def _whole(gathering: Any) -> Tensor:
    for _ in gathering.parts():
        pass
    whole_MC: Tensor = gathering.whole()
    return whole_MC


def _place(local_c: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Column of each target in this part and whether it lies there, [c, 1] each; 0 where it does not."""
    is_own_c = (local_c >= 0) & (local_c < width)
    return torch.where(is_own_c, local_c, 0)[:, None], is_own_c[:, None]


def _over_ranks(lse_c: Tensor, target_c: Tensor, exchange: TensorExchange | None) -> tuple[Tensor, Tensor]:
    """Combine c rows' log of the sum of exponentials, and target's logit, over all parts of the vocabulary.

    Args:
        target_c: 0 where another rank has the target.
        exchange: of the ranks with the other parts; None: this one has all.
    """
    if exchange is None:
        return lse_c, target_c
    both_W2c = torch.zeros(exchange.world_size, 2, len(lse_c), dtype=lse_c.dtype, device=lse_c.device)
    both_W2c[exchange.rank] = torch.stack((lse_c, target_c))
    exchange.start_all_reduce(both_W2c).wait()  # a sum with zeros: a gather
    return both_W2c[:, 0].logsumexp(0), both_W2c[:, 1].sum(0)

"""Cross entropy of a projection to the vocabulary that never holds all logits, and knows its vocabulary in parts.

Rows are taken some at a time: their logits, loss, and gradients of input and weight, so that nothing is computed twice
and the logits of the next rows take the place of these. Where the vocabulary is spread over the ranks of a
tensor-parallel group, each computes with its own columns; per row they exchange two numbers.

Shapes: W ranks of the tensor-parallel group, m rows of a rank, M = W * m, D hidden, V vocabulary (padded), v = V / W.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from collectives.exchange import TensorExchange

CHUNK_ROWS = 2048


def linear_cross_entropy(
    x_mD: Tensor,
    weight_vD: Tensor,
    targets_M: Tensor,
    *,
    vocab_size: int,
    exchange: TensorExchange | None = None,
    chunk_rows: int = CHUNK_ROWS,
) -> Tensor:
    """Mean of -log softmax(x weight^T)[target] over all M rows, nats, in float32 or wider; the same on all ranks.

    Args:
        x_mD: this rank's rows; rank r has rows r * m and following of the whole.
        weight_vD: this rank's part of the vocabulary; all of it without an exchange.
        targets_M: ids, of all rows.
        vocab_size: tokens; what is above pads the weight and is no class.
        exchange: of the tensor-parallel group.
        chunk_rows: whose logits are held at once.
    """
    trains = torch.is_grad_enabled() and (x_mD.requires_grad or weight_vD.requires_grad)
    loss: Tensor = _LinearCrossEntropy.apply(x_mD, weight_vD, targets_M, vocab_size, exchange, chunk_rows, trains)  # type: ignore[no-untyped-call]
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
    ) -> Tensor:
        gathering = None if exchange is None else exchange.gather(x_mD)
        x_MD = x_mD if gathering is None else _whole(gathering)
        first = 0 if exchange is None else exchange.rank * weight_vD.shape[0]
        wide = torch.promote_types(x_mD.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=x_mD.device)
        dx_MD = torch.empty_like(x_MD) if trains else None
        dweight_vD = torch.zeros_like(weight_vD, dtype=wide) if trains else None
        for begin in range(0, len(x_MD), chunk_rows):
            x_cD, targets_c = x_MD[begin : begin + chunk_rows], targets_M[begin : begin + chunk_rows]
            logits_cv = (x_cD @ weight_vD.t()).to(wide)
            if vocab_size < first + weight_vD.shape[0]:
                logits_cv[:, max(0, vocab_size - first) :] = -torch.inf
            place_c1, is_own_c1 = _place(targets_c - first, weight_vD.shape[0])
            target_c = torch.where(is_own_c1, logits_cv.gather(1, place_c1), 0).squeeze(1)
            lse_c, target_c = _over_ranks(logits_cv.logsumexp(1), target_c, exchange)
            loss += (lse_c - target_c).sum()
            if dx_MD is None or dweight_vD is None:
                continue
            probability_cv = logits_cv.sub_(lse_c[:, None]).exp_()
            dlogits_cv = probability_cv.scatter_add_(1, place_c1, -is_own_c1.to(wide)).div_(len(x_MD)).to(x_mD.dtype)
            torch.mm(dlogits_cv, weight_vD, out=dx_MD[begin : begin + chunk_rows])
            _add_product(dweight_vD, dlogits_cv.t(), x_cD)
        if gathering is not None:
            gathering.close()
        if dx_MD is not None and dweight_vD is not None:
            dx_mD = dx_MD if exchange is None else scatter_sum(dx_MD, exchange)
            ctx.save_for_backward(dx_mD, dweight_vD.to(weight_vD.dtype))
        return loss / len(x_MD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dx_mD, dweight_vD = ctx.saved_tensors
        # A scalar on the device, in its own dtype: rounded to bfloat16 first, 1/3 would be 0.2% too large.
        return dx_mD * dloss, dweight_vD * dloss, None, None, None, None, None


def scatter_sum(partial_MC: Tensor, exchange: TensorExchange) -> Tensor:
    """This rank's rows of the sum over ranks, [m, C]."""
    scattering = exchange.scatter(len(partial_MC) // exchange.world_size, partial_MC.shape[1], partial_MC)
    view = partial_MC.view(exchange.world_size, -1, partial_MC.shape[1])
    for rows, part in scattering.parts():
        part.copy_(view[rows])
    return scattering.result()


def gather_rows(own_mC: Tensor, exchange: TensorExchange) -> Tensor:
    """Every rank's rows, [M, C], to keep."""
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
    """Log of the sum of exponentials, and the target's logit, over all parts of the vocabulary."""
    if exchange is None:
        return lse_c, target_c
    each_W2c = torch.zeros(exchange.world_size, 2, len(lse_c), dtype=lse_c.dtype, device=lse_c.device)
    each_W2c[exchange.rank] = torch.stack((lse_c, target_c))
    exchange.start_all_reduce(each_W2c).wait()
    return each_W2c[:, 0].logsumexp(0), each_W2c[:, 1].sum(0)


def _add_product(sum_vD: Tensor, a_vc: Tensor, b_cD: Tensor) -> None:
    """sum += a b, added up in the sum's dtype."""
    if a_vc.dtype == sum_vD.dtype:
        sum_vD.addmm_(a_vc, b_cD)
    elif a_vc.is_cuda:
        sum_vD += torch.mm(a_vc, b_cD, out_dtype=sum_vD.dtype)
    else:
        sum_vD += a_vc @ b_cD

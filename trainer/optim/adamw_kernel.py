"""A Triton kernel of AdamW over one flat shard, which also writes the parameters that the module computes with.

Loshchilov and Hutter, Decoupled Weight Decay Regularization (arXiv 1711.05101), in the order of torch's fused AdamW.
The least that an element needs is 28 bytes in float32 (weight, two moments, gradient in; weight and moments out) and
two for its copy in 16 bits: this is one pass over just these.

Shapes: S elements of a shard, R runs of them with one weight decay each.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 1024, 4


def adamw_step(
    master_S: Tensor,
    grad_S: Tensor,
    exp_avg_S: Tensor,
    exp_avg_sq_S: Tensor,
    shard_S: Tensor | None,
    ends_R: Tensor,
    decay_R: Tensor,
    lr: Tensor,
    step: Tensor,
    betas: tuple[float, float],
    eps: float,
    factor: Tensor | None = None,
) -> None:
    """Move the weights and their moments, in place.

    Args:
        master_S, grad_S, exp_avg_S, exp_avg_sq_S: float32.
        shard_S: gets the weights in its own dtype; None: nobody does.
        ends_R: where each run ends, int64; what is after the last is padding, and not decayed.
        decay_R: weight decay of each run, float32.
        lr: learning rate, a scalar in float32 on the device.
        step: its first element is the number of this step, from 1, likewise.
        factor: of the gradient, likewise; `grad_S` stays as it is.
    """
    beta1, beta2 = betas
    _adamw[(triton.cdiv(master_S.numel(), _BLOCK),)](
        master_S,
        grad_S,
        exp_avg_S,
        exp_avg_sq_S,
        shard_S,
        ends_R,
        decay_R,
        lr,
        step,
        factor,
        master_S.numel(),
        beta1,
        1 - beta1,
        math.log(beta1) if beta1 else -math.inf,
        beta2,
        1 - beta2,
        math.log(beta2) if beta2 else -math.inf,
        eps,
        NUM_RUNS=len(ends_R),
        HAS_OWN=shard_S is not None,
        HAS_FACTOR=factor is not None,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


@triton.jit
def _adamw(
    master,
    grad,
    exp_avg,
    exp_avg_sq,
    own,
    ends,
    decays,
    lr,
    step,
    factor,
    numel,
    beta1,
    rest1,
    log_beta1,
    beta2,
    rest2,
    log_beta2,
    eps,
    NUM_RUNS: tl.constexpr,
    HAS_OWN: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    weight = tl.load(master + at, mask=inside, other=0)
    slope = tl.load(grad + at, mask=inside, other=0)
    first = tl.load(exp_avg + at, mask=inside, other=0)
    second = tl.load(exp_avg_sq + at, mask=inside, other=0)
    if HAS_FACTOR:
        slope *= tl.load(factor)
    rate = tl.load(lr)
    # 1 - beta^step in float64: in float32 a thousandth would keep four digits.
    number = tl.load(step).to(tl.float64)
    correction1 = (1.0 - tl.exp(number * log_beta1)).to(tl.float32)
    correction2 = tl.sqrt(1.0 - tl.exp(number * log_beta2)).to(tl.float32)
    decay = tl.zeros((BLOCK,), tl.float32)
    for index in range(NUM_RUNS):  # from the last to the first: what stays is that of the first run that ends behind
        run = NUM_RUNS - 1 - index
        decay = tl.where(at < tl.load(ends + run), tl.load(decays + run), decay)
    weight -= rate * decay * weight
    first = beta1 * first + rest1 * slope
    second = beta2 * second + rest2 * slope * slope
    weight -= (rate / correction1) * first / (tl.sqrt(second) / correction2 + eps)
    tl.store(master + at, weight, mask=inside)
    tl.store(exp_avg + at, first, mask=inside)
    tl.store(exp_avg_sq + at, second, mask=inside)
    if HAS_OWN:
        tl.store(own + at, weight.to(own.dtype.element_ty), mask=inside)

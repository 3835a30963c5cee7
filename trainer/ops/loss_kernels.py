"""Triton kernels of the softmax in the cross entropy: what a row's loss needs in one read, and its gradient in place.

Shapes: c rows, v columns of this rank, of which the first `num_known` are tokens.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 4096, 8


def softmax_statistics(logits_cv: Tensor, local_c: Tensor, num_known: int) -> tuple[Tensor, Tensor]:
    """Log of the sum of exponentials over the tokens here (-inf: none), and the target's logit (0: not here); float32.

    Args:
        local_c: column of each row's target.
    """
    lse_c, target_c = (logits_cv.new_empty(len(logits_cv), dtype=torch.float32) for _ in range(2))
    steps = triton.cdiv(num_known, _BLOCK)
    _statistics[(len(logits_cv),)](
        logits_cv, local_c, lse_c, target_c, num_known, *_lengths(logits_cv), steps, _BLOCK, num_warps=_WARPS
    )
    return lse_c, target_c


def put_gradient(logits_cv: Tensor, local_c: Tensor, lse_c: Tensor, num_known: int, scale: float) -> None:
    """logits = scale * (exp(logits - lse) - [column is the target]), 0 in the columns that pad."""
    _gradient[(triton.cdiv(logits_cv.shape[1], _BLOCK), len(logits_cv))](
        logits_cv, local_c, lse_c, scale, num_known, *_lengths(logits_cv), _BLOCK, num_warps=_WARPS
    )


def _lengths(logits_cv: Tensor) -> tuple[int, int]:
    """Columns, and elements from row to row."""
    return logits_cv.shape[1], logits_cv.stride(0)


# One program a row, in blocks of columns: the log of the sum of exponentials over tokens, in one read (online
# softmax), and the logit of the target, 0 where it is not among this rank's.
@triton.jit
def _statistics(logits, local, lse, target, num_known, num_columns, stride, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offset = tl.arange(0, BLOCK)
    # Each lane keeps its own largest logit and sum: the lanes meet once, behind the loop.
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(STEPS):
        column = step * BLOCK + offset
        # The load is masked by the row's end, which is aligned where the tokens' may not be: it stays a wide one.
        logit = tl.load(logits + row * stride + column, mask=column < num_columns, other=0).to(tl.float32)
        logit = tl.where(column < num_known, logit, float("-inf"))
        larger = tl.maximum(largest, logit)
        # A lane that has seen no token, or -inf alone, has no finite maximum to subtract.
        base = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(largest - base) + tl.exp(logit - base)
        largest = larger
    whole = tl.max(largest, 0)
    base = tl.where(whole == float("-inf"), 0.0, whole)
    tl.store(lse + row, base + tl.log(tl.sum(total * tl.exp(largest - base), 0)))
    own = tl.load(local + row)
    is_here = (own >= 0) & (own < num_known)
    tl.store(target + row, tl.load(logits + row * stride + own, mask=is_here, other=0).to(tl.float32))


# logits become scale * (softmax - one-hot of the target), in place; one program a block of columns of a row.
@triton.jit
def _gradient(logits, local, lse, scale, num_known, num_columns, stride, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = logits + row * stride + column
    logit = tl.load(at, mask=column < num_columns, other=0).to(tl.float32)
    probability = tl.where(column < num_known, tl.exp(logit - tl.load(lse + row)), 0.0)
    result = (probability - tl.where(column == tl.load(local + row), 1.0, 0.0)) * scale
    tl.store(at, result.to(logits.dtype.element_ty), mask=column < num_columns)

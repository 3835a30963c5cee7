"""Products of narrow matrices, also such that add up in a wide one, as gradients of weights do over micro-batches.

Not covered: the products themselves, which are the vendor's; which of its algorithms computes one, `autotuned_gemm`
says.

Shapes: M rows, K features in, N features out.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from collectives.sharded.slot import GradientSlot, Promise, SlotSource
from collectives.tensor.autotuned_gemm import GEMMS, by_torch, can_tune

logger = logging.getLogger(__name__)


def multiply(
    a_MK: Tensor,
    b_KN: Tensor,
    bias_N: Tensor | None = None,
    *,
    out_MN: Tensor | None = None,
    adds: bool = False,
    tuned: bool = False,
    spared: int = 0,
) -> Tensor:
    """a b (+ bias), in the dtype of `a`.

    Args:
        out_MN: where it goes.
        adds: to what `out_MN` holds, and no bias.
        tuned: by the fastest algorithm, where there is a choice (`collectives.tensor.autotuned_gemm`).
        spared: multiprocessors that such a product leaves to concurrent kernels.
    """
    place_MN = a_MK.new_empty(a_MK.shape[0], b_KN.shape[1]) if out_MN is None else out_MN
    if tuned and can_tune(a_MK, b_KN, spared) and GEMMS.run(a_MK, b_KN, place_MN, bias_N, adds, spared):
        return place_MN
    return place_MN.addmm_(a_MK, b_KN) if adds else by_torch(a_MK, b_KN, place_MN, bias_N)


@dataclass(frozen=True)
class WeightGradient:
    """dy^T x.

    Args:
        dy, x: give [M, N] and [M, K] when they are to be read; to stay as they are where that is later.
        tuned, spared: as in `multiply`.
    """

    dy: Callable[[], Tensor]
    x: Callable[[], Tensor]
    tuned: bool = False
    spared: int = 0

    def into(self, source: SlotSource | None, accumulator: object) -> Tensor | None:
        """Compute into the slot of a linear's weight and return None; else return the gradient, for autograd.

        Args:
            source, accumulator: as in `collectives.sharded.slot`; no source: of a weight that is in no bucket.
        """
        if source is not None and source.write(accumulator, self._write):
            return None
        return self.dy().t() @ self.x()

    def promised(self, source: SlotSource, accumulator: object) -> Promise | None:
        """There, later in this backward pass; None: it cannot be."""
        return source.promise(accumulator, self._write)

    def _write(self, slot: GradientSlot) -> None:
        is_first = not slot.adds
        add_matmul(slot.view, self.dy().t(), self.x(), is_first, tuned=self.tuned, spared=self.spared)


def weight_gradient(
    dy_MN: Tensor, x_MK: Tensor, source: SlotSource | None, accumulator: object, *, tuned: bool = False
) -> Tensor | None:
    """Do as `WeightGradient.into` with factors that are available already."""
    return WeightGradient(lambda: dy_MN, lambda: x_MK, tuned).into(source, accumulator)


def add_matmul(
    sum_NK: Tensor, a_NM: Tensor, b_MK: Tensor, is_first: bool, *, tuned: bool = False, spared: int = 0
) -> None:
    """sum = a b where it is the first, else sum += a b; added up in the sum's dtype, which is no narrower.

    Halves into float32 on a GPU are rounded to nothing narrow in between, in one pass over the sum, inside the product.

    Args:
        sum_NK: contiguous; what it holds is not read where the product is the first.
        is_first: whether it holds no sum yet.
        tuned, spared: as in `multiply`.
    """
    wide = sum_NK.dtype
    is_tuned = tuned and wide == torch.float32 and can_tune(a_NM, b_MK, spared)
    if is_tuned and GEMMS.run(a_NM, b_MK, sum_NK, adds=not is_first, spared=spared):
        return
    if a_NM.dtype == wide:
        sum_NK.addmm_(a_NM, b_MK, beta=0 if is_first else 1)
    elif not a_NM.is_cuda or wide != torch.float32 or a_NM.dtype.itemsize > 2:  # CUDA widens halves to float32 alone
        torch.add(0 if is_first else sum_NK, a_NM @ b_MK, out=sum_NK)
    elif is_first:
        torch.mm(a_NM, b_MK, out_dtype=wide, out=sum_NK)
    elif _adds_in_place(sum_NK.device, a_NM.dtype, wide):
        torch.addmm(sum_NK, a_NM, b_MK, out_dtype=wide, out=sum_NK)
    else:
        sum_NK += torch.mm(a_NM, b_MK, out_dtype=wide)


@functools.cache
def _adds_in_place(device: torch.device, narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether this torch's product of narrow matrices is added to a wide one where it lies, inside the product.

    Some releases take a summand of the factors' dtype alone.
    """
    ones = torch.ones(16, 16, device=device, dtype=narrow)
    total = torch.ones(16, 16, device=device, dtype=wide)
    try:
        torch.addmm(total, ones, ones, out_dtype=wide, out=total)
    except RuntimeError as exc:
        logger.warning("gradients of weights that add up take another pass: %s", str(exc).splitlines()[0])
        return False
    return bool((total == 17).all())

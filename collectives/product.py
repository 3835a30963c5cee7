"""Products of narrow matrices that add up in a wide one, as gradients of weights do over rows and micro-batches.

Left out: the products themselves, which are the vendor's.

Shapes: M rows, K features in, N features out.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from collectives.slot import SlotSource

logger = logging.getLogger(__name__)


def weight_gradient(dy_MN: Tensor, x_MK: Tensor, source: SlotSource | None, accumulator: object) -> Tensor | None:
    """dy^T x, in the slot of a linear's weight (then None), else to be handed to autograd.

    Args:
        source, accumulator: as `collectives.slot` has them; no source: of a weight that is in no bucket.
    """
    slot = None if source is None else source.slot(accumulator)
    if slot is None:
        return dy_MN.t() @ x_MK
    add_product(slot.view, dy_MN.t(), x_MK, is_first=not slot.adds)
    return None


def add_product(sum_NK: Tensor, a_NM: Tensor, b_MK: Tensor, is_first: bool) -> None:
    """sum = a b where it is the first, else sum += a b; added up in the sum's dtype, which is no narrower.

    Halves into float32 on a GPU are rounded to nothing narrow in between, in one pass over the sum, inside the product.

    Args:
        sum_NK: contiguous; what it holds is not read where the product is the first.
        is_first: whether it holds no sum yet.
    """
    wide = sum_NK.dtype
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

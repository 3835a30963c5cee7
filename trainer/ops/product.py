"""Products of narrow matrices that add up in a wide one, as gradients of weights do over rows and micro-batches.

Left out: the products themselves, which are the vendor's.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def add_product(sum_NK: Tensor, a_NM: Tensor, b_MK: Tensor, is_first: bool) -> None:
    """sum = a b where it is the first, else sum += a b; added up in the sum's dtype, which is no narrower.

    On a GPU nothing narrow is rounded to in between, and there is one pass over the sum, inside the product.

    Args:
        sum_NK: contiguous; what it holds is not read where the product is the first.
        is_first: whether it holds no sum yet.
    """
    wide = sum_NK.dtype
    if a_NM.dtype == wide:
        sum_NK.addmm_(a_NM, b_MK, beta=0 if is_first else 1)
    elif not a_NM.is_cuda:
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

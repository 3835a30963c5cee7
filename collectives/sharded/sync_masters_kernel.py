"""A Triton kernel that takes over into the masters what a program wrote into the parameters.

It reads a master and a parameter, 6 bytes an element with parameters in 16 bits, and writes only where they differ;
torch's operators take 22, because each of the three reads and writes tensors of its own.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 2048, 4


def sync_written(master_S: Tensor, shard_S: Tensor) -> None:
    """Write into `master_S` each element of `shard_S` that is not what its master rounds to.

    Args:
        master_S: the masters, float32, contiguous.
        shard_S: this rank's slice of the parameters, float16 or bfloat16, contiguous.
    """
    num_elements = master_S.numel()
    _sync_masters[(triton.cdiv(num_elements, _BLOCK),)](master_S, shard_S, num_elements, _BLOCK, num_warps=_WARPS)


@triton.jit
def _sync_masters(master_ptr, own_ptr, num_elements, block: tl.constexpr):
    # In 64 bits: a bucket of one large embedding may have more than 2^31 elements.
    offsets = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    is_inside = offsets < num_elements
    master = tl.load(master_ptr + offsets, mask=is_inside)
    own = tl.load(own_ptr + offsets, mask=is_inside)
    # NaN differs from everything, itself too: it is taken over again, which changes nothing.
    is_written = own.to(tl.float32) != master.to(own_ptr.dtype.element_ty).to(tl.float32)
    tl.store(master_ptr + offsets, own.to(tl.float32), mask=is_inside & is_written)

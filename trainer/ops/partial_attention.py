"""Attention over a part of the keys, with what merges such parts: the logarithm of each query's sum of exponentials.

Of disjoint sets of keys, softmax over all of them is the mean of the parts' outputs, weighted by exp(lse)
(FlashAttention, arXiv 2205.14135, 3.1; Ring Attention, arXiv 2310.01889). A part's backward pass takes the output and
the lse of the whole, and then gives its exact share of the gradients, so nothing of a part is kept. One interface over
four kernels: cuDNN's and flash on a GPU in 16 bits, torch's flash on a CPU, and plain products for all else, which hold
the scores. Parts of a window, of which a query does not see the farthest keys, are flash's on a GPU.

Shapes: B sequences, q queries, k keys, H heads, G heads of keys and values (H / G queries' heads share one), K values a
head.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from collectives.triton_support import HAS_TRITON
from trainer.ops.attention import backend_order
from trainer.ops.backend import Operators, uses_triton

if HAS_TRITON:
    from trainer.ops.merge_kernels import merge_in_place

Kernel = Literal["cudnn", "flash", "cpu", "plain"]
_aten = torch.ops.aten


def attend(
    q_BHqK: Tensor, k_BGkK: Tensor, v_BGkK: Tensor, *, causal: bool, left: int | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of these queries over these keys alone: [B, H, q, K], and its lse, [B, H, q], float32 or wider.

    Args:
        causal: a query sees the keys up to its own index; there are as many of both. False: all of them.
        left: and of those before its own index the last `left`; there are as many of both. None: all of them.
    """
    match choose(q_BHqK, k_BGkK, causal=causal, left=left):
        case "flash" if left is not None:
            rows = (_rows(each) for each in (q_BHqK, k_BGkK, v_BGkK))
            lengths, window = (q_BHqK.shape[2], k_BGkK.shape[2]), _flash_window(left, causal=causal)
            y, lse, *_ = _aten._flash_attention_forward(*rows, None, None, *lengths, 0.0, False, False, **window)
            return _rows(y), lse
        case "cudnn":
            y, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q_BHqK, k_BGkK, v_BGkK, None, True, 0.0, causal)
            return y, lse.reshape(lse.shape[:3])  # its last dimension is 1
        case "flash":
            y, lse, *_ = _aten._scaled_dot_product_flash_attention(q_BHqK, k_BGkK, v_BGkK, 0.0, causal)
            return y, lse
        case "cpu":
            y, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q_BHqK, k_BGkK, v_BGkK, 0.0, causal)
            return y, lse
        case "plain":
            return _plain(q_BHqK, k_BGkK, v_BGkK, causal=causal, left=left)


def attend_backward(
    dy_BHqK: Tensor,
    q_BHqK: Tensor,
    k_BGkK: Tensor,
    v_BGkK: Tensor,
    y_BHqK: Tensor,
    lse_BHq: Tensor,
    *,
    causal: bool,
    left: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The part's share of the gradients of queries, keys and values.

    Args:
        dy_BHqK: gradient of the whole output.
        y_BHqK, lse_BHq: of the whole, over all parts.
        causal, left: as in `attend`.
    """
    inputs = dy_BHqK, q_BHqK, k_BGkK, v_BGkK, y_BHqK
    lengths = q_BHqK.shape[2], k_BGkK.shape[2]
    gradients: Sequence[Tensor]
    match choose(q_BHqK, k_BGkK, causal=causal, left=left):
        case "flash" if left is not None:
            rows = (_rows(each) for each in inputs)
            others = lse_BHq.contiguous(), None, None, *lengths, 0.0, False, *_no_dropout(q_BHqK.device)
            gradients = _aten._flash_attention_backward(*rows, *others, **_flash_window(left, causal=causal))
            gradients = [_rows(each) for each in gradients]
        case "cudnn":
            lse_BHq1, unused = lse_BHq.contiguous().unsqueeze(-1), _no_dropout(q_BHqK.device)
            gradients = _aten._scaled_dot_product_cudnn_attention_backward(
                *inputs, lse_BHq1, *unused, None, None, None, *lengths, 0.0, causal
            )
        case "flash":
            unused = _no_dropout(q_BHqK.device)
            gradients = _aten._scaled_dot_product_flash_attention_backward(
                *inputs, lse_BHq.contiguous(), None, None, *lengths, 0.0, causal, *unused
            )
        case "cpu":
            gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, lse_BHq, 0.0, causal)
        case "plain":
            gradients = _plain_backward(*inputs, lse_BHq, causal=causal, left=left)
    dq, dk, dv = gradients
    return dq, dk, dv


def merge(
    y_BHqK: Tensor, lse_BHq: Tensor, part_BHqK: Tensor, part_lse_BHq: Tensor, operators: Operators = "auto"
) -> None:
    """Merge a further part into output and lse, in place; computed in the dtype of the lse."""
    if uses_triton(operators, y_BHqK):
        merge_in_place(y_BHqK, lse_BHq, part_BHqK, part_lse_BHq)
        return
    weight = torch.sigmoid(part_lse_BHq - lse_BHq)[..., None]
    y_BHqK.copy_(torch.lerp(y_BHqK.to(lse_BHq.dtype), part_BHqK.to(lse_BHq.dtype), weight))
    lse_BHq.copy_(torch.logaddexp(lse_BHq, part_lse_BHq))


def _rows(x_BHqK: Tensor) -> Tensor:
    """[B, H, q, K] <-> [B, q, H, K], a view: flash's own order."""
    return x_BHqK.transpose(1, 2)


def _flash_window(left: int, *, causal: bool) -> dict[str, int]:
    return {"window_size_left": left, "window_size_right": 0 if causal else -1}  # -1: no bound


def takes_windows(q_BHqK: Tensor, k_BGkK: Tensor) -> bool:
    """Whether windows go by parts with a bound on the left: on a GPU by flash, not by products that hold the scores."""
    return q_BHqK.device.type == "cpu" or choose(q_BHqK, k_BGkK, causal=True, left=1) == "flash"


def choose(q_BHqK: Tensor, k_BGkK: Tensor, *, causal: bool, left: int | None = None) -> Kernel:
    """Return the kernel for these shapes; the same one for forward and backward."""
    if q_BHqK.device.type == "cpu":
        return "cpu" if left is None else "plain"
    return _choose_on_gpu(
        tuple(q_BHqK.shape), tuple(k_BGkK.shape), q_BHqK.dtype, q_BHqK.device, causal, has_left=left is not None
    )


@functools.lru_cache(maxsize=256)
def _choose_on_gpu(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    causal: bool,
    *,
    has_left: bool = False,
) -> Kernel:
    """Ask torch once a shape: what it checks are shapes, dtype and device, and it checks them on the host."""
    cuda = torch.backends.cuda
    q, k = (torch.empty(shape, dtype=dtype, device=device) for shape in (q_shape, k_shape))
    params = cuda.SDPAParams(q, k, k, None, 0.0, causal, q_shape[1] != k_shape[1])
    usable: dict[SDPBackend, tuple[Kernel, Any]] = {
        SDPBackend.CUDNN_ATTENTION: ("cudnn", cuda.can_use_cudnn_attention),
        SDPBackend.FLASH_ATTENTION: ("flash", cuda.can_use_flash_attention),
    }
    if has_left:
        # cuDNN has no such bound in torch; and flash's own operator, which has, pads no heads to a multiple of 8.
        return "flash" if q_shape[-1] % 8 == 0 and cuda.can_use_flash_attention(params) else "plain"
    for backend in backend_order(q_shape[2], k_shape[2]):
        if backend in usable and usable[backend][1](params):
            return usable[backend][0]
    return "plain"


@functools.cache
def _no_dropout(device: torch.device) -> tuple[Tensor, Tensor]:
    """Seed and offset of a generator that no kernel reads."""
    return torch.zeros(2, dtype=torch.int64, device=device), torch.zeros((), dtype=torch.int64, device=device)


def _scores(q_BHqK: Tensor, k_BGkK: Tensor, *, causal: bool, left: int | None) -> Tensor:
    """Scaled products, [B, G, H / G, q, k], in float32 or wider; -inf where a query does not see the key."""
    scores = _wide(q_BHqK, k_BGkK.shape[1]) @ _wide(k_BGkK, k_BGkK.shape[1]).transpose(-1, -2)
    scores /= math.sqrt(q_BHqK.shape[-1])
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(later, -math.inf)
    if left is not None:
        far = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(-left - 1)
        scores.masked_fill_(far, -math.inf)
    return scores


def _wide(x_BHqK: Tensor, groups: int) -> Tensor:
    """[B, G, H / G, q, K] in float32 or wider."""
    num_sequences, heads, *rest = x_BHqK.shape
    wide = x_BHqK.to(torch.promote_types(x_BHqK.dtype, torch.float32))
    return wide.reshape(num_sequences, groups, heads // groups, *rest)


def _plain(q_BHqK: Tensor, k_BGkK: Tensor, v_BGkK: Tensor, *, causal: bool, left: int | None) -> tuple[Tensor, Tensor]:
    scores = _scores(q_BHqK, k_BGkK, causal=causal, left=left)
    lse = scores.logsumexp(-1)
    y = torch.exp(scores - lse[..., None]) @ _wide(v_BGkK, v_BGkK.shape[1])
    return y.flatten(1, 2).to(q_BHqK.dtype), lse.flatten(1, 2)


def _plain_backward(
    dy_BHqK: Tensor,
    q_BHqK: Tensor,
    k_BGkK: Tensor,
    v_BGkK: Tensor,
    y_BHqK: Tensor,
    lse_BHq: Tensor,
    *,
    causal: bool,
    left: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    groups = k_BGkK.shape[1]
    q, k, v, y, dy = (_wide(each, groups) for each in (q_BHqK, k_BGkK, v_BGkK, y_BHqK, dy_BHqK))
    lse = lse_BHq.reshape(len(lse_BHq), groups, -1, lse_BHq.shape[-1])
    share = torch.exp(_scores(q_BHqK, k_BGkK, causal=causal, left=left) - lse[..., None])
    # Of the softmax over all keys: what a query's shares of the whole take from each score's gradient.
    dscores = share * (dy @ v.transpose(-1, -2) - (dy * y).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    dq = (dscores @ k).flatten(1, 2)
    dk, dv = (dscores.transpose(-1, -2) @ q).sum(2), (share.transpose(-1, -2) @ dy).sum(2)
    return dq.to(q_BHqK.dtype), dk.to(k_BGkK.dtype), dv.to(v_BGkK.dtype)

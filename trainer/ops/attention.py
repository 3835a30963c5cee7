"""Causal attention, in full or through a sliding window (MegaScale 3.1); heads of keys and values may be shared.

Full attention is torch's fused kernel. A window on a GPU is FlexAttention, which skips the blocks that no query sees;
on a CPU it is a mask: right, at the cost of full attention. Left out: dropout, documents packed into one sequence.

Shapes: B sequences, T positions, H heads, G heads of keys and values, K values a head.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, window: int = 0) -> Tensor:
    """softmax(q k^T / sqrt(K)) v, [B, H, T, K]: a query sees itself and what is before it, `window` keys at most.

    Args:
        window: 0: all before it.
    """
    num_positions, shared = q_BHTK.shape[2], q_BHTK.shape[1] != k_BGTK.shape[1]
    if not 0 < window < num_positions:
        return F.scaled_dot_product_attention(q_BHTK, k_BGTK, v_BGTK, is_causal=True, enable_gqa=shared)
    if q_BHTK.is_cuda:
        return _flex(q_BHTK, k_BGTK, v_BGTK, window)
    mask_TT = window_mask(num_positions, window, q_BHTK.device)
    return F.scaled_dot_product_attention(q_BHTK, k_BGTK, v_BGTK, attn_mask=mask_TT, enable_gqa=shared)


def window_mask(num_positions: int, window: int, device: torch.device) -> Tensor:
    """[T, T]: whether a query (row) sees a key (column): itself and the `window - 1` before it."""
    position_T = torch.arange(num_positions, device=device)
    distance_TT = position_T[:, None] - position_T[None, :]
    return (distance_TT >= 0) & (distance_TT < window)


def _flex(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, window: int) -> Tensor:
    mask = _block_mask(q_BHTK.shape[2], window, q_BHTK.device)
    shared = q_BHTK.shape[1] != k_BGTK.shape[1]
    y_BHTK: Tensor = _compiled_flex()(q_BHTK, k_BGTK, v_BGTK, block_mask=mask, enable_gqa=shared)
    return y_BHTK


@functools.cache
def _block_mask(num_positions: int, window: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < window)

    return create_block_mask(seen, None, None, num_positions, num_positions, device=str(device))


@functools.cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)

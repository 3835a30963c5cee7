"""Causal attention, in full or through a sliding window (MegaScale 3.1); heads of keys and values may be shared.

Full attention on a GPU is cuDNN's where it takes the inputs (16 bits, Ampere or newer), else flash, else what torch
has. A window on a GPU is FlexAttention, which skips the blocks that no query sees; on a CPU it is a mask: right, at the
cost of full attention. Documents packed into one sequence do not see each other: on a GPU by FlexAttention, whose mask
of blocks is made anew for every micro-batch, on a CPU by a mask. Not covered: dropout.

[Note: masks of blocks] What FlexAttention wants to know of 128 queries and 128 keys is whether none, some or all pairs
see each other. Positions and documents of a block are ranges (documents' numbers rise, and so do positions inside a
chunk), so their ends say it: nothing of the size [T, T] is made, as torch's `create_block_mask` makes it (17 GB a
sequence of 131,072 tokens). What is left of a square, [T / 128, T / 128] numbers of blocks, is 4 MB of these.

[Note: layouts] Activations are [T, B, .], so heads come as [B, H, T, K] with strides (H' K, K, B H' K, 1): slices of
the product that made them, H' its heads in all. cuDNN reads any strides whose last is 1, gives its output and the
gradients of its inputs the order that the inputs' dimensions have in memory, T before B, and wants the output's
gradient in the output's strides: those that [T, B, D] seen as heads has. So nothing should be copied on the way in, out
or back, and FlexAttention keeps that order too (`copies` of `bench.operators` counts). Flash reads any strides, but its
backward makes output and gradient contiguous as [B, T, H, K]: with B > 1 two copies a layer. For that, and because it
skips the same blocks, the window is FlexAttention's; the bench measures both. What is left: autograd joins the
gradients of the slices to that of the product.

Shapes: B sequences, T positions, H heads, G heads of keys and values, K values a head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

FULL_ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Of full attention on a GPU: the first that takes the inputs. Of the process: a comparison may order it anew."""
_CUDNN_RIGHT_AT_ITS_END, _CUDNN_BLOCK = 91501, 128


def attention(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, window: int = 0, mask: Any = None) -> Tensor:
    """softmax(q k^T / sqrt(K)) v, [B, H, T, K]: a query sees itself and what is before it, `window` keys at most.

    Args:
        window: 0: all before it.
        mask: of packed documents, with the window in it: `document_block_mask` on a GPU, else `document_mask`.
    """
    if mask is not None:
        return attention_by_mask(q_BHTK, k_BGTK, v_BGTK, mask)  # type: ignore[no-any-return]
    num_positions, shared = q_BHTK.shape[2], q_BHTK.shape[1] != k_BGTK.shape[1]
    is_full = not 0 < window < num_positions
    if q_BHTK.is_cuda:
        y_BHTK: Tensor = (
            _full_on_gpu(q_BHTK, k_BGTK, v_BGTK) if is_full else flex_window(q_BHTK, k_BGTK, v_BGTK, window)
        )
        return y_BHTK
    if is_full:
        return F.scaled_dot_product_attention(q_BHTK, k_BGTK, v_BGTK, is_causal=True, enable_gqa=shared)
    mask_TT = window_mask(num_positions, window, q_BHTK.device)
    return F.scaled_dot_product_attention(q_BHTK, k_BGTK, v_BGTK, attn_mask=mask_TT, enable_gqa=shared)


# torch 2.11's Inductor takes cuDNN's output for one of other strides: wrong values, and nothing says so.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _full_on_gpu(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
    shared = q_BHTK.shape[1] != k_BGTK.shape[1]
    if shared and q_BHTK.dtype == torch.float32:  # of shared heads in 32 bits torch would hold all scores
        k_BGTK, v_BGTK = (each.repeat_interleave(q_BHTK.shape[1] // each.shape[1], 1) for each in (k_BGTK, v_BGTK))
        shared = False
    # torch's own order puts flash first: 2.04 ms a layer of 7B on an H200, cuDNN 1.08.
    with sdpa_kernel(backend_order(q_BHTK.shape[2]), set_priority=True):
        return F.scaled_dot_product_attention(q_BHTK, k_BGTK, v_BGTK, is_causal=True, enable_gqa=shared)


def backend_order(*lengths: int) -> list[SDPBackend]:
    """Return the backends to try in order; no cuDNN where it is wrong after the last whole block (torch's 169849).

    Args:
        lengths: of queries and keys.
    """
    version = torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]
    is_wrong = version < _CUDNN_RIGHT_AT_ITS_END and any(length % _CUDNN_BLOCK for length in lengths)
    return [each for each in FULL_ORDER if not (is_wrong and each == SDPBackend.CUDNN_ATTENTION)]


# A compiler that traced it would make the mask of blocks again in every forward.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention_by_mask(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, mask: Any) -> Tensor:
    """Attention through a mask, of blocks on a GPU; of as many queries and keys as the mask has rows and columns."""
    shared = q_BHTK.shape[1] != k_BGTK.shape[1]
    if not q_BHTK.is_cuda:
        return F.scaled_dot_product_attention(q_BHTK, k_BGTK, v_BGTK, attn_mask=mask, enable_gqa=shared)
    y_BHTK: Tensor = _compiled_flex()(q_BHTK, k_BGTK, v_BGTK, block_mask=mask, enable_gqa=shared)
    return y_BHTK


def document_mask(segments_BT: Tensor, window: int, own_t: Tensor | None = None) -> Tensor:
    """[B, 1, t, T]: whether a query (row) sees a key (column): as `window_mask`, and in its own document alone."""
    num_positions = segments_BT.shape[1]
    seen_tT = window_mask(num_positions, window or num_positions, segments_BT.device, own_t)
    of_queries = segments_BT if own_t is None else segments_BT[:, own_t]
    return (seen_tT & (of_queries[:, :, None] == segments_BT[:, None, :]))[:, None]


def document_block_mask(segments_BT: Tensor, window: int, own_t: Tensor | None = None) -> Any:
    """Return the same as a mask of blocks, for FlexAttention: see [Note: masks of blocks]."""
    num_positions = segments_BT.shape[1]
    reach = window or num_positions

    def seen(b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        query = query if own_t is None else own_t[query]
        is_near = (query >= key) & (query - key < reach)
        return is_near & (segments_BT[b, query] == segments_BT[b, key])

    query_t = torch.arange(num_positions, device=segments_BT.device) if own_t is None else own_t
    return _blocks_of_ranges(seen, query_t, num_positions, reach, segments_BT)


def window_mask(num_positions: int, window: int, device: torch.device, own_t: Tensor | None = None) -> Tensor:
    """[t, T]: whether a query (row) sees a key (column): itself and the `window - 1` before it.

    Args:
        own_t: positions of the queries, in their order; None: all.
    """
    position_T = torch.arange(num_positions, device=device)
    distance_tT = (position_T if own_t is None else own_t)[:, None] - position_T[None, :]
    return (distance_tT >= 0) & (distance_tT < window)


def _blocks_of_ranges(
    seen: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    query_t: Tensor,
    num_positions: int,
    reach: int,
    segments_BT: Tensor | None = None,
) -> Any:
    """Make a mask of blocks from the ends of each block's positions and documents.

    Args:
        seen: of a pair, as FlexAttention asks it inside blocks that see each other in part.
        query_t: positions of the queries.
        reach: keys that a query sees, itself among them.
        segments_BT: documents, rising; None: each sequence is one.
    """
    from torch.nn.attention.flex_attention import _DEFAULT_SPARSE_BLOCK_SIZE, BlockMask

    size = _DEFAULT_SPARSE_BLOCK_SIZE
    key_T = torch.arange(num_positions, device=query_t.device)
    (first_q, last_q), (first_k, last_k) = (_ends(each, size) for each in (query_t, key_T))  # [Q], [K] blocks
    apart_QK = first_q[:, None] - last_k, last_q[:, None] - first_k  # nearest and farthest distance of a pair
    some = (apart_QK[1] >= 0) & (apart_QK[0] < reach)
    every = (apart_QK[0] >= 0) & (apart_QK[1] < reach)
    # Not where queries of a block lie in two chunks (context parallelism), nor past the last position.
    whole_q = last_q - first_q == size - 1
    every &= whole_q[:, None] & (last_k - first_k == size - 1)
    some, every = some[None], every[None]
    if segments_BT is not None:
        (low_q, high_q), (low_k, high_k) = (_ends(each, size) for each in (segments_BT[:, query_t], segments_BT))
        some = some & (low_q[:, :, None] <= high_k[:, None]) & (high_q[:, :, None] >= low_k[:, None])
        is_one = (low_q == high_q)[:, :, None] & (low_k == high_k)[:, None]
        every = every & is_one & (low_q[:, :, None] == low_k[:, None])
    partial = (some & ~every)[:, None]  # [B, 1, Q, K]
    full = (some & every)[:, None]
    (num_partial, partial_K), (num_full, full_K) = _listed(partial), _listed(full)
    lengths = len(query_t), num_positions
    return BlockMask.from_kv_blocks(
        num_partial, partial_K, num_full, full_K, BLOCK_SIZE=size, mask_mod=seen, seq_lengths=lengths
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many key blocks each query block has, [B, 1, Q], and their indices first, [B, 1, Q, K], as int32."""
    indices = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), indices.to(torch.int32)


def _ends(values: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest of each run of `size` along the last dimension; the last run may be shorter."""
    rest = -values.shape[-1] % size
    padded = values if not rest else torch.cat([values, values[..., -1:].expand(*values.shape[:-1], rest)], -1)
    low, high = padded.reshape(*padded.shape[:-1], -1, size).aminmax(dim=-1)
    return low, high


def window_block_mask(num_positions: int, window: int, own_t: Tensor) -> Any:
    """Return the same as a mask of blocks, for FlexAttention."""

    def seen(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = own_t[query] - key
        return (distance >= 0) & (distance < window)

    return _blocks_of_ranges(seen, own_t, num_positions, window)


# A compiler that traced it would make the mask of blocks again in every forward.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def flex_window(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, window: int) -> Tensor:
    """Compute attention with a window by FlexAttention, compiled."""
    mask = _block_mask(q_BHTK.shape[2], window, q_BHTK.device)
    shared = q_BHTK.shape[1] != k_BGTK.shape[1]
    y_BHTK: Tensor = _compiled_flex()(q_BHTK, k_BGTK, v_BGTK, block_mask=mask, enable_gqa=shared)
    return y_BHTK


@functools.cache
def _block_mask(num_positions: int, window: int, device: torch.device) -> Any:
    def seen(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < window)

    return _blocks_of_ranges(seen, torch.arange(num_positions, device=device), num_positions, window)


@functools.cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)

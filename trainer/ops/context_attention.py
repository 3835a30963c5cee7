"""Causal attention of a context-parallel rank: queries of its own positions, keys and values of all.

A rank has chunks r and 2 W - 1 - r of a sequence (`netlayer.layout.context_chunks`): its queries see its own keys
causally; of an earlier rank the first chunk, and all queries see that whole; of a later rank both chunks, and the
queries of the late chunk see these whole. So no product is masked but the one among a rank's own positions, every rank
has as much to do, and that one runs while the others' keys are on their way. Parts are merged by their lse
(`trainer.ops.partial_attention`).

In the backward pass keys and values are gathered again (nothing of other ranks is kept), under the own attention of
half the heads; gradients of others' keys then travel under that of the other half. The sum over ranks is in the dtype
of the computation.

With a window, or documents packed into a sequence, each query takes one softmax over all gathered keys by a mask (of
blocks, on a GPU: what no query sees is not computed). That gather is not hidden, and a window gathers all keys too.

Shapes: B sequences, T positions of a sequence, W context-parallel ranks, t = T / W positions of a rank, of two chunks
of c, H heads, G heads of keys and values, K values a head.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from collectives.context import ContextExchange
from trainer.ops.attention import attention_by_mask
from trainer.ops.partial_attention import attend, attend_backward, merge


# A compiler cannot follow streams and collectives.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def context_attention(
    q_tBHK: Tensor, k_tBGK: Tensor, v_tBGK: Tensor, exchange: ContextExchange, mask: Any = None, *, overlap: bool = True
) -> Tensor:
    """Attention of this rank's queries over all positions up to each; every rank of the group calls it.

    Args:
        exchange: of the group.
        mask: of a window or of packed documents, this rank's queries by all T keys (`trainer.ops.attention`); None:
            full.
        overlap: False: wait for each exchange before anything is computed.

    Returns:
        [t, B, H, K].
    """
    if mask is None:
        y: Tensor = _ContextAttention.apply(q_tBHK, k_tBGK, v_tBGK, exchange, overlap)  # type: ignore[no-untyped-call]
        return y
    k_TBGK, v_TBGK = _GatherKeys.apply(k_tBGK, v_tBGK, exchange)  # type: ignore[no-untyped-call]
    return _as_rows(attention_by_mask(*map(_as_heads, (q_tBHK, k_TBGK, v_TBGK)), mask))


def _as_heads(x_tBHK: Tensor) -> Tensor:
    """[t, B, H, K] -> [B, H, t, K], a view."""
    return x_tBHK.permute(1, 2, 0, 3)


def _as_rows(x_BHtK: Tensor) -> Tensor:
    """[B, H, t, K] -> [t, B, H, K], a view."""
    return x_BHtK.permute(2, 0, 1, 3)


def _parts(rank: int, world_size: int, num_positions: int) -> list[tuple[int, slice, slice]]:
    """Other ranks, with which of this rank's queries see which of their keys, in an order that all runs share."""
    chunk = num_positions // 2
    everything, early, late = slice(0, num_positions), slice(0, chunk), slice(chunk, num_positions)
    return [
        (other, everything, early) if other < rank else (other, late, everything)
        for other in range(world_size)
        if other != rank
    ]


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_tBHK: Tensor, k_tBGK: Tensor, v_tBGK: Tensor, exchange: ContextExchange, overlap: bool
    ) -> Tensor:
        """Attend to the own keys while the others' come, then to theirs, and merge."""
        gathered = exchange.gather(k_tBGK, v_tBGK)
        if not overlap:
            gathered.wait()
        q, k, v = map(_as_heads, (q_tBHK, k_tBGK, v_tBGK))
        y, lse = attend(q, k, v, causal=True)
        # A row that takes several parts is rounded once, behind the last.
        merged = y.to(lse.dtype) if exchange.world_size > 2 else y
        whole = gathered.wait()
        for other, queries, keys in _parts(exchange.rank, exchange.world_size, len(q_tBHK)):
            others_k, others_v = (_as_heads(each[keys]) for each in whole[other])
            part, part_lse = attend(q[:, :, queries], others_k, others_v, causal=False)
            merge(merged[:, :, queries], lse[:, :, queries], part, part_lse)
        y = y.copy_(merged) if merged is not y else y
        ctx.exchange, ctx.overlap = exchange, overlap
        ctx.save_for_backward(q_tBHK, k_tBGK, v_tBGK, y, lse)
        return _as_rows(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_tBHK: Tensor) -> tuple[Tensor | None, ...]:
        """Gather again, compute every part's share of the gradients, and send others' keys' and values' theirs."""
        q_tBHK, k_tBGK, v_tBGK, y, lse = ctx.saved_tensors
        exchange: ContextExchange = ctx.exchange
        gathered = exchange.gather(k_tBGK, v_tBGK)
        if not ctx.overlap:
            gathered.wait()
        q, k, v, dy = map(_as_heads, (q_tBHK, k_tBGK, v_tBGK, dy_tBHK))
        several = exchange.world_size > 2
        dq_tBHK = torch.empty_like(q_tBHK, dtype=lse.dtype if several else q.dtype)
        own_2tBGK = k_tBGK.new_empty(2, *k_tBGK.shape)
        first, *rest = _halves_of_heads(k.shape[1], q.shape[1] // k.shape[1], splits=ctx.overlap)
        _own_gradients(dy, q, k, v, y, lse, first, dq_tBHK, own_2tBGK)
        whole = gathered.wait()
        # Of what this rank's queries do not see, and of its own keys, the gradient is none of this sum.
        partial = torch.zeros_like(whole)
        later: list[tuple[slice, Tensor]] = []
        for other, queries, keys in _parts(exchange.rank, exchange.world_size, len(q_tBHK)):
            others_k, others_v = (_as_heads(each[keys]) for each in whole[other])
            dy_q, q_q, y_q, lse_q = (each[:, :, queries] for each in (dy, q, y, lse))
            dq, dk, dv = attend_backward(dy_q, q_q, others_k, others_v, y_q, lse_q, causal=False)
            partial[other, 0, keys].copy_(_as_rows(dk))
            partial[other, 1, keys].copy_(_as_rows(dv))
            later.append((queries, _as_rows(dq)))
        scattered = exchange.scatter(partial)
        if not ctx.overlap:
            scattered.wait()
        for heads in rest:
            _own_gradients(dy, q, k, v, y, lse, heads, dq_tBHK, own_2tBGK)
        for queries, dq in later:
            dq_tBHK[queries] += dq
        own_2tBGK += scattered.wait()
        dk_tBGK, dv_tBGK = own_2tBGK
        return dq_tBHK.to(q.dtype), dk_tBGK, dv_tBGK, None, None


_Heads = tuple[slice, slice]
"""Of queries, and of the keys that they share."""


def _halves_of_heads(num_key_heads: int, sharing: int, *, splits: bool) -> Sequence[_Heads]:
    """Cut the heads into two halves, for an exchange under each; one where there is but one head of keys."""
    cuts = [0, num_key_heads // 2, num_key_heads] if splits and num_key_heads > 1 else [0, num_key_heads]
    return [(slice(begin * sharing, end * sharing), slice(begin, end)) for begin, end in itertools.pairwise(cuts)]


def _own_gradients(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    heads: _Heads,
    dq_tBHK: Tensor,
    own_2tBGK: Tensor,
) -> None:
    """Write the gradients of these heads among the rank's own positions; other tensors are [B, H, t, ...]."""
    of_queries, of_keys = heads
    dq, dk, dv = attend_backward(
        dy[:, of_queries],
        q[:, of_queries],
        k[:, of_keys],
        v[:, of_keys],
        y[:, of_queries],
        lse[:, of_queries],
        causal=True,
    )
    dq_tBHK[:, :, of_queries].copy_(_as_rows(dq))
    own_2tBGK[0, :, :, of_keys].copy_(_as_rows(dk))
    own_2tBGK[1, :, :, of_keys].copy_(_as_rows(dv))


class _GatherKeys(torch.autograd.Function):
    """Keys and values of all positions, in their order, [T, B, G, K] each; gradients are sums over the ranks."""

    @staticmethod
    def forward(ctx: Any, k_tBGK: Tensor, v_tBGK: Tensor, exchange: ContextExchange) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        whole_W2tBGK = exchange.gather(k_tBGK, v_tBGK).wait()
        keys, values = (_in_order(whole_W2tBGK[:, index]) for index in range(2))
        return keys, values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dk_TBGK: Tensor, dv_TBGK: Tensor) -> tuple[Tensor | None, ...]:
        world_size = ctx.exchange.world_size
        partial = torch.stack([_by_rank(each, world_size) for each in (dk_TBGK, dv_TBGK)], 1)
        dk_tBGK, dv_tBGK = ctx.exchange.scatter(partial).wait()
        return dk_tBGK, dv_tBGK, None


def _in_order(parts_WtBGK: Tensor) -> Tensor:
    """Chunks by rank, [W, t, ...] -> by position, [T, ...]."""
    early, late = parts_WtBGK.chunk(2, 1)
    return torch.cat([early, late.flip(0)]).flatten(0, 1)


def _by_rank(whole_TBGK: Tensor, world_size: int) -> Tensor:
    """Positions in their order, [T, ...] -> by rank, [W, t, ...]."""
    early, late = whole_TBGK.reshape(2 * world_size, -1, *whole_TBGK.shape[1:]).chunk(2)
    return torch.cat([early, late.flip(0)], 1)

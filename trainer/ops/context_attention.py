"""Causal attention of a context-parallel rank: queries of its own positions, keys and values of all.

A rank has chunks r and 2 W - 1 - r of a sequence (`netlayer.layout.context_chunks`): its queries see its own keys
causally; of an earlier rank the first chunk, and all queries see that whole; of a later rank both chunks, and the
queries of the late chunk see these whole. So no product is masked but the one among a rank's own positions, every rank
has as much to do, and that one runs while the others' keys are on their way. Parts are merged by their lse
(`trainer.ops.partial_attention`).

In the backward pass keys and values are gathered again (nothing of other ranks is kept), under the own attention of
half the heads; gradients of others' keys then travel under that of the other half. The sum over ranks is in the dtype
of the computation.

With a window a part is one of a rank's chunks of queries and one chunk of keys that it reaches: what no query sees is
not computed, and the parts among the rank's own positions run while the others' keys travel, which are all keys though.
With documents packed into a sequence, and with a window where flash cannot be used on a GPU, each query takes one
softmax over all gathered keys by a mask (of blocks, on a GPU), and that gather is not hidden.

Shapes: B sequences, T positions of a sequence, W context-parallel ranks, t = T / W positions of a rank, of two chunks
of c, H heads, G heads of keys and values, K values a head.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from collectives.context import ContextExchange
from netlayer.layout import context_chunks
from trainer.ops.attention import attention_by_mask, window_block_mask
from trainer.ops.partial_attention import attend, attend_backward, merge, takes_windows
from trainer.ops.rotary import own_positions


# A compiler cannot follow streams and collectives.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def context_attention(
    q_tBHK: Tensor,
    k_tBGK: Tensor,
    v_tBGK: Tensor,
    exchange: ContextExchange,
    mask: Any = None,
    *,
    window: int = 0,
    overlap: bool = True,
) -> Tensor:
    """Attention of this rank's queries over all positions up to each; every rank of the group calls it.

    Args:
        exchange: of the group.
        mask: of packed documents, with the window in it, this rank's queries by all T keys (`trainer.ops.attention`);
            None: there are none.
        window: keys that a query sees, itself among them; 0: all before it.
        overlap: False: wait for each exchange before anything is computed.

    Returns:
        [t, B, H, K].
    """
    y: Tensor
    if mask is None and not 0 < window < len(q_tBHK) * exchange.world_size:
        y = _ContextAttention.apply(q_tBHK, k_tBGK, v_tBGK, exchange, overlap)  # type: ignore[no-untyped-call]
        return y
    if mask is None and takes_windows(_as_heads(q_tBHK), _as_heads(k_tBGK)):
        y = _WindowAttention.apply(q_tBHK, k_tBGK, v_tBGK, exchange, window, overlap)  # type: ignore[no-untyped-call]
        return y
    if mask is None:
        mask = _window_block_mask(len(q_tBHK), window, (exchange.rank, exchange.world_size), q_tBHK.device)
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


@dataclass(frozen=True)
class _Band:
    """A chunk of this rank's queries, and the keys of one chunk that they see through a window.

    Args:
        source: rank of the keys.
        queries, keys: rows of their ranks.
        causal, left: as in `attend`.
    """

    source: int
    queries: slice
    keys: slice
    causal: bool
    left: int | None


def _bands(rank: int, world_size: int, num_positions: int, window: int) -> Iterator[_Band]:
    """Yield what this rank's queries see: each chunk's own keys first, which all its queries see some of."""
    size = num_positions // 2
    rows = {  # of a chunk, by its first position: rank, and its first row there
        chunk.start: (source, size * number)
        for source in range(world_size)
        for number, chunk in enumerate(context_chunks(num_positions * world_size, source, world_size))
    }
    for chunk in context_chunks(num_positions * world_size, rank, world_size):
        first = rows[chunk.start][1]
        everything = slice(first, first + size)
        yield _Band(rank, everything, everything, causal=True, left=window - 1 if window < size else None)
        for start in range(chunk.start - size, -1, -size):
            (source, row), hidden = rows[start], chunk.start - start - window + 1
            if hidden >= size:  # of the first query, which reaches farthest
                break
            # Query i sees the keys from i + hidden on; those that see none are the last ones.
            num_seen = size - max(hidden, 0)
            left = None if hidden <= 1 - size else max(-hidden, 0)
            yield _Band(
                source,
                slice(first, first + num_seen),
                slice(row + size - num_seen, row + size),
                causal=False,
                left=left,
            )


class _WindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_tBHK: Tensor,
        k_tBGK: Tensor,
        v_tBGK: Tensor,
        exchange: ContextExchange,
        window: int,
        overlap: bool,
    ) -> Tensor:
        """Attend to the own keys while the others' come, then to theirs, and merge."""
        gathered = exchange.gather(k_tBGK, v_tBGK)
        if not overlap:
            gathered.wait()
        bands = list(_bands(exchange.rank, exchange.world_size, len(q_tBHK), window))
        q, own = _as_heads(q_tBHK), (k_tBGK, v_tBGK)
        wide = torch.promote_types(q.dtype, torch.float32)
        merged = _as_heads(torch.empty_like(q_tBHK, dtype=wide))
        lse = torch.empty(q.shape[:3], dtype=wide, device=q.device)
        for is_own in (True, False):
            whole = {exchange.rank: own} if is_own else gathered.wait()
            for band in bands:
                if (band.source == exchange.rank) != is_own:
                    continue
                k, v = (_as_heads(each[band.keys]) for each in whole[band.source])
                part, part_lse = attend(q[:, :, band.queries], k, v, causal=band.causal, left=band.left)
                if band.causal:
                    merged[:, :, band.queries].copy_(part)
                    lse[:, :, band.queries].copy_(part_lse)
                else:
                    merge(merged[:, :, band.queries], lse[:, :, band.queries], part, part_lse)
        y_tBHK = _as_rows(merged).to(q.dtype)
        ctx.exchange, ctx.overlap, ctx.bands = exchange, overlap, bands
        ctx.save_for_backward(q_tBHK, *own, y_tBHK, lse)
        return y_tBHK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_tBHK: Tensor) -> tuple[Tensor | None, ...]:
        """Gather again, compute every part's share of the gradients, and send others' keys' and values' theirs."""
        q_tBHK, k_tBGK, v_tBGK, y_tBHK, lse = ctx.saved_tensors
        exchange: ContextExchange = ctx.exchange
        gathered = exchange.gather(k_tBGK, v_tBGK)
        if not ctx.overlap:
            gathered.wait()
        q, k, v, y, dy = map(_as_heads, (q_tBHK, k_tBGK, v_tBGK, y_tBHK, dy_tBHK))
        dq_tBHK = torch.zeros_like(q_tBHK, dtype=lse.dtype)
        own_2tBGK = torch.zeros((2, *k_tBGK.shape), dtype=lse.dtype, device=k.device)

        def add(band: _Band, keys: Tensor, values: Tensor, heads: _Heads, into_2tBGK: Tensor) -> None:
            of_queries, of_keys = heads
            dy_q, q_q, y_q, lse_q = (each[:, of_queries, band.queries] for each in (dy, q, y, lse))
            k_k, v_k = keys[:, of_keys, band.keys], values[:, of_keys, band.keys]
            dq, dk, dv = attend_backward(dy_q, q_q, k_k, v_k, y_q, lse_q, causal=band.causal, left=band.left)
            dq_tBHK[band.queries, :, of_queries] += _as_rows(dq)
            for into_tBGK, gradient in zip(into_2tBGK, (dk, dv), strict=True):
                into_tBGK[band.keys, :, of_keys] += _as_rows(gradient)

        own = [band for band in ctx.bands if band.source == exchange.rank]
        first, *rest = _halves_of_heads(k.shape[1], q.shape[1] // k.shape[1], splits=ctx.overlap)
        for band in own:
            add(band, k, v, first, own_2tBGK)
        whole = gathered.wait()
        # Of keys that no query here sees, and of its own, the gradient is none of this sum.
        partial = torch.zeros_like(whole)
        for band in ctx.bands:
            if band.source != exchange.rank:
                keys, values = map(_as_heads, whole[band.source])
                add(band, keys, values, (slice(None), slice(None)), partial[band.source])
        scattered = exchange.scatter(partial)
        if not ctx.overlap:
            scattered.wait()
        for heads, band in itertools.product(rest, own):
            add(band, k, v, heads, own_2tBGK)
        own_2tBGK += scattered.wait()
        dk_tBGK, dv_tBGK = own_2tBGK.to(k.dtype)
        return dq_tBHK.to(q.dtype), dk_tBGK, dv_tBGK, None, None, None


@functools.lru_cache(maxsize=16)
def _window_block_mask(num_own: int, window: int, part: tuple[int, int], device: torch.device) -> Any:
    """Made once for all layers of one window."""
    return window_block_mask(num_own * part[1], window, own_positions(num_own, *part, device))


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

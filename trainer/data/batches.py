"""Tokens of each batch: a function of (seed, step, sample) alone.

The counter-based generator has no state to carry, save or split: every rank computes its own samples, and the global
batch is the same whatever the number of ranks and the micro-batch size. Samples are drawn with replacement. Not
covered: epochs and packing by document (`trainer.data.sampler`), batches read ahead (`trainer.data.loader`).

Shapes: N samples, B sequences, T positions, t of them of a context-parallel rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from netlayer.layout import context_chunks

_SAMPLING = 1  # the second word of the generator's key: other uses of the seed take other words


@dataclass(frozen=True)
class Slice:
    """One rank's share of every global batch: `count` contiguous samples from `first`, `micro_batch_size` at a time."""

    first: int
    count: int
    micro_batch_size: int

    @property
    def num_micro_batches(self) -> int:
        return self.count // self.micro_batch_size


def rank_slice(global_batch_size: int, micro_batch_size: int, rank: int, world_size: int) -> Slice:
    """The share of `rank`.

    Raises:
        ValueError: `global_batch_size` is no multiple of `micro_batch_size * world_size`.
    """
    if global_batch_size % (micro_batch_size * world_size):
        raise ValueError(
            f"global_batch_size = {global_batch_size}: not a multiple of {micro_batch_size} x {world_size} ranks"
        )
    count = global_batch_size // world_size
    return Slice(first=rank * count, count=count, micro_batch_size=micro_batch_size)


def sample_starts(num_tokens: int, seq_len: int, seed: int, step: int, samples_N: range) -> NDArray[np.int64]:
    """First token of each sample's window: uniform over all windows of `seq_len + 1` tokens, shape (N,)."""
    num_windows = num_tokens - seq_len
    if num_windows < 1:
        raise ValueError(f"num_tokens = {num_tokens}: a window takes {seq_len + 1}")
    key = np.array([seed % 2**64, _SAMPLING], dtype=np.uint64)
    starts = np.empty(len(samples_N), dtype=np.int64)
    for position, sample in enumerate(samples_N):
        word = np.random.Philox(key=key, counter=np.array([0, 0, step, sample], dtype=np.uint64)).random_raw()
        starts[position] = int(word) * num_windows >> 64
    return starts


def even_starts(num_tokens: int, seq_len: int, count: int) -> NDArray[np.int64]:
    """`count` windows spread evenly over the whole stream: the same ones at every evaluation."""
    if num_tokens <= seq_len:
        raise ValueError(f"num_tokens = {num_tokens}: a window takes {seq_len + 1}")
    return np.arange(count, dtype=np.int64) * (num_tokens - seq_len - 1) // max(1, count - 1)


def micro_batches(
    tokens: NDArray[np.integer],
    starts_N: NDArray[np.int64],
    seq_len: int,
    micro_batch_size: int,
    device: torch.device,
    part: tuple[int, int] = (0, 1),
) -> Iterator[tuple[Tensor, Tensor]]:
    """The windows at `starts_N` as (tokens_BT, targets_BT), int64 on `device`, B = `micro_batch_size`.

    Args:
        part: rank and number of context-parallel ranks, for the positions that this one has.
    """
    chunks = own_chunks(seq_len, *part)
    for first in range(0, len(starts_N), micro_batch_size):
        starts = starts_N[first : first + micro_batch_size]
        rows = np.stack([tokens[start : start + seq_len + 1] for start in starts])
        windows = torch.from_numpy(cut_windows(rows, chunks).astype(np.int64))
        if device.type == "cuda":
            windows = windows.pin_memory().to(device, non_blocking=True)
        yield split_windows(windows, chunks)


def own_chunks(seq_len: int, rank: int, cp: int) -> tuple[range, ...]:
    """Positions of a sequence that a context-parallel rank has, in runs; of one rank all."""
    return (range(seq_len),) if cp == 1 else context_chunks(seq_len, rank, cp)


def cut_windows(rows_BT: NDArray[Any], chunks: tuple[range, ...]) -> NDArray[Any]:
    """Windows of T + 1 tokens -> those of each chunk and the one behind it, side by side, [B, t + number of chunks]."""
    return np.concatenate([rows_BT[:, chunk.start : chunk.stop + 1] for chunk in chunks], axis=1)


def split_windows(windows: Tensor, chunks: tuple[range, ...]) -> tuple[Tensor, Tensor]:
    """Tokens, and the token that follows each, [B, t] both, of what `cut_windows` gave."""
    parts = torch.split(windows, [len(chunk) + 1 for chunk in chunks], dim=1)
    if len(parts) == 1:
        return windows[:, :-1], windows[:, 1:]  # views, as there is nothing to join
    return torch.cat([part[:, :-1] for part in parts], 1), torch.cat([part[:, 1:] for part in parts], 1)

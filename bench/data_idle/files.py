"""Datasets that `bench.data_idle` reads: random documents, and a huge set of zeros, in Megatron's format."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.data_idle.rows import DTYPE
from trainer.data.dataset.megatron import write_megatron_index

_DOCUMENT_TOKENS = 512  # mean
_RESUME_DOCUMENT_TOKENS = 1 << 20


@contextlib.contextmanager
def written(prefix: Path, num_tokens: int, vocab_size: int, seed: int) -> Iterator[Path]:
    """Write a dataset of random documents as Megatron's files, and remove them after the block."""
    rng = np.random.default_rng(seed)
    cuts = np.unique(rng.integers(1, num_tokens, num_tokens // _DOCUMENT_TOKENS))
    lengths = np.diff([0, *cuts, num_tokens])
    with _files_of(prefix, lengths) as data:
        with data.open("wb") as file:
            for start in range(0, num_tokens, 1 << 22):
                count = min(1 << 22, num_tokens - start)
                file.write(rng.integers(1, min(vocab_size, 2**16), count).astype("<u2").data)
        yield prefix


@contextlib.contextmanager
def sparse(prefix: Path, num_tokens: int) -> Iterator[Path]:
    """Make a dataset of zeros of which no disk holds a token, and remove it after the block."""
    count = max(1, num_tokens // _RESUME_DOCUMENT_TOKENS)
    lengths = np.full(count, num_tokens // count, dtype=np.int64)
    lengths[-1] += num_tokens - lengths.sum()
    with _files_of(prefix, lengths) as data:
        with data.open("wb") as file:
            file.truncate(2 * num_tokens)
        yield prefix


@contextlib.contextmanager
def _files_of(prefix: Path, lengths: np.ndarray[Any, np.dtype[np.int64]]) -> Iterator[Path]:
    index, data = (prefix.with_name(prefix.name + end) for end in (".idx", ".bin"))
    try:
        with index.open("wb") as file:
            write_megatron_index(lambda block: _write(file, block), DTYPE, len(lengths), lambda: iter([lengths]))
        yield data
    finally:
        for path in (index, data):
            path.unlink(missing_ok=True)


def _write(file: Any, block: Any) -> None:
    file.write(block if isinstance(block, bytes) else block.tobytes())

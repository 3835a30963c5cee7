"""Datasets without files, for tests of the sampler and the loader: in memory, or computed from the index."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainer.data.sampler import Source


class MemoryDataset:
    """A `TokenDataset` of documents in memory."""

    def __init__(self, name: str, documents: Sequence[Sequence[int]], vocab_size: int = 2**31 - 1) -> None:
        self.name, self.vocab_size = name, vocab_size
        self._tokens = np.array([token for document in documents for token in document], dtype=np.int32)
        self._starts = np.cumsum([0, *(len(document) for document in documents)])
        self.num_tokens, self.num_documents = len(self._tokens), len(documents)
        self.fingerprint = hashlib.sha256(self._tokens.tobytes() + self._starts.tobytes()).hexdigest()

    def read(self, start: int, count: int) -> NDArray[np.int32]:
        assert 0 <= start <= start + count <= self.num_tokens
        return self._tokens[start : start + count]

    def document_at(self, token: int) -> int:
        return int(np.searchsorted(self._starts, token, side="right")) - 1

    def document_start(self, document: int) -> int:
        return int(self._starts[document])


class CountingDataset:
    """A `TokenDataset` of any size whose every token is its own index, modulo 2^31 - 1; documents are equally long."""

    def __init__(self, name: str, num_tokens: int, document_tokens: int = 1000) -> None:
        self.name, self.num_tokens, self._document_tokens = name, num_tokens, document_tokens
        self.num_documents = -(-num_tokens // document_tokens)
        self.vocab_size = 2**31 - 1
        self.fingerprint = f"{num_tokens} of {document_tokens}"

    def read(self, start: int, count: int) -> NDArray[np.int32]:
        assert 0 <= start <= start + count <= self.num_tokens
        return (np.arange(start, start + count) % (2**31 - 1)).astype(np.int32)

    def document_at(self, token: int) -> int:
        return token // self._document_tokens

    def document_start(self, document: int) -> int:
        return min(document * self._document_tokens, self.num_tokens)


def counting(name: str, num_tokens: int, weight: float = 1.0, document_tokens: int = 1000) -> Source:
    return Source(CountingDataset(name, num_tokens, document_tokens), weight)

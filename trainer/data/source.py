"""Tokens that are ready to train on, as the sampler and the loader read them: one stream, cut into documents.

Not covered: files (`netlayer data prepare` writes them), and which tokens a batch takes (`trainer.data.sampler`).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class TokenDataset(Protocol):
    """Tokens of all documents of a set, one after the other."""

    name: str
    num_tokens: int
    num_documents: int
    vocab_size: int
    fingerprint: str

    def read(self, start: int, count: int) -> NDArray[np.int32]:
        """Return `count` tokens from `start` of the whole stream, across documents and files."""

    def document_at(self, token: int) -> int:
        """Return the document that the token of the whole stream lies in."""

    def document_start(self, document: int) -> int:
        """Return the first token of a document; of `num_documents`, `num_tokens`."""

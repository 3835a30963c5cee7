"""Interface between token datasets on disk and what draws samples from them, and the check of a vocabulary."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from netlayer.errors import ConfigError

_BLOCK_TOKENS, _NUM_BLOCKS = 4096, 64


@runtime_checkable
class TokenDataset(Protocol):
    """Tokens of documents in a row, read by position; opening one reads no tokens.

    An implementation pickles as the place it was opened from, so that a loader process opens it again.
    """

    @property
    def name(self) -> str:
        """Name in logs, records and the state of a run."""
        ...

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all documents, with the end of each where it has one."""
        ...

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        ...

    @property
    def vocab_size(self) -> int:
        """Bound of the token ids: every id is below it."""
        ...

    @property
    def fingerprint(self) -> str:
        """Digest that stands for the tokens and document boundaries, wherever the files lie."""
        ...

    def read(self, start: int, count: int) -> NDArray[np.int32]:
        """Return tokens `start` to `start + count`, shape (count,), a copy; the run may cross documents and shards.

        Raises:
            ValueError: the run is not inside the dataset.
            CheckFailed: the files cannot be read any more, or have changed since they were opened.
        """
        ...

    def document_at(self, token: int) -> int:
        """Return the document that holds the token at this position.

        Raises:
            ValueError: there is no such token.
        """
        ...

    def document_start(self, document: int) -> int:
        """Return the position of a document's first token; that of `num_documents` is `num_tokens`.

        Raises:
            ValueError: there is no such document.
        """
        ...


def check_vocabulary(dataset: TokenDataset, vocab_size: int) -> None:
    """Check that a model with `vocab_size` tokens has every id of a dataset.

    Raises:
        ConfigError: it does not; an id past the model's embedding would be an error of the device, or a wrong row.
    """
    if dataset.vocab_size > vocab_size:
        rule = f"is below the {dataset.vocab_size:,} token ids of dataset {dataset.name}"
        remedy = f"set at least {dataset.vocab_size}, or give the dataset of this model's tokenizer"
        raise ConfigError("job.model.vocab_size", vocab_size, rule, remedy)


def check_some_ids(dataset: TokenDataset, vocab_size: int, field: str) -> None:
    """Check blocks of tokens spread evenly over a dataset, where nothing says what its ids are.

    All of a large set would take hours; whoever reads a token checks it again.

    Args:
        field: how the user named the dataset, for errors.

    Raises:
        ConfigError: a token is none of the model's.
    """
    last = max(0, dataset.num_tokens - _BLOCK_TOKENS)
    for start in sorted({last * block // (_NUM_BLOCKS - 1) for block in range(_NUM_BLOCKS)}):
        tokens = dataset.read(start, min(_BLOCK_TOKENS, dataset.num_tokens - start))
        wrong = (tokens < 0) | (tokens >= vocab_size)
        if wrong.any():
            position = int(wrong.argmax())
            rule = f"holds token {tokens[position]} at {start + position:,}, and job.model.vocab_size is {vocab_size:,}"
            remedy = "give the dataset of this model's tokenizer, or raise job.model.vocab_size"
            raise ConfigError(field, None, rule, remedy)


def check_run(dataset: TokenDataset, start: int, count: int) -> None:
    """Raise ValueError for a run of tokens that is not inside a dataset."""
    if count < 0 or not 0 <= start <= dataset.num_tokens - count:
        raise ValueError(f"tokens {start} to {start + count} of {dataset.name}: it has {dataset.num_tokens}")


def check_token(dataset: TokenDataset, token: int) -> None:
    """Raise ValueError for a token position outside a dataset."""
    if not 0 <= token < dataset.num_tokens:
        raise ValueError(f"token {token} of {dataset.name}: it has {dataset.num_tokens}")


def check_document(dataset: TokenDataset, document: int) -> None:
    """Raise ValueError for a document outside a dataset; one past the last is its end, and fine."""
    if not 0 <= document <= dataset.num_documents:
        raise ValueError(f"document {document} of {dataset.name}: it has {dataset.num_documents}")

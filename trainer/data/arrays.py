"""Token datasets in NumPy's format: a `.npy` file of token ids, and the text that `prepare_corpus` has tokenised."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from netlayer.errors import ConfigError
from trainer.data import dataset as prepared
from trainer.data.prepare import Corpus
from trainer.data.source import TokenDataset, check_document, check_run, check_token, check_vocabulary

_BLOCK_TOKENS, _NUM_BLOCKS = 4096, 64  # of a fingerprint


class ArrayDataset:
    """A `TokenDataset` of one array, memory-mapped; `NAME.documents.npy` next to `NAME.npy` has its documents' starts.

    The fingerprint is of the size, the document starts, and of blocks spread evenly over the tokens: to read all of
    them would take hours of a large set. Pickled, it is its path, and is opened again.

    Args:
        file: a one-dimensional array of whole numbers.
        name: of the dataset.
        vocab_size: of the model; the array does not say.
        end_token: the token that ends a document, where no file has the starts; None: all is one document.
        field: how the user named the file, for errors.

    Raises:
        ConfigError: there is no such file, or it is no such array.
    """

    def __init__(
        self, file: Path, name: str, vocab_size: int, end_token: int | None = None, field: str = "dataset"
    ) -> None:
        self._arguments = (file, name, vocab_size, end_token, field)
        self.name, self.vocab_size, self._field = name, vocab_size, field
        self._tokens = _open(file, field)
        self.num_tokens, self.itemsize = len(self._tokens), self._tokens.itemsize
        self._starts = self._find_starts(file, end_token)
        self.num_documents = len(self._starts) - 1
        self.fingerprint = self._digest()

    def __reduce__(self) -> tuple[type[ArrayDataset], tuple[Path, str, int, int | None, str]]:
        return type(self), self._arguments

    def read(self, start: int, count: int) -> NDArray[np.int32]:
        check_run(self, start, count)
        return np.asarray(self._tokens[start : start + count]).astype(np.int32)

    def document_at(self, token: int) -> int:
        check_token(self, token)
        return int(np.searchsorted(self._starts, token, side="right")) - 1

    def document_start(self, document: int) -> int:
        check_document(self, document)
        return int(self._starts[document])

    def _find_starts(self, file: Path, end_token: int | None) -> NDArray[np.int64]:
        starts_file = file.with_suffix(".documents.npy")
        if starts_file.is_file():
            starts = np.asarray(_open(starts_file, self._field), dtype=np.int64)
            if not len(starts) or starts[0] != 0 or (np.diff(starts) < 0).any() or starts[-1] > self.num_tokens:
                rule = f"holds no starts of documents within {self.num_tokens} tokens, rising from 0"
                raise ConfigError(self._field, starts_file, rule, "write it again, or remove it")
        elif end_token is not None:
            starts = np.concatenate(([0], np.flatnonzero(np.asarray(self._tokens) == end_token) + 1))
            starts = starts[starts < self.num_tokens]  # of what follows the last one there is nothing
        else:
            starts = np.zeros(1, dtype=np.int64)
        return np.append(starts, self.num_tokens)

    def _digest(self) -> str:
        digest = hashlib.blake2b(f"{self.num_tokens} {self._tokens.dtype}".encode(), digest_size=16)
        digest.update(self._starts.tobytes())
        last = max(0, self.num_tokens - _BLOCK_TOKENS)
        for start in sorted({last * block // (_NUM_BLOCKS - 1) for block in range(_NUM_BLOCKS)}):
            digest.update(self._tokens[start : start + _BLOCK_TOKENS].tobytes())
        return digest.hexdigest()


def open_dataset(path: Path, name: str, vocab_size: int, field: str = "") -> TokenDataset:
    """Open a dataset by the path that the user gave: a `.npy` file, what `netlayer data` made, or Megatron's prefix.

    Args:
        name: of the dataset in job.data.
        vocab_size: of the model.
        field: how the user named the dataset, for errors.

    Raises:
        ConfigError: it cannot be read, or says that it has token ids which the model lacks.
    """
    path, field = path.expanduser(), field or f"job.data.datasets.{name}"
    if path.suffix == ".npy":
        return ArrayDataset(path, name, vocab_size, field=field)
    dataset = prepared.open_dataset(path, name, field, f"{prepared.REMEDY}, or a .npy file of token ids")
    if isinstance(dataset, prepared.MegatronTokens):
        # Its files do not say what ids they hold, and to look would take a pass over all of them at every start.
        return prepared.MegatronTokens(path, vocab_size, name, field)
    check_vocabulary(dataset, vocab_size)
    return dataset


def corpus_dataset(corpus: Corpus, side: str, vocab_size: int) -> ArrayDataset:
    """Return the text of a run as a dataset: its `train` or its `validation` side."""
    # Of `train_tokenizer`, whose first token is its special one; the library need not be loaded for it.
    return ArrayDataset(corpus.folder / f"{side}.npy", "text", vocab_size, end_token=0)


def _open(file: Path, field: str) -> NDArray[np.integer]:
    try:
        tokens: NDArray[np.integer] = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as exc:
        raise ConfigError(
            field, file, f"cannot be read as a NumPy array ({exc})", "give a .npy file of token ids"
        ) from exc
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
        rule = f"holds an array of shape {tokens.shape} and type {tokens.dtype}"
        raise ConfigError(field, file, rule, "give one dimension of whole numbers")
    return tokens

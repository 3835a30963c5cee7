"""Megatron's token files, `PREFIX.bin` and `PREFIX.idx`, read in place, and the form of its index.

Version 1 of its MMapIndexedDataset, all little endian:

    9 bytes   MMIDIDX, 0, 0
    uint64    version, 1
    uint8     dtype of the tokens (`_DTYPES`)
    uint64    sequences
    uint64    documents + 1
    int32     [sequences]      tokens of each
    int64     [sequences]      byte of PREFIX.bin at which each starts
    int64     [documents + 1]  first sequence of each document, then the number of sequences
    int8      [sequences]      modes, of multimodal sets alone: refused

Opening reads the header and the ends of the three tables. Not covered: its older IndexedDataset, object storage.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from netlayer.errors import ConfigError
from trainer.data.dataset.folder import Check, TokenFile
from trainer.data.source import check_document, check_run, check_token

PREFIX_FIELD = "PREFIX"
CODES = {"uint16": 8, "uint32": 4}  # it has no uint32; ids are below 2**31, so int32 has the same bytes
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
_BLOCK = 1 << 22  # tokens or sequences at once
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of a fingerprint


class MegatronTokens:
    """Megatron's files as a `TokenDataset`: the sequences of a document are one run of tokens.

    Args:
        prefix: path without .bin and .idx, or of one of the two.
        vocab_size: bound of the ids; None: found by reading all tokens, when it is first asked for.
        name: in logs and records; the prefix's own where None.
        field: how the user named the files, for errors.

    Raises:
        ConfigError: they are missing, of another format, multimodal, cut off, or disagree with each other.
    """

    def __init__(
        self, prefix: Path, vocab_size: int | None = None, name: str | None = None, field: str = PREFIX_FIELD
    ) -> None:
        self.prefix = prefix.with_suffix("") if prefix.suffix in (".bin", ".idx") else prefix
        self.name = self.prefix.name if name is None else name
        self.files = [self.prefix.with_name(self.prefix.name + end) for end in (".idx", ".bin")]
        self._index_file, data_file = self.files
        self._field, self._vocab_size = field, vocab_size
        try:
            with self._index_file.open("rb") as stream:
                header = stream.read(_HEADER.size)
            size_bytes = self._index_file.stat().st_size
            code, self.num_sequences, entries = self._check_header(header)
            self.dtype = np.dtype(_DTYPES[code]).newbyteorder("<")
            self._data = TokenFile(data_file, self.dtype)
        except OSError as exc:
            file = exc.filename or self._index_file
            raise ConfigError(
                field, file, f"cannot be read ({exc.strerror})", "give a prefix of .bin and .idx"
            ) from exc
        self.num_documents = entries - 1
        self._check_size(size_bytes, entries)
        offset = _HEADER.size
        self._lengths = self._table("<i4", self.num_sequences, offset)
        self._pointers = self._table("<i8", self.num_sequences, offset + 4 * self.num_sequences)
        self._documents = self._table("<i8", entries, offset + 12 * self.num_sequences)
        self._check_ends()

    def __reduce__(self) -> tuple[type[MegatronTokens], tuple[Path, int | None, str]]:
        return type(self), (self.prefix, self._vocab_size, self.name)

    def _table(self, dtype: str, count: int, offset: int) -> NDArray[np.integer]:
        table: NDArray[np.integer] = np.asarray(np.memmap(self._index_file, dtype, "r", offset, (count,)))
        return table

    def _refuse(self, rule: str, remedy: str) -> ConfigError:
        return ConfigError(self._field, self._index_file, rule, remedy)

    def _check_header(self, header: bytes) -> tuple[int, int, int]:
        """Return dtype code, sequences and entries of the document table."""
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise self._refuse("is no index of Megatron's MMapIndexedDataset", "give a prefix of .bin and .idx")
        _, version, code, sequences, entries = _HEADER.unpack(header)
        if version != 1:
            raise self._refuse(f"has version {version}, known is 1", "write it again with a current Megatron")
        if code not in _DTYPES or _DTYPES[code].startswith("float"):
            rule = f"has tokens of dtype {_DTYPES.get(code, f'code {code}')}"
            raise self._refuse(rule, "give a dataset of whole numbers")
        if not sequences or entries < 2:
            raise self._refuse("has no document", "give a dataset with text")
        return code, sequences, entries

    def _check_size(self, size_bytes: int, entries: int) -> None:
        expected = _HEADER.size + 12 * self.num_sequences + 8 * entries
        if size_bytes == expected + self.num_sequences:
            raise self._refuse("has modes of a multimodal dataset", "give a dataset of text alone")
        if size_bytes != expected:
            rule = f"has {size_bytes:,} bytes, and its header says {expected:,}"
            raise self._refuse(rule, "copy it again, or write it again")

    def _check_ends(self) -> None:
        """Raise ConfigError where the tables end elsewhere than the tokens; `checks` looks at all entries."""
        remedy = "write it again: it was merged or written by a faulty version"
        if (self._documents[0], self._documents[-1]) != (0, self.num_sequences):
            first, last = int(self._documents[0]), int(self._documents[-1])
            rule = f"has documents of sequences {first} to {last}, and there are {self.num_sequences}"
            raise self._refuse(rule, remedy)
        end = int(self._pointers[-1]) + int(self._lengths[-1]) * self.dtype.itemsize
        if self._pointers[0] != 0 or end != self._data.size_bytes:
            rule = f"has sequences up to byte {end:,} of {self._data.path.name}, which has {self._data.size_bytes:,}"
            raise self._refuse(rule, remedy if end < 0 or self._pointers[-1] < 0 else "copy both files again")

    @property
    def itemsize(self) -> int:
        """Bytes of a token in the files."""
        return int(self.dtype.itemsize)

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return self._data.size_bytes // self.dtype.itemsize

    @functools.cached_property
    def vocab_size(self) -> int:
        """Bound of the token ids: as it was named, else one above the largest, which reads all tokens once."""
        if self._vocab_size is not None:
            return self._vocab_size
        return self.extremes[1] + 1

    @functools.cached_property
    def extremes(self) -> tuple[int, int]:
        """Least and largest id, as they stand in the file: `read` gives them in 32 bits. Reads all tokens once."""
        mapped = np.memmap(self._data.path, self.dtype, "r")
        blocks = [mapped[start : start + _BLOCK] for start in range(0, self.num_tokens, _BLOCK)]
        return min(int(block.min()) for block in blocks), max(int(block.max()) for block in blocks)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Digest of sizes, header and parts of both files: not of all, for that would take a pass over them."""
        digest = hashlib.blake2b(digest_size=16)
        for path in (self._index_file, self._data.path):
            size = path.stat().st_size
            digest.update(struct.pack("<Q", size))
            with path.open("rb") as stream:
                for number in range(_SAMPLES):
                    stream.seek(max(0, size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
                    digest.update(stream.read(_SAMPLE_BYTES))
        return digest.hexdigest()

    def read(self, start: int, count: int) -> NDArray[np.int32]:
        """Return tokens `start` to `start + count`; see `TokenDataset.read`."""
        check_run(self, start, count)
        tokens = np.empty(count, np.int32)
        self._data.read(start, tokens)
        return tokens

    def document_at(self, token: int) -> int:
        """Return the document that holds a token; see `TokenDataset.document_at`."""
        check_token(self, token)
        return bisect_right(range(self.num_documents), token, key=self.document_start) - 1

    def document_start(self, document: int) -> int:
        """Return the position of a document's first token; see `TokenDataset.document_start`."""
        check_document(self, document)
        sequence = int(self._documents[document])
        if sequence == self.num_sequences:
            return self.num_tokens
        return int(self._pointers[sequence]) // self.dtype.itemsize

    def document_lengths(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the tokens of `count` documents from `first` on, shape (count,)."""
        sequences = self._documents[first : first + count + 1]
        inside = sequences < self.num_sequences
        starts = np.full(len(sequences), self.num_tokens, np.int64)
        starts[inside] = self._pointers[sequences[inside]] // self.dtype.itemsize
        return np.diff(starts)

    def checks(self) -> Iterator[Check]:
        """Read everything: sequences follow each other without gaps, documents are in order, ids fit."""
        position = 0
        bad_sequence = -1
        for first in range(0, self.num_sequences, _BLOCK):
            lengths = self._lengths[first : first + _BLOCK].astype(np.int64)
            starts = position + (np.cumsum(lengths) - lengths) * self.dtype.itemsize
            wrong = (starts != self._pointers[first : first + _BLOCK]) | (lengths < 0)
            if wrong.any():
                bad_sequence = first + int(np.argmax(wrong))
                break
            position = int(starts[-1] + lengths[-1] * self.dtype.itemsize)
        detail = f"sequence {bad_sequence} does not start where the one in front of it ends"
        yield Check("sequences", bad_sequence < 0, detail if bad_sequence >= 0 else "")
        bad_document = -1
        for first in range(0, self.num_documents, _BLOCK):
            wrong = np.diff(self._documents[first : first + _BLOCK + 1]) < 0
            if wrong.any():
                bad_document = first + int(np.argmax(wrong))
                break
        detail = f"document {bad_document} ends before it starts"
        yield Check("documents", bad_document < 0, detail if bad_document >= 0 else "")
        least, largest = self.extremes
        bound = self._vocab_size or 2**31
        yield Check("token ids", least >= 0 and largest < bound, f"from {least} to {largest}, of {bound}")


def is_megatron(path: Path) -> bool:
    """Whether `path` is one of Megatron's files, or their prefix."""
    return path.suffix in (".bin", ".idx") or path.with_name(path.name + ".idx").is_file()


def write_megatron_index(
    write: Callable[[bytes | NDArray[np.integer]], None],
    dtype: str,
    num_documents: int,
    lengths: Callable[[], Iterator[NDArray[np.int64]]],
) -> None:
    """Write an index in which every document is one sequence; a few blocks of it in memory, however many there are.

    Args:
        write: appends to the file.
        dtype: of the tokens, uint16 or uint32.
        num_documents: their number.
        lengths: gives the tokens of each document in blocks, int64; called twice.
    """
    itemsize = np.dtype(dtype).itemsize
    write(_HEADER.pack(_MAGIC, 1, CODES[dtype], num_documents, num_documents + 1))
    for block in lengths():
        write(block.astype("<i4"))
    position = 0
    for block in lengths():  # in 64 bits from here on: in 32 they would overflow behind 2 GiB of tokens
        ends = position + np.cumsum(block, dtype=np.int64) * itemsize
        write((ends - block * itemsize).astype("<i8"))
        position = int(ends[-1])
    for first in range(0, num_documents + 1, _BLOCK):
        write(np.arange(first, min(first + _BLOCK, num_documents + 1), dtype="<i8"))

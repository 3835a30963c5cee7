"""Reader of a dataset folder: any run of tokens, and the documents' boundaries, without reading the rest.

[Note: tokens by pread, the index by a memory map]
A window of a shuffled dataset is a few KiB at a random place. Through a memory map the kernel reads 128 KiB around each
page it faults in; `pread` behind POSIX_FADV_RANDOM reads the pages of the window alone, in one request, and a broken
disk or a shrunk file is an OSError, not a SIGBUS that kills the process without a word. The index is searched by
bisection, which touches a page a step: there a map is right. Maps would cost a descriptor a shard as well.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from netlayer.errors import CheckFailed, ConfigError
from trainer.data.dataset.manifest import (
    INDEX_DTYPE,
    INDEX_FILE,
    SOURCES_FILE,
    TOKENIZER_FILE,
    Manifest,
    checksum,
    read_manifest,
)
from trainer.data.source import check_document, check_run, check_token

_OPEN_FILES = 256  # a quarter of the usual limit of 1,024 descriptors, however many shards and datasets there are
_BLOCK = 1 << 22  # tokens or documents of one step of a check


class Check(NamedTuple):
    """Result of one check: what was checked, whether it holds, and where it does not."""

    name: str
    is_good: bool
    detail: str = ""


class TokenFile:
    """One file of tokens, opened when it is read.

    Args:
        path: the file.
        dtype: of its tokens.

    Raises:
        OSError: there is no such file.
    """

    def __init__(self, path: Path, dtype: DTypeLike) -> None:
        self.path, self._dtype = path, np.dtype(dtype)
        stat = path.stat()
        # A file that takes the place of this one gets a descriptor of its own.
        self._key = (str(path), stat.st_size, stat.st_mtime_ns)

    @property
    def size_bytes(self) -> int:
        """Size of the file when it was opened."""
        return self._key[1]

    def read(self, start: int, out: NDArray[np.int32]) -> None:
        """Fill `out`, shape (count,), with the tokens from `start` on.

        Raises:
            CheckFailed: the file cannot be read, or has changed since it was opened.
        """
        raw = np.empty(len(out), self._dtype)
        view, offset = raw.view(np.uint8).data, start * self._dtype.itemsize
        try:
            descriptor = _open_file(self._key)
            while view:
                size = os.preadv(descriptor.number, [view], offset)
                if not size:
                    raise CheckFailed(f"{self.path}: ends at byte {offset}; it was {self.size_bytes} bytes long")
                view, offset = view[size:], offset + size
        except OSError as exc:
            raise CheckFailed(f"{self.path}: cannot be read ({exc.strerror or exc})") from exc
        out[:] = raw


class _Descriptor:
    """Open file that closes itself once the last reader has let it go: another thread may still be reading from it."""

    def __init__(self, path: str) -> None:
        self.number = -1
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.posix_fadvise(self.number, 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


@functools.lru_cache(maxsize=_OPEN_FILES)
def _open_file(key: tuple[str, int, int]) -> _Descriptor:
    """Open files of the whole process, for that is what has the limit; those not used for longest are closed."""
    descriptor = _Descriptor(key[0])
    stat = os.fstat(descriptor.number)
    if (stat.st_size, stat.st_mtime_ns) != key[1:]:
        raise CheckFailed(f"{key[0]}: has changed since the dataset was opened")
    return descriptor


class TokenFolder:
    """A dataset folder as a `TokenDataset`.

    Args:
        folder: what `netlayer data prepare` or `import` made.
        name: in logs and records; the folder's own where None.
        field: how the user named the folder, for errors.

    Raises:
        ConfigError: the manifest cannot be used, or a file is missing or of another size than it says.
    """

    def __init__(self, folder: Path, name: str | None = None, field: str = "dataset") -> None:
        self.folder, self.name = folder, folder.resolve().name if name is None else name
        self._field = field
        self.manifest: Manifest = read_manifest(folder, field)
        dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        self._shards = [
            TokenFile(_sized(folder / shard.file, shard.tokens * dtype.itemsize, field), dtype)
            for shard in self.manifest.shards
        ]
        self._ends = list(accumulate(shard.tokens for shard in self.manifest.shards))
        index = _sized(folder / INDEX_FILE, (self.num_documents + 1) * np.dtype(INDEX_DTYPE).itemsize, field)
        self._starts = np.asarray(np.memmap(index, INDEX_DTYPE, "r"))
        if (self._starts[0], self._starts[-1]) != (0, self.num_tokens):
            rule = f"runs from {self._starts[0]} to {self._starts[-1]}, and there are {self.num_tokens} tokens"
            raise ConfigError(field, index, rule, "copy the folder again, or prepare it anew")

    def __reduce__(self) -> tuple[type[TokenFolder], tuple[Path, str]]:
        return type(self), (self.folder, self.name)

    @property
    def num_tokens(self) -> int:
        """Number of tokens, the end of each document among them."""
        return self.manifest.tokens

    @property
    def itemsize(self) -> int:
        """Bytes of a token in the files."""
        return np.dtype(self.manifest.dtype).itemsize

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return self.manifest.documents

    @property
    def vocab_size(self) -> int:
        """Bound of the token ids."""
        return self.manifest.vocab_size

    @functools.cached_property
    def fingerprint(self) -> str:
        """Digest of the manifest but its provenance, the same wherever the folder lies."""
        return self.manifest.fingerprint

    @property
    def tokenizer_file(self) -> Path | None:
        """Path of the tokenizer; None where tokens were imported without one."""
        return self.folder / TOKENIZER_FILE if self.manifest.tokenizer else None

    @functools.cached_property
    def tokenizer_digest(self) -> str | None:
        """Digest of what decides about ids in the tokenizer's file; None where there is none.

        Not of all of it: a saved tokenizer carries how it was used last, and its text may be laid out otherwise.
        """
        if self.tokenizer_file is None:
            return None
        try:
            tree = json.loads(self.tokenizer_file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as exc:
            remedy = "copy the folder again, or prepare it anew"
            raise ConfigError(self._field, self.tokenizer_file, f"cannot be read ({exc})", remedy) from exc
        kept = {key: tree.get(key) for key in ("model", "normalizer", "pre_tokenizer", "added_tokens")}
        return hashlib.blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=16).hexdigest()

    def read(self, start: int, count: int) -> NDArray[np.int32]:
        """Return tokens `start` to `start + count`; see `TokenDataset.read`."""
        check_run(self, start, count)
        tokens = np.empty(count, np.int32)
        done, shard = 0, bisect_right(self._ends, start)
        while done < count:
            first = self._ends[shard] - self.manifest.shards[shard].tokens
            size = min(count - done, self._ends[shard] - start - done)
            self._shards[shard].read(start + done - first, tokens[done : done + size])
            done, shard = done + size, shard + 1
        return tokens

    def document_at(self, token: int) -> int:
        """Return the document that holds a token; see `TokenDataset.document_at`."""
        check_token(self, token)
        return int(np.searchsorted(self._starts, np.int64(token), side="right")) - 1

    def document_start(self, document: int) -> int:
        """Return the position of a document's first token; see `TokenDataset.document_start`."""
        check_document(self, document)
        return int(self._starts[document])

    def document_lengths(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the tokens of `count` documents from `first` on, shape (count,)."""
        return np.diff(self._starts[first : first + count + 1])

    def checks(self) -> Iterator[Check]:
        """Read everything, and compare it with the manifest: a check a file, then the documents."""
        files = [(shard.file, shard.checksum) for shard in self.manifest.shards]
        files.append((INDEX_FILE, self.manifest.index.checksum))
        if self.manifest.tokenizer:
            files.append((TOKENIZER_FILE, self.manifest.tokenizer.checksum))
        if sources := self.manifest.provenance.get("sources"):
            files.append((SOURCES_FILE, sources["checksum"]))
        for file, expected in files:
            yield _check_file(self.folder / file, expected)
        order = _check_order(self._starts)
        yield order
        blocks = range(0, self.num_tokens, _BLOCK)
        largest = max(int(self.read(start, min(_BLOCK, self.num_tokens - start)).max()) for start in blocks)
        yield Check("token ids", largest < self.vocab_size, f"largest {largest}, vocabulary {self.vocab_size}")
        end = self.manifest.end_of_document
        if end is not None and order.is_good:  # else nobody knows where they end
            without = sum(self._unended(first, end) for first in range(0, self.num_documents, _BLOCK))
            yield Check("ends of documents", not without, f"{without} of {self.num_documents} do not end with {end}")

    def _unended(self, first: int, end: int) -> int:
        """Return the number of documents from `first` on, a block of them, whose last token is not `end`."""
        ends = self._starts[first + 1 : first + 1 + _BLOCK]
        count, done = 0, 0
        while done < len(ends):
            start = int(ends[done]) - 1
            upto = max(done + 1, int(np.searchsorted(ends, start + _BLOCK, side="right")))
            tokens = self.read(start, int(ends[upto - 1]) - start)
            count += int(np.count_nonzero(tokens[ends[done:upto] - 1 - start] != end))
            done = upto
        return count


def _sized(path: Path, size_bytes: int, field: str) -> Path:
    """Return `path`, once it is certain that the file has this size."""
    remedy = "copy the folder again, or prepare it anew"
    try:
        size = path.stat().st_size
    except OSError as exc:
        raise ConfigError(field, path, f"cannot be read ({exc.strerror})", remedy) from exc
    if size != size_bytes:
        raise ConfigError(field, path, f"has {size:,} bytes, and its manifest says {size_bytes:,}", remedy)
    return path


def _check_file(path: Path, expected: str) -> Check:
    try:
        actual = checksum(path)
    except OSError as exc:
        return Check(path.name, is_good=False, detail=f"cannot be read ({exc.strerror})")
    return Check(path.name, actual == expected, f"checksum {actual}, and its manifest says {expected}")


def _check_order(starts: NDArray[np.int64]) -> Check:
    """Check that documents start one after the other."""
    for first in range(0, len(starts) - 1, _BLOCK):
        steps = np.diff(starts[first : first + _BLOCK + 1])
        if (steps < 0).any():
            detail = f"document {first + int(np.argmax(steps < 0)) + 1} starts before the one in front of it"
            return Check("document offsets", is_good=False, detail=detail)
    return Check("document offsets", is_good=True)

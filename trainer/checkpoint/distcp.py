"""A file of items one after the other, with their digests at its end: what holds the tensors of a checkpoint.

`torch.distributed.checkpoint` finds each item by offset and length in `.metadata`, and reads nothing else of a file. So
what comes after the last item is ours: offset, length and CRC-32 of every item (JSON), then the length of that and a
mark. The digest of this trailer lies in `meta.json`. Needs no torch: the process that writes starts in moments.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from trainer.checkpoint.digest import crc32, digest

SUFFIX = ".distcp"
_MARK = b"netlayer"
_LENGTH_BYTES = 8
_END = _LENGTH_BYTES + len(_MARK)
_MAX_TRAILER_BYTES = 1 << 30
_TAIL_BYTES = 16 << 10  # of a file that are read at once: most trailers are in it
_CHUNK_BYTES = 4 << 20
"""Written and digested together: what the second of the two reads is still in the processor's cache."""
_SMALL_BYTES = 64 << 10
"""Digested in less time than another thread takes to begin."""

Read = Callable[[int, int], bytes]
"""Read (offset, length) of a file."""


def file_of(rank: int, number: int = 0) -> str:
    """Return the name of a rank's file, as torch's own writer names it."""
    return f"__{rank}_{number}{SUFFIX}"


@dataclass(frozen=True)
class Extent:
    """Range of an item in its file, and the CRC-32 of its bytes."""

    offset: int
    length: int
    crc: int


class ItemWriter:
    """Writes items to a stream, and the trailer at the end; digests are computed while the stream takes the bytes.

    Args:
        stream: open for writing, at its start; stays open.
        on_write: called with the number of bytes after each piece, or 4 MiB of it.
        has_digests: False: each is 0, and the file none that a reader takes as whole; for measurements.
    """

    def __init__(
        self,
        stream: IO[bytes],
        on_write: Callable[[int], None] = lambda _num_bytes: None,
        *,
        has_digests: bool = True,
    ) -> None:
        self._stream, self._on_write = stream, on_write
        self._crc32: Callable[[bytes | memoryview, int], int] = crc32 if has_digests else lambda _chunk, _crc: 0
        self._thread = ThreadPoolExecutor(1, "digests")
        self.places: list[Extent] = []
        self.num_bytes = 0

    def add(self, pieces: Sequence[bytes | memoryview]) -> Extent:
        """Write one item, which is these pieces one after the other."""
        crc = length = 0
        for piece in pieces:
            for start in range(0, len(piece), _CHUNK_BYTES):
                chunk = piece[start : start + _CHUNK_BYTES] if len(piece) > _CHUNK_BYTES else piece
                if len(chunk) < _SMALL_BYTES:
                    crc = self._crc32(chunk, crc)
                    self._stream.write(chunk)
                else:
                    # A digest lets go of the interpreter's lock, and so does a write.
                    later = self._thread.submit(self._crc32, chunk, crc)
                    self._stream.write(chunk)
                    crc = later.result()
                length += len(chunk)
                self._on_write(len(chunk))
        place = Extent(self.num_bytes, length, crc)
        self.places.append(place)
        self.num_bytes += length
        return place

    def finish(self) -> str:
        """Write the trailer; return its digest."""
        text = json.dumps([[place.offset, place.length, place.crc] for place in self.places]).encode()
        self._stream.write(text + len(text).to_bytes(_LENGTH_BYTES, "little") + _MARK)
        self.num_bytes += len(text) + _END
        self.close()
        return digest(text)

    def close(self) -> None:
        """End the thread; twice is once."""
        self._thread.shutdown()


def read_trailer(size: int, read: Read) -> tuple[str, list[Extent]]:
    """Return the digest of a file's trailer, and the places of its items.

    Args:
        size: of the file.

    Raises:
        ValueError: there is no such trailer: the file is cut short, or not one of ours.
    """
    num_tail = min(size, _TAIL_BYTES)
    tail = read(size - num_tail, num_tail) if size >= _END else b""
    length = int.from_bytes(tail[-_END:][:_LENGTH_BYTES], "little")
    if not tail.endswith(_MARK) or not 2 <= length <= min(_MAX_TRAILER_BYTES, size - _END):
        raise ValueError(f"its {size} bytes do not end in digests: it is cut short, or another file")
    is_whole = length + _END <= num_tail
    text = tail[-_END - length : -_END] if is_whole else read(size - _END - length, length)
    return digest(text), _parse(text, size)


def has_trailer(path: Path) -> bool:
    """Whether a file ends as ours do, and not as those of torch's own writer."""
    size, read = file_reader(path)
    return size >= _END and read(size - len(_MARK), len(_MARK)) == _MARK


def _parse(text: bytes, size: int) -> list[Extent]:
    try:
        rows: Any = json.loads(text)
        places = [Extent(*row) for row in rows]
        valid = all(type(n) is int and n >= 0 for place in places for n in (place.offset, place.length, place.crc))
        valid = valid and all(place.offset + place.length <= size for place in places)
    except (ValueError, RecursionError, TypeError):
        valid = False
    if not valid:
        raise ValueError("its digests cannot be read")
    return places


def file_reader(path: Path) -> tuple[int, Read]:
    """Return the size of a file, and what reads ranges of it."""
    if not isinstance(path, Path):  # of an object store: `trainer.checkpoint.names.as_location`
        return object_reader(path.fs, path.path)  # type: ignore[unreachable]

    def read(offset: int, length: int) -> bytes:
        with path.open("rb") as file:
            file.seek(offset)
            content = file.read(length)
        if len(content) < length:
            raise ValueError(f"it ends {length - len(content)} bytes before byte {offset + length}")
        return content

    return path.stat().st_size, read


def object_reader(fs: Any, path: str) -> tuple[int, Read]:
    """Return the size of an object, and what reads ranges of it."""

    def read(offset: int, length: int) -> bytes:
        content: bytes = fs.cat_file(path, start=offset, end=offset + length)
        if len(content) < length:
            raise ValueError(f"it ends {length - len(content)} bytes before byte {offset + length}")
        return content

    return int(fs.size(path)), read

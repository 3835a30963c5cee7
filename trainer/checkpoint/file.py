"""Named tensors in one file, written one after the other and read where they are asked for: the safetensors format.

Eight bytes with the length of a header, the header (JSON: dtype, shape and place of each tensor), the elements. Nothing
in it is code, other tools read it, and neither side holds more of it than one tensor. The header's metadata has a
digest of each tensor; one of the header is for whoever reads the file to keep. Not covered: files of another writer
(`trainer.checkpoint.safetensors_files`).

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch
from torch import Tensor

from trainer.checkpoint.digest import digest

_DTYPES = {"F32": torch.float32, "F64": torch.float64, "BF16": torch.bfloat16, "F16": torch.float16}
_METADATA = "__metadata__"
DIGESTS = "crc32"  # of the metadata: those of all tensors, in order, eight digits each
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100 << 20  # as the safetensors library has it


class TensorWriter:
    """Writes a file whose tensors are known by name and shape before; the file is on the disk when the block ends.

    Args:
        path: of the file; replaced if it is there.
        tensors: (name, shape), in the order in which they will be added.
        dtype: of all of them.
        metadata: text to keep with them.
    """

    def __init__(
        self,
        path: Path,
        tensors: Sequence[tuple[str, Sequence[int]]],
        dtype: torch.dtype,
        metadata: Mapping[str, str],
    ) -> None:
        self._names, self._dtype = iter([name for name, _ in tensors]), dtype
        self._header_arguments = tensors, dtype, metadata
        self._header = _header(*self._header_arguments, [digest(b"")] * len(tensors))  # as long as the last one
        self._digests: list[str] = []
        self._thread = ThreadPoolExecutor(1)
        self._file = path.open("wb")

    def __enter__(self) -> TensorWriter:
        try:
            self._file.write(self._header)
        except BaseException:
            with self._thread, self._file:
                raise
        return self

    def add(self, name: str, tensor: Tensor) -> None:
        """The next tensor, from any device.

        Raises:
            ValueError: it is not the next, or of another dtype.
        """
        expected = next(self._names, None)
        if name != expected or tensor.dtype != self._dtype:
            raise ValueError(f"{name} of {tensor.dtype}: the next is {expected} of {self._dtype}")
        # As bytes: numpy has no bfloat16.
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        digested = self._thread.submit(digest, content)
        self._file.write(content)
        self._digests.append(digested.result())

    def __exit__(
        self, kind: type[BaseException] | None, _exc: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        with self._thread, self._file:
            if kind is not None:
                return
            if (missing := next(self._names, None)) is not None:
                raise ValueError(f"{missing} was not added")
            self._file.seek(0)
            self._file.write(_header(*self._header_arguments, self._digests))
            self._file.flush()
            os.fsync(self._file.fileno())


class TensorFile:
    """A file of tensors, mapped: an element comes into memory when it is read, and may go again.

    Args:
        path: of the file.
        kept_digest: what `header_digest` said of it when it was written.

    Raises:
        ValueError: it is no such file, is cut short, or its header is not as it was written.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path, kept_digest: str) -> None:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            text = _read_header(file)
            if digest(text) != kept_digest:
                raise ValueError("its header is not as it was written")
            header = _parse_header(text)
            # Copy on write: torch wants memory that it may write to, and the file stays as it is.
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.metadata: Mapping[str, str] = header.pop(_METADATA)
        self._entries, self._first = header, _LENGTH_BYTES + len(text)
        width, digests = len(digest(b"")), self.metadata[DIGESTS]
        self._unread = {name: digests[width * index :][:width] for index, name in enumerate(header)}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            if end - begin != math.prod(entry["shape"]) * _DTYPES[entry["dtype"]].itemsize or begin < 0:
                raise ValueError(f"{name} has {end - begin} bytes, which is not its shape")
            if self._first + end > size:
                raise ValueError(f"{name} ends at byte {self._first + end} of {size}")

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        """Return the names of its tensors, in their order."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        return _DTYPES[self._entries[name]["dtype"]]

    def release(self) -> None:
        """Let the pages that were read go from this process's memory; tensors of the file stay good."""
        self._memory.madvise(mmap.MADV_DONTNEED)

    def __getitem__(self, name: str) -> Tensor:
        """A view of the file: what is written into it stays in this process.

        Raises:
            ValueError: it is not as it was written.
        """
        entry = self._entries[name]
        shape, (offset, end) = entry["shape"], (self._first + place for place in entry["data_offsets"])
        if name in self._unread:
            if digest(memoryview(self._memory)[offset:end]) != self._unread[name]:
                raise ValueError(f"{name} is not as it was written")
            del self._unread[name]
        if not math.prod(shape):
            return torch.empty(shape, dtype=_DTYPES[entry["dtype"]])
        flat = torch.frombuffer(self._memory, dtype=_DTYPES[entry["dtype"]], count=math.prod(shape), offset=offset)
        return flat.view(shape)


def header_digest(path: Path) -> str:
    """Return the digest of the header of a file that was just written, to be kept next to it.

    Raises:
        ValueError: it is no such file.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return digest(_read_header(file))


def _read_header(file: IO[bytes]) -> bytes:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if not 2 <= length <= min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
        raise ValueError(f"no header of a file of tensors in its {size} bytes")
    return file.read(length)


def _parse_header(text: bytes) -> dict[str, Any]:
    """Return the metadata and the entry of each tensor, of the types that they should have.

    Raises:
        ValueError: something in it differs. A digest next to the file proves only that the same writer wrote both.
    """
    try:
        header = json.loads(text)
        entries = {name: entry for name, entry in header.items() if name != _METADATA}
        metadata = header[_METADATA]
        valid = all(isinstance(value, str) for value in metadata.values()) and isinstance(metadata[DIGESTS], str)
        for entry in entries.values():
            numbers = [*entry["shape"], *entry["data_offsets"]]
            valid = valid and entry["dtype"] in _DTYPES and len(entry["data_offsets"]) == 2
            valid = valid and all(type(number) is int and 0 <= number < 1 << 63 for number in numbers)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        valid = False
    if not valid:
        raise ValueError("its header is not that of a file of tensors")
    return {**entries, _METADATA: metadata}


def _header(
    tensors: Sequence[tuple[str, Sequence[int]]],
    dtype: torch.dtype,
    metadata: Mapping[str, str],
    digests: Sequence[str],
) -> bytes:
    code = next((code for code, known in _DTYPES.items() if known == dtype), None)
    if code is None:
        raise ValueError(f"dtype = {dtype}: must be one of {', '.join(map(str, _DTYPES.values()))}")
    header: dict[str, Any] = {_METADATA: {**metadata, DIGESTS: "".join(digests)}}
    begin = 0
    for name, shape in tensors:
        end = begin + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # elements begin where their dtype wants them
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text

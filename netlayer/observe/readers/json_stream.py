"""Incremental parser of trace files in Chrome's format: events one at a time, in memory bounded by the largest event.

A trace is an object with the list `traceEvents`, or the bare list; either may be cut off where its writer was killed,
and may be packed with gzip. Kineto writes several GB a rank, of which a JSON parser would make tens of GB of objects.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

_CHUNK = 1 << 20
# No event of a real trace has more than some hundred kB (a process group of 16,384 ranks in its arguments).
MAX_ITEM = 64 << 20
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[\s,]*")
_KEY = re.compile(r'[\s,]*"((?:[^"\\]|\\.)*)"\s*:\s*')
_GZIP = b"\x1f\x8b"


def open_text(path: Path) -> IO[bytes]:
    """Open a file for reading, unpacked if it is gzip's."""
    with path.open("rb") as file:
        is_packed = file.read(2) == _GZIP
    return cast(IO[bytes], gzip.open(path)) if is_packed else path.open("rb")


def read_parts(path: Path) -> Iterator[bytes]:
    """The content in pieces of a megabyte.

    Raises:
        ValueError: it cannot be read, or the archive is cut off: raised after what is there.
    """
    try:
        with open_text(path) as file:
            while part := file.read(_CHUNK):
                yield part
    except (EOFError, zlib.error, gzip.BadGzipFile) as exc:
        raise ValueError(f"is a gzip archive that is cut off or damaged ({exc})") from exc
    except OSError as exc:
        raise ValueError(f"cannot be read ({exc.strerror or exc})") from exc


class EventStream:
    """Events of a trace file.

    Args:
        mend: makes JSON of lines that are none, where a writer is known to leave out what JSON asks for.

    Attributes:
        header: values beside the list of events that were read so far, small ones alone.
        damage: why reading ended early; empty if the file is whole.
    """

    def __init__(self, path: Path, mend: Callable[[str], str] | None = None) -> None:
        self.path, self._mend = path, mend
        self.header: dict[str, Any] = {}
        self.damage = ""
        self._text, self._at = "", 0
        self._parts: Iterator[bytes] | None = None
        self._tail = b""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield each event that is a JSON object; stop at the first damage, which `damage` tells."""
        self.header, self.damage, self._text, self._at, self._tail = {}, "", "", 0, b""
        self._parts = read_parts(self.path)
        if self._skip(_SPACE) == "[":
            self._at += 1
            yield from self._items()
        elif self._skip(_SPACE) == "{":
            self._at += 1
            yield from self._members()
        elif not self.damage:
            self.damage = "is no JSON object or list"

    def _members(self) -> Iterator[dict[str, Any]]:
        while not self.damage and self._skip(_SPACE) not in ("}", ""):
            self._need(1 << 12)
            match = _KEY.match(self._text, self._at)
            if not match:
                self.damage = self.damage or "is cut off or damaged between two values"
                return
            self._at = match.end()
            self._need(1)
            if match[1] == "traceEvents" and self._text[self._at : self._at + 1] == "[":
                self._at += 1
                yield from self._items()
            else:
                value = self._value()
                if not self.damage:
                    self.header[match[1]] = value

    def _items(self) -> Iterator[dict[str, Any]]:
        while not self.damage:
            first = self._skip(_SPACE)
            if first == "]":
                self._at += 1
                return
            if not first:
                self.damage = self.damage or "is cut off inside its list of events"
                return
            value = self._value()
            if isinstance(value, dict) and not self.damage:
                yield value

    def _skip(self, pattern: re.Pattern[str]) -> str:
        """Move behind white space and commas; the next letter, empty at the end of the file."""
        while True:
            self._at = pattern.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def _value(self) -> Any:
        """Parse the value that begins here; reads on where it is cut by the end of what is in memory."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except (ValueError, RecursionError) as exc:
                if self._has_mended():
                    continue
                size = len(self._text) - self._at
                if size > MAX_ITEM or isinstance(exc, RecursionError):
                    self.damage = f"holds a value of more than {MAX_ITEM >> 20} MiB, or one nested too deep"
                    return None
                # A value of twice the size each time, so that long ones are not parsed over and over.
                if not self._more(max(_CHUNK, size)):
                    self.damage = self.damage or "is cut off or damaged inside an event"
                    return None
                continue
            if end == len(self._text) and self._more():
                continue  # a number may go on in the next piece
            self._at = end
            return value

    def _has_mended(self) -> bool:
        """Mend the lines from here that are whole in memory; False: they are as good as they were."""
        if self._mend is None:
            return False
        end = self._text.rfind("\n") + 1
        lines, rest = self._text[self._at : end], self._text[max(end, self._at) :]
        mended = self._mend(lines)
        self._text, self._at = mended + rest, 0
        return mended != lines

    def _need(self, letters: int) -> None:
        while len(self._text) - self._at < letters and self._more():
            pass

    def _more(self, letters: int = _CHUNK) -> bool:
        """Take the next pieces into memory, and drop what is parsed; False at the end of the file."""
        pieces, num = [self._text[self._at :]], 0
        assert self._parts is not None
        try:
            while num < letters and (part := next(self._parts, b"")):
                part, self._tail = _whole_letters(self._tail + part)
                pieces.append(part.decode("utf-8", "replace"))
                num += len(part)
        except ValueError as exc:
            self.damage = str(exc)
        self._text, self._at = "".join(pieces), 0
        return num > 0


def _whole_letters(data: bytes) -> tuple[bytes, bytes]:
    """Split before a letter of UTF-8 that is cut at the end of the data."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            break
        if byte >= 0xC0:  # first byte of a letter of 2 to 4 bytes
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return (data[:-back], data[-back:]) if back < length else (data, b"")
    return data, b""

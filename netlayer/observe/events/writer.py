"""Writer of one rank's stream of events: files of a bounded size, each readable up to its last whole batch.

A batch is one write to the operating system, so a process that is killed leaves at most a cut-off tail, which the
reader skips and names. The files are Arrow IPC streams (`rank-000003.0000.arrows`), or JSON lines (`.jsonl`) where
there is no pyarrow. A process that starts again begins a new file and never touches those before it. Beyond
`max_files` the oldest file goes, and a mark `dropped` says how many events it held. Not covered: a power cut, which
may take what the system had not written yet.
"""

from __future__ import annotations

import importlib.util
import io
import os
import re
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from netlayer.errors import ConfigError
from netlayer.observe.events.schema import (
    Event,
    Mark,
    Origin,
    arrow_schema,
    header_line,
    load_arrow,
    to_batch,
    to_lines,
)

Form = Literal["arrow", "jsonl"]
SUFFIXES: dict[Form, str] = {"arrow": ".arrows", "jsonl": ".jsonl"}
MAX_FILE_BYTES = 16 << 20
MAX_FILES = 16
_MOST_BUFFERED = 1 << 20
_UNFIT = re.compile(r"[^A-Za-z0-9_-]+")


def stream_name(origin: Origin) -> str:
    """First part of the names of a stream's files: `rank-000003`, or `host-NAME` of what is no rank's."""
    if origin.rank is not None:
        return f"rank-{origin.rank:06d}"
    return "host-" + (_UNFIT.sub("_", origin.host or "")[:100] or "unknown")


class EventWriter:
    """Appends events of one origin to the files of its stream.

    Args:
        folder: made where it is missing.
        origin: names the files; events carry their own.
        form: `arrow`, `jsonl`; None: arrow where pyarrow is installed.
        max_file_bytes: size after which the next file begins.
        max_files: of this stream in the folder, those of earlier starts too; at least 2.

    Raises:
        ConfigError: the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        origin: Origin,
        form: Form | None = None,
        *,
        max_file_bytes: int = MAX_FILE_BYTES,
        max_files: int = MAX_FILES,
    ) -> None:
        if max_files < 2 or max_file_bytes < 1:
            raise ValueError("max_files is at least 2, and max_file_bytes at least 1")
        self.folder, self.origin, self.num_events, self.num_bytes = folder, origin, 0, 0
        self.form: Form = form or ("arrow" if importlib.util.find_spec("pyarrow") else "jsonl")
        if self.form == "arrow":
            load_arrow()  # now, and not in the middle of a step
        self._max_bytes, self._max_files = max_file_bytes, max_files
        self._name = stream_name(origin)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            earlier = sorted((_number(path), path) for path in folder.glob(f"{self._name}.*") if _number(path) >= 0)
        except OSError as exc:
            rule = f"cannot hold events ({exc.strerror or exc})"
            raise ConfigError("events folder", folder, rule, "give a folder that can be written") from exc
        # How many events an earlier start's file holds is not known without reading it: -1.
        self._files: deque[tuple[Path, int]] = deque((path, -1) for _, path in earlier)
        self._next = earlier[-1][0] + 1 if earlier else 0
        self._file: io.FileIO | None = None
        self._in_file = self._size = 0
        self._chunks = _Chunks()
        self._stream: Any = None  # pyarrow's, which has no types
        self._sink: Any = None  # below it

    def write(self, events: Sequence[Event]) -> int:
        """Append events as one batch; return the bytes that it took.

        Raises:
            OSError: there is no room, or the like; the file ends with the batch before, and is closed.
            ValueError: an event does not fit the schema.
        """
        if not events:
            return 0
        if self.form == "jsonl":
            return self._append("".join(f"{line}\n" for line in to_lines(events)).encode(), len(events))
        batch = to_batch(events)
        before = self.num_bytes
        self._open_if_due()
        self._stream.write_batch(batch)
        self._append(self._take(), len(events))
        return self.num_bytes - before

    def close(self) -> None:
        """End the current file. Twice is once."""
        if self._file is not None:
            if self._stream is not None:
                self._stream.close()
                self._put(self._take())
            self._end_file()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, data: bytes, num_events: int) -> int:
        self._open_if_due()
        self._put(data)
        self._in_file += num_events
        self.num_events += num_events
        if self._size >= self._max_bytes:
            self.close()
        return len(data)

    def _open_if_due(self) -> None:
        if self._file is not None:
            return
        lost = self._make_room()
        path = self.folder / f"{self._name}.{self._next:04d}{SUFFIXES[self.form]}"
        self._next += 1
        self._file = io.FileIO(path, "x")  # unbuffered: a batch is one write
        self._files.append((path, 0))
        self._size = self._in_file = 0
        self._stream = None
        if self.form == "jsonl":
            self._put(header_line().encode() + b"\n")
        else:
            import pyarrow as pa

            options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
            # Arrow writes dozens of pieces a batch; a Python file would have to get the interpreter's lock for each.
            self._chunks = _Chunks()  # anew: the sink closes what lies below it
            self._sink = pa.BufferedOutputStream(pa.PythonFile(self._chunks, "w"), _MOST_BUFFERED)
            self._stream = pa.ipc.new_stream(self._sink, arrow_schema(), options=options)
            self._put(self._take())
        if lost:
            self.write([self._dropped(lost)])

    def _make_room(self) -> list[tuple[Path, int]]:
        """Delete the oldest files beyond the limit, less the one that is to come; return them."""
        lost = []
        while len(self._files) >= self._max_files:
            path, num_events = self._files.popleft()
            path.unlink(missing_ok=True)
            lost.append((path, num_events))
        return lost

    def _dropped(self, lost: Sequence[tuple[Path, int]]) -> Mark:
        files = [path.name for path, _ in lost]
        known = [count for _, count in lost if count >= 0]
        value = float(sum(known)) if len(known) == len(lost) else None
        more = {"where": "files", "files": files}
        return Mark(self.origin, "dropped", time.time_ns(), value=value, text="oldest file deleted", attributes=more)

    def _put(self, data: bytes) -> None:
        assert self._file is not None
        view = memoryview(data)
        try:
            while view:  # a write may be short: at a full disk, after a signal
                view = view[self._file.write(view) :]
        except OSError:
            os.ftruncate(self._file.fileno(), self._size)
            self._end_file()
            raise
        self._size += len(data)
        self.num_bytes += len(data)

    def _take(self) -> bytes:
        """Return what the stream has written since the last call."""
        self._sink.flush()
        return self._chunks.take()

    def _end_file(self) -> None:
        assert self._file is not None
        self._file.close()
        self._file = self._stream = self._sink = None
        path, _ = self._files.pop()
        self._files.append((path, self._in_file))


class _Chunks(io.RawIOBase):
    """Sink of pyarrow's writer: `take` gives what was written since the last one."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._parts.append(bytes(data))
        return len(self._parts[-1])

    def take(self) -> bytes:
        parts, self._parts = self._parts, []
        return b"".join(parts)


def _number(path: Path) -> int:
    """Number of a stream's file; -1: it is none."""
    parts = path.name.split(".")
    is_one = len(parts) == 3 and parts[1].isdigit() and f".{parts[2]}" in SUFFIXES.values()
    return int(parts[1]) if is_one else -1

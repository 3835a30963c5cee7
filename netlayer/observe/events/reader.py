"""Reader of events: files and folders of streams (Arrow, JSON lines, parquet), batch by batch in bounded memory.

What cannot be read is skipped and named in `notes`: the cut-off tail of a process that was killed, a damaged file, a
line that is no event. A file that is still written to is read up to its last whole batch.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from netlayer.errors import ConfigError
from netlayer.observe.events.schema import (
    SCHEMA_NAME,
    SCHEMA_VERSION,
    Event,
    Origin,
    arrow_schema,
    event_of_line,
    events_of,
    normalise,
    to_batch,
    version_of,
)

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER = "events"
"""Folder of the streams in the output of a run."""
_SUFFIXES = (".arrows", ".jsonl", ".parquet", ".zst")
_LINES = 4096  # of JSON, a batch
_LONGEST_LINE = 1 << 20
_MOST_NOTES = 100


def read_events(
    *paths: Path | str,
    kinds: Collection[str] | None = None,
    ranks: Collection[int] | None = None,
    steps: tuple[int, int] | None = None,
) -> EventReader:
    """Open the events of files or folders; nothing is read yet.

    Args:
        paths: a stream's file, a folder of them, or the output of a run (its folder `events`).
        kinds: `segment`, `mark`, `counter`; None: all.
        ranks: of these alone; None: of all.
        steps: first and last step; events of no step are omitted then.

    Raises:
        ConfigError: a path does not exist, or there is no file of events there.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise ConfigError(
                "events", path, "does not exist", "give a file of events, their folder, or a run's output"
            )
        files += [path] if path.is_file() else _files_in(path)
    if not files:
        rule, remedy = "holds no events", "give a folder of .arrows, .jsonl or .parquet files of the schema"
        raise ConfigError("events", ", ".join(map(str, paths)), rule, remedy)
    return EventReader(files, kinds=kinds, ranks=ranks, steps=steps)


class EventReader:
    """Events of some files; iterate over it for `Segment`, `Mark` and `Counter` objects, as often as needed.

    Args:
        files: in the order in which they are read.
        kinds, ranks, steps: as in `read_events`.
    """

    def __init__(
        self,
        files: Sequence[Path],
        *,
        kinds: Collection[str] | None = None,
        ranks: Collection[int] | None = None,
        steps: tuple[int, int] | None = None,
    ) -> None:
        self.files = tuple(files)
        self.notes: list[str] = []
        """What could not be read, one line each, of the last pass."""
        self._kinds, self._ranks, self._steps = kinds, ranks, steps

    def __iter__(self) -> Iterator[Event]:
        for batch in self.batches():
            yield from events_of(batch)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The same as Arrow record batches of `arrow_schema()`, one in memory at a time."""
        self.notes = []
        for file in self.files:
            for batch in self._batches_of(file):
                kept = self._filtered(batch)
                if kept.num_rows:
                    yield kept

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """All of it as one Arrow table, in memory; `columns` takes these alone."""
        import pyarrow as pa

        names = arrow_schema().names if columns is None else list(columns)
        batches = [batch.select(names) for batch in self.batches()]
        schema = pa.schema([arrow_schema().field(name) for name in names])
        return pa.Table.from_batches(batches, schema).unify_dictionaries()

    def _note(self, line: str) -> None:
        if len(self.notes) < _MOST_NOTES:
            self.notes.append(line)
        elif len(self.notes) == _MOST_NOTES:
            self.notes.append("and more")

    def _batches_of(self, file: Path) -> Iterator[pa.RecordBatch]:
        readers = {".jsonl": self._json_lines, ".parquet": self._parquet, ".zst": self._zstd}
        read = readers.get(file.suffix, self._arrow)
        try:
            yield from read(file)
        except OSError as exc:
            self._note(f"{file}: not read ({exc.strerror or exc})")

    def _arrow(self, file: Path) -> Iterator[pa.RecordBatch]:
        with file.open("rb") as opened:
            yield from self._arrow_stream(file, opened, file.stat().st_size)

    def _zstd(self, file: Path) -> Iterator[pa.RecordBatch]:
        """Streams one after the other, each a zstd frame: what a collector has taken and not yet turned to parquet."""
        import pyarrow as pa

        if file.with_name(file.name.removesuffix(".arrows.zst") + ".parquet").exists():
            return  # the same events, and this file is about to go
        size = file.stat().st_size
        with pa.input_stream(str(file), compression="zstd") as opened:
            yield from self._arrow_stream(file, opened, size, is_one=False)

    def _arrow_stream(self, file: Path, opened: Any, size: int, *, is_one: bool = True) -> Iterator[pa.RecordBatch]:
        """Batches of an opened file: of one stream, or of any number of them."""
        import pyarrow as pa

        num_streams = num_batches = end = 0
        while num_streams == 0 or not is_one:
            try:
                stream = pa.ipc.open_stream(opened)
                version = version_of(stream.schema)
                if not num_streams:
                    self._version(file, version)
            except (pa.ArrowException, ValueError, OSError) as exc:
                # A file that was killed before its first batch is empty, and one of many streams ends between two.
                if not (num_streams and "was null or length 0" in str(exc)):
                    self._note(f"{file}: {'empty' if not size else f'not read: {_first_line(exc)}'}")
                return
            num_streams += 1
            end = opened.tell() if is_one else 0
            while True:
                try:
                    batch = stream.read_next_batch()
                    batch.validate(full=True)  # offsets and indices of a damaged file could lie outside its buffers
                    batch = normalise(batch, version)
                except StopIteration:
                    break
                except (pa.ArrowException, ValueError, OSError, MemoryError) as exc:
                    where = f"the last {max(size - end, 0):,} bytes are"
                    lost = where if is_one else f"after {num_batches:,} batches there is"
                    self._note(f"{file}: {lost} no whole batch: {_first_line(exc)}")
                    return
                end = opened.tell() if is_one else 0
                num_batches += 1
                yield batch

    def _json_lines(self, file: Path) -> Iterator[pa.RecordBatch]:
        """Batches of a file of JSON lines; a line that is no event is a note."""
        with file.open("rb") as opened:
            if not self._has_header(file, opened):
                return
            origins: dict[tuple[Any, ...], Origin] = {}
            events: list[Event] = []
            number = 1
            while line := opened.readline(_LONGEST_LINE):
                number += 1
                try:
                    event = event_of_line(line.decode(), origins)
                except ValueError as exc:
                    what = f"line {number} is no event ({exc})"
                    if not line.endswith(b"\n"):
                        what = (
                            f"line {number} is cut off" if len(line) < _LONGEST_LINE else f"line {number} is too long"
                        )
                    self._note(f"{file}: {what}")
                    continue
                if event is not None:
                    events.append(event)
                if len(events) >= _LINES:
                    yield to_batch(events)
                    events = []
            if events:
                yield to_batch(events)

    def _has_header(self, file: Path, opened: BinaryIO) -> bool:
        try:
            header = json.loads(opened.readline(_LONGEST_LINE))
            if header["schema"] != SCHEMA_NAME:
                raise ValueError("another schema")
            self._version(file, int(header["version"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            self._note(f"{file}: not read: its first line does not name the schema {SCHEMA_NAME}")
            return False
        return True

    def _parquet(self, file: Path) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(file) as opened:
                version = self._version(file, version_of(opened.schema_arrow))
                for batch in opened.iter_batches(batch_size=1 << 16):
                    yield normalise(batch, version)
        except (pa.ArrowException, ValueError) as exc:
            self._note(f"{file}: not read: {_first_line(exc)}")

    def _version(self, file: Path, version: int) -> int:
        if version > SCHEMA_VERSION:
            self._note(f"{file}: schema {version} is newer than {SCHEMA_VERSION}: columns unknown here are omitted")
        return version

    def _filtered(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        import pyarrow as pa
        import pyarrow.compute as pc

        masks = []
        if self._kinds is not None:
            masks.append(pc.is_in(batch["kind"].dictionary_decode(), pa.array(list(self._kinds), pa.string())))
        if self._ranks is not None:
            masks.append(pc.is_in(batch["rank"], pa.array(list(self._ranks), pa.int32())))
        if self._steps is not None:
            first, last = self._steps
            masks.append(pc.and_(pc.greater_equal(batch["step"], first), pc.less_equal(batch["step"], last)))
        if not masks:
            return batch
        total = masks[0]
        for mask in masks[1:]:
            total = pc.and_(total, mask)
        return batch.filter(total)  # a null step counts as false


def _files_in(folder: Path) -> list[Path]:
    """Files of events in a folder, or in its folder `events`, in the order of rank and number."""
    inner = folder / FOLDER
    folder = inner if inner.is_dir() else folder
    return sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES and path.is_file())


def _first_line(exc: BaseException) -> str:
    return (str(exc).strip() or type(exc).__name__).splitlines()[0]

"""Columns of the evidence of a run as arrays, file by file, each file read again only where it has changed.

An event as a Python object costs microseconds, and a run of 12,288 ranks has tens of millions: here they stay Arrow
batches and become NumPy columns. Files of other programs are events already; their rows are kept, since to parse them
again for each look at a timeline would take seconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from netlayer.errors import ConfigError
from netlayer.observe.events import SEGMENTS, Event, Mark, events_of, read_events, to_batch
from netlayer.observe.events.schema import PROCESSOR_WAIT
from netlayer.observe.page.stopped import LateStep, Sign
from netlayer.observe.readers.evidence_files import EVENTS, HANG, open_evidence, recognise
from netlayer.printing import printable

if TYPE_CHECKING:
    import pyarrow as pa

Ints = NDArray[np.int64]

CLASSES = tuple(SEGMENTS)
"""Classes of segments, in the order of their codes."""
NO_STEP = -1
_CHUNK = 1 << 14
_MOST_NOTES = 20
_MOST_MARKS = 200_000
_PLACES = ("tp", "pp", "dp", "cp")
_SEGMENT_COLUMNS = ("rank", "step", "attempt", "start_ns", "end_ns")


Place = tuple[Any, ...]
"""Host, tp, pp, dp, cp of a rank."""


@dataclass
class Readings:
    """Readings of one counter of one rank or host: `values[i]` between `start_ns[i]` and `end_ns[i]`."""

    name: str
    rank: int | None
    host: str
    port: str
    unit: str
    start_ns: Ints
    end_ns: Ints
    values: NDArray[np.float64]


@dataclass
class FileColumns:
    """Content of one file.

    Args:
        path, kind: of `netlayer.observe.readers.KINDS`.
        segments: rank, step (`NO_STEP`: none), attempt, start_ns, end_ns, code (into `CLASSES`), on_host, each [row];
            rows without a rank are omitted.
        places: of each rank and start (`attempt`) its host and tp, pp, dp, cp; None where they are not known; the host
            is "" where it is not the same throughout that start.
        collectives: rows of collectives within steps, with all columns.
        table: all rows; None: of an event stream, which is read again where its rows are needed.
    """

    path: Path
    kind: str
    notes: list[str] = field(default_factory=list)
    segments: dict[str, NDArray[Any]] = field(default_factory=dict)
    places: dict[int, dict[int, Place]] = field(default_factory=dict)
    collectives: list[pa.RecordBatch] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    readings: list[Readings] = field(default_factory=list)
    queued: list[tuple[int, int, int, float, float]] = field(default_factory=list)
    """Of a step: attempt, rank, step, seconds in which the rank had no processor, and of these those before it."""
    table: pa.Table | None = None
    tail: list[pa.RecordBatch] = field(default_factory=list)
    """Batches with the rows of the two last steps of the last start, beside others."""
    last_ns: int = 0
    """End of the last event, on the reference clock."""
    signs: dict[int, Sign] = field(default_factory=dict)
    """Of each rank its last reading or mark after its start."""
    late_steps: dict[tuple[int, int], LateStep] = field(default_factory=dict)
    """By start (`attempt`) and rank the last step that a mark calls late; its parts are in the record."""
    has_whole_steps: bool = False
    """The monitor of this project wrote it: a step is in the record once it has ended, or is late."""


class Columns:
    """Files of a run with what was read of them; `refresh` reads what is new.

    Args:
        paths: as those of `open_evidence`.

    Raises:
        ConfigError: a path does not exist, or there is no file.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._read: dict[Path, tuple[tuple[int, int], FileColumns]] = {}
        self.files: list[FileColumns] = []
        self.notes: list[str] = []
        self.newest_s = 0.0
        """When the last file was written to, seconds since 1970."""
        self.read_s = 0.0
        """When reading began last, seconds since 1970: what was written later may be missing."""
        open_evidence(*paths)

    def refresh(self, progress: Callable[[int, int], None] | None = None) -> bool:
        """Read files that are new or have grown; return whether there were any."""
        read_s = time.time()
        try:
            paths = open_evidence(*self._paths).files
        except ConfigError:  # a folder that is emptied while it is looked at
            paths = ()
        changed = set(self._read) != set(paths)
        files, notes = [], []
        for number, path in enumerate(paths):
            try:
                status = path.stat()
            except OSError:
                continue  # rotated away meanwhile
            stamp = (status.st_size, status.st_mtime_ns)
            self.newest_s = max(self.newest_s, status.st_mtime)
            if path not in self._read or self._read[path][0] != stamp:
                self._read[path] = (stamp, read_file(path))
                changed = True
            files.append(self._read[path][1])
            notes += files[-1].notes
            if progress:
                progress(number + 1, len(paths))
        self._read = {file.path: self._read[file.path] for file in files}
        self.files, self.notes, self.read_s = files, notes, read_s
        return changed

    def rows(self, ranks: Sequence[int], steps: tuple[int, int] | None) -> Iterator[pa.RecordBatch]:
        """All rows of some ranks; `steps` are the first and the last of these, None: those outside of steps too."""
        import pyarrow as pa
        import pyarrow.compute as pc

        chosen = set(ranks)
        for file in self.files:
            if file.table is None:
                if not file.places or chosen & file.places.keys():
                    yield from read_events(file.path, ranks=ranks, steps=steps).batches()
                continue
            mask = pc.is_in(file.table["rank"], pa.array(list(ranks), pa.int32()))
            if steps:
                inside = pc.and_(
                    pc.greater_equal(file.table["step"], steps[0]), pc.less_equal(file.table["step"], steps[1])
                )
                mask = pc.and_(mask, inside)
            yield from file.table.filter(pc.fill_null(mask, False)).to_batches()


def read_file(path: Path) -> FileColumns:
    """Read one file of any kind; one that cannot be read is a note."""
    try:
        kind, read = recognise(path)
        file = FileColumns(path, kind)
        builder = _Builder(file)
        if kind == EVENTS:
            reader = read_events(path)
            for batch in reader.batches():
                builder.add(batch)
            file.notes += [printable(note) for note in reader.notes[:_MOST_NOTES]]
        else:
            batches = list(_batches(read(path, file.notes)))
            for batch in batches:
                builder.add(batch)
            if batches:
                import pyarrow as pa

                file.table = pa.Table.from_batches(batches).unify_dictionaries()
            file.notes = [printable(note) for note in file.notes]
        builder.finish()
    except (ValueError, ConfigError) as exc:
        return FileColumns(path, "", [printable(f"{path}: {exc}: skipped")])
    return file


def places_of(files: Sequence[FileColumns]) -> dict[int, dict[int, Place]]:
    """Places of each rank by start, as `FileColumns.places`, of all files."""
    result: dict[int, dict[int, Place]] = {}
    for file in files:
        for rank, places in file.places.items():
            of_rank = result.setdefault(rank, {})
            for attempt, place in places.items():
                of_rank[attempt] = _joined(of_rank.get(attempt), place)
    return result


def _joined(known: Place | None, place: Place) -> Place:
    """Join two places of one rank in one start: two hosts are none, since it may have been on either."""
    if known is None:
        return place
    hosts = {each for each in (known[0], place[0]) if each is not None}
    host = hosts.pop() if len(hosts) == 1 else "" if hosts else None
    return (host, *(one if one is not None else other for one, other in zip(known[1:], place[1:], strict=True)))


def newest(places: Mapping[int, Place] | None) -> Place:
    """Place of a rank in the newest start; of coordinates that it lacks, those of a start before."""
    if not places:
        return (None,) * (1 + len(_PLACES))
    order = [places[attempt] for attempt in sorted(places, reverse=True)]
    return (
        order[0][0],
        *next((place[1:] for place in order if any(each is not None for each in place[1:])), order[0][1:]),
    )


def is_hang(file: FileColumns) -> bool:
    """Whether a file is what a hung job left (Flight Recorder, RAS), which `netlayer.observe.files` judges."""
    return file.kind == HANG


def _batches(events: Iterator[Event]) -> Iterator[pa.RecordBatch]:
    part: list[Event] = []
    for event in events:
        part.append(event)
        if len(part) == _CHUNK:
            yield to_batch(part)
            part = []
    if part:
        yield to_batch(part)


class _Builder:
    """Takes batches of one file in, and leaves its columns."""

    def __init__(self, file: FileColumns) -> None:
        self._file = file
        self._parts: dict[str, list[NDArray[Any]]] = {name: [] for name in (*_SEGMENT_COLUMNS, "code", "on_host")}
        self._counters: dict[tuple[Any, ...], list[tuple[NDArray[Any], ...]]] = {}
        self._tail: list[tuple[tuple[int, int], pa.RecordBatch]] = []
        self._newest = (0, NO_STEP)  # start, step
        self._placed: set[tuple[int, int, str]] = set()

    def add(self, batch: pa.RecordBatch) -> None:
        """Take a batch of `arrow_schema()` in."""
        kinds = looked_up(batch["kind"], {"segment": 1, "mark": 2, "counter": 3})
        if batch.num_rows:
            self._file.last_ns = max(self._file.last_ns, int(_on_reference_clock(batch).max()))
        if (kinds == 1).any():
            self._segments(batch if (kinds == 1).all() else batch.filter(_mask(kinds == 1)))
        if (kinds == 2).any() and len(self._file.marks) < _MOST_MARKS:
            marks = self._without_late(batch.filter(_mask(kinds == 2)))
            self._file.marks += [event for event in events_of(marks) if isinstance(event, Mark)]
            self._places(marks)
        if (kinds == 3).any():
            self._readings(batch.filter(_mask(kinds == 3)))

    def _without_late(self, marks: pa.RecordBatch) -> pa.RecordBatch:
        """Take the marks of late steps out of others: of a run that hangs there are many."""
        is_late = looked_up(marks["name"], {"late": 1}) == 1
        if is_late.any():
            late = marks.filter(_mask(is_late))
            self._signs(late)
            columns = [*(integers(late[name]) for name in ("attempt", "rank", "step")), _on_reference_clock(late)]
            rows = zip(*(column.tolist() for column in columns), texts(late["attributes"]).tolist(), strict=True)
            for attempt, rank, step, at_ns, text in rows:
                if rank < 0:
                    continue
                key = max(attempt, 0), rank
                known = self._file.late_steps.get(key)
                if step >= (known.step if known else 0):
                    self._file.late_steps[key] = LateStep(step, at_ns, parse_facts(text))
            marks = marks.filter(_mask(~is_late))
        return marks

    def finish(self) -> None:
        """Join the parts of all batches once the last is read: segments, and counters by name, rank, host and port."""
        self._file.tail = [batch for _, batch in self._tail]
        for one in self._file.marks:
            # That a rank started or has a checkpoint is no reading that could end: it would be taken for one. And that
            # events were dropped others say of a rank too, by their own clock.
            if one.origin.rank is not None and one.name not in ("run_start", "restart", "checkpoint", "dropped"):
                self._sign(one.origin.rank, Sign(one.end_ns - (one.clock_offset_ns or 0), one.clock_error_ns))
        self._file.segments = {
            name: np.concatenate(parts) if parts else np.empty(0, np.int64) for name, parts in self._parts.items()
        }
        for (name, rank, host, port, unit), parts in self._counters.items():
            start_ns, end_ns, values = (np.concatenate(columns) for columns in zip(*parts, strict=True))
            order = np.argsort(end_ns, kind="stable")
            self._file.readings.append(
                Readings(name, rank, host, port, unit, start_ns[order], end_ns[order], values[order])
            )

    def _sign(self, rank: int, sign: Sign) -> None:
        known = self._file.signs.get(rank)
        if known is None or sign.at_ns > known.at_ns:
            self._file.signs[rank] = sign

    def _signs(self, batch: pa.RecordBatch) -> None:
        """Note the last event of each rank in a batch."""
        ranks, ends, errors = integers(batch["rank"]), _on_reference_clock(batch), integers(batch["clock_error_ns"])
        order = np.lexsort((ends, ranks))
        is_last = np.append(ranks[order][1:] != ranks[order][:-1], True) & (ranks[order] >= 0)
        for at in order[is_last].tolist():
            self._sign(int(ranks[at]), Sign(int(ends[at]), int(errors[at]) if errors[at] >= 0 else None))

    def _segments(self, batch: pa.RecordBatch) -> None:
        import pyarrow.compute as pc

        batch = batch.filter(pc.is_valid(batch["rank"]))
        if not batch.num_rows:
            return
        columns: dict[str, NDArray[Any]] = {name: integers(batch[name]) for name in _SEGMENT_COLUMNS}
        columns["attempt"] = np.maximum(columns["attempt"], 0)  # null: the first
        classes = {name: code for code, name in enumerate(CLASSES)}
        codes = looked_up(batch["segment"], classes, CLASSES.index("other"))
        columns["code"] = codes
        self._file.has_whole_steps |= bool((looked_up(batch["source"], {"monitor": 1}) == 1).any())
        columns["on_host"] = looked_up(batch["timing"], {"host": 1}) == 1
        narrow = {"rank": np.int32, "step": np.int64, "attempt": np.int32}
        for name, values in columns.items():
            self._parts[name].append(values.astype(narrow.get(name, values.dtype)))
        self._places(batch)
        self._keep_tail(batch, columns["attempt"], columns["step"])
        in_step = (codes == CLASSES.index("collective")) & (columns["step"] != NO_STEP)
        if in_step.any():
            self._file.collectives.append(batch.filter(_mask(in_step)))

    def _keep_tail(self, batch: pa.RecordBatch, attempts: Ints, steps: Ints) -> None:
        """Keep a batch of the last steps of the last start, and drop those of earlier ones."""
        inside = steps != NO_STEP
        if not inside.any():
            return
        attempt = int(attempts[inside].max())
        last = attempt, int(steps[inside & (attempts == attempt)].max())
        self._newest = max(self._newest, last)
        self._tail.append((last, batch))
        oldest_kept = self._newest[0], self._newest[1] - 1  # a start that resumes takes steps again
        self._tail = [(last, kept) for last, kept in self._tail if last >= oldest_kept]

    def _places(self, batch: pa.RecordBatch) -> None:
        """Note host and coordinates of each rank in each start."""
        ranks, attempts = integers(batch["rank"]), np.maximum(integers(batch["attempt"]), 0)
        hosts, codes = _coded(batch["host"])
        if not len(ranks) or int(ranks.max()) < 0:
            return
        # One number for rank, start and host, so that a batch is sorted once.
        num_ranks, num_hosts = int(ranks.max()) + 1, len(hosts) + 1
        keys = (attempts.astype(np.int64) * num_hosts + codes + 1) * num_ranks + ranks
        keys = np.where(ranks >= 0, keys, -1)
        for key, at in zip(*np.unique(keys, return_index=True), strict=True):
            if key < 0:
                continue
            row = (int(ranks[at]), int(attempts[at]), hosts[codes[at]])
            if row in self._placed:
                continue
            self._placed.add(row)
            rank, attempt, _ = row
            of_rank = self._file.places.setdefault(rank, {})
            place = tuple(batch[name][int(at)].as_py() for name in ("host", *_PLACES))
            of_rank[attempt] = _joined(of_rank.get(attempt), place)

    def _readings(self, batch: pa.RecordBatch) -> None:
        """Sort readings by counter, rank, host and port."""
        self._signs(batch)
        waits = looked_up(batch["name"], {PROCESSOR_WAIT: 1}) == 1
        if waits.any():
            of_steps = batch.filter(_mask(waits))
            self._queued(of_steps, texts(of_steps["attributes"]))
        ranks = integers(batch["rank"])
        columns = (np.asarray(batch["start_ns"]), np.asarray(batch["end_ns"]), np.asarray(batch["value"], float))
        # Numbers of texts in place of the texts: a run has millions of readings, and few names.
        values, codes = [], []
        for name in ("name", "host", "unit", "attributes"):
            of_column, code = _coded(batch[name])
            values.append(of_column)
            codes.append(code)
        if waits.any():  # each has attributes of its own
            codes[3] = np.where(waits, len(values[3]), codes[3])
            values[3].append("")
        keys, inverse = np.unique(np.stack([*codes, ranks]), axis=1, return_inverse=True)
        inverse = inverse.ravel()
        order = np.argsort(inverse, kind="stable")
        begins = np.searchsorted(inverse[order], np.arange(keys.shape[1] + 1))
        for number, (name_, host, unit, facts, rank) in enumerate(keys.T.tolist()):
            of_series = order[begins[number] : begins[number + 1]]
            port = str(parse_facts(values[3][facts]).get("port", ""))
            key = (values[0][name_], rank if rank >= 0 else None, values[1][host], port, values[2][unit])
            self._counters.setdefault(key, []).append(tuple(column[of_series] for column in columns))

    def _queued(self, batch: pa.RecordBatch, attributes: NDArray[Any]) -> None:
        columns = [integers(batch[name]) for name in ("attempt", "rank", "step")]
        values = np.asarray(batch["value"], float)
        for attempt, rank, step, value, text in zip(*columns, values, attributes, strict=True):
            facts = parse_facts(text)
            before_s = facts.get("before_s")
            if rank >= 0 and step != NO_STEP and facts.get("timing") == "host":
                before = float(before_s) if isinstance(before_s, int | float) else 0.0
                self._file.queued.append((max(int(attempt), 0), int(rank), int(step), float(value), before))


def integers(column: pa.Array) -> Ints:
    """A column of whole numbers with -1 for null."""
    import pyarrow.compute as pc

    return np.asarray(pc.fill_null(column, -1)).astype(np.int64, copy=False)


def _on_reference_clock(batch: pa.RecordBatch) -> Ints:
    """Ends of events on the reference clock; by the rank's own where it was not compared."""
    import pyarrow.compute as pc

    return integers(batch["end_ns"]) - np.asarray(pc.fill_null(batch["clock_offset_ns"], 0)).astype(
        np.int64, copy=False
    )


def looked_up(column: pa.Array, numbers: Mapping[str, int], otherwise: int = 0) -> NDArray[np.uint8]:
    """Numbers of the texts of a column, by its dictionary; null and other texts have the number `otherwise`."""
    values, codes = _coded(column)
    table = np.array([numbers.get(value, otherwise) for value in values], np.uint8)
    return np.asarray(table[codes])


def _coded(column: pa.Array) -> tuple[list[str], Ints]:
    """Texts of a column, the last of them "" for null, and the number of each row's."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    if isinstance(column, pa.ChunkedArray):
        column = column.unify_dictionaries().combine_chunks()
    values = [value or "" for value in column.dictionary.to_pylist()]
    return [*values, ""], np.asarray(pc.fill_null(column.indices, len(values))).astype(np.int64)


def texts(column: pa.Array) -> NDArray[Any]:
    """A column of texts as objects, "" for null; one object a distinct text."""
    values, codes = _coded(column)
    return np.asarray(np.array(values, object)[codes])


def _mask(flags: NDArray[Any]) -> pa.Array:
    import pyarrow as pa

    return pa.array(np.asarray(flags, bool))


def parse_facts(text: str) -> dict[str, Any]:
    """Attributes of an event from their JSON; empty where they are no object."""
    try:
        tree = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}

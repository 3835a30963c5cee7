"""Files of evidence of any kind: recognised by content, read as one sequence of events in bounded memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from netlayer.errors import ConfigError
from netlayer.observe import files as hang_files
from netlayer.observe import flight_recorder, ras
from netlayer.observe.events import Event, read_events
from netlayer.observe.readers import bytedance, kineto, mlperf, nccl, nic_log, recorders
from netlayer.observe.readers.json_stream import open_text
from netlayer.printing import printable

EVENTS, HANG = "netlayer events", "Flight Recorder, RAS"
KINDS = (
    EVENTS,
    HANG,
    "NCCL Inspector",
    "NCCL profiler plug-in",
    "Kineto",
    "nic watch",
    "MLPerf",
    "ByteDance straggler trace",
)
"""Kinds of evidence, as `EvidenceFiles.kinds` counts them."""
_HEAD = 1 << 18
_MOST_NOTES = 20
_SKIPPED = ("report.html", ".png", ".toml", ".lock", "attempt")
Reader = Callable[[Path, list[str]], Iterator[Event]]
_BY_TEXT: tuple[tuple[str, Callable[[str], bool], Reader], ...] = (
    ("MLPerf", mlperf.is_log, mlperf.read),
    ("NCCL Inspector", nccl.is_inspector, nccl.read_inspector),
    ("NCCL Inspector", nccl.is_metrics, nccl.read_metrics),
    ("NCCL profiler plug-in", nccl.is_profiler, nccl.read_profiler),
    ("Kineto", kineto.is_trace, kineto.read),
)


class EvidenceFiles:
    """Events of some files; iterate over it as often as needed.

    Attributes:
        files: in the order in which they are read.
        kinds: number of files by kind, of the last pass.
        notes: what could not be read, one line each, of the last pass.
        hang: files of a hung job (Flight Recorder, RAS), for `netlayer.observe.read_files`.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)
        self.kinds: Counter[str] = Counter()
        self.notes: list[str] = []
        self.hang: list[Path] = []

    def __iter__(self) -> Iterator[Event]:
        self.kinds, self.notes, self.hang = Counter(), [], []
        for path in self.files:
            try:
                kind, read = recognise(path)
                notes: list[str] = []
                yield from read(path, notes)
                self.kinds[kind] += 1
                self.notes += [printable(note) for note in notes]
                if kind == HANG:
                    self.hang.append(path)
            except (ValueError, ConfigError) as exc:
                self.notes.append(printable(f"{path}: {exc}: skipped"))


def open_evidence(*paths: Path | str) -> EvidenceFiles:
    """Find the files of some paths; nothing is read yet.

    Args:
        paths: files, folders (all files in them and one folder below), or the output of a run (its folder `events`).

    Raises:
        ConfigError: a path does not exist, or there is no file.
    """
    files_in_order: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = path / "events"
            folder = inside if inside.is_dir() else path
            files_in_order += sorted(file for file in (*folder.glob("*"), *folder.glob("*/*")) if _is_candidate(file))
        elif path.exists():
            files_in_order.append(path)
        else:
            raise ConfigError(
                "RUN", printable(str(path)), "does not exist", "give a run's folder, or files of evidence"
            )
    if not files_in_order:
        where = printable(", ".join(map(str, paths)))
        raise ConfigError("RUN", where, "holds no files", "give a run's folder, or files of evidence")
    return EvidenceFiles(files_in_order)


def _is_candidate(path: Path) -> bool:
    return path.is_file() and not path.name.startswith(".") and not path.name.endswith(_SKIPPED)


def recognise(path: Path) -> tuple[str, Reader]:
    """Kind of a file and its reader, which gives events and appends to a list what it could not read.

    Raises:
        ValueError: it is empty, of no known kind, or cannot be read; a phrase that continues the file's name.
    """
    if path.name.endswith((".arrows", ".arrows.zst")):
        return EVENTS, _read_events
    head = _head(path)
    if path.suffix == ".jsonl" and b'"netlayer.events"' in head:
        return EVENTS, _read_events
    if not head:
        raise ValueError("is empty")
    if head.startswith(b"PAR1") or path.suffix == ".parquet":
        return _recognise_parquet(path)
    text = head.decode("utf-8-sig", "replace")
    for kind, matches, read in _BY_TEXT:
        if matches(text):
            return kind, read
    return HANG, _read_hang


def _head(path: Path) -> bytes:
    try:
        with open_text(path) as file:
            return file.read(_HEAD)
    except (OSError, EOFError) as exc:
        raise ValueError(f"cannot be read ({exc})") from exc


def _recognise_parquet(path: Path) -> tuple[str, Reader]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as exc:
        raise ValueError(f"is a damaged parquet file ({str(exc).splitlines()[0]})") from exc
    if nic_log.is_log(file):
        return "nic watch", nic_log.read
    if bytedance.is_trace(file):
        return "ByteDance straggler trace", bytedance.read
    if (file.schema_arrow.metadata or {}).get(b"schema") == b"netlayer.events":
        return EVENTS, _read_events
    raise ValueError("is a parquet file of no known kind")


def _read_events(path: Path, notes: list[str]) -> Iterator[Event]:
    reader = read_events(path)
    yield from reader
    notes += reader.notes[:_MOST_NOTES]


def _read_hang(path: Path, _notes: list[str]) -> Iterator[Event]:
    parsed = hang_files.parse_file(path)
    if isinstance(parsed, flight_recorder.Dump):
        yield from recorders.launches(parsed)
    else:
        yield from recorders.counts([query for query in parsed if isinstance(query, ras.Query)])

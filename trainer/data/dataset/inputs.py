"""Texts of input files: plain text, JSON lines, parquet and Arrow, cut into pieces that workers read on their own.

The cut depends on the files and the size of a shard alone, so whoever reads a piece reads the same texts. What is wrong
with a text comes out in its place as `Damage`. Not covered: object storage, nested fields, other encodings than UTF-8.
"""

from __future__ import annotations

import fnmatch
import gzip
import io
import itertools
import json
import os
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from netlayer.errors import ConfigError
from trainer.data.dataset.manifest import checksum

INPUT_FIELD = "INPUT"
Kind = Literal["text", "jsonl", "parquet", "arrow"]
OnError = Literal["fail", "skip"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_KIND_OF_SUFFIX: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",  # C4 and others call JSON lines so
    ".parquet": "parquet",
    ".arrow": "arrow",
}
# What other files begin with that a name like .jsonl or .txt may hide. Text may begin with PAR1 (a protein's name), and
# does not end with it too, as parquet does.
_BEGINNINGS = {
    b"\x1f\x8b\x08": ("is compressed by gzip", "rename it to end with .gz"),
    b"\x28\xb5\x2f\xfd": ("is compressed by zstd", "rename it to end with .zst"),
    b"BZh91AY&SY": ("is compressed by bzip2", "decompress it, or compress it as .gz or .zst"),
    b"\xfd7zXZ\x00": ("is compressed by xz", "decompress it, or compress it as .gz or .zst"),
    b"\x04\x22\x4d\x18": ("is compressed by lz4", "decompress it, or compress it as .gz or .zst"),
    b"PK\x03\x04": ("is a zip archive", "unpack it"),
    b"PAR1": ("is parquet", "rename it to end with .parquet, or give --format parquet"),
}
_MOST_BEGINNING = max(map(len, _BEGINNINGS))
_MARKERS = frozenset({"_SUCCESS", "_metadata", "_common_metadata"})  # of Spark, beside its parquet files
_BOM = "\ufeff"
_ARROW_FILE, _ARROW_END = b"ARROW1", b"\xff\xff\xff\xff\x00\x00\x00\x00"
_ROWS = 1024
_SKIP = "fix it, or skip what cannot be read with --on-error skip"


class Text(NamedTuple):
    """One document, and where it stands in its file."""

    where: str
    text: str


@dataclass(frozen=True)
class Damage:
    """A document, or the rest of a file, that cannot be used.

    Args:
        reason: the kind, which is counted.
        path: the file.
        detail: where in the file, and what is wrong.
        remedy: what to do about it.
    """

    reason: Literal["empty document", "broken UTF-8", "not JSON", "no text", "damaged file", "unreadable file"]
    path: str
    detail: str
    remedy: str = _SKIP


@dataclass
class Skipped:
    """Damage met so far, by reason, with the first of each as an example; `fail` raises at the first."""

    on_error: OnError
    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, damage: Damage) -> None:
        """Count it.

        Raises:
            ConfigError: nothing is to be skipped.
        """
        if self.on_error == "fail":
            raise ConfigError(INPUT_FIELD, damage.path, damage.detail, damage.remedy)
        self.counts[damage.reason] += 1
        self.examples.setdefault(damage.reason, f"{damage.path}: {damage.detail}")


@dataclass(frozen=True)
class Source:
    """An input file as it was when the work was planned; `compression` is "", gz or zst."""

    path: str
    kind: Kind
    compression: str
    size_bytes: int
    mtime_ns: int

    def checksum(self) -> str:
        """Return the checksum of the whole file; errors as `read_texts`."""
        try:
            return checksum(Path(self.path))
        except OSError as exc:
            raise _unreadable(self.path, exc) from exc

    def check_unchanged(self) -> None:
        """Raise ConfigError where the file is not there as it was: also on a host that sees other files."""
        try:
            stat = Path(self.path).stat()
        except OSError as exc:
            rule = f"cannot be read any more ({exc.strerror})"
            raise ConfigError(
                INPUT_FIELD, self.path, rule, "all workers must see the inputs as this host does"
            ) from exc
        if (stat.st_size, stat.st_mtime_ns) != (self.size_bytes, self.mtime_ns):
            raise ConfigError(INPUT_FIELD, self.path, "changed while it was read", "start again when it is complete")


@dataclass(frozen=True)
class Piece:
    """Part of a file.

    Args:
        source: the file.
        size_bytes: about how much of it.
        start, end: byte range of JSON lines, each of which belongs where its first byte lies, or row groups of
            parquet; `end` is -1 for the whole file.
    """

    source: Source
    size_bytes: int
    start: int = 0
    end: int = -1

    @property
    def is_first(self) -> bool:
        """Whether this is the first of its file."""
        return self.start == 0


# --- which files -----------------------------------------------------------------------------------------------------


def find_sources(
    inputs: Sequence[Path], skipped: Skipped, pattern: str = "*", kind: Kind | None = None, split: str | None = None
) -> list[Source]:
    """Return the files of all inputs: inputs in their order, the files of a folder by path.

    Args:
        inputs: files, folders with all their subfolders, or folders of Hugging Face datasets as saved on disk.
        skipped: where unreadable files go.
        pattern: which files of a folder, by name; hidden ones never.
        kind: of all files; None: by the ends of their names.
        split: of a saved dataset with several.

    Raises:
        ConfigError: an input is missing, is neither file nor folder, is given twice, or holds no file that matches.
    """
    sources: list[Source] = []
    seen: dict[Path, str] = {}
    for path in (file for entry in inputs for file in _files(entry, pattern, split)):
        if (same := path.resolve()) in seen:
            rule = f"is given twice (also as {seen[same]})"
            raise ConfigError(INPUT_FIELD, path, rule, "its text would be trained on twice: give it once")
        seen[same] = str(path)
        try:
            with path.open("rb") as stream:
                stat = os.fstat(stream.fileno())
                beginning = stream.read(_MOST_BEGINNING)
                stream.seek(max(0, stat.st_size - 4))
                ending = stream.read(4)
        except OSError as exc:
            rule = f"cannot be read ({exc.strerror})"
            skipped.add(Damage("unreadable file", str(path), rule))
            continue
        suffix = path.suffix.lower()
        stem, compression = (path.stem, suffix[1:]) if suffix in (".gz", ".zst") else (path.name, "")
        by_name = _KIND_OF_SUFFIX.get(Path(stem).suffix.lower(), "text")
        source = Source(str(path.absolute()), kind or by_name, compression, stat.st_size, stat.st_mtime_ns)
        if compression and source.kind in ("parquet", "arrow"):
            raise ConfigError(INPUT_FIELD, path, f"is compressed {source.kind}", "decompress it first")
        if source.kind in ("text", "jsonl") and not compression:
            is_text = beginning.startswith(b"PAR1") and ending != b"PAR1"
            other = next((each for start, each in _BEGINNINGS.items() if beginning.startswith(start)), None)
            other = None if is_text else other
            if other:
                skipped.add(Damage("unreadable file", str(path), *other))
                continue
        sources.append(source)
    _check_pyarrow(sources)
    return sources


def _files(entry: Path, pattern: str, split: str | None) -> list[Path]:
    """Return the files of one input."""
    if entry.is_file():
        return [entry]
    if not entry.is_dir():
        rule = "is neither a file nor a folder" if entry.exists() else "there is no such file or folder"
        raise ConfigError(INPUT_FIELD, entry, rule, "give files and folders of text")
    if (entry / "dataset_dict.json").is_file():
        entry = _split_of(entry, split)
    if (entry / "state.json").is_file() and (entry / "dataset_info.json").is_file():
        return _saved_files(entry)
    files = []
    for path, folders, names in os.walk(entry, onerror=_refuse_folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        usable = [name for name in names if not name.startswith(".") and name not in _MARKERS]
        files += [Path(path) / name for name in usable if fnmatch.fnmatch(name, pattern)]
    if not files:
        raise ConfigError(
            INPUT_FIELD, entry, f"holds no file that matches {pattern}", "give another folder or --pattern"
        )
    irregular = next((file for file in files if file.exists() and not file.is_file()), None)
    if irregular:  # a pipe would block the read for ever
        raise ConfigError(INPUT_FIELD, irregular, "is no regular file", "omit it with --pattern")
    return sorted(files, key=lambda file: file.relative_to(entry).as_posix())


def _refuse_folder(error: OSError) -> None:
    raise ConfigError(INPUT_FIELD, error.filename, f"cannot be listed ({error.strerror})", "give folders of yours")


def _split_of(entry: Path, split: str | None) -> Path:
    """Return the folder of one split of a saved `DatasetDict`."""
    splits = _json_of(entry / "dataset_dict.json").get("splits", [])
    chosen = split or (splits[0] if len(splits) == 1 else None)
    if chosen not in splits:
        rule = f"has the splits {', '.join(splits)}" + (f", not {split}" if split else "")
        raise ConfigError(INPUT_FIELD, entry, rule, "choose one with --split")
    return entry / str(chosen)


def _saved_files(entry: Path) -> list[Path]:
    """Return the Arrow files of a dataset as `save_to_disk` leaves it, in its own order."""
    state = _json_of(entry / "state.json")
    if state.get("_indices_data_files"):  # of old versions: a selection beside the rows, which the files do not show
        rule = "holds a selection of rows that was not written out"
        raise ConfigError(INPUT_FIELD, entry, rule, "save it again after flatten_indices()")
    return [entry / str(file["filename"]) for file in state.get("_data_files", [])]


def _json_of(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(INPUT_FIELD, path, f"cannot be read ({exc})", "save the dataset again") from exc
    if not isinstance(tree, dict):
        raise ConfigError(INPUT_FIELD, path, "is no JSON object", "save the dataset again")
    return tree


def _check_pyarrow(sources: Sequence[Source]) -> None:
    """Raise ConfigError before any work where a file needs pyarrow and it is not installed."""
    needing = next((one for one in sources if one.kind in ("parquet", "arrow") or one.compression == "zst"), None)
    if needing:
        try:
            import pyarrow  # noqa: F401
        except ModuleNotFoundError as exc:
            rule = "needs pyarrow, which is not installed"
            raise ConfigError(INPUT_FIELD, needing.path, rule, "pip install 'netlayer[train]'") from exc


# --- which part of them ----------------------------------------------------------------------------------------------


def plan_units(sources: Sequence[Source], unit_bytes: int, skipped: Skipped) -> list[tuple[Piece, ...]]:
    """Return the pieces of all files in order, in units of about `unit_bytes`: a shard each.

    Files that cannot be cut (compressed, text, Arrow) stay whole.
    """
    units: list[tuple[Piece, ...]] = []
    pieces: list[Piece] = []
    filled = 0
    for piece in (each for source in sources for each in _pieces(source, unit_bytes, skipped)):
        if pieces and filled + piece.size_bytes > unit_bytes:
            units.append(tuple(pieces))
            pieces, filled = [], 0
        pieces.append(piece)
        filled += piece.size_bytes
    return [*units, tuple(pieces)] if pieces else units


def _pieces(source: Source, unit_bytes: int, skipped: Skipped) -> Iterator[Piece]:
    if source.kind == "jsonl" and not source.compression and source.size_bytes > unit_bytes:
        count = -(-source.size_bytes // unit_bytes)
        cuts = [source.size_bytes * number // count for number in range(count + 1)]
        yield from (Piece(source, end - start, start, end) for start, end in itertools.pairwise(cuts))
    elif source.kind == "parquet":
        yield from _row_groups(source, unit_bytes, skipped)
    else:
        yield Piece(source, source.size_bytes)


def _row_groups(source: Source, unit_bytes: int, skipped: Skipped) -> Iterator[Piece]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(source.path) as file:
            rows = [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]
    except (OSError, pyarrow.ArrowException) as exc:
        skipped.add(Damage("damaged file", source.path, f"is no whole parquet file ({_one_line(exc)})"))
        return
    total, first, filled = max(1, sum(rows)), 0, 0
    for number, count in enumerate(rows):
        size = source.size_bytes * count // total
        if number > first and filled + size > unit_bytes:
            yield Piece(source, filled, first, number)
            first, filled = number, 0
        filled += size
    yield Piece(source, filled, first, len(rows))


# --- their texts -----------------------------------------------------------------------------------------------------


def read_texts(piece: Piece, text_field: str) -> Iterator[Text | Damage]:
    """Yield the documents of a piece in order; a file that breaks off ends with its damage.

    Args:
        piece: part of a file.
        text_field: key of JSON lines, or column, that holds the text.

    Raises:
        ConfigError: the system does not let the file be read.
    """
    source = piece.source
    readers = {"text": _read_text, "jsonl": _read_jsonl, "parquet": _read_parquet, "arrow": _read_arrow}
    try:
        yield from readers[source.kind](piece, text_field)
    except _damage_errors() as exc:
        yield _broken_off(source.path, exc)
    except OSError as exc:
        # The system's own errors carry a number; without one it is a decompressor's, of what the file holds.
        if exc.errno is not None:
            raise _unreadable(source.path, exc) from exc
        yield _broken_off(source.path, exc)


def _broken_off(path: str, exc: BaseException) -> Damage:
    """Return the damage of a file that a decompressor or pyarrow gave up on."""
    if "requires too much memory" in str(exc):  # of zstd, whose limit pyarrow does not let anybody raise
        rule = "was compressed with a window above 128 MiB (zstd --long or --ultra), which cannot be read here"
        return Damage("unreadable file", path, rule, "decompress it, or compress it again without --long")
    return Damage("damaged file", path, f"is damaged or was cut off ({_one_line(exc)})")


def _unreadable(path: str, exc: OSError) -> ConfigError:
    rule = f"cannot be read ({exc.strerror or exc})"
    return ConfigError(INPUT_FIELD, path, rule, "look at the disk, then start again")


def _damage_errors() -> tuple[type[Exception], ...]:
    """Return the errors by which decompressors and pyarrow say that a file is damaged."""
    pyarrow: Any = sys.modules.get("pyarrow")  # where it was not imported, it has raised nothing
    return (EOFError, zlib.error, *((pyarrow.ArrowException,) if pyarrow else ()))


def _open(source: Source) -> gzip.GzipFile | io.BufferedReader:
    """Open a file for reading, decompressed, over all members and frames of it."""
    if source.compression == "gz":
        return gzip.open(source.path, "rb")
    if source.compression == "zst":
        import pyarrow

        stream: Any = pyarrow.CompressedInputStream(pyarrow.OSFile(source.path), "zstd")
        return io.BufferedReader(stream)
    return Path(source.path).open("rb")


def _read_text(piece: Piece, _text_field: str) -> Iterator[Text | Damage]:
    with _open(piece.source) as stream:
        yield _decoded(stream.read(), piece.source.path, "")


def _read_jsonl(piece: Piece, text_field: str) -> Iterator[Text | Damage]:
    path = piece.source.path
    with _open(piece.source) as stream:
        position = piece.start
        if position:  # the line that holds the byte in front belongs to the piece in front
            stream.seek(position - 1)
            position += len(stream.readline()) - 1
        number = 0
        # Lines end with \n alone: U+2028 and its kind may stand in a JSON text.
        while (piece.end < 0 or position < piece.end) and (line := stream.readline()):
            number += 1
            where = f"the line at byte {position}" if piece.start else f"line {number}"
            position += len(line)
            if line.strip():
                yield _field_of(line, path, where, text_field)


def _field_of(line: bytes, path: str, where: str, text_field: str) -> Text | Damage:
    """Return the text in a field of one JSON line, or what is damaged about it."""
    decoded = _decoded(line, path, where)
    if isinstance(decoded, Damage):
        return decoded
    try:
        tree = json.loads(decoded.text)
    except (ValueError, RecursionError) as exc:
        return Damage(
            "not JSON", path, f"{where} is not JSON ({exc})", "give JSON lines: an object a line; or " + _SKIP
        )
    if not isinstance(tree, dict):
        rule = f"{where} is {_type_name(tree)}, no JSON object"
        return Damage("not JSON", path, rule, "give JSON lines: an object a line; or " + _SKIP)
    if text_field not in tree:
        rule = f"{where} has no field {text_field}; it has {', '.join(list(tree)[:8]) or 'none'}"
        return Damage("no text", path, rule, "name the field of the text with --field")
    text = tree[text_field]
    if text is not None and not isinstance(text, str):
        rule = f"{where}: its field {text_field} is {_type_name(text)}, no text"
        return Damage("no text", path, rule, "name the field of the text with --field")
    if text and b"\\u" in line:  # halves of surrogate pairs are written as \ud800
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            return Damage("broken UTF-8", path, f"{where} is not Unicode text ({exc.reason})")
    return Text(where, text) if text else Damage("empty document", path, f"{where} is an empty document")


def _read_parquet(piece: Piece, text_field: str) -> Iterator[Text | Damage]:
    from pyarrow import parquet

    with parquet.ParquetFile(piece.source.path, page_checksum_verification=True) as file:
        if damage := _check_column(file.schema_arrow, text_field, piece.source.path):
            yield damage
            return
        for group in range(piece.start, piece.end):
            row = 0
            for batch in file.iter_batches(_ROWS, row_groups=[group], columns=[text_field]):
                column = batch.column(batch.schema.get_field_index(text_field))
                yield from _read_column(column, piece.source.path, f"row group {group}, row", row)
                row += batch.num_rows


def _read_arrow(piece: Piece, text_field: str) -> Iterator[Text | Damage]:
    import pyarrow
    from pyarrow import ipc

    path = piece.source.path
    with Path(path).open("rb") as stream:
        is_file = stream.read(len(_ARROW_FILE)) == _ARROW_FILE
        stream.seek(-min(len(_ARROW_END), piece.source.size_bytes), os.SEEK_END)
        is_whole = is_file or stream.read() == _ARROW_END
    with pyarrow.memory_map(path) as mapped, (ipc.open_file if is_file else ipc.open_stream)(mapped) as reader:
        if damage := _check_column(reader.schema, text_field, path):
            yield damage
            return
        batches = (reader.get_batch(number) for number in range(reader.num_record_batches)) if is_file else reader
        row = 0
        for batch in batches:
            yield from _read_column(batch.column(batch.schema.get_field_index(text_field)), path, "row", row)
            row += batch.num_rows
    if not is_whole:  # a stream that was cut between two batches reads to its end without an error
        yield Damage("damaged file", path, f"was cut off behind row {row}: it has no end of stream")


def _check_column(schema: Any, text_field: str, path: str) -> Damage | None:
    """Return the damage of a file whose columns have no text of this name."""
    import pyarrow.types

    if text_field not in schema.names:
        rule = f"has no column {text_field}; it has {', '.join(schema.names[:8]) or 'none'}"
        return Damage("no text", path, rule, "name the column of the text with --field")
    column = schema.field(text_field).type
    if pyarrow.types.is_dictionary(column):
        column = column.value_type
    kinds = ("is_string", "is_large_string", "is_string_view", "is_binary", "is_large_binary", "is_binary_view")
    if any(getattr(pyarrow.types, kind)(column) for kind in kinds):
        return None
    return Damage(
        "no text", path, f"column {text_field} is {column}, no text", "name the column of the text with --field"
    )


def _read_column(column: Any, path: str, place: str, first: int) -> Iterator[Text | Damage]:
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    # As bytes, for one broken text of a column would keep all others from being decoded.
    for row, text in enumerate(column.cast(pyarrow.large_binary()).to_pylist(), first):
        yield _decoded(text or b"", path, f"{place} {row}")


def _decoded(text: bytes, path: str, where: str) -> Text | Damage:
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as exc:
        rule = f"{where or 'its text'} is not UTF-8 (byte 0x{text[exc.start]:02x} at {exc.start})"
        return Damage("broken UTF-8", path, rule, "convert it to UTF-8, or skip such documents with --on-error skip")
    decoded = decoded.removeprefix(_BOM)  # what some editors write in front of a file is no text
    if not decoded:
        rule = f"{where} is an empty document".lstrip()
        return Damage("empty document", path, rule, "remove it, or skip such documents with --on-error skip")
    return Text(where, decoded)


def _type_name(value: object) -> str:
    names = {list: "a list", dict: "an object", bool: "a truth value", str: "a string", type(None): "null"}
    return names.get(type(value), "a number")


def _one_line(exc: BaseException) -> str:
    return " ".join(str(exc).split()) or type(exc).__name__

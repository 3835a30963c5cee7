"""Safe reading of log files (`Text`), and the result type of all parsers (`Log`): findings, and figures to compare.

Every parser takes a `Text` and returns a `Log`; on unreadable input it raises `Text.damaged` with file, line, what was
expected and what to do. Nothing in a log is executed, unpickled or looked up. Text comes from a file, a gzip file or
standard input (`-`); of a file too large for memory, only the lines that some parser may need are kept.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import stat
import sys
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, cast

from bench.accept.evidence.prefixes import NOBODY, Prefix, strip_prefixes
from netlayer.errors import ConfigError
from netlayer.printing import printable_text
from netlayer.verdict import Finding

MAX_BYTES = 16 << 20
MAX_LINE = 16384
MAX_ROWS = 20_000
_AGAIN = "take the log again"
_GZIP = b"\x1f\x8b"
_MAGIC = {b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"(\xb5/\xfd": "zstd"}
# Magic bytes of pickles (protocol 2 or later), ELF and Windows executables.
_BINARY = re.compile(rb"\x80[\x02-\x05]|\x7fELF|MZ\x90")
STDIN = Path("-")
MAX_STREAM_BYTES = 8 << 30
# Limit of the unpacked size of a gzip file: a megabyte of it can unpack to a gigabyte.
MAX_UNPACKED_BYTES = 512 << 20
_CHUNK_BYTES = 4 << 20
# A file with a mean line length below this is not a log; reading it would only take time.
_MIN_MEAN_LINE = 8
# Of a file too large for memory, lines with one of these are kept: tables and their headings, errors, kernel messages.
# Each is searched for separately in a whole chunk: one pattern of all, or a search by line, takes ten times as long.
_KEPT_WORDS = (
    b"# ", b" WARN ", b"NCCL version", b"NVLS", b"P2P is disabled", b"ailure", b"NVRM", b"Xid", b"Error", b"EDAC",
    b"AER", b"panic", b"emory", b"oom", b"illed", b"CANCELLED", b"exit code", b"ignal ", b"fault", b"core dumped",
    b"imeout", b"ink ", b"_perf", b"busbw", b"Avg bus", b"Rank ", b"bandwidth", b"BW ", b"GPU ", b" float ",
    b" half ", b" double ", b"float16 ", b"int8 ", b"int32 ", b"int64 ",
    b"SXid", b"PCIe Bus", b"mlx5", b"carrier", b"lockup", b"stall", b"peermem", b"mce", b"achine", b"NETDEV", b"DPC",
    b"BUG", b"Oops",
)  # fmt: skip
# NCCL's INFO, TRACE and CALL lines are dropped first, except those with these words.
_NCCL_INFO_LINE = re.compile(rb"\n[^\n]* NCCL (?:INFO|TRACE|CALL) [^\n]*")
_INFO_WORDS = (b"NVLS", b"NCCL version", b"P2P is disabled")


@dataclass(frozen=True)
class Figure:
    """A measured value that is compared with peers and expectations.

    Args:
        series: what it measures; only figures of the same series and `at` are comparable.
        at: point of the series: size, in place or out of place.
        subject: node or component that it is about.
        value: in `unit`, finite and above zero.
        unit: unit of `value`.
        line: line number in the log.
        higher_is_better: False for latencies.
        parts: participants, if there are several: the two GPUs of a pair, the hosts of a run.
        facts: keys of expectations; facts that the log does not tell are missing.
    """

    series: str
    at: str
    subject: str
    value: float
    unit: str
    line: int
    higher_is_better: bool = True
    parts: tuple[str, ...] = ()
    facts: Mapping[str, str | int | bool] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Value, unit and point: `342.1 GB/s bus at 1 GiB in place`."""
        return f"{self.value:.4g} {self.unit}" + (f" at {self.at}" if self.at else "")


@dataclass(frozen=True)
class Log:
    """Parsed content of one run in a file, or of a whole file.

    Args:
        kind: tool that wrote it.
        findings: findings from the log alone: errors, wrong data, states.
        figures: measurements to compare with expectations and peers.
        traits: firmware, driver and so on as (name, subject) -> value; compared with the majority.
        host: node that it is about, if the log names exactly one; else empty.
        run: 1, 2, ... if a file has several runs of its tool; 0 if it has one.
    """

    kind: str
    findings: tuple[Finding, ...] = ()
    figures: tuple[Figure, ...] = ()
    traits: Mapping[tuple[str, str], str] = field(default_factory=dict)
    host: str = ""
    run: int = 0


@dataclass(frozen=True)
class Text:
    """Text of a file, or of a part of it.

    Args:
        file: name that the user gave.
        content: the text.
        numbers: for a part of a file, the line number in the file of each line; else empty.
        printed_by: for the output of one of several writers of the file: that writer.
    """

    file: str
    content: str
    numbers: tuple[int, ...] = ()
    printed_by: Prefix = NOBODY

    @cached_property
    def _lines_and_writers(self) -> tuple[list[str], list[Prefix]]:
        lines = self.content.split("\n")
        long = next((at for at, line in enumerate(lines, 1) if len(line) > MAX_LINE), 0)
        if long:
            raise self.damaged(
                long, f"has {len(lines[long - 1]):,} characters, at most {MAX_LINE:,} are read in a line"
            )
        bare, printed_by = strip_prefixes(lines)
        return [printable_text(line) for line in bare], printed_by

    @property
    def lines(self) -> list[str]:
        """Lines without launcher and shipper prefixes (`prefixes.py`) and without control characters.

        Raises:
            ConfigError: a line is longer than any tool writes; regular expressions may take quadratic time on it.
        """
        return self._lines_and_writers[0]

    @property
    def prefixes(self) -> list[Prefix]:
        """Writer of each line, as far as its prefix tells.

        Raises:
            ConfigError: see `lines`.
        """
        return self._lines_and_writers[1]

    @cached_property
    def body(self) -> str:
        """`lines` as one text, by which the tool is recognised.

        Raises:
            ConfigError: see `lines`.
        """
        return "\n".join(self.lines)

    def number(self, line: int) -> int:
        """Convert a line number of this text to that of the file; 0 (the whole file) stays 0."""
        return self.numbers[min(line, len(self.numbers)) - 1] if self.numbers and line else line

    def streams(self) -> list[Text]:
        """Split the text by host, pod, service or worker, if lines of several are mixed; else return only this text.

        Lines without a named writer (the launcher's own), if any, form a text of their own at the end.

        Raises:
            ConfigError: see `lines`.
        """
        names = [(prefix.host, prefix.task) for prefix in self.prefixes]
        sources = dict.fromkeys(name for name in names if any(name))
        if len(sources) < 2:
            return [self]
        parts: dict[tuple[str, str], list[int]] = {name: [] for name in [*sources, ("", "")]}
        for at, name in enumerate(names):
            parts[name].append(at)
        return [
            Text(
                self.file,
                "\n".join([*(self.lines[at] for at in ats), ""]),
                tuple(self.number(at + 1) for at in [*ats, ats[-1]]),
                Prefix(host=name[0], task=name[1]),
            )
            for name, ats in parts.items()
            if any(self.lines[at].strip() for at in ats)
        ]

    @property
    def stem(self) -> str:
        return one_line(Path(self.file).stem)

    def damaged(self, line: int, expected: str, remedy: str = _AGAIN) -> ConfigError:
        """Return the error for unreadable input at a line (0: the whole file), with what was expected there."""
        where = one_line(self.file)
        return ConfigError(f"{where}:{self.number(line)}" if line else where, None, expected, remedy)

    def check_rows(self, num_rows: int, most: int = MAX_ROWS) -> None:
        """Refuse more rows than any tool writes, before spending time on them.

        Raises:
            ConfigError: there are more than `most`.
        """
        if num_rows > most:
            raise self.damaged(0, f"has {num_rows:,} rows or cells, at most {most:,} are judged", "give a part of it")

    def check_ended(self, line: int) -> None:
        """Refuse a row of figures without a line end: its last figure may be truncated.

        Raises:
            ConfigError: it is the last line of the file, without a line feed.
        """
        if line == len(self.lines):
            raise self.damaged(line, "ends inside a row: the run hung, or the log was cut")

    def tree(self) -> dict[str, Any]:
        """Parse the JSON object in the file; lines before it (warnings of the tool) are skipped.

        Raises:
            ConfigError: it is not a JSON object, or nested too deep.
        """
        content = self.content
        if not content.lstrip().startswith("{") and any(prefix != NOBODY for prefix in self.prefixes):
            content = self.body
        # A warning above the JSON may hold a brace of its own.
        own_line = re.search(r"^[ \t]*\{", content, re.MULTILINE)
        start = own_line.end() - 1 if own_line else content.find("{")
        before = content.count("\n", 0, start)
        try:
            tree = json.JSONDecoder(parse_constant=_no_constant).raw_decode(content[start:])[0]
        except json.JSONDecodeError as exc:
            raise self.damaged(before + exc.lineno, f"is no whole JSON: {exc.msg} at column {exc.colno}") from exc
        except (ValueError, RecursionError) as exc:
            # The end of Python's message is advice to the programmer, not to the user.
            message = printable_text(str(exc)).partition(";")[0].partition(" while ")[0]
            raise self.damaged(before + 1, f"is no JSON that can be used: {message}") from exc
        if not isinstance(tree, dict):
            raise self.damaged(before + 1, "must be a JSON object")
        return tree

    def line_of(self, what: str) -> int:
        """Return the number of the first line with this text in the first 256 KiB; 0 if there is none."""
        at = self.content.find(what, 0, 1 << 18)
        return 0 if at < 0 else self.content.count("\n", 0, at) + 1


@dataclass(frozen=True)
class Paths:
    """Expanded list of files and folders.

    Args:
        files: each file once, in order; `-` (standard input) is kept.
        in_folders: files found in a folder. The user did not name them, so it is no error if one is not a log.
        skipped: one line for each entry of a folder that is not read, with the reason.
    """

    files: tuple[Path, ...]
    in_folders: frozenset[Path]
    skipped: tuple[str, ...]


def expand(paths: Sequence[Path]) -> Paths:
    """Replace each folder by the files below it, sorted by name.

    Hidden files, links to folders and anything but regular files are skipped. Paths that do not exist stay in the list,
    so that reading them raises the error.
    """
    files: dict[Path, bool] = {}
    skipped: list[str] = []
    for path in paths:
        if path == STDIN or not _is_folder(path):
            files[path] = False
            continue
        before = len(files)
        for file in _files_below(path, skipped):
            files.setdefault(file, True)
        if len(files) == before:
            skipped.append(f"{one_line(str(path))}: holds no file to read")
    return Paths(tuple(files), frozenset(file for file, inside in files.items() if inside), tuple(skipped))


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _files_below(folder: Path, skipped: list[str]) -> Iterator[Path]:
    """Yield the regular files below a folder, in order; add a line to `skipped` for each that is not read, and why."""

    def unreadable(error: OSError) -> None:
        skipped.append(f"{one_line(str(error.filename))}: cannot be read ({error.strerror})")

    for place, folders, names in os.walk(folder, onerror=unreadable):
        hidden = [name for name in [*folders, *names] if name.startswith(".")]
        if hidden:
            skipped.append(f"{one_line(place)}: {len(hidden)} hidden, such as {one_line(hidden[0])}")
        skipped += [
            f"{one_line(place)}/{one_line(name)}: is a link to a folder"
            for name in folders
            if name not in hidden and (Path(place) / name).is_symlink()
        ]
        folders[:] = sorted(name for name in folders if name not in hidden)
        for name in sorted(set(names) - set(hidden)):
            path = Path(place) / name
            if path.is_file():
                yield path
            else:
                skipped.append(f"{one_line(str(path))}: is no regular file")


def read_text(path: Path) -> Text:
    """Read a log; `-` is standard input.

    A gzip file is unpacked on the fly. Of a file larger than `MAX_BYTES`, only the lines that some parser may need are
    kept, with their numbers.

    Raises:
        ConfigError: it is missing, not a regular file, empty, too large, or not text.
    """
    text = Text("stdin" if path == STDIN else str(path), "")
    try:
        with ExitStack() as stack:
            source, size = _open(path, text, stack)
            head = source.read(_CHUNK_BYTES)
            limit, packed = MAX_STREAM_BYTES, head.startswith(_GZIP)
            if packed:
                source, limit = _open_gzip(source, head, stack), MAX_UNPACKED_BYTES
                head = source.read(_CHUNK_BYTES)
            elif size > MAX_STREAM_BYTES:
                rule = f"has {size >> 30} GiB, at most {MAX_STREAM_BYTES >> 30} are read"
                raise text.damaged(0, rule, "give the part that the tool itself wrote")
            _check_head(text, head)
            return _read(text, source, head, limit, packed)
    except (EOFError, zlib.error, gzip.BadGzipFile) as exc:
        raise text.damaged(
            0, f"is packed (gzip) and does not unpack: {exc}", "unpack it first, or copy it again"
        ) from exc
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise text.damaged(0, f"cannot be read ({reason})", "give a file that exists and is yours to read") from exc


def _open(path: Path, text: Text, stack: ExitStack) -> tuple[BinaryIO, int]:
    """Open a file; return it with its size (0 for standard input)."""
    if path == STDIN:
        return sys.stdin.buffer, 0
    mode = path.stat()
    if not stat.S_ISREG(mode.st_mode):
        raise text.damaged(0, "must be a file", "give the log itself, or FOLDER/*")
    return stack.enter_context(path.open("rb")), mode.st_size


def _open_gzip(source: BinaryIO, head: bytes, stack: ExitStack) -> BinaryIO:
    """Open a gzip stream whose first bytes, `head`, have been read already."""

    class Whole:
        rest = head

        def read(self, size: int = -1) -> bytes:
            data, self.rest = (self.rest[:size], self.rest[size:]) if size >= 0 else (self.rest, b"")
            return data or source.read(size)

    return cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=cast(BinaryIO, Whole()), mode="rb")))


def _check_head(text: Text, head: bytes) -> None:
    """Refuse a compressed, UTF-16 or binary file, given its first bytes."""
    packed = "gzip, twice" if head.startswith(_GZIP) else ""
    packed = packed or next((name for magic, name in _MAGIC.items() if head.startswith(magic)), "")
    if packed:
        raise text.damaged(0, f"is packed ({packed})", "unpack it first")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise text.damaged(1, "is UTF-16", "save it as UTF-8")
    _check_zero(text, head, 0)
    if _BINARY.match(head):
        raise text.damaged(0, "must be text, and is binary", "give the tool's own text or JSON output")


def _check_zero(text: Text, chunk: bytes, num_lines: int) -> None:
    if b"\x00" in chunk:
        line = num_lines + chunk.count(b"\n", 0, chunk.index(b"\x00")) + 1
        raise text.damaged(line, "must be text, and holds a zero byte", "give the tool's own text or JSON output")


def _read(text: Text, source: BinaryIO, head: bytes, limit: int, packed: bool) -> Text:
    """Read the whole file if it is small enough, else its relevant lines."""
    chunks = [head]
    while head and sum(map(len, chunks)) <= MAX_BYTES:
        head = source.read(_CHUNK_BYTES)
        chunks.append(head)
    content = b"".join(chunks)
    if head:
        return _read_large(text, content, source, limit, packed)
    _check_zero(text, content, 0)
    decoded = content.decode("utf-8-sig", errors="replace").replace("\r\n", "\n")
    if not decoded.strip():
        raise text.damaged(0, "is empty", "see whether the tool ran at all, then " + _AGAIN)
    return _split_carriage_returns(replace(text, content=decoded))


def _read_large(text: Text, content: bytes, source: BinaryIO, limit: int, packed: bool) -> Text:
    """Read the lines of a large file that some parser may need."""
    part = "give the part that the tool itself wrote"
    if content.lstrip()[:1] in (b"{", b"<") or b"\n" not in content:
        what = "JSON, XML or one line" if b"\n" not in content else "JSON or XML"
        raise text.damaged(0, f"is {what} of more than {MAX_BYTES >> 20} MiB, which is not read", part)
    lines: list[bytes] = []
    numbers: list[int] = []
    num_lines = num_bytes = num_kept = 0
    rest, chunk = b"", content
    while chunk:
        num_bytes += len(chunk)
        _check_zero(text, chunk, num_lines)
        complete, ended, rest = (rest + chunk).rpartition(b"\n")
        if num_bytes > limit:
            raise text.damaged(0, f"{'unpacks to' if packed else 'has'} more than {limit >> 20} MiB", part)
        num_new = complete.count(b"\n") + len(ended)
        if len(rest) > _CHUNK_BYTES or num_bytes < _MIN_MEAN_LINE * (num_lines + num_new):
            raise text.damaged(num_lines + 1, "has lines that no tool writes: too long, or next to empty", part)
        for at, line in _relevant_lines(complete):
            lines.append(line[:MAX_LINE])
            numbers.append(num_lines + at)
            num_kept += len(line)
        num_lines += num_new
        if num_kept > MAX_BYTES:
            raise text.damaged(0, f"holds more than {MAX_BYTES >> 20} MiB of lines to judge", part)
        chunk = source.read(_CHUNK_BYTES)
    if not lines:
        raise text.damaged(0, f"holds no line of a known tool among {num_lines:,}", part)
    # The last line of the file is kept unchanged: a missing line end shows that the log was cut.
    last = [line for _, line in _relevant_lines(rest)] or [b""]
    decoded = b"\n".join([*lines, *last]).decode("utf-8", errors="replace").replace("\r\n", "\n")
    return _split_carriage_returns(replace(text, content=decoded, numbers=(*numbers, num_lines + 1)))


def _relevant_lines(chunk: bytes) -> list[tuple[int, bytes]]:
    """Return the lines of a chunk that some parser may need, with their numbers in it, from 1."""

    def filter_info(match: re.Match[bytes]) -> bytes:
        return match[0] if any(word in match[0] for word in _INFO_WORDS) else b"\n"

    if b" NCCL " in chunk:
        has_kept = any(word in chunk for word in _INFO_WORDS)
        # With a line feed before the first line too, so that the pattern matches every line.
        chunk = _NCCL_INFO_LINE.sub(filter_info if has_kept else b"\n", b"\n" + chunk)[1:]
    starts: set[int] = set()
    for word in _KEPT_WORDS:
        at = chunk.find(word)
        while at >= 0:
            starts.add(chunk.rfind(b"\n", 0, at) + 1)
            end = chunk.find(b"\n", at)
            at = chunk.find(word, end) if end >= 0 else -1
    lines = []
    number, before = 1, 0
    for start in sorted(starts):
        number, before = number + chunk.count(b"\n", before, start), start
        end = chunk.find(b"\n", start)
        lines.append((number, chunk[start : end if end >= 0 else len(chunk)]))
    return lines


def _split_carriage_returns(text: Text) -> Text:
    """Replace carriage returns (progress that was overwritten) by line feeds, keeping the original line numbers."""
    if "\r" not in text.content:
        return text
    ends = [0]
    for line in text.content.split("\n"):
        ends.append(ends[-1] + len(line) + 1)
    content = text.content.replace("\r", "\n")
    starts = [0]
    for line in content.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    numbers = tuple(text.number(bisect_right(ends, start)) for start in starts[:-1])
    return replace(text, content=content, numbers=numbers)


def one_line(text: str) -> str:
    """Make a text printable (see `printable_text`), without line feeds and tabs, which a file name may contain."""
    return printable_text(text).replace("\n", "?").replace("\t", "?")


def number(cell: object) -> float | None:
    """Convert to a finite, non-negative number; None if it is not one."""
    if isinstance(cell, bool) or not isinstance(cell, str | int | float):
        return None
    try:
        value = float(cell)
    except (ValueError, OverflowError):
        return None
    return value if math.isfinite(value) and value >= 0 else None


def mapping(value: object) -> Mapping[str, Any]:
    """Return a JSON object; an empty one if the value is something else."""
    return value if isinstance(value, dict) else {}


def sequence(value: object) -> list[Any]:
    """Return a JSON list; an empty one if the value is something else."""
    return value if isinstance(value, list) else []


def word(value: object, most: int = 200) -> str:
    """Return a JSON scalar as short printable text on one line; empty for anything else."""
    return " ".join(printable_text(str(value)).split())[:most] if isinstance(value, str | int | float) else ""


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")

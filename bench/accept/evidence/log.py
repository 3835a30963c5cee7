"""A log as text that is safe to look at, and what a parser makes of it: findings, and figures to compare.

Every parser takes a `Text` and returns a `Log`. What it cannot read it says by `Text.damaged`: file, line, what was
expected there and what to do. Nothing in a log is executed, unpickled or looked up. Text comes from a file, a gzip file
or standard input (`-`); of one too large to hold, the lines that some parser may want are kept.
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
from netlayer.verdict import Finding

MAX_BYTES = 16 << 20
MAX_LINE = 16384
MAX_ROWS = 20_000
_AGAIN = "take the log again"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202f\u2066-\u2069\ufffe\uffff]|[\ud800-\udfff]")
_GZIP = b"\x1f\x8b"
_MAGIC = {b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"(\xb5/\xfd": "zstd"}
# A pickle of protocol 2 or later, and what a program's own memory or a library begins with.
_BINARY = re.compile(rb"\x80[\x02-\x05]|\x7fELF|MZ\x90")
STDIN = Path("-")
MAX_STREAM_BYTES = 8 << 30
# What a gzip file may unpack to: a megabyte of it can hold a gigabyte.
MAX_UNPACKED_BYTES = 512 << 20
_CHUNK_BYTES = 4 << 20
# Lines shorter than this on average are no log: each costs time, and none says anything.
_MIN_MEAN_LINE = 8
# What is left out of a file too large to hold: NCCL's own chatter, unless a parser looks for it.
_CHATTER = (b" NCCL INFO ", b" NCCL TRACE ", b" NCCL CALL ")
_CHATTER_KEPT = re.compile(rb"NVLS multicast|NCCL_NVLS_ENABLE|NCCL version ")
_KEEP = re.compile(
    rb"NCCL WARN|NCCL version|failure|NVRM|SXid|Xid|Hardware Error|EDAC|AER|Kernel panic|Out of memory|oom[-_]kill"
    rb"|[Kk]illed|CANCELLED|TIME LIMIT|exit code|signal|[Ss]egmentation|core dumped|timeout|[Ll]ink (?:is )?[Dd]own"
    rb"|_perf\b|nccl-tests|rccl-tests|nThread|busbw|out-of-place|Rank +\d|Out of bounds|Avg bus|nvbandwidth|#bytes"
    rb"|(?:^|[^\w.:-])\d{1,18} +\d{1,18} +[a-z][a-z0-9_]{2,11} |BW (?:peak|average)|GPU \d{1,3}:|NVLS|^#|memcpy"
)


@dataclass(frozen=True)
class Figure:
    """A measurement that its peers and expectations are held against.

    Args:
        series: what it measures; only figures of one series and one `at` are alike.
        at: the point of the series: size and place.
        subject: whom it speaks of.
        value: in `unit`, finite and above zero.
        line: of the log.
        parts: who takes part in it, where that is more than one: the two GPUs of a pair.
        facts: what an expectation may be keyed by; what the log does not say is left out.
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
        """`342.1 GB/s bus at 1 GiB in place`."""
        return f"{self.value:.4g} {self.unit}" + (f" at {self.at}" if self.at else "")


@dataclass(frozen=True)
class Log:
    """What one run in a file, or a whole file, says.

    Args:
        kind: the tool that wrote it.
        findings: what the log says by itself: errors, wrong data, states.
        figures: measurements to hold against expectations and peers.
        traits: firmware, driver and so on as (what, subject) -> value: held against the majority.
        host: the node that it is about, where the log names exactly one; empty otherwise.
        run: 1, 2, ... where a file holds several runs of its tool; 0 where it holds one.
    """

    kind: str
    findings: tuple[Finding, ...] = ()
    figures: tuple[Figure, ...] = ()
    traits: Mapping[tuple[str, str], str] = field(default_factory=dict)
    host: str = ""
    run: int = 0


@dataclass(frozen=True)
class Text:
    """A file's text under the name the user gave it.

    Args:
        content: what stands in the file.
        numbers: where this is only a part of the file, the number that each line has there; else empty.
        printed_by: where this is what one of several wrote into the file: who that is.
    """

    file: str
    content: str
    numbers: tuple[int, ...] = ()
    printed_by: Prefix = NOBODY

    @cached_property
    def _bare(self) -> tuple[list[str], list[Prefix]]:
        lines = self.content.split("\n")
        long = next((at for at, line in enumerate(lines, 1) if len(line) > MAX_LINE), 0)
        if long:
            raise self.damaged(
                long, f"has {len(lines[long - 1]):,} characters, at most {MAX_LINE:,} are read in a line"
            )
        bare, printed_by = strip_prefixes(lines)
        return [printable(line) for line in bare], printed_by

    @property
    def lines(self) -> list[str]:
        """Without what stands before them (`prefixes.py`), and without control characters.

        Raises:
            ConfigError: a line is longer than any tool writes; what searches a line may take its length squared.
        """
        return self._bare[0]

    @property
    def prefixes(self) -> list[Prefix]:
        """Who printed each line, as far as what stood before it says so.

        Raises:
            ConfigError: as `lines`.
        """
        return self._bare[1]

    @cached_property
    def body(self) -> str:
        """`lines` as one text: what a parser is recognised by.

        Raises:
            ConfigError: as `lines`.
        """
        return "\n".join(self.lines)

    def number(self, line: int) -> int:
        """The number in the file of a line of this text; 0, the whole file, stays 0."""
        return self.numbers[min(line, len(self.numbers)) - 1] if self.numbers and line else line

    def streams(self) -> list[Text]:
        """Return one text for each host, pod, service or worker whose lines are mixed in this one; else this one.

        Lines that nobody is named for (the launcher's own) go with none of them, but into one text of their own at the
        end, where there are any.

        Raises:
            ConfigError: as `lines`.
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
        """The error that says where the file cannot be read on."""
        where = one_line(self.file)
        return ConfigError(f"{where}:{self.number(line)}" if line else where, None, expected, remedy)

    def check_rows(self, num_rows: int, most: int = MAX_ROWS) -> None:
        """Refuse what no tool writes, before time is spent on it.

        Raises:
            ConfigError: more than `most`.
        """
        if num_rows > most:
            raise self.damaged(0, f"has {num_rows:,} rows or cells, at most {most:,} are judged", "give a part of it")

    def check_ended(self, line: int) -> None:
        """Refuse a row of figures whose line has no end: its last figure may lack digits.

        Raises:
            ConfigError: it is the last one, and no line feed follows.
        """
        if line == len(self.lines):
            raise self.damaged(line, "ends inside a row: the run hung, or the log was cut")

    def tree(self) -> dict[str, Any]:
        """The JSON object that the file holds; lines before it (warnings of the tool) are passed over.

        Raises:
            ConfigError: it is no JSON object, or nested too deep.
        """
        content = self.content
        if not content.lstrip().startswith("{") and any(prefix != NOBODY for prefix in self.prefixes):
            content = self.body
        start = content.find("{")
        before = content.count("\n", 0, start)
        try:
            tree = json.JSONDecoder(parse_constant=_no_constant).raw_decode(content[start:])[0]
        except json.JSONDecodeError as exc:
            raise self.damaged(before + exc.lineno, f"is no whole JSON: {exc.msg} at column {exc.colno}") from exc
        except (ValueError, RecursionError) as exc:
            # Python's words end with advice to whoever wrote the program.
            words = printable(str(exc)).partition(";")[0].partition(" while ")[0]
            raise self.damaged(before + 1, f"is no JSON that can be used: {words}") from exc
        if not isinstance(tree, dict):
            raise self.damaged(before + 1, "must be a JSON object")
        return tree

    def line_of(self, what: str) -> int:
        """The first line with these words, or 0; beyond the first 256 KiB it is not looked for."""
        at = self.content.find(what, 0, 1 << 18)
        return 0 if at < 0 else self.content.count("\n", 0, at) + 1


@dataclass(frozen=True)
class Paths:
    """What a list of files and folders comes to.

    Args:
        files: each once, in order; `-` stays what it is, standard input.
        in_folders: those that were found in a folder: the user did not name them, so one that is no log of a known
            tool is no mistake of his.
        skipped: one line for each thing in a folder that is not read, with the reason.
    """

    files: tuple[Path, ...]
    in_folders: frozenset[Path]
    skipped: tuple[str, ...]


def expand(paths: Sequence[Path]) -> Paths:
    """Replace each folder by the files below it, sorted by name.

    Hidden ones, links to folders, and what is no regular file are skipped. What does not exist stays in the list, so
    that reading it says so.
    """
    files: dict[Path, bool] = {}
    skipped: list[str] = []
    for path in paths:
        if path == STDIN or not _is_folder(path):
            files[path] = False
            continue
        before = len(files)
        for found in _below(path, skipped):
            files.setdefault(found, True)
        if len(files) == before:
            skipped.append(f"{one_line(str(path))}: holds no file to read")
    return Paths(tuple(files), frozenset(file for file, inside in files.items() if inside), tuple(skipped))


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _below(folder: Path, skipped: list[str]) -> Iterator[Path]:
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
    """The text of a log; `-` is standard input.

    A gzip file is unpacked as it is read. Of a file larger than `MAX_BYTES` those lines are kept that some parser may
    want, with their numbers.

    Raises:
        ConfigError: it is missing, no regular file, empty, too large, or no text.
    """
    text = Text("stdin" if path == STDIN else str(path), "")
    try:
        with ExitStack() as stack:
            source, size = _open(path, text, stack)
            head = source.read(_CHUNK_BYTES)
            limit, packed = MAX_STREAM_BYTES, head.startswith(_GZIP)
            if packed:
                source, limit = _unpacked(source, head, stack), MAX_UNPACKED_BYTES
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
    """The open file and its size; that of standard input is not known."""
    if path == STDIN:
        return sys.stdin.buffer, 0
    mode = path.stat()
    if not stat.S_ISREG(mode.st_mode):
        raise text.damaged(0, "must be a file", "give the log itself, or FOLDER/*")
    return stack.enter_context(path.open("rb")), mode.st_size


def _unpacked(source: BinaryIO, head: bytes, stack: ExitStack) -> BinaryIO:
    """A gzip file from its start, of which `head` has been read already."""

    class Whole:
        rest = head

        def read(self, size: int = -1) -> bytes:
            taken, self.rest = (self.rest[:size], self.rest[size:]) if size >= 0 else (self.rest, b"")
            return taken or source.read(size)

    return cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=cast(BinaryIO, Whole()), mode="rb")))


def _check_head(text: Text, head: bytes) -> None:
    """Refuse what is no text before any more of it is read."""
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
    """The whole where it can be held, else the lines that are kept."""
    whole = [head]
    while head and sum(map(len, whole)) <= MAX_BYTES:
        head = source.read(_CHUNK_BYTES)
        whole.append(head)
    content = b"".join(whole)
    if head:
        return _kept(text, content, source, limit, packed)
    _check_zero(text, content, 0)
    decoded = content.decode("utf-8-sig", errors="replace").replace("\r\n", "\n")
    if not decoded.strip():
        raise text.damaged(0, "is empty", "see whether the tool ran at all, then " + _AGAIN)
    return _without_overwritten(replace(text, content=decoded))


def _kept(text: Text, content: bytes, source: BinaryIO, limit: int, packed: bool) -> Text:
    """The lines of a large file that some parser may want."""
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
        *whole, rest = (rest + chunk).split(b"\n")
        if num_bytes > limit:
            raise text.damaged(0, f"{'unpacks to' if packed else 'has'} more than {limit >> 20} MiB", part)
        if len(rest) > _CHUNK_BYTES or num_bytes < _MIN_MEAN_LINE * (num_lines + len(whole)):
            raise text.damaged(num_lines + 1, "has lines that no tool writes: too long, or next to empty", part)
        for number, line in enumerate(whole, num_lines + 1):
            chatter = any(mark in line for mark in _CHATTER)
            if (_CHATTER_KEPT if chatter else _KEEP).search(line):
                lines.append(line[:MAX_LINE])
                numbers.append(number)
                num_kept += len(line)
        num_lines += len(whole)
        if num_kept > MAX_BYTES:
            raise text.damaged(0, f"holds more than {MAX_BYTES >> 20} MiB of lines to judge", part)
        chunk = source.read(_CHUNK_BYTES)
    if not lines:
        raise text.damaged(0, f"holds no line of a known tool among {num_lines:,}", part)
    # The last line of the file is kept as it is: whether it has an end tells whether the log was cut.
    last = [rest] if _KEEP.search(rest) else [b""]
    decoded = b"\n".join([*lines, *last]).decode("utf-8", errors="replace").replace("\r\n", "\n")
    return _without_overwritten(replace(text, content=decoded, numbers=(*numbers, num_lines + 1)))


def _without_overwritten(text: Text) -> Text:
    """The text with what a carriage return parts on lines of their own: progress, and what was printed over it."""
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


def printable(text: str) -> str:
    """Text without what a terminal, an XML reader or a bidirectional display would act on."""
    return _CONTROL.sub("?", text)


def one_line(text: str) -> str:
    """The same without line feeds and tabs, which the name of a file may hold."""
    return printable(text).replace("\n", "?").replace("\t", "?")


def number(cell: object) -> float | None:
    """A finite number that is not negative, or None."""
    if isinstance(cell, bool) or not isinstance(cell, str | int | float):
        return None
    try:
        value = float(cell)
    except (ValueError, OverflowError):
        return None
    return value if math.isfinite(value) and value >= 0 else None


def mapping(value: object) -> Mapping[str, Any]:
    """The JSON object that this should be; an empty one where it is something else."""
    return value if isinstance(value, dict) else {}


def sequence(value: object) -> list[Any]:
    """The JSON list that this should be; an empty one where it is something else."""
    return value if isinstance(value, list) else []


def word(value: object, most: int = 200) -> str:
    """A JSON scalar as short printable text of one line; anything else is empty."""
    return " ".join(printable(str(value)).split())[:most] if isinstance(value, str | int | float) else ""


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")

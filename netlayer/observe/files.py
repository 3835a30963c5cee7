"""Readers of the files of a hung job, recognised by content: Flight Recorder dumps, RAS output, watch reports.

A file that is damaged, empty or of another kind, and a dump of another run, is skipped with a note; if its name tells
the rank, that rank counts as silent. It is an error only if no file can be used. No archive is unpacked, no pickle
runs, and size is bounded before parsing: files by their bytes, JSON by its number of brackets and commas as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import select
import stat
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from netlayer.errors import ConfigError
from netlayer.observe import flight_recorder, plain_pickle, ras, reports
from netlayer.observe.blame import Blame, diagnose
from netlayer.printing import printable

_REMEDY = "give dumps of Flight Recorder, the output of ncclras, or reports of netlayer's watch"
_STDIN = Path("-")
_WATCHDOG = "Watchdog caught collective operation timeout"
# A full buffer of Flight Recorder (2,000 entries, 8 frames each) has 0.6 MB; RAS writes 0.4 KB a rank and communicator.
_MAX_BYTES = 64 << 20
# JSON takes up to 100 bytes of memory for two of the file; 2 million objects are some hundred MB.
_MAX_CONTAINERS = 2_000_000
_MAX_VALUES = 8_000_000
_PIPE_SECONDS = 30.0
_MAX_NOTES = 5
_PICKLE = b"\x80"
_PACKED = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ\x00": "xz",
    b"BZh": "bzip2",
}
# A log of repeated queries holds several JSON texts, separated by white space.
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")
_MAX_QUERIES = 10_000


@dataclass
class _Inputs:
    """Parsed content of the files, by kind; `skipped` has path and reason of each file that cannot be used."""

    dumps: list[flight_recorder.Dump] = field(default_factory=list)
    queries: list[ras.Query] = field(default_factory=list)
    reports: list[tuple[Path, dict[str, Any]]] = field(default_factory=list)
    skipped: list[tuple[Path, str]] = field(default_factory=list)
    num_files: int = 0
    _seen: dict[bytes, Path] = field(default_factory=dict)  # by digests of their content

    def add(self, path: Path) -> None:
        """Read one file and file its content under its kind."""
        self.num_files += 1
        try:
            data = _read(path)
            parsed = _parse(path, data)
            self._check_new(path, data)
        except ValueError as exc:
            self.skipped.append((path, str(exc)))
            return
        if isinstance(parsed, flight_recorder.Dump):
            self.dumps.append(parsed)
        elif parsed and isinstance(parsed[0], ras.Query):
            self.queries += [query for query in parsed if isinstance(query, ras.Query)]
        else:
            self.reports += [(path, tree) for tree in parsed if isinstance(tree, dict)]

    def _check_new(self, path: Path, data: bytes) -> None:
        """Raise ValueError for a file that is there under another name: it says nothing for a second time."""
        other = self._seen.setdefault(hashlib.sha256(data).digest(), path)
        if other is path or _STDIN in (path, other):
            return
        with contextlib.suppress(OSError):  # a pipe, or gone meanwhile
            if other.samefile(path):
                raise ValueError(f"is {other} under another name")


def read_files(paths: Sequence[Path], world_size: int | None = None) -> Blame:
    """Read the files of one job and name the ranks that hold it up.

    Args:
        paths: files and folders (all files in them); `-` is standard input.
        world_size: number of ranks of the job, if the files do not tell.

    Raises:
        ConfigError: no file can be used, or the usable ones are of two runs.
    """
    inputs = _Inputs()
    for path in _expand(paths):
        inputs.add(path)
    parts: list[Blame] = []
    try:
        if inputs.dumps:
            known, unused, doubt = flight_recorder.select(inputs.dumps)
            damaged = flight_recorder.damaged_ranks(known, inputs.skipped, unused)
            inputs.skipped += unused
            parts.append(_doubted(diagnose(flight_recorder.join(known, world_size, damaged)), doubt))
        if inputs.queries:
            parts.append(ras.judge(inputs.queries))
        if inputs.reports:
            parts.append(diagnose(reports.join(inputs.reports, world_size)))
    except ValueError as exc:
        raise ConfigError("FILES", None, str(exc), "give the files of one run, one a rank") from exc
    if not parts:
        raise _nothing_usable(inputs)
    return Blame(
        [finding for part in parts for finding in part.findings],
        [row for part in parts for row in part.groups],
        [*_notes(inputs.skipped), *(note for part in parts for note in part.notes)],
        "; ".join(part.no_verdict for part in parts if part.no_verdict),
    )


def parse_file(path: Path) -> flight_recorder.Dump | list[ras.Query] | list[dict[str, Any]]:
    """Read and parse one file: a dump, the answers of RAS, or reports of our watch.

    Raises:
        ValueError: it is damaged or of no known kind; a phrase that continues the file's name ("is empty").
    """
    return _parse(path, _read(path))


def _doubted(blame: Blame, doubt: str) -> Blame:
    """Return the verdict without certainty if there is a doubt whether it is of the run in question."""
    if not doubt:
        return blame
    findings = [replace(finding, certain=False, line=f"{finding.line}; {doubt}") for finding in blame.findings]
    return replace(blame, findings=findings)


def _nothing_usable(inputs: _Inputs) -> ConfigError:
    path, reason = inputs.skipped[0]
    if inputs.num_files > 1:
        reason = f"{reason}; nor can any other of the {inputs.num_files} files be used"
    return ConfigError("FILES", printable(str(path)), reason, _REMEDY)


def _notes(skipped: Sequence[tuple[Path, str]]) -> Iterator[str]:
    for path, reason in skipped[:_MAX_NOTES]:
        yield f"{printable(str(path))} {reason}: skipped"
    if len(skipped) > _MAX_NOTES:
        reasons = Counter(reason for _, reason in skipped[_MAX_NOTES:])
        commonest, count = reasons.most_common(1)[0]
        yield f"{len(skipped) - _MAX_NOTES} more files are skipped ({count} of them: {commonest})"


def _parse(path: Path, data: bytes) -> flight_recorder.Dump | list[ras.Query] | list[dict[str, Any]]:
    """Recognise and parse the content of one file.

    Raises:
        ValueError: it is damaged or of no known kind; a phrase that continues the file's name ("is empty").
    """
    _check_kind(data)
    if data.startswith(_PICKLE):
        tree = plain_pickle.loads(data)
        if not flight_recorder.is_dump(tree):
            raise ValueError("is a pickle, but no dump of Flight Recorder")
        return flight_recorder.parse(tree, path)
    text = data.decode("utf-8-sig", errors="replace")
    if watch_reports := _bounded(text) and reports.split(text):
        return watch_reports
    if '"communicators"' in text:
        text = text[max(0, text.find("{")) :]  # the client may warn above its answer
    try:
        trees = list(_json_texts(text))
    except (ValueError, RecursionError):
        if queries := ras.from_text(text):
            return queries
        raise ValueError(_unknown(text)) from None
    if flight_recorder.is_dump(trees[0]):
        return flight_recorder.parse(trees[0], path)
    if any(map(ras.is_json, trees)):
        return [ras.from_json(tree) for tree in trees if ras.is_json(tree)]
    if reports.is_report(trees[0]):
        return trees[:1]
    raise ValueError("is JSON, but nothing that this command knows")


def _unknown(text: str) -> str:
    """Return what is wrong with a text that is none of the known kinds."""
    if _WATCHDOG in text:
        return (
            "is a log of PyTorch's watchdog, which says who waited and not for whom: that is in the dumps that ranks"
            " write beside it (with TORCH_NCCL_TRACE_BUFFER_SIZE=2000, in newer versions TORCH_FR_BUFFER_SIZE=2000)"
        )
    shape = "looks like JSON, but is damaged or" if text.lstrip().startswith("{") else "is"
    return f"{shape} nothing that this command knows"


def _check_kind(data: bytes) -> None:
    """Raise ValueError if the data is empty, blank, all zero bytes, or a compressed archive."""
    if not data:
        raise ValueError("is empty")
    if packed := next((name for magic, name in _PACKED.items() if data.startswith(magic)), ""):
        raise ValueError(f"is packed ({packed}): unpack it first")
    if not data.strip(b"\x00"):
        raise ValueError("holds nothing but zero bytes")
    if not data.strip():
        raise ValueError("holds nothing but blanks")


def _bounded(text: str) -> bool:
    """Return True if parsing this as JSON takes a bounded amount of memory.

    Raises:
        ValueError: it would take more than any valid file.
    """
    if text.count("{") + text.count("[") > _MAX_CONTAINERS or text.count(",") > _MAX_VALUES:
        raise ValueError("holds more objects than any such file")
    return True


def _json_texts(text: str) -> Iterator[Any]:
    """Yield every JSON text of a file: a log of repeated queries holds several."""
    text = ras.fix_json(text)
    at = _SPACE.match(text, 0).end()  # type: ignore[union-attr]
    for _ in range(_MAX_QUERIES):
        tree, at = _DECODER.raw_decode(text, at)
        yield tree
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        if at == len(text):
            return


def _expand(paths: Sequence[Path]) -> Iterable[Path]:
    for path in dict.fromkeys(paths):
        if not path.is_dir():
            yield path
            continue
        try:
            inside = sorted(file for file in path.iterdir() if file.is_file())
        except OSError as exc:
            raise ConfigError("FILES", printable(str(path)), f"cannot be read ({exc.strerror})", _REMEDY) from exc
        if not inside:
            raise ConfigError("FILES", printable(str(path)), "is a folder without files", _REMEDY)
        yield from inside


def _read(path: Path) -> bytes:
    """Return the bytes of a file or pipe.

    Raises:
        ValueError: it cannot be read, is not a regular file, or is too large.
    """
    if path == _STDIN:
        return _read_pipe(sys.stdin.fileno())
    try:
        # O_NONBLOCK: opening a pipe without a writer would block for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as exc:
        raise ValueError(f"cannot be read ({getattr(exc, 'strerror', None) or exc})") from exc
    try:
        state = os.fstat(descriptor)
        if stat.S_ISFIFO(state.st_mode) and str(path).startswith(("/dev/", "/proc/")):
            return _read_pipe(descriptor)  # `<(ncclras -v)`; a pipe elsewhere may never get a writer
        if not stat.S_ISREG(state.st_mode):
            raise ValueError("is no regular file")
        if state.st_size > _MAX_BYTES:
            raise ValueError(f"has {state.st_size >> 20:,} MiB: no such file has more than {_MAX_BYTES >> 20}")
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return file.read(_MAX_BYTES + 1)
    except OSError as exc:
        raise ValueError(f"cannot be read ({exc.strerror})") from exc
    finally:
        os.close(descriptor)


def _read_pipe(descriptor: int) -> bytes:
    """Read a pipe, such as `<(ncclras -v)`, until its end; ValueError if it takes too long or is too large."""
    parts, size, deadline = [], 0, time.monotonic() + _PIPE_SECONDS
    while True:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise ValueError(f"is a pipe that did not end within {_PIPE_SECONDS:.0f} s")
        part = os.read(descriptor, 1 << 20)
        size += len(part)
        parts.append(part)
        if not part:
            return b"".join(parts)
        if size > _MAX_BYTES:
            raise ValueError(f"is a pipe with more than {_MAX_BYTES >> 20} MiB")

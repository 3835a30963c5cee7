"""Recognises, by content, what a job left behind: dumps of Flight Recorder, RAS output, reports of our watch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from netlayer.errors import ConfigError
from netlayer.observe import flight_recorder, plain_pickle, ras, reports
from netlayer.observe.blame import Blame, diagnose

_REMEDY = "give dumps of Flight Recorder, the output of ncclras, or reports of netlayer's watch"
_MOST_BYTES = 1 << 30
_PICKLE = b"\x80"


def read_files(paths: Sequence[Path], world_size: int | None = None) -> Blame:
    """The verdict on these files; of a folder, on all files in it.

    Args:
        paths: files and folders, of one job.
        world_size: ranks of the job, where the files do not say.

    Raises:
        ConfigError: a file cannot be read, or is nothing that is known here.
    """
    dumps: list[flight_recorder.Dump] = []
    told: list[tuple[Path, dict[str, Any]]] = []
    parts: list[Blame] = []
    for path in _expand(paths):
        try:
            found = _recognise(path, _read(path))
        except ValueError as exc:
            raise ConfigError("FILES", path, str(exc), _REMEDY) from exc
        if isinstance(found, flight_recorder.Dump):
            dumps.append(found)
        elif isinstance(found, Blame):
            parts.append(found)
        else:
            told += [(path, tree) for tree in found]
    try:
        if dumps:
            parts.append(diagnose(flight_recorder.join(dumps, world_size)))
        if told:
            parts.append(diagnose(reports.join(told, world_size)))
    except ValueError as exc:
        raise ConfigError("FILES", None, str(exc), "give the files of one run, one a rank") from exc
    return Blame(
        [finding for part in parts for finding in part.findings],
        [row for part in parts for row in part.groups],
        [note for part in parts for note in part.notes],
    )


def _recognise(path: Path, data: bytes) -> flight_recorder.Dump | Blame | list[dict[str, Any]]:
    if data.startswith(_PICKLE):
        tree = plain_pickle.loads(data)
        if not flight_recorder.is_dump(tree):
            raise ValueError("a pickle, but no dump of Flight Recorder")
        return flight_recorder.parse(tree, path)
    text = data.decode("utf-8", errors="replace")
    told = reports.split(text)
    if told:
        return told
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        if ras.is_text(text):
            return ras.from_text(text)
        raise ValueError("is nothing that this command knows") from None
    if flight_recorder.is_dump(tree):
        return flight_recorder.parse(tree, path)
    if ras.is_json(tree):
        return ras.from_json(tree)
    if reports.is_report(tree):
        return [tree]
    raise ValueError("JSON, but nothing that this command knows")


def _expand(paths: Sequence[Path]) -> Iterable[Path]:
    for path in dict.fromkeys(paths):
        if not path.is_dir():
            yield path
            continue
        inside = sorted(file for file in path.iterdir() if file.is_file())
        if not inside:
            raise ConfigError("FILES", path, "is an empty folder", _REMEDY)
        yield from inside


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"is larger than {_MOST_BYTES >> 30} GiB, which no such file is")
        return path.read_bytes()
    except OSError as exc:
        raise ValueError(f"cannot be read ({exc.strerror})") from exc

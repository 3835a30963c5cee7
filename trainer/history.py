"""The rows of a run in its folder: one history of steps, however often the run was stopped, killed and started again.

`metrics.jsonl` and `validation.jsonl` hold each step once, in order. A run that resumes after step S keeps the rows up
to S, and takes later ones again: those that are there are replaced. What is replaced is not lost: `restarts.jsonl` has
a line each time a run resumes in its folder, with the step and with the rows that it replaced. Good checkpoints of
later steps, which are of a history that has ended, are renamed to `step-NNNNNN.replaced`.

[Note: killed while it resumes] The line of `restarts.jsonl` is on the disk before a row is replaced, and files are
replaced whole. Killed in between, the next start finds the same rows again, and names them again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from netlayer.errors import FULL_DISK, ConfigError
from netlayer.results import sync_folder, utc_now, writing
from trainer.checkpoint.names import META, checkpoints_in, step_of

METRICS, VALIDATION, RESTARTS = "metrics.jsonl", "validation.jsonl", "restarts.jsonl"
CHECKPOINTS = "checkpoints"
"""Folder of them in the output of a run."""
REPLACED = ".replaced"
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Restart:
    """A run that resumes in its folder.

    Args:
        count: how often it has, this time too; 0: there was nothing yet.
        missing: steps before it that have no row, as first and last; None: all there are.
        is_evaluated: whether the step that it resumes from had a held-out loss.
    """

    count: int
    missing: tuple[int, int] | None
    is_evaluated: bool


def resume_history(out: Path, step: int, resume: Path | None, checkpoints: Path | None = None) -> Restart:
    """Make the history in `out` end with `step`, and note what is replaced.

    Args:
        resume: the checkpoint; None: the run starts with its first step again.
        checkpoints: folder of the run's; None: the one in `out`.

    Raises:
        ConfigError: the folder cannot be written.
    """
    if not any((out / name).exists() for name in (METRICS, VALIDATION, RESTARTS)):
        return Restart(0, None, False)
    with writing(out, "--out"):
        # The first thing of a resumed run is the evaluation of its checkpoint: its row is taken again too.
        steps, steps_after = _split(out / METRICS, step)
        evaluations, evaluations_after = _split(out / VALIDATION, step - 1)
        aside = [path for path in checkpoints_in(checkpoints or out / CHECKPOINTS) if step_of(path) > step]
        line = {
            "utc": utc_now(),
            "resumed_step": step,
            "checkpoint": None if resume is None else resume.name,
            "replaced": {METRICS: steps_after, VALIDATION: evaluations_after, CHECKPOINTS: [p.name for p in aside]},
        }
        count = _append_durably(out / RESTARTS, line)
        _replace_durably(out / METRICS, steps)
        _replace_durably(out / VALIDATION, evaluations)
        for path in aside:
            if not isinstance(path, Path):  # an object store renames no folder: without this file it is no checkpoint
                (path / META).rename(path / f"{META}{REPLACED}")  # type: ignore[unreachable]
                continue
            path.replace(_unused(path.with_name(path.name + REPLACED)))
        sync_folder(out)
    last = steps[-1]["step"] if steps else None
    missing = (last + 1, step) if last is not None and last < step else None
    return Restart(count, missing, any(row["step"] == step for row in evaluations_after if isinstance(row, dict)))


class RowFile:
    """A file of rows. While the disk is full they wait in memory, in order, until one finds room.

    Args:
        path: of the file.
        appends: what is there stays.
        on_full: gets a line for the user when rows begin to wait.

    Raises:
        ConfigError: it cannot be opened.
    """

    def __init__(self, path: Path, *, appends: bool, on_full: Callable[[str], None]) -> None:
        self._on_full = on_full
        self._waiting: list[Row] = []
        with writing(path, "--out"):
            self._file = path.open("ab" if appends else "wb", buffering=0)

    def add(self, row: Row, *, durably: bool = False) -> None:
        """The row is in the file, or waits.

        Args:
            durably: it and those before it outlive a power cut.

        Raises:
            ConfigError: it cannot be written, for another reason than a full disk.
        """
        is_news = not self._waiting
        self._waiting.append(row)
        try:
            self._write(durably)
        except ConfigError as exc:
            if not _is_full(exc):
                raise
            if is_news:
                self._on_full(f"{exc.field} = {exc.value}: {exc.rule}: rows wait in memory until there is room")

    def close(self) -> None:
        """Write what waits.

        Raises:
            ConfigError: there is no room for it still.
        """
        try:
            self._write(durably=False)
        finally:
            self._file.close()

    def _write(self, durably: bool) -> None:
        while self._waiting:
            append_row(self._file, self._waiting[0])
            del self._waiting[0]
        if durably:
            with writing(Path(str(self._file.name)), "--out"):
                os.fsync(self._file.fileno())


def _is_full(exc: ConfigError) -> bool:
    return isinstance(exc.__cause__, OSError) and exc.__cause__.errno in FULL_DISK


def append_row(file: FileIO, row: Row) -> None:
    """Add a line of JSON, whole or not at all.

    Raises:
        ConfigError: it cannot be written.
    """
    start, left = file.tell(), memoryview(json.dumps(row, allow_nan=False).encode() + b"\n")
    with writing(Path(str(file.name)), "--out"):
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            file.seek(start)
            file.truncate()
            raise


def _split(file: Path, last: int) -> tuple[list[dict[str, Any]], Sequence[dict[str, Any] | str]]:
    """Rows up to step `last`, and what comes after, with what is no row: half of one, or what a power cut left."""
    kept: list[dict[str, Any]] = []
    after: list[dict[str, Any] | str] = []
    text = file.read_bytes().decode("utf-8", "replace") if file.is_file() else ""
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            after.append(line)
        elif row["step"] <= last:
            kept.append(row)
        else:
            after.append(row)
    return kept, after


def _append_durably(path: Path, line: Row) -> int:
    """Add the line; how many there are then."""
    with path.open("a+b", buffering=0) as file:
        file.seek(0)
        before = file.read()
        if before and not before.endswith(b"\n"):  # half of a line
            file.write(b"\n")
        append_row(file, line)
        os.fsync(file.fileno())
        return len(before.splitlines()) + 1


def _replace_durably(path: Path, rows: Sequence[Row]) -> None:
    """The whole file, or what it was; its name is durable when the folder is."""
    written = path.with_name(f".{path.name}.part")
    with written.open("wb", buffering=0) as file:
        for row in rows:
            append_row(file, row)
        os.fsync(file.fileno())
    written.replace(path)


def _unused(path: Path) -> Path:
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free

"""Checkpoints of a folder as rows, and whether one is as it was written.

`list_checkpoints` reads what describes checkpoints, and the ends of their files: a file that is missing, cut short or
another one is seen, a flipped bit in a tensor is not. `Verification` reads everything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from netlayer.errors import ConfigError
from netlayer.units import format_size
from trainer.checkpoint.file import DIGESTS, TensorFile, header_digest
from trainer.checkpoint.meta import check_ends, find, undamaged
from trainer.checkpoint.names import (
    META,
    METADATA,
    PENDING,
    as_location,
    checkpoints_in,
    halves_in,
    pending_in,
    step_of,
)
from trainer.checkpoint.reader import open_checkpoint, open_found
from trainer.checkpoint.safetensors_files import SafetensorsFiles
from trainer.history import CHECKPOINTS

FIELD = "DIR"


@dataclass(frozen=True)
class Row:
    """A checkpoint, or what is left of one.

    Args:
        name: of its folder.
        step: after which it was saved.
        format: of its files; None: nobody can say.
        layout: tensor-parallel and pipeline degree of the job that wrote it.
        num_parameters: elements of the model.
        content: `model`, or `model, optimizer`.
        num_files: in its folder.
        size_bytes: of all its files.
        state: `good`, `pending`, `damaged`, or `part` of a save that was killed.
        detail: what is wrong, in a line.
    """

    name: str
    step: int | None
    format: int | None
    layout: str | None
    num_parameters: int | None
    content: str | None
    num_files: int
    size_bytes: int
    state: str
    detail: str = ""

    def to_row(self) -> dict[str, Any]:
        return asdict(self)


def list_checkpoints(folder: Path) -> list[Row]:
    """Return the checkpoints of a run, of a folder of them, or one, oldest first.

    Raises:
        ConfigError: there are none.
    """
    folder = as_location(folder)
    if (folder / META).is_file() or (folder / METADATA).is_file():
        return [_row(folder, may_be_plain=True)]
    where = folder / CHECKPOINTS if (folder / CHECKPOINTS).is_dir() else folder
    paths = sorted([*checkpoints_in(where), *pending_in(where)], key=lambda path: (step_of(path), path.name))
    rows = [_row(path) for path in paths]
    rows += [Row(path.name, None, None, None, None, None, *_size(path), "part") for path in halves_in(where)]
    if not rows:
        remedy = "give a run such as runs/train-..., its checkpoints folder, or a checkpoint"
        raise ConfigError(FIELD, folder, "holds no checkpoint" if folder.is_dir() else "is no folder", remedy)
    return rows


def _row(path: Path, *, may_be_plain: bool = False) -> Row:
    """Return the row of a checkpoint.

    Args:
        may_be_plain: it may be of torch.distributed.checkpoint alone; one of a run that lacks `meta.json` is damaged.
    """
    has_renames = isinstance(path, Path)  # an object store cannot rename a folder: `trainer.checkpoint.storage`
    try:
        if not may_be_plain and not (path / META).is_file():
            if not has_renames:
                state = "pending" if (path / f"{META}{PENDING}").is_file() else "part"
                return Row(path.name, step_of(path), None, None, None, None, *_size(path), state)
            raise ConfigError(FIELD, path, f"lacks {META}", "")
        meta = find(path, FIELD) if (path / META).is_file() else None
        if meta is not None:
            check_ends(meta)
        source = open_checkpoint(path, FIELD) if meta is None else open_found(meta)
        with source:
            parameters = source.parameters()
            numel = sum(math.prod(source.shape(name)) for name in parameters)
            content = "model" if len(parameters) == len(source.names()) else "model, optimizer"
    except ConfigError as exc:
        digits = path.name.removeprefix("step-").removesuffix(PENDING)
        step = step_of(path) if digits.isdecimal() else None
        return Row(path.name, step, None, None, None, None, *_size(path), "damaged", exc.rule)
    state = "pending" if path.name.endswith(PENDING) else "good"
    if meta is None:
        return Row(path.name, None, None, None, numel, content, *_size(path), state, "of torch.distributed.checkpoint")
    layout = f"tp {meta.tp}, pp {meta.pp}"
    return Row(path.name, meta.step, meta.format, layout, numel, content, *_size(path), state)


def _size(path: Path) -> tuple[int, int]:
    """Return the number of files of a folder, and their bytes."""
    sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
    return len(sizes), sum(sizes)


@dataclass(frozen=True)
class Check:
    """A file of a checkpoint, and its damage in a line; empty: there is none."""

    file: str
    damage: str


class Verification:
    """Reads a checkpoint whole: one of ours, of plain torch.distributed.checkpoint, or of safetensors files.

    Args:
        path: of it, or of a run for its newest.

    Raises:
        ConfigError: there is none.
    """

    def __init__(self, path: Path, field: str = "PATH") -> None:
        self._field = field
        self._files: SafetensorsFiles | None = None
        self._file_bytes = 0
        self.has_digests = True
        path = as_location(path)
        is_ours = (path / META).is_file() or (path / METADATA).is_file()
        if not is_ours and (path.is_file() or any(path.glob("*.safetensors"))):
            self._files = SafetensorsFiles(path)
            self.path, self.total_bytes = path, sum(file.stat().st_size for file in self._files.files)
            self.has_digests = DIGESTS in self._files.metadata
            return
        self._source = open_checkpoint(path, field)
        self.path, self.has_digests = self._source.path, self._source.meta is not None
        self.total_bytes = _size(self.path)[1]

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors so far, for who shows progress."""
        return self._file_bytes if self._files is not None else self._source.bytes_read

    def checks(self) -> Iterator[Check]:
        """Read, and yield each file as it is done."""
        if self._files is None:
            for name, damage in self._source.verify():
                yield Check(name, damage)
            return
        for file in self._files.files:
            try:
                self._read_file(file)
                yield Check(file.name, "")
            except ConfigError as exc:
                yield Check(file.name, exc.rule)

    def _read_file(self, file: Path) -> None:
        """Read a safetensors file; with digests where we have written it."""
        assert self._files is not None
        if not self.has_digests:
            for name in self._files.names_in(file):
                self._file_bytes += self._files[name].clone().nbytes  # a view would read nothing
            return
        with undamaged(self._field, file):
            tensors = TensorFile(file, header_digest(file))
            for name in tensors.names():
                self._file_bytes += tensors[name].nbytes
                tensors.release()

    def line(self, checks: Sequence[Check]) -> str:
        """Return the verdict in a line, where nothing is damaged."""
        size = format_size(self.total_bytes)
        if not self.has_digests:
            return f"{self.path}: {len(checks)} files, {size}, readable; there are no digests to compare with"
        return f"{self.path}: {len(checks)} files, {size}, all as they were written"


def to_json(verification: Verification, checks: Sequence[Check]) -> str:
    """Return the result as JSON."""
    facts = {
        "path": str(verification.path),
        "size_bytes": verification.total_bytes,
        "has_digests": verification.has_digests,
        "is_good": not any(check.damage for check in checks),
        "files": [asdict(check) for check in checks],
    }
    return json.dumps(facts, indent=1) + "\n"

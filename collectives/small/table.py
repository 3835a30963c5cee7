"""Table of the path that a small collective takes, by kind, size and number of ranks.

A table is data: JSON that can be kept and given to `SmallCollectives`. `DEFAULT_TABLE` was measured on 4 x H200; for
another machine or another number of ranks, `tuner.tune` measures one. Not covered: tables for data types and for
streams that compute at the same time (it is of bfloat16, on GPUs that do nothing else).
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator

from collectives.small.path import KINDS, Kind, PathName
from netlayer.errors import ConfigError
from netlayer.results import write_text

DEFAULT_MAX_BYTES = 256 * 1024

_Positive = Annotated[int, Field(ge=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Choice(_Strict):
    """Messages of up to so many bytes, and above the choice before, take this path. Sizes are of the whole buffer."""

    up_to_bytes: _Positive
    path: PathName


class Entry(_Strict):
    """The choices for one kind and number of ranks, in ascending order; larger messages take `nccl`."""

    kind: Kind
    num_ranks: _Positive
    choices: tuple[Choice, ...]

    @model_validator(mode="after")
    def _ascending(self) -> Entry:
        sizes = [choice.up_to_bytes for choice in self.choices]
        if any(low >= high for low, high in itertools.pairwise(sizes)):
            raise ValueError(f"up_to_bytes must ascend, got {sizes}")
        return self


class Measured(_Strict):
    """One figure behind a table: the median time of a launch in a replayed graph."""

    kind: Kind
    num_ranks: _Positive
    num_bytes: _Positive
    path: PathName
    median_us: Annotated[float, Field(gt=0)]


class TuningTable(_Strict):
    """The tuned table.

    Args:
        source: where it comes from: devices, versions, how it was measured.
        measured_on: date, ISO 8601.
        entries: one for each kind and number of ranks.
        skipped: paths that could not be measured, and why.
        figures: what was measured.
    """

    source: str
    measured_on: str
    entries: tuple[Entry, ...]
    # The second name is that of tables before 0.3, read until 0.5.
    skipped: dict[PathName, str] = Field({}, validation_alias=AliasChoices("skipped", "left_out"))
    figures: tuple[Measured, ...] = ()

    @model_validator(mode="after")
    def _distinct(self) -> TuningTable:
        keys = [(entry.kind, entry.num_ranks) for entry in self.entries]
        if len(keys) != len(set(keys)):
            raise ValueError("entries must differ in kind or num_ranks")
        return self

    def choices(self, kind: Kind, num_ranks: int) -> tuple[Choice, ...]:
        """Return the choices for this number of ranks; else those of the nearest number, the smaller of two."""
        entries = [entry for entry in self.entries if entry.kind == kind]
        nearest = min(entries, key=lambda entry: (abs(entry.num_ranks - num_ranks), entry.num_ranks), default=None)
        return () if nearest is None else nearest.choices

    def choose(self, kind: Kind, num_ranks: int, num_bytes: int) -> PathName:
        """The path of a message of so many bytes."""
        choices = self.choices(kind, num_ranks)
        return next((choice.path for choice in choices if num_bytes <= choice.up_to_bytes), "nccl")

    def is_measured(self, num_ranks: int) -> bool:
        """Whether the table is of this many ranks, for all kinds."""
        return {entry.kind for entry in self.entries if entry.num_ranks == num_ranks} == set(KINDS)

    def to_json(self) -> str:
        return self.model_dump_json(indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, origin: object = "the tuned table") -> TuningTable:
        """Read what `to_json` wrote.

        Args:
            origin: for the message, such as the file.

        Raises:
            ConfigError: it is no table.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as exc:
            first = exc.errors()[0]
            where = ".".join(map(str, first["loc"])) or "table"
            rule = f"{first['msg']} (in {origin})"
            raise ConfigError(
                where, None, rule, "give a file that `python -m bench.small_messages --tune` wrote"
            ) from exc

    def save(self, file: Path) -> None:
        """Write the JSON; a ConfigError where that cannot be."""
        write_text(file, self.to_json())

    @classmethod
    def load(cls, file: Path) -> TuningTable:
        """Read a JSON file; a ConfigError where that cannot be, or where it is no table."""
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as exc:
            raise ConfigError("table", file, f"cannot be read ({exc.strerror})", "give a file of --tune") from exc
        return cls.from_json(text, file)


_UP_TO_64K, _UP_TO_256K = 64 * 1024, 256 * 1024

DEFAULT_TABLE = TuningTable(
    source="4 x NVIDIA H200 (NVLink 4), torch 2.11, NCCL 2.28.9, bfloat16, graphs of 20 launches, sizes of factor 4",
    measured_on="2026-11-21",
    entries=(
        Entry(
            kind="all_reduce",
            num_ranks=4,
            choices=(
                Choice(up_to_bytes=_UP_TO_64K, path="one_shot"),
                Choice(up_to_bytes=_UP_TO_256K, path="two_shot"),
            ),
        ),
        Entry(kind="all_gather", num_ranks=4, choices=(Choice(up_to_bytes=_UP_TO_256K, path="one_shot"),)),
        Entry(kind="reduce_scatter", num_ranks=4, choices=(Choice(up_to_bytes=_UP_TO_256K, path="one_shot"),)),
    ),
)
"""Measured for 4 ranks alone. Other numbers of ranks take the same choices, which is not measured; `tune` does that."""

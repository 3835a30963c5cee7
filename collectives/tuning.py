"""Which path a small collective takes, by kind, size and number of ranks: a table, and how one is measured.

A table is data: JSON that can be kept and given to `SmallCollectives`. `DEFAULT_TABLE` was measured on 4 x H200; for
another machine or another number of ranks, `tune` measures one. Left out: tuning for data types and for streams that
compute beside (the table is of bfloat16, on GPUs that do nothing else).
"""

from __future__ import annotations

import itertools
import logging
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path as File
from typing import Annotated

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from collectives.small_paths import KINDS, PATHS, Kind, Path, PathName, open_paths
from collectives.small_trial import Replay, Trial, is_right, make_replay, time_in_turn
from netlayer.errors import ConfigError
from netlayer.results import write_text

logger = logging.getLogger(__name__)

DEFAULT_MAX_BYTES = 256 * 1024
MIN_BYTES = 1024
_PART_BYTES = 16

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
        left_out: paths that could not be measured, and why.
        figures: what was measured.
    """

    source: str
    measured_on: str
    entries: tuple[Entry, ...]
    left_out: dict[PathName, str] = {}
    figures: tuple[Measured, ...] = ()

    @model_validator(mode="after")
    def _distinct(self) -> TuningTable:
        keys = [(entry.kind, entry.num_ranks) for entry in self.entries]
        if len(keys) != len(set(keys)):
            raise ValueError("entries must differ in kind or num_ranks")
        return self

    def choices(self, kind: Kind, num_ranks: int) -> tuple[Choice, ...]:
        """Those measured for this many ranks; else those of the nearest number of ranks, the smaller of two."""
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

    def save(self, file: File) -> None:
        """Write the JSON; a ConfigError where that cannot be."""
        write_text(file, self.to_json())

    @classmethod
    def load(cls, file: File) -> TuningTable:
        """Read a JSON file; a ConfigError where that cannot be, or where it is no table."""
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as exc:
            raise ConfigError("table", file, f"cannot be read ({exc.strerror})", "give a file of --tune") from exc
        return cls.from_json(text, file)


def tune(
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
    launches: int = 20,
    replays: int = 7,
    rounds: int = 3,
) -> TuningTable:
    """Measure all paths that this group has, and choose the fastest for each kind and size. Every rank gets the same.

    Sizes double from 1 KiB to `max_bytes`; data are bfloat16; a size between two is taken for the larger. A path counts
    with what it needs beside, such as copies into its windows. One whose data comes out wrong is left out.

    Args:
        launches: in a captured graph; replays: timed a round; rounds: the paths take turns.
    """
    num_ranks = dist.get_world_size(group)
    paths, left_out = open_paths(PATHS, group, device, max_bytes)
    sizes = [MIN_BYTES << power for power in range(max_bytes.bit_length()) if MIN_BYTES << power <= max_bytes]
    figures: list[Measured] = []
    for kind, num_bytes in itertools.product(KINDS, sizes):
        able = {name: path for name, path in paths.items() if name not in left_out}
        trials = _trials(kind, num_bytes, able, group, device)
        calls, refused = _checked_replays(trials, launches, group, device)
        left_out |= refused
        times = time_in_turn(calls, group, device, launches, replays, rounds)
        medians = {name: statistics.median(itertools.chain(*found)) for name, found in times.items()}
        figures += [
            Measured(kind=kind, num_ranks=num_ranks, num_bytes=num_bytes, path=name, median_us=us)
            for name, us in medians.items()
        ]
    # A path that failed once is trusted nowhere.
    figures = [figure for figure in figures if figure.path not in left_out]
    return TuningTable(
        source=describe(device, num_ranks, launches),
        measured_on=datetime.now(UTC).date().isoformat(),
        entries=tuple(fastest(figures, kind, num_ranks) for kind in KINDS),
        left_out=left_out,
        figures=tuple(figures),
    )


def fastest(figures: Sequence[Measured], kind: Kind, num_ranks: int) -> Entry:
    """The fastest path of each size that was measured, as choices."""
    mine = [figure for figure in figures if (figure.kind, figure.num_ranks) == (kind, num_ranks)]
    chosen = []
    for num_bytes in sorted({figure.num_bytes for figure in mine}):
        best = min((one for one in mine if one.num_bytes == num_bytes), key=lambda one: one.median_us)
        chosen.append(Choice(up_to_bytes=num_bytes, path=best.path))
    return Entry(kind=kind, num_ranks=num_ranks, choices=_merge(chosen))


def describe(device: torch.device, num_ranks: int, launches: int) -> str:
    """What a table was measured on."""
    if device.type != "cuda":
        return f"{num_ranks} ranks on {device.type}, torch {torch.__version__}, loops of {launches} launches"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    name = torch.cuda.get_device_name(device)
    return f"{num_ranks} x {name}, torch {torch.__version__}, NCCL {nccl}, bfloat16, graphs of {launches} launches"


def buffer_sizes(kind: Kind, num_bytes: int, num_ranks: int) -> tuple[int, int]:
    """Bytes that a rank gives and gets, of a collective whose whole buffer has `num_bytes`.

    Parts are rounded down to 16 bytes, as nccl-tests do.
    """
    part = num_bytes // num_ranks // _PART_BYTES * _PART_BYTES
    whole = part * num_ranks
    return {"all_reduce": (num_bytes, num_bytes), "all_gather": (part, whole), "reduce_scatter": (whole, part)}[kind]


def trial_of(path: Path, kind: Kind, source: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup) -> Trial:
    """A trial of a path on these tensors; an all-reduce is one of `source`, in place."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    if kind == "all_reduce":
        return Trial(kind, source, source, lambda: path.all_reduce(source), rank, num_ranks)
    if kind == "all_gather":
        return Trial(kind, source, out, lambda: path.all_gather(out, source), rank, num_ranks)
    return Trial(kind, source, out, lambda: path.reduce_scatter(out, source), rank, num_ranks)


def _trials(
    kind: Kind, num_bytes: int, paths: dict[PathName, Path], group: dist.ProcessGroup, device: torch.device
) -> dict[PathName, Trial]:
    dtype = torch.bfloat16
    sizes = buffer_sizes(kind, num_bytes, dist.get_world_size(group))
    source, out = (torch.empty(size // dtype.itemsize, dtype=dtype, device=device) for size in sizes)
    able = {name: path for name, path in paths.items() if path.takes(kind, dtype, max(sizes))}
    return {name: trial_of(path, kind, source, out, group) for name, path in able.items()}


def _checked_replays(
    trials: dict[PathName, Trial], launches: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[dict[PathName, Replay], dict[PathName, str]]:
    """Replays of the paths whose data is right, and what is amiss with the others."""
    calls: dict[PathName, Replay] = {}
    refused: dict[PathName, str] = {}
    for name, trial in trials.items():
        what = f"{trial.kind} of {max(trial.source.nbytes, trial.out.nbytes)} bytes"
        try:
            replay = make_replay(trial.launch, launches, device)
        except RuntimeError as exc:
            refused[name] = f"{what} cannot be launched or captured: {str(exc).partition(chr(10))[0]}"
        else:
            if is_right(trial, replay, launches, group):
                calls[name] = replay
            else:
                refused[name] = f"{what} gave wrong data"
        if name in refused:
            logger.error("path %s is left out: %s", name, refused[name])
    return calls, refused


def _merge(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """The same, without a size whose successor takes the same path."""
    following = itertools.zip_longest(choices, choices[1:])
    return tuple(choice for choice, after in following if after is None or choice.path != after.path)


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

"""Summary of the rows of `bench.small_messages`: ours against the best of the others, in words and as a verdict.

A row's `table` is `time` (one system, one collective and size), `speed_up`, `geometric_mean`, `kernel` (which one NCCL
ran on windows), or `skipped`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from netlayer.errors import CheckFailed
from netlayer.units import format_size

KINDS = ("all_reduce", "all_gather", "reduce_scatter")
SMALL_BYTES = tuple(1024 * 4**power for power in range(5))  # 1 KiB to 256 KiB
LARGE_BYTES = 64 << 20
OURS, NCCL = "ours", "nccl"

Row = dict[str, Any]
"""Columns of a record, as a rank reports them and a record keeps them."""


@dataclass(frozen=True)
class TimeFigures:
    """Statistics of all replays of one system, of a launch; times in microseconds, bandwidths in GB/s.

    Args:
        round_medians_us: of each round; `replays_us` its replays.
        num_replays: of all rounds together.
        host_bound: the host launched a replay later than the device was ready for it.
    """

    median_us: float
    p99_us: float
    min_us: float
    max_us: float
    round_medians_us: Sequence[float]
    alg_bw_gbs: float
    bus_bw_gbs: float
    num_replays: int
    replays_us: Sequence[Sequence[float]]
    host_bound: bool


class _TableRow:
    """Row of one of a record's tables."""

    table: ClassVar[str]

    def to_row(self) -> Row:
        """Return the columns of a record."""
        return {"table": self.table, **asdict(self)}  # type: ignore[call-overload]


@dataclass(frozen=True)
class TimeRow(_TableRow):
    """One system on one collective and size; without figures where its data was wrong."""

    table = "time"
    kind: str
    num_bytes: int
    system: str
    variant: str
    wrong: bool
    dtype: str
    figures: TimeFigures | None = None

    def to_row(self) -> Row:
        """Return the columns of a record."""
        columns = super().to_row()
        return columns | (columns.pop("figures") or {})


@dataclass(frozen=True)
class SkippedRow(_TableRow):
    """A system, or a collective and size, that was not measured, and why; `wrong` and `dtype` of a system's variant."""

    table = "skipped"
    system: str
    reason: str
    out_of_time: bool | None = None
    wrong: bool | None = None
    dtype: str | None = None

    def to_row(self) -> Row:
        """Return the columns of a record, without those that are None."""
        return {name: value for name, value in super().to_row().items() if value is not None}


@dataclass(frozen=True)
class KernelRow(_TableRow):
    """NCCL's kernel on registered windows; both None where the profiler did not see it."""

    table = "kernel"
    kind: str
    num_bytes: int
    kernel: str | None
    on_windows: bool | None


@dataclass(frozen=True)
class SpeedUpRow(_TableRow):
    """Ours beside the best of the others on one collective and size; `bus_bw_of_nccl`: None for small ones."""

    table = "speed_up"
    kind: str
    num_bytes: int
    ours_us: float
    best_other: str
    best_other_us: float
    speed_up: float
    bus_bw_of_nccl: float | None


@dataclass(frozen=True)
class MeanRow(_TableRow):
    """Geometric mean of the speed-ups of one collective, or of `all`, up to 256 KiB."""

    table = "geometric_mean"
    kind: str
    num_sizes: int
    speed_up: float


def summarise(rows: Sequence[Row]) -> list[Row]:
    """Compare ours with the best other at each size; the geometric means up to 256 KiB; the bandwidth from 64 MiB on.

    No rows where there was nothing to compare, or no right data.
    """
    timed = [row for row in rows if row["table"] == "time" and not row["wrong"]]
    compared: list[SpeedUpRow] = []
    for kind in KINDS:
        for num_bytes in sorted({row["num_bytes"] for row in timed if row["kind"] == kind}):
            compared += _compare([row for row in timed if (row["kind"], row["num_bytes"]) == (kind, num_bytes)])
    small = [row for row in compared if row.num_bytes <= SMALL_BYTES[-1]]
    means = [_mean(kind, [row for row in small if row.kind == kind]) for kind in KINDS]
    return [row.to_row() for row in (*compared, *means, _mean("all", small)) if row is not None]


def judge(rows: Sequence[Row], min_speed_up: float | None) -> None:
    """End well, or say what is wrong.

    Raises:
        CheckFailed: data was wrong, or time ran out, or the speed-up is missed, or was asked for and not measured.
    """
    wrong = [f"{row['kind']} of {row['num_bytes']} bytes by {_name(row)}" for row in rows if row.get("wrong")]
    if wrong:
        raise CheckFailed(f"wrong data: {'; '.join(wrong)}")
    if late := [row["system"] for row in rows if row.get("out_of_time")]:
        raise CheckFailed(f"time ran out before {late[0]} and {len(late) - 1} more; raise --limit-s, or lower --sizes")
    if min_speed_up is None:
        return
    speed_up = next(
        (row["speed_up"] for row in rows if (row["table"], row.get("kind")) == ("geometric_mean", "all")), None
    )
    if speed_up is None:
        raise CheckFailed("--min-speed-up was given, and there was nothing to compare with")
    if speed_up < min_speed_up:
        raise CheckFailed(f"the speed-up over the best of the others is {speed_up:.3f}, below {min_speed_up:g}")


def format_row(row: Row) -> str:
    """One line of a row, for a person."""
    size = f"{row.get('kind', ''):14} {format_size(row['num_bytes']) if 'num_bytes' in row else '':>8}"
    if row["table"] == "skipped":
        return f"omitted: {row['system']}: {row['reason']}"
    if row["table"] == "kernel":
        return f"{size}  nccl_windows: {row['kernel'] or 'kernel not seen'}"
    if row["table"] == "figure":
        return f"{size}  tuning: {row['path']:20} {row['median_us']:9.2f} us"
    if row["table"] == "time":
        if row["wrong"]:
            return f"{size}  {_name(row):42} WRONG DATA"
        figures = f"{row['median_us']:9.2f} us  p99 {row['p99_us']:9.2f}  {row['bus_bw_gbs']:7.2f} GB/s"
        spread = f"rounds {min(row['round_medians_us']):.2f} to {max(row['round_medians_us']):.2f}"
        spread += ", host-bound" * row["host_bound"]
        return f"{size}  {_name(row):42} {figures}  {spread}"
    if row["table"] == "speed_up":
        beside = f"{row['best_other']} {row['best_other_us']:.2f} us"
        share = f", {row['bus_bw_of_nccl']:.3f} of NCCL's bandwidth" if row["bus_bw_of_nccl"] is not None else ""
        return f"{size}  ours {row['ours_us']:9.2f} us, {beside}: {row['speed_up']:.2f}x{share}"
    return f"{row['kind']:14} geometric mean of {row['num_sizes']} up to 256 KiB: {row['speed_up']:.2f}x"


def format_summary(rows: Sequence[Row]) -> list[str]:
    """Return the lines of the final summary."""
    lines = [format_row(row) for row in rows if row["table"] not in ("time", "kernel")]
    if not any(row["table"] == "speed_up" for row in rows):
        lines = [*map(format_row, rows), "one system alone: there was nothing to compare"]
    windows = [row for row in rows if row["table"] == "kernel"]
    if windows:
        used = sum(bool(row["on_windows"]) for row in windows)
        unknown = sum(row["on_windows"] is None for row in windows)
        basis = f"not known of {unknown}" if unknown else "by the kernels' names"
        lines.append(f"nccl_windows: {used} of {len(windows)} ran NCCL's symmetric kernels ({basis})")
    return lines


def _compare(rows: Sequence[Row]) -> list[SpeedUpRow]:
    """The row of one kind and size; none where there is nothing to compare."""
    ours = next((row for row in rows if row["system"] == OURS), None)
    best = min((row for row in rows if row["system"] != OURS), key=lambda row: float(row["median_us"]), default=None)
    if ours is None or best is None:
        return []
    nccl = next((row for row in rows if row["system"] == NCCL), None)
    is_large = ours["num_bytes"] >= LARGE_BYTES
    return [
        SpeedUpRow(
            ours["kind"],
            ours["num_bytes"],
            ours_us=ours["median_us"],
            best_other=_name(best),
            best_other_us=best["median_us"],
            speed_up=best["median_us"] / ours["median_us"],
            bus_bw_of_nccl=ours["bus_bw_gbs"] / nccl["bus_bw_gbs"] if nccl and is_large else None,
        )
    ]


def _mean(kind: str, compared: Sequence[SpeedUpRow]) -> MeanRow | None:
    if not compared:
        return None
    return MeanRow(kind, len(compared), statistics.geometric_mean(row.speed_up for row in compared))


def _name(row: Row) -> str:
    return f"{row['system']} {row['variant']}".strip()

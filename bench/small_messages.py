"""`python -m bench.small_messages`: latency of small collectives, ours beside NCCL's and torch's, in CUDA graphs.

Compared, in turn and on the same data: our `SmallCollectives`; NCCL as torch.distributed calls it (`nccl`); NCCL on
tensors that lie in symmetric windows (`nccl_windows`); each of torch's symmetric-memory operations for the collective
(`torch_symmetric`). Peers get their tensors where they want them, so no copy counts against them. A time is that of a
replayed graph of many launches over the launches, the longest of the ranks; it counts once the data of the graph was
right. The largest sizes show what ours costs where it leaves a message to NCCL. Left out: multicast, and several hosts.

On gloo there is nothing to compare: the one system there is measured, by the host's clock.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click

from netlayer import environ
from netlayer.command import RunOptions, open_out, run_options
from netlayer.errors import CheckFailed, ConfigError
from netlayer.launch import detect, launch
from netlayer.meeting import meeting_place
from netlayer.rank import RankContext
from netlayer.results import RunRecord, check_target, utc_now, write_text
from netlayer.units import parse_size

KINDS = ("all_reduce", "all_gather", "reduce_scatter")
SMALL_BYTES = tuple(1024 * 4**power for power in range(5))  # 1 KiB to 256 KiB
LARGE_BYTES = (64 << 20, 256 << 20)
SIZES = (*SMALL_BYTES, 1 << 20, *LARGE_BYTES)
OURS, NCCL = "ours", "nccl"
MAX_RANKS = 8  # that our kernels and windows serve

Row = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Args:
        sizes: bytes of the whole buffer, as nccl-tests count them.
        launches: of a collective in one graph.
        replays: timed in a round; a third of them from 64 MiB on.
        rounds: how often the systems take turns.
        max_bytes: larger messages ours leaves to NCCL.
        table: the tuned table for ours, as JSON; empty: the default one.
        tune: measure a table first, and use that.
    """

    sizes: tuple[int, ...] = SIZES
    launches: int = 20
    replays: int = 15
    rounds: int = 3
    max_bytes: int = SMALL_BYTES[-1]
    table: str = ""
    tune: bool = False


class Outcome(NamedTuple):
    """What a rank has measured; all ranks have the same, but for `device`."""

    rows: list[Row]
    table: str
    device: str
    versions: dict[str, str]


class _Size(click.ParamType[int]):
    """One size as nccl-tests write it."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            size = value if isinstance(value, int) else parse_size(str(value))
        except ValueError as exc:
            self.fail(f"{value!r}: {exc}", param, ctx)
        if size < 1024 or size % 1024:
            self.fail(f"{value!r}: must be a multiple of 1 KiB, so that the ranks can share it", param, ctx)
        return size


class _Sizes(click.ParamType[tuple[int, ...]]):
    """Several, with commas between."""

    name = "SIZE,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        parts = str(value).split(",")
        return tuple(sorted({_Size().convert(part, param, ctx) for part in parts}))


@click.command(
    epilog="""\b
Examples:
  python -m bench.small_messages --json small.json
  python -m bench.small_messages --tune table.json --min-speed-up 1.25
  python -m bench.small_messages --table table.json --sizes 1K,16K,256K
"""
)
@run_options
@click.option("--ranks", type=click.IntRange(2, MAX_RANKS), help="Processes on this machine [the GPUs, or 2].")
@click.option("--backend", type=click.Choice(["auto", "gloo", "nccl"]), default="auto", show_default=True)
@click.option("--sizes", type=_Sizes(), help="Whole buffers [1K to 256K by 4, 1M, 64M, 256M; on gloo up to 1M].")
@click.option("--launches", type=click.IntRange(min=1), default=20, show_default=True, help="In one graph.")
@click.option("--replays", type=click.IntRange(min=5), default=15, show_default=True, help="Timed in a round.")
@click.option("--rounds", type=click.IntRange(min=3), default=3, show_default=True, help="Turns of each system.")
@click.option("--max-bytes", type=_Size(), default="256K", show_default=True, help="Larger ones ours leaves to NCCL.")
@click.option("--table", type=click.Path(path_type=Path), help="Tuned table for ours [the one that is shipped].")
@click.option("--tune", type=click.Path(path_type=Path), help="Tune for this machine first, and write the table here.")
@click.option("--min-speed-up", type=float, help="Fail where the geometric mean over all small sizes is below.")
def command(
    options: RunOptions,
    ranks: int | None,
    backend: str,
    sizes: tuple[int, ...] | None,
    table: Path | None,
    tune: Path | None,
    min_speed_up: float | None,
    **given: int,
) -> None:
    """Compare the latency of small collectives; exit 1 where data is wrong or ours too slow."""
    _check(options, table, tune)
    chosen = _choose_backend(backend, ranks)
    ranks = ranks or (min(len(environ.usable_gpus()), MAX_RANKS) if chosen == "nccl" else 2)
    settings = Settings(
        sizes or (SIZES if chosen == "nccl" else tuple(size for size in SIZES if size < LARGE_BYTES[0])),
        table="" if table is None else _read_table(table),
        tune=tune is not None,
        **given,
    )
    out, started = open_out(options.out, "small_messages"), utc_now()
    with meeting_place() as place:
        outcomes = launch(
            run,
            ranks,
            args=(settings, place.init_method("small_messages"), chosen),
            log_dir=out / "logs",
            on_message=lambda _rank, row: click.echo(format_row(row), err=True),
        )
    first = outcomes[0]
    rows = [*first.rows, *summarise(first.rows)]
    record = RunRecord(
        name="bench.small_messages",
        source="measured",
        rows=rows,
        started_utc=started,
        ended_utc=utc_now(),
        arguments={**options.arguments(), **asdict(settings), "ranks": ranks, "backend": chosen},
        config={"table": first.table, "versions": first.versions},
        environment=environ.snapshot(options.seed),
        devices=[outcome.device for outcome in outcomes],
    )
    click.echo(f"record: {record.save(out / 'records')}", err=True)
    if tune is not None:
        write_text(tune, first.table)
    if options.json_file:
        write_text(options.json_file, record.to_json())
    if str(options.json_file) != "-":
        for line in format_summary(rows):
            click.echo(line)
    judge(rows, min_speed_up)


def run(context: RankContext, settings: Settings, url: str, backend: str) -> Outcome:
    """One rank; torch is imported here, and not by who launches."""
    from bench.small_systems import run_rank

    return run_rank(context, settings, url, backend)


def summarise(rows: Sequence[Row]) -> list[Row]:
    """Ours beside the best of the others at each size; the geometric means up to 256 KiB; the bandwidth from 64 MiB on.

    No rows where there was nothing to compare, or no right data.
    """
    timed = [row for row in rows if row["table"] == "time" and not row["wrong"]]
    compared: list[Row] = []
    for kind in KINDS:
        for num_bytes in sorted({row["num_bytes"] for row in timed if row["kind"] == kind}):
            compared += _compare([row for row in timed if (row["kind"], row["num_bytes"]) == (kind, num_bytes)])
    small = [row for row in compared if row["num_bytes"] <= SMALL_BYTES[-1]]
    means = [_mean(kind, [row for row in small if row["kind"] == kind]) for kind in KINDS]
    return [*compared, *filter(None, means), *filter(None, [_mean("all", small)])]


def judge(rows: Sequence[Row], min_speed_up: float | None) -> None:
    """End well, or say what is wrong.

    Raises:
        CheckFailed: data was wrong, or the speed-up is missed, or was not measured although it was asked for.
    """
    wrong = [f"{row['kind']} of {row['num_bytes']} bytes by {_name(row)}" for row in rows if row.get("wrong")]
    if wrong:
        raise CheckFailed(f"wrong data: {'; '.join(wrong)}")
    if min_speed_up is None:
        return
    found = next(
        (row["speed_up"] for row in rows if (row["table"], row.get("kind")) == ("geometric_mean", "all")), None
    )
    if found is None:
        raise CheckFailed("--min-speed-up was given, and there was nothing to compare with")
    if found < min_speed_up:
        raise CheckFailed(f"the speed-up over the best of the others is {found:.3f}, below {min_speed_up:g}")


def format_row(row: Row) -> str:
    """One line of a row, for a person."""
    size = f"{row.get('kind', ''):14} {_shown(row['num_bytes']) if 'num_bytes' in row else '':>8}"
    if row["table"] == "left_out":
        return f"left out: {row['system']}: {row['reason']}"
    if row["table"] == "time":
        if row["wrong"]:
            return f"{size}  {_name(row):42} WRONG DATA"
        figures = f"{row['median_us']:9.2f} us  p99 {row['p99_us']:9.2f}  {row['bus_bw_gbs']:7.2f} GB/s"
        spread = f"rounds {min(row['round_medians_us']):.2f} to {max(row['round_medians_us']):.2f}"
        return f"{size}  {_name(row):42} {figures}  {spread}"
    if row["table"] == "speed_up":
        beside = f"{row['best_other']} {row['best_other_us']:.2f} us"
        share = f", {row['bus_bw_of_nccl']:.3f} of NCCL's bandwidth" if row["bus_bw_of_nccl"] is not None else ""
        return f"{size}  ours {row['ours_us']:9.2f} us, {beside}: {row['speed_up']:.2f}x{share}"
    return f"{row['kind']:14} geometric mean of {row['num_sizes']} up to 256 KiB: {row['speed_up']:.2f}x"


def format_summary(rows: Sequence[Row]) -> list[str]:
    """What a person wants to see at the end."""
    lines = [format_row(row) for row in rows if row["table"] != "time"]
    if not any(row["table"] == "speed_up" for row in rows):
        lines = [*map(format_row, rows), "one system alone: there was nothing to compare"]
    windows = [row for row in rows if row["table"] == "time" and row["system"] == "nccl_windows"]
    if windows:
        used = sum(bool(row["on_windows"]) for row in windows)
        unknown = sum(row["on_windows"] is None for row in windows)
        said = f"not known of {unknown}" if unknown else "by the kernels' names"
        lines.append(f"nccl_windows: {used} of {len(windows)} ran NCCL's symmetric kernels ({said})")
    return lines


def _compare(rows: Sequence[Row]) -> list[Row]:
    """The row of one kind and size."""
    ours = next((row for row in rows if row["system"] == OURS), None)
    best = min((row for row in rows if row["system"] != OURS), key=lambda row: float(row["median_us"]), default=None)
    if ours is None or best is None:
        return []
    nccl = next((row for row in rows if row["system"] == NCCL), None)
    return [
        {
            "table": "speed_up",
            "kind": ours["kind"],
            "num_bytes": ours["num_bytes"],
            "ours_us": ours["median_us"],
            "best_other": _name(best),
            "best_other_us": best["median_us"],
            "speed_up": best["median_us"] / ours["median_us"],
            "bus_bw_of_nccl": ours["bus_bw_gbs"] / nccl["bus_bw_gbs"]
            if nccl is not None and ours["num_bytes"] >= LARGE_BYTES[0]
            else None,
        }
    ]


def _mean(kind: str, compared: Sequence[Row]) -> Row | None:
    if not compared:
        return None
    mean = statistics.geometric_mean(row["speed_up"] for row in compared)
    return {"table": "geometric_mean", "kind": kind, "num_sizes": len(compared), "speed_up": mean}


def _name(row: Row) -> str:
    return f"{row['system']} {row['variant']}".strip()


def _shown(num_bytes: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:g} {unit}"
    return f"{num_bytes} B"


def _check(options: RunOptions, table: Path | None, tune: Path | None) -> None:
    if options.config_path or options.overrides:
        raise ConfigError("--config / --set", None, "have no effect here", "give --ranks, --sizes and so on")
    if table is not None and tune is not None:
        raise ConfigError("--table", table, "has no effect beside --tune", "give one of the two")
    if (env := detect(os.environ)) is not None:
        raise ConfigError("launcher", env.launcher, "has started this, which starts its ranks itself", "run it alone")
    check_target("--tune", tune)


def _choose_backend(backend: str, ranks: int | None) -> str:
    """`gloo` where there is no pair of GPUs, unless NCCL was asked for."""
    gpus = 0 if backend == "gloo" else len(environ.usable_gpus())
    if backend == "auto" and ranks is None and gpus < 2:
        return "gloo"
    return environ.choose_backend(backend, ranks or max(2, min(gpus, MAX_RANKS)))  # type: ignore[arg-type]


def _read_table(file: Path) -> str:
    from collectives.tuning import TuningTable

    return TuningTable.load(file).to_json()


if __name__ == "__main__":
    from netlayer.cli import run as run_command

    run_command(command, "python -m bench.small_messages")

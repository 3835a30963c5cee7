"""`python -m bench.small_messages`: latency of small collectives, ours against NCCL's and torch's, in CUDA graphs.

Compared, in turn and on the same data: our `SmallCollectives`; NCCL as torch.distributed calls it (`nccl`); NCCL on
tensors that lie in symmetric windows (`nccl_windows`); each of torch's symmetric-memory operations for the collective
(`torch_symmetric`). Peers get their tensors where they want them, so no copy counts against them. A time is that of a
replayed graph of many launches over the launches, the longest of the ranks; it counts once the data of the graph was
right. The largest size shows what ours costs where it leaves a message to NCCL. Every row goes to rows.jsonl in the
output folder as it comes, so that an interrupted run keeps them. Not covered: multicast, and several hosts.

On gloo there is nothing to compare: the one system there is measured, by the host's clock.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click

from bench.small_messages.rows import LARGE_BYTES, SMALL_BYTES, Row, format_row, format_summary, judge, summarise
from netlayer import environ
from netlayer.command import RunOptions, open_out, renamed_option, run_options
from netlayer.errors import ConfigError
from netlayer.launch.launcher import detect, launch
from netlayer.launch.rank import RankContext
from netlayer.results import RunRecord, check_target, utc_now, write_text
from netlayer.store.meeting import meeting_place
from netlayer.units import parse_size

SIZES = (*SMALL_BYTES, 1 << 20, LARGE_BYTES)
MAX_RANKS = 8  # that our kernels and windows serve


@dataclass(frozen=True)
class Settings:
    """Settings of a measurement.

    Args:
        sizes: bytes of the whole buffer, as nccl-tests count them.
        launches: of a collective in one graph; a fifth of them from 64 MiB on.
        replays: timed in a round.
        rounds: how often the systems take turns.
        max_bytes: larger messages ours leaves to NCCL.
        within_s: seconds of the whole command, starting the ranks included; collectives not begun by then are skipped.
        table: the tuned table for ours, as JSON; empty: the default one.
        tune: measure a table first, and use that.
    """

    sizes: tuple[int, ...] = SIZES
    launches: int = 20
    replays: int = 10
    rounds: int = 3
    max_bytes: int = SMALL_BYTES[-1]
    within_s: float = 55.0
    table: str = ""
    tune: bool = False


class Outcome(NamedTuple):
    """Result of a rank, without its rows, which it has reported already."""

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
    """Sizes separated by commas."""

    name = "SIZE,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        parts = str(value).split(",")
        return tuple(sorted({_Size().convert(part, param, ctx) for part in parts}))


@click.command(
    epilog="""\b
Examples:
  python -m bench.small_messages --json small.json
  python -m bench.small_messages --tune table.json --limit-s 90 --min-speed-up 1.25
  python -m bench.small_messages --table table.json --sizes 1K,16K,256K
"""
)
@run_options
@click.option("--ranks", type=click.IntRange(2, MAX_RANKS), help="Processes on this machine [the GPUs, or 2].")
@click.option("--backend", type=click.Choice(["auto", "gloo", "nccl"]), default="auto", show_default=True)
@click.option("--sizes", type=_Sizes(), help="Whole buffers [1K to 256K by 4, 1M, 64M; on gloo up to 1M].")
@click.option("--launches", type=click.IntRange(min=1), default=20, show_default=True, help="In one graph.")
@click.option("--replays", type=click.IntRange(min=5), default=10, show_default=True, help="Timed in a round.")
@click.option("--rounds", type=click.IntRange(min=3), default=3, show_default=True, help="Turns of each system.")
@click.option("--max-bytes", type=_Size(), default="256K", show_default=True, help="Larger ones ours leaves to NCCL.")
@click.option(
    "--limit-s",
    "within_s",
    type=click.FloatRange(min=0, min_open=True),
    default=Settings.within_s,
    show_default=True,
    help="Seconds for all of it; what is not begun by then is omitted, and the exit code 1.",
)
@renamed_option("--within", "--limit-s", "within_s")
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
    **measurement: Any,
) -> None:
    """Compare the latency of small collectives; exit 1 where data is wrong, ours too slow or the time too short."""
    _check(options, table, tune)
    chosen = _choose_backend(backend, ranks)
    ranks = ranks or (min(len(environ.usable_gpus()), MAX_RANKS) if chosen == "nccl" else 2)
    settings = Settings(
        sizes or default_sizes(chosen),
        table="" if table is None else _read_table(table),
        tune=tune is not None,
        **measurement,
    )
    record = measure(settings, ranks, chosen, open_out(options.out, "small_messages"), options.arguments(), tune)
    if options.json_file:
        write_text(options.json_file, record.to_json())
    rows = [dict(row) for row in record.rows]
    if str(options.json_file) != "-":
        for line in format_summary(rows):
            click.echo(line)
    judge(rows, min_speed_up)


def default_sizes(backend: str) -> tuple[int, ...]:
    """CPUs are spared the largest one."""
    return tuple(size for size in SIZES if backend == "nccl" or size < LARGE_BYTES)


def measure(
    settings: Settings, ranks: int, backend: str, out: Path, arguments: Mapping[str, Any], tune_to: Path | None = None
) -> RunRecord:
    """Start the ranks, and measure: the record, which is saved under `out`. Rows are shown on stderr as they come.

    Args:
        out: folder; rows.jsonl in it gets each row at once.
        arguments: further arguments for the record.
        tune_to: where a table that is tuned goes, as soon as it is.
    """
    started, deadline_s = utc_now(), time.monotonic() + settings.within_s
    rows: list[Row] = []

    with (out / "rows.jsonl").open("a", encoding="utf-8", buffering=1) as file, meeting_place() as place:

        def hear(row: Row) -> None:
            if row["table"] == "tuned":
                if tune_to is not None:
                    write_text(tune_to, row["json"])
                return
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            click.echo(format_row(row), err=True)

        outcomes = launch(
            run,
            ranks,
            args=(settings, place.init_method("small_messages"), backend, deadline_s),
            log_dir=out / "logs",
            on_message=lambda _rank, row: hear(row),
        )
    first = outcomes[0]
    rows = [row for row in rows if row["table"] != "figure"]  # the table has them
    record = RunRecord(
        name="bench.small_messages",
        source="measured",
        rows=[*rows, *summarise(rows)],
        started_utc=started,
        ended_utc=utc_now(),
        arguments={**arguments, **asdict(settings), "ranks": ranks, "backend": backend},
        config={"table": first.table, "versions": first.versions},
        environment=environ.snapshot(arguments.get("seed")),
        devices=[outcome.device for outcome in outcomes],
    )
    click.echo(f"record: {record.save(out / 'records')}", err=True)
    return record


def run(context: RankContext, settings: Settings, url: str, backend: str, deadline_s: float) -> Outcome:
    """One rank; torch is imported here, and not by who launches."""
    from bench.small_messages.ranks import run_rank

    return run_rank(context, settings, url, backend, deadline_s)


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
    from collectives.small.table import TuningTable

    return TuningTable.load(file).to_json()

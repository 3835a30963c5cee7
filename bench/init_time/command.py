"""`python -m bench.init_time`: how long it takes until all process groups of a job stand, and what of it is the store.

Three measurements. *Real ranks* (`--real N`) run on this machine from their start to the end of a first step, by the
paper's baseline (a barrier of all ranks after each group, MegaScale, NSDI'24, 3.5), by today's torch, and by
`netlayer.rendezvous` on TCPStore and on Redis. The *store share* (`--ranks`) replays what those ranks said, for
thousands of simulated ranks, against real servers on this machine: no process starts there and no communicator is made.
*One rank's own work* (`--alone`) is what each rank of a large world computes by itself, store and backend faked. What
was measured is kept, whatever ends the run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import click

from bench.init_time import alone as init_alone
from bench.init_time import page as init_page
from bench.init_time import real as init_real
from bench.init_time import share as init_share
from bench.init_time.rows import InitRow, Interrupted, RealRow, RecordedRow, ShareRow, describe
from bench.init_time.server import check_files, check_redis
from bench.init_time.share import MOST_S, Share
from bench.init_time.traffic import StoreName, Way
from netlayer import environ
from netlayer.command import RunOptions, open_out, run_options_without_config
from netlayer.errors import ConfigError
from netlayer.layout import ParallelLayout
from netlayer.progress import Stages
from netlayer.results import RunRecord, utc_now, write_text

_WAYS = (Way("baseline", "tcp"), Way("torch", "tcp"), Way("ours", "tcp"), Way("ours", "redis"))
_DEFAULT_RANKS = "128,2048,12288"
_MOST_THINKING_S = MOST_S / 3


@click.command()
@run_options_without_config
@click.option("--ranks", default=_DEFAULT_RANKS, show_default=True, help="Simulated ranks, with commas; 0: none.")
@click.option("--store", "stores", default="tcp,redis", show_default=True, help="Stores, with commas.")
@click.option("--real", type=click.IntRange(min=0), default=0, show_default=True, help="Real ranks on this machine.")
@click.option(
    "--backend",
    type=click.Choice(["gloo", "nccl"]),
    default="gloo",
    show_default=True,
    help="Of real ranks; fewer GPUs than ranks are shared by virtual nodes.",
)
@click.option("--eager", is_flag=True, help="Real ranks make NCCL's communicators at once.")
@click.option("--alone", default="0", show_default=True, help="Worlds, with commas, of which one rank runs alone.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Turns of each way.")
@click.option(
    "--think",
    "think_s",
    type=click.FloatRange(0, _MOST_THINKING_S),
    default=0.0,
    show_default=True,
    help="Seconds that a simulated rank waits between joining and its groups, as for a bootstrap of NCCL: backend_s of "
    "a run with --real N --backend nccl --eager.",
)
def command(
    options: RunOptions,
    ranks: str,
    stores: str,
    real: int,
    backend: str,
    eager: bool,
    alone: str,
    repeats: int,
    think_s: float,
) -> None:
    """Time and count how the groups of a job are made: paper's baseline, today's torch, ours on TCPStore and Redis.

    \b
    Examples:
      python -m bench.init_time --ranks 128,2048,12288 --store tcp,redis --json init.json
      python -m bench.init_time --ranks 0 --real 8             # 8 gloo ranks, timed and recorded
      python -m bench.init_time --ranks 0 --real 8 --backend nccl --eager
      python -m bench.init_time --ranks 0 --alone 32,2048,12288    # what a rank computes, by size of the world
      python -m bench.init_time --ranks 2048 --think 1.7       # with the time of a bootstrap that was measured
    """
    layouts, ways, layout = _layouts(ranks), _ways(stores), layout_of(real, "--real") if real else None
    alones = _layouts(alone, "--alone")
    _check(layouts, ways, layout, alones, think_s)
    out, started = open_out(options.out, "init_time"), utc_now()
    arguments = {"ranks": ranks, "store": stores, "real": real, "backend": backend, "eager": eager, "alone": alone}
    rows: list[InitRow] = []

    def keep() -> None:
        record = RunRecord(
            name="bench.init_time",
            source="predicted"
            if any(isinstance(row, ShareRow) and row.source == "predicted" for row in rows)
            else "measured",
            rows=[row.to_row() for row in rows],
            started_utc=started,
            ended_utc=utc_now(),
            arguments={**options.arguments(), **arguments, "repeats": repeats, "think_s": think_s},
            config={},
            environment=environ.snapshot(options.seed),
            devices=[f"{gpu.name}" for gpu in environ.list_gpus()] or ["CPU"],
        )
        _write(record, rows, out, options.json_file)

    try:
        with Stages() as stages:
            setting = init_real.Real(layout, backend, eager, out / "logs") if layout else None
            alone_rows = init_alone.rows(alones, repeats, out / "logs")
            share_rows = init_share.rows(Share(repeats, think_s), layouts, ways, stages)
            for row in itertools.chain(_of_real(setting, ways, repeats), alone_rows, share_rows):
                rows.append(row)
                stages.say(describe(row))
    except BaseException as exc:
        if rows:
            rows.append(Interrupted(str(exc) or "interrupted"))
            click.echo("what was measured until then is kept:", err=True)
            keep()
        raise
    keep()
    for line in init_page.summary(rows):
        click.echo(line, err=str(options.json_file) == "-")


def layout_of(ranks: int, field: str = "--ranks") -> ParallelLayout:
    """Return a layout: tp and pp 8 each from 64 ranks on, 2 each from 4 on, else data parallelism alone.

    Raises:
        ConfigError: the ranks cannot be divided so.
    """
    degree = next(degree for degree, least in ((8, 64), (2, 4), (1, 1)) if ranks >= least)
    if ranks % (degree * degree):
        rule = f"must be a multiple of tp {degree} x pp {degree}"
        raise ConfigError(field, ranks, rule, f"give {max(1, ranks // degree**2) * degree**2}")
    return ParallelLayout(tp=degree, pp=degree, dp=ranks // degree**2)


def _of_real(real: init_real.Real | None, ways: Sequence[Way], repeats: int) -> Iterator[RealRow | RecordedRow]:
    if real:
        has_lazy = real.backend == "gloo" and any(way.store == "tcp" for way in ways)
        really = [*ways, *([Way("torch-lazy", "tcp")] if has_lazy else [])]
        yield from init_real.timed(real, really, repeats)
        yield from init_real.recorded(real, really)


def _write(record: RunRecord, rows: Sequence[InitRow], out: Path, json_file: Path | None) -> None:
    click.echo(f"record: {record.save(out / 'records')}", err=True)
    if json_file:
        write_text(json_file, record.to_json())
    click.echo(f"report: {init_page.build_page(rows).write(out)}", err=True)


def _check(
    layouts: Sequence[ParallelLayout],
    ways: Sequence[Way],
    layout: ParallelLayout | None,
    alones: Sequence[ParallelLayout],
    think_s: float,
) -> None:
    """Refuse before the first cell what would fail at the last.

    Raises:
        ConfigError: there is nothing to measure, or this process may not open so many files.
        HardwareMissing: there is no Redis server here.
    """
    if not math.isfinite(think_s):
        raise ConfigError("--think", think_s, "is no length of time", "give seconds")
    if not layouts and layout is None and not alones:
        raise ConfigError(
            "--ranks", 0, "leaves nothing to measure", "give sizes, or real ranks: --real 8, or --alone 32"
        )
    if think_s and not layouts:
        raise ConfigError("--think", think_s, "has no effect on real ranks", "give simulated ones too: --ranks 128")
    if (layouts or layout is not None) and any(way.store == "redis" for way in ways):
        check_redis()
    if layouts:
        check_files(max(layout.world_size for layout in layouts))


def _layouts(text: str, field: str = "--ranks") -> list[ParallelLayout]:
    """Return the layouts of the sizes, each once, the smallest first: a cell is predicted from a smaller one."""
    sizes = set()
    for word in text.split(","):
        if not word.strip().isdecimal():
            raise ConfigError(field, word, "is no whole number", "give numbers with commas, as 128,2048")
        sizes.add(int(word))
    return [layout_of(size, field) for size in sorted(sizes - {0})]


def _ways(text: str) -> list[Way]:
    """Return the ways of starting that use the stores named in `text`, separated by commas."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in get_args(StoreName):
            raise ConfigError("--store", name, "is no store", f"give {' or '.join(get_args(StoreName))}, or both")
    return [way for way in _WAYS if way.store in names]

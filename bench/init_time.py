"""`python -m bench.init_time`: how long it takes until all process groups of a job stand, and what of it is the store.

Two measurements. *Real ranks* (`--real N`) run on this machine from their start to the end of a first step, by the
paper's baseline (a barrier of all ranks after each group, MegaScale, NSDI'24, 3.5), by today's torch, and by
`netlayer.rendezvous` on TCPStore and on Redis. The *store share* (`--ranks`) replays what those ranks said, for
thousands of simulated ranks, against real servers on this machine: no process starts there and no communicator is made.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, get_args

import click

from bench import init_page, init_real
from bench.init_replay import Replayed, replay
from bench.init_traffic import StoreName, Way, backend_operations, operations
from netlayer import environ
from netlayer.command import RunOptions, open_out, run_options_without_config
from netlayer.errors import CheckFailed, ConfigError
from netlayer.layout import ParallelLayout
from netlayer.progress import Bar, Stages
from netlayer.results import RunRecord, utc_now, write_text

Row = dict[str, Any]

_MOST_S = 300.0  # what would take longer comes from the closed form
_WAYS = (Way("baseline", "tcp"), Way("torch", "tcp"), Way("ours", "tcp"), Way("ours", "redis"))
_SPEED = 20_000.0  # operations a second, before any was measured
_DEFAULT_RANKS = "128,2048,12288"


@click.command()
@run_options_without_config
@click.option("--ranks", default=_DEFAULT_RANKS, show_default=True, help="Simulated ranks, with commas; 0: none.")
@click.option("--store", "stores", default="tcp,redis", show_default=True, help="Stores, with commas.")
@click.option("--real", type=click.IntRange(min=0), default=0, show_default=True, help="Real ranks on this machine.")
@click.option(
    "--backend", type=click.Choice(["gloo", "nccl"]), default="gloo", show_default=True, help="Of real ranks."
)
@click.option("--eager", is_flag=True, help="Real ranks make NCCL's communicators at once.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Turns of each way.")
def command(options: RunOptions, ranks: str, stores: str, real: int, backend: str, eager: bool, repeats: int) -> None:
    """Time and count how the groups of a job are made: paper's baseline, today's torch, ours on TCPStore and Redis.

    \b
    Examples:
      python -m bench.init_time --ranks 128,2048,12288 --store tcp,redis --json init.json
      python -m bench.init_time --ranks 0 --real 8             # 8 gloo ranks, timed and recorded
      python -m bench.init_time --ranks 0 --real 8 --backend nccl --eager
    """
    sizes, ways = _sizes(ranks), _ways(stores)
    out, started = open_out(options.out, "init_time"), utc_now()
    asked = {"ranks": ranks, "store": stores, "real": real, "backend": backend, "eager": eager, "repeats": repeats}
    rows: list[Row] = []
    with Stages() as stages:
        if real:
            setting = init_real.Real(layout_of(real, "--real"), backend, eager, out / "logs")
            lazy = [Way("torch-lazy", "tcp")] if backend == "gloo" and "tcp" in stores.split(",") else []
            for row in init_real.timed(setting, [*ways, *lazy], repeats):
                rows.append(_said(row, stages))
            for row in init_real.recorded(setting, [*ways, *lazy]):
                rows.append(_said(row, stages))
        for row in _store_share(sizes, ways, repeats, stages):
            rows.append(_said(row, stages))
    record = RunRecord(
        name="bench.init_time",
        source="measured",
        rows=rows,
        started_utc=started,
        ended_utc=utc_now(),
        arguments={**options.arguments(), **asked},
        config={},
        environment=environ.snapshot(options.seed),
        devices=[f"{gpu.name}" for gpu in environ.list_gpus()] or ["CPU"],
    )
    click.echo(f"record: {record.save(out / 'records')}", err=True)
    click.echo(f"report: {init_page.build_page(rows).write(out)}", err=True)
    if options.json_file:
        write_text(options.json_file, record.to_json())
    for line in init_page.summary(rows):
        click.echo(line)


def layout_of(ranks: int, field: str = "--ranks") -> ParallelLayout:
    """Tensor and pipeline parallelism of 8 each from 64 ranks on, of 2 from 4 on, else data parallelism alone.

    Raises:
        ConfigError: the ranks cannot be divided so.
    """
    degree = next(degree for degree, least in ((8, 64), (2, 4), (1, 1)) if ranks >= least)
    if ranks % (degree * degree):
        rule = f"must be a multiple of tp {degree} x pp {degree}"
        raise ConfigError(field, ranks, rule, f"give {max(1, ranks // degree**2) * degree**2}")
    return ParallelLayout(tp=degree, pp=degree, dp=ranks // degree**2)


def _store_share(sizes: Sequence[int], ways: Sequence[Way], repeats: int, stages: Stages) -> Iterator[Row]:
    speeds: dict[Way, float] = {}
    for ranks in sizes:
        layout = layout_of(ranks)
        for way in ways:
            total = operations(way, layout) + backend_operations(way, layout)
            common = {
                "table": init_page.LABEL,
                "ranks": ranks,
                "method": way.method,
                "store": way.store,
                "operations": total,
                "backend_operations": backend_operations(way, layout),
            }
            if total / speeds.get(way, _SPEED) > _MOST_S:
                yield {**common, "source": "predicted", "seconds": total / speeds.get(way, _SPEED)}
                continue
            try:
                runs = _replayed(way, layout, repeats, stages)
            except CheckFailed as exc:  # what was measured until then is kept
                stages.say(f"predicted instead: {exc}")
                yield {**common, "source": "predicted", "seconds": total / speeds.get(way, _SPEED)}
                continue
            best = min(runs, key=lambda one: one.seconds)
            speeds[way] = best.operations / best.seconds
            yield {
                **common,
                "source": "measured",
                "seconds": best.seconds,
                "seconds_median": statistics.median(one.seconds for one in runs),
                "seconds_all": [one.seconds for one in runs],
                "operations": best.operations,
                "bytes": best.num_bytes,
                "server_cpu_s": best.server_cpu_s,
                "generator_cpu_s": best.generator_cpu_s,
            }


def _replayed(way: Way, layout: ParallelLayout, repeats: int, stages: Stages) -> list[Replayed]:
    ranks = layout.world_size
    with stages.open(f"{way.method} on {way.store}, {ranks:,} simulated ranks") as bar:
        return [replay(way, layout, _MOST_S, partial(_tell, bar, ranks)) for _ in range(repeats)]


def _tell(bar: Bar, total: int, done: int) -> None:
    bar(done, total)


def _said(row: Row, stages: Stages) -> Row:
    stages.say(init_page.line(row))
    return row


def _sizes(text: str) -> list[int]:
    sizes = []
    for word in text.split(","):
        if not word.strip().isdigit():
            raise ConfigError("--ranks", word, "is no whole number", "give numbers with commas, as 128,2048")
        sizes.append(int(word))
    return [size for size in sizes if size and layout_of(size)]


def _ways(text: str) -> list[Way]:
    names = text.split(",")
    for name in names:
        if name not in get_args(StoreName):
            raise ConfigError("--store", name, "is no store", f"give {' or '.join(get_args(StoreName))}, or both")
    return [way for way in _WAYS if way.store in names]


if __name__ == "__main__":
    from netlayer.cli import run

    run(command, "python -m bench.init_time")

"""`netlayer observe collect` and `query`: events from a server into files, and questions to those files."""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from netlayer.errors import EXIT_FAILED, ConfigError

if TYPE_CHECKING:
    from types import FrameType

    from netlayer.observe.events.collector import Source, Tally

_PROGRESS_S = 10.0


@click.command()
@click.argument("server", envvar="NETLAYER_OBSERVE_SERVER")
@click.option("--run", required=True, help="Name of the run: job.name.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the files.")
@click.option("--kafka", is_flag=True, help="SERVER is host:port,... of Kafka brokers.")
@click.option("--parquet/--as-they-came", default=True, help="Turn files into parquet, by a process beside this one.")
@click.option("--until-eof", is_flag=True, help="End with the standard input, too.")
@click.option(
    "--for", "seconds", type=click.FloatRange(0), help="End after so many seconds; else at SIGTERM or Ctrl-C."
)
def collect(
    server: str, run: str, out: Path, kafka: bool, parquet: bool, until_eof: bool, seconds: float | None
) -> None:
    """Take the events that ranks send to SERVER, and keep them as files in a folder.

    SERVER is a redis://, rediss:// or unix:// address, that of job.observe.url (or $NETLAYER_OBSERVE_SERVER). What has
    come is written every few seconds, and only then taken off the server: a collector that is killed and started again
    loses nothing. At SIGTERM or Ctrl-C it takes what is left, and ends. A server that is away is waited for.

    The last line says how many events were kept, and how many never arrived; the files hold marks of those.

    Exit 0: every event that was sent has come; 1: some were lost; 2: SERVER or the folder cannot be used.

    \b
    Examples:
      netlayer observe collect redis://10.0.0.1:6379 --run tiny-gpt --out runs/a/events
      netlayer observe collect 10.0.0.1:9092,10.0.0.2:9092 --kafka --run tiny-gpt --out runs/a/events
      netlayer observe collect unix:///run/redis.sock --run tiny-gpt --out events --for 60
    """
    from netlayer.observe.events.collector import Keeper
    from netlayer.observe.events.collector import collect as collect_from

    ends_s = math.inf if seconds is None else time.monotonic() + seconds
    is_ended = False

    def is_over() -> bool:
        return is_ended or time.monotonic() >= ends_s or (until_eof and _has_ended(sys.stdin.fileno()))

    def end(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_ended
        is_ended = True

    previous = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    shown_s = time.monotonic()

    def show(tally: Tally) -> None:
        nonlocal shown_s
        if time.monotonic() - shown_s >= _PROGRESS_S:
            shown_s = time.monotonic()
            click.echo(_describe(tally), err=True)

    try:
        source = _open(server, run, kafka=kafka)
        keeper = Keeper(out, compacts=parquet)
        try:
            tally = collect_from(source, keeper, is_over, show)
        finally:
            source.close()
            keeper.close()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    click.echo(_describe(tally))
    if tally.lost_messages or tally.damaged:
        sys.exit(EXIT_FAILED)


def _has_ended(descriptor: int) -> bool:
    """Whether a pipe has no writer any more; what is written there is read and dropped."""
    ready, _, _ = select.select([descriptor], [], [], 0)
    return bool(ready) and not os.read(descriptor, 4096)


def _open(server: str, run: str, *, kafka: bool) -> Source:
    from netlayer.observe.events.collector import KafkaSource, RedisSource

    if kafka:
        return KafkaSource(server, run)
    return RedisSource(server, run)


def _describe(tally: Tally) -> str:
    line = f"{tally.events:,} events of {len(tally.streams):,} ranks in {tally.messages:,} messages"
    line += (
        f", {tally.num_bytes / 2**20:,.1f} MiB; lost {tally.lost_events:,} events in {tally.lost_messages:,} messages"
    )
    if tally.twice:
        line += f"; {tally.twice:,} came twice"
    if tally.damaged:
        line += f"; {tally.damaged:,} were no events"
    return line


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("sql")
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values.")
def query(path: Path, sql: str, as_csv: bool) -> None:
    """Ask the events of a run in SQL, by DuckDB: PATH is a run's output, a folder of events or a file of them.

    The table is `events`; its columns stand in docs/operations.md. Rows are read batch by batch, in bounded memory.

    \b
    Examples:
      netlayer observe query runs/a "select rank, avg(end_ns - start_ns) / 1e6 as ms from events
        where segment = 'forward' group by rank order by ms desc limit 8"
      netlayer observe query runs/a "select * from events where kind = 'mark'" --csv
    """
    from netlayer.observe.events.reader import read_events

    try:
        import duckdb
    except ImportError as exc:
        raise ConfigError("observe query", None, "needs duckdb", "pip install 'netlayer[observe]'") from exc
    import pyarrow as pa

    from netlayer.observe.events.schema import arrow_schema

    reader = read_events(path)
    events = pa.RecordBatchReader.from_batches(arrow_schema(), reader.batches())
    with duckdb.connect(":memory:", config={"enable_external_access": "false"}) as connection:
        connection.register("events", events)
        try:
            result = connection.sql(sql)
            if result is None:
                raise ConfigError("SQL", sql, "gives no rows", "write a SELECT")
            names, rows = result.columns, result.fetchall()
        except duckdb.Error as exc:
            raise ConfigError("SQL", sql, str(exc).splitlines()[0], "correct the query") from exc
    _print(names, rows, as_csv=as_csv)
    for note in reader.notes:
        click.echo(f"note: {note}", err=True)


def _print(names: list[str], rows: list[tuple[object, ...]], *, as_csv: bool) -> None:
    import csv

    from netlayer.printing import printable

    if as_csv:
        writer = csv.writer(sys.stdout)
        writer.writerow(names)
        writer.writerows(rows)
        return
    cells = [names, *([("" if value is None else printable(str(value))) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(names))]
    for row in cells:
        click.echo("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())

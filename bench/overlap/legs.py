"""The legs of `bench.overlap`, one after the other: a technique, and for dp a number of NCCL's channels.

Each technique ends in a record of its own, also where a leg fails or time runs out: what was measured is kept, and what
was not is a row that says why. Ranks are started anew for each leg, for NCCL reads its channels once in a process. Not
covered: the measurements.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from bench.overlap.rows import Row, dp_line
from bench.overlap.settings import MODULES, Backend, DpSettings, Technique, channel_environment
from bench.small_messages.rows import format_summary, judge
from netlayer import environ
from netlayer.errors import CheckFailed, NetlayerError
from netlayer.launch.launcher import launch
from netlayer.launch.rank import RankContext
from netlayer.results import RunRecord, utc_now
from netlayer.store.meeting import meeting_place

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """Settings that all legs share.

    Args:
        settings: of dp; its seed is everyone's.
        ranks: on this machine.
        backend: of their groups.
        out: folder for records, logs and traces.
        arguments: further arguments for the records.
        within_s: seconds for all legs; None: as long as it takes.
        stdout_is_json: the lines for a person go to stderr.
        nccl_settings: NCCL's variables and the reasons for them, for the records.
    """

    settings: DpSettings
    ranks: int
    backend: Backend
    out: Path
    arguments: Mapping[str, Any]
    within_s: float | None = None
    stdout_is_json: bool = False
    nccl_settings: Sequence[Mapping[str, Any]] = ()


def measure_techniques(
    run: Run, techniques: Sequence[Technique], channels: Sequence[int]
) -> tuple[list[Row], list[NetlayerError]]:
    """All rows, and what went wrong; a record of each technique is saved under `run.out`.

    Args:
        channels: that NCCL is held to, 0: not at all. Of several techniques only dp is measured with each.
    """
    deadline_s = None if run.within_s is None else time.monotonic() + run.within_s
    rows: list[Row] = []
    wrong: list[NetlayerError] = []
    for technique in techniques:
        longest_s = 0.0
        with _record(run, technique, channels) as leg_rows:
            for limit in channels if technique == "dp" or len(techniques) == 1 else (0,):
                begun_s = time.monotonic()
                try:
                    # A leg that would be cut off has cost its time for nothing: it is not begun.
                    if deadline_s is not None and begun_s + longest_s > deadline_s:
                        raise CheckFailed("no time left for it; see --limit-min")
                    measured = measure_leg(run, technique, limit)
                except NetlayerError as exc:
                    say(f"{_title(technique, limit)}: {exc}")
                    leg_rows.append({"technique": technique, "channels": limit, "skipped": str(exc)})
                    wrong.append(exc)
                    continue
                show(run, measured)
                leg_rows += measured
                longest_s = max(longest_s, time.monotonic() - begun_s)
            rows += leg_rows
    return rows, wrong


def measure_leg(run: Run, technique: Technique, limit: int) -> list[Row]:
    """Start the ranks of one leg, and measure."""
    say(f"{_title(technique, limit)}, {run.ranks} ranks")
    log_dir = run.out / "logs" / f"{technique}{limit}"
    with _environment(channel_environment(limit)):
        if technique == "small":
            measured = _measure_small(run)
        elif technique == "pp":
            measure = importlib.import_module(MODULES["pp"]).measure
            measured = measure(
                ranks=run.ranks, backend=run.backend, log_dir=log_dir, seed=run.settings.seed, on_progress=say
            )
        else:
            with meeting_place() as place:
                url = place.init_method(f"{technique}{limit}")
                measured = launch(
                    run_rank,
                    run.ranks,
                    args=(technique, run.settings, url, run.backend, limit),
                    log_dir=log_dir,
                    on_message=lambda _rank, message: say(str(message)),
                )[0]
    return [{"technique": technique, "channels": limit, **row} for row in measured]


def run_rank(
    context: RankContext, technique: Technique, settings: DpSettings, url: str, backend: Backend, limit: int
) -> list[Row]:
    """One rank; torch is imported here, and not by who launches."""
    from bench.overlap import ranks as overlap_ranks

    return overlap_ranks.run_rank(context, technique, settings, url, backend, limit)


def show(run: Run, rows: Sequence[Row]) -> None:
    """The rows of one technique as lines for a person."""
    if rows and rows[0]["technique"] == "small":
        lines = format_summary(rows)
    else:
        lines = [dp_line(row) if row["technique"] == "dp" else _line(row) for row in rows]
    for line in lines:
        click.echo(line, err=run.stdout_is_json)


def say(text: str) -> None:
    """Print progress on stderr."""
    click.echo(text, err=True)


def _measure_small(run: Run) -> list[Row]:
    """Measure small messages; a record of their own is saved too, as by the command of that name."""
    from bench.small_messages import command as small_messages

    ranks = min(run.ranks, small_messages.MAX_RANKS)
    settings = small_messages.Settings()
    if run.backend == "gloo":
        settings = small_messages.Settings(sizes=(1024, 65536), launches=2, replays=5)
    record = small_messages.measure(settings, ranks, run.backend, run.out, run.arguments)
    rows = [dict(row) for row in record.rows]
    judge(rows, None)
    return rows


@contextlib.contextmanager
def _record(run: Run, technique: Technique, channels: Sequence[int]) -> Iterator[list[Row]]:
    """Yield a list for rows; save a record of them at the end, even after an error."""
    rows: list[Row] = []
    started = utc_now()
    try:
        yield rows
    finally:
        if rows and technique != "small":
            record = make_record(run, f"bench.overlap.{technique}", rows, started, [technique], channels)
            say(f"record: {record.save(run.out / 'records')}")


def make_record(
    run: Run,
    name: str,
    rows: Sequence[Row],
    started_utc: str,
    techniques: Sequence[Technique],
    channels: Sequence[int],
) -> RunRecord:
    """Build the record of rows that were measured from `started_utc` until now."""
    gpus = [gpu.name for gpu in environ.list_gpus()[: run.ranks]]
    return RunRecord(
        name=name,
        source="measured",
        rows=rows,
        started_utc=started_utc,
        ended_utc=utc_now(),
        arguments={
            **run.arguments,
            "techniques": list(techniques),
            "channels": list(channels),
            "backend": run.backend,
            **run.settings.record(),
        },
        environment=environ.snapshot(run.settings.seed)
        | ({"nccl_settings": list(run.nccl_settings)} if run.nccl_settings else {}),
        devices=gpus if run.backend == "nccl" else ["CPU"] * run.ranks,
    )


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set these variables for processes that are started within the context."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _title(technique: Technique, limit: int) -> str:
    return f"{technique}, NCCL held to {limit} channels" if limit else technique


def _line(row: Row) -> str:
    """A row of another technique: its words, and its figures by name."""
    labels = [str(value) for value in row.values() if isinstance(value, str)]
    figures = [f"{key} {value:.4g}" for key, value in row.items() if isinstance(value, int | float)]
    return " ".join(labels) + ": " + ", ".join(figures)

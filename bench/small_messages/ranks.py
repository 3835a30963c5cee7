"""The ranks of `bench.small_messages`: every system in turn, size by size, as long as the time lasts."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from bench.backends import DISTRIBUTED, meet
from bench.perf.driver import load_collective
from bench.small_messages.command import Outcome, Settings
from bench.small_messages.rows import LARGE_BYTES, Row, SkippedRow, TimeFigures, TimeRow
from bench.small_messages.systems import DTYPE, System, open_systems
from bench.small_messages.windows import windows_rows
from collectives.small.path import KINDS, Kind
from collectives.small.table import DEFAULT_TABLE, TuningTable
from collectives.small.trial import WRONG_DATA, buffer_sizes, checked_replay
from collectives.small.tuner import tune
from collectives.timing import Times, greatest, time_in_turn
from netlayer.launch.rank import RankContext
from netlayer.percentile import percentile
from netlayer.units import format_size

Report = Callable[[Row], None]


def run_rank(context: RankContext, settings: Settings, url: str, backend: str, deadline_s: float) -> Outcome:
    """Measure as one rank; rank 0 reports its rows as they come.

    Args:
        deadline_s: on `time.monotonic`, one clock for all processes of a host.
    """
    with meet(context.env, url, None) as control:
        library = DISTRIBUTED["torch" if backend == "nccl" else "gloo"](context.env, None)
        group, device = library.group, library.device
        dist.barrier(group)  # makes NCCL's communicator
        report: Report = context.report if control.rank == 0 else lambda _row: None
        table = TuningTable.from_json(settings.table) if settings.table else DEFAULT_TABLE
        if settings.tune:
            table = tune(
                group,
                device,
                max_bytes=settings.max_bytes,
                launches=settings.launches,
                on_figure=lambda figure: report({"table": "figure", **figure.model_dump()}),
            )
            report({"table": "tuned", "json": table.to_json()})
        measure(group, device, settings, table=table, report=report, deadline_s=deadline_s)
        description = library.describe()
        return Outcome(table.to_json(), f"{description.name} {description.bus}", _versions(device))


def measure(
    group: dist.ProcessGroup,
    device: torch.device,
    settings: Settings,
    *,
    table: TuningTable,
    report: Report,
    deadline_s: float,
) -> None:
    """Report a row of every size, collective and system (`table` is `time`), and of what is skipped.

    The smallest sizes come first, all collectives of each, so that the largest are missing if time runs out.

    Args:
        table: for ours.
        report: hears each row as it comes; every rank the same ones.
        deadline_s: nothing is begun after it.
    """

    def time_is_out() -> bool:
        return bool(greatest([time.monotonic() > deadline_s], group, device)[0])

    systems, skipped = open_systems(group, device, settings, table)
    for name, reason in skipped.items():
        report(SkippedRow(name, reason).to_row())
    done: list[tuple[Kind, int]] = []
    for num_bytes, kind in itertools.product(settings.sizes, KINDS):
        if time_is_out():
            what = f"{kind} of {format_size(num_bytes)}"
            reason = f"not begun within {settings.within_s:g} s"
            report(SkippedRow(what, reason, out_of_time=True).to_row())
            continue
        for row in _measure_one(kind, num_bytes, systems, group, device, settings):
            report(row.to_row())
        done.append((kind, num_bytes))
    # Last, for a profiler that was once on may slow launches down.
    if "nccl_windows" in systems and not time_is_out():
        for kernel in windows_rows(systems["nccl_windows"], done, device):
            report(kernel.to_row())


def _measure_one(
    kind: Kind,
    num_bytes: int,
    systems: dict[str, System],
    group: dist.ProcessGroup,
    device: torch.device,
    settings: Settings,
) -> list[TimeRow | SkippedRow]:
    """All systems of one collective and size; a time only of what was right."""
    launches = settings.launches if num_bytes < LARGE_BYTES else -(-settings.launches // 5)
    rows: dict[tuple[str, str], TimeRow | SkippedRow] = {}
    dtype = str(DTYPE).removeprefix("torch.")
    replays = {}
    for system, maker in systems.items():
        for variant, trial in maker.trials(kind, num_bytes).items():
            replay = checked_replay(trial, launches, group)
            if isinstance(replay, str) and replay != WRONG_DATA:
                reason = f"{kind} of {format_size(num_bytes)} {replay}"
                rows[system, variant] = SkippedRow(f"{system} {variant}".strip(), reason, wrong=False, dtype=dtype)
                continue
            rows[system, variant] = TimeRow(kind, num_bytes, system, variant, replay == WRONG_DATA, dtype)
            if not isinstance(replay, str):
                replays[system, variant] = replay
    times = time_in_turn(replays, group, device, launches, settings.replays, settings.rounds)
    num_ranks = dist.get_world_size(group)
    return [
        replace(row, figures=_figures(kind, num_bytes, times[key], num_ranks))
        if isinstance(row, TimeRow) and key in times
        else row
        for key, row in rows.items()
    ]


def _figures(kind: Kind, num_bytes: int, times: Times, num_ranks: int) -> TimeFigures:
    """Statistics of all replays, per launch."""
    each = times.each_us
    median_us = statistics.median(each)
    whole_bytes = max(buffer_sizes(kind, num_bytes, num_ranks))
    alg_bw, bus_bw = load_collective(kind).bandwidth_gbs(whole_bytes, median_us / 1e6, num_ranks)
    return TimeFigures(
        median_us=median_us,
        p99_us=percentile(each, 99),
        min_us=min(each),
        max_us=max(each),
        round_medians_us=[statistics.median(samples) for samples in times.rounds_us],
        alg_bw_gbs=alg_bw,
        bus_bw_gbs=bus_bw,
        num_replays=len(each),
        replays_us=times.rounds_us,
        host_bound=times.host_bound,
    )


def _versions(device: torch.device) -> dict[str, str]:
    versions = {"torch": str(torch.__version__)}
    if device.type == "cuda":
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        versions |= {"nccl": ".".join(map(str, version)), "cuda": str(torch.version.cuda)}
    return versions

"""The turns of `bench.mfu`: processes for systems that can share them, and what becomes of a system that fails.

Every second run takes the systems in reverse, so that those with processes of their own are started once a run, not
twice, and a drift of the machine meets them alike. A system that fails (a crash, no memory left, a hang) is named and
skipped from there on, and the others continue in fresh processes. Rows are written as they come, into `rows.jsonl`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import click

from bench.mfu.gpus import GpuLog
from bench.mfu.rows import Begun, MfuProfile, MfuRun, Row
from bench.mfu.systems import Entry
from netlayer.config.tree import JobConfig
from netlayer.errors import NetlayerError
from netlayer.launch.launcher import launch
from netlayer.store.meeting import meeting_place
from netlayer.workload.flops import step_flops
from netlayer.workload.peaks import peak_flops

Turn = tuple[int, Entry]
ROWS = "rows.jsonl"
_START_S = 30.0
"""Of fresh processes on GPUs: imports, NCCL's groups."""
_BUILD_S = 15.0
"""Of a turn on GPUs: initial values, compiling."""
_ASSUMED_MFU = 0.4


@dataclass(frozen=True)
class Plan:
    """Settings by which systems are measured.

    Args:
        limit_s: longest turn; one that takes longer hangs.
        end_s: no turn begins that would not end before this moment of `time.monotonic`; infinity: all do.
        prefers_flash: as in `mfu_ranks.Order`.
        out: folder of logs and rows.
        env: of all processes.
    """

    runs: int
    steps: int
    warmup: int
    seed: int
    backend: str
    out: Path
    limit_s: float
    end_s: float = math.inf
    profiles: bool = False
    prefers_flash: bool = False
    env: Mapping[str, str] = field(default_factory=dict)


class Reports:
    """Collector of rank 0's reports: keeps, writes and prints each as it arrives.

    Args:
        num_turns: turns of the whole command, to estimate the remaining time.
        rows_file: gets one line per row.
        gpus: log of the GPUs' clocks and power.
    """

    def __init__(self, num_turns: int, rows_file: Path, gpus: GpuLog) -> None:
        self.runs: list[MfuRun] = []
        self.profiles: list[MfuProfile] = []
        self.failures: dict[str, str] = {}
        self.current: tuple[int, str] | None = None
        self.took_s: list[float] = []
        self.num_left = num_turns
        self._file, self._gpus = rows_file, gpus
        self._begin_s = time.monotonic()

    def __call__(self, rank: int, message: Begun | MfuRun | MfuProfile) -> None:
        if rank != 0:
            return
        if isinstance(message, Begun):
            self._begin(message)
        elif isinstance(message, MfuProfile):
            self.profiles.append(message)
            self._write(message.to_row())
        else:
            self._keep(message)

    def is_done(self, turn: Turn) -> bool:
        run, entry = turn
        return any((each.run, each.system) == (run, entry.name) for each in self.runs)

    def fail(self, name: str, reason: str) -> None:
        """Record a system's failure; its remaining turns are skipped."""
        self.failures[name] = reason
        self._write({"system": name, "run": "failed", "reason": reason})
        click.echo(f"  {name} FAILED, and is omitted from here on: {reason}", err=True)

    @property
    def current_s(self) -> float:
        """Return for how many seconds the current turn has been running."""
        return time.monotonic() - self._begin_s

    def _begin(self, message: Begun) -> None:
        now = time.monotonic()
        if self.current is not None:
            self.took_s.append(now - self._begin_s)
        self.current, self._begin_s = (message.run, message.system), now
        remaining = f", about {self.num_left * statistics.mean(self.took_s) / 60:.1f} min to go" if self.took_s else ""
        click.echo(f"run {message.run}: {message.system}{remaining}", err=True)

    def _keep(self, run: MfuRun) -> None:
        now = time.monotonic()
        gpus = self._gpus.between(now - sum(run.each_ms) / 1e3, now)
        run = replace(run, gpus=gpus)
        self.runs.append(run)
        self.num_left -= 1
        clock = f", {gpus.clock_mhz:.0f} MHz, {gpus.power_w:.0f} W" if gpus and gpus.power_w and gpus.clock_mhz else ""
        click.echo(f"  {run.system}: {run.step_ms:.1f} ms{clock}", err=True)
        if run.left_gib is not None and run.left_gib > 1:
            click.echo(f"  note: {run.left_gib:.1f} GiB were still held when it began", err=True)
        self._write(run.to_row())

    def _write(self, row: Row) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def in_turn(entries: Sequence[Entry], runs: int) -> list[Turn]:
    """Order all runs of all systems: systems that can share processes are adjacent; every second run is reversed."""
    kinds = list(dict.fromkeys(entry.processes for entry in entries))
    ordered = sorted(entries, key=lambda entry: kinds.index(entry.processes))
    return [(run, entry) for run in range(1, runs + 1) for entry in (ordered if run % 2 else ordered[::-1])]


def by_processes(turns: Sequence[Turn]) -> Iterator[tuple[Turn, ...]]:
    """Group consecutive turns that can run in the same processes."""
    return (tuple(shared) for _, shared in itertools.groupby(turns, key=lambda turn: turn[1].processes))


def measure(entries: Sequence[Entry], plan: Plan, collector: Reports) -> NetlayerError | None:
    """Run all turns, except those of a system that has failed; return the first failure."""
    first: NetlayerError | None = None
    turns = in_turn(entries, plan.runs)
    while turns:
        shared = next(by_processes(turns))
        started = len(collector.runs)
        if started and time.monotonic() + _START_S > plan.end_s:
            break
        collector.current = None
        try:
            _launch(shared, plan, collector)
        except NetlayerError as exc:
            first = first or exc
            _blame(shared, plan, collector, exc)
        else:
            if not all(collector.is_done(turn) for turn in shared):
                break
        turns = [turn for turn in turns if not collector.is_done(turn) and turn[1].name not in collector.failures]
        collector.num_left = len(turns)
    if turns:
        click.echo(f"note: the time limit is reached, {len(turns)} turns are skipped", err=True)
    return first


def estimate(entries: Sequence[Entry], plan: Plan, device: str) -> str:
    """Describe the planned turns, and on known GPUs estimate how long they will take."""
    turns = in_turn(entries, plan.runs)
    starts = len(list(by_processes(turns)))
    text = f"{len(turns)} turns of {len(entries)} systems, {plan.warmup} + {plan.steps} steps each, in {starts} starts"
    seconds = [_step_s(entry.job, device) for entry in entries]
    if None in seconds:
        return text
    each = sum(_BUILD_S + (plan.warmup + plan.steps) * second for second in seconds if second is not None)
    return f"{text}: about {(starts * _START_S + plan.runs * each) / 60:.0f} min"


def take_away(out: Path, made: Sequence[Path]) -> None:
    """Remove the output of a comparison that has measured nothing, except non-empty logs of ranks.

    Args:
        made: folders that this run has created, inner ones first.
    """
    for log in (out / "logs").glob("rank*.log"):
        if not log.stat().st_size:
            log.unlink()
    for folder in (out / "logs", out / "records", *made):
        with contextlib.suppress(OSError):  # it is not empty, or not there
            folder.rmdir()
    if (out / "logs").exists():
        click.echo(f"note: the ranks' output is in {out / 'logs'}", err=True)


def _step_s(job: JobConfig, device: str) -> float | None:
    peak = peak_flops(device, job.model.dtype)
    flops = step_flops(job.model, job.batch.global_batch_size).causal
    return flops / (_ASSUMED_MFU * peak * job.parallel.layout.world_size) if peak else None


def _blame(shared: Sequence[Turn], plan: Plan, collector: Reports, exc: NetlayerError) -> None:
    """Record which system failed; if none had begun, all systems that were to share these processes."""
    remaining = [turn for turn in shared if not collector.is_done(turn)]
    if not remaining:
        click.echo(f"note: after the last turn of these processes: {exc}", err=True)
        return
    if collector.current is None:
        for name in dict.fromkeys(entry.name for _, entry in remaining):
            collector.fail(name, f"its processes did not start: {exc}")
        return
    run, name = collector.current
    slow = f" (above --limit {plan.limit_s:g} s)" if collector.current_s >= plan.limit_s else ""
    collector.fail(name, f"run {run}: {exc}{slow}")


def _launch(shared: tuple[Turn, ...], plan: Plan, collector: Reports) -> None:
    """Launch one set of processes for systems that can share them."""
    from bench.mfu.ranks import Order, run_rank

    first = shared[0][1]
    order = Order(
        shared,
        plan.steps,
        plan.warmup,
        plan.seed,
        plan.runs,
        plan.limit_s,
        plan.end_s,
        max(collector.took_s, default=0.0),
        plan.prefers_flash,
        plan.out if plan.profiles else None,
    )
    ranks, env = first.job.parallel.layout.world_size, {**plan.env, **first.env}
    with meeting_place(first.job.store.url) as place:
        arguments = order, place.init_method("mfu"), plan.backend
        launch(run_rank, ranks, args=arguments, log_dir=plan.out / "logs", env=env, on_message=collector)

"""The figures of `bench.mfu`: medians of runs, MFU by three counts of attention's FLOPs, and the printed table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.mfu.gpus import GpuFigures
from bench.mfu.systems import OURS
from netlayer.config.tree import JobConfig
from netlayer.errors import CheckFailed
from netlayer.percentile import percentile
from netlayer.workload.flops import step_flops, utilisation
from netlayer.workload.peaks import peak_flops

Row = dict[str, Any]
FORMULA = (
    "MFU = FLOPs of a step / (seconds x GPUs x peak); FLOPs = 3 x tokens x (2 x weights of linears and head + attention"
    " of L layers); attention of a layer and token = 4 h s (full), 2 h s (causal), 4 h x keys seen (done); h hidden, s "
    "sequence; no recomputation, norms, GeLU, softmax"
)
_FIGURES = (("full", "mfu_full"), ("causal", "mfu_causal"), ("done", "mfu_done"))


@dataclass(frozen=True)
class Begun:
    """Message of rank 0: a turn begins."""

    run: int
    system: str


@dataclass(frozen=True)
class MfuRun:
    """One run of one system, as rank 0 reports it.

    Args:
        run: its number, from 1.
        change: what differs from our unchanged system; empty for that and for peers.
        left_gib: of the card's memory, what was still taken when it began and was free at the start; None on a CPU.
        step_ms: mean of the timed steps, of the slowest rank; `each_ms` of rank 0.
        memory_gib: peak of the rank with the most; None on a CPU, where what is resident is of all systems in turn.
        losses: of the warm-up steps, means over data-parallel ranks.
        in_windows, by_peers: how ours carries its bytes; None for a peer.
        gpus: over the timed steps; None where nothing was read.
    """

    system: str
    run: int
    change: str
    left_gib: float | None
    step_ms: float
    each_ms: Sequence[float]
    memory_gib: float | None
    losses: Sequence[float]
    in_windows: bool | None = None
    by_peers: bool | None = None
    gpus: GpuFigures | None = None

    def to_row(self) -> Row:
        """Return the columns of a record; those of ours and of GPUs are absent where they are not known."""
        row = asdict(self)
        figures = row.pop("gpus") or {}
        absent = [name for name in ("in_windows", "by_peers") if row[name] is None]
        return {name: value for name, value in row.items() if name not in absent} | figures


@dataclass(frozen=True)
class MfuProfile:
    """Profile of a step on rank 0: `kinds` and `most_time` as `bench.mfu.profile` makes them."""

    system: str
    launch_ms: float
    kinds: Sequence[Row]
    most_time: Sequence[Row]

    def to_row(self) -> Row:
        """Return the columns of a record, in which `run` tells what kind of row it is."""
        return {"system": self.system, "run": "profile"} | asdict(self)


@dataclass(frozen=True)
class MfuFigures:
    """Rates of a step; `mfu_*` by three counts of attention's FLOPs, None where the device's peak is not known."""

    step_ms: float
    tokens_per_s_gpu: float
    mfu_full: float | None
    mfu_causal: float | None
    mfu_done: float | None
    has_window: bool


@dataclass(frozen=True)
class MfuMedian:
    """All runs of one system: the median run, and what they have together.

    Args:
        change: as of `MfuRun`.
        runs: how many.
        spread: (max - min) / median of their times of a step.
        p99_over_median: of the steps of all runs, on rank 0.
        memory_gib: largest of the runs'.
        clock_mhz, power_w: medians; None where nothing was read.
        figures: of the median.
        over_ours: time of a token over that of ours; None where ours did not run.
    """

    system: str
    change: str
    runs: int
    micro_batch_size: int
    compile: bool
    spread: float
    p99_over_median: float
    memory_gib: float | None
    clock_mhz: float | None
    power_w: float | None
    figures: MfuFigures
    over_ours: float | None = None

    def to_row(self) -> Row:
        """Return the columns of a record, in which `run` tells what kind of row it is."""
        columns = {"system": self.system, "run": "median"} | asdict(self)
        figures, over_ours = columns.pop("figures"), columns.pop("over_ours")
        return {**columns, **figures, "over_ours": over_ours}


def with_figures(run: MfuRun, job: JobConfig, device: str) -> Row:
    """Return a run's columns with tokens/s and MFU; a NaN or infinite loss becomes None, as JSON has neither."""
    losses = [loss if math.isfinite(loss) else None for loss in run.losses]
    return {**run.to_row(), "losses": losses, **asdict(_figures(run.step_ms, job, device))}


def summarise(runs: Sequence[MfuRun], jobs: Mapping[str, JobConfig], device: str) -> list[Row]:
    """Make one row per system: the median run, the spread ((max - min) / median), and its time per token over ours.

    Args:
        jobs: by name of the system.
    """
    medians: list[MfuMedian] = []
    for system in dict.fromkeys(run.system for run in runs):
        own = [run for run in runs if run.system == system]
        times = [run.step_ms for run in own]
        median = statistics.median(times)
        each = sorted(value for run in own for value in run.each_ms)
        medians.append(
            MfuMedian(
                system,
                change=own[0].change,
                runs=len(own),
                micro_batch_size=jobs[system].batch.micro_batch_size,
                compile=jobs[system].model.compile,
                spread=(max(times) - min(times)) / median,
                p99_over_median=percentile(each, 99) / statistics.median(each),
                memory_gib=max((run.memory_gib for run in own if run.memory_gib is not None), default=None),
                clock_mhz=_median([run.gpus.clock_mhz for run in own if run.gpus]),
                power_w=_median([run.gpus.power_w for run in own if run.gpus]),
                figures=_figures(median, jobs[system], device),
            )
        )
    # Compare time per token, not per step: a change may alter the batch.
    our_rate = next((row.figures.tokens_per_s_gpu for row in medians if row.system == OURS), None)
    if our_rate:
        medians = [replace(row, over_ours=our_rate / row.figures.tokens_per_s_gpu) for row in medians]
    return [row.to_row() for row in medians]


def check_losses(runs: Sequence[MfuRun], tolerance: float) -> None:
    """Refuse a comparison of systems that did not do the same work; runs are compared among the same change only.

    Raises:
        CheckFailed: a loss differs by more than `tolerance` from that of the first run with the same change.
    """
    firsts: dict[str, MfuRun] = {}
    for run in runs:
        first = firsts.setdefault(run.change, run)
        differences = [abs(a - b) for a, b in zip(first.losses, run.losses, strict=True)]
        apart = next((each for each in differences if not each <= tolerance), None)  # a NaN too
        if apart is not None:
            raise CheckFailed(
                f"losses of {run.system}, run {run.run}, differ by {apart:.3g} from {first.system}'s, above "
                f"{tolerance:g}: they did not do the same work"
            )


def heading(job: JobConfig, device: str) -> Iterator[str]:
    """Format the lines above the table: hardware and its peak, FLOPs of a step, and the formula of MFU."""
    batch, peak = job.batch, peak_flops(device, job.model.dtype)
    flops = step_flops(job.model, batch.global_batch_size)
    known = f"peak {peak / 1e12:.1f} TFLOP/s in {job.model.dtype}" if peak else f"no peak known in {job.model.dtype}"
    yield f"{job.parallel.layout.world_size} x {device}, {known}"
    yield (
        f"a step: {batch.global_batch_size} sequences of {job.model.seq_len} tokens; "
        f"{flops.full / 1e12:,.4g} TFLOP full, {flops.causal / 1e12:,.4g} causal; "
        f"gradients reduced in {job.overlap.reduce_dtype}"
    )
    yield FORMULA


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Format the medians as a table; `done` is shown only if a window makes it differ from `causal`."""
    rows = [row for row in rows if row["run"] == "median"]
    wide = max([len("system"), *(len(row["system"]) for row in rows)])
    yield (
        f"{'system':>{wide}} {'micro':>5} {'step ms':>9} {'spread':>7} {'p99/median':>10} {'tokens/s/GPU':>13} "
        f"{'MFU full':>8} {'causal':>7} {'done':>6} {'GiB':>6} {'MHz':>5} {'W':>4} {'runs':>4} {'over ours':>9}"
    )
    for row in rows:
        cells = {name: "-" if row[key] is None else f"{row[key]:.3f}" for name, key in _FIGURES}
        if not row["has_window"]:
            cells["done"] = "-"
        over = "-" if row["over_ours"] is None else f"{row['over_ours']:.3f}"
        memory = "-" if row["memory_gib"] is None else f"{row['memory_gib']:.1f}"
        mhz, watts = ("-" if row[name] is None else f"{row[name]:.0f}" for name in ("clock_mhz", "power_w"))
        yield (
            f"{row['system']:>{wide}} {row['micro_batch_size']:5} {row['step_ms']:9.1f} {row['spread']:7.1%} "
            f"{row['p99_over_median']:10.3f} {row['tokens_per_s_gpu']:13,.0f} {cells['full']:>8} {cells['causal']:>7} "
            f"{cells['done']:>6} {memory:>6} {mhz:>5} {watts:>4} {row['runs']:4} {over:>9}"
        )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _figures(step_ms: float, job: JobConfig, device: str) -> MfuFigures:
    ranks, seconds = job.parallel.layout.world_size, step_ms / 1e3
    flops, peak = step_flops(job.model, job.batch.global_batch_size), peak_flops(device, job.model.dtype)
    return MfuFigures(
        step_ms=step_ms,
        tokens_per_s_gpu=job.batch.global_batch_size * job.model.seq_len / seconds / ranks,
        mfu_full=utilisation(flops.full, seconds, peak, ranks),
        mfu_causal=utilisation(flops.causal, seconds, peak, ranks),
        mfu_done=utilisation(flops.done, seconds, peak, ranks),
        has_window=any(job.model.window(layer) for layer in range(job.model.layers)),
    )

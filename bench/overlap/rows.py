"""The table of `bench.overlap --technique dp`: definitions of its figures, and checks that systems agree.

*compute* is our step with every collective removed and all else done. *ideal* is the larger of compute and of the
communication alone, all collectives of a step back to back. Our step has two variants (optimiser in the backward pass
or after it); the faster compute of the two counts for every system. *contention* is the step minus the same variant
with its communication removed, minus the exposed part. For FSDP2 only the sum of exposed part and contention is known;
it is given for every system (`beyond_compute`, relative to the faster compute).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.overlap.settings import PEERS, DpSettings, System
from netlayer.percentile import percentile
from netlayer.workload.flops import step_flops, utilisation
from netlayer.workload.peaks import peak_flops

Row = dict[str, Any]


@dataclass
class Timing:
    """Step times of one system over all rounds, in seconds, each the mean over ranks.

    Args:
        rounds: the iterations of each round.
        exposed: seconds in which the computation waited for communication, per iteration; empty if not measurable.
        memory_bytes: peak memory of the rank that allocated most.
        host_bound: True if a rank's device ran out of launched work at the end of a round.
    """

    rounds: list[list[float]] = field(default_factory=list)
    exposed: list[float] = field(default_factory=list)
    memory_bytes: int = 0
    host_bound: bool = False

    @property
    def iterations(self) -> list[float]:
        return [seconds for each in self.rounds for seconds in each]

    @property
    def median(self) -> float:
        return statistics.median(self.iterations)


@dataclass(frozen=True)
class Communication:
    """All collectives of a step, back to back and alone.

    Args:
        num_bytes: of all buffers, as nccl-tests count them.
        all_gather_s, reduce_scatter_s: seconds.
        ranks: that share each.
    """

    num_bytes: int
    all_gather_s: float
    reduce_scatter_s: float
    ranks: int

    @property
    def seconds(self) -> float:
        return self.all_gather_s + self.reduce_scatter_s

    def bus_bw(self, seconds: float) -> float:
        """Bytes a second over the slowest link, as nccl-tests define it for both collectives."""
        return self.num_bytes * (self.ranks - 1) / self.ranks / seconds


@dataclass(frozen=True)
class CommunicationFigures:
    """The communication of a step alone; bandwidths in bytes a second, as nccl-tests' busbw."""

    step_ms: float
    num_bytes: int
    all_gather_ms: float
    all_gather_bus_bw: float
    reduce_scatter_ms: float
    reduce_scatter_bus_bw: float


@dataclass(frozen=True)
class StepFigures:
    """Times of a step; `step_ms` the median of all, `rounds_spread` (max - min) of the rounds' medians over it."""

    step_ms: float
    step_p99_ms: float
    step_min_ms: float
    step_max_ms: float
    rounds_ms: Sequence[float]
    rounds_spread: float
    host_bound: bool
    iterations_ms: Sequence[float]


@dataclass(frozen=True)
class ExposureFigures:
    """Exposed communication of a step, and its contention: the rest beyond its own compute; also as shares of it."""

    exposed_ms: float
    exposed_p99_ms: float
    exposed_comm: float
    contention_ms: float
    contention: float
    iterations_exposed_ms: Sequence[float]


@dataclass(frozen=True)
class RateFigures:
    """Tokens/s, FLOPs of a step and MFU of the ranks together, in both conventions; None: no peak is known."""

    tokens_per_s: float
    flops_full: float
    flops_causal: float
    peak_flops: float | None
    mfu_full: float | None
    mfu_causal: float | None


@dataclass(frozen=True)
class IdealFigures:
    """A step beside the ideal one, the larger of compute and communication alone, and beside the faster compute."""

    compute_ms: float
    communication_ms: float
    ideal_ms: float
    ratio_to_ideal: float
    beyond_compute_ms: float
    beyond_compute: float


@dataclass(frozen=True)
class Prefetch:
    """All-gathers that are launched ahead."""

    prefetch: int


@dataclass(frozen=True)
class Memory:
    """Peak memory of the rank that allocated most, GiB."""

    memory_gib: float


Figures = CommunicationFigures | StepFigures | ExposureFigures | RateFigures | IdealFigures | Prefetch | Memory


@dataclass(frozen=True)
class DpRow:
    """One row of `--technique dp`.

    Args:
        channels: NCCL's number of channels; 0: its own choice.
        system: its name, or what was measured alone.
        figures: those that this kind of row has, in the order of a record's columns.
        faster_than: by another system, its step's time over this one's, less 1.
    """

    channels: int
    ranks: int
    system: str
    figures: Sequence[Figures]
    faster_than: Mapping[str, float] = field(default_factory=dict)

    def to_row(self) -> Row:
        """Return the columns of a record."""
        columns: Row = {"technique": "dp", "channels": self.channels, "ranks": self.ranks, "system": self.system}
        for each in self.figures:
            columns |= asdict(each)
        return columns | {f"faster_than_{other}": share for other, share in self.faster_than.items()}


def check_losses(losses: Mapping[str, Sequence[float]], tolerance: float) -> str | None:
    """Why these losses of the same steps do not show the same work; None where they do.

    Args:
        losses: by system, a mean over ranks each step, from the same initial values and data.
        tolerance: nats.
    """
    first, *others = losses
    for other in others:
        apart = [abs(a - b) for a, b in zip(losses[first], losses[other], strict=True)]
        if not all(each <= tolerance for each in apart):  # a NaN is not
            return f"the losses of {first} and {other} lie {apart} apart, above {tolerance:g}: not the same work"
    moved = max(losses[first]) - min(losses[first])
    if not moved > 2 * tolerance:
        return f"the losses moved by {moved:.3g} only, within twice {tolerance:g}: they show nothing; raise --lr"
    return None


def dp_rows(
    settings: DpSettings,
    channels: int,
    timings: Mapping[System, Timing],
    computes: Mapping[bool, Timing],
    communications: Mapping[bool, Communication],
    device_name: str,
    prefetches: Mapping[int, Timing] | None = None,
    prefetch: int | None = None,
) -> list[Row]:
    """Make the rows: the communication alone, each compute, each prefetch that was tried, and each system.

    Args:
        channels: NCCL's number of channels; 0: its own choice.
        timings: step times of every system.
        computes: steps with communication removed; key: the optimiser steps in the backward pass.
        communications: times of the communication alone; key: buffers in NCCL windows, as `ours_windows` has them.
        device_name: to look up the peak FLOP/s.
        prefetches: our step times by the number of all-gathers that are launched ahead.
        prefetch: the number that all other steps of ours had.
    """
    ranks = communications[False].ranks
    compute_s = min(timing.median for timing in computes.values())
    rows: list[DpRow] = []
    for in_windows, communication in communications.items():
        name = f"communication alone{', in windows' if in_windows else ''}"
        rows.append(DpRow(channels, ranks, name, [_communication(communication)]))
    for in_backward, timing in computes.items():
        name = f"compute alone, step {'in' if in_backward else 'after'} backward"
        rows.append(DpRow(channels, ranks, name, [_step(timing)]))
    for depth, timing in (prefetches or {}).items():
        figures: list[Figures] = [Prefetch(depth), _step(timing), *_exposure(timing, computes[True].median)]
        rows.append(DpRow(channels, ranks, f"ours, prefetch {depth}", figures))
    for system, timing in timings.items():
        communication = communications[system == "ours_windows"]
        ahead = [] if system in PEERS or prefetch is None else [Prefetch(prefetch)]
        figures = [
            _step(timing),
            _rates(settings, timing, communication, device_name),
            _ideal(timing, compute_s, communication),
            *ahead,
            *_exposure(timing, computes[system in ("ours", "ours_windows")].median),
            Memory(timing.memory_bytes / 2**30),
        ]
        step_ms = timing.median * 1e3
        others = [other for other in (*PEERS, "ours_overlap_off") if other in timings]
        faster_than: dict[str, float] = {other: timings[other].median * 1e3 / step_ms - 1 for other in others}
        rows.append(DpRow(channels, ranks, system, figures, faster_than))
    return [row.to_row() for row in rows]


def dp_line(row: Row) -> str:
    """One row of the table, for a person."""
    head = f"{row['system']:38}"
    if "all_gather_ms" in row:
        return (
            f"{head} {row['step_ms']:9.1f} ms: all-gather {row['all_gather_ms']:.1f} ms at "
            f"{row['all_gather_bus_bw'] / 1e9:.1f} GB/s, reduce-scatter {row['reduce_scatter_ms']:.1f} ms at "
            f"{row['reduce_scatter_bus_bw'] / 1e9:.1f} GB/s (bus bandwidth)"
        )
    line = f"{head} {row['step_ms']:9.1f} ms (p99 {row['step_p99_ms']:.1f}, rounds {row['rounds_ms']}, "
    line += f"{row['rounds_spread']:.1%} apart)"
    if row["host_bound"]:
        line += ", host-bound"
    if "ratio_to_ideal" in row:
        line += f", {row['ratio_to_ideal']:.3f} of ideal {row['ideal_ms']:.1f} ms, {row['tokens_per_s']:,.0f} tokens/s"
    if row.get("mfu_full") is not None:
        line += f", MFU {row['mfu_full']:.3f} full {row['mfu_causal']:.3f} causal"
    if "exposed_ms" in row:
        line += f", exposed {row['exposed_comm']:.1%}, contention {row['contention']:.1%}"
    elif "beyond_compute" in row:
        line += f", exposed and contention {row['beyond_compute']:.1%}"
    if "faster_than_fsdp2" in row and row["system"] not in PEERS:
        line += f", {row['faster_than_fsdp2']:+.1%} against FSDP2"
    return line


def _communication(communication: Communication) -> CommunicationFigures:
    return CommunicationFigures(
        step_ms=communication.seconds * 1e3,
        num_bytes=communication.num_bytes,
        all_gather_ms=communication.all_gather_s * 1e3,
        all_gather_bus_bw=communication.bus_bw(communication.all_gather_s),
        reduce_scatter_ms=communication.reduce_scatter_s * 1e3,
        reduce_scatter_bus_bw=communication.bus_bw(communication.reduce_scatter_s),
    )


def _step(timing: Timing) -> StepFigures:
    medians = [statistics.median(each) for each in timing.rounds]
    return StepFigures(
        step_ms=timing.median * 1e3,
        step_p99_ms=percentile(timing.iterations, 99) * 1e3,
        step_min_ms=min(timing.iterations) * 1e3,
        step_max_ms=max(timing.iterations) * 1e3,
        rounds_ms=[round(median * 1e3, 1) for median in medians],
        rounds_spread=(max(medians) - min(medians)) / timing.median,
        host_bound=timing.host_bound,
        iterations_ms=[seconds * 1e3 for seconds in timing.iterations],
    )


def _exposure(timing: Timing, own_s: float) -> list[ExposureFigures]:
    """Compute a step's exposed communication, and its contention beyond compute `own_s`; none where it is unknown."""
    if not timing.exposed:
        return []
    exposed_s, step_s = statistics.mean(timing.exposed), statistics.mean(timing.iterations)
    contention_s = step_s - own_s - exposed_s
    iterations_ms = [seconds * 1e3 for seconds in timing.exposed]
    return [
        ExposureFigures(
            exposed_ms=exposed_s * 1e3,
            exposed_p99_ms=percentile(iterations_ms, 99),
            exposed_comm=exposed_s / step_s,
            contention_ms=contention_s * 1e3,
            contention=contention_s / step_s,
            iterations_exposed_ms=iterations_ms,
        )
    ]


def _ideal(timing: Timing, compute_s: float, communication: Communication) -> IdealFigures:
    ideal_s = max(compute_s, communication.seconds)
    return IdealFigures(
        compute_ms=compute_s * 1e3,
        communication_ms=communication.seconds * 1e3,
        ideal_ms=ideal_s * 1e3,
        ratio_to_ideal=timing.median / ideal_s,
        beyond_compute_ms=(timing.median - compute_s) * 1e3,
        beyond_compute=1 - compute_s / timing.median,
    )


def _rates(settings: DpSettings, timing: Timing, communication: Communication, device_name: str) -> RateFigures:
    ranks = communication.ranks
    flops = step_flops(settings.model, settings.micro * ranks)
    peak = peak_flops(device_name, settings.model.dtype)
    return RateFigures(
        tokens_per_s=settings.micro * ranks * settings.model.seq_len / timing.median,
        flops_full=flops.full,
        flops_causal=flops.causal,
        peak_flops=peak,
        mfu_full=utilisation(flops.full, timing.median, peak, ranks),
        mfu_causal=utilisation(flops.causal, timing.median, peak, ranks),
    )

"""The figures of `bench.mfu`: rows of runs to medians, MFU in three readings, and the table for a person."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.mfu_systems import OURS
from netlayer.config import JobConfig
from netlayer.errors import CheckFailed
from trainer.flops import peak_flops, step_flops, utilisation

Row = dict[str, Any]
FORMULA = (
    "MFU = FLOPs of a step / (seconds x GPUs x peak); FLOPs = 3 x tokens x (2 x weights of linears and head + attention"
    " of L layers); attention of a layer and token = 4 h s (full), 2 h s (causal), 4 h x keys seen (done); h hidden, s "
    "sequence; no recomputation, norms, GeLU, softmax"
)
_FIGURES = (("full", "mfu_full"), ("causal", "mfu_causal"), ("done", "mfu_done"))


def with_figures(row: Row, job: JobConfig, device: str) -> Row:
    """A run's row with tokens/s and MFU."""
    return {**row, **_figures(row["step_ms"], job, device)}


def summarise(rows: Sequence[Row], jobs: Mapping[str, JobConfig], device: str) -> list[Row]:
    """One row a system: the median run, the spread (largest - least over median), and the ratio to ours.

    Args:
        jobs: by name of the system.
    """
    found: list[Row] = []
    for system in dict.fromkeys(row["system"] for row in rows):
        own = [row for row in rows if row["system"] == system]
        times = [row["step_ms"] for row in own]
        median = statistics.median(times)
        each = sorted(value for row in own for value in row["each_ms"])
        found.append(
            {
                "system": system,
                "run": "median",
                "change": own[0]["change"],
                "micro_size": jobs[system].batch.micro_size,
                "spread": (max(times) - min(times)) / median,
                "p99_over_median": each[min(len(each) - 1, int(0.99 * len(each)))] / statistics.median(each),
                "memory_gib": max(row["memory_gib"] for row in own),
                **_figures(median, jobs[system], device),
            }
        )
    ours = next(row["step_ms"] for row in found if row["system"] == OURS)
    return [{**row, "over_ours": row["step_ms"] / ours} for row in found]


def check_losses(rows: Sequence[Row], tolerance: float) -> None:
    """Refuse a comparison of systems that did not do the same work; one with a change is held against itself alone.

    Raises:
        CheckFailed: a loss differs by more from that of the first row with the same change.
    """
    firsts: dict[str, Row] = {}
    for row in rows:
        first = firsts.setdefault(row["change"], row)
        differences = [abs(a - b) for a, b in zip(first["losses"], row["losses"], strict=True)]
        apart = next((each for each in differences if not each <= tolerance), None)  # a NaN too
        if apart is not None:
            raise CheckFailed(
                f"losses of {row['system']}, run {row['run']}, differ by {apart:.3g} from {first['system']}'s, above "
                f"{tolerance:g}: they did not do the same work"
            )


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The summary for a person; `done` where a window makes it another figure than `causal`."""
    rows = [row for row in rows if row["run"] == "median"]
    wide = max([len("system"), *(len(row["system"]) for row in rows)])
    yield (
        f"{'system':>{wide}} {'micro':>5} {'step ms':>9} {'spread':>7} {'p99/median':>10} {'tokens/s/GPU':>13} "
        f"{'MFU full':>8} {'causal':>7} {'done':>6} {'GiB':>6} {'over ours':>9}"
    )
    for row in rows:
        shown = {name: "-" if row[key] is None else f"{row[key]:.3f}" for name, key in _FIGURES}
        if not row["has_window"]:
            shown["done"] = "-"
        yield (
            f"{row['system']:>{wide}} {row['micro_size']:5} {row['step_ms']:9.1f} {row['spread']:7.1%} "
            f"{row['p99_over_median']:10.3f} {row['tokens_per_s_gpu']:13,.0f} {shown['full']:>8} {shown['causal']:>7} "
            f"{shown['done']:>6} {row['memory_gib']:6.1f} {row['over_ours']:9.3f}"
        )


def _figures(step_ms: float, job: JobConfig, device: str) -> Row:
    ranks, seconds = job.parallel.layout.world_size, step_ms / 1e3
    flops, peak = step_flops(job.model, job.batch.global_size), peak_flops(device, job.model.dtype)
    return {
        "step_ms": step_ms,
        "tokens_per_s_gpu": job.batch.global_size * job.model.seq_len / seconds / ranks,
        "mfu_full": utilisation(flops.full, seconds, peak, ranks),
        "mfu_causal": utilisation(flops.causal, seconds, peak, ranks),
        "mfu_done": utilisation(flops.done, seconds, peak, ranks),
        "has_window": any(job.model.window(layer) for layer in range(job.model.layers)),
    }

"""MegaScale's tables beside our predictions from its smallest baseline row alone (arXiv 2402.15627).

One number is calibrated: the share of the peak that GEMMs sustain on its Ampere cards, so that Megatron-LM's step on
256 GPUs is met. All other rows of both systems, the 530B model and the ablation are predicted. What the paper leaves
open is set by these facts: its fabric is that of `examples/megascale-12288.toml`, NICs of 200 Gb/s, micro-batches of
one sequence, gradients reduced in float32; Megatron-LM overlaps nothing, and has norms and activations of many small
kernels and attention of the generation before, which the operators of section 3.3 replace.

[Note: the authors' rows] Printed too: Megatron-LM's authors' own steps on A100 (arXiv 2205.05198), one of which has the
layout, the batch and the cards of a row of MegaScale's 530B: what the same model makes of them, calibrated on their own
175B, tells an error of the model from a difference between two clusters that no fact of the papers names.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bench.estimate.devices import NUMBERS, Numbers, device_of
from bench.estimate.network import fabric_slowdowns
from bench.estimate.plan import Plan
from bench.estimate.step import StepEstimate, estimate_step, pipeline_ratio, quick_step_s
from netlayer.config.tree import (
    BatchConfig,
    ClusterConfig,
    Config,
    JobConfig,
    ModelConfig,
    OverlapConfig,
    ParallelConfig,
)
from netlayer.workload.flops import step_flops, utilisation

WINDOW = 1228
"""Of 2,048 tokens: inferred from the MFU column, see examples/megascale-12288.toml."""
SYSTEMS = ("Megatron-LM", "MegaScale")
# Batch, GPUs, seconds of a step of both systems: table 2.
TABLE_2 = (
    (768, 256, 40.0, 32.0),
    (768, 512, 21.2, 16.5),
    (768, 768, 15.2, 11.5),
    (768, 1024, 11.9, 8.9),
    (6144, 3072, 29.02, 23.66),
    (6144, 6144, 14.78, 12.21),
    (6144, 8192, 12.24, 9.56),
    (6144, 12288, 8.57, 6.34),
)
# GPUs (and batch), MFU of both systems in percent: the 530B model.
LARGE = ((2240, 49.2, 54.3), (4480, 48.8, 54.1), (11200, 48.2, 54.3))
# What is added, MFU in percent: table 3, 175B on 256 GPUs with a batch of 256, each row with all before it.
ABLATION: tuple[tuple[str, float, dict[str, Any]], ...] = (
    ("baseline", 47.7, {}),
    ("+ parallel block", 52.3, {"parallel_block": True}),
    ("+ sliding window", 53.3, {"window": WINDOW}),
    ("+ TP overlap", 55.5, {"tp": True}),
    ("+ PP overlap", 58.0, {"pp": True}),
    ("+ DP overlap", 59.5, {"dp": True}),
    ("+ operators", 61.2, {"operators": True}),
    ("+ other (not modelled)", 62.3, {}),
    ("+ LAMB, batch x 3", 65.3, {"batch": 768}),
)
SECONDS_BAR, POINTS_BAR = 0.04, 2.0
AUTHORS = "Megatron-LM's authors"
# Model, (layers, hidden, heads), GPUs, pp, vpp, micro-batch, batch, seconds of a step: table 5 of arXiv 2205.05198 (as
# Calculon's validation has it), with tensor parallelism of 8, sequence parallelism and attention computed again; of the
# last row its abstract gives an MFU, 54.2%.
AUTHORS_ROWS: tuple[tuple[str, tuple[int, int, int], int, int, int, int, int, float], ...] = (
    ("175B", (96, 12_288, 96), 64, 8, 3, 1, 64, 13.75),
    ("22B", (48, 6_144, 64), 8, 1, 1, 4, 4, 1.10),
    ("530B", (105, 20_480, 128), 280, 35, 3, 1, 280, 37.83),
    ("1T", (128, 25_600, 160), 512, 64, 1, 1, 512, 71.49),
    ("530B", (105, 20_480, 128), 2_240, 35, 3, 1, 2_240, 0.0),
)
AUTHORS_MFU = 54.2


@dataclass(frozen=True)
class PaperRow:
    """One figure of the paper beside ours.

    Args:
        table: `table 2`, `530B`, `ablation`, or `AUTHORS`.
        case: system and GPUs, or what is added.
        unit: `s` or `MFU %`.
        is_calibrated: it is the row that was fitted to.
        parts: seconds of the predicted step by what they go to, of rows in seconds.
    """

    table: str
    case: str
    unit: str
    paper: float
    predicted: float
    is_calibrated: bool = False
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def error(self) -> float:
        """Share of the paper's seconds, or points of MFU."""
        return self.predicted / self.paper - 1 if self.unit == "s" else self.predicted - self.paper

    @property
    def is_met(self) -> bool:
        return abs(self.error) <= (SECONDS_BAR if self.unit == "s" else POINTS_BAR)


def paper_rows(on_progress: Callable[[int, int, str], None] | None = None) -> tuple[list[PaperRow], Numbers]:
    """Return all rows, and the calibrated numbers."""
    total = len(TABLE_2) + len(LARGE) + 1

    def say(done: int, what: str) -> None:
        if on_progress:
            on_progress(done, total, what)

    say(0, "calibration")
    numbers = calibrate()
    rows: list[PaperRow] = []
    for index, (batch, gpus, *seconds) in enumerate(TABLE_2):
        say(index, f"{gpus} GPUs")
        slowdown, pp_slowdown = slowdowns_of("175b", gpus)
        for system, paper in zip(SYSTEMS, seconds, strict=True):
            estimate = estimate_step(
                plan_of(system, "175b", gpus, batch), numbers, slowdown=slowdown, pp_slowdown=pp_slowdown
            )
            is_calibrated = system == SYSTEMS[0] and gpus == TABLE_2[0][1]
            case = f"{system}, {gpus:,} GPUs"
            rows.append(PaperRow("table 2", case, "s", paper, estimate.step_s, is_calibrated, estimate.parts()))
    for index, (gpus, *percents) in enumerate(LARGE):
        say(len(TABLE_2) + index, f"530B, {gpus} GPUs")
        slowdown, pp_slowdown = slowdowns_of("530b", gpus)
        for system, paper in zip(SYSTEMS, percents, strict=True):
            plan = plan_of(system, "530b", gpus, gpus)
            estimate = estimate_step(plan, numbers, slowdown=slowdown, pp_slowdown=pp_slowdown)
            measured_s = seconds_at(plan, paper, is_windowed=system == SYSTEMS[1])
            case = f"{system}, {gpus:,} GPUs"
            rows.append(PaperRow("530B", case, "s", measured_s, estimate.step_s, parts=estimate.parts()))
    say(total - 1, "ablation")
    rows += ablation_rows(numbers)
    rows += authors_rows()
    return rows, numbers


def authors_rows() -> list[PaperRow]:
    """Return the rows of Megatron-LM's authors, GEMMs calibrated on the first of them."""
    plans = [authors_plan(*case[1:-1]) for case in AUTHORS_ROWS]
    numbers = calibrate(plans[0], AUTHORS_ROWS[0][-1])
    rows: list[PaperRow] = []
    for (name, _, gpus, *_, seconds), plan in zip(AUTHORS_ROWS, plans, strict=True):
        measured_s = seconds or seconds_at(plan, AUTHORS_MFU, is_windowed=False)
        estimate = estimate_step(plan, numbers)
        case = f"{name}, {gpus:,} GPUs"
        rows.append(PaperRow(AUTHORS, case, "s", measured_s, estimate.step_s, not rows, estimate.parts()))
    return rows


def authors_plan(
    shape: tuple[int, int, int], gpus: int, pp: int, vpp: int, micro_batch_size: int, global_batch_size: int
) -> Plan:
    """Return the plan of a row of Megatron-LM's authors: nothing overlaps, and scores pass the memory."""
    layers, hidden, heads = shape
    plan = variant(64, 64, {"operators": True})
    model = ModelConfig(
        preset="175b",
        layers=layers,
        hidden=hidden,
        heads=heads,
        ffn_hidden=4 * hidden,
        vocab_size=51_200,
        dtype="bfloat16",
        recompute="selective",
        recompute_modules="core_attn",
    )
    parallel = ParallelConfig(tp=8, pp=pp, vpp=vpp, dp=gpus // (8 * pp), balance=False)
    batch = BatchConfig(global_batch_size=global_batch_size, micro_batch_size=micro_batch_size)
    job = plan.job.model_copy(update={"model": model, "parallel": parallel, "batch": batch})
    return replace(plan, job=job, cluster=cluster_of(gpus), attention="unfused", dp_buckets=vpp)


def ablation_rows(numbers: Numbers) -> list[PaperRow]:
    """Return each step of the ablation as the points of MFU that it adds, from the calibrated baseline on."""
    options: dict[str, Any] = {}
    rows: list[PaperRow] = []
    before_paper, before = 0.0, 0.0
    for name, paper, change in ABLATION:
        options |= change
        plan = variant(256, options.get("batch", 256), options)
        predicted = mfu_of(plan, estimate_step(plan, numbers), is_windowed=bool(plan.job.model.attention_window))
        if not rows:
            rows.append(PaperRow("ablation", name, "MFU %", paper, predicted))
        else:
            rows.append(PaperRow("ablation", name, "MFU %", paper - before_paper, predicted - before))
        before_paper, before = paper, predicted
    return rows


def calibrate(plan: Plan | None = None, seconds: float = TABLE_2[0][2]) -> Numbers:
    """Return Ampere's numbers with GEMMs such that a plan takes its seconds; None: Megatron-LM's smallest row."""
    batch, gpus, *_ = TABLE_2[0]
    plan, base = plan or plan_of(SYSTEMS[0], "175b", gpus, batch), NUMBERS["Ampere"]
    numbers = base
    for _ in range(2):  # the schedule's ratio to its closed form is taken where the first round ended
        ratio = pipeline_ratio(plan, numbers)
        low, high = 0.2, 1.0
        for _ in range(30):
            middle = (low + high) / 2
            if quick_step_s(plan, replace(base, gemm=middle), ratio) > seconds:
                low = middle
            else:
                high = middle
        numbers = replace(base, gemm=(low + high) / 2)
    return numbers


def plan_of(system: str, preset: str, gpus: int, batch: int) -> Plan:
    """Return the plan of a row of table 2 or of the 530B model."""
    if system == SYSTEMS[0]:
        return variant(gpus, batch, {}, preset)
    every = {"parallel_block": True, "window": WINDOW, "tp": True, "pp": True, "dp": True, "operators": True}
    return variant(gpus, batch, every, preset)


def variant(gpus: int, batch: int, options: dict[str, Any], preset: str = "175b") -> Plan:
    """Return Megatron-LM's plan with what is added to it."""
    tp, (pp, vpp) = 8, {"175b": (8, 6), "530b": (35, 3)}[preset]
    job = JobConfig(
        model=ModelConfig(
            preset=preset,
            dtype="bfloat16",
            recompute="none",
            parallel_block=options.get("parallel_block", False),
            attention_window=options.get("window", 0),
        ),
        parallel=ParallelConfig(tp=tp, pp=pp, vpp=vpp, dp=gpus // (tp * pp), balance=False),
        batch=BatchConfig(global_batch_size=batch, micro_batch_size=1),
        overlap=OverlapConfig(
            tp=options.get("tp", False),
            pp=options.get("pp", False),
            dp=options.get("dp", False),
            zero_bubble=False,
            windows=False,
        ),
    )
    has_operators = options.get("operators", False)
    return Plan(
        job=job,
        cluster=cluster_of(gpus),
        device=device_of("A100"),
        zero=2 if options.get("dp") else 1,
        kernels="fused" if has_operators else "eager",
        attention="current" if has_operators else "previous",
        tp_under="parts",
        dp_buckets=vpp,
    )


def cluster_of(gpus: int) -> ClusterConfig:
    """Return the fabric of section 3.6 with as many servers as the GPUs need: from one pod of 256 on, whole pods."""
    servers = gpus // 8
    pods = -(-servers // 256)
    return ClusterConfig(
        servers=servers if pods == 1 else 256 * pods,
        gpus_per_server=8,
        nics_per_server=8,
        rails=8,
        nic_bps=200_000_000_000,
        nvlink_bps=2_400_000_000_000,
        servers_per_tor_set=64,
        pods=pods,
    )


def slowdowns_of(preset: str, gpus: int) -> tuple[float, float]:
    """Return by how much collisions on the fabric slow rings of data parallelism, and messages between stages."""
    job = variant(gpus, gpus, {}, preset).job
    config = Config.model_construct(cluster=cluster_of(gpus), job=job)
    return fabric_slowdowns(config)


def mfu_of(plan: Plan, estimate: StepEstimate, *, is_windowed: bool) -> float:
    """MFU in percent as the paper counts it: full attention, of windowed models the keys that are seen (inferred)."""
    return 100 * (utilisation(_flops(plan, is_windowed), estimate.step_s, _peak(plan), plan.num_gpus) or 0.0)


def seconds_at(plan: Plan, mfu: float, *, is_windowed: bool) -> float:
    """Return the seconds of a step at an MFU in percent."""
    return 100 * _flops(plan, is_windowed) / (mfu * plan.num_gpus * _peak(plan))


def summary(rows: Sequence[PaperRow]) -> list[str]:
    """Return a line a table: how many rows are within the bar, and the largest error."""
    lines = []
    for table in dict.fromkeys(row.table for row in rows):
        own = [row for row in rows if row.table == table and not row.is_calibrated]
        worst = max(own, key=lambda row: abs(row.error))
        seconds = worst.unit == "s"
        bar = f"{SECONDS_BAR:.0%}" if seconds else f"{POINTS_BAR:g} points"
        error = f"{worst.error:+.1%}" if seconds else f"{worst.error:+.1f} points"
        met = sum(row.is_met for row in own)
        lines.append(f"{table}: {met} of {len(own)} within {bar}; the worst is {worst.case}, {error}")
    return lines


@dataclass(frozen=True)
class StepLine:
    """The line a + b m that is nearest to a system's rows of table 2, m micro-batches a step.

    Args:
        constant_s, micro_batch_s: a and b, in seconds.
        worst: share by which the row that is farthest from it is off: no model in which a step has a constant and a
            cost of a micro-batch, the same at all scales, meets all rows more nearly.
    """

    constant_s: float
    micro_batch_s: float
    worst: float


def nearest_line(points: Sequence[tuple[float, float]]) -> StepLine:
    """Return the line of which the worst relative error over (micro-batches, seconds) is least.

    Three points decide it, which it misses by the same share (Chebyshev); all threes are tried.

    Raises:
        ValueError: less than three points.
    """
    if len(points) < 3:
        raise ValueError(f"{len(points)} points: a line meets any two")
    counts, seconds = np.array(points).T
    best: StepLine | None = None
    for three in itertools.combinations(range(len(points)), 3):
        for signs in itertools.product((1.0, -1.0), repeat=3):
            rows = [[1.0, counts[i], -sign * seconds[i]] for i, sign in zip(three, signs, strict=True)]
            try:
                constant, slope, off = np.linalg.solve(rows, seconds[list(three)])
            except np.linalg.LinAlgError:
                continue
            worst = float(np.abs((constant + slope * counts) / seconds - 1).max())
            if worst <= abs(off) + 1e-9 and (best is None or worst < best.worst):
                best = StepLine(float(constant), float(slope), worst)
    assert best is not None
    return best


def step_lines(predicted: Sequence[PaperRow] | None = None) -> dict[str, StepLine]:
    """Return the nearest line of each system: of the paper's rows of table 2, or of ours."""
    lines = {}
    for index, system in enumerate(SYSTEMS):
        counts = [plan_of(system, "175b", gpus, batch).num_micro_batches for batch, gpus, *_ in TABLE_2]
        seconds = [seconds[index] for _, _, *seconds in TABLE_2]
        if predicted is not None:
            seconds = [row.predicted for row in predicted if row.table == "table 2" and row.case.startswith(system)]
        lines[system] = nearest_line(list(zip(counts, seconds, strict=True)))
    return lines


def _flops(plan: Plan, is_windowed: bool) -> float:
    """Full attention; of a window the same share of it as of keys seen."""
    flops = step_flops(plan.job.model, plan.job.batch.global_batch_size)
    return flops.full - 2 * (flops.causal - flops.done) if is_windowed else flops.full


def _peak(plan: Plan) -> float:
    return plan.device.peak("bf16") or 0.0

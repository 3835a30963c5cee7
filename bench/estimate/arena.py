"""The arena: estimators of a step on all public rows, beside null models, each family predicted from the others alone.

Two protocols. *Leave one family out*: an estimator is fitted to the rows of all other families and predicts this one.
*From the smallest row*: within a series (one layout at growing scale) it is scaled so that the series' smallest row is
met, and predicts the others. Rows that are kept aside (rows_aside.csv) are predicted from all others. What an estimator
was fitted to and what it predicts never share a column.

Anyone enters an estimator as a Python file with

    def fit(rows):            # bench.estimate.rows.Row, of all other families
        return predict        # predict(plan) -> seconds of a step, None: cannot tell; bench.estimate.plan.Plan

and, if it wants, NAME. The file is imported, so it runs with the user's rights.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.estimate.devices import NUMBERS
from bench.estimate.fit import PRIOR, fit
from bench.estimate.plan import Plan
from bench.estimate.rows import Row, mfu_percent
from bench.estimate.step import pipeline_ratio, quick_step_s
from netlayer.errors import CheckFailed, ConfigError
from netlayer.workload.flops import step_flops

Predict = Callable[[Plan], float | None]
Fit = Callable[[Sequence[Row]], Predict]
OURS, CONSTANT, LOG_LINEAR, CARRIED = "ours", "one constant", "linear in log GPUs", "smallest row's MFU"
TARGETS = {"ratio to the constant": 0.5, "aim, points": 1.0, "from the smallest row, points": 0.35}
ANY = "any"
LEAST_ROWS = 4
"""Rows of a family from which an estimator must beat every null there."""


@dataclass(frozen=True)
class Entry:
    """One estimator: its name, and how it is fitted; `is_null` for the null models."""

    name: str
    fit: Fit
    is_null: bool = False


@dataclass(frozen=True)
class Prediction:
    """One row under one estimator. MFU in percent, attention in full.

    Args:
        fitted: from a fit that saw the row.
        predicted: from the rows of all other families; the row's family was omitted.
        scaled: from the smallest row of its series; None for that row itself.

    All are NaN where the estimator cannot tell.
    """

    row: Row
    estimator: str
    fitted: float
    predicted: float
    scaled: float | None

    @property
    def error(self) -> float:
        """Points of MFU, predicted less measured."""
        return self.predicted - self.row.mfu

    @property
    def scaled_error(self) -> float | None:
        return None if self.scaled is None else self.scaled - self.row.mfu


def entries(file: Path | None = None) -> list[Entry]:
    """Return ours, the nulls, and the estimator of a file."""
    own = [Entry(OURS, fit_ours), Entry(CONSTANT, fit_constant, True), Entry(LOG_LINEAR, fit_log_linear, True)]
    return [*own, entry_of(file)] if file else own


def entry_of(file: Path) -> Entry:
    """Import an estimator's file.

    Raises:
        ConfigError: it cannot be read, is no Python, or has no `fit`.
    """
    spec = importlib.util.spec_from_file_location(f"estimator_{file.stem}", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ConfigError("ESTIMATOR", file, "is no Python file", "give one with a function fit(rows)")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as exc:
        rule = f"cannot be imported ({type(exc).__name__}: {exc})"
        raise ConfigError("ESTIMATOR", file, rule, "fix it, or omit it") from exc
    chosen = getattr(module, "fit", None)
    if not callable(chosen):
        raise ConfigError("ESTIMATOR", file, "has no function fit(rows)", "see netlayer estimate arena --help")
    return Entry(str(getattr(module, "NAME", file.stem)), chosen)


def fit_ours(rows: Sequence[Row]) -> Predict:
    """Fit the six numbers of each generation that the rows have; of another one the published ones stay."""
    numbers = dict(NUMBERS)
    for generation in {row.plan.device.generation for row in rows}:
        own = [row for row in rows if row.plan.device.generation == generation]
        numbers[generation] = fit(own)

    def predict(plan: Plan) -> float:
        return quick_step_s(plan, numbers[plan.device.generation], pipeline_ratio(plan, PRIOR))

    return predict


def fit_constant(rows: Sequence[Row]) -> Predict:
    """One MFU a precision: the mean of the rows'."""
    means = {precision: sum(row.mfu for row in alike) / len(alike) for precision, alike in _by_precision(rows).items()}

    def predict(plan: Plan) -> float:
        return seconds_of(plan, means[plan.precision] if plan.precision in means else means[ANY])

    return predict


def fit_log_linear(rows: Sequence[Row]) -> Predict:
    """MFU as a line over the logarithm of the number of GPUs, a precision."""

    lines: dict[str, tuple[float, float, float]] = {}
    for precision, alike in _by_precision(rows).items():
        x = np.array([math.log2(row.gpus) for row in alike])
        y = np.array([row.mfu for row in alike])
        slope = float(np.polyfit(x, y, 1)[0]) if len(set(x)) > 1 else 0.0
        lines[precision] = slope, float(x.mean()), float(y.mean())

    def predict(plan: Plan) -> float:
        slope, middle, mean = lines[plan.precision] if plan.precision in lines else lines[ANY]
        return seconds_of(plan, max(1.0, mean + slope * (math.log2(plan.num_gpus) - middle)))

    return predict


def _by_precision(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group the rows by precision; `ANY` holds all of them, for a precision that they lack."""
    groups: dict[str, list[Row]] = {ANY: list(rows)}
    for row in rows:
        groups.setdefault(row.plan.precision, []).append(row)
    return groups


def seconds_of(plan: Plan, mfu: float) -> float:
    """Return the seconds of a step at an MFU in percent."""
    flops = step_flops(plan.job.model, plan.job.batch.global_batch_size).full
    peak = plan.device.peak(plan.precision) or math.nan
    return 100 * flops / (mfu * plan.num_gpus * peak)


def run_entry(
    entry: Entry, rows: Sequence[Row], on_progress: Callable[[int, int, str], None] | None = None
) -> list[Prediction]:
    """Run one estimator through both protocols.

    Raises:
        CheckFailed: it gave something else than a time above 0.
    """
    whole = entry.fit(rows)
    fitted = {id(row): _seconds(entry, whole, row) for row in rows}
    smallest = {id(row): series[0] for series in series_of(rows) for row in series[1:]}
    predictions: dict[int, Prediction] = {}
    every = families(rows)
    for index, family in enumerate(every):
        if on_progress:
            on_progress(index, len(every), f"without {family}")
        others = [row for row in rows if row.family != family]
        predict = entry.fit(others) if others else whole
        for row in rows:
            if row.family != family:
                continue
            first = smallest.get(id(row))
            scaled = None
            if first is not None:
                growth = _seconds(entry, predict, row) / _seconds(entry, predict, first)
                scaled = None if math.isnan(growth) else mfu_percent(row.plan, first.step_s * growth)
            predictions[id(row)] = Prediction(
                row,
                entry.name,
                _mfu(row, fitted[id(row)]),
                _mfu(row, _seconds(entry, predict, row)),
                scaled,
            )
    return [predictions[id(row)] for row in rows]


def run_aside(entry: Entry, rows: Sequence[Row], aside: Sequence[Row]) -> list[Prediction]:
    """Predict rows that are kept aside from a fit to all others.

    Raises:
        CheckFailed: as `run_entry`.
    """
    predict = entry.fit(rows)
    mfus = (_mfu(row, _seconds(entry, predict, row)) for row in aside)
    return [Prediction(row, entry.name, math.nan, mfu, None) for row, mfu in zip(aside, mfus, strict=True)]


def on_rows_of(predictions: Mapping[str, Sequence[Prediction]], estimator: str) -> tuple[int, dict[str, float]]:
    """Return how many rows an estimator predicts, and the mean absolute error of each on these."""
    predicted_rows = [index for index, each in enumerate(predictions[estimator]) if not math.isnan(each.predicted)]
    errors = {name: _mean([abs(each[index].error) for index in predicted_rows]) for name, each in predictions.items()}
    return len(predicted_rows), {name: error for name, error in errors.items() if error is not None}


def carried(rows: Sequence[Row]) -> list[Prediction]:
    """Return the null within families: the MFU of a series' smallest row carried on. It predicts no other family."""
    first = {id(row): series[0] for series in series_of(rows) for row in series[1:]}
    return [
        Prediction(row, CARRIED, math.nan, math.nan, first[id(row)].mfu if id(row) in first else None) for row in rows
    ]


def families(rows: Sequence[Row]) -> list[str]:
    """Return the families in the rows' order."""
    return list(dict.fromkeys(row.family for row in rows))


def series_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Group the rows into series, smallest first: one layout, model and release, at growing scale.

    Rows of models with fewer layers stand alone: theirs is another model.
    """
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        plan, parallel = row.plan, row.plan.job.parallel
        software = plan.precision, plan.kernels, plan.attention, plan.zero, plan.job.overlap.tp
        layout = parallel.tp, parallel.pp, parallel.vpp, plan.cp, plan.job.batch.micro_batch_size
        groups.setdefault((row.family, row.release, plan.job.model.layers, software, layout), []).append(row)
    return [sorted(group, key=lambda row: row.gpus) for group in groups.values()]


@dataclass(frozen=True)
class Score:
    """Mean absolute errors of one estimator, MFU points; None where it predicts nothing.

    Args:
        predicted: each family from the others alone.
        scaled, scaled_bf16: from the smallest row of a series, of all rows and of those in bfloat16.
        fitted: of a fit that saw all rows.
    """

    estimator: str
    family: str
    num_rows: int
    predicted: float | None
    scaled: float | None
    fitted: float | None
    scaled_bf16: float | None


def scores(predictions: Sequence[Prediction], rows: Sequence[Row]) -> list[Score]:
    """Return the scores of an estimator: `all`, then each family."""
    table = []
    for family in ("all", *families(rows)):
        own = [each for each in predictions if family in ("all", each.row.family)]
        scaled = [abs(each.scaled_error) for each in own if each.scaled_error is not None]
        table.append(
            Score(
                own[0].estimator,
                family,
                len(own),
                _mean([abs(each.error) for each in own]),
                _mean(scaled),
                _mean([abs(each.fitted - each.row.mfu) for each in own]),
                _mean(
                    [abs(e.scaled_error) for e in own if e.scaled_error is not None and e.row.plan.precision == "bf16"]
                ),
            )
        )
    return table


@dataclass(frozen=True)
class Repeats:
    """Distances between measurements of one recipe: what no estimator that reads recipes alone can tell.

    Groups hold the rows of a family that several releases measured with the same layout, batch and software facts.
    Points of MFU; `scaled` of what a row has of its series' smallest row.

    Args:
        num_rows, scaled_rows: rows in groups.
        apart, scaled_apart: mean distance of a row from the mean of its group's others: what one who has measured
            the same recipe before is off by.
        lower_bound, scaled_lower_bound: mean distance of a row from its group's median, which is the least that one
            answer a recipe can be off by.
        error, scaled_error: mean absolute error of an estimator on the same rows.
    """

    num_rows: int
    apart: float
    lower_bound: float
    error: float
    scaled_rows: int
    scaled_apart: float
    scaled_lower_bound: float
    scaled_error: float


def repeats(predictions: Sequence[Prediction]) -> Repeats | None:
    """Compare rows of one recipe with each other, and an estimator with them; None: no recipe was measured twice."""
    rows = [each.row for each in predictions]
    first = {id(row): series[0] for series in series_of(rows) for row in series[1:]}
    absolute, scaled = [], []
    for group in _recipes(predictions).values():
        if len(group) > 1:
            mfus = [(each.row.mfu, abs(each.error)) for each in group]
            absolute += _distances([mfu for mfu, _ in mfus], [error for _, error in mfus], [1.0] * len(mfus))
        grown = [each for each in group if each.scaled_error is not None]
        if len(grown) > 1:
            starts = [first[id(each.row)].mfu for each in grown]
            ratios = [each.row.mfu / start for each, start in zip(grown, starts, strict=True)]
            scaled += _distances(ratios, [abs(each.scaled_error or 0.0) for each in grown], starts)
    if not absolute:
        return None
    nothing = [(math.nan,) * 3]
    means = [[float(np.mean(column)) for column in zip(*table, strict=True)] for table in (absolute, scaled or nothing)]
    (apart, lower_bound, error), (scaled_apart, scaled_lower_bound, scaled_error) = means
    return Repeats(
        len(absolute), apart, lower_bound, error, len(scaled), scaled_apart, scaled_lower_bound, scaled_error
    )


def _distances(
    values: Sequence[float], errors: Sequence[float], points: Sequence[float]
) -> list[tuple[float, float, float]]:
    """Return each value's distance from the mean of the others and from the median, times `points`; and its error."""
    total, median = sum(values), float(np.median(values))
    return [
        (abs(value - (total - value) / (len(values) - 1)) * unit, abs(value - median) * unit, error)
        for value, error, unit in zip(values, errors, points, strict=True)
    ]


def _recipes(predictions: Sequence[Prediction]) -> dict[tuple[object, ...], list[Prediction]]:
    """Group by what a recipe says. Not by the size of buckets, which hardly moves a step and tells releases apart."""
    groups: dict[tuple[object, ...], list[Prediction]] = {}
    for each in predictions:
        plan = each.row.plan
        job = plan.job
        overlap = job.overlap.tp, job.overlap.pp, job.overlap.dp
        software = (
            plan.precision,
            plan.kernels,
            plan.attention,
            plan.zero,
            plan.delayed_scaling,
            plan.tp_only_amax,
            plan.deferred_heads,
        )
        key = (each.row.family, plan.device.name, plan.cp, job.model, job.parallel, job.batch, overlap, *software)
        groups.setdefault(tuple(map(repr, key)), []).append(each)
    return groups


@dataclass(frozen=True)
class Bar:
    """One bar: what is asked, what was reached."""

    name: str
    limit: float
    value: float

    @property
    def is_met(self) -> bool:
        return self.value <= self.limit


def bars(by_estimator: dict[str, list[Score]], estimator: str = OURS) -> list[Bar]:
    """Return the bars of an estimator beside the nulls."""
    own = {score.family: score for score in by_estimator[estimator]}
    nulls = {name: {score.family: score for score in by_estimator[name]} for name in (CONSTANT, LOG_LINEAR)}
    constant = nulls[CONSTANT]["all"].predicted or math.nan
    total = own["all"].predicted or math.nan
    table = [
        Bar("all rows, half of the constant null's error", TARGETS["ratio to the constant"] * constant, total),
        Bar("all rows, aim", TARGETS["aim, points"], total),
    ]
    table += [
        Bar(f"from the smallest row of a series{of}", TARGETS["from the smallest row, points"], value)
        for of, value in (("", own["all"].scaled), (", bf16", own["all"].scaled_bf16))
        if value is not None
    ]
    for family, score in own.items():
        if family != "all" and score.num_rows >= LEAST_ROWS and score.predicted is not None:
            best = min(null[family].predicted or math.inf for null in nulls.values())
            table.append(Bar(f"{family}: below each null", best, score.predicted))
    return table


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else None


def _mfu(row: Row, seconds: float) -> float:
    return math.nan if math.isnan(seconds) else mfu_percent(row.plan, seconds)


def _seconds(entry: Entry, predict: Predict, row: Row) -> float:
    value = predict(row.plan)
    if value is None:
        return math.nan
    if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise CheckFailed(f"estimator {entry.name} predicts {value!r} s for {row.family}, {row.gpus} GPUs")
    return float(value)

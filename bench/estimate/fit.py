"""Fit of a generation's six numbers to measured rows: least squares in MFU points, held near what was measured alone.

[Note: prior] Rows do not tell all six apart: a step that is mostly GEMMs says little of the memory. Each number has a
prior, what a micro-benchmark of that operator alone reached (`PRIOR`), with a width of its own; the sum that is
minimised is of squared errors over `ROW_POINTS` and of squared departures from the prior over its width. Errors beyond
`ROW_POINTS` count as far as they go, not squared (Huber), for a row may have causes that no number stands for.

[Note: series] What a recipe has that no number stands for, all rows of its series have. So the errors of two rows of
a series are not independent: their mean is as uncertain as a row's, their difference less (`GROWTH_POINTS`), and these
two are minimised in place of the two errors. Growth over a series is what tells the spread of ranks and the links.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bench.estimate.devices import NUMBERS, Numbers
from bench.estimate.plan import Plan
from bench.estimate.rows import Row
from bench.estimate.step import pipeline_ratio, quick_step_s

PRIOR = Numbers(gemm=0.68, gemm_fp8=0.60, attention=0.52, memory=0.78, links=0.80, spread=0.008)
"""Alone on an H200 of ours: GEMMs 727 to 758 of 989.5 TFLOP/s (reports/trainer_2xh100_202611.md), and less within a
step, where power is shared; attention 52%, Triton's norms and activations 77 to 89% of the bandwidth
(reports/trainer_h200_202611.operators.txt); NCCL on NVLink about 80% of the line rate; ranks' speeds
within a percent."""
WIDTH = Numbers(gemm=0.08, gemm_fp8=0.08, attention=0.10, memory=0.10, links=0.15, spread=0.006)
ROW_POINTS = 1.5
"""MFU points that a row's error is worth a width of a prior: what releases of one program differ by."""
GROWTH_POINTS = 0.7
"""The same of what two rows of a series have grown apart by: `ROW_POINTS` times 0.44 / 0.96, for releases that repeat a
recipe differ by 0.96 points in its rows, and by 0.44 in their growth (`netlayer estimate arena` prints both)."""
_NAMES = tuple(field.name for field in dataclasses.fields(Numbers))
_ROUNDS = 12
_STEP = 0.01
_NEAR = 0.2
"""Change of a number's logarithm below which slopes are taken once; the spread's are nearly the same anywhere."""


def ends_of_series(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the smallest and the largest row of each series: of one family, release, precision and software facts.

    A series of one row has that alone.
    """
    series: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        plan = row.plan
        key = (row.family, row.release, plan.precision, plan.kernels, plan.job.overlap, plan.job.model, plan.cp)
        series.setdefault((*key, plan.job.parallel.model_copy(update={"dp": 1})), []).append(row)
    ends = []
    for each in series.values():
        each.sort(key=lambda row: row.gpus)
        ends.append([each[0], *each[1:][-1:]])
    return ends


def fit(rows: Sequence[Row], start: Numbers | None = None) -> Numbers:
    """Fit the six numbers: the logarithm of each row's time is taken as linear in theirs, around a point.

    That is `start`, by default the generation's numbers in `devices`, whose slopes are kept for other fits of the same
    rows; where it leads far from there, around that too. The point says where time is linearised, not where the fit
    ends: that say the rows and the prior.
    Of a series (one layout at several scales) its smallest and its largest row are taken, and rows of one family and
    precision weigh together as the square root of their number, so that a source that prints many scales does not
    outvote the others.

    Raises:
        ValueError: no rows.
    """
    if not rows:
        raise ValueError("rows: none to fit to")
    series = ends_of_series(rows)
    chosen = [row for ends in series for row in ends]
    start = start or NUMBERS[rows[0].plan.device.generation]
    numbers = _solve(series, start, np.stack([_first_slopes(row.plan, start) for row in chosen]))
    if np.abs(np.log(numbers.values()) - np.log(start.values()))[:-1].max() < _NEAR:
        return numbers
    return _solve(series, numbers, np.stack([slopes(row.plan, numbers) for row in chosen]))


def slopes(plan: Plan, numbers: Numbers) -> NDArray[np.float64]:
    """Return (log seconds of a step, its derivatives by the logarithms of the six numbers), shape (7,)."""
    ratio = pipeline_ratio(plan, PRIOR)
    base = math.log(quick_step_s(plan, numbers, ratio))
    changed = (dataclasses.replace(numbers, **{name: getattr(numbers, name) * (1 + _STEP)}) for name in _NAMES)
    each = [(math.log(quick_step_s(plan, one, ratio)) - base) / math.log1p(_STEP) for one in changed]
    return np.array([base, *each])


_KEPT: dict[tuple[int, Numbers], tuple[Plan, NDArray[np.float64]]] = {}


def _first_slopes(plan: Plan, numbers: Numbers) -> NDArray[np.float64]:
    key = id(plan), numbers
    if key not in _KEPT:
        _KEPT[key] = plan, slopes(plan, numbers)  # the plan is kept, so that its id stays its own
    return _KEPT[key][1]


def _solve(series: Sequence[Sequence[Row]], at: Numbers, table: NDArray[np.float64]) -> Numbers:
    """Minimise the sum of [Note: prior] by Gauss-Newton, times as `table` has them around `at`.

    Args:
        series: one or two rows each; `table` has a row for each of theirs, in this order, shape (rows, 7).
    """
    rows = [row for ends in series for row in ends]
    groups = Counter((row.family, row.plan.precision) for row in rows)
    weights = np.array([groups[row.family, row.plan.precision] ** -0.25 for row in rows])
    to_errors = _series_errors([len(ends) for ends in series])
    measured = np.array([row.mfu for row in rows])
    seconds = np.array([row.step_s for row in rows])
    prior, width, origin = np.array(PRIOR.values()), np.array(WIDTH.values()), np.log(at.values())
    logs = origin.copy()
    for _ in range(_ROUNDS):
        mfu = measured * seconds / np.exp(table[:, 0] + table[:, 1:] @ (logs - origin))
        values = np.exp(logs)
        errors = to_errors @ (mfu - measured)
        trust = weights * np.sqrt(np.minimum(1.0, 1 / np.maximum(np.abs(errors), 1e-9)))
        residuals = np.concatenate([errors * trust, (values - prior) / width])
        by_logs = to_errors @ (-mfu[:, None] * table[:, 1:])
        slope = np.concatenate([trust[:, None] * by_logs, np.diag(values / width)])
        change = np.linalg.lstsq(slope, -residuals, rcond=None)[0]
        logs = np.minimum(logs + np.clip(change, -0.3, 0.3), 0.0)  # shares are at most 1
    return Numbers(**dict(zip(_NAMES, map(float, np.exp(logs)), strict=True)))


def _series_errors(lengths: Sequence[int]) -> NDArray[np.float64]:
    """Return the matrix that makes of rows' errors, in points, those of [Note: series], in widths: shape (rows, rows).

    Of a series of two rows it is their mean, then their difference.
    """
    matrix = np.zeros((sum(lengths), sum(lengths)))
    first = 0
    for length in lengths:
        matrix[first, first : first + length] = 1 / length / ROW_POINTS
        if length == 2:
            matrix[first + 1, first : first + 2] = -1 / GROWTH_POINTS, 1 / GROWTH_POINTS
        first += length
    return matrix

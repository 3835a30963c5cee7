"""Parameters x laws x seeds over one scenario, a run a task; or an optimiser's search in their place.

Runs go to processes here, or to a Dask cluster by its address. Not covered: the arena's frozen suite (arena), and laws
from files, which a process takes one of.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from congestion.arena.run import Contender, Row
from congestion.arena.tune_ranges import Range, overrides_of, ranges_of
from congestion.arena.tune_study import new_study
from netlayer.errors import CheckFailed, ConfigError
from topology.ranges import numbers_in
from topology.workers import in_order_of_end, standing

if TYPE_CHECKING:
    from netlayer.progress import Stages

OURS = "congestion."
Progress = Callable[[int, int, str], None]

_MOST_SEED = 10**18 - 1
_WITH_COMMAS = "scenario.phases"  # phases in turn are one value
_LARGER_IS_BETTER = ("ended", "goodput_bps", "jain", "utilisation_max")


@dataclass(frozen=True)
class Point:
    """One run: a scenario by name and all that it is told."""

    scenario: str
    law: str
    seed: int = 0
    overrides: tuple[str, ...] = ()
    preset: str = "ns3"
    fabric: str = ""
    config: Path | None = None


@dataclass(frozen=True)
class Best:
    """Result of a search: the profile, the objective's mean there and at the values it began with, a row a trial."""

    contender: Contender
    score: float
    first_score: float
    trials: list[Row]


def seeds_of(text: str) -> list[int]:
    """`1..8`, `1,5` or both; errors as `numbers_in`."""
    return numbers_in(text.replace("..", "-"), 0, _MOST_SEED, "--seed-list")


def points_of(point: Point, laws: Sequence[str], sets: Sequence[str], seeds: Sequence[int]) -> list[Point]:
    """Return all combinations, seeds innermost; `sets` are `name=value[,value...]`."""
    choices = [_values(one) for one in sets]
    return [
        replace(point, law=law, seed=seed, overrides=overrides)
        for law in laws
        for overrides in itertools.product(*choices)
        for seed in seeds
    ]


def compile_for(points: Sequence[Point], stages: Stages) -> None:
    """The kernels of all points, or every worker would compile them for itself."""
    from congestion.kernels.compile import compile_variants
    from congestion.simulation.settings import settings_of

    ours = {(point.preset, tuple(one for one in point.overrides if one.startswith(OURS))) for point in points}
    settings = [settings_of(*each) for each in sorted(ours)]
    compile_variants(settings, stages)


def run_point(point: Point) -> Row:
    """The point and `measures.summary` as one row; errors as `build_scenario`, `settings_of` and `simulate`."""
    from congestion.scenarios.catalogue import build_scenario
    from congestion.simulation import measures
    from congestion.simulation.settings import settings_of
    from congestion.simulation.simulate import simulate

    own_overrides = tuple(one for one in point.overrides if one.startswith(OURS))
    others = [one for one in point.overrides if one not in own_overrides]
    settings = settings_of(point.preset, own_overrides)
    case = build_scenario(point.scenario, others, point.seed, fabric=point.fabric, config=point.config)
    outcome = simulate(case.fabric, case.flows, settings, point.law, seed=point.seed, flaps=case.flaps)
    if outcome.interrupted:
        raise KeyboardInterrupt  # which the simulation took for a wish to see what there is
    summary = measures.summary(
        measures.flow_frame(case.fabric, case.flows, outcome), measures.port_frame(case.fabric, outcome)
    )
    values = dict(one.split("=", 1) for one in point.overrides)
    return {"cc": point.law, **values, "seed": point.seed, **summary}


def run_sweep(
    points: Sequence[Point], *, processes: int | None = None, dask: str | None = None, progress: Progress | None = None
) -> list[Row]:
    """The rows of all points, in their order.

    Raises:
        ConfigError: a point cannot be run, no scheduler answers at `dask`, or Dask is not installed.
    """
    rows: dict[int, Row] = {}
    with contextlib.closing(in_order_of_end(run_point, points, processes=processes, dask=dask)) as results:
        for index, row in results:
            rows[index] = row
            if progress:
                progress(len(rows), len(points), "")
    return [rows[index] for index in range(len(points))]


def ranges_in(sets: Sequence[str], law: str, preset: str) -> tuple[list[Range], tuple[str, ...]]:
    """Return the ranges, `congestion.x=low..high`, and what is fixed; without a range all that the law and switch have.

    Raises:
        ConfigError: a range is of nothing that can be searched, has no ends in order or ends that are refused, or is
            several values.
    """
    contender = Contender(law, law, preset)
    known = {one.name: one for one in ranges_of(contender)}
    ranges, fixed = [], []
    for one in sets:
        name, _, text = one.partition("=")
        if ".." not in text:
            if len(_values(one)) > 1:
                raise ConfigError("--set", one, "is several values", "under --optimise give name=low..high, or one")
            fixed.append(one)
            continue
        ranges.append(_range(name, text, one, known.get(name)))
    fixed_names = {one.partition("=")[0] for one in fixed}
    ranges = ranges or [one for name, one in known.items() if name not in fixed_names]
    own_overrides = (one for one in fixed if one.startswith(OURS))
    contender = replace(contender, overrides=tuple(own_overrides))
    for end in ("low", "high"):
        contender.settings(*overrides_of({one.name: getattr(one, end) for one in ranges}))
    return ranges, tuple(fixed)


def optimise(
    point: Point,
    ranges: Sequence[Range],
    objective: str,
    seeds: Sequence[int],
    num_trials: int,
    *,
    processes: int | None = None,
    dask: str | None = None,
    progress: Progress | None = None,
) -> Best:
    """The least mean over the seeds of a column of `measures.summary`, the most of goodput, fairness and utilisation.

    Raises:
        ConfigError: no such column; or as `run_sweep`.
        CheckFailed: no trial let all flows end.
    """
    from optuna.trial import TrialState

    study = new_study(0, maximise=objective in _LARGER_IS_BETTER)
    study.enqueue_trial({one.name: one.published for one in ranges})
    trials: list[Row] = []
    with standing(min(processes or len(seeds), len(seeds)), dask=dask) as submit:
        for number in range(num_trials):
            trial = study.ask({one.name: one.distribution for one in ranges})
            chosen = overrides_of(trial.params)
            trial_point = replace(point, overrides=point.overrides + chosen)
            rows = [one.result() for one in [submit(run_point, replace(trial_point, seed=seed)) for seed in seeds]]
            score = _mean(rows, objective)
            study.tell(trial, score, state=TrialState.FAIL if score is None else TrialState.COMPLETE)
            trials.append({"trial": number, **dict(one.split("=", 1) for one in chosen), objective: score})
            if progress:
                progress(len(trials), num_trials, f"best {_best(trials, objective)}")
    return _best_of(point, ranges, objective, trials)


def _best_of(point: Point, ranges: Sequence[Range], objective: str, trials: list[Row]) -> Best:
    best = _best(trials, objective)
    if best is None:
        raise CheckFailed(f"in none of {len(trials)} trials did all flows end")
    row = next(row for row in trials if row[objective] == best)
    fixed = tuple(one for one in point.overrides if one.startswith(OURS))
    chosen = tuple(f"{one.name}={row[one.name]}" for one in ranges)
    first = trials[0][objective]
    return Best(Contender(point.law, point.law, point.preset, fixed + chosen), best, first, trials)


def _best(trials: Sequence[Mapping[str, Any]], objective: str) -> float | None:
    scores = [row[objective] for row in trials if row[objective] is not None]
    return (max if objective in _LARGER_IS_BETTER else min)(scores, default=None)


def _mean(rows: Sequence[Row], objective: str) -> float | None:
    """Return the mean of the objective; None where a flow did not end."""
    columns = [name for name, value in rows[0].items() if isinstance(value, int | float) and name != "seed"]
    if objective not in rows[0]:
        raise ConfigError("--optimise", objective, "is no column", f"give one of {', '.join(columns)}")
    whole = all(row["ended"] == row["flows"] for row in rows)
    return statistics.fmean(row[objective] for row in rows) if whole else None


def _values(one: str) -> list[str]:
    """`name=value` for each of the values."""
    name, equals, text = one.partition("=")
    if not equals or name == _WITH_COMMAS:
        return [one]
    return [f"{name}={value}" for value in text.split(",")]


def _range(name: str, text: str, override: str, known: Range | None) -> Range:
    low_text, _, high_text = text.partition("..")
    try:
        low, high = float(low_text), float(high_text)
    except ValueError as exc:
        raise ConfigError("--set", override, "is no range", "write congestion.x=low..high") from exc
    if not (known and 0 <= low < high):
        rule = "has no ends in order" if known else "is nothing that can be searched"
        raise ConfigError("--set", override, rule, "write congestion.x=low..high, of a number that is not 0 by default")
    if isinstance(known.published, int):
        low, high = round(low), round(high)
    return Range(name, min(max(known.published, low), high), low, high)

"""One parameter set a law: an optimiser's search on the tuning set, the same for all, as ARENA.md says.

All laws search at once, a trial each a round; what a trial was is kept, so that a second start goes on. Left out: the
test set, which no tuner sees.
"""

from __future__ import annotations

import math
import statistics
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomlkit
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from congestion.arena import append, kept_rows, tight_buffers
from congestion.arena_protocol import SUITE, Case, Suite
from congestion.arena_run import Contender, lacking, run_one
from congestion.settings import Settings
from netlayer.errors import ConfigError
from netlayer.progress import Bar, Stages
from netlayer.results import write_text
from topology.workers import standing

TRIALS = "trials.jsonl"

_PREFIX = "congestion."
_EXCHANGED = (f"{_PREFIX}kmin_bytes", f"{_PREFIX}kmax_bytes")
_BELOW = 1 - 1e-3  # of a bound that a value may not reach
_FIGURES = 4  # significant, of a number that is drawn
_Map = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]


@dataclass(frozen=True)
class Range:
    """What is searched of a parameter: `name` as `--set` takes it; whole numbers where `published` is one."""

    name: str
    published: float
    low: float
    high: float

    @property
    def distribution(self) -> Any:
        """Optuna's: log-uniform, but for a range that begins at 0."""
        from optuna.distributions import FloatDistribution, IntDistribution

        if isinstance(self.published, int):
            return IntDistribution(int(self.low), int(self.high), log=self.low > 0)
        return FloatDistribution(self.low, self.high, log=self.low > 0)


@dataclass(frozen=True)
class Tuned:
    """What came of a law's search; scores are the protocol's, to be lowered."""

    contender: Contender
    score: float
    published_score: float
    num_parameters: int
    num_trials: int
    settled: bool


def ranges_of(contender: Contender, suite: Suite = SUITE, factor: float | None = None) -> list[Range]:
    """The switch's parameters and every number of the law's own section that is not 0, around the contender's values.

    Args:
        factor: from a value over this to times this; the protocol's where None.
    """
    settings, factor = contender.settings(), factor or suite.tuning.range_factor
    switch = [_range(_PREFIX, name, settings, factor) for name in suite.tuning.switch_parameters]
    section, prefix = _section(contender, settings)
    own = [_range(prefix, name, section, factor) for name in type(section).model_fields] if section else []
    return [one for one in (*switch, *own) if one and one.low < one.high]


def new_study(seed: int, *, maximise: bool = False) -> Any:
    """An optimiser as the protocol has it."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=seed)
    return optuna.create_study(sampler=sampler, direction="maximize" if maximise else "minimize")


def overrides_of(values: Mapping[str, float]) -> tuple[str, ...]:
    """As `--set` takes them, in few digits; kmin above kmax are exchanged."""
    values = {
        name: value if isinstance(value, int) else float(f"{value:.{_FIGURES}g}") for name, value in values.items()
    }
    low, high = _EXCHANGED
    if low in values and high in values and values[low] > values[high]:
        values |= {low: values[high], high: values[low]}
    return tuple(f"{name}={value}" for name, value in values.items())


def tune(
    contenders: Sequence[Contender], out: Path, stages: Stages, processes: int | None = None, suite: Suite = SUITE
) -> list[Tuned]:
    """The best of each law, also written to OUT/LAW.toml. Cases that the engine cannot run are left out of the score.

    Raises:
        ConfigError: `out` holds trials of another suite, of other settings, or by another version.
    """
    tuning = suite.tuning
    cases = [case for case in suite.tuning_set.cases if not lacking(case.condition)]
    buffers = tight_buffers(cases, out, stages, processes, suite)
    sized = [(case, int(buffers[case.workload.name, case.condition.name]["buffer_bytes"])) for case in cases]
    searches = [_Search(one, ranges_of(one, suite), tuning.optimiser_seed) for one in contenders]
    for row in kept_rows(out / TRIALS, contenders, suite):
        next(one for one in searches if one.contender.name == row["law"]).known[tuple(row["set"])] = row["score"]
    with standing(processes) as run:
        for each in range(tuning.trials_per_parameter, tuning.trials_most + 1, tuning.trials_step):
            with stages.open(f"{each} trials a parameter") as bar:
                _search(searches, each, sized, out, run, bar, suite)
            if all(tuning.has_settled(one.scores) for one in searches):
                break
    found = [_found(one, suite) for one in searches]
    for one in found:
        write_profile(out / f"{one.contender.name}.toml", one.contender, _words(one, suite))
    return found


def write_profile(path: Path, contender: Contender, words: Sequence[str]) -> None:
    """The settings as TOML, `words` as its comments."""
    document = tomlkit.document()
    for line in words:
        document.add(tomlkit.comment(line))
    document.add("law", tomlkit.item(contender.law))
    document.add("preset", tomlkit.item(contender.preset))
    tree: dict[str, Any] = {}
    for override in contender.overrides:
        path_, _, text = override.partition("=")
        *sections, name = path_.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = tomllib.loads(f"x = {text}")["x"]
    document.update(tree)
    write_text(path, tomlkit.dumps(document))


def read_profile(path: Path) -> Contender:
    """The law with the settings of a profile.

    Raises:
        ConfigError: the file cannot be read, is no profile, or sets what is unknown.
    """
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
        law, preset, settings = str(tree["law"]), str(tree["preset"]), tree["congestion"]
    except (OSError, ValueError, KeyError) as exc:
        remedy = "give a file that `netlayer arena --tune` or `netlayer sweep --optimise` wrote"
        raise ConfigError("--tuned", path, f"is no profile ({exc})", remedy) from exc
    contender = Contender(law, law, preset, tuple(f"{name}={value}" for name, value in _flat(settings, _PREFIX)))
    contender.settings()
    return contender


class _Search:
    """One law's study; `known` are trials of an earlier start, by their settings."""

    def __init__(self, contender: Contender, ranges: Sequence[Range], seed: int) -> None:
        self.contender, self.ranges = contender, ranges
        self.known: dict[tuple[str, ...], float] = {}
        self.scores: list[float] = []
        self.study = new_study(seed)
        self.study.enqueue_trial({one.name: one.published for one in ranges})

    def ask(self) -> tuple[Any, Contender]:
        trial = self.study.ask({one.name: one.distribution for one in self.ranges})
        return trial, replace(self.contender, overrides=overrides_of(trial.params))

    def tell(self, trial: Any, score: float) -> None:
        self.study.tell(trial, score)
        self.scores.append(score)


def _search(
    searches: Sequence[_Search],
    trials_per_parameter: int,
    cases: Sequence[tuple[Case, int]],
    out: Path,
    run: _Map,
    bar: Bar,
    suite: Suite,
) -> None:
    """Trials until every law has so many a parameter."""
    total = sum(trials_per_parameter * len(one.ranges) for one in searches)
    while unfinished := [one for one in searches if len(one.scores) < trials_per_parameter * len(one.ranges)]:
        asked = [(one, *one.ask()) for one in unfinished]
        new = [(search, contender) for search, _, contender in asked if contender.overrides not in search.known]
        tasks = [(contender, case, size, suite) for _, contender in new for case, size in cases]
        results = run(_run_case, tasks)
        for place, (search, contender) in enumerate(new):
            its = results[place * len(cases) : (place + 1) * len(cases)]
            score = _score(its, suite)
            search.known[contender.overrides] = score
            kept = {"law": contender.name, "set": contender.overrides, "score": score}
            append(out / TRIALS, [{**kept, "suite": suite.digest, "contender": search.contender.digest}])
        for search, trial, contender in asked:
            search.tell(trial, search.known[contender.overrides])
        bar(sum(len(one.scores) for one in searches), total)


def _run_case(task: tuple[Contender, Case, int, Suite]) -> tuple[float, float]:
    """Mean completion time and pause share over the tuning seeds."""
    contender, case, buffer_bytes, suite = task
    runs = [run_one(contender, case, seed, buffer_bytes, suite=suite) for seed in suite.tuning_set.seeds]
    means = (statistics.fmean(run[key] for run in runs) for key in ("completion_us", "pause_share"))
    completion_us, pause_share = means
    return completion_us, pause_share


def _score(cases: Sequence[tuple[float, float]], suite: Suite) -> float:
    weight = suite.tuning.pause_weight
    return statistics.geometric_mean([completion_us * (1 + weight * share) for completion_us, share in cases])


def _found(search: _Search, suite: Suite) -> Tuned:
    best = min(search.known, key=lambda overrides: search.known[overrides])
    return Tuned(
        replace(search.contender, overrides=best),
        search.known[best],
        search.scores[0],
        len(search.ranges),
        len(search.scores),
        suite.tuning.has_settled(search.scores),
    )


def _words(found: Tuned, suite: Suite) -> list[str]:
    end = "settled" if found.settled else "not settled"
    left = {lacking(case.condition) for case in suite.tuning_set.cases} - {""}
    return [
        f"{found.contender.name}: {found.num_trials} trials over {found.num_parameters} parameters, {end}",
        f"score {found.score:.6g}, of the published values {found.published_score:.6g}; suite {suite.digest}",
        *(f"without the tuning cases that need {reason}" for reason in sorted(left)),
    ]


def _section(contender: Contender, settings: Settings) -> tuple[BaseModel | None, str]:
    """The law's own numbers, and how their names begin."""
    if contender.file is None:
        return getattr(settings, contender.law, None), f"{_PREFIX}{contender.law}."
    from congestion.control import entered

    entered.enter(contender.file)
    kind = getattr(entered.law, "Section", None)
    own = kind(**settings.entered) if isinstance(kind, type) and issubclass(kind, BaseModel) else None
    return own, f"{_PREFIX}entered."


def _range(prefix: str, name: str, section: BaseModel, factor: float) -> Range | None:
    """None of what is no number, or 0: off."""
    value = getattr(section, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value:
        return None
    least, most = _bounds(type(section).model_fields[name])
    low, high = max(value / factor, least), min(value * factor, most)
    if isinstance(value, int):
        low, high = max(1, math.ceil(low)), math.floor(high)
    return Range(prefix + name, value, low, high)


def _bounds(field: FieldInfo) -> tuple[float, float]:
    """The least and the most that the field allows; a least that may not be reached is 0 here always."""
    least, most = 0.0, math.inf
    for rule in field.metadata:
        least = max(least, getattr(rule, "ge", least))
        most = min(most, getattr(rule, "le", most), getattr(rule, "lt", most / _BELOW) * _BELOW)
    return least, most


def _flat(tree: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        found += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]
    return found

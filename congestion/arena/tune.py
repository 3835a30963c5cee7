"""One parameter set a law: an optimiser's search on the tuning set, the same for all, as ARENA.md says.

A law's trials come one after another; the laws search side by side, and the runs of a trial are spread over all
workers. What a trial scored is a line of OUT/trials.jsonl, so that a second start goes on: the optimiser is asked for
the same trials again, which takes it a tenth of a second each, and none of them is run twice. Neither the workers'
number nor their speed changes what is found. Not covered: the test set, which no tuner sees.
"""

from __future__ import annotations

import queue
import statistics
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from congestion.arena.protocol import SUITE, Case, Suite
from congestion.arena.run import Contender, enter_law, lacking, law_file, run_one
from congestion.arena.runner import append, compile_first, kept_rows, remaining, tight_buffers
from congestion.arena.tune_profile import write_profile
from congestion.arena.tune_ranges import ranges_of
from congestion.arena.tune_study import Question, ask, begin
from netlayer.progress import Bar, Stages
from topology.workers import Submit, standing

TRIALS = "trials.jsonl"

_TASK_LINK_HOPS = 600_000  # of the runs that go to a worker together: some 50 ms


@dataclass(frozen=True)
class Tuned:
    """Result of a law's search; scores are the protocol's, to be lowered."""

    contender: Contender
    score: float
    published_score: float
    num_parameters: int
    num_trials: int
    settled: bool


def tune(
    contenders: Sequence[Contender], out: Path, stages: Stages, processes: int | None = None, suite: Suite = SUITE
) -> list[Tuned]:
    """The best of each law, also written to OUT/LAW.toml. Cases that the engine cannot run are omitted from the score.

    Raises:
        ConfigError: `out` holds trials of another suite, of other settings, or by another version.
    """
    tuning = suite.tuning
    cases = [case for case in suite.tuning_set.cases if not lacking(case.condition)]
    compile_first(contenders, cases, stages, suite)
    buffers = tight_buffers(cases, out, stages, processes, suite)
    sizes = {place: int(row["buffer_bytes"]) for place, row in buffers.items()}
    sized = [(case, sizes[case.workload.name, case.condition.name]) for case in cases]
    runs = _Runs(sized, suite, law_file(contenders))
    searches = [_Search(one, out, runs) for one in contenders]
    for row in kept_rows(out / TRIALS, contenders, suite):
        next(one for one in searches if one.contender.name == row["law"]).known[tuple(row["set"])] = row["score"]
    with standing(processes) as submit:
        for each in range(tuning.trials_per_parameter, tuning.trials_most + 1, tuning.trials_step):
            with stages.open(f"{each} trials a parameter") as bar:
                _search(searches, each, submit, bar)
            if all(tuning.has_settled(one.scores[: each * len(one.ranges)]) for one in searches):
                break
    results = [_tuned_of(one, suite) for one in searches]
    for tuned in results:
        write_profile(out / f"{tuned.contender.name}.toml", tuned.contender, _comments(tuned, suite))
    return results


@dataclass(frozen=True)
class _Task:
    """Some seeds of a tuning case under a trial's settings.

    Args:
        law_file: of all laws that are tuned, whose tasks share workers.
    """

    contender: Contender
    case: Case
    buffer_bytes: int
    seeds: tuple[int, ...]
    suite: Suite
    law_file: Path | None


@dataclass(frozen=True)
class _Runs:
    """Runs of a trial: cases with their buffers, and the law's file that workers enter."""

    cases: Sequence[tuple[Case, int]]
    suite: Suite
    law_file: Path | None

    def tasks(self, contender: Contender) -> list[_Task]:
        """The long ones first, so that no worker is left with one at the end."""
        seeds, tasks = self.suite.tuning_set.seeds, []
        for case, size in sorted(self.cases, key=lambda one: -one[0].workload.link_hops):
            many = max(1, _TASK_LINK_HOPS // case.workload.link_hops)
            tasks += [
                _Task(contender, case, size, seeds[at : at + many], self.suite, self.law_file)
                for at in range(0, len(seeds), many)
            ]
        return tasks

    def score(self, results: Sequence[tuple[_Task, list[tuple[float, float]]]]) -> float:
        """Compute the score from (completion time, pause share) of each seed of each task, in `tasks`'s order."""
        weight, by_case = self.suite.tuning.pause_weight, dict[str, list[tuple[float, float]]]()
        for task, pairs in results:
            by_case.setdefault(task.case.name, []).extend(pairs)
        means = [[statistics.fmean(column) for column in zip(*pairs, strict=True)] for pairs in by_case.values()]
        return statistics.geometric_mean([completion_us * (1 + weight * share) for completion_us, share in means])


class _Search:
    """One law's search: a question to the optimiser, then the runs of its trial, then the next question.

    `known` are scores of an earlier start too, by settings; `scores` those of the trials so far, in their order.
    """

    def __init__(self, contender: Contender, out: Path, runs: _Runs) -> None:
        self.contender, self.runs, self._out = contender, runs, out
        self.ranges = ranges_of(contender, runs.suite)
        self.known: dict[tuple[str, ...], float] = {}
        self.scores: list[float] = []
        self._suggestion = begin(self.ranges, runs.suite.tuning.optimiser_seed)
        self._trial = contender
        self._open: dict[Future[Any], int] = {}
        self._results: list[Any] = []

    def go_on(self, submit: Submit) -> list[Future[Any]]:
        """Ask for the next trial."""
        score = self.scores[-1] if self.scores else None
        return [submit(ask, Question(self._suggestion, score, self.ranges))]

    def take(self, future: Future[Any], submit: Submit, goal: int) -> list[Future[Any]]:
        """Something that was submitted is done; return what to wait for now, besides what is under way."""
        if future in self._open:
            self._results[self._open.pop(future)] = future.result()
            return [] if self._open else self._end(submit, goal, self._score())
        self._suggestion = future.result()
        self._trial = replace(self.contender, overrides=self._suggestion.overrides)
        if self._trial.overrides in self.known:
            return self._end(submit, goal, self.known[self._trial.overrides])
        tasks = self.runs.tasks(self._trial)
        self._results = [None] * len(tasks)
        self._open = {submit(_run, task): index for index, task in enumerate(tasks)}
        return list(self._open)

    def _score(self) -> float:
        score = self.runs.score(list(zip(self.runs.tasks(self._trial), self._results, strict=True)))
        row = {"law": self.contender.name, "set": self._trial.overrides, "score": score}
        append(self._out / TRIALS, [{**row, "suite": self._identity[0], "contender": self._identity[1]}])
        self.known[self._trial.overrides] = score
        return score

    def _end(self, submit: Submit, goal: int, score: float) -> list[Future[Any]]:
        self.scores.append(score)
        return self.go_on(submit) if len(self.scores) < goal else []

    @property
    def _identity(self) -> tuple[str, str]:
        return self.runs.suite.digest, self.contender.digest


def _search(searches: Sequence[_Search], trials_per_parameter: int, submit: Submit, bar: Bar) -> None:
    """Trials until every law has so many a parameter."""
    ended: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
    whose: dict[Future[Any], _Search] = {}

    def await_(futures: Sequence[Future[Any]], search: _Search) -> None:
        whose.update(dict.fromkeys(futures, search))
        for future in futures:
            future.add_done_callback(ended.put)

    goals = {one.contender.name: trials_per_parameter * len(one.ranges) for one in searches}
    total, time_left = sum(goals.values()), remaining(sum(len(one.scores) for one in searches))
    for one in searches:
        if len(one.scores) < goals[one.contender.name]:
            await_(one.go_on(submit), one)
    while whose:
        future = ended.get()
        search = whose.pop(future)
        await_(search.take(future, submit, goals[search.contender.name]), search)
        so_far = sum(len(one.scores) for one in searches)
        bar(so_far, total, time_left(so_far, total))


def _run(task: _Task) -> list[tuple[float, float]]:
    """Completion time, us, and pause share of each seed."""
    enter_law(task.law_file)
    runs = [run_one(task.contender, task.case, seed, task.buffer_bytes, suite=task.suite) for seed in task.seeds]
    return [(run["completion_us"], run["pause_share"]) for run in runs]


def _tuned_of(search: _Search, suite: Suite) -> Tuned:
    best = min(search.known, key=lambda overrides: search.known[overrides])
    return Tuned(
        replace(search.contender, overrides=best),
        search.known[best],
        search.scores[0],
        len(search.ranges),
        len(search.scores),
        suite.tuning.has_settled(search.scores),
    )


def _comments(tuned: Tuned, suite: Suite) -> list[str]:
    end = "settled" if tuned.settled else "not settled"
    left = {lacking(case.condition) for case in suite.tuning_set.cases} - {""}
    return [
        f"{tuned.contender.name}: {tuned.num_trials} trials over {tuned.num_parameters} parameters, {end}",
        f"score {tuned.score:.6g}, of the published values {tuned.published_score:.6g}; suite {suite.digest}",
        *(f"without the tuning cases that need {reason}" for reason in sorted(left)),
    ]

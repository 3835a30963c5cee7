"""The arena's runner: cases x laws x seeds in processes; a run is a line of OUT/rows.jsonl, which a second start reads.

Seeds come one after another, all cases of each, so that what an interrupted run leaves is the whole suite with fewer
seeds. Not covered: one run (arena.run), and what is made of the rows (arena.output).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from congestion.arena.protocol import SUITE, Case, Suite
from congestion.arena.run import (
    Contender,
    Row,
    enter_law,
    lacking,
    law_file,
    published,
    run_one,
    settings_in,
    tight_buffer,
)
from congestion.kernels.compile import compile_variants
from netlayer.errors import ConfigError
from netlayer.progress import Stages
from topology.workers import in_order_of_end

ROWS, BUFFERS = "rows.jsonl", "buffers.jsonl"

_QUICK_CONDITION, _QUICK_SEEDS = "200G-ecmp", 3
_MINUTES_FROM_S = 120
_MOST_TOGETHER = 8  # contenders in one task
_SAMPLED = ("all-to-all", "incast")  # scenarios whose drawn cases are kept over time too
_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True)
class Plan:
    """Plan of all contenders under each case and seed; `not_run` are cases and what the engine lacks for them."""

    contenders: tuple[Contender, ...]
    cases: tuple[Case, ...]
    seeds: tuple[int, ...]
    not_run: tuple[tuple[Case, str], ...] = ()
    suite: Suite = SUITE

    @property
    def num_runs(self) -> int:
        return len(self.contenders) * len(self.cases) * len(self.seeds)


@dataclass(frozen=True)
class Results:
    """A plan's rows, case by case, and the buffers that its cases ran with, those that were searched for."""

    plan: Plan
    rows: list[Row]
    buffers: list[Row]


def plan_of(
    contenders: Sequence[Contender],
    *,
    num_seeds: int | None = None,
    only: Sequence[str] = (),
    quick: bool = False,
    suite: Suite = SUITE,
) -> Plan:
    """The test set, or a part of it.

    Args:
        num_seeds: the first so many; all where None.
        only: texts, one of which a case's name, `workload/condition`, contains; empty is all.
        quick: one condition and three seeds, where nothing else is said.

    Raises:
        ConfigError: no case is left, or more seeds are asked for than the suite has.
    """
    only = only or ([_QUICK_CONDITION] if quick else [""])
    num_seeds = num_seeds or (_QUICK_SEEDS if quick else len(suite.test.seeds))
    if num_seeds > len(suite.test.seeds):
        raise ConfigError("--seeds", num_seeds, f"is more than the suite's {len(suite.test.seeds)}", "lower it")
    requested = [case for case in suite.test.cases if any(text in case.name for text in only)]
    cases = tuple(case for case in requested if not lacking(case.condition))
    not_run = tuple((case, lacking(case.condition)) for case in requested if lacking(case.condition))
    if not cases:
        rule = f"needs {not_run[0][1]}, which the engine lacks" if not_run else "is in the name of no case"
        raise ConfigError("--only", ", ".join(only), rule, "give a part of one, such as incast or 200G-ecmp")
    return Plan(tuple(contenders), cases, suite.test.seeds[:num_seeds], not_run, suite)


def run_arena(plan: Plan, out: Path, stages: Stages, processes: int | None = None) -> Results:
    """All rows of the plan; those that the folder `out` has are not run again. Ctrl-C leaves there what was measured.

    Args:
        processes: workers, one kernel thread each; a core each where None.

    Raises:
        ConfigError: `out` holds rows of another suite, or of a contender with other settings or by another version.
    """
    file = out / ROWS
    rows = {_key(row): row for row in kept_rows(file, plan.contenders, plan.suite)}
    order = [(one.name, *_place(case), seed) for case in plan.cases for seed in plan.seeds for one in plan.contenders]
    if not rows.keys() >= set(order):
        compile_first(plan.contenders, plan.cases, stages, plan.suite)
    buffers = tight_buffers(plan.cases, out, stages, processes, plan.suite)
    file_entered = law_file(plan.contenders)
    tasks = [
        _Task(
            lacks, case, seed, _buffer(case, buffers, plan.suite), _is_drawn(case, seed, plan), plan.suite, file_entered
        )
        for seed in plan.seeds
        for case in plan.cases
        for lacks in _together([one for one in plan.contenders if (one.name, *_place(case), seed) not in rows])
    ]
    num_kept = plan.num_runs - sum(len(task.contenders) for task in tasks)
    if num_kept:
        stages.say(f"{num_kept:,} of {plan.num_runs:,} runs stand in {file} already")
    for made in each(_run_task, tasks, lambda task: task.link_hops, stages, "runs", processes):
        append(file, made)
        rows |= {_key(row): row for row in made}
    return Results(plan, [rows[key] for key in order], list(buffers.values()))


def tight_buffers(
    cases: Sequence[Case], out: Path, stages: Stages, processes: int | None = None, suite: Suite = SUITE
) -> dict[tuple[str, str], Row]:
    """Find the buffer for each case that is run with a tight one (`arena.run.tight_buffer`), in processes side by side.

    Rows are kept in a file of `out`, and what stands there already is not found again.

    Returns:
        rows by workload and condition.
    """
    file = out / BUFFERS
    tight_cases = [case for case in cases if case.condition.buffer == "tight"]
    known = {(row["workload"], row["condition"]): row for row in kept_rows(file, [published("dcqcn", suite)], suite)}
    missing = [(case, suite) for case in tight_cases if _place(case) not in known]
    for row in each(_find_buffer, missing, lambda task: task[0].workload.link_hops, stages, "buffers", processes):
        append(file, [row])
        known[row["workload"], row["condition"]] = row
    return {_place(case): known[_place(case)] for case in tight_cases}


def compile_first(contenders: Sequence[Contender], cases: Sequence[Case], stages: Stages, suite: Suite = SUITE) -> None:
    """The kernels, if they are not kept from before: here, or every worker would compile them for itself."""
    conditions = {case.condition for case in cases}
    compile_variants((settings_in(one, condition, suite) for condition in conditions for one in contenders), stages)


def kept_rows(file: Path, contenders: Sequence[Contender], suite: Suite) -> list[Row]:
    """Rows of these contenders that an earlier start left; a line that it did not finish is dropped.

    Raises:
        ConfigError: a row is of another suite, or of a contender with other settings or by another version.
    """
    if not file.exists():
        return []
    text = file.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if whole != text:
        file.write_bytes(whole)
    digests = {one.name: one.digest for one in contenders}
    remedy = "give a new folder, or remove that file"
    rows = []
    for line in whole.splitlines():
        row = json.loads(line)
        name = row["law"]
        if row["suite"] != suite.digest:
            raise ConfigError(
                "--out", file, f"holds rows of the suite {row['suite'][:12]}, not {suite.digest[:12]}", remedy
            )
        if row["contender"] != digests.get(name, row["contender"]):
            raise ConfigError("--out", file, f"{name} ran there with other settings or by another version", remedy)
        if name in digests:
            rows.append(row)
    return rows


def append(file: Path, rows: Sequence[Row]) -> None:
    with file.open("a", encoding="utf-8") as lines:
        lines.write("".join(json.dumps(row) + "\n" for row in rows))


def each(
    function: Callable[[_T], _R],
    tasks: Sequence[_T],
    work: Callable[[_T], int],
    stages: Stages,
    name: str,
    processes: int | None,
) -> Iterator[_R]:
    """Results as they come, with a bar that says how long the rest will take by the `work` done so far."""
    if not tasks:
        return
    total, done, time_left = sum(map(work, tasks)), 0, remaining()
    with stages.open(name) as bar, contextlib.closing(in_order_of_end(function, tasks, processes=processes)) as results:
        bar(0, total)
        for index, result in results:
            yield result
            done += work(tasks[index])
            bar(done, total, time_left(done, total))


def remaining(before: float = 0) -> Callable[[float, float], str]:
    """Return a function from (done, total) to the time left at the pace since now; `before` was done already."""
    began = time.monotonic()

    def time_left(done: float, total: float) -> str:
        if done <= before:
            return ""
        left_s = (time.monotonic() - began) * (total - done) / (done - before)
        return f"{left_s:.0f} s left" if left_s < _MINUTES_FROM_S else f"{left_s / 60:.0f} min left"

    return time_left


@dataclass(frozen=True)
class _Task:
    """A case and a seed under contenders that lack it, of few all: pairs are complete whenever the run ends.

    Args:
        law_file: of the whole plan, whose contender may be in another task of the same worker.
    """

    contenders: tuple[Contender, ...]
    case: Case
    seed: int
    buffer_bytes: int
    is_drawn: bool
    suite: Suite
    law_file: Path | None

    @property
    def link_hops(self) -> int:
        return self.case.workload.link_hops * len(self.contenders)


def _run_task(task: _Task) -> list[Row]:
    enter_law(task.law_file)
    keeps = {"keep_flows": task.is_drawn, "keep_samples": task.is_drawn and task.case.workload.scenario in _SAMPLED}
    return [run_one(one, task.case, task.seed, task.buffer_bytes, suite=task.suite, **keeps) for one in task.contenders]


def _together(contenders: Sequence[Contender]) -> list[tuple[Contender, ...]]:
    """Group contenders that share the workload's paths; not too many at once, or a killed run would lose much."""
    return [tuple(contenders[at : at + _MOST_TOGETHER]) for at in range(0, len(contenders), _MOST_TOGETHER)]


def _find_buffer(task: tuple[Case, Suite]) -> Row:
    return tight_buffer(*task)


def _buffer(case: Case, buffers: Mapping[tuple[str, str], Row], suite: Suite) -> int:
    row = buffers.get(_place(case))
    return int(row["buffer_bytes"]) if row else suite.rules.buffers_bytes[0]


def _is_drawn(case: Case, seed: int, plan: Plan) -> bool:
    """Whether the page draws its flows: the first seed of each workload under the first condition."""
    return seed == plan.seeds[0] and case.condition == plan.cases[0].condition


def _place(case: Case) -> tuple[str, str]:
    return case.workload.name, case.condition.name


def _key(row: Row) -> tuple[str, str, str, int]:
    return row["law"], row["workload"], row["condition"], row["seed"]

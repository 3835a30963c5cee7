"""Who is late: a group that stands still is evidence, one that gets on is given time, and accused of nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from bench.accept.agents.fleet import _MOST_MOVING, _MOST_RUNNING, Fleet, Outcome, Where
from bench.accept.agents.links import start_ssh
from bench.accept.phases.trial import Trial
from bench.accept.phases.work import work_for
from bench.accept.run import Result, flag_late, members_of
from bench.accept.run_output import judgement_of, sentence

GROUP = (0, 1, 2, 3)
Seen = Callable[[int, int], Where]
"""Where a rank is seen: the rank, and how often was looked."""


class Watched(Fleet):
    """A fleet of no processes: what its agents would see is told by a function."""

    def __init__(self, seen: Seen) -> None:
        super().__init__([])
        self._seen, self.looks = seen, 0

    def _wait(self, done: Any, limit_s: float) -> None:
        """Time does not pass."""

    def _where(self, outcomes: Iterable[Outcome]) -> dict[int, Where]:
        self.looks += 1
        return {rank: self._seen(rank, self.looks) for one in outcomes for rank in one.group}

    def _late(self, outcomes: Collection[Outcome]) -> list[Outcome]:
        return [one for one in outcomes if not self._settled(one)]

    def settle(self, outcome: Outcome) -> Outcome:
        while late := self._late([outcome]):
            self._look_at(late)
        return outcome


def late(group: Sequence[int] = GROUP, formed: int = 4) -> Outcome:
    return Outcome(tuple(group), formed=set(group[:formed]))


def test_a_group_of_which_any_rank_gets_on_is_slow_at_last_and_nobody_hangs() -> None:
    outcome = Watched(lambda rank, looks: Where(5 + looks if rank == 1 else 3 * rank, 2, "S")).settle(late())
    assert (outcome.where, outcome.longer, outcome.slow_s > 0) == ({}, _MOST_MOVING, True)


def test_ranks_that_stand_still_are_evidence_at_once() -> None:
    fleet = Watched(lambda rank, _: Where(3 if rank == 2 else 9, 2, "S"))
    outcome = fleet.settle(late())
    assert (outcome.where[2].launched, outcome.longer, outcome.slow_s) == (3, 0, 0)


@pytest.mark.parametrize(
    ("states", "formed", "longer"),
    [
        ("SSRS", 4, _MOST_RUNNING),  # the slowest rank may wait for a core
        ("RRSR", 4, 0),  # the ranks that wait for it may spin, as on GPUs
        ("SSSR", 3, _MOST_RUNNING),  # the slowest rank has not joined yet
    ],
)
def test_the_slowest_rank_gets_more_time_while_it_runs(states: str, formed: int, longer: int) -> None:
    fleet = Watched(lambda rank, _: Where(3 if rank == 2 else 9, 2, states[rank]))
    outcome = fleet.settle(late(formed=formed))
    assert (outcome.longer, set(outcome.where)) == (longer, set(GROUP))


def test_a_rank_that_works_alone_is_given_time_too() -> None:
    assert Watched(lambda *_: Where(0, 0, "R")).settle(late((0,), 1)).longer == _MOST_RUNNING


class SlowFleet:
    """Stands in for `Fleet.run`: everything is too slow."""

    def run(self, _name: str, _args: object, groups: Iterable[Sequence[int]], _limit_s: float) -> list[Outcome]:
        return [Outcome(tuple(group), slow_s=60.0) for group in groups]


def test_what_is_too_slow_is_a_warning_about_all_and_sets_nobody_aside() -> None:
    trial = Trial(cast(Fleet, SlowFleet()), members_of([("localhost", 4)], 1), work_for("gloo", None), list(GROUP))
    assert trial.together("pairs", "pairs", {}, [GROUP], turns=False) == []
    [finding] = trial.findings
    assert (finding.verdict, finding.figure) == ("WARN", "too slow: not done within 60 s")
    assert trial.alive == list(GROUP)
    assert judgement_of(Result(trial)).verdict == "WARN"
    assert sentence(Result(trial)).startswith("to look at: node0 - node1 - node2 - node3 (pairs); ")


@pytest.mark.parametrize(
    ("line", "code", "verdict", "step"),
    [
        ("ModuleNotFoundError: No module named 'redis'", 1, "WARN", "install netlayer with its libraries on node1"),
        ("ssh: connect to host node1 port 22: No route to host", 255, "FAIL", "see whether ssh node1 works"),
        ("root@node1: Permission denied (publickey).", 255, "FAIL", "ssh-copy-id node1"),
        ("Host key verification failed.", 255, "FAIL", "accept it by hand: ssh node1"),
        ("bash: line 1: cd: /opt/netlayer: No such file or directory", 1, "FAIL", "install netlayer on node1"),
        ("", 1, "FAIL", "see whether ssh node1 works"),
    ],
)
def test_a_host_without_a_library_was_not_measured_and_is_not_drained(
    line: str, code: int, verdict: str, step: str, tmp_path: Path
) -> None:
    (tmp_path / "ssh").write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{line}\nEND\nexit {code}\n")
    (tmp_path / "ssh").chmod(0o755)
    members = members_of([("node0", 1), ("node1", 1)], 0)
    trial = Trial(Fleet([]), members, work_for("gloo", None), [0, 1])
    with (tmp_path / "log").open("w+b") as log:
        link = start_ssh("node1", [1], str(tmp_path / "ssh"), log)
        assert link.hear() is None  # it has said all
        flag_late(trial, link)
        link.close()
    assert [one.verdict for one in trial.suspects] == [verdict]
    assert step in trial.findings[0].next_step
    assert trial.findings[0].figure == ": ".join(filter(None, ["its agent did not start", line]))
    assert trial.alive == [0]

"""Outliers among pairs that share cores are flagged only if they are slow again, in turns with good pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from bench.accept.agents.fleet import Fleet, Outcome
from bench.accept.phases.pairing import measure_pairs
from bench.accept.phases.trial import Trial
from bench.accept.phases.work import work_for
from bench.accept.run import members_of
from netlayer.verdict import Finding
from tests.bench.simulated_fleet import SimulatedFleet, World

NODES = 8


class Crowded(SimulatedFleet):
    """Some pairs are slow by chance while all run at once; alone every pair is five times faster. Simulated."""

    def __init__(self, world: World, unlucky: set[frozenset[int]]) -> None:
        super().__init__(world, seed=0)
        self._unlucky = unlucky

    def _pairs(self, group: tuple[int, ...], only: Sequence[tuple[int, ...]]) -> list[dict[str, Any]]:
        rows = super()._pairs(group, only)
        for row in rows:
            ends = frozenset({group[row["rank"]], group[row["peer"]]})
            factor = 0.2 if only else 20.0 if ends in self._unlucky else 1.0
            for key in ("p50_us", "p99_us", "min_us"):
                row[key] *= factor
        return rows


@pytest.mark.parametrize("planted", [(), (2, 5), (3,)])
def test_chance_is_cleared_and_a_fault_is_not(planted: tuple[int, ...]) -> None:
    kind: Any = {0: "none", 1: "slow node", 2: "slow link"}[len(planted)]
    unlucky = {frozenset(pair) for pair in ((0, 1), (0, 4), (6, 7), (1, 7))}
    fleet = Crowded(World(kind, planted, 30.0, noise=0.02), unlucky)
    work = replace(work_for("gloo", None), turn_s=0.0)
    trial = Trial(cast(Fleet, fleet), members_of([("localhost", NODES)], 1), work, list(range(NODES)))
    measure_pairs(trial, lambda _done, _total, _words: None)
    assert [(one.ranks, one.verdict) for one in trial.suspects] == ([(planted, "FAIL")] if planted else [])
    assert fleet.num_tasks > 3  # the unlucky ones were measured again


def test_the_links_of_a_rank_that_is_slow_itself_are_not_flagged() -> None:
    fleet = Crowded(World("slow link", (2, 5), 30.0, noise=0.02), set())
    work = replace(work_for("gloo", None), turn_s=0.0)
    trial = Trial(cast(Fleet, fleet), members_of([("localhost", NODES)], 1), work, list(range(NODES)))
    paused = Finding("FAIL", trial.label([5]), "gemm, steadily", "pauses", "means like its peers'", "", "gemm")
    trial.flag("gemm", "node", [5], paused)
    measure_pairs(trial, lambda _done, _total, _words: None)
    assert [one.ranks for one in trial.suspects] == [(5,)]
    [passed] = [one for one in trial.findings if one.check == "pairs"]
    assert passed.verdict == "PASS"
    assert passed.subject == "21 pairs of 7"
    assert "slow itself" in passed.expected
    assert "node5" not in passed.figure


def test_an_outcome_knows_that_it_failed() -> None:
    assert not Outcome((0, 1)).failed
    assert Outcome((0, 1), dead={1: "gone"}).failed

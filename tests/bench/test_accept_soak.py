"""Who drifted in a soak: what all ranks have in common accuses nobody. Times are made up."""

from __future__ import annotations

from typing import Any, cast

import pytest

from bench.accept.agents.fleet import Fleet
from bench.accept.phases.soak import _conclude
from bench.accept.phases.trial import Trial
from bench.accept.phases.work import work_for
from bench.accept.run import members_of

NODES, CYCLES = 8, 12
Case = tuple[str, float, dict[int, float]]
"""Backend, how much slower all get in the last third, and some beyond that."""


def judged(backend: str, common: float, own: dict[int, float], ranks: int = NODES) -> Trial:
    trial = Trial(cast(Fleet, None), members_of([("localhost", ranks)], 1), work_for(backend, None), list(range(ranks)))

    def series(factor: float) -> list[float]:
        return [100.0] * (CYCLES * 2 // 3) + [100.0 * factor] * (CYCLES // 3)

    times: dict[Any, list[float]] = {("gemm", (rank,)): series(common * own.get(rank, 1.0)) for rank in range(ranks)}
    times["all_reduce", tuple(range(ranks))] = series(common)
    _conclude(trial, times, CYCLES)
    return trial


@pytest.mark.parametrize(
    ("case", "suspects", "verdicts"),
    [
        (("gloo", 1.0, {}), {}, ["PASS"]),
        (("gloo", 2.0, {}), {}, ["WARN", "WARN"]),
        (("gloo", 1.0, {3: 2.0}), {(3,): "FAIL"}, ["FAIL"]),
        (("gloo", 2.0, {3: 2.0}), {(3,): "FAIL"}, ["FAIL", "WARN", "WARN"]),
        (("gloo", 1.0, {3: 1.4}), {(3,): "WARN"}, ["WARN"]),
        (("nccl", 1.2, {}), {}, ["FAIL", "FAIL"]),
        (("nccl", 1.0, {5: 1.1}), {(5,): "WARN"}, ["WARN"]),
    ],
    ids=["quiet", "load on all", "one", "one, and load on all", "one, somewhat", "hot room", "one GPU, somewhat"],
)
def test_who_drifted_is_told_from_what_all_have_in_common(
    case: Case, suspects: dict[tuple[int, ...], str], verdicts: list[str]
) -> None:
    trial = judged(*case)
    assert {one.ranks: one.verdict for one in trial.suspects} == suspects
    assert sorted(str(finding.verdict) for finding in trial.findings) == verdicts


def test_the_step_on_shared_cores_is_to_look_at_the_machine() -> None:
    steps = {finding.next_step for finding in judged("gloo", 2.0, {}).findings}
    assert steps == {"run it again while nothing else runs on this machine (top)"}


def test_two_ranks_have_no_peers_to_be_told_from() -> None:
    assert {one.ranks for one in judged("nccl", 1.2, {}, ranks=2).suspects} == {(0,), (1,)}

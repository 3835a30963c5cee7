"""Naming the culprit: bisection, the matrix of pairs, and whole runs over simulated rows (`simulated_fleet`)."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast, get_args

import pytest
import torch
from _pytest.mark import ParameterSet
from hypothesis import given
from hypothesis import strategies as st

from bench.accept.agents.fleet import Fleet, Outcome, Where
from bench.accept.phases import probes
from bench.accept.phases import run as phases
from bench.accept.phases.bisect import Culprits, find_culprits
from bench.accept.phases.matrix import judge_matrix
from bench.accept.phases.pairing import measure_pairs
from bench.accept.phases.trial import Trial, evidence
from bench.accept.phases.work import work_for
from bench.accept.run import members_of
from tests.bench.simulated_fleet import FaultKind, SimulatedFleet, World

_CHOSEN = ("gemm", "copy", "all_to_all", "neighbours", "all_reduce", "pairs", "rails", "latency", "train")


def silent(_done: int, _total: int, _words: str) -> None:
    """Progress that nobody watches."""


def try_world(world: World, num_ranks: int, seed: int) -> Trial:
    """All phases over a world; one rank a node."""
    fleet = SimulatedFleet(world, seed)
    trial = Trial(cast(Fleet, fleet), members_of([("localhost", num_ranks)], 1), work_for("nccl", None))
    trial.alive = list(range(num_ranks))
    for name in _CHOSEN:
        if name == "pairs":
            measure_pairs(trial, silent)
        else:
            phases.PHASES[name](trial, silent)
    return trial


def draw_world(seed: int) -> tuple[World, int]:
    draw = random.Random(seed)
    kind: FaultKind = get_args(FaultKind)[1:][seed % 8]
    num_ranks = draw.choice((8, 13, 16, 32))
    ranks = tuple(sorted(draw.sample(range(num_ranks), 2 if kind.endswith("link") else 1)))
    return World(kind, ranks, draw.uniform(1.3, 8), noise=0.01), num_ranks


def seeds(num: int, num_in_ci: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("seed", [*range(num_in_ci), *(slow(seed) for seed in range(num_in_ci, num))])


def slow(seed: int) -> ParameterSet:
    return pytest.param(seed, marks=pytest.mark.slow)


@seeds(104, 40)  # five of each kind
def test_the_planted_fault_is_named_and_nobody_else(seed: int) -> None:
    world, num_ranks = draw_world(seed)
    trial = try_world(world, num_ranks, seed)
    assert {one.ranks for one in trial.suspects if one.verdict == "FAIL"} == {world.ranks}, trial.findings
    kind = "link" if world.kind.endswith("link") else "node"
    assert {one.kind for one in trial.suspects if one.verdict == "FAIL"} == {kind}
    if world.kind in ("hang", "stuck inside", "dead", "corrupt"):
        assert world.ranks[0] not in trial.alive
        assert len(trial.alive) == num_ranks - 1


class OneSlowCore(SimulatedFleet):
    """One of two cores is slow, and the scheduler keeps rank 5 alone there unless a core is asked for."""

    def run(self, name: str, args: Mapping[str, Any], groups: Iterable[Sequence[int]], limit_s: float) -> list[Outcome]:
        outcomes = super().run(name, args, groups, limit_s)
        for outcome in outcomes:
            if args.get("core", outcome.group == (5,)) % 2:
                for row in outcome.rows:
                    row |= {key: 1.3 * row[key] for key in ("p50_us", "p99_us", "min_us")}
                    row["iterations_us"] = [1.3 * time_us for time_us in row["iterations_us"]]
        return outcomes


def test_a_rank_that_stays_on_a_slow_core_is_not_charged_with_it() -> None:
    fleet = OneSlowCore(World("none", (), 1.0, noise=0.005), seed=0)
    trial = Trial(cast(Fleet, fleet), members_of([("localhost", 8)], 1), work_for("gloo", None), list(range(8)))
    for name in ("gemm", "copy"):
        phases.PHASES[name](trial, silent)
    assert not trial.suspects


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_a_probe_on_a_core_stays_there_and_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(probes.PROBES, "gemm", lambda *_: [{"cores": os.sched_getaffinity(0)}])
    before = os.sched_getaffinity(0)
    for core in range(3):
        [row] = probes.run_probe("gemm", torch.device("cpu"), {"core": core})
        assert row["cores"] == {sorted(before)[core % len(before)]}
        assert os.sched_getaffinity(0) == before
    assert probes.run_probe("gemm", torch.device("cpu"), {}) == [{"cores": before}]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_a_probe_runs_where_no_core_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", forbid)
    monkeypatch.setitem(probes.PROBES, "gemm", lambda *_: [{"ran": True}])
    assert probes.run_probe("gemm", torch.device("cpu"), {"core": 1}) == [{"ran": True}]


@seeds(40, 16)
def test_a_healthy_run_has_no_suspects(seed: int) -> None:
    draw = random.Random(seed)
    world = World("none", (), 1.0, noise=draw.choice((0.0, 0.005, 0.02)))
    trial = try_world(world, draw.choice((4, 8, 16, 24)), seed)
    assert not trial.suspects
    assert not [finding for finding in trial.findings if finding.verdict in ("WARN", "FAIL")]


@pytest.mark.parametrize("num_ranks", [2, 4, 7])
@pytest.mark.parametrize("kind", ["slow", "slow node", "slow link"])
def test_fewer_than_eight_unknown_devices_are_not_judged(kind: FaultKind, num_ranks: int) -> None:
    ranks = (0, 1) if kind == "slow link" else (1,)
    trial = try_world(World(kind, ranks, 1.8, noise=0.01), num_ranks, 0)
    assert not trial.suspects
    [finding] = [one for one in trial.findings if one.check == ("gemm" if kind == "slow" else "pairs")]
    assert finding.verdict == "NO VERDICT"
    assert "to decide it: run this on 8 or more simulated" in finding.next_step


@given(size=st.integers(2, 40), data=st.data())
def test_bisection_finds_the_member_or_the_link(size: int, data: st.DataObject) -> None:
    group = tuple(range(100, 100 + size))
    bad = data.draw(st.sets(st.sampled_from(group), min_size=1, max_size=2))
    trials: list[tuple[int, ...]] = []

    def is_bad(members: tuple[int, ...]) -> bool:
        assert len(set(members)) == len(members) >= 2
        trials.append(members)
        return bad <= set(members)

    culprits = find_culprits(group, is_bad, controls=(1, 2))
    if len(bad) == 1:
        assert culprits == Culprits(members=tuple(bad))
    else:
        assert (culprits.members, set(culprits.link)) == ((), bad)
    assert len(trials) <= 4 * size.bit_length() + 4


def test_a_fault_that_no_smaller_group_shows_names_nobody() -> None:
    everyone = tuple(range(8))
    assert find_culprits(everyone, lambda members: len(members) == 8).members == ()


def test_a_bad_witness_does_not_hide_the_culprit() -> None:
    assert find_culprits((4, 5), lambda members: bool({4, 9} & set(members)), (9, 1)) == Culprits(members=(4,))


@pytest.mark.parametrize("bad", [(2,), (1, 3)])
@pytest.mark.parametrize("size", [4, 8])
def test_a_matrix_tells_a_node_from_a_link(bad: tuple[int, ...], size: int) -> None:
    draw = random.Random(size)
    values = {
        (src, dst): draw.gauss(100, 1) * (0.5 if set(bad) <= {src, dst} else 1)
        for src in range(size)
        for dst in range(size)
        if src != dst
    }
    scores = judge_matrix(values)
    assert scores is not None
    nodes = {node for node, score in scores.nodes.items() if score.verdict != "PASS"}
    links = {frozenset(pair) for pair, score in scores.links.items() if score.verdict != "PASS"}
    assert (nodes, links) == (({2}, set()) if len(bad) == 1 else (set(), {frozenset(bad)}))


def test_three_nodes_are_too_few_for_a_matrix() -> None:
    assert judge_matrix({(0, 1): 1.0, (1, 2): 1.0, (0, 2): 0.1}) is None


def outcome(**given: Any) -> Outcome:
    return Outcome((0, 1, 2, 3), **given)


@pytest.mark.parametrize(
    ("found", "culprits"),
    [
        (outcome(dead={2: "was ended by SIGKILL"}, errors={1: "RuntimeError: Connection closed by peer"}), (2,)),
        (outcome(errors={1: "RuntimeError: Connection reset", 3: "RuntimeError: CUDA error: ECC"}), (3,)),
        (outcome(where={rank: Where(5, 4, "T" if rank == 1 else "S") for rank in range(4)}), (1,)),
        (outcome(where={rank: Where(4 if rank == 3 else 5, 4, "S") for rank in range(4)}), (3,)),
        (outcome(where={rank: Where(0, 0, "lost") if rank == 0 else Where(5, 4, "S") for rank in range(4)}), (0,)),
    ],
)
def test_plain_evidence_names_the_culprit(found: Outcome, culprits: tuple[int, ...]) -> None:
    assert next(iter(evidence(found)))[0] == culprits


def test_evidence_that_points_at_all_names_nobody() -> None:
    assert not list(evidence(outcome(where={rank: Where(5, 4, "S") for rank in range(4)})))
    assert not list(evidence(outcome(errors=dict.fromkeys(range(4), "RuntimeError: timed out"))))

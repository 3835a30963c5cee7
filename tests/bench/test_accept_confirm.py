"""Nobody is accused for the noise of a machine, and what is slow is named all the same. All times are simulated."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from bench.accept.agents.fleet import Fleet
from bench.accept.phases import run as phases
from bench.accept.phases.confirm import NOT_QUIET, Evidence, confirm, inconclusive, open_of, state_of, tail
from bench.accept.phases.pairing import measure_pairs
from bench.accept.phases.trial import Trial
from bench.accept.phases.work import work_for
from bench.accept.run import Result, members_of
from bench.accept.run_output import sentence
from tests.bench.simulated_fleet import Bursts, SimulatedFleet, World

SUSPECT, CONTROLS = "suspect", ("a", "b", "c", "d", "e")
Noise = Callable[[random.Random], float]


def silent(_done: int, _total: int, _words: str) -> None:
    """Progress that nobody watches."""


def tried(seed: int, noise: Noise, factor: float = 1.0, added_us: float = 0.0) -> Evidence:
    """A suspect beside five controls, all of 100 us times the noise."""
    draw = random.Random(seed)

    def measure(order: Sequence[str]) -> Mapping[str, Mapping[str, float]]:
        slower = {SUSPECT: (factor, added_us)}
        each = ((subject, slower.get(subject, (1.0, 0.0))) for subject in order)
        return {subject: {"one way": 100 * noise(draw) * times + more_us} for subject, (times, more_us) in each}

    return confirm([SUSPECT], CONTROLS, measure, 4.0, 0.0)[SUSPECT, "one way"]


def wild(draw: random.Random) -> float:
    """From one to fifty times, of any size in between."""
    return math.exp(draw.uniform(0, math.log(50)))


def two_states(draw: random.Random) -> float:
    """A core is free, or somebody else has its slice."""
    return draw.choice((1.0, 40.0))


@pytest.mark.parametrize("noise", [wild, two_states])
def test_noise_far_above_the_least_ratio_calls_nobody_slow(noise: Noise) -> None:
    states = [tried(seed, noise).state for seed in range(500)]
    assert "slow" not in states
    assert states.count("cleared") > 400


def test_on_a_quiet_machine_what_is_slow_is_so_at_once_and_what_is_not_is_cleared() -> None:
    quiet: Noise = lambda draw: draw.uniform(1, 1.3)  # noqa: E731
    slow, good = tried(0, quiet, factor=5), tried(0, quiet, factor=3)
    assert (slow.state, slow.num_slower, len(slow.times_us)) == ("slow", 6, 6)
    assert (good.state, len(good.times_us)) == ("cleared", 3)
    assert 3.5 < slow.ratio < 6.5
    assert slow.description == "slower than 5 controls in 6 of 6 turns"


def test_a_slow_link_shows_through_noise() -> None:
    states = [tried(seed, two_states, added_us=10_000.0).state for seed in range(200)]
    assert states == ["slow"] * 200


def test_where_the_noise_is_larger_than_the_effect_it_may_stay_open() -> None:
    states = [tried(seed, wild, factor=8).state for seed in range(200)]
    assert states.count("open") > 40


def test_a_series_that_stays_open_accuses_the_machine() -> None:
    found = {("x", "one way"): Evidence([9.0], {"a": [1.0]}), ("y", "one way"): Evidence(state="cleared")}
    assert open_of(found) == ["x"]
    assert state_of(found, "y") == "cleared"
    said = inconclusive([0, 1, 2], "pairs", "pairs", ["node0 - node1"])
    assert (said.verdict, said.subject) == ("WARN", "3 ranks")
    assert said.figure.startswith(NOT_QUIET)
    assert "node0 - node1" in said.figure


class Clock:
    """Clock that goes only when somebody sleeps or measures."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_on_a_loaded_machine_who_lost_every_turn_gets_the_turns_that_the_test_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of 24 suspects is slow, and others open for a while: the first turns take nine seconds each."""
    clock, draw, measured = Clock(), random.Random(0), []
    monkeypatch.setattr("bench.accept.phases.confirm.time", clock)

    def measure(order: Sequence[str]) -> Mapping[str, Mapping[str, float]]:
        clock.sleep(0.3 * len(order))
        measured.append(len(order))
        slow = {"s0": 1e5}
        return {subject: {"one way": slow.get(subject, 100 * wild(draw))} for subject in order}

    evidence = confirm([f"s{i}" for i in range(24)], CONTROLS, measure, 4.0, 0.0)
    assert [subject for (subject, _), one in evidence.items() if one.state == "slow"] == ["s0"]
    assert len(evidence["s0", "one way"].times_us) == 7  # 240 looks / 6^7 is the first chance below a thousandth
    assert clock.now_s > 25
    assert measured[-1] <= 8  # those that were as fast as a control once are out when the time of a quiet machine is


def test_who_did_not_lose_every_turn_gets_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, turns = Clock(), itertools.count()
    monkeypatch.setattr("bench.accept.phases.confirm.time", clock)

    def measure(order: Sequence[str]) -> Mapping[str, Mapping[str, float]]:
        clock.sleep(9.0)
        turn = next(turns)
        times = dict.fromkeys(CONTROLS, 100.0) | {CONTROLS[0]: 1e6 if turn == 0 else 100.0, SUSPECT: 1e4}
        return {subject: {"one way": times[subject]} for subject in order}

    evidence = confirm([SUSPECT], CONTROLS, measure, 4.0, 0.0)[SUSPECT, "one way"]
    assert (evidence.state, evidence.num_slower, len(evidence.times_us)) == ("open", 2, 3)


def test_who_gives_no_times_any_more_is_left_out() -> None:
    turns = itertools.count()

    def measure(order: Sequence[str]) -> Mapping[str, Mapping[str, float]]:
        gone = (SUSPECT, "a") if next(turns) else ()
        return {subject: {"both": 10.0 if subject == SUSPECT else 1.0} for subject in order if subject not in gone}

    found = confirm([SUSPECT], CONTROLS, measure, 4.0, 0.0)
    assert state_of(found, SUSPECT) == "open"
    assert confirm([SUSPECT], ["a"], measure, 4.0, 0.0) == {}


def test_the_tail_of_the_binomial_distribution() -> None:
    assert tail(0, 5, 0.3) == pytest.approx(1)
    assert tail(5, 5, 0.5) == 1 / 32
    assert tail(4, 5, 0.5) == 6 / 32


def loaded_trial(world: World, seed: int, num_ranks: int) -> Trial:
    fleet = SimulatedFleet(world, seed, Bursts())
    work = replace(work_for("gloo", None), turn_s=0.0)
    return Trial(cast(Fleet, fleet), members_of([("localhost", num_ranks)], 1), work, list(range(num_ranks)))


def accused(world: World, seeds: Sequence[int], num_ranks: int, measure: Callable[[Trial], Any]) -> list[Any]:
    """By seed: whom a phase accuses beside bursts of other work, and of what."""
    found = []
    for seed in seeds:
        trial = loaded_trial(world, seed, num_ranks)
        measure(trial)
        found.append([(one.verdict, one.kind, one.ranks) for one in trial.suspects])
    return found


class Restless(SimulatedFleet):
    """Link 0 - 1 takes ten times as long as others; alone, half of the others take a hundred times as long at times."""

    def _pairs(self, group: tuple[int, ...], only: Sequence[tuple[int, ...]]) -> list[dict[str, Any]]:
        rows = super()._pairs(group, only)
        for row in rows:
            alone = bool(only) and self._draw.random() < 0.5
            factor = 10.0 if {group[row["rank"]], group[row["peer"]]} == {0, 1} else 100.0 if alone else 1.0
            row["min_us"] *= factor
        return rows


def test_a_pair_that_stays_open_warns_of_the_machine_and_accuses_nobody() -> None:
    trial = loaded_trial(World("none", (), 1.0, 0.01), 0, 4)
    trial.fleet = cast(Fleet, Restless(World("none", (), 1.0, 0.01), 0))
    measure_pairs(trial, silent)
    assert trial.suspects == []
    [finding] = trial.findings
    assert (finding.verdict, finding.subject) == ("WARN", "4 ranks")
    assert finding.figure.startswith(f"{NOT_QUIET} (1 neither cleared nor slow: node0 - node1; at worst ")
    assert sentence(Result(trial, done=["pairs"])) == f"{NOT_QUIET}; 4 ranks, 1 phase"


PHASES: dict[str, Callable[[Trial], Any]] = {
    "pairs": lambda trial: measure_pairs(trial, silent),
    "neighbours": lambda trial: phases.neighbours(trial, silent),
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("num_ranks", [4, 8])
def test_bursts_that_meet_some_pairs_at_some_times_accuse_nobody(num_ranks: int, phase: str) -> None:
    assert accused(World("none", (), 1.0, 0.05), range(150), num_ranks, PHASES[phase]) == [[]] * 150


@pytest.mark.parametrize("phase", PHASES)
def test_beside_bursts_a_slow_link_is_the_only_one_accused(phase: str) -> None:
    found = accused(World("slow link", (2, 3), 100.0, 0.05), range(40), 8, PHASES[phase])
    assert found == [[("FAIL", "link", (2, 3))]] * 40

"""Confirmation of outliers on a shared machine: repeated turns with healthy controls, and a significance test.

A turn measures every suspect and every control once, alone, in random order, so that other work on the machine affects
all of them alike; turns are spaced, so that one burst of other work does not cover all of them. A suspect is

- cleared if its fastest time is close to the controls' fastest over the same turns: noise only adds time, so what was
  fast once is not slow;
- slow if it was slower than every control of its turn significantly often. In random order a healthy suspect is the
  slowest of m + 1 with probability 1 / (m + 1) at most, whatever the distribution of the noise. The binomial tail
  probability, times the number of tests, must be below `_CHANCE`. Besides, its excess time over the median control of
  its turn (median over the turns) must make it slower by the minimum ratio; the difference is paired, since noise adds
  to both;
- open if neither holds after all turns: the noise is as large as the effect.

On a loaded machine a turn takes seconds, and the few turns that fit into the time of a quiet one are too few for the
test however slow a suspect is. So whoever lost every turn yet is measured on, with its controls alone.

Not covered: noise that affects a single rank during all turns.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

from netlayer.verdict import Finding

Subject = TypeVar("Subject", bound=Hashable)
State = Literal["slow", "open", "cleared"]
MOST_CONTROLS = 5
LEAST_CONTROLS = 2
NOT_QUIET = "inconclusive: the machine was not quiet"
_CHANCE = 1e-3
"""Probability that one call of `confirm` reports any healthy suspect as slow."""
_LEAST_TURNS, _MOST_TURNS = 3, 10
_MOST_S = 25.0
_MOST_S_IF_ALWAYS_SLOWER = 150.0
"""For suspects that were slower than every control in each turn: what they lack is turns."""
_MOST_NAMED = 4


@dataclass
class Evidence:
    """Times of one series of a suspect over the turns.

    Args:
        times_us: its time in each turn.
        controls: times of the controls in the same turns, by control.
        state: its latest state.
    """

    times_us: list[float] = field(default_factory=list)
    controls: dict[Any, list[float]] = field(default_factory=dict)
    state: State = "open"

    @property
    def floor_us(self) -> float:
        """Median over the controls of their fastest times, which estimates the time without noise."""
        return statistics.median(min(times_us) for times_us in self.controls.values())

    @property
    def ratio(self) -> float:
        """Slowdown relative to the controls: 1 + median excess over the turn's median control / `floor_us`."""
        longer = [
            time_us - statistics.median(control_times)
            for time_us, control_times in zip(self.times_us, self._by_turn(), strict=True)
        ]
        return 1 + statistics.median(longer) / max(self.floor_us, 1e-3)

    @property
    def num_slower(self) -> int:
        """Number of turns in which it was slower than every control."""
        return sum(
            time_us > max(control_times) for time_us, control_times in zip(self.times_us, self._by_turn(), strict=True)
        )

    @property
    def description(self) -> str:
        return f"slower than {len(self.controls)} controls in {self.num_slower} of {len(self.times_us)} turns"

    def judge(self, least_ratio: float, num_looks: int) -> State:
        """Return the state; `num_looks` is the number of tests, by which the probability is corrected."""
        num = len(self.times_us)
        if num >= _LEAST_TURNS and min(self.times_us) <= least_ratio * self.floor_us:
            return "cleared"
        chance = num_looks * tail(self.num_slower, num, 1 / (len(self.controls) + 1))
        return "slow" if chance <= _CHANCE and self.ratio > least_ratio else "open"

    def _by_turn(self) -> list[tuple[float, ...]]:
        return list(zip(*self.controls.values(), strict=True))


def confirm(
    suspects: Sequence[Subject],
    controls: Sequence[Subject],
    measure: Callable[[Sequence[Subject]], Mapping[Subject, Mapping[str, float]]],
    least_ratio: float,
    turn_s: float,
) -> dict[tuple[Subject, str], Evidence]:
    """Measure suspects and controls in turns; return the evidence on each (suspect, series) that gave times.

    Args:
        suspects: at least one.
        controls: healthy peers of the suspects; the first few are used.
        measure: measures some of them one after the other in this order; returns times in us by subject and series,
            without subjects that failed.
        least_ratio: minimum slowdown relative to the controls of a slow suspect.
        turn_s: minimum time in seconds between the starts of two turns.
    """
    evidence_by_key: dict[tuple[Subject, str], Evidence] = defaultdict(Evidence)
    remaining, active_controls, rng = list(suspects), list(controls)[:MOST_CONTROLS], random.Random(0)
    began = time.monotonic()
    for turn in range(_MOST_TURNS):
        turn_began = time.monotonic()
        if turn_began - began > _MOST_S:
            remaining = [subject for subject in remaining if _always_slower(evidence_by_key, subject)]
        if not remaining or turn_began - began > _MOST_S_IF_ALWAYS_SLOWER:
            break
        times = measure(rng.sample([*remaining, *active_controls], len(remaining) + len(active_controls)))
        active_controls = [control for control in active_controls if times.get(control)]
        if len(active_controls) < LEAST_CONTROLS:
            break
        _add_turn(evidence_by_key, remaining, {control: times[control] for control in active_controls}, times)
        num_looks = _MOST_TURNS * len(suspects) * len(times[active_controls[0]])
        for evidence in evidence_by_key.values():
            if evidence.state == "open":
                evidence.state = evidence.judge(least_ratio, num_looks)
        remaining = [
            subject for subject in remaining if times.get(subject) and state_of(evidence_by_key, subject) == "open"
        ]
        if remaining and turn + 1 < _MOST_TURNS:
            time.sleep(max(0.0, turn_s - (time.monotonic() - turn_began)))
    return dict(evidence_by_key)


def state_of(evidence_by_key: Mapping[tuple[Subject, str], Evidence], subject: Subject) -> State:
    """Return a suspect's state over all series: slow if any series is, else open if any is, else cleared."""
    states = {evidence.state for (one, _), evidence in evidence_by_key.items() if one == subject}
    return next((state for state in get_args(State) if state in states), "cleared")


def open_of(evidence_by_key: Mapping[tuple[Subject, str], Evidence]) -> list[Subject]:
    """Return the undecided suspects."""
    return [
        subject
        for subject in dict.fromkeys(one for one, _ in evidence_by_key)
        if state_of(evidence_by_key, subject) == "open"
    ]


def inconclusive(
    ranks: Sequence[int], phase: str, check: str, suspects: Sequence[str], evidence: Iterable[Evidence] = ()
) -> Finding:
    """Return a warning on the machine if suspects remain undecided; it blames none of them."""
    figure = f"{NOT_QUIET} ({len(suspects)} neither cleared nor slow: {', '.join(suspects[:_MOST_NAMED])}"
    worst = max(
        (one for one in evidence if one.state == "open" and one.times_us), key=lambda one: one.ratio, default=None
    )
    figure += f"; at worst {worst.ratio:.1f} times as slow, {worst.description})" if worst else ")"
    expected = "suspects as fast as their controls, or slower in nearly every turn"
    step = "run it again while nothing else runs on this machine (top)"
    return Finding("WARN", f"{len(ranks)} ranks", check, figure, expected, step, phase)


def tail(wins: int, num: int, chance: float) -> float:
    """Return the binomial tail probability of `wins` or more successes in `num` trials, each with `chance`."""
    return sum(math.comb(num, k) * chance**k * (1 - chance) ** (num - k) for k in range(wins, num + 1))


def _always_slower(evidence_by_key: Mapping[tuple[Subject, str], Evidence], subject: Subject) -> bool:
    """Whether a suspect was slower than every control in each turn of an open series."""
    return any(
        evidence.num_slower == len(evidence.times_us)
        for (one, _), evidence in evidence_by_key.items()
        if one == subject and evidence.state == "open"
    )


def _add_turn(
    evidence_by_key: Mapping[tuple[Subject, str], Evidence],
    suspects: Sequence[Subject],
    controls: Mapping[Subject, Mapping[str, float]],
    times: Mapping[Subject, Mapping[str, float]],
) -> None:
    """Add the times of one turn; a control that gave no times is dropped from the earlier turns too."""
    for subject in suspects:
        for series, time_us in times.get(subject, {}).items():
            evidence = evidence_by_key[subject, series]
            evidence.times_us.append(time_us)
            known = evidence.controls
            evidence.controls = {one: [*known.get(one, ()), by_series[series]] for one, by_series in controls.items()}

"""Whether what stood out on a shared machine is slow by itself: tried in turns, beside controls, until it shows.

A turn measures every suspect and every control once, alone, in an order drawn by lot, so that other work on the
machine meets all of them alike; turns lie apart, so that one burst of it does not fill them all. A suspect is

- cleared by its fastest time, held against the controls' fastest over the same turns: noise only adds, and what was
  fast once is not slow;
- slow, where it was slower than every control of its turn more often than a healthy one would be. Since the lot
  decides, a healthy one comes last of m + 1 with a chance of 1 / (m + 1) at most, however the noise is distributed:
  the binomial tail of that, times all that is looked at, must be below `_CHANCE`. What it takes longer than the middle
  control of its turn, by the median over the turns, must besides make it slower than them by the least ratio: paired,
  since noise adds to both;
- open, where neither is so after all turns: the noise of the machine is as large as the effect.

Left out: noise that stays with one rank for as long as all turns take.
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
"""That anything healthy of one `confirm` is called slow."""
_LEAST_TURNS, _MOST_TURNS = 3, 10
_MOST_S = 25.0
_MOST_NAMED = 4


@dataclass
class Evidence:
    """What the turns say of one series of a suspect.

    Args:
        ours: its time in each turn, us.
        controls: times of the controls in the same turns, by control.
        state: as judged last.
    """

    ours: list[float] = field(default_factory=list)
    controls: dict[Any, list[float]] = field(default_factory=dict)
    state: State = "open"

    @property
    def floor_us(self) -> float:
        """The fastest time of the middle control: what of its time is not noise."""
        return statistics.median(min(times_us) for times_us in self.controls.values())

    @property
    def ratio(self) -> float:
        """Times as long as the controls: what it takes longer than the middle one of its turn, in the middle turn."""
        longer = [mine - statistics.median(theirs) for mine, theirs in zip(self.ours, self._by_turn(), strict=True)]
        return 1 + statistics.median(longer) / max(self.floor_us, 1e-3)

    @property
    def lost(self) -> int:
        """Turns in which it was slower than every control."""
        return sum(mine > max(theirs) for mine, theirs in zip(self.ours, self._by_turn(), strict=True))

    @property
    def words(self) -> str:
        return f"slower than {len(self.controls)} controls in {self.lost} of {len(self.ours)} turns"

    def judge(self, least_ratio: float, num_looks: int) -> State:
        """`num_looks`: how many chances there are to call something slow."""
        num = len(self.ours)
        if num >= _LEAST_TURNS and min(self.ours) <= least_ratio * self.floor_us:
            return "cleared"
        chance = num_looks * tail(self.lost, num, 1 / (len(self.controls) + 1))
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
    """What each series of each suspect turned out to be; nothing of those that gave no times.

    Args:
        suspects: at least one.
        controls: like them, and not suspected; the first few are taken.
        measure: times of some of them, one after the other in this order, us, by series; who failed is missing.
        least_ratio: times slower than the controls that one must be to be called slow.
        turn_s: least time from the beginning of a turn to that of the next.
    """
    found: dict[tuple[Subject, str], Evidence] = defaultdict(Evidence)
    left, beside, lot = list(suspects), list(controls)[:MOST_CONTROLS], random.Random(0)
    began = time.monotonic()
    for turn in range(_MOST_TURNS):
        turn_began = time.monotonic()
        if not left or turn_began - began > _MOST_S:
            break
        times = measure(lot.sample([*left, *beside], len(left) + len(beside)))
        beside = [control for control in beside if times.get(control)]
        if len(beside) < LEAST_CONTROLS:
            break
        _take(found, left, {control: times[control] for control in beside}, times)
        num_looks = _MOST_TURNS * len(suspects) * len(times[beside[0]])
        for evidence in found.values():
            if evidence.state == "open":
                evidence.state = evidence.judge(least_ratio, num_looks)
        left = [subject for subject in left if times.get(subject) and state_of(found, subject) == "open"]
        if left and turn + 1 < _MOST_TURNS:
            time.sleep(max(0.0, turn_s - (time.monotonic() - turn_began)))
    return dict(found)


def state_of(found: Mapping[tuple[Subject, str], Evidence], subject: Subject) -> State:
    """Of a suspect: slow where it is in any series, else open where one is."""
    states = {evidence.state for (one, _), evidence in found.items() if one == subject}
    return next((state for state in get_args(State) if state in states), "cleared")


def open_of(found: Mapping[tuple[Subject, str], Evidence]) -> list[Subject]:
    """The suspects of which nothing could be said."""
    return [subject for subject in dict.fromkeys(one for one, _ in found) if state_of(found, subject) == "open"]


def inconclusive(
    ranks: Sequence[int], phase: str, check: str, suspects: Sequence[str], found: Iterable[Evidence] = ()
) -> Finding:
    """What is said of the machine where suspects stay open: it accuses none of them."""
    figure = f"{NOT_QUIET} ({len(suspects)} neither cleared nor slow: {', '.join(suspects[:_MOST_NAMED])}"
    worst = max((one for one in found if one.state == "open" and one.ours), key=lambda one: one.ratio, default=None)
    figure += f"; at worst {worst.ratio:.1f} times as slow, {worst.words})" if worst else ")"
    expected = "suspects as fast as their controls, or slower in nearly every turn"
    step = "run it again while nothing else runs on this machine (top)"
    return Finding("WARN", f"{len(ranks)} ranks", check, figure, expected, step, phase)


def tail(wins: int, num: int, chance: float) -> float:
    """Of the binomial distribution: so many or more of `num`, each with this chance."""
    return sum(math.comb(num, k) * chance**k * (1 - chance) ** (num - k) for k in range(wins, num + 1))


def _take(
    found: Mapping[tuple[Subject, str], Evidence],
    suspects: Sequence[Subject],
    controls: Mapping[Subject, Mapping[str, float]],
    times: Mapping[Subject, Mapping[str, float]],
) -> None:
    """One turn; a control that gives no times any more does not count for the turns before either."""
    for subject in suspects:
        for series, time_us in times.get(subject, {}).items():
            evidence = found[subject, series]
            evidence.ours.append(time_us)
            known = evidence.controls
            evidence.controls = {one: [*known.get(one, ()), by_series[series]] for one, by_series in controls.items()}

"""Stragglers from the ranks' own times: who is slower than its peers, by how much, since which step, how surely.

A rank's own time in a step is the step without its waits for others. All ranks of a synchronous step end together, so
the slow one shows by a long own time and short waits, and those that wait for it are its victims, never suspects.

[Note: statistics] Each step's own times are divided by the median of the rank's peers (ranks with equal work), which
takes out what hits all of them: long sequences, evaluations, a loaded file system. What is left of a rank is judged
twice: its level against the other ranks' levels, and its level after a step against its own before it, which needs no
assumption on how much healthy ranks differ. Means are winsorised at three robust standard deviations, so that a single
pause accuses nobody; standard errors allow for correlation between neighbouring steps. A suspect must pass by a margin
(`MIN_SCORE`, in standard errors) and by an amount (`MIN_SLOWDOWN`), and still be slow at the end of the record.

Standard errors are too small where noise has long tails or wanders for many steps. Both kinds of noise make ranks fast
as often as slow, so the scores of ranks that are, or become, faster than the others show how far noise alone goes; all
scores are divided by what these exceed normal ones (an empirical null, Efron 2004).

[Note: confirmation] A score says that a rank is slow in these steps, not that it is a straggler: a machine that others
use makes one rank slow for a while, and then another one. So a suspect is accused only if both halves of its slow steps
show it, by amounts that agree, and by more (`_MARGIN`) than any other rank was off its peers in any window of as many
steps of the whole record: a permutation test of the same statistic over ranks and time, which the maximum corrects for
the number of both. Else it stays a suspect, with its `doubt`. What a rank waited for a processor is taken out of its
own time before (`judge`), where it is known.

The null model beside it is what a short script does: mean times above the median of all ranks + k MAD.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Times = np.ndarray[Any, np.dtype[np.float64]]
Numbers = np.ndarray[Any, np.dtype[np.int64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]

MIN_SLOWDOWN = 0.005
"""Least share of the peers' own time by which a suspect must be slower."""
MIN_COST = 0.01
"""Least share of a step that a suspect must cost: rank 0 of a healthy run writes a log, and is slower by that."""
MIN_SCORE = 4.5
"""Least distance in standard errors: normal noise gives one false suspect in 190 looks at 1,536 healthy ranks."""
MIN_STEPS = 5
"""Steps that a level needs, and that a change needs on either side."""
MIN_PEERS = 4
"""Ranks with equal work, the suspect included, without which nobody can be compared."""
_TO_SIGMA = 1.4826  # MAD of normal noise is 1 / 1.4826 standard deviations
_WINSOR = 3.0
_NEIGHBOURS = 4
_WINDOWS = (5, 10, 20, 50, 100, 200, 500, 1000, 2000)
# The best of many splits scores higher by chance than one level does, the more so with noise of long tails.
_SPLITS = 1.0
# Median and 99th percentile of scores under independent normal noise: of a level, and of the best split of 100 steps
# (measured by drawing them; fewer steps give lower ones).
_NORMAL, _BEST_SPLIT = (0.0, 2.1), (1.3, 3.0)
_TAIL_RANKS = 100
_NEARLY = 0.8
_HALF_STEPS = 4
_AGREE = 0.5
_MARGIN = 1.5
_SHORT = 3.0
# A spread estimated from n ranks or steps may come out too small by chance: it, or the bar, rises by 1 + 6/n.
_FEW = 6.0
_BETWEEN_RANKS, _OWN_PAST = "peers", "own past"


@dataclass(frozen=True)
class Suspect:
    """A rank that is slower than its peers.

    Args:
        column: of the table of times.
        since: row from which on it is slow; 0: as far back as the record goes.
        slowdown: 0.5 where it takes 1.5 times its peers' median.
        score: distance in standard errors.
        confidence: 1 - probability that any healthy rank of the job would score as high by normal noise; at most
            0.999, since noise is not quite normal.
        against: "peers" or "own past", whichever shows it more surely.
        doubt: why this may be noise of the machine; empty: confirmed, [Note: confirmation].
    """

    column: int
    since: int
    slowdown: float
    score: float
    confidence: float
    against: str
    doubt: str = ""


@dataclass(frozen=True)
class Detection:
    """Suspects, worst first, and what they were judged by.

    Args:
        suspects: confirmed or not; empty where nobody is slow, or nobody can be told.
        no_verdict: why it cannot be told; empty where it can.
        relative: [step, rank] own time over the peers' median, minus 1.
        returned: share of the slowest own time that goes if the confirmed ones were as fast as their peers.
        smallest: slowdown that would have been seen in this record with a chance of 99%.
    """

    suspects: tuple[Suspect, ...]
    no_verdict: str
    relative: Times
    returned: float = 0.0
    smallest: float = math.nan

    @property
    def stragglers(self) -> tuple[Suspect, ...]:
        """Confirmed suspects: these may be accused."""
        return tuple(suspect for suspect in self.suspects if not suspect.doubt)


def detect(
    own_s: Times,
    roles: Sequence[object] | None = None,
    *,
    step_s: Times | None = None,
    min_slowdown: float = MIN_SLOWDOWN,
    min_score: float = MIN_SCORE,
) -> Detection:
    """Return the ranks that are slower than their peers.

    Args:
        own_s: [step, rank] seconds of own work; NaN where a rank has no record of a step.
        roles: for each rank what it does (pipeline stage); ranks of equal role are peers; None: all are.
        step_s: [step, rank] whole steps, of which a suspect must cost `MIN_COST`; None: the own times are all of them.
        min_slowdown, min_score: least share of the peers' own time and least distance of a suspect.
    """
    own_s = np.asarray(own_s, float)
    own_s = np.where(own_s > 0, own_s, np.nan)
    relative = np.full(own_s.shape, np.nan)
    groups = _peers(roles, own_s.shape[1])
    judged = [columns for columns in groups if len(columns) >= MIN_PEERS]
    for columns in judged:
        relative[:, columns] = own_s[:, columns] / _median(own_s[:, columns], axis=1)[:, None] - 1
    whole = np.isfinite(relative).sum(axis=0) >= MIN_STEPS
    if not judged:
        return Detection((), f"no {MIN_PEERS} ranks do equal work: nobody to compare with", relative)
    if not whole.any():
        return Detection((), f"no rank has {MIN_STEPS} steps in the record", relative)
    suspects, smallest = [], []
    for columns in judged:
        usable = columns[whole[columns]]
        if len(usable) < MIN_PEERS:
            continue
        least = max(min_slowdown, MIN_COST * _step_over_own(own_s, step_s, usable))
        suspects_here, smallest_here, crowd = _suspects(relative, usable, least, min_score)
        if crowd:
            return Detection((), crowd, relative)
        suspects += suspects_here
        smallest.append(smallest_here)
    if not smallest:
        return Detection((), f"fewer than {MIN_PEERS} peers have {MIN_STEPS} steps in the record", relative)
    suspects.sort(key=lambda suspect: -suspect.slowdown)
    confirmed = [suspect for suspect in suspects if not suspect.doubt]
    return Detection(tuple(suspects), "", relative, returned(own_s, confirmed, groups), max(smallest))


def _step_over_own(own_s: Times, step_s: Times | None, columns: Numbers) -> float:
    """Return how many times as long as the own time of a typical rank its step is."""
    if step_s is None:
        return 1.0
    ratio = float(np.nanmedian(_median(step_s[:, columns], axis=1) / _median(own_s[:, columns], axis=1)))
    return ratio if math.isfinite(ratio) else 1.0


def null_model(own_s: Times, k: float) -> Flags:
    """Return for each rank whether its mean over all steps is above the median of the ranks + k MAD."""
    means = own_s.mean(axis=0)
    centre = np.median(means)
    return np.asarray(means > centre + k * np.median(np.abs(means - centre)))


def returned(own_s: Times, suspects: Sequence[Suspect], groups: Sequence[Numbers]) -> float:
    """Return the share of the slowest own time, by which all wait, that goes if suspects take their peers' median."""
    if not suspects:
        return 0.0
    repaired = own_s.copy()
    for suspect in suspects:
        peers = next(columns for columns in groups if suspect.column in columns)
        repaired[suspect.since :, suspect.column] = _median(own_s[suspect.since :, peers], axis=1)
    first = min(suspect.since for suspect in suspects)
    now, then = (np.nanmax(times[first:], axis=1).mean() for times in (own_s, repaired))
    return float(1 - then / now)


def _peers(roles: Sequence[object] | None, num_ranks: int) -> list[Numbers]:
    by_role: dict[object, list[int]] = {}
    for column in range(num_ranks):
        by_role.setdefault(roles[column] if roles is not None else None, []).append(column)
    return [np.array(columns) for columns in by_role.values()]


def _suspects(
    relative: Times, columns: Numbers, min_slowdown: float, min_score: float
) -> tuple[list[Suspect], float, str]:
    """Judge ranks with equal work; also the smallest slowdown that would be seen, and why nobody can be told."""
    rows = np.flatnonzero(np.isfinite(relative[:, columns]).any(axis=1))
    # Pauses make times long, nothing makes them short: logarithms have no such long tail, and compare ratios.
    times = np.log1p(relative[np.ix_(rows, columns)])
    times = np.where(np.isfinite(times), times, _median(times, axis=0)[None])  # a missing step says nothing
    num_steps, num_ranks = times.shape
    # Clipped around a running median, which follows a lasting change at once and a single pause not at all.
    centre = _running_median(times)
    noise, factor = _noise(times, centre)
    clipped = np.clip(times, centre - _WINSOR * noise, centre + _WINSOR * noise)
    error = noise * math.sqrt(factor)
    level, change = _level_scores(clipped, error), _change_scores(clipped, error)
    changes = change.score / _excess(_change_scores(-clipped, error).score, _BEST_SPLIT)
    change_bar = min_score * (1 + _FEW / num_steps) + _SPLITS
    suspects: dict[int, Suspect] = {}
    for at in map(int, np.flatnonzero((level.score >= min_score) | (changes >= change_bar))):
        # Where it began is told by the best split, if there is a clear one; else by the window that shows it best.
        by_split = change.score[at] >= min_score
        since = int(change.since[at] if by_split else level.since[at])
        # Not the clipped times: where a rank changed late, they would follow it late.
        slowdown = math.expm1(float(np.median(times[since:, at])))
        recent = math.expm1(float(np.median(times[-max(MIN_STEPS, (num_steps - since) // 4) :, at])))
        if slowdown >= min_slowdown and recent >= slowdown / 2:
            score = float(max(level.score[at], changes[at]))
            against = _OWN_PAST if changes[at] >= change_bar and changes[at] > level.score[at] else _BETWEEN_RANKS
            confidence = _confidence(score, num_ranks * (num_steps if against == _OWN_PAST else 1))
            suspects[at] = Suspect(int(columns[at]), since, slowdown, score, confidence, against)
    others = np.delete(times, list(suspects), axis=1)
    confirmed = [
        replace(
            suspect,
            since=int(rows[suspect.since]) if suspect.since else 0,
            doubt=_doubt(times[:, at], suspect.since, others, suspect.against),
        )
        for at, suspect in suspects.items()
    ]
    if len(suspects) > num_ranks / 3:
        crowd = f"{len(suspects)} of {num_ranks} ranks with equal work are slower than the others"
        return [], math.nan, f"{crowd}: rather another kind of work than stragglers"
    return confirmed, max(min_slowdown, math.expm1((min_score + 2.33) * level.spread)), ""


def _doubt(own: Times, since: int, others: Times, against: str) -> str:
    """Return why a suspect's slowness may be noise; empty: it is not. [Note: confirmation]

    Args:
        own: [step] logarithms of its own times over its peers'.
        others: [step, rank] the same of the ranks that nobody suspects.
    """
    length = (len(own) - since) // 2
    if length < _HALF_STEPS:
        return f"slow for {len(own) - since} steps only; {2 * _HALF_STEPS} are needed"
    if against == _OWN_PAST:  # then lasting differences between ranks are no noise
        own, others = own - np.median(own[:since]), others - np.median(others[:since], axis=0)
    first, second = (float(np.median(half)) for half in (own[-2 * length : -length], own[-length:]))
    # Logarithms: what makes fast by as much is as likely. A suspect that was slow before began earlier than told.
    before = -_window_medians(own[:since, None], length).ravel()
    noise = [*np.abs(_window_medians(others, length)).ravel(), *before]
    largest = max(noise, default=math.inf)
    if min(first, second) < _AGREE * max(first, second):
        return f"{math.expm1(first):.0%} slower in one half of these steps, {math.expm1(second):.0%} in the other"
    if min(first, second) < _MARGIN * largest:
        return f"other ranks or times are off by {math.expm1(largest):.0%} for as many steps"
    return ""


def _window_medians(times: Times, length: int) -> Times:
    """Median of each rank in windows of `length` steps, [window, rank]: the last of the record, and a quarter apart."""
    if len(times) < length:
        return np.empty((0, times.shape[1]))
    windows = np.lib.stride_tricks.sliding_window_view(times[::-1], length, axis=0)[:: max(1, length // 4)]
    return np.asarray(np.median(windows, axis=-1))[::-1]


@dataclass(frozen=True)
class _Scores:
    """Score of each rank, the step from which on it is reached, and the spread of the healthy ranks' means."""

    score: Times
    since: Numbers
    spread: float = math.nan


def _level_scores(times: Times, error: Times) -> _Scores:
    """Distance of each rank's mean over the last steps from that of the others; the best of windows of 5, 10, 20, ...

    In units of the spread of these means between the ranks.
    """
    num_steps = len(times)
    best = _Scores(np.full(times.shape[1], -np.inf), np.zeros(times.shape[1], np.int64))
    lengths = [length for length in _WINDOWS if length < num_steps]
    for length in (*lengths, num_steps):
        means = times[num_steps - length :].mean(axis=0)
        centre = np.median(means)
        # Between few ranks it may come out small by chance; what the noise of the steps adds to it is known better.
        spread = _TO_SIGMA * float(np.median(np.abs(means - centre))) * (1 + _FEW / len(means))
        spread = max(spread, float(np.median(error)) / math.sqrt(length))
        score = (means - centre) / np.maximum(spread, error / math.sqrt(length))
        # Some window out of many is extreme by chance, and a short one the sooner.
        score = score / _excess(-score, _NORMAL) / (1 + _SHORT / length)
        # A longer window that shows it nearly as well tells better since when.
        since = np.where(score > _NEARLY * best.score, num_steps - length, best.since)
        best = _Scores(np.maximum(score, best.score), since, spread)
    return best


def _change_scores(times: Times, noise: Times) -> _Scores:
    """Best split of each rank's steps into an earlier, faster and a later, slower part."""
    num_steps = len(times)
    if num_steps < 2 * MIN_STEPS:
        return _Scores(np.full(times.shape[1], -np.inf), np.zeros(times.shape[1], np.int64))
    total = np.cumsum(times, axis=0)
    before = np.arange(MIN_STEPS, num_steps - MIN_STEPS + 1)[:, None]  # steps before the split
    after = num_steps - before
    earlier = total[before[:, 0] - 1] / before
    later = (total[-1] - total[before[:, 0] - 1]) / after
    scores = (later - earlier) / (noise * np.sqrt(1 / before + 1 / after))
    best = scores.argmax(axis=0)
    return _Scores(scores.max(axis=0), before[best, 0])


def _excess(scores: Times, normal: tuple[float, float]) -> float:
    """Return how far the scores of ranks that noise made fast exceed those of normal noise; at least 1.

    Args:
        scores: of the fast direction.
        normal: median and 99th percentile that independent normal noise would give.
    """
    finite = scores[np.isfinite(scores)]
    if not len(finite):
        return 1.0
    excess = max(1.0, float(np.median(finite)) / normal[0]) if normal[0] > 0 else 1.0
    # The tail of a few ranks is one rank, which may have recovered from a real fault.
    return max(excess, float(np.quantile(finite, 0.99)) / normal[1]) if len(finite) >= _TAIL_RANKS else excess


def _noise(times: Times, centre: Times) -> tuple[Times, float]:
    """Standard deviation of each rank's steps, and the factor by which correlation widens the variance of a mean.

    From differences of neighbouring steps, which a lasting change of level leaves alone.
    """
    if len(times) < 2:
        return np.full(times.shape[1], 1e-12), 1.0
    differences = np.abs(np.diff(times, axis=0))
    residuals = times - centre
    scaled = residuals / np.maximum(_TO_SIGMA * np.median(np.abs(residuals), axis=0), 1e-12)
    scaled = np.clip(scaled, -_WINSOR, _WINSOR)
    lag = (scaled[1:] * scaled[:-1]).mean(axis=0) / np.maximum((scaled**2).mean(axis=0), 1e-12)
    # The running median follows the noise, so the estimate is low: by about 1/6 with this window.
    rho = float(np.clip(np.median(lag) + 1 / 6, 0.0, 0.9))
    noise = _TO_SIGMA * np.median(differences, axis=0) / math.sqrt(2 * (1 - rho))
    # A rank noisier than the others is judged by its own noise, a quieter one by that of all.
    return np.maximum(np.maximum(noise, np.median(noise)), 1e-12), (1 + rho) / (1 - rho)


def _running_median(times: Times) -> Times:
    """Median of each step and its neighbours, [step, rank]; the record's ends are mirrored."""
    half = min(_NEIGHBOURS, len(times) - 1)
    padded = np.pad(times, ((half, half), (0, 0)), mode="reflect") if half else times
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1, axis=0), axis=-1)


def _confidence(score: float, num_looks: int) -> float:
    """1 - probability that the best of `num_looks` normal scores is as high; at most 0.999: noise is not normal."""
    return min(0.999, max(0.0, 1 - num_looks * 0.5 * math.erfc(score / math.sqrt(2))))


def _median(values: Times, axis: int) -> Times:
    """Median without NaN; NaN where there is nothing else, and no warning."""
    empty: Flags = np.asarray(~np.isfinite(values).any(axis=axis))
    filled = np.where(np.expand_dims(empty, axis), 0.0, values)
    return np.asarray(np.nanmedian(filled, axis=axis) + np.where(empty, np.nan, 0.0))

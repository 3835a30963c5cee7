"""Statistical significance of a shortfall: repeats of a measurement against a reference, in units of their spread.

A subject (a GPU, a pair of GPUs) is measured in several series that share only the subject: other sizes, new
communicators, another time. A series consists of blocks of repeats; only block means are used. Short interruptions of a
device are part of a block's mean, slower changes show in the spread of the blocks.

[Note: conditions for a bad verdict] A series is bad if it is both below a share of the reference (`FAIL_SHARE`,
`WARN_SHARE`) and below the reference by a number of spreads (`_SPREADS`). A subject is bad if at least two of its
series are. The reference is a known value for the device type, or the median of at least eight peers; with fewer the
spread cannot be estimated. Without a reference, nothing is judged.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

from netlayer.verdict import Verdict

LEAST_PEERS = 8
FAIL_SHARE, WARN_SHARE = 0.85, 0.92
UNSTEADY_SHARE = 0.75
"""Share of its fastest block below which a block counts as paused or throttled, if in two series of one subject.

Healthy H100s that start GEMMs all at once draw so much power that they run at 0.83 for a third of a second."""
KNOWN_SPREAD = 0.01
"""Relative spread of healthy devices around the known value of their type."""
_SPREADS: Mapping[Verdict, float] = {"FAIL": 6.0, "WARN": 4.0}
_LEAST_SPREAD = 0.002  # lower bound, since a few repeats may agree by chance
_MAD_TO_SIGMA = 1.4826
_LEAST_SERIES = 2


class Reference(NamedTuple):
    """Reference value of a series.

    Args:
        value: in the series' unit; higher is better.
        spread: relative spread of healthy subjects around it.
        source: description of its source.
    """

    value: float
    spread: float
    source: str


@dataclass(frozen=True)
class Score:
    """Score of one series of a subject.

    Args:
        series: its name.
        share: measured value divided by the reference.
        spread: relative spread of its repeats and of the reference combined.
        verdict: verdict on this series alone.
        value: measured value in its unit; 0 if it is a residual of several measurements.
        source: source of the reference.
    """

    series: str
    share: float
    spread: float
    verdict: Verdict
    value: float
    source: str

    @property
    def from_fail(self) -> float:
        """Distance to `FAIL_SHARE` in spreads; negative if below."""
        return (self.share - FAIL_SHARE) / self.spread

    @property
    def below(self) -> float:
        """Shortfall from the reference in spreads."""
        return (1 - self.share) / self.spread

    def to_row(self) -> dict[str, Any]:
        """Return the score as a row of the record."""
        return {
            "series": self.series, "share": self.share, "spread": self.spread, "verdict": self.verdict,
            "value": self.value, "fail_share": FAIL_SHARE, "spreads_from_fail": self.from_fail,
            "reference": self.source,
        }  # fmt: skip


def score(series: str, share: float, own_spread: float, reference: Reference, value: float = 0.0) -> Score:
    """Score a series.

    Args:
        series: its name.
        share: measured value divided by the reference.
        own_spread: relative spread of its own repeats (`spread_of`).
        reference: reference value.
        value: measured value, for the record.
    """
    spread = max(math.hypot(own_spread, reference.spread), _LEAST_SPREAD)
    below = (1 - share) / spread
    verdict: Verdict = "PASS"
    if share < FAIL_SHARE and below >= _SPREADS["FAIL"]:
        verdict = "FAIL"
    elif share < WARN_SHARE and below >= _SPREADS["WARN"]:
        verdict = "WARN"
    return Score(series, share, spread, verdict, value, reference.source)


def worst_of(scores: Sequence[Score]) -> Score:
    """Return the score with the worst verdict; among equals, the nearest to FAIL."""
    return max(scores, key=lambda one: (get_args(Verdict).index(one.verdict), -one.from_fail))


def combine(scores: Sequence[Score]) -> Verdict:
    """Combine the verdicts of a subject's series.

    FAIL needs two series that fail, WARN two that warn or fail. A single bad series is NO VERDICT.
    """
    bad = [one.verdict for one in scores if one.verdict != "PASS"]
    if bad.count("FAIL") >= _LEAST_SERIES:
        return "FAIL"
    if len(bad) >= _LEAST_SERIES:
        return "WARN"
    return "NO VERDICT" if bad else "PASS"


def spread_of(values: Sequence[float]) -> float:
    """Return the relative standard error of the mean of block values; 0 for fewer than two blocks."""
    if len(values) < 2:
        return 0.0
    # `statistics.stdev` sums exact fractions, at 100 times the price of floats: a fleet has 10^5 pairs.
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(variance / len(values)) / mean


def peers_reference(values: Sequence[float]) -> Reference | None:
    """Return the median of peers with their robust spread; None for fewer than eight."""
    if len(values) < LEAST_PEERS:
        return None
    middle = statistics.median(values)
    mad = statistics.median(abs(value - middle) for value in values)
    return Reference(middle, _MAD_TO_SIGMA * mad / middle, f"median of {len(values)} peers")


def unsteady(blocks: Sequence[Sequence[float]]) -> float | None:
    """Return the ratio of slowest to fastest block if it is below `UNSTEADY_SHARE` in at least two series, else None.

    Args:
        blocks: block speeds of each series of one subject.
    """
    shares = sorted(min(each) / max(each) for each in blocks if each)
    if len(shares) < _LEAST_SERIES or shares[_LEAST_SERIES - 1] >= UNSTEADY_SHARE:
        return None
    return shares[_LEAST_SERIES - 1]

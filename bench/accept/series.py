"""How sure a shortfall is: repeats of one measurement, held against a reference, in units of their own spread.

A subject (a GPU, a pair of them) is measured in several series that share nothing but the subject: other sizes, new
communicators, another minute. Of each series only the blocks of its repeats are looked at: what holds a device up
now and then lies in the mean of a block, and what comes and goes more slowly in their spread.

[Note: what it takes to be accused] In one series, both: less than a share of the reference (`FAIL_SHARE`,
`WARN_SHARE`), and below the reference by so many spreads (`_SPREADS`); of a subject, in two series at least. The
reference is a value that is known for such a device, or the median of at least eight peers: of fewer, nobody can tell
the spread. Where there is no reference, nothing is judged.
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
"""Of its fastest block: a block that is slower, in two series of one subject, is a pause or a throttle, not chance.

Healthy H100 that begin to multiply all at once draw so much power that they run at 0.83 for a third of a second."""
KNOWN_SPREAD = 0.01
"""Of healthy devices around a value that is known for their kind, as a share: machines differ by so much."""
_SPREADS: Mapping[Verdict, float] = {"FAIL": 6.0, "WARN": 4.0}
_LEAST_SPREAD = 0.002  # of a few repeats that happen to agree
_MAD_TO_SIGMA = 1.4826
_LEAST_SERIES = 2


class Reference(NamedTuple):
    """What series are held against.

    Args:
        value: in the series' unit, more is better.
        spread: of healthy subjects around it, as a share of it.
        source: in words.
    """

    value: float
    spread: float
    source: str


@dataclass(frozen=True)
class Score:
    """One series of a subject.

    Args:
        series: its name.
        share: of the reference that it reaches.
        spread: of its own repeats and of the reference together, as a share.
        verdict: of this series alone.
        value: that was measured, in its unit; 0 where it is a residue of several.
        source: of the reference.
    """

    series: str
    share: float
    spread: float
    verdict: Verdict
    value: float
    source: str

    @property
    def from_fail(self) -> float:
        """Spreads above the share below which it would fail; negative below."""
        return (self.share - FAIL_SHARE) / self.spread

    @property
    def below(self) -> float:
        """Spreads below the reference."""
        return (1 - self.share) / self.spread

    def to_row(self) -> dict[str, Any]:
        """For the record."""
        return {
            "series": self.series, "share": self.share, "spread": self.spread, "verdict": self.verdict,
            "value": self.value, "fail_share": FAIL_SHARE, "spreads_from_fail": self.from_fail,
            "reference": self.source,
        }  # fmt: skip


def score(series: str, share: float, own_spread: float, reference: Reference, value: float = 0.0) -> Score:
    """A series that reaches this share of its reference, with repeats that scatter so much."""
    spread = max(math.hypot(own_spread, reference.spread), _LEAST_SPREAD)
    below = (1 - share) / spread
    verdict: Verdict = "PASS"
    if share < FAIL_SHARE and below >= _SPREADS["FAIL"]:
        verdict = "FAIL"
    elif share < WARN_SHARE and below >= _SPREADS["WARN"]:
        verdict = "WARN"
    return Score(series, share, spread, verdict, value, reference.source)


def worst_of(scores: Sequence[Score]) -> Score:
    """The one that says the worst; of those alike, the nearest to FAIL."""
    return max(scores, key=lambda one: (get_args(Verdict).index(one.verdict), -one.from_fail))


def combine(scores: Sequence[Score]) -> Verdict:
    """What several series of a subject say together.

    FAIL and WARN need two of them that say so, WARN counting a FAIL too. One alone, or less than two in all that could
    say anything, is NO VERDICT where it is not PASS.
    """
    bad = [one.verdict for one in scores if one.verdict != "PASS"]
    if bad.count("FAIL") >= _LEAST_SERIES:
        return "FAIL"
    if len(bad) >= _LEAST_SERIES:
        return "WARN"
    return "NO VERDICT" if bad else "PASS"


def spread_of(values: Sequence[float]) -> float:
    """Standard error of the mean of some blocks, as a share of it: how much repeats of the series differ.

    0 of fewer than two.
    """
    if len(values) < 2:
        return 0.0
    # `statistics.stdev` sums exact fractions, at 100 times the price of floats: a fleet has 10^5 pairs.
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(variance / len(values)) / mean


def peers_reference(values: Sequence[float]) -> Reference | None:
    """The median of peers with their robust spread; None of fewer than eight."""
    if len(values) < LEAST_PEERS:
        return None
    middle = statistics.median(values)
    mad = statistics.median(abs(value - middle) for value in values)
    return Reference(middle, _MAD_TO_SIGMA * mad / middle, f"median of {len(values)} peers")


def unsteady(blocks: Sequence[Sequence[float]]) -> float | None:
    """The slowest block of speeds over the fastest, where that is low in two series at least; else None.

    Args:
        blocks: of each series of one subject.
    """
    shares = sorted(min(each) / max(each) for each in blocks if each)
    if len(shares) < _LEAST_SERIES or shares[_LEAST_SERIES - 1] >= UNSTEADY_SHARE:
        return None
    return shares[_LEAST_SERIES - 1]

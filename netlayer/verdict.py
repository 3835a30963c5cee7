"""Verdicts: a finding with its measured figure, expectation and next step, and outlier detection among peers.

A finding is PASS, NO VERDICT, WARN or FAIL; NO VERDICT is a measured figure without anything to compare it with.
Outliers are detected by median and median absolute deviation, which one bad member of a small group hardly shifts.
Figures and expected values come from the callers, which measure or read logs.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

Verdict = Literal["PASS", "NO VERDICT", "WARN", "FAIL"]
"""Ordered from best to worst; NO VERDICT is worse than PASS, since nothing was confirmed."""
NO_EXPECTATION = "no expectation"
# Standard deviation over median absolute deviation, for a normal distribution.
_MAD_TO_SIGMA = 1.4826
# With fewer members, the outlier cannot be told from the others.
MIN_PEERS = 4
# A value is an outlier if it is below the median by both this many robust sigmas and this share of the median. Sigmas
# alone give false alarms where peers happen to be close together, the share alone where they scatter.
_SIGMAS: Mapping[Verdict, float] = {"FAIL": 6.0, "WARN": 4.0}
_SHARES: Mapping[Verdict, float] = {"FAIL": 0.15, "WARN": 0.08}


@dataclass(frozen=True)
class Finding:
    """Result of one check of one subject.

    Args:
        verdict: None if there is nothing to judge: the check was not run, or the figure is informative only.
        subject: node or component: `node7`, `mlx5_3`, `GPU 0`.
        check: name of the check: `all_reduce bus bandwidth`.
        figure: measured value, with its unit.
        expected: expected value, with its source.
        next_step: recommended action; empty for PASS.
        file, line: where the figure was read, as the user named the file; line 0 is the whole file.
    """

    verdict: Verdict | None
    subject: str
    check: str
    figure: str
    expected: str = ""
    next_step: str = ""
    file: str = ""
    line: int = 0


class Peers(NamedTuple):
    """Median, median absolute deviation and size of a group of values."""

    median: float
    mad: float
    num_peers: int

    def judge(self, value: float) -> Verdict:
        """Judge a value that should not be far below its peers."""
        short = self.median - value
        for word in ("FAIL", "WARN"):
            if short > max(_SIGMAS[word] * _MAD_TO_SIGMA * self.mad, _SHARES[word] * abs(self.median)):
                return word
        return "PASS"


def peers_of(values: Iterable[float]) -> Peers:
    """Compute median and median absolute deviation of a group.

    Raises:
        ValueError: `values` is empty.
    """
    known = list(values)
    if not known:
        raise ValueError("values = []: at least one")
    middle = statistics.median(known)
    return Peers(middle, statistics.median(abs(value - middle) for value in known), len(known))


def worst(verdicts: Iterable[Verdict | None]) -> Verdict | None:
    """Return the worst verdict; None if there is none."""
    present = set(verdicts)
    return next((word for word in reversed(get_args(Verdict)) if word in present), None)

"""PASS, NO VERDICT, WARN or FAIL: a finding, its figure, what was expected and the next step; who stands out of peers.

NO VERDICT is said where a figure was measured and nothing is known to hold it against. Outliers are told by median and
median absolute deviation, which a bad member among few hardly moves. Left out: where a figure comes from, and expected
values; those who measure or read logs bring them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

Verdict = Literal["PASS", "NO VERDICT", "WARN", "FAIL"]
"""From the best to the worst; `NO VERDICT` is worse than PASS, for whoever must be sure cannot be."""
NO_EXPECTATION = "no expectation"
# Of a normal distribution: its standard deviation over its median absolute deviation.
_MAD_TO_SIGMA = 1.4826
# With fewer, nobody can tell which one is the odd one.
MIN_PEERS = 4
# Below the peers by so many robust sigmas and by so large a share, both: sigmas alone accuse where peers lie close
# together by chance, a share alone where they scatter.
_SIGMAS: Mapping[Verdict, float] = {"FAIL": 6.0, "WARN": 4.0}
_SHARES: Mapping[Verdict, float] = {"FAIL": 0.15, "WARN": 0.08}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Args:
        verdict: None where nothing was to be judged: a check that was not run, or a figure of no weight beside others.
        subject: the node or part that it is about: `node7`, `mlx5_3`, `GPU 0`.
        check: what was looked at: `all_reduce bus bandwidth`.
        figure: what was found, with its unit.
        expected: what it was held against, with its source.
        next_step: what to do about it, in words; empty for PASS.
        file, line: where it was read, as the user named the file; line 0 is the whole file.
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
    """The middle of a group of values, and their scatter as a robust standard deviation."""

    median: float
    mad: float
    num_peers: int

    def judge(self, value: float) -> Verdict:
        """How a value stands that should not lie below its peers."""
        short = self.median - value
        for word in ("FAIL", "WARN"):
            if short > max(_SIGMAS[word] * _MAD_TO_SIGMA * self.mad, _SHARES[word] * abs(self.median)):
                return word
        return "PASS"


def peers_of(values: Iterable[float]) -> Peers:
    """Median and median absolute deviation.

    Raises:
        ValueError: no values.
    """
    known = list(values)
    if not known:
        raise ValueError("values = []: at least one")
    middle = statistics.median(known)
    return Peers(middle, statistics.median(abs(value - middle) for value in known), len(known))


def worst(verdicts: Iterable[Verdict | None]) -> Verdict | None:
    """The worst of them; None where there is none."""
    found = set(verdicts)
    return next((word for word in reversed(get_args(Verdict)) if word in found), None)

"""One ECMP choice as measured: how a router shared its flows among its next hops, and whether that is chance.

Pearson's chi-square against the expected shares; the tail is exact for the distribution, which fits when each member is
due five flows or more. Not covered: choices that are not independent a flow (flowlets, packet spraying).
"""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topology.probe.capture import Ints

# Below it a choice is called uneven: an even one is so called in one of a thousand.
UNEVEN_P = 1e-3


@dataclass(frozen=True, eq=False)
class Choice:
    """Split of one router's flows over the routers of the next hop.

    Args:
        ttl: the hop that was chosen.
        previous: the router that chose; the source itself at the first hop.
        routers, flows: who was seen there, and the flows that each took.
        share: expected of each, then of those that no flow took; sums to 1.
    """

    ttl: int
    previous: int
    routers: Ints
    flows: Ints
    share: NDArray[np.float64]

    @property
    def chi_square(self) -> float:
        """Pearson's statistic of the flows against the expected shares."""
        total = self.flows.sum()
        counts = np.zeros(len(self.share))
        counts[: len(self.flows)] = self.flows
        due = self.share * total
        return float(((counts - due) ** 2 / due).sum())

    @property
    def p_value(self) -> float:
        """Probability that independent flows with these shares differ so much or more."""
        return chi_square_tail(self.chi_square, len(self.share) - 1)

    @property
    def verdict(self) -> str:
        """Verdict in a word or two."""
        if len(self.share) == 1:
            return "one next hop"
        if self.p_value >= UNEVEN_P:
            return "even"
        return "polarised" if len(self.routers) < len(self.share) else "uneven"

    def to_row(self) -> dict[str, Any]:
        """Return a row for a table."""
        return {
            "hop": self.ttl,
            "from": address(self.previous),
            "flows": int(self.flows.sum()),
            "members": len(self.share),
            "used": len(self.routers),
            "fullest_share": float(self.flows.max() / self.flows.sum()),
            "chi_square": self.chi_square,
            "p_value": self.p_value,
            "verdict": self.verdict,
            "uneven_below_p": UNEVEN_P,
        }


def chi_square_tail(statistic: float, freedom: int) -> float:
    """Probability that a chi-square variable with `freedom` degrees exceeds the statistic.

    The closed sums for whole degrees of freedom (Abramowitz, Stegun 26.4.4, 26.4.5), terms by their logarithm.
    """
    if freedom < 1 or statistic <= 0:
        return 1.0
    half = statistic / 2
    odd = freedom % 2
    tail = math.erfc(math.sqrt(half)) if odd else 0.0
    powers = [index + odd / 2 for index in range(freedom // 2)]
    logs = [power * math.log(half) - half - math.lgamma(power + 1) for power in powers]
    return min(1.0, tail + math.fsum(math.exp(term) for term in logs))


def address(ip: int) -> str:
    """An IPv4 address in dotted form."""
    return str(ipaddress.IPv4Address(ip))

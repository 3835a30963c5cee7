"""Choice of the NCCL_IB_TIMEOUT that outlives a link flap, and its cost: the least exponent, and its neighbours.

Bounds: 4.096 us * 2^T * R is what any NIC keeps at least (below), and what a ConnectX was measured to take until it
gives up is the time to detect a dead path (above). The closed form is `congestion.retransmit`. Not covered: queues and
pauses that last longer than the timeout, which a short one would take for losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from congestion.retransmit.timers import (
    NCCL_RETRY_CNT,
    Advice,
    advise,
    nccl_timeout,
    recovery_s,
    schedule,
    survives,
)
from netlayer.nccl.ack_timeout import MARGIN, MOST_TIMEOUT, nominal_s

Row = dict[str, Any]
_NEIGHBOURS = 2  # exponents to either side of the answer that the table shows


@dataclass(frozen=True)
class Behaviour:
    """Timeouts that result from the same two numbers: a NIC of `retransmit.NICS`, its adaptive phase on or off."""

    name: str
    nic: str
    adaptive: bool = True


BEHAVIOURS = (
    Behaviour("InfiniBand's product", "infiniband"),
    Behaviour("connectx-6", "connectx-6"),
    Behaviour("connectx-6, not adaptive", "connectx-6", adaptive=False),
    Behaviour("connectx-5", "connectx-5"),
    Behaviour("rxe", "rxe"),
)


@dataclass(frozen=True)
class Solution:
    """The timers for a flap.

    Args:
        advice: the exponent that any NIC outlives the flap with, and what it costs on `nic`.
        preset: NCCL's own exponent of that release.
        preset_survives: it outlives the flap with the margin too, on any NIC.
    """

    flap_s: float
    margin: float
    nic: str
    nccl: str
    advice: Advice
    preset: int
    preset_survives: bool

    def to_row(self) -> Row:
        """Return the columns of a record; `None` where a NIC never gives up."""
        return {
            "flap_s": self.flap_s,
            "margin_share": self.margin,
            "nic": self.nic,
            "nccl": self.nccl,
            "timeout": self.advice.timeout,
            "retry_cnt": self.advice.retry_cnt,
            "nic_timeout": self.advice.nic_timeout,
            "lower_s": self.advice.lower_s,
            "recovery_s": _ending(self.advice.recovery_s),
            "error_s": _ending(self.advice.error_s),
            "nccl_timeout": self.preset,
            "nccl_survives": self.preset_survives,
            "source": "predicted",
        }


def solve(
    flap_s: float, nccl: str, nic: str = "connectx-6", retry_cnt: int = NCCL_RETRY_CNT, margin: float = MARGIN
) -> Solution:
    """The least timeout whose lower bound outlasts the flap by the margin.

    Raises:
        ValueError: no timeout is long enough, or an argument is out of its range (see `retransmit.advise`).
    """
    advice = advise(flap_s, nic, retry_cnt, margin=margin)
    preset = nccl_timeout(nccl)
    enough = retry_cnt * nominal_s(preset) >= flap_s * (1 + margin)
    return Solution(flap_s, margin, nic, nccl, advice, preset, enough)


def trade_off(solution: Solution, behaviours: Sequence[Behaviour] = BEHAVIOURS) -> list[Row]:
    """A row for each exponent around the answer and each behaviour: survives, recovers after, gives up after."""
    answer = solution.advice.timeout
    exponents = {*range(answer - _NEIGHBOURS, answer + _NEIGHBOURS + 1), solution.preset}
    rows: list[Row] = []
    for timeout in sorted(one for one in exponents if 1 <= one <= MOST_TIMEOUT):
        for behaviour in behaviours:
            timers = schedule(behaviour.nic, timeout, solution.advice.retry_cnt, adaptive=behaviour.adaptive)
            alive = survives(timers, solution.flap_s)
            rows.append(
                {
                    "timeout": timeout,
                    "retry_cnt": solution.advice.retry_cnt,
                    "behaviour": behaviour.name,
                    "flap_s": solution.flap_s,
                    "survives": alive,
                    "recovery_s": _ending(float(recovery_s(timers, solution.flap_s))) if alive else None,
                    "error_s": _ending(timers.error_s),
                    "chosen": timeout == answer,
                    "source": "predicted",
                }
            )
    return rows


def _ending(seconds: float) -> float | None:
    return float(seconds) if np.isfinite(seconds) else None

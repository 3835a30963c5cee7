"""The closed form, as a null model: one rate of failures, one time of recovery, one interval of saves.

Daly, "A higher order estimate of the optimum checkpoint interval" (2006); Young (1974) for the interval. Kinds are
averaged, standbys are always ready, saves are durable at once, and numbers stand in the middle of their ranges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from bench.life.inputs import DAY_S, Life


@dataclass(frozen=True)
class Averages:
    """Inputs of the closed form.

    Args:
        every_s: mean seconds from a failure to the next, of training; infinite where nothing fails.
        recovery_s: mean seconds of an interruption.
        redone_share: share of the interruptions that lose work.
    """

    every_s: float
    recovery_s: float
    interval_s: float
    save_s: float
    redone_share: float
    slow_share: float


def averages(life: Life, fixed: Mapping[str, float] | None = None) -> Averages:
    """Return the averages of a life; `fixed` as in `simulate`."""
    middle = {path: one.middle for path, one in life.ranges()} | dict(fixed or {})
    server = middle["recovery.standby_s" if life.recovery.standbys else "recovery.reschedule_s"]
    total, recovery, losing, slow = 0.0, 0.0, 0.0, 0.0
    for kind in life.failures:
        path = f"failures.{kind.name}"
        if kind.per_1000_server_days is not None:
            rate = middle[f"{path}.per_1000_server_days"] * life.servers / 1000 / DAY_S
        elif kind.per_day is not None:
            rate = middle[f"{path}.per_day"] / DAY_S
        else:
            rate = middle[f"{path}.count"] / (life.days * DAY_S)
        detect = middle[f"{path}.detect_s"]
        idle = 0.0 if kind.slowdown else detect
        slow += rate * kind.slowdown * detect
        total += rate
        losing += 0.0 if kind.planned or kind.slowdown else rate
        recovery += rate * (
            idle
            + middle[f"{path}.diagnose_s"]
            + middle["recovery.restart_s"]
            + (server if life.servers_lost(kind) else 0.0)
        )
    mean = recovery / total if total else 0.0
    every = math.inf if not total else 1 / total
    if life.is_counted:  # so many in the whole time: the rest of a cycle is training
        every = max(every - (mean if life.replicas.number == 1 else _stalls(middle)), 1e-9)
    share = losing / total if total else 0.0
    checkpoints = middle["checkpoints.every_s"], middle["checkpoints.stall_s"]
    return Averages(every, mean, *checkpoints, share, min(1.0, middle["slow_share"] + slow))


def closed_form(life: Life, fixed: Mapping[str, float] | None = None) -> float:
    """Return the effective training time ratio of the closed form."""
    a = averages(life, fixed)
    cycle = a.interval_s + a.save_s
    if not math.isfinite(a.every_s):
        return a.interval_s / cycle * (1 - a.slow_share)
    if life.replicas.number > 1:
        middle = {path: one.middle for path, one in life.ranges()} | dict(fixed or {})
        stall = _stalls(middle)
        away = max(0.0, a.recovery_s - middle["replicas.stall_s"]) / life.replicas.number
        whole = a.every_s + stall
        return max(0.0, a.every_s - away) / whole * a.interval_s / cycle * (1 - a.slow_share)
    # Expected time of one cycle: it is tried until it comes through, with a recovery after each attempt that does not.
    attempts = math.expm1(min(cycle / a.every_s, 500.0))
    recovery = a.recovery_s if life.is_counted else a.every_s * math.expm1(min(a.recovery_s / a.every_s, 500.0))
    losing = a.interval_s / (attempts * (a.every_s + recovery))
    keeping = a.interval_s / cycle * a.every_s / (a.every_s + recovery)
    return (a.redone_share * losing + (1 - a.redone_share) * keeping) * (1 - a.slow_share)


def best_interval_s(life: Life) -> float:
    """Return Young's interval between saves: the root of twice the save's cost times the time between failures.

    Where nothing fails within the run, the run is that time.
    """
    a = averages(life)
    return math.sqrt(2 * a.save_s * min(a.every_s, life.days * DAY_S))


def _stalls(middle: Mapping[str, float]) -> float:
    return middle["replicas.stall_s"] + middle["replicas.rejoin_stall_s"]

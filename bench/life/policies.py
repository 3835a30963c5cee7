"""Policies of a run set against each other, and which input moves the result most.

A policy is an interval of saves, a number of standbys, a time of detection, a way to restart and a number of replicas
that fail one by one. All are run with the same chance. Standbys are servers that do not train: policies are ranked by
what all servers together do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from bench.life.closed_form import best_interval_s, closed_form
from bench.life.inputs import Life, Range, exactly
from bench.life.model import TRAINING, simulate

Restart = Literal["reschedule", "requeue"]
RESTARTS: tuple[str, ...] = get_args(Restart)
REQUEUE_S = (454.0, 768.0)
"""Seconds in which a whole job is queued again, 2,048 to 16,384 GPUs: ByteRobust (arXiv 2509.16293), table 7."""
MOST_POLICIES = 200
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Policy:
    """One way to run.

    Args:
        checkpoint_s: seconds of training between two saves.
        detect_s: seconds until any failure is noticed; None: as the life has it by kind.
        restart: `reschedule` asks for the servers that were lost, `requeue` queues the whole job again.
    """

    checkpoint_s: float
    standbys: int
    detect_s: float | None
    restart: Restart
    replicas: int

    @property
    def label(self) -> str:
        parts = [f"save each {self.checkpoint_s:,.0f} s", f"{self.standbys} standbys"]
        if self.detect_s is not None:
            parts.append(f"noticed in {self.detect_s:,.0f} s")
        parts += ["requeue"] * (self.restart == "requeue")
        parts += [f"{self.replicas} replicas"] * (self.replicas > 1)
        return ", ".join(parts)


def with_policy(life: Life, policy: Policy) -> Life:
    """Return the life under a policy."""
    recovery = life.recovery.model_copy(update={"standbys": policy.standbys})
    if policy.restart == "requeue":
        restart = life.recovery.restart_s
        both = Range(low=restart.low + REQUEUE_S[0], high=restart.high + REQUEUE_S[1], per=restart.per)
        recovery = recovery.model_copy(update={"restart_s": both, "reschedule_s": exactly(0), "standby_s": exactly(0)})
    failures = life.failures
    if policy.detect_s is not None:
        noticed = {"detect_s": exactly(policy.detect_s)}
        failures = tuple(kind if kind.planned else kind.model_copy(update=noticed) for kind in failures)
    return life.model_copy(
        update={
            "checkpoints": life.checkpoints.model_copy(update={"every_s": exactly(policy.checkpoint_s)}),
            "recovery": recovery,
            "failures": failures,
            "replicas": life.replicas.model_copy(update={"number": policy.replicas}),
        }
    )


def all_policies(
    checkpoints: Sequence[float],
    standbys: Sequence[int],
    detects: Sequence[float | None],
    restarts: Sequence[Restart],
    replicas: Sequence[int],
) -> list[Policy]:
    """Return every combination that makes sense: a job that is queued again as a whole has no use for standbys."""
    combinations = itertools.product(checkpoints, standbys, detects, restarts, replicas)
    return [
        Policy(*each)
        for each in dict.fromkeys(combinations)
        if not (each[3] == "requeue" and each[1] and "reschedule" in restarts)
    ]


@dataclass(frozen=True)
class PolicyResult:
    """Result of a policy.

    Args:
        ettr: mean effective training time ratio of the servers that train.
        low, high: middle 90% of the runs.
        of_all: `ettr` over all servers, standbys among them.
        closed: of the closed form, with the numbers in the middle of their ranges.
        interruptions: mean, of a run.
        shares: of the time by part.
    """

    policy: Policy
    ettr: float
    low: float
    high: float
    of_all: float
    closed: float
    interruptions: float
    shares: dict[str, float]

    @property
    def loses_by(self) -> str:
        """Return the parts that cost most, in points."""
        losses = sorted(((share, part) for part, share in self.shares.items() if part != TRAINING), reverse=True)
        return ", ".join(f"{part} {100 * share:.1f}" for share, part in losses[:3] if share >= 0.0005) or "nothing"


def rank(
    life: Life, policies: Sequence[Policy], runs: int, seed: int, on_progress: Progress | None = None
) -> list[PolicyResult]:
    """Return the policies, the best first."""
    results = []
    for index, policy in enumerate(policies):
        if on_progress:
            on_progress(index, len(policies), policy.label)
        own = with_policy(life, policy)
        outcome = simulate(own, runs, seed)
        ettr = float(outcome.ettr.mean())
        results.append(
            PolicyResult(
                policy,
                ettr,
                *outcome.interval(),
                ettr * life.servers / (life.servers + policy.standbys),
                closed_form(own),
                float(outcome.interruptions.mean()),
                outcome.shares(),
            )
        )
    return sorted(results, key=lambda result: -result.of_all)


@dataclass(frozen=True)
class Sensitivity:
    """Effect of one input on the result, from one end of its range to the other, all others in the middle."""

    path: str
    low: float
    high: float
    ettr_low: float
    ettr_high: float
    ettr_middle: float

    @property
    def swing(self) -> float:
        return abs(self.ettr_high - self.ettr_low)


def sensitivity(life: Life, runs: int, seed: int, on_progress: Progress | None = None) -> list[Sensitivity]:
    """Return each input that is not known, those that move the result most first."""
    uncertain = {path: one for path, one in life.ranges() if one.is_uncertain}
    middle = {path: one.middle for path, one in uncertain.items()}
    at_middle = float(simulate(life, runs, seed, middle).ettr.mean())
    results = []
    for index, (path, one) in enumerate(uncertain.items()):
        if on_progress:
            on_progress(index, len(uncertain), path)
        low, high = (
            float(simulate(life, runs, seed, {**middle, path: end}).ettr.mean()) for end in (one.low, one.high)
        )
        results.append(Sensitivity(path, one.low, one.high, low, high, at_middle))
    return sorted(results, key=lambda result: -result.swing)


@dataclass(frozen=True)
class CurvePoint:
    """Effective training time at one interval of saves, of the event model and of the closed form."""

    checkpoint_s: float
    ettr: float
    low: float
    high: float
    closed: float


def curve(life: Life, runs: int, seed: int, points: int = 13) -> list[CurvePoint]:
    """Return the ratio over the interval of saves, a decade to each side of the interval at hand."""
    now = life.checkpoints.every_s.middle
    result = []
    for every_s in np.geomspace(now / 10, now * 10, points):
        own = life.model_copy(
            update={"checkpoints": life.checkpoints.model_copy(update={"every_s": exactly(float(every_s))})}
        )
        outcome = simulate(own, runs, seed)
        result.append(CurvePoint(float(every_s), float(outcome.ettr.mean()), *outcome.interval(), closed_form(own)))
    return result


def young_s(life: Life) -> float:
    """Return Young's interval of saves, at least a second."""
    return max(1.0, round(best_interval_s(life)))

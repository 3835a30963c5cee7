"""Result of one call of `netlayer run whatif`: of a cluster, or of published runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.life.cases import CaseResult
from bench.life.inputs import Life
from bench.life.policies import CurvePoint, PolicyResult, Sensitivity


@dataclass(frozen=True)
class Study:
    """Parts that are empty were not asked for.

    Args:
        life: of the cluster; None with published runs.
        policies: the best first.
        swings: what moves the best policy, the largest first.
        points: the best policy over the interval of saves.
    """

    life: Life | None = None
    policies: Sequence[PolicyResult] = ()
    swings: Sequence[Sensitivity] = ()
    points: Sequence[CurvePoint] = ()
    cases: Sequence[CaseResult] = ()

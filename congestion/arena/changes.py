"""Robustness and parts: each law with one thing changed at a time, next to itself unchanged, on the same runs.

Robustness: every searched parameter halved and doubled, noise on round trips, rare CNPs, queue pairs without ECN.
Parts: the hybrid with each of its parts switched off. Not covered: a comparison of laws with each other
(arena.verdict).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from congestion.arena.protocol import SUITE, Suite
from congestion.arena.run import Contender, Row
from congestion.arena.runner import Plan, Results, plan_of
from congestion.arena.tune_ranges import overrides_of, ranges_of
from congestion.arena.verdict import over_cases
from netlayer.errors import ConfigError

_PARTS_OF = "hybrid"
_SEPARATOR = ": "


def robustness(contenders: Sequence[Contender], suite: Suite = SUITE) -> tuple[Plan, list[str]]:
    """The plan, and the changes that settings refuse, such as a kmin doubled to above kmax."""
    rules = suite.robustness
    changes = [
        *(f"congestion.rtt_noise_us={value}" for value in rules.rtt_noise_us),
        *(f"congestion.cnp_interval_us={value}" for value in rules.cnp_interval_us),
        f"congestion.deaf_share={rules.share_without_ecn}",
    ]
    candidates, refused = [], []
    for one in contenders:
        candidates.append(one)
        for override in [*_scaled(one, suite), *changes]:
            changed = _changed(one, override)
            try:
                changed.settings()
            except ConfigError as exc:
                refused.append(str(exc))
            else:
                candidates.append(changed)
    return plan_of(
        candidates, only=[f"/{rules.condition}"], num_seeds=_seeds(rules.num_seeds, suite), suite=suite
    ), refused


def parts(contender: Contender, suite: Suite = SUITE) -> Plan:
    """The hybrid, and the hybrid without each of its parts.

    Raises:
        ConfigError: another law, whose parts nobody named.
    """
    if contender.law != _PARTS_OF:
        raise ConfigError("--laws", contender.name, "has no parts to omit", f"give {_PARTS_OF}")
    on = {name: value for name, value in contender.settings().hybrid if value is True}
    without = [_changed(contender, f"congestion.{_PARTS_OF}.{name}=false") for name in on]
    return plan_of([contender, *without], only=[f"/{name}" for name in suite.ablation_conditions], suite=suite)


def compare_changes(results: Results) -> list[Row]:
    """A row a change: completion time over the law's own, its interval, and port-time paused before and after."""
    frame = pd.DataFrame(results.rows)
    paused = frame.groupby("law")["pause_share"].mean()
    rows = []
    for one in results.plan.contenders:
        law, separator, change = one.name.partition(_SEPARATOR)
        if separator:
            both = frame[frame["law"].isin([law, one.name])]
            ratio = over_cases(both, one.name, law, "completion_us", "geometric", results.plan.suite)
            figures = {"completion": ratio.value, "low": ratio.low, "high": ratio.high}
            shares = {"pause_share": float(paused[law]), "changed_pause_share": float(paused[one.name])}
            rows.append({"law": law, "change": change, **figures, **shares})
    return rows


def _scaled(contender: Contender, suite: Suite) -> list[str]:
    """Return each searched parameter times each factor, as far as its field allows, without unchanged ones."""
    made: list[str] = []
    for factor in suite.robustness.factors:
        for one in ranges_of(contender, suite, max(factor, 1 / factor)):
            value = one.high if factor > 1 else one.low
            if value != one.published:
                made += overrides_of({one.name: value})
    return made


def _changed(contender: Contender, override: str) -> Contender:
    name = f"{contender.name}{_SEPARATOR}{override.removeprefix('congestion.')}"
    return replace(contender, name=name, overrides=(*contender.overrides, override))


def _seeds(num_requested: int, suite: Suite) -> int:
    return min(num_requested, len(suite.test.seeds))

"""Verdicts on a run from its events: stragglers, slow links, drift, what-if replay, effective training time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from netlayer import lazy_names

if TYPE_CHECKING:
    from netlayer.observe.verdicts.judge import drift as drift
    from netlayer.observe.verdicts.judge import find_stragglers as find_stragglers
    from netlayer.observe.verdicts.judge import straggler_rows as straggler_rows
    from netlayer.observe.verdicts.run import Run as Run
    from netlayer.observe.verdicts.run import collect as collect
    from netlayer.observe.verdicts.straggler import MIN_STEPS as MIN_STEPS
    from netlayer.observe.verdicts.straggler import detect as detect
    from netlayer.observe.verdicts.straggler import null_model as null_model
    from netlayer.observe.verdicts.timeline import timeline_of as timeline_of
    from netlayer.observe.verdicts.verdict import CauseRow as CauseRow

__all__ = [
    "MIN_STEPS",
    "CauseRow",
    "Run",
    "collect",
    "detect",
    "drift",
    "find_stragglers",
    "null_model",
    "straggler_rows",
    "timeline_of",
]

__getattr__ = lazy_names(
    __name__,
    {
        "MIN_STEPS": ".straggler",
        "CauseRow": ".verdict",
        "Run": ".run",
        "collect": ".run",
        "detect": ".straggler",
        "drift": ".judge",
        "find_stragglers": ".judge",
        "null_model": ".straggler",
        "straggler_rows": ".judge",
        "timeline_of": ".timeline",
    },
)

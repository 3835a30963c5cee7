"""Made-up rows of an arena: what each law's runs would look like if it were so much slower and paused so much."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from congestion.arena.protocol import SUITE, CaseSet

# Of each law: completion over the hybrid's on all-to-all and elsewhere, share of port-time paused.
WINNING = {
    "none": (1.15, 1.03, 0.030),
    "dcqcn": (1.18, 1.06, 0.010),
    "swift": (1.10, 1.02, 0.004),
    "nscc": (1.12, 1.00, 0.005),
    "hybrid": (1.00, 1.00, 0.003),
}


def made_up(laws: Mapping[str, tuple[float, float, float]] = WINNING, cases: CaseSet = SUITE.test) -> pd.DataFrame:
    """Rows as `arena_verdict` takes them: luck that all laws share of a seed, and 1% that each has alone."""
    rng = np.random.default_rng(0)
    rows = []
    for case in cases.cases:
        workload, base_us = case.workload, rng.uniform(300, 1_500)
        for seed in cases.seeds:
            luck = rng.lognormal(0, 0.1)
            for law, (asked, elsewhere, pauses) in laws.items():
                slower = asked if workload.scenario == SUITE.rules.asked_of else elsewhere
                time_us = base_us * luck * slower * rng.lognormal(0, 0.01)
                rows.append(
                    {
                        "law": law,
                        "workload": workload.name,
                        "condition": case.condition.name,
                        "scenario": workload.scenario,
                        "seed": seed,
                        "completion_us": time_us,
                        "fct_us_p99": 0.9 * time_us,
                        "fct_us_max": time_us,
                        "goodput_bps": 1e14 / time_us,
                        "victim_slowdown": 2 * slower if workload.scenario == "victim" else np.nan,
                        "pause_share": pauses * luck,
                        "bound_us": 0.9 * base_us * luck,
                    }
                )
    return pd.DataFrame(rows)

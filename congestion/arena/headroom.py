"""Headroom over the lower bound: each law's completion time over the bound that no law can pass
(`congestion.simulation.bound`).

Where the best rival is within 2% of the bound, nobody beats it by 5%; this says where that is so. The bound is what it
is, not what can be reached: above it a law may still be the best possible one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from congestion.arena.protocol import SUITE, Suite

_CASE = ["workload", "condition"]


def over_bound(rows: pd.DataFrame, by: Sequence[str] = ("workload",)) -> pd.DataFrame:
    """Columns `by`, `law`, `over_bound`: geometric mean of completion time over the bound of the same case and seed."""
    logs = rows.assign(over_bound=np.log(rows["completion_us"] / rows["bound_us"]))
    means = logs.groupby([*by, "law"], sort=False)["over_bound"].mean()
    return means.apply(np.exp).reset_index()


def headroom(rows: pd.DataFrame, candidate: str, suite: Suite = SUITE) -> pd.DataFrame:
    """A row a case: the best rival, its mean time over the bound's, the candidate's, and the least ratio of the two
    that there can be."""
    rivals = [law for law in suite.rules.rivals if law != candidate and law in set(rows["law"])]
    means = rows.pivot_table(index=_CASE, columns="law", values="completion_us", sort=False)
    bound = rows.groupby(_CASE, sort=False)["bound_us"].mean().reindex(means.index)
    best = means[rivals].min(axis=1)
    table = pd.DataFrame(
        {
            "best_rival": means[rivals].idxmin(axis=1),
            "its_over_bound": best / bound,
            "candidate_over_bound": means[candidate] / bound,
            "least_ratio": bound / best,
        }
    )
    return table.reset_index()


def headroom_sentence(rows: pd.DataFrame, candidate: str, suite: Suite = SUITE) -> str:
    """Describe what the bound means for the claim to be faster, where it is made: a sentence or two."""
    rules = suite.rules
    scenario_rows = rows[rows["scenario"] == rules.asked_of]
    rivals = over_bound(scenario_rows[scenario_rows["law"].isin([law for law in rules.rivals if law != candidate])], ())
    if rivals.empty:
        return ""
    best = rivals.sort_values("over_bound").iloc[0]
    cases = headroom(scenario_rows, candidate, suite)
    out_of_reach = int((cases["least_ratio"] > rules.faster).sum())
    least = 1 / best["over_bound"]
    end = "so the claim cannot hold here" if least > rules.faster else "a bound that need not be reachable"
    return (
        f"On {rules.asked_of} the bound is {least:.3f} of the time of {best['law']}, the best rival, {end}; "
        f"in {out_of_reach} of {len(cases)} cases it is above {rules.faster}"
    )

"""Verdict of the arena, from its rows: the comparison case by case, and whether the three claims on a candidate hold.

A row is one run: `law`, `workload`, `condition`, `scenario`, `seed` and its metrics, those of `METRICS`. ARENA.md says
what is asked and why. Not covered: the runs themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from congestion.arena.headroom import over_bound
from congestion.arena.protocol import SUITE, Suite
from congestion.simulation.statistics import Mean, Ratio, holm, paired_ratio
from netlayer.report import Verdict

# Named as in `measures.summary`; the first decides. `victim_slowdown` is NaN but in the victim's scenario.
METRICS = ("completion_us", "fct_us_p99", "fct_us_max", "goodput_bps", "victim_slowdown", "pause_share")
VERDICTS = ("better", "no worse", "undecided", "worse")
_CASE = ["workload", "condition"]
_RUN = ["law", *_CASE, "seed"]


@dataclass(frozen=True)
class Claim:
    """Claim on the candidate, whether it holds, and the figures as a sentence."""

    text: str
    holds: bool
    sentence: str


def check(rows: pd.DataFrame) -> None:
    """Refuse rows from which nothing can be concluded.

    Raises:
        ValueError: a column is missing, a run stands there twice, or a law lacks a run that another has.
    """
    missing = [name for name in (*_RUN, "scenario", "bound_us", *METRICS) if name not in rows]
    if missing or rows.empty:
        raise ValueError(f"rows lack {', '.join(missing) or 'runs'}")
    twice = rows[rows.duplicated(_RUN)]
    if not twice.empty:
        raise ValueError(f"{len(twice)} runs stand there twice, the first is {_name(twice.iloc[0][_RUN])}")
    wide = rows.pivot(index=[*_CASE, "seed"], columns="law", values="seed")
    for law in wide:
        lacking = wide.index[wide[law].isna()]
        if len(lacking):
            raise ValueError(f"{law} lacks {len(lacking)} runs that others have, the first is {_name(lacking[0])}")


def compare(rows: pd.DataFrame, candidate: str, metric: str = "completion_us", suite: Suite = SUITE) -> pd.DataFrame:
    """The candidate against every other law in every case: ratio of means, interval, p-value after Holm, verdict.

    `better`, or `worse`: the p-value says that the ratio is not 1. `no worse`: the interval ends below the margin, a
    proven difference within it too. `undecided`: none of these.
    """
    comparisons = []
    rivals = _others(rows, candidate)
    for case, all_laws in rows.groupby(_CASE, sort=False):
        runs = all_laws.pivot(index="seed", columns="law", values=metric)
        for rival in rivals:
            ratio = _ratio(runs[candidate], runs[rival], "arithmetic", suite)
            comparisons.append({**dict(zip(_CASE, case, strict=True)), "rival": rival, **vars(ratio)})
    table = pd.DataFrame(comparisons).rename(columns={"value": "ratio", "num_pairs": "pairs"})
    table["p_value"] = holm(table["p_value"].tolist())
    table["verdict"] = [
        _verdict(ratio, high, p_value, suite)
        for ratio, high, p_value in zip(table["ratio"], table["high"], table["p_value"], strict=True)
    ]
    return table


def over_cases(rows: pd.DataFrame, candidate: str, rival: str, metric: str, of: Mean, suite: Suite = SUITE) -> Ratio:
    """One ratio over all cases of `rows`, seeds resampled: of geometric means, or of sums (`arithmetic`)."""
    logs = of == "geometric"
    values = rows.assign(value=np.log(rows[metric]) if logs else rows[metric])
    means = values.pivot_table(index="seed", columns="law", values="value")
    by_seed = means.apply(np.exp) if logs else means
    return _ratio(by_seed[candidate], by_seed[rival], of, suite)


def claims(rows: pd.DataFrame, candidate: str, suite: Suite = SUITE) -> list[Claim]:
    """Judge three claims: faster than each rival, paused for less time than the first one, in no case worse.

    The first two are about one scenario (`Rules.asked_of`: all-to-all), the third about all of them.

    Args:
        rows: as `check` takes them; `law` is the congestion-control algorithm.

    Raises:
        ValueError: no rows of the candidate, of a rival of the suite, or of that scenario.
    """
    rivals = [rival for rival in suite.rules.rivals if rival != candidate]
    absent = [law for law in (candidate, *rivals) if law not in set(rows["law"])]
    if absent:
        raise ValueError(f"no rows of {', '.join(absent)}: the claims need the candidate and {', '.join(rivals)}")
    scenario_rows = rows[rows["scenario"] == suite.rules.asked_of]
    if scenario_rows.empty:
        raise ValueError(f"no rows of the scenario {suite.rules.asked_of}")
    return [
        _faster(scenario_rows, candidate, rivals, suite),
        _calmer(scenario_rows, candidate, suite),
        _no_worse(rows, candidate, suite),
    ]


def standing(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a law, best first: times over the best law's of each case and completion over the bound (geometric
    means), the other metrics' means."""
    means = rows.groupby([*_CASE, "law"], sort=False)[list(METRICS)].mean()
    times = means[list(_OVER_BEST)]
    relative = (times / times.groupby(level=_CASE).transform("min")).apply(np.log)
    laws = relative.groupby(level="law").mean().apply(np.exp).rename(columns=_OVER_BEST)
    laws["over_bound"] = over_bound(rows, ()).set_index("law")["over_bound"]
    others = ["goodput_bps", "victim_slowdown", "pause_share"]
    return laws.join(means[others].groupby(level="law").mean()).sort_values("completion").reset_index()


_OVER_BEST = {"completion_us": "completion", "fct_us_p99": "fct_p99", "fct_us_max": "fct_max"}


def is_whole(rows: pd.DataFrame, suite: Suite = SUITE) -> bool:
    """Whether every case of the suite's test set ran with every seed."""
    expected = {
        (case.workload.name, case.condition.name, seed) for case in suite.test.cases for seed in suite.test.seeds
    }
    return expected <= set(rows[[*_CASE, "seed"]].itertuples(index=False, name=None))


def verdict(results: Sequence[Claim], whole: bool) -> tuple[Verdict, str]:
    """PASS where all claims hold on the whole suite, FAIL where none does, else WARN; and why, in sentences."""
    num_held = sum(claim.holds for claim in results)
    word: Verdict = "PASS" if num_held == len(results) and whole else "WARN" if num_held else "FAIL"
    sentences = [f"{num_held} of {len(results)} claims hold" + ("" if whole else ", on a part of the suite only")]
    return word, ". ".join([*sentences, *(claim.sentence for claim in results)]) + "."


def _faster(rows: pd.DataFrame, candidate: str, rivals: Sequence[str], suite: Suite) -> Claim:
    ratios = {rival: over_cases(rows, candidate, rival, "completion_us", "geometric", suite) for rival in rivals}
    best = max(ratios, key=lambda rival: ratios[rival].value)
    limit = suite.rules.faster
    sentence = f"All-to-all completes in {_ratio_text(ratios[best], suite)} of the time of {best}, the best rival"
    return Claim(
        f"all-to-all at least {1 - limit:.0%} faster than each of {', '.join(rivals)}",
        all(ratio.high <= limit for ratio in ratios.values()),
        sentence,
    )


def _calmer(rows: pd.DataFrame, candidate: str, suite: Suite) -> Claim:
    limit, rival = suite.rules.fewer_pauses, suite.rules.rivals[0]
    claim = f"all-to-all with at least {1 - limit:.0%} less pause time than {rival}"
    if candidate == rival:
        return Claim(claim, False, f"{rival} is the measure of pause time itself")
    rows = rows.assign(pause_us=rows["pause_share"] * rows["completion_us"])  # of a port, on average
    if not rows.loc[rows["law"] == rival, "pause_us"].any():
        return Claim(claim, False, f"{rival} never pauses there: there is no pause time to save")
    ratio = over_cases(rows, candidate, rival, "pause_us", "arithmetic", suite)
    return Claim(claim, ratio.high <= limit, f"Pause time there is {_ratio_text(ratio, suite)} of {rival}'s")


def _no_worse(rows: pd.DataFrame, candidate: str, suite: Suite) -> Claim:
    margin = suite.rules.no_worse
    table = compare(rows[rows["law"].isin([candidate, *suite.rules.rivals])], candidate, suite=suite)
    over = table[table["high"] > margin]
    cases = table.groupby(_CASE)["high"].max()
    sentence = f"No worse in {(cases <= margin).sum()} of {len(cases)} cases (interval ends at {margin} or below)"
    if len(over):
        worst = over.sort_values("ratio").iloc[-1]
        worse = len(over[over["verdict"] == "worse"].drop_duplicates(_CASE))
        sentence += (
            f", proven worse in {worse}; the worst is {_name(worst[_CASE])}: {worst['ratio']:.3f} of {worst['rival']}"
        )
    return Claim(f"in no case worse than any rival by more than {margin - 1:.0%}", over.empty, sentence)


def _verdict(ratio: float, high: float, p_value: float, suite: Suite) -> str:
    proven = p_value < 1 - suite.rules.level
    if proven and ratio < 1:
        return "better"
    if high <= suite.rules.no_worse:
        return "no worse"
    return "worse" if proven else "undecided"


def _ratio(ours: pd.Series[float], theirs: pd.Series[float], of: Mean, suite: Suite) -> Ratio:
    rules = suite.rules
    x, y = ours.to_numpy(), theirs.to_numpy()
    return paired_ratio(x, y, of=of, level=rules.level, resamples=rules.resamples, seed=rules.bootstrap_seed)


def _ratio_text(ratio: Ratio, suite: Suite) -> str:
    return f"{ratio.value:.3f} ({suite.rules.level:.0%} interval {ratio.low:.3f} to {ratio.high:.3f})"


def _others(rows: pd.DataFrame, candidate: str) -> list[str]:
    return [law for law in rows["law"].unique() if law != candidate]


def _name(parts: Sequence[object] | pd.Series[str]) -> str:
    return " / ".join(map(str, parts))

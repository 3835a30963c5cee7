"""Comparison and claims, from made-up rows whose outcome is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from congestion.arena.protocol import SUITE
from congestion.arena.verdict import check, claims, compare, is_whole, over_cases, standing, verdict
from tests.congestion.arena_rows import WINNING, made_up

FEW = replace(SUITE.test, conditions=SUITE.test.conditions[:2])


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    return made_up(cases=FEW)


def test_a_case_is_compared_pair_by_pair(rows: pd.DataFrame) -> None:
    table = compare(rows, "hybrid")
    assert len(table) == len(FEW.cases) * (len(WINNING) - 1)
    one = table[(table["workload"] == "all-to-all 64") & (table["rival"] == "swift")].iloc[0]
    ours, theirs = (
        rows[(rows["workload"] == one["workload"]) & (rows["condition"] == one["condition"]) & (rows["law"] == law)]
        for law in ("hybrid", "swift")
    )
    assert one["ratio"] == pytest.approx(ours["completion_us"].mean() / theirs["completion_us"].mean())
    assert one["low"] < 1 / 1.10 < one["high"]
    assert one["high"] - one["low"] < 0.02  # the seeds' luck, ten times as large, is in both
    assert one["pairs"] == len(FEW.seeds)


def test_verdicts_of_a_case() -> None:
    cases = replace(FEW, workloads=FEW.workloads[:1], conditions=FEW.conditions[:1])
    laws = {"us": (1.0, 1, 0.0), "slow": (1.1, 1, 0.0), "alike": (1.0, 1, 0.0), "fast": (0.9, 1, 0.0)}
    rows = made_up(laws, cases)
    assert _verdicts(rows) == {"slow": "better", "alike": "no worse", "fast": "worse"}
    noise = np.random.default_rng(1).lognormal(0, 0.2, len(rows))
    noisy = rows.assign(completion_us=rows["completion_us"] * np.where(rows["law"] == "us", noise, 1.0))
    assert _verdicts(noisy)["alike"] == "undecided"


def _verdicts(rows: pd.DataFrame) -> dict[str, str]:
    table = compare(rows, "us")
    return dict(zip(table["rival"], table["verdict"], strict=True))


def test_holm_counts_every_case_and_rival(rows: pd.DataFrame) -> None:
    """The same case on its own has a smaller p-value than among all."""
    alone = rows[(rows["workload"] == "all-to-all 64") & (rows["condition"] == FEW.conditions[0].name)]
    assert compare(alone, "hybrid")["p_value"].max() < compare(rows, "hybrid")["p_value"].min()


def test_ratios_over_cases_are_of_geometric_means(rows: pd.DataFrame) -> None:
    asked = rows[rows["scenario"] == "all-to-all"]
    found = over_cases(asked, "hybrid", "swift", "completion_us", "geometric")
    logs = np.log(asked["completion_us"]).groupby(asked["law"]).mean()
    assert found.value == pytest.approx(np.exp(logs["hybrid"] - logs["swift"]))
    assert found.num_pairs == len(FEW.seeds)


def test_a_law_that_wins_has_all_claims() -> None:
    rows = made_up()
    found = claims(rows, "hybrid")
    assert [claim.holds for claim in found] == [True, True, True]
    assert "of the time of swift, the best rival" in found[0].sentence
    assert "No worse in 99 of 99 cases" in found[2].sentence
    word, sentences = verdict(found, is_whole(rows))
    assert word == "PASS"
    assert sentences.startswith("3 of 3 claims hold. All-to-all completes in 0.9")


@pytest.mark.parametrize(
    ("hybrid", "holds", "said"),
    [
        ((1.07, 1.00, 0.003), [False, True, True], "All-to-all completes in 0.97"),
        ((1.00, 1.00, 0.0096), [True, False, True], "Pause time there is 0.81"),
        ((1.00, 1.05, 0.003), [True, True, False], "No worse in 6 of 18 cases"),
        ((1.30, 1.30, 0.030), [False, False, False], "proven worse in 18; the worst is"),
    ],
    ids=["too slow", "pauses too much", "worse elsewhere", "nothing"],
)
def test_each_claim_can_fail_alone(hybrid: tuple[float, float, float], holds: list[bool], said: str) -> None:
    """Pause time counts, not its share: 0.96 of the share over 1 / 1.18 of the time is 0.81."""
    found = claims(made_up({**WINNING, "hybrid": hybrid}, FEW), "hybrid")
    assert [claim.holds for claim in found] == holds
    word, sentences = verdict(found, whole=True)
    assert word == ("WARN" if any(holds) else "FAIL")
    assert said in sentences


def test_a_part_of_the_suite_never_passes(rows: pd.DataFrame) -> None:
    assert not is_whole(rows)
    word, sentences = verdict(claims(rows, "hybrid"), is_whole(rows))
    assert word == "WARN"
    assert "on a part of the suite only" in sentences


def test_where_nobody_pauses_no_pause_is_saved() -> None:
    laws = {law: (asked, elsewhere, 0.0) for law, (asked, elsewhere, _) in WINNING.items()}
    claim = claims(made_up(laws, FEW), "hybrid")[1]
    assert not claim.holds
    assert "dcqcn never pauses" in claim.sentence


def test_a_rival_can_be_the_entrant() -> None:
    assert [claim.holds for claim in claims(made_up(cases=FEW), "dcqcn")] == [False, False, False]


def test_the_standing_is_relative_to_the_best_of_each_case(rows: pd.DataFrame) -> None:
    table = standing(rows).set_index("law")
    assert table.index[0] == "hybrid"
    asked = len(rows[rows["scenario"] == "all-to-all"]) / len(rows)
    expected = 1.18**asked * 1.06 ** (1 - asked)
    assert table.loc["dcqcn", "completion"] == pytest.approx(expected, rel=0.01)
    assert table.loc["dcqcn", "victim_slowdown"] == pytest.approx(2 * 1.06)


def test_rows_that_make_no_comparison_are_refused(rows: pd.DataFrame) -> None:
    with pytest.raises(ValueError, match="rows lack seed"):
        check(rows.drop(columns="seed"))
    with pytest.raises(ValueError, match="1 runs stand there twice, the first is none / all-to-all 64"):
        check(pd.concat([rows, rows.head(1)]))
    with pytest.raises(ValueError, match="none lacks 1 runs that others have, the first is all-to-all 64"):
        check(rows.iloc[1:])
    with pytest.raises(ValueError, match="no rows of nscc"):
        claims(rows[rows["law"] != "nscc"], "hybrid")
    with pytest.raises(ValueError, match="no rows of the scenario all-to-all"):
        claims(rows[rows["scenario"] != "all-to-all"], "hybrid")

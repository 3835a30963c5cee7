"""Short records and Markdown tables of made-up rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner

from congestion.arena.headroom import headroom, headroom_sentence, over_bound
from congestion.arena.protocol import SUITE
from congestion.arena.tables import CASES, CLAIMS, ROBUSTNESS, case_rows, claim_rows, command, markdown
from netlayer.errors import ConfigError
from netlayer.results import RunRecord, utc_now
from tests.congestion.arena_rows import WINNING, made_up

FEW = replace(SUITE.test, conditions=SUITE.test.conditions[:2])


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    return made_up(cases=FEW).assign(buffer_bytes=2**22)


def test_a_case_has_each_laws_means_and_the_ratio_to_each_rival(rows: pd.DataFrame) -> None:
    found = pd.DataFrame(case_rows(rows, "hybrid"))
    assert len(found) == len(FEW.cases) * len(WINNING)
    one = found[(found["workload"] == "rounds 32") & (found["condition"] == "200G-ecmp")].set_index("law")
    mine = rows[(rows["workload"] == "rounds 32") & (rows["condition"] == "200G-ecmp")]
    means = mine.groupby("law")["completion_us"].mean()
    assert one.loc["swift", "completion_us"] == pytest.approx(means["swift"], rel=1e-6)
    assert one.loc["swift", "ratio"] == pytest.approx(means["hybrid"] / means["swift"], rel=1e-5)
    assert one.loc["swift", "verdict"] == "better"
    assert pd.isna(one.loc["hybrid", "ratio"])
    json.dumps(case_rows(rows, "hybrid"), allow_nan=False)


def test_a_part_of_the_suite_never_passes(rows: pd.DataFrame) -> None:
    found = claim_rows(rows, "hybrid")
    assert [row["holds"] for row in found] == [True, True, True, False]


def test_the_tables_are_of_the_record(rows: pd.DataFrame, tmp_path: Path) -> None:
    made = {CASES: case_rows(rows, "hybrid"), CLAIMS: claim_rows(rows, "hybrid"), ROBUSTNESS: _changes()}
    files = [str(RunRecord(name, "simulated", its, utc_now(), utc_now()).save(tmp_path)) for name, its in made.items()]
    ran = CliRunner().invoke(command, files)
    assert ran.exit_code == 0, ran.output
    lines = ran.output.splitlines()
    assert lines[2] == "| law | completion | over_bound | victim_slowdown | pause_share |"
    assert lines[4].startswith("| hybrid | 1.000 | 1.110 |")
    assert "| all-to-all 64 | 200G-ecmp |" in ran.output
    assert "| swift | 2 | 0.9900 | 1.035 | 1.080 | 1 |" in ran.output
    assert ran.output.count("| yes |") == 3


def test_a_report_gets_its_tables_anew(tmp_path: Path) -> None:
    path = RunRecord(ROBUSTNESS, "simulated", _changes(), utc_now(), utc_now()).save(tmp_path)
    report = tmp_path / "report.md"
    report.write_text("a\n<!-- table robustness -->\nold\n<!-- end -->\nb\n<!-- table changes -->\n<!-- end -->\n")
    for _ in range(2):
        ran = CliRunner().invoke(command, [str(path), "--into", str(report)])
        assert ran.exit_code == 0, ran.output
        text = report.read_text()
        assert text.startswith("a\n<!-- table robustness -->\n\n| law |")
        assert text.count("| swift | 2 |") == text.count("pmax=0.1") == 1
        assert "old" not in text
    report.write_text("nothing")
    assert "has no place in the report" in str(
        CliRunner().invoke(command, [str(path), "--into", str(report)]).exception
    )


def _changes() -> list[dict[str, object]]:
    rows = []
    for change, ratio in (("kmin_bytes=1", 0.99), ("pmax=0.1", 1.08)):
        shares = {"pause_share": 0.01, "changed_pause_share": 0.02}
        rows.append({"law": "swift", "change": change, "completion": ratio, "low": ratio, "high": ratio, **shares})
    return rows


def test_another_record_is_one_line(tmp_path: Path) -> None:
    path = RunRecord("congestion.sweep", "simulated", [{"x": 1}], utc_now(), utc_now()).save(tmp_path)
    ran = CliRunner().invoke(command, [str(path)])
    assert isinstance(ran.exception, ConfigError)
    assert "is of congestion.sweep" in str(ran.exception)


def test_cells_are_texts_and_short_numbers() -> None:
    table = markdown([{"a": 1.23456, "b": None}, {"a": True, "b": "x"}])
    assert table == "| a | b |\n| --- | --- |\n| 1.235 | - |\n| yes | x |"


def test_the_bound_says_what_can_be_won(rows: pd.DataFrame) -> None:
    near = rows.assign(
        bound_us=rows.groupby(["workload", "condition", "seed"])["completion_us"].transform("min") * 0.99
    )
    cases = headroom(near, "hybrid")
    assert len(cases) == len(FEW.cases)
    assert (cases["least_ratio"] < cases["candidate_over_bound"] / cases["its_over_bound"]).all()
    asked = near[near["scenario"] == "all-to-all"]
    swift = over_bound(asked, ()).set_index("law").loc["swift", "over_bound"]
    assert f"the bound is {1 / swift:.3f} of the time of swift" in headroom_sentence(near, "hybrid")
    assert "cannot hold" not in headroom_sentence(near, "hybrid")
    tied = near.assign(completion_us=1.01 * near["bound_us"])
    assert "so the claim cannot hold here; in 6 of 6 cases it is above 0.95" in headroom_sentence(tied, "hybrid")

"""The table of public reports is what the programs show: two run here, the others where time does not count."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from bench.dropin_reports.command import main
from bench.dropin_reports.reports import REPORTS, run

TABLE = Path(__file__).parents[2] / "reports" / "dropin_reports_202611.tsv"


def rows() -> list[dict[str, str]]:
    with TABLE.open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def test_the_table_is_of_these_programs() -> None:
    assert [(row["address"], row["situation"], row["program"]) for row in rows()] == [
        (report.address, report.situation, report.case.__name__) for report in REPORTS
    ]
    addresses = {row["address"] for row in rows()}
    assert len(addresses) == len(rows()) >= 30
    assert all(address.startswith("https://github.com/") for address in addresses)


def test_the_wrapper_trains_the_same_or_says_what_to_do() -> None:
    for row in rows():
        assert row["ours"] == "equal" or any(
            word in row["ours"] for word in ("give ", "take ", "requires a gradient", "do that before")
        ), row
        assert row["ours_zero2"] == row["ours"]
        # In stage 3 every forward pass is a collective call: docs/dropin.md says so.
        if row["program"] != "uneven_evaluation":
            assert row["ours_zero3"] == row["ours"]


# More of them are cases of tests/collectives/dropin_cases.py.
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(
            name, marks=[] if name in ("muon_beside_adamw", "uneven_training_under_join") else pytest.mark.slow
        )
        for name in dict.fromkeys(report.case.__name__ for report in REPORTS)
    ],
)
def test_a_program_shows_what_the_table_says(program: str) -> None:
    report = next(report for report in REPORTS if report.case.__name__ == program)
    # Not those that wait until their timeout, and then say which rank was the first.
    for side in ("ours", "ours_zero3"):
        [expected] = {row[side] for row in rows() if row["program"] == program}
        assert "imed out" in expected or run(report, side) == expected


def test_an_unknown_program_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--cases", "nothing"])
    assert exit_info.value.code == 2
    assert "--cases nothing: no such programs; there are plain_training, " in capsys.readouterr().err

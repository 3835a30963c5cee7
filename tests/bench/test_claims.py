from pathlib import Path

import pytest

from bench.claims import Claim, judge, read_claims, render
from netlayer.errors import ConfigError
from netlayer.results import RunRecord


def save(folder: Path, started: str, *values: float) -> None:
    rows = [{"x": value, "kind": "a"} for value in values] + [{"x": 99.0, "kind": "b"}]
    RunRecord("bench.x", "measured", rows, started, started, devices=["2 x H200"]).save(folder)


def claim(**changes: object) -> Claim:
    given = {
        "text": "t",
        "origin": "ours",
        "quantity": "wrong elements",
        "record": "*.json",
        "name": "bench.x",
        "column": "x",
        "where": {"kind": "a"},
    }
    return Claim(**(given | changes))  # type: ignore[arg-type]


def test_a_figure_comes_from_the_newest_record_and_its_rule_decides(tmp_path: Path) -> None:
    save(tmp_path, "2026-01-01T00:00:00", 1.0)
    save(tmp_path, "2026-02-01T00:00:00", 3.0, 5.0)
    good = judge(claim(take="min", at_least=3), tmp_path)
    assert (good["verdict"], good["source"]) == ("reproduced", "measured, 2 x H200")
    assert good["figure"].startswith("wrong elements: 3 (at least 3)")
    share = judge(claim(take="min", at_least=3, unit="GB/s"), tmp_path)
    assert share["figure"].startswith("wrong elements: 3 GB/s (at least 3 GB/s)")
    assert judge(claim(take="max", at_most=4), tmp_path)["verdict"] == "refuted"
    assert judge(claim(take="mean", at_most=4), tmp_path)["verdict"] == "reproduced"


def test_without_a_record_a_claim_stands_open(tmp_path: Path) -> None:
    assert judge(claim(at_most=1), tmp_path)["verdict"] == "no record yet"
    assert judge(claim(open="needs 12,288 GPUs"), tmp_path)["verdict"] == "needs 12,288 GPUs"


def test_the_table_keeps_its_columns_whatever_the_text(tmp_path: Path) -> None:
    [line] = [line for line in render([judge(claim(text="a | b", open="x"), tmp_path)]).splitlines() if "a \\|" in line]
    assert line.count(" | ") == 5


def test_ranks_alike_are_counted_and_a_share_is_a_percentage(tmp_path: Path) -> None:
    devices = ["CPU, 1 thread"] * 2
    RunRecord("bench.x", "measured", [{"x": 0.46, "kind": "a"}], "2026", "2026", devices=devices).save(tmp_path)
    row = judge(claim(at_least=0.4, unit="%"), tmp_path)
    assert row["source"] == "measured, 2 ranks, each CPU, 1 thread"
    assert row["figure"].startswith("wrong elements: 46% (at least 40%)")


@pytest.mark.parametrize(
    "text",
    [
        "[[claim]]\ntext='a'\norigin='b'\nopen='not measured yet'\n",
        "[[claim]]\ntext='a'\norigin='b'\nat_most=1\n",
        "[[claim]]\ntext='a'\norigin='b'\nquantity='q'\n",
        "[[claim]]\nbogus=1\n",
        "[",
        "x=1\n",
    ],
)
def test_a_claim_without_its_rule_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "claims.toml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        read_claims(path)


def test_an_unknown_reduction_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "2026-01-01T00:00:00", 1.0)
    with pytest.raises(ConfigError, match="take is one of"):
        judge(claim(take="median", at_most=1), tmp_path)


def test_our_own_claims_are_well_formed() -> None:
    assert len(read_claims(Path("bench/claims.toml"))) >= 8

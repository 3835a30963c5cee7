"""`python -m bench.operators` on a CPU: rows, their check, and bad input."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from bench.operators.case import Case
from bench.operators.command import OperatorRow, _figures, _line, check, command, measure
from netlayer.errors import CheckFailed

TURNED = {"rotary omitted", "rotary applied", "rotary alone"}


def run(tmp_path: Path, *arguments: str) -> Any:
    fixed = ["--device", "cpu", "--repeats", "1", "--rounds", "1", "--out", str(tmp_path), "--json", "-"]
    return CliRunner().invoke(command, [*fixed, *arguments])


def test_every_operator_has_rows_that_were_checked(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["source"] == "measured"
    kinds = {row["operator"].split(",")[0] for row in record["rows"]}
    forward = {"layer_norm + add", "rms_norm + add", "bias + gelu", "swiglu", "head + cross entropy", "attention"}
    assert kinds == forward | {"product", "join + bias's sum", "adamw", *TURNED}
    for row in record["rows"]:
        assert row["error"] < 1e-4
        assert 0 < row["p10_us"] <= row["time_us"] <= row["p90_us"]
        assert row["share"] is None  # no peak is known of a CPU
        columns = (
            "operator system direction error over_tolerance time_us p10_us p90_us p99_us each_us bytes_moved flops"
        )
        assert list(row) == [*columns.split(), "share", "kernels", "copies", "memory_gib"]
        assert bool(row["bytes_moved"]) != bool(row["flops"])


def test_a_time_stands_beside_its_spread() -> None:
    case = Case("gelu", [], {}, lambda: None, bytes_moved=(1, 1), flops=(0, 0))
    row = _figures(case, "forward", [10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0, 30_000.0, 40_000.0], "CPU")
    assert (row.p10_us, row.time_us, row.p90_us) == (10.0, 14.5, 30_000.0)
    assert "14.5 us (10.0 to 30000.0)" in _line(OperatorRow("gelu", "torch", direction="forward", figures=row))


def test_a_case_that_is_not_there(tmp_path: Path) -> None:
    result = run(tmp_path, "--only", "dropout")
    assert result.exit_code == 2
    assert "dropout" in result.output


@pytest.mark.slow
def test_cases_by_several_names(tmp_path: Path) -> None:
    rows = json.loads(run(tmp_path, "--only", "adamw, MLP in").stdout)["rows"]
    directions = ["forward", "backward", "weight's gradient"]
    assert [row["direction"] for row in rows] == [*directions, *directions, "step"]
    assert {row["operator"] for row in rows} == {"product, MLP in", "product, MLP in, 8 bits", "adamw"}


def test_what_writes_to_its_inputs_begins_from_the_same_ones_in_every_way() -> None:
    def halve(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(0.5)

    ways = {"first": halve, "second": halve}
    case = Case("halve", [torch.ones(3)], ways, lambda x: x / 2, bytes_moved=(24,), directions=("call",))
    rows = measure(case, torch.device("cpu"), "CPU", repeats=1, rounds=1)
    assert [row.error for row in rows] == [0, 0]
    assert case.inputs[0].tolist() == [1, 1, 1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu() -> None:
    result = CliRunner().invoke(command, ["--device", "cuda"])
    assert "no CUDA device" in str(result.exception)


@pytest.mark.parametrize(
    "row",
    [{"error": 0.1, "over_tolerance": 10.0}, {"error": math.nan, "over_tolerance": math.nan}, {"failed": "Error: no"}],
)
def test_wrong_or_missing_results_are_refused(row: dict[str, Any]) -> None:
    with pytest.raises(CheckFailed, match="gelu, triton"):
        check([OperatorRow("gelu", "triton", **row)])


def test_what_is_written_in_float32_is_held_to_float32() -> None:
    """Such as a gradient of half-width factors, which would pass for one that was rounded to theirs."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    ways = {"whole": lambda x: x.float() @ x.float(), "rounded": lambda x: (x @ x).float()}
    case = Case("product", [x], ways, lambda x: x @ x, flops=(1,), directions=("call",))
    rows = {row.system: row for row in measure(case, torch.device("cpu"), "CPU", repeats=1, rounds=1)}
    check([rows["whole"]])
    with pytest.raises(CheckFailed, match="product, rounded: off by"):
        check([rows["rounded"]])

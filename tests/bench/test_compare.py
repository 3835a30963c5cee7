"""`netlayer bench compare`: ratio, spread and verdict of two records."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bench.commands.compare import compare
from bench.perf.table import nccl_tests_json
from netlayer.errors import ConfigError
from netlayer.results import RunRecord, Source
from tests.bench import canned


def write(path: Path, rows: list[dict[str, Any]], source: Source = "measured") -> Path:
    path.write_text(RunRecord("bench.all_reduce", source, rows, "2026-01-01", "2026-01-01").to_json())
    return path


def row(size: int, bus_bw: float, scatter: float = 0.0, seed: int = 0) -> dict[str, Any]:
    draw = random.Random(seed)
    times = [100 * draw.gauss(1, scatter) for _ in range(21)] if scatter else [100.0] * 21
    return {"size": size, "in_place": False, "bus_bw_gbs": bus_bw, "time_us": 1e4 / bus_bw, "iterations_us": times}


def command(*words: object) -> Result:
    return CliRunner().invoke(compare, [str(word) for word in words])


def test_each_row_is_judged_by_ratio_and_spread(tmp_path: Path) -> None:
    a = write(tmp_path / "a", [row(8, 100), row(16, 100), row(32, 100), row(64, 100, 0.5), row(128, 1)])
    b = write(tmp_path / "b", [row(8, 80), row(16, 125), row(32, 98), row(64, 93, 0.5), row(256, 1)])
    result = command(a, b, "--json", "-")
    assert result.exit_code == 1
    rows = json.loads(result.stdout)["rows"]
    assert [one["verdict"] for one in rows] == ["worse", "better", "same", "same", "only in A", "only in B"]
    assert rows[0]["ratio"] == pytest.approx(0.8)
    assert rows[3]["spread"] > 0.07


def test_less_time_is_better(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", [row(8, 100)]), write(tmp_path / "b", [row(8, 200)])
    result = command(a, b, "--by", "time_us")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "0 worse, 1 better, 0 same"
    assert command(b, a, "--by", "time_us").exit_code == 1
    assert command(b, a, "--by", "time_us", "--within", 1).exit_code == 0


def test_rows_alike_count_by_their_median(tmp_path: Path) -> None:
    a = write(tmp_path / "a", [row(8, value) for value in (99, 100, 101, 100, 3)])
    b = write(tmp_path / "b", [row(8, value) for value in (100, 99, 101, 100, 900)])
    assert command(a, b).exit_code == 0


def test_an_unknown_spread_is_noted(tmp_path: Path) -> None:
    alone = write(tmp_path / "alone", [{"size": 8, "bus_bw_gbs": 100.0}])
    cycles = write(
        tmp_path / "cycles", [{"size": 8, "bus_bw_gbs": value, "cycle": 0} for value in (90.0, 100.0, 110.0)]
    )
    assert json.loads(command(alone, alone, "--json", "-").stdout)["rows"][0]["spread"] is None
    assert "spread -: not known" in command(alone, alone).stdout
    assert "spread -" not in command(cycles, cycles).stdout


def test_a_difference_within_the_noise_is_no_loss(tmp_path: Path) -> None:
    def cycles(name: str, seed: int) -> Path:
        draw = random.Random(seed)
        rows = [{"size": size, "bus_bw_gbs": draw.gauss(100, 20)} for size in range(100) for _ in range(20)]
        return write(tmp_path / name, rows)

    rows = json.loads(command(cycles("a", 1), cycles("b", 2), "--json", "-").stdout)["rows"]
    assert sum(one["verdict"] == "worse" for one in rows) < 10


def test_incomparable_records_are_refused(tmp_path: Path) -> None:
    a, same = write(tmp_path / "a", [row(8, 1)]), write(tmp_path / "same", [row(16, 1)])
    simulated = write(tmp_path / "s", [row(8, 1)], "simulated")
    nothing = write(tmp_path / "n", [{"name": "x"}])
    for arguments, message in (
        ((a, simulated), "compare records of one source"),
        ((a, nothing), "measures nothing that A does"),
        ((a, same), "has no row that A has"),
        ((a, a, "--by", "nope"), "no row of both records has it; both measure bus_bw_gbs, time_us"),
        ((a, tmp_path / "none"), "cannot be read"),
    ):
        error = command(*arguments).exception
        assert isinstance(error, ConfigError)
        assert message in str(error)


def test_a_row_missing_in_b_is_a_loss_an_additional_one_is_not(tmp_path: Path) -> None:
    both, one = write(tmp_path / "both", [row(8, 1), row(16, 1)]), write(tmp_path / "one", [row(8, 1)])
    lacking = command(both, one)
    assert lacking.exit_code == 1
    assert lacking.stdout.splitlines()[-1] == "0 worse, 0 better, 1 same, 1 row only in A"
    more = command(one, both)
    assert more.exit_code == 0
    assert more.stdout.splitlines()[-1] == "0 worse, 0 better, 1 same, 1 row only in B"


def test_one_slow_rank_among_many_shows(tmp_path: Path) -> None:
    a = write(tmp_path / "a", [row(8, 100) | {"rank": rank} for rank in range(8)])
    b = write(tmp_path / "b", [row(8, 50 if rank == 3 else 100) | {"rank": rank} for rank in range(8)])
    result = command(a, b)
    assert result.exit_code == 1
    [line] = [line for line in result.stdout.splitlines() if line.endswith("worse")]
    assert "rank=3" in line


def test_rows_of_several_kinds_are_compared_each_by_its_own_figure(tmp_path: Path) -> None:
    def rows(share: float) -> list[dict[str, Any]]:
        return [
            {"check": "gemm", "p50_us": 1.0, "tflops": 100.0},
            {"check": "copy", "p50_us": 1.0, "bw_gbs": 100.0 * share},
            {"check": "latency", "p50_us": 1.0 / share},
        ]

    result = command(write(tmp_path / "a", rows(1)), write(tmp_path / "b", rows(0.5)), "--json", "-")
    assert result.exit_code == 1
    kept = {(one["metric"], one["verdict"]) for one in json.loads(result.stdout)["rows"]}
    assert kept == {("tflops", "same"), ("bw_gbs", "worse"), ("p50_us", "worse")}


def test_time_and_algorithm_do_not_distinguish_rows(tmp_path: Path) -> None:
    a = write(tmp_path / "a", [row(8, 1) | {"at": "2026-01-01", "algorithm": "RING", "cycle": 0}])
    b = write(tmp_path / "b", [row(8, 1) | {"at": "2026-01-02", "algorithm": "TREE", "cycle": 1}])
    assert command(a, b).stdout.splitlines()[-1] == "0 worse, 0 better, 1 same"


def test_a_figure_of_zero_gives_a_verdict_without_a_ratio(tmp_path: Path) -> None:
    for before, after, verdict, ratio in (
        (0.0, 1.0, "better", None),
        (1.0, 0.0, "worse", 0.0),
        (0.0, 0.0, "same", None),
    ):
        a, b = (write(tmp_path / str(value), [{"size": 8, "bus_bw_gbs": value}]) for value in (before, after))
        [one] = json.loads(command(a, b, "--json", "-").stdout)["rows"]
        assert (one["verdict"], one["ratio"]) == (verdict, ratio)
        assert f" {verdict}" in command(a, b).stdout


def test_common_columns_are_printed_once_above_the_rows(tmp_path: Path) -> None:
    rows = [row(size, 100) | {"dtype": "float", "device": "NVIDIA H200"} for size in (8, 16)]
    a = write(tmp_path / "a", rows)
    b = write(tmp_path / "b", [*rows, row(16, 1) | {"dtype": "half", "device": "NVIDIA H200"}])
    above, _, *lines = command(a, b).stdout.splitlines()
    assert above == "all rows: device=NVIDIA H200 in_place=False"
    assert [line.split("  ")[0] for line in lines[:3]] == [
        "dtype=float size=8", "dtype=float size=16", "dtype=half size=16",
    ]  # fmt: skip
    [one] = json.loads(command(b, write(tmp_path / "c", rows[:1]), "--json", "-").stdout)["rows"][:1]
    assert one["what"] == "device=NVIDIA H200 dtype=float in_place=False size=8"
    alone = command(tmp_path / "c", tmp_path / "c").stdout.splitlines()
    assert alone[1].startswith("device=NVIDIA H200 dtype=float in_place=False size=8  ")


def test_numbers_that_are_no_measurement_are_passed_over(tmp_path: Path) -> None:
    odd = [row(8, 1) | {"iterations_us": 5}, {"size": 9, "bus_bw_gbs": 10**400}, {"size": 10, "bus_bw_gbs": -1.0}]
    path = write(tmp_path / "odd", odd)
    path.write_text(path.read_text().replace("-1.0", "1e999"))
    assert command(path, path).stdout.splitlines()[-1] == "0 worse, 0 better, 1 same"


def test_the_json_of_nccl_tests_and_of_ours_is_read(tmp_path: Path) -> None:
    logs = Path(__file__).parent / "logs"
    nccl_tests_log = logs / "nccl_h200x8.json"
    slow = json.loads(nccl_tests_log.read_text())
    for entry in slow["results"]:
        entry["in_place"]["bus_bw"] *= 0.5
    (tmp_path / "slow").write_text(json.dumps(slow))
    outcome = command(nccl_tests_log, tmp_path / "slow", "--by", "bus_bw_gbs")
    assert outcome.exit_code == 1
    assert outcome.stdout.splitlines()[-1] == "3 worse, 0 better, 3 same"
    assert "collective=all_reduce" in outcome.stdout
    (tmp_path / "ours").write_text(json.dumps(nccl_tests_json(canned.record())))
    assert command(tmp_path / "ours", tmp_path / "ours").exit_code == 0


def perf_json(folder: Path, name: str, **changes: Any) -> Path:
    """Write another run of the same program, with `changes`."""
    tree = json.loads((Path(__file__).parent / "logs" / "nccl_h200x8.json").read_text())
    for device in tree["config"]["devices"]:
        device["device_info"] = changes.get("device", device["device_info"])
    tree["config"]["devices"] = tree["config"]["devices"][: changes.get("ranks", 8)]
    tree["args"][0] = changes.get("program", tree["args"][0])
    tree["nccl_version"] = changes.get("nccl", tree["nccl_version"])
    tree["results"][-1]["in_place"]["nwrong"] = changes.get("nwrong", 0)
    tree["out_of_bounds"] = changes.get("out_of_bounds", {"count": 0, "okay": "true"})
    (folder / name).write_text(json.dumps(tree))
    return folder / name


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(
    "changes", [{"nwrong": 4096, "out_of_bounds": {"count": 4096, "okay": False}}, {"out_of_bounds": {"count": 7}}]
)
def test_wrong_data_on_either_side_fails(changes: dict[str, Any], swap: bool, tmp_path: Path) -> None:
    good, bad = perf_json(tmp_path, "good"), perf_json(tmp_path, "bad", **changes)
    result = command(*((bad, good) if swap else (good, bad)))
    assert result.exit_code == 1
    assert result.stdout.startswith(f"failed: {'A' if swap else 'B'}: all_reduce data: ")
    rows = json.loads(command(good, bad, "--json", "-").stdout)["rows"]
    assert [row["verdict"] for row in rows].count("failed") == 1


def test_wrong_rows_of_a_record_fail(tmp_path: Path) -> None:
    good, bad = write(tmp_path / "a", [row(8, 1)]), write(tmp_path / "b", [row(8, 1) | {"wrong": 3}])
    assert command(good, bad).exit_code == command(bad, good).exit_code == 1
    unchecked = write(tmp_path / "c", [row(8, 1) | {"wrong": "N/A"}])
    assert command(good, unchecked).exit_code == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"device": "NVIDIA A100"}, "GPU is NVIDIA H200 in A, NVIDIA A100 in B"),
        ({"ranks": 4}, "ranks is 8 in A, 4 in B"),
        ({"program": "all_gather_perf"}, "it ran all_gather, and A all_reduce"),
    ],
)
def test_runs_on_other_hardware_are_not_comparable(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    a, b = perf_json(tmp_path, "a"), perf_json(tmp_path, "b", **changes)
    error = command(a, b).exception
    assert isinstance(error, ConfigError)
    assert "is not comparable with A" in str(error)
    assert says in str(error)
    if "program" not in changes:
        result = command(a, b, "--across-hardware")
        assert result.exit_code == 0
        assert f"note: {says}" in result.stdout


def test_another_nccl_version_is_noted_and_compared(tmp_path: Path) -> None:
    result = command(perf_json(tmp_path, "a"), perf_json(tmp_path, "b", nccl=22903))
    assert result.exit_code == 0
    assert result.stdout.startswith("note: NCCL is 2.28.9 in A, 2.29.3 in B\n")


def test_tables_of_nccl_tests_are_read(tmp_path: Path) -> None:
    logs = Path(__file__).parent / "logs"
    text, labelled = logs / "nccl_node0.txt", logs / "nccl_mpirun_nvls_off.txt"
    same = command(text, text)
    assert (same.exit_code, same.stdout.splitlines()[-1]) == (0, "0 worse, 0 better, 6 same")
    mixed = command(logs / "nccl_h200x8.json", text)
    assert mixed.exit_code == 0
    assert mixed.stdout.splitlines()[-1] == "0 worse, 0 better, 6 same"
    assert command(labelled, labelled).exit_code == 0
    wrong = command(logs / "nccl_wrong_data.txt", logs / "nccl_wrong_data.txt")
    assert wrong.exit_code == 1
    assert wrong.stdout.count("failed: ") == 2


def test_hostile_files_are_refused_in_one_line(tmp_path: Path) -> None:
    good = perf_json(tmp_path, "good")
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(10 << 30)
    (tmp_path / "many").write_text('{"a": [' + "{}," * 3_000_000 + "{}]}")
    (tmp_path / "packed").write_bytes(gzip.compress(bytes(1 << 20)))
    (tmp_path / "pickle").write_bytes(pickle.dumps({"a": 1}))
    (tmp_path / "empty").write_bytes(b"")
    for name, says in (
        ("pipe", "no regular file"), ("sparse", "10,240 MiB"), ("many", "objects"),
        ("packed", "holds a zero byte"), ("pickle", ""), ("empty", "is empty"), (".", "no regular file"),
    ):  # fmt: skip
        for pair in ((good, tmp_path / name), (tmp_path / name, good)):
            error = command(*pair).exception
            assert isinstance(error, ConfigError), name
            assert says in str(error)
            assert "\n" not in str(error)


def test_broken_files_get_one_line(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", [row(8, 1)])
    for content, message in (
        ("[" * 100_000, "is nested too deep"),
        ('{"results": []}', "has no schema_version"),
        ('{"results": [], "nccl_version": 1}', "incomplete or of another structure"),
        ('{"results": [5], "nccl_version": 1, "args": ["x"]}', "incomplete or of another structure"),
    ):
        (tmp_path / "broken").write_text(content)
        error = command(tmp_path / "broken", whole).exception
        assert isinstance(error, ConfigError), content[:40]
        assert message in str(error)

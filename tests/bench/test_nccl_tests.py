"""nccl-tests and ours side by side: what is run, read and held against each other; the peer here is a script."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import nccl_tests
from bench.nccl_tests import COLLECTIVES, Comparison, Measured, Table, command, join_tables, judge, read_json
from bench.perf.options import PerfOptions
from netlayer.errors import CheckFailed, ConfigError, HardwareMissing
from netlayer.results import RunRecord
from tests.bench import canned

PEER = """#!/bin/sh
echo "$@" > "$0.arguments"
while [ "$1" != -J ]; do shift; done
side='{"time": 10.0, "alg_bw": 100.0, "bus_bw": 150.0, "nwrong": 0.0}'
for size in 1024 67108864; do
  rows="$rows$comma {\\"size\\": $size, \\"out_of_place\\": $side, \\"in_place\\": $side}"; comma=,
done
echo "{\\"results\\": [$rows]}" > "$2"
"""


@pytest.fixture
def binaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with scripts in the binaries' place, on a machine of four GPUs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in COLLECTIVES:
        (folder / f"{name}_perf").write_text(PEER)
        (folder / f"{name}_perf").chmod(0o755)
    monkeypatch.setattr(nccl_tests, "_count_gpus", lambda: 4)
    return folder


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[PerfOptions]]:
    """Set what we measure: a time for the small size and a bandwidth for the large one."""

    def setter(time_us: float = 10.0, bus_bw_gbs: float = 150.0, wrong: int = 0) -> list[PerfOptions]:
        asked: list[PerfOptions] = []

        def measure(names: tuple[str, ...], options: PerfOptions, **_: object) -> list[RunRecord]:
            asked.append(options)
            figures: dict[str, Any] = {"time_us": time_us, "bus_bw_gbs": bus_bw_gbs, "wrong": wrong}
            rows = [
                canned.row(in_place, size_bytes=size, **figures)
                for size in (1024, 67108864)
                for in_place in (False, True)
            ]
            return [canned.record(rows) for _ in names]

        monkeypatch.setattr("bench.perf.measure.measure", measure)
        return asked

    return setter


def call(binaries: Path, out: Path, arguments: str = "") -> object:
    line = ["--binaries", str(binaries), "--out", str(out), *arguments.split()]
    return command.main(line, standalone_mode=False)


def test_both_run_the_same_sizes_in_turn_and_are_held_against_each_other(
    binaries: Path, ours: Callable[..., list[PerfOptions]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ours(time_us=10.1, bus_bw_gbs=149.0)
    call(binaries, tmp_path / "out", "-b 1K -e 64M -f 65536 -n 7 --runs 2")
    said = (binaries / "all_gather_perf.arguments").read_text()
    assert said.startswith("-t 4 -g 1 -b 1024 -e 67108864 -f 65536 -n 7 -w 1 -c 1 -R 2 -J ")
    assert [(given.local_register, given.iters) for given in asked] == [(0, 7), (0, 7), (2, 7), (2, 7)]
    out = capsys.readouterr().out
    assert "from 64 MiB: bus bandwidth at least 0.993 x nccl-tests'; below: time 1.010 x" in out
    assert out.count("all_reduce ") == 8
    [record] = (tmp_path / "out" / "records").glob("*.json")
    assert len(json.loads(record.read_text())["rows"]) == 3 * 2 * 4


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        ({"bus_bw_gbs": 146.9}, r"not within 2% of nccl-tests: bandwidth 0\.979 x"),
        ({"time_us": 10.3}, r"time 1\.030 x"),
        ({"wrong": 1}, "4 of 4 lines hold wrong data"),
    ],
)
def test_what_is_slower_or_wrong_ends_with_1(
    binaries: Path, ours: Callable[..., object], tmp_path: Path, figures: dict[str, Any], says: str
) -> None:
    ours(**figures)
    with pytest.raises(CheckFailed, match=says):
        call(binaries, tmp_path / "out", "--collective all_reduce -R 0")


def test_a_peer_that_fails_is_named_with_its_last_words(
    binaries: Path, ours: Callable[..., object], tmp_path: Path
) -> None:
    ours()
    (binaries / "all_reduce_perf").write_text("#!/bin/sh\necho Test NCCL failure\nexit 3\n")
    with pytest.raises(CheckFailed, match="all_reduce_perf of nccl-tests ended with 3: Test NCCL failure; see "):
        call(binaries, tmp_path / "out")


def test_one_thread_launches_all_gpus_where_asked(tmp_path: Path) -> None:
    comparison = Comparison(tmp_path, 4, ("all_reduce",), (0,), PerfOptions(), one_thread=True)
    assert comparison.peer_command("all_reduce", tmp_path / "a.json")[1:5] == ["-t", "1", "-g", "4"]


def test_our_json_is_read_as_theirs(tmp_path: Path) -> None:
    from bench.perf.table import nccl_tests_json

    (tmp_path / "a.json").write_text(json.dumps(nccl_tests_json(canned.record())))
    table = read_json(tmp_path / "a.json")
    assert table[1048576, True] == (15.0149, 122.219, 0.0)
    slower = {key: side._replace(time_us=2 * side.time_us) for key, side in table.items()}
    runs: list[tuple[Table, Table, Table]] = [(table, table, {}), (table, slower, {}), (table, table, {})]
    rows = list(join_tables("all_reduce", 0, runs))
    assert [(row["time_ratio"], row["time_ratios"]) for row in rows] == 2 * [(1.0, [1.0, 2.0, 1.0])]
    judge(rows)


def test_the_limit_of_time_is_wider_by_the_peers_own_spread(capsys: pytest.CaptureFixture[str]) -> None:
    def measured(time_us: float) -> Table:
        return {(1024, False): Measured(time_us, 1.0, 0.0)}

    rows = list(join_tables("all_reduce", 2, [(measured(10.0), measured(10.5), measured(10.4))]))
    assert rows[0]["peer_again_ratios"] == [1.04]
    judge(rows)  # 5% over, 2% and their own 4% allowed
    assert "time 1.050 x, in the median (nccl-tests again: 1.040 x, 4.0% off in the median)" in capsys.readouterr().out
    with pytest.raises(CheckFailed, match=r"time 1\.070 x"):
        judge(list(join_tables("all_reduce", 2, [(measured(10.0), measured(10.7), measured(10.4))])))


def test_nccl_tests_runs_again_after_ours(binaries: Path, ours: Callable[..., object], tmp_path: Path) -> None:
    ours()
    call(binaries, tmp_path / "out", "--again --runs 1")
    [record] = (tmp_path / "out" / "records").glob("*.json")
    assert all(row["peer_again_ratios"] == [1.0] for row in json.loads(record.read_text())["rows"])


def test_bad_arguments_are_one_line(binaries: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="-b = z: is not a size"):
        call(binaries, tmp_path / "out", "-b z")
    with pytest.raises(HardwareMissing, match="-g 5 GPUs were asked for, and this machine has 4"):
        call(binaries, tmp_path / "out", "-g 5")
    with pytest.raises(ConfigError, match="has no program all_reduce_perf"):
        call(tmp_path, tmp_path / "out")

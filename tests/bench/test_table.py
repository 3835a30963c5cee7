"""nccl-tests' table and JSON out of canned rows, read back by a small parser of its own."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from typing import Any

import pytest

import netlayer
from bench.perf.table import PerfRow, Timing, format_foot, format_table, nccl_tests_json
from tests.bench.canned import record, row

# Written by hand after the printf formats of nccl-tests 2.19.6; ours are the version, and the lines `# Backend`,
# `# NVLS` and `# Algorithm`.
GOLDEN = f"""\
# nccl-tests version netlayer-{netlayer.__version__} nccl-headers=22705 nccl-library=22705
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 2 minBytes 8 maxBytes 1048576 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1 validation: 1 \
graph: 0 unalign: 0
# Backend: torch, torch 2.13.0
#
# Using devices
#  Rank  0 Group  0 Pid   4242 on      node7 device  0 [0000:0f:00] NVIDIA H100
#  Rank  1 Group  0 Pid   4242 on      node7 device  1 [0000:0f:00] NVIDIA H100
#
#                                                              out-of-place                       in-place          
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong 
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)         
     1048576        262144     float     sum      -1    15.01   69.84  122.22       0    15.01   69.84  122.22       0
# NVLS used: no (multicast: unknown)
# Algorithm 1048576 B: RING SIMPLE, wire bandwidth 1.750 x algbw
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 122.219 
#
# Collective test concluded: all_reduce_perf
#

"""  # noqa: W291


def parse(text: str) -> list[dict[str, Any]]:
    """Any reader of nccl-tests' table: lines without '#', cells between blanks, titles from the header."""
    titles = next(line for line in text.splitlines() if line.startswith("# ") and " redop " in line).split()[1:]
    keys = [f"out_{title}" if titles.index(title) == at or at < 5 else f"in_{title}" for at, title in enumerate(titles)]
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    return [dict(zip(keys, cells, strict=True)) for cells in lines]


def test_the_table_is_that_of_nccl_tests_byte_for_byte() -> None:
    assert format_table(record()) == GOLDEN


def test_a_parser_finds_each_figure_under_its_title() -> None:
    [cells] = parse(format_table(record([row(False, wrong=3), row(True, time_us=1234567.0, bus_bw_gbs=0.001)])))
    assert cells["out_size"] == "1048576"
    assert cells["out_root"] == "-1"
    assert (cells["out_time"], cells["out_#wrong"]) == ("15.01", "3")
    assert (cells["in_time"], cells["in_busbw"], cells["in_#wrong"]) == ("1234567", "0.00", "0")


def test_without_a_check_wrong_is_unknown() -> None:
    text = format_table(record([row(False, wrong=None), row(True, wrong=None)], check=0))
    assert "  122.22    N/A    15.01" in text
    assert text.count("N/A") == 2
    assert "Out of bounds values : 0 OK" in text


def test_wrong_data_fails_the_foot() -> None:
    assert "# Out of bounds values : 1 FAILED\n" in format_foot(record([row(False, wrong=9), row(True)]))


@pytest.mark.parametrize(("least", "verdict"), [(None, ""), (135.0, "OK"), (136.0, "FAILED")])
def test_the_mean_may_be_a_tenth_below_what_is_asked(least: float | None, verdict: str) -> None:
    assert f"# Avg bus bandwidth    : 122.219 {verdict}\n" in format_foot(record(min_bw_gbs=least))


def test_the_mean_covers_every_size_in_place_and_out() -> None:
    rows = [row(False, bus_bw_gbs=1), row(True, bus_bw_gbs=2), row(False, bus_bw_gbs=3), row(True, bus_bw_gbs=6)]
    assert "Avg bus bandwidth    : 3 \n" in format_foot(record(rows))


def test_per_iteration_statistics_have_columns_of_their_own() -> None:
    text = format_table(record(per_iter=1, per_iter_skip=1))
    [line] = [line for line in text.splitlines() if not line.startswith("#") and line]
    assert line.split()[9:13] == ["14.00", "17.50", "17.50", "6.66"]
    assert text.count("  i_min    i_max    i_p99    i_cv%") == 2
    assert "# Per-Iteration Report: CUDA event timing; i_* uses max over process rows; summary skips first 1" in text


def test_timestamps_and_launch_times_replace_what_they_replace() -> None:
    text = format_table(record(timestamps=1, cpu_time=1))
    assert re.search(r"     4\.25 .*     4\.25 .*  \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\n", text)
    assert "cputime" in text
    assert "          timestamp\n" in text


def test_timestamps_are_of_the_local_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "IST-5:30")
    time.tzset()
    try:
        text = format_table(record(timestamps=1))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert "  2026-01-02 08:34:05\n" in text  # 03:04:05 UTC


def test_a_size_beyond_the_memory_is_said() -> None:
    assert "#\n# Reducing maxBytes to 4096 due to memory limitation\n#\n" in format_table(record(max_bytes=4096))


@pytest.mark.parametrize(("value", "shown"), [(0.001, "   0.00"), (99999.994, "99999.99"[:7]), (12345678.0, "1.2e+07")])
def test_large_figures_lose_decimals_before_they_lose_the_column(value: float, shown: str) -> None:
    [cells] = parse(format_table(record([row(False, time_us=value), row(True)])))
    assert len(cells["out_time"]) <= 7
    assert cells["out_time"] in (shown.strip(), "100000")


def test_json_has_the_keys_of_nccl_tests() -> None:
    tree = json.loads(json.dumps(nccl_tests_json(record(), ["all_reduce_perf", "-b", "8"])))
    assert tree["version"] == 3
    assert tree["args"] == ["all_reduce_perf", "-b", "8"]
    assert tree["env"] == ["NCCL_ALGO=Ring"]
    assert tree["config"]["step_factor"] == 2
    assert tree["config"]["devices"][1]["device_info"] == "NVIDIA H100"
    assert tree["out_of_bounds"] == {"count": 0, "okay": "true"}
    assert tree["average_bus_bandwidth"] == {"bandwidth": 122.219, "okay": "unchecked"}
    [result] = tree["results"]
    assert result["root"] == "    -1"
    assert result["out_of_place"] == {"time": 15.0149, "alg_bw": 69.84, "bus_bw": 122.219, "nwrong": 0.0}
    assert set(tree) >= {"nccl_version", "start_time", "end_time", "errors"}


def test_json_of_options_that_change_it() -> None:
    rows = [row(False, wrong=None), row(True, wrong=None)]
    tree = nccl_tests_json(record(rows, per_iter=1, cpu_time=1, step_factor=1, min_bw_gbs=1000.0))
    assert tree["config"]["step_bytes"] == 1 << 20
    assert tree["average_bus_bandwidth"]["okay"] == "false"
    [result] = tree["results"]
    assert result["in_place"]["cpu_time"] == 4.25
    assert result["in_place"]["nwrong"] is None
    assert result["in_place_per_iter"]["p99_us"] == 17.5
    assert result["in_place_per_iter"]["times_us"] == [14.0, 15.0, 17.5]


def test_a_row_keeps_the_columns_of_a_record_in_their_order() -> None:
    columns = row(False)
    assert list(PerfRow.from_row(columns).to_row().items()) == list(columns.items())


def test_a_row_whose_single_calls_were_not_timed_has_no_column_of_them() -> None:
    timed = PerfRow.from_row(row(True))
    untimed = replace(timed, timing=Timing(15.0, 4.0), wrong=None, wire_bw_gbs=None).to_row()
    assert [name for name in untimed if name.endswith("_us")] == ["time_us", "cpu_time_us"]
    assert {name: untimed[name] for name in ("wrong", "wire_bw_gbs")} == {"wrong": None, "wire_bw_gbs": None}

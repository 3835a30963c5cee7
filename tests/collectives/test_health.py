"""Health functions: every pair meets once, wrong data is found, rows are complete. No speed is judged."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.health import all_pairs as pairs
from collectives.health import checks as health
from collectives.health.trial import HealthRow, pattern
from tests.collectives.ranks import on_gloo, run_ranks

CPU = torch.device("cpu")
NUM_GPUS = torch.cuda.device_count()
Rows = list[HealthRow]


def assert_complete(rows: Rows, *figures: str) -> None:
    assert rows
    for row in rows:
        assert json.loads(json.dumps(row)) == row
        assert row["ok"] is (row["wrong"] == 0)
        assert row["device"]
        assert 0 < row["min_us"] <= row["p50_us"] <= row["p99_us"] <= max(row["iterations_us"])
        assert all(row[figure] > 0 for figure in figures)  # type: ignore[literal-required]


@given(num=st.integers(1, 40))
def test_every_two_ranks_meet_once_and_rounds_are_disjoint(num: int) -> None:
    rounds = health.pair_rounds(num)
    assert len(rounds) == (num - 1 if num % 2 == 0 else num)
    for meetings in rounds:
        present = Counter(itertools.chain(*meetings))
        assert set(present.values()) <= {1}
        assert len(present) == num - num % 2  # nobody rests without need
    assert sorted(itertools.chain(*rounds)) == list(itertools.combinations(range(num), 2))


def test_no_ranks_make_no_rounds() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        health.pair_rounds(0)


@settings(max_examples=20, deadline=None)
@given(num_bytes=st.integers(1, 200_000), seed=st.tuples(st.integers(0, 9), st.integers(0, 9)))
def test_patterns_differ_by_seed_and_not_by_length(num_bytes: int, seed: tuple[int, int]) -> None:
    whole = pattern(200_000, CPU, *seed)
    assert torch.equal(pattern(num_bytes, CPU, *seed), whole[:num_bytes])
    assert not torch.equal(pattern(200_000, CPU, seed[0], seed[1] + 1), whole)
    assert not torch.equal(whole[65536 : 2 * 65536], whole[:65536])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_gemm_is_right_in_every_type(dtype: torch.dtype) -> None:
    seen: list[tuple[int, int]] = []
    rows = health.gemm(CPU, 96, dtype, repeats=3, progress=lambda done, total: seen.append((done, total)))
    assert_complete(rows, "tflops")
    assert rows[0]["ok"]
    assert seen == [(1, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spoil", [lambda c: c[5, 7].mul_(-1), lambda c: c[3].fill_(float("nan"))])
def test_gemm_finds_one_wrong_element(spoil: Callable[[torch.Tensor], Any], dtype: torch.dtype) -> None:
    multiply = torch.mm

    def wrong(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> None:
        multiply(a, b, out=out)
        out[5, 7] = out[5, 7].abs() + 10
        spoil(out)

    with mock.patch.object(torch, "mm", wrong):
        (row,) = health.gemm(CPU, 64, dtype, repeats=1, num_checked=64)
    assert not row["ok"]
    assert row["wrong"] in (1, 65)


def test_copies_are_checked() -> None:
    rows = health.copy(CPU, 100_001, repeats=4)
    assert_complete(rows, "bw_gbs")
    assert [(row["direction"], row["ok"], row["size_bytes"]) for row in rows] == [("device_to_device", True, 100_001)]
    with mock.patch("collectives.health.checks._copying", lambda target, source: lambda: target[1:].copy_(source[1:])):
        (row,) = health.copy(CPU, 1000, repeats=2)
    assert (row["wrong"], row["ok"]) == (1, False)


def test_a_budget_bounds_the_repeats() -> None:
    (row,) = health.copy(CPU, 2**20, repeats=10**9, budget_s=0.05)
    assert 3 <= len(row["iterations_us"]) < 10**6
    assert len(health.copy(CPU, 2**20, repeats=2, budget_s=0.05)[0]["iterations_us"]) == 2


def test_blocks_are_timed_beside_single_calls_and_make_the_figure() -> None:
    (gemm,) = health.gemm(CPU, 64, torch.float32, repeats=3, budget_s=0.02, num_blocks=4, warmup_s=0.01)
    (copy,) = health.copy(CPU, 2**16, repeats=3, budget_s=0.02, num_blocks=2)
    for row, num in ((gemm, 4), (copy, 2)):
        assert len(row["blocks_us"]) == num
        assert len(row["iterations_us"]) == 3
    mean_us = sum(gemm["blocks_us"]) / 4
    assert gemm["tflops"] == pytest.approx(2 * 64**3 / mean_us / 1e6)


def test_a_host_that_is_stopped_shows_in_its_pauses() -> None:
    """The clock of this test jumps: a tenth of a second is 0.06 s of pauses and 0.04 s in which it is read."""
    steps_ns = itertools.cycle([30_000_000, *([100_000] * 200)])
    with mock.patch("time.perf_counter_ns", side_effect=itertools.accumulate(steps_ns)):
        (row,) = health.host_pauses(0.1)
    assert (row["check"], row["p50_us"]) == ("host", 30_000.0)
    assert row["stopped_share"] == pytest.approx(0.6, abs=0.02)


@pytest.mark.parametrize("bad", [{"num_bytes": 0}, {"repeats": 0}, {"budget_s": 0.0}])
def test_bad_arguments_are_value_errors(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="above zero"):
        health.copy(CPU, **bad)


def all_checks(rank: int, members: list[int]) -> dict[str, Rows]:
    """Every check of a group; ranks outside only help to make it."""
    group = dist.new_group(members)
    if rank not in members:
        return {}
    seen: list[tuple[int, int]] = []
    found = {
        "pairs": health.pairs(group, 70_000, repeats=3, progress=lambda done, total: seen.append((done, total))),
        "asked": health.pairs(group, 1000, repeats=3, only=[(1, 2), (0, 1), (1, 2)]) if len(members) > 2 else [],
        "all_to_all": health.all_to_all(group, 40_000, repeats=3),
        "all_reduce": health.all_reduce(group, 40_001, repeats=3, graph_calls=2),
    }
    num_rounds = len(health.pair_rounds(len(members)))
    assert seen == [(number + 1, num_rounds) for number in range(num_rounds)]
    with pytest.raises(ValueError, match="the lower one first"):
        health.pairs(group, only=[(1, 0)])
    with pytest.raises(ValueError, match="need at least"):
        health.all_to_all(group, 16)
    return found


def on_ranks(folder: Path, world_size: int, play: Callable[..., Any], *args: object) -> list[Any]:
    return run_ranks(on_gloo, world_size, (f"file://{folder}/meet", play, *args))


@pytest.mark.parametrize("members", [[0, 1], [0, 1, 2], [1, 3], [0, 1, 2, 3, 4]], ids=str)
def test_all_ranks_of_a_group_get_the_rows_of_all(members: list[int], tmp_path: Path) -> None:
    found = on_ranks(tmp_path, max(members) + 1, all_checks, members)
    first = found[members[0]]
    assert all(found[rank] == first for rank in members)
    for check in ("all_to_all", "all_reduce"):
        assert_complete(first[check], "alg_bw_gbs", "bus_bw_gbs")
        assert [(row["check"], row["rank"], row["ok"]) for row in first[check]] == [(check, r, True) for r in members]
    num = len(members)
    assert first["all_reduce"][0]["size_bytes"] == 40_000
    assert first["all_to_all"][0]["size_bytes"] == 40_000 // num // 16 * 16 * num
    for check, factor in (("all_to_all", (num - 1) / num), ("all_reduce", 2 * (num - 1) / num)):
        for row in first[check]:
            assert row["bus_bw_gbs"] == pytest.approx(factor * row["alg_bw_gbs"])
            assert row["alg_bw_gbs"] == pytest.approx(row["size_bytes"] / 1e3 / row["p50_us"])
    assert_complete(first["pairs"])
    expected = [
        (members[low], members[high], number, direction, 8 if direction == "latency" else 70_000, True)
        for number, meetings in enumerate(health.pair_rounds(num))
        for low, high in meetings
        for direction in ("latency", "low_to_high", "high_to_low", "both")
    ]
    keys = ("rank", "peer", "round", "direction", "size_bytes", "ok")
    assert [tuple(row[key] for key in keys) for row in first["pairs"]] == expected  # type: ignore[literal-required]
    assert all(("bw_gbs" in row) == (row["direction"] != "latency") for row in first["pairs"])
    asked = [(row["rank"], row["peer"], row["round"]) for row in first["asked"][::4]]
    assert asked == (
        [(members[1], members[2], 0), (members[0], members[1], 1), (members[1], members[2], 2)] if num > 2 else []
    )


def damaged_checks(rank: int) -> dict[str, Rows]:
    """Rank 2 spoils what it receives, each time in another way."""
    group, exchange, reduce, swap = dist.group.WORLD, pairs._exchange, dist.all_reduce, dist.all_to_all_single

    def damaged_exchange(group: Any, peer: int, send: Any, recv: Any) -> None:
        exchange(group, peer, send, recv)
        if recv is not None and recv.dtype == torch.uint8 and recv.numel() > 8:
            recv[9] ^= 1

    def damaged_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        reduce(tensor, *args, **kwargs)
        if tensor.numel() > 1:
            tensor[-1] += 1

    def lost(received: torch.Tensor, sent: torch.Tensor, group: Any) -> None:
        swap(torch.empty_like(received), sent, group=group)

    if rank == 2:
        pairs._exchange, dist.all_reduce, dist.all_to_all_single = damaged_exchange, damaged_reduce, lost
    return {
        "pairs": health.pairs(group, 1000, repeats=1),
        "all_to_all": health.all_to_all(group, 4800, repeats=1),
        "all_reduce": health.all_reduce(group, 4000, repeats=1),
    }


def test_wrong_data_is_found_and_belongs_to_its_rank(tmp_path: Path) -> None:
    found = on_ranks(tmp_path, 3, damaged_checks)[0]
    assert [row["wrong"] for row in found["all_to_all"]] == [0, 0, 4800]
    assert [row["wrong"] for row in found["all_reduce"]] == [0, 0, 1]
    wrong = {(row["rank"], row["peer"], row["direction"]) for row in found["pairs"] if not row["ok"]}
    assert wrong == {(0, 2, "low_to_high"), (0, 2, "both"), (1, 2, "low_to_high"), (1, 2, "both")}


@pytest.mark.gpu
@pytest.mark.skipif(NUM_GPUS < 1, reason="needs a CUDA device, found none")
def test_one_gpu() -> None:
    device = torch.device("cuda", 0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        rows = health.gemm(device, 2048, dtype, repeats=5)
        assert_complete(rows, "tflops")
        assert rows[0]["ok"], rows
    rows = health.copy(device, 2**26, repeats=5)
    assert_complete(rows, "bw_gbs")
    assert [row["direction"] for row in rows] == ["device_to_device", "host_to_device", "device_to_host"]
    assert all(row["ok"] for row in rows)


def nccl_checks(rank: int, world_size: int, init_method: str) -> list[HealthRow]:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=init_method, rank=rank, world_size=world_size, device_id=device)
    group = dist.group.WORLD
    return [
        *health.pairs(group, 2**24, repeats=5),
        *health.all_to_all(group, 2**24, repeats=5),
        *health.all_reduce(group, 2**24, repeats=5),
    ]


@pytest.mark.multi_gpu
@pytest.mark.gpu
@pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 CUDA devices, found {NUM_GPUS}")
def test_several_gpus(tmp_path: Path) -> None:
    found = run_ranks(nccl_checks, NUM_GPUS, (f"file://{tmp_path}/meet",), limit_s=200)
    assert all(rows == found[0] for rows in found)
    assert len(found[0]) == 4 * NUM_GPUS * (NUM_GPUS - 1) // 2 + 2 * NUM_GPUS
    assert_complete(found[0])
    assert all(row["ok"] for row in found[0]), [row for row in found[0] if not row["ok"]]

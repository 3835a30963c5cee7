"""The measurement of tensor-parallel linears, on two gloo ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from bench.tensor_overlap import Row, Sizes, _refuse_wrong, measure
from netlayer.errors import CheckFailed
from netlayer.launch import RankContext, launch

SIZES = Sizes(rows=64, hidden=32, features=16, dtype=torch.float32)


def run_rank(context: RankContext, folder: str) -> list[Row]:
    torch.set_num_threads(1)
    env = context.env
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=env.rank, world_size=env.world_size)
    rows = measure(dist.group.WORLD, torch.device("cpu"), SIZES, repeats=2, rounds=2)
    with pytest.raises(CheckFailed, match=r"row forward: ours is off by 0\.5"):
        _refuse_wrong("row", "forward", {"ours": 0.5 * env.rank}, torch.float32, torch.device("cpu"))
    dist.barrier()
    return rows


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[list[Row]]:
    folder = tmp_path_factory.mktemp("tp")
    return launch(run_rank, 2, args=(str(folder),), log_dir=folder)


def test_every_system_is_measured_on_both_layers(rows: list[list[Row]]) -> None:
    systems = {(row["layer"], row["direction"], row["system"]) for row in rows[0]}
    for layer in ("column", "row"):
        for system in ("gemm_alone", "ours_lane", "collective_then_gemm"):
            assert (layer, "forward", system) in systems
        assert (layer, "forward+backward", "ours_lane") in systems


def test_times_are_of_the_slowest_rank_and_stand_beside_the_product_alone(rows: list[list[Row]]) -> None:
    for mine, other in zip(*rows, strict=True):
        assert mine["device_us"] == other["device_us"]
        assert mine["device_us_min"] <= mine["device_us"] <= mine["device_us_max"]
        if mine["system"] == "gemm_alone":
            assert mine["ratio"] == 1


def test_limits_are_counted(rows: list[list[Row]]) -> None:
    [row] = [r for r in rows[0] if (r["layer"], r["direction"], r["system"]) == ("column", "forward", "ours_lane")]
    assert row["flops"] == 2 * 64 * 32 * 16
    assert row["bytes_sent"] == 32 * 32 * 4  # half of the rows, to one peer
    assert row["error"] < 1e-6

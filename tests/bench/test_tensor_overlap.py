"""The measurement of tensor-parallel linears, on two gloo ranks."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.overlap.tensor import Row, measure, refuse_wrong
from bench.overlap.tensor_systems import Sizes, build_systems, open_exchanges, without_gathered
from netlayer.errors import CheckFailed
from netlayer.launch.launcher import RankContext, launch

SIZES = Sizes(rows=64, hidden=32, features=16, dtype=torch.float32)
CPU = torch.device("cpu")


def run_rank(context: RankContext, folder: str) -> list[Row]:
    torch.set_num_threads(1)
    env = context.env
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=env.rank, world_size=env.world_size)
    group = dist.new_group()
    for name in ("all_reduce", "barrier", "all_gather_object"):
        setattr(dist, name, _only_in(group, getattr(dist, name)))
    rows = measure(group, CPU, SIZES, repeats=2, rounds=2)
    _check_gradients(group)
    with pytest.raises(CheckFailed, match=r"row forward: dW of ours is off by 0\.5"):
        refuse_wrong("row forward", {"ours": {"y": 0.0, "dW": 0.5 * env.rank}}, 0.1, group, CPU)
    with pytest.raises(CheckFailed, match="off by inf"):
        refuse_wrong("row forward", {"ours": {"y": math.nan}}, 0.1, group, CPU)
    dist.barrier(group)
    return rows


def _only_in(group: dist.ProcessGroup, call: Callable[..., Any]) -> Callable[..., Any]:
    """On GPUs the default group is another backend's, for the hosts alone."""

    def checked(*arguments: Any, **more: Any) -> Any:
        assert group in (*arguments, *more.values()), f"{call.__name__} in the default group"
        return call(*arguments, **more)

    return checked


def _check_gradients(group: dist.ProcessGroup) -> None:
    """A wrong dx or dW is seen, not only a wrong y."""
    exchanges = open_exchanges(group, CPU)
    for layer in ("column", "row"):
        both = build_systems(layer, group, exchanges, CPU, SIZES)["forward+backward"]
        system = both["ours_lane"]
        for damaged, part in enumerate(("y", "dx", "dW")):
            results = [tensor.clone() for tensor in system.call()]
            results[damaged] *= 2
            errors = SimpleNamespace(call=lambda results=results: tuple(results), checks=system.checks)
            found = type(system).errors(errors)  # type: ignore[arg-type]
            assert found[part] > 0.5
            assert all(error < 1e-5 for name, error in found.items() if name != part)


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
        assert mine == other
        assert mine["device_us_min"] <= mine["device_us"] <= mine["device_us_max"]
        assert mine["device_us"] <= mine["device_p99_us"]
        assert mine["host_bound"] is False
        if mine["system"] == "gemm_alone":
            assert mine["ratio"] == 1


def test_limits_are_counted(rows: list[list[Row]]) -> None:
    [row] = [r for r in rows[0] if (r["layer"], r["direction"], r["system"]) == ("column", "forward", "ours_lane")]
    assert row["flops"] == 2 * 64 * 32 * 16
    assert row["bytes_sent"] == 32 * 32 * 4  # half of the rows, to one peer
    assert row["error"] < 1e-6


def test_torchs_operation_is_told_not_to_return_what_it_gathered_where_it_can_be() -> None:
    importlib.import_module("torch.distributed._symmetric_memory")
    assert without_gathered(torch.ops.symm_mem.fused_all_gather_matmul) == {"return_A": False}
    assert without_gathered(torch.ops.symm_mem.fused_matmul_reduce_scatter) == {}

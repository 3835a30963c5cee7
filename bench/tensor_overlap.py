"""Tensor-parallel linears beside their matrix products alone: what is left of the communication (technique `tp`).

Column: the rows of x are gathered, y = x W^T with N features of this rank. Row: y = x W^T with K features of this rank,
and the sum over ranks is scattered by rows. Systems, in turn and on the same data: the product alone on data that is
there; ours by peer memory and by chunks of torch.distributed; one collective and then the product; torch's fused
operation. Times are of the slowest rank. Leaves out: starting ranks (`bench.overlap`).

Shapes: W ranks, M rows in all, K features in, N features out, of a rank's product.
"""

from __future__ import annotations

import importlib
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives.exchange import LaneTensorExchange, PeerTensorExchange, TensorExchange
from collectives.lane import Lane
from collectives.symmetric import why_unusable
from collectives.tensor import ColumnParallelLinear, RowParallelLinear
from netlayer.errors import CheckFailed

Row = dict[str, Any]
Call = Callable[[], Tensor]

_TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
_AHEAD_CYCLES = 4_000_000  # about 2 ms: longer than the host takes to launch one operation
_TILE = (256, 128)  # of cuBLAS's bf16 kernels for these shapes on Hopper

_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Sizes:
    """A column-parallel product [rows, hidden] x [hidden, features], and a row-parallel one back."""

    rows: int = 8192
    hidden: int = 4096
    features: int = 2048
    dtype: torch.dtype = torch.bfloat16


TINY = Sizes(rows=512, hidden=128, features=64, dtype=torch.float32)
"""For CPUs: shows that it works, not how fast it is."""


def measure(
    group: dist.ProcessGroup,
    device: torch.device,
    sizes: Sizes | None = None,
    *,
    repeats: int = 10,
    rounds: int = 3,
    seed: int = 0,
) -> list[Row]:
    """One row a layer, direction and system; every rank of `group` calls it and gets the same rows.

    `sizes` are those of the field's comparisons on GPUs, and `TINY` on CPUs, where none are given.
    Each row has `device_us` (median over repeats and rounds of one call with the host ahead, the slowest rank),
    `device_us_min`, `device_us_max` (of the rounds' medians), `eager_us` (a call of many in a row, host included),
    `ratio` (device_us over that of the product alone) and `error` (relative, against float64, on some rows).

    Raises:
        CheckFailed: a system computes something else.
    """
    sizes = sizes or (Sizes() if device.type == "cuda" else TINY)
    world_size = dist.get_world_size(group)
    torch.manual_seed(seed + dist.get_rank(group))
    exchanges = _open_exchanges(group, device)
    rows: list[Row] = []
    for layer, build in (("column", _column_systems), ("row", _row_systems)):
        for direction, systems in build(group, exchanges, device, sizes).items():
            errors = {name: system.check() for name, system in systems.items()}
            _refuse_wrong(layer, direction, errors, sizes.dtype, device)
            times = _time_in_turn({name: system.call for name, system in systems.items()}, device, repeats, rounds)
            alone = statistics.median(times["gemm_alone"])
            for name, system in systems.items():
                rows.append(
                    {
                        "technique": "tp",
                        "layer": layer,
                        "direction": direction,
                        "system": name,
                        "device_us": statistics.median(times[name]),
                        "device_us_min": min(times[name]),
                        "device_us_max": max(times[name]),
                        "ratio": statistics.median(times[name]) / alone,
                        "eager_us": _time_eager(system.call, device, repeats),
                        "error": errors[name],
                        "ranks": world_size,
                        "rows": sizes.rows,
                        "hidden": sizes.hidden,
                        "features": sizes.features,
                        "dtype": str(sizes.dtype).removeprefix("torch."),
                        **_limits(layer, direction, sizes, world_size, device),
                    }
                )
    return rows


@dataclass(frozen=True)
class _System:
    call: Call
    check: Callable[[], float]


def _open_exchanges(group: dist.ProcessGroup, device: torch.device) -> dict[str, TensorExchange]:
    exchanges: dict[str, TensorExchange] = {}
    if why_unusable(group, device) is None:
        exchanges["ours_peer"] = PeerTensorExchange(group, device)
    exchanges["ours_lane"] = LaneTensorExchange(Lane("tensor", group, device))
    return exchanges


def _column_systems(
    group: dist.ProcessGroup, exchanges: Mapping[str, TensorExchange], device: torch.device, sizes: Sizes
) -> dict[str, dict[str, _System]]:
    world_size = dist.get_world_size(group)
    x_mK = _random(sizes.rows // world_size, sizes.hidden, sizes, device).requires_grad_()
    dy_MN = _random(sizes.rows, sizes.features, sizes, device)
    weight_NK = _random(sizes.features, sizes.hidden, sizes, device) / math.sqrt(sizes.hidden)
    x_MK = _gathered(x_mK.detach(), group)

    def gather_then() -> Tensor:
        whole_MK = torch.empty_like(x_MK)
        _gather(whole_MK, x_mK.detach(), group=group)
        return whole_MK @ weight_NK.t()

    check = _checker(x_MK, weight_NK)
    forward = {"gemm_alone": lambda: x_MK @ weight_NK.t()}
    both = {"gemm_alone": lambda: _three_products(x_MK, weight_NK, dy_MN)}
    for name, exchange in exchanges.items():
        layer = ColumnParallelLinear(
            sizes.hidden, sizes.features * world_size, exchange=exchange, bias=False, device=device, dtype=sizes.dtype
        )
        _set(layer.weight, weight_NK)
        forward[name] = _forward(layer, x_mK)
        both[name] = _backward(layer, x_mK, dy_MN)
    forward["collective_then_gemm"] = gather_then
    if device.type == "cuda":
        op, name = _torch_fused("fused_all_gather_matmul"), group.group_name
        forward["torch_fused"] = lambda: cast(Tensor, op(x_mK.detach(), [weight_NK.t()], 0, name)[1][0])
    return {
        "forward": {name: _System(call, lambda call=call: check(call())) for name, call in forward.items()},  # type: ignore[misc]
        "forward+backward": {name: _System(call, lambda call=call: check(call())) for name, call in both.items()},  # type: ignore[misc]
    }


def _row_systems(
    group: dist.ProcessGroup, exchanges: Mapping[str, TensorExchange], device: torch.device, sizes: Sizes
) -> dict[str, dict[str, _System]]:
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    x_MK = _random(sizes.rows, sizes.features, sizes, device).requires_grad_()
    dy_mN = _random(sizes.rows // world_size, sizes.hidden, sizes, device)
    weight_NK = _random(sizes.hidden, sizes.features, sizes, device) / math.sqrt(sizes.features)
    dy_MN = _gathered(dy_mN, group)

    def then_scatter() -> Tensor:
        out_mN = torch.empty_like(dy_mN)
        _scatter(out_mN, x_MK.detach() @ weight_NK.t(), group=group)
        return out_mN

    part = _checker(x_MK.detach(), weight_NK)
    whole = _sum_checker(x_MK.detach(), weight_NK, group, rank)
    forward = {"gemm_alone": lambda: x_MK.detach() @ weight_NK.t()}
    both = {"gemm_alone": lambda: _three_products(x_MK.detach(), weight_NK, dy_MN)}
    for name, exchange in exchanges.items():
        layer = RowParallelLinear(
            sizes.features * world_size, sizes.hidden, exchange=exchange, bias=False, device=device, dtype=sizes.dtype
        )
        _set(layer.weights[0], weight_NK)
        forward[name] = _forward(layer, x_MK)
        both[name] = _backward(layer, x_MK, dy_mN)
    forward["collective_then_gemm"] = then_scatter
    if device.type == "cuda":
        op, name = _torch_fused("fused_matmul_reduce_scatter"), group.group_name
        forward["torch_fused"] = lambda: cast(Tensor, op(x_MK.detach(), weight_NK.t(), "sum", 0, name))

    def checked(name: str, call: Call) -> _System:
        return _System(call, lambda: (part if name == "gemm_alone" else whole)(call()))

    return {
        "forward": {name: checked(name, call) for name, call in forward.items()},
        "forward+backward": {name: checked(name, call) for name, call in both.items()},
    }


def _random(rows: int, columns: int, sizes: Sizes, device: torch.device) -> Tensor:
    return torch.randn(rows, columns, device=device, dtype=sizes.dtype)


def _torch_fused(name: str) -> Callable[..., Any]:
    importlib.import_module("torch.distributed._symmetric_memory")  # defines it
    operation: Callable[..., Any] = getattr(torch.ops.symm_mem, name)
    return operation


def _set(weight: nn.Parameter, values: Tensor) -> None:
    with torch.no_grad():
        weight.copy_(values)


def _forward(layer: nn.Module, x: Tensor) -> Call:
    def call() -> Tensor:
        with torch.no_grad():
            y: Tensor = layer(x)
        return y

    return call


def _backward(layer: nn.Module, x: Tensor, dy: Tensor) -> Call:
    def call() -> Tensor:
        x.grad = None
        layer.zero_grad(set_to_none=True)
        y: Tensor = layer(x)
        y.backward(dy)  # type: ignore[no-untyped-call]
        return y.detach()

    return call


def _three_products(x_MK: Tensor, weight_NK: Tensor, dy_MN: Tensor) -> Tensor:
    y_MN = x_MK @ weight_NK.t()
    _ = dy_MN @ weight_NK
    _ = dy_MN.t() @ x_MK
    return y_MN


def _gathered(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = own.new_empty(own.shape[0] * dist.get_world_size(group), own.shape[1])
    _gather(whole, own.contiguous(), group=group)
    return whole


def _checker(x_MK: Tensor, weight_NK: Tensor) -> Callable[[Tensor], float]:
    """The relative error of some rows of x W^T against float64."""
    picked = torch.linspace(0, x_MK.shape[0] - 1, 32, device=x_MK.device).long()
    expected = x_MK[picked].double() @ weight_NK.double().t()
    return lambda y_MN: _error(y_MN[picked], expected)


def _sum_checker(x_MK: Tensor, weight_NK: Tensor, group: dist.ProcessGroup, rank: int) -> Callable[[Tensor], float]:
    """The same of this rank's rows of the sum over ranks."""
    num_rows = x_MK.shape[0] // dist.get_world_size(group)
    picked = torch.linspace(0, x_MK.shape[0] - 1, 16 * dist.get_world_size(group), device=x_MK.device).long()
    expected = x_MK[picked].double() @ weight_NK.double().t()
    dist.all_reduce(expected, group=group)
    own = (picked // num_rows) == rank
    return lambda y_mN: _error(y_mN[picked[own] % num_rows], expected[own])


def _error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def _refuse_wrong(
    layer: str, direction: str, errors: Mapping[str, float], dtype: torch.dtype, device: torch.device
) -> None:
    worst = torch.tensor(list(errors.values()), device=device, dtype=torch.float32).nan_to_num(torch.inf)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    for name, error in zip(errors, worst.tolist(), strict=True):
        if not error < _TOLERANCE[dtype]:
            what = f"{layer} {direction}: {name} is off by {error:.2g} (relative)"
            raise CheckFailed(f"{what}, above the tolerance of {_TOLERANCE[dtype]:g}")


def _time_in_turn(calls: Mapping[str, Call], device: torch.device, repeats: int, rounds: int) -> dict[str, list[float]]:
    """Medians of each round, in microseconds, of the slowest rank."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            median = statistics.median(_time_one(call, device) for _ in range(repeats))
            slowest = torch.tensor(median, device=device, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times[name].append(slowest.item())
    return times


def _time_one(call: Call, device: torch.device) -> float:
    """One call on the device, the host ahead of it."""
    dist.barrier()
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6
    torch.cuda.synchronize(device)
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
    start_event.record()
    call()
    end_event.record()
    end_event.synchronize()
    return float(start_event.elapsed_time(end_event)) * 1e3


def _time_eager(call: Call, device: torch.device, repeats: int) -> float:
    """A call among many, launched as fast as the host can."""
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / repeats * 1e6


def _limits(layer: str, direction: str, sizes: Sizes, world_size: int, device: torch.device) -> Row:
    """What there is to do: operations, bytes over the links, and the waves of the product alone and of one part's."""
    products = 1 if direction == "forward" else 3
    columns = sizes.features if layer == "column" else sizes.hidden
    sent = sizes.rows * sizes.hidden * sizes.dtype.itemsize // world_size * (world_size - 1)
    limits: Row = {
        "flops": 2 * products * sizes.rows * sizes.hidden * sizes.features,
        # Forward one collective; backward another, and the column's rows are gathered once more.
        "bytes_sent": sent * (1 if direction == "forward" else (3 if layer == "column" else 2)),
    }
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        for name, rows in (("waves", sizes.rows), ("waves_of_a_part", sizes.rows // world_size)):
            limits[name] = math.ceil(rows / _TILE[0]) * math.ceil(columns / _TILE[1]) / multiprocessors
    return limits

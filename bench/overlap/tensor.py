"""Tensor-parallel linears against their GEMMs alone: what is left of the communication (technique `tp`).

Column: the rows of x are gathered, y = x W^T with N features of this rank. Row: y = x W^T with K features of this rank,
and the sum over ranks is scattered by rows. All systems (`tensor_systems`) take turns on the same data; ranks meet on
the device before each call, and times are of the slowest rank. Not covered: starting ranks (`bench.overlap`).

Shapes: W ranks, M rows in all, K features in, N features out, of a rank's product.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, get_args

import torch
import torch.distributed as dist

from bench.overlap.tensor_systems import TINY, Call, LayerName, Sizes, build_systems, open_exchanges
from collectives.timing import Times, greatest, time_in_turn
from netlayer.errors import CheckFailed
from netlayer.percentile import percentile

Row = dict[str, Any]

_TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
_TILE = (256, 128)  # of cuBLAS's bf16 kernels for these shapes on Hopper


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
    `device_p99_us`, `device_us_min`, `device_us_max` (of the rounds' medians), `host_bound` (the host was not ahead:
    some of `device_us` is its own), `eager_us` (a call of many in a row, host included), `ratio` (device_us over that
    of the product alone) and `error` (relative, against float64, on some rows; the worst of y, dx and dW).

    Raises:
        CheckFailed: a system computes something else.
    """
    sizes = sizes or (Sizes() if device.type == "cuda" else TINY)
    torch.manual_seed(seed + dist.get_rank(group))
    exchanges = open_exchanges(group, device)
    world_size = dist.get_world_size(group)
    rows: list[TensorRow] = []
    layers: tuple[LayerName, ...] = get_args(LayerName)
    for layer in layers:
        for direction, systems in build_systems(layer, group, exchanges, device, sizes).items():
            errors = {name: system.errors() for name, system in systems.items()}
            errors = refuse_wrong(f"{layer} {direction}", errors, _TOLERANCE[sizes.dtype], group, device)
            calls = {name: system.call for name, system in systems.items()}
            times = time_in_turn(calls, group, device, 1, repeats, rounds)
            alone = statistics.median(times["gemm_alone"].each_us)
            work = _work(layer, direction, sizes, world_size, device)
            for name, call in calls.items():
                eager_us = _time_eager(call, group, device, repeats)
                error = max(errors[name].values())
                timed = _times(times[name], alone)
                rows.append(TensorRow(world_size, sizes, layer, direction, name, timed, eager_us, error, work))
    return [row.to_row() for row in rows]


@dataclass(frozen=True)
class TensorTimes:
    """Times of one call on the device, microseconds: of all calls, and the least and largest median of a round.

    Args:
        ratio: over the GEMM's alone.
        host_bound: the host launched a call later than the device was ready for it.
    """

    device_us: float
    device_p99_us: float
    device_us_min: float
    device_us_max: float
    ratio: float
    host_bound: bool


@dataclass(frozen=True)
class TensorWork:
    """Work of one call: FLOPs, bytes sent over the links, waves of tiles of the whole GEMM and of a part; on GPUs."""

    flops: int
    bytes_sent: int
    waves: float | None = None
    waves_of_a_part: float | None = None


@dataclass(frozen=True)
class TensorRow:
    """One system on one layer and direction; `eager_us` launched as fast as the host can, `error` relative."""

    ranks: int
    sizes: Sizes
    layer: LayerName
    direction: str
    system: str
    times: TensorTimes
    eager_us: float
    error: float
    work: TensorWork

    def to_row(self) -> Row:
        """Return the columns of a record; waves only where they are known."""
        columns = {
            "technique": "tp",
            "ranks": self.ranks,
            "rows": self.sizes.rows,
            "hidden": self.sizes.hidden,
            "features": self.sizes.features,
            "dtype": str(self.sizes.dtype).removeprefix("torch."),
            "layer": self.layer,
            "direction": self.direction,
            "system": self.system,
        }
        work = {name: value for name, value in asdict(self.work).items() if value is not None}
        return {**columns, **asdict(self.times), "eager_us": self.eager_us, "error": self.error, **work}


def refuse_wrong(
    what: str,
    errors: Mapping[str, Mapping[str, float]],
    tolerance: float,
    group: dist.ProcessGroup,
    device: torch.device,
) -> dict[str, dict[str, float]]:
    """Errors by system and part (y, dx, dW), the worst of the ranks; raises CheckFailed where one is too large."""
    keys = [(name, part) for name, by_part in errors.items() for part in by_part]
    own = [errors[name][part] for name, part in keys]
    worst = greatest([math.inf if math.isnan(error) else error for error in own], group, device)
    agreed: dict[str, dict[str, float]] = {name: {} for name in errors}
    for (name, part), error in zip(keys, worst, strict=True):
        if not error < tolerance:
            raise CheckFailed(f"{what}: {part} of {name} is off by {error:.2g} (relative), above {tolerance:g}")
        agreed[name][part] = error
    return agreed


def _times(times: Times, alone_us: float) -> TensorTimes:
    medians = [statistics.median(samples) for samples in times.rounds_us]
    device_us = statistics.median(times.each_us)
    return TensorTimes(
        device_us=device_us,
        device_p99_us=percentile(times.each_us, 99),
        device_us_min=min(medians),
        device_us_max=max(medians),
        ratio=device_us / alone_us,
        host_bound=times.host_bound,
    )


def _time_eager(call: Call, group: dist.ProcessGroup, device: torch.device, repeats: int) -> float:
    """A call among many, launched as fast as the host can; the slowest rank."""
    greatest([0.0], group, device)  # the ranks meet, and their devices are idle
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return greatest([(time.perf_counter() - start) / repeats * 1e6], group, device)[0]


def _work(layer: LayerName, direction: str, sizes: Sizes, world_size: int, device: torch.device) -> TensorWork:
    products = 1 if direction == "forward" else 3
    columns = sizes.features if layer == "column" else sizes.hidden
    sent = sizes.rows * sizes.hidden * sizes.dtype.itemsize // world_size * (world_size - 1)
    flops = 2 * products * sizes.rows * sizes.hidden * sizes.features
    # Forward one collective; backward another, and the column's rows are gathered once more.
    bytes_sent = sent * (1 if direction == "forward" else (3 if layer == "column" else 2))
    if device.type != "cuda":
        return TensorWork(flops, bytes_sent)
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    waves, waves_of_a_part = (
        math.ceil(rows / _TILE[0]) * math.ceil(columns / _TILE[1]) / multiprocessors
        for rows in (sizes.rows, sizes.rows // world_size)
    )
    return TensorWork(flops, bytes_sent, waves, waves_of_a_part)

"""Systems of `bench.overlap.tensor`: ways to compute one parallel linear, each with its expected results.

The product alone is that of this rank on data that is there. Everything else gathers or scatters rows over the ranks:
ours by peer memory and by chunks of torch.distributed; one collective and then the product; torch's fused operation.
Each result is held against float64 on some of its rows: y, and where there is a backward pass dx and dW too.

Shapes: W ranks, M rows in all, m = M / W of a rank, K features in, N features out, of a rank's product.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives.tensor.exchange import TensorExchange, open_exchange
from collectives.tensor.linear import ColumnParallelLinear, RowParallelLinear
from collectives.torch_names import all_gather_single, reduce_scatter_single
from collectives.transport.symmetric import why_unusable

LayerName = Literal["column", "row"]
Call = Callable[[], tuple[Tensor, ...]]
Check = Callable[[Tensor], float]

PARTS = ("y", "dx", "dW")
_CHECKED_ROWS = 32


@dataclass(frozen=True)
class Sizes:
    """A column-parallel product [rows, hidden] x [hidden, features], and a row-parallel one back."""

    rows: int = 8192
    hidden: int = 4096
    features: int = 2048
    dtype: torch.dtype = torch.bfloat16


TINY = Sizes(rows=512, hidden=128, features=64, dtype=torch.float32)
"""For CPUs: shows that it works, not how fast it is."""


@dataclass(frozen=True)
class System:
    """One way: the call, and what to hold each of its results against."""

    call: Call
    checks: tuple[Check, ...]

    def errors(self) -> dict[str, float]:
        """Relative error of y, and of dx and dW where there is a backward pass."""
        results = zip(PARTS, self.checks, self.call(), strict=False)
        return {part: check(tensor) for part, check, tensor in results}


def open_exchanges(group: dist.ProcessGroup, device: torch.device) -> dict[str, TensorExchange]:
    """Open our exchanges by name; that of peer memory only where the group has it."""
    exchanges: dict[str, TensorExchange] = {}
    if why_unusable(group, device) is None:
        exchanges["ours_peer"] = open_exchange(group, device, path="peer")
    exchanges["ours_lane"] = open_exchange(group, device, path="communicator")
    return exchanges


def build_systems(
    layer: LayerName,
    group: dist.ProcessGroup,
    exchanges: Mapping[str, TensorExchange],
    device: torch.device,
    sizes: Sizes,
) -> dict[str, dict[str, System]]:
    """Build the systems by direction and name, the GEMM alone first; every rank of `group` calls it."""
    build = _column_systems if layer == "column" else _row_systems
    return build(group, exchanges, device, sizes)


def _column_systems(
    group: dist.ProcessGroup, exchanges: Mapping[str, TensorExchange], device: torch.device, sizes: Sizes
) -> dict[str, dict[str, System]]:
    """Return the systems of a column-parallel linear, forward and both passes, each with its right outputs."""
    world_size = dist.get_world_size(group)
    x_mK = _random(sizes.rows // world_size, sizes.hidden, sizes, device).requires_grad_()
    dy_MN = _random(sizes.rows, sizes.features, sizes, device)
    weight_NK = _random(sizes.features, sizes.hidden, sizes, device) / math.sqrt(sizes.hidden)
    own_mK = x_mK.detach()
    x_MK = _gathered(own_mK, group)

    def gather_then() -> tuple[Tensor, ...]:
        whole_MK = torch.empty_like(x_MK)
        all_gather_single(whole_MK, own_mK, group=group)
        return (whole_MK @ weight_NK.t(),)

    y, dx = _whole(x_MK, weight_NK.t()), _summed(dy_MN, weight_NK, group)
    dweight = _whole(dy_MN.t(), x_MK)
    forward = {
        "gemm_alone": System(lambda: (x_MK @ weight_NK.t(),), (y,)),
        "collective_then_gemm": System(gather_then, (y,)),
    }
    both = {
        "gemm_alone": System(lambda: _three_products(x_MK, weight_NK, dy_MN), (y, _whole(dy_MN, weight_NK), dweight))
    }
    for name, exchange in exchanges.items():
        features = sizes.features * world_size
        module = ColumnParallelLinear(
            sizes.hidden, features, exchange=exchange, bias=False, device=device, dtype=sizes.dtype
        )
        _set(module.weight, weight_NK)
        forward[name] = System(_forward(module, x_mK), (y,))
        both[name] = System(_backward(module, module.weight, x_mK, dy_MN), (y, dx, dweight))
    if device.type == "cuda":
        op, group_name = _torch_fused("fused_all_gather_matmul"), group.group_name
        without = without_gathered(op)
        forward["torch_fused"] = System(lambda: (op(own_mK, [weight_NK.t()], 0, group_name, **without)[1][0],), (y,))
    return {"forward": forward, "forward+backward": both}


def _row_systems(
    group: dist.ProcessGroup, exchanges: Mapping[str, TensorExchange], device: torch.device, sizes: Sizes
) -> dict[str, dict[str, System]]:
    """Return the systems of a row-parallel linear, forward and both passes, each with its right outputs."""
    world_size = dist.get_world_size(group)
    x_MK = _random(sizes.rows, sizes.features, sizes, device).requires_grad_()
    dy_mN = _random(sizes.rows // world_size, sizes.hidden, sizes, device)
    weight_NK = _random(sizes.hidden, sizes.features, sizes, device) / math.sqrt(sizes.features)
    own_MK = x_MK.detach()
    dy_MN = _gathered(dy_mN, group)

    def then_scatter() -> tuple[Tensor, ...]:
        out_mN = torch.empty_like(dy_mN)
        reduce_scatter_single(out_mN, own_MK @ weight_NK.t(), group=group)
        return (out_mN,)

    part, y = _whole(own_MK, weight_NK.t()), _summed(own_MK, weight_NK.t(), group)
    dx, dweight = _whole(dy_MN, weight_NK), _whole(dy_MN.t(), own_MK)
    forward = {
        "gemm_alone": System(lambda: (own_MK @ weight_NK.t(),), (part,)),
        "collective_then_gemm": System(then_scatter, (y,)),
    }
    both = {"gemm_alone": System(lambda: _three_products(own_MK, weight_NK, dy_MN), (part, dx, dweight))}
    for name, exchange in exchanges.items():
        features = sizes.features * world_size
        module = RowParallelLinear(
            features, sizes.hidden, exchange=exchange, bias=False, device=device, dtype=sizes.dtype
        )
        _set(module.weights[0], weight_NK)
        forward[name] = System(_forward(module, x_MK), (y,))
        both[name] = System(_backward(module, module.weights[0], x_MK, dy_mN), (y, dx, dweight))
    if device.type == "cuda":
        op, group_name = _torch_fused("fused_matmul_reduce_scatter"), group.group_name
        forward["torch_fused"] = System(lambda: (op(own_MK, weight_NK.t(), "sum", 0, group_name),), (y,))
    return {"forward": forward, "forward+backward": both}


def without_gathered(op: Any) -> dict[str, bool]:
    """Return the option making torch's fused all-gather return only the product, as ours does; {} if it has none."""
    return {"return_A": False} if any(each.name == "return_A" for each in op.default._schema.arguments) else {}


def _torch_fused(name: str) -> Any:
    importlib.import_module("torch.distributed._symmetric_memory")  # defines it
    return getattr(torch.ops.symm_mem, name)


def _random(rows: int, columns: int, sizes: Sizes, device: torch.device) -> Tensor:
    return torch.randn(rows, columns, device=device, dtype=sizes.dtype)


def _set(weight: Tensor, values: Tensor) -> None:
    with torch.no_grad():
        weight.copy_(values)


def _forward(layer: nn.Module, x: Tensor) -> Call:
    def call() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (layer(x),)

    return call


def _backward(layer: nn.Module, weight: Tensor, x: Tensor, dy: Tensor) -> Call:
    def call() -> tuple[Tensor, ...]:
        y: Tensor = layer(x)
        return (y.detach(), *torch.autograd.grad(y, (x, weight), dy))

    return call


def _three_products(x_MK: Tensor, weight_NK: Tensor, dy_MN: Tensor) -> tuple[Tensor, ...]:
    return x_MK @ weight_NK.t(), dy_MN @ weight_NK, dy_MN.t() @ x_MK


def _gathered(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = own.new_empty(own.shape[0] * dist.get_world_size(group), own.shape[1])
    all_gather_single(whole, own.contiguous(), group=group)
    return whole


def _whole(a_MK: Tensor, b_KN: Tensor) -> Check:
    """The relative error of some rows of a @ b against float64."""
    picked = torch.linspace(0, a_MK.shape[0] - 1, _CHECKED_ROWS, device=a_MK.device).long()
    expected = a_MK[picked].double() @ b_KN.double()
    return lambda y_MN: _error(y_MN[picked], expected)


def _summed(a_MK: Tensor, b_KN: Tensor, group: dist.ProcessGroup) -> Check:
    """The same of this rank's rows of the sum over ranks."""
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    num_rows = a_MK.shape[0] // world_size
    own = torch.linspace(0, num_rows - 1, min(_CHECKED_ROWS, num_rows), device=a_MK.device).long()
    picked = torch.cat([own + num_rows * each for each in range(world_size)])
    expected = a_MK[picked].double() @ b_KN.double()
    dist.all_reduce(expected, group=group)
    expected_mN = expected.chunk(world_size)[rank]
    return lambda y_mN: _error(y_mN[own], expected_mN)


def _error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())

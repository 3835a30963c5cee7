"""Cases of `bench.operators` that multiply: a block's linears in 16 and 8 bits, and the QKV one with rotary positions.

Shapes: M rows, K features in, N features out; T positions, B sequences, H heads of W values.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.operators.case import Case, Random, Sizes, Way
from collectives.tensor.autotuned_gemm import can_tune
from collectives.tensor.gemm import add_matmul, multiply
from collectives.triton_support import HAS_TRITON
from trainer.ops.fp8 import Scaled, product, quantise, quantise_both_ways
from trainer.ops.rotary import narrow_angles, rotate, rotate_in_place

if HAS_TRITON:
    from bench.operators import rotary_gemm

logger = logging.getLogger(__name__)

_ROTARY_BASE = 500_000.0
_TUNING_ROUNDS = 5
"""Of nvmath's autotuning, each of which empties the L2 cache before every algorithm: half of its default."""
_FLOAT8_TOLERANCE = 2e-3
"""An H100 sums 8-bit products in some 14 bits between two sums in float32."""


def products(sizes: Sizes, random: Random) -> Iterator[Case]:
    """The four linears of a block, each with its two backward products; the weight's gradient is in float32.

    "measured algorithm" is torch's where none is faster; "nvmath" is nvmath-python's, autotuned.
    """

    def forward(tuned: bool) -> Way:
        return lambda x, weight, bias=None: multiply(x, weight.t(), bias, tuned=tuned)

    def backward(tuned: bool) -> Way:
        return lambda dy, weight: multiply(dy, weight, tuned=tuned)

    def weight_gradient(tuned: bool) -> Way:
        def way(dy: Tensor, x: Tensor) -> Tensor:
            sum_NK = torch.empty(dy.shape[1], x.shape[1], dtype=_wide(dy), device=dy.device)
            add_matmul(sum_NK, dy.t(), x, is_first=True, tuned=tuned)
            return sum_NK

        return way

    for name, features_in, features_out in _linears(sizes):
        x, dy = random(sizes.rows, features_in), random(sizes.rows, features_out)
        weight = random(features_out, features_in, std=features_in**-0.5)
        bias = [random(features_out)] if not sizes.gated and name in ("qkv", "MLP out") else []
        nvmath = _Nvmath.load() if x.is_cuda else None
        for direction, way, by_nvmath, plain, inputs in (
            (
                "forward",
                forward,
                lambda n, x, weight, bias=None: n.multiply(x, weight.t(), x.dtype, bias),
                F.linear,
                [x, weight, *bias],
            ),
            ("backward", backward, lambda n, dy, weight: n.multiply(dy, weight, dy.dtype), torch.mm, [dy, weight]),
            (
                "weight's gradient",
                weight_gradient,
                lambda n, dy, x: n.multiply(dy.t(), x, _wide(x)),
                lambda dy, x: dy.t() @ x,
                [dy, x],
            ),
        ):
            ways = {"torch": way(False)}
            if can_tune(x, weight.t()):
                ways["measured algorithm"] = way(True)
            if nvmath is not None:
                ways["nvmath"] = functools.partial(by_nvmath, nvmath)
            flops = (2.0 * sizes.rows * features_in * features_out,)
            yield Case(f"product, {name}", inputs, ways, plain, flops=flops, directions=(direction,))


def products_in_8_bits(sizes: Sizes, random: Random) -> Iterator[Case]:
    """The same of factors that lie in 8 bits, by one scale each; forward passes sum in fewer bits (`fast`)."""
    for name, features_in, features_out in _linears(sizes):
        x, x_KM = quantise_both_ways(random(sizes.rows, features_in), "input", "tensorwise")
        dy, dy_NM = quantise_both_ways(random(sizes.rows, features_out), "gradient", "tensorwise")
        weight = quantise(random(features_out, features_in, std=features_in**-0.5), "weight", "tensorwise")
        flops = (2.0 * sizes.rows * features_in * features_out,)
        for direction, dtype, fast, a, b in (
            ("forward", sizes.dtype, True, x, weight),
            ("backward", sizes.dtype, False, dy, weight.transposed()),
            ("weight's gradient", torch.float32, False, dy_NM, x_KM),
        ):
            ways = _ways_in_8_bits(dtype, fast, can_tune(a.data, b.data.t()))
            case = Case(f"product, {name}, 8 bits", [a.data, a.scale, b.data, b.scale], ways, _scaled, flops=flops)
            limit = _FLOAT8_TOLERANCE if dtype == torch.float32 else None
            yield _of_8_bits(case, direction, limit)


def rotary(sizes: Sizes, random: Random) -> Iterator[Case]:
    """The QKV linear, and queries and keys turned: by a kernel of its own, or in the epilogue of Triton's product.

    And the linear alone, in each way, and the turning alone.
    """
    weight = random(sum(sizes.qkv), sizes.hidden, std=sizes.hidden**-0.5)
    x = random(sizes.rows, sizes.hidden)
    flops = (2.0 * sizes.rows * weight.numel(),)
    num_turned = sizes.heads + sizes.kv_heads
    angles = narrow_angles(sizes.positions, sizes.head_width, _ROTARY_BASE, None, x.device, (0, 1))
    turned = functools.partial(_turned, sizes, rotate_in_place)
    plain_turned = functools.partial(_turned, sizes, functools.partial(rotate, operators="torch"))
    by_triton = HAS_TRITON and rotary_gemm.runs_on(x.device)

    def multiplied(tuned: bool) -> Way:
        return lambda x, weight: multiply(x, weight.t(), tuned=tuned)

    alone = {
        "torch": multiplied(False),
        **({"measured algorithm": multiplied(True)} if can_tune(x, weight.t()) else {}),
    }
    both = {f"{name}, then a kernel": _then(way, turned) for name, way in alone.items()}
    if by_triton:
        alone["triton"] = rotary_gemm.product
        both["triton, epilogue"] = lambda x, weight: rotary_gemm.product_turned(x, weight, angles, num_turned)
    inputs, once = [x, weight], ("forward",)
    yield Case("rotary omitted", inputs, alone, F.linear, flops=flops, directions=once)
    yield Case("rotary applied", inputs, both, _then(F.linear, plain_turned), flops=flops, directions=once)

    a, b = quantise(x, "input", "tensorwise"), quantise(weight, "weight", "tensorwise")
    alone = _ways_in_8_bits(sizes.dtype, True, can_tune(a.data, b.data.t()), has_nvmath=False)
    both = {f"{name}, then a kernel": _then(way, turned) for name, way in alone.items()}
    if by_triton:
        alone["triton"] = lambda x, scale_x, weight, scale: rotary_gemm.product(x, weight, (scale_x, scale))
        both["triton, epilogue"] = lambda x, scale_x, weight, scale: rotary_gemm.product_turned(
            x, weight, angles, num_turned, (scale_x, scale)
        )
    inputs = [a.data, a.scale, b.data, b.scale]
    yield _of_8_bits(Case("rotary omitted, 8 bits", inputs, alone, _scaled, flops=flops), "forward")
    case = Case("rotary applied, 8 bits", inputs, both, _then(_scaled, plain_turned), flops=flops)
    yield _of_8_bits(case, "forward")

    moved = 2 * sizes.rows * num_turned * sizes.head_width * sizes.dtype.itemsize
    rows = random(sizes.rows, sum(sizes.qkv))
    yield Case("rotary alone", [rows], {"ours": turned}, plain_turned, bytes_moved=(moved,), directions=once)


def _linears(sizes: Sizes) -> Sequence[tuple[str, int, int]]:
    """Names and widths, in and out."""
    return (
        ("qkv", sizes.hidden, sum(sizes.qkv)),
        ("projection", sizes.hidden, sizes.hidden),
        ("MLP in", sizes.hidden, sizes.ffn * (2 if sizes.gated else 1)),
        ("MLP out", sizes.ffn, sizes.hidden),
    )


def _ways_in_8_bits(dtype: torch.dtype, fast: bool, can_be_tuned: bool, has_nvmath: bool = True) -> dict[str, Way]:
    def way(tuned: bool) -> Way:
        def multiplied(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> Tensor:
            return product(Scaled(a, scale_a), Scaled(b, scale_b), dtype, fast=fast, tuned=tuned)

        return multiplied

    ways = {"torch": way(False)}
    if can_be_tuned:
        ways["measured algorithm"] = way(True)
        nvmath = _Nvmath.load(fast) if has_nvmath else None
        if nvmath is not None:
            ways["nvmath"] = lambda a, scale_a, b, scale_b: nvmath.multiply(a, b.t(), dtype, None, (scale_a, scale_b))
    return ways


def _of_8_bits(case: Case, direction: str, tolerance: float | None = None) -> Case:
    return Case(
        case.name,
        case.inputs,
        case.ways,
        case.plain,
        flops=case.flops,
        directions=(direction,),
        peak="float8",
        tolerance=tolerance,
    )


def _scaled(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> Tensor:
    return (a * scale_a) @ (b * scale_b).t()


def _then(first: Way, second: Callable[[Tensor], Tensor]) -> Way:
    return lambda *inputs: second(first(*inputs))


def _turned(sizes: Sizes, turn: Callable[[Tensor, float], Tensor], rows_MN: Tensor) -> Tensor:
    """Turn queries and keys where they lie, as a block does; of `turn` that does not, copy them there."""
    cuts = torch.split(rows_MN.view(sizes.positions, sizes.batch, -1), sizes.qkv, dim=-1)
    for cut in cuts[:2]:
        heads = cut.view(*cut.shape[:2], -1, sizes.head_width)
        turned = turn(heads, _ROTARY_BASE)
        if turned.data_ptr() != heads.data_ptr():
            heads.copy_(turned)
    return rows_MN


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class _Nvmath:
    """Products by nvmath-python's `Matmul`, planned and autotuned once for each set of operands.

    It is asked for the transposed product, as `collectives.tensor.cublaslt` does: a bias then lies along its rows.
    """

    def __init__(self, advanced: Any, fast: bool) -> None:
        self._advanced, self._fast = advanced, fast
        self._plans: dict[tuple[int, ...], tuple[Any, Tensor]] = {}

    @classmethod
    def load(cls, fast: bool = False) -> _Nvmath | None:
        """None: it is not installed, which is logged once."""
        advanced = _nvmath()
        return None if advanced is None else cls(advanced, fast)

    def multiply(
        self,
        a_MK: Tensor,
        b_KN: Tensor,
        dtype: torch.dtype,
        bias_N: Tensor | None = None,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """a b (+ bias); of the same operands always the same tensor."""
        key = a_MK.data_ptr(), b_KN.data_ptr()
        if key not in self._plans:
            self._plans[key] = self._plan(a_MK, b_KN, dtype, bias_N, scales)
        planned, out_MN = self._plans[key]
        planned.execute()
        return out_MN

    def _plan(
        self,
        a_MK: Tensor,
        b_KN: Tensor,
        dtype: torch.dtype,
        bias_N: Tensor | None,
        scales: tuple[Tensor, Tensor] | None,
    ) -> tuple[Any, Tensor]:
        out_MN = torch.empty(a_MK.shape[0], b_KN.shape[1], dtype=dtype, device=a_MK.device)
        more: dict[str, Any] = {}
        if scales is not None:
            more["quantization_scales"] = {"a": scales[1].view(1), "b": scales[0].view(1)}
        quiet = logging.getLogger("nvmath")  # by default the root logger is told of every call
        quiet.setLevel(logging.WARNING)
        options = {"inplace": True, "fast_accumulation": self._fast, "logger": quiet}
        planned = self._advanced.Matmul(b_KN.t(), a_MK.t(), c=out_MN.t(), beta=0.0, options=options, **more)
        if bias_N is None:
            planned.plan()
        else:
            planned.plan(epilog=self._advanced.MatmulEpilog.BIAS, epilog_inputs={"bias": bias_N})
        planned.autotune(iterations=_TUNING_ROUNDS)
        return planned, out_MN


@functools.cache
def _nvmath() -> Any | None:
    try:
        return importlib.import_module("nvmath.linalg.advanced")
    except ImportError as exc:
        logger.warning("nvmath-python is not there, and has no rows (pip install 'nvmath-python[cu13]'): %s", exc)
        return None

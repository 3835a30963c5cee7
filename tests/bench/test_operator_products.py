"""Triton's QKV product with rotary positions in its epilogue, against float64, and nvmath's products.

Without a GPU Triton's run in its interpreter, where it is chosen.
"""

from __future__ import annotations

import logging
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.operators import products
from collectives.triton_support import HAS_TRITON
from trainer.ops.rotary import narrow_angles, rotate

if HAS_TRITON:
    from bench.operators.rotary_gemm import TILES, Tile, product, product_turned, runs_on

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEEDS_INTERPRETER = pytest.mark.skipif(not (HAS_TRITON and IS_INTERPRETED), reason="not in Triton's interpreter")
BASE = 100.0


def plain(x_MD: Tensor, weight_ND: Tensor, num_sequences: int, width: int, num_turned: int) -> Tensor:
    heads = (x_MD.double() @ weight_ND.double().t()).view(x_MD.shape[0] // num_sequences, num_sequences, -1, width)
    turned = rotate(heads[:, :, :num_turned], BASE, operators="torch")
    return torch.cat([turned, heads[:, :, num_turned:]], dim=2).view(x_MD.shape[0], -1)


def apart(got: Tensor, right: Tensor) -> float:
    return float((got.double() - right).norm() / right.norm())


@NEEDS_INTERPRETER
@pytest.mark.parametrize("stored", [32, 64])
@pytest.mark.parametrize(("positions", "num_sequences"), [(24, 2), (40, 1)])
def test_triton_product_turns_queries_and_keys(positions: int, num_sequences: int, stored: int) -> None:
    """Tiles that neither rows nor columns fill; the last head of a tile is turned, and the next one is not."""
    generator = torch.Generator().manual_seed(0)
    x_MD = torch.randn(positions * num_sequences, 48, generator=generator)
    weight_ND = torch.randn(7 * 16, 48, generator=generator)
    angles = narrow_angles(positions, 16, BASE, None, x_MD.device, (0, 1))
    tile = Tile(rows=32, columns=64, depth=16, stored=stored)
    got = product_turned(x_MD, weight_ND, angles, 5, tile=tile)
    assert apart(got, plain(x_MD, weight_ND, num_sequences, 16, 5)) < 1e-6
    assert apart(product(x_MD, weight_ND, tile=tile), x_MD.double() @ weight_ND.double().t()) < 1e-6


@NEEDS_INTERPRETER
def test_triton_product_of_8_bits_is_scaled_before_it_turns() -> None:
    generator = torch.Generator().manual_seed(0)
    x_MD, weight_ND = (torch.randn(n, 64, generator=generator).to(torch.float8_e4m3fn) for n in (40, 64))
    scales = torch.tensor(0.5), torch.tensor(0.25)
    angles = narrow_angles(40, 16, BASE, None, x_MD.device, (0, 1))
    got = product_turned(x_MD, weight_ND, angles, 3, scales, Tile(rows=32, columns=32, depth=16, stored=32))
    assert got.dtype == torch.bfloat16
    assert apart(got, plain(x_MD, weight_ND, 1, 16, 3) / 8) < 5e-3


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_TRITON or not runs_on(DEVICE), reason="needs Triton and a GPU that has TMA")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("num_turned", [0, 5])
@pytest.mark.parametrize("num_sequences", [1, 2])
def test_every_tile_on_a_gpu(num_sequences: int, num_turned: int, dtype: torch.dtype) -> None:
    """And the one that measures fastest; of two sequences the first."""
    generator = torch.Generator().manual_seed(0)
    x_MD, weight_ND = (torch.randn(n, 1056, generator=generator).to(DEVICE, dtype) for n in (608, 7 * 128))
    scales = None
    if dtype.itemsize == 1:
        scales = torch.tensor(0.5, device=DEVICE), torch.tensor(2.0, device=DEVICE)
    angles = narrow_angles(608 // num_sequences, 128, BASE, None, x_MD.device, (0, 1))
    right = plain(x_MD, weight_ND, num_sequences, 128, num_turned)
    for tile in (*TILES, None) if num_sequences == 1 else TILES[:1]:
        if num_turned:
            got = product_turned(x_MD, weight_ND, angles, num_turned, scales, tile)
        else:
            got = product(x_MD, weight_ND, scales, tile)
        assert apart(got, right) < 1e-2, tile


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_nvmath_multiplies_as_torch_does() -> None:
    pytest.importorskip("nvmath")
    nvmath = products._Nvmath.load()
    assert nvmath is not None
    x, weight, bias = (torch.randn(shape, device=DEVICE).bfloat16() for shape in ((256, 128), (384, 128), (384,)))
    right = x.double() @ weight.double().t()
    assert apart(nvmath.multiply(x, weight.t(), torch.bfloat16, bias), right + bias.double()) < 1e-2
    assert apart(nvmath.multiply(x.t(), x, torch.float32), x.double().t() @ x.double()) < 1e-5


class _Matmul:
    """nvmath's interface, as far as it is used, on a CPU."""

    def __init__(self, a: Tensor, b: Tensor, *, c: Tensor, beta: float, options: Any, **scales: Any) -> None:
        assert (beta, options["inplace"]) == (0.0, True)
        self.operands, self.bias = (a, b, c), None
        factors = scales.get("quantization_scales", {"a": 1.0, "b": 1.0})
        self.scale_a, self.scale_b = factors["a"], factors["b"]

    def plan(self, epilog: str = "", epilog_inputs: Any = None) -> None:
        assert epilog in ("", "bias")
        self.bias = epilog_inputs and epilog_inputs["bias"]

    def autotune(self, iterations: int) -> None:
        assert iterations > 0

    def execute(self) -> Tensor:
        a, b, c = self.operands
        rows = 0 if self.bias is None else self.bias[:, None]
        return c.copy_((a * self.scale_a) @ (b * self.scale_b) + rows)


def test_nvmath_is_asked_for_the_transposed_product() -> None:
    nvmath = products._Nvmath(SimpleNamespace(Matmul=_Matmul, MatmulEpilog=SimpleNamespace(BIAS="bias")), fast=False)
    x, weight, bias = torch.randn(5, 3), torch.randn(4, 3), torch.randn(4)
    torch.testing.assert_close(nvmath.multiply(x, weight.t(), x.dtype, bias), x @ weight.t() + bias)
    dy, scales = torch.randn(5, 4), (torch.tensor(2.0), torch.tensor(4.0))
    torch.testing.assert_close(nvmath.multiply(dy.t(), x, x.dtype, None, scales), 8 * dy.t() @ x)


def test_without_nvmath_its_rows_are_omitted_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "nvmath", None)
    monkeypatch.setitem(sys.modules, "nvmath.linalg.advanced", None)
    with caplog.at_level(logging.WARNING, products.__name__):
        assert products._nvmath.__wrapped__() is None
    (line,) = caplog.messages
    assert line.startswith("nvmath-python is not there, and has no rows (pip install 'nvmath-python[cu13]')")

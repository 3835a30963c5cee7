"""Linears whose weights' gradients go where they leave from: against plain torch, and what they leave to autograd."""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from collectives import ShardedDataParallel
from collectives.sharded.gradient import ShardedGradient
from collectives.sharded.reduce import GradientReduce
from collectives.sharded.slot import slot_source
from collectives.tensor import gemm
from tests.collectives.settings import shard
from trainer.model.linears import JoinedLinear, SummedLinear, TokenTable
from trainer.ops import linear
from trainer.ops.loss import linear_cross_entropy


class Stack(nn.Module):
    """Splits and sums again, layer by layer; the last layer may be used twice."""

    def __init__(self, width: int, inner: list[tuple[int, int]], bias: bool, again: bool) -> None:
        super().__init__()
        self.again = again
        self.joined = nn.ModuleList(JoinedLinear(width, sizes, bias) for sizes in inner)
        self.summed = nn.ModuleList(SummedLinear(sizes, width, bias) for sizes in inner)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        for joined, summed in zip(self.joined, self.summed, strict=True):
            x = x + summed(*joined(x)).tanh()
        return self.summed[-1](*self.joined[-1](x)) if self.again else x


def gradients(sharded: ShardedDataParallel) -> dict[str, Tensor]:
    sharded.finish_gradients()
    return {name: piece.grad for name, _, piece in sharded.named_shards() if piece.grad is not None}


@settings(deadline=None, max_examples=20)
@given(
    inner=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=3),
    bias=st.booleans(),
    again=st.booleans(),
    bucket_bytes=st.integers(1, 400),
    num_passes=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_gradients_are_those_of_plain_torch(
    inner: list[tuple[int, int]], bias: bool, again: bool, bucket_bytes: int, num_passes: int, dtype: torch.dtype
) -> None:
    plain = Stack(3, inner, bias, again).to(dtype)
    sharded = shard(copy.deepcopy(plain), bucket_bytes=bucket_bytes)
    for last in (False,) * (num_passes - 1) + (True,):
        x = torch.randn(2, 4, 3, dtype=dtype)
        plain(x).square().sum().backward()
        with sharded.last_backward() if last else sharded.no_sync():
            sharded(x).square().sum().backward()
    grads = [parameter.grad for parameter in sharded.module.parameters()]
    assert all(grad is None or isinstance(grad, ShardedGradient) for grad in grads)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    expected = {name: parameter.grad.flatten() for name, parameter in plain.named_parameters()}
    torch.testing.assert_close(gradients(sharded), expected, rtol=tolerance, atol=tolerance)


def test_without_a_wrapper_a_linear_is_torchs() -> None:
    layer = JoinedLinear(3, (2, 2), True)
    nn.init.normal_(layer.weight)
    nn.init.zeros_(layer.bias)
    y, _ = layer(torch.ones(2, 3))
    y.sum().backward()
    assert layer.weight.grad is not None


def test_recomputation_leaves_the_product_out() -> None:
    sharded = shard(Stack(3, [(2, 2)], True, False))
    module: Any = sharded.module
    x = torch.randn(2, 4, 3)
    with mock.patch.object(linear, "_sum", wraps=linear._sum) as forward:
        sharded(x).sum().backward()
        expected = gradients(sharded)
        expected = {name: grad.clone() for name, grad in expected.items()}
        sharded.zero_grad()
        forward.reset_mock()

        def down(value: Tensor) -> Tensor:
            return module.summed[0](value.tanh(), value.tanh())

        sharded.start_step()
        checkpoint(down, torch.randn(2, 4, 2, requires_grad=True), use_reentrant=False).sum().backward()
        assert forward.call_count == 1
        sharded.zero_grad()
    y = x + module.summed[0](*module.joined[0](x)).tanh()
    y.sum().backward()
    torch.testing.assert_close(gradients(sharded), expected)


def test_a_compiled_linear_is_one_graph_and_leaves_its_gradient_to_autograd() -> None:
    plain = JoinedLinear(3, (2, 2), False)
    nn.init.normal_(plain.weight)
    sharded = shard(copy.deepcopy(plain), units=[])
    compiled = torch.compile(sharded.module.forward, backend="eager", fullgraph=True)
    x = torch.randn(4, 3)
    torch.cat(compiled(x), -1).square().sum().backward()
    torch.cat(plain(x), -1).square().sum().backward()
    torch.testing.assert_close(gradients(sharded), {"weight": plain.weight.grad.flatten()})


def test_a_parameter_is_saved_without_its_place() -> None:
    sharded = shard(JoinedLinear(3, (2,), False))
    weight = sharded.module.weight
    assert slot_source(weight) is not None
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    assert slot_source(torch.load(file)) is None
    assert slot_source(copy.deepcopy(weight)) is None


@pytest.mark.parametrize("num_passes", [1, 2])
def test_the_heads_gradient_goes_there_too(num_passes: int) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = TokenTable(7, 4, None)
            nn.init.normal_(self.tokens.weight)

        def forward(self, ids_M: Tensor) -> Tensor:
            x = F.embedding(ids_M, self.tokens())
            return 3 * linear_cross_entropy(x, self.tokens(), ids_M.roll(1), vocab_size=6)

    plain = Tied().double()
    sharded = shard(copy.deepcopy(plain), reduce_dtype=torch.float64)
    with mock.patch.object(GradientReduce, "_slot", autospec=True, side_effect=GradientReduce._slot) as slot:
        for index in range(num_passes):
            ids_M = torch.arange(5) + index
            plain(ids_M % 6).backward()
            with sharded.no_sync():
                sharded(ids_M % 6).backward()
    assert slot.call_count == num_passes
    expected = {"tokens.weight": plain.tokens.weight.grad.flatten()}
    torch.testing.assert_close(gradients(sharded), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, found none")
@pytest.mark.parametrize(("num_passes", "again"), list(itertools.product((1, 3), (False, True))))
def test_on_a_gpu_gradients_of_weights_are_not_rounded(num_passes: int, again: bool) -> None:
    """In bfloat16, over wide sums: a hundred times closer to float64 than 8 bits of mantissa would be."""
    torch.manual_seed(0)
    plain = Stack(64, [(64, 128)], True, again).cuda()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(parameter.bfloat16())
    sharded = shard(copy.deepcopy(plain), param_dtype=torch.bfloat16)
    seen: list[tuple[Tensor, Tensor]] = []
    add_matmul = gemm.add_matmul

    def noted(sum_NK: Tensor, a_NM: Tensor, b_MK: Tensor, is_first: bool, **settings: Any) -> None:
        before = torch.zeros_like(sum_NK).double() if is_first else sum_NK.double()
        add_matmul(sum_NK, a_NM, b_MK, is_first, **settings)
        seen.append((sum_NK.double(), before + a_NM.double() @ b_MK.double()))

    with mock.patch.object(gemm, "add_matmul", noted):
        for index in range(num_passes):
            x = torch.randn(8, 32, 64, device="cuda", dtype=torch.bfloat16)
            with sharded.no_sync() if index < num_passes - 1 else sharded.last_backward():
                sharded(x).float().square().sum().backward()
    assert len(seen) == 3 * num_passes * (2 if again else 1)
    for found, expected in seen:
        assert float((found - expected).norm()) <= 2**-9 / 100 * float(expected.norm())
    found = gradients(sharded)
    assert all(grad.dtype == torch.float32 for grad in found.values())

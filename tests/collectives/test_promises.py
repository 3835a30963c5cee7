"""Weights' gradients that a backward pass computes where a narrow network makes it wait: the same bits as at once.

For it is the same call of a GEMM, of the same shapes into the same place, at another time. On one rank that takes its
network for narrow; among several they are in tests/trainer/test_layouts.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from collectives import ShardedDataParallel
from collectives.sharded.bucket import Bucket
from collectives.sharded.reduce import GradientReduce
from collectives.tensor import gemm
from collectives.tensor import linear as tensor
from collectives.tensor.exchange import CommunicatorTensorExchange, Scattering, TensorExchange
from collectives.tensor.linear import ColumnParallelLinear, RowParallelLinear
from collectives.transport.communicator import Communicator
from tests.collectives.settings import shard


def exchange_of(defers: bool) -> TensorExchange:
    exchange = CommunicatorTensorExchange(Communicator("tensor", None, torch.device("cpu")))
    exchange.defers = defers
    return exchange


class Stack(nn.Module):
    """Pairs of linears, of which the last is used twice."""

    def __init__(self, defers: bool, recomputes: bool = False) -> None:
        super().__init__()
        self.exchange, self.recomputes = exchange_of(defers), recomputes
        into = [ColumnParallelLinear(3, (4, 2), exchange=self.exchange) for _ in range(2)]
        back = [RowParallelLinear((4, 2), 3, exchange=self.exchange) for _ in range(2)]
        self.into, self.back = nn.ModuleList(into), nn.ModuleList(back)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        for index in (0, 1, 1):
            y = checkpoint(self.pair, x, index, use_reentrant=False) if self.recomputes else self.pair(x, index)
            x = x + y
        return x

    def pair(self, x: Tensor, index: int) -> Tensor:
        y: Tensor = self.back[index](*self.into[index](x)).tanh()
        return y


def wrapped(defers: bool, recomputes: bool = False, **settings: object) -> ShardedDataParallel:
    return shard(Stack(defers, recomputes), bucket_bytes=100, **settings)  # type: ignore[arg-type]


def passed(sharded: ShardedDataParallel, seed: int) -> None:
    x = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(seed))
    sharded(x).square().sum().backward()


def gradients(sharded: ShardedDataParallel) -> dict[str, Tensor]:
    sharded.finish_gradients()
    return {name: piece.grad.clone() for name, _, piece in sharded.named_shards() if piece.grad is not None}


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("num_passes", [1, 3])
def test_what_is_promised_gives_the_same_bits(num_passes: int, stage: int, recomputes: bool) -> None:
    expected, found = (wrapped(defers, recomputes, stage=stage) for defers in (False, True))
    with mock.patch.object(GradientReduce, "_promise", autospec=True, side_effect=GradientReduce._promise) as promised:
        for step in range(2):
            for each in (expected, found):
                for seed in range(num_passes):
                    with each.no_sync() if seed < num_passes - 1 else nullcontext():
                        passed(each, 10 * step + seed)
            torch.testing.assert_close(gradients(found), gradients(expected), rtol=0, atol=0)
            for each in (expected, found):
                each.zero_grad()
    assert promised.call_count == 2 * num_passes * 3 * 3, "three pairs of three weights"


def test_where_a_pass_postpones_nothing_is_promised_or_read() -> None:
    expected, found = wrapped(False), wrapped(True)
    passed(expected, 1)
    with (
        mock.patch.object(tensor, "_whole", wraps=tensor._whole) as whole,
        found.defer_weight_grads() as left,
    ):
        passed(found, 1)
    assert whole.call_count == 0, "rows that were gathered are put together when they are read"
    assert not found.module.exchange.deferred
    left.compute()
    torch.testing.assert_close(gradients(found), gradients(expected), rtol=0, atol=0)


def test_a_product_of_weights_comes_when_parts_are_under_way() -> None:
    """A row-parallel linear's when its pair's other one has sent its parts, that one's when the next pair gathers."""
    sharded, said = wrapped(True), list[str]()
    exchange = sharded.module.exchange
    add, gather, scatter, multiply = gemm.add_matmul, exchange.gather, exchange.scatter, tensor.multiply
    x = torch.randn(4, 3, requires_grad=True)
    loss = sharded.module.pair(sharded.module.pair(x, 0), 1).sum()

    def scatters(*args: Any) -> Scattering:
        said.append("scatter")
        scattering = scatter(*args)
        waits = scattering.result
        scattering.result = lambda *biases: (said.append("wait"), waits(*biases))[1]  # type: ignore[method-assign]
        return scattering

    with (
        mock.patch.object(gemm, "add_matmul", lambda *args, **how: (said.append("weight"), add(*args, **how))),
        mock.patch.object(exchange, "gather", lambda *args, **how: (said.append("gather"), gather(*args, **how))[1]),
        mock.patch.object(exchange, "scatter", scatters),
        mock.patch.object(tensor, "multiply", lambda *args, **how: (said.append("rows"), multiply(*args, **how))[1]),
    ):
        loss.backward()
    of_column = ["scatter", "rows", "weight", "weight", "wait"]
    second = ["gather", "gather", "rows", "rows", *of_column]
    first = ["gather", "gather", "weight", "rows", "rows", *of_column]
    assert said == [*second, *first, "weight"], "the last at the end of the pass"


def test_what_a_pass_left_that_raised_is_not_computed_in_that_of_another() -> None:
    exchange = exchange_of(True)
    one, other = (shard(Stack(True)) for _ in range(2))
    for sharded in (one, other):
        sharded.module.exchange = exchange
        for linear in (*sharded.module.into, *sharded.module.back):
            linear.exchange = exchange
    handle = one.module.into[0].register_full_backward_pre_hook(_interrupt)
    with pytest.raises(ZeroDivisionError, match="interrupted"):
        passed(one, 1)
    handle.remove()
    assert any(promise() for promise in exchange.deferred)
    with mock.patch.object(gemm, "add_matmul", wraps=gemm.add_matmul) as added:
        passed(other, 1)
    assert added.call_count == 3 * 3
    one.zero_grad()
    assert not any(promise() for promise in exchange.deferred)


def _interrupt(*_: object) -> None:
    raise ZeroDivisionError("interrupted")


def test_a_pass_that_raises_keeps_no_promise() -> None:
    """In its midst: the next pass is as if it had not been, and computes nothing of it."""
    sharded, expected = wrapped(True), wrapped(False)
    handle = sharded.module.into[0].register_full_backward_pre_hook(_interrupt)
    with pytest.raises(ZeroDivisionError, match="interrupted"):
        passed(sharded, 1)
    handle.remove()
    sharded.zero_grad()
    with mock.patch.object(gemm, "add_matmul", wraps=gemm.add_matmul) as added:
        for each in (sharded, expected):
            passed(each, 2)
    assert added.call_count == 2 * 3 * 3
    torch.testing.assert_close(gradients(sharded), gradients(expected), rtol=0, atol=0)


def test_what_has_no_place_comes_at_once() -> None:
    expected, found = wrapped(False), wrapped(True)
    with mock.patch.object(Bucket, "is_wide_enough", False):
        for each in (expected, found):
            passed(each, 1)
    assert not found.module.exchange.deferred
    torch.testing.assert_close(gradients(found), gradients(expected), rtol=0, atol=0)


def test_gradients_that_the_caller_asks_for_are_not_promised() -> None:
    sharded = wrapped(True)
    weight = sharded.module.into[0].weight
    loss = sharded.module.pair(torch.ones(4, 3), 0).sum()
    [gradient] = torch.autograd.grad(loss, weight)
    assert gradient.abs().sum() > 0
    assert not sharded.module.exchange.deferred

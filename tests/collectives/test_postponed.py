"""Weights' gradients that wait for their turn: the same bits as at once, and what becomes of those left alone.

For it is the same call of a GEMM, of the same shapes into the same place, at another time. On one rank; among several
they are in tests/trainer/test_layouts.py.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from collectives import ShardedDataParallel
from collectives.sharded.bucket import Bucket
from collectives.sharded.slot import DeferredWeightGrads
from collectives.tensor import gemm
from tests.collectives.settings import shard
from trainer.model.linears import JoinedLinear, SummedLinear


class Stack(nn.Module):
    """Linears that write into slots, one of torch's that does not, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.joined, self.summed = JoinedLinear(3, (4, 2), True), SummedLinear((4, 2), 3, True)
        self.plain = nn.Linear(3, 3)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.plain(x + self.summed(*self.joined(x)).tanh())
        return x


def wrapped(**settings: object) -> ShardedDataParallel:
    return shard(Stack(), bucket_bytes=100, **settings)  # type: ignore[arg-type]


def passed(sharded: ShardedDataParallel, seed: int) -> None:
    x = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(seed))
    sharded(x).square().sum().backward()


def deferred(sharded: ShardedDataParallel, seed: int) -> DeferredWeightGrads:
    with sharded.defer_weight_grads() as left:
        passed(sharded, seed)
    return left


def gradients(sharded: ShardedDataParallel) -> dict[str, Tensor]:
    sharded.finish_gradients()
    return {name: piece.grad.clone() for name, _, piece in sharded.named_shards() if piece.grad is not None}


def assert_next_pass_is_right(sharded: ShardedDataParallel) -> None:
    """As if nothing had been before it."""
    expected = wrapped()
    for each in (sharded, expected):
        passed(each, 2)
    torch.testing.assert_close(gradients(sharded), gradients(expected), rtol=0, atol=0)


@pytest.mark.parametrize("num_passes", [1, 3])
def test_what_waits_gives_the_same_bits(num_passes: int) -> None:
    expected, found = wrapped(), wrapped()
    with mock.patch.object(gemm, "add_matmul", wraps=gemm.add_matmul) as added:
        for step in range(2):
            for seed in range(num_passes):
                with expected.last_backward() if seed == num_passes - 1 else expected.no_sync():
                    passed(expected, 10 * step + seed)
            at_once = added.call_count
            with found.no_sync():
                left = [deferred(found, 10 * step + seed) for seed in range(num_passes)]
                assert added.call_count == at_once, "no product of a weight ran in a backward pass"
                for each in left[:-1]:
                    each.compute()
                with found.last_backward():
                    left[-1].compute()
            assert added.call_count == 2 * at_once
            added.reset_mock()
            torch.testing.assert_close(gradients(found), gradients(expected), rtol=0, atol=0)
            for sharded in (found, expected):
                sharded.zero_grad()


def test_outside_no_sync_what_is_computed_is_reduced() -> None:
    expected, found = wrapped(), wrapped()
    passed(expected, 1)
    deferred(found, 1).compute()
    torch.testing.assert_close(gradients(found), gradients(expected), rtol=0, atol=0)


def test_what_nobody_computes_is_missed_where_gradients_are_asked_for() -> None:
    sharded = wrapped()
    left = deferred(sharded, 1)
    with pytest.raises(RuntimeError, match="gradients of 1 backward passes were postponed and not computed"):
        sharded.finish_gradients()
    sharded.zero_grad()
    with pytest.raises(RuntimeError, match="computed or dropped before"):
        left.compute()
    assert_next_pass_is_right(sharded)


def test_the_last_of_a_step_comes_behind_all_others() -> None:
    sharded = wrapped()
    with sharded.no_sync():
        deferred(sharded, 1)
    with pytest.raises(RuntimeError, match="gradients of 1 backward passes were postponed"):
        deferred(sharded, 2).compute()


def test_what_raises_as_it_is_computed_loses_the_step_and_no_more() -> None:
    sharded = wrapped()
    left = deferred(sharded, 1)
    with (
        mock.patch.object(gemm, "add_matmul", side_effect=RuntimeError("out of memory")),
        pytest.raises(RuntimeError, match="out of memory"),
    ):
        left.compute()
    with pytest.raises(RuntimeError, match="the backward pass did not complete: its gradients are dropped"):
        sharded.finish_gradients()
    assert_next_pass_is_right(sharded)


def _interrupt(*_: object) -> None:
    raise ZeroDivisionError("interrupted")


def test_a_pass_that_raises_leaves_nothing_waiting() -> None:
    """In its forward pass, or in the midst of the backward: the next pass is as if it had not been."""
    for interrupt in (nn.Module.register_forward_pre_hook, nn.Module.register_full_backward_pre_hook):
        sharded = wrapped()
        handle = interrupt(sharded.module.joined, _interrupt)  # type: ignore[operator]
        with pytest.raises(ZeroDivisionError, match="interrupted"):
            deferred(sharded, 1)
        handle.remove()
        assert_next_pass_is_right(sharded)


def test_one_pass_postpones_inside_another_never() -> None:
    sharded = wrapped()
    with (
        pytest.raises(ValueError, match="postponed already"),
        sharded.defer_weight_grads(),
        sharded.defer_weight_grads(),
    ):
        pass


def test_what_has_no_place_to_wait_for_comes_at_once() -> None:
    """As gradients do that would lose digits where they add up."""
    expected, found = wrapped(), wrapped()
    passed(expected, 1)
    with mock.patch.object(Bucket, "is_wide_enough", False), found.no_sync():
        left = deferred(found, 1)
    with mock.patch.object(gemm, "add_matmul", side_effect=AssertionError("nothing waits")):
        left.compute()
    torch.testing.assert_close(gradients(found), gradients(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("open_one", "says"),
    [
        (lambda: wrapped(stage=2), "in stage 2, which reduces every pass"),
        (lambda: stepping(wrapped()), "step_in_backward steps them"),
    ],
)
def test_where_every_pass_is_used_at_once_none_is_postponed(
    open_one: Callable[[], ShardedDataParallel], says: str
) -> None:
    sharded = open_one()
    with pytest.raises(ValueError, match=says), sharded.defer_weight_grads():
        pass


def stepping(sharded: ShardedDataParallel) -> ShardedDataParallel:
    sharded.optimizer(torch.optim.SGD, lr=0.1, step_in_backward=True)
    return sharded


def test_gradients_that_autograd_hands_to_its_caller_are_not_postponed() -> None:
    sharded = wrapped()
    x, weight = torch.ones(2, 4, 3), sharded.module.joined.weight
    loss = sharded(x).square().sum()
    with sharded.defer_weight_grads():
        (found,) = torch.autograd.grad(loss, [weight])  # type: ignore[list-item]
    assert float(found.norm()) > 0

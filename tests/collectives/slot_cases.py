"""Gradients that a linear writes where they leave from, against the same ones handed to autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from collectives import ShardedDataParallel
from collectives.sharded.reduce import GradientReduce
from collectives.sharded.slot import GradientSlot, slot_source
from tests.collectives.cases import CASES, accumulate, adamw, assert_close, assert_raises, batches, case, train
from tests.collectives.harness import Case, opens_groups
from tests.collectives.settings import shard
from tests.collectives.stand_ins import windows_nowhere
from tests.collectives.step_cases import GPU_CASES, pair_of_one, train_in_backward

WIDTH = 12
Train = Callable[[ShardedDataParallel, int, int, int], dict[str, Tensor]]


class SlottedGemm(torch.autograd.Function):
    """x W^T, by the rules of `collectives.sharded.slot`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        gradient = dy.flatten(0, -2).t() @ x.flatten(0, -2)
        source = slot_source(weight)
        slot = None if source is None else source.slot(ctx.next_functions[1][0])
        if slot is None:
            return dy @ weight, gradient
        torch.add(slot.view if slot.adds else 0, gradient, out=slot.view)
        return dy @ weight, None


class SlottedNet(nn.Module):
    """Matrices used once, twice, in both ways, by the head and the embedding, sometimes, and never; vectors between."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(17, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.once, self.twice, self.mixed, self.at_times, self.never = (
            nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(5)
        )
        self.head = nn.Parameter(torch.randn(17, WIDTH) / 4)
        self.passes = 0

    def forward(self, tokens: Tensor) -> Tensor:
        product: Callable[[Tensor, Tensor], Tensor] = SlottedGemm.apply
        x = self.token(tokens)
        x = x + product(self.norms[0](x).tanh(), self.once)
        x = x + product(product(self.norms[1](x), self.twice).tanh(), self.twice)
        x = x + F.linear(product(self.norms[2](x), self.mixed).tanh(), self.mixed)
        self.passes += 1
        if self.passes % 2:
            x = x + product(x, self.at_times).tanh()
        logits = product(x, self.head) + product(x, self.token.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), tokens.roll(1, 1).flatten())


def slotted(dtype: torch.dtype = torch.float64) -> SlottedNet:
    device = torch.get_default_device()
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        return SlottedNet().to(device, dtype)


def wrapped(dtype: torch.dtype = torch.float64, **settings: Any) -> ShardedDataParallel:
    """In three buckets, about in the order of use: the one in the middle is never complete."""
    order = ["token.weight", "at_times", "norms.0.weight", "norms.0.bias", "never", "once", "norms.1.weight"]
    order += ["norms.1.bias", "twice", "norms.2.weight", "norms.2.bias", "mixed", "head"]
    settings = {"reduce_dtype": dtype, **settings}
    return shard(slotted(dtype), bucket_bytes=500 * dtype.itemsize, order=order, unused="zero", **settings)


def trained(with_slots: bool, dtype: torch.dtype, run: Train, rank: int, world_size: int, **settings: Any) -> Any:
    """State, and how many slots were given."""
    sharded = wrapped(dtype, **settings)
    given: list[GradientSlot] = []
    slot = GradientReduce._slot

    def noted(self: GradientReduce, index: int, position: int) -> GradientSlot | None:
        found = slot(self, index, position) if with_slots else None
        given.extend([found] if found is not None else [])
        return found

    with mock.patch.object(GradientReduce, "_slot", noted):
        return run(sharded, STEPS, rank, world_size), len(given)


STEPS = 2
ALL_LOCAL: Train = functools.partial(accumulate, all_local=True)
SETTINGS: list[tuple[Train, dict[str, Any]]] = [
    (train, {"overlap": False}),
    (train, {"in_flight": 1}),
    (accumulate, {}),
    (accumulate, {"stage": 2}),
    (ALL_LOCAL, {}),
    (train_in_backward, {}),
]
AMONG_RANKS: list[tuple[Train, dict[str, Any]]] = [
    (train, {"groups": pair_of_one}),
    (accumulate, {"windows": True}),
    (train_in_backward, {"windows": True, "in_flight": 1}),
]


@case
def gradients_in_slots_are_those_of_autograd(rank: int, world_size: int) -> None:
    expected: dict[Train, Any] = {}
    for run, plain in SETTINGS + (AMONG_RANKS if world_size > 1 else []):
        settings = {name: value() if callable(value) else value for name, value in plain.items()}
        if run not in expected:
            expected[run], _ = trained(False, torch.float64, run, rank, world_size)
        with windows_nowhere():
            state, given = trained(True, torch.float64, run, rank, world_size, **settings)
        assert given >= STEPS * 5, (run, plain, given)
        # Not to the bit: into a slot the product is added to what lies there, which a library may do by another kernel
        # (on processors with AMX by one unit in the last place), and over passes a sum of sums has another order.
        assert_close(state, expected[run], rtol=1e-9, atol=1e-11)


@case
def narrow_gradients_in_slots_are_close(rank: int, world_size: int) -> None:
    bfloat16 = torch.bfloat16
    for dtype, low in ((torch.float32, torch.float32), (bfloat16, torch.float32), (bfloat16, bfloat16)):
        settings: dict[str, Any] = {"reduce_dtype": low, "param_dtype": dtype}
        runs: list[Train] = [train, accumulate]
        for run in runs:
            expected, _ = trained(False, torch.float32, run, rank, world_size, **settings)
            state, given = trained(True, torch.float32, run, rank, world_size, **settings)
            assert given >= STEPS * 5
            # AdamW steps by the sign of a gradient at first: where that is noise, a step of lr goes either way.
            tolerance = 1e-4 if dtype == torch.float32 else 0.1
            for name, value in expected.items():
                assert (state[name] - value).norm() <= tolerance * value.norm(), (name, dtype, low)


@case
def slots_are_not_given_where_digits_would_be_lost(rank: int, world_size: int) -> None:
    _, given = trained(True, torch.float32, train, rank, world_size, reduce_dtype=torch.bfloat16)
    assert (given > 0) == (world_size == 1), "one rank alone rounds nothing"


@case
def gradients_asked_for_are_given_to_the_caller(rank: int, world_size: int) -> None:
    sharded = wrapped()
    tokens = next(batches(1, world_size))[rank::world_size]
    weights = [sharded.module.once, sharded.module.twice]
    found = torch.autograd.grad(sharded(tokens), weights)
    plain = slotted()
    expected = torch.autograd.grad(plain(tokens), [plain.once, plain.twice])
    torch.testing.assert_close(found, expected)
    assert all(bucket.local_N is None for bucket in sharded.buckets)


@case
def a_pass_that_fails_leaves_nothing_in_slots(rank: int, world_size: int) -> None:
    sharded = wrapped()
    expected = train(wrapped(), 2, rank, world_size)
    optimizer = sharded.optimizer(adamw)
    tokens = next(batches(1, world_size))[rank::world_size]
    for fails_in_round in (False, True):
        handle = sharded.module.norms[0].register_full_backward_hook(_interrupt)
        with nullcontext() if fails_in_round else sharded.no_sync():
            assert_raises(InterruptedError, "enough", sharded(tokens).backward)
        handle.remove()
        optimizer.zero_grad()
    for tokens in batches(2, world_size):
        sharded(tokens[rank::world_size]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_close(sharded.full_state_dict(), expected, rtol=1e-9, atol=1e-11)


def _interrupt(*_: object) -> None:
    raise InterruptedError("enough")


@opens_groups
def a_captured_step_with_slots_equals_an_eager_one(rank: int, world_size: int) -> None:
    """On CUDA alone."""
    tokens = [part[rank::world_size] for part in batches(8, world_size)]
    plain, captured = (wrapped(torch.float32) for _ in range(2))
    steps = []
    for sharded in (plain, captured):
        sharded.module.register_forward_pre_hook(_count_alike)
        optimizer = sharded.optimizer(torch.optim.AdamW, lr=0.03, fused=True, capturable=True)
        steps.append(functools.partial(_two_passes, sharded, optimizer))
    static = [part.clone() for part in tokens[:2]]
    for step in steps:
        for _ in range(3):
            step(*tokens[:2])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps[1](*static)
    for first, second in zip(tokens[2::2], tokens[3::2], strict=True):
        steps[0](first, second)
        static[0].copy_(first)
        static[1].copy_(second)
        graph.replay()
    assert_close(captured.full_state_dict(), plain.full_state_dict(), rtol=1e-6, atol=1e-6)


def _count_alike(module: nn.Module, _args: object) -> None:
    module.passes = 0


def _two_passes(sharded: ShardedDataParallel, optimizer: torch.optim.Optimizer, first: Tensor, second: Tensor) -> None:
    with sharded.no_sync():
        sharded(first).backward()
    sharded(second).backward()
    optimizer.step()
    optimizer.zero_grad()
    sharded.wait_parameters()


ALONE: list[Case] = [one for one in CASES if one.__module__ == __name__]
GPU_CASES.append(a_captured_step_with_slots_equals_an_eager_one)

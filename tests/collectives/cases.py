"""What ranks check together. A case is `case(rank, world_size)`; it raises where it fails."""

from __future__ import annotations

import copy
import functools
import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from collectives import Recorder, ShardedDataParallel
from collectives.transport.communicator import Communicator
from tests.collectives.harness import Case
from tests.collectives.settings import shard

CASES: list[Case] = []
WIDTH = 12
BUCKET_BYTES = 1000


def case(function: Case) -> Case:
    CASES.append(function)
    return function


class Block(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Tied parameters, one that its parent reads in place of calling its module, odd sizes, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(17, WIDTH)
        self.blocks = nn.ModuleList(Block(bool(i % 2)) for i in range(3))
        self.scale = nn.Parameter(torch.ones(5))
        self.never_called = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 17, bias=False)
        self.head.weight = self.token.weight
        self.register_buffer("offset", torch.rand(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        x = F.linear(x, self.never_called.weight, self.never_called.bias) * self.scale.sum()
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(1, 1).flatten()) + self.offset.sum()


def net(dtype: torch.dtype = torch.float64, seed: int = 0) -> Net:
    device = torch.get_default_device()
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` keeps a traceback for each kind of device
        return Net().to(device, dtype)


def batches(num: int, world_size: int, seed: int = 7) -> Iterator[Tensor]:
    """Global batches of 2 sequences a rank; `[rank::world_size]` is a rank's part."""
    generator = torch.Generator("cpu").manual_seed(seed)
    for _ in range(num):
        yield torch.randint(17, (2 * world_size, 6), generator=generator, device="cpu").to(torch.get_default_device())


adamw = functools.partial(torch.optim.AdamW, lr=0.03, weight_decay=0.1)
wrap = functools.partial(shard, bucket_bytes=BUCKET_BYTES, unused="zero", reduce_dtype=torch.float32)
wrap64 = functools.partial(wrap, reduce_dtype=torch.float64, bucket_bytes=2 * BUCKET_BYTES)


def reference(model: nn.Module, num_steps: int, world_size: int) -> dict[str, Tensor]:
    """The same training in one process, on whole batches."""
    model = copy.deepcopy(model)
    optimizer = adamw(model.parameters())
    for tokens in batches(num_steps, world_size):
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def train(sharded: ShardedDataParallel, num_steps: int, rank: int, world_size: int) -> dict[str, Tensor]:
    optimizer = sharded.optimizer(adamw)
    for tokens in batches(num_steps, world_size):
        sharded(tokens[rank::world_size]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return sharded.full_state_dict()


def accumulate(
    sharded: ShardedDataParallel, num_steps: int, rank: int, world_size: int, all_local: bool = False
) -> dict[str, Tensor]:
    """As `train`, with a pass under `no_sync` for each half of the batch, or for the first one alone."""
    optimizer = sharded.optimizer(adamw)
    for tokens in batches(num_steps, world_size):
        first, second = tokens[rank::world_size].split(1)
        with sharded.no_sync():
            (sharded(first) / 2).backward()
        with sharded.no_sync() if all_local else nullcontext():
            (sharded(second) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return sharded.full_state_dict()


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float) -> None:
    assert list(actual) == list(expected)
    torch.testing.assert_close(actual, expected, **tolerance)


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert_close(actual, expected, rtol=0.0, atol=0.0)


def assert_alike_on_ranks(state: dict[str, Tensor], world_size: int) -> None:
    digest = torch.stack([value.double().sum() for value in state.values()])
    digests = [torch.empty_like(digest) for _ in range(world_size)]
    dist.all_gather(digests, digest)
    assert all(torch.equal(digest, other) for other in digests)


def full_gradients(sharded: ShardedDataParallel, like: nn.Module) -> dict[str, Tensor]:
    """Gradients of the shards of all ranks, put together by hand."""
    whole = {name: torch.zeros_like(p).flatten() for name, p in like.named_parameters()}
    for bucket in sharded.buckets:
        for piece, (index, start, end) in zip(bucket.pieces, bucket.plan.pieces(bucket.rank), strict=True):
            assert piece.parameter.grad is not None
            first = bucket.rank * bucket.plan.shard_numel + start - bucket.plan.slots[index].offset
            whole[piece.name][first : first + end - start] = piece.parameter.grad
    for gradient in whole.values():
        dist.all_reduce(gradient)
    return {name: whole[name].view_as(p) for name, p in like.named_parameters()}


@contextmanager
def delays(rank: int) -> Iterator[None]:
    """Every launch of a collective is late, by another time on each rank."""
    chance = random.Random(rank)
    issue = Communicator._issue

    def late(self: Communicator, *args: Any, **kwargs: Any) -> Any:
        time.sleep(chance.choice([0.0, 0.0, 0.003, 0.01]))
        return issue(self, *args, **kwargs)

    with mock.patch.object(Communicator, "_issue", late):
        yield


@case
def equals_one_process_in_float64(rank: int, world_size: int) -> None:
    model = net(seed=rank)  # rank 0's values count
    state = train(wrap64(model), 4, rank, world_size)
    assert_close(state, reference(net(), 4, world_size), rtol=1e-9, atol=1e-11)
    assert_alike_on_ranks(state, world_size)


@case
def equals_one_process_in_float32(rank: int, world_size: int) -> None:
    state = train(wrap(net(torch.float32)), 4, rank, world_size)
    assert_close(state, reference(net(torch.float32), 4, world_size), rtol=1e-6, atol=2e-6)


@case
def gradients_equal_one_process(rank: int, world_size: int) -> None:
    model, sharded = net(), wrap64(net())
    for tokens in batches(2, world_size):  # not stepped in between: they add up
        sharded(tokens[rank::world_size]).backward()
        sharded.finish_gradients()
        model(tokens).backward()
        expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert_close(full_gradients(sharded, model), expected, rtol=1e-10, atol=1e-13)


@case
def settings_do_not_change_a_bit(rank: int, world_size: int) -> None:
    plain = train(wrap(net(torch.float32), overlap=False), 3, rank, world_size)
    assert_same(train(wrap(net(torch.float32)), 3, rank, world_size), plain)
    assert_same(train(wrap(net(torch.float32), prefetch=100, in_flight=1), 3, rank, world_size), plain)
    with delays(rank):
        assert_same(train(wrap(net(torch.float32), prefetch=1), 3, rank, world_size), plain)


@case
def bfloat16_is_close_and_does_not_depend_on_overlap(rank: int, world_size: int) -> None:
    low = functools.partial(wrap, param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)

    def model() -> Net:
        made = net(torch.float32)
        made.offset = made.offset.bfloat16()
        return made

    sharded = low(model())
    initial = sharded.full_state_dict()
    state = train(sharded, 3, rank, world_size)
    assert {value.dtype for name, value in state.items() if name != "offset"} == {torch.float32}
    assert sharded.module.head.weight.dtype == torch.bfloat16
    assert_same(train(low(model(), overlap=False), 3, rank, world_size), state)
    expected = reference(net(torch.float32), 3, world_size)
    for name in (name for name in state if name != "offset"):
        moved, should = state[name] - initial[name], expected[name] - initial[name]
        assert (moved - should).norm() < 0.35 * should.norm() + 1e-3, name


@case
def counts_are_one_gather_and_one_reduction_a_bucket(rank: int, world_size: int) -> None:
    for overlap in (True, False):
        recorder = Recorder()
        sharded = wrap(net(torch.float32), recorder=recorder, overlap=overlap, broadcast_buffers=False)
        optimizer = sharded.optimizer(adamw)
        num_buckets = len(sharded.plans)
        assert num_buckets > 4
        for step, tokens in enumerate(batches(3, world_size)):
            recorder.begin_step(step)
            losses = [sharded(tokens[rank::world_size]) for _ in range(2)]
            before = recorder.counts()
            with sharded.no_sync():
                losses[0].backward()
            assert recorder.counts() == before
            losses[1].backward()
            sharded.clip_grad_norm_(1.0)
            optimizer.step()  # launches the first gathers of the next step
            optimizer.zero_grad()
            comm = recorder.end_step()
            assert 0 <= comm.exposed_comm <= 1
            if step:  # before the first one, there is nothing to gather
                counts = comm.counts()
                assert counts.pop(("reduce", "all_reduce")) == 1
                assert counts == {("gather", "all_gather"): num_buckets, ("reduce", "reduce_scatter"): num_buckets}
                assert comm.num_bytes == 4 + 2 * sum(4 * plan.padded_numel for plan in sharded.plans)


@case
def accumulation_equals_one_backward(rank: int, world_size: int) -> None:
    expected = train(wrap64(net()), 3, rank, world_size)
    for all_local in (False, True):
        found = accumulate(wrap64(net()), 3, rank, world_size, all_local)
        assert_close(found, expected, rtol=1e-9, atol=1e-11)


@case
def two_forwards_before_backward(rank: int, world_size: int) -> None:
    expected = train(wrap64(net()), 2, rank, world_size)
    for separate in (False, True):
        sharded = wrap64(net())
        optimizer = sharded.optimizer(adamw)
        for tokens in batches(2, world_size):
            first, second = tokens[rank::world_size].split(1)
            losses = [sharded(first) / 2, sharded(second) / 2]
            if separate:  # two rounds of reduce-scatters add up
                losses[0].backward()
                losses[1].backward()
            else:
                sum(losses).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_close(sharded.full_state_dict(), expected, rtol=1e-9, atol=1e-11)


class Branches(nn.Module):
    """Which of two branches runs is the caller's choice; a third never does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor, left: bool) -> Tensor:
        x = self.first(x)
        return self.last(self.left(x) if left else self.right(x)).mean()


@case
def a_parameter_without_gradient_counts_as_zero(rank: int, world_size: int) -> None:
    torch.manual_seed(3)
    model = Branches().double()
    sharded = wrap64(copy.deepcopy(model), bucket_bytes=64)
    ours, theirs = sharded.optimizer(adamw), adamw(model.parameters())
    for _ in range(3):
        x = torch.rand(world_size, 4, dtype=torch.float64)
        with delays(rank):
            sharded(x[rank], left=rank % 2 == 0).backward()
            ours.step()
        ours.zero_grad()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        sum(model(x[r], left=r % 2 == 0) / world_size for r in range(world_size)).backward()
        theirs.step()
    assert_close(sharded.full_state_dict(), model.state_dict(), rtol=1e-9, atol=1e-11)


@case
def a_rank_without_a_backward_pass_takes_part(rank: int, world_size: int) -> None:
    sharded = wrap64(net())
    if rank:
        sharded(next(batches(1, 1))).backward()
    sharded.finish_gradients()
    model = net()
    (model(next(batches(1, 1))) * (world_size - 1) / world_size).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_close(full_gradients(sharded, model), expected, rtol=1e-9, atol=1e-12)


@case
def frozen_parameters_and_buffers_start_alike_and_stay(rank: int, world_size: int) -> None:
    model, ours = net(), net(seed=rank)
    for frozen in (model.blocks[1], ours.blocks[1]):
        frozen.requires_grad_(False)
    expected = reference(model, 3, world_size)
    sharded = wrap64(ours)
    assert not any(name.startswith("blocks.1.") for name in sharded.shapes())
    assert_close(train(sharded, 3, rank, world_size), expected, rtol=1e-9, atol=1e-11)
    ours.blocks[1].requires_grad_(True)
    assert_raises(RuntimeError, "frozen", lambda: sharded(next(batches(1, 1))))


@case
def any_shapes_and_bucket_sizes(rank: int, world_size: int) -> None:
    chance = random.Random(5)
    for _ in range(8):
        widths = [chance.randint(1, 9) for _ in range(chance.randint(2, 6))]
        torch.manual_seed(1)
        layers = [nn.Linear(a, b, bias=chance.random() < 0.5) for a, b in itertools.pairwise(widths)]
        model = nn.Sequential(*layers).double()
        sharded = wrap64(copy.deepcopy(model), bucket_bytes=chance.choice([1, 40, 200, 5000]))
        assert sum(plan.numel for plan in sharded.plans) == sum(p.numel() for p in model.parameters())
        ours, theirs = sharded.optimizer(adamw), adamw(model.parameters())
        for _ in range(2):
            x = torch.rand(world_size, widths[0], dtype=torch.float64)
            sharded(x[rank]).sum().backward()
            ours.step()
            ours.zero_grad()
            theirs.zero_grad()
            (model(x).sum() / world_size).backward()
            theirs.step()
        assert_close(sharded.full_state_dict(), model.state_dict(), rtol=1e-9, atol=1e-11)


@case
def clip_equals_one_process(rank: int, world_size: int) -> None:
    model, sharded = net(), wrap64(net())
    for max_norm in (1e9, 0.01):
        tokens = next(batches(1, world_size))
        sharded(tokens[rank::world_size]).backward()
        model(tokens).backward()
        norm = sharded.clip_grad_norm_(max_norm)
        expected_norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        torch.testing.assert_close(norm, expected_norm, rtol=1e-10, atol=0.0)
        expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert_close(full_gradients(sharded, model), expected, rtol=1e-9, atol=1e-13)
        sharded.zero_grad()
        model.zero_grad()


@case
def state_goes_round(rank: int, world_size: int) -> None:
    for param_dtype in (torch.float32, torch.bfloat16):
        made = [net(torch.float32, seed) for seed in (1, 2)]
        for model in made:
            model.offset = model.offset.to(param_dtype)
        source, target = (wrap(model, param_dtype=param_dtype) for model in made)
        state = train(source, 2, rank, world_size)
        assert state["head.weight"] is state["token.weight"]
        train(target, 1, rank, world_size)
        target.load_full_state_dict(state)
        assert_same(target.full_state_dict(), state)
        tokens = next(batches(1, 1))
        assert torch.equal(source(tokens), target(tokens))
        ours, theirs = train(source, 1, rank, world_size), train(target, 1, rank, world_size)
        assert_same(ours, theirs)


@case
def the_modules_own_state_is_current(rank: int, world_size: int) -> None:
    sharded = wrap64(net())
    state = train(sharded, 2, rank, world_size)
    optimizer = sharded.optimizer(adamw)
    sharded(next(batches(1, 1))).backward()
    optimizer.step()  # its gathers are on their way
    own = {name: value.clone() for name, value in sharded.state_dict().items()}
    assert_same({f"module.{name}": value for name, value in sharded.full_state_dict().items()}, own)
    sharded.load_state_dict({f"module.{name}": value for name, value in state.items()})
    assert_same(sharded.full_state_dict(), state)


@case
def an_exception_in_backward_costs_one_step(rank: int, world_size: int) -> None:
    expected = train(wrap64(net()), 3, rank, world_size)
    for tidy in ("zero_grad", "nothing", "finish"):
        sharded = wrap64(net())
        optimizer = sharded.optimizer(adamw)
        for step, tokens in enumerate(batches(3, world_size)):
            if step == 1:
                # Ranks stop at different places: they have launched different numbers of reduce-scatters.
                handle = sharded.module.blocks[rank % 3].register_full_backward_pre_hook(_interrupt)
                assert_raises(ZeroDivisionError, "interrupted", sharded(tokens).backward)
                handle.remove()
                if tidy == "zero_grad":
                    optimizer.zero_grad()
                if tidy == "finish":
                    assert_raises(RuntimeError, "did not complete", sharded.finish_gradients)
            sharded(tokens[rank::world_size]).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_close(sharded.full_state_dict(), expected, rtol=1e-9, atol=1e-11)


def _interrupt(*_: object) -> None:
    raise ZeroDivisionError("interrupted")


@case
def a_step_can_be_skipped(rank: int, world_size: int) -> None:
    expected = train(wrap64(net()), 2, rank, world_size)
    sharded = wrap64(net())
    optimizer = sharded.optimizer(adamw)
    for tokens in batches(2, world_size):
        with sharded.no_sync():
            sharded(tokens).backward()
        sharded(tokens * 0).backward()
        optimizer.zero_grad()  # the loss was no good, say
        sharded(tokens[rank::world_size]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert_close(sharded.full_state_dict(), expected, rtol=1e-9, atol=1e-11)


@case
def a_graph_of_the_step_before_is_refused(rank: int, world_size: int) -> None:
    sharded = wrap64(net())
    optimizer = sharded.optimizer(adamw)
    needs_unshard = sharded(next(batches(1, 1)))
    sharded(next(batches(1, 1))).backward()
    optimizer.step()
    assert_raises(RuntimeError, "modified by an inplace operation", needs_unshard.backward)


@case
def shards_changed_at_the_wrong_place_are_refused(rank: int, world_size: int) -> None:
    sharded = wrap64(net())
    sharded(next(batches(1, 1)))
    for _, _, piece in sharded.named_shards():
        piece.data.mul_(2)
        with torch.no_grad():
            piece.mul_(2)
    assert_raises(RuntimeError, "changed after they were gathered", lambda: sharded(next(batches(1, 1))))


@case
def checkpointing_recomputes_the_same(rank: int, world_size: int) -> None:
    expected = train(wrap64(net()), 2, rank, world_size)
    for reentrant in (False, True):
        model = net()
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=reentrant)
        assert_close(train(wrap64(model), 2, rank, world_size), expected, rtol=1e-9, atol=1e-11)
    sharded = wrap64(net())
    optimizer = sharded.optimizer(adamw)
    for tokens in batches(2, world_size):  # our own forward runs again inside the backward pass
        loss = checkpoint(sharded, tokens[rank::world_size], use_reentrant=False)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_close(sharded.full_state_dict(), expected, rtol=1e-9, atol=1e-11)


@case
def submodules_called_past_our_forward_are_current(rank: int, world_size: int) -> None:
    sharded, model = wrap64(net()), net()
    optimizer, theirs = sharded.optimizer(adamw), adamw(model.parameters())
    for tokens in batches(2, world_size):
        for one, part in ((sharded.module, tokens[rank::world_size]), (model, tokens)):
            x = one.blocks[2](one.token(part))
            F.linear(x, one.never_called.weight).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.step()
        optimizer.zero_grad()
        theirs.step()
        theirs.zero_grad()
    assert_close(sharded.full_state_dict(), model.state_dict(), rtol=1e-9, atol=1e-11)


@case
def emulated_collectives_give_the_same(rank: int, world_size: int) -> None:
    expected = train(wrap64(net()), 2, rank, world_size)
    missing = mock.Mock(side_effect=RuntimeError("no such collective"))
    sharded = wrap64(net())
    with mock.patch("collectives.transport.communicator.reduce_scatter_single", missing):
        sharded.reduce_comm._emulated.clear()
        assert not sharded.reduce_comm.can_reduce_scatter(torch.float64)
    sharded.gather_comm._gathers_in_place = False
    assert_close(train(sharded, 2, rank, world_size), expected, rtol=1e-9, atol=1e-11)


@case
def ranks_that_differ_are_told_so(rank: int, world_size: int) -> None:
    message = "ranks differ"
    assert_raises(ValueError, message, lambda: shard(nn.Linear(3 if rank else 4, 2)))
    assert_raises(ValueError, message, lambda: wrap(net(), bucket_bytes=700 if rank else 4000))
    assert_raises(ValueError, message, lambda: wrap(net(), reduce_dtype=[torch.float64, torch.float32][rank % 2]))


@case
def float16_means_do_not_overflow_in_the_sum(rank: int, world_size: int) -> None:
    low = {"param_dtype": torch.float16, "reduce_dtype": torch.float16}
    for num_passes in (1, 2):
        model = nn.Linear(5, 1, bias=False)
        nn.init.zeros_(model.weight)
        sharded = wrap(model, **low)
        gradients = [57344.0 / num_passes] * (world_size - 1) + [16384.0 / num_passes]
        x = torch.full((1, 5), gradients[rank], dtype=torch.float16)
        for _ in range(num_passes - 1):
            with sharded.no_sync():
                sharded(x).sum().backward()
        sharded(x).sum().backward()
        sharded.finish_gradients()
        mean = num_passes * sum(gradients) / world_size
        for gradient in full_gradients(sharded, nn.Linear(5, 1, bias=False)).values():
            torch.testing.assert_close(gradient, torch.full_like(gradient, mean))


@case
def fewer_elements_than_ranks(rank: int, world_size: int) -> None:
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 2.0)
    sharded = wrap64(model)
    assert len(list(sharded.named_shards())) == (1 if rank == 0 else 0)
    optimizer = sharded.optimizer(torch.optim.SGD, lr=0.5)
    assert len(optimizer.param_groups) == 1
    for _ in range(2):
        sharded(torch.full((1, 1), float(rank), dtype=torch.float64)).sum().backward()
        assert sharded.clip_grad_norm_(100.0).item() == (world_size - 1) / 2
        optimizer.step()
        optimizer.zero_grad()
    assert sharded.full_state_dict()["weight"].item() == 2.0 - (world_size - 1) / 2


@case
def groups_of_the_world_train_apart(rank: int, world_size: int) -> None:
    size = world_size // 2
    low = rank // size * size
    group = dist.new_group(list(range(low, low + size)), use_local_synchronization=True)
    expected = reference(net(seed=low), 2, size)
    state = train(wrap64(net(seed=rank), group=group), 2, rank - low, size)
    assert_close(state, expected, rtol=1e-9, atol=1e-11)
    pair = (group, dist.new_group(list(range(low, low + size)), use_local_synchronization=True))
    state = train(wrap64(net(seed=rank), groups=pair), 2, rank - low, size)
    assert_close(state, expected, rtol=1e-9, atol=1e-11)


@case
def options_and_schedulers_work(rank: int, world_size: int) -> None:
    model, sharded = net(), wrap64(net())
    ours = sharded.optimizer(adamw, options=lambda _, shape: {} if len(shape) > 1 else {"weight_decay": 0.0})
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    theirs = adamw([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}])
    schedules = [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in (ours, theirs)]
    for tokens in batches(3, world_size):
        sharded(tokens[rank::world_size]).backward()
        model(tokens).backward()
        for one in (ours, theirs):
            one.step()
            one.zero_grad()
        for schedule in schedules:
            schedule.step()
    assert_close(sharded.full_state_dict(), model.state_dict(), rtol=1e-9, atol=1e-11)
    assert_raises(ValueError, "takes a closure or nothing", lambda: ours.step(0.5))


def assert_raises(error: type[Exception], text: str, call: Callable[[], object]) -> None:
    with pytest.raises(error, match=text):
        call()

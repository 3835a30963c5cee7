"""ZeRO stage 3: units whose parameters come and go, beside one process, stage 2 and FSDP2.

They are added to the cases of `tests.collectives.cases`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from collectives import Recorder, ShardedDataParallel
from collectives.sharded.float8 import Float8Weights
from tests.collectives.cases import (
    WIDTH,
    Net,
    _interrupt,
    accumulate,
    adamw,
    assert_alike_on_ranks,
    assert_close,
    assert_raises,
    assert_same,
    batches,
    case,
    delays,
    net,
    reference,
    train,
    wrap,
    wrap64,
)
from tests.collectives.settings import shard


def stage3(
    model: Net | Chained, how: Callable[..., ShardedDataParallel] = wrap64, **settings: Any
) -> ShardedDataParallel:
    return how(model, units=model.blocks, stage=3, **settings)


def narrow_net(dtype: torch.dtype, seed: int = 0) -> Net:
    """In float32, but for a buffer that its forward pass adds."""
    made = net(torch.float32, seed)
    made.offset = made.offset.to(dtype)
    return made


def held_bytes(sharded: ShardedDataParallel) -> list[int]:
    """Return the bytes of unsharded parameters that each unit has now."""
    held = []
    with torch._C.DisableTorchFunctionSubclass():  # to ask a freed parameter would gather it
        for unit in sharded.module.blocks:
            storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in unit.parameters()}
            held.append(sum(storages.values()))
    return held


@case
def stage_3_equals_one_process(rank: int, world_size: int) -> None:
    state = train(stage3(net(seed=rank)), 4, rank, world_size)
    assert_close(state, reference(net(), 4, world_size), rtol=1e-9, atol=1e-11)
    assert_alike_on_ranks(state, world_size)
    found = accumulate(stage3(net(), bucket_bytes=None), 3, rank, world_size)
    assert_close(found, reference(net(), 3, world_size), rtol=1e-9, atol=1e-11)


@case
def stage_3_changes_no_bit_of_stage_2(rank: int, world_size: int) -> None:
    for low in ({}, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}):
        wide = functools.partial(wrap, broadcast_buffers=False, **low)

        model = functools.partial(narrow_net, low.get("param_dtype", torch.float32))
        made = model()
        plain = train(wide(made, units=made.blocks, stage=2), 3, rank, world_size)
        for settings in ({}, {"overlap": False}, {"prefetch": 2}, {"prefetch": 100, "in_flight": 1}):
            assert_same(train(stage3(model(), wide, **settings), 3, rank, world_size), plain)
        with delays(rank):
            assert_same(train(stage3(model(), wide), 3, rank, world_size), plain)


@case
def stage_3_holds_a_few_units_and_gathers_twice(rank: int, world_size: int) -> None:
    """Of matrices beside vectors that stay, as where products read weights in 8 bits, no more either."""
    for float8 in (None, Float8Weights(lambda _name, shape: len(shape) > 1)):
        model = net()
        model.blocks = nn.ModuleList(copy.deepcopy(model.blocks[0]) for _ in range(6))
        recorder = Recorder()
        sharded = stage3(model, bucket_bytes=None, recorder=recorder, broadcast_buffers=False, float8=float8)
        optimizer, held = sharded.optimizer(adamw), list[int]()

        def note(*_: object, sharded: ShardedDataParallel = sharded, held: list[int] = held) -> None:
            held.append(sum(held_bytes(sharded)))

        note()
        stays = held.pop()
        unit_bytes = max(plan.padded_numel for plan in sharded.plans if plan.index in sharded._gather.reshards) * 8
        for unit in sharded.module.blocks:
            unit.register_forward_hook(note)
            unit.register_full_backward_hook(note)
        for step, tokens in enumerate(batches(3, world_size)):
            recorder.begin_step(step)
            sharded(tokens[rank::world_size]).backward()
            note()
            optimizer.step()
            optimizer.zero_grad()
            counts = recorder.end_step().counts()
            if step:
                num_outside = len(sharded.plans) - 6
                # Forwards each; backwards all but the last one, which stays.
                assert counts["gather", "all_gather"] == num_outside + 6 + 5
                assert counts["reduce", "reduce_scatter"] == len(sharded.plans)
        # The one in use, one ahead, and in the backward pass one whose gradients are about to be complete.
        assert len(held) == 3 * 13
        assert max(held) - stays <= 3 * unit_bytes, [(each - stays) / unit_bytes for each in held]
        assert [held[index] for index in (12, 25, 38)] == [stays] * 3


@case
def stage_3_has_the_values_of_fsdp2(rank: int, world_size: int) -> None:
    theirs = net()
    theirs.offset = theirs.offset.clone()
    mesh = init_device_mesh(torch.get_default_device().type, (world_size,))
    for block in theirs.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(theirs, mesh=mesh)
    optimizer = adamw(theirs.parameters())
    for tokens in batches(3, world_size):
        theirs(tokens[rank::world_size]).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in theirs.state_dict().items()
    }
    assert_close(train(stage3(net()), 3, rank, world_size), expected, rtol=1e-9, atol=1e-11)


@case
def programs_go_on_in_stage_3(rank: int, world_size: int) -> None:
    """Parameters that are read, written, averaged, held and copied between steps, on every rank."""
    model, ours = net(), net()
    sharded = stage3(ours)
    mine, theirs = sharded.optimizer(adamw), adamw(model.parameters())
    averages = [AveragedModel(each) for each in (ours, model)]
    held: dict[str, Tensor] = {}
    for step, tokens in enumerate(batches(5, world_size)):
        with torch.no_grad():  # evaluation, before a forward pass with gradients
            torch.testing.assert_close(sharded(tokens), model(tokens), rtol=1e-9, atol=1e-11)
        if step == 1:
            held = ours.state_dict()
        if step == 2:
            for each in (model, ours):
                with torch.no_grad():
                    each.blocks[0].up.weight.mul_(0.9)
                each.blocks[1].down.weight.data.mul_(0.9)
        if step == 3:
            for state in (held, model.state_dict()):
                state["blocks.0.down.weight"].mul_(0.9)
        if step == 4:  # and lets go of it before anybody reads that
            held["blocks.2.down.weight"].mul_(0.9)
            model.state_dict()["blocks.2.down.weight"].mul_(0.9)
            held.clear()
        own = tokens[rank::world_size]
        penalty = [0.1 * each.blocks[1].up.weight.square().sum() for each in (ours, model)]  # read past the unit
        (sharded(own) + penalty[0]).backward()
        (model(tokens) + penalty[1]).backward()
        for optimizer, average, each in ((mine, averages[0], ours), (theirs, averages[1], model)):
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(each)
        torch.testing.assert_close(list(ours.parameters()), list(model.parameters()), rtol=1e-9, atol=1e-11)
        if held:
            assert_close(dict(held), dict(model.state_dict()), rtol=1e-9, atol=1e-11)
    assert_close(dict(averages[0].state_dict()), dict(averages[1].state_dict()), rtol=1e-9, atol=1e-11)
    assert_close(dict(copy.deepcopy(ours).state_dict()), dict(model.state_dict()), rtol=1e-9, atol=1e-11)


class Recomputed(Net):
    """Blocks that are computed again in the backward pass, inside and around the units."""

    reentrant = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x * self.scale.sum()).square().mean() + self.never_called(x).mean()


@contextmanager
def recomputing(reentrant: bool) -> Iterator[Callable[[], Recomputed]]:
    def build() -> Recomputed:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(0)
            made = Recomputed()
            made.reentrant = reentrant
        return made.to(torch.get_default_device(), torch.float64)

    yield build


@case
def recomputed_units_train_in_stage_3(rank: int, world_size: int) -> None:
    for reentrant in (False, True):
        with recomputing(reentrant) as build:
            state = train(stage3(build()), 2, rank, world_size)
            assert_close(state, reference(build(), 2, world_size), rtol=1e-9, atol=1e-11)


@case
def graphs_of_several_passes_train_in_stage_3(rank: int, world_size: int) -> None:
    expected = reference(net(), 2, world_size)
    for how in ("apart", "together", "kept", "inputs"):
        sharded = stage3(net())
        optimizer = sharded.optimizer(adamw)
        for tokens in batches(2, world_size):
            first, second = tokens[rank::world_size].split(1)
            losses = [sharded(first) / 2, sharded(second) / 2]
            if how == "apart":
                losses[0].backward()
                losses[1].backward()
            elif how == "kept":
                (sum(losses) / 2).backward(retain_graph=True)
                (sum(losses) / 2).backward()
            elif how == "inputs":  # of another pass, which leaves no gradient
                torch.autograd.grad(losses[0], sharded.module.scale, retain_graph=True)
                sum(losses).backward()
            else:
                sum(losses).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_close(sharded.full_state_dict(), expected, rtol=1e-9, atol=1e-11)


@case
def an_exception_on_one_rank_costs_one_step_in_stage_3(rank: int, world_size: int) -> None:
    """With overlap and without: there a rank that takes part must not wait for a gather that others come to later."""
    expected = train(stage3(net()), 3, rank, world_size)
    last = rank == world_size - 1
    for settings, place in itertools.product(
        ({"in_flight": 1}, {"overlap": False}), ("backwards", "backward", "forward")
    ):
        sharded = stage3(net(), **settings)
        optimizer = sharded.optimizer(adamw)
        for step, tokens in enumerate(batches(3, world_size)):
            is_bad = step == 1 and (last or place == "backwards")
            # Ranks stop at different places: they have launched different numbers of gathers and reductions.
            block = sharded.module.blocks[rank % 3 if place == "backwards" else 1]
            if is_bad and place == "forward":
                handle = block.register_forward_pre_hook(_interrupt)
                assert_raises(ZeroDivisionError, "interrupted", functools.partial(sharded, tokens))
                handle.remove()
            elif is_bad:
                handle = block.register_full_backward_pre_hook(_interrupt)
                assert_raises(ZeroDivisionError, "interrupted", sharded(tokens).backward)
                handle.remove()
            if step == 1 and place != "forward":  # and once more, on every rank
                if not is_bad:
                    sharded(tokens).backward()
                optimizer.zero_grad()
                is_bad = False
            if not is_bad:
                sharded(tokens[rank::world_size]).backward()
            optimizer.step()
            optimizer.zero_grad()
        state = sharded.full_state_dict()
        assert_alike_on_ranks(state, world_size)
        if place != "forward":
            assert_same(state, expected)


@case
def states_go_from_stage_3_to_others_and_back(rank: int, world_size: int) -> None:
    for low in ({}, {"param_dtype": torch.bfloat16}):
        wide = functools.partial(wrap, broadcast_buffers=False, **low)

        model = functools.partial(narrow_net, low.get("param_dtype", torch.float32))
        source, target = stage3(model(1), wide), wide(model(2))
        pairs = [(each, each.optimizer(adamw)) for each in (source, target)]
        for (one, mine), (other, theirs) in (pairs, pairs[::-1]):
            for tokens in batches(2, world_size):
                one(tokens[rank::world_size]).backward()
                mine.step()
                mine.zero_grad()
            other.load_full_state_dict(one.full_state_dict(cpu_offload=True))
            other.load_full_optimizer_state_dict(theirs, one.full_optimizer_state_dict(mine))
            assert_same(other.full_state_dict(), one.full_state_dict())
            tokens = next(batches(1, 1))
            assert torch.equal(one(tokens), other(tokens))
            own = {name: value.clone() for name, value in one.state_dict().items()}
            other.load_state_dict(own)
            assert_same(dict(other.state_dict()), own)


@case
def replicas_train_as_one_process(rank: int, world_size: int) -> None:
    """Shards inside a group, gradients all-reduced between groups: every stage, every split of the ranks."""
    expected = reference(net(), 3, world_size)
    for num_replicas in (each for each in (2, 4) if world_size % each == 0):
        shape = num_replicas, world_size // num_replicas
        mesh = init_device_mesh(torch.get_default_device().type, shape, mesh_dim_names=("replicate", "shard"))
        for stage in (1, 2, 3):
            made = net(seed=rank)  # the first rank's values count
            sharded = wrap64(made, group=mesh, units=made.blocks, stage=stage)
            state = train(sharded, 3, rank, world_size)
            assert_close(state, expected, rtol=1e-9, atol=1e-11)
            assert_alike_on_ranks(state, world_size)
    theirs = net()
    for module in (*theirs.blocks, theirs):
        fully_shard(module, mesh=mesh)
    optimizer = adamw(theirs.parameters())
    for tokens in batches(3, world_size):
        theirs(tokens[rank::world_size]).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {name: value.full_tensor() for name, value in theirs.state_dict().items() if isinstance(value, DTensor)}
    assert_close(found, {name: expected[name] for name in found}, rtol=1e-9, atol=1e-11)


@case
def what_one_replica_lacks_or_overflows_counts_on_all(rank: int, world_size: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (2, world_size // 2))
    model = net()
    sharded = shard(copy.deepcopy(model), group=mesh, bucket_bytes=500, reduce_dtype=torch.float64)
    ours, theirs = sharded.optimizer(adamw), adamw(model.parameters())
    for tokens in batches(2, world_size):
        own = tokens[rank::world_size]
        is_first = rank < world_size // 2
        # The head and its table on the first replica alone; `scale` on none.
        x = sharded.module.token(own) if is_first else torch.zeros(2, 6, WIDTH, dtype=torch.float64)
        sharded.start_step()
        for block in sharded.module.blocks:
            x = block(x)
        x.square().mean().backward()
        norm = sharded.clip_grad_norm_(0.1)
        ours.step()
        ours.zero_grad()
        losses = []
        for other in range(world_size):
            y = model.token(tokens[other::world_size])
            y = y if other < world_size // 2 else torch.zeros_like(y)
            for block in model.blocks:
                y = block(y)
            losses.append(y.square().mean() / world_size)
        sum(losses).backward()
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(model.parameters(), 0.1), rtol=1e-9, atol=0)
        theirs.step()
        theirs.zero_grad()
    assert_close(sharded.full_state_dict(), dict(model.state_dict()), rtol=1e-9, atol=1e-11)


@case
def float16_means_over_replicas_do_not_overflow_in_the_sum(rank: int, world_size: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (2, world_size // 2))
    layer = nn.Linear(1, 1, bias=False, dtype=torch.float32)
    sharded = shard(layer, group=mesh, reduce_dtype=torch.float16)
    sharded(torch.full((1, 1), 40_000.0 + 1_000 * rank)).sum().backward()
    sharded.finish_gradients()
    expected = 40_000 + 500 * (world_size - 1)
    for _, _, piece in sharded.named_shards():
        assert piece.grad is not None
        assert abs(float(piece.grad) - expected) <= 64


class Handing(nn.Module):
    """A unit that hands out its weight, for a lookup and a product; and one that keeps a loss of its own."""

    def __init__(self, hides: bool) -> None:
        super().__init__()
        self.table = Table()
        self.blocks = nn.ModuleList(Keeping(hides) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table()[tokens]
        for block in self.blocks:
            x = block(x)
        loss: Tensor = (x @ self.table().t()).square().mean()
        return loss + sum(block.kept for block in self.blocks if block.hides)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 17 * WIDTH).view(17, WIDTH))

    def forward(self) -> Tensor:
        return self.weight


class Keeping(nn.Module):
    def __init__(self, hides: bool) -> None:
        super().__init__()
        self.linear, self.hides, self.kept = nn.Linear(WIDTH, WIDTH), hides, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.kept = self.linear(self.linear(y.detach())).square().mean()
        return y


@case
def what_units_hand_out_stays_in_stage_3(rank: int, world_size: int) -> None:
    device = torch.get_default_device()

    def build(hides: bool = False) -> Handing:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(0)
            return Handing(hides).to(device, torch.float64)

    made = build()
    sharded = wrap64(made, units=[made.table, *made.blocks], stage=3)
    assert_close(train(sharded, 3, rank, world_size), reference(build(), 3, world_size), rtol=1e-9, atol=1e-11)
    # What autograd has saved past a unit's outputs may be gone: said, and not read.
    made = build(hides=True)
    sharded = wrap64(made, units=list(made.blocks), stage=3)
    loss = sharded(next(batches(1, 1)))
    del loss
    alone = made.blocks[0].kept
    assert_raises(RuntimeError, "version", alone.backward)


@dataclasses.dataclass
class Hidden:
    x: Tensor
    whole: object = None


class Chained(nn.Module):
    """Layers whose outputs are dataclasses, or views that are changed in place; each may be skipped."""

    def __init__(self, boxes: bool, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(boxes) for _ in range(depth))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, skipped: Sequence[int] = ()) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index not in skipped:
                before = x
                hidden = block(x)
                x = hidden.x if isinstance(hidden, Hidden) else hidden
                x += before
        y: Tensor = self.head(x)
        return y.square().mean()


class Layer(nn.Module):
    def __init__(self, boxes: bool) -> None:
        super().__init__()
        self.linear, self.boxes = nn.Linear(WIDTH, WIDTH), boxes

    def forward(self, x: Tensor) -> Tensor | Hidden:
        y: Tensor = self.linear(x.tanh().unsqueeze(0)).squeeze(0)
        if not self.boxes:
            return y
        inner = Hidden(y.clone())
        inner.whole = inner  # one that holds itself
        return inner


def chained(boxes: bool = False) -> Chained:
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(0)
        return Chained(boxes).to(torch.get_default_device(), torch.float64)


def rows(num: int, world_size: int) -> Iterator[Tensor]:
    generator = torch.Generator("cpu").manual_seed(7)
    for _ in range(num):
        x = torch.randn(2 * world_size, WIDTH, generator=generator, dtype=torch.float64, device="cpu")
        yield x.to(torch.get_default_device())


@case
def any_outputs_of_units_begin_their_backward_pass(rank: int, world_size: int) -> None:
    """Dataclasses, views that are changed in place; and gradients that are differentiated themselves."""
    for boxes, penalises in ((True, False), (False, False), (False, True)):
        plain = chained(boxes)
        sharded = stage3(copy.deepcopy(plain))
        pairs = [(sharded, sharded.optimizer(adamw)), (plain, adamw(plain.parameters()))]
        for x in rows(3, world_size):
            for model, optimizer in pairs:
                # As one process does that has all ranks' rows.
                parts = (
                    [x[rank::world_size]] if model is sharded else [x[each::world_size] for each in range(world_size)]
                )
                for part in parts:
                    part = part.clone().requires_grad_(penalises)
                    loss = model(part.clone())
                    if penalises:
                        [slope] = torch.autograd.grad(loss, part, create_graph=True)
                        loss = loss + slope.square().sum()
                    (loss / len(parts)).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_close(sharded.full_state_dict(), dict(plain.state_dict()), rtol=1e-9, atol=1e-11)
        assert sum(held_bytes(sharded)) == 0


@case
def ranks_may_use_different_units_in_stage_3(rank: int, world_size: int) -> None:
    """In the first pass too; with a part outside the units, whose gradient is the first."""
    skipped = [[(1, 2, 3), (0, 3), (0, 1, 2), ()], [(0, 1, 2), (1, 2, 3), (3,), (0, 2, 3)]]
    for settings in ({}, {"prefetch": 3}):
        plain = chained()
        sharded = stage3(copy.deepcopy(plain), unused="skip", **settings)
        ours, theirs = sharded.optimizer(adamw), adamw(plain.parameters())
        for step, x in enumerate(rows(4, world_size)):
            sharded(x[rank::world_size], skipped[rank % 2][step]).backward()
            for other in range(world_size):
                (plain(x[other::world_size], skipped[other % 2][step]) / world_size).backward()
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        assert_close(sharded.full_state_dict(), dict(plain.state_dict()), rtol=1e-9, atol=1e-11)


@case
def an_alias_of_any_parameter_keeps_its_bucket(rank: int, world_size: int) -> None:
    """Of the bucket that is current when it is made, too: all are read after the others were freed."""
    for dtype in (None, torch.bfloat16):
        model = net(torch.float32)
        model.offset = model.offset.to(dtype or torch.float32)
        sharded = wrap(model, units=model.blocks, stage=3, param_dtype=dtype)
        train(sharded, 1, rank, world_size)
        values = [parameter.detach() for parameter in model.blocks.parameters()]
        sharded.close()
        assert all(value.untyped_storage().nbytes() for value in values), "memory was freed under an alias"
        assert all(map(torch.equal, values, model.blocks.parameters()))


@case
def a_state_that_was_dropped_keeps_no_bucket(rank: int, world_size: int) -> None:
    """Of a few large buckets too, whose gathers are the last collectives for long."""
    sharded = stage3(net())
    optimizer = sharded.optimizer(adamw)
    for step, tokens in enumerate(batches(3, world_size)):
        sharded(tokens[rank::world_size]).backward()
        assert sum(held_bytes(sharded)) == 0
        if step == 1:
            state = {name: value.clone() for name, value in sharded.module.state_dict().items()}
            assert sum(held_bytes(sharded)) > 0
            with torch.no_grad():
                sharded(tokens)
            assert sum(held_bytes(sharded)) == 0
            assert state
        optimizer.step()
        optimizer.zero_grad()


@case
def a_view_that_one_rank_alone_holds_stays_current_in_stage_3(rank: int, world_size: int) -> None:
    """It parts in nothing that ranks do together, shows each step's values, and its memory goes with it."""
    last = world_size - 1
    for settings in ({}, {"param_dtype": torch.bfloat16}, {"overlap": False}, {"prefetch": 2, "bucket_bytes": 500}):
        build = functools.partial(narrow_net, settings.get("param_dtype", torch.float32))
        wide = functools.partial(wrap, broadcast_buffers=False, **settings)
        plain = train(stage3(build(), wide), 6, rank, world_size)
        model = build()
        sharded = stage3(model, wide)
        optimizer, views = sharded.optimizer(adamw), dict[str, Tensor]()
        for step, tokens in enumerate(batches(6, world_size)):
            sharded(tokens[rank::world_size]).backward()
            units = sum(held_bytes(sharded)[1:]), sum(held_bytes(sharded))
            assert (units[0] > 0) == (rank == last and 1 < step < 4)
            assert (units[1] > 0) == (rank in (0, last) and 1 < step < 5)
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                state = model.state_dict()  # every rank reads it
                kept = {0: ["blocks.0.up.weight", "token.weight"], last: ["blocks.1.up.weight"]}.get(rank, [])
                views = {name: state[name].detach() for name in kept}
                del state
                if rank == last:
                    views["blocks.0.down.weight"] = model.blocks[0].down.weight[1:, :2].detach()
            shown = {name: view.clone() for name, view in views.items()}  # before the next gathers
            masters = {name: value.to(build().scale.dtype) for name, value in sharded.full_state_dict().items()}
            for name, value in shown.items():
                whole = masters[name].to(value.dtype)
                torch.testing.assert_close(
                    value, whole if whole.shape == value.shape else whole[1:, :2], rtol=0, atol=0
                )
            if step == 3:
                views.pop("blocks.1.up.weight", None)
            if step == 4:
                views.clear()
        assert_same(sharded.full_state_dict(), plain)
        sharded.close()


@case
def a_view_that_one_rank_alone_holds_survives_what_raises_in_stage_3(rank: int, world_size: int) -> None:
    """With evaluations, a state that is loaded, a pass that raises on one rank, and norms that are read each step."""
    model, plain = net(), net()
    pair = stage3(model, in_flight=1), stage3(plain, in_flight=1)
    optimizers = [each.optimizer(adamw) for each in pair]
    views = list[Tensor]()
    for step, tokens in enumerate(batches(5, world_size)):
        if step == 1:
            views = [each.detach() for each in model.parameters()]  # on every rank, and dropped on all but the last
            views = views if rank == world_size - 1 else []
        if step == 2:
            for sharded in pair:
                sharded.load_full_state_dict(pair[1].full_state_dict())
        for sharded, optimizer in zip(pair, optimizers, strict=True):
            with torch.no_grad():
                sharded(tokens)
            if step == 3:
                handle = sharded.module.blocks[rank % 3].register_full_backward_pre_hook(_interrupt)
                assert_raises(ZeroDivisionError, "interrupted", sharded(tokens).backward)
                handle.remove()
                optimizer.zero_grad()
            sharded(tokens[rank::world_size]).backward()
            optimizer.step()
            optimizer.zero_grad()
        shown = [each.clone() for each in views]  # before the next gathers
        norms = [torch.stack([each.norm() for each in sharded.module.parameters()]) for sharded in pair]
        assert torch.equal(*norms)
        values = [each.clone() for each in plain.parameters()]  # every rank reads them
        assert all(torch.equal(*both) for both in zip(shown, values, strict=bool(views)))
    assert_same(*(sharded.full_state_dict() for sharded in pair))


class Reading(Net):
    """Reads parameters past their units in each forward pass; or is interrupted before that."""

    is_interrupted = False

    def __init__(self, reads: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.reads = reads

    def forward(self, tokens: Tensor) -> Tensor:
        if self.is_interrupted:
            _interrupt()
        penalty = self.reads(self.blocks[2].up.weight) + self.reads(self.blocks[0].down.weight)
        return super().forward(tokens) + penalty


@case
def an_exception_before_a_read_costs_one_step_in_stage_3(rank: int, world_size: int) -> None:
    """Of a norm, of a view that is kept, and of penalties; in the very first pass and in a later one."""
    views = list[Tensor]()

    def measure(weight: Tensor) -> Tensor:
        with torch.no_grad():
            return weight.norm() * 0

    def hold(weight: Tensor) -> Tensor:
        views.append(weight.detach())
        return views[-1].sum() * 0

    def penalise(weight: Tensor) -> Tensor:
        return 0.1 * weight.square().sum()

    def penalise_later(weight: Tensor) -> Tensor:
        return measure(weight) + penalise(weight)  # current by then: nothing notices the second read

    every = (measure, hold, penalise, penalise_later)
    for reads, is_first, overlap in itertools.product(every, (True, False), (True, False)):
        views.clear()
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(0)
            model = Reading(reads)
        model = model.to(torch.get_default_device(), torch.float64)
        plain = copy.deepcopy(model)
        plain.reads = measure if reads is hold else reads
        how: dict[str, Any] = {"in_flight": 100 if is_first else 1}
        # Without overlap what one gather takes along is current too, and a read of it must be noted all the same.
        how |= {"prefetch": 1 + is_first} if overlap else {"overlap": False}
        sharded = stage3(model, **how)
        gather: Any = sharded._gather
        optimizer, theirs = sharded.optimizer(adamw), adamw(plain.parameters())
        for step, tokens in enumerate(batches(4, world_size)):
            is_bad = step == (0 if is_first else 2)
            model.is_interrupted = is_bad and rank == world_size - 1
            if model.is_interrupted:
                assert_raises(ZeroDivisionError, "interrupted", functools.partial(sharded, tokens))
            else:
                sharded(tokens[rank::world_size]).backward()
            # On GPUs those alone wait for the others' answer that have reason to.
            may_be_viewed = gather._may_be_viewed
            optimizer.step()
            optimizer.zero_grad()
            assert may_be_viewed or not gather._handed_out
            assert bool(gather._handed_out) == (reads is hold)
            shown = [view.clone() for view in views]  # before the next gathers
            # What raises on one rank leaves it no gradients: the mean is over all ranks all the same.
            losses = [plain(tokens[other::world_size]) for other in range(world_size - is_bad)]
            (sum(losses) / world_size).backward()
            theirs.step()
            theirs.zero_grad()
            current = [plain.blocks[2].up.weight, plain.blocks[0].down.weight] * (len(shown) // 2)
            torch.testing.assert_close(shown, [each.detach() for each in current], rtol=1e-9, atol=1e-11)
        state = sharded.full_state_dict()
        assert_alike_on_ranks(state, world_size)
        assert_close(state, dict(plain.state_dict()), rtol=1e-9, atol=1e-11)

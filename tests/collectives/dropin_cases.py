"""Usual habits of torch programs under the wrapper, beside plain torch on the whole batch, which every rank computes.

Each case trains both in float64 and compares what a program can see: losses, parameters, norms, copies.
"""

from __future__ import annotations

import copy
import io
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from collectives import ShardedDataParallel
from tests.collectives.cases import assert_raises
from tests.collectives.harness import Case, meet
from tests.collectives.settings import shard

WIDTH = 6
DROPIN_CASES: list[Case] = []


def case(function: Case) -> Case:
    DROPIN_CASES.append(function)
    return function


def net(depth: int = 3) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(3)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*layers).to(torch.get_default_device(), torch.float64)


class Pair:
    """One model, trained by plain torch and by the wrapper, in buckets of one or two parameters."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        module: nn.Module | None = None,
        kind: Any = torch.optim.AdamW,
        stage: Literal[1, 2, 3] = 1,
        **settings: Any,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.plain: Any = net() if module is None else module
        self.inner: Any = copy.deepcopy(self.plain)
        units = list(self.inner) if stage == 3 else None
        self.sharded = shard(self.inner, bucket_bytes=WIDTH * (WIDTH + 1) * 8, units=units, stage=stage)
        settings = settings or {"lr": 0.05, "weight_decay": 0.1}
        self.theirs = kind(self.plain.parameters(), **settings)
        self.ours = self.sharded.optimizer(kind, **settings)
        self._generator = torch.Generator("cpu").manual_seed(7)

    def batch(self) -> Tensor:
        values = torch.randn(2 * self.world_size, WIDTH, generator=self._generator, dtype=torch.float64, device="cpu")
        return values.to(torch.get_default_device())

    def sides(self) -> Iterator[tuple[Any, Any, torch.optim.Optimizer, Callable[[Tensor], Tensor]]]:
        """(what is called, its module, optimiser, this side's part of a batch)."""
        yield self.plain, self.plain, self.theirs, lambda x: x
        yield self.sharded, self.inner, self.ours, lambda x: x[self.rank :: self.world_size]

    def backward(self, loss: Callable[[nn.Module, nn.Module, Tensor], Tensor] | None = None) -> None:
        x = self.batch()
        for model, module, optimizer, part in self.sides():
            optimizer.zero_grad()
            (model(part(x)).square().mean() if loss is None else loss(model, module, part(x))).backward()

    def step(self) -> None:
        self.theirs.step()
        self.ours.step()

    def train(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.backward()
            self.step()

    def check(self) -> None:
        """Every parameter, read at once, is that of plain torch."""
        assert_equal(list(self.inner.parameters()), list(self.plain.parameters()))


def assert_equal(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@case
def parameters_that_are_read_after_a_step_are_current(rank: int, world_size: int) -> None:
    reads: list[Callable[[nn.Module], Any]] = [
        lambda m: [p.detach().clone() for p in m.parameters()],
        lambda m: [p.data.sum() for p in m.parameters()],
        lambda m: torch._foreach_norm(list(m.parameters())),
        lambda m: nn.utils.parameters_to_vector(m.parameters()),
        lambda m: [torch.from_numpy(p.detach().cpu().numpy().copy()) for p in m.parameters()],
        lambda m: [p.tolist() for p in m.parameters()],
        lambda m: [p[0].clone() for p in m.parameters()],
        lambda m: list(copy.deepcopy(m).parameters()),
        lambda m: [copy.copy(p) + 0 for p in m.parameters()],
        lambda m: list(m.state_dict().values()),
        lambda m: torch.stack([torch.zeros(p.shape, dtype=p.dtype).copy_(p).sum() for p in m.parameters()]),
        lambda m: [repr(p) for p in m.parameters()],
        lambda m: torch.func.functional_call(m, dict(m.named_parameters()), torch.ones(1, WIDTH, dtype=torch.float64)),
    ]
    pair = Pair(rank, world_size)
    for read in reads:
        pair.train()
        found = read(pair.inner)
        expected = read(pair.plain)
        if isinstance(expected, list) and isinstance(expected[0], str):
            assert [text.partition("\n")[0] for text in found] == [text.partition("\n")[0] for text in expected]
        else:
            assert_equal(found, expected)


@case
def an_average_of_the_model_follows_it(rank: int, world_size: int) -> None:
    for of_wrapper in (False, True):
        pair = Pair(rank, world_size)
        average = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
        theirs = AveragedModel(pair.plain, multi_avg_fn=average)
        source = pair.sharded if of_wrapper else pair.inner
        ours = AveragedModel(source, multi_avg_fn=average)
        for _ in range(4):
            pair.train()
            theirs.update_parameters(pair.plain)
            ours.update_parameters(source)
            x = pair.batch()
            assert_equal(ours(x), theirs(x))


@case
def a_term_on_parameters_before_the_forward_pass_is_trained(rank: int, world_size: int) -> None:
    def loss(model: nn.Module, module: nn.Module, x: Tensor) -> Tensor:
        penalty = torch.stack([p.square().sum() for p in module.parameters()]).sum()
        total: Tensor = 0.01 * penalty + model(x).square().mean()
        return total

    pair = Pair(rank, world_size)
    for _ in range(4):
        pair.backward(loss)
        pair.step()
        pair.check()


@case
def what_is_written_after_a_step_is_trained_from(rank: int, world_size: int) -> None:
    def by_data(module: nn.Module) -> None:
        for parameter in module.parameters():
            parameter.data.clamp_(-0.05, 0.05)

    @torch.no_grad()
    def in_place(module: nn.Module) -> None:
        torch._foreach_mul_(list(module.parameters()), 0.5)

    for write in (by_data, in_place):
        pair = Pair(rank, world_size)
        for _ in range(4):
            pair.train()
            write(pair.plain)
            write(pair.inner)
        pair.train()
        pair.check()


@case
def what_is_written_by_data_reaches_masters_of_another_dtype(rank: int, world_size: int) -> None:
    for inside in (False, True):
        sharded = shard(net().float(), param_dtype="bfloat16", bucket_bytes=100)
        optimizer = sharded.optimizer(torch.optim.SGD, lr=0.0, step_in_backward=inside)
        for value in (0.25, 0.75):
            for parameter in sharded.module.parameters():
                parameter.data.fill_(value)
            sharded(torch.ones(1, WIDTH, dtype=torch.bfloat16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert all((values.bfloat16() == value).all() for values in sharded.full_state_dict().values())


@case
def a_tensor_made_of_a_parameter_before_shows_its_new_values(rank: int, world_size: int) -> None:
    pair = Pair(rank, world_size)
    ours, theirs = list(pair.inner.state_dict().values()), list(pair.plain.state_dict().values())
    for _ in range(3):
        pair.train()
        assert_equal(ours, theirs)


@case
def a_thread_reads_current_parameters(rank: int, world_size: int) -> None:
    pair = Pair(rank, world_size)
    for _ in range(3):
        pair.train()
        found: list[Tensor] = []
        thread = threading.Thread(target=lambda f=found: f.extend(p.detach().clone() for p in pair.inner.parameters()))
        thread.start()
        thread.join()
        assert_equal(found, [p.detach() for p in pair.plain.parameters()])


@case
def one_rank_alone_may_evaluate_copy_and_save(rank: int, world_size: int) -> None:
    pair = Pair(rank, world_size)
    x = pair.batch()
    for step in range(3):
        pair.train()
        if rank == 0:
            with torch.no_grad():
                assert_equal(pair.sharded(x), pair.plain(x))
            assert_equal(copy.deepcopy(pair.inner)(x), pair.plain(x))
            assert_equal(pair.sharded.state_dict()["module.0.0.weight"], pair.plain.state_dict()["0.0.weight"])
        meet(f"step {step}")


@case
def a_copy_is_a_plain_module(rank: int, world_size: int) -> None:
    pair = Pair(rank, world_size)
    pair.train()
    file = io.BytesIO()
    torch.save(pair.inner, file)
    file.seek(0)
    copies = [copy.deepcopy(pair.inner), torch.load(file, weights_only=False), copy.deepcopy(pair.sharded)]
    assert all(type(parameter) is nn.Parameter for copied in copies for parameter in copied.parameters())
    x = pair.batch()
    expected = pair.plain(x)
    pair.train()
    if rank == 0:
        for copied in copies:
            assert_equal(copied(x), expected)
            copied(x).sum().backward()
            copied.load_state_dict(copied.state_dict())
            assert all(parameter.grad is not None for parameter in copied.parameters())


@case
def a_layer_saved_alone_is_as_large_as_it_is(rank: int, world_size: int) -> None:
    module = net(depth=20)
    sharded = shard(module)
    file = io.BytesIO()
    torch.save(_module(sharded)[0].state_dict(), file)
    assert file.getbuffer().nbytes < 4000 < 20 * WIDTH * (WIDTH + 1) * 8


@case
def torchs_clipping_is_that_of_plain_torch(rank: int, world_size: int) -> None:
    pair = Pair(rank, world_size, kind=torch.optim.SGD, lr=0.5)
    for order in (2.0, 1.0, 3.0, float("inf")):
        pair.backward()
        for module in (pair.plain, pair.inner):
            nn.utils.clip_grad_value_(module.parameters(), 0.01)
        norms = [nn.utils.clip_grad_norm_(module.parameters(), 0.01, order) for module in (pair.plain, pair.inner)]
        assert_equal(norms[1], norms[0])
        norms = [nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.005, order)]
        assert_equal(pair.sharded.clip_grad_norm_(0.005, order), norms[0])
        pair.step()
        pair.check()


@case
def gradients_that_are_read_after_they_were_reduced_raise(rank: int, world_size: int) -> None:
    pair = Pair(rank, world_size)
    pair.backward()
    weight = pair.inner[0][0].weight
    for read in (lambda: weight.grad + 1, weight.grad.abs, weight.grad.clone, lambda: weight.grad[0]):
        assert_raises(RuntimeError, r"clip_grad_norm_\(\) or clip_grad_value_\(\) of the wrapper", read)
    foreign = torch.optim.SGD(pair.inner.parameters(), lr=0.1)
    assert_raises(RuntimeError, r"optimiser of model\.optimizer", foreign.step)
    weight.grad = torch.ones_like(weight)
    assert_raises(RuntimeError, "after the backward pass had reduced it", pair.ours.step)


@case
def a_gradient_that_was_set_to_none_is_none(rank: int, world_size: int) -> None:
    """As where a layer is kept for the first steps, and where a loop clears gradients by the parameters."""
    pair = Pair(rank, world_size)
    for step in range(4):
        x = pair.batch()
        for model, module, optimizer, part in pair.sides():
            for parameter in module.parameters():
                parameter.grad = None
            model(part(x)).square().mean().backward()
            if step < 2:
                module[2][0].weight.grad = None
            optimizer.step()
        pair.check()


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.never, self.turn = nn.ModuleList([*net(2)]), net(1), 0

    def forward(self, x: Tensor) -> Tensor:
        self.turn += 1
        y: Tensor = self.heads[self.turn % 3 == 0](x)
        return y


@case
def parameters_without_a_gradient_on_any_rank_are_left_alone(rank: int, world_size: int) -> None:
    pair = Pair(rank, world_size, Heads())
    pair.train(7)
    pair.check()


@case
def a_parameter_that_one_rank_uses_is_stepped_on_all(rank: int, world_size: int) -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.rare = net(1), net(1)

        def forward(self, x: Tensor, rare: bool) -> Tensor:
            y: Tensor = self.rare(self.always(x)) if rare else self.always(x)
            return y

    sharded = shard(Sometimes(), bucket_bytes=100)
    optimizer = sharded.optimizer(torch.optim.SGD, lr=0.1)
    before = sharded.full_state_dict()
    sharded(torch.ones(1, WIDTH, dtype=torch.float64), rank == world_size - 1).square().mean().backward()
    optimizer.step()
    after = sharded.full_state_dict()
    assert all(not torch.equal(after[name], before[name]) for name in before)


@case
def steps_in_the_backward_pass_refuse_what_has_no_gradient(rank: int, world_size: int) -> None:
    sharded = shard(Heads())
    sharded.optimizer(torch.optim.SGD, lr=0.1, step_in_backward=True)
    loss = sharded(torch.ones(1, WIDTH, dtype=torch.float64)).sum()
    assert_raises(RuntimeError, 'had no gradient on any rank, .* unused="zero"', loss.backward)


@case
def a_closure_is_called_by_the_step(rank: int, world_size: int) -> None:
    for inside in (False, True):
        pair = Pair(rank, world_size)
        if inside:
            pair.ours = pair.sharded.optimizer(torch.optim.AdamW, lr=0.05, weight_decay=0.1, step_in_backward=True)
        for _ in range(3):
            x, losses = pair.batch(), []
            for model, _, optimizer, part in pair.sides():
                own = part(x)

                def closure(model: Any = model, optimizer: Any = optimizer, own: Tensor = own) -> Tensor:
                    optimizer.zero_grad()
                    loss: Tensor = model(own).square().mean()
                    loss.backward()
                    return loss

                with torch.no_grad():
                    losses.append(optimizer.step(closure))
            dist.all_reduce(losses[1])
            assert_equal(losses[1] / world_size, losses[0])
            pair.check()


@case
def buffers_are_those_of_rank_0(rank: int, world_size: int) -> None:
    sharded = shard(nn.Sequential(nn.Linear(WIDTH, 2), nn.BatchNorm1d(2)))
    optimizer = sharded.optimizer(torch.optim.SGD, lr=0.1)
    for _ in range(2):
        sharded(torch.randn(4, WIDTH)).square().mean().backward()  # another batch on each rank
        optimizer.step()
        optimizer.zero_grad()
    mean = _module(sharded)[1].running_mean.clone()
    dist.broadcast(mean, 0)
    assert torch.equal(_module(sharded)[1].running_mean, mean)
    assert _module(sharded)[1].num_batches_tracked == 2


@case
def a_scaler_skips_the_step_on_all_ranks(rank: int, world_size: int) -> None:
    device = torch.get_default_device().type
    for clips in (False, True):
        pair = Pair(rank, world_size)
        scalers = [torch.amp.GradScaler(device, init_scale=4.0) for _ in range(2)]
        for step in range(3):
            x = pair.batch()
            factor = torch.inf if step == 1 and rank == world_size - 1 else 1.0
            for (model, _, optimizer, part), scaler in zip(pair.sides(), scalers, strict=True):
                optimizer.zero_grad()
                of_side = factor if model is pair.sharded or step != 1 else torch.inf
                scaler.scale(model(part(x)).square().mean() * of_side).backward()
                if clips:
                    scaler.unscale_(optimizer)
                    clip = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                    assert clip.isfinite() or step == 1
                scaler.step(optimizer)
                scaler.update()
            assert scalers[0].get_scale() == scalers[1].get_scale()
            pair.check()


@case
def the_state_of_another_shard_is_refused_on_all_ranks(rank: int, world_size: int) -> None:
    pair = Pair(rank, world_size)
    pair.train()
    box = [pair.ours.state_dict()]
    pair.ours.load_state_dict(copy.deepcopy(box[0]))
    dist.broadcast_object_list(box)  # what `torch.save` on rank 0 and `torch.load` on all ranks do
    again = Pair(rank, world_size)
    assert_raises(ValueError, "load each rank's own file", lambda: again.ours.load_state_dict(box[0]))
    own = {key: value for key, value in pair.ours.state_dict().items() if key != "netlayer_shard"}
    assert_raises(ValueError, "does not say of which shard", lambda: again.ours.load_state_dict(own))
    again.train()


@case
def recomputation_inside_the_backward_pass_is_trained(rank: int, world_size: int) -> None:
    class Recomputing(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            x = self[0](x)
            for layer in (self[1], self[2]):
                x = checkpoint(layer, x, use_reentrant=True)
            y: Tensor = self[3](x)
            return y

    pair = Pair(rank, world_size, Recomputing(*net(4)))
    pair.train(3)
    pair.check()


def is_hidden_matrix(name: str, shape: torch.Size) -> bool:
    return len(shape) == 2 and not name.startswith("0.")


def is_other(name: str, shape: torch.Size) -> bool:
    return not is_hidden_matrix(name, shape)


class Halves(torch.optim.Optimizer):
    """A program's own optimiser: signs of a matrix' rows, scaled by its norm; elementwise where a group says so."""

    def __init__(self, params: Any, lr: float, by_matrix: bool = True) -> None:
        super().__init__(params, {"lr": lr, "by_matrix": by_matrix})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    scale = parameter.grad.norm() if group["by_matrix"] else 1.0
                    parameter -= group["lr"] * parameter.grad / scale


@case
def muon_steps_whole_matrices_beside_adamw(rank: int, world_size: int) -> None:
    plain: Any = net(4)
    settings: Any = {"lr": 0.05, "weight_decay": 0.1}
    named = list(plain.named_parameters())
    theirs = [
        torch.optim.Muon([p for n, p in named if is_hidden_matrix(n, p.shape)], **settings),
        torch.optim.AdamW([p for n, p in named if is_other(n, p.shape)], lr=0.01),
    ]

    def build(bucket_bytes: int) -> tuple[ShardedDataParallel, list[torch.optim.Optimizer]]:
        sharded = shard(net(4), whole=is_hidden_matrix, bucket_bytes=bucket_bytes)
        muon = sharded.optimizer(torch.optim.Muon, only=is_hidden_matrix, **settings)
        return sharded, [muon, sharded.optimizer(torch.optim.AdamW, only=is_other, lr=0.01)]

    sharded, ours = build(WIDTH * WIDTH * 8 * 3)
    shapes = [tuple(piece.shape) for group in ours[0].param_groups for piece in group["params"]]
    assert set(shapes) <= {(WIDTH, WIDTH)}
    batches = Pair(rank, world_size)
    for step in range(8):
        x = batches.batch()
        if step == 4:  # other buckets go on
            states = [sharded.full_optimizer_state_dict(optimizer) for optimizer in ours]
            model_state = {name: value.clone() for name, value in sharded.state_dict().items()}
            sharded, ours = build(10_000)
            sharded.load_state_dict(model_state)
            for optimizer, state in zip(ours, states, strict=True):
                sharded.load_full_optimizer_state_dict(optimizer, state)
        plain(x).square().mean().backward()
        sharded(x[rank::world_size]).square().mean().backward()
        if step % 2:
            norms = [nn.utils.clip_grad_norm_(module.parameters(), 0.1) for module in (plain, sharded)]
            assert_equal(norms[1], norms[0])
        for optimizer in (*theirs, *ours):
            optimizer.step()
        for optimizer in (*theirs, *ours):
            optimizer.zero_grad()
        assert_equal(list(sharded.parameters()), list(plain.parameters()))


@case
def adafactor_steps_whole_parameters(rank: int, world_size: int) -> None:
    plain: Any = net(4)
    theirs = torch.optim.Adafactor(plain.parameters(), lr=0.05)
    sharded = shard(net(4), whole=lambda _name, _shape: True, bucket_bytes=700)
    ours = sharded.optimizer(torch.optim.Adafactor, lr=0.05)
    batches = Pair(rank, world_size)
    for _ in range(4):
        x = batches.batch()
        plain(x).square().mean().backward()
        sharded(x[rank::world_size]).square().mean().backward()
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
        assert_equal(list(sharded.parameters()), list(plain.parameters()))
    assert_raises(ValueError, "neither one number nor one an element", lambda: sharded.full_optimizer_state_dict(ours))


@case
def an_optimiser_of_both_kinds_has_whole_matrices(rank: int, world_size: int) -> None:
    plain: Any = net(4)
    named = list(plain.named_parameters())
    matrices = [p for n, p in named if is_hidden_matrix(n, p.shape)]
    others = {"params": [p for n, p in named if is_other(n, p.shape)], "by_matrix": False}
    theirs = Halves([{"params": matrices}, others], lr=0.01)
    sharded = shard(net(4), whole=is_hidden_matrix, bucket_bytes=10_000)
    ours = sharded.optimizer(Halves, options=lambda n, s: {"by_matrix": is_hidden_matrix(n, s)}, lr=0.01)
    batches = Pair(rank, world_size)
    for _ in range(4):
        x = batches.batch()
        plain(x).square().mean().backward()
        sharded(x[rank::world_size]).square().mean().backward()
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
        assert_equal(list(sharded.parameters()), list(plain.parameters()))
    assert_raises(ValueError, "steps the pieces of a matrix otherwise", lambda: sharded.optimizer(Halves, lr=0.1))


@case
def several_optimizers_step_in_turns(rank: int, world_size: int) -> None:
    plain: Any = net(4)
    named = list(plain.named_parameters())
    picks = [is_hidden_matrix, is_other]
    theirs = [torch.optim.Adam([p for n, p in named if pick(n, p.shape)], lr=0.05) for pick in picks]
    sharded = shard(net(4), bucket_bytes=400)
    ours = [sharded.optimizer(torch.optim.Adam, only=pick, lr=0.05) for pick in picks]
    batches = Pair(rank, world_size)
    for step in range(8):
        x = batches.batch()
        plain(x).square().mean().backward()
        sharded(x[rank::world_size]).square().mean().backward()
        for index in ((0, 1), (1,), (0,), (1, 0))[step % 4]:
            for optimizers in (theirs, ours):
                optimizers[index].step()
                optimizers[index].zero_grad()
            if step == 4:  # a look between the two
                assert_equal(list(sharded.parameters()), list(plain.parameters()))
        assert_equal(list(sharded.parameters()), list(plain.parameters()))


@case
def a_mesh_of_one_dimension_is_a_group(rank: int, world_size: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (world_size, 1), mesh_dim_names=("dp", "tp"))
    assert shard(net(), group=mesh["dp"]).gather_comm.world_size == world_size
    assert_raises(ValueError, r'give the one that shards, such as mesh\["dp"\]', lambda: _wrapped(mesh))


def _module(sharded: ShardedDataParallel) -> Any:
    return sharded.module


def _wrapped(group: Any) -> ShardedDataParallel:
    return shard(net(), group=group)


@case
def random_programs_see_what_plain_torch_shows(rank: int, world_size: int) -> None:
    for seed in range(20):
        _run_program(rank, world_size, seed)


@case
def random_programs_see_the_same_in_stage_3(rank: int, world_size: int) -> None:
    for seed in range(100, 112):
        _run_program(rank, world_size, seed, stage=3)


def _run_program(  # noqa: C901 - one branch a call
    rank: int, world_size: int, seed: int, stage: Literal[1, 3] = 1
) -> None:
    """The same random calls on both sides and on every rank; whatever one can see is compared where it is seen."""
    chance = random.Random(seed)
    kind = chance.choice([torch.optim.AdamW, torch.optim.SGD])
    pair = Pair(rank, world_size, net(chance.randint(1, 5)), kind, stage, lr=0.05)
    calls = ["backward", "step", "read", "write", "copy", "save", "load", "evaluate", "clip", "clear", "layer"]
    has_gradients = False
    for number in range(chance.randint(4, 14)):
        call, layer = chance.choice(calls), chance.randrange(len(pair.plain))
        if call == "backward":
            pair.backward()
            has_gradients = True
        elif call == "step":
            if not has_gradients:
                pair.backward()
                has_gradients = True
            pair.step()
        elif call == "write":
            for module in (pair.plain, pair.inner):
                module[layer][0].weight.data.mul_(0.9)
        elif call == "copy":
            assert_equal(list(copy.deepcopy(pair.inner).parameters()), list(pair.plain.parameters()))
        elif call == "save":
            assert_equal(dict(pair.inner.state_dict()), dict(pair.plain.state_dict()))
        elif call == "load":
            state = {name: value * 0.9 for name, value in pair.plain.state_dict().items()}
            pair.plain.load_state_dict(state)
            pair.inner.load_state_dict(state)
        elif call == "evaluate" and (stage == 3 or rank == number % world_size):
            with torch.no_grad():
                x = torch.ones(2, WIDTH, dtype=torch.float64)
                assert_equal(pair.sharded(x), pair.plain(x))
        elif call == "clip" and has_gradients:
            norms = [nn.utils.clip_grad_norm_(module.parameters(), 0.05) for module in (pair.plain, pair.inner)]
            assert_equal(norms[1], norms[0])
        elif call == "clear" and has_gradients:
            for module in (pair.plain, pair.inner):
                module[layer][0].bias.grad = None
        elif call == "layer":
            assert_equal(pair.inner[layer][0].weight.norm(), pair.plain[layer][0].weight.norm())
        elif call == "read":
            pair.check()
    pair.check()

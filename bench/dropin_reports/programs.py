"""Programs of the reports: each trains on one side, and returns the tensors that show what its report is about."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.dropin_reports.sides import STEPS, WIDTH, Side, net, train


def plain_training(side: Side) -> list[Tensor]:
    model = side.wrap(net())
    return train(side, model, side.optimizer(model, torch.optim.AdamW, lr=0.01))


def first_step_is_of_all_ranks(side: Side) -> list[Tensor]:
    model = side.wrap(net())
    return train(side, model, side.optimizer(model, torch.optim.SGD, lr=1.0), steps=1)


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = net(2), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.body(x))
        return y


def two_forward_passes_with_batch_norm(side: Side) -> list[Tensor]:
    model = side.wrap(_Normed())
    optimizer = side.optimizer(model, torch.optim.SGD, lr=0.1)
    for _ in range(STEPS):
        real, fake = side.batch(whole=True), side.batch(whole=True)  # the same on all ranks: so are the statistics
        (model(real).square().mean() - model(fake).tanh().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.values([*model.parameters(), *model.buffers()])


def buffers_that_are_assigned_anew(side: Side) -> list[Tensor]:
    class Drifting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net(2)
            self.shift: Tensor
            self.register_buffer("shift", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.body(x) + self.shift
            self.shift = self.shift + side.rank  # rank 0 adds nothing, and all are to have what it has
            return y

    model = side.wrap(Drifting())
    return train(side, model, side.optimizer(model, torch.optim.SGD, lr=0.1))


class _WithUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.never = net(2), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.used(x)
        return y


def unused_parameters(side: Side) -> list[Tensor]:
    torch.manual_seed(5)
    model = side.wrap(_WithUnused())
    return train(side, model, side.optimizer(model, torch.optim.AdamW, lr=0.01, weight_decay=0.1))


def weight_decay_without_gradients(side: Side) -> list[Tensor]:
    torch.manual_seed(5)
    model = side.wrap(_WithUnused())
    optimizer = side.optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    return train(side, model, optimizer, steps=3)


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches, self.turn = nn.ModuleList([net(1, 4), net(1, 5)]), 0

    def forward(self, x: Tensor) -> Tensor:
        self.turn += 1
        y: Tensor = self.branches[self.turn % 3 == 0](x)
        return y


def branches_that_take_turns(side: Side) -> list[Tensor]:
    model = side.wrap(_Branches())
    return train(side, model, side.optimizer(model, torch.optim.Adam, lr=0.01))


def a_copy_as_moving_average(side: Side) -> list[Tensor]:
    model = side.wrap(net())
    average = copy.deepcopy(model)

    @torch.no_grad()
    def follow(_step: int) -> None:
        for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(parameter, 0.1)

    train(side, model, side.optimizer(model, torch.optim.AdamW, lr=0.01), after=follow)
    return side.values([*average.parameters(), average(torch.ones(2, WIDTH))])


def averaged_model_of_torch(side: Side) -> list[Tensor]:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = side.wrap(net())
    average = AveragedModel(side.inner(model), multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    follow: Any = lambda _step: average.update_parameters(side.inner(model))  # noqa: E731
    train(side, model, side.optimizer(model, torch.optim.AdamW, lr=0.01), after=follow)
    return side.values([average(torch.ones(2, WIDTH))])


def parameters_written_by_hand(side: Side) -> list[Tensor]:
    model = side.wrap(net())

    @torch.no_grad()
    def shrink(_step: int) -> None:
        for parameter in side.inner(model).parameters():
            parameter.mul_(0.99)

    return train(side, model, side.optimizer(model, torch.optim.AdamW, lr=0.01), after=shrink)


def masks_on_weights(side: Side) -> list[Tensor]:
    model = side.wrap(net())
    mask = (torch.arange(WIDTH * WIDTH) % 2).view(WIDTH, WIDTH).float()

    def apply(_step: int) -> None:
        for layer in side.inner(model):
            layer[0].weight.data.mul_(mask)

    return train(side, model, side.optimizer(model, torch.optim.AdamW, lr=0.01), after=apply)


def clipping_by_torch(side: Side) -> list[Tensor]:
    model, norms = side.wrap(net()), list[Tensor]()
    clip = lambda _step: norms.append(side.whole(nn.utils.clip_grad_norm_(model.parameters(), 0.01)))  # noqa: E731
    values = train(side, model, side.optimizer(model, torch.optim.SGD, lr=0.5), before=clip)
    return [*norms, *values]


def gradients_set_to_none_at_first(side: Side) -> list[Tensor]:
    model = side.wrap(net())

    def keep(step: int) -> None:
        if step < 4:
            for parameter in side.inner(model)[2].parameters():
                parameter.grad = None

    return train(side, model, side.optimizer(model, torch.optim.AdamW, lr=0.01), before=keep)


def frozen_before_wrapping(side: Side) -> list[Tensor]:
    module = net()
    module[0].requires_grad_(False)
    model = side.wrap(module)
    if side.is_ours:
        return train(side, model, side.optimizer(model, torch.optim.AdamW, lr=0.01))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return train(side, model, torch.optim.AdamW(trained, lr=0.01))


def unfrozen_after_some_steps(side: Side) -> list[Tensor]:
    module = net()
    module[0].requires_grad_(False)
    model = side.wrap(module)
    optimizer = side.optimizer(model, torch.optim.SGD, lr=0.1)
    thaw = lambda step: None if step != 3 else side.inner(model)[0].requires_grad_(True)  # noqa: E731
    return train(side, model, optimizer, after=thaw)


def names_in_checkpoints(side: Side) -> list[Tensor]:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    names = list(get_model_state_dict(side.wrap(net())))
    return [torch.tensor([float(names == list(net().state_dict()))])]


def _shared_folder(side: Side) -> str:
    box = [tempfile.mkdtemp()]
    if side.ranks > 1:
        dist.broadcast_object_list(box)
    return box[0]


def a_distributed_checkpoint_goes_on(side: Side) -> list[Tensor]:
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = side.wrap(net())
    optimizer = side.optimizer(model, torch.optim.AdamW, lr=0.01)
    train(side, model, optimizer, steps=5)
    folder = _shared_folder(side)
    options: Any = {"no_dist": True} if side.ranks == 1 else {}
    model_state, state = get_state_dict(model, optimizer)
    state_dict_saver.save({"model": model_state, "optimizer": state}, checkpoint_id=folder, **options)
    model = side.wrap(net(seed=9), bucket_bytes=300) if side.is_ours else side.wrap(net(seed=9))
    optimizer = side.optimizer(model, torch.optim.AdamW, lr=0.5)
    model_state, state = get_state_dict(model, optimizer)
    loaded: dict[str, Any] = {"model": model_state, "optimizer": state}
    state_dict_loader.load(loaded, checkpoint_id=folder, **options)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    return train(side, model, optimizer, steps=5)


def names_of_optimizer_states(side: Side) -> list[Tensor]:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = side.wrap(net())
    optimizer = side.optimizer(model, torch.optim.AdamW, lr=0.01)
    train(side, model, optimizer, steps=2)
    state: Any = get_optimizer_state_dict(model, optimizer)
    names = sorted(name for name, _ in net().named_parameters())
    return [torch.tensor([float(sorted(state["state"]) == names)])]


def an_optimizer_state_for_one_rank(side: Side) -> list[Tensor]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    model = side.wrap(net())
    optimizer = side.optimizer(model, torch.optim.AdamW, lr=0.01)
    train(side, model, optimizer, steps=5)
    model_state, state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    alone = Side("plain")
    alone.generator = side.generator
    module = net(seed=9)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5)
    copies = copy.deepcopy((model_state, state))
    set_state_dict(module, optimizer, model_state_dict=copies[0], optim_state_dict=copies[1])
    return train(alone, module, optimizer, steps=5)


def a_plain_state_is_loaded(side: Side) -> list[Tensor]:
    model = side.wrap(net(seed=9))
    side.inner(model).load_state_dict(net().state_dict())
    return train(side, model, side.optimizer(model, torch.optim.AdamW, lr=0.01))


def tied_weights(side: Side) -> list[Tensor]:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.body, self.last = nn.Linear(WIDTH, WIDTH), net(1), nn.Linear(WIDTH, WIDTH)
            self.last.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.last(self.body(self.first(x)))
            return y

    torch.manual_seed(5)
    model = side.wrap(Tied())
    values = train(side, model, side.optimizer(model, torch.optim.AdamW, lr=0.01))
    return [*values, *side.values([side.inner(model).last.weight])]


class _Recomputing(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.first, self.body, self.times = net(1, 4), net(2), times

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(self.body, x, use_reentrant=True)
        return x


def reentrant_recomputation(side: Side) -> list[Tensor]:
    model = side.wrap(_Recomputing(1))
    return train(side, model, side.optimizer(model, torch.optim.AdamW, lr=0.01))


def reentrant_recomputation_of_one_block_twice(side: Side) -> list[Tensor]:
    model = side.wrap(_Recomputing(2))
    return train(side, model, side.optimizer(model, torch.optim.AdamW, lr=0.01))


def _accumulate(side: Side, held_back: Callable[[Any, bool], contextlib.AbstractContextManager[Any]]) -> list[Tensor]:
    model = side.wrap(net())
    optimizer = side.optimizer(model, torch.optim.AdamW, lr=0.01)
    for _ in range(STEPS):
        for micro in range(4):
            with held_back(model, micro < 3):
                (model(side.batch()).square().mean() / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.values(model.parameters())


def accumulation_under_no_sync(side: Side) -> list[Tensor]:
    def held_back(model: Any, is_early: bool) -> contextlib.AbstractContextManager[Any]:
        if side.name == "fsdp2":
            model.set_requires_gradient_sync(not is_early)
        has_no_sync = (side.is_ours or side.name == "ddp") and is_early
        return model.no_sync() if has_no_sync else contextlib.nullcontext()

    return _accumulate(side, held_back)


def accumulation_by_a_helper_for_ddp(side: Side) -> list[Tensor]:
    reduced = list[float]()

    def held_back(model: Any, is_early: bool) -> contextlib.AbstractContextManager[Any]:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model.require_backward_grad_sync = not is_early
        elif side.name != "plain":
            reduced.append(1.0)
        return contextlib.nullcontext()

    values = _accumulate(side, held_back)
    return [*values, torch.tensor([sum(reduced)])]  # last: passes on which the helper had no effect


def several_forward_passes_then_several_backward(side: Side) -> list[Tensor]:
    model = side.wrap(net())
    optimizer = side.optimizer(model, torch.optim.AdamW, lr=0.01)
    for _ in range(STEPS):
        losses = [model(side.batch()).square().mean() for _ in range(2)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.values(model.parameters())


def a_method_other_than_forward(side: Side) -> list[Tensor]:
    class Encoding(_WithUnused):
        def encode(self, x: Tensor) -> Tensor:
            y: Tensor = self.never(self.used(x))
            return y

    torch.manual_seed(5)
    model = side.wrap(Encoding())
    optimizer = side.optimizer(model, torch.optim.AdamW, lr=0.01)
    for _ in range(STEPS):
        side.inner(model).encode(side.batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.values(model.parameters())


def uneven_evaluation(side: Side) -> list[Tensor]:
    model = side.wrap(net())

    @torch.no_grad()
    def evaluate(_step: int) -> None:
        for _ in range(1 + side.rank):
            model(torch.ones(2, WIDTH))

    return train(side, model, side.optimizer(model, torch.optim.AdamW, lr=0.01), after=evaluate)


def uneven_training_under_join(side: Side) -> list[Tensor]:
    from torch.distributed.algorithms.join import Join

    model = side.wrap(net())
    optimizer = side.optimizer(model, torch.optim.SGD, lr=0.1)
    is_plain = side.name == "plain"
    with contextlib.nullcontext() if is_plain else Join([model]):
        for step in range(5 if is_plain else 4 + side.rank):
            x = side.batch(whole=True)  # the same on all ranks; one that has joined gives zeros, which is half the mean
            (model(x).square().mean() * (0.5 if is_plain and step == 4 else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return side.values(model.parameters())


def an_infinity_on_one_rank(side: Side) -> list[Tensor]:
    model, scaler = side.wrap(net()), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = side.optimizer(model, torch.optim.SGD, lr=0.1)
    for step in range(STEPS):
        loss = model(side.batch()).square().mean()
        if step == 3 and side.rank == side.ranks - 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [*side.values(model.parameters()), torch.tensor(scaler.get_scale())]


def a_scaler_where_ranks_hold_nothing(side: Side) -> list[Tensor]:
    torch.manual_seed(5)
    model, scaler = side.wrap(nn.Linear(1, 1, bias=False)), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = side.optimizer(model, torch.optim.SGD, lr=0.1)
    for _ in range(STEPS):
        scaler.scale(model(side.batch()[:, :1]).square().mean()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [*side.values(model.parameters()), torch.tensor(scaler.get_scale())]


def weight_decay_by_shape(side: Side) -> list[Tensor]:
    model = side.wrap(net())
    if side.is_ours:
        options = lambda _name, shape: {"weight_decay": 0.5 if len(shape) > 1 else 0.0}  # noqa: E731
        return train(side, model, model.optimizer(torch.optim.AdamW, options=options, lr=0.01))
    parts = [[p for p in model.parameters() if (p.ndim > 1) is is_matrix] for is_matrix in (True, False)]
    groups = [{"params": parts[0], "weight_decay": 0.5}, {"params": parts[1], "weight_decay": 0.0}]
    return train(side, model, torch.optim.AdamW(groups, lr=0.01))


def adafactor(side: Side) -> list[Tensor]:
    model = side.wrap(net())
    return train(side, model, side.optimizer(model, torch.optim.Adafactor, lr=0.01))


def lbfgs(side: Side) -> list[Tensor]:
    model = side.wrap(net())
    optimizer = side.optimizer(model, torch.optim.LBFGS, lr=0.1)
    x = side.batch()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return side.values(model.parameters())


def a_closure(side: Side) -> list[Tensor]:
    model = side.wrap(net())
    optimizer = side.optimizer(model, torch.optim.AdamW, lr=0.01)
    for _ in range(STEPS):
        x = side.batch()

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)
    return side.values(model.parameters())


def _is_matrix(_name: str, shape: Sequence[int]) -> bool:
    return len(shape) == 2


def _is_vector(_name: str, shape: Sequence[int]) -> bool:
    return len(shape) < 2


def muon_beside_adamw(side: Side) -> list[Tensor]:
    model = side.wrap(net(), whole=_is_matrix)
    optimizers = [
        side.optimizer(model, torch.optim.Muon, only=_is_matrix, lr=0.02),
        side.optimizer(model, torch.optim.AdamW, only=_is_vector, lr=0.01),
    ]
    for _ in range(STEPS):
        model(side.batch()).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return side.values(model.parameters())


class _Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = net(1, 4), net(1, 5)

    def forward(self, x: Tensor, trains_generator: bool) -> Tensor:
        if trains_generator:
            y: Tensor = self.generator(x)
            return y.square().mean()
        score: Tensor = self.critic(x)
        return (score - 1).square().mean()


def _begins_with(prefix: str, name: str, _shape: Sequence[int]) -> bool:
    return name.startswith(prefix)


def adversaries_that_take_turns(side: Side) -> list[Tensor]:
    model = side.wrap(_Adversaries())
    optimizers = [
        side.optimizer(model, torch.optim.Adam, only=functools.partial(_begins_with, prefix), lr=0.01)
        for prefix in ("generator", "critic")
    ]
    for step in range(STEPS):
        model(side.batch(), step % 3 == 0).backward()
        optimizer = optimizers[0 if step % 3 == 0 else 1]
        optimizer.step()
        optimizer.zero_grad()
    return side.values(model.parameters())


def two_optimizers_step_together(side: Side) -> list[Tensor]:
    model = side.wrap(net())
    optimizers = [
        side.optimizer(model, torch.optim.AdamW, only=_is_matrix, lr=0.01),
        side.optimizer(model, torch.optim.SGD, only=_is_vector, lr=0.1),
    ]
    for _ in range(STEPS):
        model(side.batch()).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return side.values(model.parameters())


def a_compiled_model_is_compiled_once(side: Side) -> list[Tensor]:
    torch._dynamo.reset()
    model = side.wrap(net())
    optimizer = side.optimizer(model, torch.optim.AdamW, lr=0.01)
    compiled: Any = torch.compile(model, backend="eager")
    counts: list[int] = []
    for _ in range(STEPS):
        compiled(side.batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return [*side.values(model.parameters()), torch.tensor([float(counts[1] == counts[-1])])]


def the_model_is_pickled(side: Side) -> list[Tensor]:
    model = side.wrap(net())
    train(side, model, side.optimizer(model, torch.optim.AdamW, lr=0.01), steps=3)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copied = torch.load(file, weights_only=False)
    return side.values([copied(torch.ones(2, WIDTH))])


def a_penalty_on_kernels(side: Side) -> list[Tensor]:
    class Convolving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel, self.body = nn.Conv1d(1, 2, 3), net(1)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.kernel(self.body(x).unsqueeze(1))
            return y

    torch.manual_seed(5)
    model = side.wrap(Convolving())
    optimizer = side.optimizer(model, torch.optim.AdamW, lr=0.01)
    for _ in range(STEPS):
        penalty = side.inner(model).kernel.weight.sum(dim=(1, 2)).square().sum()
        (0.1 * penalty + model(side.batch()).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.values(model.parameters())


def hooks_that_scale_gradients(side: Side) -> list[Tensor]:
    module = net()
    for parameter in module[1].parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]
    model = side.wrap(module)
    return train(side, model, side.optimizer(model, torch.optim.SGD, lr=0.5))

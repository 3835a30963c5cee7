"""Public reports of data parallel training that goes wrong, each as a small program: DDP, FSDP2 and our wrapper.

    python -m bench.dropin_reports --tsv FILE [--cases NAME ...] [--sides ddp fsdp2 ours]

Each program trains ten steps or so in float32 on two gloo ranks and shows what the report is about: losses, parameters,
norms, names. What it shows is compared with plain torch on the whole batch, which every rank computes. A side is
`equal` within 1e-6, or `differs` by so much, or raises with these words, or does not end. Each runs in processes of its
own, for one that fails leaves its peer waiting. The reports' addresses say what others met; the programs are ours.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import csv
import faulthandler
import functools
import io
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from collectives import ShardedDataParallel

WIDTH = 8
STEPS = 10
SIDES = ("ddp", "fsdp2", "ours")
_LIMIT_S = 60.0
_GRACE_S = 4.0
_TOLERANCE = 1e-6
_MESSAGE_CHARS = 240


class Side:
    """One way to train: how a module is wrapped, stepped and looked into."""

    def __init__(self, name: str, rank: int = 0, ranks: int = 1) -> None:
        self.name, self.rank, self.ranks = name, rank, ranks
        self._generator = torch.Generator().manual_seed(7)

    def wrap(self, module: nn.Module, **ours: Any) -> Any:
        """Return the module that the loop calls. Keyword arguments go to our wrapper alone."""
        if self.name == "ddp":
            return nn.parallel.DistributedDataParallel(module)
        if self.name == "fsdp2":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (self.ranks,))
            layers = [part for child in module.children() for part in _layers_of(child)]
            for layer in layers:
                if any(True for _ in layer.parameters()):
                    fully_shard(layer, mesh=mesh)
            return fully_shard(module, mesh=mesh)
        return ShardedDataParallel(module, **ours) if self.name == "ours" else module

    def optimizer(self, model: Any, kind: Any, only: Callable[[str, Any], bool] | None = None, **settings: Any) -> Any:
        """Make an optimiser of all parameters, or of those that `only` picks by name and shape."""
        if self.name == "ours":
            return model.optimizer(kind, only=only, **settings)
        named = [(name.removeprefix("module."), parameter) for name, parameter in model.named_parameters()]
        return kind([p for name, p in named if only is None or only(name, p.shape)], **settings)

    def inner(self, model: Any) -> Any:
        """The module behind the wrapper."""
        return model.module if self.name in ("ddp", "ours") else model

    def batch(self, whole: bool = False) -> Tensor:
        """Return this rank's part of the next batch, or all of it."""
        x = torch.randn(8, WIDTH, generator=self._generator)
        return x if whole else x[self.rank :: self.ranks]

    def values(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return whole copies of the tensors as they are now."""
        return [self.whole(tensor).detach().clone() for tensor in tensors]

    def whole(self, tensor: Any) -> Tensor:
        """Return the full tensor of a DTensor, and any other as it is."""
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def _layers_of(child: nn.Module) -> list[nn.Module]:
    return list(child) if isinstance(child, nn.ModuleList) else [child]


def net(depth: int = 3, seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth)])


def train(
    side: Side,
    model: Any,
    optimizer: Any,
    steps: int = STEPS,
    before: Callable[[int], None] = lambda _: None,
    after: Callable[[int], None] = lambda _: None,
    whole: bool = False,
) -> list[Tensor]:
    """Parameters after these steps; `before` runs between backward and step, `after` behind the step."""
    for step in range(steps):
        model(side.batch(whole)).square().mean().backward()
        before(step)
        optimizer.step()
        optimizer.zero_grad()
        after(step)
    return side.values(model.parameters())


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
    if side.name == "ours":
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
    model = side.wrap(net(seed=9), bucket_bytes=300) if side.name == "ours" else side.wrap(net(seed=9))
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
    alone._generator = side._generator
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
        has_no_sync = side.name in ("ddp", "ours") and is_early
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
    if side.name == "ours":
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


@dataclass(frozen=True)
class Report:
    """A public report, and the program that stands for it."""

    address: str
    situation: str
    case: Callable[[Side], list[Tensor]]


_GITHUB = "https://github.com/"
REPORTS = [
    Report(f"{_GITHUB}{address}", situation, case)
    for address, situation, case in (
        ("pytorch/pytorch/issues/98501", "gradients of FSDP are not those of DDP", plain_training),
        ("verl-project/verl/issues/7493", "gradients of other ranks do not count", first_step_is_of_all_ranks),
        (
            "pytorch/pytorch/issues/110363",
            "two forward passes through a batch norm before one backward pass",
            two_forward_passes_with_batch_norm,
        ),
        (
            "pytorch/pytorch/issues/175024",
            "a critic with a batch norm sees real and made-up inputs before one backward pass",
            two_forward_passes_with_batch_norm,
        ),
        (
            "pytorch/pytorch/issues/63916",
            "buffers that forward() assigns anew differ by rank",
            buffers_that_are_assigned_anew,
        ),
        ("pytorch/pytorch/issues/68862", "parameters that are never used", unused_parameters),
        (
            "facebookresearch/moco/issues/14",
            "weight decay of parameters without gradients",
            weight_decay_without_gradients,
        ),
        ("pytorch/pytorch/issues/57473", "parameters that only some steps use", branches_that_take_turns),
        (
            "pytorch/pytorch/issues/82070",
            "copy.deepcopy of the wrapped model for a moving average",
            a_copy_as_moving_average,
        ),
        (
            "facebookresearch/fairscale/issues/789",
            "torch's AveragedModel of the module during training",
            averaged_model_of_torch,
        ),
        ("pytorch/pytorch/issues/117742", "parameters written by hand between steps", parameters_written_by_hand),
        ("pytorch/pytorch/issues/148434", "masks of a weight's shape applied to it", masks_on_weights),
        ("pytorch/pytorch/issues/170862", "torch's clip_grad_norm_ returns the norm of a shard", clipping_by_torch),
        ("pytorch/pytorch/issues/72548", "clipping by the norm of sharded gradients", clipping_by_torch),
        (
            "facebookresearch/fairscale/issues/605",
            ".grad = None of a layer for the first steps",
            gradients_set_to_none_at_first,
        ),
        ("huggingface/accelerate/issues/807", "a layer is frozen before wrapping", frozen_before_wrapping),
        ("pytorch/pytorch/issues/104148", "a layer is unfrozen during training", unfrozen_after_some_steps),
        ("NVIDIA/apex/issues/647", "names in checkpoints begin with module.", names_in_checkpoints),
        (
            "huggingface/accelerate/issues/3971",
            "an optimiser's distributed checkpoint cannot be loaded: the step is missing",
            a_distributed_checkpoint_goes_on,
        ),
        ("pytorch/pytorch/issues/124546", "names of parameters in an optimiser's state", names_of_optimizer_states),
        (
            "facebookresearch/fairscale/pull/537",
            "an optimiser's state is loaded on another number of ranks",
            an_optimizer_state_for_one_rank,
        ),
        (
            "pytorch/pytorch/issues/136336",
            "a plain state dict is loaded into the wrapped module",
            a_plain_state_is_loaded,
        ),
        ("pytorch/torchtitan/issues/1524", "first and last layer share a weight", tied_weights),
        (
            "huggingface/transformers/issues/23018",
            "checkpoint(use_reentrant=True) of each block",
            reentrant_recomputation,
        ),
        (
            "allenai/longformer/issues/63",
            "checkpoint(use_reentrant=True) of one block twice in a pass",
            reentrant_recomputation_of_one_block_twice,
        ),
        (
            "huggingface/transformers/pull/34645",
            "accumulation without a reduction each pass",
            accumulation_under_no_sync,
        ),
        (
            "NVIDIA/cosmos-framework/issues/161",
            "a helper that holds reductions back asks isinstance(model, DistributedDataParallel); it has no effect",
            accumulation_by_a_helper_for_ddp,
        ),
        (
            "facebookresearch/fairscale/issues/918",
            "several forward passes, then their backward passes",
            several_forward_passes_then_several_backward,
        ),
        (
            "pytorch/pytorch/issues/101335",
            "a method of the module other than forward() is called",
            a_method_other_than_forward,
        ),
        ("PrimeIntellect-ai/prime-rl/pull/2636", "ranks evaluate different numbers of batches", uneven_evaluation),
        ("pytorch/pytorch/issues/33148", "ranks train different numbers of batches (Join)", uneven_training_under_join),
        (
            "pytorch/pytorch/pull/115710",
            "GradScaler: an infinity on one rank skips its step alone",
            an_infinity_on_one_rank,
        ),
        (
            "pytorch/pytorch/issues/99174",
            "GradScaler: a rank holds no part of any parameter",
            a_scaler_where_ranks_hold_nothing,
        ),
        ("pytorch/pytorch/issues/101343", "weight decay of matrices alone", weight_decay_by_shape),
        ("pytorch/pytorch/issues/109581", "Adafactor over shards", adafactor),
        ("NVIDIA/Megatron-LM/issues/5533", "Muon over shards, beside AdamW", muon_beside_adamw),
        (
            "pytorch/pytorch/issues/132068",
            "generator and critic in one model take turns, an optimiser each",
            adversaries_that_take_turns,
        ),
        ("deepspeedai/DeepSpeed/issues/1229", "two optimisers over one model", two_optimizers_step_together),
        ("pytorch/pytorch/pull/28910", "optimizer.step(closure)", a_closure),
        ("NeuroDiffGym/neurodiffeq/issues/159", "LBFGS, which calls its closure several times", lbfgs),
        ("pytorch/pytorch/issues/134954", "a compiled model is compiled again", a_compiled_model_is_compiled_once),
        ("pytorch/pytorch/issues/76927", "torch.save of the wrapped model", the_model_is_pickled),
        ("pytorch/tutorials/issues/2610", "a kernel's dimensions outside of forward()", a_penalty_on_kernels),
        (
            "facebookresearch/fairscale/issues/1101",
            "hooks on parameters that change gradients",
            hooks_that_scale_gradients,
        ),
    )
]


def outcome(case: Callable[[Side], list[Tensor]], name: str, rank: int, ranks: int) -> str:
    """Run the program on one side, and compare this rank's tensors with plain torch's."""
    expected = case(Side("plain"))
    try:
        actual = case(Side(name, rank, ranks))
    except Exception as exc:  # noqa: BLE001 - what is asked for
        message = " ".join(str(exc).split())
        return f"raises {type(exc).__name__}: {message[:_MESSAGE_CHARS]}"
    off = max(
        (float((a.double() - b.double()).abs().max()) for a, b in zip(actual, expected, strict=True) if a.numel()),
        default=0.0,
    )
    return "equal" if off < _TOLERANCE else f"differs by {off:.1e}"


def _run_rank(case: Callable[[Side], list[Tensor]], name: str, rank: int, ranks: int, folder: str) -> None:
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    log = os.open(Path(folder, f"log{rank}"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    store = f"file://{Path(folder, 'store')}"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=_LIMIT_S / 2)
    )
    text = outcome(case, name, rank, ranks)
    Path(folder, f"outcome{rank}").write_text(text)
    os._exit(0)  # a peer that waits is of no more use


def run(report: Report, name: str, ranks: int = 2) -> str:
    """Run a report's program on one side, and return the outcome of the rank that fares worst."""
    context = multiprocessing.get_context("fork")  # torch is imported once
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_run_rank, args=(report.case, name, rank, ranks, folder)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        end_s = time.monotonic() + _LIMIT_S
        while any(process.is_alive() for process in processes) and time.monotonic() < end_s:
            if not all(process.is_alive() for process in processes):  # the others may wait for what has failed
                end_s = min(end_s, time.monotonic() + _GRACE_S)
            time.sleep(0.05)
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
        files = [Path(folder, f"outcome{rank}") for rank in range(ranks)]
        outcomes = [file.read_text() for file in files if file.exists()]
    if not outcomes:
        return "does not end"
    # One that waits for a peer that has failed says so after a while, or never: that is no outcome of its own.
    waits = "does not end" if len(outcomes) < ranks and set(outcomes) == {"equal"} else ""
    return waits or max(outcomes, key=lambda text: (text != "equal", "imed out" not in text, "by peer" not in text))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tsv", type=Path, help="write the table there")
    parser.add_argument("--cases", nargs="*", help="names of programs; all by default")
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=list(SIDES))
    options = parser.parse_args(arguments)
    reports = [report for report in REPORTS if not options.cases or report.case.__name__ in options.cases]
    if not reports:
        names = ", ".join(dict.fromkeys(report.case.__name__ for report in REPORTS))
        parser.error(f"--cases {' '.join(options.cases)}: no such programs; there are {names}")
    known: dict[tuple[str, str], str] = {}
    rows = []
    for report in reports:
        row = [report.address, report.situation]
        for side in options.sides:
            key = report.case.__name__, side
            if key not in known:
                known[key] = run(report, side)
            row.append(known[key])
        rows.append([*row, report.case.__name__])
        sys.stdout.write("\t".join(rows[-1]) + "\n")
        sys.stdout.flush()
    if options.tsv is not None:
        with options.tsv.open("w", newline="") as file:
            writer = csv.writer(file, delimiter="\t", lineterminator="\n")
            writer.writerow(["address", "situation", *options.sides, "program"])
            writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

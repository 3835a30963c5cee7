"""Ways to train a program of a report, the net and the loop that most programs train."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from collectives import Reshard, ShardedDataParallel

WIDTH = 8
STEPS = 10
SIDES = ("ddp", "fsdp2", "ours", "ours_zero2", "ours_zero3")
_STAGES = {"ours": 1, "ours_zero2": 2, "ours_zero3": 3}


class Side:
    """One way to train: how a module is wrapped, stepped and looked into."""

    def __init__(self, name: str, rank: int = 0, ranks: int = 1) -> None:
        self.name, self.rank, self.ranks = name, rank, ranks
        self.is_ours = name in _STAGES
        self.generator = torch.Generator().manual_seed(7)

    def wrap(self, module: nn.Module, **ours: Any) -> Any:
        """Return the module that the loop calls. Keyword arguments go to our wrapper alone."""
        if self.name == "ddp":
            return nn.parallel.DistributedDataParallel(module)
        layers = [part for child in module.children() for part in _layers_of(child)]
        layers = [layer for layer in layers if any(True for _ in layer.parameters())]
        if self.name == "fsdp2":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (self.ranks,))
            for layer in layers:
                fully_shard(layer, mesh=mesh)
            return fully_shard(module, mesh=mesh)
        if not self.is_ours:
            return module
        stage = _STAGES[self.name]
        if stage == 3:
            # What FSDP2 shards, or the module itself: the smallest that can be freed between its uses.
            ours = {"units": layers or [module]} | ours
        return ShardedDataParallel(module, reshard=Reshard.of_stage(stage), **ours)

    def optimizer(self, model: Any, kind: Any, only: Callable[[str, Any], bool] | None = None, **settings: Any) -> Any:
        """Make an optimiser of all parameters, or of those that `only` picks by name and shape."""
        if self.is_ours:
            return model.optimizer(kind, only=only, **settings)
        named = [(name.removeprefix("module."), parameter) for name, parameter in model.named_parameters()]
        return kind([p for name, p in named if only is None or only(name, p.shape)], **settings)

    def inner(self, model: Any) -> Any:
        """The module behind the wrapper."""
        return model.module if self.is_ours or self.name == "ddp" else model

    def batch(self, whole: bool = False) -> Tensor:
        """Return this rank's part of the next batch, or all of it."""
        x = torch.randn(8, WIDTH, generator=self.generator)
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


def train_step(side: Side, model: Any, optimizer: Any) -> None:
    model(side.batch()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(
    side: Side,
    model: Any,
    optimizer: Any,
    steps: int = STEPS,
    before: Callable[[int], None] = lambda _: None,
    after: Callable[[int], None] = lambda _: None,
    whole: bool = False,
) -> list[Tensor]:
    """Parameters after these steps; `before` runs between backward and step, `after` after the step."""
    for step in range(steps):
        model(side.batch(whole)).square().mean().backward()
        before(step)
        optimizer.step()
        optimizer.zero_grad()
        after(step)
    return side.values(model.parameters())

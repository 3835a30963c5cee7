"""Random modules in random orders of calls, beside plain torch: what a program can see is the same wherever it looks.

A state machine of Hypothesis runs on every rank at once, with the same draws: they are derived from the test alone, and
what one rank finds wrong all ranks hear of, so that all of them go on or shrink together.
"""

from __future__ import annotations

import copy
import functools
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch import Tensor, nn

from collectives.sharded.prepare import open_groups
from tests.collectives.harness import Case
from tests.collectives.settings import shard

MACHINE_CASES: list[Case] = []
WIDTH = 4


def case(function: Case) -> Case:
    MACHINE_CASES.append(function)
    return function


class Block(nn.Module):
    """One of several kinds of layer; `kind` 3 uses the weight of the block before it, 4 is used in odd passes only."""

    def __init__(self, kind: int, before: Block | None) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH, bias=kind != 1)
        self.norm = nn.LayerNorm(WIDTH) if kind == 2 else nn.Identity()
        if kind == 3 and before is not None:
            self.linear.weight = before.linear.weight
        if kind == 5:
            self.linear.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + torch.tanh(self.linear(self.norm(x)))
        return y


class Blocks(nn.Module):
    def __init__(self, kinds: list[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for kind in kinds:
            self.blocks.append(Block(kind, self.blocks[-1] if len(self.blocks) else None))
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        for block in self.blocks:
            if block.kind != 4 or self.passes % 2:
                x = block(x)
        return x


OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1}),
]


def together(rule: Callable[..., None]) -> Callable[..., None]:
    """A rule whose failure on one rank is one on all: they go on, or stop, at the same place."""

    @functools.wraps(rule)
    def on_all(self: Program, *args: Any, **kwargs: Any) -> None:
        trouble = ""
        self.calls.append(f"{rule.__name__}({', '.join(f'{key}={value}' for key, value in kwargs.items())})")
        try:
            rule(self, *args, **kwargs)
        except Exception:  # noqa: BLE001 - all ranks raise it
            trouble = traceback.format_exc()
            # Groups may be of no use after this, so that nothing can be run again: this tells what was run.
            sys.stderr.write("\n".join([*self.calls, trouble]))
        self.agree(trouble)

    return on_all


WRAPS = st.fixed_dictionaries(
    {
        "bucket_bytes": st.sampled_from([50, 200, 10_000]),
        "prefetch": st.sampled_from([None, 1, 2]),
        "overlap": st.booleans(),
        "stage": st.sampled_from([1, 2]),
        "has_units": st.booleans(),
        "is_whole": st.booleans(),
    }
)
LAYERS = st.integers(0, 10)


class Program(RuleBasedStateMachine):
    """One program on two sides; class attributes say where it runs."""

    rank = 0
    world_size = 1
    groups: Any = (None, None)

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    @initialize(
        kinds=st.lists(st.integers(0, 5), min_size=1, max_size=3), optimizer=st.sampled_from(OPTIMIZERS), wrap=WRAPS
    )
    def build(self, kinds: list[int], optimizer: tuple[Any, dict[str, Any]], wrap: dict[str, Any]) -> None:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(3)
            plain = Blocks([0, *kinds]).double()
        self.plain, self.kind = plain.to(torch.get_default_device()), optimizer
        self.theirs = optimizer[0](self.plain.parameters(), **optimizer[1])
        self.generator = torch.Generator("cpu").manual_seed(7)
        self.has_gradients = False
        self.wrap(copy.deepcopy(self.plain), wrap)

    def wrap(self, module: Any, choices: dict[str, Any]) -> None:
        arguments = dict(choices)
        units = list(module.blocks) if arguments.pop("has_units") and not self.shares(module) else None
        whole = (lambda _name, shape: len(shape) == 2) if arguments.pop("is_whole") else None
        self.inner = module
        self.is_stale = False  # gradients were finished, and the forward pass after that is one of all ranks
        self.ours = shard(module, units=units, whole=whole, groups=self.groups, **arguments)
        self.optimizer = self.ours.optimizer(self.kind[0], **self.kind[1])

    def shares(self, module: Any) -> bool:
        return any(block.kind == 3 for block in module.blocks)

    def same(self, look: Callable[[Any], Any]) -> None:
        """Both sides show the same to `look(module)`."""
        torch.testing.assert_close(look(self.inner), look(self.plain), rtol=1e-8, atol=1e-10)

    def agree(self, trouble: str) -> None:
        troubles = [trouble] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(troubles, trouble)
        assert not any(troubles), "\n".join(f"rank {rank}: {each}" for rank, each in enumerate(troubles) if each)

    def layer(self, module: Any, number: int) -> Any:
        return module.blocks[number % len(module.blocks)]

    @rule(syncs=st.booleans())
    @together
    def backward(self, syncs: bool) -> None:
        x = torch.randn(2 * self.world_size, WIDTH, generator=self.generator, dtype=torch.float64, device="cpu")
        x = x.to(torch.get_default_device())
        self.is_stale = False
        self.plain(x).square().mean().backward()
        part = x[self.rank :: self.world_size]
        if syncs:
            self.ours(part).square().mean().backward()
        else:
            with self.ours.no_sync():
                self.ours(part).square().mean().backward()
        self.has_gradients = True

    @rule()
    @together
    def step(self) -> None:
        self.theirs.step()
        self.optimizer.step()
        self.is_stale = False

    @rule(to_none=st.booleans())
    @together
    def zero_grad(self, to_none: bool) -> None:
        if to_none:
            self.theirs.zero_grad()
            self.optimizer.zero_grad()
            self.has_gradients = False

    @precondition(lambda self: self.has_gradients)
    @rule(order=st.sampled_from([1.0, 2.0, float("inf")]), of_wrapper=st.booleans())
    @together
    def clip(self, order: float, of_wrapper: bool) -> None:
        expected = nn.utils.clip_grad_norm_(self.plain.parameters(), 0.05, order)
        self.is_stale = True
        if of_wrapper:
            found = self.ours.clip_grad_norm_(0.05, order)
        else:
            self.ours.finish_gradients()
            found = nn.utils.clip_grad_norm_(self.inner.parameters(), 0.05, order)
        self.same(lambda module: expected if module is self.plain else found.to(expected.dtype))

    @rule(number=LAYERS, by_data=st.booleans())
    @together
    def write(self, number: int, by_data: bool) -> None:
        for module in (self.plain, self.inner):
            weight = self.layer(module, number).linear.weight
            if by_data:
                weight.data.mul_(0.9)
            else:
                with torch.no_grad():
                    weight.mul_(0.9)

    @rule(number=LAYERS)
    @together
    def read_one(self, number: int) -> None:
        self.same(lambda module: self.layer(module, number).linear.weight.norm())

    @rule()
    @together
    def read_all(self) -> None:
        self.same(lambda module: [parameter.detach().clone() for parameter in module.parameters()])

    @rule()
    @together
    def copy_module(self) -> None:
        self.same(lambda module: list(copy.deepcopy(module).parameters()))

    @rule(factor=st.sampled_from([0.9, 1.0]))
    @together
    def save_and_load(self, factor: float) -> None:
        self.same(lambda module: dict(module.state_dict()))
        state = {name: value * factor for name, value in self.plain.state_dict().items()}
        self.plain.load_state_dict(state)
        self.inner.load_state_dict(state)

    @rule()
    @together
    def full_state(self) -> None:
        state = self.ours.full_state_dict()
        self.same(lambda module: dict(module.state_dict()) if module is self.plain else state)

    @rule(wrap=WRAPS)
    @together
    def go_on_in_another_layout(self, wrap: dict[str, Any]) -> None:
        """What a program that was saved, ended and started again does; gradients are not saved."""
        state = self.ours.full_optimizer_state_dict(self.optimizer)
        self.wrap(copy.deepcopy(self.inner), wrap)
        self.ours.load_full_optimizer_state_dict(self.optimizer, state)
        self.theirs.zero_grad()
        self.has_gradients = False

    @rule()
    @together
    def evaluate_together(self) -> None:
        self.is_stale = False
        x = torch.ones(2, WIDTH, dtype=torch.float64)
        self.same(lambda module: module.eval()(x).detach())
        for module in (self.plain, self.inner):
            module.train()

    @precondition(lambda self: self.ours.prefetch is None and not self.is_stale)
    @rule(number=LAYERS)
    @together
    def evaluate_alone(self, number: int) -> None:
        if self.rank == number % self.world_size:
            x = torch.ones(2, WIDTH, dtype=torch.float64)
            with torch.no_grad():
                found, expected = (model.eval()(x) for model in (self.ours, self.plain))
            for model in (self.ours, self.plain):
                model.train()
            torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)

    @precondition(lambda self: self.has_gradients)
    @rule(number=LAYERS)
    @together
    def clear_one(self, number: int) -> None:
        self.is_stale = True
        self.ours.finish_gradients()  # of a pass under no_sync the wrapper holds what is not reduced
        for module in (self.plain, self.inner):
            self.layer(module, number).linear.weight.grad = None

    @rule(lr=st.sampled_from([0.01, 0.1]))
    @together
    def schedule(self, lr: float) -> None:
        for optimizer in (self.theirs, self.optimizer):
            for group in optimizer.param_groups:
                group["lr"] = lr

    def teardown(self) -> None:
        if hasattr(self, "ours"):
            self.read_all()


def run_programs(rank: int, world_size: int, examples: int, steps: int) -> None:
    Program.rank, Program.world_size = rank, world_size
    device = torch.get_default_device()
    Program.groups = tuple(open_groups(None, torch.device(device), ("gather", "reduce"))) if world_size > 1 else None
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Program,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],  # what it found last is short enough to read, and ranks that failed are slow
            print_blob=False,
        ),
    )


@case
def some_programs_see_what_plain_torch_shows(rank: int, world_size: int) -> None:
    run_programs(rank, world_size, examples=12, steps=12)


@case
def many_programs_see_what_plain_torch_shows(rank: int, world_size: int) -> None:
    run_programs(rank, world_size, examples=60, steps=25)

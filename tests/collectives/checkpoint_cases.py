"""Checkpoints of the wrapper and its optimiser by names: a run goes on as plain torch does, in any layout."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from collectives import ShardedDataParallel
from tests.collectives.cases import assert_raises
from tests.collectives.dropin_cases import WIDTH, Pair, assert_equal, net
from tests.collectives.harness import Case
from tests.collectives.settings import shard

CHECKPOINT_CASES: list[Case] = []


def case(function: Case) -> Case:
    CHECKPOINT_CASES.append(function)
    return function


class Net(nn.Module):
    """Shapes that shards cut in every way: a scalar, rows, kernels of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.kernel = net(2), nn.Conv1d(1, 5, 3, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.kernel(self.body(x).unsqueeze(1)) * self.scale
        return y


def made() -> Net:
    """The same on every rank and side."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(3)
        module = Net()
    return module.to(torch.get_default_device())


def groups(_name: str, shape: torch.Size) -> dict[str, float]:
    return {"weight_decay": 0.1 if len(shape) > 1 else 0.0}


def build(bucket_bytes: int = 300, lr: float = 0.05, **settings: Any) -> tuple[ShardedDataParallel, Any]:
    sharded = shard(made(), bucket_bytes=bucket_bytes, **settings)
    return sharded, sharded.optimizer(torch.optim.AdamW, lr=lr, options=groups)


def plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    module = made()
    parameters = list(module.parameters())
    parts = [{"params": [p for p in parameters if (p.ndim > 1) is is_matrix]} for is_matrix in (True, False)]
    return module, torch.optim.AdamW([parts[0] | {"weight_decay": 0.1}, parts[1] | {"weight_decay": 0.0}], lr=0.05)


def train(model: Any, optimizer: torch.optim.Optimizer, seeds: range, rank: int = 0, ranks: int = 1) -> list[Tensor]:
    """Parameters after these steps, of this rank's part of each batch."""
    for seed in seeds:
        x = torch.randn(
            12, WIDTH, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float64, device="cpu"
        )
        x = x.to(torch.get_default_device())
        model(x[rank::ranks]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def shared_folder() -> str:
    box = [tempfile.mkdtemp()]
    dist.broadcast_object_list(box)
    return box[0]


@case
def a_distributed_checkpoint_goes_on_in_another_layout(rank: int, world_size: int) -> None:
    expected = train(*plain(), range(6))
    sharded, optimizer = build()
    train(sharded, optimizer, range(3), rank, world_size)
    folder = shared_folder()
    model_state, state = get_state_dict(sharded, optimizer)
    assert not any(name.startswith("module.") for name in (*model_state, *state["state"]))
    dcp.save({"model": model_state, "optim": state}, checkpoint_id=folder)
    alone = [dist.new_group([each]) for each in range(world_size)][rank]
    for ranks, settings in ((world_size, {"bucket_bytes": 10_000}), (1, {"group": alone})):
        again, other = build(lr=0.5, **settings)
        model_state, state = get_state_dict(again, other)
        loaded = {"model": model_state, "optim": state}
        dcp.load(loaded, checkpoint_id=folder, process_group=dist.group.WORLD)
        set_state_dict(again, other, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
        assert {group["lr"] for group in other.param_groups} == {0.05}
        assert_equal(train(again, other, range(3, 6), rank if ranks > 1 else 0, ranks), expected)


@case
def a_full_state_of_rank_0_goes_on_everywhere(rank: int, world_size: int) -> None:
    expected = train(*plain(), range(5))
    sharded, optimizer = build()
    train(sharded, optimizer, range(2), rank, world_size)
    for flat in (False, True):
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True, flatten_optimizer_state_dict=flat)
        model_state = get_model_state_dict(sharded, options=whole)
        state = get_optimizer_state_dict(sharded, optimizer, options=whole)
        assert bool(state) == (rank == 0)
        sent = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        again, other = build(10_000)
        set_model_state_dict(again, copy.deepcopy(model_state), options=sent)
        set_optimizer_state_dict(again, other, copy.deepcopy(state), options=sent)
        assert_equal(train(again, other, range(2, 5), rank, world_size), expected)


@case
def states_go_to_plain_torch_and_back(rank: int, world_size: int) -> None:
    expected = train(*plain(), range(5))
    sharded, optimizer = build()
    train(sharded, optimizer, range(2), rank, world_size)
    module, theirs = plain()
    module.load_state_dict(get_model_state_dict(sharded))
    state = sharded.full_optimizer_state_dict(optimizer)
    set_optimizer_state_dict(module, theirs, copy.deepcopy(state))
    train(module, theirs, range(2, 3))
    again, other = build(1000)
    set_model_state_dict(again, get_model_state_dict(module))
    again.load_full_optimizer_state_dict(other, get_optimizer_state_dict(module, theirs))
    assert_equal(train(again, other, range(3, 5), rank, world_size), expected)


@case
def masters_of_another_dtype_go_on_to_the_bit(rank: int, world_size: int) -> None:
    def build_low() -> tuple[ShardedDataParallel, Any]:
        sharded = shard(net().float(), param_dtype="bfloat16", bucket_bytes=100)
        return sharded, sharded.optimizer(torch.optim.SGD, lr=0.3, momentum=0.9)

    def steps(sharded: ShardedDataParallel, optimizer: Any, count: int) -> dict[str, Any]:
        for _ in range(count):
            sharded(torch.ones(2, WIDTH, dtype=torch.bfloat16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return sharded.full_state_dict()

    sharded, optimizer = build_low()
    steps(sharded, optimizer, 3)
    folder = shared_folder()
    model_state, state = get_state_dict(sharded, optimizer)
    dcp.save({"model": model_state, "optim": state}, checkpoint_id=folder)
    expected = steps(sharded, optimizer, 3)
    again, other = build_low()
    model_state, state = get_state_dict(again, other)
    loaded = {"model": model_state, "optim": state}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(again, other, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
    found = steps(again, other, 3)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@case
def parameters_that_were_never_stepped_have_no_state(rank: int, world_size: int) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.never = net(1), net(1)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.used(x)
            return y

    pair = Pair(rank, world_size, Half())
    pair.train(2)
    state = get_optimizer_state_dict(pair.sharded, pair.ours, options=StateDictOptions(full_state_dict=True))
    expected = get_optimizer_state_dict(pair.plain, pair.theirs)
    assert set(state["state"]) == set(expected["state"])
    for name, each in expected["state"].items():  # type: ignore[union-attr]
        assert_equal(state["state"][name], dict(each))
    pair.sharded.load_full_optimizer_state_dict(pair.ours, state)
    pair.train()
    pair.check()


@case
def states_of_another_model_are_refused_on_all_ranks(rank: int, world_size: int) -> None:
    sharded, optimizer = build()
    train(sharded, optimizer, range(1), rank, world_size)
    state = sharded.full_optimizer_state_dict(optimizer)

    def load(change: Any) -> None:
        other = copy.deepcopy(state)
        if rank == world_size - 1:
            change(other)
        sharded.load_full_optimizer_state_dict(optimizer, other)

    def without(other: Any) -> None:
        for group in other["param_groups"]:
            group["params"] = [name for name in group["params"] if name != "kernel.bias"]

    def other_shape(other: Any) -> None:
        for each in other["state"].values():
            each["exp_avg"] = torch.ones(2, 77)

    def by_number(other: Any) -> None:
        other["state"] = dict(enumerate(other["state"].values()))

    def in_one_group(other: Any) -> None:
        for name in ("kernel.bias", "scale"):
            other["param_groups"].append({**other["param_groups"][0], "params": [name], "lr": len(name)})

    assert_raises(ValueError, "has nothing of kernel.bias", lambda: load(without))
    assert_raises(ValueError, r"has shape \[2, 77\], and the parameter", lambda: load(other_shape))
    assert_raises(ValueError, "by numbers of parameters: take it by names", lambda: load(by_number))
    assert_raises(ValueError, "was trained with lr = ", lambda: load(in_one_group))
    theirs = torch.optim.SGD(sharded.module.parameters(), lr=0.1)
    assert_raises(ValueError, "not built by model.optimizer", lambda: sharded.full_optimizer_state_dict(theirs))
    assert_raises(ValueError, "does not hold", lambda: get_optimizer_state_dict(nn.Linear(1, 1), optimizer))
    train(sharded, optimizer, range(1, 2), rank, world_size)

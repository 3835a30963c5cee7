"""Other people's programs under the wrapper: as plain torch, or refused; the cases are in dropin_cases.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join

from collectives.sharded.optimizer_steps import check_elementwise
from tests.collectives.bf16_cases import bf16_is_as_near_to_ddp_as_ddp_in_another_order
from tests.collectives.conftest import RunCase
from tests.collectives.dropin_cases import DROPIN_CASES
from tests.collectives.harness import Case, Ranks, assert_passed, on_gpus, on_ranks
from tests.collectives.settings import shard

RANKS = [
    pytest.param((2, "cpu"), id="2-gloo"),
    pytest.param((4, "cpu"), id="4-gloo"),
    pytest.param((2, "cuda"), id="2-nccl", marks=on_gpus(2)),
]


@pytest.mark.parametrize(("case", "ranks"), on_ranks(DROPIN_CASES, RANKS, []))
def test_programs_among_ranks(case: Case, ranks: Ranks, run_case: RunCase) -> None:
    assert_passed(run_case(case, ranks))


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param((4, "cpu"), id="4-gloo", marks=pytest.mark.slow),
        pytest.param((4, "cuda"), id="4-nccl", marks=on_gpus(4)),
    ],
)
@pytest.mark.parametrize("case", [bf16_is_as_near_to_ddp_as_ddp_in_another_order])
def test_bf16_among_ranks(case: Case, ranks: Ranks, run_case: RunCase) -> None:
    assert_passed(run_case(case, ranks))


class _TrustRatio(torch.optim.SGD):
    """SGD whose step is as long as the parameter: of no name that is known."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter -= group["lr"] * parameter.norm() * parameter.grad / parameter.grad.norm()


class _TogetherNormed(torch.optim.SGD):
    """SGD over the norm of all gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                norm = torch.stack([parameter.grad.norm() for parameter in group["params"]]).norm()
                for parameter in group["params"]:
                    parameter -= group["lr"] * parameter.grad / norm


def _muon(groups: Any, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(groups, **settings)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (torch.optim.Adafactor, "otherwise than the whole"),
        (torch.optim.LBFGS, "its kind is known"),
        (_TrustRatio, "otherwise than the whole"),
        (_muon, "and not a piece of one"),
    ],
)
def test_optimizers_that_need_whole_matrices_are_refused(kind: Callable[..., Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"is not elementwise: .*{says}.*take an elementwise optimiser"):
        shard(nn.Linear(3, 2)).optimizer(kind, lr=1e-2)


_ELEMENTWISE = ["SGD", "Adam", "AdamW", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "Adadelta"]


@pytest.mark.parametrize("name", _ELEMENTWISE)
def test_elementwise_optimizers_are_not_refused(name: str) -> None:
    check_elementwise(getattr(torch.optim, name), {"lr": 1e-3})


def test_elementwise_settings_are_not_refused() -> None:
    check_elementwise(torch.optim.AdamW, {"lr": 1e-5, "fused": True, "amsgrad": True, "weight_decay": 0.1})
    check_elementwise(torch.optim.SGD, {"lr": 0.0, "momentum": 0.9, "nesterov": True})


def test_an_optimizer_is_tried_without_a_change_of_random_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda _seed: pytest.fail("the GPUs are seeded"))
    before = torch.get_rng_state()
    check_elementwise(torch.optim.AdamW, {"lr": 1e-3})
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, _TogetherNormed])
def test_optimizers_of_all_parameters_together_are_refused_for_whole_ones(kind: Callable[..., Any]) -> None:
    sharded = shard(nn.Linear(3, 2), whole=lambda _name, _shape: True)
    with pytest.raises(ValueError, match="each rank would step its own parameters only"):
        sharded.optimizer(kind, lr=1e-2)
    sharded.optimizer(_TrustRatio, lr=1e-2)


def test_only_must_pick_something_and_excludes_steps_in_backward() -> None:
    sharded = shard(nn.Linear(3, 2))
    with pytest.raises(ValueError, match="only: picks none of 2 parameters"):
        sharded.optimizer(torch.optim.SGD, lr=0.1, only=lambda _name, _shape: False)
    with pytest.raises(ValueError, match="goes with one optimiser"):
        sharded.optimizer(torch.optim.SGD, lr=0.1, only=lambda _name, _shape: True, step_in_backward=True)


def test_a_distributed_data_parallel_by_name() -> None:
    sharded = shard(nn.Linear(3, 2))
    assert isinstance(sharded, nn.parallel.DistributedDataParallel)
    with pytest.raises(RuntimeError, match="give reduce_dtype"):
        sharded.register_comm_hook(None, None)
    sharded.require_backward_grad_sync = False
    assert not sharded.require_backward_grad_sync
    with sharded.last_backward():
        assert sharded.require_backward_grad_sync


def test_moving_to_the_same_device_changes_nothing() -> None:
    sharded = shard(nn.Linear(2, 2))
    assert sharded.to("cpu").float().cpu() is sharded
    sharded(torch.ones(1, 2))
    for move in (sharded.double, sharded.half, lambda: sharded.to("meta"), sharded.share_memory):
        with pytest.raises(RuntimeError, match="before wrapping"):
            move()


def test_join_is_refused() -> None:
    sharded = shard(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="Join: ranks with uneven numbers of batches"):
        Join([sharded])  # type: ignore[list-item]
    with pytest.raises(RuntimeError, match="Join: ranks with uneven numbers of batches"):
        sharded.join(True)  # as DistributedDataParallel's, by place


def test_float64_is_reduced_in_float64() -> None:
    sharded = shard(nn.Linear(2, 2).double())
    assert sharded.reduce_buffers(sharded.buckets[0])[0].dtype == torch.float64


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch looks at inputs of a resumed frame
def test_a_compiled_wrapper_is_not_compiled_again_each_step() -> None:
    torch._dynamo.reset()
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    sharded = shard(module, bucket_bytes=20)
    optimizer = sharded.optimizer(torch.optim.AdamW, lr=0.1)
    compiled = torch.compile(sharded, backend="eager")
    counts = []
    for _ in range(5):
        compiled(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts[1] == counts[-1]

"""Sharded data parallel in one process: no communication, and the numbers of plain torch bit by bit."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import logging
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from collectives import Recorder, ShardedDataParallel, execution_order
from collectives.sharded.bucket import plan_buckets
from collectives.sharded.optimizer_steps import NUM_UNMOVED, balanced_share, choose_early
from collectives.sharded.prepare import open_communicators
from netlayer.errors import ConfigError
from tests.collectives.cases import adamw, assert_close, assert_same, batches, net, reference, train
from tests.collectives.harness import Case
from tests.collectives.settings import shard
from tests.collectives.slot_cases import ALONE, a_captured_step_with_slots_equals_an_eager_one
from tests.collectives.step_cases import (
    a_captured_step_equals_an_eager_one,
    compile_forward,
    compile_module,
    train_compiled,
)


@settings(deadline=None, max_examples=25)
@given(
    widths=st.lists(st.integers(1, 6), min_size=2, max_size=5),
    bucket_bytes=st.integers(1, 400),
    prefetch=st.integers(1, 4),
    overlap=st.booleans(),
    num_micro=st.integers(1, 3),
)
def test_equals_plain_torch(widths: list[int], bucket_bytes: int, prefetch: int, overlap: bool, num_micro: int) -> None:
    """To rounding: parameters lie at other addresses in a bucket, by which a library may choose its kernel."""
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths))).double()
    sharded = shard(
        copy.deepcopy(model),
        bucket_bytes=bucket_bytes,
        prefetch=prefetch,
        overlap=overlap,
        reduce_dtype=torch.float64,
    )
    ours, theirs = sharded.optimizer(adamw), adamw(model.parameters())
    for _ in range(2):
        x = torch.rand(3, widths[0], dtype=torch.float64)
        for micro in range(num_micro):
            model(x).sum().backward()
            if micro < num_micro - 1:
                with sharded.no_sync():
                    sharded(x).sum().backward()
            else:
                sharded(x).sum().backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_close(sharded.full_state_dict(), model.state_dict(), rtol=1e-9, atol=1e-11)


def test_one_rank_communicates_nothing() -> None:
    recorder = Recorder()
    sharded = shard(net(), bucket_bytes=1000, recorder=recorder, reduce_dtype=torch.float64)
    state = train(sharded, 2, 0, 1)
    assert not recorder.counts()
    assert_close(state, reference(net(), 2, 1), rtol=1e-9, atol=1e-11)


def test_gradients_add_up_over_backward_passes_of_a_step(caplog: pytest.LogCaptureFixture) -> None:
    model = net(torch.float32)
    sharded = shard(copy.deepcopy(model))
    tokens = next(batches(1, 1))
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            model(tokens).backward()
            sharded(tokens).backward()
    assert caplog.text.count("no_sync") == 1
    sharded.finish_gradients()
    grads = dict(model.named_parameters())
    for name, _, piece in sharded.named_shards():
        torch.testing.assert_close(piece.grad, grads[name].grad.flatten())


@pytest.mark.parametrize("moment", ["backward", "finish", "zero"])
def test_memory_of_gradients_is_freed_only_where_nobody_needs_them(moment: str) -> None:
    model = net(torch.float32)
    sharded = shard(copy.deepcopy(model))
    ours, theirs = sharded.optimizer(adamw), adamw(model.parameters())
    for tokens in batches(3, 1):
        model(tokens).backward()
        sharded(tokens).backward()
        if moment == "backward":
            sharded.release_gradients()
        sharded.finish_gradients()
        if moment == "finish":
            sharded.release_gradients()
        ours.step()
        theirs.step()
        sharded.zero_grad()
        theirs.zero_grad()
        if moment == "zero":
            sharded.release_gradients()
            assert all(bucket.gradient._flat_S is None for bucket in sharded.buckets)
    torch.testing.assert_close(sharded.full_state_dict(), dict(model.state_dict()))


def test_execution_order_is_that_of_the_calls() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.unused, self.first = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
            self.first.bias.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x))

    model = Backwards()
    order = execution_order(model, torch.rand(1, 2))
    assert order == ["first.weight", "last.weight", "last.bias", "unused.weight", "unused.bias"]
    assert list(shard(model, order=order).shapes()) == order
    with pytest.raises(ValueError, match="every trainable parameter once"):
        shard(Backwards(), order=order[1:])


def _complex() -> nn.Module:
    return nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: nn.LazyLinear(3), "no values yet"),
        (lambda: nn.Linear(2, 2, device="meta"), "no values yet"),
        (_complex, "floating-point"),
        (lambda: nn.Embedding(3, 2, sparse=True), "sparse=False"),
        (lambda: nn.ReLU(), "none"),
        (lambda: nn.Linear(2, 2).requires_grad_(False), "requires a gradient"),
    ],
)
def test_what_is_not_supported_is_a_value_error(build: Callable[[], nn.Module], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        shard(build())


@pytest.mark.parametrize("bad", [{"prefetch": 0}, {"in_flight": 0}, {"bucket_bytes": 0}])
def test_bad_arguments_are_value_errors(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        shard(nn.Linear(2, 2), **bad)


def test_moving_the_module_after_wrapping_is_refused() -> None:
    sharded = shard(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="before wrapping"):
        sharded.double()
    sharded.module.double()
    with pytest.raises(RuntimeError, match="moved or cast"):
        sharded(torch.rand(1, 2))


def test_clipping_needs_a_positive_norm() -> None:
    with pytest.raises(ValueError, match="above 0"):
        shard(nn.Linear(2, 2)).clip_grad_norm_(0.0)


def test_the_norm_of_a_large_gradient_is_exact() -> None:
    sharded = shard(nn.Linear(2048, 2048, bias=False))
    sharded(torch.full((1, 2048), 0.1)).sum().backward()
    assert float(sharded.clip_grad_norm_(1.0)) == pytest.approx(204.8, rel=1e-4)


def test_the_package_does_not_import_torch_by_itself() -> None:
    code = "import sys, collectives; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_modules_that_others_name_load_with_the_package() -> None:
    code = "import collectives; collectives.recorder.Recorder, collectives.health.gemm"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, found none")
@pytest.mark.parametrize("overlap", [True, False])
def test_one_gpu_equals_plain_torch(overlap: bool) -> None:
    with torch.device("cuda"):
        sharded = shard(net(torch.float32), bucket_bytes=500, overlap=overlap)
        assert_same(train(sharded, 3, 0, 1), reference(net(torch.float32), 3, 1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, found none")
def test_a_step_can_be_captured() -> None:
    with torch.device("cuda"):
        a_captured_step_equals_an_eager_one(0, 1)
        a_captured_step_with_slots_equals_an_eager_one(0, 1)


@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.__name__)
def test_slots_of_one_rank(case: Case) -> None:
    case(0, 1)


@pytest.mark.parametrize("compile_unit", [compile_forward, compile_module])
@pytest.mark.parametrize("before", [True, False])
def test_compiled_units_are_whole_graphs(compile_unit: Callable[[nn.Module], None], before: bool) -> None:
    state = train_compiled(compile_unit, before, 0, 1)
    assert_close(state, reference(net(), 2, 1), rtol=1e-9, atol=1e-11)


def test_a_wrapper_that_is_dropped_keeps_no_buffer() -> None:
    def train_once() -> list[weakref.ref[torch.Tensor]]:
        sharded = shard(net(torch.float32))
        train(sharded, 1, 0, 1)
        return [weakref.ref(bucket.unsharded_N) for bucket in sharded.buckets]

    buffers = train_once()
    gc.collect()
    assert all(buffer() is None for buffer in buffers)


@pytest.mark.parametrize(
    ("units", "says"),
    [
        (lambda model: [model[0], nn.Linear(2, 2)], r"units\[1\] \(Linear\) is no part"),
        (lambda model: [model[1], model[1][0]], r"units\[1\] \(Linear\) lies in another"),
        (lambda model: [model[1][0], model], r"units\[1\] \(Sequential\) lies in another unit, or holds one"),
    ],
)
def test_units_are_parts_that_do_not_overlap(units: Callable[[nn.Sequential], list[nn.Module]], says: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    with pytest.raises(ValueError, match=says):
        shard(model, units=units(model))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"stage": 4}, "ZeRO has stages 1, 2 and 3"),
        ({"stage": 3}, "stage = 3: needs units"),
        ({"stage": 3, "units": "all", "windows": True}, "goes without windows=True"),
    ],
)
def test_what_does_not_go_with_a_stage_is_a_value_error(settings: dict[str, Any], says: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if "units" in settings:
        settings = {**settings, "units": list(module)}
    with pytest.raises(ValueError, match=says):
        shard(module, **settings)


def test_stage_3_refuses_steps_in_the_backward_pass() -> None:
    sharded = shard(module := nn.Sequential(nn.Linear(2, 2)), units=list(module), stage=3)
    with pytest.raises(ValueError, match="step_in_backward = True: goes without stage 3"):
        sharded.optimizer(adamw, step_in_backward=True)


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    share=st.floats(0, 1),
)
def test_the_moved_share_is_spread_evenly(sizes: list[int], share: float) -> None:
    plans = plan_buckets([(str(i), torch.Size([n]), torch.float32) for i, n in enumerate(sizes)], 1, 1)
    early = choose_early(plans, share)
    assert not early & set(range(NUM_UNMOVED))
    # Never more than the share, counted from the front; all of what can move, where all was asked for.
    moved = before = 0
    for plan in plans:
        before += plan.numel
        moved += plan.numel if plan.index in early else 0
        assert moved <= share * before * (1 + 1e-6) + 1e-6
        if share == 1.0 and plan.index >= NUM_UNMOVED:
            assert plan.index in early


def test_the_balanced_share_makes_both_passes_as_long_as_their_communication() -> None:
    assert balanced_share(torch.bfloat16, torch.bfloat16) == pytest.approx(1 / 3)
    assert balanced_share(torch.bfloat16, torch.float32) == 0.0
    # Backward takes 2, forward 1; reduce-scatter and all-gather 1.5 each: 2 = 1.5 + x * 1.5, 1 = (1 - x) * 1.5.
    share = balanced_share(torch.float32, torch.float32)
    assert 1.5 + share * 1.5 == pytest.approx(2.0)
    assert (1 - share) * 1.5 == pytest.approx(1.0)


@pytest.mark.parametrize("change", ["replaced", "added", "data"])
def test_parameters_that_are_others_after_wrapping_are_noticed(change: str) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    sharded = shard(module)
    sharded(torch.ones(1, 3))
    if change == "replaced":
        module[1] = nn.Linear(3, 3)
    elif change == "added":
        module.register_parameter("extra", nn.Parameter(torch.ones(1)))
    else:
        module[1].bias.data = torch.ones(3)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="after wrapping: do that before"):
        sharded(torch.ones(1, 3))


def test_an_optimizer_that_has_nothing_to_do_is_spoken_of_once(caplog: pytest.LogCaptureFixture) -> None:
    sharded = shard(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    for _ in range(6):
        sharded(torch.ones(1, 3)).sum().backward()
        with pytest.raises(RuntimeError, match=r"step them by the optimiser of model\.optimizer"):
            optimizer.step()
        optimizer.zero_grad()
    [said] = [record for record in caplog.records if "trains nothing" in record.message]
    assert said.levelno == logging.WARNING
    caplog.clear()
    served = shard(nn.Linear(3, 1))
    own = served.optimizer(torch.optim.SGD, lr=0.1)
    for _ in range(6):
        served(torch.ones(1, 3)).sum().backward()
        own.step()
        own.zero_grad()
    assert not caplog.records


def test_ranks_that_would_train_alone_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE = 2: .*; call torch\.distributed\.init_process_group"):
        shard(nn.Linear(3, 1))


def test_dtypes_may_be_names() -> None:
    sharded = shard(nn.Linear(3, 1), param_dtype="bfloat16", reduce_dtype="torch.float64")
    sharded(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    assert sharded.reduce_buffers(sharded.buckets[0])[0].dtype == torch.float64
    for field in ("param_dtype", "reduce_dtype"):
        with pytest.raises(ValueError, match=f"{field} = 'bf16': is no dtype of torch; give torch.bfloat16"):
            shard(nn.Linear(3, 1), **{field: "bf16"})


def test_a_scaler_and_steps_in_the_backward_pass_do_not_go_together() -> None:
    sharded = shard(nn.Linear(3, 1))
    scaler, optimizer = torch.amp.GradScaler("cpu"), sharded.optimizer(torch.optim.SGD, lr=0.1, step_in_backward=True)
    scaler.scale(sharded(torch.ones(1, 3)).sum()).backward()
    with pytest.raises(RuntimeError, match="GradScaler: step_in_backward has taken the step unscaled"):
        scaler.step(optimizer)


def test_the_optimizers_state_is_local() -> None:
    sharded = shard(nn.Linear(3, 1))
    optimizer = sharded.optimizer(adamw)
    sharded(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    kept = copy.deepcopy(optimizer.state_dict())
    again = shard(nn.Linear(3, 1)).optimizer(adamw)
    again.load_state_dict(kept)
    torch.testing.assert_close(again.state_dict()["state"], kept["state"])


def test_communicators_have_their_groups_already() -> None:
    comms = open_communicators(None, None, torch.device("cpu"), None)
    shared = [shard(nn.Linear(2, 2), comms=comms) for _ in range(2)]
    assert all((chunk.gather_comm, chunk.reduce_comm) == comms for chunk in shared)
    with pytest.raises(ValueError, match="communicators have their groups, timeout, recorder and watch"):
        shard(nn.Linear(2, 2), comms=comms, recorder=Recorder())


def _train(sharded: ShardedDataParallel, **settings: Any) -> torch.optim.Optimizer:
    optimizer = sharded.optimizer(torch.optim.AdamW, lr=1e-3, **settings)
    for tokens in batches(2, 1):
        sharded(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def _save_and_load(sharded: ShardedDataParallel) -> torch.optim.Optimizer:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    optimizer = _train(sharded)
    state = get_optimizer_state_dict(sharded, optimizer)
    set_optimizer_state_dict(sharded, optimizer, state)
    sharded.load_state_dict(sharded.state_dict())
    return optimizer


def _average(sharded: ShardedDataParallel) -> torch.optim.Optimizer:
    average = torch.optim.swa_utils.AveragedModel(sharded.module)
    optimizer = _train(sharded)
    average.update_parameters(sharded.module)
    copy.deepcopy(sharded.module)
    sum(parameter.square().sum() for parameter in sharded.module.parameters()).backward()  # type: ignore[union-attr]
    torch.nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
    return optimizer


@pytest.mark.parametrize(
    "use",
    [
        _train,
        functools.partial(_train, step_in_backward=True),
        _save_and_load,
        _average,
        lambda sharded: sharded.optimizer(adamw),
    ],
    ids=["steps", "steps in the backward pass", "saved and loaded", "read and clipped", "built by a function"],
)
def test_a_wrapper_that_nobody_holds_is_freed(use: Callable[[ShardedDataParallel], torch.optim.Optimizer]) -> None:
    """A program may build one after the other: two sets of parameters and moments do not fit a device."""
    sharded = shard(net(torch.float32), bucket_bytes=1000)
    optimizer = use(sharded)
    left = [weakref.ref(sharded), weakref.ref(sharded.module), weakref.ref(optimizer)]
    left += [weakref.ref(bucket.unsharded_N) for bucket in sharded.buckets]
    del sharded, optimizer
    gc.collect()
    assert [reference() for reference in left if reference() is not None] == []

"""AdamW by the kernel, a bucket at once, against torch's own; without a GPU in Triton's interpreter."""

from __future__ import annotations

import copy
import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import ShardedDataParallel
from collectives.sharded.bucket import Bucket, plan_buckets
from collectives.triton_support import HAS_TRITON
from netlayer.config.tree import OptimizerConfig
from tests.collectives.settings import shard
from trainer.ops.backend import Operators
from trainer.optim import build_adamw
from trainer.parallel import Optimizers

if HAS_TRITON:
    from trainer.optim.shard_adamw import ShardAdamW

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KERNELS = HAS_TRITON and (DEVICE.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")
CONFIG = OptimizerConfig(lr=0.01, weight_decay=0.1, beta2=0.95)
pytestmark = pytest.mark.skipif(not KERNELS, reason="no Triton with a GPU here")


def wrapped(dtype: torch.dtype) -> ShardedDataParallel:
    """Matrices and vectors in turn, in buckets that end inside a layer."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(7, 19), nn.Linear(19, 33), nn.Linear(33, 5)).to(DEVICE)
    return shard(module, param_dtype=dtype, bucket_bytes=1500)


def train(
    sharded: ShardedDataParallel, optimizer: torch.optim.Optimizer, steps: range, in_backward: bool = False
) -> None:
    for step in steps:
        x = torch.randn(6, 7, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        sharded(x.to(sharded.plans[0].dtype)).float().square().mean().backward()
        if in_backward:
            assert all(piece.parameter.grad is None for bucket in sharded.buckets for piece in bucket.pieces)
        optimizer.step()
        optimizer.zero_grad()
    sharded.wait_parameters()


def held(sharded: ShardedDataParallel, optimizer: torch.optim.Optimizer) -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {}
    for name, _, piece in sharded.named_shards():
        state = optimizer.state[piece]
        found[name] = [piece.detach(), state["exp_avg"], state["exp_avg_sq"], state["step"].to(DEVICE)]
    return found


def assert_alike(
    found: dict[str, list[Tensor]], right: dict[str, list[Tensor]], rtol: float = 2e-6, atol: float = 1e-7
) -> None:
    assert found.keys() == right.keys()
    for name, expected in right.items():
        for got, tensor in zip(found[name], expected, strict=True):
            torch.testing.assert_close(got, tensor, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def build(sharded: ShardedDataParallel, operators: Operators, **options: Any) -> torch.optim.AdamW:
    return build_adamw(CONFIG, sharded, operators=operators, **options)


def test_triton_is_chosen_by_the_operators_and_the_dtype_of_the_masters() -> None:
    assert type(build(wrapped(torch.bfloat16), "torch")) is torch.optim.AdamW
    assert type(build(wrapped(torch.bfloat16), "triton")) is not torch.optim.AdamW
    double = shard(nn.Linear(2, 2).double().to(DEVICE), reduce_dtype=torch.float64)
    assert type(build(double, "triton")) is torch.optim.AdamW


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("in_backward", [False, True])
def test_triton_steps_as_torch_does(dtype: torch.dtype, in_backward: bool) -> None:
    found = []
    for operators in ("triton", "torch"):
        sharded = wrapped(dtype)
        optimizer = build(sharded, operators, step_in_backward=in_backward)
        train(sharded, optimizer, range(1, 6), in_backward)
        found.append(held(sharded, optimizer))
        if operators == "triton":
            for bucket in sharded.buckets:  # the interpreter cuts digits off where a GPU rounds
                rounded_N, rtol = bucket.master_S.to(dtype), 0 if DEVICE.type == "cuda" else 2**-7
                torch.testing.assert_close(bucket.unsharded_N, rounded_N, rtol=rtol, atol=0)
    # A gradient in bfloat16 may round otherwise where a weight does.
    rtol, atol = (2e-6, 1e-7) if dtype == torch.float32 else (2e-2, 1e-3)
    assert_alike(*found, rtol=rtol, atol=atol)


def test_triton_goes_on_from_a_state_of_torchs_and_gives_one_back() -> None:
    ours, theirs = wrapped(torch.float32), wrapped(torch.float32)
    with_kernel, plain = build(ours, "triton"), build(theirs, "torch")
    train(ours, with_kernel, range(1, 3))
    train(theirs, plain, range(1, 4))
    ours.load_full_state_dict(theirs.full_state_dict())
    with_kernel.load_state_dict(copy.deepcopy(plain.state_dict()))
    for sharded, optimizer in ((ours, with_kernel), (theirs, plain)):
        train(sharded, optimizer, range(4, 6))
    assert_alike(held(ours, with_kernel), held(theirs, plain))
    plain.load_state_dict(copy.deepcopy(with_kernel.state_dict()))
    for sharded, optimizer in ((ours, with_kernel), (theirs, plain)):
        train(sharded, optimizer, range(6, 8))
    assert_alike(held(ours, with_kernel), held(theirs, plain))


def test_triton_steps_with_what_groups_say_after_a_state_was_loaded() -> None:
    """torch makes new groups of what it loads; a state of no step begins anew."""
    found = []
    for operators in ("triton", "torch"):
        sharded = wrapped(torch.float32)
        optimizer = build(sharded, operators)
        empty = copy.deepcopy(optimizer.state_dict())
        train(sharded, optimizer, range(1, 4))
        optimizer.load_state_dict(empty)
        for group in optimizer.param_groups:
            group["weight_decay"] = 5.0
        train(sharded, optimizer, range(4, 6))
        found.append(held(sharded, optimizer))
    assert_alike(*found)


@pytest.mark.parametrize("change", [{"lr": 0.0}, {"betas": (0.5, 0.5)}, {"amsgrad": True}])
def test_triton_refuses_groups_that_differ_in_more_than_weight_decay(change: dict[str, Any]) -> None:
    sharded = wrapped(torch.float32)
    optimizer = build(sharded, "triton")
    optimizer.param_groups[-1].update(change)
    sharded(torch.ones(2, 7, device=DEVICE)).sum().backward()
    with pytest.raises(ValueError, match=r"may differ in weight_decay alone|take torch\.optim"):
        optimizer.step()
    with pytest.raises(ValueError, match="a group comes too late"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, device=DEVICE))]})


def test_triton_clips_what_it_reads_and_once() -> None:
    """As torch, which scales the gradients in place, also where there is nothing to clip; the step after is its own."""
    found = []
    for operators in ("triton", "torch"):
        sharded = wrapped(torch.float32)
        both = Optimizers([build(sharded, operators)])
        for step, max_norm in enumerate((1e6, 0.03, math.inf, 0.01, None)):
            x = torch.randn(6, 7, generator=torch.Generator().manual_seed(step)).to(DEVICE)
            sharded(x).square().mean().backward()
            sharded.finish_gradients()
            grads = [piece.grad for bucket in sharded.buckets for piece in bucket.pieces]
            norm = torch.nn.utils.get_total_norm(grads)
            if max_norm is not None:
                both.clip(norm, max_norm)
            after = torch.nn.utils.get_total_norm(grads)
            scaled = 1.0 if operators == "triton" else min(1.0, (max_norm or math.inf) / float(norm))
            assert float(after / norm) == pytest.approx(scaled, rel=1e-4)
            both.step()
            both.zero_grad()
        sharded.wait_parameters()
        found.append(held(sharded, both.each[0]))
    assert_alike(*found)


def test_triton_takes_a_learning_rate_from_anywhere() -> None:
    found = []
    for lr in (0.02, torch.tensor(0.02, dtype=torch.float64)):
        sharded = wrapped(torch.float32)
        optimizer = build(sharded, "triton")
        for group in optimizer.param_groups:
            group["lr"] = lr
        train(sharded, optimizer, range(1, 3))
        found.append(held(sharded, optimizer))
    for name, right in found[1].items():
        assert all(torch.equal(*pair) for pair in zip(found[0][name], right, strict=True))


def test_triton_steps_a_shard_of_any_rank() -> None:
    """Cut inside a parameter, and with padding behind the last."""
    shape = torch.Size([5, 7])
    [plan] = plan_buckets([("a", shape, torch.bfloat16), ("b", torch.Size([6]), torch.bfloat16)], None, 3)
    for rank in range(3):
        torch.manual_seed(rank)
        parameters = [nn.Parameter(torch.randn(5, 7, device=DEVICE)), nn.Parameter(torch.randn(6, device=DEVICE))]
        flat = torch.cat([each.detach().flatten() for each in parameters])
        bucket = Bucket(plan, nn.functional.pad(flat, (0, plan.padded_numel - plan.numel)), parameters, rank)
        pieces = [piece.parameter for piece in bucket.pieces]
        plain = [nn.Parameter(piece.detach().clone()) for piece in pieces]
        groups = [
            [{"params": [one], "weight_decay": number} for number, one in enumerate(each)] for each in (pieces, plain)
        ]
        ours = ShardAdamW(groups[0], buckets=[bucket], lr=0.01, betas=(0.9, 0.95), eps=1e-8)
        theirs = torch.optim.AdamW(groups[1], lr=0.01, betas=(0.9, 0.95), eps=1e-8)
        for _ in range(3):
            bucket.grad_S.normal_()
            for piece, copied in zip(bucket.pieces, plain, strict=True):
                piece.parameter.grad, copied.grad = piece.grad, piece.grad.clone()
            ours.step()
            theirs.step()
        for got, right in zip(pieces, plain, strict=True):
            torch.testing.assert_close(got.detach(), right.detach(), rtol=2e-6, atol=1e-7)
        assert bucket._copied_in == bucket.master_S._version


def test_triton_leaves_nothing_to_publish() -> None:
    sharded = wrapped(torch.bfloat16)
    optimizer = build(sharded, "triton")
    train(sharded, optimizer, range(1, 2))
    for bucket in sharded.buckets:
        assert bucket.shard_S is not None
        bucket.shard_S.zero_()
        bucket.copy_in_shard()
        assert not bool(bucket.shard_S.any())
        bucket.master_S.add_(1)
        bucket.copy_in_shard()
        assert bool(bucket.shard_S.any())


def test_triton_leaves_what_others_write_into_the_masters_to_be_published() -> None:
    sharded = wrapped(torch.bfloat16)
    optimizer = build(sharded, "triton")
    sharded(torch.ones(2, 7, device=DEVICE, dtype=torch.bfloat16)).float().sum().backward()
    optimizer.register_step_post_hook(lambda *_: [piece.fill_(3) for _, _, piece in no_grad_shards(sharded)])
    sharded.finish_gradients()
    with sharded.no_gathers_after_step():
        optimizer.step()
    sharded.wait_parameters()
    assert all(bool((parameter == 3).all()) for parameter in sharded.module.parameters())


def no_grad_shards(sharded: ShardedDataParallel) -> list[tuple[str, torch.Size, Tensor]]:
    return [(name, shape, piece.detach()) for name, shape, piece in sharded.named_shards()]


def test_triton_refuses_a_gradient_that_is_not_the_buckets() -> None:
    sharded = wrapped(torch.float32)
    optimizer = build(sharded, "triton")
    sharded(torch.ones(2, 7, device=DEVICE)).sum().backward()
    sharded.finish_gradients()
    name, _, piece = next(sharded.named_shards())
    piece.grad = torch.ones_like(piece)
    with pytest.raises(RuntimeError, match=f"the gradient of {name} is not the bucket's"):
        optimizer.step()


def test_triton_forgets_a_clipping_with_the_step_that_is_refused() -> None:
    found = []
    for is_refused in (False, True):
        sharded = wrapped(torch.float32)
        optimizer = build(sharded, "triton")
        assert isinstance(optimizer, ShardAdamW)
        for step in range(2):  # of the first one alone AdamW would make the same, scaled or not
            sharded(torch.full((2, 7), 1.0 + step, device=DEVICE)).square().mean().backward()
            sharded.finish_gradients()
            if is_refused and step == 1:
                _, _, piece = next(sharded.named_shards())
                right, piece.grad = piece.grad, torch.ones_like(piece)
                optimizer.clip(torch.ones((), device=DEVICE), 1e-3)
                with pytest.raises(RuntimeError, match="is not the bucket's"):
                    optimizer.step()
                piece.grad = right
            optimizer.step()
            optimizer.zero_grad()
        sharded.wait_parameters()
        found.append(held(sharded, optimizer))
    assert_alike(*found)


def test_triton_or_not_a_rank_without_pieces_chooses_as_others_do() -> None:
    sharded = wrapped(torch.bfloat16)
    for bucket in sharded.buckets:
        bucket.pieces = []
    assert type(build(sharded, "torch")) is torch.optim.AdamW
    assert type(build(sharded, "triton")) is ShardAdamW

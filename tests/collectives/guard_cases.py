"""More of what ranks check together: steps that one omits, states of one rank alone, writes into parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from collectives import Recorder, ShardedDataParallel
from collectives.sharded.bucket import Bucket
from collectives.sharded.data_parallel import CommunicatorPair
from collectives.sharded.prepare import open_communicators, open_groups
from collectives.watch.track import NEAR
from netlayer.errors import CheckFailed, CollectiveFailed, RanksMissing
from netlayer.store.arrivals import await_all
from tests.collectives.cases import (
    adamw,
    assert_alike_on_ranks,
    assert_close,
    assert_raises,
    assert_same,
    batches,
    case,
    delays,
    net,
    train,
    wrap,
    wrap64,
)
from tests.collectives.harness import meet
from tests.collectives.settings import shard

STEPS = 12


def small(**settings: object) -> ShardedDataParallel:
    return wrap64(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double(), bucket_bytes=40, **settings)


def train_small(sharded: ShardedDataParallel, is_left_out: Callable[[int], bool], num_steps: int = STEPS) -> None:
    """A newcomer's loop, with an `if` that skips a step after its forward pass."""
    optimizer = sharded.optimizer(torch.optim.SGD, lr=0.01)
    for step in range(num_steps):
        loss = sharded(torch.full((1, 3), float(step), dtype=torch.float64)).square().sum()
        if is_left_out(step):
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def names(rank: int, world_size: int) -> str:
    """How a message names the ranks but for one: of world sizes 2 and 4."""
    others = [other for other in range(world_size) if other != rank]
    return f"rank {others[0]}" if len(others) == 1 else f"ranks {others[0]}-{others[-1]}"


@case
def a_rank_that_leaves_a_step_out_alone_is_named(rank: int, world_size: int) -> None:
    culprit = world_size - 1
    says = (
        rf"different steps: step = 4 on {names(culprit, world_size)}, 5 on rank {culprit}; .*on every rank or on none"
    )
    for in_backward in (False, True):
        sharded = small()
        sharded.optimizer = functools.partial(sharded.optimizer, step_in_backward=in_backward)  # type: ignore[method-assign]
        assert_raises(CheckFailed, says, lambda s=sharded: train_small(s, lambda step: rank == culprit and step == 2))


@case
def a_rank_that_leaves_a_step_out_before_its_forward_is_named_where_steps_are_said(rank: int, world_size: int) -> None:
    culprit = world_size - 1
    says = rf"different steps: step = 3 on {names(culprit, world_size)}, 4 on rank {culprit}; "
    for how in ("start_step", "recorder"):
        recorder = Recorder()
        sharded = small(recorder=recorder)
        say = recorder.begin_step if how == "recorder" else sharded.start_step
        assert_raises(CheckFailed, says, lambda s=sharded, say=say: train_saying(s, say, rank == culprit))


def train_saying(sharded: ShardedDataParallel, say: Callable[[int], None], leaves_out: bool) -> None:
    optimizer = sharded.optimizer(torch.optim.SGD, lr=0.01)
    for step in range(STEPS):
        if leaves_out and step == 2:
            continue
        say(step)
        sharded(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@case
def chunks_that_share_communicators_train_as_those_with_their_own(rank: int, world_size: int) -> None:
    with delays(rank):
        states = [train_chunks(comms, 4, rank, leaves_out=False) for comms in (shared_comms(), None)]
    assert_same(*states)
    assert_alike_on_ranks(states[0], world_size)
    culprit = world_size - 1
    says = rf"different steps: step = 4 on {names(culprit, world_size)}, 5 on rank {culprit}; "
    assert_raises(CheckFailed, says, lambda: train_chunks(shared_comms(), STEPS, rank, leaves_out=rank == culprit))


def shared_comms() -> CommunicatorPair:
    return open_communicators(None, None, torch.get_default_device(), None)


def train_chunks(comms: CommunicatorPair | None, num_steps: int, rank: int, *, leaves_out: bool) -> dict[str, Tensor]:
    """As a pipeline's stage: each chunk has a backward pass of its own, the last one first."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        modules = [nn.Linear(3, 3).double(), nn.Linear(3, 2).double()]
    settings: dict[str, Any] = {"bucket_bytes": 40, "reduce_dtype": torch.float64, "comms": comms}
    first, last = (shard(module, **settings) for module in modules)
    assert (first.reduce_comm is last.reduce_comm) == (comms is not None)
    optimizers = [chunk.optimizer(torch.optim.SGD, lr=0.1) for chunk in (first, last)]
    for step in range(num_steps):
        between = first(torch.full((1, 3), float(step + rank), dtype=torch.float64))
        x = between.detach().requires_grad_()
        loss = last(x).square().sum()
        if leaves_out and step == 2:
            continue
        loss.backward()
        between.backward(x.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {f"{number} {name}": v for number, c in enumerate((first, last)) for name, v in c.full_state_dict().items()}


@case
def what_ranks_may_do_alone_is_no_step_left_out(rank: int, world_size: int) -> None:
    sharded = small()
    optimizer = sharded.optimizer(torch.optim.SGD, lr=0.01)
    x = torch.ones(1, 3, dtype=torch.float64)
    for step in range(9):
        with sharded.no_sync():  # as many as a rank likes, and some of them without a backward pass
            for _ in range(rank):
                sharded(x).sum().backward()
                sharded(x)
        if rank == 0:
            with torch.no_grad():
                sharded(x)
            sharded.eval()
            sharded(x)
            sharded.train()
        if rank != 1 or step % 3:  # a rank may have nothing to add to a step
            sharded(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    train_small(sharded, lambda step: step == 4)  # all together
    assert_alike_on_ranks(sharded.full_state_dict(), world_size)


@case
def only_some_rounds_are_checked_and_no_record_tells_of_it(rank: int, world_size: int) -> None:
    recorder = Recorder()
    sharded = small(recorder=recorder)
    with mock.patch.object(sharded._reduce._step_check, "_judge") as judge:
        train_small(sharded, lambda _: False, 33)
    assert judge.call_count == len([1, 2, 4, 8, 16, 32])
    assert ("reduce", "all_gather") not in recorder.counts()


@case
def settings_that_differ_are_named(rank: int, world_size: int) -> None:
    odd = rank == world_size - 1
    for field, usual, other in (("prefetch", 2, 3), ("overlap", True, False), ("bucket_bytes", 40, 41)):
        says = (
            rf"ranks differ .*: {field} = {usual} on rank.*, {other} on rank {world_size - 1}; give every rank the same"
        )
        assert_raises(ValueError, says, lambda f=field, v=other if odd else usual: small_with(f, v))
    says = rf"parameter weight = \[2, 4\] torch.float32 in bucket 0 on rank.*, \[2, 3\] .* on rank {world_size - 1};"
    assert_raises(ValueError, says, lambda: wrap(nn.Linear(3 if odd else 4, 2)))


def small_with(field: str, value: object) -> ShardedDataParallel:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double()
    return shard(model, **{"bucket_bytes": 40, field: value})  # type: ignore[arg-type]


@case
def settings_that_differ_later_are_named_at_the_first_reduction(rank: int, world_size: int) -> None:
    odd = rank == world_size - 1
    x = torch.ones(1, 3, dtype=torch.float64)
    for settings, says in (
        ({"step_in_backward": odd}, "step_in_backward = False on rank.*, True on rank"),
        (
            {"step_in_backward": True, "gather_in_backward": 0.5 if odd else 0.25},
            r"gather_in_backward = 0\.25 on .*, 0\.5",
        ),
    ):
        sharded = small()
        sharded.optimizer(torch.optim.SGD, lr=0.01, **settings)
        assert_raises(ValueError, f"ranks differ in their settings: {says}", lambda s=sharded: s(x).sum().backward())
    sharded = small()
    sharded.prefetch = 5 if odd else 2
    assert_raises(ValueError, "settings: prefetch = 2 on .*, 5 on rank", lambda: sharded(x).sum().backward())


@case
def ranks_that_differ_in_how_their_groups_are_made_are_named_before_they_hang(rank: int, world_size: int) -> None:
    culprit, device = world_size - 1, torch.get_default_device()
    gather, reduce = open_groups(None, device, ("gather", "reduce"))
    comms = open_communicators(None, (gather, reduce), device, None)
    quick = functools.partial(await_all, patience_s=0.1)  # else as many seconds as ranks may rightly come apart
    with mock.patch("collectives.sharded.prepare.await_all", quick):
        for name, odd in (("groups", (gather, reduce)), ("comms", comms), ("windows", True), ("stage", 2)):
            arguments = {name: odd} if rank == culprit else {}
            says = rf"arguments of the wrapper: {name} = (?=.* on rank {culprit}\b).* on ranks? 0\b.*; give every rank"
            assert_raises(ValueError, says, lambda arguments=arguments: small(**arguments))
    train_small(small(groups=(gather, reduce)), lambda _: False, 1)


@case
def a_rank_that_makes_no_wrapper_is_named(rank: int, world_size: int) -> None:
    ranks = dist.new_group(list(range(world_size)), timeout=timedelta(seconds=1))
    if rank == 0:
        others = "rank 1:" if world_size == 2 else "ranks 1, "
        assert_raises(RanksMissing, f"waiting for {others}.* every rank of the group makes", lambda: small(group=ranks))
    meet("the end")


@case
def a_rank_that_has_tried_a_wrapper_in_vain_meets_the_others_at_the_next(rank: int, world_size: int) -> None:
    """Numbers of wrappers differ then, and of the store's keys: nobody is missing."""
    ranks = dist.new_group(list(range(world_size)), timeout=timedelta(seconds=1))
    if rank == 0:
        assert_raises(RanksMissing, "waiting for rank", lambda: small(group=ranks))
    meet("the first is given up")
    train_small(small(), lambda _: False, 1)
    meet("the end")


@case
def a_state_of_one_rank_alone_is_an_error_within_the_timeout(rank: int, world_size: int) -> None:
    on_cuda = torch.get_default_device().type == "cuda"
    # At the timeout itself torch's watchdog ends a process: there it is far off, and the others come late after all.
    timeout, near = (timedelta(seconds=20), 0.05) if on_cuda else (timedelta(seconds=0.5), NEAR)
    kind = "a collective" if on_cuda else "all_gather"
    for name in ("state_dict", "full_state_dict"):
        sharded = small(prefetch=1, timeout=timeout)
        assert len(sharded.plans) > 2
        train_small(sharded, lambda _: False, 1)
        if rank == 0:
            says = rf"called on every rank\? {name}\(\).* is collective, .* {kind} of group gather, on rank 0, did not"
            with mock.patch("collectives.transport.communicator.NEAR", near):
                assert_raises(CollectiveFailed, says, getattr(sharded, name))
        meet(name)
        if on_cuda:
            sharded.wait_parameters()


@case
def a_state_that_is_current_needs_no_other_rank(rank: int, world_size: int) -> None:
    sharded = small(prefetch=1)
    train_small(sharded, lambda _: False, 2)
    sharded.wait_parameters()
    if rank == 0:
        assert len(sharded.state_dict()) == 4
        assert len(sharded.full_state_dict()) == 4
    meet("the end")


def low() -> ShardedDataParallel:
    model = net(torch.float32)
    model.offset = model.offset.bfloat16()
    return wrap(model, param_dtype="bfloat16", reduce_dtype="torch.bfloat16")


def parameters_of(sharded: ShardedDataParallel, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: state[name].bfloat16() for name in sharded.shapes()}


@case
def what_is_written_into_parameters_is_kept_in_another_dtype(rank: int, world_size: int) -> None:
    source = low()
    written = train(source, 2, rank, world_size)
    expected = parameters_of(source, written)
    for how in ("in place", "data before the first forward", "data and adopt"):
        target = low()
        if how != "data before the first forward":
            train(target, 1, rank, world_size)
        target.wait_parameters()
        with torch.no_grad():
            for name, parameter in target.module.named_parameters():
                (parameter if how == "in place" else parameter.data).copy_(written[name])
        if how == "data and adopt":
            target.sync_masters_from_params()
        target(next(batches(1, 1)))
        found = target.full_state_dict()
        assert_same(parameters_of(target, found), expected)
        train(target, 1, rank, world_size)  # is stepped from there
        assert_alike_on_ranks(target.full_state_dict(), world_size)


@case
def what_is_written_before_the_first_step_is_stepped(rank: int, world_size: int) -> None:
    """No forward in between: gradients are finished with what was written."""
    sharded = low()
    optimizer = sharded.optimizer(torch.optim.SGD, lr=0.0)
    with torch.no_grad():
        for parameter in sharded.module.parameters():
            parameter.fill_(0.5)
    optimizer.step()
    state = sharded.full_state_dict()
    assert all(torch.all(state[name] == 0.5) for name in sharded.shapes())


@case
def what_was_not_changed_keeps_the_precision_of_its_master(rank: int, world_size: int) -> None:
    sharded = low()
    before = train(sharded, 2, rank, world_size)
    sharded.wait_parameters()
    with torch.no_grad():  # an average is looked at, and put back
        for parameter in sharded.module.parameters():
            kept = parameter.clone()
            parameter.zero_()
            parameter.copy_(kept)
        sharded.module.scale[0] = 3.0
    sharded(next(batches(1, 1)))
    after = sharded.full_state_dict()
    assert after["scale"][0] == 3.0
    assert torch.equal(after["scale"][1:], before["scale"][1:])
    assert_same({n: t for n, t in after.items() if n != "scale"}, {n: t for n, t in before.items() if n != "scale"})


@case
def parameters_written_while_they_are_gathered_keep_what_was_written(rank: int, world_size: int) -> None:
    for model in (low(), wrap64(net())):
        optimizer = model.optimizer(adamw)
        model(next(batches(1, 1))).backward()
        optimizer.step()  # the gathers are on their way
        with torch.no_grad():
            model.module.head.weight.zero_()
        model(next(batches(1, 1)))
        assert not model.full_state_dict()["head.weight"].any()


@case
def a_step_looks_once_at_what_others_may_have_written(rank: int, world_size: int) -> None:
    sharded = low()
    with mock.patch.object(Bucket, "sync_masters", autospec=True, side_effect=Bucket.sync_masters) as sync_masters:
        train(sharded, 3, rank, world_size)
        first = len(sharded.buckets)  # the first forward pass looks too, and so does the state at the end
        assert sync_masters.call_count == (3 + 2) * first


@case
def a_scaler_finishes_the_gradients_that_it_reads(rank: int, world_size: int) -> None:
    device = torch.get_default_device().type
    expected = train(wrap64(net()), 3, rank, world_size)
    for scaler in (
        torch.amp.GradScaler(device, init_scale=4.0),
        ShardedGradScaler(device, init_scale=4.0, process_group=dist.group.WORLD),
    ):
        sharded = wrap64(net())
        optimizer = sharded.optimizer(adamw)
        for number, tokens in enumerate(batches(3, world_size)):
            for spoils in (True, False) if number == 1 else (False,):
                loss = sharded(tokens[rank::world_size])  # an infinity on one rank: all skip the step
                scaler.scale(loss * (torch.inf if spoils and rank == 0 else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        assert_close(sharded.full_state_dict(), expected, rtol=1e-9, atol=1e-11)


@case
def closing_keeps_the_parameters(rank: int, world_size: int) -> None:
    sharded = wrap64(net())
    state = train(sharded, 1, rank, world_size)
    sharded.close()
    sharded.close()
    assert_same(dict(sharded.module.state_dict()), state)

"""More of what ranks check together: steps inside the backward pass, one communicator for all, units, ZeRO stages."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from collectives import Overlap, Recorder, ShardedDataParallel
from collectives.sharded.bucket import Bucket
from collectives.sharded.collectives import NcclReduceScatter, PeerReduceScatter
from collectives.sharded.optimizer_steps import NUM_UNMOVED
from collectives.sharded.prepare import open_communicators, open_groups
from collectives.torch_names import Collect
from collectives.transport import communicator
from collectives.transport.communicator import Communicator
from collectives.transport.leftovers import release_left
from collectives.transport.peer_reduce import PeerReduce
from collectives.transport.windows import ALIGNMENT_BYTES, Windows, are_worth_it
from tests.collectives.cases import (
    Branches,
    accumulate,
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
from tests.collectives.harness import Case, opens_groups
from tests.collectives.stand_ins import Nowhere, Summed, windows_nowhere


def train_in_backward(
    sharded: ShardedDataParallel, num_steps: int, rank: int, world_size: int, share: float | None = None
) -> dict[str, Tensor]:
    optimizer = sharded.optimizer(adamw, step_in_backward=True, gather_in_backward=share)
    for tokens in batches(num_steps, world_size):
        sharded(tokens[rank::world_size]).backward()
        assert all(piece.grad is None for _, _, piece in sharded.named_shards())
        optimizer.step()
        optimizer.zero_grad()
    return sharded.full_state_dict()


def pair_of_one() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    return group, group


@case
def stepping_in_backward_does_not_change_a_bit(rank: int, world_size: int) -> None:
    for low in (False, True):
        dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16} if low else {}

        def wrapped(dtypes: dict[str, Any] = dtypes, **settings: Any) -> ShardedDataParallel:
            model = net(torch.float32)
            model.offset = model.offset.to(dtypes.get("param_dtype", torch.float32))
            return wrap(model, **dtypes, **settings)

        plain = train(wrapped(), 3, rank, world_size)
        assert_same(train_in_backward(wrapped(), 3, rank, world_size), plain)
        assert_same(train_in_backward(wrapped(overlap=False), 3, rank, world_size, 0.5), plain)
        assert_same(train_in_backward(wrapped(in_flight=1, prefetch=9), 3, rank, world_size, 1.0), plain)
        with delays(rank):
            assert_same(train_in_backward(wrapped(groups=pair_of_one()), 3, rank, world_size, 0.3), plain)
        assert_alike_on_ranks(plain, world_size)


@case
def stepping_in_backward_can_be_switched(rank: int, world_size: int) -> None:
    expected = train(wrap64(net()), 4, rank, world_size)
    sharded = wrap64(net())
    assert_raises(ValueError, "step_in_backward=True", lambda: setattr(sharded, "step_in_backward", True))
    optimizer = sharded.optimizer(adamw, step_in_backward=True)
    for step, tokens in enumerate(batches(4, world_size)):
        sharded.step_in_backward, sharded.overlap = step % 2 == 0, step != 1
        sharded(tokens[rank::world_size]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(sharded.full_state_dict(), expected)


@case
def one_communicator_runs_the_same_order_on_every_rank(rank: int, world_size: int) -> None:
    torch.manual_seed(3)
    recorder = Recorder()
    sharded = wrap64(Branches().double(), bucket_bytes=64, groups=pair_of_one(), recorder=recorder)
    assert sharded.gather_comm is sharded.reduce_comm
    optimizer = sharded.optimizer(adamw, step_in_backward=True, gather_in_backward=0.5)
    for step in range(4):
        sharded.step_in_backward = step != 2
        recorder.begin_step(step)
        with delays(rank):  # ranks go different ways, and some gathers are left when their backward pass begins
            sharded(torch.rand(4, dtype=torch.float64), left=(rank + step) % 2 == 0).backward()
            optimizer.step()
        recorder.end_step()
    order = [(each.kind, each.num_bytes) for step in recorder.steps for each in step.collectives]
    orders: list[Any] = [None] * world_size
    dist.all_gather_object(orders, order)
    assert all(other == order for other in orders)
    kinds = [kind for kind, _ in order]
    assert set(kinds) == {"all_gather", "reduce_scatter"}
    assert_alike_on_ranks(sharded.full_state_dict(), world_size)


@case
def the_share_asked_for_is_gathered_in_backward(rank: int, world_size: int) -> None:
    moved = []
    for share in (0.0, 0.5, 1.0):
        recorder = Recorder()
        sharded = wrap(net(torch.float32), recorder=recorder, prefetch=2, broadcast_buffers=False)
        optimizer = sharded.optimizer(adamw, step_in_backward=True, gather_in_backward=share)
        num_buckets = len(sharded.plans)
        for step, tokens in enumerate(batches(2, world_size)):
            loss = sharded(tokens[rank::world_size])
            recorder.begin_step(step)
            loss.backward()
            launched = recorder.end_step().counts()
            optimizer.step()
            optimizer.zero_grad()
            assert launched["reduce", "reduce_scatter"] == num_buckets
        moved.append(launched["gather", "all_gather"] - 2)  # two more are the first ones of the next forward pass
        sharded.wait_parameters()
    assert moved[0] == 0
    assert 0 < moved[1] < moved[2] == num_buckets - NUM_UNMOVED, moved


@case
def schedules_and_accumulation_work_in_backward(rank: int, world_size: int) -> None:
    states = []
    for in_backward, stage in ((False, 1), (True, 1), (True, 2)):
        sharded = wrap64(net(), stage=stage)
        optimizer = sharded.optimizer(adamw, step_in_backward=in_backward)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for tokens in batches(3, world_size):
            first, second = tokens[rank::world_size].split(1)
            with sharded.no_sync():
                (sharded(first) / 2).backward()
            (sharded(second) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        states.append(sharded.full_state_dict())
    assert_same(states[1], states[0])
    assert_close(states[2], states[0], rtol=1e-9, atol=1e-11)


@case
def stage_2_keeps_no_whole_gradients(rank: int, world_size: int) -> None:
    expected = train(wrap64(net()), 3, rank, world_size)
    recorder = Recorder()
    sharded = wrap64(net(), stage=2, recorder=recorder)
    optimizer = sharded.optimizer(adamw)
    for step, tokens in enumerate(batches(3, world_size)):
        first, second = tokens[rank::world_size].split(1)
        recorder.begin_step(step)
        with sharded.no_sync():
            (sharded(first) / 2).backward()
        assert all(bucket.local_N is None for bucket in sharded.buckets)
        (sharded(second) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert recorder.end_step().counts()["reduce", "reduce_scatter"] == 2 * len(sharded.plans)
    assert_close(sharded.full_state_dict(), expected, rtol=1e-9, atol=1e-11)


@case
def only_no_sync_passes_are_stepped_all_the_same(rank: int, world_size: int) -> None:
    expected = train(wrap64(net()), 2, rank, world_size)
    for stage in (1, 2):
        sharded = wrap64(net(), stage=stage)
        optimizer = sharded.optimizer(adamw, step_in_backward=True)
        for tokens in batches(2, world_size):
            with sharded.no_sync():
                sharded(tokens[rank::world_size]).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same(sharded.full_state_dict(), expected)


@case
def what_needs_all_gradients_is_refused_in_backward(rank: int, world_size: int) -> None:
    sharded = wrap64(net())
    optimizer = sharded.optimizer(adamw, step_in_backward=True)
    tokens = next(batches(1, 1))
    sharded(tokens).backward()
    assert_raises(ValueError, "build the optimiser without it", lambda: sharded.clip_grad_norm_(1.0))
    assert_raises(ValueError, "takes a closure or nothing", lambda: optimizer.step(0.5))
    assert_raises(RuntimeError, "no_sync", sharded(tokens).backward)
    optimizer.step()
    expected = wrap64(net())
    ours = expected.optimizer(adamw)
    for each, one in ((expected, ours), (sharded, optimizer)):
        for _ in range(2 if each is expected else 1):
            each(tokens).backward()
            one.step()
            one.zero_grad()
    assert_same(sharded.full_state_dict(), expected.full_state_dict())
    assert_raises(ValueError, "no effect", lambda: wrap(net()).optimizer(adamw, gather_in_backward=0.5))
    for share in (-0.1, 1.5):
        bad = functools.partial(wrap(net()).optimizer, adamw, step_in_backward=True, gather_in_backward=share)
        assert_raises(ValueError, r"0\.\.1", bad)


@case
def an_exception_in_a_backward_that_steps_leaves_ranks_alike(rank: int, world_size: int) -> None:
    sharded = wrap64(net(), groups=pair_of_one())
    optimizer = sharded.optimizer(adamw, step_in_backward=True, gather_in_backward=0.5)
    for step, tokens in enumerate(batches(3, world_size)):
        if step == 1:
            handle = sharded.module.blocks[rank % 3].register_full_backward_pre_hook(_interrupt)
            assert_raises(ZeroDivisionError, "interrupted", sharded(tokens).backward)
            handle.remove()
            assert_raises(RuntimeError, "load a checkpoint", optimizer.step)
        sharded(tokens[rank::world_size]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_alike_on_ranks(sharded.full_state_dict(), world_size)


def _interrupt(*_: object) -> None:
    raise ZeroDivisionError("interrupted")


@case
def recomputation_sees_the_parameters_of_its_own_step(rank: int, world_size: int) -> None:
    expected = train(wrap64(net()), 3, rank, world_size)
    for reentrant in (False, True):
        model = net()
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=reentrant)
        state = train_in_backward(wrap64(model, in_flight=1), 3, rank, world_size, 1.0)
        assert_close(state, expected, rtol=1e-9, atol=1e-11)


class Peek(nn.Module):
    """Reads a parameter that autograd does not see, before the layers that do: its backward pass reads it late."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.middle = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) @ self.last.weight.detach()
        return self.last(self.middle(x)).sum()


@case
def a_parameter_read_after_it_was_stepped_is_an_error(rank: int, world_size: int) -> None:
    torch.manual_seed(3)
    for share in (0.0, 0.5, 1.0):  # gathered early or not, it is stepped
        sharded = wrap64(Peek().double(), bucket_bytes=64, in_flight=1)
        sharded.optimizer(adamw, step_in_backward=True, gather_in_backward=share)
        loss = sharded(torch.rand(2, 4, dtype=torch.float64))
        assert_raises(RuntimeError, "modified by an inplace operation", loss.backward)
        sharded.zero_grad()


class PeekAgain(Peek):
    """The same in what is computed again for the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda x: self.first(x) @ self.last(x).detach().T, x, use_reentrant=False)
        return self.last(self.middle(x)).sum()


@case
def a_parameter_recomputed_with_after_it_was_stepped_is_an_error(rank: int, world_size: int) -> None:
    torch.manual_seed(3)
    for share in (0.0, 1.0):
        sharded = wrap64(PeekAgain().double(), bucket_bytes=64, in_flight=1)
        sharded.optimizer(adamw, step_in_backward=True, gather_in_backward=share)
        loss = sharded(torch.rand(4, 4, dtype=torch.float64))
        assert_raises(RuntimeError, "backward pass that has stepped them already", loss.backward)
        sharded.zero_grad()


@case
def units_are_waited_for_and_reduced_as_one(rank: int, world_size: int) -> None:
    expected = train(wrap64(net()), 3, rank, world_size)
    for bucket_bytes in (None, 1000):
        recorder, model = Recorder(), net()
        sharded = wrap64(model, units=model.blocks, bucket_bytes=bucket_bytes, recorder=recorder)
        for plan in sharded.plans:
            units = {slot.name.split(".")[1] if slot.name.startswith("blocks.") else "" for slot in plan.slots}
            assert len(units) == 1
        # The tied embedding, the scale; three blocks; what comes after them.
        assert bucket_bytes or len(sharded.plans) == 5
        assert_close(train(sharded, 3, rank, world_size), expected, rtol=1e-9, atol=1e-11)
    model = net()
    state = train_in_backward(wrap64(model, units=model.blocks, bucket_bytes=None), 3, rank, world_size)
    assert_close(state, expected, rtol=1e-9, atol=1e-11)


def compile_forward(unit: nn.Module) -> None:
    unit.forward = torch.compile(unit.forward, backend="aot_eager")


def compile_module(unit: nn.Module) -> None:
    unit.compile(backend="aot_eager")


@case
def compiled_units_are_whole_graphs(rank: int, world_size: int) -> None:
    expected = train(wrap64(net()), 2, rank, world_size)
    assert_close(train_compiled(compile_forward, True, rank, world_size), expected, rtol=1e-9, atol=1e-11)


def train_compiled(
    compile_unit: Callable[[nn.Module], None], before: bool, rank: int, world_size: int
) -> dict[str, Tensor]:
    """Parameters after two steps with units compiled before or after wrapping; each unit was one graph."""
    import torch._dynamo

    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    model = net()
    if before:
        for block in model.blocks:
            compile_unit(block)
    sharded = wrap64(model, units=model.blocks, bucket_bytes=None)
    if not before:
        for block in model.blocks:
            compile_unit(block)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own, about tensors that it looks at
        state = train_in_backward(sharded, 2, rank, world_size)
    assert not counters["graph_break"], dict(counters["graph_break"])
    # Blocks with and without a bias make one graph each, of all five operations.
    assert counters["stats"] == {"unique_graphs": 2, "calls_captured": 2 * 5}, dict(counters["stats"])
    torch._dynamo.reset()
    return state


@case
def muted_communicators_launch_nothing(rank: int, world_size: int) -> None:
    recorder = Recorder()
    sharded = wrap(net(torch.float32), recorder=recorder)
    optimizer = sharded.optimizer(adamw, step_in_backward=True)
    before = copy.copy(recorder.counts())
    sharded.gather_comm.muted = sharded.reduce_comm.muted = True
    for tokens in batches(2, world_size):
        loss = sharded(tokens[rank::world_size])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.isfinite(loss)
    assert recorder.counts() == before


@case
def buffers_that_take_turns_change_nothing(rank: int, world_size: int) -> None:
    expected = train(wrap64(net()), 2, rank, world_size)
    with windows_nowhere():
        for settings in ({}, {"in_flight": 1}, {"groups": pair_of_one()}, {"param_dtype": torch.float64}):
            sharded = wrap64(net(), windows=True, **settings)
            assert all(plan.shard_numel % ALIGNMENT_BYTES == 0 for plan in sharded.plans)
            if world_size > 1:
                memory = sharded._reduce_scatter.windows.memory  # type: ignore[attr-defined]
                first, end = memory.data_ptr(), memory.data_ptr() + memory.numel()
                assert all(first <= bucket.grad_S.data_ptr() < end for bucket in sharded.buckets), (
                    "sums stay in windows"
                )
            assert_close(train(sharded, 2, rank, world_size), expected, rtol=1e-12, atol=1e-12)
        for low in (torch.float32, torch.bfloat16):
            results = [train(wrap(net(), reduce_dtype=low, windows=windows), 2, rank, world_size) for windows in (0, 1)]
            assert_close(
                *results, rtol=1e-6 if low == torch.float32 else 0.1, atol=1e-6 if low == torch.float32 else 1e-3
            )
        stepped = train_in_backward(wrap64(net(), windows=True), 2, rank, world_size)
        assert_close(stepped, expected, rtol=1e-12, atol=1e-12)
        for stage in (1, 2):  # what is folded, or added to what a pass before has reduced, travels alike
            sharded = wrap64(net(), windows=True, stage=stage, in_flight=1)
            assert_close(accumulate(sharded, 2, rank, world_size), expected, rtol=1e-9, atol=1e-11)
        with pytest.raises(ValueError, match="ranks differ"):  # they would register different buffers
            wrap(net(), windows=True, in_flight=1 + rank)


@case
def sums_of_what_peers_were_sent_change_nothing(rank: int, world_size: int) -> None:
    if world_size == 1:
        return
    with (
        mock.patch("collectives.sharded.collectives.PeerReduce", Summed),
        mock.patch("collectives.sharded.collectives.why_unusable", return_value=None),
    ):
        each_setting = ({}, {"in_flight": 1}, {"overlap": False}, {"stage": 2}, {"groups": pair_of_one()})
        for low, tolerance, chosen in ((torch.float32, 1e-6, each_setting), (torch.bfloat16, 0.05, each_setting[::3])):
            for settings in chosen:
                plain, sharded = (wrap(net(), reduce_dtype=low, peer_reduce=by, **settings) for by in (False, True))
                results = [accumulate(each, 2, rank, world_size) for each in (plain, sharded)]
                assert_close(*results, rtol=tolerance, atol=tolerance)
                sharded.close()
        stepped = [train_in_backward(wrap(net(), peer_reduce=by), 2, rank, world_size) for by in (False, True)]
        assert_close(*stepped, rtol=1e-6, atol=1e-6)
        comms = open_communicators(None, None, torch.get_default_device(), None)
        expected = train(wrap(net()), 2, rank, world_size)
        for sharded in [wrap(net(), comms=comms, peer_reduce=True) for _ in range(2)]:
            assert_close(train(sharded, 2, rank, world_size), expected, rtol=1e-6, atol=1e-6)
        with pytest.raises(ValueError, match=r"peer_reduce: .*gradients travel in torch.float64.*; omit it"):
            wrap64(net(), peer_reduce=True)
    if torch.get_default_device().type == "cpu":
        with pytest.raises(ValueError, match=r"peer_reduce: .* .rank 0: the device is cpu, not"):
            wrap(net(), peer_reduce=True)


@case
def sums_of_divided_losses_are_means(rank: int, world_size: int) -> None:
    def trained(mean: bool, **settings: Any) -> dict[str, Tensor]:
        sharded = wrap64(net(), mean=mean, **settings)
        optimizer = sharded.optimizer(torch.optim.SGD, lr=0.1)  # steps by what it is given, not by its sign
        for tokens in batches(2, world_size):
            for is_last, half in enumerate(tokens[rank::world_size].split(1)):
                with contextlib.nullcontext() if is_last else sharded.no_sync():
                    (sharded(half) / (2 if mean else 2 * world_size)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return sharded.full_state_dict()

    expected = trained(True)
    with windows_nowhere():
        for settings in ({}, {"overlap": False}, {"windows": True}, {"windows": True, "stage": 2}):
            assert_close(trained(False, **settings), expected, rtol=1e-12, atol=1e-12)


class ByBuckets(torch.optim.SGD):
    """Steps buckets as their gradients come; `came` has how many did at once."""

    def __init__(self, params: Any, coming: Callable[[], Iterable[Sequence[Bucket]]], lr: float) -> None:
        super().__init__(params, lr=lr)
        self.coming, self.came = coming, list[int]()

    @torch.no_grad()
    def step(self, _closure: object = None) -> None:  # type: ignore[override]
        for buckets in self.coming():
            self.came.append(len(buckets))
            for piece in (piece.parameter for bucket in buckets for piece in bucket.pieces):
                assert piece.grad is not None
                piece.add_(piece.grad, alpha=-self.param_groups[0]["lr"])


@case
def an_optimizer_may_step_while_the_last_gradients_are_on_their_way(rank: int, world_size: int) -> None:
    def trained(kind: Any, norms: bool = False, wrapping: Any = None, **settings: Any) -> tuple[dict[str, Tensor], Any]:
        sharded = wrap64(net(), bucket_bytes=300, **(wrapping or {}))
        if kind is ByBuckets:
            settings |= {"coming": sharded.as_gradients_come, "waits": False}
        optimizer = sharded.optimizer(kind, lr=0.1, **settings)
        for tokens in batches(3, world_size):
            sharded(tokens[rank::world_size]).backward()
            if norms:  # they wait, and nothing is left to come
                sharded.clip_grad_norm_(float("inf"))
            optimizer.step()
            optimizer.zero_grad()
        return sharded.full_state_dict(), optimizer

    expected, _ = trained(torch.optim.SGD)
    for wrapping in ({}, {"in_flight": 1}, {"overlap": False}, {"stage": 2}):
        found, optimizer = trained(ByBuckets, wrapping=wrapping)
        assert_close(found, expected, rtol=1e-12, atol=1e-12)
        there, *others = optimizer.came[: len(optimizer.came) // 3]
        under_way = 0 if world_size == 1 or "overlap" in wrapping else wrapping.get("in_flight", 4)
        assert others == [1] * under_way
        assert there > 0
    found, optimizer = trained(ByBuckets, norms=True)
    assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert len(optimizer.came) == 3


class Divided:
    """A collective of gloo's, which knows no means: the sum is divided where it is waited for."""

    def __init__(self, collect: Collect) -> None:
        self.collect, self.num_means = collect, 0

    def __call__(self, output: Tensor, *given: Tensor, **options: Any) -> Any:
        is_mean = options.get("op") == dist.ReduceOp.AVG
        self.num_means += is_mean
        if not is_mean or output.is_cuda:
            return self.collect(output, *given, **options)
        work = self.collect(output, *given, **{**options, "op": dist.ReduceOp.SUM})
        assert work is not None
        return mock.Mock(wait=lambda: (work.wait(), output.div_(dist.get_world_size(options["group"]))))


@case
def means_that_the_backend_makes_change_no_bit(rank: int, world_size: int) -> None:
    for low in (torch.float32, torch.bfloat16, torch.float16):
        found: list[list[dict[str, Tensor]]] = []
        for divides in (False, True):
            scatter, reduce = Divided(communicator.reduce_scatter_single), Divided(communicator._all_reduce)
            with (
                mock.patch("collectives.sharded.collectives.GlooReduceScatter", NcclReduceScatter),
                mock.patch.object(communicator.Communicator, "divides_on_the_way", divides),
                mock.patch.multiple(communicator, reduce_scatter_single=scatter, _all_reduce=reduce),
            ):
                makes = functools.partial(wrap, reduce_dtype=low)
                states = [train(makes(net(torch.float32)), 2, rank, world_size)]
                states += [train_in_backward(makes(net(torch.float32)), 2, rank, world_size)]
                states += [accumulate(makes(net(torch.float32), stage=each), 2, rank, world_size) for each in (1, 2)]
            assert (scatter.num_means + reduce.num_means > 0) == divides
            found.append(states)
        tolerance = 1e-4 if low == torch.float16 else 0.0  # of what is subnormal half gets lost, here or there
        for summed, divided in zip(*found, strict=True):
            assert_close(divided, summed, rtol=tolerance, atol=tolerance)


@case
def windows_need_nccl(rank: int, world_size: int) -> None:
    if torch.get_default_device().type == "cuda":
        return
    with pytest.raises(
        ValueError, match="windows: only NCCL on CUDA has them, and the device is cpu and the backend cpu:gloo"
    ):
        wrap(net(), windows=True)


@opens_groups
def windows_change_nothing(rank: int, world_size: int) -> None:
    """On CUDA alone: NCCL's symmetric kernels in place of its rings."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        expected = train(wrap(net(torch.float32), reduce_dtype=dtype), 3, rank, world_size)
        for settings in ({}, {"groups": pair_of_one()}, {"in_flight": 1}):
            sharded = wrap(net(torch.float32), reduce_dtype=dtype, windows=True, **settings)
            assert_close(train(sharded, 3, rank, world_size), expected, rtol=tolerance, atol=tolerance)


@opens_groups
def reductions_by_copy_engines_change_nothing(rank: int, world_size: int) -> None:
    """On CUDA alone: beside windows for the parameters, in every order of passes, of sums and of means."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        expected = train(wrap(net(torch.float32), reduce_dtype=dtype), 3, rank, world_size)
        for settings in ({}, {"windows": True}, {"groups": pair_of_one()}, {"in_flight": 1}, {"stage": 2}):
            sharded = wrap(net(torch.float32), reduce_dtype=dtype, peer_reduce=True, **settings)
            assert_close(train(sharded, 3, rank, world_size), expected, rtol=tolerance, atol=tolerance)
            sharded.close()
        for settings in ({}, {"stage": 2, "in_flight": 1}):
            plain, sharded = (wrap(net(torch.float32), reduce_dtype=dtype, peer_reduce=by, **settings) for by in (0, 1))
            results = [accumulate(each, 3, rank, world_size) for each in (plain, sharded)]
            assert_close(*results, rtol=tolerance, atol=tolerance)
            sharded.close()


@opens_groups
def what_copy_engines_carry_is_added_in_float32(rank: int, world_size: int) -> None:
    """On CUDA alone: the sums themselves, two at once, of a part of a warp and of many of all multiprocessors."""
    group = dist.new_group(list(range(world_size)))
    assert group is not None
    device = torch.device("cuda", torch.cuda.current_device())
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        peers, adds = PeerReduce(group, device, 2**20 * dtype.itemsize), deque[Callable[[], None]]()

        def sent(
            numel: int, mean: bool, adds_up: bool, dtype: torch.dtype = dtype, peers: PeerReduce = peers
        ) -> Callable[[], None]:
            whole_N = torch.randn(world_size * numel).to(dtype)
            everyone_WN = torch.empty(world_size, world_size * numel, dtype=dtype)
            dist.all_gather_into_tensor(everyone_WN, whole_N)
            own_WS = everyone_WN[:, rank * numel : (rank + 1) * numel].float()
            expected_S = functools.reduce(torch.add, own_WS) * (1 / world_size if mean else 1)
            peers.wait_for_current_stream()
            add, summed_S = peers.send(whole_N), torch.empty(numel)

            def check() -> None:
                before_S = torch.randn(numel) if adds_up else torch.full((numel,), torch.nan)
                summed_S.copy_(before_S)
                add(summed_S, mean, adds_up)
                torch.testing.assert_close(summed_S, before_S + expected_S if adds_up else expected_S, rtol=0, atol=0)

            return check

        torch.manual_seed(rank)
        for numel, mean, adds_up in itertools.product((8, 512, 8 * 12_345, 2**20), (False, True), (False, True)):
            adds.append(sent(numel, mean, adds_up))
            if len(adds) == 2:
                adds.popleft()()
        adds.popleft()()
        with pytest.raises(ValueError, match="do not fit into a slot"):
            peers.send(torch.zeros(world_size * (2**20 + 128), dtype=dtype))
        peers.close()


@opens_groups
def wrappers_share_communicators_from_windows(rank: int, world_size: int) -> None:
    """On CUDA alone: as the chunks of a pipeline stage do, where windows are worth it."""
    group = dist.new_group(list(range(world_size)))
    device = torch.device("cuda", torch.cuda.current_device())
    windows = are_worth_it(group, Communicator("world", group, device))
    gather, reduce = open_groups(group, device, ("gather", "reduce"), windows=windows)
    comms = open_communicators(None, (gather, reduce), device, None)
    expected = train(wrap(net(torch.float32)), 3, rank, world_size)
    for by in (False, True):
        for sharded in [wrap(net(torch.float32), comms=comms, windows=windows, peer_reduce=by) for _ in range(2)]:
            assert_close(train(sharded, 3, rank, world_size), expected, rtol=1e-5, atol=1e-5)
            sharded.close()


@opens_groups
def windows_may_outlive_their_group(_rank: int, world_size: int) -> None:
    """On CUDA alone: torch ends a process that frees memory of which a dead communicator has not been rid."""
    group = dist.new_group(list(range(world_size)))
    assert group is not None
    dist.all_reduce(torch.ones(1), group=group)  # makes the communicator
    windows = Windows(group, torch.device("cuda", torch.cuda.current_device()), 4096)
    part = windows.take(16, torch.float32).fill_(1.0)
    dist.all_reduce(part, group=group)
    torch.cuda.synchronize()
    dist.destroy_process_group(group)
    assert part.tolist() == [world_size] * 16
    del windows, part
    gc.collect()
    release_left()
    torch.cuda.empty_cache()


@opens_groups
def a_captured_step_equals_an_eager_one(rank: int, world_size: int) -> None:
    """On CUDA alone: the whole step, collectives and all, replayed on new data."""
    for in_backward, groups in ((False, False), (True, False), (True, True)):
        pairs = tuple(pair_of_one() if groups and world_size > 1 else None for _ in range(2))
        _captured_equals_eager(rank, world_size, in_backward, pairs)


def _captured_equals_eager(
    rank: int, world_size: int, in_backward: bool, pairs: tuple[Any, ...], **settings: Any
) -> None:
    tokens = [part[rank::world_size] for part in batches(6, world_size)]
    plain, captured = (wrap(net(torch.float32), groups=pair, **settings) for pair in pairs)
    graph, steps = torch.cuda.CUDAGraph(), []
    static = tokens[0].clone()
    for sharded in (plain, captured):
        options = {"lr": 0.03, "weight_decay": 0.1, "fused": True, "capturable": True}
        optimizer = sharded.optimizer(torch.optim.AdamW, step_in_backward=in_backward, **options)
        steps.append(functools.partial(_whole_step, sharded, optimizer))
    for batch in tokens[:3]:
        steps[0](batch)
        steps[1](batch)
    with torch.cuda.graph(graph):
        loss = steps[1](static)
    for batch in tokens[3:]:
        expected = steps[0](batch)
        static.copy_(batch)
        graph.replay()
        torch.testing.assert_close(loss, expected, rtol=0.0, atol=0.0)
    assert_same(captured.full_state_dict(), plain.full_state_dict())


def _whole_step(sharded: ShardedDataParallel, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    loss: Tensor = sharded(tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    sharded.wait_parameters()
    return loss.detach()


@opens_groups
def a_captured_step_from_windows_equals_an_eager_one(rank: int, world_size: int) -> None:
    """On CUDA alone: with gathers by copy engines, and sums that stay where they land."""
    _captured_equals_eager(rank, world_size, False, (None, None), windows=True)
    _captured_equals_eager(rank, world_size, False, (None, None), windows=True, peer_reduce=True)


GPU_CASES: list[Case] = [
    a_captured_step_equals_an_eager_one,
    a_captured_step_from_windows_equals_an_eager_one,
    reductions_by_copy_engines_change_nothing,
    what_copy_engines_carry_is_added_in_float32,
    windows_change_nothing,
    windows_may_outlive_their_group,
    wrappers_share_communicators_from_windows,
]


@case
def windows_and_copies_are_taken_where_they_can_be_had(rank: int, world_size: int) -> None:
    """What the hardware has is faked; whether it is asked for, and by how much memory, is not."""
    expected = train(wrap(net(torch.float32)), 2, rank, world_size)
    makes = functools.partial(ShardedDataParallel, bucket_bytes=1000, unused="zero")
    for free, is_able, takes in ((1 << 30, True, (True, True)), (1000, True, (False, False)), (1 << 30, False, (0, 0))):
        with contextlib.ExitStack() as stack:
            for name, value in (
                ("collectives.Windows", Nowhere),
                ("gather.Windows", Nowhere),
                ("collectives.PeerReduce", Summed),
                ("collectives.why_unusable", mock.Mock(return_value=None)),
                ("collectives.free_bytes", mock.Mock(return_value=free)),
                ("prepare.free_bytes", mock.Mock(return_value=free)),
                ("prepare._has_nccl", lambda *_: True),
                ("prepare.are_worth_it", lambda *_, has_room, able=is_able: has_room and able),
            ):
                stack.enter_context(mock.patch(f"collectives.sharded.{name}", value))
            sharded = makes(net(torch.float32))
            found = sharded._all_gather._windows is not None, isinstance(sharded._reduce_scatter, PeerReduceScatter)
            assert found == tuple(each and world_size > 1 for each in takes)
            assert_close(train(sharded, 2, rank, world_size), expected, rtol=1e-6, atol=1e-6)
            refused = makes(net(torch.float32), overlap=Overlap(windows=False))
            assert refused._all_gather._windows is None
            given = makes(net(torch.float32), groups=pair_of_one())
            assert given._all_gather._windows is None, "with groups of the caller's it is the caller who knows"

"""What ranks check of the monitor: counts of our wrapper, DDP and FSDP2 are those of what was launched."""

from __future__ import annotations

import itertools
from collections import Counter as Count
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from collectives import Recorder
from collectives.watch.align import ClockClient, ClockServer, same_host
from collectives.watch.hooks import attach
from collectives.watch.monitor import Monitor
from netlayer.observe.events import Event, Origin, Segment
from netlayer.observe.events.clocks import RankClock
from tests.collectives.settings import shard


class Kept:
    """A transport that keeps what it gets."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def send(self, events: Sequence[Event]) -> int:
        self.events += events
        return 0

    def close(self) -> None:
        pass

    def counts(self) -> Count[tuple[str, str, int | None]]:
        return Count((each.segment, each.name, each.step) for each in self.events if isinstance(each, Segment))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, monitor: Monitor, num_micro_batches: int = 2) -> None:
    """Two steps of two micro-batches, and a forward pass without gradients between them."""
    for step in (1, 2):
        monitor.step(step)
        for _ in range(num_micro_batches):
            model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    monitor.end_step()


def check_passes(kept: Kept) -> None:
    counts = kept.counts()
    for step in (1, 2):
        assert counts["forward", "forward", step] == counts["backward", "backward", step] == 2, counts
        assert counts["optimizer", "optimizer", step] == counts["step", "step", step] == 1, counts
    passes = [each for each in kept.events if isinstance(each, Segment) and each.segment in ("forward", "backward")]
    assert [each.micro_batch for each in passes] == [0, 0, 1, 1] * 2
    assert all(before.end_ns <= after.start_ns for before, after in itertools.pairwise(passes))


def ddp_is_seen_by_its_passes(rank: int, world_size: int) -> None:
    kept, model = Kept(), DistributedDataParallel(network())
    monitor = Monitor(kept, Origin(rank=rank), interval_s=600)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = attach(monitor, model, optimizer)
    train(model, optimizer, monitor)
    attached.remove()
    model(torch.randn(4, 8))
    monitor.close()
    check_passes(kept)
    waits = [each for each in kept.events if isinstance(each, Segment) and each.segment == "wait"]
    # Every backward pass ends with the wait for the reductions, and nothing comes after it.
    ends = {each.end_ns for each in kept.events if isinstance(each, Segment) and each.segment == "backward"}
    assert [each.name for each in waits] == ["all_reduce"] * 4
    assert all(any(0 <= end - each.end_ns < 50_000_000 for end in ends) for each in waits)


def ddp_and_plain_collectives_are_seen_when_asked(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    plain, timed = network(), network()
    timed.load_state_dict(plain.state_dict())
    reference = DistributedDataParallel(plain)
    kept, model = Kept(), DistributedDataParallel(timed)
    monitor = Monitor(kept, Origin(rank=rank), interval_s=600)
    functions = [dist.all_reduce, dist.all_gather, dist.barrier]
    attached = attach(monitor, model, collectives=True)
    batch = torch.randn(4, 8) + rank
    monitor.step(1)
    model(batch).square().mean().backward()
    monitor.step(2)
    total = torch.full((3,), float(rank))
    dist.all_reduce(total)
    work = dist.all_gather([torch.empty(2) for _ in range(world_size)], torch.ones(2), async_op=True)
    assert work is not None
    work.wait()
    dist.barrier()
    coalesced = [torch.ones(2), torch.ones(2)]
    with dist._coalescing_manager(async_ops=True) as later:  # type: ignore[attr-defined]
        for tensor in coalesced:
            dist.all_reduce(tensor, async_op=True)  # returns no work yet
    later.wait()
    assert [tensor[0] for tensor in coalesced] == [world_size] * 2
    monitor.end_step()
    attached.remove()
    assert [dist.all_reduce, dist.all_gather, dist.barrier] == functions
    reference(batch).square().mean().backward()
    model.zero_grad()
    model(batch).square().mean().backward()  # after the hooks are gone: reduced, and not timed
    monitor.close()
    assert total[0] == sum(range(world_size))
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    found = [each for each in kept.events if isinstance(each, Segment) and each.segment == "collective"]
    size = sum(parameter.numel() for parameter in model.parameters()) * 4
    assert [(each.step, each.group, each.name, each.bytes, each.group_ranks) for each in found] == [
        (1, "ddp", "all_reduce", size, f"0:{world_size}:1"),
        (2, "world", "all_reduce", 12, f"0:{world_size}:1"),
        (2, "world", "all_gather", 8 * world_size, f"0:{world_size}:1"),
        (2, "world", "barrier", 0, f"0:{world_size}:1"),
    ]
    assert all(each.attributes is None and each.start_ns < each.end_ns for each in found)
    waits = [(each.step, each.name) for each in kept.events if isinstance(each, Segment) and each.segment == "wait"]
    assert waits == [(1, "all_reduce"), (2, "all_reduce"), (2, "barrier")]


def fsdp2_is_seen_with_its_collectives(rank: int, world_size: int) -> None:
    kept, model = Kept(), network()
    mesh = init_device_mesh("cpu", (world_size,))  # by itself it would look for GPUs, and warn where there are some
    for module in (model[0], model[2]):  # type: ignore[index]
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    monitor = Monitor(kept, Origin(rank=rank), interval_s=600)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = attach(monitor, model, optimizer)
    train(model, optimizer, monitor)
    assert attached.num_timed == 2
    attached.remove()
    model(torch.randn(4, 8))
    monitor.close()
    check_passes(kept)
    collectives = [each for each in kept.events if isinstance(each, Segment) and each.segment == "collective"]
    counts = Count(each.name for each in collectives)
    # Two groups with parameters; each is gathered in a forward and again in a backward pass, and scattered there.
    assert counts == {"all_gather": 2 * 2 * 2 * 2, "reduce_scatter": 2 * 2 * 2}, counts
    assert {each.group_ranks for each in collectives} == {f"0:{world_size}:1"}
    assert all(each.bytes for each in collectives)


def our_wrapper_is_seen_by_its_recorder(rank: int, world_size: int) -> None:
    kept, recorder = Kept(), Recorder()
    monitor = Monitor(kept, Origin(rank=rank), interval_s=600)
    monitor.follow(recorder)
    model = shard(network(), recorder=recorder)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    launched = {}
    for step in (1, 2, 3):
        recorder.begin_step(step)
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        launched[step] = recorder.end_step().counts()
    monitor.close()
    model.close()
    counts = Count(
        (each.step, each.group, each.name)
        for each in kept.events
        if isinstance(each, Segment) and each.segment == "collective" and each.step is not None
    )
    assert counts == {(step, *key): number for step, of in launched.items() for key, number in of.items()}
    assert sum(counts.values()) > 0
    seqs = [each.seq for each in kept.events if isinstance(each, Segment) and each.segment == "collective"]
    every: list[list[int | None]] = [[]] * world_size
    dist.all_gather_object(every, seqs)
    assert all(each == every[0] for each in every)


def clocks_of_one_host_are_exact(rank: int, world_size: int) -> None:
    clock = RankClock(is_reference=rank == 0)
    server = ClockServer(clock, "127.0.0.1") if rank == 0 else None
    told = [server.reference if server else None]
    dist.broadcast_object_list(told, src=0)
    [reference] = told
    assert reference is not None
    if rank:
        assert same_host(clock, reference)
        assert clock.offset(clock.now_ns())[1] == 0
        # By messages, the same to within the error that is stated.
        other = RankClock()
        other.anchor_ns = clock.anchor_ns
        sample = ClockClient(other, reference).compare()
        assert sample is not None
        assert abs(sample.offset_ns - (clock.anchor_ns - reference.anchor_ns)) <= sample.error_ns
    dist.barrier()
    if server:
        server.close()


CASES = [
    ddp_is_seen_by_its_passes,
    ddp_and_plain_collectives_are_seen_when_asked,
    fsdp2_is_seen_with_its_collectives,
    our_wrapper_is_seen_by_its_recorder,
    clocks_of_one_host_are_exact,
]

"""What ranks check of the monitor: counts of our wrapper, DDP and FSDP2 are those of what was launched."""

from __future__ import annotations

import itertools
from collections import Counter as Count
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from collectives import Recorder, ShardedDataParallel
from collectives.watch.align import ClockClient, ClockServer, same_host
from collectives.watch.hooks import attach
from collectives.watch.monitor import Monitor
from netlayer.observe.events import Event, Origin, Segment
from netlayer.observe.events.clocks import RankClock


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
    gradients = [torch.zeros_like(parameter) for parameter in model.parameters()]
    assert len(gradients) == 4


def fsdp2_is_seen_with_its_collectives(rank: int, world_size: int) -> None:
    kept, model = Kept(), network()
    for module in (model[0], model[2]):  # type: ignore[index]
        fully_shard(module)
    fully_shard(model)
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
    model = ShardedDataParallel(network(), recorder=recorder)
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
    fsdp2_is_seen_with_its_collectives,
    our_wrapper_is_seen_by_its_recorder,
    clocks_of_one_host_are_exact,
]

"""Times of calls that all ranks of a group make together: in turn, by the device's clock, of the slowest rank.

On CUDA the ranks meet on the device right before each call, by a tiny all-reduce on the same stream, and the host runs
ahead of it meanwhile: so neither a late rank nor a slow host is measured. Where the host was not ahead all the same,
the times say so (`Times.host_bound`). On the CPU the host's clock is read. Not covered: what is called, and whether its
data is right.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist

Replay = Callable[[], object]
Key = TypeVar("Key", bound=Hashable)

_WARM_UPS = 3  # before each round: from the shortest sleep to eight times that
_SLEEP_CYCLES = 1_000_000  # about 0.5 ms, several times what a host needs to launch a graph
_MOST_SLEEP = 64  # times as long at most


@dataclass
class Times:
    """Times of one call.

    Args:
        rounds_us: microseconds of each call of each round, the longest of the ranks.
        num_late: calls that a rank's host had not launched when the device was ready for it.
    """

    rounds_us: list[list[float]] = field(default_factory=list)
    num_late: int = 0

    @property
    def each_us(self) -> list[float]:
        return [us for times_us in self.rounds_us for us in times_us]

    @property
    def host_bound(self) -> bool:
        """Whether the median holds some of the host's time."""
        return 2 * self.num_late >= len(self.each_us)


def make_replay(launch: Callable[[], object], launches: int, device: torch.device) -> Replay:
    """A captured graph of `launches` calls on CUDA, after two calls outside it; on the CPU a loop.

    Raises:
        RuntimeError: the call cannot be captured.
    """
    if device.type != "cuda":
        return functools.partial(_repeat, launch, launches)
    current, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        launch()
        launch()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        # The mode lets NCCL's watchdog thread ask for its events meanwhile.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            _repeat(launch, launches)
    except BaseException:
        torch.cuda.set_stream(current)  # which the context leaves undone where the capture has failed
        raise
    return functools.partial(_replay, graph, launch)


def time_in_turn(
    replays: Mapping[Key, Replay],
    group: dist.ProcessGroup,
    device: torch.device,
    launches: int,
    count: int,
    rounds: int,
) -> dict[Key, Times]:
    """Times a launch of `count` replays of each, one after the other, `rounds` times over; the same on every rank.

    Every rank of `group` calls it, on streams on which its earlier calls of the group are ordered.

    Args:
        launches: in one replay.
    """
    times: dict[Key, Times] = {key: Times() for key in replays}
    for _ in range(rounds):
        for key, replay in replays.items():
            measure = _time_on_cuda if device.type == "cuda" else _time_on_cpu
            late, each_us = measure(replay, group, device, count)
            values = greatest([*late, *each_us], group, device)
            times[key].num_late += sum(value > 0 for value in values[:count])
            times[key].rounds_us.append([us / launches for us in values[count:]])
    return times


def time_replays(replay: Replay, meet: Callable[[], object], count: int) -> tuple[list[bool], list[float]]:
    """Whether the host was late for each replay, and its microseconds, on the current CUDA stream.

    Args:
        replay: of a graph.
        meet: launches what makes the ranks meet on the device.
        count: replays that are timed.
    """
    late, each_us, sleep = [], [], 1
    for _ in range(_WARM_UPS + count):
        # One replay at a time: a launch of a graph that is still under way can hold up the host until it has ended.
        slept = torch.cuda.Event()  # type: ignore[no-untyped-call]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(sleep * _SLEEP_CYCLES)  # type: ignore[no-untyped-call] # the host runs ahead meanwhile
        slept.record()
        meet()
        begin.record()
        replay()
        end.record()
        late.append(bool(slept.query()))  # type: ignore[no-untyped-call]
        end.synchronize()
        each_us.append(1e3 * float(begin.elapsed_time(end)))
        if late[-1]:
            sleep = min(2 * sleep, _MOST_SLEEP)
    return late[_WARM_UPS:], each_us[_WARM_UPS:]


def greatest(values: Sequence[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """The greatest of the ranks, value by value."""
    tensor = torch.tensor([float(value) for value in values], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return [float(value) for value in tensor.tolist()]


def _replay(graph: torch.cuda.CUDAGraph, _launch: Callable[[], object]) -> None:
    """Holds on to the call too: the graph knows the addresses of its tensors, and does not keep them."""
    graph.replay()


def _repeat(launch: Callable[[], object], times: int) -> None:
    for _ in range(times):
        launch()


def _time_on_cuda(
    replay: Replay, group: dist.ProcessGroup, device: torch.device, count: int
) -> tuple[list[bool], list[float]]:
    token = torch.zeros(1, device=device)
    return time_replays(replay, lambda: dist.all_reduce(token, group=group), count)


def _time_on_cpu(
    replay: Replay, group: dist.ProcessGroup, device: torch.device, count: int
) -> tuple[list[bool], list[float]]:
    del device
    replay()
    each_us = []
    for _ in range(count):
        dist.barrier(group)
        begin = time.perf_counter()
        replay()
        each_us.append(1e6 * (time.perf_counter() - begin))
    return [False] * count, each_us

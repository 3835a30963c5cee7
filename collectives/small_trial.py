"""One small collective as a measurement sees it: buffers whose result is known exactly, and its time in a CUDA graph.

A time is that of a replayed graph of so many launches, by events, over the launches; the longest of the ranks. Before
each replay the ranks meet on the device, and the host runs ahead of it, so neither a late rank nor a slow host is
measured. On the CPU a replay is a loop, and the host's clock is read. Left out: what to compare (`tuning`, benches).

Shapes: W ranks; sizes are of the whole buffer, as nccl-tests count them.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.small_paths import Kind

logger = logging.getLogger(__name__)

Replay = Callable[[], None]
Key = TypeVar("Key", bound=Hashable)

_PERIOD = 11  # prime, so that every rank's row is another one
_VALUES = 5  # 0 to 4: sums over 8 ranks are below 2**5, and partial sums of 8 such sums below 2**8, exact in every type
_SLEEP_CYCLES = 1_000_000  # for each replay: about 0.5 ms, several times what a host needs to launch it
_MOST_SLEEP = 64  # times as long at most


class Trial:
    """One collective of one size on this rank.

    Args:
        kind: of the collective.
        source: what this rank gives.
        out: what it gets; `source` itself where an all-reduce is in place.
        launch: the call; it may put another tensor into `out`.
        rank, num_ranks: place in the group.
    """

    def __init__(
        self, kind: Kind, source: Tensor, out: Tensor, launch: Callable[[], None], rank: int, num_ranks: int
    ) -> None:
        self.kind, self.source, self.out, self.launch = kind, source, out, launch
        self.rank, self.num_ranks = rank, num_ranks

    def fill(self) -> None:
        """Poison what comes out, then write what goes in."""
        self.out.fill_(float("nan"))
        self.source.copy_(self._pattern(self.rank, 0, self.source.numel()))

    def count_wrong(self, launches: int = 1) -> int:
        """Elements of `out` that are not the result of so many launches since `fill`.

        Sums are exact; where several launches in place multiply by a W that is no power of two, they may round.
        """
        expected = self._expected()
        tolerance = 0.0
        if self.out is self.source and launches > 1:
            expected *= float(self.num_ranks) ** (launches - 1)
            if self.num_ranks & (self.num_ranks - 1):
                tolerance = launches * torch.finfo(self.out.dtype).eps
        differ = (self.out.view(-1).float() - expected).abs_() <= tolerance * expected
        return int(differ.logical_not_().sum())

    def _expected(self) -> Tensor:
        """The result of one launch, float32."""
        length = self.out.numel()
        if self.kind == "all_gather":
            return torch.cat([self._pattern(r, 0, self.source.numel()) for r in range(self.num_ranks)])
        start = self.rank * length if self.kind == "reduce_scatter" else 0
        total = self._pattern(0, start, length)
        for rank in range(1, self.num_ranks):
            total += self._pattern(rank, start, length)
        return total

    def _pattern(self, rank: int, start: int, length: int) -> Tensor:
        """Elements `start` and on of what a rank gives: whole numbers, another row of them for each rank."""
        index = torch.arange(start, start + length, device=self.source.device)
        return index.mul_(rank + 1).add_(rank).remainder_(_PERIOD).remainder_(_VALUES).float()


def make_replay(launch: Callable[[], None], launches: int, device: torch.device) -> Replay:
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
    return graph.replay


def is_right(trial: Trial, replay: Replay, launches: int, group: dist.ProcessGroup) -> bool:
    """Whether a replay, and then a launch of its own, gives every rank the result that it should.

    In this order: where a launch puts another tensor into `out`, that is the replay's until the next launch.
    """
    wrong = 0
    for call, times in ((replay, launches), (trial.launch, 1)):
        trial.fill()
        call()
        wrong += trial.count_wrong(times)
    return int(_greatest([wrong], group, trial.source.device)[0]) == 0


def time_in_turn(
    replays: Mapping[Key, Replay],
    group: dist.ProcessGroup,
    device: torch.device,
    launches: int,
    count: int,
    rounds: int,
) -> dict[Key, list[list[float]]]:
    """Microseconds a launch of `count` replays of each, one after the other, `rounds` times over: [rounds][count]."""
    times: dict[Key, list[list[float]]] = {key: [] for key in replays}
    for _ in range(rounds):
        for key, replay in replays.items():
            measure = _time_on_cuda if device.type == "cuda" else _time_on_cpu
            times[key].append([us / launches for us in measure(replay, group, device, count)])
    return times


def kernel_names(
    calls: Sequence[Callable[[], None]], device: torch.device, prefixes: tuple[str, ...]
) -> list[str] | None:
    """The kernel of each call whose name begins with one of `prefixes`, by the profiler.

    Every rank calls it. None where the profiler has not seen exactly one such kernel a call.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for call in calls:
            call()
        torch.cuda.synchronize(device)
    seen: list[Any] = [event for event in profile.events() or [] if event.name.startswith(prefixes)]
    on_device = [event for event in seen if event.device_type.name == "CUDA"]
    on_device.sort(key=lambda event: event.time_range.start)
    return [event.name for event in on_device] if len(on_device) == len(calls) else None


def _repeat(launch: Callable[[], None], times: int) -> None:
    for _ in range(times):
        launch()


def _time_on_cuda(replay: Replay, group: dist.ProcessGroup, device: torch.device, count: int) -> list[float]:
    token = torch.zeros(1, device=device)
    replay()
    sleep = 1
    while True:
        slept = torch.cuda.Event()  # type: ignore[no-untyped-call]
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]  # type: ignore[no-untyped-call]
        torch.cuda._sleep(sleep * count * _SLEEP_CYCLES)  # type: ignore[no-untyped-call] # the host runs ahead meanwhile
        slept.record()
        for begin, end in marks:
            dist.all_reduce(token, group=group)  # the ranks begin together
            begin.record()
            replay()
            end.record()
        too_slow = slept.query()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        late, *times = _greatest([too_slow, *(begin.elapsed_time(end) for begin, end in marks)], group, device)
        if not late:
            break
        if sleep >= _MOST_SLEEP:
            logger.warning("the host launches too slowly: the times hold some of that")
            break
        sleep *= 2
    return [1e3 * ms for ms in times]


def _time_on_cpu(replay: Replay, group: dist.ProcessGroup, device: torch.device, count: int) -> list[float]:
    replay()
    times = []
    for _ in range(count):
        dist.barrier(group)
        begin = time.perf_counter()
        replay()
        times.append(1e6 * (time.perf_counter() - begin))
    return _greatest(times, group, device)


def _greatest(values: list[Any], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """The greatest of the ranks, value by value."""
    tensor = torch.tensor([float(value) for value in values], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return [float(value) for value in tensor.tolist()]

"""Latency and bandwidth between every pair of ranks, in rounds of disjoint pairs.

The pairs of a round share no rank, so a slow or faulty link or device shows in the rows of its own pairs only. They
may still share switches and uplinks; there a round can be slower than each pair alone.

[Note: what is timed] On CUDA: launches of many messages between two events, in a communicator of the two ranks
(`collectives.transport.pair_link`). The host's launch time is not part of it and is reported as `host_us`. If the
caller gives no message size, it grows until bandwidth stops rising. With gloo, and where ranks share a GPU (`eager`):
single messages through torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.health.trial import (
    HealthRow,
    Progress,
    check_arguments,
    count_wrong,
    device_name,
    gather,
    giga_per_second,
    group_device,
    make_row,
    measure,
    pattern,
    poison,
    time_launches,
)
from collectives.timing import time_replays
from collectives.transport import libnccl
from collectives.transport.pair_link import PairLink, Tap
from netlayer.percentile import percentile

_LATENCY_BYTES = 8
_SIZES = (2**24, 2**26, 2**28, 2**30)  # tried in this order when the caller gives no size
_LEAST_GAIN = 0.03  # relative bandwidth gain from one size to the next below which it counts as saturated
_MEMORY_SHARE = 16  # a message takes at most 1/16 of the free memory, so that all buffers of a pair fit
_LAUNCH_US = 40_000.0  # duration of one launch, if the budget allows: long compared with host overhead and jitter
_MOST_MESSAGES = 512  # per launch
_ROUND_TRIPS = 50  # per CUDA graph
_LOW_TO_HIGH, _HIGH_TO_LOW, _BOTH, _LATENCY = "low_to_high", "high_to_low", "both", "latency"


def pair_rounds(num: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs of 0..num-1 that contain every pair once: num - 1 rounds, or num if num is odd.

    Round-robin scheduling by the circle method: one number is fixed, the others rotate by one place a round. With an
    odd `num`, each number is idle in one round. Pairs have the lower number first.
    """
    if num < 1:
        raise ValueError(f"num must be at least 1, got {num}")
    places: list[int | None] = [*range(num), *([None] * (num % 2))]
    rounds = []
    for _ in range(len(places) - 1):
        facing = zip(places[: len(places) // 2], reversed(places[len(places) // 2 :]), strict=True)
        rounds.append(sorted((min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None))
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def pairs(
    group: dist.ProcessGroup,
    num_bytes: int | None = 2**26,
    repeats: int = 20,
    *,
    budget_s: float = 60.0,
    only: Sequence[tuple[int, int]] = (),
    progress: Progress | None = None,
    messages: int | None = None,
    eager: bool = False,
    tap: Tap | None = None,
) -> list[HealthRow]:
    """Measure latency, bandwidth each way and bandwidth both ways for every pair of ranks; four rows a pair.

    A time is the larger one of the two ranks, so that it includes the arrival of the message. `latency` is half of a
    round trip of 8 bytes; for `both`, `bw_gbs` counts the bytes of one direction. All pairs of a round run at once.
    If the group also has a CPU backend, ranks synchronise on the CPU, since their GPU may be shared. On CUDA every
    call creates new communicators of pairs ([Note: what is timed]); the times of a row are then means over the
    messages of a launch, or over the round trips of a graph.

    Args:
        group: all its ranks call this.
        num_bytes: bytes of one message; None (CUDA only): grow it until bandwidth stops rising.
        repeats: maximum number of timed launches per measurement.
        budget_s: seconds for all rounds together.
        only: pairs of group ranks, the lower one first, each measured alone, in this order; empty: all, in rounds.
        progress: called after every round.
        messages: messages of one launch on CUDA; None: as many as fill some ten milliseconds. 1 is what nccl-tests
            times.
        eager: launch each message through torch on CUDA too. Also done where a rank does not find the NCCL library.
            Rows then have no `messages`, and their times include the host's launch time.
        tap: hook around each launch.

    Raises:
        ValueError: `only` has a pair that is not two ranks of the group, the lower one first; no size without CUDA.
    """
    rank, ranks, device = dist.get_rank(group), dist.get_world_size(group), group_device(group)
    if num_bytes is None and (eager or device.type != "cuda"):
        raise ValueError("num_bytes = None: sizes rise on CUDA without eager alone; give num_bytes")
    check_arguments(num_bytes or _SIZES[0], repeats, budget_s)
    if any(not 0 <= low < high < ranks for low, high in only):
        raise ValueError(f"only = {only}: must be pairs of ranks of 0..{ranks - 1}, the lower one first")
    _meet(group, device)  # all ranks must take part in the first call of a communicator
    rounds = [[pair] for pair in only] or pair_rounds(ranks)
    sync_device = torch.device("cpu") if "cpu:" in dist.get_backend_config(group) else device
    direct = device.type == "cuda" and not eager and not _greatest(not libnccl.is_there(), group, sync_device)
    num_bytes = num_bytes if num_bytes or direct else 2**26
    budget_each_s = budget_s / (4 * len(rounds))
    halves_of_rank: list[_Half] = []
    for number, meetings in enumerate(rounds):
        pair = next((pair for pair in meetings if rank in pair), None)
        with (
            _meeting(group, number, pair, sync_device, tap, messages)
            if direct
            else _eager_meeting(group, number, pair) as meeting
        ):
            if num_bytes is None:  # the first round decides for all: only links with equal messages are comparable
                size = meeting.find_size(budget_each_s) if meeting else 0
                num_bytes = _greatest(size, group, sync_device)
            if meeting:
                halves_of_rank += meeting.measure_all(num_bytes, repeats, budget_each_s)
        _meet(group, sync_device)
        if progress is not None:
            progress(number + 1, len(rounds))
    halves = [half for one_rank in gather(halves_of_rank, group) for half in one_rank]
    return _join(halves, dist.get_process_group_ranks(group))


class _Half(NamedTuple):
    """One measurement as seen by one rank of a pair."""

    rank: int
    round: int
    pair: tuple[int, int]
    direction: str
    size_bytes: int
    times_us: list[float]
    wrong: int
    device: str
    messages: int = 1
    host_us: list[float] | None = None


class _Meeting:
    """One rank's part in the measurement of a pair; messages go one by one through torch.

    Args:
        group: process group of both ranks.
        device: device of the message buffers.
        number: index of the round.
        pair: the two group ranks, the lower one first.
        rank: group rank of this process.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, number: int, pair: tuple[int, int], rank: int
    ) -> None:
        self._group, self._device, self._number, self._pair, self._rank = group, device, number, pair, rank
        self._peer = pair[1] if rank == pair[0] else pair[0]
        self._peer_in_world = dist.get_global_rank(group, self._peer)

    def find_size(self, budget_s: float) -> int:
        """Return the message size in bytes at which bandwidth stops rising."""
        raise NotImplementedError

    def measure_all(self, num_bytes: int, repeats: int, budget_s: float) -> list[_Half]:
        """Measure latency, both directions and both at once, with `budget_s` seconds for each of the four."""
        sizes = {_LATENCY: _LATENCY_BYTES, _LOW_TO_HIGH: num_bytes, _HIGH_TO_LOW: num_bytes, _BOTH: num_bytes}
        return [self._measure(direction, size, repeats, budget_s) for direction, size in sizes.items()]

    def _measure(self, direction: str, num_bytes: int, repeats: int, budget_s: float) -> _Half:
        """Measure one direction, both at once or latency, as this rank of the pair: times in us, wrong elements.

        Latency is half the round trip. Both ranks repeat as often as the slower one allows.
        """
        is_low = self._rank == self._pair[0]
        sends = direction in (_BOTH, _LATENCY, _LOW_TO_HIGH if is_low else _HIGH_TO_LOW)
        receives = direction in (_BOTH, _LATENCY, _HIGH_TO_LOW if is_low else _LOW_TO_HIGH)
        sent_N = pattern(num_bytes, self._device, self._rank, self._peer, self._number)
        expected_N = pattern(num_bytes, self._device, self._peer, self._rank, self._number)
        received_N = torch.empty_like(expected_N)
        poison(received_N, expected_N)
        call = self._call(sent_N if sends else None, received_N if receives else None, direction)
        times_us = measure(self._device, repeats, budget_s, call, agree=self._slower)
        wrong = count_wrong(received_N, expected_N) if receives else 0
        if direction == _LATENCY:
            times_us = [time_us / 2 for time_us in times_us]
        return self._half(direction, num_bytes, times_us, wrong)

    def _half(
        self, direction: str, num_bytes: int, times_us: list[float], wrong: int, messages: int = 1,
        host_us: list[float] | None = None,
    ) -> _Half:  # fmt: skip
        name = device_name(self._device)
        return _Half(
            self._rank, self._number, self._pair, direction, num_bytes, times_us, wrong, name, messages, host_us
        )

    def _call(self, send: Tensor | None, recv: Tensor | None, direction: str) -> Callable[[], None]:
        """Return the function to time: one exchange, or for latency one round trip."""
        if direction != _LATENCY:
            return lambda: _exchange(self._group, self._peer_in_world, send, recv)
        steps = [(send, None), (None, recv)]
        ordered = steps if self._rank == self._pair[0] else steps[::-1]

        def round_trip() -> None:
            for sent, received in ordered:
                _exchange(self._group, self._peer_in_world, sent, received)

        return round_trip

    def _slower(self, one_us: float) -> float:
        """Return the larger of the two ranks' times in microseconds."""
        local_us = torch.tensor([one_us], dtype=torch.float64, device=self._device)
        peer_us = torch.empty_like(local_us)
        _exchange(self._group, self._peer_in_world, local_us, peer_us)
        return max(one_us, float(peer_us))


class _DirectMeeting(_Meeting):
    """A `_Meeting` that calls NCCL directly, with many messages a launch."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, number: int, pair: tuple[int, int], rank: int,
        link: PairLink, sync_device: torch.device, tap: Tap | None, messages: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(group, device, number, pair, rank)
        self._link, self._sync_device, self._tap, self._messages = link, sync_device, tap, messages

    def find_size(self, budget_s: float) -> int:
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        max_bytes = -self._agree(-free_bytes // _MEMORY_SHARE)
        best_gbs, best_size = 0.0, _SIZES[0]
        for size in _SIZES:
            if size > max_bytes:
                break
            half = self._measure(_BOTH, size, 2, budget_s / len(_SIZES))
            gbs = giga_per_second(size, self._agree(min(half.times_us)))
            if gbs < best_gbs * (1 + _LEAST_GAIN):
                break
            best_gbs, best_size = gbs, size
        return best_size

    def _measure(self, direction: str, num_bytes: int, repeats: int, budget_s: float) -> _Half:
        is_low = self._rank == self._pair[0]
        sends = direction in (_BOTH, _LATENCY, _LOW_TO_HIGH if is_low else _HIGH_TO_LOW)
        receives = direction in (_BOTH, _LATENCY, _HIGH_TO_LOW if is_low else _LOW_TO_HIGH)
        sent_N = pattern(num_bytes, self._device, self._rank, self._peer, self._number)
        expected_N = pattern(num_bytes, self._device, self._peer, self._rank, self._number)
        received_N = torch.empty_like(expected_N)
        poison(received_N, expected_N)
        send, recv = sent_N if sends else None, received_N if receives else None
        if direction == _LATENCY:
            times_us, messages, host_us = *self._time_round_trips(sent_N, received_N, repeats), None
        else:
            messages, launches, repeats = self._plan(send, recv, repeats, budget_s)

            def block() -> None:
                for _ in range(launches):
                    self._launch(send, recv, messages)

            times_us, host_us = time_launches(self._device, repeats, block)
            times_us = [time_us / (launches * messages) for time_us in times_us]
            host_us = [time_us / launches for time_us in host_us]
        wrong = count_wrong(received_N, expected_N) if receives else 0
        return self._half(direction, num_bytes, times_us, wrong, messages, host_us)

    def _plan(self, send: Tensor | None, recv: Tensor | None, repeats: int, budget_s: float) -> tuple[int, int, int]:
        """Return messages per launch, launches per timed interval, and number of intervals; equal on both ranks."""
        [first_us], _ = time_launches(self._device, 1, partial(self._launch, send, recv, 4))
        one_us = max(self._agree(first_us) / 4, 1.0)
        launch_us = min(_LAUNCH_US, 1e6 * budget_s / (repeats + 1))
        messages = self._messages or max(1, min(_MOST_MESSAGES, round(launch_us / one_us)))
        launches = max(1, round(launch_us / (messages * one_us))) if self._messages else 1
        affordable = int(1e6 * budget_s / (messages * launches * one_us)) - 1
        return messages, launches, max(3, min(repeats, affordable))

    def _time_round_trips(self, sent_N: Tensor, received_N: Tensor, repeats: int) -> tuple[list[float], int]:
        """Time round trips in CUDA graphs; return the one-way times in microseconds and the messages of a graph."""
        there, back = partial(self._launch, sent_N, None), partial(self._launch, None, received_N)
        steps = (there, back) if self._rank == self._pair[0] else (back, there)

        def round_trips() -> None:
            for _ in range(_ROUND_TRIPS):
                for step in steps:
                    step()

        for step in steps:  # NCCL connects at the first message, which must not happen during capture
            step()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # "thread_local" lets NCCL's threads and torch's watchdog call CUDA during the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            round_trips()
        # 8 bytes both ways before each graph synchronise the ranks, so that none waits for the other inside it.
        meet = partial(self._launch, sent_N, received_N)
        _, times_us = time_replays(graph.replay, meet, repeats)
        graph.reset()  # else the communicator could not be destroyed
        return [time_us / (2 * _ROUND_TRIPS) for time_us in times_us], 2 * _ROUND_TRIPS

    def _launch(self, send: Tensor | None, recv: Tensor | None, num: int = 1) -> None:
        if self._tap is None:
            self._link.launch(send, recv, num)
            return
        self._link.launch(self._tap.before(self._peer, send, num), recv, num)
        self._tap.after()

    def _agree(self, value: float) -> float:
        """Return the larger of the two ranks' values."""
        local = torch.tensor([value], dtype=torch.float64, device=self._sync_device)
        remote = torch.empty_like(local)
        _exchange(self._group, self._peer_in_world, local, remote)
        return max(value, float(remote))


@contextlib.contextmanager
def _eager_meeting(group: dist.ProcessGroup, number: int, pair: tuple[int, int] | None) -> Iterator[_Meeting | None]:
    """Yield this rank's measurement through torch; None if the rank has no partner in this round."""
    yield None if pair is None else _Meeting(group, group_device(group), number, pair, dist.get_rank(group))


@contextlib.contextmanager
def _meeting(
    group: dist.ProcessGroup,
    number: int,
    pair: tuple[int, int] | None,
    sync_device: torch.device,
    tap: Tap | None,
    messages: int | None = None,
) -> Iterator[_DirectMeeting | None]:
    """Yield this rank's measurement over a new NCCL communicator of the pair, which is destroyed at the end."""
    if pair is None:
        yield None
        return
    rank, device = dist.get_rank(group), group_device(group)
    peer = pair[1] if rank == pair[0] else pair[0]

    def exchange_id(unique_id: Tensor) -> Tensor:
        peer_id = torch.empty_like(unique_id, device=sync_device)
        _exchange(group, dist.get_global_rank(group, peer), unique_id.to(sync_device), peer_id)
        return peer_id.cpu()

    link = PairLink(exchange_id, pair.index(rank), None if tap is None else tap.max_ctas(peer))
    try:
        yield _DirectMeeting(group, device, number, pair, rank, link, sync_device, tap, messages)
    except BaseException:
        link.abort()
        raise
    torch.cuda.synchronize(device)
    link.close()


def _exchange(group: dist.ProcessGroup, peer: int, send: Tensor | None, recv: Tensor | None) -> None:
    """Send to global rank `peer`, receive from it, or both at once, and wait."""
    operations = []
    if send is not None:
        operations.append(dist.P2POp(dist.isend, send, peer, group))
    if recv is not None:
        operations.append(dist.P2POp(dist.irecv, recv, peer, group))
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _meet(group: dist.ProcessGroup, device: torch.device) -> None:
    """Wait for all ranks of the group."""
    everyone = torch.zeros(1, device=device)
    dist.all_reduce(everyone, group=group)
    float(everyone)  # a copy to the host waits for the device


def _greatest(value: int, group: dist.ProcessGroup, device: torch.device) -> int:
    """Return the maximum of `value` over all ranks of the group."""
    greatest = torch.tensor([value], dtype=torch.int64, device=device)
    dist.all_reduce(greatest, dist.ReduceOp.MAX, group=group)
    return int(greatest)


def _join(halves: Sequence[_Half], ranks_in_world: Sequence[int]) -> list[HealthRow]:
    """Combine the two ranks' halves of every measurement to one row, sorted by round."""
    order = (_LATENCY, _LOW_TO_HIGH, _HIGH_TO_LOW, _BOTH)
    by_key = {(half.round, half.pair, order.index(half.direction), half.rank): half for half in halves}
    rows = []
    for key in sorted({key[:3] for key in by_key}):
        low, high = (by_key[*key, rank] for rank in key[1])
        times_us = list(map(max, low.times_us, high.times_us))
        device = low.device if low.device == high.device else f"{low.device}, {high.device}"
        row = make_row("pairs", ranks_in_world[low.rank], device, low.size_bytes, times_us, low.wrong + high.wrong)
        row["peer"], row["round"], row["direction"] = ranks_in_world[high.rank], low.round, low.direction
        if low.direction != _LATENCY:
            row["bw_gbs"] = giga_per_second(low.size_bytes, row["p50_us"])
        if low.host_us and high.host_us:
            row["messages"] = low.messages
            row["host_us"] = max(percentile(low.host_us, 50), percentile(high.host_us, 50))
        rows.append(row)
    return rows

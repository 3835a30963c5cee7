"""Every pair of ranks once, in rounds in which each rank has one partner: latency and bandwidth of each link alone.

A slow or faulty link, or device, shows in the rows of its pairs and in no others, since the pairs of a round share no
rank. Left out: what they share all the same (switches, uplinks), which is where a round differs from a pair alone.

[Note: what is timed] On CUDA, launches of many messages between two events, in a communicator of the two alone
(`collectives.pair_link`): the host is no part of it, and what it takes is `host_us`. Where the caller names no size,
it rises until bandwidth does not. With gloo, and where ranks share a GPU (`eager`), single messages through torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from collectives import libnccl
from collectives.health_trial import (
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
from collectives.pair_link import PairLink, Tap
from collectives.timing import time_replays
from netlayer.percentile import percentile

_LATENCY_BYTES = 8
_SIZES = (2**24, 2**26, 2**28, 2**30)  # tried in this order where no size is asked for
_LEAST_GAIN = 0.03  # of bandwidth, from one size to the next: with less it has stopped rising
_MEMORY_SHARE = 16  # a message is so small a part of what is free: all buffers of a meeting fit, of twice its size too
_LAUNCH_US = 40_000.0  # of one launch, if the budget allows: host and pulses are small beside it
_MOST_MESSAGES = 512  # of one launch
_ROUND_TRIPS = 50  # of a graph
_LOW_TO_HIGH, _HIGH_TO_LOW, _BOTH, _LATENCY = "low_to_high", "high_to_low", "both", "latency"


def pair_rounds(num: int) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs of 0..num-1 in which every two meet once: num - 1 rounds, num where that is odd.

    The circle method: one stands still, the others move around by one place a round; whoever faces the empty place of
    an odd number rests. Pairs have the lower number first.
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
    """Latency, each way alone and both ways at once for every pair of ranks, in `pair_rounds`; four rows a pair.

    A time is the longer one of the two ranks', so that a message counts when it has arrived. `latency` is half of a
    round trip of 8 bytes; of `both`, `bw_gbs` counts the bytes of one way. All pairs of a round run at once; a rank
    whose group has a CPU backend too waits for the others without its device, which may be theirs. Every call makes
    new communicators of pairs on CUDA ([Note: what is timed]); a row's times are then means over the messages of a
    launch, or over the round trips of a graph.

    Args:
        group: every rank of it calls this.
        num_bytes: of one message; None, on CUDA alone: as many as it takes until bandwidth stops rising.
        repeats: most launches of each.
        budget_s: seconds for all rounds together.
        only: these pairs of the group's ranks, the lower one first, each alone, in this order; empty: all, in rounds.
        progress: hears of every round.
        messages: on CUDA, of a launch; None: as many as fill some ten milliseconds. 1 times what nccl-tests times.
        eager: launch message by message through torch also on CUDA, as is done where a rank does not find NCCL's
            library; rows have no `messages` then, and hold what the host takes to launch.
        tap: stands between this and NCCL.

    Raises:
        ValueError: `only` names no pair of two ranks of the group, the lower one first; no size without CUDA.
    """
    rank, ranks, device = dist.get_rank(group), dist.get_world_size(group), group_device(group)
    if num_bytes is None and (eager or device.type != "cuda"):
        raise ValueError("num_bytes = None: sizes rise on CUDA without eager alone")
    check_arguments(num_bytes or _SIZES[0], repeats, budget_s)
    if any(not 0 <= low < high < ranks for low, high in only):
        raise ValueError(f"only = {only}: must be pairs of ranks of 0..{ranks - 1}, the lower one first")
    _meet(group, device)  # all ranks must take part in the first call of a communicator
    rounds = [[pair] for pair in only] or pair_rounds(ranks)
    meets_on = torch.device("cpu") if "cpu:" in dist.get_backend_config(group) else device
    direct = device.type == "cuda" and not eager and not _greatest(not libnccl.is_there(), group, meets_on)
    num_bytes = num_bytes if num_bytes or direct else 2**26
    budget_each_s = budget_s / (4 * len(rounds))
    mine: list[_Half] = []
    for number, meetings in enumerate(rounds):
        pair = next((pair for pair in meetings if rank in pair), None)
        with (
            _meeting(group, number, pair, meets_on, tap, messages)
            if direct
            else _eager_meeting(group, number, pair) as meeting
        ):
            if num_bytes is None:  # the first round decides, for all: only alike messages are peers
                size = meeting.find_size(budget_each_s) if meeting else 0
                num_bytes = _greatest(size, group, meets_on)
            if meeting:
                mine += meeting.measure_all(num_bytes, repeats, budget_each_s)
        _meet(group, meets_on)
        if progress is not None:
            progress(number + 1, len(rounds))
    halves = [half for rank_halves in gather(mine, group) for half in rank_halves]
    return _join(halves, dist.get_process_group_ranks(group))


class _Half(NamedTuple):
    """What one rank of a pair has measured."""

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
    """One rank of a pair, with its partner; messages go one by one through torch.

    Args:
        group: that both are in.
        device: of the messages.
        number: of the round.
        pair: ranks in the group, the lower one first.
        rank: this one.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, number: int, pair: tuple[int, int], rank: int
    ) -> None:
        self._group, self._device, self._number, self._pair, self._rank = group, device, number, pair, rank
        self._peer = pair[1] if rank == pair[0] else pair[0]
        self._peer_in_world = dist.get_global_rank(group, self._peer)

    def find_size(self, budget_s: float) -> int:
        """The size from which bandwidth rises no more."""
        raise NotImplementedError

    def measure_all(self, num_bytes: int, repeats: int, budget_s: float) -> list[_Half]:
        """Each of the four, with `budget_s` seconds each."""
        sizes = {_LATENCY: _LATENCY_BYTES, _LOW_TO_HIGH: num_bytes, _HIGH_TO_LOW: num_bytes, _BOTH: num_bytes}
        return [self._measure(direction, size, repeats, budget_s) for direction, size in sizes.items()]

    def _measure(self, direction: str, num_bytes: int, repeats: int, budget_s: float) -> _Half:
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
        """What is timed: one exchange, or there and back again."""
        if direction != _LATENCY:
            return lambda: _exchange(self._group, self._peer_in_world, send, recv)
        steps = [(send, None), (None, recv)]
        ordered = steps if self._rank == self._pair[0] else steps[::-1]

        def round_trip() -> None:
            for sent, received in ordered:
                _exchange(self._group, self._peer_in_world, sent, received)

        return round_trip

    def _slower(self, one_us: float) -> float:
        """The longer time of the two ranks."""
        mine = torch.tensor([one_us], dtype=torch.float64, device=self._device)
        theirs = torch.empty_like(mine)
        _exchange(self._group, self._peer_in_world, mine, theirs)
        return max(one_us, float(theirs))


class _DirectMeeting(_Meeting):
    """As `_Meeting`, with many messages a launch through NCCL itself."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, number: int, pair: tuple[int, int], rank: int,
        link: PairLink, meets_on: torch.device, tap: Tap | None, messages: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(group, device, number, pair, rank)
        self._link, self._meets_on, self._tap, self._messages = link, meets_on, tap, messages

    def find_size(self, budget_s: float) -> int:
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        most_bytes = -self._agree(-free_bytes // _MEMORY_SHARE)
        best_gbs, found = 0.0, _SIZES[0]
        for size in _SIZES:
            if size > most_bytes:
                break
            half = self._measure(_BOTH, size, 2, budget_s / len(_SIZES))
            gbs = giga_per_second(size, self._agree(min(half.times_us)))
            if gbs < best_gbs * (1 + _LEAST_GAIN):
                break
            best_gbs, found = gbs, size
        return found

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
        """Messages of a launch, launches between two marks, and how many of these: the same on both ranks."""
        [first_us], _ = time_launches(self._device, 1, partial(self._launch, send, recv, 4))
        one_us = max(self._agree(first_us) / 4, 1.0)
        launch_us = min(_LAUNCH_US, 1e6 * budget_s / (repeats + 1))
        messages = self._messages or max(1, min(_MOST_MESSAGES, round(launch_us / one_us)))
        launches = max(1, round(launch_us / (messages * one_us))) if self._messages else 1
        affordable = int(1e6 * budget_s / (messages * launches * one_us)) - 1
        return messages, launches, max(3, min(repeats, affordable))

    def _time_round_trips(self, sent_N: Tensor, received_N: Tensor, repeats: int) -> tuple[list[float], int]:
        """Half the time of a round trip, by graphs; and messages of a graph."""
        there, back = partial(self._launch, sent_N, None), partial(self._launch, None, received_N)
        steps = (there, back) if self._rank == self._pair[0] else (back, there)

        def round_trips() -> None:
            for _ in range(_ROUND_TRIPS):
                for step in steps:
                    step()

        for step in steps:  # connections are made outside of the graph
            step()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # The mode lets NCCL's threads, and torch's watchdog, use CUDA meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            round_trips()
        # Ahead of a graph, 8 bytes both ways, so that neither rank waits for the other within it.
        meet = partial(self._launch, sent_N, received_N)
        _, times_us = time_replays(graph.replay, meet, repeats)
        graph.reset()  # or the communicator could not be given back
        return [time_us / (2 * _ROUND_TRIPS) for time_us in times_us], 2 * _ROUND_TRIPS

    def _launch(self, send: Tensor | None, recv: Tensor | None, num: int = 1) -> None:
        if self._tap is None:
            self._link.launch(send, recv, num)
            return
        self._link.launch(self._tap.before(self._peer, send, num), recv, num)
        self._tap.after()

    def _agree(self, value: float) -> float:
        """The greater of the two ranks' values."""
        mine = torch.tensor([value], dtype=torch.float64, device=self._meets_on)
        theirs = torch.empty_like(mine)
        _exchange(self._group, self._peer_in_world, mine, theirs)
        return max(value, float(theirs))


@contextlib.contextmanager
def _eager_meeting(group: dist.ProcessGroup, number: int, pair: tuple[int, int] | None) -> Iterator[_Meeting | None]:
    """This rank's part of a pair; None where it rests in this round."""
    yield None if pair is None else _Meeting(group, group_device(group), number, pair, dist.get_rank(group))


@contextlib.contextmanager
def _meeting(
    group: dist.ProcessGroup,
    number: int,
    pair: tuple[int, int] | None,
    meets_on: torch.device,
    tap: Tap | None,
    messages: int | None = None,
) -> Iterator[_DirectMeeting | None]:
    """As `_eager_meeting`, over a communicator of its own, which ends with it."""
    if pair is None:
        yield None
        return
    rank, device = dist.get_rank(group), group_device(group)
    peer = pair[1] if rank == pair[0] else pair[0]

    def swap(mine: Tensor) -> Tensor:
        theirs = torch.empty_like(mine, device=meets_on)
        _exchange(group, dist.get_global_rank(group, peer), mine.to(meets_on), theirs)
        return theirs.cpu()

    link = PairLink(swap, pair.index(rank), None if tap is None else tap.max_ctas(peer))
    try:
        yield _DirectMeeting(group, device, number, pair, rank, link, meets_on, tap, messages)
    except BaseException:
        link.abort()
        raise
    torch.cuda.synchronize(device)
    link.close()


def _exchange(group: dist.ProcessGroup, peer: int, send: Tensor | None, recv: Tensor | None) -> None:
    """Send to a rank of the world, receive from it, or both at once."""
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
    float(everyone)  # which waits for the device


def _greatest(value: int, group: dist.ProcessGroup, device: torch.device) -> int:
    """Of all ranks of the group."""
    greatest = torch.tensor([value], dtype=torch.int64, device=device)
    dist.all_reduce(greatest, dist.ReduceOp.MAX, group=group)
    return int(greatest)


def _join(halves: Sequence[_Half], ranks_in_world: Sequence[int]) -> list[HealthRow]:
    """The two halves of every measurement as one row, round by round."""
    order = (_LATENCY, _LOW_TO_HIGH, _HIGH_TO_LOW, _BOTH)
    ours = {(half.round, half.pair, order.index(half.direction), half.rank): half for half in halves}
    rows = []
    for key in sorted({key[:3] for key in ours}):
        low, high = (ours[*key, rank] for rank in key[1])
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

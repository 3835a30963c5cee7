"""Every pair of ranks once, in rounds in which each rank has one partner: latency and bandwidth of each link alone.

A slow or faulty link, or device, shows in the rows of its pairs and in no others, since the pairs of a round share no
rank. Left out: what they share all the same (switches, uplinks), which is where a round differs from a pair alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

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
)

_LATENCY_BYTES = 8
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
    num_bytes: int = 2**26,
    repeats: int = 20,
    *,
    budget_s: float = 60.0,
    only: Sequence[tuple[int, int]] = (),
    progress: Progress | None = None,
) -> list[HealthRow]:
    """Latency, each way alone and both ways at once for every pair of ranks, in `pair_rounds`; four rows a pair.

    A time is the longer one of the two ranks', so that a message counts when it has arrived. `latency` is half of a
    round trip of 8 bytes; of `both`, `bw_gbs` counts the bytes of one way. All pairs of a round run at once; a rank
    whose group has a CPU backend too waits for the others without its device, which may be theirs.

    Args:
        group: every rank of it calls this.
        num_bytes: of one message.
        repeats: most iterations of each.
        budget_s: seconds for all rounds together.
        only: these pairs of the group's ranks, the lower one first, each alone, in this order; empty: all, in rounds.
        progress: hears of every round.

    Raises:
        ValueError: `only` names no pair of two ranks of the group, the lower one first.
    """
    check_arguments(num_bytes, repeats, budget_s)
    rank, ranks, device = dist.get_rank(group), dist.get_world_size(group), group_device(group)
    if any(not 0 <= low < high < ranks for low, high in only):
        raise ValueError(f"only = {only}: must be pairs of ranks of 0..{ranks - 1}, the lower one first")
    _meet(group, device)  # all ranks must take part in the first call of a communicator
    rounds = [[pair] for pair in only] or pair_rounds(ranks)
    meets_on = torch.device("cpu") if "cpu:" in dist.get_backend_config(group) else device
    mine: list[_Half] = []
    for number, meetings in enumerate(rounds):
        for pair in meetings:
            if rank in pair:
                meeting = _Meeting(group, device, number, pair, rank)
                mine += meeting.measure_all(num_bytes, repeats, budget_s / (4 * len(rounds)))
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


class _Meeting:
    """One rank of a pair, with its partner.

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
        name = device_name(self._device)
        return _Half(self._rank, self._number, self._pair, direction, num_bytes, times_us, wrong, name)

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
        rows.append(row)
    return rows

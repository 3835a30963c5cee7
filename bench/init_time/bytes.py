"""Bytes on the wire, both ways, while a layout's groups are made: summed from the traffic model without a replay.

What all ranks say alike (joining, barriers) is summed once and taken times the ranks: the cost grows with ranks plus
groups, not with their product. What `bench.init_time` replays, byte by byte. Real ranks on Redis may differ by the
digits of a number: the mark of a rank, serial numbers, and the count that a barrier's second look finds. Not covered:
the headers of TCP and IP.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from bench.init_time.traffic import Request, Way, amount, barrier, encode, grouping, joining, last_words, num_groups
from netlayer.layout import ParallelLayout

_EPOCH_BYTES = 16  # of RedisStore's answer to who joins
_CONNECTION = b"0" * 16
_TCP_ANSWERS = {"VALIDATE": 0, "SET": 0, "PING": 4, "ADD": 8, "ARRIVE": 8, "WAIT": 1}
_COUNTERS = ("ADD", "ARRIVE")


def num_bytes(way: Way, layout: ParallelLayout) -> int:
    """Requests and answers of all ranks together, the backend's among them."""
    ranks = layout.world_size
    alike = list(joining(way))
    if way.method == "baseline":
        alike += [one for number in range(1 + num_groups(way, layout)) for one in barrier(number)]
    lasts = [last for one in alike if one.kind == "ARRIVE" for last in last_words(way, one)]
    without_barriers = replace(way, method="torch") if way.method == "baseline" else way
    own = [list(grouping(without_barriers, layout, rank)) for rank in range(ranks)]
    sizes = {one.key: len(one.value) for one in itertools.chain(lasts, *own) if one.kind in ("SET", "COMPARE_SET")}

    def both_ways(one: Request, serial: int) -> int:
        return len(encode(way, one, _CONNECTION, serial)) + _answer_bytes(way, one, sizes.get(one.key, 0))

    total = sum(ranks * both_ways(one, serial) for serial, one in enumerate(alike, 1))
    total += sum(
        both_ways(one, serial) for rank_requests in own for serial, one in enumerate(rank_requests, 1 + len(alike))
    )
    total += sum(both_ways(one, len(alike)) for one in lasts)
    if way.method == "ours":  # the last one to come does not wait
        total -= both_ways(alike[-1], len(alike))
    if way.store == "redis":
        total += sum(_count_bytes(way, one, ranks) for one in alike if one.kind in _COUNTERS)
    return total


def _answer_bytes(way: Way, request: Request, value_bytes: int) -> int:
    """Return the bytes of one answer; 0 for Redis' to a counter: `_count_bytes` has those of all ranks."""
    if way.store == "tcp":
        return _TCP_ANSWERS.get(request.kind, 8 + value_bytes)
    if request.kind in _COUNTERS:
        return 0
    return _bulk_bytes({"JOIN": _EPOCH_BYTES, "SET": 0}.get(request.kind, value_bytes))


def _count_bytes(way: Way, request: Request, ranks: int) -> int:
    """Redis' answers to all ranks: the sum so far where each adds something, or `=ranks` to each."""
    added = amount(way, request)
    return sum(_bulk_bytes(len(f"={count * added or ranks}")) for count in range(1, ranks + 1))


def _bulk_bytes(size: int) -> int:
    """Return the bytes on Redis' wire of a string of `size` bytes: $SIZE, line end, string, line end."""
    return len(f"${size}\r\n") + size + len("\r\n")

"""`alltoallv_perf`: as alltoall, with parts of unequal size. The size is the most that a rank sends or receives.

Without a matrix each rank sends the more to a rank the farther ahead it is, as nccl-tests does; NCCL_TESTS_ALLTOALLV_*
are its variables. Where we differ: a bad value is refused, not passed over, and PRINT_SUMMARY is not built.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bench.perf.binary import perf_command
from bench.perf.collectives.collective import Collective, Part, Place
from bench.perf.options import PerfOptions, flag_name
from bench.perf.traffic import Traffic, read_traffic
from netlayer.errors import ConfigError

if TYPE_CHECKING:
    from bench.backends import Backend, Call


def _launch(backend: Backend, call: Call) -> None:
    counts = _counts(call.part_count, call.send.itemsize, backend.ranks)
    received = [row[backend.rank] for row in counts]
    backend.alltoallv(call.recv, call.send, received, counts[backend.rank])


def _counts(count: int, width_bytes: int, ranks: int) -> Sequence[Sequence[int]]:
    """Elements from each rank (row) to each rank, for parts of `count` elements on average."""
    return _split(read_traffic(), count * width_bytes * ranks, width_bytes, ranks)


@functools.lru_cache(maxsize=8)  # gloo's calls are worked out while the clock runs
def _split(traffic: Traffic, total_bytes: int, width_bytes: int, ranks: int) -> Sequence[Sequence[int]]:
    return [[size // width_bytes for size in row] for row in traffic.sizes(total_bytes, ranks)]


def _extents(count: int, width_bytes: int, ranks: int) -> tuple[int, int]:
    counts = _counts(count, width_bytes, ranks)
    return max(map(sum, counts)), max(map(sum, zip(*counts, strict=True)))


def _expect(place: Place) -> list[Part]:
    counts = _counts(place.count, place.width_bytes, place.ranks)
    return [Part(source, sum(row[: place.rank]), row[place.rank]) for source, row in enumerate(counts)]


def _check(options: PerfOptions, ranks: int) -> None:
    traffic = read_traffic()
    if traffic.matrix is None:
        return
    traffic.check_ranks(ranks)
    if options.min_bytes != options.max_bytes:
        rule = "a matrix of traffic sets the sizes, so there is one"
        raise ConfigError(flag_name("min_bytes"), options.min_bytes, rule, "give -b and -e the same value")
    largest = max(_extents(0, 1, ranks))
    if largest > options.max_bytes:
        rule = f"the matrix of traffic sends or receives up to {largest} bytes on a rank"
        raise ConfigError(flag_name("max_bytes"), options.max_bytes, rule, f"give -b {largest} -e {largest}")


COLLECTIVE = Collective(
    name="alltoallv",
    summary="As alltoall, with parts of unequal size.",
    bus_factor=lambda ranks: (ranks - 1) / ranks,
    launch=_launch,
    expect=_expect,
    sends_all=True,
    receives_all=True,
    checks_in_place=False,  # parts would be overwritten before they are sent
    extents=_extents,
    check=_check,
)
command = perf_command(COLLECTIVE)

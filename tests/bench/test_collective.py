"""Sizes, factors and parts of each collective, by hand."""

from __future__ import annotations

import pytest
import torch

from bench.perf.collectives.collective import Part, Place
from bench.perf.driver import Buffers, load_collective

ALL = (
    "all_reduce", "all_gather", "reduce_scatter", "sendrecv", "alltoall", "broadcast", "reduce", "gather", "scatter",
    "alltoallv", "hypercube",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "factors"),
    [
        ("all_reduce", {1: 0, 2: 1, 4: 1.5, 8: 1.75}),
        ("all_gather", {1: 0, 2: 0.5, 4: 0.75, 8: 0.875}),
        ("reduce_scatter", {2: 0.5, 8: 0.875}),
        ("alltoall", {2: 0.5, 8: 0.875}),
        ("gather", {2: 0.5, 8: 0.875}),
        ("scatter", {2: 0.5, 8: 0.875}),
        ("sendrecv", {2: 1, 8: 1}),
        ("broadcast", {2: 1, 8: 1}),
        ("reduce", {2: 1, 8: 1}),
        ("alltoallv", {2: 0.5, 8: 0.875}),
        ("hypercube", {2: 1, 8: 1}),
    ],
)
def test_bus_factor(name: str, factors: dict[int, float]) -> None:
    collective = load_collective(name)
    assert {ranks: collective.bus_factor(ranks) for ranks in factors} == pytest.approx(factors)


def test_bandwidth_counts_billions_of_bytes_a_second() -> None:
    assert load_collective("all_reduce").bandwidth_gbs(2 * 10**9, 0.5, 4) == pytest.approx((4.0, 6.0))
    assert load_collective("all_gather").bandwidth_gbs(0, 1e-6, 4) == (0.0, 0.0)
    assert load_collective("hypercube").bandwidth_gbs(8 * 10**9, 1, 8) == pytest.approx(
        (7.0, 7.0)
    )  # its own is omitted


@pytest.mark.parametrize(
    ("name", "size_bytes", "width_bytes", "ranks", "count"),
    [
        ("all_reduce", 8, 4, 2, 2),
        ("all_reduce", 7, 4, 2, 1),
        ("sendrecv", 1 << 20, 8, 3, 1 << 17),
        ("all_gather", 8, 4, 2, 0),  # nccl-tests' famous first line
        ("all_gather", 32, 4, 2, 4),
        ("all_gather", 1 << 20, 4, 3, 87380),  # 262144 / 3 = 87381, down to a multiple of 16 bytes
        ("reduce_scatter", 1 << 20, 1, 3, 349520),
        ("alltoall", 100, 2, 3, 16),
        ("gather", 64, 8, 2, 4),
        ("scatter", 64, 8, 5, 0),
    ],
)
def test_each_rank_gets_whole_elements(name: str, size_bytes: int, width_bytes: int, ranks: int, count: int) -> None:
    assert load_collective(name).count(size_bytes, width_bytes, ranks) == count


def test_parts_say_where_each_element_comes_from() -> None:
    place = Place(rank=1, ranks=3, root=2, count=10)
    expected = {
        "all_reduce": [Part(None, 0)],
        "all_gather": [Part(0, 0), Part(1, 0), Part(2, 0)],
        "reduce_scatter": [Part(None, 10)],
        "sendrecv": [Part(0, 0)],
        "alltoall": [Part(0, 10), Part(1, 10), Part(2, 10)],
        "broadcast": [Part(2, 0)],
        "reduce": [],
        "gather": [],
        "scatter": [Part(2, 10)],
        "alltoallv": [Part(0, 0, 0), Part(1, 16, 0), Part(2, 0, 16)],  # of 30 bytes 10 one ahead, 20 two: whole 16
        "hypercube": [Part(0, 0), Part(1, 0), Part(2, 0)],
    }
    assert {name: list(load_collective(name).expect(place)) for name in ALL} == expected


def test_the_root_expects_what_others_do_not() -> None:
    place = Place(rank=2, ranks=3, root=2, count=10)
    assert load_collective("reduce").expect(place) == [Part(None, 0)]
    assert load_collective("gather").expect(place) == [Part(0, 0), Part(1, 0), Part(2, 0)]


class _OneOfThree:
    """As much of a backend as buffers need."""

    rank, ranks = 1, 3

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)


@pytest.mark.parametrize("name", ALL)
def test_in_place_the_smaller_buffer_is_this_ranks_part_of_the_larger(name: str) -> None:
    collective = load_collective(name)
    [call] = Buffers(_OneOfThree(), 1024, 0).calls(collective, 8, ("float", "sum", 0), True, 1)  # type: ignore[arg-type]
    ahead = (call.send.data_ptr() - call.recv.data_ptr()) // 4
    assert ahead == {(1, 3): 8, (3, 1): -8}.get(collective.buffer_parts(3), 0)
    assert (call.send.numel(), call.recv.numel()) == collective.elements(8, 4, 3)


def test_calls_use_stretches_of_their_own_as_far_as_buffers_reach() -> None:
    buffers = Buffers(_OneOfThree(), 1000, unalign=3)  # type: ignore[arg-type]
    calls = buffers.calls(load_collective("all_gather"), 20, ("float", "none", -1), False, 20)
    starts = [call.recv.storage_offset() * 4 for call in calls]
    assert starts == [12, 12 + 240, 12 + 480, 12 + 720]
    assert buffers.calls(load_collective("all_gather"), 0, ("float", "none", -1), False, 20)[0].recv.numel() == 0

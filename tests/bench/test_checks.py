"""Data whose result is known: exact, seeded, and every wrong element is counted."""

from __future__ import annotations

import pytest
import torch

from bench.backends import DTYPES
from bench.backends.base import premultiplier
from bench.perf.collectives.collective import Part
from bench.perf.driver import PERIOD, Data, poison
from bench.perf.options import OP_NAMES

COUNT = 2 * PERIOD + 100


def inputs_of(data: Data, count: int = COUNT) -> list[torch.Tensor]:
    buffers = [torch.empty(count, dtype=data.dtype) for _ in range(data.ranks)]
    for rank, buffer in enumerate(buffers):
        data.fill(buffer, rank)
    return buffers


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 300])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "half", "bfloat16", "float"])
@pytest.mark.parametrize("op", ["sum", "prod", "max", "min"])
def test_reductions_are_exact_in_the_type_itself(ranks: int, dtype: str, op: str) -> None:
    data = Data(ranks, DTYPES[dtype], op, seed=5)
    first, *others = inputs_of(data, PERIOD + 7)
    for other in others:
        first = {"sum": first + other, "prod": first * other}.get(
            op, getattr(torch, f"{op}imum", torch.add)(first, other)
        )
    assert data.count_wrong(first, [Part(None, 0)]) == 0


def test_more_ranks_than_the_type_counts_still_give_every_rank_a_say() -> None:
    data = Data(300, torch.int8, "sum", seed=1)
    assert all(buffer.any() for buffer in inputs_of(data, PERIOD))


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_one_changed_element_is_one_wrong(dtype: str) -> None:
    data = Data(2, DTYPES[dtype], "sum", seed=3)
    exact = sum((each.double() for each in inputs_of(data)), start=torch.zeros(COUNT, dtype=torch.float64))
    for at in (0, PERIOD, COUNT - 1):
        exact[at] = 1 if exact[at] == 0 else 0
    assert data.count_wrong(exact.to(DTYPES[dtype]), [Part(None, 0)]) == 3


@pytest.mark.parametrize("dtype", ["f8e4m3", "f8e5m2", "uint32", "uint64"])
@pytest.mark.parametrize("op", OP_NAMES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_types_that_torch_cannot_reduce_are_exact_too(dtype: str, op: str, ranks: int) -> None:
    """After each step the partial result goes through the type, as it would on its way round a ring."""
    data = Data(ranks, DTYPES[dtype], op, seed=5)
    scale = {"mulsum": premultiplier, "avg": lambda _: 1 / ranks if dtype.startswith("f8") else 1}.get(op, lambda _: 1)
    each = [buffer.double() * scale(rank) for rank, buffer in enumerate(inputs_of(data, 500))]
    combine = {"prod": torch.mul, "max": torch.maximum, "min": torch.minimum}.get(op, torch.add)
    total = each[0]
    for other in each[1:]:
        total = combine(total, other).to(DTYPES[dtype]).double()
    if op == "avg" and not dtype.startswith("f8"):
        total = (total / ranks).floor()
    assert data.count_wrong(total.to(DTYPES[dtype]), [Part(None, 0)]) == 0


def test_mulsum_multiplies_the_ranks_by_different_numbers() -> None:
    data = Data(2, torch.float32, "mulsum", seed=5)
    first, second = inputs_of(data, 64)
    assert data.count_wrong(first + 2 * second, [Part(None, 0)]) == 0
    assert data.count_wrong(first + second, [Part(None, 0)]) > 32


def test_parts_of_unequal_length_follow_each_other() -> None:
    data = Data(2, torch.float32, "", seed=6)
    first, second = inputs_of(data, 64)
    result = torch.cat([first[4:10], second[20:50], torch.zeros(7)])
    parts = [Part(0, 4, 6), Part(1, 20, 30)]
    assert data.count_wrong(result, parts) == 0  # what lies behind the last part is nobody's
    result[35] += 1
    assert data.count_wrong(result, parts) == 1
    assert data.count_wrong(result[1:], parts) > 20


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("op", ["", *OP_NAMES])
def test_what_was_never_written_is_wrong(dtype: str, op: str) -> None:
    data = Data(3, DTYPES[dtype], op, seed=2)
    result = torch.empty(COUNT, dtype=DTYPES[dtype])
    poison(result)
    assert data.count_wrong(result, [Part(None if op else 1, 0)]) == COUNT


def test_an_average_may_be_two_units_off_and_no_more() -> None:
    data = Data(3, torch.float32, "avg", seed=4)
    mean = sum(inputs_of(data), start=torch.zeros(COUNT)) / 3
    up = mean
    for _ in range(2):
        up = torch.nextafter(up, torch.tensor(torch.inf))
    nonzero = int((mean != 0).sum())
    assert data.count_wrong(mean, [Part(None, 0)]) == 0
    assert data.count_wrong(up, [Part(None, 0)]) == COUNT - nonzero
    assert data.count_wrong(torch.nextafter(up, torch.tensor(torch.inf)), [Part(None, 0)]) >= nonzero * 0.9


def test_an_average_of_whole_numbers_is_cut_off() -> None:
    data = Data(3, torch.int32, "avg", seed=4)
    total = sum(inputs_of(data), start=torch.zeros(COUNT, dtype=torch.int32))
    assert data.count_wrong(total // 3, [Part(None, 0)]) == 0


def test_parts_are_looked_for_in_order_and_from_their_first_element() -> None:
    data = Data(2, torch.float32, "", seed=6)
    first, second = inputs_of(data, 64)
    result = torch.cat([second[16:32], first[16:32]])
    assert data.count_wrong(result, [Part(1, 16), Part(0, 16)]) == 0
    assert data.count_wrong(result, [Part(0, 16), Part(1, 16)]) > 16
    assert data.count_wrong(result, [Part(1, 0), Part(0, 16)]) > 8


def test_no_parts_means_nothing_is_checked() -> None:
    assert Data(2, torch.float32, "", seed=0).count_wrong(torch.zeros(5), []) == 0


def test_an_empty_result_is_right() -> None:
    assert Data(2, torch.float32, "", seed=0).count_wrong(torch.empty(0), [Part(0, 0), Part(1, 0)]) == 0


def test_the_same_seed_gives_the_same_data_and_another_another() -> None:
    [one], [same], [other] = (inputs_of(Data(1, torch.int32, "sum", seed)) for seed in (7, 7, 8))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)

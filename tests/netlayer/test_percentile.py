"""Percentiles by nearest rank."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netlayer.percentile import percentile


@pytest.mark.parametrize(
    ("count", "percent", "wanted"),
    [
        *((1, 50, 1), (2, 50, 1), (4, 50, 2), (5, 50, 3), (99, 99, 99), (100, 99, 99), (101, 99, 100), (6, 99, 6)),
        *((1_000, 99.9, 999), (999, 99.9, 999), (1_001, 99.9, 1_000), (2_000, 99.9, 1_998)),
    ],
)
def test_it_is_the_value_of_the_nearest_rank(count: int, percent: float, wanted: int) -> None:
    values = list(range(1, count + 1))
    random.Random(0).shuffle(values)
    assert percentile(values, percent) == wanted


@given(values=st.lists(st.floats(0, 1e9), min_size=1), percent=st.integers(1, 100))
def test_it_covers_its_share_and_no_smaller_value_does(values: list[float], percent: int) -> None:
    found = percentile(values, percent)
    assert 100 * sum(value <= found for value in values) >= percent * len(values)
    assert 100 * sum(value < found for value in values) < percent * len(values)


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], 0), ([1.0], 101), ([1.0], 99.95)])
def test_nothing_has_no_percentile(values: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match="needs values"):
        percentile(values, percent)

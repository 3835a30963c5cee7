"""Orders without state: one to one, even, and the same for whoever asks."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.order import MAX_PERIOD, Blend, Permutation

weights = st.lists(
    st.one_of(st.integers(1, 1000).map(float), st.floats(1e-3, 1e3), st.decimals("0.001", 1, places=3).map(float)),
    min_size=1,
    max_size=12,
)


@given(st.integers(1, 5000), st.integers(0, 2**70), st.integers(0, 2**40))
def test_a_permutation_has_every_index_once(size: int, seed: int, epoch: int) -> None:
    places = Permutation(size, seed, "set", epoch)(np.arange(size))
    assert np.array_equal(np.sort(places), np.arange(size))


@given(st.integers(1, 2**62), st.integers(0, 2**64), st.data())
def test_of_any_size_a_permutation_goes_back(size: int, seed: int, data: st.DataObject) -> None:
    indices = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20)))
    permutation = Permutation(size, seed)
    places = permutation(indices)
    assert (places >= 0).all()
    assert (places < size).all()
    assert np.array_equal(permutation.inverse(places), indices)


def test_small_permutations_are_all_as_likely() -> None:
    counts = Counter(tuple(Permutation(4, seed)(np.arange(4)).tolist()) for seed in range(4800))
    assert len(counts) == 24
    # 200 expected, with a standard deviation of 14.
    assert min(counts.values()) > 200 - 6 * 14
    assert max(counts.values()) < 200 + 6 * 14


def test_no_place_is_likelier_than_another() -> None:
    """Chi-square over (index, place) of 17 elements: 16 x 16 degrees of freedom."""
    size, draws = 17, 1700
    table = np.zeros((size, size))
    for seed in range(draws):
        table[np.arange(size), Permutation(size, seed)(np.arange(size))] += 1
    expected = draws / size
    chi_square = float(((table - expected) ** 2 / expected).sum())
    assert abs(chi_square - 256) < 6 * math.sqrt(2 * 256)


def test_neighbours_part_and_each_key_has_its_own_order() -> None:
    size = 10_000
    places = Permutation(size, 0, "a", 0)(np.arange(size))
    assert abs(np.corrcoef(places[:-1], places[1:])[0, 1]) < 0.06  # 6 / sqrt(10,000)
    for key in ((0, "a", 1), (1, "a", 0), (0, "b", 0)):
        same = (places == Permutation(size, *key)(np.arange(size))).sum()
        assert same < 12  # one expected


def test_the_order_of_a_seed_never_changes() -> None:
    """A run that resumes with a later version goes on in the same order."""
    assert Permutation(10, 0, "text", 0)(np.arange(10)).tolist() == [4, 1, 2, 9, 8, 6, 7, 5, 3, 0]
    assert Blend([0.5, 0.3, 0.2]).locate(np.arange(10))[0].tolist() == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2]


@settings(max_examples=40)
@given(weights, st.integers(0, 3 * MAX_PERIOD))
def test_after_any_number_of_samples_each_dataset_has_had_its_share(weights: list[float], num_samples: int) -> None:
    blend = Blend(weights)
    counts = blend.counts(num_samples)
    assert counts.sum() == num_samples
    for count, share in zip(counts.tolist(), blend.shares, strict=True):
        assert count in (math.floor(num_samples * share), math.ceil(num_samples * share))


@settings(max_examples=40)
@given(weights)
def test_over_a_whole_period_it_never_leaves_the_share(weights: list[float]) -> None:
    blend = Blend(weights)
    dataset_Q, own_Q = blend.locate(np.arange(blend.period))
    for dataset, count in enumerate(blend.counts_D.tolist()):
        had_Q = np.cumsum(dataset_Q == dataset)
        exact_Q = np.arange(1, blend.period + 1) * count
        assert (np.abs(had_Q * blend.period - exact_Q) < blend.period).all()
        assert np.array_equal(own_Q[dataset_Q == dataset], np.arange(count))


@settings(max_examples=40)
@given(weights, st.integers(0, 2**50))
def test_each_sample_of_a_dataset_comes_once_wherever_one_looks(weights: list[float], first: int) -> None:
    blend = Blend(weights)
    dataset_N, own_N = blend.locate(np.arange(first, first + 200))
    before = blend.counts(first).tolist()
    for dataset, count in enumerate(before):
        own = own_N[dataset_N == dataset]
        assert np.array_equal(own, count + np.arange(len(own)))


def test_decimal_weights_are_exact_and_others_nearly() -> None:
    assert Blend([0.7, 0.2, 0.1]).shares == [Fraction(7, 10), Fraction(1, 5), Fraction(1, 10)]
    assert Blend([70, 20, 10]).shares == Blend([0.7, 0.2, 0.1]).shares
    weights = [1 / 3, 2 / 3, 1e-9]
    for share, weight in zip(Blend(weights).shares, weights, strict=True):
        assert abs(float(share) - weight) <= 1.5 / MAX_PERIOD
        assert share > 0


@pytest.mark.parametrize("bad", [[], [0.0], [1.0, -1.0], [math.inf], [math.nan]])
def test_bad_weights_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="each above 0"):
        Blend(bad)


def test_bad_sizes_and_indices_are_refused() -> None:
    with pytest.raises(ValueError, match="outside 1"):
        Permutation(0)
    with pytest.raises(ValueError, match=r"outside 0 \.\. 9"):
        Permutation(10, 0)(np.array([10]))

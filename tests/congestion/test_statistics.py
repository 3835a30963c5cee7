"""The arena's statistics: results by hand, and what an interval covers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from congestion.simulation.statistics import Mean, holm, jain, paired_ratio, pareto_front

Floats = NDArray[np.float64]


def test_the_ratio_is_that_of_the_means_by_hand() -> None:
    ours, theirs = [1.0, 2.0, 9.0], [2.0, 2.0, 2.0]
    assert paired_ratio(ours, theirs, resamples=100).value == pytest.approx(2.0)
    assert paired_ratio(ours, theirs, of="geometric", resamples=100).value == pytest.approx(18 ** (1 / 3) / 2)


def test_equal_ratios_leave_no_doubt_and_equal_values_none_either() -> None:
    found = paired_ratio([1.0, 2.0, 3.0, 4.0], [2.0, 4.0, 6.0, 8.0])
    assert (found.value, found.low, found.high) == (0.5, 0.5, 0.5)
    assert found.p_value < 0.05
    alike = paired_ratio([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert (alike.low, alike.high, alike.p_value) == (1.0, 1.0, 1.0)


def test_pairs_cancel_what_both_have_of_a_seed() -> None:
    rng = np.random.default_rng(0)
    seed = rng.lognormal(0, 1, 32)
    ours = 0.97 * seed * rng.lognormal(0, 0.01, 32)
    paired, torn = paired_ratio(ours, seed), paired_ratio(ours, rng.permutation(seed))
    assert paired.high < 1 < torn.high
    assert paired.p_value < 0.001 < 0.05 < torn.p_value


def test_the_same_seed_gives_the_same_interval() -> None:
    rng = np.random.default_rng(1)
    ours, theirs = rng.lognormal(0, 0.2, (2, 20))
    assert paired_ratio(ours, theirs, seed=3) == paired_ratio(ours, theirs, seed=3)
    assert paired_ratio(ours, theirs, seed=3) != paired_ratio(ours, theirs, seed=4)


@pytest.mark.parametrize("num_pairs", [20, 32])
@pytest.mark.parametrize("of", ["arithmetic", "geometric"])
def test_a_95_percent_interval_covers_the_truth_in_95_percent(of: Mean, num_pairs: int) -> None:
    """1,500 experiments: binomial standard deviation 0.6%. Percentiles left as they are would cover 92 to 93%."""
    rng, truth, hits = np.random.default_rng(2), 0.9, 0
    for ours, theirs in _experiments(rng, truth, num_pairs, 1_500):
        found = paired_ratio(ours, theirs, of=of, resamples=2_000)
        hits += found.low <= truth <= found.high
    assert 0.937 <= hits / 1_500 <= 0.968


def test_alike_laws_are_told_apart_in_5_percent_and_the_p_value_agrees_with_the_interval() -> None:
    told = 0
    for ours, theirs in _experiments(np.random.default_rng(3), 1.0, 20, 1_500):
        found = paired_ratio(ours, theirs, resamples=2_000)
        told += found.p_value < 0.05
        assert (found.p_value < 0.05) == (not found.low <= 1 <= found.high) or 0.045 < found.p_value < 0.055
    assert 0.032 <= told / 1_500 <= 0.068


def _experiments(rng: np.random.Generator, truth: float, num_pairs: int, number: int) -> list[tuple[Floats, Floats]]:
    """Pairs that share a seed's luck, skewed as completion times are."""
    luck = rng.lognormal(0, 0.3, (number, num_pairs))
    ours, theirs = luck * rng.lognormal(0, 0.1, (2, number, num_pairs))
    return list(zip(truth * ours, theirs, strict=True))


def test_nothing_over_nothing_is_alike_and_something_over_nothing_infinite() -> None:
    assert paired_ratio([0.0, 0.0], [0.0, 0.0]).high == 1.0
    assert paired_ratio([0.0, 0.0], [1.0, 2.0]).high == 0.0
    found = paired_ratio([1.0, 2.0], [0.0, 0.0])
    assert (found.value, found.low) == (np.inf, np.inf)


@pytest.mark.parametrize(
    ("ours", "theirs", "of", "said"),
    [
        ([1.0], [1.0], "arithmetic", "two or more pairs"),
        ([1.0, 2.0], [1.0, 2.0, 3.0], "arithmetic", "got 2 and 3"),
        ([1.0, np.nan], [1.0, 1.0], "arithmetic", "ours: needs"),
        ([1.0, 1.0], [1.0, -1.0], "arithmetic", "theirs: needs"),
        ([1.0, 0.0], [1.0, 1.0], "geometric", "above 0"),
    ],
)
def test_what_is_no_row_of_pairs_is_refused(ours: list[float], theirs: list[float], of: Mean, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        paired_ratio(ours, theirs, of=of)


def test_a_share_beyond_0_to_1_is_no_level() -> None:
    with pytest.raises(ValueError, match="level = 95"):
        paired_ratio([1.0, 2.0], [1.0, 2.0], level=95)


def test_holm_by_hand() -> None:
    """Four values: 0.005 x 4, 0.01 x 3, 0.03 x 2, and 0.04 x 1, which may not fall below the one before it."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_holm_lies_between_no_correction_and_bonferroni_and_keeps_the_order(values: list[float]) -> None:
    found = holm(values)
    for before, after in zip(values, found, strict=True):
        assert before <= after <= min(1.0, before * len(values) * (1 + 1e-12))
    assert [found[i] for i in np.argsort(values, kind="stable")] == sorted(found)


def test_jain_by_hand() -> None:
    assert jain([5.0, 5.0, 5.0]) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain([1.0, 2.0, 3.0]) == pytest.approx(36 / 42)
    with pytest.raises(ValueError, match="nothing to share"):
        jain([0.0, 0.0])


def test_the_front_by_hand() -> None:
    points = [(1.0, 5.0), (2.0, 3.0), (2.0, 4.0), (3.0, 3.0), (4.0, 1.0), (4.0, 1.0)]
    assert pareto_front(points).tolist() == [True, True, False, False, True, True]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=20))
def test_each_point_is_on_the_front_or_beaten_by_one_that_is(points: list[tuple[int, int]]) -> None:
    front = pareto_front(points)
    best = [point for point, on in zip(points, front, strict=True) if on]
    for point, on in zip(points, front, strict=True):
        beaten = any(b[0] <= point[0] and b[1] <= point[1] and b != point for b in best)
        assert on != beaten

"""Clocks compared by messages: the true offset lies within the stated error, whatever was planted."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netlayer.observe.events.clocks import (
    MAX_DRIFT_PPM,
    ClockSample,
    Exchange,
    RankClock,
    estimate,
)

S = 1_000_000_000


class World:
    """Two clocks that part by a known offset and drift, and a network with ways of random lengths."""

    def __init__(self, offset_ns: int, drift_ppm: float, seed: int, *, asymmetric: bool = False) -> None:
        self.offset_ns, self.drift = offset_ns, drift_ppm * 1e-6
        self.draw, self.asymmetric = random.Random(seed), asymmetric

    def own(self, true_ns: float) -> int:
        """Reading of this rank's clock at a moment of the reference's."""
        return round(true_ns + self.offset_ns + self.drift * true_ns)

    def offset_at(self, own_ns: int) -> float:
        true_ns = (own_ns - self.offset_ns) / (1 + self.drift)
        return own_ns - true_ns

    def way_ns(self, slow: bool) -> float:
        """Length of a way: 20 us at least, at times a millisecond in a queue or in a busy interpreter."""
        queue = self.draw.expovariate(1 / 300_000) if self.draw.random() < 0.5 else self.draw.random() * 5_000
        return 20_000 + queue + (200_000 if slow and self.asymmetric else 0)

    def burst(self, true_ns: float, number: int = 16) -> list[Exchange]:
        exchanges = []
        for _ in range(number):
            there, back = self.way_ns(True), self.way_ns(False)
            exchanges.append(Exchange(self.own(true_ns), round(true_ns + there), self.own(true_ns + there + back)))
            true_ns += 2_000_000
        return exchanges


@given(
    st.integers(-(10**15), 10**15),
    st.floats(-MAX_DRIFT_PPM, MAX_DRIFT_PPM),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_one_comparison_bounds_the_offset(offset_ns: int, drift_ppm: float, seed: int, asymmetric: bool) -> None:
    world = World(offset_ns, drift_ppm, seed, asymmetric=asymmetric)
    sample = estimate(world.burst(S))
    # Within a burst of 32 ms the clocks part by 1.6 us at most, and readings are whole nanoseconds.
    assert abs(sample.offset_ns - world.offset_at(sample.at_ns)) <= sample.error_ns + 1_700
    assert sample.error_ns <= sample.round_trip_ns / 2 + 1


@given(st.integers(-(10**15), 10**15), st.floats(-40, 40), st.integers(0, 2**32))
def test_drift_is_followed_and_the_error_says_how_well(offset_ns: int, drift_ppm: float, seed: int) -> None:
    world, clock = World(offset_ns, drift_ppm, seed), RankClock()
    for second in range(0, 600, 30):
        clock.add(estimate(world.burst(second * S + S)))
        for ahead in (0, 7, 29):
            at_ns = world.own((second + 1 + ahead) * S)
            offset, error = clock.offset(at_ns)
            assert offset is not None
            assert error is not None
            assert abs(offset - world.offset_at(at_ns)) <= error + 2_000
    assert clock.drift_ppm is not None
    assert abs(clock.drift_ppm - drift_ppm) < 2


def test_more_samples_state_a_smaller_error_than_one() -> None:
    world, clock = World(123_456_789, 12, 1), RankClock()
    clock.add(estimate(world.burst(S)))
    at_ns = world.own(31 * S)
    alone = clock.offset(at_ns)[1]
    for second in range(2, 600, 30):
        clock.add(estimate(world.burst(second * S)))
    later = clock.offset(world.own(610 * S))[1]
    assert alone is not None
    assert later is not None
    assert alone > 30 * MAX_DRIFT_PPM * 1_000
    assert later < alone / 5


def test_a_clock_that_was_never_compared_says_so() -> None:
    clock = RankClock()
    assert clock.offset(clock.now_ns()) == (None, None)
    assert clock.drift_ppm is None
    assert RankClock(is_reference=True).offset(5) == (0, 0)
    clock.set_exact(-77)
    assert clock.offset(5) == (-77, 0)


def test_the_clock_is_steady_and_near_the_systems() -> None:
    steady = [1000]
    clock = RankClock(lambda: steady[0])
    first = clock.now_ns()
    steady[0] += 500
    assert clock.now_ns() == first + 500 == clock.unix_ns(steady[0])
    assert clock.anchor_ns == first - 1000


def test_a_jump_within_a_burst_falls_back_to_the_best_exchange() -> None:
    exchanges = [Exchange(0, 10, 20), Exchange(1000, 5_000_000, 1100)]
    assert estimate(exchanges) == ClockSample(10, 0, 10, 20)


def test_exchanges_that_cannot_be_are_refused() -> None:
    for wrong in ([], [Exchange(5, 0, 4)]):
        with pytest.raises(ValueError, match="must be received after"):
            estimate(wrong)

import itertools
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.topology.fabrics import cluster
from topology.ecmp.expected import expected_collisions, expected_load
from topology.ecmp.hashing import Ecmp
from topology.ecmp.load import ECMP_TIERS, demand_bps, load
from topology.fabric.clos import Clos
from topology.traffic.job import Flows, Kind, headers, permutation


def _by_enumeration(rates: Sequence[float], num_links: int, link_bps: float) -> tuple[float, float]:
    """Expected colliding flows and excess over every way to place the flows."""
    colliding, excess = 0, 0.0
    for links in itertools.product(range(num_links), repeat=len(rates)):
        demand = np.bincount(links, weights=rates, minlength=num_links)
        colliding += int((demand[list(links)] > link_bps).sum())
        excess += float(np.maximum(demand - link_bps, 0).sum())
    return colliding / num_links ** len(rates), excess / num_links ** len(rates)


@pytest.mark.parametrize("rates", [[1.0] * 4, [2.0, 2.0, 1.0, 1.0, 1.0], [3.0, 1.0]])
@pytest.mark.parametrize("num_links", [1, 2, 3])
def test_the_closed_form_is_the_mean_over_all_placements(rates: list[float], num_links: int) -> None:
    kinds, counts = np.unique(rates, return_counts=True)
    found = expected_collisions(counts.tolist(), kinds.tolist(), num_links, 2.0)
    colliding, excess = _by_enumeration(rates, num_links, 2.0)
    assert found.num_colliding == pytest.approx(colliding)
    assert found.excess_bps == pytest.approx(excess)
    assert found.share == pytest.approx(colliding / len(rates))
    assert found.excess == pytest.approx(excess / sum(rates))


def _by_convolution(counts: list[int], rates: list[Fraction], num_links: int, link: int) -> tuple[float, float]:
    """The same with exact numbers: P(load of one link) flow by flow, and each flow against those of the others."""

    def loads(kinds: list[int]) -> dict[Fraction, float]:
        found = {Fraction(0): 1.0}
        for count, rate in zip(kinds, rates, strict=True):
            for _ in range(count):
                after: dict[Fraction, float] = {}
                for value, chance in found.items():
                    after[value] = after.get(value, 0) + chance * (1 - 1 / num_links)
                    after[value + rate] = after.get(value + rate, 0) + chance / num_links
                found = after
        return found

    colliding = 0.0
    for index, rate in enumerate(rates):
        others = [count - (position == index) for position, count in enumerate(counts)]
        over = sum(chance for value, chance in loads(others).items() if value + rate > link)
        colliding += counts[index] * over
    return colliding, num_links * sum(chance * max(0.0, float(value - link)) for value, chance in loads(counts).items())


@pytest.mark.parametrize("link", [1, 2])
def test_nine_unlike_rates_in_one_group(link: int) -> None:
    """Rates of 1, 1/2, ... 1/9 of a link: what fills it exactly (1/2 + 1/3 + 1/6) is no collision."""
    counts = [2, 2, 3, 2, 2, 3, 2, 2, 2]
    rates = [Fraction(1, parts) for parts in range(1, 10)]
    found = expected_collisions(counts, [float(rate) for rate in rates], 4, link)
    colliding, excess = _by_convolution(counts, rates, 4, link)
    assert found.num_colliding == pytest.approx(colliding, rel=1e-9)
    assert found.excess_bps == pytest.approx(excess, rel=1e-9)


def test_rates_off_the_grid_are_near() -> None:
    rates = [Fraction(1, parts) for parts in (11, 13, 17, 19)]
    found = expected_collisions([6, 6, 6, 6], [float(rate) for rate in rates], 2, 1)
    colliding, excess = _by_convolution([6, 6, 6, 6], rates, 2, 1)
    assert found.num_colliding == pytest.approx(colliding, rel=1e-2)
    assert found.excess_bps == pytest.approx(excess, rel=1e-2)


def test_what_cannot_collide_does_not_by_rounding() -> None:
    found = expected_collisions([1, 2], [1.0, 0.5], 1000, 2.0)
    assert (found.num_colliding, found.excess_bps) == (0, 0)


def test_megascale_uplinks_under_full_load() -> None:
    """64 flows on 64 links of their own rate: 1 - (1 - 1/m)^(n-1) collide, (1 - 1/m)^n of the demand is in excess."""
    baseline = expected_collisions([64], [200e9], 64, 200e9)
    assert baseline.share == pytest.approx(1 - (63 / 64) ** 63)
    assert baseline.excess == pytest.approx((63 / 64) ** 64)
    split = expected_collisions([64], [200e9], 32, 400e9)
    assert split.share == pytest.approx(1 - (31 / 32) ** 63 - 63 / 32 * (31 / 32) ** 62)
    assert split.share < baseline.share
    assert split.excess < baseline.excess


def test_no_flows_and_many_flows_are_both_well_defined() -> None:
    assert expected_collisions([0], [1.0], 8, 1.0).share == 0
    crowd = expected_collisions([200_000], [1.0], 64, 1.0)
    assert crowd.share == pytest.approx(1)
    assert crowd.excess == pytest.approx(1 - 64 / 200_000)


@given(st.integers(1, 4), st.integers(2, 4), st.integers(1, 16), st.data())
def test_up_to_full_load_the_split_raises_neither_share_nor_excess(
    parts: int, lanes: int, ports: int, data: st.DataObject
) -> None:
    """Flows of 1/parts of a NIC: `ports` uplinks of `lanes` NICs against `ports * lanes` of one NIC."""
    num_flows = data.draw(st.integers(1, parts * lanes * ports))
    split = expected_collisions([num_flows], [1 / parts], ports, lanes)
    baseline = expected_collisions([num_flows], [1 / parts], ports * lanes, 1)
    assert split.share <= baseline.share + 1e-12
    assert split.excess <= baseline.excess + 1e-12


@given(st.integers(2, 4), st.integers(1, 16), st.integers(1, 300))
def test_beyond_full_load_the_split_still_lowers_the_excess(lanes: int, ports: int, num_flows: int) -> None:
    split = expected_collisions([num_flows], [1.0], ports, lanes)
    baseline = expected_collisions([num_flows], [1.0], ports * lanes, 1)
    assert split.excess <= baseline.excess + 1e-12


def test_beyond_full_load_the_split_may_raise_the_share() -> None:
    """Four flows a port at oversubscription 2: with overload certain, a wider link only gathers more victims."""
    assert expected_collisions([64], [1.0], 16, 2.0).share > expected_collisions([64], [1.0], 32, 1.0).share


@pytest.mark.parametrize("split", [True, False])
def test_hashed_permutations_agree_with_the_closed_form_within_2_percent(split: bool) -> None:
    fabric = Clos.build(cluster(servers=512, rails=2, nics_per_server=2, aoc_split=split))
    _assert_agreement(fabric, [permutation(fabric, seed) for seed in range(200)])


def test_hashed_flows_of_unequal_rates_agree_with_the_closed_form_within_2_percent() -> None:
    fabric = Clos.build(cluster(servers=512, rails=2, nics_per_server=2))
    single = [permutation(fabric, seed) for seed in range(400)]
    # Half of the servers send second flows beside their first, so that rates are whole and half a NIC's in each ToR.
    doubled = [flows.where(np.arange(len(flows)).repeat(flows.src_nic // 2 % 2 + 1)) for flows in single]
    assert set(doubled[0].kind) == {Kind.PERMUTATION}
    _assert_agreement(fabric, doubled)


@pytest.mark.slow  # the test above has two rates in each group
def test_nine_rates_in_each_group_agree_within_2_percent() -> None:
    """NIC n sends n % 9 + 1 flows to one other, each of that part of its rate."""
    fabric = Clos.build(cluster(servers=512, rails=2, nics_per_server=2))
    single = [permutation(fabric, seed) for seed in range(40)]
    many = [flows.where(np.arange(len(flows)).repeat(flows.src_nic % 9 + 1)) for flows in single]
    assert len(np.unique(demand_bps(fabric, many[0]))) == 9
    _assert_agreement(fabric, many)


def _assert_agreement(fabric: Clos, runs: list[Flows]) -> None:
    loads = [load(fabric, flows, Ecmp("random", headers(fabric, flows, seed), seed)) for seed, flows in enumerate(runs)]
    expected = [expected_load(fabric, flows) for flows in runs]
    for tier in ECMP_TIERS:
        hashed = [one.collisions([tier]) for one in loads]
        assert np.mean([one.share for one in hashed]) == pytest.approx(
            np.mean([one[tier].share for one in expected]), rel=0.02
        )
        assert np.mean([one.excess for one in hashed]) == pytest.approx(
            np.mean([one[tier].excess for one in expected]), rel=0.02
        )


def test_two_tiers_cross_no_core() -> None:
    fabric = Clos.build(cluster(tiers=2, pods=1))
    found = expected_load(fabric, permutation(fabric, 0))
    assert [value.num_flows for value in found.values()] == [128, 0, 0, 128]

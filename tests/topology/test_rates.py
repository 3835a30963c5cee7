import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netlayer.config.tree import ClusterConfig
from tests.topology.fabrics import cluster, clusters
from topology.ecmp.hashing import Ecmp
from topology.ecmp.routing import NO_LINK, route
from topology.fabric.clos import Clos, Ints
from topology.rates.max_min import Rates, completion_bound_s, completion_s, flows_on_links, max_min
from topology.traffic.job import headers, permutation


@st.composite
def networks(draw: st.DrawFn) -> tuple[Ints, np.ndarray]:
    """Up to 30 flows over up to 8 links of unlike capacity, each on 1 to 4 links, in any order."""
    num_links, num_flows = draw(st.integers(1, 8)), draw(st.integers(1, 30))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    width = min(num_links, 4)
    paths = np.argsort(rng.random((num_flows, num_links)), axis=1)[:, :width].astype(np.int64)
    paths[np.arange(width) >= rng.integers(1, width + 1, num_flows)[:, None]] = NO_LINK
    return paths, draw(st.sampled_from([1.0, 2e11])) * rng.integers(1, 6, num_links)


def _by_the_book(paths: Ints, capacity: np.ndarray) -> np.ndarray:
    """Progressive filling, one link at a time and nothing clever."""
    rates, left = np.full(len(paths), -1.0), capacity.astype(float)
    on = np.array([[link in path for path in paths.tolist()] for link in range(len(capacity))])
    while (rates < 0).any():
        waiting = on & (rates < 0)
        shares = [left[link] / row.sum() if row.any() else np.inf for link, row in enumerate(waiting)]
        link = int(np.argmin(shares))
        frozen = waiting[link]
        rates[frozen] = shares[link]
        left -= shares[link] * (waiting & frozen).sum(axis=1)
    return rates


@given(networks())
@settings(deadline=None)  # the first example compiles
def test_rates_are_those_of_the_book_and_carry_their_certificate(network: tuple[Ints, np.ndarray]) -> None:
    paths, capacity = network
    rates = max_min(paths, capacity)
    rates.certify()
    assert (rates.link_bps <= capacity * (1 + 1e-9)).all()
    assert (rates.paths == rates.bottleneck[:, None]).any(axis=1).all()
    np.testing.assert_allclose(rates.flow_bps, _by_the_book(paths, capacity), rtol=1e-9)


@given(networks(), st.integers(0, 2**32))
@settings(deadline=None)
def test_the_order_of_flows_does_not_matter(network: tuple[Ints, np.ndarray], seed: int) -> None:
    paths, capacity = network
    order = np.random.default_rng(seed).permutation(len(paths))
    found = max_min(paths[order], capacity).flow_bps
    np.testing.assert_allclose(found, max_min(paths, capacity).flow_bps[order], rtol=1e-9)


@given(clusters(), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_hashed_flows_are_certified(tree: ClusterConfig, seed: int) -> None:
    fabric = Clos.build(tree)
    flows = permutation(fabric, seed)
    paths = route(fabric, flows.src_nic, flows.dst_nic, Ecmp("crc16", headers(fabric, flows, seed), seed))
    rates = max_min(paths, fabric.link_bps)
    rates.certify()
    assert (rates.flow_bps <= fabric.design.nic_bps * (1 + 1e-9)).all()


def test_the_textbooks_example() -> None:
    """One long flow over two links of 1 and 2, a short one on each: 1/2, 1/2, 3/2."""
    rates = max_min(np.array([[0, 1], [0, NO_LINK], [1, NO_LINK]]), np.array([1.0, 2.0]))
    assert rates.flow_bps.tolist() == [0.5, 0.5, 1.5]
    assert rates.bottleneck.tolist() == [0, 0, 1]


def test_a_false_certificate_is_refused() -> None:
    paths, capacity = np.array([[0], [0]]), np.array([2.0])
    with pytest.raises(ValueError, match="flow 1 has no bottleneck"):
        Rates(paths, capacity, np.array([1.5, 0.5]), np.zeros(2, dtype=np.int64)).certify()
    with pytest.raises(ValueError, match="link 0 carries 3"):
        Rates(paths, capacity, np.array([1.5, 1.5]), np.zeros(2, dtype=np.int64)).certify()
    with pytest.raises(ValueError, match="flow 0 has no bottleneck"):
        Rates(paths, capacity, np.array([0.5, 0.5]), np.zeros(2, dtype=np.int64)).certify()


def test_a_flow_without_a_link_is_refused() -> None:
    with pytest.raises(ValueError, match="crosses no link"):
        max_min(np.array([[NO_LINK, NO_LINK]]), np.ones(1))
    with pytest.raises(ValueError, match="without capacity"):
        max_min(np.array([[0]]), np.zeros(1))


def test_no_flows_have_no_rates() -> None:
    rates = max_min(np.zeros((0, 6), dtype=np.int64), np.ones(3))
    rates.certify()
    assert len(rates.flow_bps) == len(completion_s(rates, np.zeros(0))) == 0


def test_flows_end_one_after_another() -> None:
    """1 and 3 bytes on a link of 8 bit/s: the short one takes 2 s, then the long one has it all."""
    rates = max_min(np.array([[0], [0]]), np.array([8.0]))
    assert completion_s(rates, np.array([1.0, 3.0]), resolution=0).tolist() == [2.0, 4.0]
    assert completion_bound_s(rates.paths, rates.capacity_bps, np.array([1.0, 3.0])) == 4.0


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e6])
@pytest.mark.parametrize("resolution", [0.0, 1e-3, 1e-2])
def test_flows_that_begin_late_take_no_longer(offset: float, resolution: float) -> None:
    """Beside a flow that runs from the start on, over a link of its own."""
    rates = max_min(np.array([[0], [0], [1]]), np.array([8.0, 8.0]))
    start_s = np.array([offset, offset, 0.0])
    ends = completion_s(rates, np.array([1.0, 3.0, 1e7]), resolution=resolution, start_s=start_s)
    assert ends - start_s == pytest.approx([2.0, 4.0, 1e7], rel=2 * resolution + 1e-9)


@pytest.mark.parametrize("resolution", [0.0, 1e-3])
def test_a_flow_too_short_for_the_clock_ends(resolution: float) -> None:
    """3 bytes at 200 Gb/s are 0.12 ns; the clock stands at 1e6 s."""
    rates = max_min(np.array([[0], [0]]), np.array([2e11]))
    ends = completion_s(rates, np.array([1.0, 3.0]), resolution=resolution, start_s=np.array([0.0, 1e6]))
    assert ends == pytest.approx([4e-11, 1e6])


def test_flows_begin_one_after_another() -> None:
    """The second begins when the first has 1 of 3 bytes left, and both then share."""
    rates = max_min(np.array([[0], [0], [1]]), np.array([8.0, 8.0]))
    ends = completion_s(rates, np.array([3.0, 1.0, 1.0]), resolution=0, start_s=np.array([0.0, 2.0, 9.0]))
    assert ends.tolist() == [4.0, 4.0, 10.0]


def test_a_flow_of_no_bytes_ends_as_it_begins() -> None:
    rates = max_min(np.array([[0], [0]]), np.array([8.0]))
    assert completion_s(rates, np.array([0.0, 1.0])).tolist() == [0.0, 1.0]
    with pytest.raises(ValueError, match="resolution = 1"):
        completion_s(rates, np.ones(2), resolution=1)


@given(networks(), st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_no_schedule_beats_the_bound_and_a_coarse_one_is_near(network: tuple[Ints, np.ndarray], seed: int) -> None:
    paths, capacity = network
    num_bytes = np.random.default_rng(seed).integers(1, 100, len(paths)).astype(float)
    rates = max_min(paths, capacity)
    exact = completion_s(rates, num_bytes, resolution=0)
    bound = completion_bound_s(paths, capacity, num_bytes)
    assert bound * (1 - 1e-9) <= exact.max()
    assert completion_s(rates, num_bytes, resolution=0.01).max() <= exact.max() * 1.1
    # Bytes are conserved: no link has moved more than its capacity allows until its last flow ends.
    start, members = flows_on_links(paths, len(capacity))
    for link in range(len(capacity)):
        mine = members[start[link] : start[link + 1]]
        if len(mine):
            assert 8 * num_bytes[mine].sum() <= capacity[link] * exact[mine].max() * (1 + 1e-9)


def test_flows_on_links_by_hand() -> None:
    start, members = flows_on_links(np.array([[2, NO_LINK], [0, 2]]), 4)
    assert start.tolist() == [0, 1, 1, 3, 3]
    assert members.tolist() == [1, 0, 1]


def test_equal_flows_of_a_nic_share_it() -> None:
    fabric = Clos.build(cluster())
    paths = np.tile(np.array([[0, NO_LINK]]), (4, 1))
    assert max_min(paths, fabric.link_bps).flow_bps.tolist() == [50.0] * 4


def test_links_that_wait_for_one_another_are_filled_in_turn() -> None:
    """Flow i crosses links i and i + 1, each wider than the one before: every round but frees the next."""
    count = 40
    paths = np.stack([np.arange(count), np.arange(1, count + 1)], axis=1)
    capacity = np.cumsum(np.arange(1.0, count + 2))
    rates = max_min(paths, capacity)
    rates.certify()
    np.testing.assert_allclose(rates.flow_bps, _by_the_book(paths, capacity), rtol=1e-9)


@given(networks(), st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_with_starts_too_a_coarse_run_is_near_and_none_beats_the_bound(
    network: tuple[Ints, np.ndarray], seed: int
) -> None:
    paths, capacity = network
    rng = np.random.default_rng(seed)
    num_bytes = rng.integers(1, 100, len(paths)).astype(float)
    start_s = (100 + rng.random(len(paths)) * float(rng.choice([0, 10, 1000]))) / capacity.max()
    rates = max_min(paths, capacity)
    exact, coarse = (completion_s(rates, num_bytes, resolution=share, start_s=start_s) for share in (0, 0.01))
    assert exact.max() >= completion_bound_s(paths, capacity, num_bytes, start_s=start_s) * (1 - 1e-9)
    assert ((exact - start_s) * capacity.max() >= 8 * num_bytes * (1 - 1e-6)).all()
    assert np.mean((coarse - start_s) / (exact - start_s)) == pytest.approx(1, abs=0.1)


def test_the_bound_counts_what_begins_late() -> None:
    """A byte at 0 s and two at 10 s over 8 bit/s: 12 s, though three bytes take but 3."""
    paths, capacity = np.zeros((2, 1), dtype=np.int64), np.array([8.0])
    assert completion_bound_s(paths, capacity, np.array([1.0, 2.0]), start_s=np.array([0.0, 10.0])) == 12
    assert completion_bound_s(paths, capacity, np.array([9.0, 2.0]), start_s=np.array([0.0, 8.0])) == 11

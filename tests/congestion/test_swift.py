import numpy as np
import pytest

from congestion.control import swift
from congestion.simulation.settings import Settings, SwiftSettings
from tests.congestion.bottleneck import US, Bottleneck

LINE = 200_000_000_000
PACKET = 4_096


def _one(**changed: float) -> Bottleneck:
    return Bottleneck(swift, SwiftSettings(initial_packets=10.0).model_copy(update=changed), num_flows=1)


def _ack(run: Bottleneck, now: int, rtt: int, acked_bytes: int = PACKET) -> float:
    swift.on_ack(run.p, run.own[0], run.flow[0], now, False, rtt, acked_bytes)
    return float(run.own[0]["packets"])


def test_starts_with_what_the_idle_path_holds():
    run = Bottleneck(swift, SwiftSettings(), num_flows=1)
    assert run.own[0]["packets"] == pytest.approx(LINE * 8e-6 / 8 / 4_144)


def test_the_target_grows_by_hops_and_as_the_window_shrinks():
    p = swift.parameters(SwiftSettings(), LINE, Settings())[0]
    per_hop = swift.target_ps(p, 100.0, 5) - swift.target_ps(p, 100.0, 2)
    assert per_hop == pytest.approx(3 * 20 / 6.55 * US)
    assert swift.target_ps(p, 100.0, 1) == pytest.approx(20 * US)
    assert swift.target_ps(p, 0.1, 1) == pytest.approx(120 * US)
    assert swift.target_ps(p, 0.001, 1) == pytest.approx(120 * US)
    assert swift.target_ps(p, 35.9, 1) == pytest.approx((20 + 32.66 / 35.9**0.5 - 3.266) * US, rel=1e-3)


def test_htsim_counts_whole_packets_and_no_hops():
    p = swift.parameters(SwiftSettings(htsim_quirks=True), LINE, Settings())[0]
    assert swift.target_ps(p, 35.9, 6) == swift.target_ps(p, 35.0, 1)
    assert swift.target_ps(p, 35.9, 1) == pytest.approx(22.27 * US, rel=2e-3)  # as csg-htsim settles, two to one
    assert swift.target_ps(p, 0.5, 1) == pytest.approx(120 * US)


def test_grows_by_a_packet_a_round_trip_and_below_one_packet_by_the_packet():
    assert _ack(_one(), 10 * US, 10 * US) == pytest.approx(10.1)
    assert _ack(_one(), 10 * US, 10 * US, 5 * PACKET) == pytest.approx(10.5)
    assert _ack(_one(initial_packets=0.25), 10 * US, 10 * US) == pytest.approx(1.25)


def test_shrinks_by_the_excess_at_most_by_half_and_once_a_round_trip():
    run = _one(fs_range_us=0.0, hop_us=0.0)
    assert _ack(run, 100 * US, 25 * US) == pytest.approx(10 * (1 - 0.8 * 5 / 25))
    assert _ack(run, 110 * US, 25 * US) == pytest.approx(8.4)
    assert _ack(run, 125 * US, 25 * US) == pytest.approx(8.4 * 0.84)
    assert _ack(run, 1_000 * US, 500 * US) == pytest.approx(8.4 * 0.84 / 2)


def test_a_window_below_one_packet_is_a_pace():
    run = _one(initial_packets=1.0, fs_range_us=0.0, hop_us=0.0)
    assert run.flow[0]["rate_bps"] == LINE
    _ack(run, 100 * US, 500 * US)
    assert run.flow[0]["window_bytes"] == PACKET // 2
    assert run.flow[0]["rate_bps"] == pytest.approx(4_144 * 8 * 0.5 / 500e-6, rel=1e-6)


def test_losses_halve_it_once_a_round_trip_and_five_in_a_row_reset_it():
    run = _one()
    run.lose(0, 100 * US)
    run.lose(0, 101 * US)
    assert run.own[0]["packets"] == pytest.approx(5.0)
    _ack(run, 102 * US, 10 * US)  # progress: the count begins anew
    for _ in range(4):
        run.lose(0, 103 * US)
    assert run.own[0]["packets"] > 1
    run.lose(0, 103 * US)
    assert run.own[0]["packets"] == 0.01


def test_a_duplicate_ack_tells_nothing():
    assert _ack(_one(), 100 * US, 500 * US, 0) == 10.0


def test_keeps_to_a_window_that_it_was_given():
    run = _one()
    run.flow[0]["window_bytes"] = 5_000
    swift.start(run.p, run.own[0], run.flow[0])
    _ack(run, 100 * US, 10 * US)
    assert run.flow[0]["window_bytes"] == 5_000


def test_two_flows_meet_with_the_delay_at_its_target():
    run = Bottleneck(swift, SwiftSettings(), starts=(0, 300 * US)).run(3_000 * US)
    rates = run.rates(2_000 * US)
    np.testing.assert_allclose(rates / rates.sum(), 0.5, atol=0.02)
    assert rates.sum() > 0.98 * LINE * PACKET / 4_144
    packets = run.own["packets"].mean()
    assert run.queueing(2_000 * US).mean() + 8 == pytest.approx(swift.target_ps(run.p, packets, 2) / US, rel=0.03)


def test_more_flows_than_packets_in_the_path_still_share():
    run = Bottleneck(swift, SwiftSettings(initial_packets=1.0), num_flows=200, base_rtt_ps=4 * US).run(6_000 * US)
    rates = run.rates(3_000 * US)
    assert rates.sum() > 0.97 * LINE * PACKET / 4_144
    assert rates.min() > 0.4 * rates.mean()

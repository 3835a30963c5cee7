import numpy as np
import pytest

from congestion.control import nscc
from congestion.simulation.settings import NsccSettings
from tests.congestion.bottleneck import US, Bottleneck

LINE = 200_000_000_000
PACKET = 4_096
MOST = 1.5 * LINE * 8e-6 / 8
SCALE = 2.0  # of 200G and 12 us over 100G and 12 us


def _one(window: float = 100_000.0, **changed: float) -> Bottleneck:
    run = Bottleneck(nscc, NsccSettings(quick_adapt=False, eta_packets=0.0).model_copy(update=changed), num_flows=1)
    run.own[0]["window"] = window
    return run


def _ack(run: Bottleneck, now: int, queueing: float, marked: bool, acked_bytes: int = 10 * PACKET) -> float:
    rtt = run.base_rtt_ps + round(queueing * US)
    nscc.on_ack(run.p, run.own[0], run.flow[0], now, marked, rtt, acked_bytes)
    return float(run.own[0]["window"])


def test_starts_with_one_and_a_half_times_what_the_idle_path_holds():
    assert Bottleneck(nscc, NsccSettings(), num_flows=1).own[0]["window"] == MOST


def test_no_mark_below_the_target_gains_by_the_room():
    for queueing in (2.0, 6.0, 9.0):
        gained = 4 * PACKET * SCALE * (1 - queueing / 12) * 10 * PACKET / 100_000
        assert _ack(_one(), 50 * US, queueing, False) == pytest.approx(100_000 + gained)


def test_no_mark_above_the_target_gains_the_fair_increase():
    gained = 5 * PACKET * SCALE * 10 * PACKET / 100_000
    assert _ack(_one(), 50 * US, 13.0, False) == pytest.approx(100_000 + gained)


def test_a_mark_below_the_target_changes_nothing():
    assert _ack(_one(), 50 * US, 11.0, True) == 100_000


def test_a_mark_above_the_target_cuts_by_the_average_once_a_round_trip():
    run = _one(delay_gain=1.0)
    assert _ack(run, 50 * US, 16.0, True) == pytest.approx(100_000 * (1 - 0.8 * 4 / 16))
    assert _ack(run, 55 * US, 16.0, True) == pytest.approx(80_000)
    assert _ack(run, 59 * US, 48.0, True) == pytest.approx(40_000)  # no more than half


def test_a_slow_average_keeps_a_first_long_delay_from_cutting():
    assert _ack(_one(), 50 * US, 100.0, True) == 100_000


def test_a_window_that_met_no_queue_starts_the_fast_increase():
    run = _one(window=50_000.0)
    before = _ack(run, 50 * US, 0.0, False)
    assert _ack(run, 51 * US, 0.0, False) == pytest.approx(before + 0.25 * SCALE * 10 * PACKET)


def test_increases_are_gathered_until_eight_packets_came():
    run = _one()
    run.own[0]["adjusted_at"] = 50 * US
    for now in range(8):
        assert _ack(run, 50 * US + now, 6.0, False, PACKET) == 100_000
    assert _ack(run, 51 * US, 6.0, False, PACKET) > 100_000


def test_quick_adapt_takes_what_arrived_and_ignores_the_echo():
    run = _one(quick_adapt=True)
    run.flow[0]["next"] = 20
    _ack(run, 10 * US, 0.0, False, PACKET)  # its first round trip begins
    assert _ack(run, 29 * US, 60.0, True, 2 * PACKET) >= 100_000
    assert _ack(run, 31 * US, 60.0, True, PACKET) == 3 * PACKET
    for now in (60, 90, 120):
        assert _ack(run, now * US, 60.0, True, PACKET) == 3 * PACKET
    _ack(run, 130 * US, 6.0, False, 10 * PACKET)
    assert run.own[0]["window"] > 3 * PACKET


def test_a_loss_adapts_once_or_costs_a_packet():
    run = _one(quick_adapt=True)
    run.lose(0, 5 * US)  # no round trip of quick adapt is over yet
    assert run.own[0]["window"] == 100_000 - PACKET
    run.lose(0, 40 * US)
    assert run.own[0]["window"] == PACKET


def test_the_window_stays_within_its_bounds():
    assert _ack(_one(window=1.0), 50 * US, 11.0, True) == PACKET
    assert _ack(_one(window=1e9), 50 * US, 11.0, True) == MOST


def test_two_flows_share_with_the_queue_about_the_target():
    run = Bottleneck(nscc, NsccSettings(), starts=(0, 300 * US), kmin_bytes=100e3, kmax_bytes=400e3).run(3_000 * US)
    rates = run.rates(1_500 * US)
    np.testing.assert_allclose(rates / rates.sum(), 0.5, atol=0.05)
    assert rates.sum() > 0.97 * LINE * PACKET / 4_144
    assert 6 < run.queueing(1_500 * US).mean() < 18


def test_an_incast_drains():
    run = Bottleneck(nscc, NsccSettings(), num_flows=32, kmin_bytes=100e3, kmax_bytes=400e3).run(3_000 * US)
    assert run.queueing(0).max() > 200
    assert run.queueing(2_000 * US).mean() < 40
    assert run.rates(1_000 * US).sum() > 0.95 * LINE * PACKET / 4_144

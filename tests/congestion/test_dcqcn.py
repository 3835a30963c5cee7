import numpy as np
import pytest

from congestion.control import dcqcn
from congestion.simulation.settings import DcqcnSettings
from tests.congestion.bottleneck import US, Bottleneck

LINE = 200_000_000_000
TIMERS = DcqcnSettings(alpha_us=50.0, decrease_us=50.0, increase_us=55.0)


def _one(section: DcqcnSettings) -> Bottleneck:
    return Bottleneck(dcqcn, section, num_flows=1)


def _ack(run: Bottleneck, now: int, marked: bool, acked_bytes: int = 4_096) -> int:
    dcqcn.on_ack(run.p, run.own[0], run.flow[0], now, marked, 8 * US, acked_bytes)
    dcqcn.advance(run.p, run.own[0], run.flow[0], now)
    return int(run.flow[0]["rate_bps"])


def test_the_first_notice_starts_the_timers_and_the_cut_halves_the_rate():
    run = _one(TIMERS)
    assert _ack(run, 10 * US, True) == LINE
    assert _ack(run, 59 * US, False) == LINE
    assert _ack(run, 61 * US, False) == pytest.approx(LINE * (1 - (1 - 1 / 256) / 2), rel=1e-6)


def test_without_a_notice_nothing_moves():
    run = _one(TIMERS)
    assert _ack(run, 10_000 * US, False) == LINE


def test_recovery_goes_half_the_way_then_adds_then_adds_more():
    run = _one(TIMERS)
    _ack(run, 0, True)
    low = _ack(run, 51 * US, False)
    assert _ack(run, 107 * US, False) == pytest.approx((low + LINE) / 2, rel=1e-6)
    target = run.own[0]["target_bps"] = 100_000_000_000
    _ack(run, 162 * US, False)
    assert run.own[0]["target_bps"] == target + 40_000_000
    _ack(run, 217 * US, False)
    assert run.own[0]["target_bps"] == target + 440_000_000


def test_the_byte_counter_raises_between_the_timers():
    timer, both = _one(TIMERS), _one(TIMERS.model_copy(update={"byte_counter_bytes": 100_000}))
    for run in (timer, both):
        _ack(run, 0, True)
        _ack(run, 51 * US, False)
        _ack(run, 52 * US, False, 100_000)
    assert both.own[0]["byte_stage"] == 1
    assert both.flow[0]["rate_bps"] > 1.4 * timer.flow[0]["rate_bps"]


def test_hyper_increase_waits_for_the_slower_of_timer_and_counter():
    run = _one(TIMERS.model_copy(update={"byte_counter_bytes": 100_000, "rai_bps": 1_000_000, "rhai_bps": 2_000_000}))
    _ack(run, 0, True)
    _ack(run, 51 * US, False)
    run.own[0]["target_bps"] = target = 100_000_000_000
    _ack(run, 52 * US, False, 400_000)  # counter at 4, timer at 0: additive
    assert run.own[0]["target_bps"] == target + 3 * 1_000_000
    _ack(run, 220 * US, False)  # the timer comes to 3
    assert run.own[0]["target_bps"] == target + 3 * 1_000_000 + 2 * 1_000_000 + 2_000_000


def test_a_cut_resets_the_byte_counter():
    run = _one(TIMERS.model_copy(update={"byte_counter_bytes": 100_000}))
    _ack(run, 0, True)
    _ack(run, 51 * US, False)
    _ack(run, 52 * US, True, 150_000)
    assert run.own[0]["byte_stage"] == 1
    _ack(run, 101 * US, False, 0)
    assert (run.own[0]["byte_stage"], run.own[0]["bytes"]) == (0, 0)


def test_a_loss_changes_nothing():
    run = _one(TIMERS)
    before = run.flow.copy()
    run.lose(0, 5 * US)
    assert run.flow.tolist() == before.tolist()


def test_two_flows_share_and_recover():
    run = Bottleneck(dcqcn, TIMERS, kmin_bytes=100e3, kmax_bytes=400e3).run(8_000 * US)
    rates = run.rates(4_000 * US)
    assert rates.sum() > 0.6 * LINE
    np.testing.assert_allclose(rates / rates.sum(), 0.5, atol=0.05)

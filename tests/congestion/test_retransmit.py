"""The timers against every figure that was measured, and what follows from them for flaps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from congestion.retransmit.rows import Setting, advices, recoveries
from congestion.retransmit.timers import NICS, Timers, advise, nccl_timeout, nominal_s, recovery_s, schedule, survives

MS = 1e-3

# (T, R, ms to the error), medians, defaults.
CONNECTX_6 = [
    *((14, 1, 440.6), (14, 2, 977.6), (14, 3, 1514.3), (14, 4, 2051.4), (14, 5, 2588.2), (14, 6, 3124.8)),
    *((14, 7, 3661.8), (16, 7, 3661.8), (17, 7, 7151.7), (18, 7, 14667.8), (19, 7, 29700.8)),
    (20, 7, 59766.3),
]
CONNECTX_6_NO_FLOOR = [
    *((8, 0, 2.24), (8, 3, 5.43), (8, 7, 9.49), (10, 0, 8.38), (10, 3, 20.97), (10, 7, 37.91)),
    *((12, 0, 29.56), (12, 3, 79.94), (12, 7, 147.04), (14, 0, 105.07), (14, 3, 306.29), (14, 7, 574.90)),
    *((16, 7, 2319.7), (17, 7, 4735.6), (18, 7, 9219.9), (20, 7, 37939.0)),
]
# A timeline at T = 20, R = 7: adaptive, then regular, and the error.
TIMELINE = [20.7, 37.7, 71.4, 138.4, 239.1, 440.4, 977.3, 1782.4, 3930.3, 8225.1, 16815.3, 25405.6, 33995.8, 42585.9]


@pytest.mark.parametrize(("timeout", "retry_cnt", "error_ms"), CONNECTX_6)
def test_connectx_6_errors_when_it_was_measured_to(timeout, retry_cnt, error_ms):
    assert schedule("connectx-6", timeout, retry_cnt).error_s == pytest.approx(error_ms * MS, abs=1.6 * MS)


def test_connectx_6_sends_again_when_it_was_measured_to():
    timers = schedule("connectx-6", 20, 7)
    assert timers.sends_s[0] == pytest.approx(12.5 * MS, abs=0.3 * MS)
    np.testing.assert_allclose(timers.sends_s[1:], [*(at * MS for at in TIMELINE), 51.1761], atol=1.5 * MS)


@pytest.mark.parametrize(
    ("timeout", "least_s"), [(14, 3.66), (17, 7.15), (18, 14.67), (19, 29.70), (20, 59.77), (22, 240)]
)
def test_seven_retries_take_twice_the_product_less_a_constant(timeout, least_s):
    error_s = schedule("connectx-6", timeout, 7).error_s
    constant_s = 0.096 if timeout <= 16 else 0.364
    assert error_s == pytest.approx(7 * 2 * nominal_s(max(timeout, 16)) - constant_s, abs=2 * MS)
    assert error_s == pytest.approx(least_s, rel=2e-3)


def test_retry_count_zero_acts_as_four_on_connectx_6():
    assert schedule("connectx-6", 14, 0).error_s == pytest.approx(2050.7 * MS, abs=1.6 * MS)


@pytest.mark.parametrize(("timeout", "retry_cnt", "error_ms"), CONNECTX_6_NO_FLOOR)
def test_without_the_floor_there_is_no_adaptive_phase(timeout, retry_cnt, error_ms):
    timers = schedule("connectx-6", timeout, retry_cnt, floor=False)
    # The first timeout, which sends nothing, varies by a fifth of the nominal time from run to run.
    assert timers.error_s == pytest.approx(error_ms * MS, abs=0.2 * nominal_s(timeout))
    assert len(timers.sends_s) == retry_cnt
    np.testing.assert_allclose(np.diff(timers.sends_s), nominal_s(timeout))


@pytest.mark.parametrize(
    ("retry_cnt", "adaptive", "error_ms"), [(0, True, 428), (7, True, 3_650), (0, False, 428), (3, False, 2_038)]
)
def test_connectx_5_with_the_floor(retry_cnt, adaptive, error_ms):
    timers = schedule("connectx-5", 8, retry_cnt, adaptive=adaptive)
    assert timers.error_s == pytest.approx(error_ms * MS, abs=1.5 * MS)


@pytest.mark.parametrize(("retry_cnt", "error_ms"), [(0, 1.2), (3, 5.9), (7, 12.26)])
def test_connectx_5_without_the_floor(retry_cnt, error_ms):
    assert schedule("connectx-5", 8, retry_cnt, floor=False).error_s == pytest.approx(error_ms * MS, abs=0.1 * MS)


@pytest.mark.parametrize(
    ("timeout", "retry_cnt", "error_ms"), [(14, 1, 140), (14, 3, 288), (18, 1, 1_954), (18, 3, 4_099)]
)
def test_rxe_keeps_the_product(timeout, retry_cnt, error_ms):
    # Its first attempt may be short, and the kernel's clock rounds up.
    assert schedule("rxe", timeout, retry_cnt).error_s == pytest.approx(error_ms * MS, rel=0.1)


def test_rxe_never_gives_up_after_seven():
    timers = schedule("rxe", 14, 7)
    assert timers.error_s == np.inf
    assert recovery_s(timers, 10.0) == pytest.approx(np.ceil(10 / nominal_s(14)) * nominal_s(14))
    assert survives(timers, 1e6)


@pytest.mark.parametrize("nic", NICS)
def test_timeout_zero_waits_for_ever(nic):
    timers = schedule(nic, 0, 7)
    assert timers.sends_s.size == 0
    assert timers.error_s == np.inf
    assert recovery_s(timers, 1e-3) == np.inf


@pytest.mark.parametrize("nic", NICS)
@pytest.mark.parametrize("timeout", [1, 8, 16, 17, 21, 31])
@pytest.mark.parametrize("retry_cnt", range(8))
@pytest.mark.parametrize("floor", [True, False])
@pytest.mark.parametrize("adaptive", [True, False])
def test_time_only_rises_and_more_retries_last_longer(nic, timeout, retry_cnt, floor, adaptive):
    timers = schedule(nic, timeout, retry_cnt, adaptive=adaptive, floor=floor)
    assert np.all(np.diff([0.0, *timers.sends_s, timers.error_s]) > 0)
    if retry_cnt > 1:
        assert timers.error_s > schedule(nic, timeout, retry_cnt - 1, adaptive=adaptive, floor=floor).error_s
    if np.isfinite(timers.error_s):
        assert sum(timers.waits_ps()) == pytest.approx(timers.error_s * 1e12, rel=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("connectx-9", 14, 7), "connectx-9"),
        (("rxe", 32, 7), "0..31"),
        (("rxe", 14, 13), "0..7"),
        (("rxe", -1, 7), "-1"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        schedule(*arguments)


def test_waits_without_an_end_are_refused():
    with pytest.raises(ValueError, match="without an end"):
        schedule("rxe", 14, 7).waits_ps()


def test_a_flap_is_over_at_the_next_send():
    timers = Timers(np.array([1.0, 3.0]), 7.0)
    np.testing.assert_array_equal(recovery_s(timers, np.array([0.5, 1.0, 1.5, 3.0, 3.1])), [1, 1, 3, 3, np.inf])
    assert recovery_s(timers, 3.5, begin_s=1.0) == 4.0  # sent later, it is at another place of its schedule
    assert recovery_s(timers, 3.5, begin_s=3.0) == 4.0
    assert [survives(timers, flap) for flap in (3.0, 3.1)] == [True, False]


def test_what_is_still_sent_after_the_flap_brings_a_nak():
    timers = schedule("connectx-6", 20)
    assert recovery_s(timers, 100e-6, streams_s=168e-6) == 100e-6
    assert recovery_s(timers, 200e-6, streams_s=168e-6) == pytest.approx(12.5 * MS)
    assert recovery_s(timers, 200e-6, begin_s=100e-6, streams_s=168e-6) == 200e-6


@pytest.mark.parametrize(("flap_s", "begin_s"), [(0.0, 0.0), (1.0, 1.0), (1.0, -0.1)])
def test_a_send_outside_the_flap_is_refused(flap_s, begin_s):
    with pytest.raises(ValueError, match="begin_s"):
        recovery_s(schedule("rxe", 14, 3), flap_s, begin_s=begin_s)


@given(
    timeout=st.integers(1, 22),
    retry_cnt=st.integers(0, 7),
    adaptive=st.booleans(),
    floor=st.booleans(),
    flap_s=st.floats(1e-5, 10.0),
    share=st.floats(0.0, 0.99),
)
def test_recovery_is_after_the_flap_and_before_the_next_timeout(timeout, retry_cnt, adaptive, floor, flap_s, share):
    timers = schedule("connectx-6", timeout, retry_cnt, adaptive=adaptive, floor=floor)
    begin_s = share * flap_s
    recovered = float(recovery_s(timers, flap_s, begin_s=begin_s))
    instants = np.array([0.0, *timers.sends_s])
    if np.isinf(recovered):
        assert begin_s + instants[-1] < flap_s
    else:
        assert flap_s - 1e-12 <= recovered <= flap_s + np.diff(instants).max()


@pytest.mark.parametrize(("flap_s", "timeout", "lower_s", "error_s"), [(5.0, 18, 7.5, 14.7), (10.0, 19, 15.0, 29.7)])
def test_advice_is_the_references(flap_s, timeout, lower_s, error_s):
    advice = advise(flap_s)
    assert (advice.timeout, advice.retry_cnt) == (timeout, 7)
    assert advice.lower_s == pytest.approx(lower_s, rel=5e-3)
    assert advice.error_s == pytest.approx(error_s, rel=5e-3)


@pytest.mark.parametrize("nic", ["connectx-6", "connectx-5", "infiniband"])
@pytest.mark.parametrize("flap_s", [1e-5, 1e-3, 0.3, 3.0, 10.0])
@pytest.mark.parametrize("retry_cnt", [1, 3, 7])
def test_advice_outlives_its_flap_and_the_next_lower_exponent_does_not(nic, flap_s, retry_cnt):
    advice = advise(flap_s, nic, retry_cnt)
    for timeout in (advice.timeout, advice.nic_timeout):
        assert survives(schedule(nic, timeout, retry_cnt), 1.2 * flap_s)
    if advice.timeout > 1:
        assert retry_cnt * nominal_s(advice.timeout - 1) < 1.2 * flap_s
    if advice.nic_timeout > 1:
        assert not survives(schedule(nic, advice.nic_timeout - 1, retry_cnt), 1.2 * flap_s)
    assert advice.recovery_s >= flap_s


@pytest.mark.parametrize(("flap_s", "retry_cnt"), [(0.0, 7), (-1.0, 7), (1.0, 0), (1e6, 7)])
def test_impossible_advice_is_refused(flap_s, retry_cnt):
    with pytest.raises(ValueError, match="longest_flap_s"):
        advise(flap_s, retry_cnt=retry_cnt)


@pytest.mark.parametrize(
    ("version", "timeout"), [("2.30.7", 20), ("2.23.4", 20), ("2.22.3", 18), ("2.14", 18), ("2.13.4", 14)]
)
def test_nccl_defaults_by_version(version, timeout):
    assert nccl_timeout(version) == timeout


def test_a_version_that_is_none():
    with pytest.raises(ValueError, match=r"2\.30\.7"):
        nccl_timeout("latest")


def test_records_have_the_columns_and_values_that_they_had_as_mappings():
    settings = [Setting("connectx-5", 14, 3), Setting("connectx-5", 18, 7, False), Setting("rxe", 14, 7)]
    rows = [recoveries(settings, [0.001, 0.5, 5.0]), advices([0.01, 5.0], "connectx-5", 7)]
    golden = Path(__file__).parent / "golden" / "retransmit_rows.json"
    assert json.dumps([[row.to_row() for row in part] for part in rows]) == golden.read_text(encoding="utf-8").strip()

"""Alarms: what was planted is told within two readings, and healthy traffic is left in peace."""

from __future__ import annotations

import numpy as np
import pytest

from congestion.nic.counters.catalogue import MISSING
from congestion.nic.counters.detect import ALL_PORTS, Detector, Event, Thresholds
from congestion.nic.counters.log import Log
from congestion.nic.counters.pattern import find_period
from congestion.nic.counters.simulate import Fault, Job, simulate_log

AT_S = 90.0


def detect(log: Log, limits: Thresholds | None = None) -> Detector:
    detector = Detector(log.columns, limits)
    for time_ns, values in zip(log.time_ns.tolist(), log.values.tolist(), strict=True):
        detector.update(time_ns, values)
    return detector


def first(detector: Detector, kind: str) -> Event:
    return next(event for event in detector.events if event.kind == kind)


@pytest.mark.parametrize("period_ms", [10, 100])
@pytest.mark.parametrize("kind", ["pfc-storm", "ecn-storm", "flap", "timeout", "retransmission", "silent"])
def test_a_fault_is_told_within_two_readings(kind, period_ms):
    log = simulate_log(30, period_ms, faults=[Fault(kind, 21.0, 6.0)])
    detector = detect(log)
    event = first(detector, kind)
    assert {one.port for one in detector.events} == {"mlx5_2/1"}
    assert event.samples <= 2
    busy = kind in ("silent", "ecn-storm")  # between bursts there is nothing to see
    late_s = (event.found_ns - log.time_ns[0]) / 1e9 - 21
    assert late_s < (1.5 if busy else 2 * period_ms / 1e3 + 1e-3)


def test_a_sample_of_other_columns_is_refused():
    log = simulate_log(1, 100)
    with pytest.raises(ValueError, match="values of"):
        Detector(log.columns).update(0, log.values[0, :-1])


def test_a_silent_nic_is_not_told_a_second_time_for_its_short_steps():
    log = simulate_log(180, 100, faults=[Fault("silent", 120.0, 20.0)])
    assert [event.kind for event in detect(log).events] == ["silent"]


def test_a_storm_is_one_event_with_its_worst_and_its_end():
    log = simulate_log(120, 100, faults=[Fault("pfc-storm", AT_S, 6.0)])
    (event,) = detect(log).events
    assert event.figure == pytest.approx(0.6, rel=0.05)
    assert event.end_ns is not None
    assert (event.end_ns - event.begin_ns) / 1e9 == pytest.approx(5.9, abs=0.2)


def test_two_storms_are_two_events():
    faults = [Fault("pfc-storm", AT_S, 2.0), Fault("pfc-storm", AT_S + 10, 2.0)]
    assert [event.kind for event in detect(simulate_log(120, 100, faults=faults)).events] == ["pfc-storm"] * 2


def test_a_slow_nic_is_told_by_the_step():
    log = simulate_log(240, 100, faults=[Fault("slow", 150.0, 60.0, nic=5)])
    detector = detect(log)
    (event,) = detector.events
    assert (event.kind, event.port) == ("slow", "mlx5_5/1")
    assert event.figure == pytest.approx(0.5, abs=0.1)
    assert (event.found_ns - log.time_ns[0]) / 1e9 - 150 < 2 * 3.0
    assert detector.step_s == pytest.approx(3.0, rel=0.1)


def test_one_of_two_nics_that_is_slow_is_told_too():
    log = simulate_log(240, 100, Job(num_nics=2), faults=[Fault("slow", 150.0, 60.0, nic=1)])
    assert {(event.kind, event.port) for event in detect(log).events} == {("slow", "mlx5_1/1")}


def test_a_job_that_stops_is_stalled_and_no_nic_is_blamed():
    log = simulate_log(240, 100)
    stopped = log.time_ns > log.time_ns[0] + 150e9
    log.values[stopped] = log.values[~stopped][-1]
    (event,) = detect(log).events
    assert (event.kind, event.port) == ("stalled", ALL_PORTS)


def test_a_job_that_gets_slower_is_told_of_all_ports():
    usual, slower = simulate_log(150, 100), simulate_log(150, 100, Job(nic_bps=200e9), seed=1)
    log = Log(
        usual.columns,
        np.append(usual.time_ns, slower.time_ns - slower.time_ns[0] + usual.time_ns[-1] + 100_000_000),
        np.append(usual.values, slower.values - slower.values[0] + usual.values[-1], axis=0),
        usual.about,
    )
    events = detect(log).events
    assert {(event.kind, event.port) for event in events} == {("slow", ALL_PORTS)}


def test_a_nic_whose_counters_vanish_is_silent():
    log = simulate_log(120, 100)
    mine = [place for place, column in enumerate(log.columns) if column.startswith("mlx5_7/")]
    log.values[900:, mine] = MISSING
    assert {(event.kind, event.port) for event in detect(log).events} >= {("silent", "mlx5_7/1")}


def test_a_counter_that_is_reset_is_no_alarm():
    log = simulate_log(120, 100)
    log.values[900:] -= log.values[900] - 5
    assert detect(log).events == []


def test_a_nic_that_never_carried_traffic_is_not_missed():
    log = simulate_log(120, 100, faults=[Fault("silent", 0.0, 1000.0, nic=3)])
    assert detect(log).events == []


def test_slow_counters_that_most_samples_lack_are_still_judged():
    log = simulate_log(40, 10, faults=[Fault("pfc-storm", 30.0, 6.0), Fault("timeout", 31.0)])
    slow = [place for place, column in enumerate(log.columns) if not column.endswith(("bytes", "packets"))]
    skipped = np.arange(len(log.time_ns)) % 10 != 0
    log.values[np.ix_(skipped, slow)] = MISSING
    events = detect(log).events
    assert {event.kind for event in events} == {"pfc-storm", "timeout"}
    storm = next(event for event in events if event.kind == "pfc-storm")
    assert (storm.found_ns - log.time_ns[0]) / 1e9 - 30 < 0.25


def test_two_nics_are_too_few_to_call_one_silent():
    log = simulate_log(120, 100, Job(num_nics=3), faults=[Fault("silent", AT_S, 1.0)])
    assert "silent" not in {event.kind for event in detect(log).events}


def test_an_hour_of_healthy_traffic_has_no_alarm():
    """Jitter, checkpoints in which all stand still, marks, short pauses and single packets out of sequence."""
    detector = detect(simulate_log(3600, 250, seed=7))
    assert detector.events == []
    assert detector.step_s == pytest.approx(3.0, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "job",
    [Job(), Job(jitter=0.08), Job(step_s=11.0, pause_s=40.0), Job(num_nics=2), Job(marked=0.15, skew_s=0.02)],
    ids=["usual", "jitter", "long steps", "two NICs", "marks"],
)
def test_hours_of_other_healthy_jobs_have_no_alarm(job, seed):
    assert detect(simulate_log(3600, 100, job, seed=seed)).events == []


@pytest.mark.parametrize("period", [5, 17, 60])
def test_the_period_of_a_noisy_series_is_found(period):
    random = np.random.default_rng(3)
    series = np.tile(np.append(np.ones(period // 3), np.zeros(period - period // 3)), 40)
    assert find_period(series + random.normal(0, 0.1, len(series))) == period


def test_noise_and_silence_have_no_period():
    assert find_period(np.random.default_rng(3).normal(0, 1, 4000)) is None
    assert find_period(np.zeros(4000)) is None

"""Thresholds of PFC and its watchdog: what an ingress may hold, when it goes on, and what ends a storm."""

import dataclasses

import numpy as np
import pytest

from congestion.simulation.files import FlowSet
from congestion.simulation.settings import Settings, settings_of
from congestion.simulation.simulate import Outcome, simulate
from netlayer.errors import ConfigError
from tests.congestion.test_deadlock import _ring, _round
from tests.congestion.test_engine import _fabric, _same

_SENDERS, _LEAF = 3, 4


def _incast(threads: int = 1, **more: object) -> Outcome:
    src = np.arange(_SENDERS, dtype=np.int64)
    zeros = np.zeros(_SENDERS, dtype=np.int64)
    flows = FlowSet(src, zeros + _SENDERS, zeros + 600_000, zeros, zeros + 100)
    chosen = Settings.model_validate({"buffer_bytes": 900_000, "ecn": False, "timeout_us": 1_000.0, **more})
    return simulate(_fabric(1, _SENDERS + 1, 1, [100], [1000]), flows, chosen, "none", threads=threads)


@pytest.mark.parametrize("alpha", [1 / 64, 1 / 8, 1 / 2, 1, 4])
def test_an_ingress_is_paused_at_its_share_of_the_free_pool(alpha):
    """Three that fill at one pace are paused when each holds alpha / (1 + 3 alpha) of the pool."""
    outcome = _incast(pfc_alpha=alpha)
    pool = int(outcome.state.node["pool_bytes"][_LEAF])
    full = _SENDERS * (alpha / (1 + _SENDERS * alpha) * pool + 4_096)
    headroom = _SENDERS * 3 * 12_500
    assert (outcome.finish_ps > 0).all()
    assert outcome.state.port["pauses"].sum() > 0
    assert full - 3 * 4_144 < outcome.state.port["max_queue_bytes"].max() < full + headroom + 3 * 4_144
    assert outcome.state.cause[:, 2].sum() == 0


def test_without_a_value_alpha_is_that_of_ns3():
    _same(_incast(pfc_alpha=1 / 8).state, _incast().state)


def test_a_static_threshold_is_one_and_never_more_than_the_pool():
    outcome = _incast(xoff_bytes=40_000)
    most = _SENDERS * (40_000 + 4_096)
    assert most < outcome.state.port["max_queue_bytes"].max() < most + _SENDERS * (37_500 + 4_144)
    flooded = _incast(xoff_bytes=800_000, buffer_bytes=500_000)  # more than there is: the pool decides
    assert flooded.state.port["max_queue_bytes"].max() <= 500_000
    assert (flooded.finish_ps > 0).all()


def test_xon_is_where_it_goes_on():
    """The lower it is, the longer and rarer the pauses."""
    pauses = [
        int(_incast(xoff_bytes=40_000, xon_bytes=xon, resume_offset_bytes=60_000).state.port["pauses"].sum())
        for xon in (5_000, 35_000)
    ]
    assert 0 < pauses[0] < pauses[1]


def test_headroom_in_bytes_is_that_of_every_port():
    by_bdp, by_bytes = _incast(headroom_bdps=3), _incast(headroom_bytes=37_500)
    _same(by_bdp.state, by_bytes.state)


def _watched(action: str, **more: object) -> Outcome:
    """A ring in PFC deadlock, with a watchdog that strikes after 300 us."""
    flows = _round(2)
    flows = dataclasses.replace(flows, num_bytes=flows.num_bytes // 3)
    told = {"buffer_bytes": 900_000, "watchdog_detection_us": 300.0, "watchdog_action": action, **more}
    return simulate(_ring(), flows, Settings.model_validate(told), "none", until_ps=20_000_000_000)


def test_a_watchdog_that_drops_ends_a_deadlock_and_loses_what_waited():
    outcome = _watched("drop", watchdog_restoration_us=100.0)
    assert not len(outcome.deadlock)
    assert outcome.state.watchdog["storms"].sum() >= 1
    lost = outcome.state.watchdog["drops"].sum()
    assert lost > 0
    assert outcome.state.port["drops"].sum() == lost
    assert outcome.state.cause[:, 2].sum() == 0  # dropped on purpose, not for want of room
    assert not outcome.state.node["shared"].any()  # every buffer is empty again
    counters = outcome.to_json(_ring(), _round(2))["counters"]
    assert (counters["pfc_storms"], counters["watchdog_drops"]) == (outcome.state.watchdog["storms"].sum(), lost)


def test_a_watchdog_that_forwards_ends_it_and_one_that_alerts_only_counts():
    forwarded = _watched("forward", timeout_us=3_000.0)
    assert (forwarded.finish_ps > 0).all()
    assert forwarded.state.watchdog["drops"].sum() == 0
    alerted = _watched("alert")
    assert len(alerted.deadlock) == 5
    assert alerted.state.watchdog["storms"].sum() == 5
    assert alerted.state.port["drops"].sum() == 0


def test_a_pause_shorter_than_the_detection_is_no_storm():
    calm, watched = _incast(), _incast(watchdog_detection_us=100_000.0)
    assert watched.state.watchdog["storms"].sum() == 0
    assert (calm.finish_ps == watched.finish_ps).all()
    _same(watched.state, _incast(threads=2, watchdog_detection_us=100_000.0).state)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("pfc_alpha=0.3",), "congestion.pfc_alpha = 0.3: is none of 1/256"),
        (("pfc_alpha=1", "xoff_bytes=9000"), "congestion.xoff_bytes = 9000: is a static threshold"),
        (("xoff_bytes=9000", "xon_bytes=10000"), "congestion.xon_bytes = 10000: is above congestion.xoff_bytes"),
        (("pfc=false", "pfc_alpha=1"), "congestion.pfc_alpha = 1.0: has no effect without PFC"),
        (("headroom_bytes=9000", "headroom_bdps=2"), "has no effect beside congestion.headroom_bytes = 9000"),
        (("watchdog_action=forward",), "has no effect without a watchdog; set congestion.watchdog_detection_us"),
        (("watchdog_detection_us=9", "classes.1.weight=1"), "knows one class of traffic"),
        (("pfc=false", "watchdog_detection_us=9"), "congestion.watchdog_detection_us = 9.0: has no effect without PFC"),
    ],
)
def test_thresholds_that_cannot_be_are_one_line(overrides, message):
    with pytest.raises(ConfigError) as caught:
        settings_of("ns3", tuple(f"congestion.{one}" for one in overrides))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)

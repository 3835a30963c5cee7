import math

import numpy as np
import pytest

from congestion.control import hybrid
from congestion.simulation.fluid import FluidModel, rightmost, trajectory
from congestion.simulation.settings import HybridSettings
from tests.congestion.bottleneck import US, Bottleneck

FLOWS = (1, 2, 16, 256, 4096)
ROUND_TRIPS_US = (2.0, 8.0, 30.0, 100.0)


def test_roots_of_a_known_equation():
    """With h = 0 and no clock the other modes rest at 0; g = 0 and the clock leave s + e^-s = 0 and s = 0."""
    assert rightmost(0.0, 0.0) == pytest.approx(0.0, abs=1e-9)
    edge = 1.1141571408719301  # w sin w = 1
    assert rightmost(edge / math.tan(edge), 1e-9) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("num_flows", FLOWS)
@pytest.mark.parametrize("base_us", ROUND_TRIPS_US)
def test_fixed_point_is_stable_at_the_gains_of_the_law(num_flows, base_us):
    section = HybridSettings()
    for gain in (section.gain, section.gain * section.unconfirmed):
        model = FluidModel(num_flows, base_us, gain=gain, queue_us=section.queue_us)
        assert model.growth < 0


def test_where_it_is_not_stable():
    assert FluidModel(1024, 30.0, gain=0.25, queue_us=1.0).growth < 0
    assert FluidModel(1024, 30.0, gain=0.8, queue_us=1.0).growth > 0
    assert rightmost(0.25, 0.02, clocked=False) > 0  # a rate as a rate


def test_flows_meet_at_equal_rates_and_the_predicted_queue():
    model = FluidModel(4, 8.0)
    rates, queue_us = trajectory(model, np.array([1.0, 2, 3, 8]) * 50_000, 2_000.0)
    np.testing.assert_allclose(rates[-1], 0.25, rtol=1e-2)
    assert queue_us[-1] == pytest.approx(model.delay_us - model.base_us, rel=1e-2)


def test_an_unstable_gain_swings_for_ever():
    stable, unstable = (FluidModel(64, 30.0, gain=gain, queue_us=1.0) for gain in (0.25, 1.2))
    swings = []
    for model in (stable, unstable):
        window = np.full(64, model.capacity * model.delay_us / 64 * 1.05)
        queue_us = trajectory(model, window, 3_000.0, model.delay_us - model.base_us)[1]
        swings.append(np.ptp(queue_us[-10_000:]))
    assert swings[0] < 0.1 < 1 < swings[1]


@pytest.mark.parametrize("num_flows", [2, 16])
def test_packets_queue_as_the_model_says(num_flows):
    run = Bottleneck(hybrid, HybridSettings(use_ecn=False, line_window=False), num_flows).run(3_000 * US)
    model = FluidModel(num_flows, 8.0)
    assert run.queueing(2_000 * US).mean() == pytest.approx(model.delay_us - model.base_us, rel=0.05)


@pytest.mark.parametrize("num_flows", [2, 3, 16])
def test_windows_that_fill_an_idle_path_queue_less_where_flows_are_few(num_flows):
    run = Bottleneck(hybrid, HybridSettings(use_ecn=False), num_flows).run(3_000 * US)
    model = FluidModel(num_flows, 8.0)
    round_trip_us = min(model.delay_us, model.held_us)
    assert run.queueing(2_000 * US).mean() == pytest.approx(round_trip_us - model.base_us, rel=0.15)
    assert run.queueing(2_000 * US).mean() < 1.05 * (model.delay_us - model.base_us)

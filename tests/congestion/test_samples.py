"""Samples of links and tiers from counters that are set by hand, and when a run is looked at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from congestion.engine.looks import Looks, look_at
from congestion.engine.tables import FLOW, KIND, NEVER, PORT, RUN
from congestion.scenarios.catalogue import build_scenario
from congestion.scenarios.fabric import Star, build_fabric
from congestion.simulation import link_samples
from congestion.simulation.link_samples import LinkSamples
from congestion.simulation.samples import Samples, interval_ps, run_sampled
from congestion.simulation.settings import settings_of
from congestion.simulation.simulate import Simulation
from topology.fabric.graph import Graph

US = 1_000_000  # ps


class Run:
    """As much of a simulation as samples look at; ends after `lasts_ps`."""

    def __init__(self, fabric: Graph, *, classes: int = 1, lasts_ps: int = NEVER) -> None:
        ports = 2 * fabric.num_cables
        lanes = 0 if classes == 1 else ports * classes
        run = np.zeros(1, RUN)
        run["mtu_bytes"], run["window"] = 1000, US
        flow = np.zeros(1, FLOW)
        flow["finish"] = -1
        kind = np.zeros(1, KIND)
        kind["tx_data"] = 40_000
        self.link = np.arange(ports)
        self.state: Any = SimpleNamespace(
            port=np.zeros(ports, PORT), lane=np.zeros(lanes, PORT), flow=flow, run=run, kind=kind
        )
        self.time_ps, self.completed, self.interrupted, self.lasts_ps = 0, False, False, lasts_ps

    def run(
        self, until_ps: int = NEVER, say: Any = None, look: Any = None, every_ps: int = NEVER, from_ps: int = 0
    ) -> Any:
        while not self.completed and self.time_ps < until_ps:
            stop_ps = from_ps + ((self.time_ps - from_ps) // every_ps + 1) * every_ps
            self.time_ps = min(stop_ps, until_ps, self.lasts_ps)
            self.completed = self.time_ps == self.lasts_ps
            if look and self.time_ps == stop_ps:
                look.add(self.seen(*look.last), 1000)
        return self

    def seen(self, last_ps: int = 0, acked: Any = 0) -> Looks:
        return look_at(self.state, self.time_ps, last_ps, acked)


@pytest.fixture
def fabric() -> Graph:
    return build_fabric(Star(bps=100_000_000_000, hosts=3))


def test_a_link_has_the_share_that_its_counters_grew_by(fabric: Graph) -> None:
    run, links = Run(fabric), LinkSamples(fabric, np.arange(2 * fabric.num_cables))
    links.begin(run.seen())
    run.time_ps = 10 * US
    run.state.port["tx_bytes"][1] = 62_500  # half of 100 Gb/s for 10 us
    run.state.port["paused"][2], run.state.port["paused_at"][2] = 1, 8 * US
    links.add(run.seen())
    frame, tiers = links.links(), links.tiers()
    assert frame["utilisation"].tolist() == pytest.approx([0, 0.5, *[0] * (len(frame) - 2)])
    assert frame["pause_share"].tolist() == pytest.approx([0, 0, 0.2, *[0] * (len(frame) - 3)])
    assert tiers["paused_ports"].sum() == tiers["reached_ports"].sum() == 1
    assert (tiers["pause_share"] * tiers["ports"]).sum() == pytest.approx(0.2)


def test_a_pause_that_is_over_still_reached_its_port(fabric: Graph) -> None:
    run, links = Run(fabric), LinkSamples(fabric, np.arange(2 * fabric.num_cables))
    links.begin(run.seen())
    run.time_ps = 10 * US
    run.state.port["paused_ps"][0] = US
    links.add(run.seen())
    assert links.tiers()["paused_ports"].sum() == 0
    assert links.tiers()["reached_ports"].sum() == 1


def test_a_port_is_stopped_where_one_of_its_classes_is(fabric: Graph) -> None:
    run, samples = Run(fabric, classes=2), Samples()
    run.state.lane["paused"][3] = 1
    run.time_ps = US
    assert run.seen().stopped[0].tolist() == [False, True, *[False] * (len(run.state.port) - 2)]
    samples.add(run.seen(), 1000)
    assert samples.rows[0]["paused_ports"] == 1


def test_of_too_many_rows_the_busiest_links_stay(fabric: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_samples, "MAX_ROWS", 4)
    run, links = Run(fabric), LinkSamples(fabric, np.arange(2 * fabric.num_cables))
    links.begin(run.seen())
    for turn in (1, 2):
        run.time_ps = turn * US
        run.state.port["tx_bytes"] += np.arange(len(run.state.port))
        links.add(run.seen())
    busiest = set(links.link[-2:])
    assert len(links.links()) == 4
    assert set(links.links()["link"]) == busiest
    assert links.skipped == len(links.link) - 2


def test_long_runs_keep_fewer_and_longer_intervals(fabric: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_samples, "_MAX_INTERVALS", 8)
    run, links = Run(fabric), LinkSamples(fabric, np.arange(2 * fabric.num_cables))
    links.begin(run.seen())
    for turn in range(1, 33):
        run.time_ps = turn * US
        run.state.port["tx_bytes"] += 1_250
        links.add(run.seen())
    frame = links.links()
    times = sorted(set(frame["time_us"]))
    assert np.ptp(np.diff(times)) == 0
    assert 4 <= len(times) <= 8
    assert frame["utilisation"].tolist() == pytest.approx([0.1] * len(frame))


def test_cables_between_the_same_two_have_names_of_their_own() -> None:
    names = link_samples._names(np.array(["a", "a", "b"]), np.array(["b", "b", "a"]))
    assert names.tolist() == ["a -> b #1", "a -> b #2", "b -> a"]


def test_nothing_is_looked_at_before_the_first_start(fabric: Graph) -> None:
    run, samples = Run(fabric, lasts_ps=2_000 * US), Samples()
    run_sampled(run, samples, 10 * US, first_ps=1_935 * US)  # type: ignore[arg-type]
    assert [row["time_us"] for row in samples.rows] == [1945.0, 1955, 1965, 1975, 1985, 1995]


def test_an_interval_that_was_chosen_doubles_in_a_long_run(fabric: Graph) -> None:
    run, samples = Run(fabric, lasts_ps=20_000 * US), Samples()
    run_sampled(run, samples, US, grows=True)  # type: ignore[arg-type]
    steps = np.diff([row["time_us"] for row in samples.rows])
    assert samples.rows[-1]["time_us"] == 20_000
    assert set(steps) <= {2.0**power for power in range(6)}
    assert len(samples.rows) < 3_000


@pytest.mark.parametrize(("least_us", "interval_us"), [(400.0, 2), (2_600.0, 20), (1.0, 1)])
def test_the_interval_is_round_and_fits_the_run(fabric: Graph, least_us: float, interval_us: float) -> None:
    assert interval_ps(least_us, Run(fabric).state) == interval_us * US


@pytest.mark.parametrize(("every_us", "threads"), [(1, 1), (10, 2), (3.3, 1)])
def test_the_engine_looks_as_a_run_stopped_for_each_look_is_seen(every_us: float, threads: int) -> None:
    case = build_scenario("incast", ["scenario.senders=6", "scenario.num_bytes=300KB"])
    settings, every_ps = settings_of("ns3", ("congestion.buffer_bytes=1MiB",)), round(every_us * US)

    def begun(threads: int) -> tuple[Simulation, Samples]:
        simulation = Simulation(case.fabric, case.flows, settings, "dcqcn", threads=threads)
        return simulation, Samples(LinkSamples(case.fabric, simulation.link))

    simulation, samples = begun(threads)
    outcome = run_sampled(simulation, samples, every_ps)
    assert outcome.pause_ps.any()
    stopped, by_hand = begun(1)
    by_hand.begin(stopped)
    while not stopped.completed:
        due = (stopped.time_ps // every_ps + 1) * every_ps
        stopped.advance(due)
        if stopped.time_ps >= due:
            by_hand.add(look_at(stopped.state, stopped.time_ps, *by_hand.last), 4096)
    assert samples.rows == by_hand.rows
    for name, frame in samples.frames().items():
        pd.testing.assert_frame_equal(frame, by_hand.frames()[name])


def test_looks_are_read_when_no_row_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    case = build_scenario("incast", ["scenario.senders=2", "scenario.num_bytes=100KB"])
    found = []
    for cells in (1, 1 << 19):
        monkeypatch.setattr("congestion.engine.looks._CELLS", cells)
        simulation = Simulation(case.fabric, case.flows, settings_of("ns3"), "none")
        samples = Samples()
        simulation.run(9 * US, look=samples, every_ps=US)
        simulation.run(look=samples, every_ps=US)
        found.append(samples.rows)
    assert found[0] == found[1]
    *times, end = (row["time_us"] for row in found[0])
    assert times == list(range(1, len(times) + 1))
    assert len(times) < end < len(times) + 2

import numpy as np
import pytest

from congestion.scenarios.catalogue import build_scenario
from congestion.simulation.measures import flow_frame, ideal_ps, port_frame, span_ps, summary
from congestion.simulation.settings import Settings
from congestion.simulation.simulate import Simulation, simulate


@pytest.mark.parametrize("num_bytes", [1, 4_096, 4_097, 10_000_000])
@pytest.mark.parametrize("truncate_ns", [False, True])
@pytest.mark.parametrize("fabric", ["star", "dumbbell", "clos", "fat-tree"])
def test_a_flow_alone_takes_its_ideal_time(fabric, num_bytes, truncate_ns):
    far = ["scenario.senders=1", f"scenario.num_bytes={num_bytes}"]
    slow = {"dumbbell": ["fabric.trunk_bps=30000000000"], "clos": ["fabric.hosts_per_leaf=1", "fabric.spines=2"]}
    case = build_scenario("incast", [*far, *slow.get(fabric, ())], fabric=fabric)
    outcome = simulate(case.fabric, case.flows, Settings(), "none", truncate_ns=truncate_ns)
    assert outcome.finish_ps.tolist() == ideal_ps(outcome.state).tolist()


def test_frames_and_summary_agree_with_the_run():
    case = build_scenario("incast", ["scenario.senders=4", "scenario.num_bytes=1MB"])
    outcome = simulate(case.fabric, case.flows, Settings(buffer_bytes=1_000_000), "none")
    flows, ports = flow_frame(case.fabric, case.flows, outcome), port_frame(case.fabric, outcome)
    row = summary(flows, ports)
    assert flows["src"].tolist() == ["host0", "host1", "host2", "host3"]
    fct = np.sort(outcome.finish_ps)
    assert row["completion_us"] == pytest.approx(fct[-1] / 1e6)
    assert row["fct_median_us"] == pytest.approx((fct[1] + fct[2]) / 2e6)
    assert row["fct_p99_us"] == row["fct_p999_us"] == row["fct_max_us"] == pytest.approx(fct[-1] / 1e6)
    assert row["fct_min_us"] == pytest.approx(fct[0] / 1e6)
    assert row["goodput_bps"] == pytest.approx(4e6 * 8e12 / fct[-1])
    rates = 8e18 / outcome.finish_ps
    assert row["jain"] == pytest.approx(rates.sum() ** 2 / 4 / (rates**2).sum())
    assert row["slowdown_max"] == pytest.approx(fct[-1] / ideal_ps(outcome.state)[0])
    bottleneck = ports[(ports["src"] == "switch0") & (ports["dst"] == "host4")].iloc[0]
    packets = 4 * -(-1_000_000 // 4096)
    assert bottleneck["tx_bytes"] == 4_000_000 + 48 * packets
    assert bottleneck["tx_packets"] == packets
    assert row["utilisation_max"] == pytest.approx(bottleneck["tx_bytes"] * 40 / fct[-1])
    assert bottleneck["tier"] == "switch1-host"
    assert row["max_queue_bytes"] == bottleneck["max_queue_bytes"] > 0
    stopped = ports[ports["paused_us"] > 0]
    assert set(stopped["src"]) == {"host0", "host1", "host2", "host3"}
    assert row["pauses"] == outcome.state.port["pauses"].sum() == bottleneck["pauses_set_off"] > 0
    assert row["pauses_passed_on"] == 0
    assert row["cnps"] == row["ecn_marked"]
    assert row["pause_share"] == pytest.approx(outcome.pause_ps.sum() / fct[-1] / len(ports))
    assert row["drops"] == row["retransmissions"] == 0


def test_round_trips_stand_beside_flows_where_they_are_measured():
    case = build_scenario("incast", ["scenario.senders=2", "scenario.num_bytes=100000"])
    outcome = simulate(case.fabric, case.flows, Settings(measure_rtt=True), "none")
    flows = flow_frame(case.fabric, case.flows, outcome)
    row = summary(flows, port_frame(case.fabric, outcome))
    idle_us = float(outcome.state.flow["base_rtt_ps"][0]) / 1e6
    assert idle_us < row["rtt_mean_us"] < row["rtt_max_us"] == flows["rtt_max_us"].max()
    assert row["rtt_mean_us"] == pytest.approx((flows["rtt_mean_us"] * flows["rtts"]).sum() / flows["rtts"].sum())


def test_percentiles_are_by_nearest_rank():
    case = build_scenario("poisson", ["scenario.packets=2000", "scenario.load=0.9"])
    outcome = simulate(case.fabric, case.flows, Settings(), "none")
    row = summary(flow_frame(case.fabric, case.flows, outcome), port_frame(case.fabric, outcome))
    fct = np.sort(outcome.finish_ps - outcome.start_ps) / 1e6
    assert (row["fct_p99_us"], row["fct_p999_us"]) == pytest.approx((fct[1979], fct[1997]))


def test_a_warm_up_counts_in_no_time_and_no_counter():
    case = build_scenario("poisson", ["scenario.packets=400", "scenario.load=0.9"])
    outcome = Simulation(case.fabric, case.flows, Settings(), "none", warmup_ps=30_000_000).run()
    since = case.flows.start_ps[0] + 30_000_000
    assert outcome.since_ps == since
    flows, ports = flow_frame(case.fabric, case.flows, outcome), port_frame(case.fabric, outcome)
    row = summary(flows, ports, since / 1e6)
    later = case.flows.start_ps >= since
    fct = (outcome.finish_ps - case.flows.start_ps)[later]
    assert 0 < row["measured"] == later.sum() < row["ended"] == row["flows"] == 400
    assert (row["fct_min_us"], row["fct_max_us"]) == pytest.approx((fct.min() / 1e6, fct.max() / 1e6))
    took = outcome.finish_ps.max() - since
    assert row["completion_us"] == pytest.approx(took / 1e6)
    acknowledged = (outcome.finish_ps > since).sum() * 4_096
    in_a_window = 6 * 4_096  # of the link's delay, which is run to its end where a run pauses
    assert row["goodput_bps"] * took / 8e12 == pytest.approx(acknowledged, abs=in_a_window)
    assert row["utilisation_max"] == pytest.approx(0.9, abs=0.12)


def test_a_waiting_flow_counts_from_its_own_start():
    case = build_scenario("all-to-all", ["scenario.ranks=4", "scenario.rounds=true"], fabric="star")
    outcome = simulate(case.fabric, case.flows, Settings(), "none")
    flows = flow_frame(case.fabric, case.flows, outcome)
    assert flows["start_us"].max() > 80
    assert flows["slowdown"].max() < 1.1


def test_what_did_not_end_is_counted_and_has_no_time():
    case = build_scenario("incast", ["scenario.senders=2"])
    outcome = Simulation(case.fabric, case.flows, Settings(), "none").run(until_ps=100_000_000)
    flows, ports = flow_frame(case.fabric, case.flows, outcome), port_frame(case.fabric, outcome)
    row = summary(flows, ports)
    assert (row["flows"], row["ended"]) == (2, 0)
    assert row["completion_us"] is row["jain"] is row["fct_max_us"] is row["slowdown_median"] is None
    assert flows["fct_us"].isna().all()
    assert span_ps(outcome) == 100_000_000
    assert 0.9 < row["utilisation_max"] <= 1.01

from pathlib import Path

import numpy as np
import pytest

from congestion.scenarios.catalogue import JOB, SCENARIOS, build_scenario, case_of_cm, describe
from congestion.simulation.files import FlowSet, read_flows
from congestion.simulation.measures import ideal_ps
from congestion.simulation.settings import Settings
from congestion.simulation.simulate import simulate
from netlayer.errors import ConfigError
from tests.congestion.test_golden import GOLDEN
from topology.fabric.graph import Graph
from topology.importers import read_fabric

CABLES = ("is_switch", "a", "b", "bps", "latency_ns")


def _waits(flows: FlowSet, flow: int) -> list[int]:
    assert flows.waits_for is not None
    first, earlier = flows.waits_for
    return sorted(earlier[first[flow] : first[flow + 1]].tolist())


def _same_wires(one: Graph, other: Graph) -> None:
    for name in CABLES:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize(
    ("golden", "scenario", "overrides"),
    [
        ("g2_incast16_none", "incast", ()),
        ("g6_a2a16_none", "all-to-all", ("scenario.ranks=16",)),
        ("g4_clos_perm_none", "permutation", ("scenario.shift=8", "fabric.spines=8", "fabric.uplink_bps=200G")),
    ],
)
def test_scenarios_are_those_of_the_golden_files(golden, scenario, overrides):
    fabric = "star" if golden != "g4_clos_perm_none" else ""
    case = build_scenario(scenario, overrides, fabric=fabric)
    _same_wires(case.fabric, read_fabric([GOLDEN / golden / "topo.txt"]))
    flows = read_flows(GOLDEN / golden / "flow.txt", case.fabric)
    for name in ("src", "dst", "num_bytes", "sport"):
        np.testing.assert_array_equal(getattr(case.flows, name), getattr(flows, name))


def test_a_fat_tree_is_wired_as_htsims(tmp_path):
    path = tmp_path / "fabric.topo"
    tiers = ["Radix_Down 2\nRadix_Up 2", "Radix_Down 2\nRadix_Up 2", "Radix_Down 4"]
    text = "Nodes 16\nTiers 3\nPodsize 4\n"
    for tier, radix in enumerate(tiers):
        text += f"Tier {tier}\nDownlink_speed_Gbps 200\n{radix}\nDownlink_Latency_ns 1000\n"
    path.write_text(text)
    case = build_scenario("permutation", ["scenario.ranks=16"], fabric="fat-tree")
    _same_wires(case.fabric, read_fabric([path]))


@pytest.mark.parametrize("name", [*SCENARIOS, JOB])
def test_a_seed_gives_one_set_of_flows_and_draws_hosts_ports_and_starts(name):
    drawn = ["scenario.placement=random", "scenario.sports=random", "scenario.jitter_us=50"]
    small = ["scenario.packets=1000"] if name == "poisson" else []
    one, same, other = (build_scenario(name, [*drawn, *small], seed).flows for seed in (1, 1, 2))
    for column in ("src", "dst", "start_ps", "sport"):
        np.testing.assert_array_equal(getattr(one, column), getattr(same, column))
        assert not np.array_equal(getattr(one, column), getattr(other, column))
    assert (one.src != one.dst).all()
    assert one.sport.min() >= 0xC000
    if name != "poisson":
        assert one.start_ps.max() <= 50_000_000


def test_a_drawn_permutation_leaves_nobody_out():
    flows = build_scenario("permutation", ["scenario.ranks=9"], 5).flows
    assert sorted(flows.dst.tolist()) == list(range(9))
    assert (flows.src != flows.dst).all()


def test_rounds_wait_for_their_ranks_send_and_receipt():
    flows = build_scenario("all-to-all", ["scenario.ranks=4", "scenario.rounds=true", "scenario.gap_us=2"]).flows
    pairs = list(zip(flows.src.tolist(), flows.dst.tolist(), strict=True))
    assert pairs[:8] == [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2), (1, 3), (2, 0), (3, 1)]
    assert len(set(pairs)) == 12
    assert _waits(flows, 0) == []
    assert _waits(flows, 5) == [0, 1]  # rank 1: received of rank 0, sent to rank 2
    assert _waits(flows, 8) == [4, 6]
    assert flows.delay_ps is not None
    assert flows.delay_ps.tolist() == [2_000_000] * 12


def test_a_ring_passes_every_piece_round_twice():
    overrides = ["scenario.ranks=4", "scenario.channels=2", "scenario.num_bytes=1001"]
    flows = build_scenario("ring-all-reduce", overrides).flows
    assert len(flows) == 2 * 3 * 4 * 2
    assert flows.num_bytes.sum() == 2 * 3 * 1001
    assert set(flows.sport.tolist()) == {10_000, 10_001}
    for flow in range(8, len(flows)):
        [before] = _waits(flows, flow)
        assert flows.dst[before] == flows.src[flow]
        assert flows.sport[before] == flows.sport[flow]
        assert flows.num_bytes[before] == flows.num_bytes[flow]  # it is the same piece


def test_copies_are_groups_of_their_own():
    flows = build_scenario("ring-all-reduce", ["scenario.ranks=3", "scenario.copies=2"]).flows
    half = len(flows) // 2
    np.testing.assert_array_equal(flows.src[half:], flows.src[:half] + 3)
    assert _waits(flows, half + 3) == [half + _waits(flows, 3)[0]]


def test_a_step_of_a_ring_starts_the_gap_after_its_receipt():
    case = build_scenario("ring-all-reduce", ["scenario.ranks=4", "scenario.num_bytes=4MB", "scenario.gap_us=3"])
    outcome = simulate(case.fabric, case.flows, Settings(), "none")
    ack_back = 2 * (1_000_000 + 60 * 40)
    assert outcome.start_ps[:4].tolist() == [0] * 4
    for flow in range(4, 24):
        [before] = _waits(case.flows, flow)
        assert outcome.start_ps[flow] == outcome.finish_ps[before] - ack_back + 3_000_000


def test_the_victim_shares_the_trunk_alone():
    case = build_scenario("victim")
    outcome = simulate(case.fabric, case.flows, Settings(), "none")
    slowdown = (outcome.finish_ps - case.flows.start_ps) / ideal_ps(outcome.state)
    switch = np.flatnonzero(case.fabric.is_switch)
    assert case.flows.dst[-1] not in case.flows.dst[:-1]
    assert case.fabric.bps[-1] == 17 * 200e9
    assert [case.fabric.a[-1], case.fabric.b[-1]] == switch.tolist()
    assert slowdown[-1] > 5  # pauses of the incast stop it
    lossy = simulate(case.fabric, case.flows, Settings(pfc=False), "none")
    assert (lossy.finish_ps - case.flows.start_ps)[-1] < 1.01 * ideal_ps(lossy.state)[-1]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_packets_wait_as_in_an_md1_queue(seed):
    overrides = ["scenario.senders=250", "scenario.packets=100000", "scenario.load=0.5"]
    case = build_scenario("poisson", overrides, seed)
    outcome = simulate(case.fabric, case.flows, Settings(pfc=False), "none")
    waits_ps = outcome.finish_ps - case.flows.start_ps - ideal_ps(outcome.state)
    service_ps, load = 165_760, 0.5
    assert waits_ps.mean() == pytest.approx(load / (2 * (1 - load)) * service_ps, rel=0.01)
    free, total = 0, 0
    for start in np.sort(case.flows.start_ps).tolist():  # Lindley's recursion: the wait of each in one FIFO
        total += max(free - start, 0)
        free = max(free, start) + service_ps
    assert waits_ps.sum() == total


def test_phases_of_a_job_follow_each_other_at_each_nic():
    flows = build_scenario(JOB, ["scenario.ring_steps=2", "scenario.phases=pipeline,all-gather"]).flows
    pipeline = 2 * 3 * 4 * 8  # both ways, stages but one, dp, tp
    ring = 4 * 8 * 4
    assert len(flows) == pipeline + 2 * ring
    first = _waits(flows, pipeline)
    mine = flows.src[pipeline]
    touched = np.flatnonzero((flows.src[:pipeline] == mine) | (flows.dst[:pipeline] == mine))
    assert first == touched.tolist()
    [received] = _waits(flows, pipeline + ring)
    assert flows.dst[received] == flows.src[pipeline + ring]
    assert flows.num_bytes[pipeline] + flows.num_bytes[pipeline + ring] == 64 * 2**20 * 3 // 4
    assert flows.num_bytes[0] == 2048 * 4096 * 2 // 8


def test_bytes_of_a_job_can_be_scaled_and_its_placement_keeps_rails():
    overrides = ["scenario.bytes_per_rank=1MB", "scenario.placement=random", "scenario.phases=all-gather+pipeline"]
    flows = build_scenario(JOB, overrides, 3).flows
    assert flows.waits_for is None
    assert flows.num_bytes.sum() == pytest.approx(128 * 1_000_000, rel=1e-6)
    np.testing.assert_array_equal(flows.src % 8, flows.dst % 8)


def test_a_cm_brings_its_fat_tree(tmp_path):
    path = tmp_path / "two16.cm"
    path.write_text("Nodes 16\nConnections 2\n0->15 id 1 start 0 size 2000000\n4->15 id 2 start 7 size 2000000\n")
    case = case_of_cm(path)
    assert case.flows.start_ps.tolist() == [0, 7]
    assert set(case.fabric.latency_ns.tolist()) == {1000.0}
    assert case.fabric.hosts.tolist() == list(range(16))
    assert set(case.fabric.bps.tolist()) == {100e9}
    assert case.flows.src.tolist() == [0, 4]
    assert case.flows.num_bytes.tolist() == [2_000_000, 2_000_000]


@pytest.mark.parametrize(
    ("name", "overrides", "fabric", "message"),
    [
        ("insast", (), "", "SCENARIO = insast: is unknown"),
        ("incast", ("scenario.sender=3",), "", "did you mean scenario.senders"),
        ("incast", ("scenario.senders=none",), "", "scenario.senders = none"),
        ("incast", ("scenarios.senders=3",), "", "sets nothing here"),
        ("incast", ("fabric.hosts=3",), "", "leaves room for 3 hosts, 17 are due"),
        ("incast", (), "ring", "--fabric = ring: is unknown"),
        ("incast", ("fabric.k=5",), "fat-tree", "must be even"),
        ("incast", ("fabric.k=4",), "fat-tree", "leaves room for 16 hosts, 17 are due"),
        ("permutation", ("scenario.shift=64",), "", "back to itself"),
        ("ring-all-reduce", ("scenario.num_bytes=3",), "", "less than a byte"),
        (JOB, ("scenario.phases=all-reduce",), "", "is no phase"),
        (JOB, ("cluster.servers=1", "job.parallel.pp=1", "job.parallel.dp=1"), "", "has no flow between"),
        (JOB, ("fabric.bps=100G",), "", "has no effect on job-phases"),
    ],
)
def test_bad_parameters_are_one_line(name, overrides, fabric, message):
    with pytest.raises(ConfigError, match=message) as caught:
        build_scenario(name, overrides, fabric=fabric)
    assert "\n" not in str(caught.value)


def test_a_scenario_larger_than_a_given_fabric_is_refused():
    fabric = read_fabric([GOLDEN / "g1_single" / "topo.txt"])
    with pytest.raises(ConfigError, match="fewer than the scenario's 17"):
        build_scenario("incast", fabric=fabric)
    with pytest.raises(ConfigError, match="no effect on a fabric from a file"):
        build_scenario("incast", ["fabric.bps=1G"], fabric=fabric)
    with pytest.raises(ConfigError, match="no effect on incast"):
        build_scenario("incast", config=Path("job.toml"))


def test_every_parameter_is_listed_once_with_its_meaning():
    rows = describe()
    names = [(row["of"], row["name"]) for row in rows]
    assert len(set(names)) == len(names)
    assert all(row["meaning"] for row in rows)
    assert ("incast", "scenario.senders") in names
    assert ("every scenario", "scenario.jitter_us") in names


def test_a_cable_flaps_by_name():
    case = build_scenario("flap", ("scenario.link=leaf1,spine2", "scenario.times=2", "scenario.down_us=30"))
    (first, down, up), (second, again, _) = case.flaps
    assert first == second
    assert {case.fabric.names[case.fabric.a[first]], case.fabric.names[case.fabric.b[first]]} == {"leaf1", "spine2"}
    assert (up - down, again - down) == (30_000_000, 1_000_000_000)
    first = build_scenario("flap").flaps[0][0]
    assert case.fabric.is_switch[case.fabric.a[first]]
    assert case.fabric.is_switch[case.fabric.b[first]]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("scenario.link=leaf1", "is no pair of names"),
        ("scenario.link=leaf1,leaf2", "cables of leaf1 go to host"),
        ("scenario.link=leaf1,spine77", "is no device"),
        ("scenario.every_us=5", "is not above down_us"),
    ],
)
def test_a_cable_that_is_none_is_named(override, message):
    with pytest.raises(ConfigError, match=message):
        build_scenario("flap", (override, "scenario.times=3"))


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("all-to-all", "scenario.ranks=300000", "a run has at most"),
        ("ring-all-reduce", "scenario.ranks=8000", "GiB are free"),
    ],
)
def test_what_memory_cannot_hold_is_refused_before_it_is_made(name, override, message):
    with pytest.raises(ConfigError, match=message):
        build_scenario(name, (override,))


def test_phases_of_a_job_have_classes():
    sets = ("scenario.phases=pipeline+all-gather", "scenario.classes=pipeline=2", "scenario.pg=1")
    assert set(build_scenario("job-phases", sets).flows.pg.tolist()) == {1, 2}
    assert build_scenario("victim", ("scenario.victim_pg=3",)).flows.pg.tolist()[-2:] == [0, 3]
    with pytest.raises(ConfigError, match="no class"):
        build_scenario("job-phases", ("scenario.classes=pipeline=9",))

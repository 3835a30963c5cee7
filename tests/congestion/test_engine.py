import contextlib
import signal
from dataclasses import replace
from types import SimpleNamespace

import numba
import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from congestion.engine.build import LAWS, build
from congestion.engine.tables import State
from congestion.simulation.files import FlowSet, with_starts_of_ns3
from congestion.simulation.samples import Samples
from congestion.simulation.settings import ClassSettings, DcqcnSettings, Settings
from congestion.simulation.simulate import Progress, Simulation, simulate
from netlayer.errors import ConfigError
from tests.congestion.heap_engine import HeapEngine
from topology.fabric.graph import Graph


def _fabric(leaves: int, hosts: int, spines: int, gbps: list[int], delay_ns: list[int]) -> Graph:
    """Leaves with hosts below and spines above; rates and delays are taken in turn, a cable each."""
    num_hosts = leaves * hosts
    cables = [(host, num_hosts + host // hosts) for host in range(num_hosts)]
    cables += [(num_hosts + leaf, num_hosts + leaves + spine) for leaf in range(leaves) for spine in range(spines)]
    many = len(cables)
    a, b = (np.array(ends, dtype=np.int64) for ends in zip(*cables, strict=True))
    num_nodes = num_hosts + leaves + spines
    return Graph(
        names=tuple(f"n{node}" for node in range(num_nodes)),
        is_switch=np.arange(num_nodes) >= num_hosts,
        a=a,
        b=b,
        bps=np.resize(gbps, many) * 1e9,
        latency_ns=np.resize(delay_ns, many).astype(float),
        a_port=("",) * many,
        b_port=("",) * many,
    )


@st.composite
def _scenarios(draw):
    leaves, hosts, spines = draw(st.integers(1, 3)), draw(st.integers(2, 4)), draw(st.integers(1, 3))
    fabric = _fabric(
        leaves,
        hosts,
        spines,
        draw(st.lists(st.sampled_from([25, 100, 200, 400]), min_size=1, max_size=5)),
        draw(st.lists(st.sampled_from([300, 600, 1000, 1700]), min_size=1, max_size=3)),
    )
    pairs = st.tuples(
        st.integers(0, leaves * hosts - 1),
        st.integers(1, leaves * hosts - 1),
        st.integers(1, 200_000),
        st.integers(0, 20_000),
    )
    rows = draw(st.lists(pairs, min_size=1, max_size=12))
    src, step, num_bytes, start_ns = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    dst = (src + step) % (leaves * hosts)
    flows = FlowSet(src, dst, num_bytes, start_ns * 1000, np.full(len(rows), 100, dtype=np.int64))
    tight = draw(st.booleans())
    chosen = Settings(
        mtu_bytes=draw(st.sampled_from([1000, 4096])),
        pfc=draw(st.booleans()),
        buffer_bytes=draw(st.integers(2_500_000, 2_700_000)) if tight else 64 * 2**20,
        headroom_bdps=draw(st.integers(0, 3)),
        kmin_bytes=20_000,
        kmax_bytes=100_000,
        loss_rate=draw(st.sampled_from([0.0, 0.01])),
        dcqcn=DcqcnSettings(increase_us=draw(st.sampled_from([4.0, 12.0, 55.0]))),
    )
    return fabric, flows, chosen, draw(st.sampled_from(["none", "dcqcn"])), draw(st.booleans())


@settings(max_examples=120, deadline=None)
@given(_scenarios())
def test_windows_and_the_event_heap_agree_to_the_picosecond(scenario):
    fabric, flows, chosen, law, truncate_ns = scenario
    outcome = simulate(fabric, flows, chosen, law, seed=7, truncate_ns=truncate_ns)
    begun = with_starts_of_ns3(flows) if truncate_ns else flows
    heap = HeapEngine(build(fabric, begun, chosen, law, seed=7, truncate_ns=truncate_ns))
    assert heap.run() == outcome.finish_ps.tolist()
    assert heap.hops == outcome.link_hops
    for column, counted in (
        ("max_queue_bytes", heap.max_queue),
        ("pauses", heap.pauses),
        ("marks", heap.marks),
        ("drops", heap.drops),
    ):
        assert outcome.state.port[column].tolist() == [counted[port] for port in range(2 * fabric.num_cables)]


def test_an_incast_on_a_small_buffer_pauses_and_drops_nothing():
    fabric = _fabric(1, 9, 1, [100], [1000])
    src = np.arange(8, dtype=np.int64)
    flows = FlowSet(src, np.full(8, 8), np.full(8, 400_000), np.zeros(8, dtype=np.int64), np.full(8, 100))
    outcome = simulate(fabric, flows, Settings(buffer_bytes=1_500_000), "none")
    assert outcome.state.port["pauses"].sum() > 8
    assert outcome.state.port["drops"].sum() == 0
    assert (outcome.finish_ps > 0).all()
    heap = HeapEngine(build(fabric, flows, Settings(buffer_bytes=1_500_000), "none", seed=0, truncate_ns=False))
    assert heap.run() == outcome.finish_ps.tolist()


def test_too_little_headroom_drops():
    fabric = _fabric(1, 9, 1, [100], [1000])
    src = np.arange(8, dtype=np.int64)
    flows = FlowSet(src, np.full(8, 8), np.full(8, 400_000), np.zeros(8, dtype=np.int64), np.full(8, 100))
    outcome = simulate(fabric, flows, Settings(buffer_bytes=600_000, headroom_bdps=0), "none")
    assert outcome.state.port["drops"].sum() > 0


def test_a_seed_gives_one_trace():
    fabric = _fabric(2, 4, 2, [100], [1000])
    src = np.array([0, 1, 2, 3], dtype=np.int64)
    flows = FlowSet(src, np.full(4, 4), np.full(4, 900_000), np.zeros(4, dtype=np.int64), np.full(4, 100))
    runs = [simulate(fabric, flows, Settings(kmin_bytes=0), "dcqcn", seed=seed).state for seed in (3, 3, 4)]
    for name in ("port", "flow", "dcqcn_flow"):
        np.testing.assert_array_equal(getattr(runs[0], name), getattr(runs[1], name))
    assert not np.array_equal(runs[0].flow, runs[2].flow)


def test_the_store_of_packets_grows_while_running():
    fabric = _fabric(1, 9, 1, [100], [1000])
    src = np.arange(8, dtype=np.int64)
    flows = FlowSet(src, np.full(8, 8), np.full(8, 4_000_000), np.zeros(8, dtype=np.int64), np.full(8, 100))
    first = build(fabric, flows, Settings(), "none", seed=0, truncate_ns=False)
    outcome = simulate(fabric, flows, Settings(), "none")
    assert len(outcome.state.following) > len(first.following)
    heap = HeapEngine(build(fabric, flows, Settings(), "none", seed=0, truncate_ns=False))
    assert heap.run() == outcome.finish_ps.tolist()


def _crowd() -> tuple[Graph, FlowSet]:
    """Three senders to one receiver in each of two leaves, through a small buffer."""
    fabric = _fabric(2, 4, 2, [100, 200], [1000, 600])
    src = np.array([0, 1, 2, 4, 5, 6], dtype=np.int64)
    dst = np.array([7, 7, 7, 3, 3, 3], dtype=np.int64)
    return fabric, FlowSet(src, dst, np.full(6, 900_000), np.arange(6) * 1000, np.full(6, 100))


def _same(first: State, second: State) -> None:
    for name in ("port", "node", "flow", "receiver", "dcqcn_flow", "swift_flow", "nscc_flow", "hybrid_flow"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


@pytest.mark.parametrize("law", LAWS)
def test_threads_and_stops_change_nothing(law, tmp_path):
    inputs = (*_crowd(), Settings(buffer_bytes=1_500_000, loss_rate=0.001, timeout_us=100), law)
    whole = Simulation(*inputs, seed=3).run()
    assert whole.completed
    _same(whole.state, simulate(*inputs, seed=3, threads=2).state)
    stopped = Simulation(*inputs, seed=3)
    for until_ps in range(0, int(whole.finish_ps.max()), 20_000_000):
        stopped.advance(until_ps)
        assert not stopped.completed
        stopped.save(tmp_path / "kept.npz")
        stopped = Simulation(*inputs, seed=3)
        stopped.restore(tmp_path / "kept.npz")
    _same(whole.state, stopped.run().state)


def test_a_pause_that_begins_after_the_clock_is_not_counted_below_zero():
    run = Simulation(*_crowd(), Settings(buffer_bytes=300_000), "none", seed=3)
    begun = run.outcome().pause_ps.copy()
    for until_ps in range(0, 200_000_000, 137_000):
        run.advance(until_ps)
        pause_ps = run.outcome().pause_ps
        assert (pause_ps >= begun).all()
        begun = pause_ps
    assert begun.any()


def test_a_few_long_flows_need_memory_for_the_times_of_their_packets(monkeypatch):
    fabric, flows = _crowd()
    long = replace(flows, num_bytes=np.full(6, 60 << 30))
    free = 256 << 20  # of each flow 2^24 packets are remembered, 8 bytes a time
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    build(fabric, long, Settings(), "none", seed=0)
    with pytest.raises(ConfigError, match=r"need about 0\.\d GiB, 0\.2 GiB are free"):
        build(fabric, long, Settings(), "swift", seed=0)


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize(("leaves", "hosts", "spines"), [(12, 8, 6), (1, 24, 2), (3, 2, 1)])
def test_neighbours_share_a_worker_and_workers_share_each_tier(workers, leaves, hosts, spines):
    fabric = _fabric(leaves, hosts, spines, [100], [1000])
    flows = FlowSet(np.array([0]), np.array([1]), np.array([1000]), np.array([0]), np.array([100]))
    state = build(fabric, flows, Settings(), "none", seed=1, num_workers=workers)
    ranges = zip(state.worker["first"], state.worker["stop"], strict=True)
    owner = np.full(len(state.node), -1)
    for worker, (first, stop) in enumerate(ranges):
        owner[state.owned[first:stop]] = worker
    assert owner.min() >= 0  # each node has one: as many as there are
    assert len(state.owned) == len(owner)
    num_hosts = leaves * hosts
    shares = np.bincount(owner[:num_hosts], minlength=workers)
    assert shares.max() - shares.min() <= 2
    if leaves % workers == 0:  # whole leaves a worker: no cable between a host and its leaf passes between workers
        assert (owner[:num_hosts] == np.repeat(owner[num_hosts : num_hosts + leaves], hosts)).all()
        assert np.ptp(np.bincount(owner[num_hosts : num_hosts + leaves], minlength=workers)) == 0
        assert np.ptp(np.bincount(owner[num_hosts + leaves :], minlength=workers)) <= 1


@pytest.mark.parametrize("more", [{}, {"timeout_us": 100}, {"classes": {0: ClassSettings(), 1: ClassSettings()}}])
def test_a_run_that_is_resumed_needs_no_other_kernels(more, tmp_path, monkeypatch):
    """Kernels are compiled for the types of tables: a file keeps no alignment, by which numba tells types apart."""
    monkeypatch.setattr(Simulation, "_compile", lambda _: None)
    inputs = (*_crowd(), Settings(**more), "none")
    fresh = Simulation(*inputs, seed=3)
    fresh.save(tmp_path / "kept.npz")
    resumed = Simulation(*inputs, seed=3)
    resumed.restore(tmp_path / "kept.npz")
    for name, rows in fresh.state._asdict().items():
        kept = getattr(resumed.state, name)
        assert numba.typeof(kept) == numba.typeof(rows), name
        np.testing.assert_array_equal(kept, rows, err_msg=name)
        if rows.ctypes.data % 64 == 0 and name in ("arrivals", "entry", "port", "worker"):
            assert kept.ctypes.data % 64 == 0, name


def test_a_kept_run_of_other_inputs_is_refused(tmp_path):
    fabric, flows = _crowd()
    Simulation(fabric, flows, Settings(), "none", seed=3).save(tmp_path / "kept.npz")
    with pytest.raises(ConfigError, match="other inputs"):
        Simulation(fabric, flows, Settings(), "none", seed=4).restore(tmp_path / "kept.npz")
    (tmp_path / "torn.npz").write_bytes(b"PK\x03\x04")
    with pytest.raises(ConfigError, match="no kept run"):
        Simulation(fabric, flows, Settings(), "none").restore(tmp_path / "torn.npz")


def test_what_was_measured_before_an_interruption_is_kept():
    def interrupt(progress: Progress) -> None:
        seen.append(progress)
        raise KeyboardInterrupt

    seen: list[Progress] = []
    outcome = simulate(*_crowd(), Settings(), "swift", say=interrupt, until_ps=60_000_000)
    assert not outcome.completed
    assert (outcome.finish_ps == -1).all()
    assert 0 < seen[0].done_packets < seen[0].num_packets
    assert outcome.link_hops == seen[0].link_hops > 0
    assert outcome.interrupted


def test_an_interruption_with_the_last_event_is_told():
    def interrupt(progress: Progress) -> None:
        if progress.done_packets == progress.num_packets:
            raise KeyboardInterrupt

    outcome = simulate(*_crowd(), Settings(), "none", say=interrupt)
    assert (outcome.finish_ps >= 0).all()
    assert outcome.interrupted


def test_an_interruption_that_the_compiler_swallows_is_told_after_it(monkeypatch):
    def compiling(state, _until, _looks):
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return state, 0

    monkeypatch.setattr("congestion.simulation.simulate.run", compiling)
    with pytest.raises(KeyboardInterrupt):
        Simulation(*_crowd(), Settings(), "none")


def test_flows_wait_for_data_and_for_acknowledgements():
    """1 waits for the data of 0 to come, 2 for both its own last ACK and a delay; 3 for two."""
    fabric = _fabric(1, 3, 1, [100], [1000])
    src, dst = np.array([0, 1, 1, 2]), np.array([1, 2, 0, 0])
    first, earlier = np.array([0, 0, 1, 2, 3]), np.array([0, 1, 1])
    waits = FlowSet(
        src,
        dst,
        np.full(4, 50_000),
        np.zeros(4, dtype=np.int64),
        np.full(4, 100),
        waits_for=(first, earlier),
        delay_ps=np.array([0, 0, 5_000_000, 0]),
    )
    settings = Settings(header_bytes=0, mtu_bytes=1_000)
    outcome = simulate(fabric, waits, settings, "none")
    start, finish = outcome.start_ps.tolist(), outcome.finish_ps.tolist()
    serialised, hop = 50_000 * 80, 1_000_000 + 80_000
    assert start[1] == serialised + hop + 1_000_000  # all data of flow 0 came to host 1
    assert start[2] == finish[1] + 5_000_000
    assert start[3] == start[1] + 4_800 + serialised + hop + 1_000_000  # behind the last ACK, those of flow 1 to host 2
    assert min(finish) > 0


def test_a_timer_sends_again_what_was_lost_and_gives_up():
    fabric = _fabric(1, 2, 1, [100], [1000])
    one = FlowSet(*(np.array([value]) for value in (0, 1, 40_000, 0, 100)))
    settings = Settings(timeout_us=50, loss_rate=0.2, retries=50)
    for seed in range(20):
        outcome = simulate(fabric, one, settings, "none", seed=seed)
        assert outcome.finish_ps[0] > 0
    dead = simulate(fabric, one, Settings(timeout_us=50, loss_rate=0.99, retries=3), "none", seed=1)
    assert dead.finish_ps[0] == -1
    assert dead.state.flow["failed"][0] == 1
    assert dead.time_ps == pytest.approx(4 * 50_000_000, rel=0.1)


def test_a_window_bounds_what_is_in_flight():
    fabric = _fabric(1, 2, 1, [100], [1000])
    one = FlowSet(*(np.array([value]) for value in (0, 1, 400_000, 0, 100)))
    outcome = simulate(fabric, one, Settings(window_bytes=8_192), "none")
    rtt = int(outcome.state.flow["base_rtt_ps"][0])
    assert outcome.finish_ps[0] == pytest.approx(400_000 / 8_192 * rtt, rel=0.01)


def test_a_flap_costs_until_the_timer_and_repeated_flaps_kill():
    fabric = _fabric(1, 2, 1, [100], [1000])
    one = FlowSet(*(np.array([value]) for value in (0, 1, 400_000, 0, 100)))
    base = int(simulate(fabric, one, Settings(), "none").finish_ps[0])
    down = ((0, 10_000_000, 20_000_000),)  # 10 us within the transfer
    outcome = simulate(fabric, one, Settings(), "none", flaps=down, timeouts_ps=(50_000_000, 100_000_000))
    assert base + 10_000_000 < outcome.finish_ps[0] < base + 60_000_000
    assert outcome.state.flow["retries"][0] == 0
    assert outcome.state.port["drops"].sum() > 20
    dead = simulate(fabric, one, Settings(), "none", flaps=((0, 0, 10**12),), timeouts_ps=(50_000_000, 100_000_000))
    assert dead.finish_ps[0] == -1
    assert dead.time_ps == pytest.approx(150_000_000, rel=0.01)


@pytest.mark.parametrize("routing", [{"routing": "hashed_ports", "paths": 8}, {"routing": "spray"}])
def test_packets_on_many_paths_arrive_once_each(routing):
    fabric = _fabric(2, 4, 4, [100], [1000])
    src = np.arange(4, dtype=np.int64)
    flows = FlowSet(src, src + 4, np.full(4, 900_000), np.zeros(4, dtype=np.int64), np.full(4, 100))
    spread = {**routing, "selective_repeat": True, "timeout_us": 200}
    outcome = simulate(fabric, flows, Settings(**spread), "none")
    assert (outcome.finish_ps > 0).all()
    assert outcome.state.flow["resent"].sum() == 0
    num_uplinks = (outcome.state.port["tx_packets"][8 + 4 : 8 + 8] > 0).sum()
    assert num_uplinks == 4
    assert outcome.finish_ps.max() <= simulate(fabric, flows, Settings(), "none").finish_ps.max()
    lossy = simulate(fabric, flows, Settings(**spread, loss_rate=0.02), "none", seed=2)
    assert (lossy.finish_ps > 0).all()
    lost = lossy.state.port["drops"].sum()
    assert 0 < lossy.state.flow["resent"].sum() <= 40 * lost


def test_looks_go_on_while_timers_alone_are_left():
    """A selective receiver's sender keeps its timer behind the last ACK: nothing happens for thousands of looks."""
    fabric = _fabric(1, 2, 1, [100], [1000])
    one = FlowSet(*(np.array([value]) for value in (0, 1, 40_000, 0, 100)))
    simulation = Simulation(fabric, one, Settings(selective_repeat=True, timeout_us=4_000), "none")
    samples = Samples()
    simulation.run(look=samples, every_ps=1_000_000)
    assert len(samples.rows) > 2_000


def test_without_pfc_a_full_queue_drops_and_timers_repair():
    fabric = _fabric(1, 9, 1, [100], [1000])
    src = np.arange(8, dtype=np.int64)
    flows = FlowSet(src, np.full(8, 8), np.full(8, 400_000), np.zeros(8, dtype=np.int64), np.full(8, 100))
    settings = Settings(pfc=False, drop_tail=True, buffer_bytes=900_000, timeout_us=300)
    outcome = simulate(fabric, flows, settings, "none")
    assert outcome.state.port["drops"].sum() > 0
    assert outcome.state.port["max_queue_bytes"].max() < 900_000 / 8
    assert (outcome.finish_ps > 0).all()
    _same(outcome.state, simulate(fabric, flows, settings, "none", threads=2).state)


def test_noise_and_receivers_without_marks_change_what_a_law_sees():
    fabric, flows = _crowd()
    plain, noisy, deaf = (
        simulate(fabric, flows, Settings(kmin_bytes=20_000, kmax_bytes=100_000, **more), "hybrid").finish_ps
        for more in ({}, {"rtt_noise_us": 2.0}, {"deaf_share": 1.0})
    )
    assert (noisy != plain).any()
    assert (deaf != plain).any()
    for law in ("none", "dcqcn"):
        settings = Settings(kmin_bytes=20_000, kmax_bytes=100_000, deaf_share=1.0 if law == "dcqcn" else 0.0)
        assert simulate(fabric, flows, settings, law).state.port["marks"].sum() > 0
    unheard = simulate(fabric, flows, Settings(kmin_bytes=0, deaf_share=1.0), "dcqcn").finish_ps
    np.testing.assert_array_equal(unheard, simulate(fabric, flows, Settings(), "none").finish_ps)


def test_flowlets_take_the_emptiest_path():
    """Two flows that ECMP puts on one uplink part at their first switch; without gaps each stays on its own."""
    fabric = _fabric(2, 4, 4, [100], [1000])
    src = np.array([0, 1], dtype=np.int64)
    for dport in range(100, 200):
        flows = FlowSet(src, src + 4, np.full(2, 900_000), np.zeros(2, dtype=np.int64), np.full(2, dport))
        together = simulate(fabric, flows, Settings(), "none")
        if together.finish_ps.max() > 1.5 * 75_000_000:
            break
    apart = simulate(fabric, flows, Settings(routing="flowlet"), "none")
    assert apart.finish_ps.max() < 0.6 * together.finish_ps.max()
    assert apart.state.flow["resent"].sum() == 0
    _same(apart.state, simulate(fabric, flows, Settings(routing="flowlet"), "none", threads=2).state)


def test_one_cable_alone_loses_packets():
    fabric, flows = _crowd()
    cable = int(np.argmax(~fabric.is_switch[fabric.a]))
    link = f"{fabric.names[fabric.b[cable]]}, {fabric.names[fabric.a[cable]]}"
    lossy = Settings(loss_rates={link: 0.02}, timeout_us=100)
    outcome = simulate(fabric, flows, lossy, "none", seed=3)
    drops = outcome.state.port["drops"]
    node_of = outcome.state.port["to"][outcome.state.port["peer"]]
    assert drops.sum() > 0
    assert set(node_of[drops > 0].tolist()) <= {int(fabric.a[cable]), int(fabric.b[cable])}
    everywhere = Settings(loss_rates={link: 0.0}, loss_rate=0.02, timeout_us=100)
    others = simulate(fabric, flows, everywhere, "none", seed=3).state.port["drops"]
    assert others.sum() > 0
    spared = outcome.state.port["peer"][drops > 0], np.flatnonzero(drops > 0)
    assert not others[np.concatenate(spared)].any()
    with pytest.raises(ConfigError, match=r"congestion.loss_rates.nobody,x = nobody: is no device"):
        simulate(fabric, flows, Settings(loss_rates={"nobody,x": 0.1}), "none")


def test_a_notice_goes_back_for_each_marked_packet():
    fabric = _fabric(1, 9, 1, [100], [1000])
    flows = _to_one([*range(1, 9)], 400_000)
    outcome = simulate(fabric, flows, Settings(kmin_bytes=20_000, kmax_bytes=100_000), "dcqcn")
    assert outcome.state.receiver["cnps"].sum() == outcome.state.port["marks"].sum() > 0


def test_pauses_are_laid_to_the_port_that_packets_were_bound_for():
    """All of an incast to its last link; behind it, at links that are stopped themselves, they spread."""
    fabric = _fabric(3, 4, 1, [100] * 12 + [400] * 3, [1000])
    flows = _to_one([1, 4, 8], 2_000_000)
    outcome = simulate(fabric, flows, Settings(buffer_bytes=1 << 20, mtu_bytes=1000), "none")
    last = int(outcome.state.port["peer"][outcome.state.node["first_port"][flows.dst[0]]])
    began, spread = outcome.state.cause[:, :2].T
    assert began.sum() + spread.sum() == outcome.state.port["pauses"].sum()
    assert np.flatnonzero(began).tolist() == [last]
    assert spread.sum() > 0
    assert spread[last] == 0


def test_round_trips_are_measured_where_asked():
    fabric = _fabric(1, 2, 1, [100], [1000])
    flows = FlowSet(np.array([0]), np.array([1]), np.array([409_600]), np.array([0]), np.array([100]))
    state = simulate(fabric, flows, Settings(measure_rtt=True), "none").state
    [seen] = state.rtt
    assert (seen["count"], seen["most"]) == (99, state.flow["base_rtt_ps"][0])  # the last ACK ends the flow
    assert seen["total"] == 99 * seen["most"]


def _to_one(senders: list[int], num_bytes: int) -> FlowSet:
    """A flow of each to the first host."""
    same = np.zeros(len(senders), dtype=np.int64)
    return FlowSet(np.array(senders), same, np.full(len(same), num_bytes), same, np.full(len(same), 100))


@pytest.mark.parametrize(
    ("gbps", "num_bytes", "more", "says"),
    [
        (800, 4096, {"mtu_bytes": 8, "header_bytes": 1}, "packet = 9 B: takes no time at 800 Gbit/s, cut to whole ns"),
        (1e-6, 10**9, {"mtu_bytes": 65_536}, "leaves n0 and takes 93 days, and the clock ends after 53"),
    ],
)
def test_times_that_cannot_be_told_are_refused(gbps, num_bytes, more, says):
    fabric = _fabric(1, 2, 1, [gbps], [1000])
    flows = FlowSet(np.array([0]), np.array([1]), np.array([num_bytes]), np.array([0]), np.array([100]))
    with pytest.raises(ConfigError, match=says):
        simulate(fabric, flows, Settings(**more), "none", truncate_ns=True)

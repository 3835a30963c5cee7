import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from congestion.engine.build import build
from congestion.files import FlowSet
from congestion.settings import DcqcnSettings, Settings
from congestion.simulate import simulate
from tests.congestion.heap_engine import HeapEngine
from topology.graph import Graph


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
    heap = HeapEngine(build(fabric, flows, chosen, law, seed=7, truncate_ns=truncate_ns))
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

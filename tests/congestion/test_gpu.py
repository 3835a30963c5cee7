"""The GPU's steps give the CPU engine's bits: run as loops on the CPU, and on a GPU where there is one."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from congestion.engine.build import LAWS, Flap, build
from congestion.engine.gpu.graft import graft
from congestion.engine.gpu.loops import run_by_loops
from congestion.engine.gpu.runs import GpuRun
from congestion.engine.gpu.store import with_new
from congestion.engine.gpu.tables import GIVEN, TAKEN
from congestion.engine.run import run
from congestion.engine.tables import NEVER, State
from congestion.kernels.jit import kernel
from congestion.simulation.files import FlowSet
from congestion.simulation.settings import ClassSettings, DcqcnSettings, Settings
from congestion.simulation.simulate import Simulation, simulate
from netlayer.errors import HardwareMissing
from tests.congestion.test_engine import _fabric
from topology.fabric.graph import Graph

_COMPARED = (
    "node",
    "lane",
    "flow",
    "receiver",
    "port",
    "dcqcn_flow",
    "swift_flow",
    "nscc_flow",
    "hybrid_flow",
    "flowlet",
    "spray",
    "watchdog",
    "cause",
    "sent",
)
_END_PS = 2_000_000_000  # without a timer a lost last packet is waited for to here


@dataclasses.dataclass(frozen=True)
class Scenario:
    fabric: Graph
    flows: FlowSet
    settings: Settings
    law: str
    truncate_ns: bool = False
    flaps: tuple[Flap, ...] = ()

    def state(self) -> State:
        more = {"truncate_ns": self.truncate_ns, "flaps": self.flaps}
        return build(self.fabric, self.flows, self.settings, self.law, seed=7, **more)


def same(first: State, second: State) -> None:
    """All that a run tells; when nodes are next looked at differs: no later than the next thing that happens there."""
    for name in (*_COMPARED, "acked", "received"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name), err_msg=name)
    assert first.run["time"] == second.run["time"]


@st.composite
def scenarios(draw):
    leaves, hosts, spines = draw(st.integers(1, 3)), draw(st.integers(2, 4)), draw(st.integers(1, 3))
    rates = draw(st.lists(st.sampled_from([25, 100, 200, 400]), min_size=1, max_size=5))
    delays = draw(st.lists(st.sampled_from([300, 600, 1000, 1700]), min_size=1, max_size=3))
    fabric, many = _fabric(leaves, hosts, spines, rates, delays), leaves * hosts
    row = st.tuples(st.integers(0, many - 1), st.integers(1, many - 1), st.integers(1, 300_000), st.integers(0, 20_000))
    rows = draw(st.lists(row, min_size=1, max_size=16))
    src, apart, num_bytes, start_ns = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    dst = (src + apart) % many
    if draw(st.booleans()):  # an incast
        dst = np.full_like(src, dst[0])
        src = np.where(src == dst, (src + 1) % many, src)
    pfc, routing = draw(st.booleans()), draw(st.sampled_from(["ecmp", "spray", "flowlet", "hashed_ports"]))
    selective = routing in ("spray", "hashed_ports") or draw(st.booleans())
    tight = draw(st.integers(2_500_000, 2_700_000) if pfc else st.integers(50_000, 400_000))
    chosen = Settings(
        mtu_bytes=draw(st.sampled_from([1000, 4096])),
        pfc=pfc,
        drop_tail=not pfc and draw(st.booleans()),
        buffer_bytes=draw(st.sampled_from([tight, 64 * 2**20])),
        headroom_bdps=draw(st.integers(0, 3)),
        pfc_alpha=draw(st.sampled_from([0, 0, 1 / 64, 1, 8])),
        xoff_bytes=draw(st.sampled_from([0, 0, 0, 20_000])),
        xon_bytes=draw(st.sampled_from([0, 10_000])),
        watchdog_detection_us=draw(st.sampled_from([0.0, 0.0, 5.0])) if pfc else 0.0,
        watchdog_restoration_us=20.0,
        watchdog_action=draw(st.sampled_from(["drop", "forward", "alert"])),
        kmin_bytes=20_000,
        kmax_bytes=100_000,
        loss_rate=draw(st.sampled_from([0.0, 0.01])),
        routing=routing,
        paths=3,
        selective_repeat=selective,
        timeout_us=100.0 if selective else 1e9,  # so that one set of kernels knows all that is drawn here
        window_bytes=draw(st.sampled_from([0, 50_000])),
        rtt_noise_us=draw(st.sampled_from([0.0, 0.5])),
        dcqcn=DcqcnSettings(increase_us=draw(st.sampled_from([4.0, 55.0]))),
    )
    flaps = draw(st.lists(st.just((int(src[0]), 20_000_000, 60_000_000)), max_size=int(selective)))
    flows = FlowSet(src, dst, num_bytes, start_ns * 1000, np.full(len(src), 100, dtype=np.int64))
    return Scenario(fabric, flows, chosen, draw(st.sampled_from(LAWS)), draw(st.booleans()), tuple(flaps))


@pytest.mark.slow  # compiles the engine and the steps
@pytest.mark.timeout(900)
@settings(max_examples=80, deadline=None)
@given(scenarios(), st.integers(1, 9), st.booleans(), st.integers(0, 300))
def test_the_steps_give_the_engines_bits_for_any_number_and_order_of_lanes(scenario, lanes, backwards, until_us):
    expected, begin = run(scenario.state(), until_us * 1_000_000)
    found, its_begin = run_by_loops(scenario.state(), until_us * 1_000_000, lanes, backwards)
    assert begin == its_begin
    same(expected, found)
    expected, _ = run(expected, _END_PS)
    go_on = run if until_us % 2 else run_by_loops
    same(expected, go_on(found, _END_PS)[0])


def crowd(
    senders: int = 8,
    buffer_bytes: int = 1_500_000,
    num_bytes: int = 400_000,
    law: str = "none",
    timeout_us: float = 1e4,
) -> Scenario:
    """An incast over one switch; a timer, though none runs out, is of the kernels that know all."""
    src = np.arange(senders, dtype=np.int64)
    to = np.full(senders, senders)
    flows = FlowSet(src, to, np.full(senders, num_bytes), np.zeros(senders, dtype=np.int64), np.full(senders, 100))
    fabric = _fabric(1, senders + 1, 1, [100], [1000])
    chosen = Settings(buffer_bytes=buffer_bytes, kmin_bytes=50_000, kmax_bytes=200_000, timeout_us=timeout_us)
    return Scenario(fabric, flows, chosen, law)


@pytest.mark.slow  # as above
@pytest.mark.timeout(900)
def test_a_crowd_that_is_paused_gives_the_engines_bits():
    expected, _ = run(crowd().state(), NEVER)
    assert expected.port["pauses"].sum() > 8
    same(expected, run_by_loops(crowd().state(), NEVER)[0])


@pytest.mark.slow  # as above
@pytest.mark.timeout(900)
def test_the_steps_make_room_for_more_packets():
    one = crowd(senders=30, num_bytes=2_000_000, buffer_bytes=1 << 30)
    same(run(one.state(), NEVER)[0], run_by_loops(one.state(), NEVER)[0])


@pytest.mark.slow  # compiles another set of kernels
@pytest.mark.timeout(900)
def test_the_steps_of_the_plain_kernels_give_the_engines_bits():
    for law in LAWS:
        one = crowd(law=law, timeout_us=0.0)
        same(run(one.state(), NEVER)[0], run_by_loops(one.state(), NEVER)[0])


def with_classes() -> Scenario:
    """Two senders of each of three classes to one host, one class lossy and one before the others."""
    one = crowd(senders=6, law="dcqcn", timeout_us=100.0)
    classes = {0: ClassSettings(weight=2), 1: ClassSettings(weight=1, lossless=False), 2: ClassSettings(weight=0)}
    flows = dataclasses.replace(one.flows, pg=np.arange(6) % 3)
    chosen = one.settings.model_copy(update={"classes": classes, "ack_class": 2, "buffer_bytes": 2_500_000})
    return dataclasses.replace(one, flows=flows, settings=chosen)


@pytest.mark.slow  # compiles another set of kernels
@pytest.mark.timeout(900)
def test_the_steps_give_the_engines_bits_with_classes_of_traffic():
    expected, _ = run(with_classes().state(), NEVER)
    assert expected.lane["pauses"].sum() > 0
    same(expected, run_by_loops(with_classes().state(), NEVER)[0])


@pytest.mark.slow  # as above
@pytest.mark.timeout(900)
def test_a_run_that_the_cpu_began_goes_on_in_the_steps():
    expected, _ = run(crowd().state(), NEVER)
    begun, _ = run(crowd().state(), 100_000_000)
    same(expected, run_by_loops(begun, NEVER)[0])


def test_the_ring_of_free_chunks_grows_around_what_is_free():
    clock = np.zeros(GIVEN + 1, dtype=np.int64)
    clock[TAKEN], clock[GIVEN] = 6, 9
    made = with_new(np.array([10, 11, 12, 13], dtype=np.uint32), clock, 7)
    assert made[clock[TAKEN] : clock[GIVEN]].tolist() == [12, 13, 10, 4, 5, 6]


@kernel
def _one(value):
    return value + 1


@kernel
def _calls_one(value):
    return 2 * _one(value)


@kernel
def _ten(value):
    return value + 10


def test_a_graft_changes_what_is_called_and_nothing_else():
    grafted = graft(_calls_one, {_one: _ten})
    assert (grafted(1), _calls_one(1)) == (22, 4)
    assert graft(_one, {_ten: _one}) is _one


def _has_gpu() -> bool:
    try:
        from congestion.engine.gpu.runs import check_device

        check_device()
    except HardwareMissing:
        return False
    return True


needs_gpu = pytest.mark.skipif(not _has_gpu(), reason="no NVIDIA GPU with numba-cuda")


@pytest.mark.skipif(_has_gpu(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so():
    one = crowd()
    with pytest.raises(HardwareMissing, match="--backend gpu needs"):
        simulate(one.fabric, one.flows, one.settings, one.law, backend="gpu")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("buffer_bytes", [1_500_000, 64 << 20])
def test_a_gpu_gives_the_engines_bits_under_each_law(law, buffer_bytes):
    one = crowd(buffer_bytes=buffer_bytes, law=law, timeout_us=0.0)
    expected, found = (
        simulate(one.fabric, one.flows, one.settings, one.law, backend=backend) for backend in ("numba", "gpu")
    )
    same_looks(expected.state, found.state)
    assert found.completed


def same_looks(first: State, second: State) -> None:
    """What is sent back from a GPU at each pause."""
    for name in _COMPARED:
        if name != "sent":
            np.testing.assert_array_equal(getattr(first, name), getattr(second, name), err_msg=name)


@pytest.mark.gpu
@needs_gpu
@settings(max_examples=150, deadline=None)
@given(scenarios(), st.integers(0, 300))
def test_a_gpu_gives_the_engines_bits(scenario, until_us):
    expected, begin = run(scenario.state(), until_us * 1_000_000)
    on_gpu = GpuRun(scenario.state())
    assert on_gpu.run(until_us * 1_000_000) == begin
    same_looks(expected, on_gpu.state)
    expected, _ = run(expected, _END_PS)
    if until_us % 2:
        on_gpu.run(_END_PS)
        same(expected, on_gpu.whole())
    else:
        same(expected, run(on_gpu.whole(), _END_PS)[0])


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_gives_the_engines_bits_with_classes_of_traffic():
    expected, _ = run(with_classes().state(), NEVER)
    on_gpu = GpuRun(with_classes().state())
    on_gpu.run(NEVER)
    same(expected, on_gpu.whole())


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_makes_room_for_more_packets():
    one = crowd(senders=40, num_bytes=4_000_000, buffer_bytes=1 << 30)
    expected, _ = run(one.state(), NEVER)
    on_gpu = GpuRun(one.state())
    before = len(on_gpu._on_gpu.following)
    on_gpu.run(NEVER)
    assert len(on_gpu._on_gpu.following) > before
    same(expected, on_gpu.whole())


@pytest.mark.gpu
@needs_gpu
def test_a_kept_run_of_a_gpu_goes_on_anywhere(tmp_path):
    one = crowd(law="dcqcn")
    whole = simulate(one.fabric, one.flows, one.settings, one.law)
    for first, second in (("gpu", "numba"), ("numba", "gpu"), ("gpu", "gpu")):
        begun = Simulation(one.fabric, one.flows, one.settings, one.law, backend=first)
        begun.run(until_ps=100_000_000)
        begun.save(tmp_path / "half.npz")
        resumed = Simulation(one.fabric, one.flows, one.settings, one.law, backend=second)
        resumed.restore(tmp_path / "half.npz")
        same_looks(whole.state, resumed.run().state)

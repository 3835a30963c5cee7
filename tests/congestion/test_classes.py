"""Classes of traffic: strict and weighted turns, pauses by class, lossless beside lossy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from congestion.engine.build import build
from congestion.engine.tables import State
from congestion.scenarios.fabric import Dumbbell, Star, build_fabric
from congestion.simulation.files import FlowSet
from congestion.simulation.settings import ClassSettings, Settings, settings_of
from congestion.simulation.simulate import Simulation, simulate
from netlayer.errors import ConfigError
from topology.fabric.graph import Graph

_GBPS = 100_000_000_000


def _flows(src: list[int], dst: list[int], num_bytes: list[int], pg: list[int], start_ps: list[int] | None = None):
    columns = [np.array(column, dtype=np.int64) for column in (src, dst, num_bytes, start_ps or [0] * len(src))]
    return FlowSet(*columns, np.full(len(src), 100), pg=np.array(pg))


def _star(hosts: int) -> Graph:
    return build_fabric(Star(bps=_GBPS, hosts=hosts))


def _same(first: State, second: State) -> None:
    for name in ("port", "lane", "node", "flow", "receiver", "dcqcn_flow", "swift_flow"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


def _delivered(state: State, flow: int) -> int:
    return int(state.receiver["expected"][flow])


def test_a_strict_class_is_served_as_if_it_were_alone():
    """But for the one packet that is under way when its own comes."""
    fabric, strict = _star(3), ClassSettings(weight=0)
    both = _flows([0, 1], [2, 2], [800_000, 400_000], [0, 1], [0, 20_000_000])
    chosen = Settings(classes={0: ClassSettings(), 1: strict}, ack_class=1)
    together = simulate(fabric, both, chosen, "none")
    alone = simulate(fabric, _flows([1], [2], [400_000], [1], [20_000_000]), chosen, "none")
    packet_ps = int(together.state.kind["tx_data"][0])
    assert 0 <= together.finish_ps[1] - alone.finish_ps[0] <= 3 * packet_ps
    assert together.finish_ps[0] > together.finish_ps[1]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=4))
def test_weighted_classes_share_a_link_within_a_turn(weights):
    many = len(weights)
    fabric = _star(many + 1)
    flows = _flows(list(range(many)), [many] * many, [4_096 * 1_000] * many, list(range(many)))
    chosen = Settings(classes={each: ClassSettings(weight=weight) for each, weight in enumerate(weights)})
    run = Simulation(fabric, flows, chosen, "none")
    run.advance(40_000_000)
    before = [_delivered(run.state, flow) for flow in range(many)]
    run.advance(240_000_000)
    sent = np.array([_delivered(run.state, flow) for flow in range(many)]) - before
    expected = sent.sum() * np.array(weights) / sum(weights)
    assert sent.sum() == pytest.approx(200_000_000 / int(run.state.kind["tx_data"][0]), abs=2)
    assert (abs(sent - expected) <= max(weights) + 1).all()


def test_turns_hold_at_the_senders_nic_too():
    fabric = _star(3)
    flows = _flows([0, 0], [1, 2], [4_096 * 900] * 2, [0, 1])
    chosen = Settings(classes={0: ClassSettings(weight=3), 1: ClassSettings(weight=1)})
    run = Simulation(fabric, flows, chosen, "none")
    run.advance(150_000_000)
    sent = run.state.flow["next"]
    assert sent[0] == pytest.approx(3 * sent[1], abs=4)


def _small(**more: object) -> Settings:
    return Settings(
        buffer_bytes=1_500_000,
        classes={0: ClassSettings(lossless=True), 1: ClassSettings(lossless=False)},
        timeout_us=200,
        **more,
    )


def test_a_lossless_class_never_drops_beside_one_that_does():
    fabric = _star(9)
    flows = _flows(list(range(8)), [8] * 8, [600_000] * 8, [0, 1] * 4)
    outcome = simulate(fabric, flows, _small(), "none")
    lane = outcome.state.lane
    assert (outcome.finish_ps > 0).all()
    assert lane["drops"][0::2].sum() == 0
    assert lane["drops"][1::2].sum() > 0
    assert lane["pauses"][0::2].sum() > 0
    assert lane["pauses"][1::2].sum() == 0
    assert outcome.state.port["drops"].sum() == lane["drops"].sum()
    assert outcome.state.port["pauses"].sum() == lane["pauses"].sum()


def test_a_pause_stops_its_class_alone():
    """Class 0 is held up by an incast; a flow of class 1 through the same trunk is not."""
    fabric = build_fabric(Dumbbell(bps=_GBPS, hosts=12, trunk_bps=5 * _GBPS))
    src, dst = [0, 1, 2, 3, 4], [6, 6, 6, 6, 7]
    sizes, starts = [2_000_000] * 4 + [800_000], [0] * 4 + [50_000_000]
    tight = {"buffer_bytes": 2_500_000}
    chosen = Settings(**tight, classes={0: ClassSettings(), 1: ClassSettings()})
    apart = simulate(fabric, _flows(src, dst, sizes, [0, 0, 0, 0, 1], starts), chosen, "none")
    mixed = simulate(fabric, _flows(src, dst, sizes, [0] * 5, starts), chosen, "none")
    alone = simulate(fabric, _flows([4], [7], [800_000], [1], [50_000_000]), chosen, "none")
    trunk = mixed.state.port[np.argmax(mixed.state.port["tx_bytes"])]
    assert trunk["tx_bytes"] > 0
    assert mixed.pause_ps.max() > 0
    assert apart.finish_ps[4] < 1.1 * alone.finish_ps[0]
    assert mixed.finish_ps[4] > 1.5 * (apart.finish_ps[4] - 50_000_000) + 50_000_000


def test_acknowledgements_have_a_class_of_their_own():
    """Behind a queue of data ACKs wait; in a strict class they do not."""
    fabric = _star(4)
    flows = _flows([0, 1, 2], [2, 2, 3], [800_000, 800_000, 400_000], [0, 0, 0])
    shared = Settings(classes={0: ClassSettings(), 1: ClassSettings(weight=0)})
    own = shared.model_copy(update={"ack_class": 1})
    assert own.ack_class == 1
    outcome = simulate(fabric, flows, own, "none")
    assert outcome.state.lane["max_queue_bytes"][1::2].max() < 10 * own.ack_bytes
    assert outcome.state.lane["max_queue_bytes"][0::2].max() > 100_000


def test_each_class_has_its_law_and_its_marks():
    fabric = _star(5)
    flows = _flows([0, 1, 2, 3], [4] * 4, [2_000_000] * 4, [0, 0, 1, 1])
    marked = ClassSettings(law="dcqcn", kmin_bytes=0, kmax_bytes=10_000)
    chosen = Settings(classes={0: ClassSettings(law="none", ecn=False), 1: marked})
    state = simulate(fabric, flows, chosen, "swift").state
    assert (state.flow["rate_bps"][:2] == _GBPS).all()
    assert (state.flow["rate_bps"][2:] < _GBPS).all()
    assert state.lane["marks"][0::2].sum() == 0
    assert state.port["marks"].sum() == state.lane["marks"][1::2].sum() > 0


@st.composite
def _mixed(draw):
    many = draw(st.integers(2, 3))
    hosts = draw(st.integers(3, 8))
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(0, hosts - 1), st.integers(1, hosts - 1), st.integers(1, 300_000), st.integers(0, many - 1)
            ),
            min_size=1,
            max_size=12,
        )
    )
    src = [row[0] for row in rows]
    flows = _flows(src, [(row[0] + row[1]) % hosts for row in rows], [row[2] for row in rows], [row[3] for row in rows])
    classes = {
        each: ClassSettings(weight=draw(st.integers(0, 3)), lossless=draw(st.booleans())) for each in range(many)
    }
    chosen = Settings(
        buffer_bytes=draw(st.sampled_from([1_800_000, 64 * 2**20])),
        classes=classes,
        ack_class=draw(st.integers(-1, many - 1)),
        kmin_bytes=20_000,
        kmax_bytes=100_000,
        timeout_us=300.0,
        retries=1_000,
    )
    return build_fabric(Dumbbell(bps=_GBPS, hosts=hosts, trunk_bps=_GBPS)), flows, chosen


@settings(max_examples=40, deadline=None)
@given(_mixed(), st.sampled_from(["none", "dcqcn"]))
def test_packets_are_conserved_and_nothing_lossless_is_dropped(scenario, law):
    fabric, flows, chosen = scenario
    outcome = simulate(fabric, flows, chosen, law, seed=3)
    state, many = outcome.state, chosen.num_classes
    assert (outcome.finish_ps > 0).all()
    assert (state.receiver["expected"] == state.flow["num_packets"]).all()
    for name in ("queue_bytes", "in_bytes", "headroom_used", "frames", "paused", "pause_sent"):
        assert not state.lane[name].any()
    assert not state.node["shared"].any()
    for number in range(many):
        if chosen.class_of(number).lossless:
            assert state.lane["drops"][number::many].sum() == 0
    _same(state, simulate(fabric, flows, chosen, law, seed=3, threads=2).state)


def test_stops_change_nothing(tmp_path):
    fabric, flows = _star(6), _flows([0, 1, 2, 3, 4], [5] * 5, [400_000] * 5, [0, 1, 0, 1, 1])
    inputs = (fabric, flows, _small(ack_class=1), "dcqcn")
    whole = Simulation(*inputs, seed=3).run()
    stopped = Simulation(*inputs, seed=3)
    for until_ps in range(0, int(whole.finish_ps.max()), 40_000_000):
        stopped.advance(until_ps)
        stopped.save(tmp_path / "kept.npz")
        stopped = Simulation(*inputs, seed=3)
        stopped.restore(tmp_path / "kept.npz")
    _same(whole.state, stopped.run().state)


def test_one_class_by_name_is_one_class():
    """With one class that is as the run's all flows take as long as without classes, pauses and all."""
    fabric, flows = _star(9), _flows(list(range(8)), [8] * 8, [400_000] * 8, [0] * 8)
    plain = Settings(buffer_bytes=1_500_000)
    named = plain.model_copy(update={"classes": {0: ClassSettings()}})
    one, same = (simulate(fabric, flows, chosen, "dcqcn", seed=2) for chosen in (plain, named))
    assert one.state.port["pauses"].sum() > 0
    np.testing.assert_array_equal(one.finish_ps, same.finish_ps)
    for name in ("pauses", "marks", "tx_bytes", "max_queue_bytes"):
        np.testing.assert_array_equal(one.state.port[name], same.state.port[name])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("congestion.ack_class=1",), "needs classes"),
        (("congestion.classes.1.weight=2", "congestion.ack_class=3"), "is no class"),
        (("congestion.classes.9.weight=2",), "less than or equal to 7"),
        (("congestion.classes.1.wait=2",), "Extra inputs"),
        (("congestion.classes.1.kmin_bytes=200", "congestion.classes.1.kmax_bytes=100"), "is above"),
    ],
)
def test_wrong_settings_are_named(overrides, message):
    with pytest.raises(ConfigError, match=message):
        settings_of("ns3", overrides)


def test_a_flow_of_no_class_is_named():
    chosen = settings_of("ns3", ("congestion.classes.1.weight=2",))
    assert chosen.num_classes == 2
    with pytest.raises(ConfigError, match="known are those up to 1"):
        build(_star(3), _flows([0], [1], [100], [5]), chosen, "none", seed=0)
    unknown = settings_of("ns3", ("congestion.classes.0.law=bbr",))
    with pytest.raises(ConfigError, match="bbr"):
        build(_star(3), _flows([0], [1], [100], [0]), unknown, "none", seed=0)


@pytest.mark.parametrize("law", ["dcqcn", "swift"])
def test_a_class_has_its_own_parameters_of_a_law(law):
    """As if all flows had them; and a class beside it keeps the run's."""
    own = {"dcqcn": {"increase_us": "20", "g": "0.5"}, "swift": {"base_target_us": "9"}}[law]
    flows = _flows([0, 1, 2], [3, 3, 3], [900_000] * 3, [1, 1, 1])
    thresholds = {"kmin_bytes": 20_000, "kmax_bytes": 80_000}
    by_class = Settings(classes={0: ClassSettings(), 1: ClassSettings(**{law: own})}, **thresholds)
    for_all = Settings(
        classes={0: ClassSettings(), 1: ClassSettings()}, **thresholds, **{law: getattr(by_class.of_class(1), law)}
    )
    found, expected = (simulate(_star(4), flows, each, law, seed=5) for each in (by_class, for_all))
    _same(found.state, expected.state)
    plain = simulate(_star(4), flows, for_all.model_copy(update={law: getattr(Settings(), law)}), law, seed=5)
    assert not np.array_equal(found.finish_ps, plain.finish_ps)
    rows = getattr(found.state, law)
    assert rows.shape == (2,)
    assert rows[0] != rows[1]
    assert rows[0] == getattr(plain.state, law)[0]

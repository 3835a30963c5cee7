"""Packets over several paths: sprayed by each switch, or by hashed source ports; and ECMP by topology's hashes."""

import numpy as np
import pytest

from congestion.engine.build import build
from congestion.engine.tables import ACK_PATH
from congestion.scenarios.catalogue import build_scenario
from congestion.simulation.files import FlowSet
from congestion.simulation.settings import Settings, settings_of
from congestion.simulation.simulate import Outcome, simulate
from netlayer.errors import ConfigError
from tests.congestion.test_engine import _fabric, _same
from topology.ecmp.graph_routing import Routes, by_ecmp
from topology.ecmp.hashing import HASHES, Ecmp, Headers
from topology.fabric.graph import Graph

_ANY_ORDER = ("congestion.selective_repeat=true", "congestion.timeout_us=10000")


def _settings(routing: str, *more: str) -> Settings:
    return settings_of("ns3", (f"congestion.routing={routing}", *_ANY_ORDER, *more))


def _one_flow(spines: int, packets: int) -> tuple[Graph, FlowSet]:
    flows = FlowSet(*(np.array([value]) for value in (0, 2, packets * 4_096, 0, 100)))
    return _fabric(2, 2, spines, [100], [1000]), flows


def _up(fabric: Graph, outcome: Outcome, node: int) -> list[int]:
    """Packets that a switch sent to each of those above it."""
    port, level = outcome.state.port, fabric.level
    here = np.flatnonzero(port["to"][port["peer"]] == node)
    above = here[level[port["to"][here]] > level[node]]
    return [int(many) for many in port["tx_packets"][above]]


def test_one_flow_is_sprayed_over_all_of_40_spines_and_16_ports_are_16_paths():
    fabric, flows = _one_flow(40, 400)
    sprayed = simulate(fabric, flows, _settings("spray"), "none")
    assert _up(fabric, sprayed, 4) == [10] * 40
    assert sprayed.state.flow["resent"].sum() == 0
    hashed = _up(fabric, simulate(fabric, flows, _settings("hashed_ports"), "none"), 4)
    assert sum(hashed) == 400
    assert 2 < np.count_nonzero(hashed) <= 16


def test_every_switch_of_a_fat_tree_sprays_evenly_to_the_packet():
    """Data and ACKs have a turn each, so the ports of a set differ by one of each at most; at both tiers."""
    made = build_scenario("permutation", ("scenario.ranks=16", "scenario.num_bytes=300000", "fabric.k=4"), 1,
                          fabric="fat-tree")  # fmt: skip
    outcome = simulate(made.fabric, made.flows, _settings("spray"), "none")
    assert (outcome.finish_ps > 0).all()
    counts = [_up(made.fabric, outcome, node) for node in np.flatnonzero(made.fabric.is_switch).tolist()]
    spreading = [each for each in counts if sum(each)]
    assert len(spreading) > 8
    assert all(len(each) == 2 and max(each) - min(each) <= 2 for each in spreading)


def test_spraying_is_the_same_for_two_threads_and_another_seed_turns_elsewhere():
    fabric, src = _fabric(2, 4, 4, [100], [1000]), np.arange(3, dtype=np.int64)
    # 147 packets over 4 ports: where the three left over go hangs on the seed.
    flows = FlowSet(src, src + 4, np.full(3, 200_000), np.zeros(3, dtype=np.int64), np.full(3, 100))
    first, same, other = (
        simulate(fabric, flows, _settings("spray"), "dcqcn", seed=seed, threads=threads).state
        for seed, threads in ((1, 1), (1, 2), (2, 1))
    )
    _same(first, same)
    assert (first.port["tx_bytes"] != other.port["tx_bytes"]).any()


def test_losses_are_repaired_under_spraying():
    fabric, flows = _one_flow(8, 200)
    lossy = simulate(fabric, flows, _settings("spray", "congestion.loss_rate=0.02"), "none", seed=2)
    assert (lossy.finish_ps > 0).all()
    assert lossy.state.flow["resent"].sum() > 0


@pytest.mark.parametrize("name", HASHES)
@pytest.mark.parametrize("seed", [0, 7])
def test_a_flows_path_is_topologys_for_every_hash_and_seed(name, seed):
    fabric, src = _fabric(3, 4, 5, [100], [1000]), np.arange(12, dtype=np.int64)
    dst, sport = (src + 5) % 12, src * 97 % 30_000
    flows = FlowSet(src, dst, src * 0 + 4_096, src * 0, sport + 100)
    state = build(fabric, flows, Settings(ecmp_hash=name, ecmp_seed=seed), "none", seed=0)
    ip = fabric.addresses
    headers = Headers(ip[src], ip[dst], flows.sport.astype(np.uint16), udp_dport=flows.dport)
    links = Routes(fabric, dst).route(src, dst, by_ecmp(Ecmp(name, headers, seed)))
    for row, expected in zip(state.path, links.tolist(), strict=True):
        node, nodes = int(state.port["to"][state.port["peer"][row[0]]]), []
        for port in row[: min(len(expected), ACK_PATH)]:
            node = int(state.port["to"][port])
            nodes.append(node)
        assert nodes[: sum(link >= 0 for link in expected)] == [
            int(fabric.link_dst[link]) for link in expected if link >= 0
        ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("congestion.routing=spray",), "set congestion.selective_repeat=true too"),
        (("congestion.routing=hashed_ports",), "set congestion.selective_repeat=true too"),
        (("congestion.routing=spray", *_ANY_ORDER, "congestion.paths=8"), "congestion.paths = 8: has no effect"),
        (("congestion.routing=spray", *_ANY_ORDER, "congestion.ecmp_seed=8"), "congestion.ecmp_seed = 8: has no"),
        (("congestion.paths=8",), "congestion.paths = 8: has no effect"),
        (("congestion.ecmp_hash=md5",), "congestion.ecmp_hash = md5"),
    ],
)  # fmt: skip
def test_routing_that_cannot_be_is_one_line(overrides, message):
    with pytest.raises(ConfigError) as caught:
        settings_of("ns3", overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)

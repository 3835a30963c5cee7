import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netlayer.config.tree import ClusterConfig
from tests.topology.fabrics import clusters
from tests.topology.graphs import diamond, graph
from topology.ecmp.graph_routing import UNREACHABLE, Routes, Step, by_ecmp
from topology.ecmp.hashing import HASHES, Ecmp, Headers
from topology.ecmp.routing import NO_LINK, route
from topology.fabric.cable_plan import CablePlan
from topology.fabric.clos import Clos, Ints, Tier
from topology.fabric.graph import Graph

# Data packets of 4 MB and their ACKs that each of 8 spines sent to each of 4 leaves, in units of one flow's packets:
# ns-3 HPCC, 32 hosts, 4 leaves x 8, 8 spines, host i to (i + 8) % 32, murmur3, port 10000 to 4791.
SPINES_SENT = [
    *([3, 1, 0, 4], [2, 5, 2, 0], [1, 2, 4, 3], [2, 1, 0, 1]),
    *([3, 3, 3, 1], [1, 3, 4, 5], [2, 0, 2, 0], [2, 1, 1, 2]),
]


def _all_pairs(nodes: Ints) -> tuple[Ints, Ints]:
    src, dst = (side.ravel() for side in np.meshgrid(nodes, nodes))
    return src[src != dst], dst[src != dst]


def _clos_links(fabric: Clos) -> Ints:
    """Link of the Clos behind each link of its graph."""
    tiers = [np.arange(*fabric.tier_start[[tier, tier + 1]]) for tier in Tier]
    return np.concatenate([*tiers[:3], *tiers[:2:-1]])


@settings(deadline=None)
@given(st.one_of(clusters(), clusters(rail_only=True)), st.sampled_from(HASHES), st.integers(0, 99))
def test_on_a_clos_it_takes_the_paths_of_routing(tree: ClusterConfig, name: str, seed: int) -> None:
    cable_plan = CablePlan.build(tree)
    fabric = cable_plan.fabric
    src, dst = _all_pairs(np.arange(fabric.design.num_nics))
    joined = fabric.network_of(src) == fabric.network_of(dst)
    src, dst = src[joined], dst[joined]
    if not len(src):
        return
    rng = np.random.default_rng(seed)
    some = rng.integers(0, len(src), 200)
    src, dst = src[some], dst[some]
    headers = Headers(fabric.address_of(src), fabric.address_of(dst), rng.integers(0, 65536, 200).astype(np.uint16))
    ecmp = Ecmp(name, headers, seed)  # type: ignore[arg-type]
    paths = Routes(cable_plan.graph(), dst).route(src, dst, by_ecmp(ecmp))
    found = np.where(paths == NO_LINK, NO_LINK, _clos_links(fabric)[paths])
    wanted = route(fabric, src, dst, ecmp)
    for one, other in zip(found.tolist(), wanted.tolist(), strict=True):
        assert [link for link in one if link != NO_LINK] == [link for link in other if link != NO_LINK]


@settings(deadline=None)
@given(st.one_of(clusters(), clusters(rail_only=True)))
def test_every_pair_is_connected_by_the_formulas_hops(tree: ClusterConfig) -> None:
    cable_plan = CablePlan.build(tree)
    src, dst = _all_pairs(np.arange(cable_plan.fabric.design.num_nics))
    if len(src):
        hops = Routes(cable_plan.graph(), dst).hops(src, dst)
        assert np.array_equal(np.where(hops == UNREACHABLE, 0, hops), cable_plan.fabric.hops(src, dst))


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Any switches and hosts, some with several cables, some pairs without a path."""
    hosts, switches = draw(st.integers(2, 6)), draw(st.integers(1, 7))
    node, switch = st.integers(0, hosts + switches - 1), st.integers(hosts, hosts + switches - 1)
    cables = draw(st.lists(st.tuples(node, switch).filter(lambda ends: ends[0] != ends[1]), min_size=1, max_size=25))
    return graph(hosts, switches, cables)


@settings(deadline=None)
@given(graphs(), st.integers(0, 2**40))
def test_paths_are_walks_of_shortest_length_over_switches(fabric: Graph, value: int) -> None:
    import networkx as nx

    src, dst = _all_pairs(fabric.hosts)
    routes = Routes(fabric, dst)
    hops = routes.hops(src, dst)
    paths = routes.route(src, dst, np.full(len(src), value, dtype=np.int64))
    for flow, (start, end) in enumerate(zip(src.tolist(), dst.tolist(), strict=True)):
        relays = [node for node in range(fabric.num_nodes) if fabric.is_switch[node] or node in (start, end)]
        net = nx.Graph(list(zip(fabric.a.tolist(), fabric.b.tolist(), strict=True))).subgraph(relays)
        known = start in net and end in net and nx.has_path(net, start, end)
        assert hops[flow] == (nx.shortest_path_length(net, start, end) if known else UNREACHABLE)
        links = [link for link in paths[flow].tolist() if link != NO_LINK]
        assert len(links) == max(hops[flow], 0)
        walk = [start, *fabric.link_dst[links].tolist()]
        assert walk[:-1] == fabric.link_src[links].tolist()
        assert walk[-1] == (end if known else start)


@settings(deadline=None)
@given(graphs())
def test_an_even_spread_is_the_mean_over_all_choices_and_conserves_bytes(fabric: Graph) -> None:
    src, dst = _all_pairs(fabric.hosts)
    routes = Routes(fabric, dst)
    reached = routes.hops(src, dst) != UNREACHABLE
    totals = routes.spread(src, dst, np.ones(len(src)))
    size = fabric.num_nodes
    into = np.bincount(fabric.link_dst, weights=totals, minlength=size)
    out = np.bincount(fabric.link_src, weights=totals, minlength=size)
    sent = np.bincount(src[reached], minlength=size) - np.bincount(dst[reached], minlength=size)
    assert np.allclose(out - into, sent)
    assert np.isclose(totals.sum(), routes.hops(src, dst)[reached].sum())
    singly = sum(routes.spread(src[[one]], dst[[one]], np.ones(1)) for one in range(len(src)))
    assert np.allclose(totals, singly)


def test_members_stand_in_order_of_link_and_hosts_never_relay() -> None:
    one = diamond()
    routes = Routes(one, np.array([2]))
    assert one.link_dst[routes.members(3, 2)].tolist() == [4, 5, 5]
    relay = graph(3, 2, [(0, 3), (1, 3), (1, 4), (2, 4)])
    assert Routes(relay, np.array([2])).hops(np.array([0]), np.array([2])).tolist() == [UNREACHABLE]


def test_a_choice_sees_hop_height_and_direction() -> None:
    steps: list[Step] = []

    def choose(step: Step) -> Ints:
        steps.append(step)
        return np.full(len(step.node), 2)

    paths = Routes(diamond(), np.array([2])).route(np.array([0]), np.array([2]), choose)
    assert diamond().link_dst[paths[0]].tolist() == [3, 5, 6, 2]
    assert [(s.hop, int(s.level[0]), bool(s.upward[0]), int(s.group_size[0])) for s in steps] == [
        *((0, 0, True, 1), (1, 1, True, 3), (2, 2, False, 1), (3, 1, False, 1)),
    ]


def test_hash_values_may_differ_from_hop_to_hop() -> None:
    routes = Routes(diamond(), np.array([2]))
    values = np.array([[0, 1, 0, 0]])
    assert routes.route(np.array([0]), np.array([2]), values)[0, 1] == 4


def test_a_flow_needs_two_ends() -> None:
    with pytest.raises(ValueError, match="one host"):
        Routes(diamond(), np.array([0])).route(np.array([0]), np.array([0]), np.zeros(1, dtype=np.int64))


def test_murmur3_sends_flows_where_the_simulator_sent_them() -> None:
    down = [(host, 32 + host // 8) for host in range(32)]
    fabric = graph(32, 12, [*down, *((leaf, spine) for leaf in range(32, 36) for spine in range(36, 44))])
    src = np.arange(32)
    dst = (src + 8) % 32
    sent = np.zeros(fabric.num_links, dtype=np.int64)
    for start, end, sport, dport in ((src, dst, 10_000, 4791), (dst, src, 4791, 10_000)):
        ports = np.full(32, sport, dtype=np.uint16)
        headers = Headers(fabric.addresses[start], fabric.addresses[end], ports, udp_dport=dport)
        paths = Routes(fabric, end).route(start, end, by_ecmp(Ecmp("murmur3", headers, 0)))
        sent += np.bincount(paths.ravel(), minlength=fabric.num_links)
    back = sent[fabric.num_cables + 32 :].reshape(4, 8).T
    assert back.tolist() == SPINES_SENT

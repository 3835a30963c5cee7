import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netlayer.config.tree import ClusterConfig
from netlayer.errors import ConfigError
from tests.topology.fabrics import cluster, clusters
from tests.topology.graphs import diamond, graph
from topology.ecmp.compare import ALL_TIERS
from topology.ecmp.graph_load import demand_bps, graph_rows, load_fabric, load_graph
from topology.ecmp.hashing import Ecmp, HashName
from topology.ecmp.load import load
from topology.fabric.cable_plan import CablePlan
from topology.fabric.clos import Clos, Tier
from topology.fabric.export import write_graphml
from topology.rates.contention import contend
from topology.traffic.job import Flows, Kind, headers, permutation


def _flows(pairs: list[tuple[int, int]], num_bytes: float = 1e9) -> Flows:
    src, dst = np.array(pairs, dtype=np.int64).T
    return Flows(src, dst, np.full(len(pairs), num_bytes), np.full(len(pairs), Kind.FILE, dtype=np.int8))


@settings(deadline=None, max_examples=30)
@given(tree=clusters(), name=st.sampled_from(["random", "crc16", "murmur3"]), seed=st.integers(0, 99))
def test_on_a_clos_it_finds_what_the_clos_finds(tree: ClusterConfig, name: HashName, seed: int) -> None:
    fabric = Clos.build(tree)
    flows = permutation(fabric, seed)
    if not len(flows):
        return
    wanted = contend(load(fabric, flows, Ecmp(name, headers(fabric, flows, seed), seed)))
    found = load_graph(CablePlan.build(tree).graph(), flows, name, seed)
    assert found.flow_bps == pytest.approx(wanted.loaded.flow_bps)
    assert found.rates.flow_bps == pytest.approx(wanted.rates.flow_bps)
    assert found.slowdown == pytest.approx(wanted.slowdown)
    masks = found.tiers()
    between = (Tier.TOR_SPINE, Tier.SPINE_CORE, Tier.CORE_SPINE, Tier.SPINE_TOR)
    for mask, tiers in ((masks[ALL_TIERS], between), (masks["switch1-switch2"], between[:1])):
        one, other = found.collisions(mask), wanted.loaded.collisions(tiers)
        assert (one.num_links, one.num_flows, one.num_colliding, one.num_overloaded) == (
            *(other.num_links, other.num_flows, other.num_colliding, other.num_overloaded),
        )
        assert one.excess == pytest.approx(other.excess)
        assert found.slowdowns(mask) == pytest.approx(wanted.slowdowns(tiers))
    assert found.times() == pytest.approx(wanted.times(flows))
    found.rates.certify()


def test_every_rate_has_a_bottleneck_and_names_say_where() -> None:
    pairs = [(0, 2)] * 40 + [(1, 2)] * 40
    found = load_graph(diamond(), _flows(pairs), "random", 1)
    found.rates.certify()
    assert found.rates.flow_bps.sum() == pytest.approx(100e9), "one link leads to host 2"
    assert found.flow_bps.tolist() == [100e9 / 80] * 80
    assert found.bottlenecks() == []
    narrow = graph(4, 4, [(0, 4), (1, 4), (2, 7), (3, 7), (4, 5), (4, 6), (5, 7), (6, 7)])
    one_way = next(
        seed for seed in range(99) if load_graph(narrow, _flows([(0, 2), (1, 3)]), "random", seed).bottlenecks()
    )
    (row,) = load_graph(narrow, _flows([(0, 2), (1, 3)]), "random", one_way).bottlenecks()
    assert (row["from"], row["held_back"], row["fair_bps"], row["slowdown"]) == ("s4", 2, 50e9, 2.0)
    assert row["first_pairs"] == ["h0 > h2", "h1 > h3"]


def test_rows_are_means_over_seeds_and_json() -> None:
    rows = graph_rows(diamond(), _flows([(0, 2), (1, 2)]), seeds=range(4), hashes=["random", "crc16"])
    columns = [row.to_row() for row in rows]
    assert json.loads(json.dumps(columns, allow_nan=False)) == columns
    tiers = ["host-switch1", "switch1-switch2", "switch2-switch1", "switch1-host", "fabric"]
    assert [(row.hash_name, row.tier) for row in rows] == [
        (name, tier) for name in ("random", "crc16") for tier in tiers
    ]
    assert {row.seeds for row in rows} == {4}
    assert [row.flows for row in rows[:5]] == [2.0] * 5


def test_a_host_shares_all_its_links() -> None:
    two_ports = graph(2, 1, [(0, 2), (0, 2), (1, 2)])
    assert demand_bps(two_ports, _flows([(0, 1)])).tolist() == [100e9]
    assert demand_bps(two_ports, _flows([(1, 0), (1, 0)])).tolist() == [50e9, 50e9]


def test_hosts_on_one_cable_are_a_fabric_too() -> None:
    assert load_graph(graph(2, 0, [(0, 1)]), _flows([(0, 1)]), "random", 0).rates.flow_bps.tolist() == [100e9]


def test_a_flow_without_a_path_is_named() -> None:
    apart = graph(2, 2, [(0, 2), (1, 3)])
    with pytest.raises(ConfigError, match="1 of 1 flows have no path in this fabric: the first from h0 to h1"):
        load_graph(apart, _flows([(0, 1)]), "random", 0)


def test_what_build_writes_is_loaded(tmp_path: Path) -> None:
    tree = cluster(nics_per_server=2, rails=2, rail_only=True)
    write_graphml(CablePlan.build(tree).graph(), tmp_path / "fabric.graphml")
    found = load_fabric(tmp_path / "fabric.graphml")
    assert load_graph(found, _flows([(0, 200)]), "crc16", 0).rates.flow_bps.tolist() == [200.0]
    with pytest.raises(ConfigError, match="the first from srv0000/nic0 to srv0100/nic1"):
        load_graph(found, _flows([(0, 200), (0, 201)]), "crc16", 0)

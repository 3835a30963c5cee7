import csv
import io

import numpy as np
import pytest

from netlayer.config.tree import ClusterConfig
from tests.topology.fabrics import cluster
from topology.ecmp.graph_routing import Routes
from topology.ecmp.hashing import Ecmp
from topology.ecmp.routing import NO_LINK, route
from topology.fabric.addressing import cables_csv
from topology.fabric.cable_plan import CablePlan
from topology.fabric.clos import Clos, Tier
from topology.fabric.wires import Wires, link_table
from topology.traffic.job import headers, permutation

CLUSTERS = [
    cluster(nics_per_server=2, rails=2),
    cluster(tiers=2, pods=1),
    cluster(nics_per_server=2, rails=2, rail_only=True),
]


@pytest.mark.parametrize("config", CLUSTERS, ids=["rails", "two tiers", "rail-only"])
def test_links_have_the_ends_that_cables_csv_names(config: ClusterConfig) -> None:
    fabric, cable_plan = Clos.build(config), CablePlan.build(config)
    wires = Wires.of_clos(fabric, config)
    rows = csv.DictReader(io.StringIO(cables_csv(cable_plan.graph(), cable_plan)))
    cables = {tuple(row[f"{end}_{what}"] for end in "ab" for what in ("device", "port")) for row in rows}
    ends = list(zip(wires.src, wires.src_port, wires.dst, wires.dst_port, strict=True))
    half = fabric.num_links // 2
    assert {tuple(map(str, one)) for one in ends[:half]} == cables
    assert {(str(c), str(d), str(a), str(b)) for a, b, c, d in ends[half:]} == cables
    assert wires.tier.tolist() == [Tier(tier).label for tier in fabric.link_tier.tolist()]


def test_a_path_is_told_device_by_device() -> None:
    config = CLUSTERS[0]
    fabric = Clos.build(config)
    wires = Wires.of_clos(fabric, config)
    flows = permutation(fabric, 0)
    paths = route(fabric, flows.src_nic, flows.dst_nic, Ecmp("crc16", headers(fabric, flows, 0), 0))
    for flow, text in enumerate(wires.paths(paths)):
        devices = text.split(" > ")
        assert (devices[0], devices[-1]) == (wires.host[flows.src_nic[flow]], wires.host[flows.dst_nic[flow]])
        links = paths[flow][paths[flow] != NO_LINK]
        assert devices[1:] == wires.dst[links].tolist()
        assert (wires.src[links[1:]] == wires.dst[links[:-1]]).all()


def test_a_graph_names_the_same_links() -> None:
    config = CLUSTERS[0]
    graph = CablePlan.build(config).graph()
    wires = Wires.of_graph(graph)
    assert wires.tiers == ["host-switch1", "switch1-switch2", "switch2-switch3", *wires.tiers[3:]]
    src, dst = graph.hosts[:1], graph.hosts[-1:]
    (text,) = wires.paths(Routes(graph, dst).route(src, dst, np.zeros(1, dtype=np.int64)))
    assert text.startswith(f"{graph.names[src[0]]} > tor-")
    assert wires.name(0) == graph.link_name(0).replace(" -> ", " > ")


def test_a_link_with_more_demand_than_capacity_is_in_collision() -> None:
    fabric = Clos.build(CLUSTERS[0])
    wires = Wires.of_clos(fabric, CLUSTERS[0])
    demand = np.zeros(fabric.num_links)
    demand[[5, 6]] = fabric.link_bps[[5, 6]] * [1.0, 1.5]
    table = link_table(wires, demand, np.array([[5], [6], [6]]))
    assert np.flatnonzero(table["collision"]).tolist() == [6]
    assert table["flows"][[5, 6]].tolist() == [1, 2]
    assert table["utilisation"][6] == 1.5

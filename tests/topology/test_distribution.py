import numpy as np

from tests.topology.fabrics import cluster
from topology.ecmp.distribution import Distribution, colliding_of_tors
from topology.ecmp.hashing import Ecmp
from topology.ecmp.load import Load, load
from topology.fabric.clos import Clos, Tier
from topology.traffic.job import Flows, headers, permutation

FABRIC = Clos.build(cluster())


def _loaded(seed: int) -> tuple[Flows, Load]:
    flows = permutation(FABRIC, seed)
    return flows, load(FABRIC, flows, Ecmp("crc16", headers(FABRIC, flows, seed), seed))


def test_every_link_of_every_seed_is_counted_once() -> None:
    counted = Distribution()
    for seed in range(3):
        counted.add(True, "permutation", "crc16", *_loaded(seed))
    rows = counted.link_rows()
    for tier in Tier:
        mine = [row for row in rows if row["tier"] == tier.label]
        span = FABRIC.tier_links(tier)
        assert sum(row["links"] for row in mine) == 3 * (span.stop - span.start)
        assert sum(row["share"] for row in mine) == 1


def test_links_above_their_capacity_are_those_in_collision() -> None:
    flows, loaded = _loaded(0)
    counted = Distribution()
    counted.add(True, "permutation", "crc16", flows, loaded)
    over = ("to 125%", "to 150%", "to 200%", "to 300%", "above")
    found = sum(row["links"] for row in counted.link_rows() if row["tier"] == "tor-spine" and row["use"] in over)
    assert found == loaded.collisions([Tier.TOR_SPINE]).num_overloaded


def test_flows_in_collision_of_all_tors_add_up() -> None:
    flows, loaded = _loaded(0)
    by_tor = colliding_of_tors(flows, loaded)
    assert by_tor.sum() == loaded.collisions([Tier.TOR_SPINE]).num_colliding
    counted = Distribution()
    counted.add(False, "permutation", "crc16", flows, loaded)
    rows = counted.tor_rows()
    assert sum(row["tors"] for row in rows) == len(by_tor) == FABRIC.design.num_tors
    assert np.dot([row["flows_in_collision"] for row in rows], [row["tors"] for row in rows]) == by_tor.sum()

import numpy as np
import pytest

from tests.topology.fabrics import megascale
from tests.topology.jobs import small
from topology.ecmp.hashing import Ecmp
from topology.ecmp.load import load
from topology.ecmp.port_table import port_table
from topology.ecmp.search import offset_vectors, plan_ports, plan_summary, search_knobs
from topology.fabric.clos import Clos
from topology.placement.strategies import Placement, place_slots, usable_servers
from topology.traffic.job import permutation
from topology.traffic.step import slot_flows

CONFIG = small()
FABRIC = Clos.build(CONFIG.cluster)


def test_planned_ports_lower_the_excess_and_hold_when_hashed_again() -> None:
    flows = permutation(FABRIC, 0)
    plan = plan_ports(FABRIC, flows, "crc16", 0, candidates=16)
    found = plan_summary(plan)
    assert found["excess_after"] < 0.4 * found["excess_before"]
    again = load(FABRIC, flows, Ecmp("crc16", plan.headers, 0))
    assert np.array_equal(again.link_bps, plan.after.link_bps)
    assert (plan.headers.udp_sport >= 0xC000).all()


def test_one_candidate_changes_nothing() -> None:
    plan = plan_ports(FABRIC, permutation(FABRIC, 0), "crc16", 0, candidates=1)
    assert plan.num_changed == 0
    with pytest.raises(ValueError, match="at least 1"):
        plan_ports(FABRIC, permutation(FABRIC, 0), "crc16", 0, candidates=0)


def test_a_plan_names_each_queue_pair_once() -> None:
    flows = slot_flows(CONFIG.job, CONFIG.cluster, 2)
    plan = plan_ports(FABRIC, flows, "crc32c", 1, candidates=4)
    frame = port_table(plan, FABRIC, CONFIG.cluster, Placement("given", np.arange(128)))
    assert len(frame) == len(flows)
    assert not frame.duplicated(["src_device", "dst_device", "kind", "qp"]).any()
    assert frame["src_ip"].str.startswith("10.").all()
    assert (frame["src_rank"] == flows.src_nic).all()


def test_offsets_cure_polarisation() -> None:
    config = megascale()
    fabric = Clos.build(config.cluster)
    placed = place_slots("given", fabric, config.job.parallel, 1536, usable_servers(1536))
    rows = search_knobs(
        fabric, lambda qps: slot_flows(config.job, config.cluster, qps), placed, "crc16", seeds=[0], qps=(1,)
    )
    assert {row["offset_bits"] for row in rows} == {" ".join(map(str, one)) for one in offset_vectors("crc16", 0)}
    used = {row["offsets"]: row["pipeline_core_links_used"] for row in rows}
    assert used[True] > 0.9 > 0.7 > used[False]
    assert [row["excess"] for row in rows] == sorted(row["excess"] for row in rows)


def test_vectors_of_offsets_are_tried_where_the_hash_takes_any() -> None:
    vectors = offset_vectors("crc32c", 7, drawn=3)
    assert vectors[:2] == [(0, 8, 16, 24), (0, 0, 0, 0)]
    assert all(len(set(one)) == 4 and max(one) < 32 for one in vectors[2:])
    assert vectors == offset_vectors("crc32c", 7, drawn=3) != offset_vectors("crc32c", 8, drawn=3)
    placed = place_slots("given", FABRIC, CONFIG.job.parallel, 128, usable_servers(128))
    flows = slot_flows(CONFIG.job, CONFIG.cluster)
    (row,) = search_knobs(FABRIC, lambda _: flows, placed, "murmur3", seeds=[0], qps=(1,))
    assert (row["offsets"], row["offset_bits"]) == (False, "")
    given = [(0, 5, 9, 3), (1, 2, 3, 4)]
    rows = search_knobs(FABRIC, lambda _: flows, placed, "crc16", seeds=[0], qps=(1,), offsets=given)
    assert {row["offset_bits"] for row in rows} == {"0 5 9 3", "1 2 3 4"}

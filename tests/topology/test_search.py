from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.topology.fabrics import megascale
from tests.topology.jobs import small
from topology.clos import Clos
from topology.hashing import Ecmp
from topology.load import load
from topology.placement import place_slots, usable_servers
from topology.search import plan_ports, plan_summary, search_knobs, write_plan
from topology.step import slot_flows
from topology.traffic import permutation

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


def test_a_plan_names_each_queue_pair_once(tmp_path: Path) -> None:
    flows = slot_flows(CONFIG.job, CONFIG.cluster, 2)
    write_plan(plan_ports(FABRIC, flows, "crc32c", 1, candidates=4), tmp_path / "ports.csv")
    frame = pd.read_csv(tmp_path / "ports.csv")
    assert len(frame) == len(flows)
    assert not frame.duplicated(["src_nic", "dst_nic", "kind", "qp"]).any()
    assert frame["src_ip"].str.startswith("10.").all()
    assert len(pd.read_json(tmp_path / "ports.json")) == len(flows)


def test_offsets_cure_polarisation() -> None:
    config = megascale()
    fabric = Clos.build(config.cluster)
    placed = place_slots("given", fabric, config.job.parallel, 1536, usable_servers(1536))
    rows = search_knobs(
        fabric, lambda qps: slot_flows(config.job, config.cluster, qps), placed, "crc16", seeds=[0], qps=(1,)
    )
    assert [row["offsets"] for row in rows] == [True, False]
    assert rows[0]["pipeline_core_links_used"] > 0.9 > 0.7 > rows[1]["pipeline_core_links_used"]

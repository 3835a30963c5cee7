import dataclasses

import numpy as np
import pytest

from tests.topology.jobs import small
from topology.ecmp.balance import BalanceName
from topology.ecmp.compare import traffic_flows
from topology.fabric.clos import Clos
from topology.fabric.wires import Wires
from topology.single_run import RunRequest, run_once

CONFIG = small()
FABRIC = Clos.build(CONFIG.cluster)
WIRES = Wires.of_clos(FABRIC, CONFIG.cluster)


def test_links_carry_the_flows_whose_paths_cross_them() -> None:
    run = run_once(RunRequest(CONFIG, "crc16", "pipeline"))
    tables = run.tables(WIRES)
    links, flows = tables["links"], tables["flows"]
    paths = [text.split(" > ") for text in flows["path"]]
    assert sum(len(path) - 1 for path in paths) == links["flows"].sum()
    into = sum(path[1] == "tor-s00-r0" for path in paths)
    assert into == links.loc[(links["tier"] == "nic-tor") & (links["dst"] == "tor-s00-r0"), "flows"].sum()
    for row in run.bottlenecks(WIRES):
        flow, pair = row["first_flows"][0], row["first_pairs"][0]
        assert pair == f"{flows['src'][flow]} > {flows['dst'][flow]}"
        assert f"{row['from']} > {row['to']}" in flows["path"][flow]


def test_a_placement_moves_the_jobs_flows() -> None:
    ends = [run_once(RunRequest(CONFIG, "crc16", "ring", placement=name)).flows for name in ("given", "random")]
    assert len(ends[0]) == len(ends[1])
    assert not np.array_equal(ends[0].src_nic, ends[1].src_nic)


def test_of_flows_with_starts_only_those_under_way_have_rates() -> None:
    flows = traffic_flows(CONFIG, FABRIC, "permutation", 0)
    late = np.where(np.arange(len(flows)) < 40, 1e6, 0.0)
    run = run_once(RunRequest(CONFIG, "crc16", "file", flows=dataclasses.replace(flows, start_s=late)))
    table = run.tables(WIRES)["flows"]
    assert len(run.under_way) == len(flows) - 40
    assert table["rate_bps"].isna().tolist() == [True] * 40 + [False] * (len(flows) - 40)
    assert table["path"].str.contains(" > ").all()
    assert run.time["completion_s"] > 1e6
    assert set(run.bottlenecks(WIRES)[0]["first_flows"]) <= set(range(40, len(flows)))


@pytest.mark.parametrize("name", ["spray", "adaptive"])
def test_sprayed_flows_have_no_one_path(name: BalanceName) -> None:
    table = run_once(RunRequest(CONFIG, name, "permutation")).tables(WIRES)["flows"]
    assert (set(table["path"]) == {"sprayed over all"}) == (name == "spray")


def test_every_stage_is_timed_and_compiling_apart() -> None:
    run = run_once(RunRequest(CONFIG, "adaptive", "pipeline"))
    assert [row["stage"] for row in run.timings] == ["build", "flows", "compile", "hash", "load", "rate", "time"]
    nothing = run_once(RunRequest(CONFIG, "crc16", "file", flows=run.flows.where(np.zeros(0, dtype=np.int64))))
    assert nothing.time["completion_s"] == 0

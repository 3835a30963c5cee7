from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netlayer.errors import ConfigError
from tests.topology.fabrics import megascale
from tests.topology.jobs import small
from topology.fabric.clos import Clos
from topology.placement.strategies import (
    STRATEGIES,
    Placement,
    StrategyName,
    num_slots,
    place_slots,
    read_csv,
    usable_servers,
)
from topology.placement.swaps import cheapest, improve, placement_cost
from topology.traffic.step import grown, placement_row, slot_flows, traffic_cost

CONFIG = small()
FABRIC = Clos.build(CONFIG.cluster)
PARALLEL = CONFIG.job.parallel


@given(
    strategy=st.sampled_from(STRATEGIES),
    lost=st.lists(st.integers(0, 127), max_size=28, unique=True),
    seed=st.integers(0, 99),
)
def test_every_strategy_puts_each_slot_on_a_usable_server_of_its_own(
    strategy: StrategyName, lost: list[int], seed: int
) -> None:
    usable = usable_servers(128, lost)
    placed = place_slots(strategy, FABRIC, PARALLEL, 100, usable, seed)
    assert usable[placed.server].all()
    assert len(np.unique(placed.server)) == 100


def test_a_placement_moves_flows_and_keeps_their_bytes() -> None:
    flows = slot_flows(CONFIG.job, CONFIG.cluster)
    placed = place_slots("random", FABRIC, PARALLEL, 128, usable_servers(128), 3)
    moved = placed.apply(flows, 1)
    assert np.array_equal(moved.src_nic, placed.server[flows.src_nic])
    assert moved.num_bytes.sum() == flows.num_bytes.sum()


def test_the_papers_placement_sends_fewest_ring_bytes_between_pods() -> None:
    config = megascale()
    fabric = Clos.build(config.cluster)
    flows = slot_flows(config.job, config.cluster)
    usable = usable_servers(config.cluster.servers)
    slots = num_slots(config.cluster, config.job.parallel)
    cost = {
        name: traffic_cost(fabric, place_slots(name, fabric, config.job.parallel, slots, usable).apply(flows, 8))
        for name in STRATEGIES
    }
    ring = {name: row["cross_pod_ring_bytes"] for name, row in cost.items()}
    assert min(ring, key=lambda name: ring[name]) == "paper"
    assert cost["pipeline-first"]["cross_pod_pipeline_bytes"] == 0
    assert ring["random"] > 100 * ring["paper"]


def test_a_placement_file_reads_back(tmp_path: Path) -> None:
    placed = place_slots("random", FABRIC, PARALLEL, 128, usable_servers(128), 1)
    placed.write_csv(tmp_path / "placement.csv", 1)
    assert np.array_equal(read_csv(tmp_path / "placement.csv", 128, CONFIG.cluster).server, placed.server)


@pytest.mark.parametrize(
    ("lines", "rule"),
    [
        ("rank,host\n0,1", "columns rank,server"),
        ("rank,server\n0,0", "must name each of the ranks 0..3 once"),
        ("rank,server\n0,0\n1,1\n2,0\n3,0", "share a server's NVLink"),
        ("rank,server\n0,0\n1,0\n2,0\n3,0", "named for more"),
        ("rank,server\n0,0\n1,0\n2,128\n3,128", "servers must be among"),
        ("rank,server\n0,99999999999999999999999", "is no CSV of whole numbers"),
        ('rank,server\n0,"' + "0" * 200_000, "is no CSV of whole numbers"),
        ('rank,server\n0,"0', "is no CSV of whole numbers"),
    ],
)
def test_a_bad_placement_file_is_refused_in_one_line(tmp_path: Path, lines: str, rule: str) -> None:
    path = tmp_path / "placement.csv"
    path.write_text(lines + "\n")
    two_gpus = CONFIG.cluster.model_copy(update={"gpus_per_server": 2})
    with pytest.raises(ConfigError, match=rule):
        read_csv(path, 2, two_gpus)


def test_a_placement_file_of_a_spreadsheet_is_read(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("rank,server\n0,3\n", encoding="utf-8-sig")
    assert read_csv(tmp_path / "p.csv", 1, CONFIG.cluster).server.tolist() == [3]


def test_too_few_servers_and_unknown_ones_are_refused() -> None:
    with pytest.raises(ConfigError, match="the job needs 128 servers, 127 of 128"):
        place_slots("packed", FABRIC, PARALLEL, 128, usable_servers(128, [5]))
    with pytest.raises(ConfigError, match="server = 128"):
        usable_servers(128, [128])


def test_the_optimiser_improves_mends_and_repeats() -> None:
    cluster, busy = grown(CONFIG, 20)
    fabric, flows = Clos.build(cluster), slot_flows(CONFIG.job, cluster)
    usable = usable_servers(cluster.servers, busy, [0, 1, 2, 77])
    start = place_slots("random", fabric, PARALLEL, 128, usable_servers(cluster.servers), 0)
    found, again = (improve(fabric, flows, start, usable, seed=4, max_moves=200_000) for _ in range(2))
    assert found.cost_after < 0.6 * found.cost_before
    assert usable[found.placement.server].all()
    assert len(np.unique(found.placement.server)) == 128
    assert np.array_equal(found.placement.server, again.placement.server)
    moved = found.placement.apply(flows, 1)
    above = fabric.hops(moved.src_nic, moved.dst_nic) - 2
    assert found.cost_after == pytest.approx(float((moved.num_bytes * above).sum()))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_optimiser_never_raises_the_cost_and_keeps_what_it_need_not_move(strategy: StrategyName) -> None:
    flows = slot_flows(CONFIG.job, CONFIG.cluster)
    start = place_slots(strategy, FABRIC, PARALLEL, 128, usable_servers(128), 0)
    found = improve(FABRIC, flows, start, usable_servers(128), max_moves=400_000)
    assert found.cost_before == pytest.approx(placement_cost(FABRIC, flows, start))
    assert found.cost_after == pytest.approx(placement_cost(FABRIC, flows, found.placement))
    assert found.cost_after <= found.cost_before * (1 + 1e-12)
    assert found.slots_moved == int((found.placement.server != start.server).sum())
    if found.slots_moved:  # each is worth a hundredth of a slot's cost
        assert found.cost_after < found.cost_before * (1 - 0.0099 * found.slots_moved / 128)


def test_around_failed_servers_few_ranks_move() -> None:
    """Rank order is as good as any order here: the ten slots of lost servers move, and a few that follow them."""
    config = megascale()
    cluster, busy = grown(config, 32)
    fabric, flows = Clos.build(cluster), slot_flows(config.job, cluster)
    lost = [5, 77, *range(400, 408)]
    start = place_slots("given", fabric, config.job.parallel, 1536, usable_servers(cluster.servers))
    found = improve(fabric, flows, start, usable_servers(cluster.servers, busy, lost))
    moved = np.flatnonzero(found.placement.server != start.server)
    assert set(lost) <= set(moved.tolist())
    assert 10 <= found.slots_moved == len(moved) <= 30
    assert found.cost_after <= found.cost_before
    assert not found.cut_short
    row = found.to_row("given", 8)
    assert (row["ranks_moved"], row["start"]) == (8 * len(moved), "given")
    assert improve(fabric, flows, start, usable_servers(cluster.servers, busy, lost), max_seconds=0).cut_short
    kept = found.given_up(start)
    assert (kept.slots_moved, kept.cost_after) == (0, found.cost_before)
    assert np.array_equal(kept.placement.server, start.server)


def test_the_cheapest_placement_is_the_start_and_of_equals_the_first() -> None:
    flows = slot_flows(CONFIG.job, CONFIG.cluster)
    placements = [place_slots(name, FABRIC, PARALLEL, 128, usable_servers(128), 0) for name in STRATEGIES]
    costs = [placement_cost(FABRIC, flows, placement) for placement in placements]
    best = cheapest(FABRIC, flows, placements)
    assert placement_cost(FABRIC, flows, best) == min(costs)
    given, same = placements[0], Placement("same", placements[0].server)
    assert cheapest(FABRIC, flows, [placements[1], given, same]).name == "given"


def test_the_optimiser_refuses_flows_of_slots_that_are_not_there() -> None:
    start = place_slots("given", FABRIC, PARALLEL, 96, usable_servers(128))
    with pytest.raises(ValueError, match="the placement has 96 slots"):
        improve(FABRIC, slot_flows(CONFIG.job, CONFIG.cluster), start, usable_servers(128))


def test_spares_grow_the_fabric_by_whole_pods() -> None:
    cluster, busy = grown(CONFIG, 10)
    assert (cluster.servers, cluster.pods) == (192, 3)
    assert busy == list(range(138, 192))
    assert grown(CONFIG, 0) == (CONFIG.cluster, [])
    assert Clos.build(cluster).design.num_pods == 3


def test_a_row_says_what_a_placement_costs() -> None:
    flows = slot_flows(CONFIG.job, CONFIG.cluster)
    placed = place_slots("given", FABRIC, PARALLEL, 128, usable_servers(128))
    row = placement_row(FABRIC, flows, placed, "crc16", 0)
    assert row["placement"] == "given"
    alone = [placement_row(FABRIC, flows, placed, "crc16", seed, seeds=1) for seed in range(4)]
    times = [one["time_s"] for one in alone]
    assert (row["time_min_s"], row["time_s"], row["time_max_s"]) == (min(times), np.median(times), max(times))
    assert row["pipeline_excess"] == pytest.approx(np.mean([one["pipeline_excess"] for one in alone]))
    assert alone[0]["time_min_s"] == alone[0]["time_s"] == alone[0]["ring_time_s"] + alone[0]["pipeline_time_s"]
    assert {"mean_hops", "cross_pod_bytes", "ring_excess", "pipeline_collision_share", "time_s"} <= set(row)

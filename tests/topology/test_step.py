import numpy as np
import pytest

from tests.topology.jobs import small
from topology.ecmp.load import demand_bps
from topology.fabric.clos import Clos
from topology.failures.faults import Failure, alive_links
from topology.placement.strategies import place_slots, usable_servers
from topology.rates.max_min import completion_bound_s
from topology.traffic.step import run_step, slot_flows

CONFIG = small()
FABRIC = Clos.build(CONFIG.cluster)
FLOWS = slot_flows(CONFIG.job, CONFIG.cluster)


@pytest.mark.parametrize("seed", range(3))
def test_a_phase_lasts_no_longer_than_at_its_first_rates_and_no_shorter_than_its_fullest_link(seed: int) -> None:
    step = run_step(FABRIC, FLOWS, "crc16", seed)
    for phase in step.phases:
        least = completion_bound_s(phase.load.paths, FABRIC.link_bps, phase.num_bytes)
        assert least * (1 - 1e-9) <= phase.time_s <= phase.time_bound_s * (1 + 1e-9)
        assert phase.time_bound_s == phase.seconds.max()
    assert step.time_bound_s == sum(phase.time_bound_s for phase in step.phases)


def test_flows_end_and_leave_their_rate_to_others() -> None:
    """The way round from the last stage to the first carries half of the bytes and ends first."""
    scattered = place_slots("random", FABRIC, CONFIG.job.parallel, 128, usable_servers(128), 0).apply(FLOWS, 1)
    phases = [run_step(FABRIC, scattered, "crc16", seed)["pipeline"] for seed in range(8)]
    assert any(phase.time_s < phase.time_bound_s * (1 - 1e-3) for phase in phases)


def test_flows_without_a_path_ask_for_nothing() -> None:
    """Of a pipeline's four NICs two in a row are gone: the others, each other's neighbours, share with nobody."""
    alive = alive_links(FABRIC, [Failure("nic-link", 40), Failure("nic-link", 72)])
    step, whole = (run_step(FABRIC, FLOWS, "crc16", 0, alive=mask) for mask in (alive, None))
    pipeline = step["pipeline"]
    assert 0 < pipeline.num_stopped == step.num_stopped - step["ring"].num_stopped
    flows = FLOWS.where(np.isin(FLOWS.kind, (2, 3)))
    left = flows.where(pipeline.reached)
    assert np.array_equal(pipeline.load.flow_bps, demand_bps(FABRIC, left))
    before = whole["pipeline"].load.flow_bps[pipeline.reached]
    assert (pipeline.load.flow_bps >= before).all()
    assert set(left.src_nic[pipeline.load.flow_bps > before]) == {8, 104}
    assert len(pipeline.seconds) == pipeline.reached.sum()

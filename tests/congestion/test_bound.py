import numpy as np
import pytest

from congestion.scenarios.catalogue import build_scenario
from congestion.simulation.bound import completion_bound_us
from congestion.simulation.settings import settings_of
from congestion.simulation.simulate import simulate

SMALL = (
    "fabric.latency_ns=1000",
    "fabric.hosts=16",
    "fabric.hosts_per_leaf=4",
    "fabric.spines=4",
    "fabric.uplink_bps=200G",
)
DRAWN = ("scenario.placement=random", "scenario.sports=random", "scenario.jitter_us=20")
OUT_OF_ORDER = ("congestion.selective_repeat=true", "congestion.timeout_us=10000")
WORKLOADS = {
    "incast": ("scenario.senders=6", "scenario.num_bytes=100KB"),
    "permutation": ("scenario.ranks=16", "scenario.num_bytes=200KB"),
    "all-to-all": ("scenario.ranks=8", "scenario.num_bytes=30000"),
    "rounds": ("scenario.ranks=8", "scenario.num_bytes=30000", "scenario.rounds=true", "scenario.gap_us=3"),
    "ring-all-reduce": ("scenario.ranks=8", "scenario.channels=2", "scenario.num_bytes=1MB"),
}


def _both(workload: str, seed: int, overrides: tuple[str, ...] = ()) -> tuple[float, float]:
    """The bound and what it took with nothing but PFC, us."""
    name = "all-to-all" if workload == "rounds" else workload
    made = build_scenario(name, (*SMALL, *DRAWN, *WORKLOADS[workload]), seed, fabric="clos")
    settings = settings_of("ns3", overrides)
    outcome = simulate(made.fabric, made.flows, settings, "none", seed=seed)
    took_ps = outcome.finish_ps.max() - outcome.start_ps.min()
    return completion_bound_us(made.fabric, made.flows, settings), took_ps / 1e6


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("routing", ["ecmp", "spray"])
def test_nothing_is_faster(workload: str, routing: str) -> None:
    more = (f"congestion.routing={routing}", *(OUT_OF_ORDER if routing == "spray" else ()))
    for seed in range(4):
        bound, took = _both(workload, seed, more)
        assert bound <= took + 1e-6


@pytest.mark.parametrize("num_bytes", [1, 4_096, 1_000_000])
def test_a_flow_alone_takes_as_long(num_bytes: int) -> None:
    made = build_scenario("incast", ("scenario.senders=1", f"scenario.num_bytes={num_bytes}", *SMALL), fabric="clos")
    outcome = simulate(made.fabric, made.flows, settings_of("ns3"), "none")
    took_us = (outcome.finish_ps - outcome.start_ps)[0] / 1e6
    assert completion_bound_us(made.fabric, made.flows, settings_of("ns3")) == pytest.approx(took_us, rel=2e-3)


def test_an_incast_takes_hardly_longer() -> None:
    for seed in range(4):
        bound, took = _both("incast", seed)
        assert took < 1.08 * bound  # the last to end may be from another leaf than the bound's


def test_chains_count() -> None:
    bound, took = _both("rounds", 1)
    made = build_scenario("all-to-all", (*SMALL, *DRAWN, *WORKLOADS["rounds"]), 1, fabric="clos")
    a_round_us = (7 * 4_144 + 1_376) * 8 / 200e3 + 8  # serialisation and four links there and back
    assert bound > 7 * a_round_us + 6 * 3
    assert took < 2 * bound
    assert len(made.flows) == 56


def test_a_collision_counts() -> None:
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 1_000, 8)
    drawn = [_both("permutation", int(seed))[0] for seed in seeds]
    spray = [_both("permutation", int(seed), ("congestion.routing=spray", *OUT_OF_ORDER))[0] for seed in seeds]
    assert all(alone <= collided for alone, collided in zip(spray, drawn, strict=True))
    assert max(drawn) > 1.1 * max(spray)

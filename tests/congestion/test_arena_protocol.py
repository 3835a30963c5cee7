"""The arena's suite: frozen, as ARENA.md says, and made of scenarios that exist and fit their budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import congestion
from congestion.arena.protocol import SUITE, Case, CaseSet, Workload
from congestion.scenarios.catalogue import Case as Scene
from congestion.scenarios.catalogue import build_scenario
from congestion.simulation.settings import PRESETS, Settings
from congestion.simulation.statistics import paired_ratio
from netlayer.config.file import example

# A change of the suite is a new version: raise it, and write this anew with ARENA.md.
DIGEST = "3e5f73f071fc4d80c35a3f2715817476cc552d898ec1ecae226247366e359d9c"
PROTOCOL = (Path(congestion.__file__).parent / "arena" / "ARENA.md").read_text()
SETS = {"tuning": SUITE.tuning_set, "test": SUITE.test}
WORKLOADS = [(name, workload) for name, cases in SETS.items() for workload in cases.workloads]


def _scene(cases: CaseSet, workload: Workload, seed: int) -> Scene:
    config = example(workload.config) if workload.config else None
    overrides = SUITE.overrides(Case(workload, cases.conditions[0]))
    return build_scenario(workload.scenario, overrides, seed, fabric="clos", config=config)


def test_the_suite_is_the_one_that_was_frozen() -> None:
    assert SUITE.digest == DIGEST
    assert f"suite {SUITE.version}, sha256 {DIGEST}" in PROTOCOL


@pytest.mark.parametrize(
    "changed",
    [
        replace(SUITE, rules=replace(SUITE.rules, no_worse=1.03)),
        replace(SUITE, test=replace(SUITE.test, seeds=SUITE.test.seeds[:-1])),
        replace(SUITE, tuning=replace(SUITE.tuning, trials_per_parameter=21)),
        replace(SUITE, every={**SUITE.every, "jitter_us": 40}),
    ],
)
def test_any_change_shows_in_the_digest(changed: object) -> None:
    assert getattr(changed, "digest") != SUITE.digest  # noqa: B009


def test_the_document_counts_as_the_code_does() -> None:
    for workload in SUITE.test.workloads:
        line = next(line for line in PROTOCOL.splitlines() if line.startswith(f"| {workload.name} |"))
        assert line.endswith(f"| {workload.packets:,} | {workload.link_hops:,} |")
    a_seed = sum(workload.link_hops for workload in SUITE.test.workloads)
    assert SUITE.test.link_hops == a_seed * len(SUITE.test.conditions) * len(SUITE.test.seeds)
    assert f"{a_seed:,} x {len(SUITE.test.conditions)} conditions x\n{len(SUITE.test.seeds)} seeds" in PROTOCOL
    for condition in SUITE.test.conditions:
        assert f" {condition.name}" in PROTOCOL


def test_five_laws_run_in_minutes_on_two_cores() -> None:
    assert 5 * SUITE.test.link_hops / (2 * 8e6) < 11 * 60
    assert SUITE.tuning_set.link_hops / 8e6 < 3


@pytest.mark.parametrize(("which", "workload"), WORKLOADS, ids=[f"{name}: {one.name}" for name, one in WORKLOADS])
def test_each_workload_is_a_scenario_of_as_many_packets(which: str, workload: Workload) -> None:
    cases = SETS[which]
    flows = _scene(cases, workload, cases.seeds[0]).flows
    packets = -(-flows.num_bytes // SUITE.fabric.mtu_bytes)
    rounding = 0.02 if workload.scenario == "job-phases" else 0.0
    assert workload.packets <= packets.sum() <= (1 + rounding) * workload.packets
    leaf = flows.src // SUITE.fabric.hosts_per_tor == flows.dst // SUITE.fabric.hosts_per_tor
    link_hops = int((2 * packets * np.where(leaf, 2, 4)).sum())
    assert 0.85 * workload.link_hops <= link_hops <= (1 + rounding) * workload.link_hops


def test_a_seed_draws_hosts_ports_and_starts() -> None:
    cases = SUITE.test
    workload = next(one for one in cases.workloads if one.scenario == "permutation")
    first, again, other = (_scene(cases, workload, seed).flows for seed in (*cases.seeds[:1] * 2, cases.seeds[1]))
    for name in ("src", "dst", "sport", "start_ps"):
        assert (getattr(first, name) == getattr(again, name)).all()
        assert (getattr(first, name) != getattr(other, name)).any()
    assert 0 < first.start_ps.max() <= 50e6


@pytest.mark.parametrize("condition", SUITE.test.conditions, ids=lambda one: one.name)
def test_the_fabric_has_the_rates_that_the_condition_names(condition: object) -> None:
    case = next(case for case in SUITE.test.cases if case.condition is condition)
    graph = build_scenario(case.workload.scenario, SUITE.overrides(case), 1, fabric="clos").fabric
    tor = graph.node_ids["leaf0"]
    up = graph.bps[(graph.a == tor)].sum()
    down = graph.bps[(graph.b == tor)].sum()
    assert down == case.condition.nic_bps * 8
    assert down / up == case.condition.oversubscription


def test_tuning_and_test_share_no_seed_size_or_rank_count() -> None:
    assert not set(SUITE.tuning_set.seeds) & set(SUITE.test.seeds)
    assert len(SUITE.test.seeds) >= 20
    for tuned in SUITE.tuning_set.workloads:
        for tested in SUITE.test.workloads:
            if tuned.scenario == tested.scenario:
                for key in ("ranks", "senders", "num_bytes", "bytes_per_rank", "cluster.servers"):
                    if key in tuned.parameters:
                        assert tuned.parameters[key] != tested.parameters[key]
    assert {one.scenario for one in SUITE.tuning_set.workloads} == {one.scenario for one in SUITE.test.workloads}


def test_what_is_searched_and_the_preset_exist() -> None:
    assert set(SUITE.tuning.switch_parameters) <= set(Settings.model_fields)
    assert SUITE.rules.published_dcqcn in PRESETS


def test_names_are_unique_and_the_parts_refer_to_conditions_that_exist() -> None:
    for cases in SETS.values():
        names = [case.name for case in cases.cases]
        assert len(set(names)) == len(names)
    conditions = {condition.name for condition in SUITE.test.conditions}
    assert {SUITE.robustness.condition, *SUITE.ablation_conditions} <= conditions
    assert SUITE.robustness.num_seeds <= len(SUITE.test.seeds)
    assert SUITE.rules.asked_of in {workload.scenario for workload in SUITE.test.workloads}


def test_the_resamples_suffice_for_holm_over_the_whole_table() -> None:
    """The smallest p-value that so many resamples can give, over all cases and four rivals, is still below 5%."""
    seeds, rules = len(SUITE.test.seeds), SUITE.rules
    clear = paired_ratio(np.arange(1, seeds + 1), np.arange(1, seeds + 1) * 2.0, resamples=rules.resamples)
    assert clear.p_value * len(SUITE.test.cases) * 4 < 1 - rules.level


def test_a_law_has_settled_when_the_last_trials_brought_under_1_percent() -> None:
    """Ten trials, the last three of them the last 30%."""
    before = [2.0, 1.5, 1.2, 1.1, 1.0, 1.3, 1.0]
    assert SUITE.tuning.has_settled([*before, 0.995, 1.4, 1.2])
    assert not SUITE.tuning.has_settled([*before, 1.4, 0.98, 1.2])
    with pytest.raises(ValueError, match="no last 30%"):
        SUITE.tuning.has_settled([1.0])

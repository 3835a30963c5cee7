from typing import Any

import numpy as np
import pytest
from hypothesis import given

from netlayer.config.tree import ClusterConfig
from netlayer.errors import ConfigError
from tests.topology.fabrics import cluster, clusters, megascale
from topology.fabric.clos import Clos
from topology.fabric.design import plan


def test_megascale_has_the_papers_counts() -> None:
    design = plan(megascale().cluster)
    assert (design.num_tor_sets, design.num_tors, design.tors_per_pod) == (24, 192, 32)
    assert (design.num_pods, design.spines_per_pod, design.num_spines, design.num_cores) == (6, 32, 192, 128)
    assert (design.tor_ports_down, design.tor_ports_up, design.spine_ports_down, design.spine_ports_up) == (32,) * 4
    assert (design.cores_per_plane, design.links_per_spine_core, design.core_ports) == (4, 8, 48)
    assert (design.tor_uplinks, design.tor_uplink_bps, design.links_per_tor_spine) == (32, 400_000_000_000, 1)


def test_without_the_split_the_same_ports_carry_uplinks_at_nic_rate() -> None:
    tree = megascale().cluster
    split, baseline = plan(tree), plan(tree.model_copy(update={"aoc_split": False}))
    assert (baseline.tor_uplinks, baseline.tor_uplink_bps) == (64, tree.nic_bps)
    assert baseline.tor_uplinks * baseline.tor_uplink_bps == split.tor_uplinks * split.tor_uplink_bps
    for name in ("tor_ports_up", "spines_per_pod", "spine_ports_down", "num_cores", "core_ports", "spine_uplink_bps"):
        assert getattr(baseline, name) == getattr(split, name)


@given(clusters())
def test_no_switch_has_more_ports_than_its_radix(tree: ClusterConfig) -> None:
    fabric = Clos.build(tree)
    sent = np.bincount(fabric.link_src, weights=fabric.link_bps, minlength=fabric.num_nodes)
    received = np.bincount(fabric.link_dst, weights=fabric.link_bps, minlength=fabric.num_nodes)
    assert np.array_equal(sent, received)
    assert sent[fabric.design.num_nics :].max() <= tree.switch_radix * tree.switch_port_bps
    for row in fabric.describe():
        assert row["ports_left"] >= 0


@given(clusters())
def test_a_tor_has_its_oversubscription(tree: ClusterConfig) -> None:
    design = plan(tree)
    up = design.tor_uplinks * design.tor_uplink_bps
    assert up * tree.oversubscription == design.nics_per_tor * design.nic_bps


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"switch_radix": 33}, "cluster.switch_radix"),
        ({"nic_bps": 300}, "cluster.nic_bps"),
        ({"servers_per_tor_set": 64}, "cluster.servers_per_tor_set"),
        ({"servers_per_tor_set": 31}, "cluster.servers_per_tor_set"),
        ({"oversubscription": 3.0}, "cluster.oversubscription"),
        ({"pods": 3}, "cluster.pods"),
        ({"tiers": 2}, "cluster.pods"),
        ({"pods": 1, "servers": 32 * 17}, "cluster.pods"),
        ({"core_switches_per_plane": 3}, "cluster.core_switches_per_plane"),
        ({"pods": 4, "core_switches_per_plane": 1}, "cluster.core_switches_per_plane"),
        ({"servers": 32_769}, "cluster.servers"),
        ({"nic_bps": 4, "switch_port_bps": 400}, "cluster.nic_bps"),
    ],
)
def test_a_design_that_cannot_be_wired_is_one_line_with_a_remedy(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(cluster(**changes))
    assert caught.value.field == field
    assert "\n" not in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize("changes", [{"servers_per_tor_set": 64}, {"oversubscription": 3.0}, {"pods": 3}])
def test_the_remedy_helps(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(cluster(**changes))
    value = float(caught.value.remedy.removeprefix("set ").removeprefix("one of [").split(",")[0].split()[0])
    remedy = {caught.value.field.removeprefix("cluster."): int(value) if value.is_integer() else value}
    plan(cluster(**{"core_switches_per_plane": 1, **changes, **remedy}))

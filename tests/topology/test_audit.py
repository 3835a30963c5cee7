from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netlayer.config.tree import ClusterConfig
from netlayer.errors import ConfigError
from tests.topology.fabrics import cluster, clusters, megascale
from tests.topology.graphs import write
from topology.fabric.audit import audit, hop_rows, limits, load_prices, max_servers_per_tor_set, part_rows, port_rows
from topology.fabric.cable_plan import CablePlan
from topology.fabric.design import plan


def test_megascale_needs_what_the_paper_says() -> None:
    cable_plan = CablePlan.build(megascale().cluster)
    whole = limits(cable_plan)
    assert whole["max_servers_per_tor_set"] == 64
    assert (whole["bisection_share"], whole["uplink_over_nic"]) == (1.0, 2.0)
    assert (whole["max_pods"], whole["max_servers"]) == (8, 2048)
    assert {row["item"]: row["count"] for row in part_rows(cable_plan)} == {
        "switch": 512,
        "nic": 12_288,
        "nic_cable": 6_144,
        "fibre": 12_288,
        "optic": 24_576,
    }
    assert [row["left"] for row in port_rows(cable_plan)] == [0, 0, 2048]
    assert {row["hops"]: row["pairs"] for row in hop_rows(cable_plan)} == {
        2: 192 * 64 * 63,
        4: 6 * (2048**2 - 32 * 64**2) - 12_288 * 7,
        6: 12_288**2 - 6 * 2048**2,
    }


@given(st.one_of(clusters(), clusters(rail_only=True)))
def test_ports_and_cables_are_those_of_the_links(tree: ClusterConfig) -> None:
    cable_plan = CablePlan.build(tree)
    graph = cable_plan.graph()
    ends = [*zip(graph.a.tolist(), graph.a_port, strict=True), *zip(graph.b.tolist(), graph.b_port, strict=True)]
    used = {(node, port.partition("/")[0]) for node, port in ends if graph.is_switch[node]}
    rows = port_rows(cable_plan)
    assert sum(row["used_down"] + row["used_up"] for row in rows) == len(used)
    assert all(row["left"] >= 0 for row in rows)
    assert sum(row["switches"] for row in rows) == int(graph.is_switch.sum())


@given(st.one_of(clusters(), clusters(rail_only=True)))
def test_hops_are_counted_as_the_formula_gives_them(tree: ClusterConfig) -> None:
    cable_plan = CablePlan.build(tree)
    nics, each = cable_plan.fabric.design.num_nics, tree.nics_per_server
    src, dst = np.divmod(np.arange(nics**2), nics)
    apart = src // each != dst // each
    hops, pairs = np.unique(cable_plan.fabric.hops(src[apart], dst[apart]), return_counts=True)
    rows = hop_rows(cable_plan)
    assert {row["hops"]: row["pairs"] for row in rows} == dict(zip(hops.tolist(), pairs.tolist(), strict=True))
    assert not rows or sum(row["share"] for row in rows) == pytest.approx(1.0)


@given(clusters())
def test_the_largest_tor_set_can_be_built_and_one_more_cannot(tree: ClusterConfig) -> None:
    most = max_servers_per_tor_set(tree)
    assert most >= tree.servers_per_tor_set
    one = {"servers": most, "servers_per_tor_set": most, "pods": 1, "tiers": 2}
    assert plan(tree.model_copy(update=one)).nics_per_tor == most * tree.nics_per_server // tree.rails
    for more in range(most + 1, most + 9):
        with pytest.raises(ConfigError):
            plan(tree.model_copy(update={**one, "servers": more, "servers_per_tor_set": more}))


def test_rail_only_pairs_of_two_rails_have_no_path() -> None:
    cable_plan = CablePlan.build(cluster(nics_per_server=2, rails=2), rail_only=True)
    rows = {row["hops"]: row["share"] for row in hop_rows(cable_plan)}
    assert rows[0] == 0.5
    assert limits(cable_plan)["bisection_share"] == 1.0


def test_one_server_has_no_pairs() -> None:
    assert hop_rows(CablePlan.build(cluster(servers=1, pods=1, core_switches_per_plane=1))) == []


_PRICES = "[prices]\nswitch = 10\nnic = 2\nnic_cable = 1\nfibre = 0\noptic = 0.5\n"


def test_cost_is_counts_times_prices(tmp_path: Path) -> None:
    prices = load_prices(write(tmp_path / "p.toml", _PRICES + 'currency = "EUR"\n'))
    cable_plan = CablePlan.build(megascale().cluster)
    cost = 512 * 10 + 12_288 * 2 + 6_144 + 24_576 * 0.5
    whole = {"item": "all", "count": 12_288, "unit_price": cost / 12_288, "cost": cost}
    assert part_rows(cable_plan, prices)[-1] == whole | {"currency": "EUR", "without": []}
    own = cable_plan.cluster.model_copy(update={"prices": prices})
    assert part_rows(CablePlan.build(own)) == part_rows(cable_plan, prices)
    assert {row["table"] for row in audit(CablePlan.build(cluster()), prices)} == {"ports", "parts", "hops", "limits"}


def test_a_part_without_a_price_is_named_and_never_free(tmp_path: Path) -> None:
    rows = part_rows(
        CablePlan.build(megascale().cluster), load_prices(write(tmp_path / "p.toml", "[prices]\nswitch = 4\n"))
    )
    assert [(row["item"], row["cost"]) for row in rows] == [
        ("switch", 2048.0),
        ("nic", None),
        ("nic_cable", None),
        ("fibre", None),
        ("optic", None),
        ("all without nic, nic_cable, fibre, optic", 2048.0),
    ]
    assert rows[-1]["currency"] == ""
    assert rows[-1]["without"] == ["nic", "nic_cable", "fibre", "optic"]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("[prices]\nswich = 1\n", "prices.swich: unknown key; did you mean switch?"),
        ("[prices]\nswitch = -1\n", "prices.switch = -1: "),
        ('[prices]\nswitch = "1"\n', "prices.switch = 1: "),
        ("[prices]\nswitch = true\n", "prices.switch = True: "),
        ("[prices]\nswitch = inf\n", "prices.switch = inf: "),
        ("[prices]\ncurrency = 5\n", "prices.currency = 5: "),
        ("switch = 1\n", "one table [prices]"),
        ("[prices\n", "is not TOML"),
    ],
)
def test_prices_that_are_none_are_one_line(tmp_path: Path, text: str, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_prices(write(tmp_path / "p.toml", text))
    assert rule in str(caught.value)


def test_a_missing_price_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_prices(tmp_path / "none.toml")

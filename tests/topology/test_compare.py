import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from netlayer.config.file import load_config
from netlayer.config.tree import Config, build_config
from netlayer.errors import ConfigError
from tests.topology.fabrics import EXAMPLES, cluster, megascale
from topology.ecmp.balance import BALANCES
from topology.ecmp.compare import (
    ALL_TIERS,
    CLOSED_FORM,
    LOADS,
    TRAFFICS,
    USUAL_HASHES,
    USUAL_TRAFFICS,
    compare_split,
    split_by_load,
)
from topology.ecmp.hashing import FIVE_TUPLE
from topology.ecmp.rows import TierCollisions
from topology.fabric.clos import Clos, Tier
from topology.traffic.job import permutation


def _tree(**changes: Any) -> Config:
    tree = cluster(**changes).model_dump()
    parallel = {"dp": tree["servers"] // 2, "pp": 2}
    return build_config(
        {"cluster": tree, "job": {"parallel": parallel, "batch": {"global_batch_size": tree["servers"] * 4}}}
    )


def _pick(rows: list[TierCollisions], **wanted: Any) -> list[TierCollisions]:
    return [row for row in rows if all(getattr(row, key) == value for key, value in wanted.items())]


def test_megascale_collides_less_with_the_split() -> None:
    rows = compare_split(megascale(), seeds=range(4), hashes=["random"])
    for traffic in ("pipeline", "permutation"):
        for source in ("simulated", "predicted"):
            uplinks = _pick(rows, traffic=traffic, source=source, tier="tor-spine")
            with_split, without = sorted(uplinks, key=lambda row: not row.split)
            assert with_split.collision_share < without.collision_share
            assert with_split.excess < 0.8 * without.excess
            assert (with_split.links, without.links) == (6_144, 12_288)
    ring = _pick(rows, traffic="ring", tier=ALL_TIERS)
    assert [(row.flows, row.collisions) for row in ring] == [(192, 0), (192, 0)]


def test_there_is_a_row_for_every_case_and_it_is_json() -> None:
    rows = compare_split(_tree(), seeds=[3, 4])
    columns = [row.to_row() for row in rows]
    assert json.loads(json.dumps(columns, allow_nan=False)) == columns
    assert len(rows) == 2 * len(USUAL_TRAFFICS) * (len(USUAL_HASHES) * 7 + 4)
    assert {row.source for row in _pick(rows, hash_name=CLOSED_FORM)} == {"predicted"}
    assert {tuple(row) for row in columns} == {tuple(columns[0])}
    assert rows == compare_split(_tree(), seeds=[3, 4])


def test_every_hash_is_near_the_closed_form_on_the_permutation() -> None:
    rows = _pick(compare_split(megascale(), seeds=range(3), traffics=["permutation"]), tier="tor-spine", split=True)
    expected = _pick(rows, hash_name=CLOSED_FORM)[0]
    for row in _pick(rows, source="simulated"):
        assert row.excess == pytest.approx(expected.excess, rel=0.05)


def test_queue_pairs_spread_the_excess() -> None:
    excess = [
        _pick(
            compare_split(_tree(), seeds=range(3), traffics=["pipeline"], qps_per_connection=qps),
            tier="tor-spine",
            hash_name="crc16",
            split=True,
        )[0].excess
        for qps in (1, 8)
    ]
    assert excess[1] < excess[0]


def test_every_traffic_and_every_balance_has_its_rows() -> None:
    rows = compare_split(_tree(), seeds=[0], hashes=BALANCES, traffics=TRAFFICS)
    found = {(row.traffic, row.hash_name) for row in rows}
    assert found == {(traffic, name) for traffic in TRAFFICS for name in (*BALANCES, CLOSED_FORM)}
    for row in _pick(rows, source="simulated"):
        assert row.slowdown <= row.max_slowdown
    assert {row.excess for row in _pick(rows, hash_name="spray") if row.tier != Tier.TOR_NIC.label} == {0}
    incast = {row.traffic for row in _pick(rows, tier=Tier.TOR_NIC.label) if row.excess}
    assert incast == {"tree"}  # a parent has two children


def test_collisions_slow_flows_down_and_the_split_helps() -> None:
    uplinks = _pick(
        compare_split(_tree(), seeds=range(4), traffics=["permutation"]), tier=ALL_TIERS, hash_name="random"
    )
    with_split, without = sorted(uplinks, key=lambda row: not row.split)
    assert 1 < with_split.slowdown < without.slowdown


def test_flows_of_a_file_stand_in_for_the_jobs() -> None:
    tree = _tree()
    flows = permutation(Clos.build(tree.cluster), 3)
    rows = compare_split(tree, seeds=[3], hashes=["crc16"], flows=flows)
    assert {row.traffic for row in rows} == {"file"}
    same = compare_split(tree, seeds=[3], hashes=["crc16"], traffics=["permutation"])
    assert [row.excess for row in rows] == [row.excess for row in same]


def test_flows_that_begin_apart_are_not_counted_together(caplog: pytest.LogCaptureFixture) -> None:
    tree = _tree()
    together = permutation(Clos.build(tree.cluster), 3)
    apart = dataclasses.replace(together, start_s=2.0 * np.arange(len(together)))  # a second each
    rows = _pick(compare_split(tree, seeds=[3], hashes=["crc16"], flows=apart), tier="tor-spine")
    assert {(row.flows, row.collision_share) for row in rows} == {(1, 0)}
    assert "of the 1 flows that are under way at 0 s, when they crowd most, of 128" in caplog.text


def test_hashing_the_queue_pair_spreads_what_one_port_gathers() -> None:
    """Eight queue pairs a connection: hashed by addresses alone they stay together, with the QP they spread."""
    excess = [
        _pick(
            compare_split(
                _tree(), seeds=range(3), traffics=["pipeline"], hashes=["random"], qps_per_connection=8, fields=fields
            ),
            tier="tor-spine",
            hash_name="random",
            split=True,
        )[0].excess
        for fields in (["src_ip", "dst_ip"], ["src_ip", "dst_ip", "dst_qpn"], FIVE_TUPLE)
    ]
    assert excess[1] < 0.6 * excess[0]
    assert excess[2] < 0.6 * excess[0]


def test_the_split_helps_most_at_partial_load() -> None:
    rows = split_by_load(megascale().cluster)
    assert len(rows) == 2 * len(LOADS)
    by_load = {(row.split, row.load): row for row in rows}
    gains = [by_load[True, load].collision_share / by_load[False, load].collision_share for load in LOADS]
    assert gains == sorted(gains)
    assert gains[0] < 0.2
    assert gains[-1] > 0.9


@pytest.mark.parametrize(
    ("tree", "rule"),
    [
        (load_config(EXAMPLES / "laptop.toml"), "all traffic stays in one server"),
        (_tree(servers=32, pods=1), "all NICs hang on one ToR"),
    ],
)
def test_a_fabric_that_nothing_crosses_is_refused_in_one_line(tree: Config, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as caught:
        compare_split(tree)
    assert "\n" not in str(caught.value)


def test_bad_arguments_are_value_errors() -> None:
    with pytest.raises(ValueError, match="seeds"):
        compare_split(_tree(), seeds=[])
    with pytest.raises(ValueError, match="'storage'"):
        compare_split(_tree(), traffics=["storage"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="'md5'"):
        compare_split(_tree(), hashes=["md5"])  # type: ignore[list-item]

"""Rows of hashed flows give the columns, in the order and to the digit, that records had when rows were mappings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.topology.test_compare import _tree
from tests.topology.test_graph_load import _flows, diamond
from topology.ecmp.compare import compare_split, split_by_load
from topology.ecmp.graph_load import graph_rows
from topology.ecmp.split_verdict import closed_form, ratios, simulated
from topology.fabric.clos import Clos

GOLDEN = json.loads((Path(__file__).parent / "golden" / "ecmp_rows.json").read_text(encoding="utf-8"))


def rows_of(name: str) -> list[Any]:
    tree = _tree()
    if name == "compare":
        return compare_split(tree, seeds=[0, 1], hashes=["crc16"], traffics=["permutation"])
    if name == "by_load":
        return split_by_load(tree.cluster, (0.5,))
    if name == "graph":
        return graph_rows(diamond(), _flows([(0, 2), (1, 2)]), seeds=range(2), hashes=["crc16"])
    fabrics = {split: Clos.build(tree.cluster.model_copy(update={"aoc_split": split})) for split in (True, False)}
    shares = closed_form(tree.cluster, (0.5, 1.0)) + simulated(fabrics, ["crc16"], [0, 1], (0.5,))
    return ratios(shares) if name == "ratios" else shares


@pytest.mark.parametrize("name", GOLDEN)
def test_records_have_the_same_columns_and_values(name: str) -> None:
    rows = [row.to_row() for row in rows_of(name)]
    assert [list(row) for row in rows] == [list(row) for row in GOLDEN[name]]
    assert json.dumps(rows) == json.dumps(GOLDEN[name])

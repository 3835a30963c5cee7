"""`python -m bench.mfu.blocks` on a CPU: versions in turn, whether they compute the same bits, and bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.mfu.blocks import _HERE, command

OPTIONS = ["--model", "1m", "--layers", "1", "--rounds", "1", "--seconds", "0", "--device", "cpu"]


@pytest.mark.slow
def test_versions_take_turns_and_other_bits_are_seen(tmp_path: Path) -> None:
    other = tmp_path / "other"
    for package in ("netlayer", "collectives", "trainer"):
        shutil.copytree(_HERE / package, other / package, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
    changed = tmp_path / "changed"
    shutil.copytree(other, changed)
    stream = changed / "trainer" / "model" / "gpt.py"
    stream.write_text(stream.read_text().replace("INIT_STD = 0.02", "INIT_STD = 0.03"))
    file = tmp_path / "record.json"
    beside = ["--beside", str(other), "--beside", str(changed)]
    settings = ["--set", "model.fp8=tensorwise", "--out", str(tmp_path), "--json", str(file)]
    result = CliRunner().invoke(command, [*OPTIONS, *beside, *settings], catch_exceptions=False)
    assert result.exit_code == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["version"], row["same_bits"], row["repeats"]) for row in rows] == [
        ("here", True, True),
        ("other", True, True),
        ("changed", False, True),
    ]
    assert all(row["block_ms"] > 0 for row in rows)


def test_a_folder_that_is_no_tree_of_this_project_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, [*OPTIONS, "--beside", str(tmp_path)])
    assert "is no tree of this project; give the folder that holds trainer/" in str(result.exception)

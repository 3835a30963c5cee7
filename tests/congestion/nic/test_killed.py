"""SIGKILL at every call of a change that lasts: a rollback leaves what there was before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.congestion.nic.changes import EXAMPLES
from tests.congestion.nic.simulated import VENDORS

_TOP = Path(__file__).parents[3]


def kill_everywhere(vendor: str, example: str, groups: str) -> dict[str, Any]:
    words = [sys.executable, "-m", "tests.congestion.nic.killed", vendor, example, groups]
    done = subprocess.run(words, cwd=_TOP, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("vendor", "example", "groups"), [("mlx5", "tuned-dcqcn", "groups"), ("irdma", "lossless-dcqcn", "none")]
)
def test_a_killed_change_is_undone(vendor, example, groups):
    found = kill_everywhere(vendor, example, groups)
    assert not found["wrong"]
    assert found["killed"] > 60


@pytest.mark.slow
@pytest.mark.parametrize("groups", ["groups", "none"])
@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("vendor", VENDORS)
def test_a_killed_change_is_undone_on_every_nic(vendor, example, groups):
    found = kill_everywhere(vendor, example, groups)
    assert not found["wrong"]
    assert found["killed"] > 15

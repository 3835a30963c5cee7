"""Workers of pytest-xdist run whole files: a split one makes its module's fixtures, and launches its ranks, twice."""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests import conftest, scheduling

ROOT = Path(__file__).parents[2]


def test_a_file_runs_in_one_worker() -> None:
    files = [f"tests/netlayer/{name}.py" for name in ("test_units", "test_layout", "test_percentile")]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "-n", "2", "--dist", "loadfile", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    workers = defaultdict(set)
    for worker, file in re.findall(r"^\[(gw\d)\] .*? PASSED (\S+?)::", done.stdout, re.MULTILINE):
        workers[file].add(worker)
    assert sorted(workers) == sorted(files), done.stdout + done.stderr
    assert all(len(each) == 1 for each in workers.values()), workers
    assert len(set.union(*workers.values())) == 2


def test_make_test_hands_out_files() -> None:
    assert re.findall(r"--dist (\w+)", (ROOT / "Makefile").read_text(encoding="utf-8")) == ["loadfile", "loadfile"]


def test_files_that_compile_the_simulators_kernels_are_one_unit() -> None:
    one = {"tests/congestion/test_engine.py::test_a[1::2]", "tests/bench/test_sim_speed.py::TestA::test_b"}
    assert len({scheduling.unit_of(each) for each in one}) == 1
    assert scheduling.unit_of("tests/congestion/nic/test_plan.py::test_a") == "tests/congestion/nic/test_plan.py"


def test_files_with_a_place_in_the_order_exist() -> None:
    files = [*(unit for unit in scheduling._LONGEST if "/" in unit), *scheduling._COMPILING]
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_slow_tests_say_how_long_they_take_and_the_five_longest_are_named() -> None:
    tests = {f"tests/a.py::test_{minutes}": minutes for minutes in (0, 2, 3, 4, 5, 6, 19)}

    def marks(minutes: int) -> list[pytest.Mark]:
        return [pytest.mark.slow(minutes=minutes).mark] if minutes else []

    items = [
        SimpleNamespace(nodeid=name, iter_markers=lambda _, minutes=minutes: marks(minutes))
        for name, minutes in tests.items()
    ]
    lines = conftest.pytest_report_collectionfinish(cast(list[pytest.Item], items))
    assert lines[0].startswith("6 of these take longer than a minute each, together about 39 on two idle cores")
    assert lines[1:] == [f"  {minutes} minutes: tests/a.py::test_{minutes}" for minutes in (19, 6, 5, 4, 3)]
    assert conftest.pytest_report_collectionfinish(cast(list[pytest.Item], items[:1])) == []

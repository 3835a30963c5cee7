"""Pytest plugin that adds up the CPU seconds of each test, of the processes that it started too: Linux alone.

    pytest -p tests.cpu_seconds --cpu-seconds seconds.jsonl -n 3 --dist loadfile -m "not slow" tests/trainer

A line a test goes into the file, and the costliest files and functions are printed. CPU seconds hardly depend on what
else a machine does, as times on the clock do. Counted is this process, children that have ended and were waited for,
and living ones with theirs. Not counted: what outlived a killed parent, for nobody waits for it.
"""

from __future__ import annotations

import json
import os
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_TICKS_S = os.sysconf("SC_CLK_TCK")
_NUM_SHOWN = 40


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-seconds", metavar="FILE", help="append the CPU seconds of each test to this file")


def cpu_s() -> tuple[float, float]:
    """Return CPU seconds of this process until now, and of those below it."""
    own, ended = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime, ended.ru_utime + ended.ru_stime + _of_children(os.getpid())


def _of_children(pid: int) -> float:
    total = 0.0
    for threads in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in _read(threads).split():
            # After the name, which may hold spaces: state, then numbers; utime, stime, and those of what it waited for.
            fields = _read(Path(f"/proc/{child}/stat")).rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) / _TICKS_S + _of_children(int(child))
    return total


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # it has ended
        return ""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    file = item.config.getoption("--cpu-seconds")
    before = cpu_s()
    result = yield
    if file:
        own, below = (round(now - then, 3) for now, then in zip(cpu_s(), before, strict=True))
        with Path(file).open("a") as lines:
            lines.write(json.dumps({"test": item.nodeid, "own_s": own, "processes_s": below}) + "\n")
    return result


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    file = config.getoption("--cpu-seconds")
    if not file or not Path(file).exists():
        return
    rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
    for title, separator in (("files", "::"), ("functions", "[")):
        sums = Counter[str]()
        for row in rows:
            sums[row["test"].partition(separator)[0]] += row["own_s"] + row["processes_s"]
        terminalreporter.section(f"CPU seconds of {title}, {sums.total():.0f} in all")
        for name, seconds in sums.most_common(_NUM_SHOWN):
            terminalreporter.write_line(f"{seconds:8.1f} {name}")

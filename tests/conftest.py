"""What holds for every test."""

import gc
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings

from tests.forked import forked_ranks

# A shell without job control starts background jobs with SIGINT ignored, and programs that tests start would inherit
# it: Ctrl-C could then not be tested.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A deadline judges the machine: on a loaded one, an example that is right takes longer than 200 ms.
settings.register_profile("netlayer", deadline=None, max_examples=50)
settings.register_profile("thorough", deadline=None, max_examples=500)  # `make test-slow`
settings.load_profile("netlayer")

_HERE = Path(__file__).parent


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Nobody looks through what is collected for garbage: it stays, and that was a quarter of the tests' own time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that says how long it takes may take six times as long, on a loaded machine, unless it has a timeout."""
    for item in items:
        minutes = minutes_of(item)
        if minutes and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(max(300.0, 6 * 60 * minutes)))


@pytest.hookimpl(optionalhook=True)  # the lab's virtual machine has no workers
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file runs in one worker; all that compile the simulator's kernels in the same one."""
    if config.getoption("dist") != "loadfile":
        return None
    from tests.scheduling import FileScheduling  # which needs pytest-xdist

    return FileScheduling(config, log)


_PACKAGES = ("netlayer.", "topology.", "congestion.", "collectives.", "trainer.", "bench.")
_before = set[str]()
"""Modules that were imported before the test that runs."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    if len(sys.modules) != len(_before):
        _before.clear()
        _before.update(sys.modules)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """A module that is first imported while a test replaces what it takes by name keeps that, for every later test."""
    yield
    if len(sys.modules) == len(_before):
        return
    for name in [name for name in sys.modules if name.startswith(_PACKAGES) and name not in _before]:
        for key, value in vars(sys.modules[name]).items():
            owner = str(getattr(value, "__module__", ""))
            if isinstance(value, mock.NonCallableMock) or owner.startswith("tests."):
                pytest.fail(f"{name}, first imported in {item.name}, keeps its {key}: import it above", pytrace=False)


@pytest.fixture(scope="module", autouse=True)
def _forked_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ranks that a test launches have torch imported already, but in the launcher's own tests."""
    if (_HERE / "netlayer") in request.path.parents:
        yield
        return
    with forked_ranks():
        yield


def minutes_of(item: pytest.Item) -> float:
    """Minutes that a slow test takes on two idle cores, as its mark says; 0 where it says nothing: a minute at most."""
    return max((float(mark.kwargs.get("minutes", 0)) for mark in item.iter_markers("slow")), default=0.0)


def pytest_report_collectionfinish(items: list[pytest.Item]) -> list[str]:
    """Say before slow tests begin how long they take, and name the five longest."""
    long = sorted((item for item in items if minutes_of(item)), key=minutes_of, reverse=True)
    if not long:
        return []
    total = sum(map(minutes_of, long))
    text = f"{len(long)} of these take longer than a minute each, together about {total:.0f} on two idle cores"
    return [f"{text}; the longest:", *(f"  {minutes_of(item):g} minutes: {item.nodeid}" for item in long[:5])]

"""Nothing that stands in for a function during a test is left in a module that the test was the first to import."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests import conftest


@pytest.mark.parametrize("value", [mock.Mock(), lambda: None])
def test_a_module_that_keeps_a_replacement_is_named(value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    item: Any = SimpleNamespace(name="test_x")
    after = conftest.pytest_runtest_teardown(item)
    next(after)
    made = ModuleType("netlayer.made")
    made.check_job = value  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "netlayer.made", made)
    with pytest.raises(pytest.fail.Exception, match=r"netlayer\.made, first imported in test_x, keeps its check_job"):
        next(after)


def test_a_module_that_is_imported_whole_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    item: Any = SimpleNamespace(name="test_x")
    after = conftest.pytest_runtest_teardown(item)
    next(after)
    made = ModuleType("netlayer.made")
    made.fail = pytest.fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "netlayer.made", made)
    with pytest.raises(StopIteration):
        next(after)

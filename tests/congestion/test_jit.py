"""What is kept of kernels while they are compiled, and what a person hears of it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from numba import types
from numba.core import event

from congestion.kernels.jit import compile_progress, count_kernels

SOURCE = """
from congestion.kernels.jit import entry, inlined, kernel

@kernel
def least(a, b):
    return a if a < b else b

@inlined
def twice(a):
    return least(a, a) + a

@kernel
def applied(function, a):
    return function(a)

@entry
def whole(a):
    return applied(twice, a)
"""


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], ModuleType]:
    """The module as another process would load it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("congestion.kernels.jit._WORTH_S", 0.0)
    path = tmp_path / "kernels_of_a_test.py"
    path.write_text(SOURCE)

    def load() -> ModuleType:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, path.stem, module)
        spec.loader.exec_module(module)
        return module

    return load


def kept(tmp_path: Path) -> set[str]:
    return {file.name.split("-")[0].split(".")[1] for file in (tmp_path / "cache").rglob("*.nbc")}


def test_a_killed_process_leaves_what_it_has_compiled(fresh: Callable[[], ModuleType], tmp_path: Path) -> None:
    first = fresh()
    first.twice.compile((types.int64,))  # and then the process ends
    assert kept(tmp_path) == {"least", "twice"}
    second = fresh()
    assert count_kernels(second.whole) == (0, 4)
    assert second.whole(3) == 6
    assert count_kernels(second.whole) == (4, 4)
    assert sum(second.twice.stats.cache_hits.values()) == 1
    assert not second.least.overloads  # it is in what was kept of its caller
    assert kept(tmp_path) == {"whole"}
    third = fresh()
    assert third.whole(3) == 6
    assert sum(third.whole.stats.cache_hits.values()) == 1


class Waits:
    """Stages of which one waits; `progress` is what it would show."""

    progress: Callable[[], tuple[int, int, str]]

    @contextmanager
    def wait(self, name: str, progress: Callable[[], tuple[int, int, str]]) -> Iterator[None]:
        self.progress = progress
        yield


def test_progress_names_the_kernel_and_counts(fresh: Callable[[], ModuleType]) -> None:
    module, stages, shown = fresh(), Waits(), []

    class Ask(event.Listener):
        def on_start(self, event: Any) -> None:
            shown.append(stages.progress())

        def on_end(self, event: Any) -> None:
            pass

    with compile_progress(stages, "kernels"):  # type: ignore[arg-type]
        assert stages.progress()[:2] == (0, 0)
        with event.install_listener("numba:compile", Ask()):
            module.whole(3)
        assert stages.progress()[:2] == (0, 0)
    ours = [words for done, total, words in shown if total]
    assert {words.split(",")[0] for words in ours} == {
        f"kernels_of_a_test.{name}" for name in ("whole", "applied", "twice", "least")
    }
    assert "0 of 4 kernels ready" in ours[0]
    assert [done for done, total, words in shown] == sorted(done for done, total, words in shown)

"""What is heard of a stage where nobody watches: lines as it begins, while it goes on, and as it ends."""

from __future__ import annotations

import time

import pytest

from netlayer import progress
from netlayer.progress import Stages


def test_a_stage_says_how_far_it_is_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    now = iter(range(0, 10_000, 5))
    monkeypatch.setattr(progress, "monotonic", lambda: float(next(now)))
    with Stages() as stages, stages.open("work") as bar:
        for done in range(1, 9):  # each 5 s
            bar(done, 10, f"step {done}")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "work ..."
    assert lines[1:-1] == ["work: 20%, step 2", "work: 40%, step 4", "work: 60%, step 6", "work: 80%, step 8"]
    assert lines[-1].startswith("work done in ")


def test_a_long_stage_says_less_often(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    now = iter(range(0, 100_000, 5))
    monkeypatch.setattr(progress, "monotonic", lambda: float(next(now)))
    with Stages() as stages, stages.open("work") as bar:
        for done in range(2_000):
            bar(done, 2_000)
    said = len(capsys.readouterr().err.splitlines()) - 2
    assert 10_000 / 60 <= said < 10_000 / 60 + 30


def _stopped_in(stages: Stages, name: str) -> None:
    with stages.wait(name):
        time.sleep(0.5)
        raise KeyboardInterrupt


def test_a_stage_that_says_nothing_is_counted_and_a_short_one_is_not_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    with Stages() as stages:
        with stages.wait("short"):
            pass
        assert capsys.readouterr().err == ""
        for name in ("_MOMENT_S", "_TICK_S", "_LINE_S"):
            monkeypatch.setattr(progress, name, 0.001)
        with pytest.raises(KeyboardInterrupt):
            _stopped_in(stages, "long")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "long ..."
    assert lines[1] == "long: 0 s so far"
    assert lines[-1].startswith("long done in ")

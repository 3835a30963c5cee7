"""Steps are timed without waiting in between, and a host that its device waits for is seen, on a made-up device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bench.overlap.steps import StepTimer
from tests.collectives.settings import shard


class Clock:
    """A CUDA device that notes what is asked of it; `reached` is whether it has done all that was launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, reached: bool) -> None:
        self.heard: list[str] = []
        clock = self

        class Event:
            def __init__(self, **_: bool) -> None:
                self.at = 0

            def record(self) -> None:
                self.at = len(clock.heard)
                clock.heard.append("mark")

            def query(self) -> bool:
                return reached

            def elapsed_time(self, end: Any) -> float:
                return 1e3 * float(end.at - self.at)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: clock.heard.append("wait for the device"))

    def barrier(self) -> None:
        self.heard.append("wait for all ranks")


@pytest.mark.parametrize("reached", [False, True])
def test_nothing_waits_between_steps(monkeypatch: pytest.MonkeyPatch, reached: bool) -> None:
    clock = Clock(monkeypatch, reached)
    timer = StepTimer(torch.device("cuda"), clock)  # type: ignore[arg-type]
    steps = timer.measure(lambda number: clock.heard.append(f"step {number}"), 2, warmup=1)
    waits = ["wait for the device", "wait for all ranks"]
    assert clock.heard == [*waits, "step 0", "mark", "step 1", "mark", "step 2", "mark", *waits]
    assert steps == ([2.0, 2.0], reached)


def test_the_gathers_ahead_may_be_changed_between_steps() -> None:
    layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))
    model = shard(layers, units=list(layers), prefetch=1)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    for prefetch in (1, 3, 2):
        model.prefetch = prefetch
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert model.prefetch == prefetch == len(model._gather._works)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        model.prefetch = 0

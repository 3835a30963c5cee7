"""Times steps that are launched one after the other: nothing waits for a device, a host or another rank in between."""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from bench.backends import Control


class Steps(NamedTuple):
    """Seconds of each step on this rank, and whether its device had caught up with its host at the end of them."""

    seconds: list[float]
    host_bound: bool


class StepTimer:
    """Steps of one rank, by events on CUDA, by the host's clock elsewhere."""

    def __init__(self, device: torch.device, control: Control) -> None:
        self.device, self._control = device, control

    def measure(self, step: Callable[[int], object], count: int, warmup: int = 0) -> Steps:
        """`count` steps after `warmup` others; the ranks begin together, and then wait for each other as steps do.

        Args:
            step: launches the step of that number, from 0; the warm-up counts.
        """
        gc.collect()
        self.synchronize()
        marks: list[Any] = []
        with _no_collection():
            for number in range(warmup + count):
                if number == warmup:
                    marks.append(self._mark())
                step(number)
                if number >= warmup:
                    marks.append(self._mark())
            host_bound = self.device.type == "cuda" and bool(marks[-1].query())
            self.synchronize()
        return Steps(_between(marks), host_bound)

    def synchronize(self) -> None:
        """Wait for the device and for all ranks."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self._control.barrier()

    def _mark(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Ranks that collect garbage at different times wait for each other."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _between(marks: list[Any]) -> list[float]:
    """Seconds between neighbouring marks."""
    if isinstance(marks[0], float):
        return [after - before for before, after in itertools.pairwise(marks)]
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)]

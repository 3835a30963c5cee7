"""Remaining time of several runs in turn: each as long as the mean of those done and the one under way."""

from __future__ import annotations

import time

from trainer.commands.train import short_time


class Pace:
    """Pace of `num_runs` runs; time runs from when it is made."""

    def __init__(self, num_runs: int) -> None:
        self._num_runs = num_runs
        self._took_s: list[float] = []
        self._began = time.monotonic()

    def words(self, left_s: float | None) -> str:
        """`; run 2 of 3, 12 min left in all`, where this run will take `left_s` more."""
        done = len(self._took_s)
        text = f"; run {done + 1} of {self._num_runs}"
        if left_s is None:
            return text
        this_s = time.monotonic() - self._began + left_s
        each_s = (sum(self._took_s) + this_s) / (done + 1)
        return f"{text}, {short_time(left_s + each_s * (self._num_runs - done - 1))} left in all"

    def next(self) -> None:
        now = time.monotonic()
        self._took_s.append(now - self._began)
        self._began = now

"""Reader of MLPerf training logs: `:::MLLOG {...}` lines among anything else, with or without a rank before them.

Steps come from `tracked_stats` with `train_step_time` (seconds, ended where the line was written), evaluations and
blocks from their begin and end lines, the run's begin and end and other numbers as marks and counters. Times are
milliseconds since 1970 on the host that wrote the line; one without a rank counts as rank 0's.

Source: github.com/mlcommons/logging, mlperf_logging/mllog.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from netlayer.observe.events import Counter, Event, Mark, Origin, Segment
from netlayer.observe.readers.json_stream import open_text

SOURCE = "mlperf"
_LINE = re.compile(rb"^(?:.*?\b(\d{1,7})\]?: *)?.*?:::MLL(?:OG|v[\d.]+) (\{.*)$", re.DOTALL)
_LONGEST_LINE = 1 << 20
_INTERVALS = {
    "init": ("other", "init"),
    "run": ("other", "run"),
    "block": ("other", "block"),
    "epoch": ("other", "epoch"),
    "eval": ("evaluation", "evaluation"),
    "staging": ("data", "staging"),
}
_STEP_TIMES = ("train_step_time", "train_step_timing", "step_time")
_MOST_TEXT = 200


def is_log(head: str) -> bool:
    """Whether the beginning of a file has such a line."""
    return ":::MLLOG {" in head


def read(path: Path, notes: list[str]) -> Iterator[Event]:
    """The events of a log; lines that are damaged are counted in `notes`.

    Raises:
        ValueError: it has no whole line.
    """
    log, num_good, num_bad = _Log(), 0, 0
    with open_text(path) as file:
        while line := file.readline(_LONGEST_LINE):
            if b":::MLL" not in line:
                continue
            try:
                events = list(log.events(line))
            except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
                num_bad += 1
                continue
            num_good += 1
            yield from events
    if not num_good:
        raise ValueError("holds no whole line of MLPerf's log")
    if num_bad:
        notes.append(f"{path}: {num_bad} lines of MLPerf's log are damaged: skipped")
    if log.begun:
        notes.append(f"{path}: never ended: {', '.join(sorted(log.begun))}")


class _Log:
    """State between lines: begun intervals, and the number of steps so far."""

    def __init__(self) -> None:
        self.begun: dict[str, int] = {}
        self._origins: dict[int, Origin] = {}
        self._num_steps = 0

    def events(self, line: bytes) -> Iterator[Event]:
        match = _LINE.match(line)
        if not match:
            raise ValueError("no line of the log")
        tree = json.loads(match[2])
        rank = int(match[1]) if match[1] else 0
        origin = self._origins.setdefault(rank, Origin(source=SOURCE, rank=rank))
        key, at_ns, value = str(tree["key"]), int(tree["time_ms"]) * 1_000_000, tree.get("value")
        if not 0 <= at_ns < 1 << 63:
            raise ValueError("no time")
        name, _, end = key.rpartition("_")
        if end == "start" and name in _INTERVALS:
            self.begun[name] = at_ns
            if name == "run":
                yield Mark(origin, "run_start", at_ns)
        elif end == "stop" and name in _INTERVALS and name in self.begun:
            segment, word = _INTERVALS[name]
            start_ns = self.begun.pop(name)
            yield Segment(origin, segment, word, start_ns, max(start_ns, at_ns), timing="reported", lane=name)
            if name == "run":
                yield Mark(origin, "run_end", at_ns)
        else:
            yield from self._values(origin, key, at_ns, value, tree.get("metadata"))

    def _values(self, origin: Origin, key: str, at_ns: int, value: Any, metadata: Any) -> Iterator[Event]:
        values: Mapping[str, Any] = value if isinstance(value, dict) else {key: value}
        attributes = {"samples": count} if (count := _samples(metadata)) is not None else None
        for name, number in values.items():
            if isinstance(number, bool) or not isinstance(number, int | float):
                text = None if number is None else str(number)[:_MOST_TEXT]
                yield Mark(origin, f"mlperf.{name}"[:_MOST_TEXT], at_ns, text=text, attributes=attributes)
            elif name in _STEP_TIMES and 0 < number < 1e6:
                self._num_steps += 1
                start_ns = at_ns - round(number * 1e9)
                yield Segment(
                    origin,
                    "step",
                    "step",
                    start_ns,
                    at_ns,
                    step=self._num_steps,
                    timing="reported",
                    attributes=attributes,
                )
            else:
                yield Counter(origin, f"mlperf.{name}"[:_MOST_TEXT], at_ns, at_ns, float(number), attributes=attributes)


def _samples(metadata: Any) -> int | None:
    """Number of samples trained on at a line, where it says."""
    if not isinstance(metadata, dict):
        return None
    values = (metadata.get(key) for key in ("samples_count", "step", "epoch_num"))
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)

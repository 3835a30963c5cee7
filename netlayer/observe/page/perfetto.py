"""Events as a trace for ui.perfetto.dev: a rank is a process, a lane a thread, a counter a track, a send an arrow.

Format: Trace Event Format, "JSON Object Format" (Google, 2016), which Perfetto reads; times in microseconds from
the first event, on the run's reference clock. What `netlayer train --trace` writes of running ranks is
`collectives.watch.trace`; this one reads any evidence. Events are written one by one: a run of any size takes no
memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from netlayer.errors import ConfigError
from netlayer.observe.events import Counter, Event, Mark, Segment, events_of, parse_ranks
from netlayer.observe.page.view import RunView
from netlayer.results import writing

_SPAN = re.compile(r"(\d{1,12})(?:-(\d{1,12}))?")
_NO_RANK = 1 << 24
"""Process of events of a host or a switch as a whole."""


def export_trace(path: Path, view: RunView, steps: str | None, ranks: str | None) -> int:
    """Write steps of a run as a trace; return how many events are in it.

    Args:
        steps: `7`, `3-5`; None: the step that a timeline opens with, or all where no step is known.
        ranks: `0:64:1`, `3,5`; None: all.

    Raises:
        ConfigError: those are no steps or ranks of the run, or the file cannot be written.
    """
    span = _steps(view, steps)
    try:
        chosen = sorted(set(view.ranks) & set(parse_ranks(ranks))) if ranks is not None else view.ranks
    except ValueError:
        chosen = []
    if not chosen:
        raise ConfigError("--ranks", ranks, "names no rank of the run", "give some, such as 0:8:1 or 3,5,9")
    events = (event for batch in view.columns.rows(chosen, span) for event in events_of(batch))
    return write_trace(path, events, view.begin_ns)


def _steps(view: RunView, text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None if view.default_step is None else (view.default_step, view.default_step)
    match = _SPAN.fullmatch(text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if not any(first <= step <= last for step in view.run.steps):
        known = f"{view.run.steps[0]}-{view.run.steps[-1]}" if view.run.steps else "none"
        raise ConfigError("--steps", text, "names no step of the run", f"its steps are {known}")
    return first, last


def write_trace(path: Path, events: Iterable[Event], base_ns: int) -> int:
    """Write a trace, whole or not at all; return how many events are in it.

    Args:
        base_ns: time of the trace's begin, ns since 1970.

    Raises:
        ConfigError: the file cannot be written.
    """
    count = 0
    with writing(path, "--perfetto"):
        pending = path.with_name(f".{path.name}.pending")
        try:
            with pending.open("w", encoding="utf-8") as file:
                file.write('{"displayTimeUnit":"ms","traceEvents":[')
                for row in trace_events(events, base_ns):
                    file.write((",\n" if count else "\n") + json.dumps(row, separators=(",", ":"), allow_nan=False))
                    count += 1
                file.write("\n]}\n")
            pending.replace(path)
        finally:
            pending.unlink(missing_ok=True)
    return count


def trace_events(events: Iterable[Event], base_ns: int) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace; names of processes and threads before the first event of each."""
    threads: dict[tuple[int, str], int] = {}
    flows: dict[tuple[Any, ...], int] = {}
    for event in events:
        rank, host = event.origin.rank, event.origin.host or ""
        process = _NO_RANK if rank is None else rank
        lane = _lane(event)
        if (process, lane) not in threads:
            if not any(known == process for known, _ in threads):
                name = f"rank {rank}" + (f" ({host})" if host else "") if rank is not None else "hosts"
                yield _metadata("process_name", process, 0, {"name": name})
                yield _metadata("process_sort_index", process, 0, {"sort_index": process})
            threads[process, lane] = sum(known == process for known, _ in threads)
            yield _metadata("thread_name", process, threads[process, lane], {"name": lane})
        offset = event.clock_offset_ns or 0
        at_us = (event.start_ns - offset - base_ns) / 1e3
        common = {"pid": process, "tid": threads[process, lane], "ts": at_us}
        if isinstance(event, Segment):
            yield {**common, "ph": "X", "name": _name(event), "cat": event.segment, "dur": event.duration_ns / 1e3,
                   "args": _facts(event)}  # fmt: skip
            yield from _arrow(event, common, flows)
        elif isinstance(event, Mark):
            yield {
                **common,
                "ph": "i",
                "s": "p",
                "name": event.name,
                "args": {"text": event.text or "", "step": event.step},
            }
        elif isinstance(event, Counter):
            yield from _reading(event, common)


def _metadata(name: str, process: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": args}


def _lane(event: Event) -> str:
    if isinstance(event, Segment):
        return event.lane or ("collectives" if event.segment == "collective" else "computation")
    return "marks" if isinstance(event, Mark) else "counters"


def _name(event: Segment) -> str:
    if event.segment == "wait":
        return f"wait in {event.name}"
    return f"{event.name} ({event.group})" if event.group else event.name


def _facts(event: Segment) -> dict[str, Any]:
    names = ("step", "micro_batch", "chunk", "group_ranks", "seq", "bytes", "peer", "timing")
    return {name: value for name in names if (value := getattr(event, name)) is not None}


def _arrow(event: Segment, common: dict[str, Any], flows: dict[tuple[Any, ...], int]) -> Iterator[dict[str, Any]]:
    """Yield the begin of an arrow at a send, the end at its receive."""
    if event.segment != "collective" or event.flow is None or event.name not in ("send", "recv"):
        return
    number = flows.setdefault((event.origin.attempt, event.step, event.flow), len(flows) + 1)
    end_us = common["ts"] + event.duration_ns / 1e3
    where = {"ph": "s", **common} if event.name == "send" else {"ph": "f", "bp": "e", **common, "ts": end_us}
    yield {**where, "id": number, "name": "message", "cat": "message"}


def _reading(event: Counter, common: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if not -1e300 < event.value < 1e300:
        return
    seconds = (event.end_ns - event.start_ns) / 1e9
    value = event.value / seconds if seconds > 0 else event.value
    port = (event.attributes or {}).get("port")
    name = " ".join(filter(None, (event.origin.host if event.origin.rank is None else "", event.name, str(port or ""))))
    unit = f"{event.unit}/s" if seconds > 0 else event.unit or "value"
    at_us = common["ts"] + seconds * 1e6
    yield {"ph": "C", "name": name, "pid": common["pid"], "tid": common["tid"], "ts": at_us, "args": {unit: value}}

"""Traces for ui.perfetto.dev (and chrome://tracing): what every rank computed, sent and received, on one time line.

A rank is a process of the trace, a lane of it a thread; arrows go from a send to its receive. Ranks of one host share
its clock (CLOCK_MONOTONIC, behind `time.perf_counter_ns`), so their times are comparable as they are; clocks of several
hosts are aligned by a few barriers. Format: Trace Event Format, "JSON Object Format" (Google, 2016). Not covered: what
other programs do on the machine.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collectives.clock import shared_ns, union
from collectives.watch.recorder import COMPUTE, STEP, WAIT, Span, StepComm
from netlayer.environ import boot_id
from netlayer.results import write_text

if TYPE_CHECKING:
    import torch.distributed as dist

Event = dict[str, Any]
_FIRST_LANES = (STEP, COMPUTE, WAIT)
_NUM_BARRIERS = 9


@dataclass(frozen=True)
class RankTrace:
    """Spans that one rank has recorded. Picklable: ranks send theirs to the one that writes the file.

    Args:
        rank: global rank.
        spans: on this rank's host clock.
        name: shown next to the rank: `stage 2`.
        offset_ns: subtract it from the clock of this rank to get the clock of the first (`align_clocks`).
    """

    rank: int
    spans: Sequence[Span]
    name: str = ""
    offset_ns: int = 0


@dataclass(frozen=True)
class ClockAlignment:
    """Offset of this rank's clock from that of the group's first rank.

    Args:
        offset_ns: this clock minus that one.
        method: `same host` or `barrier`, in words for the reader of a trace.
        spread_ns: half the range that single estimates had; 0 where the clock is the same.
    """

    offset_ns: int
    method: str
    spread_ns: int = 0


def record_trace(rank: int, steps: Iterable[StepComm], name: str = "", offset_ns: int = 0) -> RankTrace:
    """Return all spans of recorded steps; waits until the device has done them."""
    return RankTrace(rank, [span for step in steps for span in step.spans()], name, offset_ns)


def align_clocks(group: dist.ProcessGroup | None = None) -> ClockAlignment:
    """Compare the clock of this rank with that of the group's first; every rank of the group calls it.

    On one host there is nothing to estimate. On several, all ranks leave a barrier at about the same moment: the median
    of the differences of their clocks then, over a few barriers, is off by about the time a barrier takes to reach them
    (tens of microseconds), which is what `spread_ns` shows.
    """
    import torch.distributed as dist

    world_size = dist.get_world_size(group)
    hosts: list[str | None] = [None] * world_size
    dist.all_gather_object(hosts, boot_id(), group=group)
    if len(set(hosts)) == 1:
        return ClockAlignment(0, "same host: one clock")
    left_ns = []
    for _ in range(_NUM_BARRIERS):
        dist.all_gather_object([None] * world_size, None, group=group)  # returns on the host when all have come
        left_ns.append(time.perf_counter_ns())
    readings: list[list[int]] = [[]] * world_size
    dist.all_gather_object(readings, left_ns, group=group)
    return estimate_offset(readings[0], left_ns)


def estimate_offset(first_ns: Sequence[int], own_ns: Sequence[int]) -> ClockAlignment:
    """The alignment from readings of two clocks at the same moments."""
    differences = [own - first for first, own in zip(first_ns, own_ns, strict=True)]
    spread_ns = (max(differences) - min(differences)) // 2
    return ClockAlignment(round(statistics.median(differences)), "barrier: median of several", spread_ns)


def chrome_trace(ranks: Sequence[RankTrace], about: dict[str, Any] | None = None) -> dict[str, Any]:
    """The trace as an object to be written as JSON; times in microseconds from the first span.

    Args:
        ranks: one or many.
        about: metadata in the file, next to the events: how clocks were aligned, what ran.
    """
    starts = [span.start_ns - trace.offset_ns for trace in ranks for span in trace.spans]
    origin_ns = min(starts, default=0)
    events: list[Event] = []
    flows = _Flows()
    for trace in ranks:
        label = f"rank {trace.rank}" + (f" ({trace.name})" if trace.name else "")
        events.append(_metadata("process_name", trace.rank, 0, name=label))
        events.append(_metadata("process_sort_index", trace.rank, 0, sort_index=trace.rank))
        for tid, (lane, spans) in enumerate(_threads(trace.spans)):
            events.append(_metadata("thread_name", trace.rank, tid, name=lane))
            events.append(_metadata("thread_sort_index", trace.rank, tid, sort_index=tid))
            for span in spans:
                slice_ = _slice(span, trace, tid, origin_ns)
                events.append(slice_)
                flows.note(span, slice_)
    events += flows.events()
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about or {}}


def write_trace(path: Path, ranks: Sequence[RankTrace], about: dict[str, Any] | None = None) -> None:
    """Write `chrome_trace` to a file, whole or not at all; open it in https://ui.perfetto.dev.

    Raises:
        ConfigError: it cannot be written.
    """
    write_text(path, json.dumps(chrome_trace(ranks, about)))


def hidden_share(spans: Sequence[Span], lane_prefix: str, **labels: str | int) -> float | None:
    """Share (0..1) of the time in which lanes of a prefix are busy that lies under computation; None: never busy.

    Args:
        spans: of one rank.
        lane_prefix: `send`, `recv`, `gather`.
        labels: only spans that carry these: `phase="warm-up"`.
    """
    chosen = [span for span in spans if span.lane.startswith(lane_prefix) and span.labels.items() >= labels.items()]
    busy = union((span.start_ns, span.end_ns) for span in chosen)
    total = sum(end - start for start, end in busy)
    under = union((span.start_ns, span.end_ns) for span in spans if span.lane == COMPUTE)
    return shared_ns(busy, under) / total if total else None


class _Flows:
    """Arrows between slices that carry the same flow, from the sending to the receiving one."""

    def __init__(self) -> None:
        self._ends: dict[str, dict[str, Event]] = defaultdict(dict)

    def note(self, span: Span, slice_: Event) -> None:
        if span.flow:
            self._ends[span.flow]["from" if span.name == "send" else "to"] = slice_

    def events(self) -> list[Event]:
        """Return the start and the end of each arrow, as events of Chrome's trace format (`ph` s and f)."""
        events = []
        for number, (flow, ends) in enumerate(self._ends.items()):
            if len(ends) < 2:  # the other rank is not part of the trace
                continue
            common = {"cat": "message", "name": flow, "id": number}
            first, last = ends["from"], ends["to"]
            start = {**common, "ph": "s", "pid": first["pid"], "tid": first["tid"], "ts": first["ts"]}
            # The arrow ends where the receive does: a receive that is posted early begins before its send.
            end_ts = last["ts"] + last["dur"]
            finish = {**common, "ph": "f", "bp": "e", "pid": last["pid"], "tid": last["tid"], "ts": end_ts}
            if end_ts >= first["ts"]:
                events += [start, finish]
        return events


def _slice(span: Span, trace: RankTrace, tid: int, origin_ns: int) -> Event:
    """Return a span as a complete event of Chrome's trace format, in microseconds since `origin_ns`."""
    return {
        "ph": "X",
        "name": _title(span),
        "cat": "compute" if span.lane in _FIRST_LANES else "communication",
        "pid": trace.rank,
        "tid": tid,
        "ts": (span.start_ns - trace.offset_ns - origin_ns) / 1e3,
        "dur": max(0, span.end_ns - span.start_ns) / 1e3,
        "args": span.labels,
    }


def _title(span: Span) -> str:
    if "micro_batch" not in span.labels:
        return span.name
    return f"{span.name} {span.labels['micro_batch']}.{span.labels['chunk']}"


def _metadata(kind: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _threads(spans: Sequence[Span]) -> list[tuple[str, list[Span]]]:
    """Spans by lane, in order of time. Slices of a thread must nest: a lane that overlaps itself gets a second one."""
    by_lane: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_lane[span.lane].append(span)
    threads: list[tuple[str, list[Span]]] = []
    for lane in sorted(by_lane, key=_lane_order):
        rows: list[_Row] = []
        for span in sorted(by_lane[lane], key=lambda span: (span.start_ns, -span.end_ns)):
            row = next((row for row in rows if row.fits(span)), None)
            if row is None:
                rows.append(row := _Row())
            row.add(span)
        threads += [(lane if index == 0 else f"{lane} ({index + 1})", row.spans) for index, row in enumerate(rows)]
    return threads


def _lane_order(lane: str) -> tuple[int, str]:
    return (_FIRST_LANES.index(lane) if lane in _FIRST_LANES else len(_FIRST_LANES)), lane


class _Row:
    """Spans that follow each other or lie inside each other."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._open_ends: list[int] = []

    def fits(self, span: Span) -> bool:
        while self._open_ends and self._open_ends[-1] <= span.start_ns:
            self._open_ends.pop()
        return not self._open_ends or span.end_ns <= self._open_ends[-1]

    def add(self, span: Span) -> None:
        self.spans.append(span)
        self._open_ends.append(span.end_ns)

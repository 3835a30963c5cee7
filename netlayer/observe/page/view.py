"""View of a run for its page: tables, verdicts, who holds it up, and the payload that the page opens with.

Everything here is of one state of the files; `RunView.of` reads them as they are now. What the page needs only on
demand (a timeline, readings) is in `netlayer.observe.page.detail`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netlayer.layout import describe_ranks
from netlayer.observe.blame import Blame
from netlayer.observe.events import Mark, Segment, events_of
from netlayer.observe.page.advice import next_step
from netlayer.observe.page.columns import Columns, Place, Readings, is_hang, newest, places_of
from netlayer.observe.page.payload import pack, pack_levels
from netlayer.observe.page.stopped import LateStep, Sign, Stop, judge_stop
from netlayer.observe.page.tables import run_of
from netlayer.observe.verdicts.judge import judge
from netlayer.observe.verdicts.run import Run
from netlayer.observe.verdicts.straggler import Detection
from netlayer.observe.verdicts.verdict import StartRow, StragglerRow, Verdict
from netlayer.workload.flops import utilisation

Floats = NDArray[np.float64]

DIMENSIONS = {"tp": ("tp",), "cp": ("cp",), "dp": ("dp", "cp"), "dp_replicate": ("dp_replicate",), "pp": ("pp",)}
"""Groups of ranks, and the coordinates that vary inside one: see `netlayer.layout`, [Note: data-parallel groups]."""
_PLACES = ("tp", "pp", "dp", "cp", "dp_replicate")
SLOWER = "slower than its peers"
"""Name of the measure by which stragglers are judged."""
NOT_JUDGED = "difference from its peers (no verdict)"
"""Name of the same where nobody could be judged by it."""
BUSY = "busy (without waits)"
_LIVE_S = 600.0
"""Age of the newest file up to which a run without an end counts as one that runs."""
_LAG_S = 60.0
_PAUSE_S = 30.0
_PAUSE_STEPS = 10.0
"""Pause of a run that goes on, in steps, up to which it counts as one where nobody shows whom the others wait for."""
_NEUTRAL = ("forward", "backward")
_LEAST_SHARE = 0.1
"""Share of a step that a segment takes at least where the page opens with it."""
_MOST_MARKS = 300
_MOST_TEXT = 400
_MOST_FINDINGS = 100


@dataclass(frozen=True)
class Opening:
    """Measure and statistic that the maps open with, and in one line why it is not the comparison with peers."""

    measure: str
    statistic: str
    why: str = ""


@dataclass(frozen=True)
class RunView:
    """State of a run.

    Args:
        title: of the page.
        version: grows with each state.
        run: its tables.
        is_open: cells [step, rank] whose step has no end in the record, of a run that records ends of steps.
        verdicts, detection: of `netlayer observe report`.
        stop: who holds it up at its end.
        blame: of Flight Recorder dumps and RAS output; None: there are none.
        is_live: files are being written to.
    """

    title: str
    version: int
    columns: Columns
    run: Run
    is_open: NDArray[np.bool_]
    verdicts: Sequence[Verdict]
    detection: Detection
    stop: Stop
    blame: Blame | None
    is_live: bool

    @classmethod
    def of(cls, title: str, version: int, columns: Columns, link_gbps: float | None = None) -> RunView:
        """Judge what the columns hold now."""
        run, is_open = run_of(columns)
        if is_open.sum() * 2 > np.isfinite(run.step_s).sum():
            is_open[:] = False  # evidence that knows no steps as such: from the first event to the last
        is_live = time.time() - columns.newest_s < _LIVE_S
        stop = _stop_of(columns, run, is_live)
        hung_ns = stop.still_ns if stop.silent else None
        verdicts, detection = judge(_whole_steps(run, is_open), link_gbps, hung_ns)
        # Judged by whole steps; the tables of the page have the others too.
        lacking = np.full((len(run.steps) - len(detection.relative), len(run.ranks)), np.nan)
        detection = replace(detection, relative=np.vstack([detection.relative, lacking]))
        blame = None
        if hang := [file.path for file in columns.files if is_hang(file)]:
            from netlayer.observe.files import read_files

            blame = read_files(hang)
        return cls(title, version, columns, run, is_open, verdicts, detection, stop, blame, is_live)

    @cached_property
    def measures(self) -> dict[str, tuple[Floats, str]]:
        """Tables [step, rank] that the heat map shows, by name, and their unit."""
        run = self.run
        exists = np.isfinite(run.step_s) & ~self.is_open
        tables = {
            NOT_JUDGED if self._straggler.state == "cannot tell" else SLOWER: (self.detection.relative, "share"),
            "step": (run.step_s, "s"),
            BUSY: (run.own_s, "s"),
        }
        tables = {name: (np.where(exists, times, np.nan), unit) for name, (times, unit) in tables.items()}
        for name, times in run.segments.items():
            tables[name] = (np.where(exists, times, np.nan), "s")
        if run.queued_s.any():
            tables["waiting for a processor"] = (np.where(exists, run.queued_s, np.nan), "s")
        return {name: pair for name, pair in tables.items() if np.isfinite(pair[0]).any()}

    @cached_property
    def _straggler(self) -> Verdict:
        return next(verdict for verdict in self.verdicts if verdict.subject == "straggler")

    @cached_property
    def opening(self) -> Opening | None:
        """Comparison with peers where somebody stands out by it, else how long a pass takes: that accuses nobody.

        None: there is no measure.
        """
        state, line = self._straggler.state, self._straggler.line
        if state in ("found", "suspected") and SLOWER in self.measures:
            return Opening(SLOWER, "mean")
        if not self.measures:
            return None
        step_s = float(np.nanmedian(self.run.step_s)) if np.isfinite(self.run.step_s).any() else 0.0
        medians = ((name, self.run.segments[name]) for name in _NEUTRAL if name in self.measures)
        long = [name for name, times in medians if float(np.nanmedian(times)) >= _LEAST_SHARE * step_s]
        measure = next(iter([*long, "step"]))
        if measure not in self.measures:
            measure = next(iter(self.measures))
        if state == "none":
            return Opening(
                measure, "median", f"No comparison with peers is shown, for by it nobody stands out: {line}."
            )
        return Opening(measure, "median", f"No comparison with peers is shown, for nobody can be judged by it: {line}.")

    @cached_property
    def ranks(self) -> list[int]:
        """All ranks that any evidence names, in order."""
        named = self.places.keys() | set(self.run.ranks)
        if self.blame:
            for finding in self.blame.findings:
                named |= {*finding.ranks, *finding.waiting}
        return sorted(rank for rank in named if rank >= 0)

    @cached_property
    def hosts(self) -> dict[int, str]:
        """Host of each rank that is known to be on one in the last start with steps, else in the newest."""
        attempt = max(self.run.attempts, default=-1)
        hosts = {
            rank: of_starts.get(attempt, (None,))[0] if attempt >= 0 else newest(of_starts)[0]
            for rank, of_starts in self.places.items()
        }
        return {rank: str(host) for rank, host in hosts.items() if host}

    @cached_property
    def places(self) -> dict[int, dict[int, Place]]:
        """Host and coordinates of each rank by start, as `FileColumns.places`."""
        return places_of(self.columns.files)

    @cached_property
    def stragglers(self) -> tuple[StragglerRow, ...]:
        """Rows of slow ranks, confirmed or not."""
        return tuple(row for verdict in self.verdicts for row in verdict.rows if isinstance(row, StragglerRow))

    @property
    def mfu(self) -> Floats:
        """Model FLOPs utilisation of each step by its median rank; NaN where the job's FLOPs or peak are not known."""
        facts, num = self.run.facts, len(self.run.steps)
        flops, peak, world = (facts.get(key) for key in ("flops_per_step_full", "peak_flops", "world_size"))
        numbers = isinstance(flops, int | float) and isinstance(peak, int | float) and isinstance(world, int)
        if not numbers or not num or peak <= 0 or world < 1:  # type: ignore[operator]
            return np.full(num, np.nan)
        seconds = row_medians(np.where(self.is_open, np.nan, self.run.step_s))
        values = [utilisation(float(flops), each, float(peak), world) if each > 0 else None for each in seconds]  # type: ignore[arg-type]
        return np.array([np.nan if value is None else value for value in values])

    @cached_property
    def checkpoint(self) -> Mark | None:
        """Mark of the newest checkpoint that the record knows: one that became good, or that the last start resumed."""
        marks = (mark for file in self.columns.files for mark in file.marks if mark.origin.rank is not None)
        known = (mark for mark in marks if mark.name in ("checkpoint", "run_start") and (mark.step or 0) > 0)
        return max(known, key=lambda mark: mark.start_ns, default=None)

    @property
    def default_step(self) -> int | None:
        """Step that a timeline opens with: the one in which the run stands still, else the last that is whole."""
        steps = self.run.steps
        if not steps or self.stop.silent:
            return steps[-1] if steps else None
        num = (np.isfinite(self.run.step_s) & ~self.is_open).sum(axis=1)
        whole = np.flatnonzero(num == num.max())
        return steps[int(whole[-1])]

    def group(self, dimension: str, rank: int) -> list[int]:
        """Ranks of a group of `DIMENSIONS` that a rank is in, in their order; empty where no layout is known."""
        known = self._coordinates
        own = known.get(rank)
        if own is None:
            return []
        inside = [_PLACES.index(name) for name in DIMENSIONS[dimension]]
        same = [at for at in range(len(_PLACES)) if at not in inside]
        members = [
            ([place[at] for at in inside], other)
            for other, place in known.items()
            if all(place[at] == own[at] for at in same)
        ]
        return [other for _, other in sorted(members)]

    @cached_property
    def _coordinates(self) -> dict[int, tuple[int, ...]]:
        """Return `_PLACES` of each rank; empty where one of them has no stage or data-parallel place."""
        _, places = self._places()
        rows = list(zip(*(places[name] for name in _PLACES), strict=True))
        if any(stage < 0 or dp < 0 for _, stage, dp, *_ in rows):
            return {}
        return dict(zip(self.ranks, rows, strict=True))

    def overview(self) -> bytes:
        """Return the payload that the page opens with: all of the run but its single steps and events."""
        ranks, run = self.ranks, self.run
        hosts, places = self._places()
        names = sorted(set(hosts))
        host_of = {name: number for number, name in enumerate(names)}
        arrays: dict[str, NDArray[Any]] = {
            "ranks": np.array(ranks, np.int32),
            "host": np.array([host_of[host] for host in hosts], np.int32),
            **{name: np.array(values, np.int32) for name, values in places.items()},
            "steps": np.array(run.steps, np.int32),
            "attempt": np.array(run.attempts, np.int32),
            "step_end_s": (np.array(run.step_end_ns, float) - self.begin_ns) / 1e9,
            "mfu": self.mfu.astype(np.float32),
            **self._by_step(),
        }
        column = np.full(len(ranks), -1)
        column[np.searchsorted(ranks, list(run.ranks))] = np.arange(len(run.ranks))
        measures, titles = [], list(self.measures)
        for number, (name, (table, unit)) in enumerate(self.measures.items()):
            measures.append({"name": name, "unit": unit})
            for key, values in statistics(table).items():
                arrays[f"{key}{number}"] = _spread(values, column).astype(np.float32)
        arrays |= self._waits()
        facts = {
            "title": self.title,
            "version": self.version,
            "live": self.is_live,
            "hosts": names,
            "layout": self.run.facts.get("layout"),
            "facts": {key: value for key, value in run.facts.items() if key != "layout"},
            "measures": measures,
            "busy": titles.index(BUSY) if BUSY in titles else None,
            "opening": asdict(self.opening) | {"measure": titles.index(self.opening.measure)} if self.opening else None,
            "verdicts": [self._verdict(verdict) for verdict in self.verdicts],
            "stragglers": [asdict(row) for row in self.stragglers],
            "stop": {
                "state": self.stop.state,
                "line": self._with_host(self.stop.line),
                "silent": self.stop.silent,
                "alike": self.stop.alike,
                "silence_s": self.stop.silence_s,
                "until_s": (self.stop.still_ns[1] - self.begin_ns) / 1e9 if self.stop.still_ns else None,
            },
            "checkpoint_step": self.checkpoint.step if self.checkpoint else None,
            "num_whole_steps": len(_whole_steps(run, self.is_open).steps),
            "next": next_step(self),
            "hang": self._hang(),
            "starts": [asdict(row) for verdict in self.verdicts for row in verdict.rows if isinstance(row, StartRow)],
            "spans": [self._span(number) for number in range(len(run.starts))],
            "marks": self.marks(),
            "counters": self.counters(),
            "default_step": self.default_step,
            "begin_ns": str(self.begin_ns),
            "kinds": self._kinds(),
            "notes": [*self.columns.notes, *run.notes][:100],
        }
        return pack(facts, arrays)

    def levels(self, number: int) -> bytes:
        """Return the payload of a measure's table [rank, step] as levels.

        Raises:
            LookupError: there is no such measure.
        """
        name, (table, unit) = list(self.measures.items())[number]
        levels, low, high = pack_levels(np.ascontiguousarray(table.T))
        return pack({"name": name, "unit": unit, "low": low, "high": high, "version": self.version},
                    {"levels": levels, "ranks": np.array(self.run.ranks, np.int32)})  # fmt: skip

    @cached_property
    def begin_ns(self) -> int:
        """Begin of the run, from which times on the page count."""
        first = [start.at_ns for start in self.run.starts]
        first += [int(file.segments["start_ns"].min()) for file in self.columns.files
                  if file.segments and len(file.segments["start_ns"])]  # fmt: skip
        first += [mark.start_ns for file in self.columns.files for mark in file.marks[:1] if mark.start_ns]
        first += [int(one.start_ns[0]) for file in self.columns.files for one in file.readings if one.start_ns[0]]
        return min(first, default=0)

    def marks(self) -> list[dict[str, Any]]:
        """Marks of interest; those that all ranks say alike are one."""
        rows: dict[tuple[Any, ...], list[Mark]] = {}
        for mark in self.run.marks:
            text = (mark.text or describe_facts(mark.attributes))[:_MOST_TEXT]
            host = "" if mark.origin.rank is not None else mark.origin.host or ""
            rows.setdefault((mark.name, mark.step, mark.origin.attempt, host, text), []).append(mark)
        result = []
        for (name, step, attempt, host, text), marks in list(rows.items())[:_MOST_MARKS]:
            ranks = sorted({mark.origin.rank for mark in marks if mark.origin.rank is not None})
            row = {"name": name, "step": step, "attempt": attempt, "host": host, "text": text}
            row |= {"ranks": describe_ranks(ranks) if ranks else "", "rank": ranks[0] if ranks else None}
            row |= {"at_s": (marks[0].start_ns - self.begin_ns) / 1e9, "source": marks[0].origin.source}
            row["facts"] = describe_facts(marks[0].attributes)[:_MOST_TEXT] if marks[0].text else ""
            result.append(row)
        return result

    def _places(self) -> tuple[list[str], dict[str, list[int]]]:
        """Host of each rank, and its coordinates; -1: not known."""
        layout = self.run.facts.get("layout")
        replicas, degree = (layout.get(name) for name in ("dp_replicate", "dp")) if isinstance(layout, dict) else (1, 1)
        hosts: list[str] = []
        places: dict[str, list[int]] = {name: [] for name in _PLACES}
        for rank in self.ranks:
            host, *numbers = newest(self.places.get(rank))
            hosts.append(str(host or ""))
            for name, value in zip(_PLACES, (*numbers, None), strict=True):
                places[name].append(value if isinstance(value, int) else -1)
            # An event's `dp` counts the parts of a batch through all replicas, which follow each other.
            if (
                isinstance(replicas, int)
                and isinstance(degree, int)
                and replicas > 1
                and places["dp"][-1] >= 0 < degree
            ):
                places["dp_replicate"][-1], places["dp"][-1] = divmod(places["dp"][-1], degree)
        return hosts, places

    def _by_step(self) -> dict[str, NDArray[Any]]:
        step_s, own_s = (np.where(self.is_open, np.nan, times) for times in (self.run.step_s, self.run.own_s))
        result: dict[str, NDArray[Any]] = {"step_median_s": row_medians(step_s).astype(np.float32)}
        result["own_median_s"] = row_medians(own_s).astype(np.float32)
        largest = np.where(np.isfinite(own_s), own_s, -np.inf).max(axis=1, initial=-np.inf)
        result["own_largest_s"] = np.where(np.isfinite(largest), largest, np.nan).astype(np.float32)
        return result

    def _waits(self) -> dict[str, NDArray[Any]]:
        """Rank that each of `ranks` waits for (-1: none), and how many are between."""
        root, between = np.full(len(self.ranks), -1, np.int32), np.full(len(self.ranks), -1, np.int32)
        at = {rank: number for number, rank in enumerate(self.ranks)}
        for rank, (other, distance) in self.stop.waiting.items():
            root[at[rank]], between[at[rank]] = other, distance
        for finding in self.blame.findings if self.blame else ():
            for rank in finding.waiting:
                if finding.ranks and rank in at:
                    root[at[rank]], between[at[rank]] = finding.ranks[0], 0
        return {"waits_for": root, "between": between}

    def _with_host(self, line: str) -> str:
        """Line about one silent rank, with its host where that is known."""
        if len(self.stop.silent) != 1:
            return line
        [rank] = self.stop.silent
        host = self.hosts.get(rank)
        return (
            line.replace(f"rank {rank} ", f"rank {rank} ({host}) ", 1)
            if host and line.startswith(f"rank {rank} ")
            else line
        )

    def _verdict(self, verdict: Verdict) -> dict[str, Any]:
        rows = [] if isinstance(verdict.rows and verdict.rows[0], StragglerRow | StartRow) else verdict.rows[:20]
        return {"subject": verdict.subject, "state": verdict.state, "line": verdict.line,
                "rows": [asdict(row) for row in rows]}  # fmt: skip

    def _hang(self) -> dict[str, Any] | None:
        if self.blame is None:
            return None
        from netlayer.observe.command import headlines

        findings = [
            {"kind": one.kind, "ranks": one.ranks, "line": one.line, "certain": one.certain, "group": one.group,
             "collective": one.collective, "waiting": len(one.waiting)}
            for one in self.blame.findings[:_MOST_FINDINGS]
        ]  # fmt: skip
        return {"lines": headlines(self.blame), "findings": findings, "notes": list(self.blame.notes)[:20]}

    def _span(self, number: int) -> dict[str, Any]:
        start = self.run.starts[number]
        return {
            "attempt": start.attempt,
            "from_s": (start.at_ns - self.begin_ns) / 1e9,
            "to_s": (start.last_ns - self.begin_ns) / 1e9,
            "first_step_s": None if start.first_ns is None else (start.first_ns - self.begin_ns) / 1e9,
            "ended": start.ended,
        }

    def counters(self) -> list[dict[str, Any]]:
        """Counters by name: unit, number of series, and readings."""
        rows: dict[str, dict[str, Any]] = {}
        for one in self.readings:
            row = rows.setdefault(one.name, {"name": one.name, "unit": one.unit, "series": 0, "readings": 0})
            row["series"] += 1
            row["readings"] += len(one.values)
        return sorted(rows.values(), key=lambda row: str(row["name"]))

    @cached_property
    def readings(self) -> list[Readings]:
        """Readings by counter, rank, host and port; those of several files, as of several starts, are one series."""
        parts: dict[tuple[Any, ...], list[Readings]] = {}
        for one in (readings for file in self.columns.files for readings in file.readings):
            parts.setdefault((one.name, one.rank, one.host, one.port, one.unit), []).append(one)
        result = []
        for series in parts.values():
            if len(series) == 1:
                result.append(series[0])
                continue
            start_ns, end_ns, values = (
                np.concatenate([getattr(one, name) for one in series]) for name in ("start_ns", "end_ns", "values")
            )
            order = np.argsort(end_ns, kind="stable")
            result.append(replace(series[0], start_ns=start_ns[order], end_ns=end_ns[order], values=values[order]))
        return result

    def _kinds(self) -> dict[str, int]:
        kinds: dict[str, int] = {}
        for file in self.columns.files:
            if file.kind:
                kinds[file.kind] = kinds.get(file.kind, 0) + 1
        return kinds


def _whole_steps(run: Run, is_open: NDArray[np.bool_]) -> Run:
    """Tables without the steps at the end that no rank has ended: what they hold is no time of a step."""
    num = len(run.steps)
    while num > 1 and is_open[num - 1].any() and is_open[num - 1][np.isfinite(run.step_s[num - 1])].all():
        num -= 1
    cut = slice(num)
    return replace(
        run, steps=run.steps[cut], step_s=run.step_s[cut], own_s=run.own_s[cut], queued_s=run.queued_s[cut],
        segments={name: times[cut] for name, times in run.segments.items()}, step_end_ns=run.step_end_ns[cut],
        attempts=run.attempts[cut],
    )  # fmt: skip


def _stop_of(columns: Columns, run: Run, is_live: bool) -> Stop:
    """Judge the end of the last start, by the rows of its last two steps."""
    if not run.starts or not run.steps:
        return Stop("cannot tell", "no step is recorded")
    attempt = max(run.attempts)
    ends = sum(mark.name == "run_end" and (mark.origin.attempt or 0) == attempt
               for file in columns.files for mark in file.marks)  # fmt: skip
    last: dict[int, int] = {}
    segments: list[Segment] = []
    # An earlier start may have come further than the one that resumed from a checkpoint.
    newest = max(step for step, of_step in zip(run.steps, run.attempts, strict=True) if of_step == attempt)
    for batch in (batch for file in columns.files for batch in file.tail):
        segments += _late(batch, newest, attempt)
    for event in segments:
        rank = event.origin.rank
        assert rank is not None
        assert event.step is not None
        last[rank] = max(event.step, last.get(rank, 0))
    segments = [event for event in segments if (event.step or 0) >= last[event.origin.rank or 0] - 1]
    signs: dict[int, Sign] = {}
    for file in columns.files:
        for rank, sign in file.signs.items():
            signs[rank] = max(sign, signs.get(rank, sign), key=lambda one: one.at_ns)
    until_ns, is_now = max((file.last_ns for file in columns.files), default=0), False
    # Files that are written as things happen say by their age that nothing happens any more.
    if is_live and abs(columns.newest_s - until_ns / 1e9) < _LAG_S:
        until_ns, is_now = max(until_ns, round(columns.read_s * 1e9)), True
    step_s = float(np.nanmedian(run.step_s)) if np.isfinite(run.step_s).any() else 0.0
    is_whole = any(file.has_whole_steps for file in columns.files)
    late = _late_steps(columns, attempt) if is_whole else None
    stop = judge_stop(
        segments,
        until_ns,
        step_s,
        ended=ends * 2 >= len(run.ranks),
        last_sign_ns={rank: sign.at_ns for rank, sign in signs.items()},
        late_steps=late,
        clock_error_ns=_clock_error(signs, places_of(columns.files), attempt),
    )
    last_ns = max((place.last_ns for place in stop.places.values()), default=until_ns)
    pause_s = (until_ns - last_ns) / 1e9
    if is_now and stop.state == "cannot tell" and pause_s < max(_PAUSE_S, _PAUSE_STEPS * step_s):
        # A checkpoint, an evaluation or a slow file system is not in the record before it is over.
        line = f"the run goes on, or pauses: the last operation in the record ended {pause_s:.0f} s ago"
        return replace(stop, state="running", line=line)
    return stop


def _clock_error(signs: Mapping[int, Sign], places: Mapping[int, Mapping[int, Place]], attempt: int) -> int | None:
    """Return how far apart the clocks of ranks that gave signs may be at most, ns; None: they were not compared."""
    known_places = (places.get(rank, {}) for rank in signs)
    # A rank that has recorded nothing in this start is on the host that it was on last.
    hosts = {(of_rank.get(attempt) or of_rank.get(max(of_rank, default=0)) or (None,))[0] for of_rank in known_places}
    if len(hosts) < 2 and hosts != {None} and hosts != {""}:
        return 0  # one host has one clock
    errors = [sign.error_ns for sign in signs.values()]
    known = [error for error in errors if error is not None]
    return 2 * max(known, default=0) if len(known) == len(errors) else None


def _late_steps(columns: Columns, attempt: int) -> dict[int, LateStep]:
    """Newest mark of each rank that says that its step of a start is late."""
    late: dict[int, LateStep] = {}
    for (of_attempt, rank), mark in (pair for file in columns.files for pair in file.late_steps.items()):
        if of_attempt == attempt:
            late[rank] = max(mark, late.get(rank, mark), key=lambda one: (one.step, one.at_ns))
    return late


def _late(batch: Any, newest: int, attempt: int) -> list[Segment]:
    """Segments of a batch in the last steps of a start; a rank may be a few steps behind the others."""
    import pyarrow.compute as pc

    mask = pc.and_(pc.greater_equal(batch["step"], newest - 3), pc.equal(pc.fill_null(batch["attempt"], 0), attempt))
    return [event for event in events_of(batch.filter(pc.fill_null(mask, False))) if isinstance(event, Segment)]


def statistics(table: Floats) -> dict[str, Floats]:
    """Mean, median, 99th percentile and trend of each rank over the steps of a table [step, rank].

    The trend is the slope of a line through the steps, as what it adds from the first to the last of them: seconds, or
    for shares a share.
    """
    num_steps, num_ranks = table.shape
    known = np.isfinite(table)
    count = known.sum(axis=0)
    filled = np.where(known, table, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(count > 0, filled.sum(axis=0) / count, np.nan)
        at = np.where(known, np.arange(num_steps, dtype=float)[:, None], 0.0)
        middle = at.sum(axis=0) / count
        offset = np.where(known, at - middle, 0.0)
        slope = (offset * (filled - mean)).sum(axis=0) / (offset**2).sum(axis=0)
    median, p99 = quantiles = np.full((2, num_ranks), np.nan)
    whole = count == num_steps
    if whole.any():
        quantiles[:, whole] = np.quantile(table[:, whole], (0.5, 0.99), axis=0)
    for column in np.flatnonzero((count > 0) & ~whole):
        quantiles[:, column] = np.quantile(table[known[:, column], column], (0.5, 0.99))
    trend = np.where(count > 2, slope * (num_steps - 1), np.nan)
    return {"mean": mean, "median": median, "p99": p99, "trend": trend}


def row_medians(times: Floats) -> Floats:
    """Median of each step over the ranks; NaN where there is none."""
    if not times.size:
        return np.full(len(times), np.nan)
    empty = np.asarray(~np.isfinite(times).any(axis=1))
    filled = np.where(empty[:, None], 0.0, times)
    return np.where(empty, np.nan, np.nanmedian(filled, axis=1))


def _spread(values: Floats, column: NDArray[Any]) -> Floats:
    """Values of the tables' columns for all ranks of the page."""
    return np.where(column >= 0, values[np.maximum(column, 0)], np.nan)


def describe_facts(attributes: Mapping[str, Any] | None) -> str:
    """Attributes of a mark in one line."""
    return ", ".join(f"{key} {value}" for key, value in (attributes or {}).items() if value is not None)


def title_of(paths: Sequence[Path]) -> str:
    """Name of what is looked at, for a page's title."""
    first = paths[0].absolute().name or str(paths[0])
    return first if len(paths) == 1 else f"{first} and {len(paths) - 1} more"


Progress = Callable[[int, int], None]

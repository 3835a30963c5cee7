"""Tables of what the events of a run say: times by step and rank, collectives, starts of the run, traffic of ports.

The events are read once. What is kept grows with steps times ranks, not with the number of events; `last_steps` bounds
it for long runs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as CountOf
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from netlayer.observe.events import Counter, Event, Mark, Segment
from netlayer.observe.events.schema import PROCESSOR_WAIT

if TYPE_CHECKING:
    import pyarrow as pa

Times = np.ndarray[Any, np.dtype[np.float64]]

COMPUTE = ("forward", "backward", "weights", "optimizer")
PLANNED = ("checkpoint", "evaluation")
ROUTINE = ("checkpoint", "clock", "late", "run_start", "run_end")
"""Marks of a run that goes well."""
HOST = ("data", "gc", *PLANNED)
SEGMENTS = (*COMPUTE, *HOST, "wait", "collective")
"""Segments whose seconds are kept by step and rank."""
_FEW_STEPS = 0.1
_BATCH = 1 << 14
_MOST_MARKS = 10_000
_MOST_READINGS = 2_000_000


@dataclass
class Start:
    """One start of the run: its first `run_start` or `restart` mark, and what it did.

    Args:
        attempt: its number, 0 the first one.
        at_ns: the mark; of a run without marks its first step's begin.
        is_marked: it has such a mark.
        first_step, last_step: steps that it took; None: none.
        first_ns: begin of its first step; None: it took none.
        last_ns: end of the last thing that it recorded.
        ended: it ended as intended.
        lost_s: in steps that a later start took again, on the rank that took longest.
        planned_s: seconds of checkpoints and evaluations after its first step and outside of steps, on the rank that
            took longest.
    """

    attempt: int
    at_ns: int
    first_step: int | None = None
    last_step: int | None = None
    first_ns: int | None = None
    last_ns: int = 0
    ended: bool = False
    is_marked: bool = False
    lost_s: float = 0.0
    planned_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Traffic:
    """Bytes that a port moved: `bytes_moved[i]` between `start_ns[i]` and `end_ns[i]`."""

    port: str
    start_ns: np.ndarray[Any, np.dtype[np.int64]]
    end_ns: np.ndarray[Any, np.dtype[np.int64]]
    bytes_moved: Times


@dataclass(frozen=True)
class Run:
    """Tables of a run; every table of times is [step, rank] in seconds, NaN where nothing is recorded.

    Args:
        steps, ranks: numbers of rows and columns.
        hosts, stages: of each rank, "" and None if not known.
        step_s: whole steps.
        own_s: steps without waits for other ranks.
        queued_s: part of the own time in which the rank was ready and had no processor; zero where nobody counted it.
        shares_processors: ranks compute on a host's processors beside others, and nobody counted that.
        is_reported: another program timed the steps, and nobody counted what ranks waited for a processor.
        segments: seconds in each class of segments; of computation without the waits inside.
        step_end_ns: [step], end of the step on the rank that ended it last.
        attempts: [step], the start of the run in which it was taken last.
        collectives: of `split_collectives`, without those outside of steps; None where there are none.
        starts: each start of the run.
        marks: of interest to a person, in order.
        num_marks: how many there are of each name.
        traffic: of each port whose counters were read.
        hosts: of each rank, in its newest start.
        host_since: first step from which on a rank took all its steps on that host; empty: no rank moved.
        facts: attributes of the first `run_start` that has a layout, else of the last.
        notes: what is missing, one line each.
    """

    steps: Sequence[int]
    ranks: Sequence[int]
    hosts: Sequence[str]
    stages: Sequence[int | None]
    step_s: Times
    own_s: Times
    queued_s: Times
    segments: dict[str, Times]
    step_end_ns: Sequence[int]
    attempts: Sequence[int]
    collectives: pa.Table | None
    starts: Sequence[Start]
    marks: Sequence[Mark]
    num_marks: CountOf[str]
    traffic: Sequence[Traffic]
    facts: dict[str, Any]
    notes: Sequence[str] = ()
    shares_processors: bool = False
    is_reported: bool = False
    host_since: Sequence[int] = ()

    def host_of(self, column: int, since_step: int) -> str:
        """Host on which a rank took all its steps from one on; empty: it has moved since, or it is not known."""
        moved = column < len(self.host_since) and since_step < self.host_since[column]
        return "" if moved else self.hosts[column]

    def name(self, column: int, since_step: int | None = None) -> str:
        """A rank with its host from a step on (None: from the first): `rank 3 (host a)`."""
        host = self.host_of(column, self.steps[0] if since_step is None else since_step)
        return f"rank {self.ranks[column]}" + (f" ({host})" if host else "")


@dataclass
class _Cell:
    """One rank in one step."""

    attempt: int = 0
    start_ns: int = 0
    end_ns: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    first_ns: int = 1 << 62
    last_ns: int = 0
    on_host: bool = False
    is_reported: bool = False
    queued_s: float | None = None
    queued_before_s: float = 0.0
    parts: list[tuple[str, int, int]] = field(default_factory=list)
    """Segments of computation, and waits: which may lie inside them."""

    def waited_within(self, name: str) -> float:
        """Seconds of the segments of a class in which the rank waited for others."""
        waits = [(begin, end) for part, begin, end in self.parts if part == "wait"]
        own = [(begin, end) for part, begin, end in self.parts if part == name]
        inside_ns = (min(one[1], wait[1]) - max(one[0], wait[0]) for one in own for wait in waits)
        return sum(max(0, length) for length in inside_ns) / 1e9


def first_step_on(
    host: str | None, hosts: Mapping[int, str | None], steps: Sequence[int], attempts: Sequence[int]
) -> int:
    """Return the first step from which on a rank took all its steps on a host.

    Args:
        hosts: of the rank by start.
        steps, attempts: steps in order, and the start in which the rank took each; -1: it did not.
    """
    if all(hosts.get(attempt) == host for attempt in set(attempts) if attempt >= 0):
        return steps[0] if steps else 0
    first = steps[-1] + 1 if steps else 0
    for step, attempt in zip(reversed(steps), reversed(attempts), strict=True):
        if attempt >= 0 and hosts.get(attempt) != host:
            break
        first = step
    return first


def collect(events: Iterable[Event], last_steps: int | None = None) -> Run:
    """Read events into tables.

    Args:
        last_steps: keep the last steps alone; None: all.
    """
    collector = _Collector(last_steps)
    for event in events:
        if isinstance(event, Segment):
            collector.segment(event)
        elif isinstance(event, Mark):
            collector.mark(event)
        else:
            collector.counter(event)
    return collector.run()


class _Collector:
    def __init__(self, last_steps: int | None) -> None:
        self._last_steps = last_steps
        self._cells: dict[int, dict[int, _Cell]] = defaultdict(dict)  # by step and rank
        self._hosts: dict[int, dict[int, str]] = defaultdict(dict)  # by rank and start; "": it differs inside one
        self._stages: dict[int, int] = {}
        # Of each start and rank: checkpoints, evaluations and garbage collections outside of steps.
        self._outside: dict[tuple[int, int], list[tuple[str, int, int]]] = defaultdict(list)
        self._lost_ns: CountOf[tuple[int, int]] = CountOf()  # steps that were taken again, by start and rank
        self._batch: list[Event] = []
        self._tables: list[Any] = []
        self._starts: dict[int, Start] = {}
        self._marks: list[Mark] = []
        self._num_marks: CountOf[str] = CountOf()
        self._readings: dict[str, list[tuple[int, int, float]]] = defaultdict(list)
        self._num_readings = 0
        self._facts: dict[str, Any] = {}

    def segment(self, event: Segment) -> None:
        """Take a segment in: into its step's cell, or beside the steps of its rank."""
        rank = event.origin.rank
        if rank is None:
            return
        attempt = event.origin.attempt or 0
        self._place(event, rank, attempt)
        start = self._starts.setdefault(attempt, Start(attempt, event.start_ns))
        start.last_ns = max(start.last_ns, event.end_ns)
        if event.step is None:
            if event.segment in (*PLANNED, "gc"):
                self._outside[attempt, rank].append((event.segment, event.start_ns, event.end_ns))
            return
        self._add(event, event.step, rank, attempt)
        if event.segment == "step":
            start.first_step = event.step if start.first_step is None else min(start.first_step, event.step)
            start.last_step = max(start.last_step or event.step, event.step)
            start.first_ns = event.start_ns if start.first_ns is None else min(start.first_ns, event.start_ns)
        elif event.segment == "collective":
            self._batch.append(event)
            if len(self._batch) >= _BATCH:
                self._flush()
        if self._last_steps is not None and len(self._cells) > 2 * self._last_steps:
            self._forget()

    def _place(self, event: Segment, rank: int, attempt: int) -> None:
        if event.origin.host:
            of_starts = self._hosts[rank]
            if of_starts.setdefault(attempt, event.origin.host) != event.origin.host:
                of_starts[attempt] = ""
        if event.origin.pp is not None:
            self._stages.setdefault(rank, event.origin.pp)

    def _cell(self, step: int, rank: int, attempt: int) -> _Cell | None:
        """A rank's step: one that was taken again counts as it was then; None: of an earlier start."""
        cell = self._cells[step].get(rank)
        if cell is None or attempt > cell.attempt:
            if cell is not None:
                self._lost_ns[cell.attempt, rank] += cell.end_ns - cell.start_ns
            cell = self._cells[step][rank] = _Cell(attempt)
        return cell if attempt == cell.attempt else None

    def _add(self, event: Segment, step: int, rank: int, attempt: int) -> None:
        cell = self._cell(step, rank, attempt)
        if cell is None:
            self._lost_ns[attempt, rank] += event.duration_ns if event.segment == "step" else 0
            return
        cell.is_reported = cell.is_reported or event.timing == "reported"
        if event.segment == "step":
            cell.start_ns, cell.end_ns = event.start_ns, event.end_ns
            cell.on_host = event.timing == "host"
        else:
            cell.seconds[event.segment] += event.duration_ns / 1e9
            if event.segment in COMPUTE or event.segment == "wait":
                cell.parts.append((event.segment, event.start_ns, event.end_ns))
            cell.first_ns, cell.last_ns = min(cell.first_ns, event.start_ns), max(cell.last_ns, event.end_ns)

    def mark(self, event: Mark) -> None:
        self._num_marks[event.name] += 1
        attempt = event.origin.attempt or 0
        if event.name in ("run_start", "restart"):
            start = self._starts.setdefault(attempt, Start(attempt, event.start_ns))
            start.at_ns = min(start.at_ns, event.start_ns)
            start.is_marked = True
            if event.name == "run_start" and event.attributes and (not self._facts or "layout" not in self._facts):
                self._facts = dict(event.attributes)  # a driver's mark has no layout
        if event.name == "run_end" and attempt in self._starts:
            self._starts[attempt].ended = True
        if attempt in self._starts:
            self._starts[attempt].last_ns = max(self._starts[attempt].last_ns, event.start_ns)
        routine = event.name in ROUTINE or event.name.startswith(("launch ", "mlperf."))
        if not routine and len(self._marks) < _MOST_MARKS:
            self._marks.append(event)

    def counter(self, event: Counter) -> None:
        if event.name == PROCESSOR_WAIT:
            self._add_queued(event)
            return
        if event.unit != "bytes" or event.end_ns <= event.start_ns or self._num_readings >= _MOST_READINGS:
            return
        port = str((event.attributes or {}).get("port", ""))
        name = " ".join(filter(None, (event.origin.host, port, event.name.removeprefix("nic."))))
        self._readings[name].append((event.start_ns, event.end_ns, event.value))
        self._num_readings += 1

    def _add_queued(self, event: Counter) -> None:
        """Add what a rank waited for a processor to its step, where the host computes: elsewhere it delays launches."""
        rank, facts = event.origin.rank, event.attributes or {}
        if rank is None or event.step is None or facts.get("timing") != "host":
            return
        cell = self._cell(event.step, rank, event.origin.attempt or 0)
        if cell is not None:
            cell.queued_s = event.value
            before_s = facts.get("before_s")
            cell.queued_before_s = before_s if isinstance(before_s, int | float) else 0.0

    def run(self) -> Run:
        """Return the tables of all that was taken in."""
        steps = sorted(self._cells)[-(self._last_steps or 0) :]
        ranks = sorted({rank for step in steps for rank in self._cells[step]})
        shape = len(steps), len(ranks)
        columns = {rank: column for column, rank in enumerate(ranks)}
        step_s, own_s, queued_s = np.full(shape, np.nan), np.full(shape, np.nan), np.zeros(shape)
        for times in self._outside.values():
            times.sort(key=lambda one: one[1])
        used = {name for step in steps for cell in self._cells[step].values() for name in cell.seconds}
        used |= {segment for times in self._outside.values() for segment, _, _ in times}
        segments = {name: np.zeros(shape) for name in SEGMENTS if name in used}
        ends, untimed = [], 0
        for row, step in enumerate(steps):
            for rank, cell in self._cells[step].items():
                whole = (cell.end_ns or cell.last_ns) - (cell.start_ns or cell.first_ns)
                untimed += not cell.end_ns
                column = columns[rank]
                # What the host does between two steps delays the next one: it is own time of that step.
                gap_ns = self._gap_ns(step, rank, cell)
                whole += gap_ns
                step_s[row, column] = whole / 1e9
                for name in cell.seconds.keys() & segments.keys():
                    inside_s = cell.waited_within(name) if name in COMPUTE else 0.0
                    segments[name][row, column] = max(0.0, cell.seconds[name] - inside_s)
                own_s[row, column] = _own_seconds(cell, whole / 1e9)
                if cell.queued_s is not None:
                    queued = cell.queued_s + min(cell.queued_before_s, gap_ns / 1e9)
                    queued_s[row, column] = min(queued, own_s[row, column])
            ends.append(max((cell.end_ns or cell.last_ns) for cell in self._cells[step].values()))
        notes = (
            [f"{untimed} steps have no begin and end in the record: they count from their first event to their last"]
            if untimed
            else []
        )
        traffic = [
            Traffic(name, *(np.array(part) for part in zip(*sorted(readings), strict=True)))
            for name, readings in sorted(self._readings.items())
        ]
        return Run(
            steps,
            ranks,
            [self._host(rank) for rank in ranks],
            [self._stages.get(rank) for rank in ranks],
            step_s,
            own_s,
            queued_s,
            segments,
            ends,
            [max(cell.attempt for cell in self._cells[step].values()) for step in steps],
            self._collectives(),
            self._all_starts(),
            sorted(self._marks, key=lambda mark: mark.start_ns),
            self._num_marks,
            traffic,
            self._facts,
            notes,
            self._shares_processors(ranks),
            self._is_reported(),
            [self._host_since(rank, steps) for rank in ranks],
        )

    def _host(self, rank: int) -> str:
        of_starts = self._hosts.get(rank)
        return of_starts[max(of_starts)] if of_starts else ""

    def _host_since(self, rank: int, steps: Sequence[int]) -> int:
        if len(self._starts) < 2:
            return steps[0]
        attempts = [self._cells[step][rank].attempt if rank in self._cells[step] else -1 for step in steps]
        of_starts = {attempt: host or None for attempt, host in self._hosts.get(rank, {}).items()}
        return first_step_on(self._host(rank) or None, of_starts, steps, attempts)

    def _shares_processors(self, ranks: Sequence[int]) -> bool:
        """Whether several ranks of a host compute on its processors, and steps lack what they waited for them."""
        ranks_on_host = max(CountOf(self._host(rank) for rank in ranks).values(), default=0)
        cells = [cell for of_step in self._cells.values() for cell in of_step.values() if cell.on_host]
        # A step or two may lack it: the first one, or one that another thread began.
        return ranks_on_host > 1 and sum(cell.queued_s is None for cell in cells) > _FEW_STEPS * len(cells)

    def _is_reported(self) -> bool:
        """Whether another program timed the steps, which lack what ranks waited for a processor."""
        cells = [cell for of_step in self._cells.values() for cell in of_step.values()]
        return sum(cell.is_reported and cell.queued_s is None for cell in cells) > _FEW_STEPS * len(cells)

    def _all_starts(self) -> list[Start]:
        """Starts of the run in order, with what they took for checkpoints and evaluations, and in vain."""
        for (attempt, _), times in self._outside.items():
            start = self._starts[attempt]
            for name in PLANNED:
                later = (
                    end - begin for segment, begin, end in times if segment == name and begin > (start.first_ns or 0)
                )
                seconds = sum(later) / 1e9
                if seconds:
                    start.planned_s[name] = max(seconds, start.planned_s.get(name, 0.0))
        for (attempt, _), lost_ns in self._lost_ns.items():
            self._starts[attempt].lost_s = max(self._starts[attempt].lost_s, lost_ns / 1e9)
        return [self._starts[attempt] for attempt in sorted(self._starts)]

    def _gap_ns(self, step: int, rank: int, cell: _Cell) -> int:
        """Time between the step before and this one on a rank, without checkpoints and evaluations; 0: not known."""
        before = self._cells[step - 1].get(rank) if step - 1 in self._cells else None
        if before is None or not before.end_ns or not cell.start_ns or before.attempt != cell.attempt:
            return 0
        planned_s = sum(one.seconds.get(name, 0.0) for one in (before, cell) for name in PLANNED)
        outside_ns = self._between_ns(rank, cell.attempt, before.end_ns, cell.start_ns, PLANNED)
        collected_ns = self._between_ns(rank, cell.attempt, before.end_ns, cell.start_ns, ("gc",))
        if collected_ns:
            cell.seconds["gc"] += collected_ns / 1e9
        return max(0, cell.start_ns - before.end_ns - round(planned_s * 1e9) - outside_ns)

    def _between_ns(self, rank: int, attempt: int, first_ns: int, last_ns: int, segments: Sequence[str]) -> int:
        """Nanoseconds between two steps of a rank in segments of some classes that are no step's."""
        times = self._outside.get((attempt, rank), [])  # sorted by their begin: `run`
        first = bisect_left(times, first_ns, key=lambda one: one[1])
        last = bisect_left(times, last_ns, key=lambda one: one[1])
        return sum(
            max(0, min(end, last_ns) - max(begin, first_ns))
            for segment, begin, end in times[max(0, first - 1) : last]
            if segment in segments
        )

    def _flush(self) -> None:
        from netlayer.observe.events import to_batch

        self._tables.append(to_batch([event for event in self._batch if isinstance(event, Segment)]))
        self._batch = []

    def _collectives(self) -> Any:
        """All collectives with wait and transfer apart; None where there are none."""
        if self._batch:
            self._flush()
        if not self._tables:
            return None
        import pyarrow as pa

        from netlayer.observe.events import split_collectives

        return split_collectives(pa.Table.from_batches(self._tables))

    def _forget(self) -> None:
        assert self._last_steps is not None
        for step in sorted(self._cells)[: -self._last_steps]:
            del self._cells[step]
        if len(self._tables) > 4 * self._last_steps:
            del self._tables[: -4 * self._last_steps]


def _own_seconds(cell: _Cell, whole_s: float) -> float:
    """A step without waits for others; without its collectives where nobody recorded the waits.

    Where segments of computation are all there is, they are the own time.
    """
    if "wait" in cell.seconds:
        return max(0.0, whole_s - cell.seconds["wait"])
    compute_s = sum(cell.seconds.get(name, 0.0) for name in (*COMPUTE, *HOST))
    if compute_s and (not cell.end_ns or compute_s <= whole_s):
        return compute_s
    return max(0.0, whole_s - cell.seconds.get("collective", 0.0))

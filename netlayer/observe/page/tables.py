"""Tables of a run from columns: what `netlayer.observe.verdicts.run.collect` gives of events one by one.

The same rules on arrays, so that a run of 12,288 ranks and 100 steps takes seconds; tests compare the two. A step
that was taken again counts as it was then: of each step and rank only rows of the last attempt are kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as CountOf
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from netlayer.observe.events import Mark
from netlayer.observe.page.columns import CLASSES, NO_STEP, Columns, FileColumns, newest, places_of
from netlayer.observe.verdicts.run import COMPUTE, HOST, PLANNED, ROUTINE, SEGMENTS, Run, Start, Traffic, first_step_on

if TYPE_CHECKING:
    import pyarrow as pa

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_CODE = {name: code for code, name in enumerate(CLASSES)}
_FEW_STEPS = 0.1
_MOST_MARKS = 10_000
_MOST_COLLECTIVES = 2_000_000


@dataclass(frozen=True)
class Cells:
    """Last rows of each step and rank; all arrays are of rows but for `step_of`, `rank_of`.

    Args:
        steps, ranks: numbers of the table's rows and columns.
        cell: row of the flat [step, rank] table.
        code: class of the segment.
        step_of, rank_of: index of step and rank of each row.
    """

    steps: Ints
    ranks: Ints
    cell: Ints
    code: NDArray[np.uint8]
    start_ns: Ints
    end_ns: Ints
    on_host: NDArray[np.bool_]

    @property
    def size(self) -> int:
        return len(self.steps) * len(self.ranks)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.steps), len(self.ranks)

    def sums(self, values: NDArray[Any], code: int) -> Floats:
        """Sum of values over the rows of a class, by cell."""
        rows = self.code == code
        return np.asarray(np.bincount(self.cell[rows], weights=values[rows], minlength=self.size), float)

    def extreme(self, values: Ints, rows: NDArray[np.bool_], function: np.ufunc, start: int) -> Ints:
        """Least or largest value of some rows, by cell."""
        result = np.full(self.size, start, np.int64)
        function.at(result, self.cell[rows], values[rows])
        return result


def run_of(columns: Columns) -> tuple[Run, NDArray[np.bool_]]:
    """Return the tables of a run, and the cells [step, rank] whose step has no end in the record."""
    files = columns.files
    rows = _joined(files)
    starts = _starts(rows, files)
    _note_lost_steps(rows, starts)
    cells, attempts = _last_attempts(rows)
    marks, num_marks, facts = _marks(files)
    outside = _outside(rows)
    queued = {(rank, step, attempt): (value, before) for file in files
              for attempt, rank, step, value, before in file.queued}  # fmt: skip
    times = _times(cells, attempts, outside)
    queued_s, lacking = _queued(cells, attempts, times, queued)
    for (attempt, _), spans in outside.items():
        _note_planned(starts[attempt], spans)
    places = places_of(files)
    ranks = [int(rank) for rank in cells.ranks]
    hosts, stages, since, steps = [], [], [], cells.steps.tolist()
    for column, rank in enumerate(ranks):
        host, _, stage, *_ = newest(places.get(rank))
        hosts.append(str(host or ""))
        stages.append(_whole(stage))
        of_starts = {attempt: place[0] or None for attempt, place in places.get(rank, {}).items()}
        since.append(
            first_step_on(host or None, of_starts, steps, attempts[:, column].tolist()) if len(starts) > 1 else steps[0]
        )
    notes = []
    untimed = int((times.exists & ~times.is_timed).sum())
    if untimed:
        notes.append(
            f"{untimed} steps have no begin and end in the record: they count from their first event to their last"
        )
    most = max(CountOf(hosts).values(), default=0)
    num_on_host = int((times.on_host & times.exists).sum())
    table, left = _collectives(files, cells.steps)
    if left:
        notes.append(f"links are judged by the last {left} steps")
    run = Run(
        steps=[int(step) for step in cells.steps],
        ranks=ranks,
        hosts=hosts,
        stages=stages,
        step_s=times.step_s,
        own_s=times.own_s,
        queued_s=queued_s,
        segments=times.segments,
        step_end_ns=[int(value) for value in times.end_ns.max(axis=1, initial=0)],
        attempts=[int(value) for value in attempts.max(axis=1, initial=0)],
        collectives=table,
        starts=[starts[attempt] for attempt in sorted(starts)],
        marks=marks,
        num_marks=num_marks,
        traffic=_traffic(files),
        facts=facts,
        notes=notes,
        shares_processors=most > 1 and lacking > _FEW_STEPS * num_on_host,
        host_since=since,
    )
    return run, times.exists & ~times.is_timed


def _joined(files: Sequence[FileColumns]) -> dict[str, NDArray[Any]]:
    names = ("rank", "step", "attempt", "start_ns", "end_ns", "code", "on_host")
    parts = [file.segments for file in files if file.segments]
    if not parts:
        return {name: np.empty(0, np.int64) for name in names}
    return {name: np.concatenate([part[name] for part in parts]) for name in names}


def _starts(rows: dict[str, NDArray[Any]], files: Sequence[FileColumns]) -> dict[int, Start]:
    """Each start of the run, with what its segments say."""
    starts: dict[int, Start] = {}
    attempts, first = np.unique(rows["attempt"], return_index=True)
    for attempt, at in zip(attempts, first, strict=True):
        start = starts[int(attempt)] = Start(int(attempt), int(rows["start_ns"][at]))
        of_start = rows["attempt"] == attempt if len(attempts) > 1 else slice(None)
        start.last_ns = int(rows["end_ns"][of_start].max())
        steps = (rows["code"][of_start] == _CODE["step"]) & (rows["step"][of_start] != NO_STEP)
        if steps.any():
            numbers = rows["step"][of_start][steps]
            start.first_step, start.last_step = int(numbers.min()), int(numbers.max())
            start.first_ns = int(rows["start_ns"][of_start][steps].min())
    for mark in (mark for file in files for mark in file.marks):
        attempt = mark.origin.attempt or 0
        if mark.name in ("run_start", "restart"):
            start = starts.setdefault(attempt, Start(attempt, mark.start_ns))
            start.at_ns = min(start.at_ns, mark.start_ns)
            start.is_marked = True
        if mark.name == "run_end" and attempt in starts:
            starts[attempt].ended = True
        if attempt in starts:
            starts[attempt].last_ns = max(starts[attempt].last_ns, mark.start_ns)
    return starts


def _marks(files: Sequence[FileColumns]) -> tuple[list[Mark], CountOf[str], dict[str, Any]]:
    """Marks for a person in order, how many of each name, and the facts of the first start that has a layout."""
    counts: CountOf[str] = CountOf()
    kept: list[Mark] = []
    facts: dict[str, Any] = {}
    for mark in (mark for file in files for mark in file.marks):
        counts[mark.name] += 1
        if mark.name == "run_start" and mark.attributes and (not facts or "layout" not in facts):
            facts = dict(mark.attributes)  # a driver's mark has no layout
        routine = mark.name in ROUTINE or mark.name.startswith(("launch ", "mlperf."))
        if not routine and len(kept) < _MOST_MARKS:
            kept.append(mark)
    return sorted(kept, key=lambda mark: mark.start_ns), counts, facts


def _last_attempts(rows: dict[str, NDArray[Any]]) -> tuple[Cells, Ints]:
    """Rows within steps that count, and the attempt of each cell, [step, rank]; -1: the rank has no such step."""
    inside = rows["step"] != NO_STEP
    steps, step_of = np.unique(rows["step"][inside], return_inverse=True)
    ranks, rank_of = np.unique(rows["rank"][inside], return_inverse=True)
    cell = step_of.astype(np.int64) * len(ranks) + rank_of
    attempt = rows["attempt"][inside]
    last = np.full(len(steps) * len(ranks), -1, np.int64)
    np.maximum.at(last, cell, attempt)
    counts = attempt == last[cell]
    columns = {name: rows[name][inside][counts] for name in ("code", "start_ns", "end_ns", "on_host")}
    cells = Cells(steps, ranks.astype(np.int64), cell[counts], **columns)
    return cells, last.reshape(len(steps), len(ranks))


def _note_lost_steps(rows: dict[str, NDArray[Any]], starts: dict[int, Start]) -> None:
    """Add up the steps of each start that a later one took again, on the rank that lost most."""
    if len(starts) < 2:
        return
    is_step = (rows["code"] == _CODE["step"]) & (rows["step"] != NO_STEP)
    last: dict[tuple[int, int], int] = {}
    inside = rows["step"] != NO_STEP
    keys = np.stack([rows["rank"][inside], rows["step"][inside]])
    numbers, inverse = np.unique(keys, axis=1, return_inverse=True)
    newest = np.full(numbers.shape[1], -1, np.int64)
    np.maximum.at(newest, inverse.ravel(), rows["attempt"][inside])
    last = dict(zip(map(tuple, numbers.T.tolist()), newest.tolist(), strict=True))
    lost: CountOf[tuple[int, int]] = CountOf()
    for rank, step, attempt, start_ns, end_ns in zip(
        *(rows[name][is_step].tolist() for name in ("rank", "step", "attempt", "start_ns", "end_ns")), strict=True
    ):
        if attempt < last[rank, step]:
            lost[attempt, rank] += end_ns - start_ns
    for (attempt, _), lost_ns in lost.items():
        starts[attempt].lost_s = max(starts[attempt].lost_s, lost_ns / 1e9)


def _outside(rows: dict[str, NDArray[Any]]) -> dict[tuple[int, int], list[tuple[str, int, int]]]:
    """Checkpoints, evaluations and garbage collections outside of steps, by attempt and rank, in order of begin."""
    codes = [_CODE[name] for name in (*PLANNED, "gc")]
    apart = (rows["step"] == NO_STEP) & np.isin(rows["code"], codes)
    spans: dict[tuple[int, int], list[tuple[str, int, int]]] = defaultdict(list)
    names = ("attempt", "rank", "code", "start_ns", "end_ns")
    for attempt, rank, code, begin, end in zip(*(rows[name][apart].tolist() for name in names), strict=True):
        spans[attempt, rank].append((CLASSES[code], begin, end))
    for of_rank in spans.values():
        of_rank.sort(key=lambda one: one[1])
    return spans


def _note_planned(start: Start, spans: Sequence[tuple[str, int, int]]) -> None:
    for name in PLANNED:
        seconds = sum(end - begin for one, begin, end in spans if one == name and begin > (start.first_ns or 0)) / 1e9
        if seconds:
            start.planned_s[name] = max(seconds, start.planned_s.get(name, 0.0))


@dataclass(frozen=True)
class _Times:
    """Times of the cells, each [step, rank]: see `Run`."""

    step_s: Floats
    own_s: Floats
    gap_ns: Ints
    segments: dict[str, Floats]
    end_ns: Ints
    exists: NDArray[np.bool_]
    on_host: NDArray[np.bool_]
    is_timed: NDArray[np.bool_]


def _times(cells: Cells, attempts: Ints, outside: dict[tuple[int, int], list[tuple[str, int, int]]]) -> _Times:
    """Return the times of all cells, by the rules of `collect`."""
    shape, is_step = cells.shape, cells.code == _CODE["step"]
    # Of several segments of a step the last one counts, as it does where events come one by one.
    start_ns, end_ns = np.zeros(cells.size, np.int64), np.zeros(cells.size, np.int64)
    start_ns[cells.cell[is_step]], end_ns[cells.cell[is_step]] = cells.start_ns[is_step], cells.end_ns[is_step]
    on_host = np.zeros(cells.size, bool)
    on_host[cells.cell[is_step]] = cells.on_host[is_step]
    first_ns = cells.extreme(cells.start_ns, ~is_step, np.minimum, 1 << 62)
    last_ns = cells.extreme(cells.end_ns, ~is_step, np.maximum, 0)
    exists = attempts.ravel() >= 0
    whole_ns = np.where(end_ns != 0, end_ns, last_ns) - np.where(start_ns != 0, start_ns, first_ns)
    duration_s = (cells.end_ns - cells.start_ns) / 1e9
    present = [name for name in SEGMENTS if (cells.code == _CODE[name]).any()]
    present += [name for name in SEGMENTS if name not in present
                and any(one[0] == name for spans in outside.values() for one in spans)]  # fmt: skip
    seconds = {name: cells.sums(duration_s, _CODE[name]) for name in present}
    counts = {name: cells.sums(np.ones(len(duration_s)), _CODE[name]) for name in ("wait",) if name in present}
    gap_ns, collected_ns = _gaps(cells, attempts, start_ns, end_ns, seconds, outside)
    if "gc" in seconds:
        seconds["gc"] = seconds["gc"] + collected_ns / 1e9
    whole_s = (whole_ns + gap_ns) / 1e9
    waited = counts["wait"] > 0 if "wait" in counts else np.zeros(cells.size, bool)
    compute_s = sum((seconds[name] for name in (*COMPUTE, *HOST) if name in seconds), np.zeros(cells.size))
    own_s = np.maximum(0.0, whole_s - seconds.get("collective", 0.0))
    by_compute = (compute_s > 0) & ((end_ns == 0) | (compute_s <= whole_s))
    own_s = np.where(by_compute, compute_s, own_s)
    own_s = np.where(waited, np.maximum(0.0, whole_s - seconds.get("wait", 0.0)), own_s)
    own_s, whole_s = np.where(exists, own_s, np.nan), np.where(exists, whole_s, np.nan)
    segments = {}
    for name in sorted(present, key=SEGMENTS.index):
        inside = _waited_within(cells, _CODE[name]) if name in COMPUTE and waited.any() else 0.0
        segments[name] = np.maximum(0.0, seconds[name] - inside).reshape(shape)
    ends = np.where(exists, np.where(end_ns != 0, end_ns, last_ns), 0)
    return _Times(
        whole_s.reshape(shape),
        own_s.reshape(shape),
        gap_ns.reshape(shape),
        segments,
        ends.reshape(shape),
        exists.reshape(shape),
        on_host.reshape(shape),
        (end_ns != 0).reshape(shape),
    )


def _waited_within(cells: Cells, code: int) -> Floats:
    """Seconds of the segments of a class in which the rank waited for others, by cell.

    A wait [b, e] covers max(t - b, 0) - max(t - e, 0) of the time up to t, so that the overlap with a segment is the
    difference of two such sums, which sorted begins and ends of the waits give for all segments at once.
    """
    own, wait = cells.code == code, cells.code == _CODE["wait"]
    base = cells.extreme(cells.start_ns, own | wait, np.minimum, 1 << 62)
    last = cells.extreme(cells.end_ns, own | wait, np.maximum, 0)
    used = last > 0
    reach = int((last[used] - base[used]).max(initial=0)) + 1
    if not own.any() or not wait.any() or reach * cells.size >= 1 << 62:
        return np.zeros(cells.size)

    def keyed(times_ns: Ints, rows: NDArray[np.bool_]) -> Ints:
        return cells.cell[rows] * reach + (times_ns[rows] - base[cells.cell[rows]])

    total = np.zeros(int(own.sum()))
    for times_ns, sign in ((cells.start_ns, 1.0), (cells.end_ns, -1.0)):
        edges = np.sort(keyed(times_ns, wait))
        before = np.concatenate([[0], np.cumsum(edges - edges // reach * reach)])  # without the cell: sums stay small
        first = np.searchsorted(edges, cells.cell[own] * reach)
        for moment, of_segment in ((cells.end_ns, 1.0), (cells.start_ns, -1.0)):
            at = keyed(moment, own)
            upto = np.searchsorted(edges, at)
            covered = (upto - first) * (at % reach) - (before[upto] - before[first])
            total += sign * of_segment * covered
    return np.asarray(np.bincount(cells.cell[own], weights=total / 1e9, minlength=cells.size), float)


def _gaps(
    cells: Cells,
    attempts: Ints,
    start_ns: Ints,
    end_ns: Ints,
    seconds: dict[str, Floats],
    outside: dict[tuple[int, int], list[tuple[str, int, int]]],
) -> tuple[Ints, Ints]:
    """Time between the step before and each one, without what is planned, and the garbage collections in it, ns."""
    shape = cells.shape
    gap, collected = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    starts, ends = start_ns.reshape(shape), end_ns.reshape(shape)
    planned = sum((seconds[name] for name in PLANNED if name in seconds), np.zeros(cells.size)).reshape(shape)
    for row in (np.flatnonzero(np.diff(cells.steps) == 1) + 1).tolist():
        known = (ends[row - 1] != 0) & (starts[row] != 0) & (attempts[row] == attempts[row - 1])
        planned_ns = np.rint((planned[row] + planned[row - 1]) * 1e9).astype(np.int64)
        gap[row] = np.where(known, starts[row] - ends[row - 1] - planned_ns, 0)
    column_of = {int(rank): column for column, rank in enumerate(cells.ranks)}
    for (attempt, rank), spans in outside.items():
        column = column_of.get(rank)
        if column is None:
            continue
        of_start = attempts[:, column] == attempt
        known = of_start[1:] & of_start[:-1] & (ends[:-1, column] != 0) & (starts[1:, column] != 0)
        known &= np.diff(cells.steps) == 1
        for row in (np.flatnonzero(known) + 1).tolist():
            low, high = int(ends[row - 1, column]), int(starts[row, column])
            gap[row, column] -= _between_ns(spans, low, high, PLANNED)
            collected[row, column] = _between_ns(spans, low, high, ("gc",))
    return np.maximum(gap, 0).ravel(), collected.ravel()


def _between_ns(spans: Sequence[tuple[str, int, int]], low: int, high: int, names: Sequence[str]) -> int:
    first = bisect_left(spans, low, key=lambda one: one[1])
    last = bisect_left(spans, high, key=lambda one: one[1])
    return sum(
        max(0, min(end, high) - max(begin, low))
        for name, begin, end in spans[max(0, first - 1) : last]
        if name in names
    )


def _queued(
    cells: Cells, attempts: Ints, times: _Times, queued: dict[tuple[int, int, int], tuple[float, float]]
) -> tuple[Floats, int]:
    """Seconds in which each rank had no processor, [step, rank], and how many steps on a host lack that."""
    result, is_known = np.zeros(cells.shape), np.zeros(cells.shape, bool)
    if queued:
        row_of = {int(step): row for row, step in enumerate(cells.steps)}
        column_of = {int(rank): column for column, rank in enumerate(cells.ranks)}
        for (rank, step, attempt), (value, before_s) in queued.items():
            row, column = row_of.get(step), column_of.get(rank)
            if row is None or column is None or attempts[row, column] != attempt:
                continue
            seconds = value + min(before_s, times.gap_ns[row, column] / 1e9)
            result[row, column] = min(seconds, times.own_s[row, column])
            is_known[row, column] = True
    return result, int((times.on_host & times.exists & ~is_known).sum())


def _collectives(files: Sequence[FileColumns], steps: Ints) -> tuple[pa.Table | None, int]:
    """Collectives with wait and transfer apart; of very many those of the last steps, and of how many steps then."""
    batches = [batch for file in files for batch in file.collectives]
    if not batches:
        return None, 0
    import pyarrow as pa
    import pyarrow.compute as pc

    from netlayer.observe.events import split_collectives

    table = pa.Table.from_batches(batches)
    left = 0
    if table.num_rows > _MOST_COLLECTIVES:
        left = max(1, len(steps) * _MOST_COLLECTIVES // table.num_rows)
        table = table.filter(pc.greater_equal(table["step"], int(steps[-left])))
    return split_collectives(table), left


def _traffic(files: Sequence[FileColumns]) -> list[Traffic]:
    parts: dict[str, list[Any]] = defaultdict(list)
    for one in (readings for file in files for readings in file.readings):
        moved = one.end_ns > one.start_ns
        if one.unit == "bytes" and moved.any():
            name = " ".join(filter(None, (one.host, one.port, one.name.removeprefix("nic."))))
            parts[name].append(np.stack([one.start_ns[moved], one.end_ns[moved]]))
            parts[name].append(one.values[moved])
    traffic = []
    for name, of_port in sorted(parts.items()):
        start_ns, end_ns = np.concatenate(of_port[::2], axis=1)
        values = np.concatenate(of_port[1::2])
        order = np.lexsort((values, end_ns, start_ns))
        traffic.append(Traffic(name, start_ns[order], end_ns[order], values[order]))
    return traffic


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None

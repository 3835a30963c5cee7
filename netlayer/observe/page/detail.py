"""Payloads that the page asks for one by one: events of some ranks, one rank, readings of a counter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from netlayer.observe.page.columns import CLASSES, Readings, integers, newest, parse_facts, texts
from netlayer.observe.page.payload import pack
from netlayer.observe.page.view import RunView, describe_facts

if TYPE_CHECKING:
    import pyarrow as pa

Floats = NDArray[np.float64]

MOST_EVENTS = 60_000
MOST_RANKS = 4096
MOST_POINTS = 2000
_MARK = 254
"""Code of a mark among classes of segments."""
_MOST_FLOWS = 60
_MOST_OPERATIONS = 24
_NUMBERS = ("micro_batch", "chunk", "seq", "peer", "attempt")
_NAMES = ("name", "group", "group_ranks", "lane", "timing")


def events(view: RunView, ranks: Sequence[int], steps: tuple[int, int] | None) -> bytes:
    """Return segments and marks of some ranks, times in milliseconds from the first; of very many the longest.

    Args:
        steps: first and last, each as it was taken last; None: everything, also outside of steps.

    Rows with equal `key` are one collective, or a send and its receive; -1: neither.
    """
    import pyarrow as pa

    batches = list(view.columns.rows(list(ranks)[:MOST_RANKS], steps))
    rows = pa.Table.from_batches(batches) if batches else None
    if rows is not None:
        rows = _without_counters(rows.unify_dictionaries(), all_marks=view.blame is not None)
        rows = rows if steps is None else _last_attempts(rows)
    if rows is None or not rows.num_rows:
        return pack({"base_ns": "0", "names": {}, "omitted": 0, "classes": CLASSES, "version": view.version})
    offset = np.maximum(integers(rows["clock_offset_ns"]), -1)
    offset = np.where(np.asarray(rows["clock_offset_ns"].is_null()), 0, integers(rows["clock_offset_ns"]))
    start_ns, end_ns = np.asarray(rows["start_ns"]) - offset, np.asarray(rows["end_ns"]) - offset
    omitted = max(0, len(start_ns) - MOST_EVENTS)
    order = np.lexsort((end_ns, start_ns))
    if omitted:
        longest = np.argpartition(start_ns - end_ns, MOST_EVENTS)[:MOST_EVENTS]
        order = longest[np.argsort(start_ns[longest], kind="stable")]
    rows = rows.take(pa.array(order))
    start_ns, end_ns = start_ns[order], end_ns[order]
    base_ns = int(start_ns.min())
    kinds, segments = texts(rows["kind"]), texts(rows["segment"])
    code = np.full(len(kinds), CLASSES.index("other"), np.uint8)
    for number, name in enumerate(CLASSES):
        code[segments == name] = number
    code[kinds == "mark"] = _MARK
    arrays: dict[str, NDArray[Any]] = {
        "start_ms": (start_ns - base_ns) / 1e6,
        "end_ms": (end_ns - base_ns) / 1e6,
        "code": code,
        "rank": integers(rows["rank"]).astype(np.int32),
        "step": integers(rows["step"]).astype(np.int32),
        "bytes": np.where(np.asarray(rows["bytes"].is_null()), np.nan, integers(rows["bytes"]).astype(float)),
        "key": _keys(rows),
    }
    arrays |= {name: integers(rows[name]).astype(np.int32) for name in _NUMBERS}
    names: dict[str, list[str]] = {}
    for name in _NAMES:
        values, indices = np.unique(texts(rows[name]).astype(str), return_inverse=True)
        names[name], arrays[name] = [str(value) for value in values], indices.astype(np.int32)
    marked = np.flatnonzero(code == _MARK)[:2000]
    lines = {
        int(at): (rows["text"][at].as_py() or describe_facts(parse_facts(rows["attributes"][at].as_py() or "")))[:400]
        for at in marked.tolist()
    }
    facts = {"base_ns": str(base_ns), "since_begin_ms": (base_ns - view.begin_ns) / 1e6, "names": names,
             "omitted": omitted, "classes": CLASSES, "texts": lines, "version": view.version,
             "open": _open_operations(view, ranks, steps, base_ns)}  # fmt: skip
    return pack(facts, arrays)


def _open_operations(
    view: RunView, ranks: Sequence[int], steps: tuple[int, int] | None, base_ns: int
) -> list[dict[str, Any]]:
    """Operations that some ranks never ended, where a verdict says who is silent: rank, begin, and in words."""
    if not view.stop.silent or steps is None:
        return []
    result = []
    for number in ranks:
        place = view.stop.places.get(number)
        if place is None or place.operation is None or not steps[0] <= place.step <= steps[1]:
            continue
        what = "waits in" if place.members else "in"
        result.append(
            {
                "rank": number,
                "step": place.step,
                "from_ms": (place.last_ns - base_ns) / 1e6,
                "what": f"{what} {place.operation}",
            }
        )
    return result


def _without_counters(rows: pa.Table, *, all_marks: bool) -> pa.Table:
    """Rows without counters and the marks that are of no interest on a timeline."""
    import pyarrow as pa

    kinds, names = texts(rows["kind"]), texts(rows["name"])
    keep = (kinds != "counter") & ~np.isin(names, ("clock", "late"))
    if not all_marks:
        keep &= (kinds == "segment") | ~np.isin(names, ("run_start",))
    return rows.filter(pa.array(keep.astype(bool)))


def _last_attempts(rows: pa.Table) -> pa.Table:
    """Rows of each step as it was taken last."""
    import pyarrow as pa

    steps, inverse = np.unique(integers(rows["step"]), return_inverse=True)
    attempts = integers(rows["attempt"])
    last = np.full(len(steps), -1, np.int64)
    np.maximum.at(last, inverse, attempts)
    return rows.filter(pa.array(attempts == last[inverse]))


def _keys(rows: pa.Table) -> NDArray[np.int32]:
    """Number of each row's collective or message, -1 where it has none; as `split_collectives` matches them."""
    kinds, flow, ranks = texts(rows["segment"]), texts(rows["flow"]), texts(rows["group_ranks"])
    seq = integers(rows["seq"])
    keys: dict[tuple[Any, ...], int] = {}
    result = np.full(rows.num_rows, -1, np.int32)
    columns = zip(integers(rows["attempt"]), integers(rows["step"]), texts(rows["group"]), texts(rows["name"]),
                  strict=True)  # fmt: skip
    for at, place in enumerate(columns):
        if kinds[at] != "collective":
            continue
        if flow[at]:
            result[at] = keys.setdefault((*place[:2], flow[at]), len(keys))
        elif seq[at] >= 0 and ranks[at]:
            result[at] = keys.setdefault((*place, ranks[at], int(seq[at])), len(keys))
    return result


def rank(view: RunView, number: int) -> bytes:
    """Return one rank: its place at the end, series of all measures, flows, last operations, and marks.

    Raises:
        LookupError: no evidence names that rank.
    """
    if number not in view.ranks:
        raise LookupError(f"rank {number}: no evidence names it")
    arrays: dict[str, NDArray[Any]] = {}
    if number in view.run.ranks:
        column = list(view.run.ranks).index(number)
        for index, (table, _) in enumerate(view.measures.values()):
            arrays[f"series{index}"] = table[:, column].astype(np.float32)
        arrays["peers"] = _peers_median(view, column).astype(np.float32)
    place = view.stop.places.get(number)
    facts = {
        "rank": number,
        "version": view.version,
        "flows": _flows(view, number),
        "operations": _operations(view, number),
        "marks": _rank_marks(view, number),
        "place": str(place.operation or "") if place is not None and view.stop.silent else None,
        "findings": [
            finding.line
            for finding in (view.blame.findings if view.blame else ())
            if number in finding.ranks or number in finding.waiting
        ][:10],
    }
    return pack(facts, arrays)


def _peers_median(view: RunView, column: int) -> Floats:
    """Own time of the median rank with equal work, [step]."""
    from netlayer.observe.page.view import row_medians

    stages = view.run.stages
    peers = [other for other, stage in enumerate(stages) if stage == stages[column]]
    return row_medians(view.run.own_s[:, peers])


def _flows(view: RunView, number: int) -> list[dict[str, Any]]:
    """Collectives and messages of a rank by group: how often a step, of which size, how long, and how much waiting."""
    import pyarrow as pa
    import pyarrow.compute as pc

    table = view.run.collectives
    if table is None:
        return _launched(view, number)
    rows = table.filter(pc.equal(table["rank"], number))
    if not rows.num_rows:
        return []
    text = {name: pa.array(texts(rows[name]).tolist(), pa.string()) for name in ("name", "group", "group_ranks")}
    # Steps of two starts are different ones.
    step = pc.add(pc.multiply(pc.fill_null(rows["attempt"], 0).cast(pa.int64()), 1 << 40), rows["step"])
    numbers = {"peer": pc.fill_null(rows["peer"], -1), "bytes": pc.fill_null(rows["bytes"], 0), "step": step}
    times = {"wait_ns": rows["wait_for_peers_ns"], "transfer_ns": rows["transfer_ns"]}
    plain = pa.table({**text, **numbers, **times})
    keys = ["name", "group", "group_ranks", "peer"]
    sums = plain.group_by(keys).aggregate(
        [("step", "count"), ("step", "count_distinct"), ("bytes", "mean"), ("wait_ns", "mean"), ("transfer_ns", "mean")]
    )
    flows = [
        {
            "name": row["name"], "group": row["group"], "group_ranks": row["group_ranks"],
            "peer": None if row["peer"] < 0 else row["peer"], "a_step": row["step_count"] / row["step_count_distinct"],
            "bytes": row["bytes_mean"], "wait_ms": row["wait_ns_mean"] / 1e6,
            "transfer_ms": row["transfer_ns_mean"] / 1e6,
        }
        for row in sums.to_pylist()
    ]  # fmt: skip
    return sorted(flows, key=lambda row: -row["a_step"] * row["bytes"])[:_MOST_FLOWS]


def _launched(view: RunView, number: int) -> list[dict[str, Any]]:
    """Groups in which a rank launched something, of dumps that say no times."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for mark in (mark for file in view.columns.files for mark in file.marks):
        if mark.origin.rank != number or not mark.name.startswith("launch "):
            continue
        facts = mark.attributes or {}
        key = (mark.name.removeprefix("launch "), str(facts.get("group", "")))
        row = rows.setdefault(key, {"name": key[0], "group": key[1], "group_ranks": str(facts.get("group_ranks") or ""),
                                    "peer": None, "launched": 0, "complete": 0})  # fmt: skip
        row["launched"] += 1
        row["complete"] += facts.get("state") == "complete"
    return list(rows.values())[:_MOST_FLOWS]


def _operations(view: RunView, number: int) -> list[dict[str, Any]]:
    """Last things that a rank recorded, newest first."""
    # By step before time: of some evidence the clock begins anew with each step.
    rows: list[tuple[int, int, dict[str, Any]]] = []
    for mark in (mark for file in view.columns.files for mark in file.marks if mark.origin.rank == number):
        if mark.name.startswith("launch "):
            facts = mark.attributes or {}
            what = f"{mark.name.removeprefix('launch ')} #{facts.get('seq', '')} ({facts.get('group', '')})"
            rows.append(
                (-1, mark.start_ns, {"what": what, "state": facts.get("state", ""), "size": facts.get("size", "")})
            )
    last = list(view.run.steps)[-2:]
    if last:
        for batch in view.columns.rows([number], (last[0], last[-1])):
            for row in batch.select(["kind", "name", "segment", "step", "micro_batch", "group", "start_ns", "end_ns"]).to_pylist():  # fmt: skip  # noqa: E501
                if row["kind"] != "segment" or row["segment"] == "step":
                    continue
                what = ("wait in " if row["segment"] == "wait" else "") + row["name"]
                what += f" ({row['group']})" if row["group"] else ""
                if row["micro_batch"] is not None:
                    what += f" of micro-batch {row['micro_batch']}"
                rows.append((row["step"], row["end_ns"], {"what": what, "step": row["step"],
                                                          "ms": (row["end_ns"] - row["start_ns"]) / 1e6}))  # fmt: skip
    place = view.stop.places.get(number) if view.stop.silent else None
    if place is not None and place.operation is not None:
        what = f"{'waits in' if place.members else 'in'} {place.operation}"
        rows.append((place.step + 1, place.last_ns, {"what": what, "step": place.step, "size": "no end in the record"}))
    rows.sort(key=lambda one: (-one[0], -one[1]))
    newest = rows[:_MOST_OPERATIONS]
    return [{**row, "at_s": (at - view.begin_ns) / 1e9} for _, at, row in newest]


def _rank_marks(view: RunView, number: int) -> list[dict[str, Any]]:
    marks = [mark for mark in view.run.marks if mark.origin.rank == number]
    return [
        {"name": mark.name, "step": mark.step, "at_s": (mark.start_ns - view.begin_ns) / 1e9,
         "text": (mark.text or describe_facts(mark.attributes))[:400]}
        for mark in marks[-40:]
    ]  # fmt: skip


def counters(view: RunView, name: str, of_rank: int | None, span_s: tuple[float, float] | None) -> bytes:
    """Return readings of a counter: of all ranks the range and the median, and one line a series of one rank or host.

    Args:
        of_rank: whose series, and its host's, are added; None: the first ones.
        span_s: begin and end since the run's begin; None: all. A shorter span shows finer times.

    Bytes become bytes a second between two readings.

    Raises:
        LookupError: there is no such counter.
    """
    every = [one for one in view.readings if one.name == name]
    if not every:
        raise LookupError(f"counter {name}: there is none")
    unit = f"{every[0].unit}/s" if any((one.end_ns > one.start_ns).any() for one in every) else every[0].unit
    low = min(int(one.end_ns[0]) for one in every) if span_s is None else view.begin_ns + round(span_s[0] * 1e9)
    high = max(int(one.end_ns[-1]) for one in every) if span_s is None else view.begin_ns + round(span_s[1] * 1e9)
    edges = np.linspace(low, max(high, low + 1), min(MOST_POINTS, _usual_points(every, low, high)) + 1)
    facts: dict[str, Any] = {"name": name, "unit": unit, "series": [], "num_series": len(every)}
    arrays: dict[str, NDArray[Any]] = {"at_s": ((edges[:-1] + edges[1:]) / 2 - view.begin_ns) / 1e9}
    chosen = _chosen(view, every, of_rank)
    if len(every) > len(chosen) or len(every) > 1:
        times = np.concatenate([one.end_ns for one in every])
        values = np.concatenate([_rates(one) for one in every])
        for key, column in zip(("low", "middle", "high"), _spread_of(times, values, edges), strict=True):
            arrays[key] = column.astype(np.float32)
    for number, one in enumerate(chosen):
        label = " ".join(filter(None, (f"rank {one.rank}" if one.rank is not None else "", one.host, one.port)))
        facts["series"].append({"label": label, "rank": one.rank, "host": one.host})
        arrays[f"series{number}"] = _means(one.end_ns, _rates(one), edges).astype(np.float32)
    return pack({**facts, "version": view.version}, arrays)


def _usual_points(every: Sequence[Readings], low: int, high: int) -> int:
    """Readings of the longest series in a span: no more points are of use."""
    counts = [int(((one.end_ns >= low) & (one.end_ns <= high)).sum()) for one in every[:64]]
    return max(2, max(counts))


def _chosen(view: RunView, every: Sequence[Readings], of_rank: int | None) -> list[Readings]:
    if of_rank is None:
        return list(every[:4])
    host = newest(view.places.get(of_rank))[0]
    own = [one for one in every if one.rank == of_rank]
    return own or [one for one in every if host and one.host == host][:8]


def _rates(one: Readings) -> Floats:
    """Readings; of what was counted between two moments, a second."""
    seconds = (one.end_ns - one.start_ns) / 1e9
    return np.where(seconds > 0, one.values / np.where(seconds > 0, seconds, 1.0), one.values)


def _means(times: NDArray[np.int64], values: Floats, edges: Floats) -> Floats:
    """Mean of the values in each interval between two edges; NaN where there is none."""
    at = np.clip(np.searchsorted(edges, times, "left") - 1, 0, len(edges) - 2)
    inside = (times >= edges[0]) & (times <= edges[-1])
    count = np.bincount(at[inside], minlength=len(edges) - 1)
    total = np.bincount(at[inside], values[inside], minlength=len(edges) - 1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _spread_of(times: NDArray[np.int64], values: Floats, edges: Floats) -> tuple[Floats, Floats, Floats]:
    """Least, median and largest value in each interval between two edges."""
    inside = (times >= edges[0]) & (times <= edges[-1])
    at = np.clip(np.searchsorted(edges, times[inside], "left") - 1, 0, len(edges) - 2)
    order = np.lexsort((values[inside], at))
    at, ordered = at[order], values[inside][order]
    begins = np.searchsorted(at, np.arange(len(edges)))
    first, last = begins[:-1], begins[1:]
    full = last > first
    if not len(ordered):
        nothing = np.full(len(first), np.nan)
        return nothing, nothing, nothing
    places = (first, (first + last) // 2, np.maximum(last - 1, 0))
    low, middle, high = (np.where(full, ordered[np.minimum(place, len(ordered) - 1)], np.nan) for place in places)
    return low, middle, high

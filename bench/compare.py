"""`netlayer bench compare A B`: two records row by row: ratio, spread, verdict.

Rows are alike where all that is no measurement is equal. The spread is what chance alone may make of the difference,
from three rows alike or more, else from the single iterations, where a record keeps them: a difference within it is
none. Left out: whether the two machines may be compared at all; it says both.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from bench.perf_json import is_perf_json, perf_record
from netlayer.errors import EXIT_FAILED, ConfigError
from netlayer.results import RunRecord, check_target, read_json, record_of, utc_now, write_text

# What is measured, by the end of its key, and whether more of it is better.
_HIGHER = ("_gbs", "tflops", "bus_bw", "alg_bw", "per_s", "mfu_full", "mfu_causal", "speedup")
_LOWER = ("_us", "_ms", "_s", "_ns")
# What came out, or tells repetitions of one case apart. Ranks are no repetitions: one that is slow must show.
_NO_KEY = (
    "wrong", "ok", "round", "cycle", "hostname", "at", "algorithm", "protocol", "host_bound", "best_other",
    "peak_bytes", "nccl",
)  # fmt: skip
_DEFAULT_SHARE = 0.05
_MAD_TO_SIGMA = 1.4826
# Of the difference: where nothing changed, about one row in forty seems worse.
_SIGMAS = 2.0
# What a column of figures shows at most; numbers beyond it are no measurement.
_MOST = 1e300
_ONLY = {"a": "only in A", "b": "only in B"}
_NO_SPREAD = "spread -: not known, so that chance may look like a loss; take *_perf's -J with -N 3 or more"


_Key = tuple[tuple[str, str], ...]


class _Case(NamedTuple):
    """What rows must share to be held against each other, and the column that is compared."""

    key: _Key
    metric: str

    @property
    def words(self) -> str:
        return _words(self.key)


_Cases = dict[_Case, list[Mapping[str, Any]]]


@click.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--by", "metric", help="The column to compare [default: the first that a row measures].")
@click.option(
    "--within",
    type=click.FloatRange(0, 1),
    default=_DEFAULT_SHARE,
    show_default=True,
    help="Worse by this share is no loss.",
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the rows here; - is stdout.")
def compare(a: Path, b: Path, metric: str | None, within: float, json_file: Path | None) -> None:
    """Whether record B is slower or faster than record A, row by row.

    A and B are records of netlayer, or JSON that nccl-tests or our *_perf wrote with -J.

    Exit 0: nothing in B is worse than in A by more than --within and the spread of A and B; 1: something is, or B lacks
    a row of A; 2: the records cannot be compared.

    \b
    Example:
      netlayer bench compare before.json after.json --by bus_bw_gbs --within 0.02
    """
    check_target("--json", json_file)
    records = _load(a), _load(b)
    if records[0].source != records[1].source:
        rule = f"is {records[1].source}, and A is {records[0].source}"
        raise ConfigError("B", b, rule, "compare records of one source")
    both = _metrics(records[0]) & _metrics(records[1])
    if not both:
        raise ConfigError("B", b, "measures nothing that A does", "give two records of one bench")
    rows = list(compare_rows(records[0], records[1], metric, within))
    if all(row["verdict"] in _ONLY.values() for row in rows):
        field, value = ("--by", metric) if metric else ("B", b)
        rule = f"no row of both records has it; both measure {', '.join(sorted(both))}"
        rule = rule if metric else "has no row that A has"
        raise ConfigError(field, value, rule, "choose one of these" if metric else "give two records of one bench")
    if json_file:
        arguments = {"a": str(a), "b": str(b), "by": metric or "", "within": within}
        record = RunRecord("bench.compare", records[0].source, rows, utc_now(), utc_now(), arguments)
        write_text(json_file, record.to_json())
    if str(json_file) != "-":
        keys = {case.words: case.key for record in records for case in _cases(record, metric)}
        click.echo("\n".join(table(rows, keys)))
    if any(row["verdict"] in ("worse", _ONLY["a"]) for row in rows):
        sys.exit(EXIT_FAILED)


def compare_rows(a: RunRecord, b: RunRecord, metric: str | None, within: float) -> Iterator[dict[str, Any]]:
    """One row for each case of both records, then one for each that only one of them has.

    Where a case comes several times, medians are compared. `ratio` is B over A, None where A is zero.

    Args:
        metric: the column to compare; where None, each row's first that is better the higher, else its first.
        within: a loss up to this share is none.
    """
    ours, theirs = _cases(a, metric), _cases(b, metric)
    for case, mine in ours.items():
        if case in theirs:
            yield _compared(case, mine, theirs[case], within)
    for side, cases, other in (("a", ours, theirs), ("b", theirs, ours)):
        for case in cases:
            if case not in other:
                value = statistics.median(_values(cases[case], case.metric))
                row = {"what": case.words, "metric": case.metric, "a": None, "b": None, "ratio": None, "spread": None}
                yield {**row, side: value, "verdict": _ONLY[side]}


def table(rows: Sequence[Mapping[str, Any]], keys: Mapping[str, _Key]) -> Iterator[str]:
    """What all rows share, once; the rows as text, each with what is its own; and one line that counts them.

    Args:
        keys: by `what` of the rows.
    """
    several = [keys[row["what"]] for row in rows] if len(rows) > 1 else [()]
    shared = tuple(pair for pair in several[0] if all(pair in key for key in several))
    if shared:
        yield f"all rows: {_words(shared)}"
    own = [_words(tuple(pair for pair in keys[row["what"]] if pair not in shared)) or "-" for row in rows]
    width = max(4, *map(len, own))
    wide = max(6, *(len(row["metric"]) for row in rows))
    yield f"{'row':<{width}}  {'metric':<{wide}}  {'A':>10}  {'B':>10}  {'B/A':>7}  {'spread':>7}  verdict"
    for row, what in zip(rows, own, strict=True):
        figures = f"{_shown(row['a'], '.4g'):>10}  {_shown(row['b'], '.4g'):>10}  {_shown(row['ratio'], '.3f'):>7}"
        figures += f"  {_shown(row['spread'], '.1%'):>7}"
        yield f"{what:<{width}}  {row['metric']:<{wide}}  {figures}  {row['verdict']}"
    counts = {word: sum(row["verdict"] == word for row in rows) for word in ("worse", "better", "same")}
    words = [f"{count} {word}" for word, count in counts.items()]
    alone = {word: sum(row["verdict"] == word for row in rows) for word in _ONLY.values()}
    words += [f"{count} row{'s' * (count != 1)} {word}" for word, count in alone.items() if count]
    if any(row["ratio"] is not None and row["spread"] is None for row in rows):
        yield _NO_SPREAD
    yield ", ".join(words)


def _words(key: _Key) -> str:
    return " ".join(f"{name}={value}" for name, value in key)


def _load(path: Path) -> RunRecord:
    tree = read_json(path)
    return perf_record(tree, path) if is_perf_json(tree) else record_of(tree, path)


def _compared(
    case: _Case, mine: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], within: float
) -> dict[str, Any]:
    first, second = (statistics.median(_values(rows, case.metric)) for rows in (mine, theirs))
    known = [one for rows in (mine, theirs) if (one := _spread(rows, case.metric)) is not None]
    spread = _SIGMAS * math.hypot(*known) if known else None
    gain = _gain(first, second) if case.metric.endswith(_HIGHER) else _gain(second, first)
    least = max(within, spread or 0.0)
    verdict = "worse" if gain < -least else "better" if gain > least else "same"
    ratio = second / first if first else None
    return {"what": case.words, "metric": case.metric, "a": first, "b": second,
            "ratio": ratio, "spread": spread, "verdict": verdict}  # fmt: skip


def _gain(before: float, after: float) -> float:
    """By what share more; from nothing to something it is without end."""
    if before == after:
        return 0.0
    return after / before - 1 if before else math.inf


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _metrics(record: RunRecord) -> set[str]:
    return {key for row in record.rows for key, value in row.items() if _is_metric(key, value)}


def _is_metric(key: str, value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and key.endswith(_HIGHER + _LOWER) and 0 <= value < _MOST  # type: ignore[operator]


def _first_metric(row: Mapping[str, Any]) -> str | None:
    known = [key for key, value in row.items() if _is_metric(key, value)]
    return next((key for key in known if key.endswith(_HIGHER)), known[0] if known else None)


def _cases(record: RunRecord, metric: str | None) -> _Cases:
    found: _Cases = {}
    for row in record.rows:
        column = metric or _first_metric(row)
        if column is not None and _is_metric(column, row.get(column)):
            found.setdefault(_Case(tuple(_key(row)), column), []).append(row)
    return found


def _key(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in sorted(row.items()):
        plain = isinstance(value, str | bool) or (isinstance(value, int) and not _is_metric(name, value))
        if (plain or name == "group") and name not in _NO_KEY:
            yield name, str(value)


def _values(rows: Sequence[Mapping[str, Any]], metric: str) -> list[float]:
    return [float(row[metric]) for row in rows]


def _spread(rows: Sequence[Mapping[str, Any]], metric: str) -> float | None:
    """Robust standard deviation of what the figure comes from, as a share of its median; None where nothing tells it.

    That of several rows alike, or of the single iterations divided by the root of their number: a median scatters less.
    """
    values = _values(rows, metric)
    if len(values) >= 3:
        return _scatter(values) / math.sqrt(len(values))
    each = [row["iterations_us"] for row in rows if isinstance(row.get("iterations_us"), list)]
    times = [float(time) for one in each for time in one if _is_metric("iterations_us", time)]
    return _scatter(times) / math.sqrt(len(times)) if len(times) >= 3 else None


def _scatter(values: Sequence[float]) -> float:
    middle = statistics.median(values)
    mad: float = statistics.median(abs(value - middle) for value in values)
    return _MAD_TO_SIGMA * mad / middle if middle else 0.0

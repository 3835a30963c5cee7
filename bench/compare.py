"""`netlayer bench compare A B`: two records row by row: ratio, spread, verdict.

Rows are alike where all that is no measurement is equal. The spread is that of the single iterations, where a record
keeps them: a difference within it is none. Left out: whether the two machines may be compared at all; it says both.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from netlayer.errors import EXIT_FAILED, ConfigError
from netlayer.results import RunRecord, check_target, load_record, utc_now, write_text

# What is measured, by the end of its key, and whether more of it is better.
_HIGHER = ("_gbs", "tflops", "bus_bw", "alg_bw", "per_s", "mfu_full", "mfu_causal", "speedup")
_LOWER = ("_us", "_ms", "_s", "_ns")
_NO_KEY = ("wrong", "ok", "round", "iterations_us", "rank", "cycle", "hostname")
_DEFAULT_SHARE = 0.05
_MAD_TO_SIGMA = 1.4826


@click.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--by", "metric", help="The column to compare [default: the first that both records measure].")
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

    Exit 0: nothing in B is worse than in A by more than --within and the spread of A; 1: something is; 2: the records
    cannot be compared.

    \b
    Example:
      netlayer bench compare before.json after.json --by bus_bw_gbs --within 0.02
    """
    check_target("--json", json_file)
    records = load_record(a), load_record(b)
    if records[0].source != records[1].source:
        rule = f"is {records[1].source}, and A is {records[0].source}"
        raise ConfigError("B", b, rule, "compare records of one source")
    chosen = metric or _first_metric(records, b)
    rows = list(compare_rows(records[0], records[1], chosen, within))
    if not rows:
        known = ", ".join(sorted(_metrics(records[0]) & _metrics(records[1]))) or "nothing"
        raise ConfigError("--by", chosen, f"no row of both records has it; both measure {known}", "choose one of these")
    if json_file:
        arguments = {"a": str(a), "b": str(b), "by": chosen, "within": within}
        record = RunRecord("bench.compare", records[0].source, rows, utc_now(), utc_now(), arguments)
        write_text(json_file, record.to_json())
    if str(json_file) != "-":
        click.echo("\n".join(table(rows, chosen)))
    if any(row["verdict"] == "worse" for row in rows):
        sys.exit(EXIT_FAILED)


def compare_rows(a: RunRecord, b: RunRecord, metric: str, within: float) -> Iterator[dict[str, Any]]:
    """One row for each key that both records have; where a key comes several times, medians are compared."""
    ours, theirs = _by_key(a, metric), _by_key(b, metric)
    higher = metric.endswith(_HIGHER)
    for key, mine in ours.items():
        if key not in theirs:
            continue
        first, second = (statistics.median(_values(rows, metric)) for rows in (mine, theirs[key]))
        spread = max(_spread(mine, metric), _spread(theirs[key], metric))
        ratio = second / first if first else float("nan")
        gain = ratio - 1 if higher else 1 / ratio - 1 if ratio else 0.0
        least = max(within, spread)
        verdict = "worse" if gain < -least else "better" if gain > least else "same"
        yield {"what": " ".join(f"{name}={value}" for name, value in key), "a": first, "b": second,
               "ratio": ratio, "spread": spread, "verdict": verdict}  # fmt: skip


def table(rows: Sequence[Mapping[str, Any]], metric: str) -> Iterator[str]:
    """The rows as text, and one line that counts them."""
    width = max(4, *(len(row["what"]) for row in rows))
    yield f"{'row':<{width}}  {'A ' + metric:>16}  {'B ' + metric:>16}  {'B/A':>7}  {'spread':>7}  verdict"
    for row in rows:
        figures = f"{row['a']:>16.4g}  {row['b']:>16.4g}  {row['ratio']:>7.3f}  {row['spread']:>7.1%}"
        yield f"{row['what']:<{width}}  {figures}  {row['verdict']}"
    counts = {word: sum(row["verdict"] == word for row in rows) for word in ("worse", "better", "same")}
    yield ", ".join(f"{count} {word}" for word, count in counts.items())


def _metrics(record: RunRecord) -> set[str]:
    return {key for row in record.rows for key, value in row.items() if _is_metric(key, value)}


def _is_metric(key: str, value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and key.endswith(_HIGHER + _LOWER) and key != "iterations_us"


def _first_metric(records: tuple[RunRecord, RunRecord], b: Path) -> str:
    both = _metrics(records[0]) & _metrics(records[1])
    first = next((key for row in records[0].rows for key in row if key in both and key.endswith(_HIGHER)), None)
    first = first or next((key for row in records[0].rows for key in row if key in both), None)
    if first is None:
        raise ConfigError("B", b, "measures nothing that A does", "give two records of one bench")
    return first


def _by_key(record: RunRecord, metric: str) -> dict[tuple[tuple[str, str], ...], list[Mapping[str, Any]]]:
    found: dict[tuple[tuple[str, str], ...], list[Mapping[str, Any]]] = {}
    for row in record.rows:
        if _is_metric(metric, row.get(metric)):
            found.setdefault(tuple(_key(row)), []).append(row)
    return found


def _key(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in row.items():
        plain = isinstance(value, str | bool) or (isinstance(value, int) and not _is_metric(name, value))
        if plain and name not in _NO_KEY:
            yield name, str(value)


def _values(rows: Sequence[Mapping[str, Any]], metric: str) -> list[float]:
    return [float(row[metric]) for row in rows]


def _spread(rows: Sequence[Mapping[str, Any]], metric: str) -> float:
    """Robust standard deviation of what the figure comes from, as a share of its median.

    That of several rows alike, or of the single iterations divided by the root of their number: a median scatters less.
    """
    values = _values(rows, metric)
    if len(values) >= 3:
        return _scatter(values) / math.sqrt(len(values))
    times = [time for row in rows for time in row.get("iterations_us", ())]
    return _scatter(times) / math.sqrt(len(times)) if len(times) >= 3 else 0.0


def _scatter(values: Sequence[float]) -> float:
    middle = statistics.median(values)
    mad: float = statistics.median(abs(value - middle) for value in values)
    return _MAD_TO_SIGMA * mad / middle if middle else 0.0

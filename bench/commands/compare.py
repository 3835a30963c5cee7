"""`netlayer bench compare A B`: compare two records row by row, with ratio, spread and verdict.

Rows match if all their columns that are not measurements are equal. The spread is the difference that noise may cause,
estimated from at least three matching rows, else from single iterations if the record has them; a smaller difference
counts as none. Wrong data on either side fails, whatever the speed. Runs on different GPUs or different numbers of
ranks or hosts are compared only on request; a different NCCL version, NVLS state or CUDA graph use is reported, since
it may be the subject of the comparison.

Several runs in a file count as one record; their rows name the collective. Text has fewer columns than JSON, so if one
side is text, rows match by the columns that both sides have.
"""

from __future__ import annotations

import json
import math
import re
import stat
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import click

from bench.accept.evidence import recognise
from bench.accept.evidence.log import Log, Text, read_text
from bench.perf.table import is_perf_json, perf_record
from netlayer.errors import EXIT_FAILED, CheckFailed, ConfigError
from netlayer.results import RunRecord, check_target, record_of, utc_now, write_text

# Suffixes of measured columns, for which higher or lower is better.
_HIGHER = ("_gbs", "tflops", "bus_bw", "alg_bw", "per_s", "mfu_full", "mfu_causal", "speedup")
_LOWER = ("_us", "_ms", "_s", "_ns")
# Columns that are results, or that number repetitions of one case. Ranks are not repetitions: a slow one must show.
_NO_KEY = (
    "wrong", "ok", "round", "cycle", "hostname", "at", "algorithm", "protocol", "host_bound", "best_other",
    "peak_bytes", "nccl",
)  # fmt: skip
_DEFAULT_SHARE = 0.05
_MAD_TO_SIGMA = 1.4826
# Spreads of the difference that count as noise: without any change, about one row in forty seems worse.
_SIGMAS = 2.0
# Larger numbers are not measurements.
_MOST = 1e300
_ONLY = {"a": "only in A", "b": "only in B"}
_NO_SPREAD = "spread -: not known, so that chance may look like a loss; take *_perf's -J with -N 3 or more"


# Facts that make two runs incomparable, and facts that may be the subject of the comparison; keys of `Figure.facts`.
_HARDWARE = {"device": "GPU", "ranks": "ranks", "hosts": "hosts"}
_SETTINGS = {"nccl": "NCCL", "nvls": "NVLS", "graph": "CUDA graph"}
_MAX_BYTES = 32 << 20
_MAX_OBJECTS = 2_000_000
_PLACES = {"out of place": False, "in place": True}
# Names of nccl-tests.
_TYPES = {
    *("int8", "uint8", "int32", "uint32", "int64", "uint64", "half", "float", "double", "bfloat16"),
    *("f8e4m3", "f8e5m2", "fp8_e4m3", "fp8_e5m2", "float16", "float32", "float64"),
}
_OPERATORS = {"sum", "prod", "max", "min", "avg", "mulsum"}
# Not any bracket: a line that mpirun has labelled starts with one too.
_JSON = re.compile(r"\s*(?:\{|\[\s*[\[{])")
_REMEDY = "give two records of netlayer, or two outputs (text or -J) of nccl-tests or our *_perf"


_Key = tuple[tuple[str, str], ...]


class _Case(NamedTuple):
    """Key that rows must share to be compared, and the column that is compared."""

    key: _Key
    metric: str

    @property
    def description(self) -> str:
        return _describe_key(self.key)


_Cases = dict[_Case, list[Mapping[str, Any]]]


@dataclass(frozen=True)
class Side:
    """One of the two records that are compared.

    Args:
        record: rows of all runs in the file.
        facts: values of hardware and settings over all runs, by (collective, name of the fact).
        failures: descriptions of wrong data and failed runs.
        is_text: True if it was text, which has fewer columns.
    """

    record: RunRecord
    facts: Mapping[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    failures: Sequence[str] = ()
    is_text: bool = False


@click.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--by", "metric", help="The column to compare [default: the first that a row measures].")
@click.option(
    "--within",
    type=click.FloatRange(0, 1),
    default=_DEFAULT_SHARE,
    show_default=True,
    help="Ignore a loss up to this share.",
)
@click.option("--across-hardware", is_flag=True, help="Compare although GPU, ranks or hosts differ.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the rows here; - is stdout.")
def compare(a: Path, b: Path, metric: str | None, within: float, across_hardware: bool, json_file: Path | None) -> None:
    """Compare record B with record A row by row: is it slower or faster?

    A and B are records of netlayer, or output of nccl-tests or our *_perf: text, or JSON (-J).

    Exit 0: nothing in B is worse than in A by more than --within and the spread of A and B; 1: something is, B lacks a
    row of A, or either has wrong data; 2: the records cannot be compared.

    \b
    Examples:
      netlayer bench compare before.json after.json --by bus_bw_gbs --within 0.02
      netlayer bench compare nccl_2.27.txt nccl_2.28.txt
    """
    check_target("--json", json_file)
    sides = _load(a), _load(b)
    failures = [f"{name}: {failure}" for name, side in zip("AB", sides, strict=True) for failure in side.failures]
    try:
        rows, keys = _compare(b, sides, metric, within, across_hardware)
    except ConfigError as exc:
        if not failures:
            raise
        raise CheckFailed(f"{'; '.join(failures)}; and B cannot be compared: {exc}") from exc
    records = [side.record for side in sides]
    notes = [*_differences(sides, {**_HARDWARE, **_SETTINGS}), *_unknown(sides)]
    rows += [{"what": failure, "metric": "data", "verdict": "failed"} for failure in failures]
    if json_file:
        arguments = {"a": str(a), "b": str(b), "by": metric or "", "within": within, "differences": notes}
        record = RunRecord("bench.compare", records[0].source, rows, utc_now(), utc_now(), arguments)
        write_text(json_file, record.to_json())
    if str(json_file) != "-":
        for failure in failures:
            click.echo(f"failed: {failure}")
        for note in notes:
            click.echo(f"note: {note}")
        click.echo("\n".join(table(rows[: len(rows) - len(failures)], keys)))
    if failures or any(row["verdict"] in ("worse", _ONLY["a"]) for row in rows):
        sys.exit(EXIT_FAILED)


def _compare(
    b: Path, sides: tuple[Side, Side], metric: str | None, within: float, across_hardware: bool
) -> tuple[list[dict[str, Any]], dict[str, _Key]]:
    """Return the rows of the comparison, and the keys of both records by their description.

    Raises:
        ConfigError: the two cannot be compared.
    """
    first, second = _with_common_columns(sides)
    if first.source != second.source:
        rule = f"is {second.source}, and A is {first.source}"
        raise ConfigError("B", b, rule, "compare records of one source")
    both = _metrics(first) & _metrics(second)
    if not both:
        raise ConfigError("B", b, "measures nothing that A does", "give two records of one bench")
    if (other := _differences(sides, _HARDWARE)) and not across_hardware:
        rule = f"is not comparable with A: {'; '.join(other)}"
        raise ConfigError("B", b, rule, "give two runs on the same hardware, or add --across-hardware")
    rows = list(compare_rows(first, second, metric, within))
    if all(row["verdict"] in _ONLY.values() for row in rows):
        if metric:
            rule = f"no row of both records has it; both measure {', '.join(sorted(both))}"
            raise ConfigError("--by", metric, rule, "choose one of these")
        names = [sorted({str(row.get("collective", "")) for row in record.rows} - {""}) for record in (first, second)]
        rule = "has no row that A has"
        if names[0] and names[1] and not {*names[0]} & {*names[1]}:
            rule = f"is not comparable with A: it ran {', '.join(names[1])}, and A {', '.join(names[0])}"
        raise ConfigError("B", b, rule, "give two records of one bench")
    return rows, {case.description: case.key for record in (first, second) for case in _cases(record, metric)}


def _differences(sides: tuple[Side, Side], names: Mapping[str, str]) -> list[str]:
    """Return the facts that both sides have for a common collective and that differ, as sentences."""
    differences: dict[str, None] = {}
    for collective, name in sides[0].facts:
        values_a, values_b = (side.facts.get((collective, name), frozenset()) for side in sides)
        if name in names and values_a and values_b and values_a != values_b:
            differences[f"{names[name]} is {_join_values(values_a)} in A, {_join_values(values_b)} in B"] = None
    return list(differences)


def _unknown(sides: tuple[Side, Side]) -> Iterator[str]:
    """Yield a note for each hardware fact that only one side tells, so that it cannot be compared."""
    for name, what in _HARDWARE.items():
        known = [frozenset().union(*(values for (_, n), values in side.facts.items() if n == name)) for side in sides]
        if bool(known[0]) != bool(known[1]):
            side, other = ("A", "B") if known[0] else ("B", "A")
            yield f"{what} is {_join_values(known[0] or known[1])} in {side}, and {other} does not say"


def _join_values(values: frozenset[str]) -> str:
    return " and ".join(sorted(values))


def _with_common_columns(sides: tuple[Side, Side]) -> tuple[RunRecord, RunRecord]:
    """Return both records; if one is text, without the columns that the other one lacks."""
    records = tuple(side.record for side in sides)
    if any(side.is_text for side in sides):
        names = [{name for row in record.rows for name in row} for record in records]
        common = names[0] & names[1]
        records = tuple(
            replace(record, rows=[{name: row[name] for name in row if name in common} for row in record.rows])
            for record in records
        )
    return records[0], records[1]


def compare_rows(a: RunRecord, b: RunRecord, metric: str | None, within: float) -> Iterator[dict[str, Any]]:
    """Yield one row for each case of both records, then one for each case that only one of them has.

    If a case has several rows, their medians are compared. `ratio` is B / A, None if A is zero.

    Args:
        a, b: the records.
        metric: column to compare; None: each row's first one that is better if higher, else its first.
        within: a loss up to this share is ignored.
    """
    cases_a, cases_b = _cases(a, metric), _cases(b, metric)
    for case, rows_a in cases_a.items():
        if case in cases_b:
            yield _compare_case(case, rows_a, cases_b[case], within)
    for side, cases, other in (("a", cases_a, cases_b), ("b", cases_b, cases_a)):
        for case in cases:
            if case not in other:
                value = statistics.median(_values(cases[case], case.metric))
                row = {
                    "what": case.description,
                    "metric": case.metric,
                    "a": None,
                    "b": None,
                    "ratio": None,
                    "spread": None,
                }
                yield {**row, side: value, "verdict": _ONLY[side]}


def table(rows: Sequence[Mapping[str, Any]], keys: Mapping[str, _Key]) -> Iterator[str]:
    """Yield the lines of the table: columns common to all rows, then the rows, then a line of counts.

    Args:
        rows: rows of the comparison.
        keys: key of each row, by its `what`.
    """
    several = [keys[row["what"]] for row in rows] if len(rows) > 1 else [()]
    shared = tuple(pair for pair in several[0] if all(pair in key for key in several))
    if shared:
        yield f"all rows: {_describe_key(shared)}"
    own_keys = [_describe_key(tuple(pair for pair in keys[row["what"]] if pair not in shared)) or "-" for row in rows]
    width = max(4, *map(len, own_keys))
    metric_width = max(6, *(len(row["metric"]) for row in rows))
    yield f"{'row':<{width}}  {'metric':<{metric_width}}  {'A':>10}  {'B':>10}  {'B/A':>7}  {'spread':>7}  verdict"
    for row, what in zip(rows, own_keys, strict=True):
        figures = f"{_cell(row['a'], '.4g'):>10}  {_cell(row['b'], '.4g'):>10}  {_cell(row['ratio'], '.3f'):>7}"
        figures += f"  {_cell(row['spread'], '.1%'):>7}"
        yield f"{what:<{width}}  {row['metric']:<{metric_width}}  {figures}  {row['verdict']}"
    counts = {word: sum(row["verdict"] == word for row in rows) for word in ("worse", "better", "same")}
    counts_text = [f"{count} {word}" for word, count in counts.items()]
    one_sided = {word: sum(row["verdict"] == word for row in rows) for word in _ONLY.values()}
    counts_text += [f"{count} row{'s' * (count != 1)} {word}" for word, count in one_sided.items() if count]
    if any(row["ratio"] is not None and row["spread"] is None for row in rows):
        yield _NO_SPREAD
    yield ", ".join(counts_text)


def _describe_key(key: _Key) -> str:
    return " ".join(f"{name}={value}" for name, value in key)


def _load(path: Path) -> Side:
    """Load a record, an nccl-tests output or a *_perf output.

    Raises:
        ConfigError: it cannot be read, is too large, or has no known format.
    """
    content = _read(path)
    if not _JSON.match(content):
        logs = [log for log in recognise.parse_all(read_text(path)) if log.figures]
        if not logs or any(figure.unit != "GB/s bus" for log in logs for figure in log.figures):
            raise ConfigError("record", path, "holds no bandwidths of nccl-tests", _REMEDY)
        rows = [row for log in logs for row in _text_rows(log) if row["collective"]]
        if not rows:
            rule = "does not say which collective it ran"
            raise ConfigError("record", path, rule, "give the whole output, with the line of its program")
        return Side(
            RunRecord("nccl-tests", "measured", rows, "", ""), _facts_of_logs(logs), _failures(logs), is_text=True
        )
    try:
        tree = json.loads(content)
    except RecursionError as exc:
        raise ConfigError("record", path, "is nested too deep", _REMEDY) from exc
    except ValueError as exc:
        raise ConfigError("record", path, f"is not JSON ({str(exc)[:100]})", _REMEDY) from exc
    if not is_perf_json(tree):
        record = record_of(tree, path)
        return Side(record, _record_facts(record), _row_failures(record))
    record = perf_record(tree, path)
    logs = list(recognise.parse_all(Text(str(path), content)))
    return Side(record, _facts_of_logs(logs), _failures(logs))


def _read(path: Path) -> str:
    """Read a file that is small enough to be parsed.

    Raises:
        ConfigError: it is too large, not a regular file, or cannot be read.
    """
    try:
        state = path.stat()
        if not stat.S_ISREG(state.st_mode):
            raise ConfigError("record", path, "cannot be read (no regular file)", _REMEDY)
        if state.st_size > _MAX_BYTES:
            raise ConfigError("record", path, f"has {state.st_size >> 20:,} MiB, at most {_MAX_BYTES >> 20}", _REMEDY)
        content = path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as exc:
        raise ConfigError("record", path, f"cannot be read ({exc.strerror})", "give a file that exists") from exc
    if content.count("{") + content.count("[") > _MAX_OBJECTS:
        raise ConfigError("record", path, f"holds more than {_MAX_OBJECTS:,} objects", _REMEDY)
    return content


def _text_rows(log: Log) -> Iterator[dict[str, Any]]:
    """Yield rows like those of JSON output, with the columns that a text table of nccl-tests has."""
    for figure in log.figures:
        cells = figure.series.rpartition(", ")[0].split()
        size = figure.facts.get("bytes")
        place = next((value for name, value in _PLACES.items() if figure.at.endswith(f" {name}")), None)
        row = {"collective": figure.facts.get("collective", ""), "size_bytes": size, "in_place": place}
        kinds = [cell for cell in cells if cell in _TYPES]
        row["dtype"] = kinds[-1] if kinds else ""
        row["op"] = next((cell for cell in reversed(cells) if cell in _OPERATORS), "none")
        yield {**row, "bus_bw_gbs": figure.value}


def _facts_of_logs(logs: Sequence[Log]) -> dict[tuple[str, str], frozenset[str]]:
    """Collect the runs' facts on hardware and settings, by (collective, name)."""
    facts: dict[tuple[str, str], set[str]] = defaultdict(set)
    for log in logs:
        for figure in log.figures:
            collective = str(figure.facts.get("collective", ""))
            for name in (*_HARDWARE, *_SETTINGS):
                if name in figure.facts:
                    facts[collective, name].add(_format_fact(name, figure.facts[name]))
    return {key: frozenset(values) for key, values in facts.items()}


def _format_fact(name: str, value: object) -> str:
    if name == "nccl" and isinstance(value, int):
        return f"{value // 10000}.{value // 100 % 100}.{value % 100}"
    return {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _record_facts(record: RunRecord) -> dict[tuple[str, str], frozenset[str]]:
    """Collect the facts of a netlayer record: its devices and NCCL version."""
    devices = [str(device) for device in record.devices]
    versions = record.environment.get("versions") if isinstance(record.environment, Mapping) else None
    library = versions.get("nccl") if isinstance(versions, Mapping) else None
    facts = {("", "device"): frozenset(devices), ("", "nccl"): frozenset([str(library)] if library else [])}
    return {key: values for key, values in facts.items() if values}


def _failures(logs: Sequence[Log]) -> list[str]:
    """Describe wrong data and aborted runs."""
    return [
        f"{finding.check}: {finding.figure}" for log in logs for finding in log.findings if finding.verdict == "FAIL"
    ]


def _row_failures(record: RunRecord) -> list[str]:
    """Describe the rows of a netlayer record with wrong results."""
    wrong = [row for row in record.rows if row.get("ok") is False or _num_wrong(row.get("wrong"))]
    if not wrong:
        return []
    first = _describe_key(tuple(_key(wrong[0]))) or "the first"
    return [f"{len(wrong)} of {len(record.rows)} rows came out wrong, first {first}"]


def _num_wrong(value: object) -> float:
    """Return the number of wrong elements; 0 for values that are not numbers, such as N/A for unchecked data."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and value == value else 0.0  # type: ignore[arg-type]


def _compare_case(
    case: _Case, rows_a: Sequence[Mapping[str, Any]], rows_b: Sequence[Mapping[str, Any]], within: float
) -> dict[str, Any]:
    first, second = (statistics.median(_values(rows, case.metric)) for rows in (rows_a, rows_b))
    spreads = [one for rows in (rows_a, rows_b) if (one := _spread(rows, case.metric)) is not None]
    spread = _SIGMAS * math.hypot(*spreads) if spreads else None
    gain = _gain(first, second) if case.metric.endswith(_HIGHER) else _gain(second, first)
    threshold = max(within, spread or 0.0)
    verdict = "worse" if gain < -threshold else "better" if gain > threshold else "same"
    ratio = second / first if first else None
    return {"what": case.description, "metric": case.metric, "a": first, "b": second,
            "ratio": ratio, "spread": spread, "verdict": verdict}  # fmt: skip


def _gain(before: float, after: float) -> float:
    """Return the relative increase; infinite from zero."""
    if before == after:
        return 0.0
    return after / before - 1 if before else math.inf


def _cell(value: float | None, form: str) -> str:
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
    cases: _Cases = {}
    for row in record.rows:
        column = metric or _first_metric(row)
        if column is not None and _is_metric(column, row.get(column)):
            cases.setdefault(_Case(tuple(_key(row)), column), []).append(row)
    return cases


def _key(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in sorted(row.items()):
        plain = isinstance(value, str | bool) or (isinstance(value, int) and not _is_metric(name, value))
        if (plain or name == "group") and name not in _NO_KEY:
            yield name, str(value)


def _values(rows: Sequence[Mapping[str, Any]], metric: str) -> list[float]:
    return [float(row[metric]) for row in rows]


def _spread(rows: Sequence[Mapping[str, Any]], metric: str) -> float | None:
    """Return the relative robust standard error of the compared value; None if it cannot be estimated.

    Estimated from at least three matching rows, else from single iterations; divided by the root of their number.
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

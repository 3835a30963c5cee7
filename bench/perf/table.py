"""Rows of a bench and the record that they make, as nccl-tests writes it: the text table and the JSON of `-J`.

`PerfRow` is what a rank reports, `Collector` makes records out of such rows, `LiveTable` prints each as it comes. The
layout is that of nccl-tests 2.19.6, so that programs which read its output read ours. It has all that
nccl-tests prints for the flags that we take, and further `#` lines: the backend, and NCCL's algorithm and NVLS.
`perf_record` reads such JSON, ours or nccl-tests', so that two runs can be compared. Without torch: tables are made
where there is none. Not covered: whether a figure is good; `netlayer accept judge` says that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple, get_args

import click

import netlayer
from bench.perf.collectives.collective import UNKNOWN
from bench.perf.options import PerfOptions
from netlayer.errors import ConfigError
from netlayer.results import Row, RunRecord, Source, utc_now, utc_text

_JSON_VERSION = 3
_TIME_FORMAT = "%Y-%m-%d %H:%M:%S"
# A bandwidth below this share of NCCL_TESTS_MIN_BW fails.
MIN_BW_SHARE = 0.9
_TITLES = ("algbw", "busbw", "#wrong", "i_min", "i_max", "i_p99", "i_cv%")
_UNITS = ("(us)", "(GB/s)", "(GB/s)", "", "(us)", "(us)", "(us)", "(%)")
# Which call it was, and NCCL's choices for it, which nccl-tests' results do not have.
_CALL_KEYS = ("size_bytes", "dtype", "op", "root", "in_place", "algorithm", "protocol", "wire_bw_gbs")
# Widths of the figures that `_side` writes under the titles; from the fifth on those of -I.
_WIDTHS = (7, 6, 6, 6, 7, 7, 7, 7)
_REMEDY = "take it again with -J"


@dataclass(frozen=True)
class Timing:
    """Times of a size's calls: the mean of all, and statistics of single calls where these were timed.

    Args:
        time_us, cpu_time_us: until the calls were done, and until they were launched, of one call.
        min_us to cv_pct: of single calls, the longest of the ranks, without the first ones (-K); percentiles by
            nearest rank.
        iterations_us: every single call.
    """

    time_us: float
    cpu_time_us: float
    min_us: float | None = None
    max_us: float | None = None
    avg_us: float | None = None
    p50_us: float | None = None
    p95_us: float | None = None
    p99_us: float | None = None
    stdev_us: float | None = None
    cv_pct: float | None = None
    iterations_us: Sequence[float] | None = None


@dataclass(frozen=True)
class PerfRow:
    """One measurement: one size of one collective, out of place or in place. All ranks report the same.

    Args:
        size_bytes: of the larger buffer; less than was asked for where shares are rounded down.
        count: elements of one part.
        root: -1 where there is none.
        wrong: elements that came out wrong on all ranks together; None where there was no check.
        emulated: what ran instead where the library lacks the call; empty where it has it.
        algorithm, protocol: in NCCL's words; `unknown` where it did not tell.
        wire_bw_gbs: what the busiest rank's link carried; None where it is not known.
        at_s: end of the measurement, in seconds since 1970.
        cycle: number of the pass over all sizes (-N).
    """

    size_bytes: int
    count: int
    dtype: str
    op: str
    root: int
    in_place: bool
    timing: Timing
    alg_bw_gbs: float
    bus_bw_gbs: float
    wrong: int | None
    emulated: str
    algorithm: str
    protocol: str
    wire_bw_gbs: float | None
    at_s: float
    cycle: int

    def to_row(self) -> dict[str, Any]:
        """Return the columns of a record, which holds JSON values only: `at` is text, unknown statistics are absent."""
        row: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Timing):
                # In the middle of the row, where the columns always stood.
                row |= {name: figure for name, figure in asdict(value).items() if figure is not None}
            elif field.name == "at_s":
                row["at"] = utc_text(value)
            else:
                row[field.name] = value
        return row

    @classmethod
    def from_row(cls, row: Row) -> PerfRow:
        """Read the columns of a record."""
        timing = Timing(**{field.name: row[field.name] for field in fields(Timing) if field.name in row})
        at_s = datetime.fromisoformat(row["at"]).timestamp()
        plain = {field.name: row[field.name] for field in fields(cls) if field.name in row}
        return cls(timing=timing, at_s=at_s, **plain)


class Started(NamedTuple):
    """Begin of a collective; `config` is what was resolved: devices, versions, sizes."""

    name: str
    config: dict[str, Any]


OnRow = Callable[[RunRecord, PerfRow], None]  # a row, and the record it will stand in, so far without rows


class Collector:
    """Builds records out of what a rank reports.

    Args:
        on_start: called with each record, without rows, when its collective begins.
        on_row: called with each row, and its record as in `on_start`.
        environment: of the processes that run all collectives.
    """

    def __init__(
        self,
        options: PerfOptions,
        on_start: Callable[[RunRecord], None] | None = None,
        on_row: OnRow | None = None,
        environment: Mapping[str, Any] | None = None,
    ) -> None:
        self._options, self._on_start, self._on_row = options, on_start, on_row
        self._environment = environment or {}
        self._records: list[RunRecord] = []
        self._begun: RunRecord | None = None
        self._rows: list[PerfRow] = []

    def receive(self, message: object) -> None:
        """Take one report of a rank."""
        if isinstance(message, Started):
            self._close()  # ranks do not report an end: the next collective's start is it
            self._begun = self._open(message)
            if self._on_start:
                self._on_start(self._begun)
            return
        assert isinstance(message, PerfRow)
        # `Started` comes first, from the same rank and over the same pipe.
        assert self._begun is not None
        self._rows.append(message)
        if self._on_row:
            self._on_row(self._begun, message)

    def finish(self) -> list[RunRecord]:
        """Return all records, once the ranks have ended."""
        self._close()
        return self._records

    def _open(self, started: Started) -> RunRecord:
        devices = [
            f"{device['hostname']} {device['device']} {device['device_info']}" for device in started.config["devices"]
        ]
        return RunRecord(
            name=f"bench.{started.name}",
            source="measured",
            rows=[],  # filled in by `_close`, as the end is: `on_start` and `on_row` need the rest before
            started_utc=utc_now(),
            ended_utc="",
            arguments=asdict(self._options),
            config=started.config,
            environment=self._environment,
            devices=devices,
        )

    def _close(self) -> None:
        if self._begun is not None:
            rows = [row.to_row() for row in self._rows]
            self._records.append(replace(self._begun, rows=rows, ended_utc=utc_now()))
        self._begun, self._rows = None, []


class LiveTable:
    """Prints each row as it comes, and keeps it in case the run is interrupted."""

    def __init__(self) -> None:
        self._begun: RunRecord | None = None
        self._rows: list[PerfRow] = []

    def start(self, record: RunRecord) -> None:
        self._begun = record
        click.echo(format_head(record), nl=False)

    def add(self, record: RunRecord, row: PerfRow) -> None:
        self._rows.append(row)
        click.echo(format_row(row, record), nl=False)  # click flushes: a person sees each figure when it is there

    def so_far(self) -> RunRecord | None:
        """Return the record of the complete lines until now; None if there is none."""
        # A line of the table is two rows, out of place and in place: one half alone has no place in the files.
        rows = [row.to_row() for row in self._rows[: len(self._rows) // 2 * 2]]
        return replace(self._begun, rows=rows, ended_utc=utc_now()) if self._begun and rows else None


def format_table(record: RunRecord) -> str:
    """Format the whole output of one bench, with its closing lines."""
    # From the record's rows, not from what was measured: a file that is read again prints the same table.
    lines = (format_row(PerfRow.from_row(row), record) for row in record.rows)
    return "".join([format_head(record), *lines, format_foot(record)])


def format_head(record: RunRecord) -> str:
    """Format the lines above the first row."""
    arguments, config = record.arguments, record.config
    version, factor = config["nccl_version"], arguments["step_factor"]
    step = f"{factor}(factor)" if factor > 1 else f"{arguments['step_bytes']}(bytes)"
    lines = [
        # No headers were compiled in: both versions are of the library that runs.
        f"# nccl-tests version netlayer-{netlayer.__version__} nccl-headers={version} nccl-library={version}",
        f"# Collective test starting: {_program(record)}",
        f"# nThread 1 nGpus {config['ngpus']} minBytes {arguments['min_bytes']} maxBytes {arguments['max_bytes']}"
        f" step: {step} warmup iters: {arguments['warmup_iters']} iters: {arguments['iters']}"
        f" agg iters: {arguments['agg_iters']} validation: {arguments['check']} graph: {arguments['cudagraph']}"
        f" unalign: {arguments['unalign']}",
        # Ours alone, as a comment: programs that read nccl-tests' table skip comments.
        f"# Backend: {config['library']}",
    ]
    if arguments["per_iter"]:
        skipped = arguments["per_iter_skip"]
        skip = f"; summary skips first {skipped} iterations" if skipped else ""
        lines.append(f"# Per-Iteration Report: {config['clock']} timing; i_* uses max over process rows{skip} ")
    lines += ["#", "# Using devices", *map(_device_line, config["devices"])]
    # In nccl-tests' words, for programs look for this line.
    if config["max_bytes"] < arguments["max_bytes"]:
        lines += ["#", f"# Reducing maxBytes to {config['max_bytes']} due to memory limitation"]
    return "\n".join([*lines, "#", *_titles(arguments)]) + "\n"


def format_row(row: PerfRow, record: RunRecord) -> str:
    """Format one row: the front and the out-of-place side, or the in-place side and the end of the line."""
    side = _side(row, record.arguments)
    if row.in_place:
        # The in-place side closes the line, so the line's one time stands there.
        at = datetime.fromtimestamp(row.at_s).astimezone()
        stamp = f"{at.strftime(_TIME_FORMAT):>21}" if record.arguments["timestamps"] else ""
        return f"{side}{stamp}\n"
    return f"{row.size_bytes:12d}  {row.count:12d}  {row.dtype:>8}  {row.op:>6}  {row.root:6d}{side}"


def format_foot(record: RunRecord) -> str:
    """Format the closing lines: wrong data, and the mean bandwidth."""
    wrong, mean = num_failed(record), mean_bus_bw(record)
    # Nobody asked for a bandwidth: no verdict is printed, as by nccl-tests.
    verdict = {None: "", True: "OK", False: "FAILED"}[fast_enough(record)]
    spoken = "".join(f"# {line}\n" for line in algorithm_lines(record))
    return (
        f"{spoken}# {'Out of bounds values':<20} : {wrong} {'FAILED' if wrong else 'OK'}\n"
        f"# {'Avg bus bandwidth':<20} : {mean:g} {verdict}\n"
        f"#\n# Collective test concluded: {_program(record)}\n#\n\n"
    )


def num_failed(record: RunRecord) -> int:
    """Count the measurements with wrong data: nccl-tests' out-of-bounds values."""
    return sum(bool(row["wrong"]) for row in record.rows)


def mean_bus_bw(record: RunRecord) -> float:
    """Return the mean bus bandwidth over all sizes, in place and out of place, in GB/s."""
    # Not weighted by size, as in nccl-tests: small sizes, bound by latency, pull the mean down.
    return sum(row["bus_bw_gbs"] for row in record.rows) / len(record.rows) if record.rows else 0.0


def fast_enough(record: RunRecord) -> bool | None:
    """Return True if the mean reaches the least bandwidth of the options; None if they have none."""
    least = record.arguments["min_bw_gbs"]
    return None if least is None else mean_bus_bw(record) >= least * MIN_BW_SHARE


def nccl_tests_json(record: RunRecord, argv: list[str] | None = None) -> dict[str, Any]:
    """Return the tree that nccl-tests writes with `-J`, with its types; only the key `netlayer` is ours."""
    variables = record.environment.get("variables", {})
    fast = fast_enough(record)
    return {
        "version": _JSON_VERSION,
        "start_time": _local_time(record.started_utc),
        "args": sys.argv if argv is None else argv,
        "env": [f"{name}={value}" for name, value in variables.items()],
        "nccl_version": record.config["nccl_version"],
        "config": _json_config(record),
        "results": [_json_result(out, into, record.arguments) for out, into in _pairs(record)],
        "out_of_bounds": {"count": num_failed(record), "okay": _word(num_failed(record) == 0)},
        "average_bus_bandwidth": {
            "bandwidth": round(mean_bus_bw(record), 6),
            "okay": "unchecked" if fast is None else _word(fast),
        },
        "errors": [],  # `bench.perf.command` puts here why a run ended early
        "end_time": _local_time(record.ended_utc),
        "netlayer": {
            "source": record.source,
            "backend": record.config["backend"],
            "emulated": sorted({row["emulated"] for row in record.rows} - {""}),
            "nvls": {"multicast": record.config["nvls"], "used": nvls_used(record)},
            "calls": [{key: row[key] for key in _CALL_KEYS} for row in record.rows],
            "environment": record.environment,
        },
    }


def is_perf_json(tree: object) -> bool:
    """Whether nccl-tests or one of ours wrote it."""
    return isinstance(tree, dict) and "results" in tree and "nccl_version" in tree


def perf_record(tree: Mapping[str, Any], path: Path) -> RunRecord:
    """Two rows a size, out of place and in place, with the keys of our own records; `path` names it in errors.

    Raises:
        ConfigError: a result lacks its size or figures, or there is none.
    """
    try:
        name = Path(str(tree["args"][0])).name.partition("_perf")[0]
        rows = [row for result in tree["results"] for row in _nccl_tests_rows(name, result)]
        source: Source = tree.get("netlayer", {}).get("source", "measured")
        started, ended = str(tree["start_time"]), str(tree["end_time"])
        # A run that ended before its first size leaves such a file, and there is nothing in it to compare.
        if not rows or source not in get_args(Source):
            raise ValueError("no measurement")
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError) as exc:
        rule = f"is JSON of nccl-tests, but incomplete or of another structure ({exc!r})"
        raise ConfigError("record", path, rule, _REMEDY) from exc
    return RunRecord(f"nccl-tests.{name}", source, rows, started, ended)


def uses_nvls(algorithm: str) -> bool | None:
    """Whether an algorithm reduces or copies in the switch; None where it is unknown.

    Symmetric kernels that do so have MC, for multicast, in their name.
    """
    if algorithm == UNKNOWN:
        return None
    return "NVLS" in algorithm or "MC" in algorithm


def nvls_used(record: RunRecord) -> bool | None:
    """Whether any call was reduced or copied in the switch; None where NCCL did not tell of every one."""
    uses = [uses_nvls(row["algorithm"]) for row in record.rows]
    if any(uses):
        return True
    return None if None in uses or not uses else False


def algorithm_lines(record: RunRecord) -> Iterator[str]:
    """Yield lines for below a table: NVLS, and each algorithm with its sizes; none where it is not NCCL."""
    if not record.config["nccl_version"]:
        return
    used = {True: "yes", False: "no", None: UNKNOWN}[nvls_used(record)]
    yield f"NVLS used: {used} (multicast: {record.config['nvls']})"
    for algorithm, rows in groupby(record.rows, key=_algorithm_words):
        yield f"Algorithm {_size_range(list(rows))}: {algorithm}"


def _program(record: RunRecord) -> str:
    return f"{record.name.removeprefix('bench.')}_perf"


def _device_line(device: Mapping[str, Any]) -> str:
    who = f"Rank {device['rank']:2d} Group {device['group']:2d} Pid {device['pid']:6d} on {device['hostname']:>10}"
    return f"#  {who} device {device['device']:2d} [{device['device_hex']}] {device['device_info']}"


def _titles(arguments: Mapping[str, Any]) -> Iterator[str]:
    time = "cputime" if arguments["cpu_time"] else "time"
    stamps = ("timestamp", _TIME_FORMAT) if arguments["timestamps"] else ("", "")
    stamp_width = 19 if arguments["timestamps"] else 0
    num_columns = 8 if arguments["per_iter"] else 4  # the last four are those of -I
    blank = _front("", "", "")
    if arguments["per_iter"]:
        yield f"{blank}              out-of-place (+ per-iteration){'':32}in-place (+ per-iteration)"
    else:
        yield f"{blank}           out-of-place                       in-place          "
    for front, names, stamp in (
        (_front("size", "count", "type", "redop", "root"), (time, *_TITLES), stamps[0]),
        (_front("(B)", "(elements)", ""), _UNITS, stamps[1]),
    ):
        columns = zip(names[:num_columns], _WIDTHS, strict=False)
        side = "".join(f"  {name:>{width}}" for name, width in columns)
        yield f"{front}{side}{side} {stamp:>{stamp_width}}"


def _front(size: str, count: str, dtype: str, op: str = "", root: str = "") -> str:
    return f"# {size:>10}  {count:>12}  {dtype:>8}  {op:>6}  {root:>6}"


def _side(row: PerfRow, arguments: Mapping[str, Any]) -> str:
    timing = row.timing
    time_us = timing.cpu_time_us if arguments["cpu_time"] else timing.time_us
    figures = [_fit(time_us, 7), _fit(row.alg_bw_gbs, 6), _fit(row.bus_bw_gbs, 6)]
    wrong = "  N/A" if row.wrong is None else f"{row.wrong:6g}"
    text = "".join(f"  {figure}" for figure in [*figures, wrong])
    if arguments["per_iter"]:
        single_calls = (timing.min_us, timing.max_us, timing.p99_us, timing.cv_pct)
        text += "".join(f"  {_fit(figure, 7)}" for figure in single_calls if figure is not None)
    return text


def _fit(value: float, width: int) -> str:
    """Format with up to two decimals, as many as the column has room for; beyond that, with an exponent."""
    for decimals in (2, 1, 0):
        text = f"{value:{width}.{decimals}f}"
        if len(text) <= width:
            return text
    # 1.2e+09 is seven characters wide; a column of six has room for no decimal.
    return f"{value:{width}.{1 if width >= 7 else 0}e}"[:width]


def _pairs(record: RunRecord) -> Iterator[tuple[PerfRow, PerfRow]]:
    """Return rows in pairs: out of place, and the same size in place."""
    # pairwise also yields each in-place row with the next size's row; the condition drops those.
    return ((out, into) for out, into in pairwise(map(PerfRow.from_row, record.rows)) if into.in_place)


def _json_config(record: RunRecord) -> dict[str, Any]:
    arguments, factor = record.arguments, record.arguments["step_factor"]
    step = {"step_factor": factor} if factor > 1 else {"step_bytes": arguments["step_bytes"]}
    return {
        "nthreads": 1,
        "ngpus": record.config["ngpus"],
        "minimum_bytes": arguments["min_bytes"],
        "maximum_bytes": arguments["max_bytes"],
        **step,
        "warmup_iters": arguments["warmup_iters"],
        "iterations": arguments["iters"],
        "aggregated_iterations": arguments["agg_iters"],
        "validation": arguments["check"],
        "graph": arguments["cudagraph"],
        "blocking_collectives": _word(arguments["blocking"]),
        "per_iter_timing": _word(arguments["per_iter"]),
        "per_iter_skip": arguments["per_iter_skip"],
        "parallel_init": "false",  # a rank has one thread, see `-p`
        "devices": record.config["devices"],
    }


def _json_result(out: PerfRow, into: PerfRow, arguments: Mapping[str, Any]) -> dict[str, Any]:
    result = {
        "size": out.size_bytes,
        "count": out.count,
        "type": out.dtype,
        "redop": out.op,
        "root": f"{out.root:6}",  # padded text: so nccl-tests writes it
    }
    for key, row in (("out_of_place", out), ("in_place", into)):
        result[key] = _json_side(row, arguments)
        if arguments["per_iter"]:
            result[f"{key}_per_iter"] = _json_per_iter(row.timing, arguments)
    return result | {"actual_iterations": arguments["iters"], "experiment_name": ""}


def _json_side(row: PerfRow, arguments: Mapping[str, Any]) -> dict[str, Any]:
    time = {"cpu_time": row.timing.cpu_time_us} if arguments["cpu_time"] else {"time": row.timing.time_us}
    wrong = None if row.wrong is None else float(row.wrong)
    return {**time, "alg_bw": row.alg_bw_gbs, "bus_bw": row.bus_bw_gbs, "nwrong": wrong}


def _json_per_iter(timing: Timing, arguments: Mapping[str, Any]) -> dict[str, Any]:
    figures = asdict(timing)
    names = ("min_us", "max_us", "avg_us", "p50_us", "p95_us", "p99_us", "stdev_us", "cv_pct")
    known = {name: figures[name] for name in names if figures[name] is not None}
    return {"skipped_iterations": arguments["per_iter_skip"], **known, "times_us": timing.iterations_us}


def _word(true: object) -> str:
    # nccl-tests writes these as strings, not as JSON's booleans.
    return "true" if true else "false"


def _local_time(utc: str) -> str:
    # Records keep UTC; nccl-tests writes its host's local time.
    return datetime.fromisoformat(utc).astimezone().strftime(_TIME_FORMAT)


def _nccl_tests_rows(name: str, result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for in_place, key in ((False, "out_of_place"), (True, "in_place")):
        side = result.get(key)
        if side is None:
            continue
        yield {
            "collective": name,
            "size_bytes": int(result["size"]),
            "dtype": str(result["type"]),
            "op": str(result["redop"]),
            "root": int(result["root"]),
            "in_place": in_place,
            "time_us": float(side["time"] if "time" in side else side["cpu_time"]),
            "alg_bw_gbs": float(side["alg_bw"]),
            "bus_bw_gbs": float(side["bus_bw"]),
            "wrong": side.get("nwrong"),
        }


def _algorithm_words(row: Row) -> str:
    if row["algorithm"] == UNKNOWN:
        return f"{UNKNOWN}, wire bandwidth {UNKNOWN}"
    if row["wire_bw_gbs"] is None:
        return f"{row['algorithm']} {row['protocol']}, wire bandwidth {UNKNOWN}"
    share = row["wire_bw_gbs"] / row["alg_bw_gbs"] if row["alg_bw_gbs"] else 0.0
    return f"{row['algorithm']} {row['protocol']}, wire bandwidth {share:.3f} x algbw"


def _size_range(rows: Sequence[Row]) -> str:
    first, last = rows[0]["size_bytes"], rows[-1]["size_bytes"]
    places = {row["in_place"] for row in rows}
    where = "" if len(places) == 2 else " in place" if True in places else " out of place"
    return (f"{first} B" if first == last else f"{first}..{last} B") + where

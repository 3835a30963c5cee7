"""A record of a bench as nccl-tests writes it: the text table, line by line, and the JSON of `-J`.

The layout is that of nccl-tests 2.19.6, so that programs which read its output read ours. Omits nothing it prints
for the flags that we honour; added are `#` lines on the backend, and on the algorithm and NVLS as NCCL tells of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
from itertools import pairwise
from typing import Any

import netlayer
from bench.perf.algorithms import algorithm_lines, nvls_used
from netlayer.results import RunRecord

Row = Mapping[str, Any]
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


def format_table(record: RunRecord) -> str:
    """The whole output of one bench, with its closing lines."""
    return "".join([format_head(record), *(format_row(row, record) for row in record.rows), format_foot(record)])


def format_head(record: RunRecord) -> str:
    """Everything above the first row."""
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
    if config["max_bytes"] < arguments["max_bytes"]:
        lines += ["#", f"# Reducing maxBytes to {config['max_bytes']} due to memory limitation"]
    return "\n".join([*lines, "#", *_titles(arguments)]) + "\n"


def format_row(row: Row, record: RunRecord) -> str:
    """Format one row: the front and the out-of-place side, or the in-place side and the end of the line."""
    side = _side(row, record.arguments)
    if row["in_place"]:
        # The in-place side closes the line, so the line's one time stands there.
        stamp = (
            f"{datetime.fromisoformat(row['at']).strftime(_TIME_FORMAT):>21}" if record.arguments["timestamps"] else ""
        )
        return f"{side}{stamp}\n"
    front = f"{row['size_bytes']:12d}  {row['count']:12d}  {row['dtype']:>8}  {row['op']:>6}  {row['root']:6d}"
    return front + side


def format_foot(record: RunRecord) -> str:
    """The closing lines: what went wrong, and the mean bandwidth."""
    wrong, mean = num_failed(record), mean_bus_bw(record)
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
    """Mean bus bandwidth over all sizes, in place and out of place alike, in GB/s."""
    # Not weighted by size, as in nccl-tests: small sizes, bound by latency, pull the mean down.
    return sum(row["bus_bw_gbs"] for row in record.rows) / len(record.rows) if record.rows else 0.0


def fast_enough(record: RunRecord) -> bool | None:
    """Whether the mean reaches the least bandwidth that was asked for; None where none was."""
    least = record.arguments["min_bw_gbs"]
    return None if least is None else mean_bus_bw(record) >= least * MIN_BW_SHARE


def nccl_tests_json(record: RunRecord, argv: list[str] | None = None) -> dict[str, Any]:
    """The tree that nccl-tests writes with `-J`, its odd types included; ours alone is `netlayer`."""
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


def _side(row: Row, arguments: Mapping[str, Any]) -> str:
    time_us = row["cpu_time_us"] if arguments["cpu_time"] else row["time_us"]
    figures = [_fit(time_us, 7), _fit(row["alg_bw_gbs"], 6), _fit(row["bus_bw_gbs"], 6)]
    wrong = "  N/A" if row["wrong"] is None else f"{row['wrong']:6g}"
    text = "".join(f"  {figure}" for figure in [*figures, wrong])
    if arguments["per_iter"]:
        text += "".join(f"  {_fit(row[key], 7)}" for key in ("min_us", "max_us", "p99_us", "cv_pct"))
    return text


def _fit(value: float, width: int) -> str:
    """Format with up to two decimals, as many as the column has room for; beyond that, with an exponent."""
    for decimals in (2, 1, 0):
        text = f"{value:{width}.{decimals}f}"
        if len(text) <= width:
            return text
    # 1.2e+09 is seven characters wide; a column of six has room for no decimal.
    return f"{value:{width}.{1 if width >= 7 else 0}e}"[:width]


def _pairs(record: RunRecord) -> Iterator[tuple[Row, Row]]:
    """Rows two by two: out of place, and the same in place."""
    # pairwise also yields each in-place row with the next size's row; the condition drops those.
    return ((out, into) for out, into in pairwise(record.rows) if into["in_place"])


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


def _json_result(out: Row, into: Row, arguments: Mapping[str, Any]) -> dict[str, Any]:
    result = {
        "size": out["size_bytes"],
        "count": out["count"],
        "type": out["dtype"],
        "redop": out["op"],
        "root": f"{out['root']:6}",  # padded text: so nccl-tests writes it
    }
    for key, row in (("out_of_place", out), ("in_place", into)):
        result[key] = _json_side(row, arguments)
        if arguments["per_iter"]:
            result[f"{key}_per_iter"] = _json_per_iter(row, arguments)
    return result | {"actual_iterations": arguments["iters"], "experiment_name": ""}


def _json_side(row: Row, arguments: Mapping[str, Any]) -> dict[str, Any]:
    time = {"cpu_time": row["cpu_time_us"]} if arguments["cpu_time"] else {"time": row["time_us"]}
    wrong = None if row["wrong"] is None else float(row["wrong"])
    return {**time, "alg_bw": row["alg_bw_gbs"], "bus_bw": row["bus_bw_gbs"], "nwrong": wrong}


def _json_per_iter(row: Row, arguments: Mapping[str, Any]) -> dict[str, Any]:
    names = {"min_us", "max_us", "avg_us", "p50_us", "p95_us", "p99_us", "stdev_us", "cv_pct"}
    figures = {name: row[name] for name in row if name in names}
    return {"skipped_iterations": arguments["per_iter_skip"], **figures, "times_us": row["iterations_us"]}


def _word(true: object) -> str:
    # nccl-tests writes these as strings, not as JSON's booleans.
    return "true" if true else "false"


def _local_time(utc: str) -> str:
    # Records keep UTC; nccl-tests writes its host's local time.
    return datetime.fromisoformat(utc).astimezone().strftime(_TIME_FORMAT)

"""The JSON that nccl-tests and our `*_perf` write with `-J`, as a record, so that two of them can be compared.

Not covered: whether its figures are good; `netlayer accept judge` says that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from netlayer.errors import ConfigError
from netlayer.results import RunRecord, Source

_REMEDY = "take it again with -J"


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
        rows = [row for result in tree["results"] for row in _rows(name, result)]
        source: Source = tree.get("netlayer", {}).get("source", "measured")
        started, ended = str(tree["start_time"]), str(tree["end_time"])
        if not rows or source not in get_args(Source):
            raise ValueError("no measurement")
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError) as exc:
        rule = f"is JSON of nccl-tests, but incomplete or of another structure ({exc!r})"
        raise ConfigError("record", path, rule, _REMEDY) from exc
    return RunRecord(f"nccl-tests.{name}", source, rows, started, ended)


def _rows(name: str, result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
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

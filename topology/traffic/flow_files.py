"""Flows that a user brings: CSV or parquet of src, dst, bytes, start, sport; HPCC's flow.txt; htsim's .cm.

Hosts are as `flow_hosts` finds them; flow.txt counts them as topo.txt does, a .cm file as fabric.topo does. Starts
count from the first flow. Not covered: htsim's triggers (a flow that waits for another begins at once, which is said),
priorities, and a destination port: every flow goes over RoCEv2.
"""

from __future__ import annotations

import csv
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np

from netlayer.errors import ConfigError
from topology.fabric.clos import Clos
from topology.fabric.export import htsim_nodes
from topology.fabric.graph import Graph
from topology.importers.files import show
from topology.traffic.flow_hosts import Find, find_nic, find_node
from topology.traffic.job import Flows, Kind

logger = logging.getLogger(__name__)

_PS = 1e-12
_COLUMNS = ("src", "dst", "bytes")
_CM_LINE = re.compile(r"(?P<src>\S+?)->(?P<dst>\S+)(?P<rest>(?:\s+\S+\s+\S+)*)\s*")
_NUMBER = re.compile(r"[0-9]{1,18}")
_LAST_PORT = 0xFFFF
_REMEDY = "fix that line"


class _Line(NamedTuple):
    """One flow as it is written; `where` says which line it is, `start` is text in `unit_s`, `sport` None if absent."""

    where: str
    src: str
    dst: str
    num_bytes: str
    start: str
    unit_s: float = 1.0
    sport: str | None = None


def read_flows(path: Path, fabric: Clos | Graph) -> Flows:
    """The flows of a file, its kind by its name: .csv, .parquet, .cm, and .txt for HPCC.

    Args:
        path: the file.
        fabric: whose hosts the flows run between: NICs of a `Clos`, nodes of a `Graph`.

    Raises:
        ConfigError: the file cannot be read or holds no flows, or a line is wrong: a host that the fabric does not
            have, a flow to its own host, bytes, a start or a port that are none. The line and what stands there are
            named.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError("--flows", path, "is of an unknown kind", f"give one of {', '.join(_READERS)}")
    find = find_nic(fabric) if isinstance(fabric, Clos) else find_node(fabric)
    try:
        if path.suffix.lower() == ".cm":
            find = _checked_cm(path, fabric, find)
        lines = list(reader(path))
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError("--flows", path, f"cannot be read ({exc})", "give a readable file") from exc
    if not lines:
        raise ConfigError("--flows", path, "holds no flows", "give at least one")
    return _to_flows(path, lines, find)


def _to_flows(path: Path, lines: Sequence[_Line], find: Find) -> Flows:
    """Make flows of the lines of a file; `find` turns a host's name into its number, starts count from the first flow.

    Raises:
        ConfigError: a host is unknown or sends to itself, or a number is none.
    """
    known: dict[str, int] = {}
    ends = np.empty((2, len(lines)), dtype=np.int64)
    amounts = np.empty((2, len(lines)))
    sports = np.zeros(len(lines), dtype=np.uint16)
    for row, line in enumerate(lines):
        for end, host in enumerate((line.src, line.dst)):
            if host not in known:
                try:
                    known[host] = find(host)
                except ValueError as exc:
                    raise _wrong(path, line, f"unknown host {show(host) or '(none)'}", str(exc)) from exc
            ends[end, row] = known[host]
        if ends[0, row] == ends[1, row]:
            raise _wrong(path, line, f"host {show(line.src)} sends to itself", "leave such a flow out")
        amounts[0, row] = _number(path, line, "bytes", line.num_bytes)
        amounts[1, row] = _number(path, line, "start", line.start) * line.unit_s
        sports[row] = 0 if line.sport is None else _port(path, line, line.sport)
    start_s = amounts[1] - amounts[1].min()
    kind = np.full(len(lines), Kind.FILE, dtype=np.int8)
    starts, ports = start_s if start_s.any() else None, sports if sports.any() else None
    return Flows(ends[0], ends[1], amounts[0], kind, starts, ports)


def _number(path: Path, line: _Line, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = np.nan
    if not np.isfinite(value) or value < 0 or (name == "bytes" and value == 0):
        rule = f"{name} is {show(text) or 'missing'}, no {'positive ' * (name == 'bytes')}number"
        raise _wrong(path, line, rule, _REMEDY)
    return value


def _port(path: Path, line: _Line, text: str) -> int:
    port = int(text) if _NUMBER.fullmatch(text) else 0
    if not 0 < port <= _LAST_PORT:
        raise _wrong(path, line, f"sport is {show(text) or 'missing'}, no UDP port", f"write 1 to {_LAST_PORT}")
    return port


def _read_csv(path: Path) -> Iterator[_Line]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            reader.fieldnames = [_ALIASES.get(name, name) for name in reader.fieldnames or ()]
            _check_columns(path, reader.fieldnames)
            has_port = "sport" in reader.fieldnames
            for row in reader:
                src, dst, num_bytes, start, sport = ((row.get(name) or "").strip() for name in _ALL_COLUMNS)
                where = f"line {reader.line_num}"
                yield _Line(where, src, dst, num_bytes, start or "0", sport=sport if has_port else None)
        except csv.Error as exc:
            where = f"{path} after line {reader.line_num}"
            raise ConfigError("--flows", where, f"is no CSV ({exc})", "close its quotes") from exc


_ALL_COLUMNS = (*_COLUMNS, "start", "sport")
# As `optimize ports` names them, so that its plan can be checked.
_ALIASES = {"src_device": "src", "dst_device": "dst", "udp_sport": "sport"}


def _read_parquet(path: Path) -> Iterator[_Line]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowException as exc:
        raise ConfigError("--flows", path, f"is no parquet file ({exc})", "give one, or a .csv") from exc
    table = table.rename_columns([_ALIASES.get(name, name) for name in table.column_names])
    _check_columns(path, table.column_names)
    absent = {"start": ["0"] * table.num_rows, "sport": [None] * table.num_rows}
    columns = [
        [_cell(value) for value in table.column(name).to_pylist()] if name in table.column_names else absent[name]
        for name in _ALL_COLUMNS
    ]
    for row, (src, dst, num_bytes, start, sport) in enumerate(zip(*columns, strict=True), 1):
        yield _Line(f"row {row}", src or "", dst or "", num_bytes or "", start or "0", sport=sport)


def _cell(value: object) -> str:
    """Return the value as CSV has it; a column of whole numbers with gaps comes as floats."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "" if value is None else str(value)


def _check_columns(path: Path, columns: Sequence[str]) -> None:
    missing = [name for name in _COLUMNS if name not in columns]
    if missing:
        rule = f"has no column {', '.join(missing)}"
        raise ConfigError("--flows", path, rule, "its first line must read src,dst,bytes; start and sport may follow")


def _read_hpcc(path: Path) -> Iterator[_Line]:
    """Read the number of flows, then `src dst priority dport bytes start` a line; start in seconds."""
    count, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
    if not _NUMBER.fullmatch(count.strip()):
        raise ConfigError("--flows", path, "line 1 is no number of flows", "give HPCC's flow.txt")
    num_flows = 0
    for number, text in enumerate(lines, 2):
        fields = text.split()
        if fields:
            if len(fields) != 6:
                _refuse_line(path, number, f"has {len(fields)} words", "write src dst priority port bytes start")
            num_flows += 1
            yield _Line(f"line {number}", fields[0], fields[1], fields[4], fields[5])
    if num_flows != int(count):
        raise ConfigError("--flows", path, f"line 1 says {count.strip()} flows, {num_flows} follow", "correct either")


def _checked_cm(path: Path, fabric: Clos | Graph, find: Find) -> Find:
    """Find hosts as htsim counts them; a file for another number of hosts is refused, as the simulator does."""
    num_hosts = fabric.design.num_nics if isinstance(fabric, Clos) else len(fabric.hosts)
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        fields = text.split()
        if fields and fields[0].lower() == "nodes" and fields[1:] != [str(num_hosts)]:
            rule = f"is for {show(' '.join(fields[1:])) or 'no'} nodes, the fabric has {num_hosts} hosts"
            _refuse_line(path, number, rule, "give a matrix of this fabric")
    if isinstance(fabric, Graph):
        return find
    nodes = htsim_nodes(fabric)
    return lambda host: int(nodes[find(host)]) if _NUMBER.fullmatch(host) else find(host)


def _read_htsim(path: Path) -> Iterator[_Line]:
    """Read `src->dst id N start PS size BYTES` a line, its pairs in any order; start in picoseconds."""
    waiting = 0
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        first = text.split(maxsplit=1)[0].lower() if text.strip() else ""
        if not first or first.startswith("#") or first in ("nodes", "connections", "triggers", "trigger", "failures"):
            continue
        match = _CM_LINE.fullmatch(text.strip())
        if match is None:
            _refuse_line(
                path, number, f"does not read src->dst id N start PS size BYTES: {show(text.strip())}", _REMEDY
            )
        fields = match["rest"].split()
        pairs = dict(zip(fields[::2], fields[1::2], strict=True))
        waiting += "trigger" in pairs and "start" not in pairs
        start, size = pairs.get("start", "0"), pairs.get("size", "")
        yield _Line(f"line {number}", match["src"], match["dst"], size, start, _PS)
    if waiting:
        logger.warning("%s: %d flows wait for a trigger, which has no effect: they begin at once", path, waiting)


def _refuse_line(path: Path, number: int, rule: str, remedy: str) -> NoReturn:
    raise ConfigError("--flows", f"{path} line {number}", rule, remedy)


def _wrong(path: Path, line: _Line, rule: str, remedy: str) -> ConfigError:
    return ConfigError("--flows", f"{path} {line.where}", rule, remedy)


_READERS: dict[str, Callable[[Path], Iterator[_Line]]] = {
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": _read_hpcc,
    ".cm": _read_htsim,
}

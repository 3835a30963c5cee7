"""Flows that a user brings: CSV or parquet of src, dst, bytes, start; HPCC's flow.txt; htsim's connection matrix (.cm).

A host is a NIC's number, its address (10.<NIC>.<server>), or a name of a map that the caller gives. Starts count from
the first flow. Left out: htsim's triggers (a flow that waits for another begins at once, which is said), priorities,
and a port number: every flow goes over RoCEv2.
"""

from __future__ import annotations

import csv
import ipaddress
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from netlayer.errors import ConfigError
from topology.clos import Clos
from topology.traffic import Flows, Kind

logger = logging.getLogger(__name__)

_PS = 1e-12
_COLUMNS = ("src", "dst", "bytes")
_CM_LINE = re.compile(r"(?P<src>\S+?)->(?P<dst>\S+)(?P<rest>(?:\s+\S+\s+\S+)*)\s*")
_REMEDY = "mend that line"


class _Line(NamedTuple):
    """One flow as it is written; `where` says which line it is, `start_s` is seconds as text or number."""

    where: str
    src: str
    dst: str
    num_bytes: str
    start: str
    unit_s: float = 1.0


def read_flows(path: Path, fabric: Clos, hosts: Mapping[str, int] | None = None) -> Flows:
    """The flows of a file, its kind by its name: .csv, .parquet, .cm, and .txt for HPCC.

    Args:
        path: the file.
        fabric: whose NICs the hosts are.
        hosts: names of NICs, beside their numbers and addresses.

    Raises:
        ConfigError: the file cannot be read or holds no flows, or a line is wrong: a host that the fabric does not
            have, a flow to its own host, bytes or a start that are no number. The line and what stands there are named.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError("--flows", path, "is of an unknown kind", f"give one of {', '.join(_READERS)}")
    try:
        lines = list(reader(path))
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError("--flows", path, f"cannot be read ({exc})", "give a readable file") from exc
    if not lines:
        raise ConfigError("--flows", path, "holds no flows", "give at least one")
    return _to_flows(path, lines, fabric, hosts or {})


def _to_flows(path: Path, lines: Sequence[_Line], fabric: Clos, hosts: Mapping[str, int]) -> Flows:
    known: dict[str, int] = {}
    ends = np.empty((2, len(lines)), dtype=np.int64)
    amounts = np.empty((2, len(lines)))
    for row, line in enumerate(lines):
        for end, host in enumerate((line.src, line.dst)):
            if host not in known:
                known[host] = _nic(path, line, host, fabric, hosts)
            ends[end, row] = known[host]
        if ends[0, row] == ends[1, row]:
            raise _wrong(path, line, f"host {line.src} sends to itself", "leave such a flow out")
        amounts[0, row] = _number(path, line, "bytes", line.num_bytes)
        amounts[1, row] = _number(path, line, "start", line.start) * line.unit_s
    start_s = amounts[1] - amounts[1].min()
    kind = np.full(len(lines), Kind.FILE, dtype=np.int8)
    return Flows(ends[0], ends[1], amounts[0], kind, start_s if start_s.any() else None)


def _nic(path: Path, line: _Line, host: str, fabric: Clos, hosts: Mapping[str, int]) -> int:
    design = fabric.design
    nic = hosts.get(host, -1)
    if nic < 0 and host.isdecimal():
        nic = int(host)
    elif nic < 0 and host.count(".") == 3:
        nic = _nic_of_address(host, design.nics_per_server)
    if 0 <= nic < design.num_nics:
        return nic
    names = f", an address such as {ipaddress.ip_address(int(fabric.address_of(np.array([0]))[0]))}"
    raise _wrong(
        path, line, f"unknown host {host or '(none)'}", f"the fabric has hosts 0 to {design.num_nics - 1}{names}"
    )


def _nic_of_address(host: str, nics_per_server: int) -> int:
    try:
        address = int(ipaddress.IPv4Address(host))
    except ValueError:
        return -1
    network, local, server = address >> 24, address >> 16 & 0xFF, address & 0xFFFF
    return server * nics_per_server + local if network == 10 and local < nics_per_server else -1


def _number(path: Path, line: _Line, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = np.nan
    if not np.isfinite(value) or value < 0 or (name == "bytes" and value == 0):
        raise _wrong(path, line, f"{name} is {text or 'missing'}, no {'positive ' * (name == 'bytes')}number", _REMEDY)
    return value


def _read_csv(path: Path) -> Iterator[_Line]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        _check_columns(path, reader.fieldnames or ())
        for row in reader:
            src, dst, num_bytes, start = ((row.get(name) or "").strip() for name in (*_COLUMNS, "start"))
            yield _Line(f"line {reader.line_num}", src, dst, num_bytes, start or "0")


def _read_parquet(path: Path) -> Iterator[_Line]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowException as exc:
        raise ConfigError("--flows", path, f"is no parquet file ({exc})", "give one, or a .csv") from exc
    _check_columns(path, table.column_names)
    columns = [table.column(name).to_pylist() for name in _COLUMNS]
    starts = table.column("start").to_pylist() if "start" in table.column_names else [0] * table.num_rows
    for row, cells in enumerate(zip(*columns, starts, strict=True), 1):
        src, dst, num_bytes, start = ("" if cell is None else str(cell) for cell in cells)
        yield _Line(f"row {row}", src, dst, num_bytes, start)


def _check_columns(path: Path, found: Sequence[str]) -> None:
    missing = [name for name in _COLUMNS if name not in found]
    if missing:
        rule = f"has no column {', '.join(missing)}"
        raise ConfigError("--flows", path, rule, "its first line must read src,dst,bytes or src,dst,bytes,start")


def _read_hpcc(path: Path) -> Iterator[_Line]:
    """The number of flows, then `src dst priority dport bytes start` a line; start in seconds."""
    count, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
    if not count.strip().isdecimal():
        raise ConfigError("--flows", path, "line 1 is no number of flows", "give HPCC's flow.txt")
    found = 0
    for number, text in enumerate(lines, 2):
        words = text.split()
        if words:
            if len(words) != 6:
                bad = _Line(f"line {number}", "", "", "", "")
                raise _wrong(path, bad, f"has {len(words)} words", "write src dst priority port bytes start")
            found += 1
            yield _Line(f"line {number}", words[0], words[1], words[4], words[5])
    if found != int(count):
        raise ConfigError("--flows", path, f"line 1 says {count.strip()} flows, {found} follow", "correct either")


def _read_htsim(path: Path) -> Iterator[_Line]:
    """`src->dst id N start PS size BYTES` a line, its pairs in any order; start in picoseconds."""
    waiting = 0
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        first = text.split(maxsplit=1)[0].lower() if text.strip() else ""
        if not first or first.startswith("#") or first in ("nodes", "connections", "triggers", "trigger", "failures"):
            continue
        match = _CM_LINE.fullmatch(text.strip())
        words = match["rest"].split() if match else []
        pairs = dict(zip(words[::2], words[1::2], strict=True))
        line = _Line(f"line {number}", match["src"], match["dst"], pairs.get("size", ""), "", _PS) if match else None
        if line is None:
            rule = f"does not read src->dst id N start PS size BYTES: {text.strip()}"
            raise _wrong(path, _Line(f"line {number}", "", "", "", ""), rule, _REMEDY)
        waiting += "trigger" in pairs and "start" not in pairs
        yield line._replace(start=pairs.get("start", "0"))
    if waiting:
        logger.warning("%s: %d flows wait for a trigger, which has no effect: they begin at once", path, waiting)


def _wrong(path: Path, line: _Line, rule: str, remedy: str) -> ConfigError:
    return ConfigError("--flows", f"{path} {line.where}", rule, remedy)


_READERS: dict[str, Callable[[Path], Iterator[_Line]]] = {
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": _read_hpcc,
    ".cm": _read_htsim,
}

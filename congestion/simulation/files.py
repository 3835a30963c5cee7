"""Flows as arrays, and the files that they come from: HPCC's flow.txt and htsim's .cm.

flow.txt is the number of flows, then `src dst priority dport bytes start` a line, the start in seconds. A .cm is `Nodes
n`, `Connections n`, then `src->dst id n start ps size bytes` a line. Starts are kept as integer picoseconds, as
written. A flow's priority is its class of traffic, where the settings have classes. Not covered: htsim's triggers,
which are refused.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from netlayer.errors import ConfigError
from topology.fabric.graph import Graph

Ints = NDArray[np.int64]
Flap = tuple[int, int, int]
"""A cable, and from when until when it is down, ps."""

_PS = 10**12
_LAST_PORT = 0xFFFF
_FIRST_PORT = 10_000
_SPORTS = _LAST_PORT + 1 - _FIRST_PORT
_MOST_NODES = 4_000_000
MOST_CLASSES = 8
_ROCE_PORT = 4_791
MOST_BYTES = 2**50
_MOST_SECONDS = 10**6
_REMEDY = "mend that line"


@dataclass(frozen=True, eq=False)
class FlowSet:
    """Flows in file order; all arrays of shape (num_flows,).

    A flow may wait for flows before it in this order, and starts `delay_ps` after all of them are done: one that came
    to its source is done when all its data arrived there, one that left its source when its last ACK came back.

    Args:
        src, dst: node ids of hosts.
        num_bytes: payload.
        start_ps: when the sender is handed the flow; of a flow that waits it is not read.
        dport: UDP destination port, which ECMP hashes.
        sport: UDP source port; left empty, 10000 + n for the n-th flow of a pair.
        pg: class of traffic, 0..7, which counts where the settings have classes; left empty, 0.
        waits_for: None, or (first, earlier): flow f waits for the flows earlier[first[f]:first[f + 1]]; shapes
            (num_flows + 1,) and (num_waits,).
        delay_ps: None is 0 everywhere.

    Raises:
        ValueError: a flow waits for one that is not before it, or that neither comes to nor leaves its source.
    """

    src: Ints
    dst: Ints
    num_bytes: Ints
    start_ps: Ints
    dport: Ints
    _: KW_ONLY
    sport: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    pg: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    waits_for: tuple[Ints, Ints] | None = None
    delay_ps: Ints | None = None

    def __post_init__(self) -> None:
        if not len(self.sport):
            object.__setattr__(self, "sport", _FIRST_PORT + nth_of_pair(self.src, self.dst) % _SPORTS)
        if not len(self.pg):
            object.__setattr__(self, "pg", np.zeros_like(self.src))
        if self.waits_for is not None:
            _check_waits(self.src, self.dst, *self.waits_for)

    def __len__(self) -> int:
        return len(self.src)

    @property
    def first_ps(self) -> int:
        """Start of the first flow, ps; a flow that waits for others starts after them."""
        if self.waits_for is None:
            return int(self.start_ps.min())
        return int(self.start_ps[np.diff(self.waits_for[0]) == 0].min())


def nth_of_pair(src: Ints, dst: Ints) -> Ints:
    """Count for each flow the earlier ones that have the same ends."""
    order = np.lexsort((dst, src))  # stable: a pair's flows stay in their order
    new = np.diff(src[order], prepend=-1) != 0
    new |= np.diff(dst[order], prepend=-1) != 0
    row = np.arange(len(order))
    nth = np.empty_like(row)
    nth[order] = row - np.maximum.accumulate(np.where(new, row, 0))
    return nth


def _check_waits(src: Ints, dst: Ints, first: Ints, earlier: Ints) -> None:
    if len(first) != len(src) + 1 or first[0] != 0 or first[-1] != len(earlier) or (np.diff(first) < 0).any():
        raise ValueError(f"waits_for must split {len(earlier)} waits among {len(src)} flows")
    flow = np.repeat(np.arange(len(src)), np.diff(first))
    for row in np.flatnonzero((earlier < 0) | (earlier >= flow))[:1]:
        raise ValueError(f"flow {flow[row]} waits for flow {earlier[row]}, which is not before it")
    for row in np.flatnonzero((dst[earlier] != src[flow]) & (src[earlier] != src[flow]))[:1]:
        raise ValueError(f"flow {flow[row]} waits for flow {earlier[row]}, which its source does not see")


def with_starts_of_ns3(flows: FlowSet) -> FlowSet:
    """The flows with starts as ns-3 has them: it reads seconds into a double, and cuts what that is to whole ns.

    So a flow at 2.000001582 s starts at 2,000,001,581 ns; of many under PFC one nanosecond decides who is first.
    """
    starts, which = np.unique(flows.start_ps, return_inverse=True)
    parts = ((ps / _PS).as_integer_ratio() for ps in starts.tolist())
    cut = np.array([above * 10**9 // below * 1000 for above, below in parts], dtype=np.int64)
    return replace(flows, start_ps=cut[which])


def read_flows(path: Path, fabric: Graph) -> FlowSet:
    """The flows of a flow.txt between the hosts of `fabric`.

    Raises:
        ConfigError: the file cannot be read, its count does not match, or a line is wrong; the line is named.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError("--flows", path, f"cannot be read ({exc})", "give HPCC's flow.txt") from exc
    head = lines[0].strip() if lines else ""
    if not (head.isascii() and head.isdigit()):
        raise _wrong(path, 1, head, "is no number of flows", "write how many flows follow")
    rows = [_flow(path, number, text, fabric) for number, text in enumerate(lines[1:], 2) if text.strip()]
    if len(rows) != int(head):
        raise _wrong(path, 1, head, f"flows are promised, {len(rows)} follow", "correct either")
    if not rows:
        raise ConfigError("--flows", path, "holds no flows", "give at least one")
    *columns, pg = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    return FlowSet(*columns, pg=pg)


def cm_nodes(path: Path) -> int:
    """Return the number of hosts that a .cm is for; htsim builds its fabric from that.

    Raises:
        ConfigError: the file cannot be read, or has no such line.
    """
    for number, fields in _cm_lines(path):
        if fields[0].lower() == "nodes":
            return _whole(path, number, fields[1] if len(fields) == 2 else "", "nodes", _MOST_NODES, "--cm")
    raise ConfigError("--cm", path, "has no line `Nodes n`", "give htsim's connection matrix")


def read_cm(path: Path, fabric: Graph) -> FlowSet:
    """The flows of a .cm; its host n is the n-th host of `fabric`.

    Raises:
        ConfigError: the file cannot be read, its count does not match, or a line is wrong; the line is named.
    """
    rows: list[tuple[int, int, int, int, int]] = []
    promised: int | None = None
    for number, fields in _cm_lines(path):
        if fields[0].lower() == "connections":
            promised = _whole(path, number, fields[1] if len(fields) == 2 else "", "connections", _MOST_NODES, "--cm")
        elif fields[0].lower() != "nodes":
            rows.append(_connection(path, number, fields, fabric))
    if not rows:
        raise ConfigError("--cm", path, "holds no flows", "give at least one")
    if promised is not None and promised != len(rows):
        raise ConfigError("--cm", path, f"promises {promised} connections, has {len(rows)}", "correct either")
    return FlowSet(*(np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)))


def _cm_lines(path: Path) -> list[tuple[int, list[str]]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError("--cm", path, f"cannot be read ({exc})", "give htsim's connection matrix") from exc
    return [(number, text.split()) for number, text in enumerate(lines, 1) if text.strip() and text.strip()[0] != "#"]


def _connection(path: Path, number: int, fields: list[str], fabric: Graph) -> tuple[int, int, int, int, int]:
    text, hosts = " ".join(fields), fabric.hosts
    values = dict(zip(fields[1::2], fields[2::2], strict=False))
    ends = fields[0].split("->")
    known = len(ends) == 2 and len(fields) % 2 and values.keys() <= {"id", "start", "size"} and "size" in values
    if not known:
        raise _wrong(path, number, text, "is not understood", "write src->dst id n start ps size bytes", "--cm")
    for end in ends:
        if not (end.isascii() and end.isdigit() and int(end) < len(hosts)):
            raise _wrong(path, number, end, "is no host of the fabric", f"give one of 0..{len(hosts) - 1}", "--cm")
    if ends[0] == ends[1]:
        raise _wrong(path, number, text, f"host {ends[0]} sends to itself", "leave such a flow out", "--cm")
    start = _whole(path, number, values.get("start", "0"), "start", _MOST_SECONDS * _PS, "--cm", least=0)
    num_bytes = _whole(path, number, values["size"], "size", MOST_BYTES, "--cm")
    return int(hosts[int(ends[0])]), int(hosts[int(ends[1])]), num_bytes, start, _ROCE_PORT


def _flow(path: Path, number: int, text: str, fabric: Graph) -> tuple[int, int, int, int, int, int]:
    fields = text.split()
    if len(fields) != 6:
        raise _wrong(path, number, text, f"has {len(fields)} words", "write src dst priority dport bytes start")
    src, dst = (_host(path, number, word, fabric) for word in fields[:2])
    if src == dst:
        raise _wrong(path, number, text, f"host {src} sends to itself", "leave such a flow out")
    dport = _whole(path, number, fields[3], "dport", _LAST_PORT)
    num_bytes = _whole(path, number, fields[4], "bytes", MOST_BYTES)
    pg = _whole(path, number, fields[2], "priority", MOST_CLASSES - 1, least=0)
    return src, dst, num_bytes, _start(path, number, fields[5]), dport, pg


def _host(path: Path, number: int, word: str, fabric: Graph) -> int:
    node = int(word) if word.isascii() and word.isdigit() else -1
    if not 0 <= node < fabric.num_nodes or fabric.is_switch[node]:
        raise _wrong(path, number, word, "is no host of the fabric", f"give a host's id below {fabric.num_nodes}")
    return node


def _whole(path: Path, number: int, word: str, name: str, most: int, option: str = "--flows", *, least: int = 1) -> int:
    value = int(word) if word.isascii() and word.isdigit() and len(word) < 20 else -1
    if not least <= value <= most:
        raise _wrong(path, number, word, f"{name} must be a whole number of {least}..{most}", _REMEDY, option)
    return value


def _start(path: Path, number: int, word: str) -> int:
    try:
        seconds = Decimal(word)
    except InvalidOperation:
        seconds = Decimal(-1)
    if not (seconds.is_finite() and 0 <= seconds <= _MOST_SECONDS):
        raise _wrong(path, number, word, f"start must be seconds of 0..{_MOST_SECONDS}", _REMEDY)
    return int(seconds * _PS)


def _wrong(path: Path, number: int, value: str, rule: str, remedy: str, option: str = "--flows") -> ConfigError:
    return ConfigError(f"{option} {path}, line {number}", value.strip()[:80], rule, remedy)

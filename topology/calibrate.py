"""Measured byte counters of ports beside what flows were predicted to put there: the residual of every link.

Counters are bytes that a port sent. Two predictions stand beside them: `even`, if every next-hop set shared each flow
evenly (no hash needs to be known), and `hashed`, if the switches hashed as assumed. One scale, fitted over all links,
takes up what is alike everywhere (headers, a longer interval), so that what is left is a link's own. Left out: how
counters are collected.
"""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netlayer.errors import ConfigError
from topology.graph import Floats, Graph, Ints
from topology.graph_routing import UNREACHABLE, Routes, by_ecmp
from topology.hashing import Ecmp, HashName, Headers
from topology.importers.files import read_text, show
from topology.routing import NO_LINK

logger = logging.getLogger(__name__)

_COUNTER_COLUMNS = ("device", "port", "bytes")
_FLOW_COLUMNS = ("src", "dst", "bytes")
_FIRST_PORT, _LAST_PORT = 0xC000, 0xFFFF


@dataclass(frozen=True, eq=False)
class Counters:
    """Bytes that links carried; `link` are link ids of the graph, each once."""

    link: Ints
    num_bytes: Floats


@dataclass(frozen=True, eq=False)
class HostFlows:
    """Flows between hosts of a graph (node ids), their bytes, and where they are known their UDP source ports."""

    src: Ints
    dst: Ints
    num_bytes: Floats
    udp_sport: NDArray[np.uint16] | None = None


def read_counters(graph: Graph, path: Path) -> Counters:
    """Counters from a CSV of `device, port, bytes`; in a fabric without port names `port` is the neighbour's name.

    Raises:
        ConfigError: the file is damaged, names a device or port that the fabric lacks, or a port twice.
    """
    places = _places(graph)
    found: dict[int, float] = {}
    for number, row in _rows(path, "--counters", _COUNTER_COLUMNS):
        where = f"{show(path)}, line {number}"
        graph.find(row["device"], f"--counters {where}")
        links = places.get((row["device"], row["port"]), [])
        if len(links) != 1:
            rule = f"{row['device']} has {len(links) or 'no'} links at {show(row['port'])}"
            raise ConfigError("--counters", where, rule, "name a port that is one link's end")
        if links[0] in found:
            raise ConfigError("--counters", where, f"gives {graph.link_name(links[0])} twice", "keep the later one")
        found[links[0]] = _bytes(row["bytes"], "--counters", where)
    return Counters(np.array(list(found), dtype=np.int64), np.array(list(found.values()), dtype=np.float64))


def read_host_flows(graph: Graph, path: Path) -> HostFlows:
    """Flows from a CSV of `src, dst, bytes` with the names of hosts, and if it is there `sport`.

    Raises:
        ConfigError: the file is damaged, or names what is no host of the fabric.
    """
    ends: list[tuple[int, int]] = []
    amounts: list[float] = []
    sports: list[int] = []
    for number, row in _rows(path, "--flows", _FLOW_COLUMNS):
        where = f"{show(path)}, line {number}"
        src, dst = (graph.find(row[end], f"--flows {where}, {end}") for end in ("src", "dst"))
        if src == dst or graph.is_switch[src] or graph.is_switch[dst]:
            rule = f"{show(row['src'])} to {show(row['dst'])} is no flow between two hosts"
            raise ConfigError("--flows", where, rule, "name two hosts")
        ends.append((src, dst))
        amounts.append(_bytes(row["bytes"], "--flows", where))
        if "sport" in row:
            sports.append(_port(row["sport"], where))
    both = np.array(ends, dtype=np.int64)
    udp_sport = np.array(sports, dtype=np.uint16) if sports else None
    return HostFlows(both[:, 0], both[:, 1], np.array(amounts), udp_sport)


def predict(graph: Graph, flows: HostFlows, hash_name: HashName, seed: int) -> tuple[Floats, Floats]:
    """Bytes a link, shape (num_links,), twice: shared evenly, and as the hash sends each flow."""
    routes = Routes(graph, flows.dst)
    lost = int((routes.hops(flows.src, flows.dst) == UNREACHABLE).sum())
    if lost:
        logger.warning("%d of %d flows have no path in this fabric", lost, len(flows.src))
    ecmp = Ecmp(hash_name, host_headers(graph, flows, seed), seed)
    paths = routes.route(flows.src, flows.dst, by_ecmp(ecmp))
    crossed = paths != NO_LINK
    weights = np.broadcast_to(flows.num_bytes[:, None], paths.shape)[crossed]
    hashed = np.bincount(paths[crossed], weights=weights, minlength=graph.num_links)
    return routes.spread(flows.src, flows.dst, flows.num_bytes), np.asarray(hashed, dtype=np.float64)


def host_headers(graph: Graph, flows: HostFlows, seed: int) -> Headers:
    """5-tuples of the flows: the graph's addresses; UDP source ports that are not known are drawn from the seed."""
    rng = np.random.default_rng(seed)
    sport = flows.udp_sport
    if sport is None:
        sport = rng.integers(_FIRST_PORT, _LAST_PORT, len(flows.src), dtype=np.uint16, endpoint=True)
    return Headers(graph.addresses[flows.src], graph.addresses[flows.dst], sport)


def compare(graph: Graph, counters: Counters, predictions: Mapping[str, Floats]) -> list[dict[str, Any]]:
    """One row a counted link: its bytes, and for each prediction `NAME_bytes` (scaled) and `NAME_residual`.

    A residual is (counted - predicted) / the mean of the counted links of the same two levels, so that an idle link's
    is finite. `level` is that of the sending end.
    """
    link, counted = counters.link, counters.num_bytes
    level = graph.level
    kind = level[graph.link_src[link]] * (int(level.max()) + 2) + level[graph.link_dst[link]]
    mean = _group_means(kind, counted)
    scaled = {name: values[link] * fit_scale(counted, values[link]) for name, values in predictions.items()}
    residuals = {name: (counted - values) / np.where(mean > 0, mean, 1.0) for name, values in scaled.items()}
    return [
        {
            "link": graph.link_name(one),
            "level": int(level[graph.link_src[one]]),
            "rate_bps": float(graph.link_bps[one]),
            "counter_bytes": float(counted[row]),
            **{f"{name}_bytes": float(values[row]) for name, values in scaled.items()},
            **{f"{name}_residual": float(values[row]) for name, values in residuals.items()},
        }
        for row, one in enumerate(link.tolist())
    ]


def summarise(
    rows: Sequence[Mapping[str, Any]], counters: Counters, predictions: Mapping[str, Floats]
) -> dict[str, Any]:
    """Over all counted links: the fitted scale, the root mean square residual and the largest, of each prediction."""
    summary: dict[str, Any] = {"links": len(rows), "counter_bytes": float(counters.num_bytes.sum())}
    for name, values in predictions.items():
        residuals = np.array([row[f"{name}_residual"] for row in rows])
        summary[f"{name}_scale"] = fit_scale(counters.num_bytes, values[counters.link])
        summary[f"{name}_rms_residual"] = float(np.sqrt((residuals**2).mean())) if len(rows) else 0.0
        summary[f"{name}_max_residual"] = float(np.abs(residuals).max(initial=0.0))
    return summary


def fit_scale(counted: Floats, predicted: Floats) -> float:
    """The factor on the prediction that leaves the least squares; 1 where nothing is predicted."""
    power = float(predicted @ predicted)
    return float(counted @ predicted) / power if power else 1.0


def _group_means(kind: Ints, values: Floats) -> Floats:
    _, group = np.unique(kind, return_inverse=True)
    return np.asarray((np.bincount(group, weights=values) / np.bincount(group))[group])


def _places(graph: Graph) -> dict[tuple[str, str], list[int]]:
    """Links out of (device, port), or (device, neighbour) where a cable has no port names."""
    places: dict[tuple[str, str], list[int]] = {}
    names = graph.names
    ports = [*graph.a_port, *graph.b_port]
    ends = zip(graph.link_src.tolist(), graph.link_dst.tolist(), ports, strict=True)
    for link, (src, dst, port) in enumerate(ends):
        places.setdefault((names[src], port or names[dst]), []).append(link)
    return places


def _rows(path: Path, option: str, columns: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    reader = csv.DictReader(read_text(path).splitlines(), strict=True)
    try:
        rows = [(reader.line_num, row) for row in reader]
    except csv.Error as exc:
        raise ConfigError(option, f"{show(path)}, line {reader.line_num}", f"is no CSV ({exc})", "mend it") from exc
    lacking = [column for column in columns if column not in (reader.fieldnames or ())]
    if lacking:
        rule = f"has no column {', '.join(lacking)}"
        raise ConfigError(option, show(path), rule, f"its first line must name {', '.join(columns)}")
    if not rows:
        raise ConfigError(option, show(path), "has no line behind its header", "give at least one")
    for number, row in rows:
        if any(row[column] is None for column in columns):
            raise ConfigError(option, f"{show(path)}, line {number}", "is too short", f"give {', '.join(columns)}")
    return rows


def _port(text: str | None, where: str) -> int:
    if text is None or not text.isascii() or not text.isdigit() or not 0 < int(text[:9]) <= _LAST_PORT:
        raise ConfigError("--flows", where, f"{show(text)} is no UDP port", f"write 1 to {_LAST_PORT}")
    return int(text)


def _bytes(text: str, option: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ConfigError(option, where, f"{show(text)} is no number of bytes", "write 0 or more")
    return value

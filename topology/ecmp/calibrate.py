"""Measured byte counters of ports next to what flows were predicted to put there: the residual of every link.

Counters are bytes that a port sent. Two predictions are compared: `even`, if every next-hop set shared each flow
evenly (no hash needs to be known), and `hashed`, if the switches hashed as assumed. One scale a prediction, fitted over
all links, takes up what is alike everywhere (headers, a longer interval), so that what is left is a link's own. A
residual is (counted - scale x predicted) over the mean counter of the links between the same two levels (where nothing
was counted there, over the mean scaled prediction), so that it is finite on an idle link. Not covered: how counters are
collected.
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

from netlayer.errors import ConfigError
from topology.ecmp.graph_routing import UNREACHABLE, Routes, by_ecmp
from topology.ecmp.hashing import Ecmp, HashName
from topology.fabric.graph import Floats, Graph, Ints
from topology.importers.files import read_text, show
from topology.rates.max_min import sum_over_links
from topology.traffic.job import Flows, headers

logger = logging.getLogger(__name__)

_COUNTER_COLUMNS = ("device", "port", "bytes")


@dataclass(frozen=True, eq=False)
class Counters:
    """Bytes that links carried; `link` are link ids of the graph, each once."""

    link: Ints
    num_bytes: Floats


def read_counters(graph: Graph, path: Path, whole: Graph | None = None) -> Counters:
    """Read counters from a CSV of `device, port, bytes`; in a fabric without port names `port` is the neighbour's name.

    Args:
        graph: whose links are counted.
        whole: also with the cables of NVLink, which `graph` lacks; counters of their ports are omitted.

    Raises:
        ConfigError: the file is damaged, names a device or port that the fabric lacks, or a port twice.
    """
    places = _places(graph)
    omitted = _places(whole).keys() - places.keys() if whole is not None else set()
    num_omitted = 0
    bytes_of_link: dict[int, float] = {}
    for number, row in _rows(path, "--counters", _COUNTER_COLUMNS):
        where = f"{show(path)}, line {number}"
        if (row["device"], row["port"]) in omitted:
            num_omitted += 1
            continue
        links = places.get((row["device"], row["port"]), [])
        if not links:
            graph.find(row["device"], f"--counters {where}")
        if len(links) != 1:
            rule = f"{row['device']} has {len(links) or 'no'} links at {show(row['port'])}"
            raise ConfigError("--counters", where, rule, "name a port that is one link's end")
        if links[0] in bytes_of_link:
            raise ConfigError("--counters", where, f"gives {graph.link_name(links[0])} twice", "keep the later one")
        bytes_of_link[links[0]] = _bytes(row["bytes"], "--counters", where)
    if num_omitted:
        logger.warning("%s: %d counters of NVLink ports are omitted", show(path), num_omitted)
    return Counters(
        np.array(list(bytes_of_link), dtype=np.int64), np.array(list(bytes_of_link.values()), dtype=np.float64)
    )


def predict(graph: Graph, flows: Flows, hash_name: HashName, seed: int) -> tuple[Floats, Floats]:
    """Bytes a link, shape (num_links,), twice: shared evenly, and as the hash sends each flow.

    Args:
        graph: the fabric.
        flows: between its hosts, as `flow_files.read_flows` gives them.
        hash_name, seed: of the switches; the seed also moves UDP source ports that the flows do not have.
    """
    routes = Routes(graph, flows.dst_nic)
    lost = int((routes.hops(flows.src_nic, flows.dst_nic) == UNREACHABLE).sum())
    if lost:
        logger.warning("%d of %d flows have no path in this fabric", lost, len(flows))
    ecmp = Ecmp(hash_name, headers(graph, flows, seed), seed)
    paths = routes.route(flows.src_nic, flows.dst_nic, by_ecmp(ecmp))
    hashed = sum_over_links(paths, flows.num_bytes, graph.num_links)
    return routes.spread(flows.src_nic, flows.dst_nic, flows.num_bytes), hashed


def compare(graph: Graph, counters: Counters, predictions: Mapping[str, Floats]) -> list[dict[str, Any]]:
    """One row a counted link and prediction, the prediction as it is and scaled; `level` is that of the sending end."""
    link, counted = counters.link, counters.num_bytes
    level = graph.level
    kind = level[graph.link_src[link]] * (int(level.max()) + 2) + level[graph.link_dst[link]]
    mean = _group_means(kind, counted)
    columns = {}
    for name, values in predictions.items():
        scaled = values[link] * fit_scale(counted, values[link])
        base = np.where(mean > 0, mean, _group_means(kind, scaled))
        residual = (counted - scaled) / np.where(base > 0, base, 1.0)
        columns[name] = (values[link], scaled, base, residual)
    return [
        {
            "link": graph.link_name(one),
            "level": int(level[graph.link_src[one]]),
            "rate_bps": float(graph.link_bps[one]),
            "prediction": name,
            "counter_bytes": float(counted[row]),
            **dict(zip(_COMPARED, (float(column[row]) for column in column_of), strict=True)),
        }
        for row, one in enumerate(link.tolist())
        for name, column_of in columns.items()
    ]


_COMPARED = ("predicted_bytes", "scaled_bytes", "residual_over_bytes", "residual")


def summarise(
    rows: Sequence[Mapping[str, Any]], counters: Counters, predictions: Mapping[str, Floats]
) -> list[dict[str, Any]]:
    """Return a row a prediction: its scale, and over all counted links the rms residual and the largest."""
    summaries = []
    for name, values in predictions.items():
        residuals = np.array([row["residual"] for row in rows if row["prediction"] == name])
        summaries.append(
            {
                "prediction": name,
                "links": len(residuals),
                "scale": fit_scale(counters.num_bytes, values[counters.link]),
                "rms_residual": float(np.sqrt((residuals**2).mean())) if len(residuals) else 0.0,
                "max_residual": float(np.abs(residuals).max(initial=0.0)),
            }
        )
    return summaries


def fit_scale(counted: Floats, predicted: Floats) -> float:
    """The factor on the prediction that leaves the least squares; 1 where nothing is predicted."""
    power = float(predicted @ predicted)
    return float(counted @ predicted) / power if power else 1.0


def _group_means(kind: Ints, values: Floats) -> Floats:
    _, group = np.unique(kind, return_inverse=True)
    return np.asarray((np.bincount(group, weights=values) / np.bincount(group))[group])


def _places(graph: Graph) -> dict[tuple[str, str], list[int]]:
    """Links out of (device, port), or (device, neighbour) where a cable has no port names.

    The NIC srv7/eth0 is a node of its own; here it is also the port eth0 of srv7, whatever the cable calls it.
    """
    places: dict[tuple[str, str], list[int]] = {}
    names = graph.names
    ports = [*graph.a_port, *graph.b_port]
    ends = zip(graph.link_src.tolist(), graph.link_dst.tolist(), ports, strict=True)
    for link, (src, dst, port) in enumerate(ends):
        name = names[src]
        places.setdefault((name, port or names[dst]), []).append(link)
        device, slash, nic = name.partition("/")
        if slash and not graph.is_switch[src]:
            for known_as in {nic, port or names[dst]}:
                places.setdefault((device, known_as), []).append(link)
    return places


def _rows(path: Path, option: str, columns: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    """Read a CSV file that has `columns`; return (line number, row) pairs.

    Raises:
        ConfigError: it is no CSV, lacks a column or has no row.
    """
    reader = csv.DictReader(read_text(path).splitlines(), strict=True)
    try:
        rows = [(reader.line_num, row) for row in reader]
    except csv.Error as exc:
        raise ConfigError(option, f"{show(path)}, line {reader.line_num}", f"is no CSV ({exc})", "fix it") from exc
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


def _bytes(text: str, option: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ConfigError(option, where, f"{show(text)} is no number of bytes", "write 0 or more")
    return value

"""One traffic over one fabric, once, stage by stage and timed: build, flows, hash, load, rate, time.

Beside the times stand what only a single run can show: the path of every flow and the load of every link, how long the
traffic takes, the links that hold it back, and the shares of every ECMP group's members. Where flows have starts, load
and rates are those of the busiest instant, and the time is that of all. Not covered: means over seeds (compare).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from netlayer.config.tree import Config
from topology.ecmp.balance import BalanceName, chooser, spray
from topology.ecmp.compare import traffic_flows
from topology.ecmp.hashing import FIVE_TUPLE, Field
from topology.ecmp.load import Load, place
from topology.ecmp.members import members
from topology.ecmp.routing import route
from topology.fabric.clos import Clos, Ints
from topology.fabric.wires import Wires, flow_table, link_table
from topology.placement.strategies import StrategyName
from topology.rates.contention import Contention, busiest, contend
from topology.traffic.job import Flows, Kind, headers

if TYPE_CHECKING:
    import pandas as pd

Rows = list[dict[str, Any]]


@dataclass(frozen=True, eq=False)
class RunRequest:
    """Traffic to run: one by name, or `flows` where it is "file"."""

    config: Config
    hash_name: BalanceName
    traffic: str
    seed: int = 0
    qps_per_connection: int = 1
    num_channels: int | None = None
    fields: tuple[Field, ...] = FIVE_TUPLE
    flows: Flows | None = None
    placement: StrategyName = "given"


@dataclass(frozen=True, eq=False)
class SingleRun:
    """Result of a run; rows hold JSON values.

    `under_way` are the flows that run together (`contention.busiest`), of which load, collisions and rates are: all,
    but where flows have starts those of the instant `at_s`.
    """

    request: RunRequest
    flows: Flows
    paths: Ints | None
    under_way: Ints
    at_s: float
    contention: Contention
    timings: Rows
    time: dict[str, Any]
    members: Rows

    @property
    def which(self) -> dict[str, Any]:
        """Columns that distinguish the rows of several runs."""
        return {"traffic": self.request.traffic, "hash": self.request.hash_name, "seed": self.request.seed}

    @property
    def loaded(self) -> Load:
        return self.contention.loaded

    def bottlenecks(self, wires: Wires) -> Rows:
        """The links that hold most flows back, with the names of both ends and of a few flows."""
        return [self._bottleneck(wires, row) for row in self.contention.bottlenecks()]

    def tables(self, wires: Wires) -> dict[str, pd.DataFrame]:
        """`links`: a row a link; `flows`: a row a flow, without a rate where it is not under way."""
        loaded, flows = self.loaded, self.flows
        columns: dict[str, Any] = {"kind": [Kind(kind).name.lower() for kind in flows.kind.tolist()]}
        if flows.start_s is not None:
            columns["start_s"] = flows.start_s
        of_flows = {
            "demand_bps": loaded.flow_bps,
            "rate_bps": self.contention.rates.flow_bps,
            "slowdown": self.contention.slowdown,
        }
        for name, values in of_flows.items():
            columns[name] = np.full(len(flows), np.nan)
            columns[name][self.under_way] = values
        paths = [_SPRAYED] * len(flows) if self.paths is None else wires.paths(self.paths)
        links = link_table(wires, loaded.link_bps, loaded.paths, path_names=self.paths is not None)
        named = flow_table(wires.host, (flows.src_nic, flows.dst_nic), flows.num_bytes, paths, columns)
        return {"links": links.assign(**self.which), "flows": named.assign(**self.which)}

    def _bottleneck(self, wires: Wires, row: dict[str, Any]) -> dict[str, Any]:
        first = self.under_way[row["first_flows"]]
        ends = zip(wires.host[self.flows.src_nic[first]], wires.host[self.flows.dst_nic[first]], strict=True)
        kept = {key: value for key, value in row.items() if key not in ("src_node", "dst_node")}
        named = {"from": wires.src[row["link"]], "to": wires.dst[row["link"]], "first_flows": first.tolist()}
        return {**kept, **named, "first_pairs": [f"{src} > {dst}" for src, dst in ends]}


_SPRAYED = "sprayed over all"


def run_once(request: RunRequest) -> SingleRun:
    """Run it; the compiled kernels are loaded in a stage of their own.

    Raises:
        ConfigError, ValueError: as `compare.compare_split`.
    """
    timings: Rows = []
    with _timed(timings, "build") as row:
        fabric = Clos.build(request.config.cluster)
        row["items"] = fabric.num_links
    with _timed(timings, "flows") as row:
        flows = request.flows if request.flows is not None else _flows(request, fabric)
        under_way, at_s = busiest(fabric, flows)
        row["items"] = len(flows)
    with _timed(timings, "compile") as row:
        _warm(request, fabric, flows)
        row["items"] = 1
    with _timed(timings, "hash") as row:
        paths = _paths(request, fabric, flows)
        row["items"] = len(flows)
    with _timed(timings, "load") as row:
        loaded = _load(fabric, flows, paths, under_way)
        row["items"] = loaded.collisions().num_links
    with _timed(timings, "rate") as row:
        contention = contend(loaded)
        row["items"] = len(under_way)
    with _timed(timings, "time") as row:
        every = (
            contention if len(under_way) == len(flows) else contend(_load(fabric, flows, paths, np.arange(len(flows))))
        )
        took = {"flows": len(flows), "under_way": len(under_way), "at_s": at_s, **every.times(flows)}
        row["items"] = len(flows)
    shares = [each.to_row() for each in members(loaded)]
    return SingleRun(request, flows, paths, under_way, at_s, contention, timings, took, shares)


def _warm(request: RunRequest, fabric: Clos, flows: Flows) -> None:
    """Load what is compiled, or compile it: the first flow, twice, shares its NIC with itself and has to be rated."""
    first = flows.where(np.zeros(2 * min(len(flows), 1), dtype=np.int64))
    contend(_load(fabric, first, _paths(request, fabric, first), np.arange(len(first)))).times(first)


def _load(fabric: Clos, flows: Flows, paths: Ints | None, chosen: Ints) -> Load:
    together = flows.where(chosen)
    return spray(fabric, together) if paths is None else place(fabric, together, paths[chosen])


def _paths(request: RunRequest, fabric: Clos, flows: Flows) -> Ints | None:
    """Return every flow's one path; None where packets are sprayed."""
    if request.hash_name == "spray":
        return None
    tuples = headers(fabric, flows, request.seed)
    choices = chooser(request.hash_name, fabric, flows, tuples, request.seed, fields=request.fields)
    return route(fabric, flows.src_nic, flows.dst_nic, choices)


def _flows(request: RunRequest, fabric: Clos) -> Flows:
    return traffic_flows(
        request.config,
        fabric,
        request.traffic,
        request.seed,
        request.qps_per_connection,
        request.num_channels,
        request.placement,
    )


@contextmanager
def _timed(rows: Rows, stage: str) -> Iterator[dict[str, Any]]:
    row: dict[str, Any] = {"stage": stage}
    start = time.perf_counter()
    yield row
    row["time_s"] = time.perf_counter() - start
    rows.append(row)

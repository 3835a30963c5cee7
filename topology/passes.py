"""One pass of one traffic over one fabric, stage by stage and timed: build, flows, hash, load, rate.

Beside the times stand what only a single run can show: how long the traffic takes, the links that hold it back and
which flows share them, and the shares of every ECMP group's members. Left out: means over seeds (compare).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from netlayer.config import Config
from topology.balance import BalanceName, chooser, spray
from topology.clos import Clos, Ints
from topology.compare import traffic_flows
from topology.contention import Contention, contend
from topology.hashing import FIVE_TUPLE, Field
from topology.load import place
from topology.members import members
from topology.rates import max_min
from topology.routing import route
from topology.traffic import Flows, headers

Rows = list[dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Pass:
    """What to run: a traffic by name, or `flows` where it is "file"."""

    config: Config
    hash_name: BalanceName
    traffic: str
    seed: int = 0
    qps_per_connection: int = 1
    num_channels: int | None = None
    fields: tuple[Field, ...] = FIVE_TUPLE
    flows: Flows | None = None


@dataclass(frozen=True, eq=False)
class Outcome:
    """What came out; rows hold JSON values."""

    asked: Pass
    flows: Flows
    contention: Contention
    timings: Rows
    time: dict[str, Any]
    bottlenecks: Rows
    members: Rows

    def tagged_rows(self) -> Rows:
        """All rows, each with its table's name, the traffic and the hash."""
        which = {"traffic": self.asked.traffic, "hash": self.asked.hash_name, "seed": self.asked.seed}
        tables = {"timing": self.timings, "time": [self.time], "bottleneck": self.bottlenecks, "members": self.members}
        return [{"table": name, **which, **row} for name, rows in tables.items() for row in rows]


def one_pass(asked: Pass) -> Outcome:
    """Run it; the compiled kernels are loaded first, a stage of its own.

    Raises:
        ConfigError, ValueError: as `compare.compare_split`.
    """
    timings: Rows = []
    with _timed(timings, "compile") as row:
        max_min(np.zeros((1, 1), dtype=np.int64), np.ones(1))
        row["items"] = 1
    with _timed(timings, "build") as row:
        fabric = Clos.build(asked.config.cluster)
        row["items"] = fabric.num_links
    with _timed(timings, "flows") as row:
        flows = asked.flows if asked.flows is not None else _flows(asked, fabric)
        row["items"] = len(flows)
    with _timed(timings, "hash") as row:
        paths = _paths(asked, fabric, flows)
        row["items"] = len(flows)
    with _timed(timings, "load") as row:
        loaded = spray(fabric, flows) if paths is None else place(fabric, flows, paths)
        row["items"] = loaded.collisions().num_links
    with _timed(timings, "rate") as row:
        held = contend(loaded)
        row["items"] = len(flows)
    time_row = {"flows": len(flows), **held.times(flows)}
    shares = [each.row() for each in members(loaded)]
    return Outcome(asked, flows, held, timings, time_row, held.bottlenecks(), shares)


def _paths(asked: Pass, fabric: Clos, flows: Flows) -> Ints | None:
    """Every flow's one path; None where packets are sprayed."""
    if asked.hash_name == "spray":
        return None
    tuples = headers(fabric, flows, asked.seed)
    choices = chooser(asked.hash_name, fabric, flows, tuples, asked.seed, fields=asked.fields)
    return route(fabric, flows.src_nic, flows.dst_nic, choices)


def _flows(asked: Pass, fabric: Clos) -> Flows:
    return traffic_flows(asked.config, fabric, asked.traffic, asked.seed, asked.qps_per_connection, asked.num_channels)


@contextmanager
def _timed(rows: Rows, stage: str) -> Iterator[dict[str, Any]]:
    row: dict[str, Any] = {"stage": stage}
    start = time.perf_counter()
    yield row
    row["time_s"] = time.perf_counter() - start
    rows.append(row)

"""Seeds x placements x failures, one case a task: in processes here, or on a Dask cluster by its address.

Both run the same function on the same cases (`workers`) and give the rows in the order of the cases. Not covered:
sweeps over designs, which a shell loop over `--set` does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import logging
import pickle
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from netlayer.config.tree import Config
from topology.ecmp.hashing import HashName
from topology.fabric.clos import Clos
from topology.fabric.graph import Graph
from topology.fabric.imported import ImportedFabric
from topology.fabric.interface import Fabric
from topology.failures.faults import Failure, alive_links, lost_capacity
from topology.placement.strategies import StrategyName, num_slots, place_slots
from topology.traffic.job import Flows, permutation
from topology.traffic.step import Step, run_step, slot_flows
from topology.workers import in_order_of_end

logger = logging.getLogger(__name__)

Row = dict[str, Any]
Progress = Callable[[int, int, str], None]
# Cases a task: a task's cost is some tens of milliseconds of transport.
_BATCH = 8


@dataclass(frozen=True, eq=False)
class Subject:
    """The fabric of a sweep and the traffic on it: pickles, and is equal to another of the same content.

    Args:
        config: cluster and job as JSON; empty where there is no job.
        graph: an imported fabric, in place of the cluster's.
        flows: the traffic where there is no job; without either a random permutation for each seed.
        nics_per_server: of an imported fabric, see `ImportedFabric.of`.
    """

    config: str
    graph: Graph | None = None
    flows: Flows | None = None
    nics_per_server: int = 1

    @functools.cached_property
    def digest(self) -> bytes:
        parts = [part for part in (self.graph, self.flows) if part is not None]
        content = [[getattr(part, field.name) for field in dataclasses.fields(part)] for part in parts]
        return hashlib.sha256(pickle.dumps((self.config, content, self.nics_per_server))).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Subject) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @classmethod
    def of(cls, config: Config) -> Subject:
        """A cluster file's fabric and job."""
        return cls(config.model_dump_json())


@dataclass(frozen=True)
class Case:
    """One point of a sweep; `failures` fail together."""

    seed: int = 0
    placement: StrategyName = "given"
    failures: tuple[Failure, ...] = ()
    hash_name: HashName = "crc16"
    qps: int = 1


def cases(
    seeds: Sequence[int],
    placements: Sequence[StrategyName],
    failures: Sequence[tuple[Failure, ...]],
    hash_name: HashName = "crc16",
    qps: int = 1,
) -> list[Case]:
    """All combinations, failures innermost."""
    return [Case(*point, hash_name, qps) for point in itertools.product(seeds, placements, failures)]


def run_case(subject: Config | Subject, case: Case) -> Row:
    """Return one row: what failed, what it cost the fabric, and the step before and after.

    With a flow that has no path left the job `stops`. Else `slowdown` is the bound of the step's communication over
    that of the same seed and placement without failures, `flow_slowdown` the mean over the flows of the same. They may
    lie below 1: a smaller group hashes every flow anew, and at times better; the step hangs on its unluckiest flow, so
    that `slowdown` says little for one seed.
    """
    subject = _subject(subject)
    fabric, flows = _prepared(subject, case.placement, case.seed, case.qps)
    healthy = _healthy(subject, case.placement, case.seed, case.hash_name, case.qps)
    alive = alive_links(fabric, case.failures)
    step = run_step(fabric, flows, case.hash_name, case.seed, alive=alive)
    stops = step.num_stopped > 0
    lost_bps, lost_share = lost_capacity(fabric, alive)
    pairs, all_pairs = fabric.unreachable_pairs(alive)
    row: Row = {
        "seed": case.seed,
        "placement": case.placement,
        "hash": case.hash_name,
        "kind": "+".join(dict.fromkeys(failure.kind for failure in case.failures)) or "none",
        "failed": " ".join(map(str, case.failures)),
        **_names(fabric, case.failures),
        "lost_bps": lost_bps,
        "lost_share": lost_share,
        "unreachable_pairs": pairs,
        "unreachable_share": pairs / all_pairs if all_pairs else 0.0,
        "stopped_flows": step.num_stopped,
        "stops": stops,
        "time_bound_s": None if stops else step.time_bound_s,
        "slowdown": None if stops else _over(step.time_bound_s, healthy.time_bound_s),
        "flow_slowdown": None if stops else _flow_slowdown(step, healthy),
    }
    for phase in step.phases:
        collisions = phase.collisions
        row |= {f"{phase.name}_collision_share": collisions.share, f"{phase.name}_excess": collisions.excess}
    return row


def run_sweep(
    subject: Config | Subject,
    points: Sequence[Case],
    *,
    processes: int | None = None,
    dask: str | None = None,
    progress: Progress | None = None,
) -> list[Row]:
    """Return the rows of all cases, in their order.

    Args:
        subject: cluster and job, or an imported fabric and its traffic.
        points: the cases.
        processes: workers here; the cores of this machine where None; 1 runs all in this process.
        dask: address of a Dask scheduler, whose workers have netlayer; `processes` has no effect then.
        progress: called with (done, total, text).

    Raises:
        ConfigError: no scheduler answers at `dask`, or Dask is not installed.
    """
    if dask and processes:
        logger.warning("the number of processes has no effect: the sweep runs on %s", dask)
    subject = _subject(subject)
    hash(subject)  # it is kept, and goes along to the workers
    batches = [(subject, tuple(points[first : first + _BATCH])) for first in range(0, len(points), _BATCH)]
    results = in_order_of_end(_run_batch, batches, processes=processes, dask=dask)
    rows: dict[int, list[Row]] = {}
    with contextlib.closing(results):
        for index, batch_rows in results:
            rows[index] = batch_rows
            if progress:
                progress(sum(map(len, rows.values())), len(points), "")
    return [row for index in range(len(batches)) for row in rows[index]]


def worst(rows: Sequence[Row]) -> list[Row]:
    """One row for each placement and kind of failure: largest loss, spread of the slowdowns, share of the cases that
    stop the job, and which case was worst.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["placement"], row["kind"]), []).append(row)
    return [_worst_of(placement, kind, group) for (placement, kind), group in groups.items()]


def _worst_of(placement: str, kind: str, rows: Sequence[Row]) -> Row:
    last = max(rows, key=lambda row: (row["stopped_flows"], row["slowdown"] or 0.0))
    maxima = ("lost_bps", "lost_share", "unreachable_pairs", "unreachable_share", "stopped_flows")
    return {
        "placement": placement,
        "kind": kind,
        "cases": len(rows),
        **{f"{key}_max": max(row[key] for row in rows) for key in maxima},
        "stops_share": statistics.fmean(row["stops"] for row in rows),
        **_spread("slowdown", rows),
        **_spread("flow_slowdown", rows),
        "worst": f"{str(last.get('names', last['failed']))[:60] or 'none'}, seed {last['seed']}",
    }


def _spread(key: str, rows: Sequence[Row]) -> Row:
    """Return least, median, mean and most over the cases that do not stop the job; None where all do."""
    values = [row[key] for row in rows if not row["stops"]]
    figures = [min(values), statistics.median(values), statistics.fmean(values), max(values)] if values else [None] * 4
    return {f"{key}_{name}": value for name, value in zip(("min", "median", "mean", "max"), figures, strict=True)}


def _over(time_s: float, healthy_s: float) -> float:
    return time_s / healthy_s if healthy_s else 1.0


def _flow_slowdown(step: Step, healthy: _Healthy) -> float:
    """Mean over the flows of their time over that in the healthy fabric; all flows have a path."""
    ratios = [phase.seconds / whole for phase, whole in zip(step.phases, healthy.seconds, strict=True)]
    return float(np.concatenate(ratios).mean()) if ratios else 1.0


def _run_batch(task: tuple[Subject, Sequence[Case]]) -> list[Row]:
    subject, batch = task
    return [run_case(subject, case) for case in batch]


def _subject(subject: Config | Subject) -> Subject:
    return subject if isinstance(subject, Subject) else Subject.of(subject)


def _names(fabric: Fabric, failures: Sequence[Failure]) -> Row:
    """Return a column of the parts' own names, where they have any."""
    names = [fabric.part_name(*failure) for failure in failures]
    return {"names": "; ".join(names)} if any(names) else {}


@functools.lru_cache(maxsize=2)
def _fabric(subject: Subject) -> Fabric:
    if subject.graph is not None:
        return ImportedFabric.of(subject.graph, subject.nics_per_server)
    return Clos.build(Config.model_validate_json(subject.config).cluster)


# Cases come seed by seed and placement by placement, so few of these are in use at a time; they are large.
@functools.lru_cache(maxsize=4)
def _prepared(subject: Subject, placement: StrategyName, seed: int, qps: int) -> tuple[Fabric, Flows]:
    """The fabric, and the flows on it: the job's between the servers that hold its ranks, or those without a job."""
    fabric = _fabric(subject)
    if subject.flows is not None:
        return fabric, subject.flows
    if not subject.config:
        return fabric, permutation(fabric, seed, qps)
    config = Config.model_validate_json(subject.config)
    slots = num_slots(config.cluster, config.job.parallel)
    placed = place_slots(placement, fabric, config.job.parallel, slots, fabric.full_servers, seed)
    return fabric, placed.apply(slot_flows(config.job, config.cluster, qps), fabric.nics_per_server)


class _Healthy(NamedTuple):
    """Baseline of failures: the step's time, and every flow's, a phase."""

    time_bound_s: float
    seconds: tuple[NDArray[np.float64], ...]


@functools.lru_cache(maxsize=4)
def _healthy(subject: Subject, placement: StrategyName, seed: int, hash_name: HashName, qps: int) -> _Healthy:
    fabric, flows = _prepared(subject, placement, seed, qps)
    step = run_step(fabric, flows, hash_name, seed)
    return _Healthy(step.time_bound_s, tuple(phase.seconds for phase in step.phases))

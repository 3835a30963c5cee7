"""Seeds x placements x failures, one case a task: in processes here, or on a Dask cluster by its address.

Both run the same function on the same cases (`workers`) and give the rows in the order of the cases. Not covered:
sweeps over designs, which a shell loop over `--set` does.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from netlayer.config.tree import Config
from topology.ecmp.hashing import HashName
from topology.fabric.clos import Clos
from topology.failures.faults import Failure, alive_links, lost_capacity
from topology.failures.survivors import unreachable_pairs
from topology.placement.strategies import StrategyName, num_slots, place_slots, usable_servers
from topology.traffic.job import Flows
from topology.traffic.step import Step, run_step, slot_flows
from topology.workers import in_order_of_end

logger = logging.getLogger(__name__)

Row = dict[str, Any]
Progress = Callable[[int, int, str], None]
# Cases a task: a task's cost is some tens of milliseconds of transport.
_BATCH = 8


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


def run_case(config: Config, case: Case) -> Row:
    """Return one row: what failed, what it cost the fabric, and the step before and after.

    With a flow that has no path left the job `stops`. Else `slowdown` is the bound of the step's communication over
    that of the same seed and placement without failures, `flow_slowdown` the mean over the flows of the same. They may
    lie below 1: a smaller group hashes every flow anew, and at times better; the step hangs on its unluckiest flow, so
    that `slowdown` says little for one seed.
    """
    text = config.model_dump_json()
    fabric, flows = _prepared(text, case.placement, case.seed, case.qps)
    healthy = _healthy(text, case.placement, case.seed, case.hash_name, case.qps)
    alive = alive_links(fabric, case.failures)
    step = run_step(fabric, flows, case.hash_name, case.seed, alive=alive)
    stops = step.num_stopped > 0
    lost_bps, lost_share = lost_capacity(fabric, alive)
    pairs, all_pairs = unreachable_pairs(fabric, alive)
    row: Row = {
        "seed": case.seed,
        "placement": case.placement,
        "hash": case.hash_name,
        "kind": "+".join(dict.fromkeys(failure.kind for failure in case.failures)) or "none",
        "failed": " ".join(map(str, case.failures)),
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
    config: Config,
    points: Sequence[Case],
    *,
    processes: int | None = None,
    dask: str | None = None,
    progress: Progress | None = None,
) -> list[Row]:
    """Return the rows of all cases, in their order.

    Args:
        config: cluster and job.
        points: the cases.
        processes: workers here; the cores of this machine where None; 1 runs all in this process.
        dask: address of a Dask scheduler, whose workers have netlayer; `processes` has no effect then.
        progress: called with (done, total, text).

    Raises:
        ConfigError: no scheduler answers at `dask`, or Dask is not installed.
    """
    if dask and processes:
        logger.warning("the number of processes has no effect: the sweep runs on %s", dask)
    text = config.model_dump_json()
    batches = [(text, tuple(points[first : first + _BATCH])) for first in range(0, len(points), _BATCH)]
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
        "worst": f"{last['failed'][:60] or 'none'}, seed {last['seed']}",
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


def _run_batch(task: tuple[str, Sequence[Case]]) -> list[Row]:
    text, batch = task
    config = Config.model_validate_json(text)
    return [run_case(config, case) for case in batch]


@functools.lru_cache(maxsize=2)
def _fabric(text: str) -> Clos:
    return Clos.build(Config.model_validate_json(text).cluster)


# Cases come seed by seed and placement by placement, so few of these are in use at a time; they are large.
@functools.lru_cache(maxsize=4)
def _prepared(text: str, placement: StrategyName, seed: int, qps: int) -> tuple[Clos, Flows]:
    """The fabric, and the job's flows between the servers that hold its ranks."""
    config, fabric = Config.model_validate_json(text), _fabric(text)
    slots = num_slots(config.cluster, config.job.parallel)
    usable = usable_servers(fabric.design.num_servers)
    placed = place_slots(placement, fabric, config.job.parallel, slots, usable, seed)
    return fabric, placed.apply(slot_flows(config.job, config.cluster, qps), fabric.design.nics_per_server)


class _Healthy(NamedTuple):
    """Baseline of failures: the step's time, and every flow's, a phase."""

    time_bound_s: float
    seconds: tuple[NDArray[np.float64], ...]


@functools.lru_cache(maxsize=4)
def _healthy(text: str, placement: StrategyName, seed: int, hash_name: HashName, qps: int) -> _Healthy:
    fabric, flows = _prepared(text, placement, seed, qps)
    step = run_step(fabric, flows, hash_name, seed)
    return _Healthy(step.time_bound_s, tuple(phase.seconds for phase in step.phases))

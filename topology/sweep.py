"""Seeds x placements x failures, one case a task: in processes here, or on a Dask cluster by its address.

Both run the same function on the same cases and give the rows in the order of the cases. A Ctrl-C cancels what has not
begun and waits for what has (a case takes well under a second); a worker whose parent is gone ends by itself. Left
out: sweeps over designs, which a shell loop over `--set` does.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from netlayer.config import Config
from netlayer.errors import ConfigError
from topology.clos import Clos
from topology.failures import Failure, alive_links, lost_capacity
from topology.hashing import HashName
from topology.placement import StrategyName, num_slots, place_slots, usable_servers
from topology.step import Step, run_step, slot_flows
from topology.survivors import unreachable_pairs
from topology.traffic import Flows

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
    """One row: what failed, what it cost the fabric, and the step before and after.

    `slowdown` is the time of the step's communication over that of the same seed and placement without failures, among
    flows that still have a path; `stopped_flows` are those that have none, and with one of them the job stops. It may
    lie below 1: a smaller group hashes every flow anew, and at times better.
    """
    text = config.model_dump_json()
    fabric, flows = _prepared(text, case.placement, case.seed, case.qps)
    healthy = _healthy(text, case.placement, case.seed, case.hash_name, case.qps)
    alive = alive_links(fabric, case.failures)
    step = run_step(fabric, flows, case.hash_name, case.seed, alive=alive) if case.failures else healthy
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
        "time_s": step.time_s,
        "slowdown": step.time_s / healthy.time_s if healthy.time_s else 1.0,
    }
    for phase in step.phases:
        found = phase.collisions
        row |= {f"{phase.name}_collision_share": found.share, f"{phase.name}_excess": found.excess}
    return row


def run_sweep(
    config: Config,
    points: Sequence[Case],
    *,
    processes: int | None = None,
    dask: str | None = None,
    progress: Progress | None = None,
) -> list[Row]:
    """The rows of all cases, in their order.

    Args:
        config: cluster and job.
        points: the cases.
        processes: workers here; the cores of this machine where None; 1 runs all in this process.
        dask: address of a Dask scheduler, whose workers have netlayer; `processes` has no effect then.
        progress: called with (done, total, words).

    Raises:
        ConfigError: no scheduler answers at `dask`, or Dask is not installed.
    """
    if dask and processes:
        logger.warning("the number of processes has no effect: the sweep runs on %s", dask)
    batches = [tuple(points[first : first + _BATCH]) for first in range(0, len(points), _BATCH)]
    text = config.model_dump_json()
    workers = min(processes or os.cpu_count() or 1, len(batches))
    found: Generator[tuple[int, list[Row]], None, None]
    if dask:
        found = _on_dask(text, batches, dask)
    elif workers <= 1:
        found = ((index, _run_batch(text, batch)) for index, batch in enumerate(batches))
    else:
        found = _in_processes(text, batches, workers)
    rows: dict[int, list[Row]] = {}
    with contextlib.closing(found):
        for index, batch_rows in found:
            rows[index] = batch_rows
            if progress:
                progress(sum(map(len, rows.values())), len(points), "")
    return [row for index in range(len(batches)) for row in rows[index]]


def worst(rows: Sequence[Row]) -> list[Row]:
    """One row for each placement and kind of failure: largest loss and slowdown, and which case was worst."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["placement"], row["kind"]), []).append(row)
    return [_worst_of(placement, kind, found) for (placement, kind), found in groups.items()]


def _worst_of(placement: str, kind: str, rows: Sequence[Row]) -> Row:
    last = max(rows, key=lambda row: (row["slowdown"], row["stopped_flows"]))
    maxima = ("lost_bps", "lost_share", "unreachable_pairs", "unreachable_share", "stopped_flows", "slowdown")
    return {
        "placement": placement,
        "kind": kind,
        "cases": len(rows),
        **{f"{key}_max": max(row[key] for row in rows) for key in maxima},
        "slowdown_mean": sum(row["slowdown"] for row in rows) / len(rows),
        "stops_share": sum(row["stopped_flows"] > 0 for row in rows) / len(rows),
        "worst": f"{last['failed'][:60] or 'none'}, seed {last['seed']}",
    }


def _run_batch(text: str, batch: Sequence[Case]) -> list[Row]:
    config = Config.model_validate_json(text)
    return [run_case(config, case) for case in batch]


def _in_processes(
    text: str, batches: Sequence[tuple[Case, ...]], workers: int
) -> Generator[tuple[int, list[Row]], None, None]:
    # Spawned, not forked: this process may hold threads of numba and of the progress bar.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker)
    try:
        futures: dict[Future[list[Row]], int] = {
            pool.submit(_run_batch, text, batch): index for index, batch in enumerate(batches)
        }
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin_worker() -> None:
    """Leave Ctrl-C to the parent, and end when it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _on_dask(
    text: str, batches: Sequence[tuple[Case, ...]], address: str
) -> Generator[tuple[int, list[Row]], None, None]:
    with _dask_client(address) as (distributed, client):
        futures = {
            client.submit(_run_batch, text, batch, key=f"netlayer-sweep-{os.getpid()}-{index}", pure=False): index
            for index, batch in enumerate(batches)
        }
        try:
            for future in distributed.as_completed(futures, loop=client.loop):
                yield futures[future], future.result()
        except ModuleNotFoundError as exc:
            rule = f"a worker lacks a module ({exc.name})"
            raise ConfigError("--dask", address, rule, "install netlayer where the workers run") from exc
        finally:
            client.cancel(list(futures))


@contextlib.contextmanager
def _dask_client(address: str) -> Iterator[tuple[Any, Any]]:
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError as exc:
        raise ConfigError("--dask", address, "Dask is not installed", "pip install 'netlayer[dask]'") from exc
    try:
        client = distributed.Client(address, timeout="10s", set_as_default=False)
    except (OSError, ValueError, TimeoutError) as exc:
        raise ConfigError("--dask", address, f"no scheduler answers ({exc})", "start one: dask scheduler") from exc
    try:
        yield distributed, client
    finally:
        client.close()


@functools.lru_cache(maxsize=4)
def _fabric(text: str) -> Clos:
    return Clos.build(Config.model_validate_json(text).cluster)


@functools.lru_cache(maxsize=16)
def _prepared(text: str, placement: StrategyName, seed: int, qps: int) -> tuple[Clos, Flows]:
    """The fabric, and the job's flows between the servers that hold its ranks."""
    config, fabric = Config.model_validate_json(text), _fabric(text)
    slots = num_slots(config.cluster, config.job.parallel)
    usable = usable_servers(fabric.design.num_servers)
    placed = place_slots(placement, fabric, config.job.parallel, slots, usable, seed)
    return fabric, placed.apply(slot_flows(config.job, config.cluster, qps), fabric.design.nics_per_server)


@functools.lru_cache(maxsize=64)
def _healthy(text: str, placement: StrategyName, seed: int, hash_name: HashName, qps: int) -> Step:
    fabric, flows = _prepared(text, placement, seed, qps)
    return run_step(fabric, flows, hash_name, seed)

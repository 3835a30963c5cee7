"""`python -m bench.topology_scale`: seconds and memory of one pass over fabrics of 12,288 to 98,304 GPUs, on one core.

A pass builds the fabric, derives all ring flows of the job (the all-gather's and the reduce-scatter's), hashes them,
loads every link and rates every flow (max-min), one phase after the other. Fabrics grow by pods of the paper's design
(MegaScale, NSDI'24, 3.6), the job by its data-parallel degree. Each size runs in a process of its own, so that its peak
memory is its own. *packed* is the paper's placement, where few flows leave their ToR; *scattered* puts the servers in
random order, so that nearly all cross the fabric. The times are measured; what the flows do is simulated and stays out
of the rows. Not covered: starting Python, and compiling the kernels, whose time stands apart.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import click
import numpy as np

from netlayer import environ
from netlayer.command import RunOptions, open_out, run_options
from netlayer.config.file import example
from netlayer.config.tree import Config, build_config
from netlayer.errors import CheckFailed
from netlayer.results import RunRecord, utc_now, write_text
from topology.ecmp.hashing import Ecmp, HashName
from topology.ecmp.load import place
from topology.ecmp.routing import route
from topology.fabric.clos import Clos, Ints
from topology.rates.max_min import max_min
from topology.traffic.job import Flows, Kind, headers, job_flows

Placement = Literal["packed", "scattered"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
STAGES = ("build", "flows", "hash", "load", "rate")
PAPER_PODS = 6
# Limits for the paper's fabric, and for the exponent over all sizes.
MAX_BUILD_S, MAX_TOTAL_S, MAX_PEAK_BYTES, MAX_EXPONENT = 2.0, 10.0, 4e9, 1.1

_PHASES = (Kind.DP_ALL_GATHER, Kind.DP_REDUCE_SCATTER)


@dataclass(frozen=True)
class OnePass:
    """One pass over a fabric: seconds by stage, CPU seconds of all stages, and the counts of what it built."""

    times: dict[str, float]
    cpu_s: float
    links: int
    flows: int
    flows_between_tors: int


@dataclass(frozen=True)
class SizeRow:
    """Times of one fabric and placement: medians over the passes of each stage and of the whole.

    Args:
        compile_s: seconds to compile the kernels, before the first pass.
        cpu_s: least CPU seconds of a pass.
        totals_s: seconds of each pass.
        peak_bytes: most memory that the process held.
    """

    pods: int
    placement: Placement
    gpus: int
    links: int
    flows: int
    flows_between_tors: int
    compile_s: float
    build_s: float
    flows_s: float
    hash_s: float
    load_s: float
    rate_s: float
    total_s: float
    cpu_s: float
    totals_s: list[float]
    peak_bytes: int

    def to_row(self) -> dict[str, Any]:
        """Return the columns of a record."""
        return {"table": "size", **asdict(self)}


@dataclass(frozen=True)
class Growth:
    """Exponent with which a placement's CPU seconds grow with the GPUs; None for a single size."""

    placement: Placement
    exponent: float | None

    def to_row(self) -> dict[str, Any]:
        """Return the columns of a record."""
        return {"table": "growth", **asdict(self)}


@click.command()
@run_options
@click.option("--pods", multiple=True, type=click.IntRange(min=1), help="Sizes, in pods of 2,048 GPUs [6 12 24 48].")
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Passes a size.")
@click.option("--qps", type=click.IntRange(min=1), default=1, show_default=True, help="Queue pairs a connection.")
@click.option("--hash", "hash_name", type=click.Choice(["crc16", "random"]), default="crc16", show_default=True)
def command(options: RunOptions, pods: Sequence[int], repeats: int, qps: int, hash_name: HashName) -> None:
    """Time one pass over ever larger fabrics; exit 1 where a limit is missed.

    Limits: the fabric of 6 pods built in 2 s, all in 10 s, under 4 GB; time grows by at most the power 1.1.
    """
    out, started = open_out(options.out, "topology_scale"), utc_now()
    paper = RunOptions(options.config_path, options.overrides, options.seed, None, None).load_config(
        example("megascale-12288")
    )
    rows: list[SizeRow] = []
    for number in sorted(set(pods or (6, 12, 24, 48))):
        config = grow(paper, number)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
            for placement in PLACEMENTS:
                arguments = (config, placement, hash_name, qps, options.seed, repeats)
                rows.append(pool.submit(measure, *arguments).result())
                click.echo(_line(rows[-1]))
    growth = [Growth(name, exponent(rows, name)) for name in PLACEMENTS]
    record = RunRecord(
        name="bench.topology_scale",
        source="measured",
        rows=[*(row.to_row() for row in rows), *(each.to_row() for each in growth)],
        started_utc=started,
        ended_utc=utc_now(),
        arguments={**options.arguments(), "pods": list(pods), "repeats": repeats, "qps": qps, "hash": hash_name},
        config=paper.model_dump(mode="json"),
        environment=environ.snapshot(options.seed),
        devices=["one CPU core"],
    )
    click.echo(f"record: {record.save(out / 'records')}", err=True)
    if options.json_file:
        write_text(options.json_file, record.to_json())
    for row in growth:
        if row.exponent is not None:
            click.echo(f"{row.placement}: time grows with the GPUs to the power {row.exponent:.2f}")
    if missed := missed_limits(rows, growth):
        raise CheckFailed("; ".join(missed))


def grow(paper: Config, pods: int) -> Config:
    """Return the fabric and job scaled to `pods`: servers a pod and ranks a model stay, data parallelism grows.

    Core switches of a plane grow with the pods, so that each keeps a port for every pod.

    Raises:
        ConfigError: the fabric or the job cannot be had in this size.
    """
    tree = paper.model_dump()
    cluster, parallel, batch = tree["cluster"], tree["job"]["parallel"], tree["job"]["batch"]
    if (cluster["servers"] * pods) % cluster["pods"] or (parallel["dp"] * pods) % cluster["pods"]:
        raise ValueError(f"pods = {pods}: servers and dp of {cluster['pods']} pods cannot be scaled to it")
    sequences = batch["global_batch_size"] // parallel["dp"]
    uplinks = cluster["switch_radix"] // 2
    fits = [cores for cores in range(1, uplinks + 1) if uplinks % cores == 0]
    enough = [cores for cores in fits if pods * uplinks // cores <= cluster["switch_radix"]]
    cluster["servers"] = cluster["servers"] * pods // cluster["pods"]
    parallel["dp"] = parallel["dp"] * pods // cluster["pods"]
    batch["global_batch_size"] = sequences * parallel["dp"]
    if pods != cluster["pods"] and cluster["tiers"] == 3 and enough:
        cluster["core_switches_per_plane"] = enough[0]
    cluster["pods"] = pods
    return build_config(tree)


def measure(config: Config, placement: Placement, hash_name: HashName, qps: int, seed: int, repeats: int) -> SizeRow:
    """Time `repeats` passes over one fabric on one core, after one that is not counted; call it in a fresh process."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    warm = {"compile": 0.0}
    with _clock(warm, "compile"):
        max_min(np.zeros((2, 1), dtype=np.int64), np.ones(1))  # two flows on one link: all kernels run
    one_pass(config, placement, hash_name, qps, seed)  # what is loaded on first use is loaded now
    passes = [one_pass(config, placement, hash_name, qps, seed + turn) for turn in range(repeats)]
    totals = [sum(each.times.values()) for each in passes]
    stages = {f"{stage}_s": statistics.median(each.times[stage] for each in passes) for stage in STAGES}
    return SizeRow(
        pods=config.cluster.pods,
        placement=placement,
        gpus=config.cluster.num_gpus,
        links=passes[0].links,
        flows=passes[0].flows,
        flows_between_tors=passes[0].flows_between_tors,
        compile_s=warm["compile"],
        **stages,
        total_s=statistics.median(totals),
        cpu_s=min(each.cpu_s for each in passes),
        totals_s=totals,
        peak_bytes=peak_bytes(),
    )


def one_pass(config: Config, placement: Placement, hash_name: HashName, qps: int, seed: int) -> OnePass:
    """Build the fabric, derive, hash, load and rate its flows once; certifying the rates is not timed.

    Raises:
        ValueError: a rate is not max-min fair.
    """
    times = dict.fromkeys((*STAGES, "cpu"), 0.0)
    between = 0
    with _clock(times, "build"):
        fabric = Clos.build(config.cluster)
    with _clock(times, "flows"):
        flows = _ring_flows(config, fabric, placement, qps, seed)
    for kind in _PHASES:
        phase = flows.select(kind)
        with _clock(times, "hash"):
            paths = _hash(fabric, phase, hash_name, seed)
        with _clock(times, "load"):
            loaded = place(fabric, phase, paths)
        with _clock(times, "rate"):
            rates = max_min(paths, fabric.link_bps)
        rates.certify()
        between += loaded.collisions().num_flows
    cpu_s = times.pop("cpu")
    return OnePass(times, cpu_s, fabric.num_links, len(flows), between)


def exponent(rows: Sequence[SizeRow], placement: Placement) -> float | None:
    """Return the least-squares slope of log CPU seconds over log GPUs; None for a single size.

    It takes the fastest pass of each size, since other programs can only slow a pass down.
    """
    selected = [row for row in rows if row.placement == placement]
    if len(selected) < 2:
        return None
    gpus, seconds = np.log([row.gpus for row in selected]), np.log([row.cpu_s for row in selected])
    return float(np.polyfit(gpus, seconds, 1)[0])


def missed_limits(rows: Sequence[SizeRow], growth: Sequence[Growth]) -> list[str]:
    """List the limits that were missed, one line each: of times, of memory, and of growth."""
    missed = []
    for row in rows:
        if row.pods == PAPER_PODS:
            for key, most in (("build_s", MAX_BUILD_S), ("total_s", MAX_TOTAL_S), ("peak_bytes", MAX_PEAK_BYTES)):
                value = getattr(row, key)
                if value > most:
                    missed.append(f"{row.placement}: {key} = {value:.3g} is above {most:g}")
    for each in growth:
        if each.exponent is not None and not each.exponent <= MAX_EXPONENT:
            missed.append(f"{each.placement}: exponent {each.exponent:.2f} is above {MAX_EXPONENT}")
    return missed


def peak_bytes() -> int:
    """Return the peak resident memory of this process in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _ring_flows(config: Config, fabric: Clos, placement: Placement, qps: int, seed: int) -> Flows:
    flows = job_flows(config.job, config.cluster, qps_per_connection=qps).select(*_PHASES)
    if placement == "packed":
        return flows
    design = fabric.design
    server = np.random.default_rng(seed).permutation(design.num_servers)
    src, dst = (
        server[nic // design.nics_per_server] * design.nics_per_server + nic % design.nics_per_server
        for nic in (flows.src_nic, flows.dst_nic)
    )
    return Flows(src, dst, flows.num_bytes, flows.kind)


def _hash(fabric: Clos, flows: Flows, hash_name: HashName, seed: int) -> Ints:
    ecmp = Ecmp(hash_name, headers(fabric, flows, seed), seed)
    return route(fabric, flows.src_nic, flows.dst_nic, ecmp)


@contextmanager
def _clock(times: dict[str, float], stage: str) -> Iterator[None]:
    """Add the seconds of the block to its stage, and its CPU seconds to `cpu`."""
    start, cpu = time.perf_counter(), time.process_time()
    yield
    times[stage] += time.perf_counter() - start
    times["cpu"] = times.get("cpu", 0.0) + time.process_time() - cpu


def _line(row: SizeRow) -> str:
    stages = ", ".join(f"{stage} {getattr(row, f'{stage}_s'):.3f}" for stage in STAGES)
    flows = f"{row.flows:>8,} flows, {row.flows_between_tors:>8,} between ToRs"
    return (
        f"{row.gpus:>7,} GPUs, {row.placement:9} {flows}: "
        f"{row.total_s:.3f} s ({stages}), {row.peak_bytes / 1e6:,.0f} MB"
    )


if __name__ == "__main__":
    from netlayer.cli import run

    run(command, "python -m bench.topology_scale")

"""`python -m bench.sim_speed`: packets times links a second of the simulator, and of an event heap on the same work.

The work is a permutation over a k-ary fat tree of 100G links of 1 us: every host sends 500 packets of 4,000 B payload
and 64 B of header along a path that ECMP draws, each answered by an ACK of 64 B. A *link-hop* is one packet, data or
ACK, over one link. *line-rate* has neither marks nor pauses; *dcqcn* has ECN, DCQCN and PFC. Each size and case runs
in a process of its own, so that its peak memory is its own; threads take turns, and so do the engine and the heap. A
time counts only once all flows have ended, for any number of threads with the same bits in flows, ports and law, and in
the heap at the same picosecond. Not covered: building the tables and compiling the kernels, whose times stand apart.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal, get_args

import click
import numpy as np

from bench.simulator.heap_engine import simulate_by_heap
from congestion.engine.build import build
from congestion.scenarios.fabric import FatTree, build_fabric
from congestion.scenarios.patterns import Permutation, permutation
from congestion.simulation.files import FlowSet
from congestion.simulation.settings import Settings, settings_of
from congestion.simulation.simulate import Backend, Outcome, simulate
from netlayer import environ
from netlayer.command import RunOptions, open_out, run_options_without_config
from netlayer.errors import CheckFailed
from netlayer.progress import Stages
from netlayer.results import RunRecord, utc_now, write_text
from topology.fabric.graph import Graph

Case = Literal["line-rate", "dcqcn"]
CASES: tuple[Case, ...] = get_args(Case)
# Limits: link-hops a second of one thread by case and hosts, peak memory, and how many times as fast as the
# heap, and two threads as one.
LEAST_HOPS_PER_S = {"line-rate": {1_024: 20e6, 8_192: 10e6}, "dcqcn": {1_024: 10e6, 8_192: 6e6}}
LEAST_GPU_HOPS_PER_S = 300e6
MAX_PEAK_BYTES, MIN_OVER_HEAP, MIN_OVER_ONE_THREAD = 1e9, 4.0, 1.6

Row = dict[str, Any]
_COMPARED = ("flow", "receiver", "port", "dcqcn_flow")
_PACKETS = ("congestion.mtu_bytes=4000", "congestion.header_bytes=64", "congestion.ack_bytes=64")
_MTU_BYTES = 4_000


@click.command()
@run_options_without_config
@click.option("--ports", multiple=True, type=click.IntRange(4, 64), help="k of the fat tree, even [16 32].")
@click.option("--peer-ports", type=click.IntRange(4, 64), default=16, show_default=True, help="k beside the heap.")
@click.option("--case", "cases", multiple=True, type=click.Choice(CASES), help="Which [both].")
@click.option("--packets", type=click.IntRange(1), default=500, show_default=True, help="Packets a host.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Runs of each; the best counts.")
@click.option("--threads", type=click.IntRange(2, 1024), default=2, show_default=True, help="Compared with one.")
@click.option(
    "--backend", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True, help="gpu: beside the CPU."
)
def command(
    options: RunOptions,
    ports: Sequence[int],
    peer_ports: int,
    cases: Sequence[Case],
    packets: int,
    repeats: int,
    threads: int,
    backend: str,
) -> None:
    """Time the simulator on permutations over fat trees of k^3 / 4 hosts; exit 1 where a limit is missed.

    Limits: line rate 20 and 10 million link-hops/s of one thread at 1,024 and 8,192 hosts; with ECN, DCQCN and PFC 10
    and 6 million, under 1 GB; at least 4 times the heap, and two threads at least 1.6 times one. A GPU: 300 million at
    8,192 hosts with ECN, DCQCN and PFC.

    \b
    Examples:
      python -m bench.sim_speed
      python -m bench.sim_speed --ports 8 --peer-ports 8 --repeats 3
      python -m bench.sim_speed --case dcqcn --ports 32 --json -
      python -m bench.sim_speed --backend gpu --ports 32
    """
    out, started = open_out(options.out, "sim_speed"), utc_now()
    to_stderr = str(options.json_file) == "-"
    with Stages() as stages:
        with stages.open("compile"):  # in a process of its own too: a compiler takes memory
            rows: list[Row] = [_apart(compile_kernels, options.seed)]
        sizes = sorted(set(ports or (16, 32)))
        works = [(measure_on_gpu, k) for k in sizes]
        if backend == "cpu":
            works = [*((measure, k) for k in sizes), (measure_peer, peer_ports)]
        for work, k in works:
            for case in cases or CASES:
                with stages.open(f"{work.__name__} {case} k={k}"):
                    rows.append(_apart(work, k, case, packets, repeats, options.seed, threads))
                stages.print(f"{line(rows[-1])}\n", err=to_stderr)
    record = RunRecord(
        name="bench.sim_speed",
        source="measured",
        rows=rows,
        started_utc=started,
        ended_utc=utc_now(),
        arguments={
            **options.arguments(),
            "ports": list(ports),
            "peer_ports": peer_ports,
            "case": list(cases),
            "packets": packets,
            "repeats": repeats,
            "threads": threads,
            "backend": backend,
        },
        config={"congestion": {case: settings(case).model_dump(mode="json") for case in cases or CASES}},
        environment=environ.snapshot(options.seed),
        devices=["CPU, one core a thread", *(["the first GPU"] if backend == "gpu" else [])],
    )
    click.echo(f"record: {record.save(out / 'records')}", err=True)
    if options.json_file:
        write_text(options.json_file, record.to_json())
    if missed := missed_limits(rows):
        raise CheckFailed("; ".join(missed))


def compile_kernels(seed: int) -> Row:
    """One row: seconds to compile the engine's kernels, or to load those that were kept."""
    return {
        "table": "compile",
        "compile_s": simulate(*scenario(4, 1, seed), settings("dcqcn"), "dcqcn", seed=seed).compile_s,
    }


def settings(case: Case) -> Settings:
    """Packets as said above, thresholds and DCQCN of the preset `ns3`, which scale to 100G."""
    without = () if case == "dcqcn" else ("congestion.ecn=false", "congestion.pfc=false")
    return settings_of("ns3", (*_PACKETS, *without))


def scenario(k: int, packets: int, seed: int) -> tuple[Graph, FlowSet]:
    """The fat tree of k-port switches and the permutation over all its hosts."""
    fabric = build_fabric(FatTree(bps=100_000_000_000, k=k))
    pattern = Permutation(ranks=len(fabric.hosts), num_bytes=packets * _MTU_BYTES, sports="random")
    return fabric, permutation(fabric, pattern, seed)


def measure(k: int, case: Case, packets: int, repeats: int, seed: int, threads: int) -> Row:
    """One row: the engine with one thread and with several, in turn.

    Raises:
        CheckFailed: a flow did not end, or two runs differ in a bit.
    """
    fabric, flows = scenario(k, packets, seed)
    one, many = _Times(), _Times()
    first, peak = b"", 0
    for _ in range(repeats):
        for times, workers in ((one, 1), (many, threads)):
            outcome = times.run(fabric, flows, case, seed, workers)
            state_digest, peak = digest(outcome), peak or _peak_bytes()
            if state_digest != (first := first or state_digest):
                raise CheckFailed(f"{case}, k={k}: {workers} threads gave other bits than the first run")
    return {
        "table": "speed",
        **_facts(case, outcome),
        "threads": threads,
        "load_s": one.load_s,
        "build_s": min(one.build_s),
        **one.columns("one", outcome.link_hops),
        **many.columns("many", outcome.link_hops),
        "over_one_thread": min(one.wall_s) / min(many.wall_s),
        "peak_bytes": peak,
    }


def measure_peer(k: int, case: Case, packets: int, repeats: int, seed: int, threads: int) -> Row:  # noqa: ARG001
    """One row: the engine with one thread and the heap, in turn.

    The heap has no PFC, and is right where nothing was paused.

    Raises:
        CheckFailed: a flow did not end, or the two differ in a completion time, in marks or in link-hops.
    """
    fabric, flows = scenario(k, packets, seed)
    without = settings(case).model_copy(update={"pfc": False})
    engine, heap = _Times(), _Times()
    simulate_by_heap(build(*scenario(4, 1, seed), without, _law(case), seed=seed))  # compiles
    for _ in range(repeats):
        outcome = engine.run(fabric, flows, case, seed, 1)
        state = build(fabric, flows, without, _law(case), seed=seed)
        with heap.clock():
            counted = simulate_by_heap(state)[0]
        marks = int(outcome.state.port["marks"].sum())
        if not np.array_equal(state.flow["finish"], outcome.finish_ps) or counted["marks"] != marks:
            raise CheckFailed(f"{case}, k={k}: the engine and the heap disagree")
        if counted["hops"] != outcome.link_hops:
            raise CheckFailed(f"{case}, k={k}: the heap counted other link-hops")
    return {
        "table": "peer",
        **_facts(case, outcome),
        **engine.columns("engine", outcome.link_hops),
        **heap.columns("heap", outcome.link_hops),
        "over_heap": min(heap.wall_s) / min(engine.wall_s),
        "over_heap_cpu": min(heap.cpu_s) / min(engine.cpu_s),
    }


def measure_on_gpu(k: int, case: Case, packets: int, repeats: int, seed: int, threads: int) -> Row:  # noqa: ARG001
    """One row: the GPU, after one thread of the CPU, which says what is right; a first run, cold, is not counted.

    Raises:
        CheckFailed: a flow did not end, or the GPU's bits are not the CPU's.
    """
    fabric, flows = scenario(k, packets, seed)
    cpu, gpu, cold = _Times(), _Times(), _Times()
    right = cpu.run(fabric, flows, case, seed, 1)
    for number in range(repeats + 1):
        outcome = (gpu if number else cold).run(fabric, flows, case, seed, 1, "gpu")
        if digest(outcome) != digest(right):
            fields = ", ".join(differences(right, outcome)) or "bytes between fields"
            raise CheckFailed(f"{case}, k={k}: the GPU gave other bits than the CPU: {fields}")
    return {
        "table": "gpu",
        **_facts(case, outcome),
        "load_s": cold.load_s,
        "build_s": min(gpu.build_s),
        **gpu.columns("gpu", outcome.link_hops),
        **cpu.columns("cpu", outcome.link_hops),
        "over_cpu": cpu.wall_s[0] / min(gpu.wall_s),
    }


class _Times:
    """Seconds of the runs of one kind, in their order."""

    def __init__(self) -> None:
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []
        self.build_s: list[float] = []
        self.load_s = 0.0  # of the kernels

    def run(
        self, fabric: Graph, flows: FlowSet, case: Case, seed: int, threads: int, backend: Backend = "numba"
    ) -> Outcome:
        """Simulate once, note the run's seconds, and return its outcome.

        Raises:
            CheckFailed: a flow did not end.
        """
        began = time.perf_counter()
        outcome = simulate(fabric, flows, settings(case), _law(case), seed=seed, threads=threads, backend=backend)
        took = time.perf_counter() - began
        if not outcome.completed or (outcome.finish_ps < 0).any():
            raise CheckFailed(f"{case}: {int((outcome.finish_ps < 0).sum())} of {len(flows)} flows did not end")
        self.wall_s.append(outcome.wall_s)
        self.cpu_s.append(outcome.cpu_s)
        self.build_s.append(took - outcome.wall_s - outcome.compile_s)
        self.load_s = max(self.load_s, outcome.compile_s)
        return outcome

    @contextmanager
    def clock(self) -> Iterator[None]:
        began, cpu = time.perf_counter(), time.process_time()
        yield
        self.wall_s.append(time.perf_counter() - began)
        self.cpu_s.append(time.process_time() - cpu)

    def columns(self, name: str, link_hops: int) -> Row:
        return {
            f"{name}_wall_s": self.wall_s,
            f"{name}_cpu_s": self.cpu_s,
            f"{name}_best_hops_per_s": link_hops / min(self.wall_s),
            f"{name}_median_hops_per_s": link_hops / statistics.median(self.wall_s),
        }


def digest(outcome: Outcome) -> bytes:
    """Return the digest of the final state: flows, ports and the congestion-control algorithm."""
    tables = outcome.state._asdict()
    return hashlib.sha256(b"".join(tables[name].tobytes() for name in _COMPARED)).digest()


def differences(one: Outcome, other: Outcome) -> list[str]:
    """Fields of what `digest` is of, with the first row in which two outcomes differ, and in how many they do."""
    lines = []
    for name in _COMPARED:
        own, its = getattr(one.state, name), getattr(other.state, name)
        for field in own.dtype.names:
            rows = np.flatnonzero(own[field] != its[field])
            if len(rows):
                where = f"{name}.{field} in {len(rows):,} of {len(own):,} rows"
                lines.append(f"{where} (row {rows[0]}: {own[field][rows[0]]}, {its[field][rows[0]]})")
    return lines


def missed_limits(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """List what was slower or larger than allowed; limits are for 1,024 and 8,192 hosts."""
    missed = []
    for row in rows:
        hosts = row.get("hosts")
        if hosts not in (1_024, 8_192):
            continue
        if row.get("table") == "gpu":
            if hosts == 8_192 and row["case"] == "dcqcn" and row["gpu_best_hops_per_s"] < LEAST_GPU_HOPS_PER_S:
                reason = f"{row['gpu_best_hops_per_s']:.4g} is below {LEAST_GPU_HOPS_PER_S:g}"
                missed.append(f"dcqcn, 8,192 hosts: gpu_best_hops_per_s = {reason}")
            continue
        bounds = {"over_heap": MIN_OVER_HEAP, "one_best_hops_per_s": LEAST_HOPS_PER_S[row["case"]][hosts]}
        if row.get("threads") == 2:
            bounds["over_one_thread"] = MIN_OVER_ONE_THREAD
        where = f"{row['case']}, {hosts:,} hosts"
        for key, bound in bounds.items():
            if row.get(key, bound) < bound:
                missed.append(f"{where}: {key} = {row[key]:.4g} is below {bound:g}")
        if row.get("peak_bytes", 0) > MAX_PEAK_BYTES:
            missed.append(f"{where}: peak_bytes = {row['peak_bytes']:.3g} is above {MAX_PEAK_BYTES:g}")
    return missed


def line(row: Mapping[str, Any]) -> str:
    """Format a row as text."""
    what = f"{row['hosts']:>6,} hosts, {row['case']:9} {row['link_hops'] / 1e6:7.3f} M link-hops:"
    if row["table"] == "peer":
        engine, heap = (row[f"{name}_best_hops_per_s"] / 1e6 for name in ("engine", "heap"))
        return f"{what} engine {engine:.1f} M/s, heap {heap:.1f} M/s, {row['over_heap']:.2f} times the heap"
    if row["table"] == "gpu":
        best, median, cpu = (row[f"{name}_hops_per_s"] / 1e6 for name in ("gpu_best", "gpu_median", "cpu_best"))
        speed = (
            f"GPU {best:.0f} M/s (median {median:.0f}) in {min(row['gpu_wall_s']):.4f} s, {row['over_cpu']:.0f} times"
        )
        return f"{what} {speed} one thread ({cpu:.1f} M/s); kernels compiled in {row['load_s']:.1f} s"
    one, median, many = (row[f"{name}_hops_per_s"] / 1e6 for name in ("one_best", "one_median", "many_best"))
    speed = f"{one:.1f} M/s (median {median:.1f}) in {min(row['one_wall_s']):.3f} s"
    threads = f"{row['threads']} threads {many:.1f} M/s ({row['over_one_thread']:.2f} times)"
    apart = f"kernels loaded in {row['load_s']:.1f} s, tables built in {row['build_s']:.2f} s"
    return f"{what} {speed}, {threads}, {row['peak_bytes'] / 1e6:,.0f} MB; {apart}"


def _apart(work: Callable[..., Row], *arguments: Any) -> Row:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        return pool.submit(work, *arguments).result()


def _law(case: Case) -> str:
    return "dcqcn" if case == "dcqcn" else "none"


def _facts(case: Case, outcome: Outcome) -> Row:
    port = outcome.state.port
    return {
        "case": case,
        "hosts": len(outcome.finish_ps),
        "link_hops": outcome.link_hops,
        "completion_ps": int(outcome.finish_ps.max()),
        "marks": int(port["marks"].sum()),
        "pauses": int(port["pauses"].sum()),
        "max_queue_bytes": int(port["max_queue_bytes"].max()),
    }


def _peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    from netlayer.cli import run

    run(command, "python -m bench.sim_speed")

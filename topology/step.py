"""The communication of one training step on a fabric: its phases, their collisions, and how long they take.

A phase is flows that run at one time: the rings (the all-gather and the reduce-scatter take the same pairs, one after
the other) and the pipeline (forward and backward overlap in 1F1B). A phase lasts until its slowest flow has sent its
bytes at the max-min fair rates that hold while all run; the step's communication is the sum of its phases. Left out:
what computation hides, and rates that rise when others finish (`rates.completion_s`: times here are upper bounds).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from netlayer.config import ClusterConfig, Config, JobConfig
from topology.clos import Clos, Ints, Tier
from topology.hashing import Ecmp, HashName
from topology.load import Collisions, Load, place
from topology.placement import Placement
from topology.rates import max_min
from topology.routing import route
from topology.survivors import Bools, route_around
from topology.traffic import Flows, Kind, headers, job_flows

Floats = NDArray[np.float64]

# Name, the kinds that run together, how often a step runs them.
PHASES: tuple[tuple[str, tuple[Kind, ...], int], ...] = (
    ("ring", (Kind.DP_REDUCE_SCATTER,), 2),
    ("pipeline", (Kind.PP_FORWARD, Kind.PP_BACKWARD), 1),
)


@dataclass(frozen=True, eq=False)
class Phase:
    """One phase on its paths; `seconds` a flow for all its turns, infinite where `reached` is False."""

    name: str
    load: Load
    reached: Bools
    seconds: Floats

    @property
    def collisions(self) -> Collisions:
        return self.load.collisions()

    @property
    def time_s(self) -> float:
        """Until the slowest flow that has a path is done; 0 without flows."""
        return float(self.seconds[self.reached].max(initial=0.0))

    @property
    def num_stopped(self) -> int:
        """Flows without a path."""
        return int((~self.reached).sum())


@dataclass(frozen=True)
class Step:
    """All phases of a step."""

    phases: tuple[Phase, ...]

    @property
    def time_s(self) -> float:
        return sum(phase.time_s for phase in self.phases)

    @property
    def num_stopped(self) -> int:
        return sum(phase.num_stopped for phase in self.phases)

    def __getitem__(self, name: str) -> Phase:
        return next(phase for phase in self.phases if phase.name == name)


def slot_flows(job: JobConfig, cluster: ClusterConfig, qps: int = 1) -> Flows:
    """The job's flows between slots 0, 1, ...; the cluster may have more servers than the job."""
    servers = job.parallel.layout.world_size // cluster.gpus_per_server
    return job_flows(job, cluster.model_copy(update={"servers": servers}), qps_per_connection=qps)


def run_step(
    fabric: Clos, flows: Flows, name: HashName, seed: int, *, alive: Bools | None = None, rotate: bool = True
) -> Step:
    """Hash, load and rate every phase of placed flows; over the links of the mask `alive` where it is given."""
    phases = []
    for phase, kinds, turns in PHASES:
        chosen = flows.select(*kinds)
        if len(chosen):
            ecmp = Ecmp(name, headers(fabric, chosen, seed), seed, rotate=rotate)
            phases.append(run_phase(fabric, phase, chosen, ecmp, turns=turns, alive=alive))
    return Step(tuple(phases))


def run_phase(
    fabric: Clos, name: str, flows: Flows, ecmp: Ecmp, *, turns: int = 1, alive: Bools | None = None
) -> Phase:
    """One phase; `turns`: how often it runs."""
    if alive is None or alive.all():
        paths, reached = route(fabric, flows.src_nic, flows.dst_nic, ecmp), np.ones(len(flows), dtype=np.bool_)
    else:
        paths, reached = route_around(fabric, flows.src_nic, flows.dst_nic, ecmp, alive)
    seconds = np.full(len(flows), np.inf)
    rate = flow_rates(fabric, paths, reached)
    seconds[reached] = turns * 8 * flows.num_bytes[reached] / rate[reached]
    return Phase(name, place(fabric, flows, paths), reached, seconds)


def flow_rates(fabric: Clos, paths: Ints, reached: Bools) -> Floats:
    """Max-min fair rate of each flow while all run, bits per second; 0 without a path."""
    rates = np.zeros(len(paths))
    if reached.any():
        rates[reached] = max_min(paths[reached], fabric.link_bps).flow_bps
    return rates


def traffic_cost(fabric: Clos, flows: Flows) -> dict[str, float]:
    """What placed flows ask of the fabric: hops weighted by bytes, and bytes that leave a ToR, and a pod."""
    hops = fabric.hops(flows.src_nic, flows.dst_nic)
    ring = np.isin(flows.kind, (Kind.DP_ALL_GATHER, Kind.DP_REDUCE_SCATTER))
    total = float(flows.num_bytes.sum())
    across = hops == len(Tier)
    return {
        "mean_hops": float((flows.num_bytes * hops).sum()) / total if total else 0.0,
        "cross_tor_bytes": float(flows.num_bytes[hops > 2].sum()),
        "cross_pod_bytes": float(flows.num_bytes[across].sum()),
        "cross_pod_ring_bytes": float(flows.num_bytes[across & ring].sum()),
        "cross_pod_pipeline_bytes": float(flows.num_bytes[across & ~ring].sum()),
        "total_bytes": total,
    }


def placement_row(fabric: Clos, flows: Flows, placement: Placement, name: HashName, seed: int) -> dict[str, object]:
    """Cost of one placement: its traffic, its collisions and the step's communication. `flows` are between slots."""
    placed = placement.apply(flows, fabric.design.nics_per_server)
    step = run_step(fabric, placed, name, seed)
    row: dict[str, object] = {"placement": placement.name, "hash": name, "seed": seed, **traffic_cost(fabric, placed)}
    for phase in step.phases:
        found = phase.collisions
        row |= {
            f"{phase.name}_collision_share": found.share,
            f"{phase.name}_excess": found.excess,
            f"{phase.name}_time_s": phase.time_s,
        }
    return row | {"time_s": step.time_s}


def grown(config: Config, spares: int) -> tuple[ClusterConfig, list[int]]:
    """The cluster with whole pods more until it has `spares` servers beyond the job's, and those that are not ours.

    Pods grow by as many ToR sets as they have now; new servers above `spares` count as busy.

    Raises:
        ConfigError: with two tiers the servers of the last ToR set are all there can be.
    """
    cluster = config.cluster
    if not spares:
        return cluster, []
    full = cluster.servers_per_tor_set
    sets = -(-cluster.servers // full)
    room = sets * full - cluster.servers
    pods = cluster.pods
    while room < spares:
        room += sets // cluster.pods * full
        pods += 1
    bigger = cluster.servers + room
    busy = list(range(cluster.servers + spares, bigger))
    return cluster.model_copy(update={"servers": bigger, "pods": pods}), busy

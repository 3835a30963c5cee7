"""The communication of one training step on a fabric: its phases, their collisions, and how long they take.

A phase is flows that run at one time: the rings (the all-gather and the reduce-scatter take the same pairs, one after
the other), the pipeline (forward and backward overlap in 1F1B), and the sum of a tied token table's gradients over the
pipeline's ends. A phase lasts until its last flow ends at max-min
fair rates; the step's communication is the sum of its phases. `time_s` fills the rates anew as flows end;
`time_bound_s` takes those that hold while all run, in a hundredth of the time and a few percent above. Not covered:
what computation hides.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netlayer.config.tree import ClusterConfig, Config, JobConfig
from topology.ecmp.hashing import Ecmp, HashName
from topology.ecmp.load import Collisions, Load, place
from topology.fabric.interface import Bools, Fabric
from topology.placement.strategies import Placement
from topology.rates.max_min import Rates, completion_s, max_min
from topology.traffic.job import Flows, Kind, headers, job_flows

Floats = NDArray[np.float64]

# Name, the kinds that run together, and those that take the same pairs in a turn of their own.
PHASES: tuple[tuple[str, tuple[Kind, ...], tuple[Kind, ...]], ...] = (
    ("ring", (Kind.DP_REDUCE_SCATTER,), (Kind.DP_ALL_GATHER,)),
    ("context", (Kind.CP_ALL_GATHER,), (Kind.CP_REDUCE_SCATTER,)),
    ("pipeline", (Kind.PP_FORWARD, Kind.PP_BACKWARD), ()),
    ("tied", (Kind.TIED_ALL_REDUCE,), ()),
    ("replicas", (Kind.DP_REPLICATE_ALL_REDUCE,), ()),
    # Where there is no job: the traffic itself is the one phase.
    ("permutation", (Kind.PERMUTATION,), ()),
    ("file", (Kind.FILE,), ()),
)
# Of `time_s`: ends within a hundredth of a flow's own time are taken together.
_RESOLUTION = 1e-2


@dataclass(frozen=True, eq=False)
class Phase:
    """One phase; load, rates and bytes (of all its turns) are of the flows that are `reached`: those with a path."""

    name: str
    reached: Bools
    load: Load
    rates: Rates
    num_bytes: Floats

    @property
    def collisions(self) -> Collisions:
        return self.load.collisions()

    @property
    def seconds(self) -> Floats:
        """Seconds that each reached flow takes at the rate that it has while all run."""
        return 8 * self.num_bytes / self.rates.flow_bps

    @property
    def time_bound_s(self) -> float:
        """Seconds until the slowest flow is done, were no rate to rise; 0 without flows."""
        return float(self.seconds.max(initial=0.0))

    @property
    def time_s(self) -> float:
        """Seconds until the last flow ends, rates filled anew as flows end; 0 without flows."""
        return float(completion_s(self.rates, self.num_bytes, resolution=_RESOLUTION).max(initial=0.0))

    @property
    def num_stopped(self) -> int:
        """Flows without a path."""
        return int((~self.reached).sum())


@dataclass(frozen=True)
class Step:
    """All phases of a step."""

    phases: tuple[Phase, ...]

    @property
    def time_bound_s(self) -> float:
        return sum(phase.time_bound_s for phase in self.phases)

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
    fabric: Fabric,
    flows: Flows,
    name: HashName,
    seed: int,
    *,
    alive: Bools | None = None,
    offsets: Sequence[int] | None = None,
) -> Step:
    """Hash, load and rate every phase of placed flows.

    Args:
        name, seed, offsets: the switches' hash, see `hashing.Ecmp`.
        alive: a mask over links, where not all are.
    """
    phases = []
    for phase, kinds, others in PHASES:
        chosen = flows.select(*kinds)
        if len(chosen):
            ecmp = Ecmp(name, headers(fabric, chosen, seed), seed, offsets=offsets)
            num_bytes = chosen.num_bytes + sum(flows.select(kind).num_bytes for kind in others)
            both = dataclasses.replace(chosen, num_bytes=num_bytes)
            phases.append(run_phase(fabric, phase, both, ecmp, alive=alive))
    return Step(tuple(phases))


def run_phase(fabric: Fabric, name: str, flows: Flows, ecmp: Ecmp, *, alive: Bools | None = None) -> Phase:
    """One phase: the flows run at one time, with the bytes of all its turns."""
    paths, reached = fabric.route(flows.src_nic, flows.dst_nic, ecmp, alive)
    left = flows.where(reached)  # the others ask for nothing
    load = place(fabric, left, paths[reached])
    return Phase(name, reached, load, max_min(load.paths, fabric.link_bps), left.num_bytes)


def traffic_cost(fabric: Fabric, flows: Flows) -> dict[str, float]:
    """Return the load of placed flows on the fabric: hops weighted by bytes, and bytes that leave a ToR, and a pod."""
    hops = fabric.hops(flows.src_nic, flows.dst_nic)
    ring = np.isin(flows.kind, (Kind.DP_ALL_GATHER, Kind.DP_REDUCE_SCATTER))
    total = float(flows.num_bytes.sum())
    across = fabric.leaves_pod(flows.src_nic, flows.dst_nic)
    return {
        "mean_hops": float((flows.num_bytes * hops).sum()) / total if total else 0.0,
        "cross_tor_bytes": float(flows.num_bytes[hops > 2].sum()),
        "cross_pod_bytes": float(flows.num_bytes[across].sum()),
        "cross_pod_ring_bytes": float(flows.num_bytes[across & ring].sum()),
        "cross_pod_pipeline_bytes": float(flows.num_bytes[across & ~ring].sum()),
        "total_bytes": total,
    }


def placement_row(
    fabric: Fabric, flows: Flows, placement: Placement, name: HashName, seed: int, *, seeds: int = 4
) -> dict[str, Any]:
    """Return one placement's cost: its traffic, its collisions and the step's communication. `flows` are between slots.

    A phase ends with its unluckiest flow, so one draw of the hash says little: times are medians over the seeds seed,
    seed + 1, ... with the least and the most, collisions are means.
    """
    placed = placement.apply(flows, fabric.nics_per_server)
    steps = [run_step(fabric, placed, name, seed + turn) for turn in range(seeds)]
    row: dict[str, Any] = {"placement": placement.name, "hash": name, "seed": seed, "seeds": seeds}
    row |= traffic_cost(fabric, placed)
    totals = np.zeros(seeds)
    for phases in zip(*(step.phases for step in steps), strict=True):
        collisions, times = [phase.collisions for phase in phases], [phase.time_s for phase in phases]
        totals += times
        row |= {
            f"{phases[0].name}_collision_share": statistics.fmean(one.share for one in collisions),
            f"{phases[0].name}_excess": statistics.fmean(one.excess for one in collisions),
            f"{phases[0].name}_time_s": statistics.median(times),
        }
    return row | {
        "time_s": float(np.median(totals)),
        "time_min_s": float(totals.min()),
        "time_max_s": float(totals.max()),
    }


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

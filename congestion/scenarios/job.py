"""The phases of a 3D-parallel training step as flows: data-parallel rings, and the pipeline's sends.

Who sends to whom, and how much, comes from `topology.traffic.job`: an edge of a ring is one flow, or several in turn,
each after the receipt of the one before. A phase begins at a NIC once all that it sent and received in the last one is
done. Not covered: computation between phases, tensor parallelism (NVLink), the sum of a tied token table's gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from congestion.scenarios.patterns import Flows, Pattern, on_hosts, rng_of
from congestion.simulation.files import MOST_CLASSES, FlowSet, Ints, nth_of_pair
from netlayer.config.tree import Bytes, ClusterConfig, JobConfig
from netlayer.errors import ConfigError
from netlayer.workload.schedule import micro_batches
from topology.fabric.graph import Graph
from topology.traffic import job as traffic
from topology.traffic.job import Kind

_PHASES = {
    "all-gather": (Kind.DP_ALL_GATHER,),
    "reduce-scatter": (Kind.DP_REDUCE_SCATTER,),
    "pipeline": (Kind.PP_FORWARD, Kind.PP_BACKWARD),
}
_RINGS = (Kind.DP_ALL_GATHER, Kind.DP_REDUCE_SCATTER)


class JobPhases(Pattern):
    """Phases of the job's step; `[cluster]` and `[job]` come from --config."""

    phases: str = Field(
        "pipeline,reduce-scatter,all-gather",
        description=f"in turn by commas, at once by +; of {', '.join(_PHASES)}",
    )
    bucket_bytes: Bytes = Field(
        64 * 2**20,
        description="parameters of a rank that a ring gathers, in the computation's dtype; it reduces their gradients, "
        "in the dtype in which these travel; 0: all of a step",
    )
    micro_batches: int = Field(1, ge=0, description="whose activations the pipeline sends; 0: all of a step")
    bytes_per_rank: Bytes = Field(
        0, description="then all flows are scaled alike until a rank sends so much on average; 0: not"
    )
    ring_steps: int = Field(1, ge=1, le=100_000, description="flows that an edge of a ring is cut into")
    classes: str = Field("", description="class of traffic of phases, such as pipeline=1,all-gather=2; others: pg")
    qps: int = Field(1, ge=1, le=256, description="queue pairs a connection, which share its bytes")


def job_phases(fabric: Graph, p: JobPhases, seed: int, job: JobConfig, cluster: ClusterConfig) -> FlowSet:
    """NIC n of the cluster is host n of the fabric; placed at random, servers are exchanged, and rails kept.

    Raises:
        ConfigError: a phase is unknown, nothing leaves a server, or see `traffic.job_flows`.
    """
    turns = [_kinds(phase) for phase in p.phases.split(",")]
    whole = traffic.job_flows(job, cluster, qps_per_connection=p.qps)
    num_bytes = _scaled(whole, turns, p, job, cluster)
    made, pg_of = _Flows(), _classes(p)
    for kinds in turns:
        made.next_phase()
        for kind in kinds:
            rows = np.flatnonzero(whole.kind == kind)
            steps = p.ring_steps if kind in _RINGS else 1
            made.add(whole.src_nic[rows], whole.dst_nic[rows], num_bytes[rows], steps, pg_of.get(kind, p.pg))
    nic = np.arange(cluster.servers * cluster.nics_per_server)
    if len(nic) > len(fabric.hosts):
        rule = f"fewer than the cluster's {len(nic)} NICs"
        raise ConfigError("fabric", f"{len(fabric.hosts)} hosts", rule, "leave the fabric to the cluster file")
    if p.placement == "random":
        server, local = np.divmod(nic, cluster.nics_per_server)
        nic = rng_of(seed, "placement").permutation(cluster.servers)[server] * cluster.nics_per_server + local
    return on_hosts(fabric, p, seed, made.flows(), fabric.hosts[nic])


def num_flows(phases: str, p: JobPhases, job: JobConfig, cluster: ClusterConfig) -> int:
    """Count the flows of phases at once, joined by +.

    Raises:
        ConfigError: a phase is unknown.
    """
    kind = traffic.job_flows(job, cluster, qps_per_connection=p.qps).kind
    return sum(int((kind == one).sum()) * (p.ring_steps if one in _RINGS else 1) for one in _kinds(phases))


def _kinds(phase: str) -> list[Kind]:
    """All that runs at once in a phase."""
    names = [name.strip() for name in phase.split("+")]
    for name in names:
        if name not in _PHASES:
            raise ConfigError("scenario.phases", name, "is no phase", f"join {', '.join(_PHASES)} by , or +")
    return [kind for name in names for kind in _PHASES[name]]


def _classes(p: JobPhases) -> dict[Kind, int]:
    """The class of traffic of each kind that has one of its own."""
    classes: dict[Kind, int] = {}
    for part in filter(None, p.classes.split(",")):
        phase, _, number = part.partition("=")
        if not (number.strip().isdecimal() and int(number) < MOST_CLASSES):
            rule = f"gives no class of 0..{MOST_CLASSES - 1}"
            raise ConfigError("scenario.classes", part, rule, "write phase=number, several by commas")
        classes |= dict.fromkeys(_kinds(phase), int(number))
    return classes


def _scaled(
    flows: traffic.Flows, turns: Sequence[Sequence[Kind]], p: JobPhases, job: JobConfig, cluster: ClusterConfig
) -> Ints:
    """Return the bytes of each flow: of one bucket, and of `p.micro_batches`, where the phases ask for that.

    Then all are scaled to `p.bytes_per_rank` on average.

    Raises:
        ConfigError: no phase has a flow between servers.
    """
    num_bytes = flows.num_bytes.copy()
    if p.bucket_bytes:
        ring = np.isin(flows.kind, _RINGS)
        nics = traffic.nic_of_rank(cluster, np.arange(job.parallel.layout.world_size))
        stage = np.searchsorted(nics, flows.src_nic[ring]) // (job.parallel.tp * job.parallel.dp)
        num_bytes[ring] *= p.bucket_bytes / traffic.parameter_bytes(job)[stage]
    if p.micro_batches:
        num_bytes[np.isin(flows.kind, _PHASES["pipeline"])] *= p.micro_batches / micro_batches(job)
    total = sum(num_bytes[flows.kind == kind].sum() for kinds in turns for kind in kinds)
    if not total:
        rule = f"has no flow between its {cluster.servers} servers"
        raise ConfigError("scenario.phases", p.phases, rule, "give --config a job of several servers")
    if p.bytes_per_rank:
        num_bytes *= p.bytes_per_rank * job.parallel.layout.world_size / total
    return np.maximum(np.round(num_bytes), 1).astype(np.int64)


class _Flows:
    """Flows as phases add them, with what each waits for."""

    def __init__(self) -> None:
        self.num_flows = 0
        self._columns: list[tuple[Ints, Ints, Ints, Ints, Ints]] = []
        self._waits: list[tuple[Ints, Ints]] = []
        self._before: dict[int, list[int]] = {}  # flows of a NIC's last phase
        self._now: dict[int, list[int]] = {}

    def next_phase(self) -> None:
        self._before = {**self._before, **self._now}
        self._now = {}

    def add(self, src: Ints, dst: Ints, num_bytes: Ints, steps: int, pg: int) -> None:
        """Flows of this phase; in `steps` each is cut up, and a piece waits for the one that its source received."""
        if not len(src):
            return
        channel = nth_of_pair(src, dst)
        flow = self.num_flows + np.arange(len(src))
        self._wait_for_phase(flow, src)
        # The k-th flow into a NIC is of the same ring as the k-th out of it: both stand in order of group and channel.
        received = np.empty_like(flow)
        received[np.argsort(src, kind="stable")] = flow[np.argsort(dst, kind="stable")]
        for step in range(steps):
            piece = num_bytes * (step + 1) // steps - num_bytes * step // steps
            self._columns.append((src, dst, np.maximum(piece, 1), channel, np.full_like(src, pg)))
            if step:
                self._waits.append((flow + step * len(src), received + (step - 1) * len(src)))
        self.num_flows += steps * len(src)
        for ends in (src, dst):
            for one, nic in enumerate(ends.tolist() * steps, int(flow[0])):
                self._now.setdefault(nic, []).append(one)

    def _wait_for_phase(self, flow: Ints, src: Ints) -> None:
        for one, nic in zip(flow.tolist(), src.tolist(), strict=True):
            earlier = np.array(self._before.get(nic, ()), dtype=np.int64)
            self._waits.append((np.full_like(earlier, one), earlier))

    def flows(self) -> Flows:
        src, dst, num_bytes, channel, pg = (np.concatenate(column) for column in zip(*self._columns, strict=True))
        flow, earlier = (np.concatenate(column) for column in zip(*self._waits, strict=True))
        return Flows(src, dst, num_bytes, channel, (flow, earlier), pg=pg)

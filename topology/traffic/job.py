"""Flows of a training job over the fabric, as arrays: the collectives of its data-parallel groups and its pipeline.

Rank r is GPU r % gpus_per_server of server r // gpus_per_server; tensor-parallel traffic and neighbours in one server
use NVLink and make no flow. How many bytes, and in which dtype, `netlayer.workload` says. Beside the job's own flows
stands a random permutation at full load, for the share of a ring that leaves its ToR depends on placement. Not covered:
when a flow of the job starts, and scalars of all ranks (the norm of gradients, losses, LAMB's norms: KiB a step).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from netlayer.config.tree import ClusterConfig, JobConfig
from netlayer.errors import ConfigError
from netlayer.workload.comm_bytes import Carries, Collective, Group, stage_collectives, total_bytes
from netlayer.workload.comm_bytes import Kind as CollectiveKind
from netlayer.workload.model_size import stage_elements
from topology.ecmp.hashes import mix64
from topology.ecmp.hashing import Headers
from topology.ecmp.source_port import udp_source_port
from topology.fabric.clos import Ints
from topology.fabric.graph import Graph
from topology.fabric.interface import Fabric
from topology.traffic.rings import Edges, Segments, all_pairs, ring, tree

Algorithm = Literal["ring", "tree", "all_pairs"]
_QPN_MASK = 0xFF_FFFF  # 24 bits, as the destination QP in a packet's base transport header (BTH)
_FIRST_QPN = 2  # 0 and 1 are the management queue pairs


class Kind(IntEnum):
    """Kinds of traffic that a flow carries."""

    DP_ALL_GATHER = 0
    DP_REDUCE_SCATTER = 1
    PP_FORWARD = 2
    PP_BACKWARD = 3
    PERMUTATION = 4
    DP_ALL_REDUCE = 5
    DP_ALL_TO_ALL = 6
    FILE = 7
    TIED_ALL_REDUCE = 8
    DP_REPLICATE_ALL_REDUCE = 9
    CP_ALL_GATHER = 10
    CP_REDUCE_SCATTER = 11


@dataclass(frozen=True, eq=False)
class Flows:
    """Flows between NICs, arrays of one length: endpoints (NIC indices), bytes a step, and `Kind`.

    `start_s` is when each begins, in seconds from the first; None where all begin at once. `udp_sport` is the UDP
    source port of each where a file gives it; None where it follows from the queue pairs.
    """

    src_nic: Ints
    dst_nic: Ints
    num_bytes: NDArray[np.float64]
    kind: NDArray[np.int8]
    start_s: NDArray[np.float64] | None = None
    udp_sport: NDArray[np.uint16] | None = None

    def __len__(self) -> int:
        return len(self.src_nic)

    def select(self, *kinds: Kind) -> Flows:
        """The flows of these kinds."""
        return self.where(np.isin(self.kind, kinds))

    def where(self, chosen: NDArray[np.bool_] | Ints) -> Flows:
        """The flows that a mask keeps, or those at these positions (a position may come twice)."""
        return Flows(
            self.src_nic[chosen],
            self.dst_nic[chosen],
            self.num_bytes[chosen],
            self.kind[chosen],
            None if self.start_s is None else self.start_s[chosen],
            None if self.udp_sport is None else self.udp_sport[chosen],
        )

    def over_queue_pairs(self, qps_per_connection: int) -> Flows:
        """Split each flow into several that share its bytes, one after another.

        Raises:
            ValueError: fewer than one.
        """
        if qps_per_connection < 1:
            raise ValueError(f"qps_per_connection = {qps_per_connection}: at least 1")
        flows = self.where(np.arange(len(self)).repeat(qps_per_connection))
        return replace(flows, num_bytes=flows.num_bytes / qps_per_connection)


def job_flows(
    job: JobConfig,
    cluster: ClusterConfig,
    *,
    qps_per_connection: int = 1,
    num_channels: int | None = None,
    algorithm: Algorithm = "ring",
) -> Flows:
    """Flows of one step, each connection as `qps_per_connection` flows that share its bytes.

    By `ring` a data-parallel group gathers its parameters and scatters its gradients (the same pairs, one flow a kind);
    by `tree` it reduces its gradients in one all-reduce, for NCCL has trees for nothing else; by `all_pairs` each rank
    spreads the bytes of its ring over its group. Along a ring whatever the algorithm, replicas add up their gradients,
    a shard each, and context-parallel groups that leave a server gather keys and values, and scatter their gradients.
    The pipeline sends activations forward and gradients backward, from the last stage round to the first where ranks
    hold several model chunks; the first and the last add up the gradient of a token table that both hold. A cluster of
    one server has no flows.

    Args:
        num_channels: NCCL's channels of a group, each with its part of the bytes and one of the NICs that the group
            uses in a server; None for one a NIC that it has in each of its servers, for a tree two.

    Raises:
        ConfigError: a tensor-parallel group would leave its server, or the job does not fill the cluster.
        ValueError: the algorithm is unknown, or a number is below 1.
    """
    _check(job, cluster, num_channels, algorithm)
    stages = _Stages.of(job)
    groups = [
        *_data_parallel(job, cluster, stages, algorithm, num_channels),
        *_context_parallel(job, cluster, stages, num_channels),
        *_between_replicas(job, cluster, stages, num_channels),
        *_pipeline(job, stages),
    ]
    src, dst, num_bytes, kind = (np.concatenate(column) for column in zip(*groups, strict=True))
    # No bytes go between the ends of a pipeline without model chunks, nor where no token table is tied: those would be
    # flows that take a path and carry nothing.
    leaves = (src // cluster.gpus_per_server != dst // cluster.gpus_per_server) & (num_bytes > 0)
    flows = Flows(nic_of_rank(cluster, src), nic_of_rank(cluster, dst), num_bytes, kind)
    return flows.where(leaves).over_queue_pairs(qps_per_connection)


def nic_of_rank(cluster: ClusterConfig, rank: Ints) -> Ints:
    """The NIC of each rank: a server's GPUs share its NICs evenly, in order."""
    server, gpu = np.divmod(rank, cluster.gpus_per_server)
    # Multiplied before it is divided: of four GPUs on two NICs two have each, in order.
    local = gpu * cluster.nics_per_server // cluster.gpus_per_server
    return np.asarray(server * cluster.nics_per_server + local)


@dataclass(frozen=True)
class _Stages:
    """Collectives of a rank of each pipeline stage in a step."""

    collectives: Sequence[Sequence[Collective]]

    @classmethod
    def of(cls, job: JobConfig) -> _Stages:
        return cls([stage_collectives(job, stage) for stage in range(job.parallel.pp)])

    def buffers(self, group: Group, kind: CollectiveKind) -> NDArray[np.float64]:
        """Bytes of whole buffers, shape (pp,)."""
        return np.array([total_bytes(each, group, kind) for each in self.collectives], dtype=np.float64)

    def sent(
        self, group: Group, kind: CollectiveKind | None = None, carries: Carries | None = None
    ) -> NDArray[np.float64]:
        """Bytes that a rank sends along a ring or to a neighbour, shape (pp,)."""
        return np.array([total_bytes(each, group, kind, carries, sent=True) for each in self.collectives])


def stage_parameters(job: JobConfig) -> NDArray[np.float64]:
    """Parameters that a rank of each pipeline stage holds, shape (pp,)."""
    return np.array([stage_elements(job, stage) for stage in range(job.parallel.pp)], dtype=np.float64)


def parameter_bytes(job: JobConfig) -> NDArray[np.float64]:
    """Bytes of the all-gathers of a rank of each pipeline stage, shape (pp,): its parameters; 0 without other ranks."""
    return _Stages.of(job).buffers("dp", "all_gather")


def gradient_bytes(job: JobConfig) -> NDArray[np.float64]:
    """Bytes of the reduce-scatters of a rank of each pipeline stage, shape (pp,): its gradients in the dtype in which
    they travel; 0 without other ranks."""
    return _Stages.of(job).buffers("dp", "reduce_scatter")


def traffic_rows(job: JobConfig, flows: Flows) -> list[dict[str, Any]]:
    """Bytes a step of the whole job: of its flows, a row a kind, and of tensor parallelism, which makes no flow."""
    rows: list[dict[str, Any]] = [
        {
            "kind": kind.name.lower(),
            "where": "fabric",
            "flows": int((flows.kind == kind).sum()),
            "bytes": float(flows.num_bytes[flows.kind == kind].sum()),
        }
        for kind in Kind
        if (flows.kind == kind).any()
    ]
    # `sent` is of one rank of each stage, and a stage has tp x cp x dp of them, in each replica.
    inside = float(_Stages.of(job).sent("tp").sum()) * job.parallel.tp * job.parallel.gradient_ranks
    return [*rows, {"kind": "tp", "where": "inside servers", "flows": 0, "bytes": inside}]


def permutation(fabric: Fabric, seed: int, qps_per_connection: int = 1) -> Flows:
    """Every NIC sends to a random NIC under another ToR, and receives from one; bytes are a second at line rate.

    Each pair is `qps_per_connection` flows that share the rate.
    Where ToRs are too unequal for that, the NICs that are left over stay idle. In a rail-only network all stay on
    their rail.
    """
    rng = np.random.default_rng(seed)
    src = fabric.nics
    dst, network = np.empty_like(src), fabric.network_of(src)
    # Network by network, for no switch joins two.
    for one in np.unique(network).tolist():
        dst[network == one] = rng.permutation(src[network == one])
    src_tor, dst_tor = fabric.tor_of(src), fabric.tor_of(dst)
    idle = np.zeros(len(src), dtype=np.bool_)
    # Chance sends some NICs below their own ToR. Each exchanges its target with a flow such that both leave their ToRs
    # after it, so every NIC still receives from one.
    for flow in np.flatnonzero(src_tor == dst_tor):
        if src_tor[flow] != dst_tor[flow]:
            continue  # an earlier exchange has mended it
        fits = (dst_tor != src_tor[flow]) & (src_tor != dst_tor[flow]) & (network == network[flow])
        partners = np.flatnonzero(fits & ~idle)
        if len(partners):
            pair = np.array([flow, rng.choice(partners)])
            dst[pair], dst_tor[pair] = dst[pair[::-1]], dst_tor[pair[::-1]]
        else:
            # No partner: more than half of the network's NICs are under this ToR.
            idle[flow] = True
    flows = Flows(src, dst, fabric.nic_bps[src] / 8, np.full(len(src), Kind.PERMUTATION, np.int8))
    return flows.where(~idle).over_queue_pairs(qps_per_connection)


def headers(fabric: Fabric | Graph, flows: Flows, seed: int) -> Headers:
    """The flows' 5-tuples; queue pairs of a NIC are numbered in order from a seeded first, as drivers hand them out.

    UDP source ports follow from the queue pairs, unless the flows have their own.
    """
    src, dst = fabric.nic_nodes(flows.src_nic), fabric.nic_nodes(flows.dst_nic)
    # A NIC sends from even numbers and receives at odd ones, counted from its first, so that no two of its queue pairs
    # are one.
    local = _queue_pair(src, 2 * _occurrence(src), seed)
    remote = _queue_pair(dst, 2 * _occurrence(dst) + 1, seed)
    source, target = (fabric.address_of(nic) for nic in (flows.src_nic, flows.dst_nic))
    sport = udp_source_port(local, remote) if flows.udp_sport is None else flows.udp_sport
    return Headers(source, target, sport, remote.astype(np.uint32))


_Connections = tuple[Ints, Ints, NDArray[np.float64], NDArray[np.int8]]


def _data_parallel(
    job: JobConfig, cluster: ClusterConfig, stages: _Stages, algorithm: Algorithm, num_channels: int | None
) -> list[_Connections]:
    """Rank to rank, bytes and kind, for the collectives of every data-parallel group."""
    table = job.parallel.layout.group_table("dp")
    segments = Segments.of(table, table // cluster.gpus_per_server, nic_of_rank(cluster, table))
    # Ranks count by tensor, context, data parallelism, replica, then stage: a group's first rank tells its stage.
    stage = table[:, 0] // (job.parallel.tp * job.parallel.gradient_ranks)
    # Whole buffers, for an edge of a tree carries all of one; a ring's ranks send all shards but one, which is `sent`.
    gradients = stages.buffers("dp", "reduce_scatter")[stage]  # of a group
    if algorithm == "tree":
        return [_of_edges(edges, gradients, Kind.DP_ALL_REDUCE) for edges in tree(segments, num_channels)]
    if algorithm == "all_pairs":
        return [_of_edges(all_pairs(segments), gradients, Kind.DP_ALL_TO_ALL)]
    edges = ring(segments, num_channels)
    return [
        _of_edges(edges, stages.sent("dp", "all_gather")[stage], Kind.DP_ALL_GATHER),
        _of_edges(edges, stages.sent("dp", "reduce_scatter")[stage], Kind.DP_REDUCE_SCATTER),
    ]


def _context_parallel(
    job: JobConfig, cluster: ClusterConfig, stages: _Stages, num_channels: int | None
) -> list[_Connections]:
    """Rank to rank, bytes and kind, for the exchanges of every context-parallel group; none without them."""
    if job.parallel.cp == 1:
        return []
    table = job.parallel.layout.group_table("cp")
    segments = Segments.of(table, table // cluster.gpus_per_server, nic_of_rank(cluster, table))
    stage = table[:, 0] // (job.parallel.tp * job.parallel.gradient_ranks)
    edges = ring(segments, num_channels)
    return [
        _of_edges(edges, stages.sent("cp", "all_gather")[stage], Kind.CP_ALL_GATHER),
        _of_edges(edges, stages.sent("cp", "reduce_scatter")[stage], Kind.CP_REDUCE_SCATTER),
    ]


def _between_replicas(
    job: JobConfig, cluster: ClusterConfig, stages: _Stages, num_channels: int | None
) -> list[_Connections]:
    """Rank to rank, bytes and kind, for the all-reduce between ranks with the same shard; none without replicas."""
    if job.parallel.dp_replicate == 1:
        return []
    table = job.parallel.layout.group_table("dp_replicate")
    segments = Segments.of(table, table // cluster.gpus_per_server, nic_of_rank(cluster, table))
    stage = table[:, 0] // (job.parallel.tp * job.parallel.gradient_ranks)
    sent = stages.sent("dp_replicate", "all_reduce")[stage]
    return [_of_edges(ring(segments, num_channels), sent, Kind.DP_REPLICATE_ALL_REDUCE)]


def _of_edges(edges: Edges, group_bytes: NDArray[np.float64], kind: Kind) -> _Connections:
    return _connections(edges.src_rank, edges.dst_rank, edges.share * group_bytes[edges.row], kind)


def _pipeline(job: JobConfig, stages: _Stages) -> list[_Connections]:
    """Stage to next stage and back; the last stage's next is the first. Between these two, a tied table's gradient."""
    table = job.parallel.layout.group_table("pp")
    src, dst = table.ravel(), np.roll(table, -1, axis=1).ravel()
    forward = np.broadcast_to(stages.sent("pp", "send", "forward"), table.shape)
    # What comes back over a pair is what its later stage sends, so the stages move as the targets did.
    backward = np.broadcast_to(np.roll(stages.sent("pp", "send", "backward"), -1), table.shape)
    first, last = table[:, 0], table[:, -1]
    # Both ends hold the table and send alike, so the first stage's bytes are the last one's.
    tied = np.full(len(table), stages.sent("tied")[0])
    return [
        _connections(src, dst, forward.ravel(), Kind.PP_FORWARD),
        _connections(dst, src, backward.ravel(), Kind.PP_BACKWARD),
        _connections(first, last, tied, Kind.TIED_ALL_REDUCE),
        _connections(last, first, tied, Kind.TIED_ALL_REDUCE),
    ]


def _connections(src: Ints, dst: Ints, num_bytes: NDArray[np.float64], kind: Kind) -> _Connections:
    return src, dst, num_bytes, np.full(len(src), kind, dtype=np.int8)


def _check(job: JobConfig, cluster: ClusterConfig, num_channels: int | None, algorithm: Algorithm) -> None:
    if num_channels is not None and num_channels < 1:
        raise ValueError(f"num_channels = {num_channels}: at least 1")
    if algorithm not in get_args(Algorithm):
        raise ValueError(f"algorithm {algorithm!r}: one of {', '.join(get_args(Algorithm))}")
    ranks = job.parallel.layout.world_size
    if ranks != cluster.num_gpus:
        rule = f"the product of its degrees must be the cluster's {cluster.num_gpus} GPUs"
        raise ConfigError("job.parallel", ranks, rule, "give the file a [job.parallel] that fills it")
    if cluster.gpus_per_server % job.parallel.tp:
        rule = f"must divide cluster.gpus_per_server = {cluster.gpus_per_server}: tensor parallelism stays in a server"
        raise ConfigError("job.parallel.tp", job.parallel.tp, rule, "lower tp, or raise pp or dp in its place")


def _queue_pair(nic: Ints, ordinal: Ints, seed: int) -> Ints:
    """Queue pair numbers, 24 bits: the first of a NIC is drawn from the seed, the others count up."""
    # The seed is mixed before the NIC is added: else NIC n of seed 1 would have the numbers of NIC n + 1 of seed 0.
    first = mix64(mix64(np.array([seed & ((1 << 64) - 1)], dtype=np.uint64)) + nic.astype(np.uint64))
    begin = np.maximum(first.astype(np.int64) & _QPN_MASK, _FIRST_QPN)
    # After the largest comes the first that is not a management pair's, so that no two of a NIC are one.
    return np.asarray(_FIRST_QPN + (begin - _FIRST_QPN + ordinal) % (_QPN_MASK + 1 - _FIRST_QPN))


def _occurrence(ids: Ints) -> Ints:
    """Count how many times each value occurred before it in the array."""
    # Stable, so that equal values stay in the flows' order.
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    positions = np.arange(len(ids))
    # Where the run of equal values began that each stands in; no NIC is -1, so the first one begins a run.
    starts = np.maximum.accumulate(np.where(np.diff(ordered, prepend=-1) != 0, positions, 0))
    counted = np.empty(len(ids), dtype=np.int64)
    counted[order] = positions - starts
    return counted

"""Seconds of collectives: a latency a hop, and bytes over the rate of the narrowest link of a ring.

A ring through all ranks of a group crosses each server once a channel, and a server's ranks bring their NICs: the rate
is that of NVLink inside a server, else of the NICs that the group has there, if that is less (nccl-tests' bus
bandwidth). Collisions on the fabric slow what leaves a server by what `fabric_slowdowns` takes from topology's hashed
paths and max-min rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.estimate.devices import Numbers
from bench.estimate.plan import Plan
from netlayer.config.tree import Config

if TYPE_CHECKING:  # an estimate without a fabric needs no numba
    from topology.ecmp.hashing import HashName
    from topology.fabric.interface import Fabric
    from topology.traffic.job import Flows


@dataclass(frozen=True)
class _Protocol:
    """One of NCCL's protocols: seconds of a collective, of a hop on NVLink and between servers, share of the rate."""

    base_s: float
    nvlink_hop_s: float
    nic_hop_s: float
    share: float


_PROTOCOLS = (_Protocol(14.0e-6, 1.9e-6, 4.0e-6, 0.92), _Protocol(8.4e-6, 3.4e-6, 14.0e-6, 1.0))
"""LL128 and Simple, of which a ring takes the faster: the constants that NCCL chooses by (2.19 to 2.27,
`src/graph/tuning.cc`: baseLat and hwLat of rings). LL is for less than what a step sends."""
_TREE = _Protocol(6.8e-6, 0.6e-6, 5.0e-6, 1.0)
"""LL on a tree, from the same tables: what a few hundred bytes take."""


@dataclass(frozen=True)
class Network:
    """The links of one rank, as collectives reach them.

    Args:
        nvlink_bps, nic_bps: bytes/s of a rank and direction, times the share that collectives reach.
        slowdown: of rings that leave a server, over a fabric without collisions.
        pp_slowdown: the same of messages between stages.
    """

    plan: Plan
    nvlink_bps: float
    nic_bps: float
    slowdown: float = 1.0
    pp_slowdown: float = 1.0

    @classmethod
    def of(cls, plan: Plan, numbers: Numbers, slowdown: float = 1.0, pp_slowdown: float = 1.0) -> Network:
        cluster = plan.cluster
        nvlink = min(cluster.nvlink_bps, plan.device.nvlink_bps) / 8 * numbers.links
        nic = cluster.nic_bps * cluster.nics_per_server / cluster.gpus_per_server / 8 * numbers.links
        return cls(plan, nvlink, nic, slowdown, pp_slowdown)

    def tp(self, num_bytes: float, times: int = 1) -> float:
        """Seconds of `times` all-gathers or reduce-scatters of whole buffers of this size in all, in a tensor-parallel
        group."""
        return self._ring(num_bytes, self.plan.job.parallel.tp, 1, times)

    def cp(self, num_bytes: float) -> float:
        """The same in a context-parallel group."""
        return self._ring(num_bytes, self.plan.cp, self.plan.job.parallel.tp)

    def dp(self, num_bytes: float, times: int = 1) -> float:
        """The same in the group that shares parameters, `times` collectives of this size in all."""
        return self._ring(num_bytes, self.plan.group_size, self.plan.job.parallel.tp, times)

    def replicas(self, num_bytes: float, times: int = 1) -> float:
        """Seconds of `times` all-reduces of this size in all between the replicas of a shard: its two halves."""
        stride = self.plan.job.parallel.tp * self.plan.group_size
        return 2 * self._ring(num_bytes, self.plan.job.parallel.dp_replicate, stride, times)

    def pp(self, num_bytes: float) -> float:
        """Seconds of a message between neighbouring stages."""
        stride = self.plan.job.parallel.tp * self.plan.group_size * self.plan.job.parallel.dp_replicate
        if stride * 2 <= self.plan.cluster.gpus_per_server:
            return min(
                each.base_s + each.nvlink_hop_s + num_bytes / self.nvlink_bps / each.share for each in _PROTOCOLS
            )
        rate = self.nic_bps / self.pp_slowdown
        return min(each.base_s + each.nic_hop_s + num_bytes / rate / each.share for each in _PROTOCOLS)

    def small_all_reduce(self, ranks: int) -> float:
        """Seconds of an all-reduce of a few bytes over so many ranks that fill their servers: up a tree and down."""
        if ranks == 1:
            return 0.0
        servers = -(-ranks // self.plan.cluster.gpus_per_server)
        inside = (-(-ranks // servers) - 1) * _TREE.nvlink_hop_s
        return _TREE.base_s + 2 * (inside + math.floor(math.log2(servers)) * _TREE.nic_hop_s)

    def _ring(self, num_bytes: float, ranks: int, stride: int, times: int = 1) -> float:
        """Seconds of `times` ring all-gathers of `num_bytes` in all, over ranks that are `stride` apart."""
        if ranks == 1:
            return 0.0
        of_a_server = max(1, min(ranks, self.plan.cluster.gpus_per_server // stride))
        sent = num_bytes * (ranks - 1) / ranks
        servers = -(-ranks // of_a_server)
        between = of_a_server * self.nic_bps / self.slowdown
        rate = self.nvlink_bps if servers == 1 else min(self.nvlink_bps, between) if of_a_server > 1 else between
        return min(
            times * (each.base_s + (servers - 1) * each.nic_hop_s + (ranks - servers) * each.nvlink_hop_s)
            + sent / rate / each.share
            for each in _PROTOCOLS
        )


def fabric_slowdowns(config: Config, seed: int = 0) -> tuple[float, float]:
    """Return by how much hash collisions slow the job's rings, and messages between its stages: topology's times over
    those without any.

    1 where nothing leaves a ToR. Hashed by CRC-32C (`topology`); a fabric that sprays packets has 1.
    """
    from topology.fabric.clos import Clos
    from topology.traffic.job import Kind
    from topology.traffic.step import slot_flows

    kinds = Kind.DP_REDUCE_SCATTER, Kind.DP_ALL_GATHER, Kind.PP_FORWARD, Kind.PP_BACKWARD
    flows = slot_flows(config.job, config.cluster).select(*kinds)
    if not len(flows):
        return 1.0, 1.0
    slowdowns = phase_slowdowns(Clos.build(config.cluster), flows, "crc32c", seed)
    return slowdowns.get("ring", 1.0), slowdowns.get("pipeline", 1.0)


def phase_slowdowns(
    fabric: Fabric, flows: Flows, hash_name: HashName, seed: int, *, bound: bool = False
) -> dict[str, float]:
    """Return by how much collisions slow each phase of placed flows (`ring`, `pipeline`); 1 where nothing does.

    Args:
        bound: by the rates that hold while all flows run, which takes a hundredth of the time and is a little above.
    """
    from topology.rates.contention import uncongested
    from topology.rates.max_min import completion_s
    from topology.traffic.step import run_step

    slowdowns = {}
    for phase in run_step(fabric, flows, hash_name, seed).phases:
        if len(phase.num_bytes):
            free = uncongested(fabric, phase.load.paths)
            if bound:
                ratio = phase.time_bound_s / float((8 * phase.num_bytes / free.flow_bps).max())
            else:
                ratio = phase.time_s / float(completion_s(free, phase.num_bytes, resolution=1e-2).max())
            slowdowns[phase.name] = max(1.0, ratio)
    return slowdowns

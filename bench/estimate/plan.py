"""Plans: the job that is estimated, where it runs, and what the software does.

A `Plan` holds what `JobConfig` does, and other software's choices (stages of ZeRO, kernels), so that rows of that can
be predicted too.

[Note: context parallelism] `job.parallel.cp` is 1 and `cp` says the degree, whatever its software; `share_job` is the
job with it, of which `netlayer.workload` tells parameters, bytes and memory.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from bench.estimate.devices import Device
from bench.estimate.host import Host
from netlayer.config.tree import ClusterConfig, JobConfig
from netlayer.errors import ConfigError
from netlayer.workload.buckets import MOST_COPYING_RANKS
from netlayer.workload.comm_bytes import stage_collectives, total_bytes
from netlayer.workload.model_size import stage_elements
from netlayer.workload.schedule import micro_batches
from netlayer.workload.stages import run_of

Precision = Literal["bf16", "fp8"]
Kernels = Literal["fused", "compiled", "eager"]
KERNELS: tuple[Kernels, ...] = ("fused", "compiled", "eager")
Attention = Literal["current", "previous", "unfused"]
Under = Literal["rows", "parts"]
CHANNELS = 16
"""Channels that NCCL's collectives usually take, each a block on a multiprocessor."""


@dataclass(frozen=True)
class StageFacts:
    """One rank of a pipeline stage.

    Args:
        chunks: of each, how many halves of blocks there are by (window, whether it is an MLP).
        elements: parameters.
        gathered_bytes, reduced_bytes, num_buckets: of its data-parallel exchange, once.
        replicated_bytes: what ranks of replicas then all-reduce: a rank's shard of the sums.
    """

    chunks: tuple[Mapping[tuple[int, bool], int], ...]
    elements: int
    gathered_bytes: float
    reduced_bytes: float
    num_buckets: int
    replicated_bytes: float


@dataclass(frozen=True)
class Plan:
    """One case.

    Args:
        job: without context parallelism: `job.parallel.dp` counts data-parallel ranks alone.
        cluster: NICs and NVLink.
        device: the GPU.
        cp: context-parallel degree; next to tensor parallelism, inside a server where both fit.
        precision: of the blocks' GEMMs; the head and attention stay in bfloat16.
        zero: 0: gradients are all-reduced, all else is whole; 1 and 2: reduce-scatter, all-gather once a step; 3: FSDP,
            parameters are gathered for each forward and each backward, gradients reduced after each backward.
        kernels: of norms and activations: fused (Triton, Transformer Engine), compiled (Inductor), eager.
        attention: a kernel made for this generation of GPUs (Hopper: cuDNN's, FlashAttention-3; Ampere:
            FlashAttention-2), or for the one before, or products whose scores pass the memory (Megatron-LM until 2022).
        deferred_heads: micro-batches whose gradients of the head's weights the last stage computes when its passes are
            done, while the others still compute (Megatron's `defer_embedding_wgrad_compute` and its limit).
        recompute_share: share of a forward's linears that backward computes again, where it is not 0 or 1.
        tp_under: how tensor-parallel exchanges lie under GEMMs, where they do: the rows of one rank at a time, this
            rank's first (over the memory of the peers), or in parts of all ranks' rows, each a collective.
        dp_buckets: collectives that a stage's parameters are gathered in, and its gradients reduced; 0: as this trainer
            cuts them.
        dp_channels: channels of data-parallel collectives: multiprocessors that computation lacks meanwhile.
        delayed_scaling: FP8's maxima of a pass are all-reduced over all ranks of its stage when it ends: Transformer
            Engine's delayed scaling.
        tp_only_amax: they are all-reduced in the tensor-parallel group alone, whose ranks meet at each linear anyway
            (Megatron's `tp_only_amax_red`; before Transformer Engine 1.6 NVTE_DP_AMAX_REDUCE_INTERVAL=0).
        host: what launching costs; None: not modelled. A job with `loop.cuda_graph` has none.
    """

    job: JobConfig
    cluster: ClusterConfig
    device: Device
    cp: int = 1
    precision: Precision = "bf16"
    zero: int = 2
    kernels: Kernels = "fused"
    attention: Attention = "current"
    deferred_heads: int = 0
    recompute_share: float | None = None
    tp_under: Under = "rows"
    dp_buckets: int = 0
    dp_channels: int = CHANNELS
    delayed_scaling: bool = False
    tp_only_amax: bool = False
    host: Host | None = None

    @functools.cached_property
    def num_gpus(self) -> int:
        return self.job.parallel.layout.world_size * self.cp

    @functools.cached_property
    def share_job(self) -> JobConfig:
        """The job of [Note: context parallelism]."""
        return self.job.model_copy(update={"parallel": self.job.parallel.model_copy(update={"cp": self.cp})})

    @functools.cached_property
    def num_micro_batches(self) -> int:
        return micro_batches(self.job)

    @functools.cached_property
    def tokens(self) -> int:
        """Tokens that a rank has of one micro-batch, over its tensor-parallel group."""
        return self.job.batch.micro_batch_size * self.job.model.seq_len // self.cp

    @functools.cached_property
    def group_size(self) -> int:
        """Ranks that share a rank's parameters: data-parallel and context-parallel."""
        return self.job.parallel.dp * self.cp

    @property
    def waits_for_nccl(self) -> bool:
        """Whether tensor-parallel exchanges are NCCL's under this trainer's products: without the memory of the peers.

        NCCL's kernel starts when it has all of its multiprocessors, and a product leaves it twice `USUAL_BLOCKS`: less
        than NCCL takes over NVLink, so that it waits for the product ([Note: who is first],
        `collectives.tensor.exchange`).
        """
        parallel, overlap = self.job.parallel, self.job.overlap
        reaches = parallel.tp <= min(MOST_COPYING_RANKS, self.cluster.gpus_per_server)
        return parallel.tp > 1 and overlap.tp and self.tp_under == "rows" and not (overlap.peer_memory and reaches)

    @property
    def borrowed(self) -> float:
        """Share of a card's multiprocessors that NCCL's usual channels hold: GEMMs slow by it while exchanges run."""
        return CHANNELS / self.device.multiprocessors

    @property
    def narrow_exchanges(self) -> bool:
        """Whether parameters and activations are gathered in 8 bits: by Transformer Engine, not by this trainer."""
        return self.precision == "fp8" and self.job.model.fp8 == "off"

    @property
    def narrow_share(self) -> float:
        """Share of the blocks whose GEMMs are of the plan's precision."""
        model = self.job.model
        return 1.0 if model.fp8 == "off" else max(0, model.layers - model.fp8_first - model.fp8_last) / model.layers

    @property
    def reductions(self) -> int:
        """Times that a step reduces gradients: stage 2 of this trainer does in every micro-batch."""
        return self.num_micro_batches if self.job.parallel.stage == 2 and self.zero in (1, 2) else 1

    @property
    def linear_share_again(self) -> float:
        """Share of a forward's linears that the backward computes again."""
        if self.recompute_share is not None:
            return self.recompute_share
        return 1.0 if self.job.model.recompute == "full" else 0.0

    @functools.cached_property
    def stages(self) -> tuple[StageFacts, ...]:
        """Contents and exchanges of each stage, whatever the numbers are; exchanges as stage 1 of ZeRO has them."""
        job = self.share_job
        job = job.model_copy(update={"parallel": job.parallel.model_copy(update={"zero": 1})})
        facts = []
        for stage in range(job.parallel.pp):
            collectives = stage_collectives(job, stage)
            halves = (
                Counter((job.model.window(half // 2), bool(half % 2)) for half in run_of(job, stage, chunk))
                for chunk in range(job.parallel.vpp)
            )
            facts.append(
                StageFacts(
                    chunks=tuple(halves),
                    elements=stage_elements(job, stage),
                    gathered_bytes=total_bytes(collectives, "dp", "all_gather", "parameters"),
                    reduced_bytes=total_bytes(collectives, "dp", "reduce_scatter", "gradients"),
                    num_buckets=self.dp_buckets
                    or sum(each.times for each in collectives if each.carries == "parameters")
                    or 1,
                    replicated_bytes=total_bytes(collectives, "dp_replicate", "all_reduce", "gradients"),
                )
            )
        return tuple(facts)


def check_plan(plan: Plan) -> Plan:
    """Return the plan, if it is possible.

    Raises:
        ConfigError: the layout, the precision or the stage of ZeRO cannot be had.
    """
    seq_len, tp = plan.job.model.seq_len, plan.job.parallel.tp
    if plan.zero == 0 and plan.job.parallel.dp_replicate > 1:
        rule = (
            f"shards nothing, and job.parallel.dp_replicate = {plan.job.parallel.dp_replicate} are replicas of shards"
        )
        raise ConfigError("--zero", plan.zero, rule, "give 1, 2 or 3, or set job.parallel.dp_replicate to 1")
    if plan.cp < 1 or seq_len % (2 * plan.cp * tp if plan.cp > 1 else 1):
        rule = f"must be at least 1, and 2 x cp x tp must divide job.model.seq_len = {seq_len}"
        raise ConfigError("--cp", plan.cp, rule, "give a smaller power of two")
    if plan.device.peak(plan.precision) is None:
        rule = f"cannot be had on {plan.device.name}, which has no such tensor cores"
        raise ConfigError("--precision", plan.precision, rule, "give bf16, or a Hopper card")
    if plan.zero == 3 and plan.job.parallel.pp > 1 and plan.job.parallel.vpp > 1:
        rule = "gathers parameters for every micro-batch, and interleaved stages hold several chunks"
        raise ConfigError("--zero", plan.zero, rule, "give 2, or set job.parallel.vpp to 1")
    return plan

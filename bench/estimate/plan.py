"""Plans: the job that is estimated, where it runs, and what the software does.

A `Plan` holds what `JobConfig` does, and other software's choices (stages of ZeRO, kernels), so that rows of that can
be predicted too.

[Note: context parallelism] A rank of a context-parallel group has the rows of 1 / cp of a sequence, all parameters,
and reduces their gradients over dp x cp ranks. That is a job of cp times as many sequences of 1 / cp of the tokens on
dp x cp data-parallel ranks (`share_job`), but for attention, which sees the keys of all: parameters, bytes and memory
are asked of `netlayer.workload` for that job, attention's FLOPs for the whole sequence.
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
from netlayer.workload.comm_bytes import stage_collectives, total_bytes
from netlayer.workload.model_size import stage_elements
from netlayer.workload.schedule import micro_batches
from netlayer.workload.stages import run_of

Precision = Literal["bf16", "fp8"]
Kernels = Literal["fused", "compiled", "eager"]
KERNELS: tuple[Kernels, ...] = ("fused", "compiled", "eager")
Attention = Literal["current", "previous"]
CHANNELS = 16
"""Channels that NCCL's collectives usually take, each a block on a multiprocessor."""


@dataclass(frozen=True)
class StageFacts:
    """One rank of a pipeline stage.

    Args:
        chunks: of each, how many halves of blocks there are by (window, whether it is an MLP).
        elements: parameters.
        gathered_bytes, reduced_bytes, num_buckets: of its data-parallel exchange, once a step.
    """

    chunks: tuple[Mapping[tuple[int, bool], int], ...]
    elements: int
    gathered_bytes: float
    reduced_bytes: float
    num_buckets: int


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
            FlashAttention-2), or for the one before.
        deferred_heads: micro-batches whose gradients of the head's weights the last stage computes when its passes are
            done, while the others still compute (Megatron's `defer_embedding_wgrad_compute` and its limit).
        recompute_share: share of a forward's linears that backward computes again, where it is not 0 or 1.
        dp_channels: channels of data-parallel collectives: multiprocessors that computation lacks meanwhile.
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
    dp_channels: int = CHANNELS
    host: Host | None = None

    @functools.cached_property
    def num_gpus(self) -> int:
        return self.job.parallel.layout.world_size * self.cp

    @functools.cached_property
    def share_job(self) -> JobConfig:
        """The job of [Note: context parallelism]."""
        job = self.job
        if self.cp == 1:
            return job
        seq_len = job.model.seq_len // self.cp
        window = min(job.model.attention_window, seq_len)
        return job.model_copy(
            update={
                "model": job.model.model_copy(update={"seq_len": seq_len, "attention_window": window}),
                "parallel": job.parallel.model_copy(update={"dp": job.parallel.dp * self.cp}),
                "batch": job.batch.model_copy(update={"global_batch_size": job.batch.global_batch_size * self.cp}),
            }
        )

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
    def linear_share_again(self) -> float:
        """Share of a forward's linears that the backward computes again."""
        if self.recompute_share is not None:
            return self.recompute_share
        return 1.0 if self.job.model.recompute == "full" else 0.0

    @functools.cached_property
    def stages(self) -> tuple[StageFacts, ...]:
        """Contents and exchanges of each stage, whatever the numbers are."""
        job = self.share_job
        facts = []
        for stage in range(job.parallel.pp):
            collectives = [each for each in stage_collectives(job, stage) if each.group == "dp"]
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
                    num_buckets=next((each.times for each in collectives if each.carries == "parameters"), 1),
                )
            )
        return tuple(facts)


def check_plan(plan: Plan) -> Plan:
    """Return the plan, if it is possible.

    Raises:
        ConfigError: the layout, the precision or the stage of ZeRO cannot be had.
    """
    seq_len, tp = plan.job.model.seq_len, plan.job.parallel.tp
    if plan.job.parallel.dp_replicate > 1:
        rule = "must be 1: replicas of sharded groups are not estimated"
        raise ConfigError("job.parallel.dp_replicate", plan.job.parallel.dp_replicate, rule, "raise job.parallel.dp")
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

"""Degrees of parallelism of a job, what data-parallel ranks hold in shards, and which shapes ranks can share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field

from netlayer.config.section import Section
from netlayer.errors import ConfigError
from netlayer.layout import ParallelLayout

if TYPE_CHECKING:
    from netlayer.config.tree import JobConfig

Count = Annotated[int, Field(ge=1)]
FP8_BLOCK = 128
"""Side of a block of weights, and length of a run of inputs, that share a scale in `model.fp8 = "blockwise"`."""


def _stage_or_auto(value: object) -> object:
    if isinstance(value, bool) or value not in (1, 2, 3, "auto"):
        raise ValueError("must be 1, 2, 3 or auto")
    return value


class ParallelConfig(Section):
    """Degrees of parallelism, whose product is the number of ranks, and how long ranks wait for each other."""

    tp: Count = Field(1, description="tensor-parallel degree, inside a server")
    pp: Count = Field(1, description="pipeline stages")
    dp: Count = Field(2, description="data-parallel degree: ranks that share the shards of one replica")
    cp: Count = Field(
        1,
        description="context-parallel degree: each rank has two of 2 x cp chunks of every sequence, an early and a "
        "late one, and gathers the others' keys and values; all of them share shards too",
    )
    dp_replicate: Count = Field(
        1,
        description="replicas of the data-parallel groups (hybrid sharding): each holds all shards and has its part of "
        "the batch; gradients are all-reduced between replicas",
    )
    vpp: Count = Field(1, description="model chunks a pipeline rank holds (interleaved 1F1B)")
    zero: Annotated[Literal[1, 2, 3, "auto"], BeforeValidator(_stage_or_auto)] = Field(
        "auto",
        description="ZeRO stage of data parallelism. 1: masters and optimiser in shards; 2: gradients too, reduced in "
        "every micro-batch; 3: parameters of blocks too, gathered once a forward and once a backward pass. auto: the "
        "first of these that fits the GPU",
    )
    balance: bool = Field(
        True,
        description="pipeline stages hold about as much work as each other: half blocks are counted, and the "
        "vocabulary's projection; the first stage may need more memory; false: as many layers as each other",
    )
    distributed_timeout_s: float = Field(
        600.0, gt=0, description="longest wait in a collective, seconds: for ranks that compile or save meanwhile"
    )

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout(
            tp=self.tp, pp=self.pp, dp=self.dp, vpp=self.vpp, cp=self.cp, dp_replicate=self.dp_replicate
        )

    @property
    def data_ranks(self) -> int:
        """Parts of a batch: `dp` of every replica."""
        return self.dp * self.dp_replicate

    @property
    def data_degrees(self) -> str:
        """Return `dp = {} x 4`, with the replicas where there are several: for lines on a batch."""
        if self.dp_replicate == 1:
            return f"dp = {{}} x {self.dp}"
        return f"dp x job.parallel.dp_replicate = {{}} x {self.dp} x {self.dp_replicate}"

    @property
    def stage(self) -> Literal[1, 2, 3]:
        """ZeRO stage that is counted and trained with: 1 where no other is asked for, or one rank is alone."""
        return 1 if self.zero == "auto" or self.dp_cp == 1 else self.zero

    @property
    def dp_cp(self) -> int:
        """Ranks that hold masters and optimiser state in shards: of one replica."""
        return self.layout.dp_cp

    @property
    def gradient_ranks(self) -> int:
        """Ranks whose gradients are added up: `dp_cp` of every replica."""
        return self.layout.gradient_ranks


def check_context(job: JobConfig) -> None:
    """Refuse sequences that context-parallel ranks cannot share."""
    cp, tp, seq_len = job.parallel.cp, job.parallel.tp, job.model.seq_len
    if cp > 1 and seq_len % (2 * cp):
        rule = f"needs 2 x cp chunks of a sequence, and job.model.seq_len = {seq_len} is no multiple of {2 * cp}"
        raise ConfigError("job.parallel.cp", cp, rule, "change either")
    if cp > 1 and seq_len // cp % tp:
        rule = f"leaves each rank {seq_len // cp} positions, which job.parallel.tp = {tp} does not divide"
        raise ConfigError("job.parallel.cp", cp, rule, "change either")


def check_fp8(job: JobConfig) -> None:
    """Refuse shapes that tensor cores do not take in 8 bits, and what else cannot be had with them."""
    model, parallel = job.model, job.parallel
    kept = model.fp8_first + model.fp8_last
    for key in ("fp8_first", "fp8_last", "fp8_param_gather", "fp8_tp_gather"):
        if model.fp8 == "off" and getattr(model, key):
            rule = "has no effect: no linear is in 8 bits, for job.model.fp8 = off"
            raise ConfigError(f"job.model.{key}", getattr(model, key), rule, "omit it, or set job.model.fp8")
    if model.fp8 == "off":
        return
    if kept >= model.layers:
        rule = f"cannot be had with fp8_first {model.fp8_first} + fp8_last {model.fp8_last} of {model.layers} layers"
        raise ConfigError("job.model.fp8", model.fp8, rule, "set it to off, or lower one of them")
    for name, is_in_the_way in (("compile = true", model.compile), ("dtype = float64", model.dtype == "float64")):
        if is_in_the_way:
            raise ConfigError("job.model.fp8", model.fp8, f"cannot be had with job.model.{name}", "change one of them")
    _check_fp8_gathers(job)
    unit = FP8_BLOCK if model.fp8 == "blockwise" else 16
    widths = {"hidden": model.hidden, "ffn_hidden / tp": model.ffn_hidden // parallel.tp}
    widths |= {"heads x head width / tp": model.attention_width // parallel.tp}
    widths |= {"kv_heads x head width / tp": model.kv_width // parallel.tp}
    rows = job.batch.micro_batch_size * model.seq_len // parallel.cp
    for name, value in {**widths, "tokens of a rank's micro-batch": rows}.items():
        if value % unit:
            rule = f"needs multiples of {unit}, and {name} = {value}"
            raise ConfigError("job.model.fp8", model.fp8, rule, "change that, or set it to off")


def _check_fp8_gathers(job: JobConfig) -> None:
    """Refuse what does not go with weights, or with activations, that travel in 8 bits."""
    model, key = job.model, "job.model.fp8_tp_gather"
    if model.fp8_tp_gather and job.parallel.tp == 1:
        rule = "has no effect: tensor-parallel ranks gather activations, and job.parallel.tp = 1"
        raise ConfigError(key, True, rule, "omit it, or raise tp")
    if model.fp8_tp_gather and model.fp8 != "tensorwise":
        rule = f"needs one scale for all rows, and job.model.fp8 = {model.fp8} has one for each tile"
        raise ConfigError(key, True, rule, "omit it, or set fp8 to tensorwise")
    for name, is_in_the_way in (
        ("job.loop.cuda_graph", job.loop.cuda_graph),
        ("job.overlap.step_in_backward", job.overlap.step_in_backward),
    ):
        if job.model.fp8_param_gather and is_in_the_way:
            rule = f"cannot be had with {name} = true: scales are shared between a step's end and its gathers"
            raise ConfigError("job.model.fp8_param_gather", True, rule, "omit one of them")

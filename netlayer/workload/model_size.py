"""How many parameters a model has, and how many of them a rank of a pipeline stage holds."""

from __future__ import annotations

from netlayer.config import JobConfig, ModelConfig
from netlayer.workload.stages import BlockPart, count_parts, halves_in, run_of


def num_parameters(model: ModelConfig) -> int:
    """Parameters of `trainer.model.GPT`, without rows that pad its vocabulary."""
    blocks = model.layers * block_elements(model, 1)
    tables = model.vocab_size * model.hidden * (1 if model.tied_embeddings else 2)
    return tables + position_elements(model) + blocks + norm_elements(model)


def stage_elements(job: JobConfig, stage: int) -> int:
    """Elements of the parameters that a rank of a pipeline stage has, rows that pad the vocabulary among them."""
    model, parallel = job.model, job.parallel
    is_first, is_last = stage == 0, stage == parallel.pp - 1
    tables = is_first + is_last - (model.tied_embeddings and parallel.pp == 1)
    blocks = sum(
        number * block_elements(model, parallel.tp, part)
        for chunk in range(parallel.vpp)
        for part, number in count_parts(run_of(job, stage, chunk)).items()
    )
    ends = (position_elements(model) if is_first else 0) + (norm_elements(model) if is_last else 0)
    return tables * table_elements(job) + blocks + ends


def block_elements(model: ModelConfig, tp: int, part: BlockPart = "whole") -> int:
    """Parameters of a block on one rank: linears are cut, what they add behind a sum and norms are whole."""
    hidden = model.hidden
    has_attention, has_mlp = halves_in(part)
    outputs = num_branches(model, part)
    inner = qkv_width(model) * has_attention + up_width(model) * has_mlp
    summed = hidden * has_attention + model.ffn_hidden * has_mlp
    cut = hidden * inner + summed * hidden + (inner if model.bias else 0)
    return cut // tp + outputs * ((hidden if model.bias else 0) + norm_elements(model))


def norm_elements(model: ModelConfig) -> int:
    return model.hidden * (2 if model.norm == "layernorm" else 1)


def position_elements(model: ModelConfig) -> int:
    return model.seq_len * model.hidden if model.positions == "learned" else 0


def table_elements(job: JobConfig) -> int:
    """This rank's rows of a token table."""
    return -(-job.model.vocab_size // job.parallel.tp) * job.model.hidden


def qkv_width(model: ModelConfig) -> int:
    return model.hidden + 2 * (model.hidden * model.num_kv_heads // model.heads)


def up_width(model: ModelConfig) -> int:
    return model.ffn_hidden * (2 if model.activation == "swiglu" else 1)


def num_branches(model: ModelConfig, part: BlockPart) -> int:
    """Which read the residual stream, and add to it."""
    return 1 if model.parallel_block else sum(halves_in(part))

"""The parameters of a model: how many, in which shapes, and which of them a rank of a pipeline stage holds.

Shapes are those of `trainer.model.gpt.GPT`, in the order in which it registers them: buckets are cut along that order
(`buckets`), LAMB takes a norm of each matrix, and what a tensor-parallel group holds whole is what its ranks add up
once a step (`comm_bytes`).

A head's width need not be hidden / heads: what queries, keys and values are wide is `ModelConfig.attention_width` and
`kv_width`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from netlayer.config.tree import JobConfig, ModelConfig
from netlayer.workload.stages import BlockPart, count_parts, halves_in, run_of


class Parameter(NamedTuple):
    """A parameter as a rank of a tensor-parallel group holds it.

    Args:
        name: inside its unit.
        shape: of this rank's part.
        is_cut: each rank has another part; False: all have the same, whole.
    """

    name: str
    shape: tuple[int, ...]
    is_cut: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters gathered and reduced as one: a block or half, or a token table; norms and positions of the ends go
    alone.

    Args:
        name: `whole`, `attention` or `mlp` of a block; `tokens`, `position` or `norm` of the model's ends.
        parameters: in the order of their registration.
        count: how many units of the kind there are.
    """

    name: str
    parameters: tuple[Parameter, ...]
    count: int = 1

    @property
    def numel(self) -> int:
        """Elements of one of them."""
        return sum(parameter.numel for parameter in self.parameters)


def num_parameters(model: ModelConfig) -> int:
    """Parameters of the whole model, without rows that pad its vocabulary."""
    blocks = model.layers * block_elements(model, 1)
    tables = model.vocab_size * model.hidden * (1 if model.tied_embeddings else 2)
    return tables + position_elements(model) + blocks + norm_elements(model)


def stage_elements(job: JobConfig, stage: int) -> int:
    """Elements of the parameters that a rank of a pipeline stage has, rows that pad the vocabulary among them."""
    chunks = (chunk_units(job, stage, chunk) for chunk in range(job.parallel.vpp))
    return sum(unit.count * unit.numel for units in chunks for unit in units)


def chunk_units(job: JobConfig, stage: int, chunk: int) -> list[Unit]:
    """The units of one model chunk of a rank; blocks of one kind as one row, with their number."""
    model, parallel = job.model, job.parallel
    is_first = stage == 0 and chunk == 0
    is_last = stage == parallel.pp - 1 and chunk == parallel.vpp - 1
    table = Unit("tokens", (Parameter("weight", (table_rows(job), model.hidden), True),))
    units = []
    if is_first:
        if model.positions == "learned":
            units.append(Unit("position", (Parameter("position", (model.seq_len, model.hidden), False),)))
        units.append(table)
    for part, count in count_parts(run_of(job, stage, chunk)).items():
        units.append(Unit(part, block_parameters(model, parallel.tp, part), count))
    if is_last:
        units.append(Unit("norm", _norm(model, "norm")))
        if not (model.tied_embeddings and is_first):  # else it is the embedding's
            units.append(table)
    return units


def block_parameters(model: ModelConfig, tp: int, part: BlockPart = "whole") -> tuple[Parameter, ...]:
    """Return the parameters of a block or a half on one rank: linears are cut, norms and biases after a sum whole."""
    if model.parallel_block:
        inputs = (model.attention_width, model.ffn_hidden)
        inner = _column(model, tp, "inner", qkv_width(model) + up_width(model))
        return (*_norm(model, "norm"), *inner, *_qk_norms(model), *_row(model, tp, "outer", inputs))
    has_attention, has_mlp = halves_in(part)
    parameters: tuple[Parameter, ...] = ()
    if has_attention:
        qkv = _column(model, tp, "qkv", qkv_width(model))
        out = _row(model, tp, "out", (model.attention_width,))
        parameters += (*_norm(model, "norm"), *qkv, *_qk_norms(model), *out)
    if has_mlp:
        up = _column(model, tp, "up", up_width(model))
        parameters += (*_norm(model, "mlp_norm"), *up, *_row(model, tp, "down", (model.ffn_hidden,)))
    return parameters


def block_elements(model: ModelConfig, tp: int, part: BlockPart = "whole") -> int:
    """Elements of `block_parameters`."""
    return sum(parameter.numel for parameter in block_parameters(model, tp, part))


def norm_elements(model: ModelConfig) -> int:
    return sum(parameter.numel for parameter in _norm(model, "norm"))


def position_elements(model: ModelConfig) -> int:
    return model.seq_len * model.hidden if model.positions == "learned" else 0


def padded_vocabulary(vocab_size: int, tp: int) -> int:
    """Rows of a token table: the next multiple of the ranks that it is cut over."""
    return -(-vocab_size // tp) * tp


def table_rows(job: JobConfig) -> int:
    """Return the number of this rank's rows of a token table."""
    return padded_vocabulary(job.model.vocab_size, job.parallel.tp) // job.parallel.tp


def table_elements(job: JobConfig) -> int:
    """Elements of this rank's rows of a token table."""
    return table_rows(job) * job.model.hidden


def linear_widths(model: ModelConfig, tp: int, *, is_mlp: bool) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the widths of the inputs of a half block's two linears on a rank, and those of their outputs."""
    hidden = model.hidden
    if is_mlp:
        return (hidden, model.ffn_hidden / tp), (up_width(model) / tp, hidden)
    return (hidden, model.attention_width / tp), (qkv_width(model) / tp, hidden)


def qkv_width(model: ModelConfig) -> int:
    return model.attention_width + 2 * model.kv_width


def up_width(model: ModelConfig) -> int:
    return model.ffn_hidden * (2 if model.activation == "swiglu" else 1)


def num_branches(model: ModelConfig, part: BlockPart) -> int:
    """Return the number of branches that read the residual stream and add to it."""
    return 1 if model.parallel_block else sum(halves_in(part))


def _norm(model: ModelConfig, name: str) -> tuple[Parameter, ...]:
    """LayerNorm has a bias, RMSNorm none."""
    weight = Parameter(f"{name}.weight", (model.hidden,), False)
    return (weight, weight._replace(name=f"{name}.bias")) if model.norm == "layernorm" else (weight,)


def _qk_norms(model: ModelConfig) -> tuple[Parameter, ...]:
    """One weight a value of a head, which all heads share: whole on every rank."""
    names = ("q_norm", "k_norm") if model.qk_norm else ()
    return tuple(Parameter(f"{name}.weight", (model.head_width,), False) for name in names)


def _column(model: ModelConfig, tp: int, name: str, width: int) -> tuple[Parameter, ...]:
    """A linear whose outputs are cut."""
    weight = Parameter(f"{name}.weight", (width // tp, model.hidden), True)
    return (weight, Parameter(f"{name}.bias", (width // tp,), True)) if model.bias else (weight,)


def _row(model: ModelConfig, tp: int, name: str, inputs: tuple[int, ...]) -> tuple[Parameter, ...]:
    """A linear whose inputs are cut, and the sum of whose outputs gets the bias."""
    bias = (Parameter(f"{name}.bias", (model.hidden,), False),) if model.bias else ()
    weights = (
        Parameter(f"{name}.weights.{index}", (model.hidden, width // tp), True) for index, width in enumerate(inputs)
    )
    return (*bias, *weights)

"""What a job's parameters, gradients and optimiser state take, and whether this machine has that much.

A lower bound: a job that it refuses cannot run, one that it lets pass may still run out. Left out: activations, buckets
under way, and torch itself (a few hundred MiB a rank).
"""

from __future__ import annotations

from typing import Literal

from netlayer import environ
from netlayer.config import JobConfig, ModelConfig
from netlayer.errors import HardwareMissing

_DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}
_GRADIENT_BYTES = 4  # gradients add up in float32 (ZeRO stage 1: whole on every rank)
_MOMENTS_BYTES = 8  # two moments of AdamW in float32
_MASTER_BYTES = 4


def num_parameters(model: ModelConfig) -> int:
    """Parameters of `trainer.model.GPT`, without rows that pad its vocabulary."""
    hidden, ffn = model.hidden, model.ffn_hidden
    shared = hidden * model.num_kv_heads // model.heads
    norm = hidden * (2 if model.norm == "layernorm" else 1)
    inner = hidden + 2 * shared + ffn * (2 if model.activation == "swiglu" else 1)
    outputs = 1 if model.parallel_block else 2
    linears = hidden * inner + (hidden + ffn) * hidden + ((inner + outputs * hidden) if model.bias else 0)
    block = linears + norm * outputs
    tables = model.vocab_size * hidden * (1 if model.tied_embeddings else 2)
    positions = model.seq_len * hidden if model.positions == "learned" else 0
    return tables + positions + model.layers * block + norm


def rank_bytes(job: JobConfig) -> int:
    """The least that a rank holds, its parts in the mean: parameters, and its share of gradients, masters and moments.

    Gradients are whole where they add up over several micro-batches; of one they leave bucket by bucket.
    """
    width = _DTYPE_BYTES[job.model.dtype]
    sharded = _GRADIENT_BYTES + _MOMENTS_BYTES + (0 if width >= _MASTER_BYTES else _MASTER_BYTES)
    part = num_parameters(job.model) // (job.parallel.tp * job.parallel.pp)
    whole = width + (_GRADIENT_BYTES if job.batch.global_size > job.batch.micro_size * job.parallel.dp else 0)
    return part * whole + part * sharded // job.parallel.dp


def check_memory(job: JobConfig, ranks: int, backend: Literal["gloo", "nccl"]) -> None:
    """Refuse a job that cannot fit, before any rank starts.

    Raises:
        HardwareMissing: the ranks together need more than this machine has free, or one more than its GPU has.
    """
    each = rank_bytes(job)
    words = f"a rank holds at least {_gib(each)} of parameters, gradients and optimiser state"
    if backend == "nccl":
        needed, there = (
            each,
            min((gpu.memory_mib for gpu in environ.usable_gpus() if gpu.memory_mib), default=0) * 2**20,
        )
        where = "the GPU has"
    else:
        needed, there = each * ranks, environ.available_memory_bytes()
        words += f", {ranks} ranks {_gib(needed)}" if ranks > 1 else ""
        where = "free here are"
    if there and needed > there:
        raise HardwareMissing(
            f"job.model = {num_parameters(job.model):,} parameters: {words}; {where} {_gib(there)}; lower "
            "job.model.layers or job.model.hidden" + (", or start fewer ranks" if ranks > 1 else "")
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"

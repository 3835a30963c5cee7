"""The model that peers of other make can train: a GPT as of GPT-2, which their modules and ours compute alike."""

from __future__ import annotations

from netlayer.config.tree import JobConfig, ModelConfig
from netlayer.errors import ConfigError


def check_plain(peer: str, job: JobConfig) -> None:
    """Refuse a job whose model, optimiser or layout the peer's modules do not have.

    Raises:
        ConfigError: serial blocks, full attention, learned positions, LayerNorm, GeLU, an own head, AdamW, without
            recomputation, is all that there is; or the ranks of a group do not divide the vocabulary.
    """
    model, tp = job.model, job.parallel.tp
    for field, value, plain in (
        ("model.parallel_block", model.parallel_block, False),
        ("model.attention_window", model.attention_window, 0),
        ("model.positions", model.positions, "learned"),
        ("model.norm", model.norm, "layernorm"),
        ("model.head_dim", model.head_dim, 0),
        ("model.qk_norm", model.qk_norm, False),
        ("model.activation", model.activation, "gelu"),
        ("model.tied_embeddings", model.tied_embeddings, False),
        ("model.recompute", "none" if _spares_products(model) else model.recompute, "none"),
        ("optimizer.name", job.optimizer.name, "adamw"),
    ):
        if value != plain:
            remedy = f"omit it, and measure it of ours: --also {field}={_toml(value)}"
            raise ConfigError(f"job.{field}", value, f"is not what --peers {peer} can train ({_toml(plain)})", remedy)
    if model.vocab_size % tp:
        rule = f"must be a multiple of job.parallel.tp = {tp} for --peers {peer}, which pads no vocabulary"
        raise ConfigError("job.model.vocab_size", model.vocab_size, rule, "give such a one")


def _spares_products(model: ModelConfig) -> bool:
    """Whether ours computes no product again, only outputs of norms and activations: a peer's model is the same."""
    return model.recompute == "selective" and not model.recomputes("core_attn")


def layers_of(job: JobConfig, stage: int, chunk: int) -> range:
    """Layers of a chunk in a peer's pipeline, which has as many in each."""
    parallel = job.parallel
    each = job.model.layers // (parallel.pp * parallel.vpp)
    first = (chunk * parallel.pp + stage) * each
    return range(first, first + each)


def _toml(value: object) -> str:
    """Format a value as `--set` reads it."""
    return str(value).lower() if isinstance(value, bool) else str(value)

"""Model FLOPs of a training step, and MFU in both conventions.

The formula is the paper's, 72 B L s h^2 (1 + s/(6h) + V/(12 L h)), written with the MLP's width f in place of 4h, the
width a of all heads in place of h inside attention (they differ where a head's width is given), and the width g of keys
and values where heads share them: only matmuls count, a multiply-add is 2, backward is twice forward. Not
covered: recomputation (no useful work), norms (of queries and keys too), GeLU, softmax. `full` and `causal` do not
subtract a sliding window (the paper leaves open how it counts one); `done` counts the keys that each query sees.
"""

from __future__ import annotations

from dataclasses import dataclass

from netlayer.config.tree import ModelConfig


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one optimiser step over all ranks, attention counted in full, being causal by half, or as it is done."""

    full: float
    causal: float
    done: float


def step_flops(model: ModelConfig, sequences: int) -> StepFlops:
    """Model FLOPs, forward and backward, of `sequences` sequences of `model.seq_len` tokens.

    Raises:
        ValueError: fewer than one.
    """
    if sequences < 1:
        raise ValueError(f"sequences = {sequences}: must be at least 1")
    attention, mlp = linear_flops(model)
    linears = model.layers * (attention + mlp) + head_flops(model)
    full = model.layers * 4 * model.attention_width * model.seq_len
    done = sum(scores_flops(model, layer) for layer in range(model.layers))
    tokens = 3.0 * sequences * model.seq_len
    return StepFlops(tokens * (linears + full), tokens * (linears + full / 2), tokens * (linears + done))


def half_block_flops(model: ModelConfig, layer: int) -> tuple[float, float]:
    """Return forward FLOPs a token of a layer's attention, as it is done, and of its MLP."""
    attention, mlp = linear_flops(model)
    return attention + scores_flops(model, layer), mlp


def head_flops(model: ModelConfig) -> float:
    """Return forward FLOPs a token of the projection to the vocabulary."""
    return 2.0 * model.hidden * model.vocab_size


def linear_flops(model: ModelConfig) -> tuple[float, float]:
    """Return forward FLOPs a token of the linears of one layer's attention, and of its MLP."""
    h, f, a, g = model.hidden, model.ffn_hidden, model.attention_width, model.kv_width
    return 4.0 * h * a + 4 * h * g, (6.0 if model.activation == "swiglu" else 4.0) * h * f


def scores_flops(model: ModelConfig, layer: int) -> float:
    """Return forward FLOPs a token between the linears of attention, in the mean over positions."""
    return 4 * model.attention_width * _mean_keys(model.seq_len, model.window(layer))


def _mean_keys(num_positions: int, window: int) -> float:
    """Keys that a query sees, in the mean over positions."""
    w = min(window or num_positions, num_positions)
    return w - w * (w - 1) / 2 / max(1, num_positions)  # of none, no job, memory can be counted


def utilisation(flops: float, seconds: float, peak: float | None, num_devices: int) -> float | None:
    """Model FLOPs utilisation, 0..1; None where no peak is known.

    Raises:
        ValueError: no time, or no device.
    """
    if not seconds > 0:  # a NaN too
        raise ValueError(f"seconds = {seconds}: must be above 0")
    if num_devices < 1:
        raise ValueError(f"num_devices = {num_devices}: must be at least 1")
    return flops / (seconds * num_devices * peak) if peak else None

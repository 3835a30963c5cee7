"""Passes of 8-bit products over memory, beyond the products' own: for largest magnitudes, casts and transpositions.

Of this trainer's tensorwise scales (`trainer.ops.fp8`): a tensor is read for its largest magnitude, unless the kernel
that wrote it has found that; then it is read and written in 8 bits, in both orders where two products sum over other
dimensions. `blockwise` has more passes, which are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from netlayer.config.tree import ModelConfig
from netlayer.workload.model_size import linear_widths

LARGEST, CAST, TRANSPOSED, TRANSPOSE = 2, 2 + 1, 1, 1 + 1
"""Bytes an element in bfloat16: read for the largest magnitude; read, and written in 8 bits; written once more in the
other order, in the same pass; read and written so in a pass of its own."""


@dataclass(frozen=True)
class CastBytes:
    """Bytes of a half block's two linears on one rank, of a forward and of a backward pass.

    Args:
        forward, backward: a token.
        forward_weight, backward_weight: an element of the weights.
    """

    forward: float
    backward: float
    forward_weight: float
    backward_weight: float


def found_amaxes(model: ModelConfig, tp: int) -> tuple[str, ...]:
    """Return the tensors of a block whose largest magnitudes the kernels that write them find, and linears read.

    Outputs of `norm`, `mlp_norm` and `activation`; and of the gradients of what linears give: `up_grad` of the one
    before the activation, `out_grad` of the one behind attention, `branch_grad` of the last one. GeLU finds none, nor
    does attention; and queries, keys and values, or all outputs of a parallel block's first linear, have gradients of
    several kernels. Over a tensor-parallel group gradients are quantised in parts, and rows as they arrive, but for
    those that all ranks scale together before they travel.
    """
    if model.fp8 != "tensorwise":
        return ()
    is_gated, is_whole = model.activation == "swiglu", not model.parallel_block
    conditions = {
        "norm": tp == 1 or model.fp8_tp_gather,
        "mlp_norm": is_whole and (tp == 1 or model.fp8_tp_gather),
        "activation": is_gated,
        "up_grad": is_gated and is_whole and tp == 1,
        "out_grad": is_whole and tp == 1,
        "branch_grad": tp == 1,
    }
    return tuple(name for name, holds in conditions.items() if holds)


def found_of_linears(model: ModelConfig, tp: int, *, is_mlp: bool) -> tuple[tuple[bool, bool], tuple[bool, bool]]:
    """Return of which of a half block's two linears they are found: of the inputs, and of the outputs' gradients."""
    amaxes = found_amaxes(model, tp)
    norm = "norm" if model.parallel_block or not is_mlp else "mlp_norm"
    last = "branch_grad" if model.parallel_block or is_mlp else "out_grad"
    return (norm in amaxes, is_mlp and "activation" in amaxes), (is_mlp and "up_grad" in amaxes, last in amaxes)


def cast_bytes(model: ModelConfig, tp: int, *, is_mlp: bool) -> CastBytes:
    """Return the bytes of all passes of a half block; a parallel block's linears are counted as a standard one's."""
    inputs, outputs = linear_widths(model, tp, is_mlp=is_mlp)
    inputs_found, grads_found = found_of_linears(model, tp, is_mlp=is_mlp)
    again = LARGEST + CAST + TRANSPOSE
    if tp == 1:
        first, second = (
            sum((CAST + TRANSPOSED + LARGEST * (not is_found)) * width for width, is_found in zip(*each, strict=True))
            for each in ((inputs, inputs_found), (outputs, grads_found))
        )
        if model.fp8 == "tensorwise":  # backward cast to the other order, by the largest magnitude of the forward pass
            again = CAST
    else:
        # Rows are quantised as they arrive, and for the weight's gradient once more over all of them.
        first = (LARGEST + CAST) * sum(inputs)
        second = (LARGEST + CAST) * (2 * sum(outputs) + sum(inputs)) - LARGEST * inputs_found[1] * inputs[1]
        if model.fp8_tp_gather:  # a rank's own rows before they travel, which they do in both passes
            first += (CAST / tp - (LARGEST + CAST)) * inputs[0]
            second += (CAST / tp + TRANSPOSE - (LARGEST + CAST)) * inputs[0]
        if model.fp8 == "tensorwise":
            again = LARGEST + CAST
    if model.fp8_param_gather:
        return CastBytes(first, second, 0, TRANSPOSE)
    return CastBytes(first, second, LARGEST + CAST, again)

"""The operators of a GPT, forward and backward: attention, rotary positions, and the loss without whole logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from netlayer import lazy_names

if TYPE_CHECKING:
    from trainer.ops.activation import bias_gelu as bias_gelu
    from trainer.ops.activation import swiglu as swiglu
    from trainer.ops.attention import FULL_ORDER as FULL_ORDER
    from trainer.ops.attention import flex_window as flex_window
    from trainer.ops.attention import window_mask as window_mask
    from trainer.ops.backend import Operators as Operators
    from trainer.ops.backend import uses_triton as uses_triton
    from trainer.ops.join_kernels import join_and_sum as join_and_sum
    from trainer.ops.loss import linear_cross_entropy as linear_cross_entropy
    from trainer.ops.norm import EPS as EPS
    from trainer.ops.norm import Norm as Norm
    from trainer.ops.norm import add_norm as add_norm

__all__ = [
    "EPS",
    "FULL_ORDER",
    "Norm",
    "Operators",
    "add_norm",
    "bias_gelu",
    "flex_window",
    "join_and_sum",
    "linear_cross_entropy",
    "swiglu",
    "uses_triton",
    "window_mask",
]

__getattr__ = lazy_names(
    __name__,
    {
        "EPS": ".norm",
        "FULL_ORDER": ".attention",
        "Norm": ".norm",
        "Operators": ".backend",
        "add_norm": ".norm",
        "bias_gelu": ".activation",
        "flex_window": ".attention",
        "join_and_sum": ".join_kernels",
        "linear_cross_entropy": ".loss",
        "swiglu": ".activation",
        "uses_triton": ".backend",
        "window_mask": ".attention",
    },
)

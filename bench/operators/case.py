"""A case of `bench.operators`, and the sizes of models whose operators are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from netlayer.workload.presets import MODELS

Way = Callable[..., Any]
Random = Callable[..., Tensor]
"""Makes a tensor of normal values, of a shape, in the dtype of the sizes; `std`."""
_ROWS = 8192


@dataclass(frozen=True)
class Sizes:
    """One micro-batch of a model; 7B's.

    Args:
        kv_heads: heads of keys and values.
        gated: the MLP's first linear has two outputs of `ffn`.
        shard: elements that an optimiser steps, 7B's block.
    """

    batch: int = 4
    positions: int = 2048
    hidden: int = 4096
    ffn: int = 16_384
    heads: int = 32
    kv_heads: int = 32
    gated: bool = False
    vocab: int = 50_304
    window: int = 512
    shard: int = 201_326_592
    dtype: torch.dtype = torch.bfloat16

    @property
    def rows(self) -> int:
        """M."""
        return self.batch * self.positions

    @property
    def head_width(self) -> int:
        """Values of a head."""
        return self.hidden // self.heads

    @property
    def qkv(self) -> list[int]:
        """Widths of queries, keys and values."""
        return [self.hidden, *[self.kv_heads * self.head_width] * 2]


TINY = Sizes(
    batch=2, positions=24, hidden=32, ffn=40, heads=2, kv_heads=1, vocab=70, window=5, shard=999, dtype=torch.float32
)
"""For CPUs: shows that it works, not how fast it is."""


@dataclass(frozen=True)
class Case:
    """An operator.

    Args:
        inputs: every one gets a gradient, where there is a backward pass; else a way may write to them.
        ways: by system.
        plain: the definition, for float64.
        bytes_moved, flops: least of each direction; 0: not what bounds it.
        peak: dtype whose peak FLOP/s bounds it.
        tolerance: relative error that is let pass; None: as the dtype has it.
        directions: what is timed: a forward pass, and it and its backward; or, of what is no part of a graph, the call.
    """

    name: str
    inputs: list[Tensor]
    ways: dict[str, Way]
    plain: Way
    bytes_moved: Sequence[float] = (0, 0)
    flops: Sequence[float] = (0, 0)
    directions: Sequence[str] = ("forward", "forward+backward")
    peak: str = "bfloat16"
    tolerance: float | None = None

    @property
    def has_backward(self) -> bool:
        return "forward+backward" in self.directions


def sizes_of(model: str) -> Sizes:
    """Return the sizes of a micro-batch of 8,192 tokens of a preset."""
    shape: dict[str, Any] = dict(MODELS[model])
    return Sizes(
        batch=_ROWS // shape["seq_len"],
        positions=shape["seq_len"],
        hidden=shape["hidden"],
        ffn=shape["ffn_hidden"],
        heads=shape["heads"],
        kv_heads=shape.get("kv_heads", shape["heads"]),
        gated=shape.get("activation") == "swiglu",
        vocab=shape["vocab_size"],
    )

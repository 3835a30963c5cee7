"""Rotary positions: pairs of values of queries and keys are turned by an angle that grows with the position.

Su et al., RoFormer (arXiv 2104.09864), 3.4.2; pairs are value i and i + K/2, as in GPT-NeoX.

Shapes: T positions, B sequences, H heads, K values a head.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def rotate(x_TBHK: Tensor, base: float) -> Tensor:
    """`x` with its pairs turned by position / base^(2 i / K); the first row is position 0."""
    cos, sin = _angles(x_TBHK.shape[0], x_TBHK.shape[-1], base, x_TBHK.device)
    wide = x_TBHK.to(torch.promote_types(x_TBHK.dtype, torch.float32))
    left, right = wide.chunk(2, dim=-1)
    cos, sin = cos.to(wide.dtype), sin.to(wide.dtype)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x_TBHK.dtype)


@functools.lru_cache(maxsize=16)
def _angles(num_positions: int, width: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine, [T, 1, 1, K / 2] each, float64: computed once."""
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=device) / width
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float64, device=device), base**-exponents)
    return angles.cos()[:, None, None], angles.sin()[:, None, None]

"""A rank's place in its context-parallel group: which positions it has, and what its queries see.

Shapes: T positions of a sequence, t of them of this rank.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from collectives.context import ContextExchange
from trainer.ops.attention import window_block_mask, window_mask
from trainer.ops.rotary import own_positions


@dataclass(frozen=True)
class Context:
    """The group of a rank.

    Args:
        exchange: of keys and values.
        overlap: whether exchanges run under attention.
    """

    exchange: ContextExchange
    overlap: bool = True

    @property
    def part(self) -> tuple[int, int]:
        """Rank and number of ranks."""
        return self.exchange.rank, self.exchange.world_size

    def positions(self, num_own: int, device: torch.device) -> Tensor:
        """Positions of this rank's rows in their sequence, [t]."""
        return own_positions(num_own, *self.part, device)

    def window_mask(self, num_own: int, window: int, device: torch.device) -> Any:
        """Return which of all keys this rank's queries see through a window; None: all before them."""
        if not 0 < window < num_own * self.exchange.world_size:
            return None
        return _window_mask(num_own, window, self.part, device)


@functools.lru_cache(maxsize=16)
def _window_mask(num_own: int, window: int, part: tuple[int, int], device: torch.device) -> Any:
    """Made once for all layers of one window."""
    own_t, num_positions = own_positions(num_own, *part, device), num_own * part[1]
    if device.type == "cuda":
        return window_block_mask(num_positions, window, own_t)
    return window_mask(num_positions, window, device, own_t)

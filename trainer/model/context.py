"""A rank's place in its context-parallel group: which positions it has.

Shapes: T positions of a sequence, t of them of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from collectives.context import ContextExchange
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

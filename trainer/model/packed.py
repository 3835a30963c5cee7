"""Facts for a model on sequences that hold several documents, or tokens that are no targets.

Shapes: B sequences, T positions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer.ops.attention import document_block_mask, document_mask

NO_TARGET = -1
"""In place of a target that does not count."""


class Packed:
    """Documents of a micro-batch, beside its tokens and targets; targets that do not count are `NO_TARGET`.

    Args:
        segments_BT: number of the document that each position is in, rising; None: all of a sequence is one.
        scale: gives positions over targets that count, of the whole batch on all ranks: a loss, which is a sum over
            targets divided by positions, is multiplied by it. Called for the first loss: the ranks add up meanwhile.
        own_t: positions that this rank of a context-parallel group has; None: all. Documents are those of all.
    """

    def __init__(self, segments_BT: Tensor | None, scale: Callable[[], Tensor], own_t: Tensor | None = None) -> None:
        self.segments_BT, self._scale, self.own_t = segments_BT, scale, own_t

    @property
    def scale(self) -> Tensor:
        return self._scale()

    @functools.cached_property
    def positions(self) -> Tensor | None:
        """Position of each of this rank's tokens in its document."""
        if self.segments_BT is None:
            return None
        index_T = torch.arange(self.segments_BT.shape[1], device=self.segments_BT.device)
        begins_BT = torch.zeros_like(self.segments_BT, dtype=torch.bool)
        begins_BT[:, 1:] = self.segments_BT[:, 1:] != self.segments_BT[:, :-1]
        positions_BT = index_T - torch.where(begins_BT, index_T, 0).cummax(1).values
        return positions_BT if self.own_t is None else positions_BT[:, self.own_t]

    def attention_mask(self, window: int) -> Any:
        """Return which keys a query sees, as `attention` takes it: made once, for all layers of one window."""
        if self.segments_BT is None:
            return None
        if window not in self._masks:
            make = document_block_mask if self.segments_BT.is_cuda else document_mask
            self._masks[window] = make(self.segments_BT, window, self.own_t)
        return self._masks[window]

    @functools.cached_property
    def _masks(self) -> dict[int, Any]:
        return {}

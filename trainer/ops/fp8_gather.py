"""Quantisation of weights in pieces, for their travel in 8 bits (`collectives.sharded.float8`).

A rank quantises its pieces of weights by the scales of the whole ones, to the bits that `trainer.ops.fp8.quantise`
gives of these. A piece may begin and end anywhere: blocks of 128 x 128 that a shard cuts have one scale all the same,
for the largest magnitudes are those of all ranks.

Shapes: E elements of a piece, [R, C] a weight, K scales of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from collectives.sharded.float8 import PieceOfWeight
from collectives.triton_support import HAS_TRITON
from trainer.ops.backend import Operators, uses_triton
from trainer.ops.fp8 import BLOCK, E4M3, Recipe, cast_plain, scale_of

if HAS_TRITON:
    from trainer.ops.fp8_kernels import cast_rounded


class PieceQuantiser:
    """Quantiser of pieces of weights (`collectives.sharded.float8.Quantiser`).

    Args:
        recipe: of the scales.
        operators: by which weights are quantised whole; other ones may divide to other last bits.
    """

    def __init__(self, recipe: Recipe, operators: Operators = "auto") -> None:
        self.recipe, self.operators = recipe, operators

    def scales_shape(self, shape: torch.Size) -> tuple[int, ...]:
        """(); of blocks [R / 128, C / 128]."""
        return () if self.recipe == "tensorwise" else (shape[0] // BLOCK, shape[1] // BLOCK)

    def largest(self, pieces: Sequence[PieceOfWeight], dtype: torch.dtype) -> list[Tensor]:
        """Largest magnitudes of pieces, float32, [K] each; rounding keeps their order, so they are rounded alone."""
        if not pieces:
            return []
        if self.recipe == "tensorwise":
            norms = torch._foreach_norm([piece.values for piece in pieces], math.inf)
            return list(torch.split(torch.stack(norms).to(dtype).float(), 1))
        return [self._largest_of_blocks(piece).to(dtype).float() for piece in pieces]

    def scales(self, largest_K: Tensor) -> Tensor:
        return scale_of(largest_K, E4M3, self.recipe)

    def cast(self, piece: PieceOfWeight, dtype: torch.dtype, scale: Tensor, out_E: Tensor) -> None:
        """Quantise a piece."""
        if self.recipe == "tensorwise" and uses_triton(self.operators, piece.values):
            cast_rounded(piece.values, dtype, scale, out_E)
            return
        values_E = piece.values.to(dtype).float()
        if self.recipe == "tensorwise":
            out_E.copy_(cast_plain(values_E / scale, E4M3))
            return
        rows_RC, first = self._rows(piece, values_E)
        block_rows = slice(first // BLOCK, (first + len(rows_RC)) // BLOCK)
        cast_RC = cast_plain((_tiles(rows_RC) / scale[block_rows, None, :, None]).view(rows_RC.shape), E4M3)
        out_E.copy_(_within(cast_RC, piece, first))

    def _largest_of_blocks(self, piece: PieceOfWeight) -> Tensor:
        rows_RC, first = self._rows(piece, piece.values.float())
        grid = rows_RC.new_zeros(self.scales_shape(piece.shape))
        grid[first // BLOCK : (first + len(rows_RC)) // BLOCK] = _tiles(rows_RC).abs().amax((1, 3))
        return grid.view(-1)

    def _rows(self, piece: PieceOfWeight, values_E: Tensor) -> tuple[Tensor, int]:
        """Return the rows of whole blocks that a piece lies in, zero beside it, and the number of the first one."""
        columns = piece.shape[1]
        height = BLOCK * columns
        first, end = piece.start // height, -(-(piece.start + len(values_E)) // height)
        before = piece.start - first * height
        rows = F.pad(values_E, (before, (end - first) * height - before - len(values_E)))
        return rows.view(-1, columns), first * BLOCK


def _tiles(rows_RC: Tensor) -> Tensor:
    """[R / 128, 128, C / 128, 128]."""
    rows, columns = rows_RC.shape
    return rows_RC.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)


def _within(rows_RC: Tensor, piece: PieceOfWeight, first: int) -> Tensor:
    """Return the elements of a piece, [E], of the rows that it lies in."""
    before = piece.start - first * piece.shape[1]
    return rows_RC.view(-1)[before : before + len(piece.values)]

"""Inputs whose result is known exactly, and the count of elements that came out otherwise.

A rank's input repeats one pattern of small whole numbers with a prime period, seeded by the run and the rank, so that
every reduction is exact in every type and a part at a wrong place differs. Outputs are poisoned before each check.
Left out: inputs that are hard for rounding; nccl-tests' own generator is the place for those.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bench.collective import Part

PERIOD = 16381  # prime: no part of a power-of-two size begins where another did
_BLOCK = 1024 * PERIOD  # elements compared at once: bounds the memory for masks
_AVG_TOLERANCE_ULP = 2  # NCCL scales each input by 1/n before it adds

# Whole numbers up to here are exact in the type, and so is every sum that stays below.
_EXACT = {torch.int8: 127, torch.uint8: 127, torch.bfloat16: 256, torch.float16: 2048}
_EXACT_OTHERS = 1 << 20
_POISON_INT = 0xAA  # no input, sum or product here is 0xAA repeated
_MAX_DOUBLINGS = 6  # a product is at most 2**6: exact everywhere, and fits int8


class Data:
    """The inputs and expectations of one seed over so many ranks; `op` is '' where nothing is reduced."""

    def __init__(self, ranks: int, dtype: torch.dtype, op: str, seed: int) -> None:
        self.ranks, self.dtype, self.op, self.seed = ranks, dtype, op, seed

    def fill(self, buffer: Tensor, rank: int) -> None:
        """Write the input of `rank` into `buffer`."""
        _tile(buffer, self._pattern(rank).to(self.dtype).to(buffer.device))

    def count_wrong(self, result: Tensor, parts: Sequence[Part]) -> int:
        """Elements of `result` that differ from what `parts` expect, in order, all of one length."""
        if not parts:
            return 0
        wrong = 0
        for piece, part in zip(result.tensor_split(len(parts)), parts, strict=True):
            low, high = self._bounds(part)
            wrong += _count_outside(piece, low.to(result.device), high.to(result.device))
        return wrong

    def _pattern(self, rank: int) -> Tensor:
        """One period of a rank's input as int64."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + rank)
        if self.op == "prod":
            return 1 + torch.randint(0, 2, (PERIOD,), generator=generator) * self._turn(rank, _MAX_DOUBLINGS)
        exact = _EXACT.get(self.dtype, _EXACT_OTHERS)
        adds = self.op in ("sum", "avg")
        largest = max(1, exact // self.ranks) if adds else exact
        values = torch.randint(0, largest + 1, (PERIOD,), generator=generator)
        return values * self._turn(rank, exact) if adds else values

    def _turn(self, rank: int, most: int) -> Tensor:
        """1 where it is this rank's turn, else 0: at no element more than `most` ranks have theirs."""
        stride = -(-self.ranks // most)
        return ((torch.arange(PERIOD) + rank) % stride == 0).long()

    def _bounds(self, part: Part) -> tuple[Tensor, Tensor]:
        """One period of the least and of the greatest value allowed, from the part's first element on."""
        if part.source is not None:
            low = high = self._pattern(part.source).to(self.dtype)
        elif self.op != "avg":
            low = high = self._reduced().to(self.dtype)
        elif self.dtype.is_floating_point:
            low, high = _around(self._reduced().double() / self.ranks, self.dtype)
        else:
            low = high = (self._reduced() // self.ranks).to(self.dtype)
        shift = -(part.start % PERIOD)
        return low.roll(shift), high.roll(shift)

    def _reduced(self) -> Tensor:
        """One period of the reduction over all ranks, exact; the sum where the operator is the average."""
        total = self._pattern(0)
        for rank in range(1, self.ranks):
            total = _combine(self.op, total, self._pattern(rank))
        return total


def poison(buffer: Tensor) -> None:
    """Overwrite with what no check accepts: NaN, or a bit pattern that no result has."""
    if buffer.dtype.is_floating_point:
        buffer.fill_(float("nan"))
    else:
        buffer.view(torch.uint8).fill_(_POISON_INT)


def _combine(op: str, left: Tensor, right: Tensor) -> Tensor:
    if op == "prod":
        return left * right
    if op == "max":
        return torch.maximum(left, right)
    return torch.minimum(left, right) if op == "min" else left + right


def _around(mean: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The rounded mean, and a few units in the last place to both sides."""
    rounded = mean.to(dtype).double()
    _, exponent = torch.frexp(rounded)
    ulp = torch.ldexp(torch.full_like(rounded, torch.finfo(dtype).eps), exponent - 1)
    margin = torch.where(rounded == 0, 0.0, _AVG_TOLERANCE_ULP * ulp)
    return (rounded - margin).to(dtype), (rounded + margin).to(dtype)


def _tile(buffer: Tensor, period: Tensor) -> None:
    whole = buffer.numel() // PERIOD * PERIOD
    buffer[:whole].view(-1, PERIOD).copy_(period)
    buffer[whole:].copy_(period[: buffer.numel() - whole])


def _count_outside(result: Tensor, low: Tensor, high: Tensor) -> int:
    """NaN is outside of everything, so a result that was never written is wrong."""
    wrong = 0
    for block in torch.split(result, _BLOCK):
        whole = block.numel() // PERIOD * PERIOD
        body, tail = block[:whole].view(-1, PERIOD), block[whole:]
        rest = tail.numel()
        inside = ((body >= low) & (body <= high)).sum() + ((tail >= low[:rest]) & (tail <= high[:rest])).sum()
        wrong += block.numel() - int(inside)
    return wrong

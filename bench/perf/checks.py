"""Inputs whose result is known exactly, and the count of elements that came out otherwise.

A rank's input repeats one pattern of small whole numbers with a prime period, seeded by the run and the rank, so that
every reduction is exact in every type and a part at a wrong place differs. Outputs are poisoned before each check.
Not covered: inputs that are hard for rounding; nccl-tests' own generator is the place for those.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bench.perf.collectives.collective import Part

PERIOD = 16381  # prime: no part of a power-of-two size begins where another did
_BLOCK = 1024 * PERIOD  # elements compared at once: bounds the memory for masks
_AVG_TOLERANCE_ULP = 2  # NCCL scales each input by 1/n before it adds
_LARGEST_FACTOR = 2  # of `premultiplier`

# Whole numbers up to here are exact in the type, and so is every sum that stays below.
_EXACT = {
    torch.int8: 127,
    torch.uint8: 127,
    torch.bfloat16: 256,
    torch.float16: 2048,
    torch.float8_e4m3fn: 16,
    torch.float8_e5m2: 8,
}
# torch computes little with these; as the other type the bits, or the values, of all our numbers are the same.
_SAME_BITS = {torch.uint32: torch.int32, torch.uint64: torch.int64}
_WIDER = {torch.float8_e4m3fn: torch.float16, torch.float8_e5m2: torch.float16}
_EXACT_OTHERS = 1 << 20
_POISON_INT = 0xAA  # no input, sum or product here is 0xAA repeated
_POISON_FP8 = 0x7F  # NaN in both
_MAX_DOUBLINGS = 6  # a product is at most 2**6: exact everywhere, and fits int8


class Data:
    """The inputs and expectations of one seed over so many ranks; `op` is '' where nothing is reduced."""

    def __init__(self, ranks: int, dtype: torch.dtype, op: str, seed: int) -> None:
        self.ranks, self.dtype, self.op, self.seed = ranks, _SAME_BITS.get(dtype, dtype), op, seed

    def fill(self, buffer: Tensor, rank: int) -> None:
        """Write the input of `rank` into `buffer`."""
        period = self._pattern(rank).to(self.dtype).to(buffer.device)
        if self.dtype in _WIDER:  # one byte each, which torch copies under any name
            period, buffer = period.view(torch.uint8), buffer.view(torch.uint8)
        _tile(buffer.view(period.dtype), period)

    def count_wrong(self, result: Tensor, parts: Sequence[Part]) -> int:
        """Elements of `result` that differ from what `parts` expect, in order.

        Parts that do not say how long they are share the result evenly; what is beyond the last one is not looked at.
        """
        if not parts:
            return 0
        wrong, begin = 0, 0
        for part in parts:
            length = result.numel() // len(parts) if part.length is None else part.length
            low, high = self._bounds(part)
            piece = result[begin : begin + length].view(self.dtype)
            wrong += _count_outside(piece, low.to(result.device), high.to(result.device))
            begin += length
        return wrong

    def _pattern(self, rank: int) -> Tensor:
        """One period of a rank's input as int64."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + rank)
        if self.op == "prod":
            return 1 + torch.randint(0, 2, (PERIOD,), generator=generator) * self._turn(rank, _MAX_DOUBLINGS)
        exact = _EXACT.get(self.dtype, _EXACT_OTHERS)
        adds = self.op in ("sum", "avg", "mulsum")
        if self.op == "mulsum":
            exact //= _LARGEST_FACTOR
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
            low = high = self._pattern(part.source)
        elif self.op != "avg":
            low = high = self._reduced()
        elif self.dtype.is_floating_point:
            low, high = _around(self._reduced().double() / self.ranks, self.dtype, self._tolerance_ulp())
        else:
            low = high = self._reduced() // self.ranks
        shift, dtype = -(part.start % PERIOD), _WIDER.get(self.dtype, self.dtype)
        return low.roll(shift).to(dtype), high.roll(shift).to(dtype)

    def _tolerance_ulp(self) -> int:
        """Return the tolerance of an average, in units in the last place.

        With 3 bits or fewer behind the point, 1/n itself is half a unit off where n is no power of two, and so is each
        input times 1/n.
        """
        narrow = self.dtype in _WIDER and self.ranks & (self.ranks - 1)
        return _AVG_TOLERANCE_ULP + self.ranks if narrow else _AVG_TOLERANCE_ULP

    def _reduced(self) -> Tensor:
        """One period of the reduction over all ranks, exact; the sum where the operator is the average."""
        total = self._scaled(0)
        for rank in range(1, self.ranks):
            total = _combine(self.op, total, self._scaled(rank))
        return total

    def _scaled(self, rank: int) -> Tensor:
        pattern = self._pattern(rank)
        return pattern * premultiplier(rank) if self.op == "mulsum" else pattern


def premultiplier(rank: int) -> int:
    """Return the factor of `mulsum` for a rank's input: exact in every type, and not the same for all."""
    return 1 + rank % _LARGEST_FACTOR


def poison(buffer: Tensor) -> None:
    """Overwrite with what no check accepts: NaN, or a bit pattern that no result has."""
    if buffer.dtype in _WIDER:
        buffer.view(torch.uint8).fill_(_POISON_FP8)
    elif buffer.dtype.is_floating_point:
        buffer.fill_(float("nan"))
    else:
        buffer.view(torch.uint8).fill_(_POISON_INT)


def _combine(op: str, left: Tensor, right: Tensor) -> Tensor:
    if op == "prod":
        return left * right
    if op == "max":
        return torch.maximum(left, right)
    return torch.minimum(left, right) if op == "min" else left + right


def _around(mean: Tensor, dtype: torch.dtype, tolerance_ulp: int) -> tuple[Tensor, Tensor]:
    """The rounded mean, and some units in the last place to both sides."""
    rounded = mean.to(dtype).double()
    _, exponent = torch.frexp(rounded)
    ulp = torch.ldexp(torch.full_like(rounded, torch.finfo(dtype).eps), exponent - 1)
    margin = torch.where(rounded == 0, 0.0, tolerance_ulp * ulp)
    return rounded - margin, rounded + margin


def _tile(buffer: Tensor, period: Tensor) -> None:
    whole = buffer.numel() // PERIOD * PERIOD
    buffer[:whole].view(-1, PERIOD).copy_(period)
    buffer[whole:].copy_(period[: buffer.numel() - whole])


def _count_outside(result: Tensor, low: Tensor, high: Tensor) -> int:
    """NaN is outside of everything, so a result that was never written is wrong."""
    wrong = 0
    for stretch in torch.split(result, _BLOCK):
        block = stretch.to(low.dtype)
        whole = block.numel() // PERIOD * PERIOD
        body, tail = block[:whole].view(-1, PERIOD), block[whole:]
        rest = tail.numel()
        inside = ((body >= low) & (body <= high)).sum() + ((tail >= low[:rest]) & (tail <= high[:rest])).sum()
        wrong += block.numel() - int(inside)
    return wrong

"""Collective as a bench sees it: how a size becomes elements, what it moves, and what must come out.

One object a collective, without torch, so that `--help` is quick. The sizes and factors are those of nccl-tests
(src/*.cu and doc/PERFORMANCE.md), so that a number means the same in both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from bench.backends import Backend, Call
    from bench.perf.options import PerfOptions

# A rank's share of a divided buffer is rounded down to this, as nccl-tests does: 8 bytes over 2 ranks are 0 bytes.
SHARE_ALIGNMENT_BYTES = 16


class Part(NamedTuple):
    """`count` elements of a result: those of the input of rank `source` from element `start` on.

    A `source` of None stands for the reduction of all ranks' inputs, a `length` of None for an even share.
    """

    source: int | None
    start: int
    length: int | None = None


@dataclass(frozen=True)
class Place:
    """Position that an expectation is computed for: rank of `ranks`, root, elements of a part and their size."""

    rank: int
    ranks: int
    root: int
    count: int
    width_bytes: int = 1


@dataclass(frozen=True)
class Collective:
    """One collective.

    Args:
        name: as in `<name>_perf` and `bench.<name>`.
        summary: one line for `--help`.
        bus_factor: what turns alg_bw into bus_bw for so many ranks: the share of the size that each rank's link
            carries at best, whatever the algorithm.
        launch: starts it on a backend.
        expect: the parts of the receive buffer in order; empty on a rank whose receive buffer means nothing.
        sends_all: the send buffer holds `count` elements for each rank, not for one.
        receives_all: the receive buffer does.
        reduces: it takes an operator.
        shows_op: the operator stands in the table though nothing is reduced, which nccl-tests does for sendrecv.
        has_root: it takes a root.
        checks_in_place: its result in place is defined; where not, nccl-tests times it and prints N/A, and so do we.
        min_ranks: the fewest ranks it works with.
        alg_factor: the share of the size that alg_bw counts; nccl-tests leaves a rank's own part out of hypercube's.
        extents: the elements of the send and the receive buffer, from (count, width in bytes, ranks); None is as many
            parts of `count` elements as `sends_all` and `receives_all` say.
        check: raises a ConfigError where the ranks or the sizes asked for cannot be.
        one_launch: it is one launch of the library; where not, several of its calls cannot be grouped (`-m`).
    """

    name: str
    summary: str
    bus_factor: Callable[[int], float]
    launch: Callable[[Backend, Call], None]
    expect: Callable[[Place], Sequence[Part]]
    sends_all: bool = False
    receives_all: bool = False
    reduces: bool = False
    shows_op: bool = False
    has_root: bool = False
    checks_in_place: bool = True
    min_ranks: int = 1
    alg_factor: Callable[[int], float] = lambda _: 1.0
    extents: Callable[[int, int, int], tuple[int, int]] | None = None
    check: Callable[[PerfOptions, int], None] | None = None
    one_launch: bool = True

    def count(self, size_bytes: int, width_bytes: int, ranks: int) -> int:
        """Elements of one part for a size asked for; `width_bytes` is the size of an element."""
        elements = size_bytes // width_bytes
        if not self.sends_all and not self.receives_all:
            return elements
        align = SHARE_ALIGNMENT_BYTES // width_bytes
        return elements // ranks // align * align

    def buffer_parts(self, ranks: int) -> tuple[int, int]:
        """Return the number of parts, of `count` elements each, in the send and the receive buffer."""
        return (ranks if self.sends_all else 1), (ranks if self.receives_all else 1)

    def elements(self, count: int, width_bytes: int, ranks: int) -> tuple[int, int]:
        """Elements of the send and of the receive buffer."""
        if self.extents is not None:
            return self.extents(count, width_bytes, ranks)
        sent, received = self.buffer_parts(ranks)
        return sent * count, received * count

    def bandwidth_gbs(self, size_bytes: int, seconds: float, ranks: int) -> tuple[float, float]:
        """alg_bw and bus_bw in GB/s (1e9): the size of the larger buffer over the time, and times `bus_factor`."""
        alg_bw = size_bytes * self.alg_factor(ranks) / 1e9 / seconds if seconds > 0 else 0.0
        return alg_bw, alg_bw * self.bus_factor(ranks)

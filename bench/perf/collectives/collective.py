"""Collective as a bench sees it: how a size becomes elements, what it moves, and what must come out.

One object a collective, without torch, so that `--help` is quick. The sizes and factors are those of nccl-tests
(src/*.cu and doc/PERFORMANCE.md), so that a number means the same in both. `wire_share` is what NCCL's algorithms put
on a rank's link: times alg_bw it is the wire bandwidth, which is what to hold against the line rate; bus_bw may exceed
that where the switch reduces (NVLS).
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
UNKNOWN = "unknown"  # an algorithm or protocol that the library did not log


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
        """Return the elements of one part for a requested size; `width_bytes` is the size of an element."""
        elements = size_bytes // width_bytes
        if not self.sends_all and not self.receives_all:
            return elements
        # nccl-tests cuts the size so that each rank's part begins aligned: the sizes in both tables agree.
        align = SHARE_ALIGNMENT_BYTES // width_bytes
        return elements // ranks // align * align

    def buffer_parts(self, ranks: int) -> tuple[int, int]:
        """Return the number of parts, of `count` elements each, in the send and the receive buffer."""
        return (ranks if self.sends_all else 1), (ranks if self.receives_all else 1)

    def elements(self, count: int, width_bytes: int, ranks: int) -> tuple[int, int]:
        """Return the elements of the send and of the receive buffer."""
        if self.extents is not None:
            return self.extents(count, width_bytes, ranks)
        sent, received = self.buffer_parts(ranks)
        return sent * count, received * count

    def bandwidth_gbs(self, size_bytes: int, seconds: float, ranks: int) -> tuple[float, float]:
        """alg_bw and bus_bw in GB/s (1e9): the size of the larger buffer over the time, and times `bus_factor`."""
        # 0 s where nothing was timed (-n 0): no bandwidth rather than an infinite one.
        alg_bw = size_bytes * self.alg_factor(ranks) / 1e9 / seconds if seconds > 0 else 0.0
        return alg_bw, alg_bw * self.bus_factor(ranks)


# Bytes on the link for each byte of data: LL sends 4 bytes with a flag of 4, LL128 120 in lines of 128.
_PROTOCOLS = {"SIMPLE": 1.0, "LL": 2.0, "LL128": 128 / 120}
_RING = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda _: 1.0,
    "reduce": lambda _: 1.0,
}
_EXCHANGE = {name: _RING[name] for name in ("all_reduce", "all_gather", "reduce_scatter")}
# The switch fetches every rank's whole buffer to reduce it and writes the result to every rank; of both, a rank's own
# part crosses its link as well.
_IN_SWITCH = {
    "all_reduce": lambda n: 1 + 1 / n,
    "all_gather": lambda _: 1.0,
    "reduce_scatter": lambda _: 1.0,
}
_SHARES: dict[str, dict[str, Callable[[int], float]]] = {
    "RING": _RING,
    "PAT": {name: _RING[name] for name in ("all_gather", "reduce_scatter")},
    # On one host a tree is a chain: its inner ranks pass everything on, up and down.
    "TREE": {"all_reduce": lambda n: 2.0 if n > 2 else 1.0},
    "NVLS": _IN_SWITCH,
    # Symmetric kernels: ST and LD move parts between pairs of ranks, MC goes through the switch.
    "AllReduce_AGxLL_R": {"all_reduce": lambda n: n - 1.0},
    "AllReduce_AGxLLMC_R": {"all_reduce": lambda n: float(n)},
    "AllReduce_RSxLD_AGxST": _EXCHANGE,
    "AllReduce_RSxLDMC_AGxSTMC": _IN_SWITCH,
    "AllGather_LL": _EXCHANGE,
    "AllGather_LLMC": _IN_SWITCH,
    "AllGather_ST": _EXCHANGE,
    "AllGather_STMC": _IN_SWITCH,
    "ReduceScatter_LL": _EXCHANGE,
    "ReduceScatter_LD": _EXCHANGE,
    "ReduceScatter_LDMC": _IN_SWITCH,
}
_ON_ONE_HOST = ("TREE", "NVLS")


def wire_share(collective: str, algorithm: str, protocol: str, ranks: int, *, one_host: bool) -> float | None:
    """Return the bytes on the busiest rank's link over the size of a collective; None if it is not known.

    Not derived here, and so None: calls between two ranks, of which NCCL's log does not tell the protocol, trees and
    NVLS over several hosts, CollNet.

    Args:
        algorithm, protocol: in NCCL's words, as its log has them.
    """
    if algorithm in _ON_ONE_HOST and not one_host:
        return None
    share, overhead = _SHARES.get(algorithm, {}).get(collective), _PROTOCOLS.get(protocol)
    return None if share is None or overhead is None else share(ranks) * overhead

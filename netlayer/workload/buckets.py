"""Buckets: the cut of a rank's parameters into buckets, their padding, and how many are reduced at once.

`collectives` lays its buffers out by this, and `comm_bytes` and `memory` count them by it. No configuration is read.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence

REDUCTIONS_IN_FLIGHT = 4
"""Default for the reduce-scatters that may be under way besides the bucket that is being filled."""
IN_FLIGHT_BYTES = 2 * 2**30
"""That as many reduce-scatters take at most, unless one takes more: a large one lasts as long as a block's backward."""
COPIES_AT_ONCE = 2
"""Where copy engines carry gradients: the sends of one bucket, and the sum of the one before."""
MOST_COPYING_RANKS = 8
"""Of a group whose copy engines do."""
USUAL_BLOCKS = 4
"""Multiprocessors that a collective of NCCL commonly takes without NVLink. A product over which its parts lie leaves
twice as many, for the blocks of a product come in pairs on neighbours."""

_LEAST_SLOT_BYTES = 2**20  # a window is a matter of many messages: few are made


def slot_bytes(num_bytes: int) -> int:
    """Return what one rank's rows of `num_bytes` take in a window of a tensor-parallel exchange over peer memory."""
    return max(_LEAST_SLOT_BYTES, 1 << (num_bytes - 1).bit_length())


def cut(sizes: Sequence[int], kinds: Sequence[Hashable], limit_bytes: int | None) -> list[range]:
    """Runs of parameters that share a bucket, as indices.

    A bucket ends where the kind changes, and where it would grow above the limit; it holds at least one parameter.

    Args:
        sizes: bytes of each parameter, in order of first use.
        kinds: what must be alike in a bucket: the dtype, the part of the model.
        limit_bytes: largest size of a bucket without its padding; None: no limit.
    """
    limit = sys.maxsize if limit_bytes is None else limit_bytes
    runs: list[range] = []
    size_of_run, kind_of_run = 0, None
    for index, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        if not runs or kind != kind_of_run or size_of_run + size > limit:
            runs.append(range(index, index))
            size_of_run, kind_of_run = 0, kind
        runs[-1] = range(runs[-1].start, index + 1)
        size_of_run += size
    return runs


def reductions_in_flight(num_bytes: int) -> int:
    """Return how many reduce-scatters of buckets of so many bytes may be under way."""
    return max(1, min(REDUCTIONS_IN_FLIGHT, IN_FLIGHT_BYTES // max(num_bytes, 1)))


def buffer_sizes(sizes: Sequence[int], count: int) -> list[int]:
    """Sizes of `count` buffers that buckets take turns in: all but one for what is usual, and one for the largest.

    Usual is what as many buckets reach as there are buffers: the few larger ones, token tables, have one together.
    """
    ordered = sorted(sizes, reverse=True)
    usual = ordered[min(count, len(ordered)) - 1] if ordered else 0
    return [*[usual] * (count - 1), *ordered[:1]] if ordered else [0] * count


def aligned_scales(number: int) -> int:
    """Return how many float32 the scales of a weight in 8 bits take: those of the next one begin at 16 bytes.

    cuBLASLt takes no product whose scale lies elsewhere (CUBLAS_STATUS_NOT_SUPPORTED; reports/llama8b_202611.md).
    """
    return -(-number // 4) * 4


def shard_elements(numel: int, ranks: int, align: int = 1) -> int:
    """Elements of a rank's shard of a bucket, its part of the padding among them.

    Args:
        align: a shard is a multiple of this many elements.
    """
    return -(-numel // (ranks * align)) * align

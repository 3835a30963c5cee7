"""Orders of samples that are functions of an index, with no state: a shuffle, and a blend of several datasets.

Whoever knows (seed, epoch, index) knows the sample, in constant time and memory: nothing is drawn, kept or replayed.

Shapes: N indices, D datasets, Q samples of a period.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

MAX_PERIOD = 2**16
"""Samples after which a blend repeats, at most: weights are multiples of one over it."""

_NUM_ROUNDS = 8  # four make a Feistel network of random functions a pseudo-random permutation (Luby and Rackoff)
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # of SplitMix64


class Permutation:
    """A permutation of 0 .. size - 1, chosen by a key: call it with indices; `inverse` goes back.

    A Feistel network permutes the next power of four. What leaves the range goes through it again until it is inside
    (Black and Rogaway's cycle walking): less than four passes on average, and still one to one.

    Args:
        size: at least 1, at most 2^62.
        key: words that choose it, such as (seed, name, epoch).
    """

    def __init__(self, size: int, *key: int | str) -> None:
        if not 1 <= size <= 2**62:
            raise ValueError(f"size = {size}: outside 1 .. 2^62")
        self.size = size
        self._half = (max(size - 1, 1).bit_length() + 1) // 2  # bits; the domain is 4 ** half
        self._mask = np.uint64(2**self._half - 1)
        digest = hashlib.blake2b(repr((size, *key)).encode(), digest_size=8 * _NUM_ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype="<u8")

    def __call__(self, index_N: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the place of each index, 0 .. size - 1."""
        return self._walk(index_N, self._keys, turned=False)

    def inverse(self, place_N: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of each place."""
        return self._walk(place_N, self._keys[::-1], turned=True)

    def _walk(self, value_N: NDArray[np.int64], keys: NDArray[np.uint64], *, turned: bool) -> NDArray[np.int64]:
        """Permute numbers below `size`: pass each through the network until it comes out below `size` (cycle walking).

        Args:
            keys: of the rounds, in the order of use.
            turned: run the network backwards, for the inverse.
        """
        if len(value_N) and (value_N.min() < 0 or value_N.max() >= self.size):
            raise ValueError(f"an index lies outside 0 .. {self.size - 1}")
        place_N = self._network(value_N.astype(np.uint64), keys, turned)
        while (outside_N := place_N >= self.size).any():
            place_N[outside_N] = self._network(place_N[outside_N], keys, turned)
        return place_N.astype(np.int64)

    def _network(self, value_N: NDArray[np.uint64], keys: NDArray[np.uint64], turned: bool) -> NDArray[np.uint64]:
        left_N, right_N = value_N >> np.uint64(self._half), value_N & self._mask
        # Backwards, the halves change places before and after, and the keys come in the other order.
        if turned:
            left_N, right_N = right_N, left_N
        for key in keys:
            left_N, right_N = right_N, left_N ^ (_mix(right_N ^ key) & self._mask)
        if turned:
            left_N, right_N = right_N, left_N
        return (left_N << np.uint64(self._half)) | right_N


def _mix(word_N: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread each word over all its bits: the finalizer of SplitMix64 (Steele et al., OOPSLA 2014)."""
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        word_N = (word_N ^ (word_N >> np.uint64(shift))) * factor
    return word_N ^ (word_N >> np.uint64(31))


class Blend:
    """Order of datasets over samples: after any k samples, dataset i has had floor or ceil of k * share i.

    The order is that of unit jobs with deadlines: the j-th sample of dataset i belongs into the time from
    (j - 1) / share to j / share, and of those that may come, the one whose time ends first does. With shares that add
    up to one such an order always exists, and this finds it (Baruah et al., Algorithmica 1996). It repeats after as
    many samples as the shares' common denominator, so a table of one period gives the dataset of any sample.

    Args:
        weights: above 0; only their ratios count. Decimal fractions are taken as written; where the common denominator
            is above `MAX_PERIOD`, shares are rounded to multiples of one over it, and none to zero.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        if not 1 <= len(weights) <= MAX_PERIOD or not all(0 < weight < math.inf for weight in weights):
            raise ValueError(f"weights = {list(weights)}: at least one, each above 0")
        self.counts_D = np.array(_whole_shares(weights), dtype=np.int64)
        """Samples of each dataset in a period."""
        self.period = int(self.counts_D.sum())
        self._dataset_Q = _schedule(self.counts_D.tolist())
        self._earlier_Q = np.empty(self.period, dtype=np.int64)  # samples of the same dataset before it in its period
        for dataset, count in enumerate(self.counts_D):
            self._earlier_Q[self._dataset_Q == dataset] = np.arange(count)

    @property
    def shares(self) -> list[Fraction]:
        """Share of each dataset, as it is blended."""
        return [Fraction(int(count), self.period) for count in self.counts_D]

    def locate(self, sample_N: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the dataset of each sample, and which of that dataset's samples it is, from 0."""
        turn_N, place_N = np.divmod(sample_N, self.period)
        dataset_N = self._dataset_Q[place_N]
        return dataset_N, turn_N * self.counts_D[dataset_N] + self._earlier_Q[place_N]

    def counts(self, num_samples: int) -> NDArray[np.int64]:
        """Return how many of the first samples are of each dataset, shape (D,)."""
        turns, rest = divmod(num_samples, self.period)
        return turns * self.counts_D + np.bincount(self._dataset_Q[:rest], minlength=len(self.counts_D))


def _whole_shares(weights: Sequence[float]) -> list[int]:
    """Return whole numbers in the ratio of the weights, without a common factor, `MAX_PERIOD` in all at most."""
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    shares = [weight / total for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= MAX_PERIOD:
        return [int(share * period) for share in shares]
    # Largest remainders. A small share is rounded up first, so that no dataset is lost.
    counts = [max(1, int(share * MAX_PERIOD)) for share in shares]
    order = sorted(range(len(shares)), key=lambda index: shares[index] * MAX_PERIOD - counts[index], reverse=True)
    missing = MAX_PERIOD - sum(counts)
    for index in order[: max(0, missing)]:
        counts[index] += 1
    while sum(counts) > MAX_PERIOD:  # many small shares were rounded up: the largest pay for them
        counts[counts.index(max(counts))] -= 1
    factor = math.gcd(*counts)
    return [count // factor for count in counts]


def _schedule(counts: list[int]) -> NDArray[np.int64]:
    """Return the dataset of each sample of a period, earliest deadline first."""
    period = sum(counts)
    order = np.empty(period, dtype=np.int64)
    # Of each dataset one sample waits: in `later` until its time begins, then in `ready`, by the end of its time.
    later = [(0, dataset, 1) for dataset in range(len(counts))]
    ready: list[tuple[int, int, int]] = []
    heapq.heapify(later)
    for place in range(period):
        while later and later[0][0] <= place:
            _, dataset, number = heapq.heappop(later)
            heapq.heappush(ready, (-(-number * period // counts[dataset]), dataset, number))
        _, dataset, number = heapq.heappop(ready)
        order[place] = dataset
        if number < counts[dataset]:
            heapq.heappush(later, (number * period // counts[dataset], dataset, number + 1))
    return order

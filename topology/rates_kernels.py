"""The compiled loops of progressive filling; see `rates` for what it computes.

A binary heap holds links by the fair share that they would give. A share can only rise as other links freeze flows, so
the heap's keys are lower bounds: the top is recomputed when it is taken, and sinks back where it has risen.
"""

from __future__ import annotations

import numba as nb
import numpy as np
from numpy.typing import NDArray

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]
_Bools = NDArray[np.bool_]


@nb.njit(cache=True)
def caps(paths: _Ints, capacity: _Floats) -> tuple[_Floats, _Ints]:
    """The least capacity on every path, and whose it is."""
    least, where = np.full(len(paths), np.inf), np.full(len(paths), -1, np.int64)
    for flow in range(len(paths)):
        for link in paths[flow]:
            if link >= 0 and capacity[link] < least[flow]:
                least[flow], where[flow] = capacity[link], link
    return least, where


@nb.njit(cache=True)
def narrow(paths: _Ints, number: _Ints) -> _Ints:
    """Paths over the numbered links alone, by their numbers (below 0: none), -1 behind."""
    narrowed = np.full(paths.shape, -1, np.int64)
    for flow in range(len(paths)):
        column = 0
        for link in paths[flow]:
            if link >= 0 and number[link] >= 0:
                narrowed[flow, column] = number[link]
                column += 1
    return narrowed


@nb.njit(cache=True)
def gather(paths: _Ints, num_links: int) -> tuple[_Ints, _Ints]:
    """Flows by link, a counting sort: those of link l are `members[start[l]:start[l + 1]]`, in order."""
    start = np.zeros(num_links + 2, np.int64)  # shifted by one: while members are put in, start[l + 1] is where
    for flow in range(len(paths)):
        for link in paths[flow]:
            if link >= 0:
                start[link + 2] += 1
    for link in range(num_links):
        start[link + 2] += start[link + 1]
    members = np.empty(start[num_links + 1], np.int64)
    for flow in range(len(paths)):
        for link in paths[flow]:
            if link >= 0:
                members[start[link + 1]] = flow
                start[link + 1] += 1
    return start[: num_links + 1], members


@nb.njit(cache=True)
def fill(
    tight: _Ints, left: _Floats, start: _Ints, members: _Ints, by_cap: _Ints, rate: _Floats, bottleneck: _Ints
) -> None:
    """Lower `rate`, which holds the flows' caps, to the fair rates, and set `bottleneck` where a tight link holds.

    Args:
        tight: paths over the tight links as `narrow` gives them.
        left: of every tight link, its capacity and its number of flows; used up.
        start, members: flows by tight link, as `gather` gives them.
        by_cap: the flows with a tight link, by rising cap.
    """
    size = len(left)
    heap, key = np.arange(size), left[:, 0] / left[:, 1]
    for position in range(size // 2 - 1, -1, -1):
        _sink(heap, key, position, size)
    free = np.zeros(len(tight), np.bool_)
    for flow in by_cap:
        free[flow] = True
    turn = 0
    while size > 0:
        link = heap[0]
        if left[link, 1] > 0:
            share = left[link, 0] / left[link, 1]
            if share > key[0] * (1 + 1e-12):
                key[0] = share
                _sink(heap, key, 0, size)
                continue
            while turn < len(by_cap) and (not free[by_cap[turn]] or rate[by_cap[turn]] < share):
                # It reaches its cap before the link is full: the link's share rises.
                _freeze(by_cap[turn], rate[by_cap[turn]], free, tight, left)
                turn += 1
            if left[link, 1] == 0 or left[link, 0] / left[link, 1] > share:
                continue
            for flow in members[start[link] : start[link + 1]]:
                if _freeze(flow, share, free, tight, left):
                    rate[flow], bottleneck[flow] = share, link
        size -= 1
        heap[0], key[0] = heap[size], key[size]
        _sink(heap, key, 0, size)


@nb.njit(cache=True)
def _freeze(flow: int, rate: float, free: _Bools, tight: _Ints, left: _Floats) -> bool:
    """Take the rate of a flow off the tight links of its path; False where it is frozen already."""
    if not free[flow]:
        return False
    free[flow] = False
    for link in tight[flow]:
        if link < 0:
            break
        left[link, 0] = max(0.0, left[link, 0] - rate)
        left[link, 1] -= 1
    return True


@nb.njit(cache=True)
def _sink(links: _Ints, key: _Floats, position: int, size: int) -> None:
    """Restore the heap below `position`; equal keys stand by link id, so that runs agree."""
    if position >= size:
        return
    link, own = links[position], key[position]
    while True:
        child = 2 * position + 1
        if child >= size:
            break
        other = child + 1
        if other < size and _before(key[other], links[other], key[child], links[child]):
            child = other
        if not _before(key[child], links[child], own, link):
            break
        links[position], key[position] = links[child], key[child]
        position = child
    links[position], key[position] = link, own


@nb.njit(cache=True)
def _before(key: float, link: int, other_key: float, other_link: int) -> bool:
    return bool(key < other_key or (key == other_key and link < other_link))

"""The compiled loops of progressive filling; see `rates` for what it computes.

In a round every link offers its waiting flows an even share of what it has left. A flow waits for the least offer on
its path, or for its own cap where that is lower. A link whose flows all wait for it is the bottleneck of them all, and
they are frozen at its offer; the others go into the next round. So all links that are first in their neighbourhood go
at once, and a large fabric takes about ten rounds, where the book takes link after link. A chain of links that wait for
one another takes a round each.
"""

from __future__ import annotations

import numba as nb
import numpy as np
from numpy.typing import NDArray

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]

# Offers that are equal but for rounding are taken together.
_EQUAL = 1e-12


@nb.njit(cache=True)
def caps(paths: _Ints, capacity: _Floats) -> tuple[_Floats, _Ints]:
    """The least capacity on every path, and whose it is; infinite, and -1, where a path has no link."""
    least, where = np.full(len(paths), np.inf), np.full(len(paths), -1, np.int64)
    for flow in range(len(paths)):
        for link in paths[flow]:
            if link >= 0 and capacity[link] < least[flow]:
                least[flow], where[flow] = capacity[link], link
    return least, where


@nb.njit(cache=True)
def add_up(paths: _Ints, amounts: _Floats, num_links: int) -> _Floats:
    """Sum of `amounts`, one a flow, over the flows on each link."""
    total = np.zeros(num_links)
    for flow in range(len(paths)):
        for link in paths[flow]:
            if link >= 0:
                total[link] += amounts[flow]
    return total


@nb.njit(cache=True)
def narrow(paths: _Ints, number: _Ints) -> _Ints:
    """Paths over the numbered links alone, by their numbers (below 0: none), -1 after them."""
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
def fill(tight: _Ints, left: _Floats, rate: _Floats, bottleneck: _Ints) -> None:
    """Lower `rate`, which holds the flows' caps, to the fair rates, and set `bottleneck` where a tight link holds.

    Args:
        tight: paths over the tight links as `narrow` gives them.
        left: capacity of every tight link; used up.
    """
    waiting = np.flatnonzero(tight[:, 0] >= 0)
    flows = add_up(tight, np.ones(len(tight)), len(left))
    least = np.empty(len(waiting))
    size = len(waiting)
    while size > 0:
        share = left / flows  # a link without waiting flows is not read again
        lowest = np.full(len(left), np.inf)
        for place in range(size):
            _offer(tight[waiting[place]], rate[waiting[place]], share, lowest, least, place)
        kept = 0
        for place in range(size):
            flow = waiting[place]
            holds = _holds(tight[flow], least[place], share, lowest)
            if rate[flow] <= least[place] or holds >= 0:
                if rate[flow] > least[place]:
                    bottleneck[flow] = holds
                rate[flow] = least[place]
                for link in tight[flow]:
                    if link < 0:
                        break
                    left[link] = max(0.0, left[link] - rate[flow])
                    flows[link] -= 1
            else:
                waiting[kept] = flow
                kept += 1
        size = kept


@nb.njit(cache=True)
def _offer(links: _Ints, cap: float, share: _Floats, lowest: _Floats, least: _Floats, place: int) -> None:
    """Set the rate that a flow waits for, and on each of its links the lowest that any flow there waits for."""
    rate = cap
    for link in links:
        if link < 0:
            break
        rate = min(rate, share[link])
    least[place] = rate
    for link in links:
        if link < 0:
            break
        lowest[link] = min(lowest[link], rate)


@nb.njit(cache=True)
def _holds(links: _Ints, rate: float, share: _Floats, lowest: _Floats) -> int:
    """Return the link that a flow and all other flows on it wait for; -1 where there is none."""
    for link in links:
        if link < 0:
            break
        if share[link] <= rate * (1 + _EQUAL) and lowest[link] >= share[link] * (1 - _EQUAL):
            return int(link)
    return -1


@nb.njit(cache=True)
def most_crowded(begin: _Floats, end: _Floats, up_tor: _Ints, down_tor: _Ints, num_tors: int) -> float:
    """The first beginning of a flow at which most pairs of flows under way leave by one ToR or arrive by one."""
    begins, ends = np.argsort(begin, kind="mergesort"), np.argsort(end, kind="mergesort")
    up, down = np.zeros(num_tors, np.int64), np.zeros(num_tors, np.int64)
    pairs, most, at = 0, -1, 0.0
    gone = 0
    for flow in begins:
        while end[ends[gone]] <= begin[flow]:
            left = ends[gone]
            up[up_tor[left]] -= 1
            down[down_tor[left]] -= 1
            pairs -= up[up_tor[left]] + down[down_tor[left]]
            gone += 1
        pairs += up[up_tor[flow]] + down[down_tor[flow]]
        up[up_tor[flow]] += 1
        down[down_tor[flow]] += 1
        if pairs > most:
            most, at = pairs, begin[flow]
    return at

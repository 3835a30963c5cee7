"""Bisection of a failing group to its bad member or bad link.

A bad member shows in every group that contains it, a bad link in every group with both its ends. It takes about
2 log2(N) trials for a member, twice that for a link. Only one fault is found at a time: exclude it and repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

Trial = Callable[[tuple[int, ...]], bool]
"""Function that returns True if a group of at least two shows the fault."""


class Culprits(NamedTuple):
    """Result: bad members, else one bad link between two, else nothing if no smaller group shows the fault."""

    members: tuple[int, ...] = ()
    link: tuple[int, ...] = ()


def find_culprits(group: Sequence[int], is_bad: Trial, controls: Sequence[int] = ()) -> Culprits:
    """Find the smallest cause of a fault that the whole group shows.

    Args:
        group: at least two members.
        is_bad: tries a group.
        controls: healthy members outside the group.
    """
    pair = _smallest(tuple(group), is_bad)
    if len(pair) != 2:
        return Culprits(link=pair) if pair else Culprits()
    others = [one for one in (*controls, *group) if one not in pair]
    if not others:
        return Culprits(link=pair)
    # A control may itself be bad: if both ends look bad with the first one, the second one decides.
    for control in others[:2]:
        bad = tuple(end for end in pair if is_bad((end, control)))
        if len(bad) < 2:
            return Culprits(members=bad) if bad else Culprits(link=pair)
    return Culprits(members=pair)


def _smallest(group: tuple[int, ...], is_bad: Trial) -> tuple[int, ...]:
    """Return a bad group that is a pair or has no bad half."""
    if len(group) <= 2:
        return group
    first, second = _halves(group)
    for half in (first, second):
        if len(half) > 1 and is_bad(half):
            return _smallest(half, is_bad)
    # Neither half is bad by itself (a single member cannot be tried): the fault needs members of both.
    second = _shrink(second, first, is_bad)
    first = _shrink(first, second, is_bad)
    return first + second


def _shrink(part: tuple[int, ...], fixed: tuple[int, ...], is_bad: Trial) -> tuple[int, ...]:
    """Shrink a part as long as it is bad together with `fixed`."""
    while len(part) > 1:
        smaller = next((half for half in _halves(part) if is_bad(half + fixed)), None)
        if smaller is None:
            return part
        part = smaller
    return part


def _halves(group: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    middle = (len(group) + 1) // 2
    return group[:middle], group[middle:]

"""Which members of a group spoil what the group does together: found by trying ever smaller groups.

A bad member shows in every group that it is in, a bad link where both of its ends are. About 2 log2(N) trials for a
member, twice that for a link. Left out: how a trial is judged, and two faults at once (find one, take it out, go on).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

Trial = Callable[[tuple[int, ...]], bool]
"""Whether a group of at least two shows the fault."""


class Culprits(NamedTuple):
    """What was found: members, or else one link between two, or nothing where no smaller group shows the fault."""

    members: tuple[int, ...] = ()
    link: tuple[int, ...] = ()


def find_culprits(group: Sequence[int], is_bad: Trial, witnesses: Sequence[int] = ()) -> Culprits:
    """The smallest cause of a fault that the whole group shows.

    Args:
        group: at least two.
        is_bad: tries a group.
        witnesses: others, outside of the group, that are known to be good.
    """
    pair = _smallest(tuple(group), is_bad)
    if len(pair) != 2:
        return Culprits(link=pair) if pair else Culprits()
    others = [one for one in (*witnesses, *group) if one not in pair]
    if not others:
        return Culprits(link=pair)
    # A witness may itself be bad: the second one decides where both ends look bad with the first.
    for witness in others[:2]:
        bad = tuple(end for end in pair if is_bad((end, witness)))
        if len(bad) < 2:
            return Culprits(members=bad) if bad else Culprits(link=pair)
    return Culprits(members=pair)


def _smallest(group: tuple[int, ...], is_bad: Trial) -> tuple[int, ...]:
    """A bad group that has no bad half, or that is a pair."""
    if len(group) <= 2:
        return group
    first, second = _halves(group)
    for half in (first, second):
        if len(half) > 1 and is_bad(half):
            return _smallest(half, is_bad)
    # Neither half is bad by itself (one alone cannot be tried): the fault needs members of both.
    second = _shrink(second, first, is_bad)
    first = _shrink(first, second, is_bad)
    return first + second


def _shrink(part: tuple[int, ...], beside: tuple[int, ...], is_bad: Trial) -> tuple[int, ...]:
    """A smaller part that is still bad together with the members beside it."""
    while len(part) > 1:
        smaller = next((half for half in _halves(part) if is_bad(half + beside)), None)
        if smaller is None:
            return part
        part = smaller
    return part


def _halves(group: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    middle = (len(group) + 1) // 2
    return group[:middle], group[middle:]

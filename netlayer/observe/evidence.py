"""What is known of the collectives of a job, whoever wrote it down: groups, and what every rank launched in them.

Collectives of a group are numbered on each rank for itself; equal numbers mean the same collective, or should. Sends
and receives are numbered for each pair and direction. Left out: the data, and reduction operators, which no recorder
writes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from netlayer.layout import describe_ranks

Sizes = tuple[tuple[int, ...], ...]

_SPELLINGS = ("_into_tensor", "_tensor", "_single", "_coalesced", "_base", "_oop")
_FAMILIES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "all_reduce_barrier": "barrier",
    "alltoall": "all_to_all",
}
_UNEVEN = ("all_to_all", "_v")  # kinds whose ranks may rightly differ in size
_ONE_SIDED = {"scatter": "inputs", "gather": "outputs"}  # what only the root holds


class Signature(NamedTuple):
    """What must be equal on all ranks of a collective; None where it need not be."""

    kind: str
    num_elements: tuple[int | None, int | None]
    dtypes: tuple[tuple[str, ...] | None, tuple[str, ...] | None]

    def difference(self, other: Signature) -> str:
        """What two ranks disagree in, in words; empty where they agree."""
        names = ("collective", "size", "dtype")
        return next((name for name, a, b in zip(names, self, other, strict=True) if a != b), "")


@dataclass(frozen=True)
class Launch:
    """One collective, send or receive as a rank launched it.

    Args:
        seq: its number in the group, or in the pair and direction.
        kind: `all_reduce`, `_all_gather_base`, `send`; joined by + where several run as one.
        order: position among everything that the rank launched.
        done: whether it is known to be complete on this rank.
        inputs, outputs: shapes of the tensors.
        input_dtypes, output_dtypes: names as the recorder writes them.
        num_bytes: where shapes are not known.
        created_ns: when, on the rank's own clock; 0 where not known.
        place: the line of the program that launched it.
        recorded: its number as the recorder counts, over all sends and receives of a group; 0: `seq`.
        started: whether it is known to run on the device; False where nobody wrote that down.
    """

    seq: int
    kind: str
    order: int
    done: bool
    inputs: Sizes = ()
    outputs: Sizes = ()
    input_dtypes: tuple[str, ...] = ()
    output_dtypes: tuple[str, ...] = ()
    num_bytes: int | None = None
    created_ns: int = 0
    place: str = ""
    recorded: int = 0
    started: bool = False

    def __str__(self) -> str:
        return f"{self.kind} #{self.seq} ({self.size})"

    @property
    def size(self) -> str:
        """Shapes and dtypes in words: `[1024, 4] Float`, `[4] -> [16] Float`, `3 tensors of 96 elements Float`."""
        if self.num_bytes is not None:
            return f"{self.num_bytes:,} bytes"
        given, made = _words(self.inputs), _words(self.outputs)
        shown = given if given == made or not made else f"{given} -> {made}" if given else made
        dtypes = "/".join(dict.fromkeys(self.input_dtypes + self.output_dtypes))
        return " ".join(filter(None, (shown, dtypes))) or "no data"

    @property
    def counterpart(self) -> tuple[str, int]:
        """Equal on ranks that do the same work in groups of the same role."""
        return (self.kind if self.kind in ("send", "recv") else "", self.recorded or self.seq)

    @cached_property
    def signature(self) -> Signature:
        """What the other ranks must have launched too."""
        kind = "+".join(map(family, self.kind.split("+")))
        sides: tuple[Sizes, Sizes] = (self.inputs, self.outputs)
        dtypes: tuple[tuple[str, ...], tuple[str, ...]] = (self.input_dtypes, self.output_dtypes)
        if kind in ("send", "recv"):
            kind, sides, dtypes = "send/recv", (self.inputs or self.outputs, ()), (self.input_dtypes or dtypes[1], ())
        counts: list[int | None] = [sum(map(math.prod, side)) for side in sides]
        names: list[tuple[str, ...] | None] = [tuple(sorted(set(side))) for side in dtypes]
        if self.num_bytes is not None:
            counts[0] = self.num_bytes
        if any(mark in self.kind for mark in _UNEVEN):
            counts = [None, None]
        if kind in _ONE_SIDED:
            side = 0 if _ONE_SIDED[kind] == "inputs" else 1
            counts[side] = names[side] = None
        return Signature(kind, (counts[0], counts[1]), (names[0], names[1]))


@dataclass(frozen=True)
class Group:
    """A process group, or one direction between two ranks of it.

    Args:
        key: the same on all its ranks, and of no other group.
        name: what the program calls it.
        role: shared with groups that do the same work elsewhere: every data-parallel group has `dp`.
        ranks: in the world, in order.
        sender: of a direction: the rank that sends; the other one receives.
    """

    key: str
    name: str
    role: str
    ranks: tuple[int, ...]
    sender: int | None = None

    def __str__(self) -> str:
        return f"group {self.name} ({describe_ranks(self.ranks)})"


@dataclass
class RankLog:
    """What one rank launched, by group and number.

    Args:
        rank: in the world.
        source: the file that says so.
        launches: by key of the group, in order of launch.
        whole: whether it reaches back to the start; older entries may have been overwritten.
        doing: what it does now, as a phrase; empty where not known.
    """

    rank: int
    source: str
    launches: dict[str, dict[int, Launch]] = field(default_factory=dict)
    whole: bool = True
    doing: str = ""

    def last(self, key: str) -> Launch | None:
        """Its last launch in a group, of those that are written down."""
        return next(reversed(self.launches[key].values()), None) if key in self.launches else None

    def first_open(self, key: str) -> Launch | None:
        """The first launch in a group that is not complete."""
        return next((launch for launch in self.launches.get(key, {}).values() if not launch.done), None)

    @cached_property
    def newest(self) -> tuple[str, Launch] | None:
        """The last launch in any group, with the key of that group."""
        pairs = ((key, launch) for key, of_group in self.launches.items() for launch in of_group.values())
        return max(pairs, key=lambda pair: pair[1].order, default=None)


@dataclass(frozen=True)
class Evidence:
    """Everything that the files say of one job.

    Args:
        groups: by key.
        ranks: logs by rank.
        world: every rank that is known to exist.
        damaged: ranks whose file is there but cannot be used, with the reason.
        unrecorded: what these files cannot show, in words; empty where they show all.
    """

    groups: Mapping[str, Group]
    ranks: Mapping[int, RankLog]
    world: Sequence[int]
    damaged: Mapping[int, str] = field(default_factory=dict)
    unrecorded: str = ""

    @property
    def silent(self) -> list[int]:
        """Ranks that left nothing."""
        return [rank for rank in self.world if rank not in self.ranks]


def family(kind: str) -> str:
    """One name for the spellings of a collective: `_all_gather_base` and `all_gather_into_tensor` are `all_gather`."""
    name = kind.lower().lstrip("_")
    for spelling in _SPELLINGS:
        name = name.removesuffix(spelling)
    for short, long in _FAMILIES.items():
        name = long if name == short else name
    return name


def _words(shapes: Iterable[tuple[int, ...]]) -> str:
    listed = list(shapes)
    if len(listed) > 2:
        return f"{len(listed)} tensors of {sum(map(math.prod, listed)):,} elements"
    return " ".join(str(list(shape)) for shape in listed)

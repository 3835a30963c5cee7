"""Data model for the recorded collectives of a job, whatever recorder wrote them: groups, and launches by rank.

Each rank numbers the collectives of a group by itself; equal numbers should mean the same collective. Sends and
receives are numbered for each pair and direction. Not covered: tensor contents and reduction operators, which no
recorder writes.
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
TOGETHER = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "barrier")
"""Families of collectives that end on no rank before all have launched them."""
_UNEVEN = ("all_to_all", "alltoall", "_v")  # kinds whose sizes may legitimately differ between ranks
_ONE_SIDED = {"scatter": "inputs", "gather": "outputs"}  # tensors that only the root has


class Signature(NamedTuple):
    """Properties that must be equal on all ranks of a collective; None for those that need not be."""

    kind: str
    num_elements: tuple[int | None, int | None]
    dtypes: tuple[tuple[str, ...] | None, tuple[str, ...] | None]

    def difference(self, other: Signature) -> str:
        """Return the first property that differs ("collective", "size", "dtype"); empty if none does."""
        names = ("collective", "size", "dtype")
        return next((name for name, a, b in zip(names, self, other, strict=True) if a != b), "")


@dataclass(frozen=True)
class Launch:
    """One collective, send or receive as a rank launched it.

    Args:
        seq: its number in the group, or in the pair and direction.
        kind: `all_reduce`, `_all_gather_base`, `send`; joined by + where several run as one.
        order: position among all launches of the rank.
        done: True if it is known to be complete on this rank.
        inputs, outputs: shapes of the tensors.
        input_dtypes, output_dtypes: names as the recorder writes them.
        num_bytes: size where shapes are not recorded, else None.
        created_ns: launch time by the rank's own clock; 0 if not recorded.
        place: line of the program that launched it.
        recorded: the recorder's own number, which counts all sends and receives of a group; 0: same as `seq`.
        started: True if it is known to run on the device; False also where the recorder does not tell.
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
        """Shapes and dtypes as text: `[1024, 4] Float`, `[4] -> [16] Float`, `3 tensors of 96 elements Float`."""
        if self.num_bytes is not None:
            return f"{self.num_bytes:,} bytes"
        inputs, outputs = _words(self.inputs), _words(self.outputs)
        shapes = inputs if inputs == outputs or not outputs else f"{inputs} -> {outputs}" if inputs else outputs
        dtypes = "/".join(dict.fromkeys(self.input_dtypes + self.output_dtypes))
        return " ".join(filter(None, (shapes, dtypes))) or "no data"

    @property
    def counterpart(self) -> tuple[str, int]:
        """Key that is equal for the same operation in other groups of the same role."""
        return (self.kind if self.kind in ("send", "recv") else "", self.recorded or self.seq)

    @cached_property
    def signature(self) -> Signature:
        """Properties that this launch must share with those of the other ranks."""
        kind = "+".join(map(family, self.kind.split("+")))
        sides: tuple[Sizes, Sizes] = (self.inputs, self.outputs)
        dtypes: tuple[tuple[str, ...], tuple[str, ...]] = (self.input_dtypes, self.output_dtypes)
        if kind in ("send", "recv"):
            kind, sides, dtypes = "send/recv", (self.inputs or self.outputs, ()), (self.input_dtypes or dtypes[1], ())
        counts: list[int | None] = [sum(map(math.prod, side)) for side in sides]
        names: list[tuple[str, ...] | None] = [tuple(sorted(set(side))) for side in dtypes]
        if self.num_bytes is not None:
            counts[0] = self.num_bytes
        if any(mark in self.kind.lower() for mark in _UNEVEN):
            counts = [None, None]
        if kind in _ONE_SIDED:
            side = 0 if _ONE_SIDED[kind] == "inputs" else 1
            counts[side] = names[side] = None
        return Signature(kind, (counts[0], counts[1]), (names[0], names[1]))


@dataclass(frozen=True)
class Group:
    """A process group, or one direction between two ranks of it.

    Args:
        key: unique identity, equal on all its ranks.
        name: name that the program gives it.
        role: shared by groups that do the same work on other ranks: every data-parallel group has `dp`.
        ranks: global ranks, in order.
        sender: for one direction of a pair, the sending rank; None for a whole group.
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
    """Recorded launches of one rank, by group and number.

    Args:
        rank: global rank.
        source: path of the file.
        launches: by key of the group, in order of launch.
        whole: True if it reaches back to the start; False if older entries were overwritten.
        doing: current activity as a phrase; empty if not known.
    """

    rank: int
    source: str
    launches: dict[str, dict[int, Launch]] = field(default_factory=dict)
    whole: bool = True
    doing: str = ""

    def last(self, key: str) -> Launch | None:
        """Return the last recorded launch in a group; None if there is none."""
        return next(reversed(self.launches[key].values()), None) if key in self.launches else None

    def first_open(self, key: str) -> Launch | None:
        """Return the first incomplete launch in a group; None if all are complete."""
        return next((launch for launch in self.launches.get(key, {}).values() if not launch.done), None)

    @cached_property
    def newest(self) -> tuple[str, Launch] | None:
        """Last launch in any group, with the key of that group."""
        pairs = ((key, launch) for key, of_group in self.launches.items() for launch in of_group.values())
        return max(pairs, key=lambda pair: pair[1].order, default=None)


@dataclass(frozen=True)
class Evidence:
    """Recorded groups and launches of one job, from all its files.

    Args:
        groups: by key.
        ranks: logs by rank.
        world: all ranks that are known to exist.
        damaged: ranks whose file exists but cannot be used, with the reason.
        blind_spot: sentence on what these files cannot show; empty if they are complete.
    """

    groups: Mapping[str, Group]
    ranks: Mapping[int, RankLog]
    world: Sequence[int]
    damaged: Mapping[int, str] = field(default_factory=dict)
    blind_spot: str = ""

    @property
    def silent(self) -> list[int]:
        """Ranks without a usable file."""
        return [rank for rank in self.world if rank not in self.ranks]


def family(kind: str) -> str:
    """Return the common name of a collective: `all_gather` for `_all_gather_base` and `all_gather_into_tensor`."""
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

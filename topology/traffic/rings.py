"""The rings, trees and pairs that NCCL makes of a group of ranks, as edges between servers.

Ranks of one server form a chain over NVLink; between servers channel c enters and leaves by the same NIC, the c-th of
those that the group's ranks of a server use, so that every channel stays on its rail (NCCL_CROSS_NIC=0 and rings that
agree). Where the servers of a group hold different rails, for the group does not begin and end with a server, a channel
crosses rails; there are as many as the server with fewest NICs of the group allows (NCCL takes the least of all ranks).
Servers stand in rank order. Not covered: NCCL's search over PCIe paths, CollNet and NVLS.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Edges(NamedTuple):
    """Connections between servers: rank to rank, the row of the group table, and the share of its bytes."""

    src_rank: Ints
    dst_rank: Ints
    row: Ints
    share: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Segments:
    """The runs of a group's ranks that share a server: one entry a group and server, groups after one another.

    Args:
        table: the groups, shape (num_groups, degree); ranks of one server stand together in a row.
        start, length: position of a segment in the flat table.
        num_nics: NICs that its ranks use.
        row: its group; `place` counts the segments of a row from 0, `row_size` of them.
    """

    table: Ints
    start: Ints
    length: Ints
    num_nics: Ints
    row: Ints
    place: Ints
    row_size: Ints

    @classmethod
    def of(cls, table: Ints, server: Ints, nic: Ints) -> Segments:
        """Cut the groups; `server` and `nic` of each rank have the table's shape."""
        first = np.ones(table.shape, dtype=np.bool_)
        first[:, 1:] = server[:, 1:] != server[:, :-1]
        other_nic = first.copy()
        other_nic[:, 1:] |= nic[:, 1:] != nic[:, :-1]
        start = np.flatnonzero(first)
        row = start // table.shape[1]
        row_sizes = np.bincount(row, minlength=len(table))
        return cls(
            table=table,
            start=start,
            length=np.diff(start, append=table.size),
            num_nics=np.add.reduceat(other_nic.ravel().astype(np.int64), start),
            row=row,
            place=np.arange(len(start)) - (np.cumsum(row_sizes) - row_sizes)[row],
            row_size=row_sizes[row],
        )

    def channels(self, num_channels: int | None, per_nic: int = 1) -> Ints:
        """Return channels of each group: `num_channels`, or `per_nic` for each NIC that it has in every server."""
        if num_channels is not None:
            return np.full(len(self.table), num_channels, dtype=np.int64)
        return per_nic * self.least_nics

    @property
    def least_nics(self) -> Ints:
        """NICs that each group has in every one of its servers."""
        return np.asarray(np.minimum.reduceat(self.num_nics, np.flatnonzero(self.place == 0)))

    def at(self, segment: Ints, place: Ints) -> Ints:
        """The segment at another place of the same row."""
        return segment - self.place[segment] + place

    def rank(self, segment: Ints, channel: Ints) -> Ints:
        """Return the rank next to the NIC that a channel uses in a segment."""
        nic = channel % self.least_nics[self.row[segment]]
        place = nic * self.length[segment] // self.num_nics[segment]
        return np.asarray(self.table.ravel()[self.start[segment] + place])

    def on_channels(self, channels: Ints) -> tuple[Ints, Ints]:
        """Every segment on every channel of its group: (segment, channel)."""
        each = channels[self.row]
        segment = np.repeat(np.arange(len(self.start), dtype=np.int64), each)
        return segment, np.arange(len(segment)) - (np.cumsum(each) - each)[segment]

    def edges(self, source: Ints, target: Ints, channel: Ints, channels: Ints) -> Edges:
        """Return edges between segments on these channels, but for those that stay in their segment."""
        leaves = source != target
        source, target, channel = source[leaves], target[leaves], channel[leaves]
        row = self.row[source]
        return Edges(self.rank(source, channel), self.rank(target, channel), row, 1 / channels[row])


def ring(segments: Segments, num_channels: int | None = None) -> Edges:
    """Each server to the next one of its group, on every channel; a channel carries its part of the data."""
    channels = segments.channels(num_channels)
    source, channel = segments.on_channels(channels)
    target = segments.at(source, (segments.place[source] + 1) % segments.row_size[source])
    return segments.edges(source, target, channel, channels)


def tree(segments: Segments, num_channels: int | None = None) -> tuple[Edges, Edges]:
    """Edges (up, down) of NCCL's double binary tree: half of the channels on each of two trees.

    A server that is a leaf of one tree is an inner node of the other, so that both together load all alike (Sanders,
    Speck, Traeff: Two-tree algorithms for full bandwidth broadcast, reduction and scan, 2009).
    """
    channels = segments.channels(num_channels, per_nic=2)
    child, channel = segments.on_channels(channels)
    of_child = channels[segments.row[child]]
    second = (2 * channel >= of_child) & (of_child > 1)
    place, size = segments.place[child], segments.row_size[child]
    parent = np.where(second, _second_parent(place, size), tree_parent(place, size))
    upper = segments.at(child, parent)
    return segments.edges(child, upper, channel, channels), segments.edges(upper, child, channel, channels)


def tree_parent(place: Ints, size: Ints) -> Ints:
    """Parent of each place in a binary tree over 0..size-1 whose leaves are the odd places; the root 0 has itself.

    With 2^k the lowest bit of a place, its parent has that bit cleared and the next set, or cleared alone where that
    would lie outside.
    """
    lowest = place & -place
    parent = (place ^ lowest) | (lowest << 1)
    return np.asarray(np.where(place == 0, 0, np.where(parent < size, parent, place ^ lowest)))


def all_pairs(segments: Segments) -> Edges:
    """Every rank to every rank of its group in another server, a share of 1 / degree each.

    Data for a GPU passes over NVLink to the GPU of its own server that is on the target's rail, and leaves by that
    one's NIC (NCCL's PXN), where the group has a rank there.
    """
    groups, degree = segments.table.shape
    segment_of = np.repeat(np.arange(len(segments.start)), segments.length).reshape(groups, degree)
    position = (np.arange(groups * degree) - np.repeat(segments.start, segments.length)).reshape(groups, degree)
    shape = (groups, degree, degree)
    source, target = (np.broadcast_to(each, shape) for each in (segment_of[:, :, None], segment_of[:, None, :]))
    crosses = source != target
    source, slot = source[crosses], np.broadcast_to(position[:, None, :], shape)[crosses]
    sender = segments.table.ravel()[segments.start[source] + slot % segments.length[source]]
    receiver = np.broadcast_to(segments.table[:, None, :], shape)[crosses]
    return Edges(sender, receiver, segments.row[source], np.full(len(source), 1 / degree))


def _second_parent(place: Ints, size: Ints) -> Ints:
    """The other tree: mirrored where the number is even, shifted by one where it is odd."""
    even = size % 2 == 0
    moved = np.where(even, size - 1 - place, (place - 1) % size)
    parent = tree_parent(moved, size)
    return np.asarray(np.where(even, size - 1 - parent, (parent + 1) % size))

"""The interface of a fabric, be it a `Clos` by arithmetic or a `Graph` that somebody has wired.

Failure analysis, placement, port plans and reports are written against `Fabric` alone. Two classes have it:
`clos.Clos`, where all of it is closed form, and `imported.ImportedFabric`, which infers tiers, ToR sets, pods, rails.
Not covered: what only a planned CLOS has (the ToR split, its picture, optics); commands say so where they omit it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # hashes know fabrics, not the other way round
    from topology.ecmp.hashing import Ecmp

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# New kinds at the end: the place of a kind is part of the seed by which parts are drawn.
PartKind = Literal[
    "nic-link", "tor-link", "core-link", "optic-down", "optic-up", "tor", "spine", "core", "rail", "peer-link"
]
PART_KINDS: tuple[PartKind, ...] = get_args(PartKind)


class Fabric(Protocol):
    """A fabric. NIC n is the n % nics_per_server-th of server n // nics_per_server; links are directed, by id.

    *Tiers* number classes of directed links, *parts* are what can fail. Arrays over NICs, servers and links are indexed
    by their number; methods take and give numbers as arrays of any one shape.
    """

    # Sizes
    @property
    def num_links(self) -> int: ...
    @property
    def num_nics(self) -> int:
        """Numbers of NICs; where servers differ, not each of them is a NIC (`nics`)."""

    @property
    def num_servers(self) -> int: ...
    @property
    def nics_per_server(self) -> int: ...

    # Links and their tiers
    @property
    def link_src(self) -> Ints: ...
    @property
    def link_dst(self) -> Ints: ...
    @property
    def link_bps(self) -> Floats: ...
    @property
    def link_tier(self) -> NDArray[np.signedinteger[Any]]: ...
    @property
    def tier_labels(self) -> Sequence[str]:
        """Name of each tier: `tor-spine`, or where heights alone are known `switch1-switch2`."""

    @property
    def nic_tiers(self) -> Sequence[int]:
        """Tiers of the NICs' own links."""

    @property
    def hashed_tiers(self) -> Sequence[int]:
        """Tiers whose links a hash chooses: those between switches."""

    @property
    def core_tier(self) -> int | None:
        """Tier of the links up to the core; None where there is none."""

    @property
    def cable_links(self) -> Sequence[slice | Ints]:
        """Each cable once, by one of its two links; a slice or an array for each class of cables."""

    def tier_links(self, tier: int) -> slice | Ints: ...
    def links_on(self, paths: Ints, tiers: Sequence[int]) -> Ints:
        """Paths, shape (..., hops), with their links of these tiers alone; other columns are NO_LINK or omitted."""

    # NICs
    @property
    def nics(self) -> Ints:
        """The numbers that are NICs, ascending."""

    @property
    def nic_bps(self) -> Floats: ...
    @property
    def rail_of(self) -> Ints:
        """Rail of each NIC of a server, shape (nics_per_server,)."""

    def nic_nodes(self, nic: Ints) -> Ints:
        """Node ids, by which drivers' queue pairs are drawn."""

    def nic_name(self, nic: int) -> str: ...
    def address_of(self, nic: Ints) -> NDArray[np.uint32]: ...
    def tor_of(self, nic: Ints) -> Ints:
        """Number of the ToR that a NIC hangs on, or of its set of ToRs where it hangs on several."""

    def network_of(self, nic: Ints) -> Ints:
        """Number of the network, of those that no switch joins."""

    def hops(self, src_nic: Ints, dst_nic: Ints) -> Ints:
        """Links of a shortest path; 0 to itself, or where there is none."""

    def leaves_pod(self, src_nic: Ints, dst_nic: Ints) -> Bools: ...

    # Where servers stand
    @property
    def full_servers(self) -> Bools:
        """Servers with all of their NICs: those that can hold ranks."""

    @property
    def tor_set(self) -> Ints:
        """ToR set of each server: servers of one set hang on the same ToRs."""

    @property
    def pod(self) -> Ints:
        """Pod of each server: ToRs of one pod share their spines."""

    @property
    def tor_set_width(self) -> int:
        """Servers that a ToR set is wired for, at most."""

    @property
    def set_distance(self) -> Floats:
        """Mean links above the NICs between servers of two ToR sets: on one rail, and across rails; shape (2, T, T).

        Shape (2, 0, 0) where pods say it all: 4 between pods, 2 between ToR sets and between rails.
        """

    # Paths and failures
    def route(self, src_nic: Ints, dst_nic: Ints, ecmp: Ecmp, alive: Bools | None = None) -> tuple[Ints, Bools]:
        """Return link ids, shape (num_flows, width), NO_LINK where a column is unused; and which flows have a path.

        Args:
            src_nic, dst_nic: endpoints; no flow may end where it begins.
            ecmp: the switches' choices, made for the headers of the same flows.
            alive: a mask over links, where not all are.

        Raises:
            ValueError: a flow's two ends are one NIC.
            ConfigError: all links are alive, and a flow has no path.
        """

    def count(self, kind: PartKind) -> int:
        """Return the number of parts of a kind."""

    def part_links(self, kind: PartKind, number: int) -> Ints:
        """Directed links that die with a part."""

    def part_name(self, kind: PartKind, number: int, /) -> str:
        """Return the devices' own names for a part; empty where its kind and number are all there is."""

    def unreachable_pairs(self, alive: Bools) -> tuple[int, int]:
        """Ordered pairs of NICs of different servers with no path, and all that the whole fabric joins."""

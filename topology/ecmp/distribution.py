"""Distribution of collisions: links of a tier by what they carry, and ToRs by how many of their flows collide.

Counted over several loads (seeds), apart for each design, traffic and hash. Not covered: means (compare).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from topology.ecmp.load import TOLERANCE, Load
from topology.ecmp.routing import NO_LINK
from topology.fabric.clos import Ints
from topology.traffic.job import Flows

Rows = list[dict[str, Any]]

# Demand over capacity of a link, up to and with each edge; rounding lifts none above its own.
USES = ("idle", "to 25%", "to 50%", "to 75%", "to 100%", "to 125%", "to 150%", "to 200%", "to 300%", "above")
_EDGES = np.array([0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0]) * (1 + TOLERANCE) + 1e-12


class Case(NamedTuple):
    """Case that a load belongs to."""

    split: bool
    traffic: str
    hash: str


class Distribution:
    """Add the loads of all seeds, then take the rows."""

    def __init__(self) -> None:
        self._labels: dict[Case, Sequence[str]] = {}
        self._links: dict[Case, NDArray[np.int64]] = {}
        self._tors: defaultdict[Case, list[Ints]] = defaultdict(list)

    def add(self, split: bool, traffic: str, hash_name: str, flows: Flows, loaded: Load) -> None:
        """Count one load of these flows."""
        self.add_links(split, traffic, hash_name, loaded)
        if loaded.pool_bps is None:  # a sprayed flow has no one uplink
            self._tors[Case(split, traffic, hash_name)].append(colliding_of_tors(flows, loaded))

    def add_links(self, split: bool, traffic: str, hash_name: str, loaded: Load) -> None:
        """Count the links of one load alone."""
        case = Case(split, traffic, hash_name)
        self._labels[case] = loaded.fabric.tier_labels
        self._links[case] = self._links.get(case, 0) + link_uses(loaded)

    def link_rows(self) -> Rows:
        """Links of each tier by demand over capacity, of all seeds together; `share` of the tier's."""
        return [
            {
                **case._asdict(),
                "tier": label,
                "use": use,
                "links": int(number),
                "share": number / counts[tier].sum(),
            }
            for case, counts in self._links.items()
            for tier, label in enumerate(self._labels[case])
            if counts[tier].any()
            for use, number in zip(USES, counts[tier].tolist(), strict=True)
        ]

    def tor_rows(self) -> Rows:
        """Count ToRs by how many of their flows are in collision on an uplink, of all seeds together."""
        rows: Rows = []
        for case, colliding in self._tors.items():
            counts = np.concatenate(colliding)
            values, times = np.unique(counts, return_counts=True)
            rows += [
                {**case._asdict(), "flows_in_collision": int(value), "tors": int(number), "share": number / len(counts)}
                for value, number in zip(values, times, strict=True)
            ]
        return rows


def link_uses(loaded: Load) -> NDArray[np.int64]:
    """Count the links of each tier (rows) by how much they are used (columns, `USES`)."""
    counts = np.zeros((len(loaded.fabric.tier_labels), len(USES)), dtype=np.int64)
    for tier in range(len(counts)):
        links = loaded.fabric.tier_links(tier)
        use = loaded.link_bps[links] / loaded.fabric.link_bps[links]
        counts[tier] = np.bincount(np.searchsorted(_EDGES, use), minlength=len(USES))
    return counts


def colliding_of_tors(flows: Flows, loaded: Load) -> Ints:
    """Count, for each ToR that sends flows to others, those on an uplink with more demand than capacity."""
    # The second link of a path is that by which it leaves its ToR, where it does.
    link = loaded.paths[:, 1]
    leaves = (link != NO_LINK) & np.isin(loaded.fabric.link_tier[link], loaded.fabric.hashed_tiers)
    tor = loaded.fabric.tor_of(flows.src_nic)[leaves]
    over = loaded.link_bps > loaded.fabric.link_bps * (1 + TOLERANCE)
    sent = np.bincount(tor)
    return np.bincount(tor, weights=over[link[leaves]], minlength=len(sent))[sent > 0].astype(np.int64)

"""Every directed link by name, and what flows put on it: the rows of `links.csv` and `flows.csv`.

Names are those of `cables.csv`, for a fabric of the arithmetic form and for an imported one alike. Not covered: who the
flows are (single_run, imported_run).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from netlayer.config.tree import ClusterConfig
from topology.ecmp.load import TOLERANCE
from topology.ecmp.routing import NO_LINK
from topology.fabric.cable_plan import CablePlan
from topology.fabric.clos import Clos, Tier
from topology.fabric.graph import Floats, Graph, Ints

if TYPE_CHECKING:
    import pandas as pd

Names = NDArray[np.object_]

PATH_ARROW = " > "


@dataclass(frozen=True, eq=False)
class Wires:
    """Arrays over directed links: the devices and ports at both ends, the tier as a label, the capacity.

    `host` names the node of each NIC, in the order in which flows count them.
    """

    src: Names
    dst: Names
    src_port: Names
    dst_port: Names
    tier: Names
    bps: Floats
    host: Names

    @classmethod
    def of_clos(cls, fabric: Clos, cluster: ClusterConfig) -> Wires:
        """The links of `fabric`, which was built from `cluster`, in its own order."""
        graph = CablePlan.build(cluster).graph()
        tier = fabric.link_tier.astype(np.int64)
        offset = np.arange(fabric.num_links) - fabric.tier_start[tier]
        down = tier > Tier.SPINE_CORE
        cable = np.where(down, fabric.tier_start[len(Tier) - 1 - tier] + offset, np.arange(fabric.num_links))
        labels = np.array([one.label for one in Tier], dtype=object)
        return cls._of(graph, cable, down, labels[tier], np.arange(fabric.design.num_nics))

    @classmethod
    def of_graph(cls, graph: Graph) -> Wires:
        """The links of an imported fabric; a tier is the pair of heights that it joins."""
        link, height = np.arange(graph.num_links), graph.level
        labels = np.array(
            ["host", *(f"switch{one}" for one in range(1, int(height.max()) + 1)), "unreached"], dtype=object
        )
        tier = labels[height[graph.link_src]] + "-" + labels[height[graph.link_dst]]
        return cls._of(graph, link % graph.num_cables, link >= graph.num_cables, tier, graph.hosts)

    @classmethod
    def _of(cls, graph: Graph, cable: Ints, down: NDArray[np.bool_], tier: Names, host: Ints) -> Wires:
        names = np.array(graph.names, dtype=object)
        a, b = graph.a[cable], graph.b[cable]
        a_port, b_port = (np.array(ports, dtype=object)[cable] for ports in (graph.a_port, graph.b_port))
        return cls(
            src=names[np.where(down, b, a)],
            dst=names[np.where(down, a, b)],
            src_port=np.where(down, b_port, a_port),
            dst_port=np.where(down, a_port, b_port),
            tier=tier,
            bps=graph.bps[cable],
            host=names[host],
        )

    @property
    def tiers(self) -> list[str]:
        """The labels, in the order in which they first appear."""
        return list(dict.fromkeys(self.tier.tolist()))

    def of_tier(self, label: str) -> Ints:
        """The links of one tier."""
        return np.flatnonzero(self.tier == label)

    def name(self, link: int) -> str:
        """`tor-s00-r1:33 > spine-p0-00:2`; ports only where they are known."""
        ends = ((self.src[link], self.src_port[link]), (self.dst[link], self.dst_port[link]))
        return PATH_ARROW.join(f"{device}:{port}" if port else device for device, port in ends)

    def paths(self, paths: Ints) -> list[str]:
        """Each flow's devices in order: `srv0000/nic0 > tor-s00-r0 > ... > srv0064/nic0`."""
        crossed = paths != NO_LINK
        first = np.where(crossed.any(axis=1), crossed.argmax(axis=1), 0)
        begin = paths[np.arange(len(paths)), first]
        texts = np.where(crossed.any(axis=1), self.src[begin], "")
        for column in range(paths.shape[1]):
            link = paths[:, column]
            texts = texts + np.where(crossed[:, column], PATH_ARROW + self.dst[link], "")
        return [str(text) for text in texts]


def link_table(wires: Wires, demand_bps: Floats, paths: Ints, path_names: bool = True) -> pd.DataFrame:
    """One row a link: both ends, tier, capacity, demand, flows, and whether its flows are in collision.

    Args:
        path_names: False where packets are sprayed, so that `paths` do not name each link of a flow.
    """
    import pandas as pd

    flows = np.bincount(paths[paths != NO_LINK], minlength=len(wires.bps))
    return pd.DataFrame(
        {
            "link": np.arange(len(wires.bps)),
            "tier": wires.tier,
            "src": wires.src,
            "src_port": wires.src_port,
            "dst": wires.dst,
            "dst_port": wires.dst_port,
            "capacity_bps": wires.bps,
            "demand_bps": demand_bps,
            "utilisation": demand_bps / wires.bps,
            "flows": flows if path_names else None,
            "collision": demand_bps > wires.bps * (1 + TOLERANCE),
        }
    )


def flow_table(
    names: Names | Sequence[str],
    ends: tuple[Ints, Ints],
    num_bytes: Floats,
    paths: Sequence[str],
    columns: dict[str, Any],
) -> pd.DataFrame:
    """One row a flow, in the order that flow numbers count: who sends to whom, bytes, path, and the `columns` given.

    Args:
        names: of what `ends` count.
        ends: sender and receiver of each flow.
    """
    import pandas as pd

    known = np.asarray(names, dtype=object)
    who = {"flow": np.arange(len(num_bytes)), "src": known[ends[0]], "dst": known[ends[1]]}
    return pd.DataFrame({**who, "bytes": num_bytes, "path": paths, **columns})

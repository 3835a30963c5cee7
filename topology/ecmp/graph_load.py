"""Effect of hashed flows on any fabric, a user's own: load, collisions, fair rates and bottlenecks, as for a `Clos`.

A tier is a pair of heights over the hosts (`host-switch1`, `switch1-switch2`, ...), each direction by itself. A host
node is a NIC: it shares the rate of its links evenly among the flows that it sends or receives. Not covered: spraying
and adaptive choice, routing other than ECMP over shortest paths, and (but in `times`) starts: all flows run together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netlayer.errors import ConfigError
from topology.ecmp.compare import ALL_TIERS, FROM_FILE
from topology.ecmp.graph_routing import UNREACHABLE, Routes, by_ecmp
from topology.ecmp.hashing import FIVE_TUPLE, Ecmp, Field, HashName
from topology.ecmp.load import TOLERANCE, Collisions
from topology.ecmp.routing import NO_LINK
from topology.ecmp.rows import TierCollisions
from topology.fabric.graph import Floats, Graph, Ints
from topology.fabric.wires import Wires
from topology.importers import read_fabric
from topology.rates.contention import times
from topology.rates.max_min import Rates, flows_on_links, max_min, sum_over_links
from topology.traffic.job import Flows, headers

Rows = list[dict[str, Any]]

_SHOWN_FLOWS = 32


@dataclass(frozen=True, eq=False)
class GraphLoad:
    """Flows on their paths over a graph, whose hosts they name by node id.

    Args:
        paths: link ids, shape (num_flows, most hops), NO_LINK after a path's end.
        flow_bps, link_bps: what each flow asks for, and the demand on each link.
        rates, free: max-min fair rates, and those that hold if only the flows' first and last links bounded them.
    """

    graph: Graph
    wires: Wires
    flows: Flows
    paths: Ints
    flow_bps: Floats
    link_bps: Floats
    rates: Rates
    free: Rates

    @property
    def slowdown(self) -> Floats:
        """Uncongested rate over rate, of each flow."""
        return self.free.flow_bps / self.rates.flow_bps

    def tiers(self) -> dict[str, NDArray[np.bool_]]:
        """Return a mask over links for each tier that flows cross, and for all between switches."""
        used = np.unique(self.wires.tier[self.paths[self.paths != NO_LINK]].astype(str)).tolist()
        masks = {tier: self.wires.tier == tier for tier in self.wires.tiers if tier in used}
        switches = self.graph.is_switch
        return masks | {ALL_TIERS: switches[self.graph.link_src] & switches[self.graph.link_dst]}

    def collisions(self, links: NDArray[np.bool_]) -> Collisions:
        """Count and size over the links of a mask together."""
        demand, capacity = self.link_bps[links], self.graph.link_bps[links]
        over = np.where(demand > capacity * (1 + TOLERANCE), demand - capacity, 0.0)
        full = self.link_bps > self.graph.link_bps * (1 + TOLERANCE)
        total = float(demand.sum())
        return Collisions(
            num_links=len(demand),
            num_flows=int(self._crosses(links).sum()),
            num_colliding=int(self._crosses(links & full).sum()),
            num_overloaded=int((over > 0).sum()),
            excess=float(over.sum()) / total if total else 0.0,
            utilisation=total / float(capacity.sum()) if len(demand) else 0.0,
            max_utilisation=float((demand / capacity).max(initial=0.0)),
        )

    def slowdowns(self, links: NDArray[np.bool_]) -> tuple[float, float]:
        """Mean and worst slowdown of the flows that cross one of these links; (1, 1) where none does."""
        slowdown = self.slowdown[self._crosses(links)]
        return (float(slowdown.mean()), float(slowdown.max())) if len(slowdown) else (1.0, 1.0)

    def times(self, resolution: float = 1e-2) -> dict[str, float]:
        """Return seconds as `contention.Contention.times` does."""
        return times(self.rates, self.free, self.flows, resolution)

    def bottlenecks(self, most: int = 10) -> Rows:
        """Return the links between switches that hold most flows back, worst first, and which flows share them."""
        num_held_back = np.bincount(self.rates.bottleneck, minlength=self.graph.num_links) * self.tiers()[ALL_TIERS]
        start, members = flows_on_links(self.paths, self.graph.num_links)
        order = np.argsort(-num_held_back, kind="stable")[:most].tolist()
        return [self._bottleneck(link, members[start[link] : start[link + 1]]) for link in order if num_held_back[link]]

    def _bottleneck(self, link: int, flows: Ints) -> dict[str, Any]:
        """Return the row of a link that is a bottleneck: flows on it, those it holds back, the first few by name."""
        held_back, names = flows[self.rates.bottleneck[flows] == link], self.graph.names
        first = flows[:_SHOWN_FLOWS].tolist()
        ends = zip(self.flows.src_nic[first].tolist(), self.flows.dst_nic[first].tolist(), strict=True)
        return {
            "link": link,
            "tier": str(self.wires.tier[link]),
            "flows": len(flows),
            "held_back": len(held_back),
            "fair_bps": float(self.rates.flow_bps[held_back].max()),
            "slowdown": float(self.slowdown[flows].max()),
            "first_flows": first,
            "from": str(self.wires.src[link]),
            "to": str(self.wires.dst[link]),
            "first_pairs": [f"{names[src]} > {names[dst]}" for src, dst in ends],
        }

    def _crosses(self, links: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Whether each flow crosses one of the links; one entry more, False, is where NO_LINK points."""
        return np.asarray(np.append(links, False)[self.paths].any(axis=1))


def load_fabric(path: Path) -> Graph:
    """Read a fabric from a file or folder: what `import` or `build` wrote (fabric.graphml), or any format of `import`.

    Raises:
        ConfigError: see `importers.read_fabric`.
    """
    return read_fabric([path])


def load_graph(
    graph: Graph, flows: Flows, name: HashName, seed: int, *, fields: Sequence[Field] = FIVE_TUPLE
) -> GraphLoad:
    """Hash, load and rate flows (of `flow_files.read_flows`) over a graph; the seed moves switches and queue pairs.

    Raises:
        ConfigError: a flow has no path.
        ValueError: the hash or a field is unknown.
    """
    routes = Routes(graph, flows.dst_nic)
    lost = np.flatnonzero(routes.hops(flows.src_nic, flows.dst_nic) == UNREACHABLE)
    if len(lost):
        ends = " to ".join(graph.names[nic[lost[0]]] for nic in (flows.src_nic, flows.dst_nic))
        rule = f"{len(lost)} of {len(flows)} flows have no path in this fabric: the first from {ends}"
        raise ConfigError("--flows", None, rule, "omit them, or fix the fabric")
    ecmp = Ecmp(name, headers(graph, flows, seed), seed, fields=fields)
    paths = routes.route(flows.src_nic, flows.dst_nic, by_ecmp(ecmp))
    demand = demand_bps(graph, flows)
    last = paths[np.arange(len(paths)), (paths != NO_LINK).sum(axis=1) - 1]
    ends_alone = np.stack([paths[:, 0], np.where(last == paths[:, 0], NO_LINK, last)], axis=1)
    return GraphLoad(
        graph,
        Wires.of_graph(graph),
        flows,
        paths,
        demand,
        sum_over_links(paths, demand, graph.num_links),
        max_min(paths, graph.link_bps),
        max_min(ends_alone, graph.link_bps),
    )


def demand_bps(graph: Graph, flows: Flows) -> Floats:
    """Return each flow's demand: the rate of its host's links over the flows there, at the fuller of its two ends."""
    bps = np.bincount(graph.link_src, weights=graph.link_bps, minlength=graph.num_nodes)
    shares = [bps[nic] / np.bincount(nic, minlength=graph.num_nodes)[nic] for nic in (flows.src_nic, flows.dst_nic)]
    return np.asarray(np.minimum(*shares))


def graph_rows(
    graph: Graph,
    flows: Flows,
    *,
    seeds: Sequence[int],
    hashes: Sequence[HashName],
    fields: Sequence[Field] = FIVE_TUPLE,
    traffic: str = FROM_FILE,
) -> list[TierCollisions]:
    """Return a row a hash and tier, means over the seeds.

    Args:
        traffic: name of the flows in the rows.

    Raises:
        ConfigError, ValueError: see `load_graph`.
    """
    rows: list[TierCollisions] = []
    for name in hashes:
        loads = [load_graph(graph, flows, name, seed, fields=fields) for seed in seeds]
        masks = {tier: mask for loaded in loads for tier, mask in loaded.tiers().items()}
        for tier, links in masks.items():
            collisions = [loaded.collisions(links) for loaded in loads]
            slowdowns = [loaded.slowdowns(links) for loaded in loads]
            rows.append(TierCollisions.of_seeds(None, traffic, name, tier, collisions, slowdowns))
    return rows

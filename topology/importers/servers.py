"""Servers and rails of an imported fabric, and servers that are cabled otherwise than their neighbours.

Two NIC cables that were swapped between rails leave every count of a fabric as it was; they show only where servers on
the same ToRs are held against each other. Not covered: a cabling error that most servers share.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from topology.fabric.graph import Graph
from topology.importers.cables import natural_key

_LEAST_ALIKE = 3  # servers that must agree before another is called different
_MOST_NAMED = 8


@dataclass(frozen=True)
class Servers:
    """Switch that each NIC's cable ends at, by server and NIC: the node `srv1/eth0` is NIC `eth0` of server `srv1`."""

    switch_of: Mapping[str, Mapping[str, str]]

    @property
    def num_nics(self) -> int:
        return sum(len(nics) for nics in self.switch_of.values())

    def rows(self) -> list[dict[str, Any]]:
        """One row a NIC name: how many servers have it, and on how many switches it ends. A rail ends on one a pod."""
        ends: dict[str, list[str]] = defaultdict(list)
        for nics in self.switch_of.values():
            for nic, switch in nics.items():
                ends[nic].append(switch)
        return [
            {
                "nic": nic,
                "servers": len(switches),
                "switches": len(set(switches)),
                "first_switch": min(switches, key=natural_key),
            }
            for nic, switches in sorted(ends.items(), key=lambda item: natural_key(item[0]))
        ]

    def asymmetries(self) -> Iterator[str]:
        """Yield a line for each server whose NICs end elsewhere than those of most servers on the same switches."""
        groups: dict[frozenset[str], dict[str, tuple[tuple[str, str], ...]]] = defaultdict(dict)
        for server, nics in self.switch_of.items():
            groups[frozenset(nics.values())][server] = tuple(sorted(nics.items()))
        # A cable to a switch of another group makes a group of its own: it belongs to the one it shares most with.
        large = [switches for switches, group in groups.items() if len(group) >= _LEAST_ALIKE]
        for switches in [one for one, group in groups.items() if len(group) < _LEAST_ALIKE]:
            nearest = max(large, key=lambda other: len(other & switches), default=frozenset[str]())
            if 2 * len(nearest & switches) >= len(nearest) > 0:
                groups[nearest] |= groups.pop(switches)
        for group in groups.values():
            usual, num_alike = Counter(group.values()).most_common(1)[0]
            if num_alike < _LEAST_ALIKE or 2 * num_alike <= len(group):
                continue
            expected = dict(usual)
            for server in sorted(group, key=natural_key):
                differences = [
                    f"{nic} ends at {switch}, not {expected[nic]}"
                    for nic, switch in group[server]
                    if nic in expected and expected[nic] != switch
                ]
                if differences:
                    ends = ", ".join(differences[:_MOST_NAMED])
                    yield f"{server}: {ends}, as on {num_alike} of {len(group)} servers beside it"
        yield from self._unequal()

    def _unequal(self) -> Iterator[str]:
        """Yield a line where servers have different numbers of NICs, most having the same."""
        counts = Counter(len(nics) for nics in self.switch_of.values())
        usual, num_alike = counts.most_common(1)[0] if counts else (0, 0)
        if num_alike < _LEAST_ALIKE or len(counts) == 1 or 2 * num_alike <= len(self.switch_of):
            return
        others = [f"{server} {len(nics)}" for server, nics in self.switch_of.items() if len(nics) != usual]
        more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
        yield f"{num_alike} of {len(self.switch_of)} servers have {usual} NICs; {', '.join(others[:_MOST_NAMED])}{more}"


def find_servers(graph: Graph) -> Servers:
    """Return the servers whose NICs are nodes of their own, `server/nic`; hosts that are one node have no rails."""
    switch_of: dict[str, dict[str, str]] = defaultdict(dict)
    for low, high in zip(graph.a.tolist(), graph.b.tolist(), strict=True):
        for node, other in ((low, high), (high, low)):
            server, _, nic = graph.names[node].partition("/")
            if nic and not graph.is_switch[node] and graph.is_switch[other]:
                switch_of[server][nic] = graph.names[other]
    return Servers(switch_of)

"""Path spread: which routers each flow of a probe sweep crosses, and whether every router shared its flows out evenly.

A flow is one UDP source port between two addresses. The router at hop h is who answered the probe with TTL h. Shares
are judged a router at a time, among the flows that came to it, for a polarised network looks even when only the hop as
a whole is counted. Addresses are what routers answer with: one router may have several. Not covered: joining those,
loops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topology.probe.capture import Ints
from topology.probe.choice import UNEVEN_P, Choice, address

Rows = list[dict[str, Any]]

SILENT = 0


@dataclass(frozen=True, eq=False)
class PathSpread:
    """The routers of every flow between two addresses.

    Args:
        src_ip, dst_ip: as integers.
        sports: shape (num_flows,), ascending.
        ttls: shape (num_hops,), ascending, up to the first where only the target answers.
        router: shape (num_flows, num_hops), the address that answered first, 0 where none did.
        changed: same shape, True where answers came from more than one address.
        sent: probes a hop, each (port, round) once however often it was repeated; 0 where no probe was captured.
        answered: of those, a hop.
        rtt_us: shape of `router`, of the first answer to a probe sent once; NaN where unknown.
        rounds: of which there are answers; with one, whether flows move cannot be seen.
        reached: some probe came to its target.
        refused: shape (num_flows,), who called the target unreachable, which ends the path; 0 where nobody did.
    """

    src_ip: int
    dst_ip: int
    sports: Ints
    ttls: Ints
    router: Ints
    changed: NDArray[np.bool_]
    sent: Ints
    answered: Ints
    rtt_us: NDArray[np.float64]
    rounds: int
    reached: bool
    refused: Ints

    def choices(
        self, members: Mapping[int, int] | None = None, weights: Mapping[int, float] | None = None
    ) -> list[Choice]:
        """The ECMP choices of the network: at each hop, how each router before it shared its flows out.

        Args:
            members: at a hop (its TTL), to how many routers each one before it leads; without it, as many as were seen.
            weights: of a router's address, where not 1.

        Raises:
            ValueError: more routers answered at a hop than `members` says.
        """
        return [
            choice
            for hop, ttl in enumerate(self.ttls.tolist())
            for choice in self._choices_at(hop, (members or {}).get(ttl), weights or {})
        ]

    def _choices_at(self, hop: int, members: int | None, weights: Mapping[int, float]) -> list[Choice]:
        before = self.router[:, hop - 1] if hop else np.full(len(self.sports), self.src_ip)
        here = self.router[:, hop]
        known = (before != SILENT) & (here != SILENT)
        choices = []
        for previous in np.unique(before[known]).tolist():
            routers, flows = np.unique(here[known & (before == previous)], return_counts=True)
            if members is not None and len(routers) > members:
                raise ValueError(f"hop {self.ttls[hop]}: {len(routers)} routers answered, expected are {members}")
            unseen = max(0, (members or 0) - len(routers))
            shares = np.array([weights.get(router, 1.0) for router in routers.tolist()] + [1.0] * unseen)
            choices.append(Choice(int(self.ttls[hop]), previous, routers, flows, shares / shares.sum()))
        return choices

    def paths(self) -> Rows:
        """Return the distinct paths, most used first, silent hops as `*`; `unreachable` where a router says so."""
        paths, flows = np.unique(np.column_stack([self.router, self.refused]), axis=0, return_counts=True)
        order = np.argsort(-flows, kind="stable")
        return [
            {"path": _path(*paths[i].tolist()), "flows": int(flows[i]), "share": float(flows[i] / len(self.sports))}
            for i in order
        ]

    def flows(self) -> Rows:
        """The path of each flow, one column a hop, empty where silent; `unreachable` is who called the target so."""
        ends = {"src": address(self.src_ip), "dst": address(self.dst_ip)}
        columns = [f"hop_{ttl}" for ttl in self.ttls.tolist()]
        paths = ([address(ip) if ip else "" for ip in path] for path in self.router.tolist())
        rows: Rows = [
            {**ends, "sport": sport, **dict(zip(columns, path, strict=True))}
            for sport, path in zip(self.sports.tolist(), paths, strict=True)
        ]
        if self.refused.any():
            for row, ip in zip(rows, self.refused.tolist(), strict=True):
                row["unreachable"] = address(ip) if ip else ""
        return rows

    def hops(self) -> Rows:
        """Each router of each hop: its flows, and their share of those whose router there is known."""
        rows: Rows = []
        for hop, ttl in enumerate(self.ttls.tolist()):
            here = self.router[:, hop]
            known = here[here != SILENT]
            routers, flows = np.unique(known, return_counts=True)
            rows.extend(
                {
                    "hop": ttl,
                    "router": address(router),
                    "flows": count,
                    "share": count / len(known),
                    "rtt_us": _median(self.rtt_us[here == router, hop]),
                }
                for router, count in zip(routers.tolist(), flows.tolist(), strict=True)
            )
        return rows

    def expected(self, choices: Sequence[Choice]) -> Rows:
        """Return, for each hop, the share of its flows that each router seen there should get from the hop before."""
        rows: Rows = []
        for ttl in self.ttls.tolist():
            due = _expected_flows([choice for choice in choices if choice.ttl == ttl])
            total = sum(due.values())
            seen = [(router, flows) for router, flows in sorted(due.items()) if router != SILENT]
            rows += [{"hop": ttl, "router": address(router), "share": flows / total} for router, flows in seen]
        return rows

    def summary(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The whole sweep in one row."""
        sent, answered = int(self.sent.sum()), int(self.answered.sum())
        judged = [choice for choice in choices if len(choice.share) > 1]
        return {
            "src": address(self.src_ip),
            "dst": address(self.dst_ip),
            "flows": len(self.sports),
            "hops": len(self.ttls),
            "rounds": self.rounds,
            "reached": self.reached,
            "paths": len(np.unique(self.router, axis=0)),
            "probes": sent,
            "answered": answered,
            "unanswered_share": 1 - answered / sent if sent else None,
            "unreachable_flows": int((self.refused != SILENT).sum()),
            "flows_that_moved": int(self.changed.any(axis=1).sum()),
            "choices": len(judged),
            "uneven_choices": sum(choice.p_value < UNEVEN_P for choice in judged),
        }


def _path(*hops: int) -> str:
    """The last of them is who calls the target unreachable, or 0."""
    *routers, refused = hops
    if not refused:
        return " > ".join(address(router) if router else "*" for router in routers)
    known = routers[: routers.index(refused) + 1] if refused in routers else routers
    return " > ".join([*(address(router) if router else "*" for router in known), "unreachable"])


def _expected_flows(choices: Sequence[Choice]) -> dict[int, float]:
    """Flows due to each router of one hop, from the flows that the routers before it had."""
    due: dict[int, float] = {}
    for choice in choices:
        for router, share in zip(choice.routers.tolist(), choice.share.tolist(), strict=False):
            due[router] = due.get(router, 0.0) + share * float(choice.flows.sum())
        for _ in choice.share[len(choice.routers) :]:
            due[SILENT] = due.get(SILENT, 0.0) + float(choice.share[-1] * choice.flows.sum())
    return due


def _median(values: NDArray[np.float64]) -> float | None:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else None

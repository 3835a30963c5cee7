"""Path spread: which routers each flow of a probe sweep crosses, and whether every router shared its flows out evenly.

A flow is one UDP source port between two addresses. The router at hop h is who answered the probe with TTL h. Shares
are judged a router at a time, among the flows that came to it, for a polarised network looks even when only the hop as
a whole is counted. Addresses are what routers answer with: one router may have several. Left out: joining those, loops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topology.probe.capture import Ints, Seen
from topology.probe.choice import UNEVEN_P, Choice, address

Rows = list[dict[str, Any]]

_SILENT = 0


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
        known = (before != _SILENT) & (here != _SILENT)
        found = []
        for previous in np.unique(before[known]).tolist():
            routers, flows = np.unique(here[known & (before == previous)], return_counts=True)
            if members is not None and len(routers) > members:
                raise ValueError(f"hop {self.ttls[hop]}: {len(routers)} routers answered, expected are {members}")
            unseen = max(0, (members or 0) - len(routers))
            shares = np.array([weights.get(router, 1.0) for router in routers.tolist()] + [1.0] * unseen)
            found.append(Choice(int(self.ttls[hop]), previous, routers, flows, shares / shares.sum()))
        return found

    def paths(self) -> Rows:
        """The distinct paths, most used first, silent hops as `*`."""
        found, flows = np.unique(self.router, axis=0, return_counts=True)
        order = np.argsort(-flows, kind="stable")
        return [
            {
                "path": " > ".join(address(router) if router else "*" for router in found[i].tolist()),
                "flows": int(flows[i]),
                "share": float(flows[i] / len(self.sports)),
            }
            for i in order
        ]

    def flows(self) -> Rows:
        """The path of each flow, one column a hop, empty where silent."""
        ends = {"src": address(self.src_ip), "dst": address(self.dst_ip)}
        columns = [f"hop_{ttl}" for ttl in self.ttls.tolist()]
        return [
            {**ends, "sport": sport, **dict(zip(columns, [address(ip) if ip else "" for ip in path], strict=True))}
            for sport, path in zip(self.sports.tolist(), self.router.tolist(), strict=True)
        ]

    def hops(self, choices: Sequence[Choice]) -> Rows:
        """Each router of each hop: its flows, their share, and the share due to it from the routers before it."""
        rows: Rows = []
        for hop, ttl in enumerate(self.ttls.tolist()):
            here = self.router[:, hop]
            known = int((here != _SILENT).sum())
            due = _expected_flows([choice for choice in choices if choice.ttl == ttl])
            total = sum(due.values())
            routers, flows = np.unique(here[here != _SILENT], return_counts=True)
            rows.extend(
                {
                    "hop": ttl,
                    "router": address(router),
                    "flows": count,
                    "share": count / known,
                    "expected_share": due[router] / total if router in due else None,
                    "rtt_us": _median(self.rtt_us[here == router, hop]),
                }
                for router, count in zip(routers.tolist(), flows.tolist(), strict=True)
            )
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
            "flows_that_moved": int(self.changed.any(axis=1).sum()),
            "choices": len(judged),
            "uneven_choices": sum(choice.p_value < UNEVEN_P for choice in judged),
        }


def spread(probes: Seen, answers: Seen) -> list[PathSpread]:
    """The path spread of every pair of addresses that probes or answers name."""
    src, dst = np.r_[probes.src_ip, answers.src_ip], np.r_[probes.dst_ip, answers.dst_ip]
    return [
        _spread_of(int(a), int(b), _between(probes, a, b), _between(answers, a, b))
        for a, b in np.unique(np.stack((src, dst), axis=1), axis=0)
    ]


def _between(seen: Seen, src: int, dst: int) -> Seen:
    return seen.only((seen.src_ip == src) & (seen.dst_ip == dst))


def _spread_of(src: int, dst: int, probes: Seen, answers: Seen) -> PathSpread:
    answers = answers.only(np.argsort(answers.time_ns, kind="stable")) if len(answers) else answers
    sports, ttls = np.unique(np.r_[probes.sport, answers.sport]), np.unique(np.r_[probes.ttl, answers.ttl])
    flow, hop = np.searchsorted(sports, answers.sport), np.searchsorted(ttls, answers.ttl)
    router = np.full((len(sports), len(ttls)), _SILENT, dtype=np.int64)
    first = _first_of(flow * len(ttls) + hop)
    router[flow[first], hop[first]] = answers.router[first]
    changed = np.zeros(router.shape, dtype=bool)
    moved = router[flow, hop] != answers.router
    changed[flow[moved], hop[moved]] = True
    end = _last_hop(router, dst)
    return PathSpread(
        src,
        dst,
        sports,
        ttls[:end],
        router[:, :end],
        changed[:, :end],
        _count_once(probes, ttls)[:end],
        _count_once(answers, ttls)[:end],
        _round_trips(probes, answers, flow, hop, router.shape)[:, :end],
        len(np.unique(answers.round)),
        bool(answers.reached.any()),
    )


def _last_hop(router: Ints, dst: int) -> int:
    """Hops up to the first where the target alone answers."""
    at_target = (router == dst).any(axis=0) & ((router == dst) | (router == _SILENT)).all(axis=0)
    return int(at_target.argmax()) + 1 if at_target.any() else router.shape[1]


def _probe_id(seen: Seen) -> Ints:
    return seen.sport << 16 | seen.ttl << 8 | seen.round


def _count_once(seen: Seen, ttls: Ints) -> Ints:
    """Distinct probes a hop."""
    ids = np.unique(_probe_id(seen))
    return np.bincount(np.searchsorted(ttls, ids >> 8 & 0xFF), minlength=len(ttls))


def _first_of(keys: Ints) -> Ints:
    """Where each distinct key comes first."""
    return np.unique(keys, return_index=True)[1]


def _round_trips(probes: Seen, answers: Seen, flow: Ints, hop: Ints, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Microseconds from a probe to its first answer; which probe a repeated one's answer belongs to is not known."""
    rtt_us = np.full(shape, np.nan)
    ids, first, counts = np.unique(_probe_id(probes), return_index=True, return_counts=True)
    if not len(ids):
        return rtt_us
    wanted = _probe_id(answers)
    at = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
    sent_ns = probes.time_ns[first[at]]
    known = (ids[at] == wanted) & (counts[at] == 1) & (sent_ns > 0) & (answers.time_ns >= sent_ns)
    taken_us, flow, hop = ((answers.time_ns - sent_ns) / 1e3)[known], flow[known], hop[known]
    chosen = _first_of(flow * shape[1] + hop)
    rtt_us[flow[chosen], hop[chosen]] = taken_us[chosen]
    return rtt_us


def _expected_flows(choices: Sequence[Choice]) -> dict[int, float]:
    """Flows due to each router of one hop, from the flows that the routers before it had."""
    due: dict[int, float] = {}
    for choice in choices:
        for router, share in zip(choice.routers.tolist(), choice.share.tolist(), strict=False):
            due[router] = due.get(router, 0.0) + share * float(choice.flows.sum())
        for _ in choice.share[len(choice.routers) :]:
            due[_SILENT] = due.get(_SILENT, 0.0) + float(choice.share[-1] * choice.flows.sum())
    return due


def _median(values: NDArray[np.float64]) -> float | None:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else None

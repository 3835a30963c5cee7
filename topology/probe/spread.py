"""Paths from probes and answers: who answered for which flow at which hop, and where a path ends.

Not covered: joining several addresses of one router, loops.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from topology.probe.capture import Ints, ProbeTable
from topology.probe.paths import SILENT, PathSpread


def spread(probes: ProbeTable, answers: ProbeTable) -> list[PathSpread]:
    """The path spread of every pair of addresses that probes or answers name."""
    src, dst = np.r_[probes.src_ip, answers.src_ip], np.r_[probes.dst_ip, answers.dst_ip]
    return [
        _spread_of(int(a), int(b), _between(probes, a, b), _between(answers, a, b))
        for a, b in np.unique(np.stack((src, dst), axis=1), axis=0)
    ]


def _between(seen: ProbeTable, src: int, dst: int) -> ProbeTable:
    return seen.only((seen.src_ip == src) & (seen.dst_ip == dst))


def _spread_of(src: int, dst: int, probes: ProbeTable, answers: ProbeTable) -> PathSpread:
    """Return the paths from one source to one destination: a router for each flow and TTL, what changed or failed."""
    answers = answers.only(np.argsort(answers.time_ns, kind="stable")) if len(answers) else answers
    sports, ttls = np.unique(np.r_[probes.sport, answers.sport]), np.unique(np.r_[probes.ttl, answers.ttl])
    shape = len(sports), len(ttls)
    expired, refusals = answers.only(~answers.refused), answers.only(answers.refused)
    flow, hop = np.searchsorted(sports, expired.sport), np.searchsorted(ttls, expired.ttl)
    router = np.full(shape, SILENT, dtype=np.int64)
    first = _first_of(flow * len(ttls) + hop)
    router[flow[first], hop[first]] = expired.router[first]
    changed = np.zeros(router.shape, dtype=bool)
    moved = router[flow, hop] != expired.router
    changed[flow[moved], hop[moved]] = True
    places = np.searchsorted(sports, refusals.sport), np.searchsorted(ttls, refusals.ttl)
    refused = _cut(router, *places, refusals.router)
    end = _last_hop(router, dst, refused)
    flow, hop = np.searchsorted(sports, answers.sport), np.searchsorted(ttls, answers.ttl)
    return PathSpread(
        src,
        dst,
        sports,
        ttls[:end],
        router[:, :end],
        changed[:, :end],
        _count_once(probes, ttls)[:end],
        _count_once(answers, ttls)[:end],
        _round_trips(probes, answers, flow, hop, shape)[:, :end],
        len(np.unique(answers.round)),
        bool(answers.reached.any()),
        refused,
    )


def _cut(router: Ints, flow: Ints, hop: Ints, refuser: Ints) -> Ints:
    """End each flow's path, in place, at the router that calls its target unreachable first; who that is, a flow.

    A router without a route says so before it looks at the TTL, and so is at that hop; one whose next hop does not
    answer has let the TTL before end there, and is there already.
    """
    refused = np.full(len(router), SILENT, dtype=np.int64)
    order = np.lexsort((hop, flow))
    for index in order[_first_of(flow[order])].tolist():
        row, at, who = int(flow[index]), int(hop[index]), int(refuser[index])
        refused[row] = who
        router[row, at:] = SILENT
        if at == 0 or router[row, at - 1] != who:
            router[row, at] = who
    return refused


def _last_hop(router: Ints, dst: int, refused: Ints) -> int:
    """Hops up to the first where the target alone answers, or the last that any of only refused flows has."""
    if refused.all():
        return int(np.flatnonzero((router != SILENT).any(axis=0)).max(initial=0)) + 1
    at_target = (router == dst).any(axis=0) & ((router == dst) | (router == SILENT)).all(axis=0)
    return int(at_target.argmax()) + 1 if at_target.any() else router.shape[1]


def _probe_id(seen: ProbeTable) -> Ints:
    return seen.sport << 16 | seen.ttl << 8 | seen.round


def _count_once(seen: ProbeTable, ttls: Ints) -> Ints:
    """Distinct probes a hop."""
    ids = np.unique(_probe_id(seen))
    return np.bincount(np.searchsorted(ttls, ids >> 8 & 0xFF), minlength=len(ttls))


def _first_of(keys: Ints) -> Ints:
    """Return the position where each distinct key comes first."""
    return np.unique(keys, return_index=True)[1]


def _round_trips(
    probes: ProbeTable, answers: ProbeTable, flow: Ints, hop: Ints, shape: tuple[int, ...]
) -> NDArray[np.float64]:
    """Microseconds from a probe to its first answer; which probe a repeated one's answer belongs to is not known."""
    rtt_us = np.full(shape, np.nan)
    ids, first, counts = np.unique(_probe_id(probes), return_index=True, return_counts=True)
    if not len(ids):
        return rtt_us
    answer_ids = _probe_id(answers)
    at = np.minimum(np.searchsorted(ids, answer_ids), len(ids) - 1)
    sent_ns = probes.time_ns[first[at]]
    known = (ids[at] == answer_ids) & (counts[at] == 1) & (sent_ns > 0) & (answers.time_ns >= sent_ns)
    delays_us, flow, hop = ((answers.time_ns - sent_ns) / 1e3)[known], flow[known], hop[known]
    chosen = _first_of(flow * shape[1] + hop)
    rtt_us[flow[chosen], hop[chosen]] = delays_us[chosen]
    return rtt_us

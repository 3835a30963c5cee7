"""Next hops of a probe's flows at Linux routers, forecast by the kernel's own hash, next to the measured ones.

A router is known by the address that it answers with, its next hops by theirs, in the order of its route. Not covered:
routers whose seed is the kernel's own (no program can read it), policies 2 and 3, and the sending host's own choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import numpy as np

from topology.ecmp.hashing import Headers
from topology.probe.choice import address
from topology.probe.kernel_hash import choose, multipath_hash
from topology.probe.paths import SILENT, PathSpread

Rows = list[dict[str, Any]]


class LinuxRouter(NamedTuple):
    """A router's address, its `fib_multipath_hash_seed`, and its route's next hops with their weights."""

    address: int
    seed: int
    next_hops: tuple[int, ...]
    weights: tuple[int, ...]


def forecast(pair: PathSpread, routers: Iterable[LinuxRouter], policy: Literal[0, 1]) -> Rows:
    """One row a flow and router on its way: the next hop that the hash gives it, and the one that answered.

    Args:
        pair: the measured paths; a flow whose next hop stayed silent has no row.
        routers: those whose hash is known.
        policy: their `fib_multipath_hash_policy`: 0 hashes addresses alone, 1 the 5-tuple.
    """
    src, dst = (np.full(len(pair.sports), ip, dtype=np.uint32) for ip in (pair.src_ip, pair.dst_ip))
    headers = Headers(src, dst, pair.sports.astype(np.uint16))
    next_ttl = np.diff(pair.ttls) == 1
    rows: Rows = []
    for router in routers:
        hops = np.array(router.next_hops, dtype=np.int64)
        predicted = hops[choose(multipath_hash(headers, router.seed, policy), router.weights)]
        here, after = pair.router[:, :-1], pair.router[:, 1:]
        for flow, hop in np.argwhere((here == router.address) & (after != SILENT) & next_ttl).tolist():
            rows.append(
                {
                    "src": address(pair.src_ip),
                    "dst": address(pair.dst_ip),
                    "sport": int(pair.sports[flow]),
                    "hop": int(pair.ttls[hop + 1]),
                    "from": address(router.address),
                    "predicted": address(int(predicted[flow])),
                    "measured": address(int(after[flow, hop])),
                }
            )
    return rows


def predicted_shares(rows: Rows) -> Rows:
    """Return the flows that each router should send to each next hop, of those rows: only what is predicted."""
    keys = ("src", "dst", "hop", "from")
    sent = Counter(tuple(row[key] for key in keys) for row in rows)
    to_each = Counter((*(row[key] for key in keys), row["predicted"]) for row in rows)
    return [
        {**dict(zip(keys, source, strict=True)), "router": router, "flows": count, "share": count / sent[tuple(source)]}
        for (*source, router), count in sorted(to_each.items())
    ]

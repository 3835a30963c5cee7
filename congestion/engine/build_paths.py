"""The ports that each flow's packets leave by, there and back: murmur3 over the header, as switches hash it."""

from __future__ import annotations

import hashlib
import weakref

import numpy as np
from numpy.typing import NDArray

from congestion.engine import tables
from congestion.engine.tables import Ints, aligned
from congestion.files import FlowSet
from netlayer.errors import ConfigError
from topology.graph import Graph
from topology.graph_routing import Choose, Routes, by_ecmp
from topology.hashing import Ecmp, Headers
from topology.routing import NO_LINK

_PATH_STEP = 7919  # between the source ports of a flow's paths

_KEPT_BYTES = 64 << 20

Paths = tuple[NDArray[np.uint32], Ints]
# Oldest first: a search runs the same flows many times, a hundred workloads in turn.
_kept: dict[tuple[weakref.ref[Graph], bytes], Paths] = {}


def all_paths(fabric: Graph, flows: FlowSet, ends: Ints, many: int) -> Paths:
    """Ports by hop, there and back, `many` rows a flow, the first by its header; and links one way of each flow.

    They are those of an earlier call where fabric and headers are, and not to be written to.

    Args:
        ends: (2 * num_cables,) the port of each end of a cable.

    Raises:
        ConfigError: a flow has no path, or one that is too long for a packet's word.
    """
    headers = np.stack([flows.src, flows.dst, flows.sport, flows.dport, np.full_like(flows.src, many)])
    key = weakref.ref(fabric), hashlib.sha256(headers.tobytes()).digest()
    if key not in _kept:
        while sum(path.nbytes for path, _ in _kept.values()) > _KEPT_BYTES:  # before: two large ones may be too much
            del _kept[next(iter(_kept))]
        _kept[key] = _find(fabric, flows, ends, many)
    return _kept[key]


def _find(fabric: Graph, flows: FlowSet, ends: Ints, many: int) -> Paths:
    path = aligned(len(flows) * many * 2 * tables.ACK_PATH, np.dtype(np.uint32)).reshape(len(flows), many, -1)
    num_links = np.zeros(len(flows), dtype=np.int64)
    for which in range(many):
        sport = (flows.sport + which * _PATH_STEP) & 0xFFFF
        there = _paths(fabric, ends, flows.src, flows.dst, sport, flows.dport)
        back = _paths(fabric, ends, flows.dst, flows.src, flows.dport, sport)
        path[:, which, : tables.ACK_PATH] = np.maximum(there, 0)
        path[:, which, tables.ACK_PATH :] = np.maximum(back, 0)
        num_links = np.maximum(num_links, (there >= 0).sum(axis=1))
    return path.reshape(len(flows) * many, -1), num_links


def _paths(fabric: Graph, ends: Ints, src: Ints, dst: Ints, sport: Ints, dport: Ints) -> Ints:
    """Ports by hop, shape (num_flows, ACK_PATH), -1 behind the last: murmur3 over the header, seed the switch's id."""
    paths = np.full((len(src), tables.ACK_PATH), -1, dtype=np.int64)
    routes = Routes(fabric, dst)
    hops = routes.hops(src, dst)
    if np.any(hops < 0):
        row = int(np.argmax(hops < 0))
        rule = f"has no path to {fabric.names[dst[row]]}"
        raise ConfigError("--flows", fabric.names[src[row]], rule, "join the two in the topology")
    if hops.max() > tables.MOST_HOPS:
        rule = f"is {hops.max()} links long, known are paths of up to {tables.MOST_HOPS}"
        raise ConfigError("--topo", "longest path", rule, "give a fabric of at most that diameter")
    ip = fabric.addresses
    headers = Headers(ip[src], ip[dst], sport.astype(np.uint16), udp_dport=dport)
    found = routes.route(src, dst, _choose(headers))
    leaves = ends[found % fabric.num_cables * 2 + found // fabric.num_cables]
    paths[:, : found.shape[1]] = np.where(found == NO_LINK, -1, leaves)
    return paths


def _choose(headers: Headers) -> Choose:
    return by_ecmp(Ecmp("murmur3", headers, 0))

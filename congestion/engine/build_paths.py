"""The ports that packets leave by: a flow's, there and back, by its header's hash; and those a switch sprays to."""

from __future__ import annotations

import hashlib
import weakref

import numpy as np
from numpy.typing import NDArray

from congestion.engine import tables
from congestion.engine.tables import Ints, aligned
from congestion.simulation.files import FlowSet
from congestion.simulation.settings import Settings
from netlayer.errors import ConfigError
from topology.ecmp.graph_routing import Routes, by_ecmp
from topology.ecmp.hashing import Ecmp, Headers
from topology.ecmp.routing import NO_LINK
from topology.fabric.graph import Graph

_PATH_STEP = 7919  # between the source ports of a flow's paths
_MOST_SPRAYING = 1 << 16  # switches: `NODE.switch` has 16 bits

_KEPT_BYTES = 64 << 20

Paths = tuple[NDArray[np.uint32], Ints]
# Oldest first: a search runs the same flows many times, a hundred workloads in turn.
_kept: dict[tuple[weakref.ref[Graph], bytes], Paths] = {}


def all_paths(fabric: Graph, flows: FlowSet, ends: Ints, many: int, settings: Settings) -> Paths:
    """Ports by hop, there and back, `many` rows a flow, the first by its header; and links one way of each flow.

    They are those of an earlier call where fabric and headers are, and not to be written to.

    Args:
        ends: (2 * num_cables,) the port of each end of a cable.

    Raises:
        ConfigError: a flow has no path, or one that is too long for a packet's word.
    """
    headers = np.stack([flows.src, flows.dst, flows.sport, flows.dport, np.full_like(flows.src, many)])
    hashed = f"{settings.ecmp_hash} {settings.ecmp_seed}".encode()
    key = weakref.ref(fabric), hashlib.sha256(headers.tobytes() + hashed).digest()
    if key not in _kept:
        while sum(path.nbytes for path, _ in _kept.values()) > _KEPT_BYTES:  # before: two large ones may be too much
            del _kept[next(iter(_kept))]
        _kept[key] = _find(fabric, flows, ends, many, settings)
    return _kept[key]


def ecmp_of(settings: Settings, headers: Headers) -> Ecmp:
    """The choices of all switches, by the hash and the seed of the settings."""
    return Ecmp(settings.ecmp_hash, headers, settings.ecmp_seed)


def next_hops(fabric: Graph, flows: FlowSet, ends: Ints) -> tuple[Ints, int, NDArray[np.uint32]]:
    """Find the ports that a switch sprays to.

    The first result numbers switches, and gives a host the number of its own switch; then how many switches there are.
    In the third stands, for switch a and packets to hosts of switch b, at place a * num_switches + b where their set
    of ports begins. A set is its size, packets sprayed so far (data, then ACKs), and its ports; a switch's
    destinations with the same ports share it, so that those ports get even numbers of packets.

    Raises:
        ConfigError: there are more switches than a node's row can number.
    """
    switches = np.flatnonzero(fabric.is_switch)
    if len(switches) > _MOST_SPRAYING:
        rule = f"has {len(switches):,} switches, spraying knows up to {_MOST_SPRAYING:,}"
        raise ConfigError("--topo", "fabric", rule, "set congestion.routing to ecmp or hashed_ports")
    number = np.zeros(fabric.num_nodes, dtype=np.int64)
    number[switches] = np.arange(len(switches))
    for near, far in ((fabric.a, fabric.b), (fabric.b, fabric.a)):
        number[near] = np.where(fabric.is_switch[near], number[near], number[far])
    hosts = np.unique(np.concatenate([flows.src, flows.dst]))
    _, first = np.unique(number[hosts], return_index=True)
    hosts = hosts[first]  # one stands for all of its switch
    routes, many = Routes(fabric, hosts), len(switches)
    spray, sets = [np.zeros(many * many, dtype=np.int64)], many * many
    for a, switch in enumerate(switches.tolist()):
        known: dict[bytes, int] = {}
        away = hosts[number[hosts] != a]
        if not len(away):
            continue
        sizes, links = routes.sets(np.full(len(away), switch), away)
        leaves = ends[links % fabric.num_cables * 2 + links // fabric.num_cables]
        for host, ports in zip(away.tolist(), np.split(leaves, np.cumsum(sizes)[:-1]), strict=True):
            if not len(ports):  # out of reach, so that no packet is on its way there
                continue
            if ports.tobytes() not in known:
                known[ports.tobytes()] = sets
                spray.append(np.concatenate([[len(ports), 0, 0], ports]))
                sets += len(spray[-1])
            spray[0][a * many + number[host]] = known[ports.tobytes()]
    return number, many, np.concatenate(spray).astype(np.uint32)


def _find(fabric: Graph, flows: FlowSet, ends: Ints, many: int, settings: Settings) -> Paths:
    """Return the ports of each path of each flow, there and of its ACKs back, and the most links of a flow's paths."""
    path = aligned(len(flows) * many * 2 * tables.ACK_PATH, np.dtype(np.uint32)).reshape(len(flows), many, -1)
    num_links = np.zeros(len(flows), dtype=np.int64)
    for which in range(many):
        sport = (flows.sport + which * _PATH_STEP) & 0xFFFF
        there = _paths(fabric, ends, flows.src, flows.dst, sport, flows.dport, settings)
        back = _paths(fabric, ends, flows.dst, flows.src, flows.dport, sport, settings)
        path[:, which, : tables.ACK_PATH] = np.maximum(there, 0)
        path[:, which, tables.ACK_PATH :] = np.maximum(back, 0)
        num_links = np.maximum(num_links, (there >= 0).sum(axis=1))
    return path.reshape(len(flows) * many, -1), num_links


def _paths(fabric: Graph, ends: Ints, src: Ints, dst: Ints, sport: Ints, dport: Ints, settings: Settings) -> Ints:
    """Ports by hop, shape (num_flows, ACK_PATH), -1 behind the last: the header's hash, each switch by its own seed."""
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
    links = routes.route(src, dst, by_ecmp(ecmp_of(settings, headers)))
    leaves = ends[links % fabric.num_cables * 2 + links // fabric.num_cables]
    paths[:, : links.shape[1]] = np.where(links == NO_LINK, -1, leaves)
    return paths

"""From a fabric, flows and settings to the arrays of a run.

Directed links are renumbered so that 2c and 2c + 1 are the two ways of cable c: the other way is `link ^ 1`, and a
node's in-links in order of their ids are its ports in the file's order.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from congestion.engine import columns as at
from congestion.engine.columns import NEVER, Ints, State
from congestion.files import FlowSet
from congestion.settings import Settings
from netlayer.errors import ConfigError
from topology.graph import Graph
from topology.graph_routing import Choose, Routes, by_ecmp
from topology.hashing import Ecmp, Headers
from topology.routing import NO_LINK

Law = Literal["none", "dcqcn"]
LAWS: tuple[Law, ...] = get_args(Law)

_PS_PER_US = 1_000_000
_REFERENCE_BPS = 200_000_000_000  # rates and thresholds of the settings are for this rate
_MOST_SHIFT = 3
_FIRST_POOL = 1 << 16


def build(
    fabric: Graph,
    flows: FlowSet,
    settings: Settings,
    law: Law,
    *,
    seed: int,
    truncate_ns: bool,
    pool: int = _FIRST_POOL,
) -> State:
    """The state before the first event.

    Args:
        fabric: hosts with one cable each, links of one rate both ways.
        truncate_ns: cut every serialisation time to whole ns, as ns-3 does.
        pool: packets that may be queued before the pool grows.

    Raises:
        ConfigError: a host has not one cable, a link has no delay, a flow has no path, or one exceeds what a packet's
            word can hold.
    """
    _check(fabric, flows, settings)
    c = _constants(fabric, settings, law, seed, truncate_ns)
    link, ring_slots = _links(fabric, settings, c)
    in_start, in_links = _in_links(fabric, link)
    node = _nodes(fabric, flows, settings, link, in_start, in_links)
    flow, path = _flows(fabric, flows, settings, link, node)
    by_host = np.lexsort((np.arange(len(flows)), flows.start_ps, flows.src)).astype(np.int64)
    most_seen = max(_arriving(link, in_links[in_start[n] : in_start[n + 1]]) for n in range(len(node)))
    return State(
        c=c,
        marking=np.array([settings.pmax, settings.g]),
        link=link,
        node=node,
        flow=flow,
        alpha=np.ones(len(flows)),
        path=path,
        in_start=in_start,
        in_links=in_links,
        by_host=by_host,
        active=np.zeros(len(flows), dtype=np.int64),
        wire=np.empty((ring_slots, 2), dtype=np.int64),
        pool=np.empty((pool, 2), dtype=np.int64),
        seen=np.empty((most_seen, 4), dtype=np.int64),
        order=np.empty(most_seen, dtype=np.int64),
    )


def _check(fabric: Graph, flows: FlowSet, settings: Settings) -> None:
    ends = np.bincount(np.concatenate([fabric.a, fabric.b]), minlength=fabric.num_nodes)
    for host in np.unique(np.concatenate([flows.src, flows.dst])).tolist():
        if ends[host] != 1:
            name = fabric.names[host]
            raise ConfigError("--topo", name, f"has {ends[host]} cables", "give each host that sends or receives one")
    if np.any(fabric.latency_ns <= 0):
        cable = int(np.argmax(fabric.latency_ns <= 0))
        where = f"{fabric.names[fabric.a[cable]]} - {fabric.names[fabric.b[cable]]}"
        raise ConfigError("--topo", where, "has no delay", "give the link a delay above 0, such as 1ns")
    longest = int(-(-flows.num_bytes.max() // settings.mtu_bytes))
    if longest > at.MOST_PACKETS:
        rule = f"is {longest} packets, a flow has at most {at.MOST_PACKETS}"
        raise ConfigError("--flows", int(flows.num_bytes.max()), rule, "split it, or raise congestion.mtu_bytes")


def _constants(fabric: Graph, settings: Settings, law: Law, seed: int, truncate_ns: bool) -> Ints:
    c = np.zeros(at.CONSTANTS, dtype=np.int64)
    values = {
        at.DATA_WIRE: settings.mtu_bytes + settings.header_bytes,
        at.ACK_WIRE: settings.ack_bytes,
        at.PFC_WIRE: settings.pfc_frame_bytes,
        at.TRUNCATE: truncate_ns,
        at.SEED: seed,
        at.WINDOW: round(fabric.latency_ns.min() * 1000),
        at.PFC_ON: settings.pfc,
        at.ECN_ON: settings.ecn,
        at.DCQCN_ON: law == "dcqcn",
        at.NACK_GAP: round(settings.nack_interval_us * _PS_PER_US),
        at.RESERVE: settings.reserve_bytes,
        at.RESUME_OFFSET: settings.resume_offset_bytes,
        at.FREE: -1,
        at.LOSS_SCALED: round(settings.loss_rate * 2**53),
        at.ALPHA_GAP: round(settings.alpha_us * _PS_PER_US),
        at.CUT_GAP: round(settings.decrease_us * _PS_PER_US),
        at.RISE_GAP: round(settings.increase_us * _PS_PER_US),
        at.FAST_STEPS: settings.fast_recovery_steps,
        at.MIN_RATE: settings.min_rate_bps,
        at.CLAMP: settings.clamp_target,
    }
    for column, value in values.items():
        c[column] = value
    host_bps = _host_bps(fabric)
    for column, bps in ((at.RAI, settings.rai_bps), (at.RHAI, settings.rhai_bps)):
        c[column] = bps * host_bps // _REFERENCE_BPS
    return c


def _host_bps(fabric: Graph) -> int:
    """Rate of the first host's NIC, by which the simulator scales what it scales."""
    first = int(fabric.hosts[0])
    cable = int(np.argmax((fabric.a == first) | (fabric.b == first)))
    return int(fabric.bps[cable])


def _links(fabric: Graph, settings: Settings, c: Ints) -> tuple[Ints, int]:
    link = np.zeros((2 * fabric.num_cables, at.LINK_COLUMNS), dtype=np.int64)
    rate = np.repeat(np.round(fabric.bps).astype(np.int64), 2)
    delay = np.repeat(np.round(fabric.latency_ns * 1000).astype(np.int64), 2)
    link[:, at.RATE], link[:, at.DELAY] = rate, delay
    link[0::2, at.DST], link[1::2, at.DST] = fabric.b, fabric.a
    link[:, at.BUSY] = link[:, at.QHEAD] = link[:, at.QTAIL] = -1
    for column, size in ((at.TX_DATA, c[at.DATA_WIRE]), (at.TX_ACK, c[at.ACK_WIRE])):
        took = size * 8 * 10**12 // rate
        link[:, column] = took // 1000 * 1000 if c[at.TRUNCATE] else took
    # Thresholds: Python's integers, for a product of bytes and bit/s may pass 64 bits.
    for column, value in ((at.KMIN, settings.kmin_bytes), (at.KMAX, settings.kmax_bytes)):
        link[:, column] = [value * each // _REFERENCE_BPS for each in rate.tolist()]
    bdp = [each * ps // (8 * 10**12) for each, ps in zip(rate.tolist(), delay.tolist(), strict=True)]
    link[:, at.HEADROOM] = np.array(bdp) * settings.headroom_bdps
    # A link faster than the hosts' gets a larger share of the pool: one shift less a doubling.
    faster = np.ceil(np.log2(np.maximum(rate / _host_bps(fabric), 1))).astype(np.int64)
    link[:, at.SHIFT] = np.maximum(_MOST_SHIFT - faster, 0)
    # What a wire holds: the shortest packets back to back for its delay and a window, and one window of slack.
    shortest_ps = np.maximum(min(settings.ack_bytes, settings.header_bytes + 1) * 8 * 10**12 // rate, 1)
    slots = (delay + 2 * c[at.WINDOW] + link[:, at.TX_DATA]) // shortest_ps + 64
    capacity = np.exp2(np.ceil(np.log2(slots))).astype(np.int64)
    link[:, at.RING_MASK] = capacity - 1
    link[:, at.RING_BASE] = np.cumsum(capacity) - capacity
    return link, int(capacity.sum())


def _in_links(fabric: Graph, link: Ints) -> tuple[Ints, Ints]:
    order = np.argsort(link[:, at.DST], kind="stable").astype(np.int64)
    counts = np.bincount(link[:, at.DST], minlength=fabric.num_nodes)
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), order


def _arriving(link: Ints, in_links: Ints) -> int:
    return int((link[in_links, at.RING_MASK] + 1).sum()) + 1


def _nodes(fabric: Graph, flows: FlowSet, settings: Settings, link: Ints, in_start: Ints, in_links: Ints) -> Ints:
    node = np.zeros((fabric.num_nodes, at.NODE_COLUMNS), dtype=np.int64)
    node[:, at.IS_SWITCH] = fabric.is_switch
    node[:, at.NEXT_TIME] = NEVER
    node[:, at.ROBIN] = -1
    np.minimum.at(node[:, at.NEXT_TIME], flows.src, flows.start_ps)
    counts = np.bincount(flows.src, minlength=fabric.num_nodes)
    node[:, at.NUM_FLOWS] = counts
    node[:, at.FIRST_FLOW] = np.cumsum(counts) - counts
    for each in range(fabric.num_nodes):
        ins = in_links[in_start[each] : in_start[each + 1]]
        if fabric.is_switch[each]:
            taken = int(link[ins, at.HEADROOM].sum()) + settings.reserve_bytes * len(ins)
            if settings.pfc and taken >= settings.buffer_bytes:
                rule = f"is not above the {taken} B that {fabric.names[each]}'s headroom and reserves take"
                remedy = "raise it, or lower congestion.headroom_bdps"
                raise ConfigError("congestion.buffer_bytes", settings.buffer_bytes, rule, remedy)
            node[each, at.POOL_BYTES] = settings.buffer_bytes - taken
        elif len(ins):
            node[each, at.OUT] = ins[0] ^ 1
    return node


def _flows(
    fabric: Graph, flows: FlowSet, settings: Settings, link: Ints, node: Ints
) -> tuple[Ints, np.typing.NDArray[np.int32]]:
    flow = np.zeros((len(flows), at.FLOW_COLUMNS), dtype=np.int64)
    packets = -(-flows.num_bytes // settings.mtu_bytes)
    flow[:, at.SRC], flow[:, at.DST_HOST] = flows.src, flows.dst
    flow[:, at.NUM_PACKETS] = packets
    flow[:, at.LAST_WIRE] = flows.num_bytes - (packets - 1) * settings.mtu_bytes + settings.header_bytes
    flow[:, at.START] = flows.start_ps
    flow[:, at.FINISH] = flow[:, at.LAST_NACK] = -1
    line = link[node[flows.src, at.OUT], at.RATE]
    flow[:, at.LINE_RATE] = flow[:, at.FLOW_RATE] = flow[:, at.TARGET] = line
    flow[:, at.ALPHA_AT] = flow[:, at.CUT_AT] = flow[:, at.RISE_AT] = NEVER
    path = np.full((len(flows), 2 * at.ACK_PATH), NO_LINK, dtype=np.int32)
    path[:, : at.ACK_PATH] = _paths(fabric, flows.src, flows.dst, flows.sport, flows.dport)
    path[:, at.ACK_PATH :] = _paths(fabric, flows.dst, flows.src, flows.dport, flows.sport)
    return flow, path


def _paths(fabric: Graph, src: Ints, dst: Ints, sport: Ints, dport: Ints) -> Ints:
    """Links by hop, shape (num_flows, ACK_PATH), by murmur3 over the header with the switch's node id as its seed."""
    paths = np.full((len(src), at.ACK_PATH), NO_LINK, dtype=np.int64)
    routes = Routes(fabric, dst)
    hops = routes.hops(src, dst)
    if np.any(hops < 0):
        row = int(np.argmax(hops < 0))
        rule = f"has no path to {fabric.names[dst[row]]}"
        raise ConfigError("--flows", fabric.names[src[row]], rule, "join the two in the topology")
    if hops.max() > at.MOST_HOPS:
        rule = f"is {hops.max()} links long, known are paths of up to {at.MOST_HOPS}"
        raise ConfigError("--topo", "longest path", rule, "give a fabric of at most that diameter")
    for port in np.unique(dport).tolist():  # the destination port is one a set of headers
        rows = np.flatnonzero(dport == port)
        ip = fabric.addresses
        headers = Headers(ip[src[rows]], ip[dst[rows]], sport[rows].astype(np.uint16), udp_dport=port)
        found = Routes(fabric, dst[rows]).route(src[rows], dst[rows], _choose(headers))
        paths[rows[:, None], np.arange(found.shape[1])] = np.where(
            found == NO_LINK, NO_LINK, found % fabric.num_cables * 2 + found // fabric.num_cables
        )
    return paths


def _choose(headers: Headers) -> Choose:
    return by_ecmp(Ecmp("murmur3", headers, 0))

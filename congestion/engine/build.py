"""From a fabric, flows and settings to the tables of a run."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from congestion.control import dcqcn, laws
from congestion.engine import tables
from congestion.engine.tables import CHUNK, NEVER, Ints, Rows, State
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
_BYTE_PS = 8 * 10**12  # a byte at 1 bit/s
_REFERENCE_BPS = 200_000_000_000  # rates and thresholds of the settings are for this rate
_MOST_SHIFT = 3
_NUMBERS: dict[Law, int] = {"none": laws.NONE, "dcqcn": laws.DCQCN}


def build(fabric: Graph, flows: FlowSet, settings: Settings, law: Law, *, seed: int, truncate_ns: bool) -> State:
    """The state before the first event.

    Args:
        fabric: hosts with one cable each, links of one rate both ways.
        truncate_ns: cut every serialisation time to whole ns, as ns-3 does.

    Raises:
        ConfigError: a host has not one cable, a link has no delay, a flow has no path, or one exceeds what a packet's
            word can hold.
    """
    _check(fabric, flows, settings)
    run = _run(fabric, settings, law, seed, truncate_ns)
    ends, port = _ports(fabric, settings, run[0])
    node = _nodes(fabric, flows, settings, port)
    by_host = np.lexsort((np.arange(len(flows)), flows.start_ps, flows.src)).astype(np.uint32)
    entering = _packets_a_window(settings, port, int(run["window"][0]))
    most_seen = int(np.bincount(port["to"], entering).max())
    from_hosts = ~fabric.is_switch[port["to"][port["peer"]]]
    run["most_new_chunks"] = entering[from_hosts].sum() // CHUNK + 1
    num_ports = len(port)
    num_chunks = 4 * (2 * num_ports + int(run["most_new_chunks"][0]))
    wire, queue = np.zeros(num_ports, dtype=tables.LIST), np.zeros(num_ports, dtype=tables.LIST)
    for first, lists in ((0, wire), (num_ports, queue)):
        lists["head"] = lists["tail"] = np.arange(first, first + num_ports)
    worker = np.zeros(1, dtype=tables.WORKER)
    worker["soonest"] = NEVER
    free = np.empty((1, num_chunks), dtype=np.uint32)
    worker["num_free"] = num_chunks - 2 * num_ports
    free[0, : num_chunks - 2 * num_ports] = np.arange(num_chunks - 1, 2 * num_ports - 1, -1)
    flow = _flows(flows, settings, port, node)
    own = np.zeros(len(flows), dtype=dcqcn.STATE)
    for column in ("due", "alpha_at", "cut_at", "rise_at"):
        own[column] = NEVER
    own["target_bps"] = flow["rate_bps"]
    own["alpha"] = 1.0
    receiver = np.zeros(len(flows), dtype=tables.RECEIVER)
    receiver["last_nack"] = -1
    return State(
        run=run,
        port=port,
        node=node,
        flow=flow,
        receiver=receiver,
        dcqcn=_dcqcn(fabric, settings),
        dcqcn_flow=own,
        path=_both_paths(fabric, flows, ends),
        by_host=by_host,
        active=np.zeros(len(flows), dtype=np.uint32),
        wire=wire,
        queue=queue,
        visible=np.zeros(num_ports, dtype=np.int64),
        entry=np.empty(num_chunks * CHUNK, dtype=tables.ENTRY),
        following=np.empty(num_chunks, dtype=np.uint32),
        free=free,
        wake=np.zeros(fabric.num_nodes, dtype=np.uint8),
        awake=np.zeros(fabric.num_nodes, dtype=np.uint8),
        seen=np.empty((1, most_seen), dtype=tables.SEEN),
        order=np.empty((1, most_seen), dtype=np.uint32),
        counts=np.empty((1, int(node["num_ports"].max())), dtype=np.uint32),
        worker=worker,
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
    if longest > tables.MOST_PACKETS:
        rule = f"is {longest} packets, a flow has at most {tables.MOST_PACKETS}"
        raise ConfigError("--flows", int(flows.num_bytes.max()), rule, "split it, or raise congestion.mtu_bytes")


def _run(fabric: Graph, settings: Settings, law: Law, seed: int, truncate_ns: bool) -> Rows:
    run = np.zeros(1, dtype=tables.RUN)
    values = {
        "data_wire_bytes": settings.mtu_bytes + settings.header_bytes,
        "ack_wire_bytes": settings.ack_bytes,
        "pfc_wire_bytes": settings.pfc_frame_bytes,
        "truncate": truncate_ns,
        "seed": seed,
        "window": round(fabric.latency_ns.min() * 1000),
        "pfc": settings.pfc,
        "ecn": settings.ecn,
        "law": _NUMBERS[law],
        "pmax": settings.pmax,
        "nack_gap": round(settings.nack_interval_us * _PS_PER_US),
        "reserve_bytes": settings.reserve_bytes,
        "resume_offset_bytes": settings.resume_offset_bytes,
        "loss_scaled": round(settings.loss_rate * 2**53),
    }
    for name, value in values.items():
        run[name] = value
    return run


def _dcqcn(fabric: Graph, settings: Settings) -> Rows:
    made = np.zeros(1, dtype=dcqcn.PARAMETERS)
    host_bps = _host_bps(fabric)
    values = {
        "g": settings.g,
        "alpha_gap": round(settings.alpha_us * _PS_PER_US),
        "cut_gap": round(settings.decrease_us * _PS_PER_US),
        "rise_gap": round(settings.increase_us * _PS_PER_US),
        "fast_steps": settings.fast_recovery_steps,
        "rai_bps": settings.rai_bps * host_bps // _REFERENCE_BPS,
        "rhai_bps": settings.rhai_bps * host_bps // _REFERENCE_BPS,
        "min_rate_bps": settings.min_rate_bps,
        "clamp": settings.clamp_target,
    }
    for name, value in values.items():
        made[name] = value
    return made


def _host_bps(fabric: Graph) -> int:
    """Rate of the first host's NIC, by which the simulator scales what it scales."""
    first = int(fabric.hosts[0])
    cable = int(np.argmax((fabric.a == first) | (fabric.b == first)))
    return int(fabric.bps[cable])


def _ports(fabric: Graph, settings: Settings, run: Any) -> tuple[Ints, Rows]:
    """The port of each end (2c, 2c + 1: cable c's a and b), and the table: a node's ports together, in cable order."""
    at_node = np.stack([fabric.a, fabric.b], axis=1).ravel()
    order = np.argsort(at_node, kind="stable")
    ends = np.empty_like(order)
    ends[order] = np.arange(len(order))
    port = np.zeros(len(order), dtype=tables.PORT)
    port["peer"] = ends[order ^ 1]
    port["to"] = at_node[order ^ 1]
    port["rate"] = rate = np.round(fabric.bps).astype(np.int64)[order // 2]
    port["delay"] = delay = np.round(fabric.latency_ns * 1000).astype(np.int64)[order // 2]
    port["busy"] = -1
    for column, size in (("tx_data", run["data_wire_bytes"]), ("tx_ack", run["ack_wire_bytes"])):
        took = int(size) * _BYTE_PS // rate
        port[column] = took // 1000 * 1000 if run["truncate"] else took
    # Thresholds: Python's integers, for a product of bytes and bit/s may pass 64 bits.
    for column, value in (("kmin", settings.kmin_bytes), ("kmax", settings.kmax_bytes)):
        port[column] = [value * each // _REFERENCE_BPS for each in rate.tolist()]
    bdp = [each * ps // _BYTE_PS for each, ps in zip(rate.tolist(), delay.tolist(), strict=True)]
    port["headroom"] = np.array(bdp) * settings.headroom_bdps
    # A link faster than the hosts' gets a larger share of the pool: one shift less a doubling.
    faster = np.ceil(np.log2(np.maximum(rate / _host_bps(fabric), 1))).astype(np.int64)
    port["shift"] = np.maximum(_MOST_SHIFT - faster, 0)
    return ends, port


def _nodes(fabric: Graph, flows: FlowSet, settings: Settings, port: Rows) -> Rows:
    node = np.zeros(fabric.num_nodes, dtype=tables.NODE)
    node["is_switch"] = fabric.is_switch
    node["next_time"] = NEVER
    node["robin"] = -1
    next_time = np.full(fabric.num_nodes, NEVER)
    np.minimum.at(next_time, flows.src, flows.start_ps)
    node["next_time"] = next_time
    num_ports = np.bincount(port["to"][port["peer"]], minlength=fabric.num_nodes)
    node["num_ports"] = num_ports
    node["first_port"] = np.cumsum(num_ports) - num_ports
    counts = np.bincount(flows.src, minlength=fabric.num_nodes)
    node["num_flows"] = counts
    node["first_flow"] = np.cumsum(counts) - counts
    for n in np.flatnonzero(fabric.is_switch & (num_ports > 0)).tolist():
        mine = port[node["first_port"][n] :][: num_ports[n]]
        taken = int(mine["headroom"].sum()) + settings.reserve_bytes * len(mine)
        if settings.pfc and taken >= settings.buffer_bytes:
            rule = f"is not above the {taken} B that {fabric.names[n]}'s headroom and reserves take"
            remedy = "raise it, or lower congestion.headroom_bdps"
            raise ConfigError("congestion.buffer_bytes", settings.buffer_bytes, rule, remedy)
        node["pool_bytes"][n] = settings.buffer_bytes - taken
        node["max_shift"][n] = mine["shift"].max()
    return node


def _packets_a_window(settings: Settings, port: Rows, window_ps: int) -> Ints:
    """Packets that can leave each port in a window, and what its wire delivers in one; shape (num_ports,)."""
    shortest_ps = np.maximum(min(settings.ack_bytes, settings.header_bytes + 1) * _BYTE_PS // port["rate"], 1)
    return np.asarray((window_ps + port["tx_data"]) // shortest_ps + 64)


def _flows(flows: FlowSet, settings: Settings, port: Rows, node: Rows) -> Rows:
    flow = np.zeros(len(flows), dtype=tables.FLOW)
    packets = -(-flows.num_bytes // settings.mtu_bytes)
    flow["src"], flow["dst"] = flows.src, flows.dst
    flow["num_packets"] = packets
    flow["last_wire_bytes"] = flows.num_bytes - (packets - 1) * settings.mtu_bytes + settings.header_bytes
    flow["start"] = flows.start_ps
    flow["finish"] = -1
    flow["line_rate_bps"] = flow["rate_bps"] = port["rate"][node["first_port"][flows.src]]
    return flow


def _both_paths(fabric: Graph, flows: FlowSet, ends: Ints) -> NDArray[np.uint32]:
    path = np.zeros((len(flows), 2 * tables.ACK_PATH), dtype=np.uint32)
    path[:, : tables.ACK_PATH] = _paths(fabric, ends, flows.src, flows.dst, flows.sport, flows.dport)
    path[:, tables.ACK_PATH :] = _paths(fabric, ends, flows.dst, flows.src, flows.dport, flows.sport)
    return path


def _paths(fabric: Graph, ends: Ints, src: Ints, dst: Ints, sport: Ints, dport: Ints) -> Ints:
    """Ports by hop, shape (num_flows, ACK_PATH), by murmur3 over the header with the switch's node id as its seed."""
    paths = np.zeros((len(src), tables.ACK_PATH), dtype=np.int64)
    routes = Routes(fabric, dst)
    hops = routes.hops(src, dst)
    if np.any(hops < 0):
        row = int(np.argmax(hops < 0))
        rule = f"has no path to {fabric.names[dst[row]]}"
        raise ConfigError("--flows", fabric.names[src[row]], rule, "join the two in the topology")
    if hops.max() > tables.MOST_HOPS:
        rule = f"is {hops.max()} links long, known are paths of up to {tables.MOST_HOPS}"
        raise ConfigError("--topo", "longest path", rule, "give a fabric of at most that diameter")
    for number in np.unique(dport).tolist():  # the destination port is one a set of headers
        rows = np.flatnonzero(dport == number)
        ip = fabric.addresses
        headers = Headers(ip[src[rows]], ip[dst[rows]], sport[rows].astype(np.uint16), udp_dport=number)
        found = Routes(fabric, dst[rows]).route(src[rows], dst[rows], _choose(headers))
        leaves = ends[found % fabric.num_cables * 2 + found // fabric.num_cables]
        paths[rows[:, None], np.arange(found.shape[1])] = np.where(found == NO_LINK, 0, leaves)
    return paths


def _choose(headers: Headers) -> Choose:
    return by_ecmp(Ecmp("murmur3", headers, 0))

"""From a fabric, flows and settings to the tables of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import psutil
from numpy.typing import NDArray

from congestion.control import laws
from congestion.engine import tables
from congestion.engine.tables import CHUNK, NEVER, Ints, Rows, State, aligned
from congestion.files import FlowSet
from congestion.settings import Settings
from netlayer.errors import ConfigError
from topology.graph import Graph
from topology.graph_routing import Choose, Routes, by_ecmp
from topology.hashing import Ecmp, Headers
from topology.routing import NO_LINK

Flap = tuple[int, int, int]
"""A cable, and from when until when it is down, ps."""
Law = Literal["none", "dcqcn", "swift", "nscc", "hybrid"]
LAWS: tuple[Law, ...] = get_args(Law)

_PS_PER_US = 1_000_000
_BYTE_PS = 8 * 10**12  # a byte at 1 bit/s
_REFERENCE_BPS = 200_000_000_000  # rates and thresholds of the settings are for this rate
_MOST_SHIFT = 3
_MOST_REMEMBERED, _LEAST_REMEMBERED = 1 << 26, 1 << 10  # times in all (512 MB), of a flow
_PATH_STEP = 7919  # between the source ports of a flow's paths
_CACHED_PORTS = 1 << 14  # whose tables a core's cache holds
_ROOM = 16  # chunks at first, in those that can be needed at first: what is not used is not there
_STRETCHES = 16  # of nodes, a worker
_HOST_WORK = 2  # of a host beyond its port's, in ports of a switch


def build(
    fabric: Graph,
    flows: FlowSet,
    settings: Settings,
    law: str,
    *,
    seed: int,
    truncate_ns: bool = False,
    num_workers: int = 1,
    flaps: Sequence[Flap] = (),
    timeouts_ps: Sequence[int] = (),
) -> State:
    """The state before the first event.

    Args:
        law: one of LAWS, or the name of one that was entered (`congestion.control.entered`).
        fabric: hosts with one cable each, links of one rate both ways.
        flaps: cables that are down for a time: what arrives over them then is lost, but for PFC frames.
        timeouts_ps: waits before each retry, in place of `settings.timeout_us` and `retries`; then a flow has failed.
        num_workers: threads that share the nodes; they change nothing but the time that it takes.
        truncate_ns: cut every serialisation time to whole ns, as ns-3 does.

    Raises:
        ConfigError: a host has not one cable, a link has no delay, a flow has no path, or one exceeds what a packet's
            word can hold.
    """
    _check(fabric, flows, settings)
    _check_memory(fabric, flows, settings, laws.wants_rtt(law, settings))
    run = _run(fabric, settings, law, seed, truncate_ns)
    ends, port, rate, delay = _ports(fabric)
    kind = _kinds(fabric, settings, run[0], rate, delay)
    num_waits = np.zeros(len(flows), dtype=np.int64) if flows.waits_for is None else np.diff(flows.waits_for[0])
    node = _nodes(fabric, flows, num_waits == 0, settings, port, kind)
    by_host = np.lexsort((np.arange(len(flows)), flows.start_ps, num_waits > 0, flows.src)).astype(np.uint32)
    most_seen = int(np.bincount(port["to"], _most_packets(settings, kind[port["kind"]], run[0])).max())
    run["most_new_chunks"] = _most_new(flows, settings, port, node, kind, run[0]) // CHUNK + 1
    num_ports = len(port)
    run["large"] = num_ports > _CACHED_PORTS
    num_chunks = _ROOM * num_workers * (2 * num_ports + int(run["most_new_chunks"][0]))
    wire, queue = aligned(num_ports, tables.LIST), aligned(num_ports, tables.LIST)
    for first, lists in ((0, wire), (num_ports, queue)):
        lists["head"] = lists["tail"] = np.arange(first, first + num_ports)
    worker, owned, free = _workers(node, num_workers, num_chunks, 2 * num_ports)
    path, num_links = _all_paths(fabric, flows, ends, _num_paths(settings))
    flow = _flows(flows, num_waits, settings, port, kind, node)
    flow["num_links"] = num_links
    flow["base_rtt_ps"] = _base_rtt(path[:: _num_paths(settings)], num_links, kind[port["kind"]])
    waiting_from, waiting = _waiting(flows)
    many = _sent_times(flow) if laws.wants_rtt(law, settings) else 1
    run["sent_mask"] = many - 1 if laws.wants_rtt(law, settings) else -1
    sent = np.zeros((len(flows), many), dtype=np.int64)
    timeouts = np.array(timeouts_ps or [round(settings.timeout_us * _PS_PER_US)] * (settings.retries + 1))
    run["timeout"], run["most_retries"], run["flaps"] = timeouts[0], len(timeouts) - 1, bool(flaps)
    flap_from, flap = _flaps(fabric, flaps, ends)
    words = (int(flow["num_packets"].max()) + 63) // 64 if settings.selective_repeat else 1
    receiver = np.zeros(len(flows), dtype=tables.RECEIVER)
    receiver["last_nack"] = -1
    return State(
        run=run,
        port=port,
        kind=kind,
        node=node,
        flow=flow,
        receiver=receiver,
        **laws.tables(law, len(flows), _host_bps(fabric), settings),
        sent=sent,
        timeouts=timeouts,
        acked=np.zeros((len(flows), words), dtype=np.uint64),
        received=np.zeros((len(flows), words), dtype=np.uint64),
        flap_from=flap_from,
        flap=flap,
        flowlet=np.tile(np.array([0, -NEVER]), (len(flows), 1)),
        waiting_from=waiting_from,
        waiting=waiting,
        path=path,
        path_line=path.view(tables.PATH).ravel(),
        by_host=by_host,
        active=np.zeros(len(flows), dtype=np.uint32),
        wire=wire,
        queue=queue,
        visible=np.zeros(num_ports, dtype=np.int64),
        entry=aligned(num_chunks * CHUNK, tables.ENTRY),
        following=np.empty(num_chunks, dtype=np.uint32),
        free=free,
        wake=np.zeros(fabric.num_nodes, dtype=np.uint8),
        awake=np.zeros(fabric.num_nodes, dtype=np.uint8),
        seen=np.empty((num_workers, most_seen), dtype=tables.SEEN),
        order=np.empty((num_workers, most_seen), dtype=np.uint32),
        counts=np.empty((num_workers, int(node["num_ports"].max())), dtype=np.uint32),
        worker=worker,
        owned=owned,
        arrived=np.zeros(1, dtype=np.int64),
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


def _check_memory(fabric: Graph, flows: FlowSet, settings: Settings, wants_rtt: bool) -> None:
    longest = int(-(-flows.num_bytes.max() // settings.mtu_bytes))
    a_flow = tables.FLOW.itemsize + tables.RECEIVER.itemsize + _num_paths(settings) * tables.PATH.itemsize + 256
    a_flow += 8 * min(longest, _LEAST_REMEMBERED) * wants_rtt + longest // 4 * settings.selective_repeat
    a_port = tables.PORT.itemsize + 2 * tables.LIST.itemsize + 8 * CHUNK * tables.ENTRY.itemsize
    needed = len(flows) * a_flow + 2 * fabric.num_cables * a_port
    free = psutil.virtual_memory().available
    if needed > free:
        rule = f"need about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
        raise ConfigError("flows", len(flows), rule, "simulate fewer or shorter ones, or a smaller fabric")


def _run(fabric: Graph, settings: Settings, law: str, seed: int, truncate_ns: bool) -> Rows:
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
        "law": laws.number_of(law),
        "pmax": settings.pmax,
        "nack_gap": round(settings.nack_interval_us * _PS_PER_US),
        "cnp_gap": round(settings.cnp_interval_us * _PS_PER_US),
        "mtu_bytes": settings.mtu_bytes,
        "most_window_bytes": settings.window_bytes or NEVER,
        "sent_mask": -1,
        "rtt_noise": round(settings.rtt_noise_us * _PS_PER_US),
        "deaf_scaled": round(settings.deaf_share * 2**53),
        "routing": ("ecmp", "spray", "flowlet").index(settings.routing),
        "num_paths": _num_paths(settings),
        "flowlet_gap": round(settings.flowlet_gap_us * _PS_PER_US),
        "selective": settings.selective_repeat,
        "drop_tail": settings.drop_tail,
        "reserve_bytes": settings.reserve_bytes,
        "resume_offset_bytes": settings.resume_offset_bytes,
        "loss_scaled": round(settings.loss_rate * 2**53),
    }
    for name, value in values.items():
        run[name] = value
    return run


def _host_bps(fabric: Graph) -> int:
    """Rate of the first host's NIC, by which the simulator scales what it scales."""
    first = int(fabric.hosts[0])
    cable = int(np.argmax((fabric.a == first) | (fabric.b == first)))
    return int(fabric.bps[cable])


def _ports(fabric: Graph) -> tuple[Ints, Rows, Ints, Ints]:
    """The port of each end (2c, 2c + 1: cable c's a and b), the table, a node's ports together in cable order; and the
    rate and delay of each kind of port."""
    at_node = np.stack([fabric.a, fabric.b], axis=1).ravel()
    order = np.argsort(at_node, kind="stable")
    ends = np.empty_like(order)
    ends[order] = np.arange(len(order))
    port = aligned(len(order), tables.PORT)
    port["peer"] = ends[order ^ 1]
    port["to"] = at_node[order ^ 1]
    port["busy"] = -1
    pairs = np.stack([np.round(fabric.bps), np.round(fabric.latency_ns * 1000)], axis=1).astype(np.int64)
    kinds, which = np.unique(pairs, axis=0, return_inverse=True)
    port["kind"] = which[order // 2]
    return ends, port, kinds[:, 0], kinds[:, 1]


def _kinds(fabric: Graph, settings: Settings, run: Any, rate: Ints, delay: Ints) -> Rows:
    kind = np.zeros(len(rate), dtype=tables.KIND)
    kind["rate"], kind["delay"] = rate, delay
    for column, size in (("tx_data", run["data_wire_bytes"]), ("tx_ack", run["ack_wire_bytes"])):
        took = int(size) * _BYTE_PS // rate
        kind[column] = took // 1000 * 1000 if run["truncate"] else took
    # Thresholds: Python's integers, for a product of bytes and bit/s may pass 64 bits.
    for column, value in (("kmin", settings.kmin_bytes), ("kmax", settings.kmax_bytes)):
        kind[column] = [value * each // _REFERENCE_BPS for each in rate.tolist()]
    bdp = [each * ps // _BYTE_PS for each, ps in zip(rate.tolist(), delay.tolist(), strict=True)]
    kind["headroom"] = np.array(bdp) * settings.headroom_bdps
    # A link faster than the hosts' gets a larger share of the pool: one shift less a doubling.
    faster = np.ceil(np.log2(np.maximum(rate / _host_bps(fabric), 1))).astype(np.int64)
    kind["shift"] = np.maximum(_MOST_SHIFT - faster, 0)
    return kind


def _nodes(fabric: Graph, flows: FlowSet, known: NDArray[np.bool_], settings: Settings, port: Rows, kind: Rows) -> Rows:
    node = np.zeros(fabric.num_nodes, dtype=tables.NODE)
    node["is_switch"] = fabric.is_switch
    node["timer"] = NEVER
    node["robin"] = -1
    next_time = np.full(fabric.num_nodes, NEVER)
    np.minimum.at(next_time, flows.src[known], flows.start_ps[known])
    node["next_time"] = next_time
    num_ports = np.bincount(port["to"][port["peer"]], minlength=fabric.num_nodes)
    node["num_ports"] = num_ports
    node["first_port"] = np.cumsum(num_ports) - num_ports
    counts = np.bincount(flows.src, minlength=fabric.num_nodes)
    node["num_flows"] = counts
    node["num_known"] = np.bincount(flows.src[known], minlength=fabric.num_nodes)
    node["first_flow"] = np.cumsum(counts) - counts
    for n in np.flatnonzero(fabric.is_switch & (num_ports > 0)).tolist():
        mine = kind[port["kind"][node["first_port"][n] :][: num_ports[n]]]
        taken = int(mine["headroom"].sum()) + settings.reserve_bytes * len(mine)
        if settings.pfc and taken >= settings.buffer_bytes:
            rule = f"is not above the {taken} B that {fabric.names[n]}'s headroom and reserves take"
            remedy = "raise it, or lower congestion.headroom_bdps"
            raise ConfigError("congestion.buffer_bytes", settings.buffer_bytes, rule, remedy)
        node["pool_bytes"][n] = settings.buffer_bytes - taken
        node["max_shift"][n] = mine["shift"].max()
    return node


def _workers(node: Rows, num_workers: int, num_chunks: int, taken: int) -> tuple[Rows, Ints, NDArray[np.uint32]]:
    """The workers, their nodes one after another, and their free chunks: all but the first `taken`, lowest first.

    Hosts and switches of a fabric are busy at different times, so each worker has stretches of both.
    """
    work = np.cumsum(node["num_ports"] + _HOST_WORK * (node["is_switch"] == 0))
    stretch = work * (_STRETCHES * num_workers) // (work[-1] + 1) if len(work) else work
    owner = stretch % num_workers
    worker = aligned(num_workers, tables.WORKER)
    worker["soonest"] = NEVER
    worker["stop"] = np.cumsum(np.bincount(owner, minlength=num_workers))
    worker["first"][1:] = worker["stop"][:-1]
    free = np.empty((num_workers, num_chunks), dtype=np.uint32)
    for k in range(num_workers):
        mine = np.arange(num_chunks - 1, taken - 1, -1)[k::num_workers]
        free[k, : len(mine)] = mine
        worker["num_free"][k] = len(mine)
    return worker, np.argsort(owner, kind="stable"), free


def _most_packets(settings: Settings, kind: Rows, run: Any) -> Ints:
    """Of any size, that ports of these kinds can send in a window, and their wires deliver in one."""
    shortest_ps = np.maximum(min(settings.ack_bytes, settings.header_bytes + 1) * _BYTE_PS // kind["rate"], 1)
    return np.asarray((run["window"] + kind["tx_data"]) // shortest_ps + 64)


def _most_new(flows: FlowSet, settings: Settings, port: Rows, node: Rows, kind: Rows, run: Any) -> int:
    """Data packets that all hosts can send in a window: full ones, and one a flow that may be short."""
    first = node["first_port"][np.unique(flows.src)]
    nic = kind[port["kind"][first]]
    full = int((run["window"] // nic["tx_data"] + 1).sum()) + len(flows)
    return min(full, int(_most_packets(settings, nic, run).sum()))


def _flows(flows: FlowSet, num_waits: Ints, settings: Settings, port: Rows, kind: Rows, node: Rows) -> Rows:
    flow = np.zeros(len(flows), dtype=tables.FLOW)
    packets = -(-flows.num_bytes // settings.mtu_bytes)
    flow["src"], flow["dst"] = flows.src, flows.dst
    flow["num_packets"] = packets
    flow["last_wire_bytes"] = flows.num_bytes - (packets - 1) * settings.mtu_bytes + settings.header_bytes
    flow["start"] = flows.start_ps
    flow["finish"] = -1
    flow["num_waits"] = num_waits
    flow["delay"] = 0 if flows.delay_ps is None else flows.delay_ps
    flow["timeout_at"] = flow["window_bytes"] = NEVER
    flow["line_rate_bps"] = flow["rate_bps"] = kind["rate"][port["kind"][node["first_port"][flows.src]]]
    return flow


def _sent_times(flow: Rows) -> int:
    """How many packets of a flow are remembered, and so may be in flight, where a law wants to know round trips."""
    longest = min(int(flow["num_packets"].max()), max(_MOST_REMEMBERED // len(flow), _LEAST_REMEMBERED))
    return 1 << (longest - 1).bit_length()


def _waiting(flows: FlowSet) -> tuple[Ints, NDArray[np.uint32]]:
    """By flow, those that wait for it: waits_for the other way around."""
    if flows.waits_for is None:
        return np.zeros(len(flows) + 1, dtype=np.int64), np.zeros(0, dtype=np.uint32)
    first, earlier = flows.waits_for
    later = np.repeat(np.arange(len(flows), dtype=np.uint32), np.diff(first))
    counts = np.bincount(earlier, minlength=len(flows))
    return np.concatenate([[0], np.cumsum(counts)]), later[np.argsort(earlier, kind="stable")]


def _base_rtt(path: NDArray[np.uint32], num_links: Ints, kind: Rows) -> Ints:
    """Of a full packet there and its ACK back through an idle network, ps; kind: of each port."""
    ways = np.where(
        np.arange(tables.ACK_PATH) < num_links[:, None], path.reshape(len(path), 2, -1).swapaxes(0, 1), len(kind)
    )
    took = np.stack([kind["tx_data"] + kind["delay"], kind["tx_ack"] + kind["delay"]])
    took = np.append(took, np.zeros((2, 1), dtype=np.int64), axis=1)  # of no port
    return np.asarray(took[0][ways[0]].sum(axis=1) + took[1][ways[1]].sum(axis=1))


def _num_paths(settings: Settings) -> int:
    return 1 if settings.routing == "ecmp" else settings.paths


def _flaps(fabric: Graph, flaps: Sequence[Flap], ends: Ints) -> tuple[Ints, Ints]:
    """By port, when what arrives there is lost."""
    rows = [(int(ends[2 * cable + side]), since, until) for cable, since, until in flaps for side in (0, 1)]
    counts = np.bincount([row[0] for row in rows], minlength=2 * fabric.num_cables)
    times = np.array([row[1:] for row in sorted(rows)], dtype=np.int64).reshape(-1, 2)
    return np.concatenate([[0], np.cumsum(counts)]), times


def _all_paths(fabric: Graph, flows: FlowSet, ends: Ints, many: int) -> tuple[NDArray[np.uint32], Ints]:
    """Ports by hop, there and back, `many` rows a flow, the first by its header; and links one way of each flow."""
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

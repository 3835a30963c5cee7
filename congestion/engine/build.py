"""Construction of a run's tables from a fabric, flows and settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import psutil
from numpy.typing import NDArray

from congestion.control import registry
from congestion.engine import tables
from congestion.engine.build_flows import (
    base_rtt,
    first_times,
    flap_rows,
    flow_classes,
    flow_rows,
    laws_by_class,
    num_sent_times,
    waiting_flows,
)
from congestion.engine.build_paths import all_paths, next_hops
from congestion.engine.build_ports import (
    host_bps,
    kind_rows,
    lane_rows,
    node_rows,
    pace_rows,
    port_order,
    port_rows,
)
from congestion.engine.tables import CHUNK, NEVER, Ints, Rows, State, aligned
from congestion.simulation.files import Flap, FlowSet
from congestion.simulation.settings import Settings
from netlayer.errors import ConfigError
from topology.fabric.graph import Graph

Law = Literal["none", "dcqcn", "swift", "nscc", "hybrid"]
LAWS: tuple[Law, ...] = get_args(Law)

_PS_PER_US = 1_000_000
_BYTE_PS = 8 * 10**12  # a byte at 1 bit/s
_PS_PER_DAY = 86_400 * 10**12
_CACHED_PORTS = 1 << 14  # whose tables a core's cache holds
_ROOM = 32  # chunks at first, in those that can be needed at first: what is not used is not there
_MOST_WORK = 1.1  # of a worker in a tier, in even shares
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
    numbers: Ints | None = None,
) -> State:
    """The state before the first event.

    Args:
        law: one of LAWS, or the name of one that was entered (`congestion.control.plugin`).
        fabric: hosts with one cable each, links of one rate both ways.
        flaps: cables that are down for a time: what arrives over them then is lost, but for PFC frames.
        timeouts_ps: waits before each retry, in place of `settings.timeout_us` and `retries`; then a flow has failed.
        numbers: of each flow, by which random numbers are drawn for it; None: its row.
        num_workers: threads that share the nodes; they change nothing but the time that it takes.
        truncate_ns: cut every serialisation time to whole ns, as ns-3 does.

    Raises:
        ConfigError: a host has not one cable, a link has no delay, a flow has no path, or one exceeds what a packet's
            word can hold.
    """
    _check(fabric, flows, settings)
    in_use = laws_by_class(settings, law)
    by_law = [registry.wants_rtt(each, settings.of_class(number)) for number, each in enumerate(in_use)]
    wants_rtt = settings.measure_rtt or any(by_law)
    # Before the first table: pages are given out on first touch, so a run too large for memory would begin, and be
    # killed in its middle.
    _check_memory(fabric, flows, settings, wants_rtt)
    run = _run(fabric, settings, law, seed, truncate_ns)
    ends, port, like = port_rows(fabric, port_order(fabric, flows), settings)
    kind = kind_rows(fabric, settings, run[0], like)
    num_waits = np.zeros(len(flows), dtype=np.int64) if flows.waits_for is None else np.diff(flows.waits_for[0])
    node = node_rows(fabric, flows, num_waits == 0, settings, port, kind)
    # Flows that wait for others stand behind those whose start is known; as their starts become known, hosts move them
    # up.
    by_host = np.lexsort((np.arange(len(flows)), flows.start_ps, num_waits > 0, flows.src)).astype(np.uint32)
    # Here, for the next two lines divide by serialisation times, which it checks to be above 0.
    _check_times(fabric, flows, port, node, kind, run[0])
    most_seen = int(np.bincount(port["to"], _most_packets(flows, kind[port["kind"]], run[0])).max())
    run["most_new_chunks"] = _most_new(flows, port, node, kind, run[0]) // CHUNK + 1
    num_ports = len(port)
    run["large"] = num_ports > _CACHED_PORTS
    # A wire a port, and a queue for each of its classes. Every list begins with a chunk of its own.
    num_lists = num_ports * (1 + settings.num_classes)
    # Free chunks are kept by worker, so that none has to lock: each needs room for what it may take in a window.
    num_chunks = _ROOM * num_workers * (num_lists + int(run["most_new_chunks"][0]))
    first_entry = np.arange(0, num_lists * CHUNK, CHUNK, dtype=np.uint32)
    first_wire, first_queue = first_entry[:num_ports], first_entry[num_ports:].copy()
    worker, owned, free = _workers(_owners(node, port, num_workers), num_workers, num_chunks, num_lists)
    path, num_links = all_paths(fabric, flows, ends, _num_paths(settings), settings)
    spray = np.zeros(0, dtype=np.uint32)
    if settings.routing == "spray":
        node["switch"], run["num_switches"], spray = next_hops(fabric, flows, ends)
    flow = flow_rows(flows, num_waits, settings, law, port, kind, node)
    flow["num_links"] = num_links
    # The first path of each flow, that of its own header.
    port_kind = port["kind"]
    flow["base_rtt_ps"] = base_rtt(path[:: _num_paths(settings)], num_links, kind[port_kind])
    waiting_from, waiting = waiting_flows(flows)
    many = num_sent_times(int(flow["num_packets"].max()), len(flow)) if wants_rtt else 1
    # `many` is a power of two, so the place of a packet's time is its number & mask: no division a packet.
    run["sent_mask"] = many - 1 if wants_rtt else -1
    sent = np.zeros((len(flows), many), dtype=np.int64)
    # A wait more than retries: after the last retry one is waited for too, before the flow has failed.
    timeouts = np.array(timeouts_ps or [round(settings.timeout_us * _PS_PER_US)] * (settings.retries + 1))
    run["timeout"], run["most_retries"], run["flaps"] = timeouts[0], len(timeouts) - 1, bool(flaps)
    flap_from, flap = flap_rows(fabric, flaps, ends)
    num_words = (int(flow["num_packets"].max()) + 63) // 64 if settings.selective_repeat else 1
    receiver = np.zeros(len(flows), dtype=tables.RECEIVER)
    receiver["last_nack"] = -1
    receiver["number"] = np.arange(len(flows)) if numbers is None else numbers
    variant = features(settings, has_faults=bool(flaps or timeouts.any()))
    return State(
        # The type alone is read: a kernel is compiled for each set of field names (`kernels.machine.has`).
        features=np.zeros(1, dtype=[(name, "u1") for name in variant]),
        run=run,
        # In the order of DATA, ACK, NACK, PFC: a NACK is as long as an ACK.
        size=np.array([run[name][0] for name in ("data_wire_bytes", *2 * ("ack_wire_bytes",), "pfc_wire_bytes")]),
        pace=pace_rows(kind, run[0]),
        port=port,
        lane=lane_rows(port, settings),
        weight=np.array([settings.class_of(number).weight for number in range(settings.num_classes)]),
        class_of=flow_classes(settings, flows),
        kind=kind,
        node=node,
        flow=flow,
        receiver=receiver,
        **registry.tables(in_use, len(flows), host_bps(fabric), settings),
        sent=sent,
        rtt=np.zeros(len(flows) if settings.measure_rtt else 1, dtype=tables.RTT),
        law_view=np.zeros(len(flows) if registry.PLUGIN in flow["law"] else 0, dtype=tables.VIEW),
        cause=np.zeros((num_ports, 3), dtype=np.int64),
        timeouts=timeouts,
        acked=np.zeros((len(flows), num_words), dtype=np.uint64),
        received=np.zeros((len(flows), num_words), dtype=np.uint64),
        flap_from=flap_from,
        flap=flap,
        # Last seen so long ago that any gap has passed: the first packet chooses a path.
        flowlet=np.tile(np.array([0, -NEVER]), (len(flows), 1)),
        spray=spray,
        watchdog=np.zeros(num_ports if settings.watchdog_detection_us else 0, dtype=tables.WATCHDOG),
        waiting_from=waiting_from,
        waiting=waiting,
        path=path,
        path_line=path.view(tables.PATH).ravel(),
        by_host=by_host,
        active=np.zeros(len(flows), dtype=np.uint32),
        wire_head=first_wire.copy(),
        wire_tail=first_wire.copy(),
        queue_head=first_queue,
        queue_tail=first_queue.copy(),
        arrivals=aligned(num_ports, tables.ARRIVALS),
        entry=aligned(num_chunks * CHUNK, tables.ENTRY),
        following=np.empty(num_chunks, dtype=np.uint32),
        free=free,
        next_time=first_times(fabric.num_nodes, flows, num_waits == 0),
        wake=np.zeros((2, fabric.num_nodes), dtype=np.uint8),
        seen=np.empty((num_workers, most_seen), dtype=tables.SEEN),
        order=np.empty((num_workers, most_seen), dtype=np.uint32),
        counts=np.empty((num_workers, int(node["num_ports"].max())), dtype=np.uint32),
        busy=np.empty((num_workers, int(node["num_ports"].max())), dtype=np.uint32),
        next_tx=np.empty((num_workers, int(node["num_ports"].max())), dtype=np.int64),
        worker=worker,
        owned=owned,
        # Two of the 8 numbers are used: 64 bytes a row, so that workers do not write into one cache line.
        mailbox=np.zeros((num_workers, 2, 8), dtype=np.int64),
        arrived=np.zeros(1, dtype=np.int64),
    )


def _check(fabric: Graph, flows: FlowSet, settings: Settings) -> None:
    """Raise ConfigError for fabric, flows or classes that cannot be simulated."""
    ends = np.bincount(np.concatenate([fabric.a, fabric.b]), minlength=fabric.num_nodes)
    for host in np.unique(np.concatenate([flows.src, flows.dst])).tolist():
        if ends[host] != 1:
            name = fabric.names[host]
            raise ConfigError("--topo", name, f"has {ends[host]} cables", "give each host that sends or receives one")
    if np.any(fabric.latency_ns <= 0):
        cable = int(np.argmax(fabric.latency_ns <= 0))
        where = f"{fabric.names[fabric.a[cable]]} - {fabric.names[fabric.b[cable]]}"
        raise ConfigError("--topo", where, "has no delay", "give the link a delay above 0, such as 1ns")
    if len(flows) > tables.MOST_FLOWS:
        raise ConfigError("flows", len(flows), f"a run has at most {tables.MOST_FLOWS}", "simulate fewer")
    if settings.classes and flows.pg.max() >= settings.num_classes:
        row = int(np.argmax(flows.pg))
        rule = f"is the class of flow {row}, known are those up to {settings.num_classes - 1}"
        raise ConfigError("pg", int(flows.pg[row]), rule, f"set congestion.classes.{flows.pg[row]}.weight")
    for number, law in enumerate(laws_by_class(settings, "none")):
        if law not in LAWS:
            rule = f"is unknown; known are {', '.join(LAWS)}"
            raise ConfigError(f"congestion.classes.{number}.law", law, rule, "give one of them")
    longest = int(-(-flows.num_bytes.max() // settings.mtu_bytes))
    if longest > tables.MOST_PACKETS:
        rule = f"is {longest} packets, a flow has at most {tables.MOST_PACKETS}"
        raise ConfigError("flows", f"{int(flows.num_bytes.max())} B", rule, "split it, or raise congestion.mtu_bytes")


def _check_memory(fabric: Graph, flows: FlowSet, settings: Settings, wants_rtt: bool) -> None:
    """Raise ConfigError if the tables would need more memory than is free."""
    longest = int(-(-flows.num_bytes.max() // settings.mtu_bytes))
    a_flow = tables.FLOW.itemsize + tables.RECEIVER.itemsize + _num_paths(settings) * tables.PATH.itemsize + 256
    # Times of 8 bytes a packet; and a bit a packet in each of `acked` and `received`, which is longest / 4 bytes.
    a_flow += 8 * num_sent_times(longest, len(flows)) * wants_rtt + longest // 4 * settings.selective_repeat
    a_port = (
        tables.PORT.itemsize * (1 + settings.num_classes)
        + tables.ARRIVALS.itemsize
        + 4 * 4  # heads and tails of a wire and a queue
        + 8 * CHUNK * tables.ENTRY.itemsize
    )
    needed = len(flows) * a_flow + 2 * fabric.num_cables * a_port
    free = psutil.virtual_memory().available
    if needed > free:
        rule = f"need about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
        raise ConfigError("flows", len(flows), rule, "simulate fewer or shorter ones, or a smaller fabric")


def _run(fabric: Graph, settings: Settings, law: str, seed: int, truncate_ns: bool) -> Rows:
    """Return the numbers that hold for the whole run, one row of `tables.RUN`: times in ps, sizes in bytes."""
    run = np.zeros(1, dtype=tables.RUN)
    values = {
        "data_wire_bytes": settings.mtu_bytes + settings.header_bytes,
        "ack_wire_bytes": settings.ack_bytes,
        "pfc_wire_bytes": settings.pfc_frame_bytes,
        "truncate": truncate_ns,
        "seed": seed,
        "window": round(fabric.latency_ns.min() * 1000),  # ps: the lookahead of `engine.run`
        "pfc": settings.pfc,
        "law": registry.number_of(law),
        "pmax": settings.pmax,
        "ecn": settings.ecn,
        "num_classes": settings.num_classes,
        "ack_class": settings.ack_class,
        "nack_gap": round(settings.nack_interval_us * _PS_PER_US),
        "cnp_gap": round(settings.cnp_interval_us * _PS_PER_US),
        "mtu_bytes": settings.mtu_bytes,
        "most_window_bytes": settings.window_bytes or NEVER,
        "sent_mask": -1,
        "rtt_noise": round(settings.rtt_noise_us * _PS_PER_US),
        "measure_rtt": settings.measure_rtt,
        "deaf_scaled": round(settings.deaf_share * 2**53),  # of 2^53, the range of `packets.hash_random`
        # In the order of ECMP, SPRAY, FLOWLET, HASHED_PORTS in `tables`, and below of DROP, FORWARD, ALERT.
        "routing": ("ecmp", "spray", "flowlet", "hashed_ports").index(settings.routing),
        "num_paths": _num_paths(settings),
        "flowlet_gap": round(settings.flowlet_gap_us * _PS_PER_US),
        "selective": settings.selective_repeat,
        "drop_tail": settings.drop_tail,
        "reserve_bytes": settings.reserve_bytes,
        "resume_offset_bytes": settings.resume_offset_bytes,
        "losses": bool(settings.loss_rate or settings.loss_rates),
        "xoff_bytes": settings.xoff_bytes or NEVER,
        "xon_bytes": settings.xon_bytes,
        "watchdog_after": round(settings.watchdog_detection_us * _PS_PER_US),
        "watchdog_restore": round(settings.watchdog_restoration_us * _PS_PER_US),
        "watchdog_action": ("drop", "forward", "alert").index(settings.watchdog_action),
    }
    for name, value in values.items():
        run[name] = value
    return run


def features(settings: Settings, *, has_faults: bool) -> list[str]:
    """Return the variant that the kernels are compiled for: one class knows nothing of more, plain ones of no losses.

    Args:
        has_faults: links go down, or a sender has a retransmit timer.
    """
    if settings.classes:
        return ["extras", "classes"]
    return ["extras"] if has_faults or _wants_extras(settings) else ["plain"]


def _wants_extras(settings: Settings) -> bool:
    """Whether a run needs what most runs do not: kernels for those are compiled without it."""
    return bool(
        settings.loss_rate
        or settings.loss_rates
        or settings.routing != "ecmp"
        or settings.selective_repeat
        or settings.timeout_us
        or settings.deaf_share
        or settings.rtt_noise_us
        or settings.measure_rtt
        or settings.cnp_interval_us
        or settings.drop_tail
        or settings.watchdog_detection_us
    )


def _owners(node: Rows, port: Rows, num_workers: int) -> Ints:
    """The worker of each node.

    Hosts in stretches of as much work each, then each switch with most of those that it is cabled to and that have a
    worker already, tier by tier from the hosts up: few packets pass from one worker's cache to another's. Hosts and
    tiers are busy at different times, so each worker has about as much of each of them.
    """
    work = node["num_ports"] + _HOST_WORK * (node["is_switch"] == 0)
    if num_workers == 1:
        return np.zeros(len(node), dtype=np.int64)
    owner = np.full(len(node), -1)
    hosts = np.flatnonzero(node["is_switch"] == 0)
    shares = np.cumsum(work[hosts])
    # One more than all shares, or the last host would go to a worker that is not there.
    owner[hosts] = shares * num_workers // (shares[-1] + 1) if len(hosts) else 0
    here, there = port["to"][port["peer"]], port["to"]
    while (owner < 0).any():
        votes = np.zeros((len(node), num_workers), dtype=np.int64)
        # Each cable to a node that has a worker is a vote for that worker.
        reached = (owner[here] < 0) & (owner[there] >= 0)
        np.add.at(votes, (here[reached], owner[there[reached]]), 1)
        tier = np.flatnonzero(votes.any(axis=1))
        if not len(tier):  # cabled to nothing that leads to a host
            tier = np.flatnonzero(owner < 0)
        load, most = np.zeros(num_workers), _MOST_WORK * work[tier].sum() / num_workers
        for n in tier:
            # Who still has room comes first, then who has most of its cables: else one worker would get a whole tier.
            best = min(range(num_workers), key=lambda k: (load[k] + work[n] > most, -votes[n, k], load[k]))
            owner[n] = best
            load[best] += work[n]
    return owner


def _workers(
    owner: Ints, num_workers: int, num_chunks: int, num_taken: int
) -> tuple[Rows, NDArray[np.uint32], NDArray[np.uint32]]:
    """Workers, their nodes one after another, and their free chunks: all but the first `num_taken`, lowest first."""
    worker = aligned(num_workers, tables.WORKER)
    worker["soonest"] = NEVER
    worker["stop"] = np.cumsum(np.bincount(owner, minlength=num_workers))
    worker["first"][1:] = worker["stop"][:-1]
    free = np.empty((num_workers, num_chunks), dtype=np.uint32)
    for k in range(num_workers):
        # Descending, for they are taken from the end: those above are rarely reached, and stay pages that nobody made.
        chunks = np.arange(num_chunks - 1, num_taken - 1, -1)[k::num_workers]
        free[k, : len(chunks)] = chunks
        worker["num_free"][k] = len(chunks)
    return worker, np.argsort(owner, kind="stable").astype(np.uint32), free


def _most_packets(flows: FlowSet, kind: Rows, run: Any) -> Ints:
    """Packets of any size that ports of these kinds can send in a window, and their wires deliver in one.

    The last packet of a flow may be so short that it takes no time, once that is cut to whole ns.
    """
    # A packet may have begun before the window in which it arrives, hence its own time on top of the window's.
    span, header = run["window"] + kind["tx_data"], int(run["data_wire_bytes"]) - int(run["mtu_bytes"])
    short = (header + 1) * _BYTE_PS // kind["rate"]
    short = short // 1000 * 1000 if run["truncate"] else short
    by_time = span // np.minimum(kind["tx_ack"], np.maximum(short, 1))
    at_once = span // kind["tx_ack"] + np.minimum(len(flows), span)
    return np.asarray(np.where(short > 0, by_time, at_once) + 64)


def _check_times(fabric: Graph, flows: FlowSet, port: Rows, node: Rows, kind: Rows, run: Any) -> None:
    """Check that each packet takes time, and that all of them end before the clock does."""
    for name, size in (("tx_data", "data_wire_bytes"), ("tx_ack", "ack_wire_bytes")):
        if not kind[name].min():
            rate = float(kind["rate"][kind[name].argmin()])
            rule = f"takes no time at {rate / 1e9:g} Gbit/s" + ", cut to whole ns" * bool(run["truncate"])
            remedy = "leave --truncate-ns out" if run["truncate"] else "give slower links or larger packets"
            raise ConfigError("packet", f"{run[size]} B", rule, remedy)
    for name, host in (("leaves", flows.src), ("goes to", flows.dst)):
        # The bound on the index is for nodes without a cable at the table's end: they have no flows, so any rate will
        # do.
        first_port = np.minimum(node["first_port"], len(port) - 1)
        nic_kind = port["kind"][first_port]
        rate = kind["rate"][nic_kind]
        tx_time = np.bincount(host, flows.num_bytes, fabric.num_nodes) * _BYTE_PS / rate
        if tx_time.max() + float(flows.start_ps.min()) > NEVER:
            busiest = int(tx_time.argmax())
            days = (
                f"takes {tx_time[busiest] / _PS_PER_DAY:.0f} days, and the clock ends after {NEVER / _PS_PER_DAY:.0f}"
            )
            rule = f"is what {name} {fabric.names[busiest]} and {days}"
            total = f"{int(flows.num_bytes[host == busiest].sum())} B"
            raise ConfigError("flows", total, rule, "give fewer bytes or faster links")


def _most_new(flows: FlowSet, port: Rows, node: Rows, kind: Rows, run: Any) -> int:
    """Data packets that all hosts can send in a window: full ones, and one a flow that may be short."""
    first = node["first_port"][np.unique(flows.src)]
    nic = kind[port["kind"][first]]
    full = int((run["window"] // nic["tx_data"] + 1).sum()) + len(flows)
    return min(full, int(_most_packets(flows, nic, run).sum()))


def _num_paths(settings: Settings) -> int:
    return settings.paths if settings.routing in ("flowlet", "hashed_ports") else 1

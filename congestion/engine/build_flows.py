"""The tables of flows, and of what the links do to them, before the first event."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from congestion.control import registry
from congestion.engine import tables
from congestion.engine.tables import NEVER, Ints, Rows
from congestion.simulation.files import Flap, FlowSet
from congestion.simulation.settings import Settings
from topology.fabric.graph import Graph

_MOST_REMEMBERED, _LEAST_REMEMBERED = 1 << 26, 1 << 10  # times in all (512 MB), of a flow


def flow_rows(
    flows: FlowSet, num_waits: Ints, settings: Settings, law: str, port: Rows, kind: Rows, node: Rows
) -> Rows:
    """Fill FLOW, but for what depends on its path."""
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
    nic = node["first_port"][flows.src]
    nic_kind = port["kind"][nic]
    flow["line_rate_bps"] = flow["rate_bps"] = kind["rate"][nic_kind]
    numbers = np.array([registry.number_of(each) for each in laws_by_class(settings, law)])
    flow["tuned"] = tuned = flow_classes(settings, flows)
    flow["law"] = numbers[tuned]
    return flow


def flow_classes(settings: Settings, flows: FlowSet) -> NDArray[np.uint8]:
    """Return each flow's class; without classes `pg` is not read."""
    return (flows.pg if settings.classes else np.zeros(len(flows))).astype(np.uint8)


def laws_by_class(settings: Settings, law: str) -> list[str]:
    return [settings.class_of(number).law or law for number in range(settings.num_classes)]


def num_sent_times(most_packets: int, num_flows: int) -> int:
    """Number of packets remembered of a flow, and so may be in flight, where a law wants to know round trips.

    Args:
        most_packets: of the longest flow.
    """
    longest = min(most_packets, max(_MOST_REMEMBERED // num_flows, _LEAST_REMEMBERED))
    return 1 << (longest - 1).bit_length()


def waiting_flows(flows: FlowSet) -> tuple[Ints, NDArray[np.uint32]]:
    """Return by flow those that wait for it: waits_for the other way around."""
    if flows.waits_for is None:
        return np.zeros(len(flows) + 1, dtype=np.int64), np.zeros(0, dtype=np.uint32)
    first, earlier = flows.waits_for
    later = np.repeat(np.arange(len(flows), dtype=np.uint32), np.diff(first))
    counts = np.bincount(earlier, minlength=len(flows))
    return np.concatenate([[0], np.cumsum(counts)]), later[np.argsort(earlier, kind="stable")]


def first_times(num_nodes: int, flows: FlowSet, known: NDArray[np.bool_]) -> Ints:
    """Return when each node has a flow to start, NEVER where none is known to."""
    times = np.full(num_nodes, NEVER)
    np.minimum.at(times, flows.src[known], flows.start_ps[known])
    return times


def base_rtt(path: NDArray[np.uint32], num_links: Ints, kind: Rows) -> Ints:
    """Round trip of a full packet there and its ACK back through an idle network, ps; kind: of each port."""
    ways = np.where(
        np.arange(tables.ACK_PATH) < num_links[:, None], path.reshape(len(path), 2, -1).swapaxes(0, 1), len(kind)
    )
    there, back = kind["tx_data"] + kind["delay"], kind["tx_ack"] + kind["delay"]
    delays_ps = np.stack([there, back])
    delays_ps = np.append(delays_ps, np.zeros((2, 1), dtype=np.int64), axis=1)  # of no port
    return np.asarray(delays_ps[0][ways[0]].sum(axis=1) + delays_ps[1][ways[1]].sum(axis=1))


def flap_rows(fabric: Graph, flaps: Sequence[Flap], ends: Ints) -> tuple[Ints, Ints]:
    """Return by port when what arrives there is lost."""
    rows = [(int(ends[2 * cable + side]), since, until) for cable, since, until in flaps for side in (0, 1)]
    counts = np.bincount([row[0] for row in rows], minlength=2 * fabric.num_cables)
    times = np.array([row[1:] for row in sorted(rows)], dtype=np.int64).reshape(-1, 2)
    return np.concatenate([[0], np.cumsum(counts)]), times

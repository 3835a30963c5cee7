"""The tables of nodes and ports, and of what ports of a rate and a class have in common."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from congestion.engine import tables
from congestion.engine.tables import NEVER, Ints, Rows, aligned
from congestion.simulation.files import FlowSet
from congestion.simulation.settings import Settings
from netlayer.errors import ConfigError
from topology.fabric.graph import Graph

_BYTE_PS = 8 * 10**12  # a byte at 1 bit/s
_REFERENCE_BPS = 200_000_000_000  # thresholds of the settings are for this rate
_MOST_SHIFT = 3


def host_bps(fabric: Graph) -> int:
    """Rate of the first host's NIC, by which the simulator scales what it scales."""
    first = int(fabric.hosts[0])
    cable = int(np.argmax((fabric.a == first) | (fabric.b == first)))
    return int(fabric.bps[cable])


def port_order(fabric: Graph, flows: FlowSet) -> Ints:
    """The cable's end at each port, (2 * num_cables,): 2c for cable c's a, 2c + 1 for its b. A node's are together.

    Of what comes at one moment, all else alike, a switch takes the port with the lowest number first. So a node's ports
    stand in the order in which those behind them begin: ns-3 runs events of one moment in the order in which they were
    scheduled, and its flows in the order of their file. Then by node id, then by cable.
    """
    at_node = np.stack([fabric.a, fabric.b], axis=1).ravel()
    peer = np.stack([fabric.b, fabric.a], axis=1).ravel()
    return np.lexsort((np.arange(len(at_node)), peer, _first_flows(fabric, flows)[peer], at_node))


def _first_flows(fabric: Graph, flows: FlowSet) -> Ints:
    """Place, by node, of the first flow that begins there, or else ends; of a switch that of any host below."""
    place = np.empty(len(flows), dtype=np.int64)
    place[np.lexsort((np.arange(len(flows)), flows.start_ps))] = np.arange(len(flows))
    first, ends = (np.full(fabric.num_nodes, len(flows)) for _ in range(2))
    np.minimum.at(first, flows.src, place)
    np.minimum.at(ends, flows.dst, place)
    first = np.where(first < len(flows), first, ends)
    level = fabric.level
    for height in range(int(level.max())):
        up = (level[fabric.link_src] == height) & (level[fabric.link_dst] == height + 1)
        np.minimum.at(first, fabric.link_dst[up], first[fabric.link_src[up]])
    return first


def port_rows(fabric: Graph, order: Ints, settings: Settings) -> tuple[Ints, Rows, Ints]:
    """The port of each end, the table, and of each kind of port rate, delay and loss rate (of 2^53): (num_kinds, 3).

    Args:
        order: of `port_order`.

    Raises:
        ConfigError: a cable that has a loss rate is not there.
    """
    at_node = np.stack([fabric.a, fabric.b], axis=1).ravel()
    ends = np.empty_like(order)
    ends[order] = np.arange(len(order))
    port = aligned(len(order), tables.PORT)
    port["peer"] = ends[order ^ 1]
    port["to"] = at_node[order ^ 1]
    port["busy"] = -1
    measures = [np.round(fabric.bps), np.round(fabric.latency_ns * 1000), _losses(fabric, settings)]
    kinds, which = np.unique(np.stack(measures, axis=1).astype(np.int64), axis=0, return_inverse=True)
    port["kind"] = which[order // 2] * settings.num_classes
    return ends, port, kinds


def _losses(fabric: Graph, settings: Settings) -> Ints:
    """Share of packets that each cable loses, of 2^53."""
    losses = np.full(fabric.num_cables, round(settings.loss_rate * 2**53))
    for link, share in settings.loss_rates.items():
        losses[fabric.cables_between(link, f"congestion.loss_rates.{link}")] = round(share * 2**53)
    return losses


def lane_rows(port: Rows, settings: Settings) -> Rows:
    """A row a class of each port; none without classes, where a port's own does for all."""
    if not settings.classes:
        return aligned(0, tables.PORT)
    num_classes = settings.num_classes
    lane = aligned(len(port) * num_classes, tables.PORT)
    lane["kind"] = (port["kind"][:, None] + np.arange(num_classes)).ravel()
    lane["turn"] = -1
    return lane


def kind_rows(fabric: Graph, settings: Settings, run: Any, like: Ints) -> Rows:
    """Return for each row of `like` (rate, delay, loss rate) a row a class."""
    kind = np.zeros(len(like), dtype=tables.KIND)
    rate = kind["rate"] = like[:, 0]
    kind["delay"], kind["loss_scaled"] = like[:, 1], like[:, 2]
    for column, size in (("tx_data", run["data_wire_bytes"]), ("tx_ack", run["ack_wire_bytes"])):
        tx_ps = int(size) * _BYTE_PS // rate
        kind[column] = tx_ps // 1000 * 1000 if run["truncate"] else tx_ps
    kind = np.repeat(kind, settings.num_classes)
    for number in range(settings.num_classes):
        _set_class(kind[number :: settings.num_classes], settings, number)
    # A link faster than the hosts' gets a larger share of the pool: one shift less a doubling.
    faster = np.ceil(np.log2(np.maximum(kind["rate"] / host_bps(fabric), 1))).astype(np.int64)
    kind["shift"] = np.maximum(_MOST_SHIFT - faster, 0)
    if settings.pfc_alpha:
        power = round(math.log2(settings.pfc_alpha))
        lossless = kind["lossless"] == 1
        kind["shift"][lossless], kind["lift"][lossless] = max(-power, 0), max(power, 0)
    return kind


def _set_class(kind: Rows, settings: Settings, number: int) -> None:
    """Set the columns of port kinds for one class of traffic: ECN thresholds and PFC headroom by the port's rate."""
    its = settings.class_of(number)
    kind["lossless"], kind["pmax"] = its.lossless, its.pmax
    rate, delay = kind["rate"].tolist(), kind["delay"].tolist()
    # Thresholds: Python's integers, for a product of bytes and bit/s may pass 64 bits.
    for column, value in (("kmin", its.kmin_bytes), ("kmax", its.kmax_bytes)):
        kind[column] = [value * each // _REFERENCE_BPS if its.ecn else NEVER for each in rate]
    kind["headroom"] = [
        settings.headroom_bytes or each * ps // _BYTE_PS * its.headroom_bdps
        for each, ps in zip(rate, delay, strict=True)
    ]


def pace_rows(kind: Rows, run: Any) -> Ints:
    """Serialisation of a data packet, ACK, NACK and PFC frame by kind of port, then the delay; (many, 8)."""
    pace = np.zeros((len(kind), 8), dtype=np.int64)
    pfc = int(run["pfc_wire_bytes"]) * _BYTE_PS // kind["rate"]
    pace[:, :4] = np.stack(
        [kind["tx_data"], kind["tx_ack"], kind["tx_ack"], pfc // 1000 * 1000 if run["truncate"] else pfc], axis=1
    )
    pace[:, 4] = kind["delay"]
    return pace


def node_rows(
    fabric: Graph, flows: FlowSet, known: NDArray[np.bool_], settings: Settings, port: Rows, kind: Rows
) -> Rows:
    """Return the table of nodes: where the ports and flows of each begin, and what a switch's shared buffer holds.

    Raises:
        ConfigError: headroom and reserves take all of a switch's buffer.
    """
    node = np.zeros(fabric.num_nodes, dtype=tables.NODE)
    node["is_switch"] = fabric.is_switch
    node["timer"] = NEVER
    node["round_robin_index"] = -1
    num_ports = np.bincount(port["to"][port["peer"]], minlength=fabric.num_nodes)
    node["num_ports"] = num_ports
    node["first_port"] = np.cumsum(num_ports) - num_ports
    counts = np.bincount(flows.src, minlength=fabric.num_nodes)
    node["num_flows"] = counts
    node["num_known"] = np.bincount(flows.src[known], minlength=fabric.num_nodes)
    node["first_flow"] = np.cumsum(counts) - counts
    for n in np.flatnonzero(fabric.is_switch & (num_ports > 0)).tolist():
        kinds = kind[port["kind"][node["first_port"][n] :][: num_ports[n], None] + np.arange(settings.num_classes)]
        lossless = kinds if not settings.classes else kinds[kinds["lossless"] == 1]
        taken_bytes = int(lossless["headroom"].sum()) + settings.reserve_bytes * lossless.size
        if (kinds["lossless"] == 1).any() and taken_bytes >= settings.buffer_bytes:
            rule = f"is not above the {taken_bytes} B that {fabric.names[n]}'s headroom and reserves take"
            remedy = "raise it, or lower congestion.headroom_bdps"
            raise ConfigError("congestion.buffer_bytes", settings.buffer_bytes, rule, remedy)
        node["pool_bytes"][n] = settings.buffer_bytes - taken_bytes
        node["max_shift"][n] = kinds["shift"].max()
    return node

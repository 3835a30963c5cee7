"""Lower bound on completion time under any law: the most loaded link under the flows' paths, and chains of flows.

A link must pass all that is routed over it, and not before it is there; a flow that waits for others cannot begin
before these could end. The larger of the two, over all links and chains. Under ECMP paths are known, and ACKs take
their share; where a packet may take several paths only a host's own link is sure to be passed. Not covered: that flows
which wait contend with each other, cuts of several links, and PFC frames: a schedule as short as this need not exist.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from congestion.engine.build_paths import ecmp_of
from congestion.simulation.files import FlowSet, Ints
from congestion.simulation.settings import Settings
from topology.ecmp.graph_routing import Routes, by_ecmp
from topology.ecmp.hashing import Headers
from topology.ecmp.routing import NO_LINK
from topology.fabric.graph import Graph

Floats = NDArray[np.float64]

_BYTE_PS = 8e12  # a byte at 1 bit/s
_PS_PER_NS, _PS_PER_US = 1e3, 1e6


def completion_bound_us(fabric: Graph, flows: FlowSet, settings: Settings) -> float:
    """First start to the last flow's last ACK, at the least."""
    known = settings.routing == "ecmp"
    sizes = _Sizes.of(flows, settings)
    there = _Way.of(fabric, flows.src, flows.dst, flows.sport, flows.dport, settings)
    back = _Way.of(fabric, flows.dst, flows.src, flows.dport, flows.sport, settings)
    first, last = there.tx_time(sizes.first), there.tx_time(sizes.last)
    slowest = there.byte_ps.max(axis=1) * sizes.full
    arrival = (sizes.packets - 1) * slowest + last.sum(axis=1) + there.delay.sum(axis=1)
    acks = back.tx_time(sizes.ack) + back.delay
    start = _starts(flows, arrival, acks.sum(axis=1))
    data = _Jobs(
        there.link,
        start[:, None] + _before(first + there.delay),
        there.tx_time(np.asarray((sizes.packets - 1) * sizes.full, dtype=np.float64)) + last,
        there.delay + _behind(last + there.delay) + acks.sum(axis=1)[:, None],
    )
    reached = start + (first + there.delay).sum(axis=1)
    of_acks = _Jobs(
        back.link,
        reached[:, None] + _before(acks),
        back.tx_time(sizes.packets * sizes.ack),
        back.delay + _behind(acks),
    )
    ends = [(start + arrival + acks.sum(axis=1)).max(), _latest([data]), _latest([data, of_acks]) if known else 0.0]
    return float(max(ends) - start.min()) / _PS_PER_US


@dataclass(frozen=True, eq=False)
class _Sizes:
    """Sizes of each flow: packets, and wire bytes of a full one, of the first, of the last, and of an ACK."""

    packets: Ints
    full: float
    first: Floats
    last: Floats
    ack: Floats

    @classmethod
    def of(cls, flows: FlowSet, settings: Settings) -> _Sizes:
        packets = -(-flows.num_bytes // settings.mtu_bytes)
        last = (flows.num_bytes - (packets - 1) * settings.mtu_bytes + settings.header_bytes).astype(np.float64)
        full = float(settings.mtu_bytes + settings.header_bytes)
        first = np.asarray(np.where(packets > 1, full, last), dtype=np.float64)
        return cls(packets, full, first, last, np.full(len(flows), float(settings.ack_bytes)))


@dataclass(frozen=True, eq=False)
class _Way:
    """Hop by hop, all of shape (num_flows, most hops): the link, -1 where there is none or it is not known; ps a byte,
    and delay, 0 behind the end; at the least where the link is not known."""

    link: Ints
    byte_ps: Floats
    delay: Floats

    @classmethod
    def of(cls, fabric: Graph, src: Ints, dst: Ints, sport: Ints, dport: Ints, settings: Settings) -> _Way:
        routes, ip = Routes(fabric, dst), fabric.addresses
        headers = Headers(ip[src], ip[dst], sport.astype(np.uint16), udp_dport=dport)
        link = routes.route(src, dst, by_ecmp(ecmp_of(settings, headers)))
        a_byte, delay = _BYTE_PS / fabric.link_bps, np.tile(fabric.latency_ns, 2) * _PS_PER_NS
        on_way = link != NO_LINK
        byte_ps, delays = np.where(on_way, a_byte[link], 0.0), np.where(on_way, delay[link], 0.0)
        if settings.routing != "ecmp":
            hop, hops = np.arange(link.shape[1]), on_way.sum(axis=1)[:, None]
            between = (hop > 0) & (hop < hops - 1)
            byte_ps, delays = np.where(between, a_byte.min(), byte_ps), np.where(between, delay.min(), delays)
            link = np.where(between, NO_LINK, link)
        return cls(link, byte_ps, delays)

    def tx_time(self, num_bytes: Floats) -> Floats:
        return self.byte_ps * num_bytes[:, None]


@dataclass(frozen=True, eq=False)
class _Jobs:
    """Jobs of links, all of one shape: not before `release`, for `work`, and `tail` from there to the flow's end;
    ps."""

    link: Ints
    release: Floats
    work: Floats
    tail: Floats


def _latest(jobs: list[_Jobs]) -> float:
    """The largest over links and times t of: t, all work released since then, and the least tail of it."""
    link, release, work, tail = (
        np.concatenate([getattr(one, name).ravel() for one in jobs]) for name in ("link", "release", "work", "tail")
    )
    order = np.lexsort((-release, link))
    order = order[link[order] != NO_LINK]
    most = 0.0
    for rows in np.split(order, np.flatnonzero(np.diff(link[order])) + 1):
        ends = release[rows] + np.cumsum(work[rows]) + np.minimum.accumulate(tail[rows])
        most = max(most, float(ends.max()))
    return most


def _starts(flows: FlowSet, arrival: Floats, ack: Floats) -> Floats:
    """Earliest start of each flow, ps: of what it waits for, its own sends to the ACK, others' arrive."""
    start = flows.start_ps.astype(np.float64)
    if flows.waits_for is None:
        return start
    first, earlier = flows.waits_for
    later = np.repeat(np.arange(len(flows)), np.diff(first))
    start[later] = 0.0
    own = flows.src[earlier] == flows.src[later]
    takes = arrival[earlier] + np.where(own, ack[earlier], 0.0)
    if flows.delay_ps is not None:
        takes = takes + flows.delay_ps[later]
    while True:  # once for each flow of the longest chain
        begun = start.copy()
        np.maximum.at(begun, later, start[earlier] + takes)
        if np.array_equal(begun, start):
            return start
        start = begun


def _before(tx_time: Floats) -> Floats:
    """Sum of the hops before each."""
    return np.cumsum(tx_time, axis=1) - tx_time


def _behind(tx_time: Floats) -> Floats:
    """Sum of the hops behind each."""
    return np.asarray(tx_time.sum(axis=1)[:, None] - np.cumsum(tx_time, axis=1))

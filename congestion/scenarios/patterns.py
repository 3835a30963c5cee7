"""Traffic patterns over a fabric: incast, permutation, a flapping cable, victim, all-to-all, ring all-reduce, Poisson.

Each is a function of the fabric, its parameters and a seed to flows; the same three give the same flows. Rank i is the
i-th host of the fabric, or a host drawn by the seed. Collectives are flows that wait for others, as NCCL's ranks do.
Not covered: a training job's traffic (scenario_job), computation, NCCL's in-flight window and its protocols.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import BeforeValidator, Field

from congestion.simulation.files import FlowSet, Ints
from netlayer.config.tree import Section
from netlayer.errors import ConfigError
from netlayer.units import parse_size
from topology.fabric.graph import Graph

Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0, le=2**50)]
Ranks = Annotated[int, Field(ge=2, le=1_000_000)]

_ROCE_PORT = 4_791
_FIRST_PORT = 10_000
_ROCE_SPORTS = (0xC000, 0x10000)  # that RoCEv2 senders take
_PS_PER_US = 1_000_000
_BYTE_PS = 8 * 10**12  # a byte at 1 bit/s


class Pattern(Section):
    """Fields of all scenarios."""

    placement: Literal["in-order", "random"] = Field("in-order", description="rank i on host i, or drawn by the seed")
    sports: Literal["counted", "random"] = Field(
        "counted", description="UDP source ports, which ECMP hashes: 10000 up for a pair's connections, or drawn"
    )
    pg: int = Field(0, ge=0, le=7, description="class of traffic of its flows, where congestion.classes has several")
    jitter_us: float = Field(0.0, ge=0, le=10**6, description="each host starts up to this late, drawn by the seed")


class Incast(Pattern):
    """Many hosts send to one at once."""

    senders: int = Field(16, ge=1, le=1_000_000, description="hosts that send")
    num_bytes: Size = Field(4_000_000, description="of each sender; '4MB' and '1MiB' are understood")


class Permutation(Pattern):
    """Every host sends to one and receives from one."""

    ranks: Ranks = Field(32, description="hosts that take part")
    num_bytes: Size = Field(4_000_000, description="of each flow")
    shift: int = Field(0, ge=0, description="rank i sends to rank i + shift; 0: to one drawn by the seed")


class Flap(Permutation):
    """A permutation while a cable goes down and up; with congestion.timeout_us above 0 what is lost is sent again."""

    link: str = Field("", description="the cable by the names of its ends, A,B; empty: the first between switches")
    at_us: float = Field(50.0, ge=0, le=10**9, description="when it goes down first")
    down_us: float = Field(100.0, gt=0, le=10**9, description="for how long")
    times: int = Field(1, ge=1, le=100_000, description="how often")
    every_us: float = Field(1_000.0, gt=0, le=10**9, description="from one time to the next")


class Victim(Pattern):
    """An incast, and a flow that shares its trunk but not its bottleneck: head-of-line blocking."""

    senders: int = Field(16, ge=1, le=500_000, description="hosts of the incast")
    num_bytes: Size = Field(4_000_000, description="of each sender, and of the victim")
    victim_pg: int = Field(-1, ge=-1, le=7, description="class of traffic of the victim; -1: that of the others")


class Collective(Pattern):
    """Fields of all collectives."""

    ranks: Ranks = Field(16, description="hosts of a group")
    copies: int = Field(1, ge=1, le=100_000, description="groups side by side, each on hosts of its own")


class AllToAll(Collective):
    """Every rank sends to every other one."""

    num_bytes: Size = Field(1_000_000, description="of each pair")
    rounds: bool = Field(False, description="in NCCL's rounds: in round r rank i sends to i + r; false: all at once")
    gap_us: float = Field(0.0, ge=0, description="between the end of a rank's round and its next one")


class RingAllReduce(Collective):
    """2 (n - 1) steps round a ring, each after the receipt of the last one."""

    num_bytes: Size = Field(64_000_000, description="that are reduced")
    channels: int = Field(1, ge=1, le=64, description="rings at once, each with its part of the bytes and its own port")
    gap_us: float = Field(0.0, ge=0, description="between receipt and the next send: the reduction")


class Poisson(Pattern):
    """Packets to one host at exponential gaps: an M/D/1 queue at its link."""

    senders: int = Field(64, ge=1, le=1_000_000, description="hosts that send, in no order")
    packets: int = Field(100_000, ge=1, le=10**8, description="packets in all, each a flow")
    load: float = Field(0.5, gt=0, lt=1, description="share of the link's time that packets take")
    num_bytes: Size = Field(4_096, description="payload of a packet, at most congestion.mtu_bytes")
    header_bytes: int = Field(48, ge=0, description="its wire bytes beyond that, as congestion.header_bytes")


class Flows(NamedTuple):
    """Flows between ranks before they have hosts, ports and starts; all of shape (num_flows,).

    `channel` tells the connections of a pair apart; `waits` are pairs (flow, flow before it), shape (num_waits,) each.
    """

    src: Ints
    dst: Ints
    num_bytes: Ints
    channel: Ints | None = None
    waits: tuple[Ints, Ints] | None = None
    gap_us: float = 0.0
    pg: Ints | None = None

    def copied(self, copies: int, ranks: int) -> Flows:
        """Return `copies` groups of `ranks`, one after another."""
        if copies == 1:
            return self
        copy = np.arange(copies, dtype=np.int64)[:, None]
        group, flow = ranks * copy, len(self.src) * copy
        return Flows(
            (self.src + group).ravel(),
            (self.dst + group).ravel(),
            np.tile(self.num_bytes, copies),
            None if self.channel is None else np.tile(self.channel, copies),
            None if self.waits is None else ((self.waits[0] + flow).ravel(), (self.waits[1] + flow).ravel()),
            self.gap_us,
            None if self.pg is None else np.tile(self.pg, copies),
        )


def incast(fabric: Graph, p: Incast, seed: int) -> FlowSet:
    """Ranks 0..senders-1 to rank `senders`."""
    src = np.arange(p.senders, dtype=np.int64)
    return on_hosts(fabric, p, seed, Flows(src, np.full_like(src, p.senders), np.full_like(src, p.num_bytes)))


def permutation(fabric: Graph, p: Permutation, seed: int) -> FlowSet:
    """A shift, or a circle through all ranks in an order drawn by the seed, in which nobody meets himself."""
    rank = np.arange(p.ranks, dtype=np.int64)
    if p.shift and p.shift % p.ranks == 0:
        raise ConfigError("scenario.shift", p.shift, f"brings each of {p.ranks} ranks back to itself", "change it")
    if p.shift:
        dst = (rank + p.shift) % p.ranks
    else:
        order = rng_of(seed, "pairs").permutation(p.ranks)
        dst = np.empty_like(rank)
        dst[order] = np.roll(order, -1)
    return on_hosts(fabric, p, seed, Flows(rank, dst, np.full_like(rank, p.num_bytes)))


def flaps(fabric: Graph, p: Flap) -> tuple[tuple[int, int, int], ...]:
    """Return which cable is down when, as `simulate` takes it; of parallel cables the first.

    Raises:
        ConfigError: there is no such cable, or it is to go down while it is down.
    """
    if p.times > 1 and p.every_us <= p.down_us:
        raise ConfigError("scenario.every_us", p.every_us, f"is not above down_us = {p.down_us:g}", "raise it")
    begin = [round((p.at_us + turn * p.every_us) * _PS_PER_US) for turn in range(p.times)]
    cable, down_ps = _cable(fabric, p.link), round(p.down_us * _PS_PER_US)
    return tuple((cable, start, start + down_ps) for start in begin)


def _cable(fabric: Graph, link: str) -> int:
    if not link:
        return int(np.argmax(fabric.is_switch[fabric.a] & fabric.is_switch[fabric.b]))
    return int(np.argmax(fabric.cables_between(link, "scenario.link")))


def victim(fabric: Graph, p: Victim, seed: int) -> FlowSet:
    """The victim is the last flow: from beside the senders to beside their receiver.

    On a dumbbell with room for senders + 1 hosts a side the trunk is the link that they share, and no bottleneck.
    """
    side = p.senders + 1
    src = np.arange(side, dtype=np.int64)
    dst = np.full_like(src, side)
    dst[-1] = side + 1
    pg = np.full_like(src, p.pg)
    pg[-1] = p.pg if p.victim_pg < 0 else p.victim_pg
    return on_hosts(fabric, p, seed, Flows(src, dst, np.full_like(src, p.num_bytes), pg=pg))


def all_to_all(fabric: Graph, p: AllToAll, seed: int) -> FlowSet:
    """All pairs, each rank to the ranks behind it in turn if in rounds.

    In rounds flow (r, i) waits for (r - 1, i), which its rank sent, and for the one that its rank received in round
    r - 1. NCCL runs several rounds at once where it has channels for them (NCCL, enqueue.cc); here one.
    """
    n = p.ranks
    if not p.rounds:
        src, other = np.divmod(np.arange(n * (n - 1), dtype=np.int64), n - 1)
        flows = Flows(src, other + (other >= src), np.full_like(src, p.num_bytes))
        return on_hosts(fabric, p, seed, flows.copied(p.copies, n))
    turn, rank = np.divmod(np.arange(n * (n - 1), dtype=np.int64), n)
    later = np.flatnonzero(turn > 0)
    sent = later - n
    received = turn[sent] * n + (rank[later] - turn[later]) % n
    waits = np.repeat(later, 2), np.stack([sent, received], axis=1).ravel()
    flows = Flows(rank, (rank + turn + 1) % n, np.full_like(rank, p.num_bytes), waits=waits, gap_us=p.gap_us)
    return on_hosts(fabric, p, seed, flows.copied(p.copies, n))


def ring_all_reduce(fabric: Graph, p: RingAllReduce, seed: int) -> FlowSet:
    """Flow (step, rank, channel): in step s rank i passes piece i - s of its channel to rank i + 1.

    The first n - 1 steps reduce and scatter, the others gather; a rank sends in step s what it received in s - 1
    (Patarasuk, Yuan: Bandwidth optimal all-reduce, 2009). Every rank sends 2 (n - 1) / n of the bytes.
    """
    n, each = p.ranks, p.channels
    if p.num_bytes < n * each:
        rule = f"is less than a byte for each of {n} ranks x {each} channels"
        raise ConfigError("scenario.num_bytes", p.num_bytes, rule, "raise it")
    flow = np.arange(2 * (n - 1) * n * each, dtype=np.int64)
    step, place = np.divmod(flow, n * each)
    rank, channel = np.divmod(place, each)
    pieces = np.diff(np.arange(n * each + 1) * p.num_bytes // (n * each))
    later = flow[step > 0]
    received = (step[later] - 1) * n * each + (rank[later] - 1) % n * each + channel[later]
    num_bytes = pieces[channel * n + (rank - step) % n]
    flows = Flows(rank, (rank + 1) % n, num_bytes, channel, (later, received), p.gap_us)
    return on_hosts(fabric, p, seed, flows.copied(p.copies, n))


def poisson(fabric: Graph, p: Poisson, seed: int) -> FlowSet:
    """One-packet flows to the last rank from senders drawn for each; mean wait rho / (2 mu (1 - rho)) at its link."""
    rng = rng_of(seed, "pairs")
    src = rng.integers(0, p.senders, p.packets)
    dst = np.full_like(src, p.senders)
    made = on_hosts(fabric, p, seed, Flows(src, dst, np.full_like(src, p.num_bytes)))
    at = np.flatnonzero((fabric.a == made.dst[0]) | (fabric.b == made.dst[0]))[0]
    service_ps = (p.num_bytes + p.header_bytes) * _BYTE_PS / fabric.bps[at]
    made.start_ps[:] += np.cumsum(rng.exponential(service_ps / p.load, p.packets)).astype(np.int64)
    return made


def on_hosts(fabric: Graph, p: Pattern, seed: int, flows: Flows, host_of: Ints | None = None) -> FlowSet:
    """Return flows between ranks as flows between hosts, with their starts, UDP ports and classes of traffic.

    Args:
        fabric: whose hosts the ranks stand on.
        p: placement, jitter of starts and ports.
        seed: of what is drawn.
        flows: between ranks.
        host_of: node of each rank; None: as `p.placement` says.

    Raises:
        ConfigError: the fabric has fewer hosts than there are ranks.
    """
    if host_of is None:
        ranks = int(max(flows.src.max(), flows.dst.max())) + 1
        if ranks > len(fabric.hosts):
            rule = f"fewer than the scenario's {ranks}"
            raise ConfigError("fabric", f"{len(fabric.hosts)} hosts", rule, "lower the scenario's, or grow the fabric")
        random = p.placement == "random"
        host_of = rng_of(seed, "placement").permutation(fabric.hosts) if random else fabric.hosts
    src, dst = host_of[flows.src], host_of[flows.dst]
    begin = rng_of(seed, "starts").uniform(0, p.jitter_us * _PS_PER_US, fabric.num_nodes).astype(np.int64)
    channel = np.zeros_like(src) if flows.channel is None else flows.channel
    return FlowSet(
        src=src,
        dst=dst,
        num_bytes=flows.num_bytes,
        start_ps=begin[src],
        dport=np.full_like(src, _ROCE_PORT),
        sport=_drawn_ports(src, dst, channel, seed) if p.sports == "random" else _FIRST_PORT + channel,
        pg=np.full_like(src, p.pg) if flows.pg is None else flows.pg,
        waits_for=_by_flow(len(src), *flows.waits) if flows.waits and len(flows.waits[0]) else None,
        delay_ps=np.full_like(src, round(flows.gap_us * _PS_PER_US)) if flows.gap_us else None,
    )


def rng_of(seed: int, use: str) -> np.random.Generator:
    """A stream for each use, so that a change in one draws nothing else anew."""
    return np.random.default_rng([seed, *use.encode()])


def _drawn_ports(src: Ints, dst: Ints, channel: Ints, seed: int) -> Ints:
    """One port a connection, in order of (src, dst, channel)."""
    _, connection = np.unique(np.stack([src, dst, channel]), axis=1, return_inverse=True)
    drawn = rng_of(seed, "ports").integers(*_ROCE_SPORTS, connection.max() + 1)
    return np.asarray(drawn[connection.ravel()])


def _by_flow(num_flows: int, flow: Ints, earlier: Ints) -> tuple[Ints, Ints]:
    first = np.zeros(num_flows + 1, dtype=np.int64)
    np.cumsum(np.bincount(flow, minlength=num_flows), out=first[1:])
    return first, earlier[np.argsort(flow, kind="stable")]

"""Senders under one law at one bottleneck, packet by packet, without the engine: a queue, marks, and a way back.

Times in ps. Every flow has endless data from its start on, its own NIC at the bottleneck's rate, and the same idle
round trip. The queue marks as RED does, by a draw; no packet is lost.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

from congestion.simulation.settings import Settings

US = 1_000_000
NEVER = 2**62
FLOW = np.dtype(
    [
        ("next", "i4"),
        ("unacked", "i4"),
        ("num_packets", "i4"),
        ("num_links", "i4"),
        ("rate_bps", "i8"),
        ("window_bytes", "i8"),
        ("line_rate_bps", "i8"),
        ("base_rtt_ps", "i8"),
        ("start", "i8"),
    ],
    align=True,
)
SEND, SERVE, ACK = 0, 1, 2


@dataclass
class Bottleneck:
    """Run `law` with `section`'s parameters; `samples` are (time, flow, rtt, marked) of every ACK."""

    law: ModuleType
    section: Any
    num_flows: int = 2
    settings: Settings = field(default_factory=Settings)
    rate_bps: int = 200_000_000_000
    base_rtt_ps: int = 8 * US
    starts: tuple[int, ...] = ()
    kmin_bytes: float = np.inf
    kmax_bytes: float = np.inf
    cnp_interval_ps: int = 0  # at most one mark a flow comes back in this time
    unmarked: frozenset[int] = frozenset()  # flows whose packets carry no ECN

    def __post_init__(self) -> None:
        self.p = self.law.parameters(self.section, self.rate_bps, self.settings)[0]
        self.own = np.zeros(self.num_flows, dtype=self.law.STATE)
        self.flow = np.zeros(self.num_flows, dtype=FLOW)
        self.flow["line_rate_bps"] = self.flow["rate_bps"] = self.rate_bps
        self.flow["base_rtt_ps"] = self.base_rtt_ps
        self.flow["window_bytes"] = NEVER
        self.flow["num_packets"] = 2**31 - 1
        self.flow["num_links"] = 2
        self.mtu = self.settings.mtu_bytes
        self.tx = (self.mtu + self.settings.header_bytes) * 8 * 10**12 // self.rate_bps
        self.busy = 0
        self.idle = 0  # ps that the bottleneck was without work
        self.available = np.zeros(self.num_flows, dtype=np.int64)
        self.random = np.random.default_rng(1)
        self.events: list[tuple[int, int, int, int]] = []
        self.samples: list[tuple[int, int, int, bool]] = []
        self.cnp_after = np.zeros(self.num_flows, dtype=np.int64)
        for f in range(self.num_flows):
            self.flow[f]["start"] = self.starts[f] if self.starts else 0
            self.law.start(self.p, self.own[f], self.flow[f])
            self.available[f] = self.flow[f]["start"]
            self._wake(f, self.available[f])

    def run(self, until: int) -> Bottleneck:
        """Go on to `until` ps."""
        while self.events and self.events[0][0] < until:
            now, kind, f, sent = heapq.heappop(self.events)
            (self._send, self._serve, self._acknowledge)[kind](now, f, sent)
        return self

    def lose(self, f: int, now: int) -> None:
        """Tell the law of a loss of flow `f`."""
        self.law.on_loss(self.p, self.own[f], self.flow[f], now)

    def rates(self, since: int) -> np.ndarray:
        """Goodput by flow from `since` to the last ACK, bit/s; shape (num_flows,)."""
        flows = [f for now, f, _, _ in self.samples if now >= since]
        return np.bincount(flows, minlength=self.num_flows) * self.mtu * 8e12 / (self.samples[-1][0] - since)

    def queueing(self, since: int) -> np.ndarray:
        """Queueing delay of every packet acknowledged from `since` on, us."""
        return np.array([rtt - self.base_rtt_ps for now, _, rtt, _ in self.samples if now >= since]) / US

    def _wake(self, f: int, at: int) -> None:
        heapq.heappush(self.events, (int(at), SEND, f, 0))

    def _send(self, now: int, f: int, _: int) -> None:
        flow = self.flow[f]
        in_flight = int(flow["next"] - flow["unacked"]) * self.mtu
        if now < self.available[f] or (in_flight and in_flight + self.mtu > flow["window_bytes"]):
            return  # the pace or an ACK will wake it
        flow["next"] += 1
        self.law.advance(self.p, self.own[f], flow, now)
        heapq.heappush(self.events, (now + self.base_rtt_ps // 2 - self.tx, SERVE, f, now))
        self.available[f] = now + self.tx * self.rate_bps // int(flow["rate_bps"])
        self._wake(f, self.available[f])

    def _serve(self, now: int, f: int, sent: int) -> None:
        self.idle += max(now - self.busy, 0)
        queue_bytes = max(self.busy - now, 0) * self.rate_bps / 8e12
        span = self.kmax_bytes - self.kmin_bytes
        share = 0.2 * (queue_bytes - self.kmin_bytes) / span if np.isfinite(span) and span else 0.0
        marked = queue_bytes > self.kmax_bytes or self.random.random() < share
        self.busy = max(self.busy, now) + self.tx
        if marked and f not in self.unmarked and now >= self.cnp_after[f]:
            self.cnp_after[f] = now + self.cnp_interval_ps
            sent = -sent - 1
        heapq.heappush(self.events, (self.busy + self.base_rtt_ps // 2, ACK, f, sent))

    def _acknowledge(self, now: int, f: int, sent: int) -> None:
        marked = sent < 0
        rtt = now - (-sent - 1 if marked else sent)
        self.flow[f]["unacked"] += 1
        self.law.on_ack(self.p, self.own[f], self.flow[f], now, marked, rtt, self.mtu)
        self.samples.append((now, f, rtt, marked))
        self._wake(f, max(now, self.available[f]))

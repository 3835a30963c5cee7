"""Answers as routers of a known network would give them, built by scapy, which knows nothing of our parser."""

from collections.abc import Callable, Sequence
from ipaddress import IPv4Address

import numpy as np
from scapy.layers.inet import ICMP, IP

from topology.probe.packets import Sweep, build

SRC, DST = "10.0.0.7", "10.1.0.9"
# (port, ttl, round) -> the router's address, `ADDR unreachable` where it has no route, nothing where it stays silent
Network = Callable[[int, int, int], str | None]


def sweep(ports: Sequence[int] = range(50000, 50010), ttls: Sequence[int] = range(1, 4), rounds: int = 1) -> Sweep:
    return Sweep(
        int(IPv4Address(SRC)), int(IPv4Address(DST)), np.array(list(ports)), np.array(list(ttls)), rounds=rounds
    )


def exchange(asked: Sweep, network: Network, quoted_bytes: int | None = None) -> list[bytes]:
    """Every probe, each followed by its answer; a router quotes the probe as it came, or its first bytes."""
    packets = []
    for row in build(asked):
        probe = row.tobytes()
        seen = IP(probe)
        router = network(seen.sport, seen.id >> 8, seen.id & 0xFF)
        packets.append(probe)
        if router:
            packets.append(answer(probe, router, quoted_bytes))
    return packets


def answer(probe: bytes, router: str, quoted_bytes: int | None = None) -> bytes:
    expired = IP(probe)
    expired.ttl, expired.chksum = 1, None
    router, _, unreachable = router.partition(" ")
    kind = ICMP(type=3, code=0 if unreachable else 3) if unreachable or router == DST else ICMP(type=11, code=0)
    return bytes(IP(src=router, dst=SRC) / kind / bytes(expired)[:quoted_bytes])

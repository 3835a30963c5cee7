"""A conversation of two queue pairs as scapy builds it, and files of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scapy.layers.l2 import Ether
from scapy.utils import RawPcapWriter

from congestion.nic.capture.packets import ACK, RETH, acknowledge, cnp, request

REQUESTER, RESPONDER = "10.0.0.1", "10.0.0.2"
WRITE_FIRST, WRITE_MIDDLE, WRITE_LAST, WRITE_ONLY, SEND_ONLY, READ = 0x06, 0x07, 0x08, 0x0A, 0x04, 0x0C
EPOCH_NS = 1_700_000_000_000_000_000


@dataclass
class Talk:
    """Packets between queue pair 0x111 at the requester and 0x222 at the responder, each with its time."""

    frames: list[bytes] = field(default_factory=list)
    times_ns: list[int] = field(default_factory=list)
    sqpn: int = 0x111
    dqpn: int = 0x222
    sport: int = 50_001

    def add(self, packet: Any, at_us: float) -> None:
        self.frames.append(bytes(Ether() / packet))
        self.times_ns.append(EPOCH_NS + round(at_us * 1000))

    def write(self, psn: int, at_us: float, *, tos: int = 106, payload: bytes = b"data") -> None:
        header = RETH(va=0x1000, rkey=7, length=len(payload))
        self.request(WRITE_ONLY, psn, at_us, payload=payload, header=header, tos=tos)

    def request(self, opcode: int, psn: int, at_us: float, **about: Any) -> None:
        ends = {"src": REQUESTER, "dst": RESPONDER, "dqpn": self.dqpn, "sport": self.sport}
        self.add(request(opcode, psn & 0xFF_FFFF, ack_request=True, **ends, **about), at_us)

    def answer(self, psn: int, at_us: float, syndrome: int = ACK) -> None:
        ends = {"src": RESPONDER, "dst": REQUESTER, "dqpn": self.sqpn, "sport": self.sport}
        self.add(acknowledge(psn & 0xFF_FFFF, syndrome=syndrome, **ends), at_us)

    def notify(self, at_us: float) -> None:
        self.add(cnp(src=RESPONDER, dst=REQUESTER, dqpn=self.sqpn, sport=self.sport), at_us)

    def save(self, path: Path) -> Path:
        return save(path, self.frames, self.times_ns)


def save(path: Path, frames: Sequence[bytes], times_ns: Sequence[int], link: int = 1) -> Path:
    """A pcap file with nanoseconds."""
    with RawPcapWriter(str(path), linktype=link, nano=True) as writer:
        writer.write_header(None)
        for frame, stamp in zip(frames, times_ns, strict=True):
            writer.write_packet(frame, sec=stamp // 10**9, usec=stamp % 10**9)
    return path

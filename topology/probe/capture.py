"""Captures of probes and of what routers answer: pcap files in and out, and the fields that path spread needs.

Written: classic pcap with nanoseconds, raw IP or Ethernet. Read: pcap and pcapng (scapy) of Ethernet with up to two
VLAN tags, raw IP, and Linux' cooked captures. All packets are parsed at once as one byte matrix. Not covered: IPv6,
fragments, tunnels around a probe.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from netlayer.errors import ConfigError
from topology.ecmp.hashing import ROCE_V2_PORT, UDP_PROTOCOL
from topology.probe.packets import sequence_number

if TYPE_CHECKING:
    from topology.probe.packets import Packets

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Link = Literal["ethernet", "raw"]

ICMP_UNREACHABLE, ICMP_TIME_EXCEEDED = 3, 11
_PORT_UNREACHABLE = 3
_ICMP_PROTOCOL = 1
_LINKTYPE: dict[Link, int] = {"ethernet": 1, "raw": 101}
# Enough for link header, IP with options, ICMP, and the probe's IP with options and BTH.
_KEPT_BYTES = 192
# Bytes before the network header, and where in them the EtherType is (negative: there is none, it is IP).
_LINK_HEADERS = {1: (14, 12), 12: (0, -1), 101: (0, -1), 228: (0, -1), 113: (16, 14), 276: (20, 0)}
_ETHERTYPE_IPV4, _VLAN_TAGS = 0x0800, (0x8100, 0x88A8)


@dataclass(frozen=True, eq=False)
class Capture:
    """IPv4 packets, cut after the headers, with the time of each.

    Args:
        packets: shape (num_packets, 192) from the IP header on, zeros after a packet's end.
        lengths: bytes of each that are there.
        time_ns: since 1970; 0 where unknown.
        skipped: frames of other protocols.
    """

    packets: Packets
    lengths: Ints
    time_ns: Ints
    skipped: int = 0

    @classmethod
    def of(cls, packets: Sequence[bytes], time_ns: Iterable[int], skipped: int = 0) -> Capture:
        """Make a capture from IP packets in order of arrival."""
        return cls(*_matrix(packets), np.array(list(time_ns), dtype=np.int64), skipped)


@dataclass(frozen=True, eq=False)
class ProbeTable:
    """Probes as sent, or the probes that answers quote; one entry each.

    Args:
        src_ip, dst_ip, sport: of the probe.
        ttl, round: it was sent with.
        time_ns: of the probe, or of the answer.
        router: who answered; 0 for probes.
        reached: the answer says that the probe came to its target.
        refused: the answer says that the target is unreachable from the router.
    """

    src_ip: Ints
    dst_ip: Ints
    sport: Ints
    ttl: Ints
    round: Ints
    time_ns: Ints
    router: Ints
    reached: Bools
    refused: Bools

    def __len__(self) -> int:
        return len(self.src_ip)

    def only(self, chosen: NDArray[np.bool_] | Ints) -> ProbeTable:
        """Return those chosen by a mask, or by index in that order."""
        return ProbeTable(**{name: getattr(self, name)[chosen] for name in self.__dataclass_fields__})


def probes(capture: Capture) -> ProbeTable:
    """Return the probes of a capture, distinguished from other RoCE traffic by their sequence number."""
    fields = _Fields(capture)
    start = np.zeros(len(capture.lengths), dtype=np.int64)
    is_probe = fields.is_probe(start) & (
        fields.u32(start + fields.header_bytes(start) + 16) & 0xFF_FFFF == fields.psn(start)
    )
    is_probe &= capture.lengths >= fields.header_bytes(start) + 20
    never = np.zeros(len(start), dtype=bool)
    return fields.seen(start, is_probe, capture.time_ns, np.zeros_like(start), never, never)


def answers(capture: Capture) -> ProbeTable:
    """Return the ICMP errors of a capture that quote a probe: time exceeded and unreachable."""
    fields = _Fields(capture)
    start = np.zeros(len(capture.lengths), dtype=np.int64)
    icmp = fields.header_bytes(start)
    kind, code = fields.u8(icmp), fields.u8(icmp + 1)
    quoted = icmp + 8
    is_answer = (fields.u8(start + 9) == _ICMP_PROTOCOL) & (fields.u16(start + 6) & 0x1FFF == 0)
    is_answer &= np.isin(kind, (ICMP_UNREACHABLE, ICMP_TIME_EXCEEDED)) & fields.is_probe(quoted)
    is_answer &= capture.lengths >= quoted + fields.header_bytes(quoted) + 8
    router = fields.u32(start + 12)
    is_answer &= router != fields.u32(quoted + 12)  # our own host's word that it cannot reach the next hop
    at_target = (kind == ICMP_UNREACHABLE) & ((code == _PORT_UNREACHABLE) | (router == fields.u32(quoted + 16)))
    return fields.seen(quoted, is_answer, capture.time_ns, router, at_target, (kind == ICMP_UNREACHABLE) & ~at_target)


def write_pcap(path: Path, packets: Iterable[bytes], time_ns: Iterable[int], link: Link) -> int:
    """Write a pcap file, replacing one that is there; how many packets.

    Raises:
        ConfigError: scapy is missing, or the file cannot be written.
    """
    scapy = _load_scapy()
    written = 0
    try:
        with scapy.utils.RawPcapWriter(str(path), linktype=_LINKTYPE[link], nano=True) as writer:
            writer.write_header(None)
            for packet, stamp in zip(packets, time_ns, strict=True):
                writer.write_packet(packet, sec=stamp // 10**9, usec=stamp % 10**9)
                written += 1
    except OSError as exc:
        raise ConfigError("--pcap", path, f"cannot be written ({exc.strerror})", "give a file of yours") from exc
    return written


def read_pcap(path: Path) -> Capture:
    """The IPv4 packets of a capture file, which may be gzipped.

    Raises:
        ConfigError: scapy is missing, the file cannot be read, is no capture, or its link layer is unknown.
    """
    scapy = _load_scapy()
    try:
        # Opened here, for scapy leaves a file open that it does not understand.
        with path.open("rb") as file:
            frames, stamps, links = _frames(scapy.utils.RawPcapReader(file))
    except (scapy.error.Scapy_Exception, EOFError, struct.error, zlib.error) as exc:
        raise ConfigError("--read", path, f"is no pcap or pcapng ({exc})", "give a capture file") from exc
    except OSError as exc:
        raise ConfigError("--read", path, f"cannot be read ({exc.strerror or exc})", "give a capture file") from exc
    unknown = set(links) - set(_LINK_HEADERS)
    if unknown:
        rule = f"has link type {min(unknown)}, known are {', '.join(map(str, sorted(_LINK_HEADERS)))}"
        raise ConfigError("--read", path, rule, "capture on an Ethernet interface")
    return _strip(frames, stamps, np.array(links, dtype=np.int64))


def _frames(reader: Any) -> tuple[list[bytes], list[int], list[int]]:
    """Frames, times in nanoseconds and link types; pcapng gives its own units in every packet."""
    frames, stamps, links = [], [], []
    for frame, meta in reader:
        if hasattr(meta, "tsresol"):
            ticks = ((meta.tshigh or 0) << 32) + (meta.tslow or 0)
            stamps.append(ticks * 10**9 // int(meta.tsresol or 10**6))
            links.append(meta.linktype)
        else:
            stamps.append(meta.sec * 10**9 + meta.usec * (1 if reader.nano else 1000))
            links.append(reader.linktype)
        frames.append(frame)
    return frames, stamps, links


def _strip(frames: list[bytes], stamps: list[int], links: Ints) -> Capture:
    """Take the link header off every frame; frames that hold no IPv4 drop out."""
    matrix, lengths = _matrix(frames)
    rows = np.arange(len(frames))
    start, type_at = np.zeros(len(frames), dtype=np.int64), np.zeros(len(frames), dtype=np.int64)
    for link, (size, at) in _LINK_HEADERS.items():
        start[links == link], type_at[links == link] = size, at
    bare = type_at < 0
    ethertype = _number(matrix, rows, np.maximum(type_at, 0), 2)
    for _ in range(2):
        tagged = np.isin(ethertype, _VLAN_TAGS) & ~bare
        ethertype = np.where(tagged, _number(matrix, rows, start + 2, 2), ethertype)
        start += 4 * tagged
    is_ip = (bare | (ethertype == _ETHERTYPE_IPV4)) & (_number(matrix, rows, start, 1) >> 4 == 4)
    shifted = np.minimum(start[:, None] + np.arange(_KEPT_BYTES), _KEPT_BYTES - 1)
    packets = np.take_along_axis(matrix, shifted, axis=1)[is_ip]
    skipped = len(frames) - int(is_ip.sum())
    return Capture(packets, (lengths - start)[is_ip], np.array(stamps, dtype=np.int64)[is_ip], skipped)


class _Fields:
    """Fields of every packet of a capture, at an offset of its own in each."""

    def __init__(self, capture: Capture) -> None:
        self._packets, self._rows = capture.packets, np.arange(len(capture.lengths))

    def u8(self, at: Ints) -> Ints:
        return _number(self._packets, self._rows, at, 1)

    def u16(self, at: Ints) -> Ints:
        return _number(self._packets, self._rows, at, 2)

    def u32(self, at: Ints) -> Ints:
        return _number(self._packets, self._rows, at, 4)

    def header_bytes(self, ip: Ints) -> Ints:
        return (self.u8(ip) & 0xF) * 4

    def is_probe(self, ip: Ints) -> NDArray[np.bool_]:
        """UDP to the RoCEv2 port, with a TTL in the identification."""
        dport = self.u16(ip + self.header_bytes(ip) + 2)
        is_udp = (self.u8(ip) >> 4 == 4) & (self.u8(ip + 9) == UDP_PROTOCOL)
        matches: NDArray[np.bool_] = is_udp & (dport == ROCE_V2_PORT) & (self.u16(ip + 4) >> 8 > 0)
        return matches

    def psn(self, ip: Ints) -> Ints:
        """The sequence number that a probe with these ports and identification has."""
        return sequence_number(self.u16(ip + self.header_bytes(ip)), self.u16(ip + 4))

    def seen(self, ip: Ints, chosen: Bools, time_ns: Ints, router: Ints, reached: Bools, refused: Bools) -> ProbeTable:
        identification = self.u16(ip + 4)
        return ProbeTable(
            src_ip=self.u32(ip + 12),
            dst_ip=self.u32(ip + 16),
            sport=self.u16(ip + self.header_bytes(ip)),
            ttl=identification >> 8,
            round=identification & 0xFF,
            time_ns=time_ns,
            router=router,
            reached=reached,
            refused=refused,
        ).only(chosen)


def _matrix(packets: Sequence[bytes]) -> tuple[Packets, Ints]:
    """Packets as rows of one matrix, cut or filled with zeros, and the bytes of each that are kept."""
    cut = [packet[:_KEPT_BYTES] for packet in packets]
    joined = b"".join(packet.ljust(_KEPT_BYTES, b"\0") for packet in cut)
    lengths = np.array([len(packet) for packet in cut], dtype=np.int64)
    return np.frombuffer(joined, dtype=np.uint8).reshape(len(cut), _KEPT_BYTES), lengths


def _number(matrix: Packets, rows: Ints, at: Ints, size: int) -> Ints:
    """The big-endian number of `size` bytes at an offset in each row; beyond the end it is the last byte again."""
    number = np.zeros(len(rows), dtype=np.int64)
    for byte in range(size):
        number = number << 8 | matrix[rows, np.minimum(at + byte, _KEPT_BYTES - 1)]
    return number


def _load_scapy() -> ModuleType:
    try:
        import scapy.error
        import scapy.utils
    except ImportError as exc:
        raise ConfigError("scapy", None, "is not installed", "pip install 'netlayer[rdma]'") from exc
    return scapy

"""RoCEv2 packets of a capture as arrays: addresses, BTH, and what the operation adds to it, all packets at once.

Link layers: Ethernet with up to two VLAN tags, raw IP, Linux' cooked captures, BSD loopback; IPv4 and IPv6. Not read:
IP fragments, IPv6 extension headers, tunnels, MPLS, RoCE v1 and other link layers: such frames are counted by kind.

Source of the headers: InfiniBand Architecture Specification 1.5, chapter 9, and its annexes A16 and A17.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from congestion.nic.capture.frames import Frames, read_frames
from congestion.nic.capture.icrc import ICRC_BYTES, icrcs
from topology.ecmp.hashing import ROCE_V2_PORT

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Bytes = NDArray[np.uint8]

CNP = 0x81
READ_REQUEST = 0x0C
NAK_SEQUENCE = 0x60  # an AETH's syndrome
ICRC_OK, ICRC_WRONG, ICRC_UNKNOWN = 1, 0, -1

_UDP_PROTOCOL, _UDP_BYTES, _BTH_BYTES = 17, 8, 12
# Bytes before the network header, and where in them the EtherType stands (negative: there is none).
_LINKS = {0: (4, -1), 1: (14, 12), 12: (0, -1), 14: (0, -1), 101: (0, -1), 108: (4, -1), 113: (16, 14), 228: (0, -1)}
_LINKS |= {229: (0, -1), 276: (20, 0)}
_IPV4, _IPV6, _VLAN_TAGS = 0x0800, 0x86DD, (0x8100, 0x88A8)
# What may carry RoCE and is not read: by EtherType, by IP protocol, by UDP port, by the protocol in a GRE header.
_ETHERTYPES = {0x8915: "RoCE v1", 0x8847: "MPLS", 0x8848: "MPLS", **dict.fromkeys(_VLAN_TAGS, "VLAN tags beyond two")}
_IN_IP = {4: "IP in IP", 41: "IPv6 in IP", 47: "GRE", 50: "IPsec", 51: "IPsec"}
_UDP_TUNNELS = {4789: "VXLAN", 8472: "VXLAN", 4790: "VXLAN-GPE", 6081: "GENEVE", 6635: "MPLS in UDP"}
_GRE, _ERSPAN_TYPES = 47, (0x88BE, 0x22EB)
_IPV6_EXTENSIONS = (0, 43, 44, 60)
_MAPPED = bytes(10) + b"\xff\xff"  # how an IPv4 address stands in a GID: ::ffff:a.b.c.d

# Operations by the low 5 bits of the opcode; the high 3 say RC, UC, RD or UD.
_RETH = {0x06, 0x0A, 0x0B, 0x0C}  # address, key and length
_IMMEDIATE = {0x03, 0x05, 0x09, 0x0B}
_AETH = {0x0D, 0x0F, 0x10, 0x11, 0x12}  # syndrome and message number
_RESPONSES = {0x0D, 0x0E, 0x0F, 0x10, 0x11, 0x12}
_LAST = {0x02, 0x03, 0x04, 0x05, 0x08, 0x09, 0x0A, 0x0B, 0x0C, 0x13, 0x14, 0x16, 0x17}


@dataclass(frozen=True, eq=False)
class Packets:
    """RoCEv2 packets in the order of the file; arrays of shape (num_packets,).

    Args:
        addresses: every IP address, as text; `src` and `dst` count into it.
        time_ns: since 1970.
        sport: UDP source port.
        ecn: 0 not ECN-capable, 1 ECT(1), 2 ECT(0), 3 congestion experienced.
        opcode: transport and operation; 0x81 is a CNP.
        dqpn, psn: destination queue pair and packet sequence number, 24 bits each.
        ack_request: the sender wants an answer to this packet.
        syndrome: of an ACK, NAK or read response; -1 for packets without.
        message_bytes: what a WRITE or READ announces; -1 for packets without.
        payload_bytes: without headers, padding and CRC.
        icrc: 1 right, 0 wrong, -1 unknown: not checked, the capture cut the packet, or it is zero.
        num_frames: of the whole file.
        num_skipped: frames that are not RoCEv2.
        unread: of those, by kind, the frames that may carry RoCE and are not read: {"VXLAN": 12}.
        num_damaged: frames that are RoCEv2, and whose lengths cannot be right or that were cut inside their headers.
        cut: the file ends inside a frame.
    """

    addresses: tuple[str, ...]
    src: Ints
    dst: Ints
    time_ns: Ints
    sport: Ints
    ecn: Ints
    opcode: Ints
    dqpn: Ints
    psn: Ints
    ack_request: Bools
    syndrome: Ints
    message_bytes: Ints
    payload_bytes: Ints
    icrc: Ints
    num_frames: int
    num_skipped: int
    num_damaged: int
    cut: bool
    unread: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.opcode)

    @property
    def is_cnp(self) -> Bools:
        return np.asarray(self.opcode == CNP)

    @property
    def is_response(self) -> Bools:
        """ACKs, NAKs, read and atomic responses."""
        return _has(self.opcode, _RESPONSES)

    @property
    def is_request(self) -> Bools:
        return ~self.is_cnp & ~self.is_response

    @property
    def ends_message(self) -> Bools:
        return ~self.is_cnp & _has(self.opcode, _LAST)


def read_pcap(path: Path, *, check_icrc: bool = True, field: str = "FILE") -> Packets:
    """The RoCEv2 packets of a pcap or pcapng file.

    Raises:
        ConfigError: the file cannot be read, is no capture, or is damaged.
    """
    return parse(read_frames(path, field), check_icrc=check_icrc)


def parse(frames: Frames, *, check_icrc: bool = True) -> Packets:
    """The RoCEv2 packets among frames."""
    data, stop = frames.data, frames.start + frames.captured
    ip, ethertype = _network(frames)
    version = np.where(ip < stop, _number(data, ip, 1) >> 4, 0)
    version[((ethertype >= 0) & (ethertype != np.where(version == 6, _IPV6, _IPV4)))] = 0
    four, six = version == 4, version == 6
    ip_bytes = np.where(four, (_number(data, ip, 1) & 0xF) * 4, 40)
    whole = np.where(four, (_number(data, ip + 6, 2) & 0x3FFF) == 0, six)  # neither first nor later fragment
    protocol = _number(data, np.where(four, ip + 9, ip + 6), 1)
    udp = ip + ip_bytes
    bth = udp + _UDP_BYTES
    is_roce = (four | six) & whole & (protocol == _UDP_PROTOCOL) & (ip_bytes >= 20) & (udp + 4 <= stop)
    is_roce &= _number(data, udp + 2, 2) == ROCE_V2_PORT
    opcode = _number(data, bth, 1)
    headers = _header_bytes(opcode)
    flags = _number(data, bth + 1, 1)
    padding = flags >> 4 & 3
    udp_bytes = _number(data, udp + 4, 2)
    payload = udp_bytes - _UDP_BYTES - _BTH_BYTES - headers - padding - ICRC_BYTES
    # Frames may be longer than their packet (Ethernet pads them), never shorter.
    fits = (payload >= 0) & (udp - frames.start + udp_bytes <= frames.original) & (bth + _BTH_BYTES + headers <= stop)
    kept = np.flatnonzero(is_roce & fits)
    checked = _check(data, ip[kept], ip_bytes[kept], (udp + udp_bytes)[kept], stop[kept]) if check_icrc else None
    addresses, src, dst = _addresses(data, ip[kept], four[kept])
    syndrome, message = _extensions(data, bth[kept] + _BTH_BYTES, opcode[kept])
    traffic = np.where(four[kept], _number(data, ip[kept] + 1, 1), _number(data, ip[kept], 2) >> 4)
    return Packets(
        addresses=addresses,
        src=src,
        dst=dst,
        time_ns=frames.time_ns[kept],
        sport=_number(data, udp[kept], 2),
        ecn=traffic & 3,
        opcode=opcode[kept],
        dqpn=_number(data, bth[kept] + 5, 3),
        psn=_number(data, bth[kept] + 9, 3),
        ack_request=_number(data, bth[kept] + 8, 1) >> 7 == 1,
        syndrome=syndrome,
        message_bytes=message,
        payload_bytes=payload[kept],
        icrc=np.full(len(kept), ICRC_UNKNOWN, dtype=np.int64) if checked is None else checked,
        num_frames=len(frames),
        num_skipped=len(frames) - int(is_roce.sum()),
        num_damaged=int(is_roce.sum()) - len(kept),
        cut=frames.cut,
        unread=_unread(frames, ip, ethertype, np.flatnonzero(~is_roce)),
    )


def _unread(frames: Frames, ip: Ints, ethertype: Ints, left: Ints) -> dict[str, int]:
    """Count by kind the frames in `left` that may carry RoCE and were not looked into; the most frequent first."""
    data, at, stop = frames.data, ip[left], (frames.start + frames.captured)[left]
    kind_of, link = ethertype[left], frames.link[left]
    counts: dict[str, int] = {}
    for number, name in _ETHERTYPES.items():
        counts[name] = counts.get(name, 0) + int((kind_of == number).sum())
    version = np.where(at + 20 <= stop, _number(data, at, 1) >> 4, 0)
    version[(kind_of >= 0) & (kind_of != np.where(version == 6, _IPV6, _IPV4))] = 0
    four, six = version == 4, version == 6
    protocol = np.where(four | six, _number(data, np.where(four, at + 9, at + 6), 1), -1)
    inner = at + np.where(four, (_number(data, at, 1) & 0xF) * 4, 40)
    fragment = four & ((_number(data, at + 6, 2) & 0x3FFF) != 0)
    counts["IP fragments"] = int((fragment & (protocol == _UDP_PROTOCOL)).sum())
    whole = ~fragment & (inner + 4 <= stop)
    # Of IPv6 packets with an extension header, those that go on to UDP or to another one; multicast reports do not.
    after = np.isin(_number(data, inner, 1), (_UDP_PROTOCOL, *_IPV6_EXTENSIONS))
    counts["IPv6 extension headers"] = int((six & whole & after & np.isin(protocol, _IPV6_EXTENSIONS)).sum())
    gre = whole & (protocol == _GRE)
    counts["ERSPAN"] = int(np.isin(_number(data, inner[gre] + 2, 2), _ERSPAN_TYPES).sum())
    for number, name in _IN_IP.items():
        counts[name] = counts.get(name, 0) + int((whole & (protocol == number)).sum())
    counts["GRE"] -= counts["ERSPAN"]
    port = np.where(whole & (protocol == _UDP_PROTOCOL), _number(data, inner + 2, 2), -1)
    for number, name in _UDP_TUNNELS.items():
        counts[name] = counts.get(name, 0) + int((port == number).sum())
    for other in np.unique(link[~np.isin(link, list(_LINKS))]).tolist():
        counts[f"link type {other}"] = int((link == other).sum())
    return dict(sorted(((name, num) for name, num in counts.items() if num), key=lambda one: -one[1]))


def _network(frames: Frames) -> tuple[Ints, Ints]:
    """Return where each frame's IP header begins, and the EtherType before it; -1 where its link layer has none."""
    ip = np.full(len(frames), -1, dtype=np.int64)
    type_at = np.zeros(len(frames), dtype=np.int64)
    known = np.zeros(len(frames), dtype=bool)
    for link, (size, at) in _LINKS.items():
        chosen = frames.link == link
        ip[chosen], type_at[chosen] = size, at
        known |= chosen
    ip += frames.start
    ethertype = np.where(type_at < 0, -1, _number(frames.data, frames.start + np.maximum(type_at, 0), 2))
    for _ in range(2):
        tagged = np.isin(ethertype, _VLAN_TAGS)
        ethertype = np.where(tagged, _number(frames.data, ip + 2, 2), ethertype)
        ip += 4 * tagged
    return np.where(known, ip, frames.start + frames.captured), ethertype


def _check(data: Bytes, ip: Ints, ip_bytes: Ints, end: Ints, stop: Ints) -> Ints:
    """Whether each packet ends with the CRC that it should; unknown where the capture cut it off or nobody wrote it."""
    checks = np.full(len(ip), ICRC_UNKNOWN, dtype=np.int64)
    there = np.flatnonzero(end <= stop)
    stored = _number(data, end[there] - 4, 4).astype(">u4").view("<u4").astype(np.int64)
    expected = icrcs(data, ip[there], ip_bytes[there], end[there] - ICRC_BYTES)
    checks[there] = np.where(stored == expected, ICRC_OK, ICRC_WRONG)
    # Four zeros stand where a packet was captured, or made, before a NIC computes it; damage would hardly leave them.
    checks[there[(stored == 0) & (expected != 0)]] = ICRC_UNKNOWN
    return checks


def _addresses(data: Bytes, ip: Ints, four: Bools) -> tuple[tuple[str, ...], Ints, Ints]:
    """Return every address once as text, and which of them each packet goes from and to."""
    rows = np.zeros((2, len(ip), 16), dtype=np.uint8)
    rows[:, :, :12] = np.frombuffer(_MAPPED, dtype=np.uint8)
    for side, (at4, at6) in enumerate(((12, 8), (16, 24))):
        rows[side, four, 12:] = data[ip[four, None] + at4 + np.arange(4)]
        rows[side, ~four] = data[ip[~four, None] + at6 + np.arange(16)]
    halves = rows.reshape(-1, 16).view(">u8")
    high, low = halves[:, 0].astype(np.uint64), halves[:, 1].astype(np.uint64)
    highs, high_of = np.unique(high, return_inverse=True)
    lows, low_of = np.unique(low, return_inverse=True)
    pairs, pair_of = np.unique(high_of * len(lows) + low_of, return_inverse=True)
    texts = []
    for pair in pairs.tolist():
        address = ipaddress.IPv6Address(int(highs[pair // len(lows)]) << 64 | int(lows[pair % len(lows)]))
        texts.append(str(address.ipv4_mapped or address))
    return tuple(texts), pair_of[: len(ip)].astype(np.int64), pair_of[len(ip) :].astype(np.int64)


def _extensions(data: Bytes, at: Ints, opcode: Ints) -> tuple[Ints, Ints]:
    """The syndrome, and the length that a WRITE or READ announces; -1 where there is none."""
    ordinary = opcode != CNP
    at = at + _TRANSPORT[opcode]
    syndrome = np.where(ordinary & _has(opcode, _AETH), _number(data, at, 1), -1)
    return syndrome, np.where(ordinary & _has(opcode, _RETH), _number(data, at + 12, 4), -1)


def _operation(number: int) -> int:
    """Bytes that an operation adds after the BTH and the transport's own header."""
    size = 16 * (number in _RETH) + 4 * (number in _IMMEDIATE) + 4 * (number in _AETH) + 4 * (number in (0x16, 0x17))
    return size + 28 * (number in (0x13, 0x14)) + 8 * (number == 0x12)


def _transport(opcode: int) -> int:
    """Bytes that the transport puts before that: UD a DETH, RD an RDETH and in requests a DETH, XRC its own there."""
    response = opcode & 0x1F in _RESPONSES
    return {2: 4 if response else 12, 3: 8, 5: 0 if response else 4}.get(opcode >> 5, 0)


_CNP_BYTES = 16  # zeros
_TRANSPORT = np.array([_transport(opcode) for opcode in range(256)], dtype=np.int64)
_EXTENSION = np.array([_operation(opcode & 0x1F) for opcode in range(256)], dtype=np.int64)


def _header_bytes(opcode: Ints) -> Ints:
    return np.asarray(np.where(opcode == CNP, _CNP_BYTES, _TRANSPORT[opcode] + _EXTENSION[opcode]))


def _has(opcode: Ints, operations: set[int]) -> Bools:
    return np.isin(opcode & 0x1F, list(operations))


def _number(data: Bytes, at: Ints, size: int) -> Ints:
    """The big-endian number of `size` bytes at each place; beyond the data it is the last byte again."""
    number = np.zeros(len(at), dtype=np.int64)
    if not len(data):
        return number
    for byte in range(size):
        number = number << 8 | data[np.minimum(at + byte, len(data) - 1)]
    return number

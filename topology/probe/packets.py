"""RoCEv2 probes as bytes: a TTL sweep times a source-port sweep, all packets at once.

A probe is an IPv4 / UDP 4791 / BTH packet (RC SEND only, to a queue pair that should not exist) with the invariant CRC
a NIC expects, so that switches treat it as RDMA and the target's NIC drops it. The IP identification carries TTL and
round, since routers return it when they answer; the packet sequence number repeats it and the port, which tells our
probes from other traffic. Not covered: IPv6, and headers after the BTH.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topology.ecmp.hashing import ROCE_V2_PORT, UDP_PROTOCOL

Packets = NDArray[np.uint8]  # (num_packets, packet_bytes), all of one length

# A queue pair number that no NIC is likely to have given out; 0 and 1 are for management.
UNUSED_QPN = 0xFFFFF0
# DSCP 26, ECN-capable: the common mark of RoCE traffic, so that probes travel in its class.
ROCE_TOS = 106
# A SEND may be empty; Wireshark looks for a guest protocol in the payload and calls a shorter one malformed.
PAYLOAD_BYTES = 16
MAX_ROUNDS = 256
MAX_PAYLOAD_BYTES = 4096

_RC_SEND_ONLY = 0x04
_DEFAULT_PKEY = 0xFFFF
_DONT_FRAGMENT = 0x4000
_IP_BYTES, _UDP_BYTES, _BTH_BYTES, _ICRC_BYTES = 20, 8, 12, 4
HEADER_BYTES = _IP_BYTES + _UDP_BYTES + _BTH_BYTES

HEADER = np.dtype(
    [
        ("version_length", "u1"), ("tos", "u1"), ("total_bytes", ">u2"), ("identification", ">u2"), ("fragment", ">u2"),
        ("ttl", "u1"), ("protocol", "u1"), ("ip_checksum", ">u2"), ("src_ip", ">u4"), ("dst_ip", ">u4"),
        ("sport", ">u2"), ("dport", ">u2"), ("udp_bytes", ">u2"), ("udp_checksum", ">u2"),
        ("opcode", "u1"), ("flags", "u1"), ("pkey", ">u2"), ("qpn", ">u4"), ("psn", ">u4"),
    ]
)  # fmt: skip
# What routers may change on the way, and what the checksums derive from it: TOS, TTL, the IP and UDP checksums, and the
# BTH byte with the congestion bits.
_MUTABLE_COLUMNS = [1, 8, 10, 11, 26, 27, _IP_BYTES + _UDP_BYTES + 4]


@dataclass(frozen=True, eq=False)
class Sweep:
    """Probes to send: every TTL of every source port, `rounds` times.

    Args:
        src_ip, dst_ip: IPv4 addresses as integers.
        ports: UDP source ports, 1..65535.
        ttls: 1..255.
        rounds: how often; a flow that takes another path in a later round is found out.
        qpn: destination queue pair, 2..2^24-1.
        tos: the whole TOS byte, DSCP and ECN.
        payload_bytes: a multiple of 4.

    Raises:
        ValueError: a value is out of range.
    """

    src_ip: int
    dst_ip: int
    ports: NDArray[np.int64]
    ttls: NDArray[np.int64]
    rounds: int = 1
    qpn: int = UNUSED_QPN
    tos: int = ROCE_TOS
    payload_bytes: int = PAYLOAD_BYTES

    def __post_init__(self) -> None:
        _check_range("ports", self.ports, 1, 0xFFFF)
        _check_range("ttls", self.ttls, 1, 0xFF)
        _check_range("rounds", self.rounds, 1, MAX_ROUNDS)
        _check_range("qpn", self.qpn, 2, (1 << 24) - 1)
        _check_range("tos", self.tos, 0, 0xFF)
        _check_range("payload_bytes", self.payload_bytes, 0, MAX_PAYLOAD_BYTES)
        if self.payload_bytes % 4:
            raise ValueError(f"payload_bytes = {self.payload_bytes}: a multiple of 4")

    def __len__(self) -> int:
        return self.rounds * len(self.ports) * len(self.ttls)

    @property
    def packet_bytes(self) -> int:
        """Bytes of one probe from the IP header to the ICRC."""
        return HEADER_BYTES + self.payload_bytes + _ICRC_BYTES


def build(sweep: Sweep) -> Packets:
    """All probes of a sweep, shape (len(sweep), packet_bytes): TTLs vary fastest, then ports, then rounds."""
    grid = np.meshgrid(np.arange(sweep.rounds), sweep.ports, sweep.ttls, indexing="ij")
    rounds, ports, ttls = (axis.ravel() for axis in grid)
    header = np.zeros(len(sweep), dtype=HEADER)
    header["version_length"], header["tos"], header["total_bytes"] = 0x45, sweep.tos, sweep.packet_bytes
    header["identification"], header["fragment"] = ttls << 8 | rounds, _DONT_FRAGMENT
    header["ttl"], header["protocol"] = ttls, UDP_PROTOCOL
    header["src_ip"], header["dst_ip"] = sweep.src_ip, sweep.dst_ip
    header["sport"], header["dport"], header["udp_bytes"] = ports, ROCE_V2_PORT, sweep.packet_bytes - _IP_BYTES
    header["opcode"], header["pkey"], header["qpn"] = _RC_SEND_ONLY, _DEFAULT_PKEY, sweep.qpn
    header["psn"] = sequence_number(ports, header["identification"])
    packets = np.zeros((len(sweep), sweep.packet_bytes), dtype=np.uint8)
    packets[:, :HEADER_BYTES] = header.view(np.uint8).reshape(len(sweep), HEADER_BYTES)
    packets[:, 10:12] = _as_bytes(ip_checksum(packets[:, :_IP_BYTES]), ">u2")
    packets[:, -_ICRC_BYTES:] = _as_bytes(icrc(packets[:, :-_ICRC_BYTES]), "<u4")
    return packets


def sequence_number(sport: NDArray[np.integer], identification: NDArray[np.integer]) -> NDArray[np.int64]:
    """The 24-bit packet sequence number of a probe."""
    return (sport.astype(np.int64) & 0xFF) << 16 | identification.astype(np.int64)


def icrc(packets: Packets) -> NDArray[np.uint32]:
    """Invariant CRC of RoCEv2 packets over IPv4 without options; on the wire its least significant byte comes first.

    Args:
        packets: from the first byte of the IP header to the last before the ICRC.

    CRC-32 over 64 ones, in the place of the local route header that Ethernet lacks, and the packet with every field
    that may change on the way as ones. Source: InfiniBand Architecture, annex A17 (RoCEv2), and 7.8.1.
    """
    masked = np.full((len(packets), 8 + packets.shape[1]), 0xFF, dtype=np.uint8)
    masked[:, 8:] = packets
    masked[:, np.add(_MUTABLE_COLUMNS, 8)] = 0xFF
    return np.fromiter((zlib.crc32(row) for row in masked), dtype=np.uint32, count=len(masked))


def ip_checksum(headers: Packets) -> NDArray[np.uint16]:
    """The Internet checksum (RFC 1071) of each header, whose checksum field must be zero."""
    total = np.ascontiguousarray(headers).view(">u2").sum(axis=1, dtype=np.uint32)
    for _ in range(2):
        total = (total & 0xFFFF) + (total >> 16)
    checksum: NDArray[np.uint16] = (~total & 0xFFFF).astype(np.uint16)
    return checksum


def with_ethernet(packets: Packets, src_mac: str, dst_mac: str) -> Packets:
    """The packets in Ethernet frames.

    Raises:
        ValueError: a MAC address is not six hexadecimal bytes.
    """
    front = np.frombuffer(_mac(dst_mac) + _mac(src_mac) + b"\x08\x00", dtype=np.uint8)
    return np.hstack((np.broadcast_to(front, (len(packets), len(front))), packets))


def _mac(text: str) -> bytes:
    try:
        address = bytes.fromhex(text.replace(":", ""))
    except ValueError:
        address = b""
    if len(address) != 6:
        raise ValueError(f"MAC address {text!r}: six bytes, as 02:00:00:00:00:01")
    return address


def _as_bytes(numbers: NDArray[np.unsignedinteger], wire: str) -> Packets:
    kind = np.dtype(wire)
    return numbers.astype(kind).view(np.uint8).reshape(len(numbers), kind.itemsize)


def _check_range(name: str, values: int | NDArray[np.int64], low: int, high: int) -> None:
    array = np.atleast_1d(values)
    if not len(array) or array.min() < low or array.max() > high:
        wrong = array[(array < low) | (array > high)]
        raise ValueError(f"{name} = {wrong[0] if len(wrong) else 'none'}: {low}..{high}")

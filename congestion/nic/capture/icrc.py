"""The invariant CRC at the end of every RoCEv2 packet, for one packet or for a whole capture.

CRC-32 (Ethernet's) over eight bytes of ones and the packet from its IP header on, with ones in place of all that a
router may change: TOS, TTL, IP and UDP checksum (IPv6: traffic class, flow label, hop limit), and the BTH byte of the
congestion bits. Stored with its low byte first. Source: InfiniBand Architecture Specification 1.5, annex A17.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Bools = NDArray[np.bool_]

ICRC_BYTES = 4
_UDP_BYTES, _BTH_BYTES = 8, 12
_IPV6_BYTES = 40
_CHUNK = 16_384  # packets whose headers are masked at once


def icrc(packet: bytes) -> int:
    """The CRC that a packet should end with, as a number.

    Args:
        packet: from the IP header on, without the CRC.

    Raises:
        ValueError: shorter than IP, UDP and BTH.
    """
    ip_bytes = _IPV6_BYTES if packet[:1] and packet[0] >> 4 == 6 else (packet[0] & 0xF) * 4 if packet else 0
    size = ip_bytes + _UDP_BYTES + _BTH_BYTES
    if not ip_bytes or len(packet) < size:
        raise ValueError(f"packet of {len(packet)} bytes: at least IP, UDP and BTH headers")
    headers = np.frombuffer(packet[:size], dtype=np.uint8)[None, :]
    return zlib.crc32(packet[size:], zlib.crc32(_masked(headers, ip_bytes)))


def icrcs(data: Bytes, ip: Ints, ip_bytes: Ints, end: Ints) -> Ints:
    """Compute the ICRC of many packets of one buffer.

    Args:
        ip: where each packet's IP header begins.
        ip_bytes: its length, 40 for IPv6.
        end: where the stored CRC begins.
    """
    crcs = np.zeros(len(ip), dtype=np.int64)
    for length in np.unique(ip_bytes):
        chosen = np.flatnonzero(ip_bytes == length)
        for first in range(0, len(chosen), _CHUNK):
            part = chosen[first : first + _CHUNK]
            crcs[part] = _chunk(data, ip[part], int(length), end[part])
    return crcs


def _chunk(data: Bytes, ip: Ints, ip_bytes: int, end: Ints) -> list[int]:
    size = ip_bytes + _UDP_BYTES + _BTH_BYTES
    heads = memoryview(_masked(data[ip[:, None] + np.arange(size)], ip_bytes))
    whole, crc32, step = data.data, zlib.crc32, size + 8
    starts = range(0, step * len(ip), step)
    payloads = zip(starts, (ip + size).tolist(), end.tolist(), strict=True)
    return [crc32(whole[begin:stop], crc32(heads[at : at + step])) for at, begin, stop in payloads]


def _masked(headers: Bytes, ip_bytes: int) -> bytes:
    """Rows of headers after eight bytes of ones, all that routers may change made ones too."""
    rows = np.full((len(headers), 8 + headers.shape[1]), 0xFF, dtype=np.uint8)
    rows[:, 8:] = headers
    ip, udp = rows[:, 8:], rows[:, 8 + ip_bytes :]
    six = headers[:, 0] >> 4 == 6
    ip[six, 0] |= 0x0F  # traffic class and flow label begin inside the first byte
    ip[six, 1:4] = 0xFF
    ip[six, 7] = 0xFF
    four = np.flatnonzero(~six)
    for column in (1, 8, 10, 11):
        ip[four, column] = 0xFF
    udp[:, 6:8] = 0xFF
    udp[:, _UDP_BYTES + 4] = 0xFF
    return rows.tobytes()

"""ECMP: which of several equal next hops a switch gives a RoCEv2 flow, for many flows at once.

`random` is the ideal: each switch mixes the whole header with its own seed. `crc16` and `crc32c` are what switching
chips compute (Broadcom RTAG7: a CRC over header words and a seed, rotated right by an offset, then modulo). A CRC is
linear: another seed changes every hash by the same XOR, so with the seed alone the flows that one uplink carried to a
spine all leave it by one uplink (polarisation); hence an offset a stage. Left out: flowlets (DLB), packet spraying, and
the field selection of real chips, which is not public.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

HashName = Literal["random", "crc16", "crc32c"]
HASHES: tuple[HashName, ...] = get_args(HashName)

UDP_PROTOCOL = 17
ROCE_V2_PORT = 4791
_FLOW_LABEL_MASK = 0xF_FFFF
_WORD_MASK = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E37_79B9_7F4A_7C15)

Words = NDArray[np.uint64]


class Stage(IntEnum):
    """The choices that a path makes, each at its own offset of the hash."""

    TOR_UP = 0
    SPINE_UP = 1
    CORE_DOWN = 2
    SPINE_DOWN = 3


@dataclass(frozen=True)
class Crc:
    """A reflected CRC of `width` bits; parameters as in the catalogues, `polynomial` with its bits reversed."""

    width: int
    polynomial: int
    init: int = 0
    xor_out: int = 0

    def table(self) -> NDArray[np.uint32]:
        """The CRC of each single byte."""
        entries: NDArray[np.uint32] = np.arange(256, dtype=np.uint32)
        for _ in range(8):
            entries = (entries >> np.uint32(1)) ^ (entries & np.uint32(1)) * np.uint32(self.polynomial)
        return entries

    def of(self, message: NDArray[np.uint8]) -> NDArray[np.uint32]:
        """CRC of every message, shape (num_messages, num_bytes)."""
        start = np.full(len(message), self.init, dtype=np.uint32)
        return self.extend(start, message) ^ np.uint32(self.xor_out)

    def extend(self, register: NDArray[np.uint32], message: NDArray[np.uint8]) -> NDArray[np.uint32]:
        """The register after these further bytes of each message."""
        table = self.table()
        for byte in message.T:
            register = table[(register ^ byte) & 0xFF] ^ (register >> 8)
        return register


CRC16_CCITT = Crc(width=16, polynomial=0x8408)
CRC32C = Crc(width=32, polynomial=0x82F6_3B78, init=0xFFFF_FFFF, xor_out=0xFFFF_FFFF)
_CRCS: dict[HashName, Crc] = {"crc16": CRC16_CCITT, "crc32c": CRC32C}
# Rotations a stage, as far apart as the width allows: ToR uplinks need the most bits, parallel links the fewest.
_OFFSETS = {16: (0, 8, 13, 6), 32: (0, 8, 16, 24)}


@dataclass(frozen=True, eq=False)
class Headers:
    """The 5-tuples of flows; protocol and destination port are those of RoCEv2."""

    src_ip: NDArray[np.uint32]
    dst_ip: NDArray[np.uint32]
    udp_sport: NDArray[np.uint16]

    def to_bytes(self) -> NDArray[np.uint8]:
        """As on the wire, shape (num_flows, 13): both addresses, protocol, source and destination port."""
        fields = np.empty(
            len(self.src_ip), dtype=[("src", ">u4"), ("dst", ">u4"), ("proto", "u1"), ("ports", ">u2", 2)]
        )
        fields["src"], fields["dst"], fields["proto"] = self.src_ip, self.dst_ip, UDP_PROTOCOL
        fields["ports"][:, 0], fields["ports"][:, 1] = self.udp_sport, ROCE_V2_PORT
        return fields.view(np.uint8).reshape(len(fields), fields.itemsize)

    def to_words(self) -> tuple[Words, Words]:
        """The same in two integers a flow."""
        addresses = self.src_ip.astype(np.uint64) << np.uint64(32) | self.dst_ip
        return addresses, self.udp_sport.astype(np.uint64) << np.uint64(16) | np.uint64(ROCE_V2_PORT)


class Ecmp:
    """The choices of all switches for a set of flows.

    Args:
        name: the hash function.
        headers: the flows' 5-tuples.
        seed: of the switches; every switch derives its own from it.
        rotate: shift the hash by an offset a stage; without it the CRCs polarise.

    Raises:
        ValueError: the hash is unknown.
    """

    def __init__(self, name: HashName, headers: Headers, seed: int, *, rotate: bool = True) -> None:
        if name not in HASHES:
            raise ValueError(f"hash {name!r}: one of {', '.join(HASHES)}")
        self._crc = _CRCS.get(name)
        self._seed, self._rotate = seed, rotate
        if self._crc:
            start = np.full(len(headers.src_ip), self._crc.init, dtype=np.uint32)
            self._register = self._crc.extend(start, headers.to_bytes())
        else:
            addresses, ports = headers.to_words()
            self._mixed = mix64(mix64(addresses) ^ ports)

    def choose(self, stage: Stage, switch: NDArray[np.int64], group_size: int) -> NDArray[np.int64]:
        """The member (0..group_size-1) that each flow takes at its switch (a node id); groups need no power of two."""
        if group_size == 1:
            return np.zeros(len(switch), dtype=np.int64)
        seeds = mix64(switch.astype(np.uint64) ^ mix64(np.array([self._seed & _WORD_MASK], dtype=np.uint64)))
        if self._crc is None:
            return (mix64(self._mixed ^ seeds) % np.uint64(group_size)).astype(np.int64)
        seed_bytes = (seeds >> np.uint64(32)).astype(">u4").view(np.uint8).reshape(-1, 4)
        hashed = self._crc.extend(self._register, seed_bytes) ^ np.uint32(self._crc.xor_out)
        offset = _OFFSETS[self._crc.width][stage] if self._rotate else 0
        return (_rotate_right(hashed, offset, self._crc.width) % np.uint64(group_size)).astype(np.int64)


def mix64(words: Words) -> Words:
    """SplitMix64 of each word (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)."""
    words = words + _GOLDEN
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return words ^ (words >> np.uint64(31))


def udp_source_port(local_qpn: NDArray[np.int64], remote_qpn: NDArray[np.int64]) -> NDArray[np.uint16]:
    """UDP source port of a RoCEv2 connection without a flow label, 0xC000..0xFFFF, as Linux derives it from the QPNs.

    NCCL leaves the flow label 0, so the 24-bit queue pair numbers decide (include/rdma/ib_verbs.h:
    rdma_calc_flow_label, rdma_flow_label_to_udp_sport). The product is symmetric: both directions get one port.
    """
    product = local_qpn.astype(np.uint64) * remote_qpn.astype(np.uint64)
    product ^= product >> np.uint64(20)
    product ^= product >> np.uint64(40)
    label = product & np.uint64(_FLOW_LABEL_MASK)
    folded = (label & np.uint64(0x3FFF)) ^ (label >> np.uint64(14))
    return (folded | np.uint64(0xC000)).astype(np.uint16)


def _rotate_right(hashed: NDArray[np.uint32], offset: int, width: int) -> Words:
    wide = hashed.astype(np.uint64)
    turned = wide >> np.uint64(offset) | wide << np.uint64(width - offset)
    return turned & np.uint64((1 << width) - 1)

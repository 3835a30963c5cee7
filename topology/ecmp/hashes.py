"""The hash functions that switches and simulators use, over whole arrays of messages.

CRCs are given by the parameters of the catalogues and checked against the published value of "123456789"; murmur3 is
the 32-bit variant that network simulators take (x86_32); SplitMix64 serves as an ideal hash. Not covered: which fields
a switch hashes, and which next hop it takes (hashing).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Words32 = NDArray[np.uint32]

_GOLDEN = np.uint64(0x9E37_79B9_7F4A_7C15)


@dataclass(frozen=True)
class Crc:
    """A reflected CRC of `width` bits; parameters as in the catalogues, `polynomial` with its bits reversed."""

    width: int
    polynomial: int
    init: int = 0
    xor_out: int = 0

    def table(self) -> Words32:
        """Return the CRC of each single byte, (256,)."""
        entries: Words32 = np.arange(256, dtype=np.uint32)
        for _ in range(8):
            entries = (entries >> np.uint32(1)) ^ (entries & np.uint32(1)) * np.uint32(self.polynomial)
        return entries

    def of(self, message: NDArray[np.uint8]) -> Words32:
        """CRC of every message, shape (num_messages, num_bytes)."""
        return self.finish(self.extend(self.start(len(message)), message))

    def start(self, num_messages: int) -> Words32:
        """Return the register before the first byte."""
        return np.full(num_messages, self.init, dtype=np.uint32)

    def extend(self, register: Words32, message: NDArray[np.uint8]) -> Words32:
        """Return the register after these further bytes of each message."""
        table = self.table()
        for byte in message.T:
            register = table[(register ^ byte) & 0xFF] ^ (register >> 8)
        return register

    def finish(self, register: Words32) -> Words32:
        """Return the CRC of a register."""
        return register ^ np.uint32(self.xor_out)


CRC16_BISYNC = Crc(width=16, polynomial=0xA001)  # CRC-16/ARC
CRC16_CCITT = Crc(width=16, polynomial=0x8408)  # CRC-16/KERMIT
CRC32C = Crc(width=32, polynomial=0x82F6_3B78, init=0xFFFF_FFFF, xor_out=0xFFFF_FFFF)  # CRC-32/ISCSI


def xor16(message: NDArray[np.uint8]) -> Words32:
    """XOR of the little-endian 16-bit words of every message, shape (num_messages, an even num_bytes)."""
    low = np.bitwise_xor.reduce(message[:, 0::2], axis=1).astype(np.uint32)
    high = np.bitwise_xor.reduce(message[:, 1::2], axis=1).astype(np.uint32)
    return np.asarray(low | high << np.uint32(8))


def murmur3(message: Iterable[Words32], seed: Words32) -> Words32:
    """Compute MurmurHash3 x86_32 (Appleby, public domain) of 32-bit little-endian words, one array a word."""
    state, num_bytes = seed.astype(np.uint32), 0
    for word in message:
        scrambled = _rotate_left(word.astype(np.uint32) * np.uint32(0xCC9E_2D51), 15) * np.uint32(0x1B87_3593)
        state = _rotate_left(state ^ scrambled, 13) * np.uint32(5) + np.uint32(0xE654_6B64)
        num_bytes += 4
    state = state ^ np.uint32(num_bytes)
    state = (state ^ state >> np.uint32(16)) * np.uint32(0x85EB_CA6B)
    state = (state ^ state >> np.uint32(13)) * np.uint32(0xC2B2_AE35)
    return np.asarray(state ^ state >> np.uint32(16))


def mix64(values: Words) -> Words:
    """SplitMix64 of each value (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)."""
    values = values + _GOLDEN
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return values ^ (values >> np.uint64(31))


def rotate_right(hashed: Words32, offset: int, width: int) -> Words:
    """Turn words of `width` bits right, bits that fall off coming back in front."""
    wide = hashed.astype(np.uint64)
    turned = wide >> np.uint64(offset) | wide << np.uint64(width - offset)
    return turned & np.uint64((1 << width) - 1)


def _rotate_left(values: Words32, offset: int) -> Words32:
    return np.asarray(values << np.uint32(offset) | values >> np.uint32(32 - offset))

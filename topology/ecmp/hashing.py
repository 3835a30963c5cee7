"""ECMP: which of several equal next hops a switch gives a RoCEv2 flow, for many flows at once.

`random` is the ideal: each switch mixes the whole header with its own seed. `crc16` (CCITT), `crc16_bisync`,
`crc32c_low`, `crc32c_high` and `xor16` are what switching chips compute (Broadcom RTAG7: a function of 16-bit header
bins and a seed, rotated right by an offset, then modulo); `crc32c` takes both halves; `murmur3` is the ns-3 HPCC
simulator's. CRC and XOR are linear: another seed changes every hash by the same XOR, so with the seed alone the flows
that one uplink carried to a spine all leave it by one uplink (polarisation); hence an offset a stage. Not covered: the
bin order of real chips, which is not public, and what is no hash (balance).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from topology.ecmp.hashes import (
    CRC16_BISYNC,
    CRC16_CCITT,
    CRC32C,
    Crc,
    Words,
    Words32,
    mix64,
    murmur3,
    rotate_right,
    xor16,
)
from topology.ecmp.source_port import udp_source_port

__all__ = [
    "CRC16_BISYNC",
    "CRC16_CCITT",
    "CRC32C",
    "FIVE_TUPLE",
    "HASHES",
    "Crc",
    "Ecmp",
    "Field",
    "HashName",
    "Headers",
    "Stage",
    "mix64",
    "udp_source_port",
]

HashName = Literal[
    "random", "crc16", "crc32c", "crc16_bisync", "crc32c_low", "crc32c_high", "xor16", "murmur3"
]  # crc16 is CCITT
HASHES: tuple[HashName, ...] = get_args(HashName)
Field = Literal["src_ip", "dst_ip", "protocol", "src_port", "dst_port", "dst_qpn"]
FIVE_TUPLE: tuple[Field, ...] = ("src_ip", "dst_ip", "protocol", "src_port", "dst_port")

UDP_PROTOCOL = 17  # IANA's protocol number of UDP, in the IPv4 header
ROCE_V2_PORT = 4791  # IANA's UDP port of RoCEv2 (InfiniBand specification, annex A17)
_WORD_MASK = (1 << 64) - 1  # a seed may be any integer of Python, an array's words have 64 bits
# RTAG7 hashes twelve bins of 16 bits (six 32-bit words), then the seed as the seventh word.
_NUM_BINS = 12
_WIDE_BINS: dict[Field, int] = {"src_ip": 0, "dst_ip": 2, "dst_qpn": 4, "protocol": 6}  # low half first
_NARROW_BINS: dict[Field, int] = {"src_port": 8, "dst_port": 9}


class Stage(IntEnum):
    """The choices that a path makes, each at its own offset of the hash."""

    TOR_UP = 0
    SPINE_UP = 1
    CORE_DOWN = 2
    SPINE_DOWN = 3


_CRCS: dict[HashName, tuple[Crc, int, int]] = {  # function, first bit taken, bits taken
    "crc16": (CRC16_CCITT, 0, 16),
    "crc16_bisync": (CRC16_BISYNC, 0, 16),
    "crc32c": (CRC32C, 0, 32),
    "crc32c_low": (CRC32C, 0, 16),
    "crc32c_high": (CRC32C, 16, 16),
}
# Rotations a stage, as far apart as the width allows: ToR uplinks need the most bits, parallel links the fewest.
_OFFSETS = {0: (0, 0, 0, 0), 16: (0, 8, 13, 6), 32: (0, 8, 16, 24)}


@dataclass(frozen=True, eq=False)
class Headers:
    """The 5-tuples of flows, and the destination QP of their BTH where a switch is to hash it (E-ECMP)."""

    src_ip: NDArray[np.uint32]
    dst_ip: NDArray[np.uint32]
    udp_sport: NDArray[np.uint16]
    dst_qpn: NDArray[np.uint32] | None = None
    udp_dport: int | NDArray[np.int64] = ROCE_V2_PORT  # one, or one a flow

    def __len__(self) -> int:
        return len(self.src_ip)

    def field(self, name: Field) -> Words32:
        """One field, 32 bits a flow.

        Raises:
            ValueError: the destination QP is asked for and not known.
        """
        known: dict[Field, NDArray[np.uint32] | NDArray[np.uint16] | NDArray[np.int64] | int | None] = {
            "src_ip": self.src_ip,
            "dst_ip": self.dst_ip,
            "protocol": UDP_PROTOCOL,
            "src_port": self.udp_sport,
            "dst_port": self.udp_dport,
            "dst_qpn": self.dst_qpn,
        }
        if known.get(name) is None:
            raise ValueError(f"hash field {name!r}: the headers do not have it; known are {', '.join(get_args(Field))}")
        return np.broadcast_to(np.asarray(known[name], dtype=np.uint32), len(self)).astype(np.uint32)

    def to_bins(self, fields: Sequence[Field] = FIVE_TUPLE) -> NDArray[np.uint8]:
        """The fields as RTAG7 takes them, little-endian, shape (num_flows, 24); fields not taken are 0."""
        bins = np.zeros((len(self), _NUM_BINS), dtype="<u2")
        for name, first in _WIDE_BINS.items():
            if name in fields:
                value = self.field(name)
                bins[:, first], bins[:, first + 1] = value & np.uint32(0xFFFF), value >> np.uint32(16)
        for name, first in _NARROW_BINS.items():
            if name in fields:
                bins[:, first] = self.field(name)
        return bins.view(np.uint8).reshape(len(self), 2 * _NUM_BINS)

    def to_words(self, fields: Sequence[Field] = FIVE_TUPLE) -> list[Words32]:
        """Return the fields as the ns-3 simulator takes them: addresses, then both ports in one word, then the QP."""
        none = np.zeros(len(self), dtype=np.uint32)
        source, target, sport, dport = (
            self.field(name) if name in fields else none for name in ("src_ip", "dst_ip", "src_port", "dst_port")
        )
        # ns-3 HPCC's switch hashes 12 bytes, without the protocol: sport | dport << 16 is its third word.
        message = [source, target, sport | dport << np.uint32(16)]
        return [*message, self.field("dst_qpn")] if "dst_qpn" in fields else message


class Ecmp:
    """The choices of all switches for a set of flows.

    Args:
        name: the hash function.
        headers: the flows' 5-tuples.
        seed: of the switches; every switch derives its own from it.
        rotate: shift the hash by an offset a stage; without it CRC and XOR polarise. murmur3 and random take none.
        fields: the header fields that are hashed; `dst_qpn` among them is E-ECMP.
        offsets: bits to rotate by, one for each `Stage`, in place of our own; see `hash_bits`.
        seed_per_switch: False gives every switch the same seed; random and murmur3 then polarise too.
        preprocess: stir every bin first, h ^= (h >> 3) ^ (h << 2), as RTAG7 can.

    Raises:
        ValueError: the hash or a field is unknown, no field is given, or the offsets are not one for each stage, below
            the bits of the hash.
    """

    def __init__(
        self,
        name: HashName,
        headers: Headers,
        seed: int,
        *,
        rotate: bool = True,
        fields: Sequence[Field] = FIVE_TUPLE,
        offsets: Sequence[int] | None = None,
        seed_per_switch: bool = True,
        preprocess: bool = False,
    ) -> None:
        if name not in HASHES:
            raise ValueError(f"hash {name!r}: one of {', '.join(HASHES)}")
        if not fields or set(fields) - set(get_args(Field)):
            raise ValueError(f"hash fields {fields!r}: some of {', '.join(get_args(Field))}")
        self._name, self._seed, self._per_switch = name, seed, seed_per_switch
        if offsets is not None:
            _check_offsets(name, offsets)
        self._offsets = tuple(offsets) if offsets is not None else usual_offsets(name) if rotate else (0,) * len(Stage)
        # The header's part is the same at every switch, so it is hashed once; the seed comes last in the message, and
        # `hashed` adds that alone.
        if name in _CRCS:
            crc = _CRCS[name][0]
            self._register = crc.extend(crc.start(len(headers)), _bins(headers, fields, preprocess))
        elif name == "xor16":
            self._register = xor16(_bins(headers, fields, preprocess))
        else:
            self._message = headers.to_words(fields)
            self._mixed = _mix_all(self._message)

    def choose(self, stage: Stage, switch: NDArray[np.int64], group_size: int) -> NDArray[np.int64]:
        """The member (0..group_size-1) that each flow takes at its switch (a node id); groups need no power of two."""
        if group_size == 1:
            return np.zeros(len(switch), dtype=np.int64)
        member = (self.hashed(stage, switch) % np.uint64(group_size)).astype(np.int64)
        # The simulator lists its next hops from the last to the first.
        return group_size - 1 - member if self._name == "murmur3" else member

    def hashed(self, stage: Stage, switch: NDArray[np.int64]) -> Words:
        """Return the value that a switch takes modulo its group, after its rotation."""
        if self._name == "murmur3":
            # ns-3 HPCC seeds each switch by its node id: seed 0 gives the paths of its runs.
            seeds = (switch if self._per_switch else np.zeros_like(switch)) + self._seed
            return murmur3(self._message, (seeds & 0xFFFF_FFFF).astype(np.uint32)).astype(np.uint64)
        seeds64 = self._switch_seeds(switch)
        if self._name == "random":
            # Mixed once more after the seed: no choice at one switch tells anything of the choice at another.
            return mix64(self._mixed ^ seeds64)
        seed_bytes = (seeds64 >> np.uint64(32)).astype("<u4").view(np.uint8).reshape(-1, 4)
        if self._name == "xor16":
            return rotate_right(self._register ^ xor16(seed_bytes), self._offsets[stage], 16)
        crc, first, width = _CRCS[self._name]
        full = crc.finish(crc.extend(self._register, seed_bytes)) >> np.uint32(first)
        return rotate_right(full & np.uint32((1 << width) - 1), self._offsets[stage], width)

    def _switch_seeds(self, switch: NDArray[np.int64]) -> Words:
        base = mix64(np.array([self._seed & _WORD_MASK], dtype=np.uint64))
        return mix64(switch.astype(np.uint64) ^ base) if self._per_switch else base.repeat(len(switch))


def hash_bits(name: HashName) -> int:
    """Bits of a hash that a switch can rotate; 0 for random and murmur3, which take no offset."""
    return _CRCS[name][2] if name in _CRCS else 16 if name == "xor16" else 0


def usual_offsets(name: HashName) -> tuple[int, ...]:
    """The offset of each `Stage` where none is given."""
    return _OFFSETS[hash_bits(name)]


def _check_offsets(name: HashName, offsets: Sequence[int]) -> None:
    bits = hash_bits(name)
    if not bits:
        raise ValueError(f"offsets {tuple(offsets)}: {name} takes none")
    if len(offsets) != len(Stage) or not all(0 <= offset < bits for offset in offsets):
        rule = f"{len(Stage)} numbers from 0 to {bits - 1}, one for each of {', '.join(stage.name for stage in Stage)}"
        raise ValueError(f"offsets {tuple(offsets)}: {name} takes {rule}")


def _bins(headers: Headers, fields: Sequence[Field], preprocess: bool) -> NDArray[np.uint8]:
    message = headers.to_bins(fields)
    if preprocess:
        # A view, so this changes `message`; of 16 bits, so what is shifted past a bin's end is lost, not carried on.
        bins = message.view("<u2")
        bins ^= (bins >> 3) ^ (bins << 2)
    return message


def _mix_all(message: Sequence[Words32]) -> Words:
    mixed = np.zeros(len(message[0]), dtype=np.uint64)
    for word in message:
        mixed = mix64(mixed ^ word)
    return mixed

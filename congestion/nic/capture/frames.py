"""Frames of a capture file as offsets into its bytes: classic pcap and pcapng, of any byte order, gzipped or not.

The file is mapped, not read, and frames are never copied: a million of them are found in about a second. A file that
ends inside a frame gives what was there before, and says so. Not covered: other capture formats, and pcapng
blocks that hold no packet.
"""

from __future__ import annotations

import gzip
import mmap
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from netlayer.errors import ConfigError

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]

_GZIP = b"\x1f\x8b"
_NANOSECONDS = {0xA1B2C3D4: 1000, 0xA1B23C4D: 1}  # one tick of the second time field, by the file's first four bytes
_SECTION, _INTERFACE, _OLD_PACKET, _SIMPLE_PACKET, _PACKET = 0x0A0D0D0A, 1, 2, 3, 6
_BYTE_ORDER = 0x1A2B3C4D
_IF_TSRESOL, _IF_TSOFFSET = 9, 14
# libpcap's own limit for a frame; a file may announce a larger one.
_MOST_FRAME_BYTES = 262_144
_MOST_UNZIPPED_BYTES = 8 << 30
_REMEDY = "give a capture file, as tcpdump -w writes it"


@dataclass(frozen=True, eq=False)
class Frames:
    """Frames in file order; arrays of shape (num_frames,).

    Args:
        data: the bytes of the whole file.
        start: where in them a frame begins.
        captured: bytes of it that are there.
        original: bytes that it had on the wire.
        time_ns: since 1970; 0 where the file has none.
        link: its link type, as tcpdump.org/linktypes.html numbers them.
        cut: the file ends inside a frame or block.
    """

    data: Bytes
    start: Ints
    captured: Ints
    original: Ints
    time_ns: Ints
    link: Ints
    cut: bool

    def __len__(self) -> int:
        return len(self.start)


def read_frames(path: Path, field: str = "FILE") -> Frames:
    """All frames of a capture file.

    Raises:
        ConfigError: the file cannot be read, is no capture, or is damaged; `field` is how the user named it.
    """
    try:
        raw = _load(path)
    except (OSError, EOFError, zlib.error) as exc:
        reason = getattr(exc, "strerror", None) or exc
        raise ConfigError(field, path, f"cannot be read ({reason})", _REMEDY) from exc
    if len(raw) < 4:
        raise ConfigError(field, path, f"is no capture: {len(raw)} bytes long", _REMEDY)
    try:
        first = bytes(raw[:4])
        if int.from_bytes(first, "big") == _SECTION:
            return _read_pcapng(raw)
        for order, endian in (("big", ">"), ("little", "<")):
            tick_ns = _NANOSECONDS.get(int.from_bytes(first, order))  # type: ignore[arg-type]
            if tick_ns:
                return _read_pcap(raw, endian, tick_ns)
    except _Damaged as exc:
        raise ConfigError(field, path, f"is damaged: {exc}", "capture it again, or cut it off before there") from exc
    raise ConfigError(field, path, f"is no pcap or pcapng (it begins with {first.hex()})", _REMEDY)


class _Damaged(Exception):
    """A number in the file cannot be right; says where."""


def _load(path: Path) -> memoryview:
    with path.open("rb") as file:
        if file.read(2) == _GZIP:
            with gzip.open(path) as unzipped:
                data = unzipped.read(_MOST_UNZIPPED_BYTES + 1)
            if len(data) > _MOST_UNZIPPED_BYTES:
                raise OSError(f"more than {_MOST_UNZIPPED_BYTES >> 30} GiB when unzipped")
            return memoryview(data)
        file.seek(0)
        try:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (ValueError, OSError):  # empty, or a pipe
            return memoryview(file.read())


def _read_pcap(raw: memoryview, endian: str, tick_ns: int) -> Frames:
    if len(raw) < 24:
        raise _Damaged(f"it ends inside the file's header, at byte {len(raw)}")
    snap_bytes, link = struct.unpack_from(endian + "16xII", raw)
    most = max(snap_bytes, _MOST_FRAME_BYTES)
    header = struct.Struct(endian + "IIII")
    rows: list[tuple[int, int, int, int]] = []
    at, end = 24, len(raw)
    while at + 16 <= end:
        seconds, ticks, captured, original = header.unpack_from(raw, at)
        if captured > most:
            raise _Damaged(f"frame {len(rows) + 1}, at byte {at}, says that it is {captured} bytes long")
        if at + 16 + captured > end:
            break
        rows.append((at + 16, captured, original, seconds * 1_000_000_000 + ticks * tick_ns))
        at += 16 + captured
    start, captured, original, time_ns = np.array(rows, dtype=np.int64).reshape(len(rows), 4).T.copy()
    links = np.full(len(rows), link & 0xFFFF, dtype=np.int64)  # above it: whether frames end in an FCS
    return Frames(np.frombuffer(raw, dtype=np.uint8), start, captured, original, time_ns, links, at != end)


@dataclass(frozen=True)
class _Interface:
    """Clock and link layer of a pcapng interface: time is ticks * tick_ns / ticks_per_ns, + offset_ns."""

    link: int
    snap_bytes: int
    ticks_per_s: int
    offset_ns: int


def _read_pcapng(raw: memoryview) -> Frames:
    rows: list[tuple[int, int, int, int, int]] = []
    interfaces: list[_Interface] = []
    at, end, endian = 0, len(raw), "<"
    while at + 12 <= end:
        kind = struct.unpack_from(endian + "I", raw, at)[0]
        if kind == _SECTION:  # reads the same in both byte orders
            endian, interfaces = _byte_order(raw, at), []
        size = struct.unpack_from(endian + "I", raw, at + 4)[0]
        if size < 12 or size % 4:
            raise _Damaged(f"the block at byte {at} says that it is {size} bytes long")
        if at + size > end:
            break
        if struct.unpack_from(endian + "I", raw, at + size - 4)[0] != size:
            raise _Damaged(f"the block at byte {at} has two lengths")
        body, length = at + 8, size - 12
        if kind == _INTERFACE:
            interfaces.append(_read_interface(raw, body, length, endian))
        elif kind in (_PACKET, _OLD_PACKET, _SIMPLE_PACKET):
            rows.append(_read_block(raw, kind, body, length, endian, interfaces))
        at += size
    start, captured, original, time_ns, links = np.array(rows, dtype=np.int64).reshape(len(rows), 5).T.copy()
    return Frames(np.frombuffer(raw, dtype=np.uint8), start, captured, original, time_ns, links, at != end)


def _byte_order(raw: memoryview, at: int) -> str:
    for endian in "<>":
        if struct.unpack_from(endian + "I", raw, at + 8)[0] == _BYTE_ORDER:
            return endian
    raise _Damaged(f"the section at byte {at} has no byte order")


def _read_interface(raw: memoryview, body: int, length: int, endian: str) -> _Interface:
    if length < 8:
        raise _Damaged(f"the interface at byte {body - 8} is too short")
    link, snap_bytes = struct.unpack_from(endian + "HxxI", raw, body)
    ticks_per_s, offset_s = 10**6, 0
    at = body + 8
    while at + 4 <= body + length:
        code, size = struct.unpack_from(endian + "HH", raw, at)
        if code == 0 or at + 4 + size > body + length:
            break
        if code == _IF_TSRESOL and size == 1:
            power = raw[at + 4]
            ticks_per_s = 2 ** (power & 0x7F) if power & 0x80 else 10**power
        elif code == _IF_TSOFFSET and size == 8:
            offset_s = struct.unpack_from(endian + "q", raw, at + 4)[0]
        at += 4 + (size + 3) // 4 * 4
    return _Interface(link, snap_bytes, ticks_per_s, offset_s * 10**9)


def _read_block(
    raw: memoryview, kind: int, body: int, length: int, endian: str, interfaces: list[_Interface]
) -> tuple[int, int, int, int, int]:
    """Start, captured and original bytes, time and link type of the packet in a block."""
    head = {_PACKET: ("IIIII", 20), _OLD_PACKET: ("HxxIIII", 20), _SIMPLE_PACKET: ("I", 4)}[kind]
    if length < head[1]:
        raise _Damaged(f"the packet at byte {body - 8} is too short")
    fields = struct.unpack_from(endian + head[0], raw, body)
    number = fields[0] if kind != _SIMPLE_PACKET else 0
    if number >= len(interfaces):
        raise _Damaged(f"the packet at byte {body - 8} names interface {number} of {len(interfaces)}")
    owner = interfaces[number]
    if kind == _SIMPLE_PACKET:
        original, time_ns = fields[0], 0
        captured = min(original, owner.snap_bytes or original)
    else:
        _, high, low, captured, original = fields
        time_ns = (high << 32 | low) * 10**9 // owner.ticks_per_s + owner.offset_ns
    if captured > length - head[1]:
        raise _Damaged(f"the packet at byte {body - 8} says that it is {captured} bytes long")
    if not -(2**63) <= time_ns < 2**63:
        raise _Damaged(f"the packet at byte {body - 8} has an impossible time")
    return body + head[1], captured, original, time_ns, owner.link

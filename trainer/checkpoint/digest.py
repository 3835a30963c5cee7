"""Digests that show damage to a checkpoint: a CRC-32 of each tensor, each header and each file next to them.

A file's header has the digests of its tensors, and `meta.json` those of the headers, of the tokenizer and of itself. So
damage is noticed in what is read, when it is read. It guards against disks and wires, not against people: who can write
a file can write its digest. zlib's CRC-32 does about a gigabyte a second on a core: a checkpoint is written no faster
than that, file by file, and each rank that goes on reads whole what it holds a part of.
"""

from __future__ import annotations

import zlib


def digest(content: bytes | memoryview) -> str:
    """Eight hexadecimal digits."""
    return f"{zlib.crc32(content):08x}"

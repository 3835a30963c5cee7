"""Payloads of the page: a JSON object and typed arrays in one piece of bytes, which a browser views without a copy.

    4 bytes  NLP1
    4 bytes  length of the header, little-endian
    header   {"facts": ..., "arrays": {name: [dtype, shape, offset]}}, padded with blanks to a multiple of 8
    arrays   each begins at a multiple of 8 from the end of the header

Numbers that are not finite are NaN in arrays and null in facts. `pack_levels` turns a table into bytes of 255 levels,
for colours.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"NLP1"
MISSING = 255
"""Level of a cell without a value."""
_DTYPES = {"uint8", "int32", "float32", "float64"}
_LEVELS = 254


def pack(facts: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]] | None = None) -> bytes:
    """Return a payload.

    Raises:
        ValueError: an array has a type that a browser has no view of.
    """
    head: dict[str, Any] = {}
    parts, offset = [], 0
    for name, array in (arrays or {}).items():
        if str(array.dtype) not in _DTYPES:
            raise ValueError(
                f"array {name}: {array.dtype} has no view in a browser; one of {', '.join(sorted(_DTYPES))}"
            )
        data = np.ascontiguousarray(array).tobytes()
        head[name] = [str(array.dtype), list(array.shape), offset]
        parts.append(data + bytes(-len(data) % 8))
        offset += len(parts[-1])
    header = json.dumps({"facts": plain(facts), "arrays": head}, separators=(",", ":"), allow_nan=False).encode()
    header += b" " * (-(len(header) + 8) % 8)
    return b"".join([MAGIC, len(header).to_bytes(4, "little"), header, *parts])


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return the facts and arrays of a payload.

    Raises:
        ValueError: it is none.
    """
    if data[:4] != MAGIC:
        raise ValueError("no payload of the page")
    begin = 8 + int.from_bytes(data[4:8], "little")
    header = json.loads(data[8:begin])
    arrays = {}
    for name, (dtype, shape, offset) in header["arrays"].items():
        count = math.prod(shape)
        arrays[name] = np.frombuffer(data, dtype, count, begin + offset).reshape(shape)
    return header["facts"], arrays


def squeeze(data: bytes) -> bytes:
    """Compress a payload as a browser unpacks it; the same bytes give the same bytes."""
    return gzip.compress(data, compresslevel=6, mtime=0)


def pack_levels(table: NDArray[np.float64]) -> tuple[NDArray[np.uint8], float, float]:
    """Levels 0 to 254 of a table between its 0.5th and 99.5th percentile, and these two; NaN is `MISSING`.

    A level is 0.4% of that range: for colours. What lies outside has the level of the nearer end.
    """
    finite = table[np.isfinite(table)]
    if not len(finite):
        return np.full(table.shape, MISSING, np.uint8), 0.0, 1.0
    low, high = (float(value) for value in np.quantile(finite, (0.005, 0.995)))
    if not high > low:
        high = low + max(abs(low) * 1e-6, 1e-12)
    with np.errstate(invalid="ignore"):
        levels = np.clip(np.rint((table - low) / (high - low) * _LEVELS), 0, _LEVELS)
    return np.where(np.isfinite(table), levels, MISSING).astype(np.uint8), low, high


def plain(value: Any) -> Any:
    """Return a value that JSON can hold: NumPy's numbers as Python's, NaN as null, other objects as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | range):
        return [plain(each) for each in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int | bool) else str(value)

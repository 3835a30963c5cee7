"""Sizes and rates as people write them: '200G' is a rate, '64MiB' a size, '16M' a size as nccl-tests reads it.

Rates are decimal (1G = 1e9 bit/s, as on a port's label); sizes are binary for one-letter suffixes (1M = 2**20 bytes,
nccl-tests' rule) and exact for 'MB' (1e6) and 'MiB' (2**20). Numbers are kept as integers.
"""

from __future__ import annotations

import re

_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NUMBER = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?(?:e\d+)?)\s*([a-zA-Z/]*)\s*", re.ASCII)


def parse_rate(text: str | int) -> int:
    """Bits per second from '200G', '400Gbps', '25.6 Tb/s' or a plain number.

    Raises:
        ValueError: the text is no rate; the message shows one that is.
    """
    number, unit = _split(text, "a rate such as 200G or 25.6T (bits per second)")
    prefix = re.sub(r"(bps|b/s|bit/s)$", "", unit, flags=re.IGNORECASE).upper()
    return _scale(text, number, _DECIMAL, prefix, "a rate such as 200G or 25.6T (bits per second)")


def parse_size(text: str | int) -> int:
    """Return bytes for '8', '16M' (binary, as nccl-tests), '64MiB' or '10MB' (decimal).

    Raises:
        ValueError: the text is no size; the message shows one that is.
    """
    expected = "a size such as 8, 64K, 16M, 64MiB or 1G (bytes)"
    number, unit = _split(text, expected)
    unit = unit.upper()
    if unit.endswith("IB"):
        return _scale(text, number, _BINARY, unit[:-2], expected)
    if unit.endswith("B"):
        return _scale(text, number, _DECIMAL, unit[:-1], expected)
    return _scale(text, number, _BINARY, unit, expected)


def format_size(num_bytes: int) -> str:
    """'64 MiB' from 67108864: the largest binary unit with at most one decimal."""
    value, unit = float(num_bytes), "B"
    for name in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, name
    return f"{value:.1f}".removesuffix(".0") + f" {unit}"


def format_rate(bits_per_second: float) -> str:
    """'200 Gb/s' from 200e9: the largest decimal unit with at most one decimal."""
    value, unit = float(bits_per_second), "b/s"
    for name in ("kb/s", "Mb/s", "Gb/s", "Tb/s"):
        if abs(value) < 1000:
            break
        value, unit = value / 1000, name
    return f"{value:.1f}".removesuffix(".0") + f" {unit}"


def _split(text: str | int, expected: str) -> tuple[float | int, str]:
    match = _NUMBER.fullmatch(str(text))
    if isinstance(text, bool) or match is None:
        raise ValueError(f"{text!r} is not {expected}")
    digits = match[1].replace("_", "")
    return (int(digits) if digits.isdigit() else float(digits)), match[2]


def _scale(text: str | int, number: float | int, units: dict[str, int], prefix: str, expected: str) -> int:
    if prefix not in units:
        raise ValueError(f"{text!r} is not {expected}")
    try:
        return round(number * units[prefix])
    except OverflowError as exc:
        raise ValueError(f"{text!r} is not {expected}") from exc

"""`alltoallv_perf`: as alltoall, with parts of unequal size. The size is the most that a rank sends or receives.

Without a matrix each rank sends the more to a rank the farther ahead it is, as nccl-tests does. Its variables:
NCCL_TESTS_ALLTOALLV_SPREAD: 0 the same to all, 1 (default) by distance alone; ..._MATRIX_FILE: bytes from each rank
(row) to each rank, separated by whitespace; ..._MATRIX_SCALE: a factor on them. Where we differ: a bad value is
refused, not passed over, and PRINT_SUMMARY, a summary a rank, is not built.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.perf.collectives.collective import SHARE_ALIGNMENT_BYTES, Collective, Part, Place
from bench.perf.options import PerfOptions, flag_name, perf_command
from netlayer.errors import ConfigError

if TYPE_CHECKING:
    from bench.backends import Backend, Call

_SPREAD, _FILE, _SCALE, _SUMMARY = (
    f"NCCL_TESTS_ALLTOALLV_{name}" for name in ("SPREAD", "MATRIX_FILE", "MATRIX_SCALE", "PRINT_SUMMARY")
)
Matrix = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Traffic:
    """A rule for sizes in bytes; `matrix`, read from `file`, stands above `spread`."""

    spread: float = 1.0
    matrix: Matrix | None = None
    file: str = ""

    def sizes(self, total_bytes: int, ranks: int) -> Matrix:
        """Bytes from each rank to each rank where a rank sends about `total_bytes`."""
        if self.matrix is not None:
            return tuple(row[:ranks] for row in self.matrix[:ranks])
        ahead = [self._share(distance, total_bytes, ranks) for distance in range(ranks)]
        return tuple(tuple(ahead[(to - rank) % ranks] for to in range(ranks)) for rank in range(ranks))

    def check_ranks(self, ranks: int) -> None:
        """See that the matrix is large enough.

        Raises:
            ConfigError: it is not.
        """
        if self.matrix is not None and len(self.matrix) < ranks:
            rule = f"has {len(self.matrix)} rows, and there are {ranks} ranks"
            raise ConfigError(_FILE, self.file, rule, "give a row and a column a rank")

    def _share(self, distance: int, total_bytes: int, ranks: int) -> int:
        if ranks == 1:
            return _aligned(total_bytes)
        even, weighted = total_bytes / ranks, distance * total_bytes / (ranks * (ranks - 1) // 2)
        return _aligned((1 - self.spread) * even + self.spread * weighted)


def read_traffic() -> Traffic:
    """Read the traffic that the environment sets.

    Raises:
        ConfigError: a variable or the matrix cannot be used.
    """
    return _read(*(os.environ.get(name) for name in (_SPREAD, _FILE, _SCALE, _SUMMARY)))


@functools.cache
def _read(spread: str | None, file: str | None, scale: str | None, summary: str | None) -> Traffic:
    if summary not in (None, "0"):
        raise ConfigError(_SUMMARY, summary, "is not built: a row has the largest rank's figures", "unset it")
    if file is None:
        if scale is not None:
            raise ConfigError(_SCALE, scale, f"scales a matrix, and {_FILE} is not set", "unset it, or set both")
        return Traffic(_number(_SPREAD, spread, 1.0, most=1.0))
    if spread is not None:
        raise ConfigError(_SPREAD, spread, f"has no effect beside {_FILE}", "unset one of them")
    return Traffic(matrix=_read_matrix(file, _number(_SCALE, scale, 1.0)), file=file)


def _number(name: str, text: str | None, default: float, most: float = math.inf) -> float:
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= most or math.isinf(value):
        limit = "" if math.isinf(most) else f" and at most {most:g}"
        raise ConfigError(name, text, f"must be a number of at least 0{limit}", f"unset it, which is {default:g}")
    return value


def _read_matrix(file: str, scale: float) -> Matrix:
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(_FILE, file, f"cannot be read ({exc})", "give a text file with a row a rank") from exc
    rows: list[tuple[int, ...]] = []
    for number, line in enumerate(lines, 1):
        where = f"{_FILE}: {file}:{number}"
        if fields := line.split():
            rows.append(tuple(_aligned(scale * _number(where, word, 0.0)) for word in fields))
    if not rows or any(len(row) != len(rows) for row in rows):
        widths = sorted({len(row) for row in rows})
        rule = f"must be square, and has {len(rows)} rows of {', '.join(map(str, widths)) or 0} numbers"
        raise ConfigError(_FILE, file, rule, "give bytes from each rank (row) to each rank")
    return tuple(rows)


def _aligned(num_bytes: float) -> int:
    """Round down to a multiple of 16 bytes, as nccl-tests: whole elements of every type."""
    return int(num_bytes) // SHARE_ALIGNMENT_BYTES * SHARE_ALIGNMENT_BYTES


def _launch(backend: Backend, call: Call) -> None:
    counts = _counts(call.part_count, call.send.itemsize, backend.ranks)
    received = [row[backend.rank] for row in counts]
    backend.alltoallv(call.recv, call.send, received, counts[backend.rank])


def _counts(count: int, width_bytes: int, ranks: int) -> Sequence[Sequence[int]]:
    """Elements from each rank (row) to each rank, for parts of `count` elements on average."""
    return _split(read_traffic(), count * width_bytes * ranks, width_bytes, ranks)


@functools.lru_cache(maxsize=8)  # gloo's calls are worked out while the clock runs
def _split(traffic: Traffic, total_bytes: int, width_bytes: int, ranks: int) -> Sequence[Sequence[int]]:
    return [[size // width_bytes for size in row] for row in traffic.sizes(total_bytes, ranks)]


def _extents(count: int, width_bytes: int, ranks: int) -> tuple[int, int]:
    counts = _counts(count, width_bytes, ranks)
    return max(map(sum, counts)), max(map(sum, zip(*counts, strict=True)))


def _expect(place: Place) -> list[Part]:
    counts = _counts(place.count, place.width_bytes, place.ranks)
    return [Part(source, sum(row[: place.rank]), row[place.rank]) for source, row in enumerate(counts)]


def _check(options: PerfOptions, ranks: int) -> None:
    traffic = read_traffic()
    if traffic.matrix is None:
        return
    traffic.check_ranks(ranks)
    if options.min_bytes != options.max_bytes:
        rule = "a matrix of traffic sets the sizes, so there is one"
        raise ConfigError(flag_name("min_bytes"), options.min_bytes, rule, "give -b and -e the same value")
    largest = max(_extents(0, 1, ranks))
    if largest > options.max_bytes:
        rule = f"the matrix of traffic sends or receives up to {largest} bytes on a rank"
        raise ConfigError(flag_name("max_bytes"), options.max_bytes, rule, f"give -b {largest} -e {largest}")


COLLECTIVE = Collective(
    name="alltoallv",
    summary="As alltoall, with parts of unequal size.",
    bus_factor=lambda ranks: (ranks - 1) / ranks,
    launch=_launch,
    expect=_expect,
    sends_all=True,
    receives_all=True,
    checks_in_place=False,  # parts would be overwritten before they are sent
    extents=_extents,
    check=_check,
)
command = perf_command(COLLECTIVE)

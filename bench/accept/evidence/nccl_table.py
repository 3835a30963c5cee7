"""Table formats of all versions of nccl-tests and rccl-tests: columns by the header line, counted from the right.

A row has one or two sides: out of place and in place. History (github.com/NVIDIA/nccl-tests and ROCm/rccl-tests, src/):
until March 2019 `bytes N type [op] [root]`, and a deviation `res` for each side; until August 2022 (NCCL 2.13)
`size count type [redop] [root|dist]` and a deviation `error`, which rccl-tests marks with `*` if it is too large; since
then always redop and root, and `#wrong`, the number of wrong elements. An empty redop leaves its column blank.
rccl-tests -O 0 has only the in-place side, broadcast of 2.0 only the out-of-place side. Added later: date and time at
the end (-S) or before the size, per-iteration columns for each side (-I), and `#iters` at the end.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from bench.accept.evidence.log import number

OUT_OF_PLACE, IN_PLACE = "out of place", "in place"
_TYPE_BYTES = {
    "int8": 1, "char": 1, "uint8": 1, "f8e4m3": 1, "f8e5m2": 1, "fp8_e4m3": 1, "fp8_e5m2": 1,
    "half": 2, "bfloat16": 2, "int32": 4, "int": 4, "uint32": 4, "float": 4, "int64": 8, "uint64": 8, "double": 8,
}  # fmt: skip
# Deviation that old versions accept, per rank beyond the first.
_ACCEPTED = {"half": 1e-2, "bfloat16": 1e-2, "float": 1e-5, "double": 1e-12}
_ROW = re.compile(r"\s*(?:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\s+)?\d{1,18}\s+\d{1,18}\s+[a-z][a-z0-9_]{2,11}(?:\s|$)")
_STAMP = re.compile(r"\d{4}-\d\d-\d\d$|\d\d:\d\d:\d\d$")
# Marks a deviation: small values and zero are printed with such an exponent, element counts never.
_EXPONENT = re.compile(r"\de(?:-\d{1,3}|\+00)\*?$")
_TIMES = ("time", "cputime")
_DEVIATIONS = ("error", "res")


class Layout(NamedTuple):
    """Columns of a table, from its header line.

    Args:
        front: names of the columns before the figures.
        side: names of the columns of one side.
        places: sides of the table, in order.
        num_behind: number of columns after the sides, such as the number of iterations.
    """

    front: tuple[str, ...]
    side: tuple[str, ...]
    places: tuple[str, ...]
    num_behind: int = 0


class Side(NamedTuple):
    """Figures of one side of a row.

    Args:
        size: message size in bytes.
        what: data type and reduction.
        place: out of place or in place.
        alg_bw, bus_bw: bandwidths in GB/s.
        wrong: number of wrong elements; None if the data was not checked, or the version does not count them.
        line: line number.
        deviation: largest difference, printed by versions before August 2022; None in later ones.
        too_large: True if the deviation is marked as not accepted.
        rounding: half of the last printed digit of both bandwidths.
    """

    size: int
    what: str
    place: str
    alg_bw: float
    bus_bw: float
    wrong: float | None
    line: int
    deviation: float | None = None
    too_large: bool = False
    rounding: tuple[float, float] = (0.005, 0.005)


class Row(NamedTuple):
    """A row of one size; `op` and `root` are None if the row has no such cell; `root` is -1 for "no root"."""

    size: int
    num_elements: int
    dtype: str
    op: str | None
    root: int | None
    sides: tuple[Side, ...]
    # True if the header has a column of distances (only sendrecv had one), or if its reduction column is blank.
    has_distance: bool = False
    has_blank_op: bool = False


def is_row(line: str) -> bool:
    """Return True if a line begins like a row: size, count and type."""
    return bool(_ROW.match(line))


def read_header(line: str, title: str) -> Layout | None:
    """Parse the columns of a header line; None if it is not a header.

    Args:
        line: the line.
        title: the line above it, which names the sides.
    """
    names = line.replace("#wrong", "wrong").strip("# \t|").split()
    if len(names) < 6 or "busbw" not in names or not {"size", "bytes"} & set(names[:2]):
        return None
    names = [name for name in names if name != "timestamp"]
    starts = [index for index, name in enumerate(names) if name in _TIMES]
    if not starts:
        return None
    side = tuple(names[starts[0] : starts[1] if len(starts) > 1 else len(names)])
    only = OUT_OF_PLACE if "out-of-place" in title else IN_PLACE
    num_behind = len(names) - starts[1] - len(side) if len(starts) > 1 else 0
    if num_behind < 0:
        return None
    return Layout(tuple(names[: starts[0]]), side, (OUT_OF_PLACE, IN_PLACE) if len(starts) > 1 else (only,), num_behind)


def read_row(row_text: str, line: int, layout: Layout | None) -> Row | str:
    """Parse a row; return it, or the reason why it cannot be read.

    Args:
        row_text: the row.
        line: its line number.
        layout: layout from the header; None if the log has no header: then the number of cells decides.
    """
    cells = row_text.split()
    while cells and _STAMP.match(cells[0]):
        cells.pop(0)
    while cells and _STAMP.match(cells[-1]):
        cells.pop()
    front, figures, places, names = _parts(cells, layout)
    if figures is None:
        return f"{len(cells)} cells"
    size, count, dtype = int(front[0]), int(front[1]), front[2]
    op = next((cell for cell in front[3:] if cell[0].isalpha()), None)
    root = next((int(cell) for cell in front[3:] if not cell[0].isalpha()), None)
    has_distance = layout is not None and "dist" in layout.front
    has_blank_op = op is None and layout is not None and bool({"redop", "op"} & set(layout.front))
    what = " ".join(cell for cell in (dtype, op) if cell not in (None, "none"))
    sides: list[Side] = []
    width = len(figures) // len(places)
    for index, place in enumerate(places):
        part = dict(zip(names, figures[index * width : (index + 1) * width], strict=False))
        side = _side(size, what, place, part, line)
        if side is None:
            return f"its {place} figures are {' '.join(part.values())}"
        sides.append(side)
    return Row(size, count, dtype, op, None if has_distance else root, tuple(sides), has_distance, has_blank_op)


def _parts(
    cells: Sequence[str], layout: Layout | None
) -> tuple[Sequence[str], Sequence[str] | None, tuple[str, ...], tuple[str, ...]]:
    """Split cells in those before the figures, figures, places and column names; figures are None if none fits."""
    names = layout.side if layout else ("time", "algbw", "busbw", "wrong")
    places = layout.places if layout else (OUT_OF_PLACE, IN_PLACE)
    if layout and layout.num_behind:
        cells = cells[: -layout.num_behind]
    # Counted from the right, since a front column may be blank. If the first side is blank, only the second is there.
    for counted in dict.fromkeys((places, places[-1:])):
        for num_names in (len(names),) if layout else (4, 8):
            num_front = len(cells) - len(counted) * num_names
            if 3 <= num_front <= 5 and _is_front(cells[3:num_front], layout):
                figures = cells[num_front:]
                if layout is None and any(_EXPONENT.search(cell) for cell in figures[3::num_names]):
                    names = (*names[:3], "error")
                return cells[:num_front], figures, counted, names
    return cells[:3], None, (), ()


def _is_front(cells: Sequence[str], layout: Layout | None) -> bool:
    """Return True if the cells after the type are the reduction and root columns of the header."""
    num_ops = sum(bool(re.match("[a-z]+$", cell)) for cell in cells[:1])
    if not all(re.match(r"-?\d{1,6}$", cell) for cell in cells[num_ops:]) or len(cells) > num_ops + 1:
        return False
    if layout is None:
        return True
    # Only the reduction can be blank. If another cell is missing, the row was cut and all figures would be shifted.
    num_columns, may_be_blank = len(layout.front) - 3, {"redop", "op"} & set(layout.front)
    return len(cells) == num_columns or (bool(may_be_blank) and num_ops == 0 and len(cells) == num_columns - 1)


def _side(size: int, what: str, place: str, cells: dict[str, str], line: int) -> Side | None:
    time, alg_bw, bus_bw = (number(cells.get(name)) for name in (_time_name(cells), "algbw", "busbw"))
    if not time or alg_bw is None or bus_bw is None:
        return None
    last_cell = next((cells[name] for name in ("wrong", *_DEVIATIONS) if name in cells), "N/A")
    errors = number(last_cell.rstrip("*"))
    if errors is None and last_cell != "N/A":
        return None
    is_old_table = any(name in cells for name in _DEVIATIONS)
    return Side(
        size,
        what,
        place,
        alg_bw,
        bus_bw,
        None if is_old_table else errors,
        line,
        errors if is_old_table else None,
        last_cell.endswith("*"),
        (_rounding(cells["algbw"]), _rounding(cells["busbw"])),
    )


def _time_name(cells: dict[str, str]) -> str:
    return next((name for name in _TIMES if name in cells), "")


def _rounding(cell: str) -> float:
    return 0.5 if "." not in cell else 0.5 * 10.0 ** -len(cell.partition(".")[2])


def accepted_deviation(dtype: str, num_ranks: int) -> float:
    """Return the largest deviation that versions before August 2022 accept."""
    return _ACCEPTED.get(dtype, 0.0) * max(1, num_ranks - 1)


class _Form(NamedTuple):
    """Properties by which a collective's rows are recognised.

    Args:
        sharded: True if its size covers all ranks' parts, and its count one part.
        reduces, has_root: True if its rows name a reduction, a root.
        factor: ratio of bus to algorithm bandwidth: 2 means 2(n-1)/n, 1 means (n-1)/n, 0 means 1.
        checks_in_place: True if the data of its in-place side is checked.
    """

    sharded: bool
    reduces: bool
    has_root: bool
    factor: int
    checks_in_place: bool = True


_FORMS = {
    "all_reduce": _Form(False, True, False, 2),
    "all_gather": _Form(True, False, False, 1),
    "reduce_scatter": _Form(True, True, False, 1),
    "broadcast": _Form(False, False, True, 0),
    "reduce": _Form(False, True, True, 0),
    "alltoall": _Form(True, False, False, 1, checks_in_place=False),
    "gather": _Form(True, False, True, 1),
    "scatter": _Form(True, False, True, 1),
    "sendrecv": _Form(False, True, False, 0, checks_in_place=False),
    "hypercube": _Form(True, False, False, 0),
}
COLLECTIVES = frozenset({*_FORMS, "alltoallv"})


class Deduction(NamedTuple):
    """Collective as deduced from its rows.

    Args:
        names: collectives that match the rows; a single one if unambiguous, empty if none matches.
        num_ranks: ranks of one group; 0 if the rows do not tell it.
        fits_list: True if the bandwidths match the number of ranks that the log lists.
    """

    names: tuple[str, ...]
    num_ranks: int
    fits_list: bool = True


def deduce(rows: Sequence[Row], num_ranks: int) -> Deduction:
    """Deduce the collective from size and count, reduction, root, and ratio of bus to algorithm bandwidth.

    alltoall and sendrecv do not check their in-place data, all others do. Only this distinguishes all_reduce from
    sendrecv on two ranks. Unchecked in-place data also distinguishes alltoall from all_gather; but since there are
    tables with zeros in alltoall's in-place side, checked data leaves both possible. gather and scatter are ambiguous.

    Args:
        rows: the rows.
        num_ranks: number of ranks listed in the log, 0 if none. A truncated list does not match the bandwidths, which
            then take precedence.
    """
    shapes = {shape for row in rows if (shape := _shape(row))}
    if len(shapes) != 1:
        return Deduction((), 0)
    shape = shapes.pop()
    unchecked = _only_in_place_unchecked(rows)
    forms = {
        name: form
        for name, form in _FORMS.items()
        if form.sharded == (shape > 1)
        and not (unchecked and form.checks_in_place)
        and not (name == "sendrecv" and _is_checked_in_place(rows))
        and all(_fits(row, name, form) for row in rows)
    }
    low, high = _ratio(rows)
    for ranks in (shape,) if shape > 1 else dict.fromkeys((num_ranks, 0)):
        names = tuple(name for name, form in forms.items() if _factor_fits(form.factor, ranks, low, high))
        if names:
            deduced = ranks or (_ranks_of(low, high) if names == ("all_reduce",) else 0)
            return Deduction(names, deduced, num_ranks in (0, ranks))
    return Deduction((), 0)


def _shape(row: Row) -> int:
    """Return size divided by the bytes of `count`: 1, or the number of ranks; 0 if not known."""
    nbytes = row.num_elements * _TYPE_BYTES.get(row.dtype, 0)
    return row.size // nbytes if nbytes and row.size % nbytes == 0 else 0


def _fits(row: Row, name: str, form: _Form) -> bool:
    """Return True if a row's columns (reduction, root, deviation) can be those of the collective `name`."""
    if row.has_distance:
        return name == "sendrecv"
    reduces, has_root = row.op not in (None, "none"), row.root is not None and row.root >= 0
    if has_root != form.has_root:
        return False
    if name in ("all_gather", "alltoall") and any(side.deviation is not None for side in row.sides):
        # Before August 2022 alltoall's header had a (blank) reduction column, all_gather's had none.
        return not reduces and (name == "alltoall") == row.has_blank_op
    # Early versions of sendrecv printed no reduction.
    return reduces == form.reduces or (name == "sendrecv" and row.op is None)


def _ratio(rows: Sequence[Row]) -> tuple[float, float]:
    """Return lower and upper bound of the ratio of bus to algorithm bandwidth, given their printed digits."""
    low, high = 0.0, math.inf
    for side in (side for row in rows for side in row.sides):
        alg_error, bus_error = (1.1 * half for half in side.rounding)
        if side.alg_bw > 10 * alg_error:
            low = max(low, (side.bus_bw - bus_error) / (side.alg_bw + alg_error))
            high = min(high, (side.bus_bw + bus_error) / (side.alg_bw - alg_error))
    return (low, high) if low <= high else (0.0, math.inf)


def _factor_fits(factor: int, num_ranks: int, low: float, high: float) -> bool:
    """Whether the bounds of `_ratio` (bus over algorithm bandwidth) allow a `_Form.factor`; 0 ranks: any number."""
    if factor == 0:
        return low <= 1 <= high
    if num_ranks:
        return low <= factor * (num_ranks - 1) / num_ranks <= high
    return low <= factor and high >= factor / 2  # any number of ranks from two on


def _ranks_of(low: float, high: float) -> int:
    """Return the number of ranks whose all_reduce factor is within the bounds; 0 if several are."""
    fitting = [ranks for ranks in range(2, 129) if low <= 2 * (ranks - 1) / ranks <= high]
    return fitting[0] if len(fitting) == 1 else 0


def _only_in_place_unchecked(rows: Sequence[Row]) -> bool:
    """Return True if every row's data was checked out of place, but not in place."""

    def checked_places(row: Row) -> dict[str, bool]:
        return {side.place: side.wrong is not None or side.deviation is not None for side in row.sides}

    return bool(rows) and all(checked_places(row) == {OUT_OF_PLACE: True, IN_PLACE: False} for row in rows)


def _is_checked_in_place(rows: Sequence[Row]) -> bool:
    sides = (side for row in rows for side in row.sides if side.place == IN_PLACE)
    return any(side.wrong is not None or side.deviation is not None for side in sides)

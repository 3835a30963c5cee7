"""The tables of nccl-tests and rccl-tests, of every version: columns by the header line, counted from the right.

History (github.com/NVIDIA/nccl-tests and ROCm/rccl-tests, src/): until March 2019 `bytes N type [op] [root]` and a
deviation `res` a side; until August 2022 (NCCL 2.13) `size count type [redop] [root|dist]` and a deviation `error`,
which rccl-tests mark with `*` where it is too large; since then redop and root always, and `#wrong`, the number of
elements. An empty redop leaves its column blank. rccl-tests -O 0 have one side, in place; 2.0's broadcast has one, out
of place. Later came a date and a time at the end (-S), or before the size, per-iteration columns a side (-I), and
`#iters` at the end.
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
# The deviation that the old versions accept for each further rank.
_ACCEPTED = {"half": 1e-2, "bfloat16": 1e-2, "float": 1e-5, "double": 1e-12}
_ROW = re.compile(r"\s*(?:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\s+)?\d{1,18}\s+\d{1,18}\s+[a-z][a-z0-9_]{2,11}(?:\s|$)")
_STAMP = re.compile(r"\d{4}-\d\d-\d\d$|\d\d:\d\d:\d\d$")
# A count of elements is printed with an exponent where it is large, a deviation where it is small or zero.
_EXPONENT = re.compile(r"\de(?:-\d{1,3}|\+00)\*?$")
_TIMES = ("time", "cputime")
_DEVIATIONS = ("error", "res")


class Layout(NamedTuple):
    """What a header line says.

    Args:
        front: names of the columns before the figures.
        side: names of the columns of one side.
        places: which sides there are.
        num_behind: columns behind the sides, such as the number of iterations.
    """

    front: tuple[str, ...]
    side: tuple[str, ...]
    places: tuple[str, ...]
    num_behind: int = 0


class Side(NamedTuple):
    """Figures of one side of a row.

    Args:
        wrong: number of wrong elements; None where the data was not checked or the version counts none.
        deviation: the largest difference, as versions before August 2022 print it; None in later ones.
        too_large: whether the deviation is marked as one that is not accepted.
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
    # The widths of the last printed digit of both bandwidths, halved.
    rounding: tuple[float, float] = (0.005, 0.005)


class Row(NamedTuple):
    """One size; `op` and `root` are None where the row has none, and `root` is -1 where the collective has none."""

    size: int
    num_elements: int
    dtype: str
    op: str | None
    root: int | None
    sides: tuple[Side, ...]
    # Whether the header has a column of distances, which sendrecv alone ever had, or one of reductions that is blank.
    has_distance: bool = False
    has_blank_op: bool = False


def is_row(words: str) -> bool:
    """Whether a line begins as a row does: size, count and type."""
    return bool(_ROW.match(words))


def read_header(words: str, title: str) -> Layout | None:
    """The columns that a header line names; None where it is none.

    Args:
        title: the line above, which says the sides.
    """
    names = words.replace("#wrong", "wrong").strip("# \t|").split()
    if len(names) < 6 or "busbw" not in names or not {"size", "bytes"} & set(names[:2]):
        return None
    names = [name for name in names if name != "timestamp"]
    starts = [at for at, name in enumerate(names) if name in _TIMES]
    if not starts:
        return None
    side = tuple(names[starts[0] : starts[1] if len(starts) > 1 else len(names)])
    only = OUT_OF_PLACE if "out-of-place" in title else IN_PLACE
    num_behind = len(names) - starts[1] - len(side) if len(starts) > 1 else 0
    if num_behind < 0:
        return None
    return Layout(tuple(names[: starts[0]]), side, (OUT_OF_PLACE, IN_PLACE) if len(starts) > 1 else (only,), num_behind)


def read_row(words: str, line: int, layout: Layout | None) -> Row | str:
    """Return the row, or why it cannot be read.

    Args:
        layout: of the header above; None where the log has none: then what the cells are is told by their number.
    """
    cells = words.split()
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
    for at, place in enumerate(places):
        part = dict(zip(names, figures[at * width : (at + 1) * width], strict=False))
        side = _side(size, what, place, part, line)
        if side is None:
            return f"its {place} figures are {' '.join(part.values())}"
        sides.append(side)
    return Row(size, count, dtype, op, None if has_distance else root, tuple(sides), has_distance, has_blank_op)


def _parts(
    cells: Sequence[str], layout: Layout | None
) -> tuple[Sequence[str], Sequence[str] | None, tuple[str, ...], tuple[str, ...]]:
    """Cells before the figures, the figures, their places and their columns; no figures where the number is wrong."""
    names = layout.side if layout else ("time", "algbw", "busbw", "wrong")
    places = layout.places if layout else (OUT_OF_PLACE, IN_PLACE)
    if layout and layout.num_behind:
        cells = cells[: -layout.num_behind]
    # Counted from the right: a column in front may be blank. Where the first side is blank, the second stands alone.
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
    """Whether these cells behind the type are a reduction, a root, or both, as the header has them."""
    num_ops = sum(bool(re.match("[a-z]+$", cell)) for cell in cells[:1])
    if not all(re.match(r"-?\d{1,6}$", cell) for cell in cells[num_ops:]) or len(cells) > num_ops + 1:
        return False
    if layout is None:
        return True
    # Only the reduction can be blank. Any other lack of a cell is a row that was cut, and would shift all figures.
    num_columns, may_lack = len(layout.front) - 3, {"redop", "op"} & set(layout.front)
    return len(cells) == num_columns or (bool(may_lack) and num_ops == 0 and len(cells) == num_columns - 1)


def _side(size: int, what: str, place: str, cells: dict[str, str], line: int) -> Side | None:
    time, alg_bw, bus_bw = (number(cells.get(name)) for name in (_time_name(cells), "algbw", "busbw"))
    if not time or alg_bw is None or bus_bw is None:
        return None
    last = next((cells[name] for name in ("wrong", *_DEVIATIONS) if name in cells), "N/A")
    errors = number(last.rstrip("*"))
    if errors is None and last != "N/A":
        return None
    old = any(name in cells for name in _DEVIATIONS)
    return Side(
        size,
        what,
        place,
        alg_bw,
        bus_bw,
        None if old else errors,
        line,
        errors if old else None,
        last.endswith("*"),
        (_rounding(cells["algbw"]), _rounding(cells["busbw"])),
    )


def _time_name(cells: dict[str, str]) -> str:
    return next((name for name in _TIMES if name in cells), "")


def _rounding(cell: str) -> float:
    return 0.5 if "." not in cell else 0.5 * 10.0 ** -len(cell.partition(".")[2])


def accepted_deviation(dtype: str, num_ranks: int) -> float:
    """The largest difference that versions before August 2022 call right."""
    return _ACCEPTED.get(dtype, 0.0) * max(1, num_ranks - 1)


class _Form(NamedTuple):
    """What tells a collective's rows from others.

    Args:
        sharded: whether its size is that of all ranks' parts, and its count that of one.
        reduces, has_root: whether its rows name a reduction, and a root.
        factor: of the algorithm bandwidth in the bus bandwidth: 2 is 2(n-1)/n, 1 is (n-1)/n, 0 is 1.
        checks_in_place: whether the data of its in-place side is checked.
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
    """What rows say of their collective.

    Args:
        names: the collectives that can have written them; one where they tell it, none where they fit none.
        num_ranks: of one group; 0 where the rows do not tell it.
        fits_list: whether the ranks that the log lists can have written these bandwidths.
    """

    names: tuple[str, ...]
    num_ranks: int
    fits_list: bool = True


def deduce(rows: Sequence[Row], num_ranks: int) -> Deduction:
    """Tell the collective by size against count, reduction, root, and bus over algorithm bandwidth.

    alltoall and sendrecv leave their in-place data unchecked, all others check it: this alone tells all_reduce from
    sendrecv among two ranks. It tells alltoall from all_gather where it is unchecked, but tables are about in which
    alltoall's in-place side has zeros: where it is checked, both stay possible. So do gather and scatter.

    Args:
        num_ranks: as the log lists them, 0 where it lists none. A list that was cut does not fit the bandwidths: then
            what they tell counts.
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
    """Size over the bytes of count: 1, or the number of ranks; 0 where it cannot be told."""
    nbytes = row.num_elements * _TYPE_BYTES.get(row.dtype, 0)
    return row.size // nbytes if nbytes and row.size % nbytes == 0 else 0


def _fits(row: Row, name: str, form: _Form) -> bool:
    if row.has_distance:
        return name == "sendrecv"
    reduces, has_root = row.op not in (None, "none"), row.root is not None and row.root >= 0
    if has_root != form.has_root:
        return False
    if name in ("all_gather", "alltoall") and any(side.deviation is not None for side in row.sides):
        # Before August 2022 alltoall's header had a column for the reduction that it has not; all_gather's had none.
        return not reduces and (name == "alltoall") == row.has_blank_op
    # At first sendrecv printed no reduction.
    return reduces == form.reduces or (name == "sendrecv" and row.op is None)


def _ratio(rows: Sequence[Row]) -> tuple[float, float]:
    """Bounds of bus over algorithm bandwidth, as far as their printed digits tell it."""
    low, high = 0.0, math.inf
    for side in (side for row in rows for side in row.sides):
        alg, bus = (1.1 * half for half in side.rounding)
        if side.alg_bw > 10 * alg:
            low = max(low, (side.bus_bw - bus) / (side.alg_bw + alg))
            high = min(high, (side.bus_bw + bus) / (side.alg_bw - alg))
    return (low, high) if low <= high else (0.0, math.inf)


def _factor_fits(factor: int, num_ranks: int, low: float, high: float) -> bool:
    if factor == 0:
        return low <= 1 <= high
    if num_ranks:
        return low <= factor * (num_ranks - 1) / num_ranks <= high
    return low <= factor and high >= factor / 2  # any number of ranks from two on


def _ranks_of(low: float, high: float) -> int:
    """The one number of ranks whose factor of all_reduce lies within the bounds; 0 where several do."""
    fitting = [ranks for ranks in range(2, 129) if low <= 2 * (ranks - 1) / ranks <= high]
    return fitting[0] if len(fitting) == 1 else 0


def _only_in_place_unchecked(rows: Sequence[Row]) -> bool:
    """Whether every row's data was checked out of place and not in place."""

    def checked(row: Row) -> dict[str, bool]:
        return {side.place: side.wrong is not None or side.deviation is not None for side in row.sides}

    return bool(rows) and all(checked(row) == {OUT_OF_PLACE: True, IN_PLACE: False} for row in rows)


def _is_checked_in_place(rows: Sequence[Row]) -> bool:
    sides = (side for row in rows for side in row.sides if side.place == IN_PLACE)
    return any(side.wrong is not None or side.deviation is not None for side in sides)

"""Axes of charts, and the rows that can be drawn on them.

`Axis` names a column with its title, unit and scale; `drawable` gives a frame whose columns are called x, y, ...,
so that no name of the user's breaks an expression. Rows that cannot be drawn are omitted, and a note counts them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

# Units that stand on each tick with the prefix that fits; 'share' stands there as a percentage.
_PREFIXED = frozenset({"bytes", "s", "B/s", "b/s", "FLOP/s", "Hz", "W"})
# Smallest first: an expression is built from the inside out.
_BINARY = [(1.0, ""), *((1024.0**power, f"{letter}i") for power, letter in enumerate("KMGT", start=1))]
_DECIMAL = [
    (10.0 ** (3 * power), prefix) for power, prefix in enumerate(("n", "µ", "m", "", "k", "M", "G", "T", "P"), start=-3)
]
_ON_TICKS = _PREFIXED | {"share"}
_TICKS, _FEW = 9, 7
# How far the dates reach, and what then tells them apart.
_DATES = ((timedelta(minutes=5), "%H:%M:%S"), (timedelta(days=1), "%H:%M"), (timedelta(days=4), "%d %b %H:%M"))


@dataclass(frozen=True)
class Axis:
    """One axis of a chart.

    Args:
        column: the DataFrame's column.
        title: what the reader sees; the column's name where empty.
        unit: `bytes` (ticks as 64 MiB), `share` (0..1, ticks as 25%), a symbol that takes prefixes (`s`, `B/s`, `b/s`,
            `FLOP/s`, `Hz`, `W`: ticks as 1.5 ms), or any other text, which follows the title: Bandwidth (GB/s).
        log: logarithmic; base 2 for bytes. Values that are not above zero are omitted and counted.
        zero: the axis begins at zero (lines only; bars and areas always do).
    """

    column: str
    title: str = ""
    unit: str = ""
    log: bool = False
    zero: bool = False

    @property
    def words(self) -> str:
        """The title, or the column's name as words."""
        return self.title or self.column.replace("_", " ")

    @property
    def label(self) -> str:
        """The title with its unit, unless every tick carries the unit."""
        return self.words if not self.unit or self.unit in _ON_TICKS else f"{self.words} ({self.unit})"

    def tick_text(self) -> str:
        """The expression that writes a tick: with its unit only where the title has none."""
        return Axis(self.column, unit=self.unit if self.unit in _ON_TICKS else "").text("datum.value")

    def text(self, value: str) -> str:
        """A Vega expression that writes `value` (itself an expression) as a person would, unit included."""
        if self.unit == "share":
            return f"format({value}, '.3~p')"
        if self.unit in _PREFIXED:
            return _prefixed(value, self.unit)
        suffix = json.dumps(f" {self.unit}" if self.unit else "")
        return f"{_plain_text(value)} + {suffix}"


def as_axis(axis: Axis | str) -> Axis:
    """A bare column name is an axis with everything left at its default."""
    return Axis(axis) if isinstance(axis, str) else axis


@dataclass(frozen=True)
class Drawable:
    """Rows that can be drawn, and what the reader must be told about those that cannot."""

    frame: pd.DataFrame
    notes: tuple[str, ...]


def drawable(frame: pd.DataFrame, axes: Mapping[str, Axis], texts: Mapping[str, str | None]) -> Drawable:
    """The columns named in `axes` and `texts` under the mappings' keys, without the rows that cannot be drawn.

    A text column of None is an empty text in every row.

    Raises:
        ValueError: a column is missing or holds no numbers, or no row is left.
    """
    data, notes = pd.DataFrame(index=range(len(frame))), []
    for name, axis in axes.items():
        data[name] = _values(_column(frame, axis.column))
        notes += _spoil(data, name, axis)
    for name, column in texts.items():
        data[name] = "" if column is None else _column(frame, column).astype(str).to_numpy()
    data = data.dropna(subset=list(axes)).reset_index(drop=True)
    if data.empty:
        raise ValueError(f"nothing to draw: {'; '.join(notes) or 'the frame has no rows'}")
    return Drawable(data, tuple(notes))


def scale(axis: Axis, values: pd.Series[Any]) -> alt.Scale:
    """The Vega-Lite scale of `axis`; dates are shown in UTC."""
    if pd.api.types.is_datetime64_any_dtype(values):
        return alt.Scale(type="utc")
    if not axis.log:
        return alt.Scale(type="linear", zero=axis.zero)
    base2 = axis.unit == "bytes"
    return alt.Scale(type="log", base=2 if base2 else 10, nice=False, padding=8)


def ticks(axis: Axis, values: pd.Series[Any]) -> alt.Axis:
    """Return a few ticks at round values, written with their unit."""
    if pd.api.types.is_datetime64_any_dtype(values):
        return alt.Axis(title=axis.label, tickCount=_FEW, labelExpr=f"utcFormat(datum.value, '{_date_format(values)}')")
    label = axis.tick_text()
    if axis.log:
        positions = log_ticks(values, 2 if axis.unit == "bytes" else 10)
        chosen: dict[str, Any] = {"values": positions} if positions else {"tickCount": _FEW}
        return alt.Axis(title=axis.label, labelExpr=label, **chosen)
    if axis.unit == "bytes":
        return alt.Axis(title=axis.label, values=byte_ticks(values, zero=axis.zero), labelExpr=label)
    whole: dict[str, Any] = (
        {"tickMinStep": 1} if axis.unit not in _ON_TICKS and np.all(values == np.round(values)) else {}
    )
    return alt.Axis(title=axis.label, tickCount=_FEW, labelExpr=label, **whole)


def log_ticks(values: pd.Series[Any], base: int) -> list[float]:
    """Return powers of `base` among the values, each 2nd, 5th or 10th where they are many; [] where there is no choice.

    Such strides meet 1 KiB, 1 MiB and 1 GiB. Within three decades the powers alone say little: their twofold and
    fivefold join them.
    """
    least, most = float(values.min()), float(values.max())
    low, high = math.floor(math.log(least, base)), math.ceil(math.log(most, base))
    stride = next((stride for stride in (1, 2, 5, 10) if (high - low) / stride <= _TICKS), 20)
    digits = (1, 2, 5) if base == 10 and most / least < 1000 else (1,)
    powers = range(low - low % stride, high + 1, stride)
    candidates = [digit * float(base) ** power for power in powers for digit in digits]
    among = [tick for tick in candidates if least * 0.999 <= tick <= most * 1.001]
    return among if len(among) > 1 else []


def byte_ticks(values: pd.Series[Any], *, zero: bool) -> list[float]:
    """Multiples of one power of two, at most nine of them, around the values, and zero where the axis has it."""
    low, high = float(values.min()), float(values.max())
    if zero:
        low, high = min(0.0, low), max(0.0, high)
    step = 2.0 ** math.ceil(math.log2(max(high - low, 1.0) / (_TICKS - 2)))
    return [step * number for number in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _column(frame: pd.DataFrame, name: str) -> pd.Series[Any]:
    if name in frame.columns:
        return frame[name]
    columns = [str(column) for column in frame.columns]
    near = get_close_matches(name, columns, 1)
    hint = f"did you mean {near[0]!r}" if near else f"there are {', '.join(columns) or 'none'}"
    raise ValueError(f"no column {name!r}: {hint}")


def _values(column: pd.Series[Any]) -> Any:
    """Floats, or dates in UTC; a naive date is taken as UTC."""
    if pd.api.types.is_datetime64_any_dtype(column):
        return pd.to_datetime(column, utc=True).to_numpy()
    try:
        return column.to_numpy(dtype=float, na_value=np.nan)
    except (TypeError, ValueError) as exc:
        raise ValueError(f"column {column.name!r} holds no numbers: {exc}") from exc


def _date_format(values: pd.Series[Any]) -> str:
    reach = values.max() - values.min()
    return next((text for limit, text in _DATES if reach < limit), "%d %b %Y")


def _spoil(data: pd.DataFrame, name: str, axis: Axis) -> list[str]:
    """Set what cannot be drawn to missing; say how many and why."""
    if pd.api.types.is_datetime64_any_dtype(data[name]):
        bad = {"has no date": data[name].isna()}
    else:
        finite = np.isfinite(data[name])
        bad = {"is not finite": ~finite, "is not above zero": finite & (data[name] <= 0) & axis.log}
    notes = []
    for reason, rows in bad.items():
        if rows.any():
            data.loc[rows, name] = None
            notes.append(f"{int(rows.sum()):,} of {len(data):,} rows omitted: {axis.words} {reason}")
    return notes


def _prefixed(value: str, unit: str) -> str:
    """Four digits and the prefix that fits: 64 MiB, 25 GB/s, 1.5 ms. Seconds take no prefix upwards."""
    cases = _BINARY if unit == "bytes" else [case for case in _DECIMAL if unit != "s" or case[0] <= 1]
    symbol = "B" if unit == "bytes" else unit
    text = f"format({value}, '.4~g') + ' {symbol}'"
    for size, prefix in cases:
        text = f"abs({value}) >= {size!r} ? format({value} / {size!r}, ',.4~r') + ' {prefix}{symbol}' : {text}"
    return f"({value} === 0 ? '0' : {text})"


def _plain_text(value: str) -> str:
    """Whole numbers and large ones with separators, others with four digits; very small ones with an exponent."""
    whole = f"{value} === floor({value}) || abs({value}) >= 10000"
    small = f"abs({value}) < 0.0001"
    return f"({whole} ? format({value}, ',.0f') : {small} ? format({value}, '.4~g') : format({value}, ',.4~r'))"

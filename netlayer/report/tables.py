"""DataFrames and single values as text that lines up: right-aligned figures, the same decimals down a column."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

MISSING = "\N{EN DASH}"


@dataclass(frozen=True)
class Column:
    """One column as text; numbers stand right."""

    title: str
    numeric: bool
    cells: tuple[str, ...]


def columns_of(frame: pd.DataFrame, formats: Mapping[str, str]) -> tuple[Column, ...]:
    """Every column of `frame` as text; a named index comes first.

    Args:
        formats: format specs by column, `{"bus_bw": ".2f"}`; without one the column's own values decide.

    Raises:
        ValueError: `formats` names a column that is not there.
    """
    if any(name is not None for name in frame.index.names):
        frame = frame.reset_index()
    unknown = sorted(set(formats) - {str(name) for name in frame.columns})
    if unknown:
        raise ValueError(f"formats = {unknown}: no such column; there are {', '.join(map(str, frame.columns))}")
    return tuple(_column(str(name), frame.iloc[:, at], formats.get(str(name))) for at, name in enumerate(frame.columns))


def number_text(value: Any) -> str:
    """One value as a person writes it: 1,234 for whole numbers, four digits for others, a dash for none."""
    if _is_missing(value):
        return MISSING
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, int | np.integer):
        return f"{value:,}"
    return _float_text(float(value)) if isinstance(value, float | np.floating) else str(value)


def _float_text(value: float) -> str:
    if not math.isfinite(value):
        return "∞" if value > 0 else "-∞"
    if value and not 1e-4 <= abs(value) < 1e15:
        return f"{value:.3e}"
    text = f"{value:,.{_decimals(abs(value), 4)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _column(title: str, values: pd.Series[Any], spec: str | None) -> Column:
    kind = values.dtype
    numeric = pd.api.types.is_numeric_dtype(kind) and not pd.api.types.is_bool_dtype(kind)
    if spec is None and pd.api.types.is_float_dtype(kind):
        spec = _column_spec(values.to_numpy(dtype=float, na_value=np.nan))
    return Column(title, numeric, tuple(_cell(value, spec) for value in values))


def _cell(value: Any, spec: str | None) -> str:
    if spec is None or _is_missing(value) or (isinstance(value, float | np.floating) and not math.isfinite(value)):
        return number_text(value)
    return format(value, spec)


def _column_spec(values: np.ndarray[Any, Any]) -> str | None:
    """Return a format with three digits for the least value, four decimals at most; .3g for tiny or huge values."""
    sizes = np.abs(values[np.isfinite(values) & (values != 0)])
    if sizes.size == 0 or np.all(sizes == np.round(sizes)):
        return ",.0f"
    if sizes.max() < 1e-2 or sizes.max() >= 1e12:
        return ".3g"
    return f",.{min(4, _decimals(float(sizes.min()), 3))}f"


def _decimals(size: float, digits: int) -> int:
    return max(0, digits - 1 - math.floor(math.log10(size))) if size else 0


def _is_missing(value: Any) -> bool:
    return (
        value is None
        or value is pd.NA
        or value is pd.NaT
        or (isinstance(value, float | np.floating) and math.isnan(value))
    )

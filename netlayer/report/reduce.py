"""Fewer rows for the same picture: stretches of long lines, bins, shares. What is thinned comes with a note."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from netlayer.report.axes import Drawable

LINE_POINTS = 2_000  # a series; all series together get three times as many
Values = np.ndarray[Any, np.dtype[Any]]


def thinned(data: Drawable) -> Drawable:
    """Rows in the order of `x`; a long series as the lowest and highest `y` of each stretch of equally many rows."""
    limit = _limit(data.frame)
    kept = []
    for _, rows in data.frame.groupby("series", sort=False):
        rows = rows.sort_values("x", kind="stable")
        kept.append(rows if len(rows) <= limit else rows.iloc[_extremes(rows["y"].to_numpy(), limit // 2 - 1)])
    return _joined(kept, data, len(data.frame), "the lowest and highest of each stretch")


def cumulated(data: Drawable) -> Drawable:
    """Return each series' values `x` in order and the share `y` of rows at or below; evenly thinned if many."""
    limit = _limit(data.frame) // 2  # a share has no spikes to keep
    kept, num_points = [], 0
    for name, rows in data.frame.groupby("series", sort=False):
        values, counts = np.unique(rows["x"], return_counts=True)
        curve = pd.DataFrame({"x": [values[0], *values], "y": [0.0, *(counts.cumsum() / len(rows))], "series": name})
        keep = np.linspace(0, len(curve) - 1, min(limit, len(curve))).round().astype(int)
        kept.append(curve.iloc[keep])
        num_points += len(curve)
    return _joined(kept, data, num_points, "evenly chosen")


def binned(frame: pd.DataFrame, edges: Values, *, share: bool) -> pd.DataFrame:
    """Rows of each series between neighbouring `edges` (`x`, `x2`): `y` is their number, or share of the series."""
    parts = []
    for name, rows in frame.groupby("series", sort=False):
        counts, _ = np.histogram(rows["x"], edges)
        heights = counts / counts.sum() if share else counts
        parts.append(pd.DataFrame({"x": edges[:-1], "x2": edges[1:], "y": heights, "series": name}))
    bins = pd.concat(parts, ignore_index=True)
    return bins[bins["y"] > 0].reset_index(drop=True)


def bin_edges(values: Values, bins: int, *, log: bool = False) -> Values:
    """Return at most `bins` + 1 edges: equally far apart, in equal ratio if `log`, of whole width for whole numbers."""
    if bins < 1:
        raise ValueError(f"bins = {bins}: at least 1")
    low, high = float(values.min()), float(values.max())
    if log and high > low:
        return np.geomspace(low, high, bins + 1)
    if np.all(values == np.round(values)):
        width = max(1, int(-(-(high - low + 1) // bins)))
        return np.arange(low - 0.5, high + 0.5 + width, width)
    return np.linspace(low, high, bins + 1) if high > low else low + np.array([-0.5, 0.5]) * (abs(low) or 1.0)


def _limit(frame: pd.DataFrame) -> int:
    return min(LINE_POINTS, max(60, 3 * LINE_POINTS // frame["series"].nunique()))


def _extremes(values: Values, stretches: int) -> list[int]:
    """Return positions of the first, the last, and of each stretch's lowest and highest value."""
    positions = {0, len(values) - 1}
    for stretch in np.array_split(np.arange(len(values)), stretches):
        positions |= {int(stretch[values[stretch].argmin()]), int(stretch[values[stretch].argmax()])}
    return sorted(positions)


def _joined(kept: list[pd.DataFrame], data: Drawable, num_points: int, how: str) -> Drawable:
    frame = pd.concat(kept, ignore_index=True)
    note = f"{num_points:,} points drawn as {len(frame):,}: {how}"
    return Drawable(frame, (*data.notes, note) if len(frame) < num_points else data.notes)

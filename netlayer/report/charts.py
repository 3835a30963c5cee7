"""The charts that several packages share: DataFrame in, Altair chart in the house's look out.

Every chart is as wide as its card, shows its values under the pointer, and singles out a series that is clicked in its
legend. A note under the title counts rows omitted or thinned. Not covered: anything that a single command alone draws.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from netlayer.report import marks
from netlayer.report.axes import Axis, as_axis, drawable, scale, ticks
from netlayer.report.marks import Chart, Threshold
from netlayer.report.reduce import Values, bin_edges, binned, cumulated, thinned
from netlayer.report.theme import ON_BRIGHT, ON_DARK, SCALE

HEIGHT = 300
_MARKED_POINTS = 40
_LABELLED_BARS = 12
_LABELLED_COLUMNS = 16  # more of them are narrower than a number
_LABELLED_CELLS = 240


def line(
    frame: pd.DataFrame,
    x: Axis | str,
    y: Axis | str,
    *,
    colour: str | None = None,
    title: str = "",
    height: int = HEIGHT,
    step: bool = False,
    threshold: Threshold | None = None,
) -> Chart:
    """`y` over `x` (numbers or dates), one line for each value of `colour`; `step` holds a value until the next.

    A series of more than 2,000 rows is drawn as the lowest and highest of each stretch, and the subtitle says so.

    Raises:
        ValueError: a column is missing or holds no numbers, or no row can be drawn.
    """
    x, y = as_axis(x), as_axis(y)
    data = thinned(drawable(frame, {"x": x, "y": y}, {"series": colour}))
    layers = _lines(data.frame, x, y, colour=colour, step=step)
    return marks.finished([*layers, *marks.rule(threshold, y)], title, data.notes, height)


def area(
    frame: pd.DataFrame,
    x: Axis | str,
    y: Axis | str,
    *,
    colour: str | None = None,
    title: str = "",
    height: int = HEIGHT,
    step: bool = False,
) -> Chart:
    """Parts of a whole over `x`, stacked in the order in which the values of `colour` first appear.

    Raises:
        ValueError: as `line`; also a logarithmic `y`, where parts do not add up.
    """
    x, y = as_axis(x), _with_foot(y, "a stacked part")
    data = drawable(frame, {"x": x, "y": y}, {"series": colour})
    _check_single(data.frame, ["x", "series"])
    totals = data.frame.groupby("x")["y"].sum()
    pick, under = marks.pick(), marks.under()
    base = marks.base(data.frame, {"x": x, "y": y}).encode(
        x=alt.X("x", axis=ticks(x, data.frame["x"]), scale=scale(x, data.frame["x"])),
        y=alt.Y("y:Q", axis=ticks(y, totals), stack="zero"),
        order=alt.Order("rank:Q"),
        color=marks.colour(data.frame, colour),
    )
    drawn = base.mark_area(interpolate="step-after" if step else "linear", fillOpacity=0.8)
    dots = marks.dots(base, under, alt.when(under).then(alt.value(1)).otherwise(alt.value(0)))
    discs = marks.discs(base, marks.tooltip({"x": x, "y": y}, colour))
    layers = [drawn.encode(opacity=marks.dimmed(pick)).add_params(pick), dots, discs.add_params(under)]
    return marks.finished(layers, title, data.notes, height)


def bars(
    frame: pd.DataFrame,
    x: Axis | str,
    y: Axis | str,
    *,
    colour: str | None = None,
    title: str = "",
    height: int = HEIGHT,
    stacked: bool = False,
    threshold: Threshold | None = None,
) -> Chart:
    """One bar for each category `x`, in the frame's order; with `colour` several, side by side or `stacked`.

    Raises:
        ValueError: as `line`; also a logarithmic `y`, where a bar has no foot, or two rows for one bar.
    """
    x, y = as_axis(x), _with_foot(y, "a bar")
    data = drawable(frame, {"y": y}, {"category": x.column, "series": colour})
    _check_single(data.frame, ["category", "series"])
    top = data.frame.groupby("category")["y"].sum() if stacked else data.frame["y"]
    pick = marks.pick()
    base = marks.base(data.frame, {"y": y}).encode(
        x=marks.category("category", x, data.frame, alt.Scale(paddingInner=0.35, paddingOuter=0.25)),
        y=alt.Y("y:Q", axis=ticks(y, top), stack="zero" if stacked else None),
        opacity=marks.dimmed(pick),
    )
    if stacked:
        base = base.encode(order=alt.Order("rank:Q"))
    elif colour is not None:
        base = base.encode(xOffset=alt.XOffset("series:N", sort=marks.series_names(data.frame)))
    tooltip = [marks.hint("category", x), *marks.tooltip({"y": y}, colour)]
    layers = [base.mark_bar().encode(color=marks.colour(data.frame, colour), tooltip=tooltip).add_params(pick)]
    if not stacked and len(data.frame) <= _LABELLED_BARS:
        layers.append(base.mark_text(baseline="bottom", dy=-4).encode(text="y_text:N"))
    return marks.finished([*layers, *marks.rule(threshold, y)], title, data.notes, height)


def histogram(
    frame: pd.DataFrame,
    value: Axis | str,
    *,
    colour: str | None = None,
    counted: str = "rows",
    share: bool = False,
    bins: int = 40,
    title: str = "",
    height: int = HEIGHT,
) -> Chart:
    """Draw a histogram of `value` with at most `bins` bins, series over each other on the same bins.

    Args:
        counted: what one row is, in the plural, for the axis: Number of flows.
        share: the share of each series' rows instead of their number.
        bins: most bins; whole numbers get bins of whole width.

    Raises:
        ValueError: as `line`; also `bins` below 1.
    """
    value = as_axis(value)
    data = drawable(frame, {"x": value}, {"series": colour})
    edges = bin_edges(data.frame["x"].to_numpy(), bins, log=value.log)
    counts = binned(data.frame, edges, share=share)
    y = Axis("y", title=f"Share of {counted}", unit="share") if share else Axis("y", title=f"Number of {counted}")
    several, pick = colour is not None, marks.pick()
    drawn = (
        marks.base(counts, {"y": y})
        .transform_calculate(bin_text=_bin_text(value, edges))
        .mark_bar(cornerRadiusEnd=0, binSpacing=1, fillOpacity=0.6 if several else 0.9)
        .encode(
            x=alt.X("x:Q", bin="binned", axis=ticks(value, data.frame["x"]), scale=scale(value, data.frame["x"])),
            x2="x2:Q",
            y=alt.Y("y:Q", axis=ticks(y, counts["y"]), stack=None),
            color=marks.colour(counts, colour),
            opacity=marks.dimmed(pick),
            tooltip=marks.tooltip({"bin": value, "y": y}, colour),
        )
        .add_params(pick)
    )
    return marks.finished([drawn], title, data.notes, height)


def cdf(
    frame: pd.DataFrame,
    value: Axis | str,
    *,
    colour: str | None = None,
    counted: str = "rows",
    title: str = "",
    height: int = HEIGHT,
) -> Chart:
    """The share of rows (`counted` names them, in the plural) that is at or below each value.

    Raises:
        ValueError: as `line`.
    """
    value, share = as_axis(value), Axis("y", title=f"Share of {counted} at or below", unit="share")
    data = drawable(frame, {"x": value}, {"series": colour})
    curves = cumulated(data)
    layers = _lines(curves.frame, value, share, colour=colour, step=True)
    return marks.finished(layers, title, curves.notes, height)


def heatmap(
    frame: pd.DataFrame,
    x: Axis | str,
    y: Axis | str,
    value: Axis | str,
    *,
    title: str = "",
    height: int | None = None,
) -> Chart:
    """One cell for each pair of categories `x`, `y`, in the frame's order; few cells have their values written in.

    Raises:
        ValueError: as `line`; also two rows for one cell.
    """
    x, y, value = as_axis(x), as_axis(y), as_axis(value)
    data = drawable(frame, {"value": value}, {"x": x.column, "y": y.column})
    _check_single(data.frame, ["x", "y"])
    base = marks.base(data.frame, {"value": value}).encode(
        x=marks.category("x", x, data.frame, alt.Scale(padding=0)),
        y=marks.category("y", y, data.frame, alt.Scale(padding=0)),
    )
    shades = alt.Scale(type="log" if value.log else "linear", scheme=SCALE)
    gradient: dict[str, Any] = {"gradientLength": 260, "gradientThickness": 10, "tickCount": 4}
    apart: dict[str, Any] = {"labelOverlap": "greedy", "labelSeparation": 8}
    legend = alt.Legend(title=value.label, labelExpr=value.tick_text(), **gradient, **apart)
    pair = [marks.hint("x", x), marks.hint("y", y)]
    colour = alt.Color("value:Q", scale=shades, legend=legend)
    base = base.encode(tooltip=[*pair, *marks.tooltip({"value": value}, None)])
    layers = [base.mark_rect().encode(color=colour)]
    if len(data.frame) <= _LABELLED_CELLS and data.frame["x"].nunique() <= _LABELLED_COLUMNS:
        bright = alt.datum.value > _middle(data.frame["value"], value.log)
        ink = alt.when(bright).then(alt.value(ON_BRIGHT)).otherwise(alt.value(ON_DARK))
        layers.append(base.mark_text(fontSize=11).encode(text="value_text:N", color=ink))
    rows = data.frame["y"].nunique()
    return marks.finished(layers, title, data.notes, height or min(640, max(140, 30 * rows)))


def _lines(frame: pd.DataFrame, x: Axis, y: Axis, *, colour: str | None, step: bool) -> list[alt.Chart]:
    """The lines and their points, which are seen where they are few and under the pointer."""
    pick, under = marks.pick(), marks.under()
    base = marks.base(frame, {"x": x, "y": y}).encode(
        x=alt.X("x", axis=ticks(x, frame["x"]), scale=scale(x, frame["x"])),
        y=alt.Y("y", axis=ticks(y, frame["y"]), scale=scale(y, frame["y"])),
        color=marks.colour(frame, colour),
    )
    few = frame.groupby("series").size().max() <= _MARKED_POINTS and not step
    seen = marks.dimmed(pick) if few else alt.when(under).then(alt.value(1)).otherwise(alt.value(0))
    lines = base.mark_line(interpolate="step-after" if step else "linear").encode(opacity=marks.dimmed(pick))
    discs = marks.discs(base, marks.tooltip({"x": x, "y": y}, colour))
    return [lines.add_params(pick), marks.dots(base, under, seen), discs.add_params(under)]


def _bin_text(value: Axis, edges: Values) -> str:
    """The bin's reach; where bins hold whole numbers, the first and the last of them, or the only one."""
    if edges[0] % 1 != 0.5:
        return f"{value.text('datum.x')} + ' to ' + {value.text('datum.x2')}"
    first, last = value.text("(datum.x + 0.5)"), value.text("(datum.x2 - 0.5)")
    return first if edges[1] - edges[0] == 1 else f"{first} + ' to ' + {last}"


def _with_foot(axis: Axis | str, what: str) -> Axis:
    axis = as_axis(axis)
    if axis.log:
        raise ValueError(f"y = {axis.column!r}: {what} has no foot on a logarithmic axis; use a linear one, or a line")
    return replace(axis, zero=True)


def _check_single(frame: pd.DataFrame, keys: list[str]) -> None:
    doubled = frame[frame.duplicated(keys)]
    if not doubled.empty:
        where = ", ".join(str(doubled.iloc[0][key]) for key in keys if doubled.iloc[0][key] != "")
        raise ValueError(f"{len(doubled)} rows would hide others (first: {where}); aggregate them first")


def _middle(values: pd.Series[Any], log: bool) -> float:
    low, high = float(values.min()), float(values.max())
    return float(np.sqrt(low * high)) if log else (low + high) / 2

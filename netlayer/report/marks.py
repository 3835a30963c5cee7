"""Parts that the charts have in common: channels, tooltips, legend, threshold line, title."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import altair as alt
import pandas as pd

from netlayer.report.axes import Axis
from netlayer.report.theme import CARD, PALETTE, SCALE

Chart = alt.Chart | alt.LayerChart
_LETTERS_IN_LINE = 90


@dataclass(frozen=True)
class Threshold:
    """A dashed line across the chart: a line rate, a limit, a value expected."""

    value: float
    label: str


def base(frame: pd.DataFrame, axes: Mapping[str, Axis]) -> alt.Chart:
    """The rows, and for each axis its value as text (`x_text`): the same in tooltips, labels and ticks."""
    texts = {f"{name}_text": _value_text(frame, name, axis) for name, axis in axes.items()}
    rank = {"rank": f"indexof({json.dumps(series_names(frame))}, datum.series)"} if "series" in frame else {}
    return alt.Chart(frame).transform_calculate(**texts, **rank)


def series_names(frame: pd.DataFrame) -> list[str]:
    """Return the series in the order in which they first appear, which decides their colours."""
    return list(dict.fromkeys(frame["series"]))


def category(channel: str, axis: Axis, frame: pd.DataFrame, scale: alt.Scale) -> Any:
    """The x or y of a chart of categories, in the frame's order."""
    names = list(dict.fromkeys(frame[channel]))
    if channel == "y":
        return alt.Y("y:N", sort=names, scale=scale, axis=alt.Axis(title=axis.label, ticks=False))
    tilted = channel == "category" and sum(map(len, names)) > _LETTERS_IN_LINE
    turned: dict[str, Any] = {"labelAngle": -35, "labelOverlap": False} if tilted else {"labelAngle": 0}
    drawn = alt.Axis(title=axis.label, ticks=False, labelLimit=160, **turned)
    return alt.X(f"{channel}:N", sort=names, scale=scale, axis=drawn)


def colour(frame: pd.DataFrame, colour: str | None) -> Any:
    """The palette in the order in which the series first appear; a scale where it has too few colours."""
    if colour is None:
        return alt.value(PALETTE[0])
    names = series_names(frame)
    shades: dict[str, Any] = {"domain": names}
    if len(names) > len(PALETTE):
        # Its ends would fade into the light and the dark card.
        shades["scheme"] = alt.SchemeParams(SCALE, extent=[0.15, 0.85])
    return alt.Color("series:N", scale=alt.Scale(**shades), sort=names, legend=alt.Legend(title=None))


def tooltip(axes: Mapping[str, Axis], colour: str | None) -> list[alt.Tooltip]:
    """The series first, then each axis' value with its unit."""
    series = [] if colour is None else [hint("series", Axis(colour))]
    return series + [hint(f"{name}_text", axis) for name, axis in axes.items()]


def hint(field: str, axis: Axis) -> alt.Tooltip:
    """One row of a tooltip. Vega-Lite puts the title into an expression and escapes all but backslash and line end."""
    return alt.Tooltip(f"{field}:N", title=" ".join(axis.words.split()).replace("\\", "\\\\"))


def pick() -> alt.Parameter:
    """The series that are clicked in the legend; all while none is."""
    return alt.selection_point(name="picked", fields=["series"], bind="legend", toggle="true")


def under() -> alt.Parameter:
    """The point under the pointer."""
    return alt.selection_point(name="under", on="pointerover", clear="pointerout", empty=False)


def dots(base: alt.Chart, under: alt.Parameter, opacity: Any) -> alt.Chart:
    """A small dot on each point, a large one under the pointer."""
    size = alt.when(under).then(alt.value(120)).otherwise(alt.value(40))
    drawn: alt.Chart = base.mark_point(filled=True, strokeWidth=0).encode(size=size, opacity=opacity)
    return drawn


def discs(base: alt.Chart, tooltip: Sequence[alt.Tooltip]) -> alt.Chart:
    """Round each point an unseen disc that the pointer can hit.

    Vega-Lite's own way, `nearest`, says "undefined" for texts in 6.4, and cuts the whole chart into cells.
    """
    point = base.mark_point(filled=True, strokeWidth=0, size=300)
    drawn: alt.Chart = point.encode(opacity=alt.value(0), tooltip=list(tooltip))
    return drawn


def dimmed(pick: alt.Parameter) -> Any:
    """Opacity that lets the series that are not picked step back."""
    return alt.when(pick).then(alt.value(1)).otherwise(alt.value(0.12))


def rule(threshold: Threshold | None, y: Axis) -> list[alt.Chart]:
    """The dashed line and, outlined so that it can be read upon marks, its label."""
    if threshold is None:
        return []
    if not math.isfinite(threshold.value) or (y.log and threshold.value <= 0):
        raise ValueError(f"threshold {threshold.label!r} = {threshold.value}: has no place on the axis {y.label!r}")
    row = pd.DataFrame({"y": [float(threshold.value)], "label": [f"{threshold.label}: "]})
    drawn = base(row, {"y": y}).transform_calculate(said="datum.label + datum.y_text").encode(y="y:Q")
    place: dict[str, Any] = {"align": "right", "baseline": "bottom", "dx": -4, "dy": -5}
    label = drawn.encode(text="said:N", x=alt.value("width"))
    return [
        drawn.mark_rule(strokeDash=[5, 4], strokeWidth=1.5),
        label.mark_text(**place, stroke=CARD, strokeWidth=5, strokeJoin="round"),
        label.mark_text(**place),
    ]


def finished(layers: Sequence[alt.Chart], title: str, notes: Sequence[str], height: int) -> Chart:
    """The layers as one chart, as wide as its card, with the notes under the title."""
    chart: Any = layers[0] if len(layers) == 1 else alt.layer(*layers)
    chart = chart.properties(width="container", height=height)
    if title or notes:
        chart = chart.properties(title=alt.TitleParams(title or notes[0], subtitle=list(notes if title else notes[1:])))
    return cast(Chart, chart)


def _value_text(frame: pd.DataFrame, name: str, axis: Axis) -> str:
    if pd.api.types.is_datetime64_any_dtype(frame[name]):
        return f"utcFormat(toDate(datum.{name}), '%Y-%m-%d %H:%M:%S') + ' UTC'"
    return axis.text(f"datum.{name}")

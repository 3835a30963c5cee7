"""The arena's own charts: ratios with their intervals, and completion time against pauses with the front."""

from __future__ import annotations

from typing import Any

import altair as alt
import pandas as pd

from netlayer.report import Chart
from netlayer.report.theme import MUTED, PALETTE

_ROW_HEIGHT = 20


def intervals(frame: pd.DataFrame, laws: list[str], margin: float) -> Chart:
    """Columns `workload`, `rival`, `ratio`, `low`, `high`: a line an interval, a dot its ratio; left of 1 is better."""
    names = list(dict.fromkeys(frame["workload"]))
    rivals = [law for law in laws if law in set(frame["rival"])]
    base = alt.Chart(frame).encode(
        y=alt.Y("workload:N", sort=names, axis=alt.Axis(title=None, ticks=False, labelLimit=220)),
        yOffset=alt.YOffset("rival:N", sort=rivals),
        color=law_colour(laws, rivals),
        tooltip=[
            alt.Tooltip("workload:N"),
            alt.Tooltip("rival:N", title="against"),
            *(alt.Tooltip(f"{name}:Q", format=".3f") for name in ("ratio", "low", "high")),
        ],
    )
    scale = alt.Scale(zero=False, nice=True, padding=12)
    x = alt.X("low:Q", scale=scale, axis=alt.Axis(title="Completion time over the rival's", tickCount=9))
    lines = pd.DataFrame({"x": [1.0, margin], "what": ["alike", "no worse"]})
    marks = (
        alt.Chart(lines)
        .mark_rule(color=MUTED)
        .encode(x="x:Q", strokeDash=alt.StrokeDash("what:N", legend=None, sort=["alike", "no worse"]))
    )
    spans = base.mark_rule(strokeWidth=2).encode(x=x, x2="high:Q")
    dots = base.mark_point(filled=True, size=70, opacity=1).encode(x=alt.X("ratio:Q", scale=scale))
    drawn: Any = alt.layer(marks, spans, dots)
    height = _ROW_HEIGHT * len(names) * max(1, len(rivals))
    return drawn.properties(width="container", height=height)  # type: ignore[no-any-return]


def over_bound(frame: pd.DataFrame, laws: list[str]) -> Chart:
    """Columns `workload`, `law`, `over_bound`: a dot a law on each workload's line, the bound as a rule at 1."""
    names = list(dict.fromkeys(frame["workload"]))
    scale = alt.Scale(zero=False, nice=True, padding=12)
    base = alt.Chart(frame.assign(bound=1.0)).encode(
        y=alt.Y("workload:N", sort=names, axis=alt.Axis(title=None, ticks=False, labelLimit=220)),
        yOffset=alt.YOffset("law:N", sort=laws),
        color=law_colour(laws, laws, "law"),
        tooltip=[alt.Tooltip("workload:N"), alt.Tooltip("law:N"), alt.Tooltip("over_bound:Q", format=".3f")],
    )
    axis = alt.Axis(title="Completion time over the lower bound", tickCount=9)
    bound = alt.Chart(pd.DataFrame({"x": [1.0]})).mark_rule(color=MUTED).encode(x="x:Q")
    lines = base.mark_rule(strokeWidth=1.5).encode(x=alt.X("bound:Q", scale=scale, axis=axis), x2="over_bound:Q")
    dots = base.mark_point(filled=True, size=60, opacity=1).encode(x=alt.X("over_bound:Q", scale=scale))
    drawn: Any = alt.layer(bound, lines, dots)
    return drawn.properties(width="container", height=14 * len(names) * len(laws))  # type: ignore[no-any-return]


def front(frame: pd.DataFrame, laws: list[str]) -> Chart:
    """Columns `law`, `pause_share`, `completion`, `on_front`: a named dot a law, the front as a line of steps."""
    x = alt.X("pause_share:Q", axis=alt.Axis(title="Port-time paused", format=".2~%", tickCount=7))
    scale = alt.Scale(zero=False, nice=True, padding=24)
    y = alt.Y("completion:Q", scale=scale, axis=alt.Axis(title="Completion time over the best law's", tickCount=7))
    base = alt.Chart(frame).encode(x=x, y=y)
    steps = (
        alt.Chart(frame[frame["on_front"]])
        .mark_line(interpolate="step-after", strokeDash=[5, 4], color=MUTED, strokeWidth=1.5)
        .encode(x=x, y=y)
    )
    tooltip = [
        alt.Tooltip("law:N"),
        alt.Tooltip("completion:Q", format=".3f"),
        alt.Tooltip("pause_share:Q", title="port-time paused", format=".2%"),
        alt.Tooltip("on_front:N", title="on the front"),
    ]
    dots = base.mark_point(filled=True, size=160, opacity=1).encode(color=law_colour(laws, None), tooltip=tooltip)
    labels = base.mark_text(align="left", dx=9, dy=-11, fontWeight=600).encode(text="law:N")
    drawn: Any = alt.layer(steps, dots, labels)
    return drawn.properties(width="container", height=320)  # type: ignore[no-any-return]


def law_colour(laws: list[str], legend_laws: list[str] | None, column: str = "rival") -> Any:
    """A law has one colour in every chart of the page; a legend of `legend_laws`, by the column, where given."""
    scale: dict[str, Any] = {"domain": laws, "range": [PALETTE[at % len(PALETTE)] for at in range(len(laws))]}
    legend = None if legend_laws is None else alt.Legend(title=None, values=legend_laws)
    by = "law:N" if legend_laws is None else f"{column}:N"
    return alt.Color(by, scale=alt.Scale(**scale), legend=legend)

"""The charts of `netlayer simulate` alone: a share over time as bands of colour, and completion against pauses.

A law has the colour of its place in the list, as on the arena's page. Not covered: the text next to them.
"""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from congestion.arena import charts as arena_charts
from congestion.simulation.statistics import pareto_front
from netlayer.report import Axis, Chart
from netlayer.report.theme import SCALE

_BINS = 72  # of time: a cell stays a few pixels wide
_ROW_HEIGHT, _LEAST_HEIGHT = 20, 90
_LABEL_PIXELS = 260


def bands(
    frame: pd.DataFrame,
    rows: list[str],
    value: Axis,
    *,
    until_s: float | None = None,
    top: float | None = None,
    title: str = "",
) -> Chart:
    """Columns `from_s`, `to_s`, `row` and the value's: a cell each, time to the right, `rows` from the top.

    Args:
        until_s: where the axis of time ends; with the last cell where None.
        top: what the brightest colour is, so that charts can be compared; the largest value where None.
    """
    time = Axis("from_s", "Time since the first start", "s")
    ends = pd.concat([frame["from_s"], frame["to_s"]])
    drawn = pd.DataFrame(
        {
            "from_s": frame["from_s"],
            "to_s": frame["to_s"],
            "row": frame["row"].astype(str),
            "value": frame[value.column].astype(float),
        }
    )
    texts = {
        "value_text": value.text("datum.value"),
        "when": f"{time.text('datum.from_s')} + ' to ' + {time.text('datum.to_s')}",
    }
    shades = alt.Scale(scheme=SCALE, domain=[0.0, top or max(float(drawn["value"].max()), 1e-12)], clamp=True)
    legend = alt.Legend(
        title=value.label, labelExpr=value.tick_text(), gradientLength=260, gradientThickness=10, tickCount=4
    )
    scale = alt.Scale(domain=[min(0.0, float(ends.min())), until_s or float(ends.max())], nice=False)
    chart: Any = (
        alt.Chart(drawn)
        .transform_calculate(**texts)
        .mark_rect()
        .encode(
            x=alt.X(
                "from_s:Q",
                scale=scale,
                axis=alt.Axis(title=time.label, labelExpr=time.tick_text(), tickCount=7, grid=False),
            ),
            x2="to_s:Q",
            y=alt.Y(
                "row:N",
                sort=rows,
                scale=alt.Scale(domain=rows, padding=0.04),
                axis=alt.Axis(title=None, ticks=False, labelLimit=_LABEL_PIXELS, labelOverlap=False),
            ),
            color=alt.Color("value:Q", scale=shades, legend=legend),
            tooltip=[
                alt.Tooltip("row:N", title="of"),
                alt.Tooltip("when:N", title="time"),
                alt.Tooltip("value_text:N", title=value.words),
            ],
        )
    )
    options = {"title": title} if title else {}
    height = max(_LEAST_HEIGHT, _ROW_HEIGHT * len(rows))
    return chart.properties(width="container", height=height, **options)  # type: ignore[no-any-return]


def in_bins(frame: pd.DataFrame, value: str, begin_us: float, end_us: float) -> pd.DataFrame:
    """Means over equal stretches of time: columns `from_s`, `to_s`, and the value's.

    Args:
        frame: `time_us`, the end of each interval, in order, and the value's mean over it; the first begins at
            `begin_us`. Intervals may differ in length.
        end_us: the last stretch ends here; a stretch after the last interval is omitted.
    """
    ends = np.r_[begin_us, frame["time_us"].to_numpy(dtype=float)]
    area = np.r_[0.0, np.cumsum(frame[value].to_numpy(dtype=float) * np.diff(ends))]
    bins = max(1, min(_BINS, len(frame)))
    edges = np.linspace(begin_us, end_us, bins + 1)
    stop = min(ends[-1], end_us)
    edges = np.r_[edges[edges < stop], stop]
    means = np.diff(np.interp(edges, ends, area)) / np.diff(edges)
    return pd.DataFrame({"from_s": edges[:-1] / 1e6, "to_s": edges[1:] / 1e6, value: means})


def front(rows: pd.DataFrame, laws: list[str]) -> tuple[Chart, list[str]]:
    """The chart of completion against pauses, and the laws on its front.

    Args:
        rows: a row a law whose flows all ended: law, completion_us, pause_share.
    """
    table = pd.DataFrame(
        {
            "law": rows["law"].astype(str),
            "completion": rows["completion_us"].astype(float) / float(rows["completion_us"].min()),
            "pause_share": rows["pause_share"].astype(float),
        }
    )
    table["on_front"] = pareto_front(table[["completion", "pause_share"]])
    return arena_charts.front(table, laws), table.loc[table["on_front"], "law"].tolist()

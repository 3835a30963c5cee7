"""What the chart builders draw, what they omit and say, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import pytest
import vl_convert
from hypothesis import given
from hypothesis import strategies as st

from netlayer.report import Axis, Chart, Threshold, charts
from netlayer.report.axes import Drawable, byte_ticks, log_ticks
from netlayer.report.plots import MAX_ROWS, spec_of
from netlayer.report.reduce import LINE_POINTS, bin_edges, binned, cumulated, thinned
from netlayer.report.theme import DARK, PALETTE

SIZE = Axis("size_bytes", "Message size", "bytes", log=True)
BUS_BW = Axis("bus_bw", "Bus bandwidth", "GB/s")
FRAME = pd.DataFrame(
    {
        "size_bytes": [2**10, 2**20, 2**30] * 2,
        "bus_bw": [1.0, 20.0, 45.5, 2.0, 22.0, 47.25],
        "collective": ["all_gather"] * 3 + ["sendrecv"] * 3,
    }
)
BUILDERS: dict[str, Callable[[], Chart]] = {
    "line": lambda: charts.line(FRAME, SIZE, BUS_BW, colour="collective", threshold=Threshold(50, "line rate")),
    "step": lambda: charts.line(FRAME.head(3), "size_bytes", "bus_bw", step=True),
    "area": lambda: charts.area(FRAME, "size_bytes", BUS_BW, colour="collective"),
    "bars": lambda: charts.bars(FRAME.iloc[[0, 3]], "collective", BUS_BW, threshold=Threshold(1.5, "expected")),
    "grouped": lambda: charts.bars(FRAME, "size_bytes", BUS_BW, colour="collective"),
    "stacked": lambda: charts.bars(FRAME, "size_bytes", BUS_BW, colour="collective", stacked=True),
    "histogram": lambda: charts.histogram(FRAME, "bus_bw", colour="collective", counted="runs"),
    "cdf": lambda: charts.cdf(FRAME, BUS_BW, colour="collective", counted="runs"),
    "heatmap": lambda: charts.heatmap(FRAME, "size_bytes", "collective", BUS_BW),
}


def spec(chart: Chart) -> dict[str, Any]:
    return spec_of(chart, "chart", "a chart")


def svg(chart: Chart) -> str:
    drawn = {**spec(chart), "width": 600}
    return vl_convert.vegalite_to_svg(drawn, vl_version="6.4", allowed_base_urls=[])


def rows(chart: Chart) -> list[dict[str, Any]]:
    """The rows of the chart's largest data set."""
    found: list[list[dict[str, Any]]] = list(spec(chart)["datasets"].values())
    return max(found, key=len)


def title(chart: Chart) -> str:
    said = spec(chart)["title"]
    return " ".join([said["text"], *said.get("subtitle", [])])


@pytest.mark.parametrize("name", BUILDERS)
def test_every_builder_draws_marks_and_fills_its_card(name: str) -> None:
    chart = BUILDERS[name]()
    picture = svg(chart)
    assert spec(chart)["width"] == "container"
    assert 'class="mark-' in picture
    assert "undefined" not in picture
    assert "NaN" not in picture


def test_ticks_carry_binary_prefixes_and_the_title_its_unit() -> None:
    picture = svg(BUILDERS["line"]())
    assert ">1 KiB<" in picture
    assert ">1 MiB<" in picture
    assert ">Bus bandwidth (GB/s)<" in picture
    assert ">line rate: 50 GB/s<" in picture


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        ("s", 0.0015, "1.5 ms"),
        ("B/s", 25e9, "25 GB/s"),
        ("share", 0.25, "25%"),
        ("bytes", 1536.0, "1.5 KiB"),
        ("s", 7200.0, "7,200 s"),
    ],
)
def test_units_are_written_as_people_write_them(unit: str, value: float, text: str) -> None:
    frame = pd.DataFrame({"name": ["a"], "value": [value]})
    assert f">{text}<" in svg(charts.bars(frame, "name", Axis("value", unit=unit)))


def test_dates_are_shown_in_utc() -> None:
    moments = pd.Series(pd.to_datetime(["2026-01-01 12:00", "2026-01-01 16:00"])).dt.tz_localize("Asia/Tokyo")
    picture = svg(charts.line(pd.DataFrame({"time": moments, "loss": [2.0, 1.0]}), "time", "loss"))
    assert ">03:00<" in picture
    assert ">12:00<" not in picture


def test_names_with_dots_and_quotes_break_no_expression() -> None:
    frame = pd.DataFrame({"a.b['x']": [1, 2], 'y"\\': [3.0, 4.0], "s": ["it's", '"</script>']})
    picture = svg(charts.line(frame, "a.b['x']", 'y"\\', colour="s"))
    assert "it's" in picture
    assert "undefined" not in picture


def test_values_that_cannot_be_drawn_are_left_out_and_said() -> None:
    frame = pd.DataFrame({"x": [0, 1, 2, 4], "loss": [1.0, np.nan, np.inf, 3.0]})
    chart = charts.line(frame, Axis("x", log=True), "loss", title="Loss")
    assert [row["x"] for row in rows(chart)] == [4]
    assert title(chart) == ("Loss 1 of 4 rows omitted: x is not above zero 2 of 4 rows omitted: loss is not finite")


def test_a_chart_without_a_title_says_what_it_left_out_in_its_place() -> None:
    assert title(charts.bars(pd.DataFrame({"k": "ab", "v": [1.0, None]}), "k", "v")).startswith("1 of 2 rows omitted")


def test_long_lines_are_thinned_and_said() -> None:
    frame = pd.DataFrame({"step": range(10_000), "loss": np.sin(np.arange(10_000))})
    chart = charts.line(frame, "step", "loss")
    assert len(rows(chart)) <= LINE_POINTS
    assert f"10,000 points drawn as {len(rows(chart)):,}" in title(chart)


@given(st.integers(LINE_POINTS + 1, 3 * LINE_POINTS), st.integers(0, 2**32 - 1))
def test_thinning_keeps_both_ends_and_both_extremes(num_rows: int, seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal(num_rows)
    frame = pd.DataFrame({"x": np.arange(num_rows), "y": values, "series": ""})
    kept = thinned(Drawable(frame, ())).frame
    assert len(kept) <= LINE_POINTS
    assert {0, num_rows - 1, int(values.argmin()), int(values.argmax())} <= set(kept["x"])


def test_many_series_share_the_points_of_a_page() -> None:
    frame = pd.DataFrame({"x": list(range(1000)) * 64, "y": 1.0, "rank": np.repeat(np.arange(64), 1000)})
    assert len(rows(charts.line(frame, "x", "y", colour="rank"))) <= 3 * LINE_POINTS


@given(st.lists(st.integers(-50, 5000), min_size=1, max_size=60), st.integers(1, 50))
def test_every_value_falls_into_one_bin(values: list[int], bins: int) -> None:
    found = np.array(values, dtype=float)
    edges = bin_edges(found, bins)
    counts = binned(pd.DataFrame({"x": found, "series": ""}), edges, share=False)
    assert len(edges) <= bins + 1
    assert counts["y"].sum() == len(values)


def test_shares_of_each_series_add_up_to_one() -> None:
    frame = pd.DataFrame({"x": [1.0, 2.5, 2.6, 9.0], "series": ["a", "a", "a", "b"]})
    shares = binned(frame, bin_edges(frame["x"].to_numpy(), 4), share=True).groupby("series")["y"].sum()
    assert shares.to_dict() == pytest.approx({"a": 1.0, "b": 1.0})


def test_bins_on_a_log_axis_have_equal_ratios() -> None:
    edges = bin_edges(np.array([1.0, 100.0]), 2, log=True)
    assert edges.tolist() == pytest.approx([1.0, 10.0, 100.0])


def test_a_cdf_rises_from_zero_to_one() -> None:
    frame = pd.DataFrame({"x": [3.0, 1.0, 3.0, 2.0], "series": ""})
    curve = cumulated(Drawable(frame, ())).frame
    assert curve["x"].tolist() == [1.0, 1.0, 2.0, 3.0]
    assert curve["y"].tolist() == [0.0, 0.25, 0.5, 1.0]


@pytest.mark.parametrize(
    ("values", "base", "ticks"),
    [
        ([8, 2**30], 2, [2.0**power for power in range(5, 31, 5)]),
        ([2, 300], 10, [2, 5, 10, 20, 50, 100, 200]),
        ([1e-3, 1e3], 10, [1e-3, 1e-2, 1e-1, 1, 10, 100, 1000]),
        ([3.1, 3.4], 10, []),
        ([5, 5], 10, []),
    ],
)
def test_log_ticks_stand_among_the_values(values: list[float], base: int, ticks: list[float]) -> None:
    assert log_ticks(pd.Series(values, dtype=float), base) == pytest.approx(ticks)


def test_byte_ticks_are_multiples_of_a_power_of_two() -> None:
    assert byte_ticks(pd.Series([1e9, 3e9]), zero=True) == [number * 2.0**29 for number in range(7)]
    assert byte_ticks(pd.Series([2.0**30, 2.0**30 + 2**20]), zero=False)[:2] == [2.0**30, 2.0**30 + 2**18]


def test_colours_follow_the_order_of_the_frame_and_turn_into_a_scale_when_they_run_out() -> None:
    few = spec(charts.line(FRAME.iloc[::-1], "size_bytes", "bus_bw", colour="collective"))
    assert few["layer"][0]["encoding"]["color"]["scale"] == {"domain": ["sendrecv", "all_gather"]}
    many = pd.DataFrame({"x": range(8), "y": range(8), "rank": range(8)})
    scale = spec(charts.line(many, "x", "y", colour="rank"))["layer"][0]["encoding"]["color"]["scale"]
    assert len(PALETTE) < 8
    assert scale["scheme"]["name"] == "viridis"


def test_every_colour_of_the_palette_has_a_dark_partner() -> None:
    assert set(PALETTE) <= set(DARK)
    assert len(set(DARK.values())) == len(DARK)


def test_a_missing_cell_of_a_heat_map_is_said() -> None:
    chart = charts.heatmap(FRAME.assign(bus_bw=[1.0, np.nan, 3, 4, 5, 6]), "size_bytes", "collective", "bus_bw")
    assert "1 of 6 rows omitted: bus bw is not finite" in title(chart)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "missing column": (lambda: charts.line(FRAME, "size_byte", "bus_bw"), "did you mean 'size_bytes'"),
    "unlike any column": (lambda: charts.line(FRAME, "qqq", "bus_bw"), "there are size_bytes, bus_bw, collective"),
    "text as number": (lambda: charts.line(FRAME, "size_bytes", "collective"), "'collective' holds no numbers"),
    "no rows": (lambda: charts.cdf(FRAME.head(0), "bus_bw"), "the frame has no rows"),
    "nothing finite": (lambda: charts.cdf(pd.DataFrame({"v": [np.nan]}), "v"), "nothing to draw: 1 of 1 rows"),
    "two rows a bar": (lambda: charts.bars(FRAME, "collective", "bus_bw"), "4 rows would hide others"),
    "two rows a cell": (lambda: charts.heatmap(FRAME.assign(a=1), "a", "collective", "bus_bw"), "aggregate them"),
    "log bars": (lambda: charts.bars(FRAME, "size_bytes", Axis("bus_bw", log=True)), "a bar has no foot"),
    "log area": (lambda: charts.area(FRAME, "size_bytes", Axis("bus_bw", log=True)), "a stacked part has no foot"),
    "no bins": (lambda: charts.histogram(FRAME, "bus_bw", bins=0), "bins = 0"),
    "threshold": (
        lambda: charts.line(FRAME, SIZE, BUS_BW, threshold=Threshold(float("nan"), "limit")),
        "threshold 'limit' = nan",
    ),
    "too many rows": (
        lambda: spec(charts.area(pd.DataFrame({"x": range(MAX_ROWS + 1), "y": 1}), "x", "y")),
        f"more than {MAX_ROWS:,} rows",
    ),
    "data from elsewhere": (
        lambda: spec(alt.Chart("https://example.com/a.csv").mark_point()),
        "would load 'https://example.com/a.csv'",
    ),
    "infinity in plain data": (
        lambda: spec(alt.Chart(alt.InlineData(values=[{"x": float("inf")}])).mark_point()),
        "not JSON compliant",
    ),
    "no chart": (lambda: spec_of(FRAME, "chart", ""), "is a DataFrame; give an Altair chart"),
    "bad name": (lambda: spec_of(BUILDERS["line"](), "../chart", ""), "names the PNG file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_drawn_is_refused_with_the_reason(case: str) -> None:
    build, reason = REFUSED[case]
    with pytest.raises(ValueError) as caught:
        build()
    assert reason in str(caught.value)

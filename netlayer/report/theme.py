"""The look of every chart: colours that colour-blind readers tell apart, one font, one grid, light and dark.

A chart is drawn once, in the light colours. In dark mode the page's style sheet swaps each of them for its partner
below, so that nothing is drawn again when the reader's setting changes, and paper always gets the light ones.
"""

from __future__ import annotations

from typing import Any, Final

INK, MUTED, GRID, CARD = "#1c2733", "#5d6b7a", "#e3e8ee", "#fefeff"
# Hues after Okabe and Ito (2008), shifted until every two stay 16.9 apart (CIELAB) for readers with deuteranopia,
# protanopia or tritanopia, and every one has 3:1 on the card, in light and in dark.
PALETTE = ("#066ac6", "#e36b12", "#09a27a", "#b5529b", "#875a01", "#573692")
_PALETTE_DARK = ("#449ae4", "#fb8940", "#45d6aa", "#c365a0", "#f5db4f", "#ccb9ff")
DARK = {
    INK: "#e6ebf1",
    MUTED: "#9aa8b7",
    GRID: "#2e3946",
    CARD: "#171e26",
    **dict(zip(PALETTE, _PALETTE_DARK, strict=True)),
}
# One hue after another stops telling series apart: beyond the palette the colours are a scale, read as an order.
SCALE: Final = "viridis"
# Text on a cell of that scale, the same in light and dark.
ON_BRIGHT, ON_DARK = "#10161d", "#fdfdfd"

_PAGE_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_PNG_FONT = "Arial, 'Liberation Sans', sans-serif"
PNG_WIDTH = 760


def page_config() -> dict[str, Any]:
    """Vega-Lite config of the interactive charts: no background, so the card's own shows."""
    return _config(_PAGE_FONT, "transparent")


def png_config() -> dict[str, Any]:
    """Vega-Lite config of the pictures: white, with a margin, in a font that the renderer carries."""
    return {**_config(_PNG_FONT, "#ffffff"), "padding": 16}


def _config(font: str, background: str) -> dict[str, Any]:
    axis = {"labelColor": MUTED, "titleColor": INK, "domainColor": MUTED, "tickColor": MUTED, "gridColor": GRID}
    sizes = {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": 600}
    return {
        "background": background,
        "font": font,
        "padding": 2,
        "view": {"stroke": None, "continuousHeight": 280, "discreteHeight": 280},
        "axis": {**axis, **sizes, "labelPadding": 6, "titlePadding": 12, "tickSize": 4},
        "axisY": {"domain": False, "ticks": False},
        "axisX": {"labelOverlap": "greedy", "labelSeparation": 10, "labelFlush": False},
        "legend": _legend() | sizes,
        "title": _title(),
        "range": {"category": list(PALETTE), "heatmap": {"scheme": SCALE}, "ramp": {"scheme": SCALE}},
        "mark": {"color": PALETTE[0]},
        "line": {"strokeWidth": 2.25, "strokeJoin": "round", "strokeCap": "round"},
        "bar": {"cornerRadiusEnd": 2},
        "rule": {"color": INK},
        "text": {"color": INK, "fontSize": 12},
    }


def _legend() -> dict[str, Any]:
    return {
        "orient": "top",
        "direction": "horizontal",
        "columns": 6,
        "labelColor": INK,
        "titleColor": MUTED,
        "labelLimit": 220,
        "symbolType": "circle",
        "symbolSize": 90,
        "offset": 10,
    }


def _title() -> dict[str, Any]:
    return {
        "anchor": "start",
        "frame": "bounds",
        "fontSize": 14,
        "fontWeight": 600,
        "color": INK,
        "subtitleColor": MUTED,
        "subtitleFontSize": 12,
        "subtitlePadding": 5,
        "offset": 10,
    }

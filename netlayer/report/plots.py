"""A chart's one spec, as the page needs it and as a picture: checked, escaped, drawn without any network."""

from __future__ import annotations

import copy
import importlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import altair as alt

from netlayer.errors import HardwareMissing
from netlayer.report.theme import PNG_WIDTH, png_config
from netlayer.results import Source

MAX_ROWS = 20_000
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")
# What the page's script calls: the compiler and runtime that the PNG is drawn with, too.
_VEGA_LITE = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])


@dataclass(frozen=True)
class Plot:
    """One chart of a report: its Vega-Lite spec, and what is written around it."""

    name: str
    spec: dict[str, Any]
    caption: str
    alt: str
    source: tuple[Source, ...]

    def png(self, stamp: str) -> bytes:
        """Return the plot as PNG at twice the screen's resolution, with `stamp` under its title."""
        spec = copy.deepcopy(self.spec)
        if spec.get("width") == "container":
            spec["width"] = PNG_WIDTH
        spec["title"] = _stamped(spec.get("title", ""), stamp)
        return _vl_convert().vegalite_to_png(  # type: ignore[no-any-return]
            spec, vl_version=_VEGA_LITE, scale=2, config=png_config(), allowed_base_urls=[]
        )


def spec_of(chart: Any, name: str, alt_text: str) -> dict[str, Any]:
    """The chart's Vega-Lite spec without a theme, its data inside.

    A NaN or infinity in a DataFrame becomes null, as Altair writes it, and is not drawn.

    Raises:
        ValueError: `name` makes no file name, `chart` is no Altair chart, or it carries more than `MAX_ROWS` rows, a
            NaN or infinity in other data, or an address that a browser would load from.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"chart name = {name!r}: lower-case letters, digits, '_', '.' and '-'; it names the PNG file")
    if not alt.api.is_chart_type(chart):
        raise ValueError(f"chart {name!r} is a {type(chart).__name__}; give an Altair chart")
    try:
        with alt.theme.enable("none"), alt.data_transformers.enable("default", max_rows=MAX_ROWS):
            spec: dict[str, Any] = chart.to_dict()
    except alt.MaxRowsError as exc:
        raise ValueError(f"chart {name!r} has more than {MAX_ROWS:,} rows; aggregate or thin them, and say so") from exc
    spec.pop("$schema", None)
    address = next(_addresses(spec), None)
    if address is not None:
        raise ValueError(f"chart {name!r} would load {address!r}; put the data inside: a report fetches nothing")
    script_json(spec)
    return {"description": alt_text, **spec}


def script_json(value: Any) -> str:
    """JSON that may stand inside a <script> element: nothing in it can end the element or open a comment.

    Raises:
        ValueError: a NaN or infinity, which JSON does not have.
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


@cache
def vega_bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script that may stand inside a <script> element."""
    bundle = _vl_convert().javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=_VEGA_LITE)
    return re.sub(r"</(?=script)", r"<\\/", bundle, flags=re.IGNORECASE)


def _vl_convert() -> Any:
    """A whole JavaScript engine, which only what is drawn or written needs.

    Raises:
        HardwareMissing: it is not installed: some GPU hosts get the packages of a bench alone.
    """
    try:
        return importlib.import_module("vl_convert")
    except ImportError as exc:
        reason = "a page needs vl-convert: pip install vl-convert-python; what was measured is in the record"
        raise HardwareMissing(reason) from exc


def _stamped(title: Any, stamp: str) -> dict[str, Any]:
    """Return a chart's title with `stamp` below it as its last subtitle, or in its place where there is none."""
    parts = dict(title) if isinstance(title, dict) else {"text": title}
    if not parts.get("text"):
        return {**parts, "text": stamp, "fontSize": 12, "fontWeight": 400}
    subtitle = parts.get("subtitle") or []
    return {**parts, "subtitle": [*([subtitle] if isinstance(subtitle, str) else subtitle), stamp]}


def _addresses(tree: Any) -> Iterator[str]:
    """Every `url` in the spec that is a text: data or a picture from elsewhere."""
    if isinstance(tree, list):
        for item in tree:
            yield from _addresses(item)
    elif isinstance(tree, dict):
        for key, item in tree.items():
            if key == "url" and isinstance(item, str):
                yield item
            if key not in ("datasets", "values"):
                yield from _addresses(item)

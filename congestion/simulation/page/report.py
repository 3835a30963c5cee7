"""The page of `netlayer simulate` from what its runs left, and where it is written."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netlayer.errors import HardwareMissing
from netlayer.results import write_text

if TYPE_CHECKING:
    import pandas as pd

    from congestion.simulation.samples import Samples

SAMPLED = ("samples", "links", "tiers")
_STDOUT = "-"


def write_page(
    rows: list[dict[str, Any]],
    frames: Mapping[str, pd.DataFrame],
    about: Mapping[str, Any],
    *,
    part: Path | None,
    html: Path | None,
) -> None:
    """report.html into the folder `part`, and the file `html`; pictures lie in plots/ next to each.

    Where what draws it is not installed, a line says so; it is an error only if the file was asked for.

    Args:
        rows, frames: as `simulation.page.page.Findings` takes them, frames by name.
        about: the other fields of `Findings`.

    Raises:
        HardwareMissing: `html` is given, and the page cannot be drawn here.
    """
    try:
        from congestion.simulation.page.page import Findings, build_page

        values: dict[str, Any] = {"rows": rows, **frames, **about}
        report = build_page(Findings(**values))
        with tempfile.TemporaryDirectory() as folder:
            page = report.write(part or folder)
            if html:
                put_page(page, html)
    except (HardwareMissing, ModuleNotFoundError) as exc:
        if html:
            raise HardwareMissing(f"--html: {exc}") from exc
        click.echo(f"no page: {exc}", err=True)


def put_page(page: Path, html: Path) -> None:
    """Copy what `Report.write` wrote to `html`; of stdout, `-`, the page alone.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_text(html, page.read_text(encoding="utf-8"))
    if str(html) == _STDOUT:
        return
    folder = html.resolve().parent / "plots"
    folder.mkdir(exist_ok=True)
    for picture in (page.parent / "plots").glob("*.png"):
        (folder / picture.name).write_bytes(picture.read_bytes())
    click.echo(f"report: {html}", err=True)


def links_note(law: str, samples: Samples) -> str:
    """Describe in a sentence what the frame of links omits; empty where it has all."""
    links = samples.links
    if links is None or not links.skipped:
        return ""
    many = len(links.link)
    return f"{law}: of {many:,} links the {many - links.skipped:,} busiest are kept over time."

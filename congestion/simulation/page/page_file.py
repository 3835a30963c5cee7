"""A page as the file that a user named, its pictures in plots/ next to it."""

from __future__ import annotations

from pathlib import Path

import click

from netlayer.results import write_text

_STDOUT = "-"


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

"""Rows as a table on stdout, each column written by what its name says it holds: shares, bytes, seconds, rates."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from netlayer.units import format_rate, format_size

# A pipe has no width of its own, and rich would fold a table at 80.
_PIPE_WIDTH = 200


def print_rows(title: str, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], note: str = "") -> None:
    """A table of the columns (key in a row: heading); columns that no row has are left out."""
    shown = {key: heading for key, heading in columns.items() if any(key in row for row in rows)}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for key, heading in shown.items():
        words = any(isinstance(row.get(key), str) for row in rows)
        table.add_column(heading, justify="left" if words else "right", no_wrap=words)
    for row in rows:
        table.add_row(*(cell(key, row.get(key)) for key in shown))
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
    console.print(title, style="italic", markup=False)
    console.print(table)
    console.print(f"{note}\n" if note else "", markup=False)


def cell(key: str, value: Any) -> str:
    """One value as a person writes it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if "bytes" in key:
        return format_size(round(value))
    if "_bps" in key:
        return format_rate(value)
    if key.endswith(("_s", "_s_max")):
        return f"{value:.3f} s"
    if any(word in key for word in ("share", "excess", "utilisation", "used")):
        return f"{value:.2%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"

"""Tables on stdout, and filters for text of other programs that is printed.

`print_rows` writes each column by what its name says it holds: shares, bytes, seconds, rates. rich is imported only
where a table is printed: the filters are needed by commands that print none.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from netlayer.units import format_rate, format_size

# A pipe has no edge to wrap at, and rich would fold a table at 80.
_PIPE_WIDTH = 10_000
_NUMBER = re.compile(r"([-+]?[\d,]*\.?\d+(e[-+]\d+)?%?( |/|$)|-$)")
_SHARES = {"share", "excess", "utilisation", "used"}
# Control characters but for line feeds and tabs, separators and marks that turn the direction of text, halves of
# surrogate pairs, and what XML forbids.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202f\u2066-\u2069\ufffe\uffff]|[\ud800-\udfff]")


def printable(text: str, instead: str = "?") -> str:
    """Replace each character that is not printable (`str.isprintable`; line feeds too): none may steer a terminal."""
    return "".join(char if char.isprintable() else instead for char in text)


def escaped(text: str) -> str:
    """Write each character that is not printable as Python's escape of it (`\\n`, `\\x1b`): one line, nothing lost."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def printable_line(text: str) -> str:
    """Return another program's output on one line: white space as single blanks, what is not printable dropped."""
    return printable(" ".join(text.split()), "")


def printable_text(text: str) -> str:
    """Replace by "?" what a terminal, an XML reader or a bidirectional display acts on; line feeds and tabs stay."""
    return _CONTROL.sub("?", text)


def print_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], note: str = "") -> None:
    """Print texts as they are, words to the left and numbers to the right; `none` where there are no rows."""
    from rich.console import Console
    from rich.table import Table

    lines = list(rows)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, heading in enumerate(headings):
        has_text = any(_NUMBER.match(line[column]) is None for line in lines)
        table.add_column(heading, justify="left" if has_text else "right", overflow="fold")
    for line in lines:
        table.add_row(*line)
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, markup=False)
    console.print(title, style="italic", soft_wrap=True)
    console.print(table if lines else "none")
    console.print(f"{note}\n" if note else "", soft_wrap=True)


def print_rows(title: str, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], note: str = "") -> None:
    """Print a table of the columns (key in a row: heading); columns that no row has are omitted."""
    headings = {key: heading for key, heading in columns.items() if any(key in row for row in rows)}
    lines = [[cell(key, row.get(key)) for key in headings] for row in rows]
    print_table(title, list(headings.values()), lines, note)


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
        return duration(value)
    if _SHARES.intersection(key.split("_")):
        return f"{value:.2%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"


def duration(seconds: float) -> str:
    """`1.234 s` or `1.987 ms`: four digits, whatever the size."""
    for scale, unit in ((1.0, "s"), (1e3, "ms")):
        if abs(seconds) * scale >= 1 or not seconds:
            return f"{seconds * scale:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"

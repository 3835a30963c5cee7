"""The tables that `netlayer topology build` and `import` print. Rows as `audit` and `graph.describe` give them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from netlayer.units import format_rate

Rows = Sequence[dict[str, Any]]

# A pipe has no width of its own, and rich would fold a table at 80.
_PIPE_WIDTH = 140
_SHOWN_LINKS = 12


def print_audit(name: str, rows: Rows) -> None:
    """Ports, parts, hops, and what the design can grow to."""
    ports, parts, hops, (limits,) = (_of(rows, table) for table in ("ports", "parts", "hops", "limits"))
    table = _table("level", "switches", "ports", "used down", "used up", "left", "used")
    for row in ports:
        counts = [f"{row[key]:,}" for key in ("switches", "ports", "used_down", "used_up", "left")]
        table.add_row(row["level"], *counts, f"{row['used_share']:.0%}")
    _print(f"{name} - {limits['variant']}: ports", table)
    priced = "cost" in parts[0]
    table = _table("part", "count", *(("price", "cost") if priced else ()))
    for row in parts:
        money = [f"{row['unit_price']:,.0f}", f"{row['cost']:,.0f}"] if priced else []
        table.add_row(row["item"].replace("_", " "), f"{row['count']:,}", *money)
    _print("Parts" + (": the last line is a GPU's share, and all" if priced else ""), table)
    table = _table("hops", "pairs", "share")
    for row in hops:
        table.add_row(str(row["hops"] or "no path"), f"{row['pairs']:,}", f"{row['share']:.1%}")
    _print("Links between two NICs of different servers (ordered pairs)", table, _words(limits))


def print_graph(source: str, levels: Rows, note: str) -> None:
    """An imported fabric, level by level."""
    table = _table("level", "devices", "ports used", "uplinks", "uplink rate", "capacity up")
    for row in levels:
        used = _span(str(row["ports_min"]), str(row["ports_max"]))
        rates = [format_rate(row[key]) for key in ("up_link_bps_min", "up_link_bps_max")]
        up = [f"{row['up_links']:,}", _span(*rates), format_rate(row["up_bps"])] if row["up_links"] else ["-"] * 3
        table.add_row(row["level"], f"{row['count']:,}", used, *up)
    _print(source, table, note)


def print_calibration(rows: Rows, summary: dict[str, Any], names: Sequence[str], source: str) -> None:
    """Links with the largest residual of the last prediction first, and how well each prediction fits."""
    ordered = sorted(rows, key=lambda row: -abs(row[f"{names[-1]}_residual"]))
    table = _table("link", "level", "counted MB", *(title for name in names for title in (f"{name} MB", "residual")))
    for row in ordered[:_SHOWN_LINKS]:
        cells = [text for name in names for text in (_mega(row[f"{name}_bytes"]), f"{row[f'{name}_residual']:+.1%}")]
        table.add_row(row["link"], str(row["level"]), _mega(row["counter_bytes"]), *cells)
    fits = [
        f"{name}: rms residual {summary[f'{name}_rms_residual']:.1%}, largest {summary[f'{name}_max_residual']:.1%}, "
        f"scale {summary[f'{name}_scale']:.4g}"
        for name in names
    ]
    more = f"{len(rows) - _SHOWN_LINKS} more in the record; " if len(rows) > _SHOWN_LINKS else ""
    _print(f"Counters ({source}) beside the predictions, farthest off first", table, more + "; ".join(fits))


def _words(limits: dict[str, Any]) -> str:
    bisection, share = format_rate(limits["bisection_bps"]), limits["bisection_share"]
    pods = f"{limits['max_pods']} pods" if limits["max_pods"] > 1 else "one pod"
    servers, total = limits["max_servers_per_tor_set"], limits["max_servers"]
    width = limits["uplink_over_nic"]
    return (
        f"bisection {bisection} each way ({share:.0%} of the NICs'); an uplink is {width:g} NICs wide\n"
        f"at most {servers} servers under one ToR set, {total:,} in {pods} wired like this"
    )


def _of(rows: Rows, table: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["table"] == table]


def _span(low: str, high: str) -> str:
    return low if low == high else f"{low} - {high}"


def _mega(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f}"


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for title in others:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _print(title: str, table: Table, note: str = "") -> None:
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, markup=False)
    console.print(title, style="italic")
    console.print(table)
    console.print(f"{note}\n" if note else "")

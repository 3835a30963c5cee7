"""The tables that `netlayer topology probe` prints. Rows as its record keeps them."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

Rows = list[dict[str, Any]]

# A pipe has no width of its own, and rich would fold a table at 80.
_PIPE_WIDTH = 140
_SHOWN_PATHS = 12


def print_spread(rows: Rows) -> None:
    """One pair of addresses: summary, routers of every hop, ECMP choices, most used paths."""
    (summary,) = (row for row in rows if row["table"] == "summary")
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
    title = f"{summary['src']} to {summary['dst']} (measured): {_words(summary)}"
    console.print(title, style="italic", soft_wrap=True)
    console.print(_hops([row for row in rows if row["table"] == "hop"]))
    _print_choices(console, [row for row in rows if row["table"] == "choice"])
    paths = [row for row in rows if row["table"] == "path"]
    console.print(f"\n{len(paths)} paths, most used first", style="italic")
    console.print(_paths(paths[:_SHOWN_PATHS]))
    if len(paths) > _SHOWN_PATHS:
        console.print(f"... {len(paths) - _SHOWN_PATHS} more in the record")
    console.print()


def _print_choices(console: Console, rows: Rows) -> None:
    """The choices between several next hops; the others by their number alone."""
    judged = [row for row in rows if row["members"] > 1]
    alone = f"; {len(rows) - len(judged)} more showed one next hop each" if len(judged) < len(rows) else ""
    console.print(f"\n{len(judged)} choices among several next hops{alone}", style="italic")
    if judged:
        console.print(_choices(judged))


def _words(summary: dict[str, Any]) -> str:
    lost = summary["unanswered_share"]
    kept = f"every flow kept its path in {summary['rounds']} rounds" if summary["rounds"] > 1 else "one round"
    moved = summary["flows_that_moved"]
    return ", ".join(
        [
            f"{summary['flows']:,} flows over {summary['paths']:,} paths of {summary['hops']} hops",
            f"target {'reached' if summary['reached'] else 'not reached'}",
            "no probe captured" if lost is None else f"{lost:.1%} of {summary['probes']:,} probes unanswered",
            f"{moved:,} flows moved" if moved else kept,
        ]
    )


def _hops(rows: Rows) -> Table:
    table = _table("hop", "router", "flows", "share", "expected", "RTT us")
    for row in rows:
        due, rtt = row["expected_share"], row["rtt_us"]
        table.add_row(
            str(row["hop"]),
            row["router"],
            f"{row['flows']:,}",
            f"{row['share']:.2%}",
            "-" if due is None else f"{due:.2%}",
            "-" if rtt is None else f"{rtt:,.0f}",
        )
    return table


def _choices(rows: Rows) -> Table:
    table = _table("hop", "from", "flows", "used", "fullest", "chi-square", "p", "verdict")
    for row in rows:
        used = f"{row['used']} of {row['members']}"
        statistic = [f"{row['chi_square']:.2f}", f"{row['p_value']:.2g}"]
        table.add_row(
            str(row["hop"]),
            row["from"],
            f"{row['flows']:,}",
            used,
            f"{row['fullest_share']:.2%}",
            *statistic,
            row["verdict"],
        )
    return table


def _paths(rows: Rows) -> Table:
    table = _table("flows", "share", "path")
    for row in rows:
        table.add_row(f"{row['flows']:,}", f"{row['share']:.2%}", row["path"])
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(
            title, justify="left" if title in ("router", "from", "path", "verdict") else "right", no_wrap=True
        )
    return table

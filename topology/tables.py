"""The tables that `netlayer topology` prints. Rows as `Clos.describe` and `compare.compare_split` give them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from netlayer.units import format_rate
from topology.clos import Tier

Rows = Sequence[dict[str, Any]]

# A pipe has no width of its own, and rich would fold a table at 80.
_PIPE_WIDTH = 140
_COUNTS = (("servers", "servers"), ("ToR sets", "tor_sets"), ("rails", "rails"), ("pods", "pods"))


def print_fabric(name: str, levels: Rows, summary: dict[str, Any]) -> None:
    """Switches and links, level by level."""
    table = _table("level", "count", "ports down", "up", "left", "uplinks", "uplink rate", "capacity up", "path hops")
    for row in levels:
        ports = [str(row[f"ports_{which}"]) for which in ("down", "up", "left")]
        rates = [format_rate(row[key]) if row["up_links"] else "-" for key in ("up_link_bps", "up_bps")]
        links = f"{row['up_links']:,}" if row["up_links"] else "-"
        table.add_row(row["level"], f"{row['count']:,}", *ports, links, *rates, str(row["path_hops"]))
    counts = ", ".join(f"{title}: {summary[key]:,}" for title, key in _COUNTS)
    bisection = format_rate(summary["bisection_bps"])
    alone = "; one server: nothing crosses it" if summary["servers"] == 1 else ""
    note = f"{summary['switches']} switches, {summary['links']:,} directed links, bisection {bisection} each way{alone}"
    _print(f"{name} - {counts}", table, note)


def print_collisions(rows: Rows, *, split: bool, seeds: int) -> None:
    """The configured fabric, tier by tier: load, and for each hash the share of flows in collision and the excess."""
    mine = [row for row in rows if row["split"] == split]
    hashes = list(dict.fromkeys(row["hash"] for row in mine))
    table = _table("traffic", "tier", "links", "flows", "load", "fullest", *hashes)
    for traffic, tier in dict.fromkeys((row["traffic"], row["tier"]) for row in mine):
        found = {row["hash"]: row for row in mine if (row["traffic"], row["tier"]) == (traffic, tier)}
        first = next(iter(found.values()))
        figures = [f"{first['links']:,}", f"{first['flows']:,.0f}", f"{first['utilisation']:.1%}"]
        fullest = max(row["max_utilisation"] or 0 for row in found.values())
        cells = [_share_and_excess(found.get(name)) for name in hashes]
        table.add_row(traffic, tier, *figures, f"{fullest:.0%}", *cells)
    _print(f"ECMP {_with(split)}: flows in collision / excess, mean of {seeds} seeds", table)


def print_split(rows: Rows) -> None:
    """ToR uplinks with and without the split."""
    table = _table("traffic", "hash", "source", "flows in collision", "excess")
    uplinks = [row for row in rows if row["tier"] == Tier.TOR_SPINE.label]
    for traffic, name, source in dict.fromkeys((row["traffic"], row["hash"], row["source"]) for row in uplinks):
        pair = {row["split"]: row for row in uplinks if (row["traffic"], row["hash"]) == (traffic, name)}
        cells = [
            " -> ".join(f"{pair[split][key]:.2%} ± {pair[split][key + '_std']:.2%}" for split in (False, True))
            for key in ("collision_share", "excess")
        ]
        table.add_row(traffic, name, source, *cells)
    _print("ToR uplinks, without -> with the split", table)


def print_timings(rows: Rows) -> None:
    """What each stage took for the job's flows, once."""
    table = _table("stage", "items", "ms")
    for row in rows:
        table.add_row(row["stage"], f"{row['items']:,}", f"{row['time_s'] * 1e3:.1f}")
    _print("One pass over the job's flows", table)


def _share_and_excess(row: dict[str, Any] | None) -> str:
    return f"{row['collision_share']:.1%} / {row['excess']:.1%}" if row else "-"


def _with(split: bool) -> str:
    return "with the ToR split" if split else "without the ToR split"


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for title in others:
        table.add_column(title, justify="left" if title in ("tier", "hash", "source") else "right", no_wrap=True)
    return table


def _print(title: str, table: Table, note: str = "") -> None:
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
    console.print(title, style="italic")
    console.print(table)
    console.print(f"{note}\n" if note else "")

"""The tables that `netlayer topology` prints. Rows as `Clos.describe` and `compare.compare_split` give them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from netlayer.units import format_rate
from topology.clos import Tier

if TYPE_CHECKING:
    from topology.passes import Outcome

Rows = Sequence[dict[str, Any]]

# A pipe has no width of its own, and rich would fold a table at 80.
_PIPE_WIDTH = 140
_SHOWN = 6
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


def print_slowdowns(rows: Rows, *, split: bool) -> None:
    """The flows that leave their ToR, for each hash: uncongested over max-min fair rate."""
    mine = [row for row in rows if row["split"] == split and row["tier"] == "fabric"]
    hashes = list(dict.fromkeys(row["hash"] for row in mine))
    table = _table("traffic", *hashes)
    for traffic in dict.fromkeys(row["traffic"] for row in mine):
        found = [row for row in mine if row["traffic"] == traffic]
        table.add_row(traffic, *(f"{row['slowdown']:.2f} ({row['max_slowdown']:.2f})" for row in found))
    _print(f"Slowdown {_with(split)}: mean (worst) of the flows between ToRs", table)


def print_pass(once: Outcome) -> None:
    """One pass: how long its stages took, how long its traffic takes, and the links that hold it back."""
    asked = once.asked
    what = f"{asked.traffic}, {asked.hash_name}, seed {asked.seed}"
    _print_members(once.members, what)
    _print_bottlenecks(once.bottlenecks, what)
    table = _table("stage", "items", "ms")
    for row in once.timings:
        table.add_row(row["stage"], f"{row['items']:,}", f"{row['time_s'] * 1e3:.1f}")
    times = {key: f"{once.time[key]:.4g} s" for key in ("completion_s", "uncongested_s", "bound_s")}
    note = "at max-min fair rates it takes {completion_s}, uncongested {uncongested_s}; no schedule beats {bound_s}"
    _print(f"One pass: {what}", table, note.format(**times))


def _print_members(rows: Rows, what: str) -> None:
    table = _table("tier", "groups", "members", "expected share", "largest", "unused", "deviation", "if random")
    for row in rows:
        counts = [f"{row[key]:,}" for key in ("groups", "members")]
        shares = [f"{row[key]:.2%}" for key in ("expected_share", "max_share")]
        spread = [f"{row[key]:.0%}" for key in ("deviation", "binomial_deviation")]
        table.add_row(row["tier"], *counts, *shares, f"{row['unused_members']:,}", *spread)
    if rows:
        _print(f"ECMP members, actual against expected share of their group: {what}", table)


def _print_bottlenecks(rows: Rows, what: str) -> None:
    table = _table("link", "tier", "from", "to", "flows", "held back", "fair rate", "worst slowdown", "which")
    for row in rows:
        ends = [str(row[key]) for key in ("src_node", "dst_node", "flows", "held_back")]
        shown = ", ".join(map(str, row["first_flows"][:_SHOWN])) + (", ..." if row["flows"] > _SHOWN else "")
        table.add_row(
            str(row["link"]), row["tier"], *ends, format_rate(row["fair_bps"]), f"{row['slowdown']:.2f}", shown
        )
    if rows:
        _print(f"Bottlenecks between switches: {what}", table)


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

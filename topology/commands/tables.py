"""The tables of `netlayer topology describe` and `ecmp`. Levels as `Clos.describe` gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from netlayer.printing import duration, print_rows, print_table
from netlayer.units import format_rate
from topology.fabric.clos import Tier

if TYPE_CHECKING:
    from topology.ecmp.rows import TierCollisions
    from topology.fabric.wires import Wires
    from topology.single_run import SingleRun

Rows = Sequence[dict[str, Any]]

_SHOWN_FLOWS = 2
_COUNTS = (("servers", "servers"), ("ToR sets", "tor_sets"), ("rails", "rails"), ("pods", "pods"))


def print_fabric(name: str, levels: Rows, summary: dict[str, Any]) -> None:
    """Switches and links, level by level."""
    headings = ["level", "count", "ports down", "up", "left", "uplinks", "uplink rate", "capacity up", "path hops"]
    lines = []
    for row in levels:
        ports = [str(row[f"ports_{which}"]) for which in ("down", "up", "left")]
        rates = [format_rate(row[key]) if row["up_links"] else "-" for key in ("up_link_bps", "up_bps")]
        links = f"{row['up_links']:,}" if row["up_links"] else "-"
        lines.append([row["level"], f"{row['count']:,}", *ports, links, *rates, str(row["path_hops"])])
    counts = ", ".join(f"{title}: {summary[key]:,}" for title, key in _COUNTS)
    bisection = format_rate(summary["bisection_bps"])
    alone = "; one server: nothing crosses it" if summary["servers"] == 1 else ""
    note = f"{summary['switches']} switches, {summary['links']:,} directed links, bisection {bisection} each way{alone}"
    print_table(f"{name} - {counts}", headings, lines, note)


def print_traffic(rows: Rows) -> None:
    """Bytes of the job's step: over the fabric, and inside servers, where tensor parallelism makes no flow."""
    if not rows:
        return
    columns = {"kind": "what", "where": "where", "flows": "flows", "bytes": "bytes a step"}
    print_rows("Traffic of one step (predicted)", rows, columns)


def print_collisions(rows: Sequence[TierCollisions], *, split: bool | None, seeds: int) -> None:
    """Print every tier of the fabric as configured: share of flows in collision / excess, a column a hash."""
    split_rows = [row for row in rows if row.split == split]
    hashes = list(dict.fromkeys(row.hash_name for row in split_rows))
    lines = []
    for traffic, tier in dict.fromkeys((row.traffic, row.tier) for row in split_rows):
        by_hash = {row.hash_name: row for row in split_rows if (row.traffic, row.tier) == (traffic, tier)}
        first = next(iter(by_hash.values()))
        figures = [f"{first.links:,}", f"{first.flows:,.0f}", f"{first.utilisation:.1%}"]
        fullest = max(row.max_utilisation or 0 for row in by_hash.values())
        lines.append(
            [traffic, tier, *figures, f"{fullest:.0%}", *(_share_and_excess(by_hash.get(name)) for name in hashes)]
        )
    title = f"ECMP{_with(split)}: flows in collision / excess, mean of {seeds} seeds"
    print_table(title, ["traffic", "tier", "links", "flows", "load", "fullest", *hashes], lines)


def print_split(rows: Sequence[TierCollisions]) -> None:
    """ToR uplinks with and without the split."""
    uplinks = [row for row in rows if row.tier == Tier.TOR_SPINE.label]
    lines = []
    for traffic, name, source in dict.fromkeys((row.traffic, row.hash_name, row.source) for row in uplinks):
        pair = {row.split: row for row in uplinks if (row.traffic, row.hash_name) == (traffic, name)}
        both = pair[False], pair[True]
        cells = [
            " -> ".join(_mean_and_std(row, row.collision_share, row.collision_share_std) for row in both),
            " -> ".join(_mean_and_std(row, row.excess, row.excess_std) for row in both),
        ]
        lines.append([traffic, name, source, *cells])
    print_table(
        "ToR uplinks, without -> with the split", ["traffic", "hash", "source", "flows in collision", "excess"], lines
    )


def print_slowdowns(rows: Sequence[TierCollisions], *, split: bool | None) -> None:
    """Print slowdowns of the flows that leave their ToR, for each hash: uncongested over max-min fair rate."""
    fabric_rows = [row for row in rows if row.split == split and row.tier == "fabric"]
    hashes = list(dict.fromkeys(row.hash_name for row in fabric_rows))
    lines = []
    for traffic in dict.fromkeys(row.traffic for row in fabric_rows):
        of_traffic = [row for row in fabric_rows if row.traffic == traffic]
        lines.append([traffic, *(f"{row.slowdown:.2f} ({row.max_slowdown:.2f})" for row in of_traffic)])
    title = f"Slowdown{_with(split)}: mean (worst) of the flows between ToRs"
    print_table(title, ["traffic", *hashes], lines)


def print_run(run: SingleRun, wires: Wires) -> None:
    """One run: how long its stages took, how long its traffic takes, and the links that hold it back."""
    what = ", ".join(f"{run.which[key]}" for key in ("traffic", "hash")) + f", seed {run.which['seed']}"
    _print_members(run.members, what)
    print_bottlenecks(run.bottlenecks(wires), what)
    lines = [[row["stage"], f"{row['items']:,}", f"{row['time_s'] * 1e3:.1f}"] for row in run.timings]
    times = {key: duration(run.time[key]) for key in ("completion_s", "uncongested_s", "bound_s")}
    note = "at max-min fair rates it takes {completion_s}, uncongested {uncongested_s}; no schedule beats {bound_s}"
    if len(run.under_way) < len(run.flows):
        note += (
            "\n"
            f"load, collisions and rates are of the {len(run.under_way):,} of {len(run.flows):,} flows that are under "
            f"way {duration(run.at_s)} from the first start, when most are"
        )
    print_table(f"One run, times measured here: {what}", ["stage", "items", "ms"], lines, note.format(**times))


def print_bottlenecks(rows: Rows, what: str) -> None:
    """Print the links that hold most flows back; flow numbers count the rows of flows.csv."""
    lines = []
    for row in rows:
        pairs = zip(row["first_flows"], row["first_pairs"], strict=True)
        labels = [f"{flow}: {pair}" for flow, pair in list(pairs)[:_SHOWN_FLOWS]]
        counts = [str(row[key]) for key in ("flows", "held_back")]
        rates = [format_rate(row["fair_bps"]), f"{row['slowdown']:.2f}"]
        others = row.get("links", 1) - 1
        link = f"{row['from']} > {row['to']}" + (f" and {others} more that share its packets" if others else "")
        lines.append([link, row["tier"], *counts, *rates, "; ".join(labels)])
    headings = ["link", "tier", "flows", "held back", "fair rate", "worst slowdown", "first flows (rows of flows.csv)"]
    print_table(f"Bottlenecks: {what}", headings, lines)


def _print_members(rows: Rows, what: str) -> None:
    columns = {
        "tier": "tier",
        "groups": "groups",
        "members": "members",
        "expected_share": "expected share",
        "max_share": "largest share",
        "unused_members": "unused",
        "deviation": "deviation",
        "binomial_deviation": "if random",
    }
    print_rows(f"ECMP members, actual against expected share of their group: {what}", rows, columns)


def _share_and_excess(row: TierCollisions | None) -> str:
    return f"{row.collision_share:.1%} / {row.excess:.1%}" if row else "-"


def _mean_and_std(row: TierCollisions, mean: float, std: float) -> str:
    return f"{mean:.2%}" + (f" ± {std:.2%}" if row.source == "simulated" and row.seeds > 1 else "")


def _with(split: bool | None) -> str:
    return "" if split is None else " with the ToR split" if split else " without the ToR split"

"""The tables that `netlayer topology build` and `import` print. Rows as `audit` and `graph.describe` give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from netlayer.printing import print_table
from netlayer.units import format_rate, format_size

Rows = Sequence[dict[str, Any]]

_SHOWN_LINKS = 12


def print_audit(name: str, tables: Mapping[str, Rows]) -> None:
    """Ports, parts, hops, and what the design can grow to."""
    ports, parts, hops, (limits,) = (tables.get(table, []) for table in ("ports", "parts", "hops", "limits"))
    counts = ("switches", "ports", "used_down", "used_up", "left")
    print_table(
        f"{name} - {limits['variant']}: ports",
        ["level", "switches", "ports", "used down", "used up", "left", "used"],
        [[row["level"], *(f"{row[key]:,}" for key in counts), f"{row['used_share']:.0%}"] for row in ports],
    )
    _print_parts(parts)
    print_table(
        "Links between two NICs of different servers (ordered pairs)",
        ["hops", "pairs", "share"],
        [[str(row["hops"] or "no path"), f"{row['pairs']:,}", f"{row['share']:.1%}"] for row in hops],
        _describe(limits),
    )


def print_graph(source: str, levels: Rows, note: str) -> None:
    """An imported fabric, level by level."""
    lines = []
    for row in levels:
        used = _span(str(row["ports_min"]), str(row["ports_max"]))
        rates = [format_rate(row[key]) for key in ("up_link_bps_min", "up_link_bps_max")]
        up = [f"{row['up_links']:,}", _span(*rates), format_rate(row["up_bps"])] if row["up_links"] else ["-"] * 3
        lines.append([row["level"], f"{row['count']:,}", used, *up])
    print_table(source, ["level", "devices", "ports used", "uplinks", "uplink rate", "capacity up"], lines, note)


def print_servers(nics: Rows, num_servers: int) -> None:
    """NICs of an imported fabric's servers, and on how many switches each ends."""
    lines = [[row["nic"], f"{row['servers']:,}", f"{row['switches']:,}", row["first_switch"]] for row in nics]
    note = "a NIC that ends on one switch, or on one a pod, is a rail"
    print_table(f"{num_servers:,} servers", ["NIC", "servers", "switches", "first switch"], lines, note)


def print_calibration(rows: Rows, fits: Rows, source: str) -> None:
    """Print the links, largest residual of the last prediction first, and how well each prediction fits.

    Rows as `calibrate.compare` and `calibrate.summarise` give them.
    """
    links: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        links.setdefault(row["link"], {})[row["prediction"]] = row
    names = [fit["prediction"] for fit in fits]
    worst = sorted(links.values(), key=lambda link: -abs(link[names[-1]]["residual"]))
    headings, lines = ["link", "level", "counted"], []
    for fit in fits:
        headings += [fit["prediction"], f"x {fit['scale']:.4g}", "residual"]
    for link in worst[:_SHOWN_LINKS]:
        first = link[names[0]]
        cells = [first["link"], str(first["level"]), _size(first["counter_bytes"])]
        for name in names:
            row = link[name]
            cells += [_size(row["predicted_bytes"]), _size(row["scaled_bytes"]), f"{row['residual']:+.1%}"]
        lines.append(cells)
    fit_lines = [
        f"{fit['prediction']}: scale {fit['scale']:.4g} fitted over {fit['links']:,} links, rms residual "
        f"{fit['rms_residual']:.1%}, largest {fit['max_residual']:.1%}"
        for fit in fits
    ]
    more = [f"{len(links) - _SHOWN_LINKS} more links in calibration.csv"] if len(links) > _SHOWN_LINKS else []
    meant = "residual: counted less scaled prediction, over the mean counter of the links between the same levels"
    title = f"Counters ({source}) next to the predictions, farthest off first"
    print_table(title, headings, lines, "\n".join([meant, *fit_lines, *more]))


def _print_parts(parts: Rows) -> None:
    if "cost" not in parts[0]:
        print_table("Parts", ["part", "count"], [[_part(row), f"{row['count']:,}"] for row in parts])
        return
    whole = parts[-1]
    lines = [[_part(row), f"{row['count']:,}", *(_money(row[key]) for key in ("unit_price", "cost"))] for row in parts]
    lines[-1][1] = f"{whole['count']:,} GPUs"
    note = f"no price for {', '.join(whole['without'])}: what is added up is no total" if whole["without"] else ""
    cost = f"cost, {whole['currency']}" if whole["currency"] else "cost"
    print_table("Parts; the last line's price is a GPU's share", ["part", "count", "price", cost], lines, note)


def _part(row: dict[str, Any]) -> str:
    return str(row["item"]).replace("_", " ")


def _money(amount: float | None) -> str:
    return "-" if amount is None else f"{amount:,.0f}" if amount >= 100 else f"{amount:,.2f}"


def _describe(limits: dict[str, Any]) -> str:
    bisection, share = format_rate(limits["bisection_bps"]), limits["bisection_share"]
    pods = f"{limits['max_pods']} pods" if limits["max_pods"] > 1 else "one pod"
    servers, total = limits["max_servers_per_tor_set"], limits["max_servers"]
    width = limits["uplink_over_nic"]
    return (
        f"bisection {bisection} each way ({share:.0%} of the NICs'); an uplink is {width:g} NICs wide\n"
        f"at most {servers} servers under one ToR set, {total:,} in {pods} wired like this"
    )


def _span(low: str, high: str) -> str:
    return low if low == high else f"{low} - {high}"


def _size(num_bytes: float) -> str:
    return format_size(round(num_bytes))

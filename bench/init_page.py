"""The lines, the summary and the page of `bench.init_time`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from netlayer.report import Axis, Report, charts

Row = dict[str, Any]

LABEL = "store share, simulated ranks"
REAL = "real ranks"
RECORDED = "recorded"
PARTS = ("start_s", "groups_s", "backend_s", "first_s", "checkpoint_s", "step_s")
_NAMES = {"baseline": "paper's baseline", "torch": "torch", "torch-lazy": "torch, lazy gloo", "ours": "ours"}


_COMPARED = {
    "groups_cpu_s": "processor time outside the backend, over ours",
    "groups_s": "time outside the backend, waits among it, over ours",
    "standing_s": "time until the groups stand, over ours",
    "used_s": "time until each was used once, over ours",
    "whole_s": "time to the end of the first step, over ours",
}


def way_name(row: Row) -> str:
    """`ours on redis`."""
    return f"{_NAMES[row['method']]} on {'Redis' if row['store'] == 'redis' else 'TCPStore'}"


def line(row: Row) -> str:
    """A row in words, while others are still to come."""
    who = f"{row['ranks']:,} ranks, {way_name(row)}"
    if row["table"] == REAL:
        parts = ", ".join(f"{name.removesuffix('_s').replace('_', ' ')} {row[name]:.3f}" for name in PARTS)
        return f"{who}: {row['whole_s']:.3f} s behind the gate ({parts})"
    if row["table"] == RECORDED:
        agrees = (
            "as modelled" if agrees_with_model(row) else f"modelled {row['modelled']:,}, {row['backend_modelled']:,}"
        )
        backend = f"{row['backend_operations']:,} of {row['backend']}"
        return f"{who}: {row['operations']:,} store operations and {backend} recorded, {agrees}"
    return f"{who}: {row['seconds']:.3f} s, {row['operations']:,} operations ({LABEL}, {row['source']})"


def agrees_with_model(row: Row) -> bool:
    """Whether a recording has as many operations as the closed form, ours and the backend's."""
    return bool(row["operations"] == row["modelled"] and row["backend_operations"] == row["backend_modelled"])


def exponents(rows: Iterable[Row]) -> dict[str, float]:
    """By way: slope of log seconds over log ranks where it was measured, least squares; two sizes or more."""
    frame = pd.DataFrame([{**row, "way": way_name(row)} for row in rows if row["table"] == LABEL])
    found: dict[str, float] = {}
    if len(frame):
        for way, mine in frame[frame["source"] == "measured"].groupby("way", sort=False):
            if len(mine) > 1:
                found[str(way)] = float(np.polyfit(np.log(mine["ranks"]), np.log(mine["seconds"]), 1)[0])
    return found


def summary(rows: Sequence[Row]) -> list[str]:
    """What the whole comes to: growth, and torch's ways over ours by seconds and operations."""
    lines = [f"{way}: time grows with the ranks to the power {slope:.2f}" for way, slope in exponents(rows).items()]
    for part, words in _COMPARED.items():
        medians = _medians(rows, part)
        for ours in (way for way in medians if way.startswith("ours")):
            ratios = [f"{medians[way] / medians[ours]:.2f} of {way}" for way in medians if not way.startswith("ours")]
            lines.append(f"{ours}, {words}: {', '.join(ratios)}")
    largest = max((row["ranks"] for row in rows if row["table"] == LABEL), default=0)
    asked = {way_name(row): row["operations"] for row in rows if row["table"] == LABEL and row["ranks"] == largest}
    for ours in (way for way in asked if way.startswith("ours")):
        ratios = [f"{asked[way] / asked[ours]:,.2f} of {way}" for way in asked if not way.startswith("ours")]
        lines.append(f"{ours}, operations of {largest:,} ranks, over ours: {', '.join(ratios)}")
    return lines


def build_page(rows: Sequence[Row]) -> Report:
    """The report; `Report.write` puts it into a folder."""
    report = Report("Group initialisation", "paper's baseline, today's torch, and netlayer.rendezvous")
    _real(report, rows)
    _share(report, rows)
    section = report.section("What is what")
    section.text(
        "Real ranks import everything, wait at a gate, and then open the store, make all groups of the layout, use "
        "each once, load a checkpoint and take one step. `backend` is what torch spends in the constructors of its "
        "communicators; `groups` is all else until the groups stand."
    )
    section.text(
        "The store share replays what such ranks said: one process holds all connections and stands for all ranks, "
        "which think for no time; the server is another process. It is no initialisation. Cells marked predicted "
        "would have taken over five minutes: operations in closed form over the speed of the next smaller cell."
    )
    return report


def _real(report: Report, rows: Sequence[Row]) -> None:
    mine = pd.DataFrame([{**row, "way": way_name(row)} for row in rows if row["table"] == REAL])
    if not len(mine):
        return
    section = report.section("Real ranks", f"{mine['ranks'].iloc[0]} ranks on this machine.", source="measured")
    parts = mine.groupby("way", sort=False)[[*PARTS, "whole_s"]].median().reset_index()
    table = parts.rename(
        columns={name: f"{name.removesuffix('_s').replace('_', ' ')} / s" for name in parts.columns[1:]}
    )
    section.table(table, caption="Medians over ranks and turns; start is before the gate and not part of the whole.")
    long = parts.melt("way", list(PARTS[1:]), "part", "seconds")
    long["part"] = long["part"].str.removesuffix("_s").str.replace("_", " ")
    section.chart(
        charts.bars(long, "way", Axis("seconds", "seconds"), colour="part"), name="parts", caption="Behind the gate."
    )
    recorded = [row for row in rows if row["table"] == RECORDED]
    if recorded:
        columns = ("operations", "modelled", "backend", "backend_operations", "backend_modelled", "bytes")
        frame = pd.DataFrame([{"way": way_name(row), **{name: row[name] for name in columns}} for row in recorded])
        section.table(frame, caption="Store operations of all ranks, recorded by a relay, beside the closed form.")


def _share(report: Report, rows: Sequence[Row]) -> None:
    mine = pd.DataFrame([{**row, "way": way_name(row)} for row in rows if row["table"] == LABEL])
    if not len(mine):
        return
    sources = sorted(mine["source"].unique())
    section = report.section("Store share, simulated ranks", source=sources)
    section.chart(
        charts.line(
            mine,
            Axis("ranks", "simulated ranks", log=True),
            Axis("seconds", "seconds", log=True),
            colour="way",
        ),
        name="share",
        caption="Best of the repeats; cells marked predicted in the table are from the closed form.",
    )
    names = ["way", "ranks", "source", "seconds", "operations", "backend_operations", "bytes", "server_cpu_s"]
    section.table(mine.reindex(columns=names).rename(columns={"server_cpu_s": "server CPU / s"}))
    slopes = exponents(rows)
    if slopes:
        section.text("; ".join(f"{way}: exponent {slope:.2f}" for way, slope in slopes.items()))


def _medians(rows: Iterable[Row], part: str) -> dict[str, float]:
    by_way: dict[str, list[float]] = {}
    for row in rows:
        if row["table"] == REAL:
            standing_s = row["groups_s"] + row["backend_s"]
            sums = {**row, "standing_s": standing_s, "used_s": standing_s + row["first_s"]}
            by_way.setdefault(way_name(row), []).append(sums[part])
    return {way: statistics.median(values) for way, values in by_way.items()}

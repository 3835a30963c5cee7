"""The lines, the summary and the page of `bench.init_time`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from bench.init_time.rows import (
    BEHIND_GATE,
    PARTS,
    WHOLES,
    AloneRow,
    InitRow,
    Interrupted,
    RealRow,
    RecordedRow,
    ShareRow,
)
from netlayer.report import Axis, Report, charts
from netlayer.report.theme import INK

_COMPARED = {
    "groups_cpu_s": "processor time outside the backend",
    "groups_s": "time outside the backend, waits among it",
    "standing_s": "time until the groups stand",
    "used_s": "time until each was used once",
    "whole_s": "time from the gate to the end of the first step",
    "launched_s": "time from launch to the end of the first step",
}


def exponents(rows: Iterable[InitRow]) -> dict[str, float]:
    """Return by way the slope of log seconds (without think time) over log ranks, if two or more sizes are measured."""
    frame = _frame(row for row in rows if isinstance(row, ShareRow))
    slopes: dict[str, float] = {}
    if len(frame):
        for way, cells in frame[frame["source"] == "measured"].groupby("way", sort=False):
            if cells["ranks"].nunique() > 1:
                slopes[str(way)] = _slope(cells["ranks"], cells["seconds"] - cells["think_s"])
    return slopes


def _frame(rows: Iterable[RealRow | RecordedRow | ShareRow]) -> pd.DataFrame:
    """Return the columns of rows, and the name of each one's way."""
    return pd.DataFrame([{**row.to_row(), "way": row.way} for row in rows])


def _slope(x: pd.Series[Any], y: pd.Series[Any]) -> float:
    """Return the least-squares slope of log y over log x."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def summary(rows: Sequence[InitRow]) -> list[str]:
    """Summarise: growth with the ranks, and torch's ways over ours by seconds and operations."""
    shares = [row for row in rows if isinstance(row, ShareRow)]
    grows = "time but thinking" if any(row.think_s for row in shares) else "time"
    lines = [f"{way}: {grows} grows with the ranks to the power {slope:.2f}" for way, slope in exponents(rows).items()]
    for part, title in _COMPARED.items():
        lines += _compared(_medians(rows, part), title, ".4f", " s")
    alone = [row for row in rows if isinstance(row, AloneRow)]
    for torchs, ours in zip(alone[::2], alone[1::2], strict=False):
        ratio = torchs.cpu_s / ours.cpu_s
        lines.append(f"a rank of {ours.ranks:,}, its own work: {ratio:,.2f} of torch's time over ours")
    largest = max((row.ranks for row in shares), default=0)
    operations = {row.way: row.operations for row in shares if row.ranks == largest}
    return lines + _compared(operations, f"operations of {largest:,} ranks", ",", "")


def _compared(figures: dict[str, Any], title: str, spec: str, unit: str) -> list[str]:
    """Return a line for each way of ours: the others' figures over its own, or its own if there are no others."""
    others = {way: value for way, value in figures.items() if not way.startswith("ours")}
    lines = []
    for way, own in figures.items():
        if way.startswith("ours"):
            ratios = ", ".join(f"{value / own:,.2f} of {other}" for other, value in others.items())
            lines.append(f"{way}, {title}" + (f", over ours: {ratios}" if ratios else f": {own:{spec}}{unit}"))
    return lines


def build_page(rows: Sequence[InitRow]) -> Report:
    """Build the report; `Report.write` puts it into a folder."""
    report = Report("Group initialisation", "paper's baseline, today's torch, and netlayer.rendezvous")
    for row in rows:
        if isinstance(row, Interrupted):
            report.verdict("FAIL", f"Interrupted: {row.reason}; what was measured until then is below")
    return report.fill(rows, [_real, _alone, _share, _meaning])


def _real(report: Report, rows: Sequence[InitRow]) -> None:
    """Add the section on real ranks: time from launch to the first step, by parts, and the store's operations."""
    runs = _frame(row for row in rows if isinstance(row, RealRow))
    if not len(runs):
        return
    section = report.section("Real ranks", f"{runs['ranks'].iloc[0]} ranks on this machine.", source="measured")
    medians = runs.groupby("way", sort=False)[[*WHOLES, *PARTS]].median().reset_index()
    launch = {"start_s": "start", "gate_s": "gate", "whole_s": "behind the gate"}
    section.table(
        _named(medians, {"way": "way", "launched_s": "from launch", **launch}),
        caption="Seconds to the end of the first step, medians over turns: start and gate medians over ranks, the two "
        "wholes those of the last rank. Every way starts alike. The gate holds each rank until the last "
        "one is ready.",
    )
    section.chart(_stacked(medians, launch), name="launch", caption="From launch to the end of the first step.")
    section.table(
        _named(medians, {"way": "way", "whole_s": "behind the gate", **BEHIND_GATE}),
        caption="Seconds, medians over turns: the whole of the last rank, parts as medians over ranks.",
    )
    section.chart(_stacked(medians, BEHIND_GATE), name="parts", caption="What is behind the gate, by its parts.")
    recorded = _frame(row for row in rows if isinstance(row, RecordedRow))
    if len(recorded):
        columns = {
            "way": "way",
            "operations": "operations",
            "modelled": "modelled",
            "backend": "backend",
            "backend_operations": "its own",
            "backend_modelled": "its own, modelled",
            "bytes": "bytes",
        }
        section.table(
            _named(recorded, columns),
            caption="Store operations of all ranks, recorded by a relay, beside the closed form.",
        )


def _alone(report: Report, rows: Sequence[InitRow]) -> None:
    runs = pd.DataFrame([row.to_row() for row in rows if isinstance(row, AloneRow)])
    if not len(runs):
        return
    intro = (
        "Processor time until the groups of one rank stand, with torch's fake backend and a store that answers at once."
    )
    section = report.section("One rank's own work", intro, source="measured")
    runs = runs.assign(milliseconds=runs["cpu_s"] * 1e3)
    axes = Axis("ranks", "ranks of the world", log=True), Axis("milliseconds", "processor time", "ms", log=True)
    section.chart(charts.line(runs, *axes, colour="method"), name="alone", caption="Medians of the repeats.")
    wide = runs.pivot(index="ranks", columns="method", values="milliseconds").reset_index()
    wide = wide.reindex(columns=["ranks", "torch", "ours"])  # an interrupted run may have only one way
    wide["torch over ours"] = wide["torch"] / wide["ours"]
    named = {"ranks": "ranks", "torch": "torch / ms", "ours": "ours / ms", "torch over ours": "torch over ours"}
    section.table(_named(wide, named), formats=dict.fromkeys(list(named.values())[1:], ",.2f"))


def _named(frame: pd.DataFrame, columns: dict[str, str]) -> pd.DataFrame:
    """Return these columns, under the names that a reader sees."""
    return frame.reindex(columns=list(columns)).rename(columns=columns)


def _stacked(frame: pd.DataFrame, parts: dict[str, str]) -> alt.Chart | alt.LayerChart:
    long = frame.rename(columns=parts).melt("way", list(parts.values()), "part", "seconds")
    return charts.bars(long, "way", Axis("seconds", "seconds", "s"), colour="part", stacked=True)


def _share(report: Report, rows: Sequence[InitRow]) -> None:
    """Add the section on simulated ranks: seconds of the store's share by the number of ranks, and its growth."""
    cells = _frame(row for row in rows if isinstance(row, ShareRow))
    if not len(cells):
        return
    think_s = cells["think_s"].max()
    thinking = (
        f"Each rank thinks for {think_s:g} s between joining and its groups; the exponents omit it." if think_s else ""
    )
    section = report.section("Store share, simulated ranks", thinking, source=sorted(cells["source"].unique()))
    ringed = " Ringed: predicted." if "predicted" in set(cells["source"]) else ""
    section.chart(_growth(cells), name="share", caption=f"Best of the repeats.{ringed}")
    columns = {
        "way": "way",
        "ranks": "ranks",
        "source": "source",
        "seconds": "seconds",
        "operations": "operations",
        "megabytes": "MB",
        "server_cpu_s": "server CPU / s",
    }
    section.table(
        _named(cells.assign(megabytes=cells["bytes"] / 1e6), columns),
        caption="Of all ranks together, the exchange of NCCL's ids among it; bytes of requests and answers.",
        formats={"seconds": ",.3f", "MB": ",.2f", "server CPU / s": ",.2f"},
    )
    slopes = exponents(rows)
    if slopes:
        section.text("; ".join(f"{way}: exponent {slope:.2f}" for way, slope in slopes.items()))


def _meaning(report: Report, _rows: Sequence[InitRow]) -> None:
    section = report.section("Terms")
    section.text(
        "Real ranks start and import everything (`start`), wait at a gate until all are ready, and then open the "
        "store, make all groups of the layout, use each once, load a checkpoint and take one step. `backend` is what "
        "torch spends in the constructors of its communicators; `groups` is all else until the groups stand."
    )
    section.text(
        "The store share replays what such ranks said: one process holds all connections and stands for all ranks; the "
        "server is another process. It is no initialisation. Cells marked predicted would have taken over five "
        "minutes: operations and bytes in closed form, over the speed of the next smaller cell, or over the cell's own "
        "until five minutes had passed."
    )


def _growth(cells: pd.DataFrame) -> alt.Chart | alt.LayerChart:
    x, y = Axis("ranks", "simulated ranks", log=True), Axis("seconds", "seconds", "s", log=True)
    drawn = charts.line(cells, x, y, colour="way")
    predicted = cells[cells["source"] == "predicted"]
    if not len(predicted):
        return drawn
    rings = alt.Chart(predicted[["ranks", "seconds"]]).encode(x="ranks:Q", y="seconds:Q")
    ring = rings.mark_point(shape="diamond", filled=False, size=260, strokeWidth=2, color=INK)
    labels = rings.mark_text(align="right", dx=-14, color=INK).encode(text=alt.value("predicted"))
    marked: alt.LayerChart = drawn + ring + labels
    return marked


def _medians(rows: Iterable[InitRow], part: str) -> dict[str, float]:
    """Return by way the median over the turns of real ranks; `part`: a key of `_COMPARED`."""
    by_way: dict[str, list[float]] = {}
    for row in rows:
        if isinstance(row, RealRow):
            standing_s = row.parts.groups_s + row.parts.backend_s
            sums = {**asdict(row.parts), "standing_s": standing_s, "used_s": standing_s + row.parts.first_s}
            by_way.setdefault(row.way, []).append(sums[part])
    return {way: statistics.median(values) for way, values in by_way.items()}

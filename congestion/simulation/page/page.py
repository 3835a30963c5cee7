"""The page of `netlayer simulate`: laws side by side on one scenario, over time, in their tails, tier by tier.

Every sentence is computed from the rows. What was not sampled is shown as shares of the whole run. Not covered: running
anything, and more than one seed (arena.page).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from congestion.simulation.page import charts as simulate_charts
from congestion.simulation.page.findings import SOURCE, Findings, by_law, unit_of
from congestion.simulation.page.links import add_links, add_pauses
from congestion.simulation.page.verdict import calm_laws, first_laws, has_ended, on_front, verdict
from netlayer.printing import duration
from netlayer.report import Axis, Figure, Report, charts

_LOG_FROM = 30  # times between the least and the largest value, from which an axis is logarithmic
_ROUND_TRIPS = {"rtt_mean_us": "RTT mean (us)", "rtt_max_us": "RTT max (us)"}
_ON_TOP = "Where laws do alike their lines lie upon each other, and the last one's is seen."


def build_page(findings: Findings) -> Report:
    """The report; `Report.write` puts it into a folder, `Report.html` gives its text."""
    many = int(findings.rows[0]["flows"])
    report = Report(
        f"Simulation: {findings.name}",
        f"{', '.join(findings.laws)}; {many:,} flow{'s' if many > 1 else ''}, seed {findings.seed}",
    )
    report.verdict(*verdict(findings.rows, findings.bound_us, findings.seed))
    _overview(report, findings)
    _front(report, findings)
    _over_time(report, findings)
    _tails(report, findings)
    add_pauses(report, findings)
    add_links(report, findings)
    _definitions(report, findings)
    return report


def _overview(report: Report, findings: Findings) -> None:
    section = report.section("At a glance", source=SOURCE)
    section.figures(*_tiles(findings))
    scale, unit = unit_of([row["completion_us"] or 0.0 for row in findings.rows])
    times = pd.DataFrame([_times(row, findings.bound_us, scale, unit) for row in findings.rows])
    section.table(
        times,
        formats={"over the bound": ".3f"} if findings.bound_us else {},
        caption=f"The run's completion time and its flows' (FCT), all in {unit}: the least, the median, the 99th and "
        "99.9th percentile and the largest of the flows that ended.",
    )
    section.table(
        pd.DataFrame([_slowdowns(row) for row in findings.rows]),
        caption="Slowdown: a flow's time over its time alone on its path. Goodput is all payload over the completion "
        "time; Jain's index is of the flows' goodputs, 1 where all have the same.",
    )
    section.table(
        pd.DataFrame([_counts(row) for row in findings.rows]),
        formats={"paused": ".2%", "busiest link": ".1%"},
        caption="Pauses are those sent; paused: port-time in which ports may not send. Marks are ECN's; CNPs are the "
        "notices of them that receivers sent.",
    )


def _tiles(findings: Findings) -> list[Figure]:
    tiles, several = [], len(findings.rows) > 1
    if findings.ended:
        best = min(findings.ended, key=lambda row: float(row["completion_us"]))
        took = duration(best["completion_us"] / 1e6)
        tiles.append(
            Figure("Completed first", ", ".join(first_laws(findings.ended)), "", f"after {took}")
            if several
            else Figure("Completed after", took)
        )
    ranked = findings.ended or findings.rows  # what never ends may pause less for it
    calm = min(ranked, key=lambda row: float(row["pause_share"]))
    share = f"{calm['pause_share']:.2%}"
    if several and any(row["pause_share"] for row in ranked):
        tiles.append(Figure("Paused least", ", ".join(calm_laws(ranked)), "", f"{share} of port-time"))
    else:
        tiles.append(Figure("Port-time paused", share if calm["pause_share"] else "none"))
    if findings.bound_us:
        tiles.append(Figure("Lower bound", duration(findings.bound_us / 1e6), "", "no law completes sooner"))
    return tiles


def _times(row: Mapping[str, Any], bound_us: float | None, scale: float, unit: str) -> dict[str, Any]:
    def scaled(key: str) -> float | None:
        return None if row[key] is None else row[key] / scale

    known = row["completion_us"] is not None and has_ended(row)
    over = {"over the bound": row["completion_us"] / bound_us if known else None} if bound_us else {}
    spread = {"min": "FCT min", "median": "median", "p99": "p99", "p999": "p99.9", "max": "max"}
    return {
        "law": row["cc"],
        "ended": f"{row['ended']:,} of {row['flows']:,}",
        f"completion ({unit})": scaled("completion_us") if known else None,
        **over,
        **{title: scaled(f"fct_{key}_us") for key, title in spread.items()},
    }


def _slowdowns(row: Mapping[str, Any]) -> dict[str, Any]:
    spread = {"min": "slowdown min", "median": "median", "p99": "p99", "p999": "p99.9", "max": "max"}
    rate = row["goodput_bps"]
    return {
        "law": row["cc"],
        **{title: row[f"slowdown_{key}"] for key, title in spread.items()},
        "goodput (Gb/s)": None if rate is None else rate / 1e9,
        "Jain": row["jain"],
    }


def _counts(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "law": row["cc"],
        "pauses": row["pauses"],
        "paused": row["pause_share"],
        "marks": row["ecn_marked"],
        "CNPs": row["cnps"],
        "drops": row["drops"],
        "resent": row["retransmissions"],
        "largest queue (KiB)": row["max_queue_bytes"] / 1024,
        "busiest link": row["utilisation_max"],
        **{title: row[key] for key, title in _ROUND_TRIPS.items() if key in row},
    }


def _front(report: Report, findings: Findings) -> None:
    """Add the section on laws that no other one beats in both completion time and pauses (the Pareto front)."""
    ended = findings.ended
    if len(ended) < 2:
        return
    members = ", ".join(f"`{law}`" for law in on_front(ended))
    section = report.section("Completion time against pauses", f"On the front: {members}.", source=SOURCE)
    rows = pd.DataFrame(ended).rename(columns={"cc": "law"})
    if not rows["pause_share"].any():
        section.text("No port was paused in any run, so completion time alone orders the laws: see the table above.")
        return
    section.chart(
        simulate_charts.front(rows, findings.laws)[0],
        name="front",
        caption="Lower is faster, left is calmer; no law is both faster and calmer than one on the front, which the "
        "dashed line joins.",
    )
    missing = len(findings.rows) - len(ended)
    if missing:
        section.note(f"{missing} of {len(findings.rows)} laws left out: not all of their flows ended.")


def _over_time(report: Report, findings: Findings) -> None:
    """Add the charts of rate, longest queue and fairness over time, if the runs were sampled."""
    if findings.samples is None or findings.samples.empty:
        return
    section = report.section("Over time", _ON_TOP if len(findings.laws) > 1 else "", source=SOURCE)
    frame = by_law(findings.samples, findings.laws)
    frame = frame.assign(time_s=(frame["time_us"] - findings.begin_us) / 1e6)
    time = Axis("time_s", "Time since the first start", "s")
    drawn = {
        "rate": (
            Axis("rate_bps", "Rate", "b/s", zero=True),
            "What all receivers acknowledged in each interval, all flows together.",
        ),
        "queue": (Axis("queue_bytes", "Longest queue", "bytes", zero=True), "The longest queue of any port."),
        "fairness": (
            Axis("jain", "Jain's index", zero=True),
            "Fairness of the flows under way, by what each moved in the interval: 1 where all moved the same.",
        ),
    }
    for name, (axis, caption) in drawn.items():
        known = frame.dropna(subset=axis.column)
        if len(known) and (name != "fairness" or int(frame["flows"].max()) > 1):
            chart = charts.line(known, time, axis, colour="cc", title=axis.words)
            section.chart(chart, name=name, caption=caption)
    if findings.note:
        section.note(findings.note)


def _tails(report: Report, findings: Findings) -> None:
    section = report.section("Flow completion times", source=SOURCE)
    flows = by_law(findings.flows, findings.laws)
    ended = flows.dropna(subset="fct_us")
    if ended.empty:
        section.text("No flow ended.")
        return
    if len(flows) == len(findings.rows):
        section.text("Of one flow there is no distribution: its time is in the table above.")
        return
    ended = ended.assign(fct_s=ended["fct_us"] / 1e6)
    kinds = {
        "fct": (Axis("fct_s", "Flow completion time", "s", log=_is_wide(ended["fct_s"])), "Flow completion time"),
        "slowdown": (Axis("slowdown", "Slowdown", log=_is_wide(ended["slowdown"])), "Slowdown, 1 on an idle fabric"),
    }
    left = len(flows) - len(ended)
    note = f" {left:,} of {len(flows):,} did not end and are left out." if left else ""
    for name, (axis, title) in kinds.items():
        section.chart(
            charts.cdf(ended, axis, colour="cc", counted="flows", title=title),
            name=name,
            caption=f"Share of flows that took at most so long.{note}",
        )


def _definitions(report: Report, findings: Findings) -> None:
    section = report.section("Definitions and limits")
    section.text(
        "Completion time is from the first start to the last flow's last ACK. The lower bound is the time that the "
        "most loaded link needs for what is routed over it, or the longest chain of flows alone; it is not always "
        "reachable. A link is one direction of a cable, counted where it is sent."
    )
    section.note(
        "Nothing here is measured: it is a packet simulation, and of one seed. What differs by a few percent may "
        "differ the other way with another; `netlayer arena` compares laws over many seeds."
    )
    if any("measured" in row for row in findings.rows):
        section.note("Tables count from the end of the warm-up; curves of flows and over time show the whole run.")
    if findings.config:
        section.keyvalues(findings.config)
    if findings.command:
        section.code(findings.command)


def _is_wide(values: pd.Series[Any]) -> bool:
    return bool(values.min() > 0 and values.max() / values.min() >= _LOG_FROM)

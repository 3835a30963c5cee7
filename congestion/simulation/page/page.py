"""The page of `netlayer simulate`: laws side by side on one scenario, over time, in their tails, tier by tier.

Every sentence is computed from the rows. What was not sampled is shown as shares of the whole run. Not covered: running
anything, and more than one seed (arena.page).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pandas as pd

from congestion.simulation.page import charts as simulate_charts
from congestion.simulation.page.verdict import calm_laws, first_laws, has_ended, on_front, verdict
from netlayer.printing import duration
from netlayer.report import Axis, Figure, Report, Section, charts

SOURCE: Final = "simulated"
_LOG_FROM = 30  # times between the least and the largest value, from which an axis is logarithmic
_ROUND_TRIPS = {"rtt_mean_us": "RTT mean (us)", "rtt_max_us": "RTT max (us)"}
_ON_TOP = "Where laws do alike their lines lie upon each other, and the last one's is seen."
_LINKS = 24
_LINK_CHARTS = 6
_IDLE = 0.02  # of the busiest link's load
_CAUSING = 8
_CAUSES = (
    "Why ports were paused: a switch stops a port once too much that came in there waits, and the longest queue in "
    "that moment was for this link. Set off: while the link could send, so its own load is the cause; passed on: while "
    f"it was stopped itself, so the cause lies behind it. The {_CAUSING} first links of each law."
)
_PAUSE_ROWS = (
    "A tier is one direction of cables: from where they are sent, to where. Ports paused: those that were stopped at "
    "some time; pauses sent: by the ports of this tier to the other end of their cables, which stops; longest: the "
    "longest that one port was stopped, in sum; in an interval: the most ports that were stopped in one."
)


@dataclass(frozen=True, eq=False)
class Findings:
    """Input of the page.

    Args:
        name: what ran.
        rows: one a law: `cc`, `completed`, and `measures.summary`.
        flows, ports: `measures.flow_frame` and `port_frame` of all laws, `cc` before them.
        samples, links, tiers: `Samples.frame`, `LinkSamples.links` and `tiers` likewise; None where not sampled.
        bound_us: what no law can be faster than; None where it is not known.
        seed: of the runs.
        config: as it was run with.
        command: that ran it.
        note: on what was sampled.
    """

    name: str
    rows: Sequence[Mapping[str, Any]]
    flows: pd.DataFrame
    ports: pd.DataFrame
    samples: pd.DataFrame | None = None
    links: pd.DataFrame | None = None
    tiers: pd.DataFrame | None = None
    bound_us: float | None = None
    seed: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""
    note: str = ""

    @property
    def laws(self) -> list[str]:
        return list(dict.fromkeys(row["cc"] for row in self.rows))

    @property
    def begin_us(self) -> float:
        """The first start, which is 0 on the page's axes of time."""
        return float(self.flows["start_us"].min())

    @property
    def ended(self) -> list[Mapping[str, Any]]:
        """Rows of the laws whose flows all ended."""
        return [row for row in self.rows if has_ended(row)]


def build_page(findings: Findings) -> Report:
    """The report; `Report.write` puts it into a folder, `Report.html` gives its text."""
    many = int(findings.rows[0]["flows"])
    report = Report(
        f"Simulation: {findings.name}",
        f"{', '.join(findings.laws)}; {many:,} flow{'s' if many > 1 else ''}, seed {findings.seed}",
    )
    report.verdict(*verdict(findings.rows, findings.bound_us, findings.seed))
    return report.fill(findings, [_overview, _front, _over_time, _tails, _pauses, _links, _definitions])


def _overview(report: Report, findings: Findings) -> None:
    section = report.section("At a glance", source=SOURCE)
    section.figures(*_tiles(findings))
    scale, unit = _unit_of([row["completion_us"] or 0.0 for row in findings.rows])
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
    """Return the figures at the top of the page: the law that completed first, the least paused, the lower bound."""
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
        section.note(f"{missing} of {len(findings.rows)} laws omitted: not all of their flows ended.")


def _over_time(report: Report, findings: Findings) -> None:
    """Add the charts of rate, longest queue and fairness over time, if the runs were sampled."""
    if findings.samples is None or findings.samples.empty:
        return
    section = report.section("Over time", _ON_TOP if len(findings.laws) > 1 else "", source=SOURCE)
    frame = _by_law(findings.samples, findings.laws)
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
    flows = _by_law(findings.flows, findings.laws)
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
    note = f" {left:,} of {len(flows):,} did not end and are omitted." if left else ""
    for name, (axis, title) in kinds.items():
        section.chart(
            charts.cdf(ended, axis, colour="cc", counted="flows", title=title),
            name=name,
            caption=f"Share of flows that took at most so long.{note}",
        )


def _pauses(report: Report, findings: Findings) -> None:
    section = report.section("Where it pauses", source=SOURCE)
    ports = _by_law(findings.ports, findings.laws)
    if not ports["pause_share"].any() and not ports["pauses"].any():
        section.text("No port was paused in any run.")
        return
    if findings.tiers is None or findings.tiers.empty:
        share = ports.groupby(["cc", "tier"], sort=False, observed=True)["pause_share"].mean().reset_index()
        axis = Axis("pause_share", "Port-time paused", "share")
        section.chart(
            charts.heatmap(share, Axis("tier", "Ports of"), Axis("cc", "Law"), axis),
            name="pause_tiers",
            caption="Share of the whole run in which a port of the tier may not send; `--sample-us` shows when.",
        )
    else:
        _pauses_over_time(section, findings)
    section.table(_pause_rows(ports, findings.tiers), formats={"paused": ".2%"}, caption=_PAUSE_ROWS)
    section.table(_causes(ports), caption=_CAUSES)


def _pauses_over_time(section: Section, findings: Findings) -> None:
    """Add the charts of paused port-time by tier over time, and of how many ports pauses reach."""
    tiers = findings.tiers
    assert tiers is not None
    begin, end = findings.begin_us, float(tiers["time_us"].max())
    parts, rows = [], []
    names = [tier for tier in tiers["tier"].unique() if tiers.loc[tiers["tier"] == tier, "pause_share"].any()]
    for law in findings.laws:
        for tier in names:
            series = tiers[(tiers["cc"] == law) & (tiers["tier"] == tier)].sort_values("time_us")
            if series.empty:
                continue
            rows.append(f"{law}: {tier}")
            parts.append(_relative(series, "pause_share", begin, end).assign(row=rows[-1]))
    if not parts:
        return
    section.chart(
        simulate_charts.bands(pd.concat(parts), rows, Axis("pause_share", "Port-time paused", "share")),
        name="pause_tiers",
        caption="Share of the tier's port-time in which a port may not send; tiers that never were are omitted. "
        "Pauses spread from the tier that sends into the congested port towards the senders.",
    )
    spread = tiers.groupby(["cc", "time_us"], sort=False)["reached_ports"].sum().reset_index()
    spread = _by_law(spread, findings.laws).assign(time_s=lambda frame: (frame["time_us"] - begin) / 1e6)
    section.chart(
        charts.line(
            spread,
            Axis("time_s", "Time since the first start", "s"),
            Axis("reached_ports", "Ports paused", zero=True),
            colour="cc",
            title="How far the tree of pauses spreads",
        ),
        name="pause_spread",
        caption="Ports that were stopped at some time in each interval, all tiers together.",
    )


def _causes(ports: pd.DataFrame) -> pd.DataFrame:
    """Return for each law the links that most pauses were due to."""
    caused = ports.assign(due=ports["pauses_set_off"] + ports["pauses_passed_on"])
    caused = caused[caused["due"] > 0].sort_values("due", ascending=False, kind="stable")
    most = caused.groupby("cc", sort=False, observed=True).head(_CAUSING).sort_values("cc", kind="stable")
    return pd.DataFrame(
        {
            "law": most["cc"].astype(str),
            "longest queue for": most["src"] + " -> " + most["dst"],
            "set off": most["pauses_set_off"],
            "passed on": most["pauses_passed_on"],
            "at most (KiB)": most["max_queue_bytes"] / 1024,
        }
    )


def _pause_rows(ports: pd.DataFrame, tiers: pd.DataFrame | None) -> pd.DataFrame:
    scale, unit = _unit_of(ports["paused_us"])
    rows = []
    for (law, tier), own_ports in ports.groupby(["cc", "tier"], sort=False, observed=True):
        if not (own_ports["paused_us"].any() or own_ports["pauses"].any()):
            continue
        row = {
            "law": law,
            "tier": tier,
            "ports": len(own_ports),
            "ports paused": int((own_ports["paused_us"] > 0).sum()),
            "pauses sent": int(own_ports["pauses"].sum()),
            "paused": float(own_ports["pause_share"].mean()),
            f"longest ({unit})": float(own_ports["paused_us"].max()) / scale,
        }
        if tiers is not None:
            at_once = tiers.loc[(tiers["cc"] == law) & (tiers["tier"] == tier), "reached_ports"]
            row["in an interval"] = int(at_once.max()) if len(at_once) else 0
        rows.append(row)
    return pd.DataFrame(rows)


def _links(report: Report, findings: Findings) -> None:
    """Add the section on the busiest links over time; without samples of links, over the whole run."""
    section = report.section("Links", source=SOURCE)
    if findings.links is None or findings.links.empty:
        _whole_links(section, findings)
        return
    links = findings.links
    begin, end = findings.begin_us, float(links["time_us"].max())
    load = links.groupby("link", sort=False)["utilisation"].sum()
    busiest = _busiest(load)
    for number, law in enumerate(findings.laws[:_LINK_CHARTS]):
        law_links = links[(links["cc"] == law) & links["link"].isin(busiest)]
        parts = [
            _relative(one.sort_values("time_us"), "utilisation", begin, end).assign(row=name)
            for name, one in law_links.groupby("link", sort=False)
        ]
        if not parts:
            continue
        axis = Axis("utilisation", "Utilisation", "share")
        section.chart(
            simulate_charts.bands(pd.concat(parts), busiest, axis, until_s=(end - begin) / 1e6, top=1.0, title=law),
            name=f"links_{number}",
            caption=f"The {len(busiest)} busiest links of {_num_links(findings)} over time, the same for every law, "
            "the busiest on top; 100% is line rate, headers included.",
        )
    if len(findings.laws) > _LINK_CHARTS:
        section.note(f"The first {_LINK_CHARTS} of {len(findings.laws)} laws are drawn.")


def _busiest(load: pd.Series[float]) -> list[str]:
    """The links that are drawn, the busiest first; idle ones, which carry ACKs alone, tell nothing."""
    ranked = load.sort_values(ascending=False, kind="stable").head(_LINKS)
    return [str(name) for name in ranked.index[ranked > _IDLE * float(ranked.iloc[0])]] or [str(ranked.index[0])]


def _num_links(findings: Findings) -> str:
    return f"{len(findings.ports) // max(1, findings.ports['cc'].nunique()):,}"


def _whole_links(section: Section, findings: Findings) -> None:
    """Draw the busiest links without samples: each law's share of the whole run."""
    ports = _by_law(findings.ports, findings.laws)
    named = ports.assign(link=ports["src"] + " -> " + ports["dst"])
    mean = named.groupby(["cc", "link"], sort=False, observed=True)["utilisation"].max().reset_index()
    load = mean.groupby("link", sort=False)["utilisation"].sum()
    busiest = _busiest(load)
    mean = mean[mean["link"].isin(busiest)]
    mean = mean.assign(rank=mean["link"].map({name: at for at, name in enumerate(busiest)})).sort_values(
        ["rank"], kind="stable"
    )
    section.chart(
        charts.heatmap(
            mean, Axis("cc", "Law"), Axis("link", "Link"), Axis("utilisation", "Utilisation of the whole run", "share")
        ),
        name="links",
        caption=f"The {len(busiest)} busiest of {_num_links(findings)} links. `--sample-us` shows them over time.",
    )


def _relative(frame: pd.DataFrame, value: str, begin_us: float, end_us: float) -> pd.DataFrame:
    """`page.charts.in_bins`, time counted from `begin_us`."""
    times = frame["time_us"].to_numpy(dtype=float)
    first = max(begin_us, 2 * times[0] - times[1]) if len(times) > 1 else begin_us
    if first >= times[0]:
        first = times[0] - 1e-6
    bins = simulate_charts.in_bins(frame, value, first, end_us)
    return bins.assign(**{name: np.maximum(bins[name] - begin_us / 1e6, 0) for name in ("from_s", "to_s")})


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


def _by_law(frame: pd.DataFrame, laws: list[str]) -> pd.DataFrame:
    """Rows in the page's order of laws, so that a law has one colour in every chart."""
    return frame.assign(cc=pd.Categorical(frame["cc"], laws)).sort_values("cc", kind="stable")


def _unit_of(times_us: Any) -> tuple[float, str]:
    """Microseconds a unit, and the unit, that suit the largest of these times."""
    most = max([float(one) for one in times_us], default=0.0)
    return (1e6, "s") if most >= 1e7 else (1e3, "ms") if most >= 1e4 else (1.0, "us")


def _is_wide(values: pd.Series[Any]) -> bool:
    return bool(values.min() > 0 and values.max() / values.min() >= _LOG_FROM)

"""Pauses by place and utilisation of links: two sections of the page of `netlayer simulate`."""

from __future__ import annotations

import numpy as np
import pandas as pd

from congestion.simulation.page import charts as simulate_charts
from congestion.simulation.page.findings import SOURCE, Findings, by_law, unit_of
from netlayer.report import Axis, Report, Section, charts

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


def add_pauses(report: Report, findings: Findings) -> None:
    section = report.section("Where it pauses", source=SOURCE)
    ports = by_law(findings.ports, findings.laws)
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
        caption="Share of the tier's port-time in which a port may not send; tiers that never were are left out. "
        "Pauses spread from the tier that sends into the congested port towards the senders.",
    )
    spread = tiers.groupby(["cc", "time_us"], sort=False)["reached_ports"].sum().reset_index()
    spread = by_law(spread, findings.laws).assign(time_s=lambda frame: (frame["time_us"] - begin) / 1e6)
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
    scale, unit = unit_of(ports["paused_us"])
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


def add_links(report: Report, findings: Findings) -> None:
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
    ports = by_law(findings.ports, findings.laws)
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

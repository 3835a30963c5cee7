"""The sections of the report about what can be changed or go wrong: placements, failures, cures of collisions."""

from __future__ import annotations

from typing import Any

import altair as alt
import pandas as pd

from netlayer.report import Axis, Chart, Report, charts
from netlayer.report.theme import MUTED
from netlayer.units import format_rate
from topology.report.data import DRAWS, HASH, KNOB_SEEDS, OPTIMISE_S, SINGLES, TOGETHER, Findings

# Placements with more than this times the median of the bytes between pods would flatten the picture of the rest.
_FLATTENS = 4


def write(report: Report, findings: Findings) -> None:
    """Write the sections on placements, failures and remedies."""
    if findings.placements:
        _placements(report, findings)
    _failures(report, findings)
    _cures(report, findings)


def _placements(report: Report, findings: Findings) -> None:
    rows = pd.DataFrame(findings.placements)
    section = report.section(
        "Where the ranks stand",
        "`given` is rank order, `packed` fills the roomiest ToR sets first, `paper` keeps each data-parallel group in "
        "as few pods and ToR sets as it can (MegaScale 3.2, 3.6), `pipeline-first` puts the stages of one pipeline "
        f"side by side. {_paper_against_given(rows)}",
        source="simulated",
    )
    _draw_bytes(section, rows)
    section.chart(
        charts.bars(rows, Axis("placement", "Placement"), Axis("time_s", "Communication of a step", "s")),
        name="placement_time",
        caption="Each phase until its last flow ends at max-min fair rates, phases after one another; median of "
        f"{rows['seeds'].iloc[0]} seeds.",
    )
    spread = zip(rows["time_min_s"] * 1e3, rows["time_max_s"] * 1e3, strict=True)
    table = rows.assign(time_ms=rows["time_s"] * 1e3, range=[f"{low:.0f} to {high:.0f}" for low, high in spread])
    table[["cross_tor_bytes", "cross_pod_bytes"]] /= 1e12
    costs = {
        "placement": "placement",
        "mean_hops": "hops a byte",
        "cross_tor_bytes": "TB between ToRs",
        "cross_pod_bytes": "TB between pods",
        "time_ms": "communication ms",
        "range": "least to most",
    }
    formats = {"hops a byte": ".3f", "TB between ToRs": ".2f", "TB between pods": ".2f", "communication ms": ".1f"}
    section.table(table[list(costs)].rename(columns=costs), formats=formats, caption="Of one step.")
    hit = {"placement": "placement"}
    for phase in ("ring", "pipeline"):
        hit |= {f"{phase}_collision_share": f"{phase} flows in collision", f"{phase}_excess": f"{phase} excess"}
    hit = {key: label for key, label in hit.items() if key in table}
    shares = dict.fromkeys(list(hit.values())[1:], ".1%")
    section.table(table[list(hit)].rename(columns=hit), formats=shares, caption="On any tier; means of the seeds.")
    improved = findings.command("place", "--strategy", "random", "--hash", HASH, "--seconds", f"{OPTIMISE_S:g}")
    section.code(f"{findings.command('place', '--no-optimise', '--hash', HASH)}\n# random, optimised\n{improved}")


def _draw_bytes(section: Any, rows: pd.DataFrame) -> None:
    total = rows["cross_pod_bytes"]
    if not total.any():
        section.text("No byte crosses between pods.")
        return
    flattens = total > _FLATTENS * total.median()
    traffic_names = {"cross_pod_ring_bytes": "data-parallel rings", "cross_pod_pipeline_bytes": "pipeline"}
    across = rows[~flattens].melt(
        id_vars="placement", value_vars=list(traffic_names), var_name="traffic", value_name="terabytes"
    )
    across["traffic"] = across["traffic"].map(traffic_names)
    across["terabytes"] /= 1e12
    too_many = zip(rows.loc[flattens, "placement"], total[flattens] / 1e12, strict=True)
    omitted = ", ".join(f"{name} ({terabytes:.0f} TB)" for name, terabytes in too_many)
    section.chart(
        charts.bars(
            across,
            Axis("placement", "Placement"),
            Axis("terabytes", "Bytes between pods a step", "TB"),
            colour="traffic",
            stacked=True,
        ),
        name="placement_bytes",
        caption="Bytes a step that cross between pods."
        + (f" Not drawn, for it would flatten the rest: {omitted}." if omitted else ""),
    )


def _paper_against_given(rows: pd.DataFrame) -> str:
    """Name the figures in which the paper's order is better here than rank order, and those in which it is worse."""
    paper, rank_order = (rows[rows["placement"] == name].iloc[0] for name in ("paper", "given"))
    named = {
        "cross_pod_ring_bytes": "ring bytes between pods",
        "cross_pod_pipeline_bytes": "pipeline bytes between pods",
        "cross_tor_bytes": "bytes between ToRs",
        "mean_hops": "hops a byte",
        "time_s": "time of communication",
    }
    changes: dict[str, list[str]] = {"better": [], "worse": []}
    for key, label in named.items():
        if paper[key] != rank_order[key]:
            change = f"{paper[key] / rank_order[key] - 1:+.1%}" if rank_order[key] else "from none"
            changes["worse" if paper[key] > rank_order[key] else "better"].append(f"{label} ({change})")
    if not any(changes.values()):
        return "On this fabric `paper` costs the same as `given`."
    parts = [f"{word} in {', '.join(figures)}" for word, figures in changes.items() if figures]
    return f"On this fabric `paper` is {'; '.join(parts)} than `given`."


def _failures(report: Report, findings: Findings) -> None:
    rows = pd.DataFrame(findings.worst)
    alone, several = rows[rows["together"] == 1], rows[rows["together"] > 1].sort_values(["kind", "together"])
    section = report.section(
        "Failures",
        "ECMP groups shrink to the members that still lead to the destination. Slowdown: communication of a step over "
        "the same without failures; below 1 the smaller groups happen to hash better. A NIC, its optic, a ToR or a "
        "rail that is gone leaves flows without a path: the job stops until its ranks are moved, and has no slowdown.",
        source="simulated",
    )
    seeds = f"{findings.seeds} seeds from {findings.seed}"
    section.table(
        _failure_table(alone, several=False),
        caption=f"One part at a time, up to {SINGLES} of each kind, {seeds}; losses are the largest, slowdown is the "
        "median.",
        formats={**_FAILURE_FORMATS, "pairs cut off": ".3%"},
    )
    commands = [findings.command("whatif", "--hash", HASH, "--sample", SINGLES, "--seeds", findings.seeds)]
    if not several.empty:
        survived = several.dropna(subset="slowdown_median")
        if not survived.empty:
            section.chart(
                _range_chart(survived),
                name="failures_together",
                caption=f"Random parts at one time: median, least and most of {DRAWS} draws x {seeds}.",
            )
        section.table(
            _failure_table(several, several=True),
            caption=f"Several parts at one time, {DRAWS} draws x {seeds}; slowdown is the median.",
            formats=_FAILURE_FORMATS,
        )
        for kind, _ in TOGETHER:
            numbers = several.loc[several["kind"] == kind, "together"]
            options = ("--hash", HASH, "--sample", DRAWS, "--seeds", findings.seeds, "--fail", kind, "--together")
            commands += [findings.command("whatif", *options, number) for number in numbers]
    section.code("\n".join(commands))


_FAILURE_FORMATS = {"stops the job": ".0%"}


def _failure_table(rows: pd.DataFrame, *, several: bool) -> pd.DataFrame:
    lost = zip(rows["lost_bps_max"], rows["lost_share_max"], strict=True)
    slow = zip(rows["slowdown_median"], rows["slowdown_min"], rows["slowdown_max"], strict=True)
    formatted = rows.assign(
        lost=[f"{format_rate(bps)} ({share:.2%})" for bps, share in lost],
        slowdown=[
            "stops" if pd.isna(median) else f"{median:.3f} ({low:.3f} to {high:.3f})" for median, low, high in slow
        ],
    )
    headings = {
        "kind": "fails",
        **({"together": "parts"} if several else {}),
        "cases": "cases",
        "lost": "capacity lost (of a tier)",
        **({} if several else {"unreachable_share_max": "pairs cut off"}),
        "stopped_flows_max": "flows stopped",
        "stops_share": "stops the job",
        "slowdown": "slowdown (range)",
    }
    return formatted[list(headings)].rename(columns=headings)


def _range_chart(rows: pd.DataFrame) -> Chart:
    """Median and range of each kind and number, side by side so that none hides another."""
    rows = rows.assign(what=[f"{number} {kind}" for number, kind in zip(rows["together"], rows["kind"], strict=True)])
    order = list(rows["what"])
    x = alt.X(
        "what:N",
        sort=order,
        axis=alt.Axis(title="Parts that fail at one time", labelAngle=-35, labelOverlap=False, ticks=False),
    )
    scale = alt.Scale(zero=False, nice=True)
    base = alt.Chart(rows).encode(x=x, color=alt.Color("kind:N", sort=None, legend=alt.Legend(title=None)))
    tooltip = [alt.Tooltip("what:N", title="fails"), alt.Tooltip("cases:Q")]
    for key, title in (("slowdown_median", "median"), ("slowdown_min", "least"), ("slowdown_max", "most")):
        tooltip.append(alt.Tooltip(f"{key}:Q", title=title, format=".3f"))
    tooltip.append(alt.Tooltip("stops_share:Q", title="stops the job", format=".0%"))
    y = alt.Y("slowdown_min:Q", scale=scale, axis=alt.Axis(title="Slowdown", tickCount=7))
    span = base.mark_rule(strokeWidth=3, opacity=0.55).encode(y=y, y2="slowdown_max:Q", tooltip=tooltip)
    dots = base.mark_point(filled=True, size=90, opacity=1).encode(y="slowdown_median:Q", tooltip=tooltip)
    whole = alt.Chart(pd.DataFrame({"y": [1.0]})).mark_rule(strokeDash=[5, 4], color=MUTED).encode(y="y:Q")
    drawn: Any = alt.layer(whole, span, dots)
    return drawn.properties(width="container", height=300)  # type: ignore[no-any-return]


def _cures(report: Report, findings: Findings) -> None:
    section = report.section(
        "What lowers collisions",
        "A UDP source port for each queue pair, planned against the switches' hash; and switch seeds, offsets and "
        f"queue pairs a connection on a grid. {_polarisation(findings)}",
        source="simulated",
    )
    cures = pd.DataFrame(findings.cures)
    commands = []
    if not cures.empty:
        bars = cures.melt(
            id_vars="traffic", value_vars=["excess_before", "excess_after"], var_name="ports", value_name="excess"
        )
        bars["ports"] = bars["ports"].map({"excess_before": "as drivers derive them", "excess_after": "planned"})
        section.chart(
            charts.bars(bars, Axis("traffic", "Traffic"), Axis("excess", "Excess", "share"), colour="ports"),
            name="port_plan",
            caption="Excess over all tiers that a hash chooses, before and after.",
        )
        columns = {"traffic": "traffic", "queue_pairs": "queue pairs", "changed": "to change"}
        columns |= {f"collision_share_{when}": f"colliding {when}" for when in ("before", "after")}
        columns |= {f"max_utilisation_{when}": f"fullest link {when}" for when in ("before", "after")}
        table = cures[list(columns)].rename(columns=columns)
        section.table(table, formats={name: ".1%" for name in table.columns if "before" in name or "after" in name})
        options = [word for name in cures["traffic"] for word in ("--traffic", name)]
        commands.append(findings.command("cure ports", *options, "--hash", HASH))
    headings = {
        "seed": "seed",
        "offset_bits": "offset bits",
        "qps": "queue pairs",
        "excess": "worst excess",
        "ring_collision_share": "ring colliding",
        "pipeline_collision_share": "pipeline colliding",
        "pipeline_core_links_used": "core links used",
        "permutation_collision_share": "colliding",
        "permutation_core_links_used": "core links used",
        "time_ms": "time ms, at most",
    }
    knobs = pd.DataFrame(findings.knobs).assign(time_ms=lambda rows: rows["time_bound_s"] * 1e3)
    knobs = knobs[[key for key in headings if key in knobs]].rename(columns=headings)
    shares = [name for name in knobs.columns if name.endswith(("excess", "colliding", "used"))]
    section.table(
        knobs,
        formats={**dict.fromkeys(shares, ".2%"), "time ms, at most": ".1f"},
        max_rows=12,
        caption="Switch seeds, offsets and queue pairs a connection, least excess of the worse phase first.",
    )
    commands.append(findings.command("cure knobs", "--hash", HASH, "--seeds", KNOB_SEEDS))
    section.code("\n".join(commands))


def _polarisation(findings: Findings) -> str:
    """Say what the grid shows of offsets; nothing where there is no core."""
    knobs = pd.DataFrame(findings.knobs)
    column = "pipeline_core_links_used"
    if knobs.empty or column not in knobs or not knobs[column].any():
        return ""
    used = knobs[knobs["qps"] == 1].groupby("offsets")[column].mean()
    return (
        f"Of the core links that pipeline flows could take, {used[True]:.0%} are used with an offset a stage, "
        f"{used[False]:.0%} without (polarisation)."
    )

"""The page of `netlayer topology report`: the fabric, what its ToR split does, how full its links are, and changes.

Changes are what can be done or go wrong: placements, failures, ECMP plans against collisions.

Every claim is computed from the rows of `data`, and every section says by which command and seed to repeat it.
"""

from __future__ import annotations

from typing import Any

import altair as alt
import pandas as pd

from netlayer.report import Axis, Chart, Figure, Report, Threshold, charts
from netlayer.report.theme import MUTED, ON_BRIGHT
from netlayer.units import format_rate
from topology.ecmp.distribution import USES
from topology.ecmp.split_verdict import DEFINITIONS, LOADS, verdict
from topology.fabric import picture as fabric_picture
from topology.fabric.graph import describe
from topology.fabric.imported import ImportedFabric
from topology.fabric.interface import Fabric
from topology.report.data import (
    DRAWS,
    HASH,
    KNOB_SEEDS,
    OPTIMISE_S,
    SINGLES,
    TOGETHER,
    Findings,
    uplink_rows,
    use_rows,
)

_DESIGNS = {True: "with split", False: "without"}
_EITHER = "with split or without"
_SHOWN_SETS = 48
_REPEAT = "# {}\n"
# Placements with more than this times the median of the bytes between pods would flatten the picture of the rest.
_FLATTENS = 4
_FAILURE_FORMATS = {"stops the job": ".0%"}


LEFT_OUT = (
    "An imported fabric, its tiers inferred from heights over the hosts. Omitted are what only a plan has: the ToR "
    "split, bisection, optics that fail, the picture of the fabric and of its uplinks."
)


def build_page(findings: Findings) -> Report:
    """The report; `Report.write` puts it into a folder."""
    report = Report(f"Fabric {findings.name}", f"{_size(findings)}; seed {findings.seed}")
    about_collisions = [*([_split] if findings.clos is not None else []), _distributions, _loads]
    about_costs = [*([_placements] if findings.placements else []), _failures, _improvements]
    return report.fill(findings, [_overview, _fabric, *about_collisions, *about_costs, _definitions])


def _size(findings: Findings) -> str:
    config, fabric = findings.config, findings.fabric
    job = f"; job {config.job.name}" if config else ""
    if isinstance(fabric, ImportedFabric):
        return fabric.describe() + job
    assert config is not None
    cluster = config.cluster
    rails = "1 rail" if cluster.rails == 1 else f"{cluster.rails} rails"
    return f"{cluster.num_gpus:,} GPUs, {cluster.servers:,} servers, {rails}{job}"


def _overview(report: Report, findings: Findings) -> None:
    """Add the section at a glance: the verdict, how many switches there are, and the main figures."""
    fabric, clos = findings.fabric, findings.clos
    tors, spines, cores = (fabric.count(kind) for kind in ("tor", "spine", "core"))
    first = verdict(findings.claims, findings.ratios, clos.design)[1] if clos else LEFT_OUT
    section = report.section("At a glance", first)
    kinds = f"{tors} ToRs, {spines} spines" + (f", {cores} core" if cores else "")
    section.figures(
        Figure("Switches", tors + spines + cores, "", kinds),
        Figure("Directed links", fabric.num_links, "", "a cable is two"),
        *([Figure("Bisection", format_rate(clos.bisection_bps), "", "each way")] if clos else []),
        source="predicted",
    )
    rank_order = next((row for row in findings.placements if row["placement"] == "given"), {})
    figures = []
    if rank_order:
        hint = f"median of {rank_order['seeds']} seeds, nothing hidden"
        figures.append(Figure("Communication of a step", f"{rank_order['time_s']:.3f}", "s", hint))
    if "pipeline_collision_share" in rank_order:
        share = f"{rank_order['pipeline_collision_share']:.1%}"
        hint = f"on any tier; excess {rank_order['pipeline_excess']:.1%}, {HASH}"
        figures.append(Figure("Pipeline flows in collision", share, "", hint))
    if findings.improvements:
        best = max(findings.improvements, key=lambda row: float(row["excess_before"]))
        hint = f"{best['traffic']}: from {best['excess_before']:.1%}, ports of {best['changed']:,} QPs changed"
        figures.append(Figure("Excess with planned UDP ports", f"{best['excess_after']:.1%}", "", hint))
    section.figures(*figures, source="simulated")
    commands = [
        *([findings.command("describe")] if clos else []),
        *(
            [findings.command("place", "--strategy", "given", "--no-optimise", "--hash", HASH)]
            if findings.placements
            else []
        ),
        *(
            [findings.command("optimize ports", "--traffic", best["traffic"], "--hash", HASH)]
            if findings.improvements
            else []
        ),
    ]
    section.code("\n".join(commands))


def _fabric(report: Report, findings: Findings) -> None:
    fabric = findings.clos
    if fabric is None:
        _levels(report, findings.fabric)
        return
    traffic = "pipeline" if "pipeline" in findings.loads else "permutation"
    section = report.section("The fabric", f"Coloured by the load of one traffic: {traffic}.", source="simulated")
    section.chart(
        fabric_picture.fabric_chart(fabric, findings.loads[traffic]),
        name="fabric",
        caption=fabric_picture.caption(fabric),
    )
    levels = pd.DataFrame(fabric.describe())
    for column in ("up_link_bps", "up_bps"):
        levels[column] = [format_rate(value) if value else "-" for value in levels[column]]
    named = {"up_links": "uplinks", "up_link_bps": "uplink rate", "up_bps": "capacity up", "path_hops": "path hops"}
    named |= {"ports_down": "ports down", "ports_up": "up", "ports_left": "left"}
    section.table(levels.rename(columns=named), source="predicted", caption="Ports of one device, links of the level.")
    ecmp = findings.command("ecmp", "--traffic", traffic, "--hash", HASH, "--seeds", 1)
    section.code(f"# links.csv\n{ecmp}\n{findings.command('describe')}")


def _split(report: Report, findings: Findings) -> None:
    """Add the section on the ToR split: collisions with it and without, and the claims about it."""
    repeat = "# split.csv, claims.csv\n" + findings.command("report", "--seeds", findings.seeds)
    if not findings.split_has_effect:
        assert findings.clos is not None
        section = report.section("The ToR split", verdict(findings.claims, findings.ratios, findings.clos.design)[1])
        section.code(repeat)
        return
    section = report.section(
        "Does the ToR split halve hash collisions?",
        "Both designs have the same NICs and the same uplink capacity; load is the share of a ToR's NICs that send at "
        "full rate to other ToRs. In collision: on an uplink with more demand than capacity; excess: how much more; "
        "sharing: in company on an uplink at all.",
        source=["simulated", "predicted"],
    )
    frame = pd.DataFrame([row.to_row() for row in findings.ratios if row.ratio is not None])
    section.chart(
        charts.line(
            frame[frame["source"] == "predicted"],
            Axis("load", "Share of a ToR's NICs that send at full rate", "share"),
            Axis("ratio", "With the split over without", zero=True),
            colour="definition",
            threshold=Threshold(0.5, "halved"),
        ),
        name="split_ratio",
        caption="Closed form, ideal hash: below the dashed line the split halves what the definition counts; above 1 "
        "it makes more of it.",
        source="predicted",
    )
    claim_rows = [
        {"definition": claim.definition, "hash": claim.hash_name, "from": claim.source, "with the split": claim.words}
        for claim in findings.claims
    ]
    section.table(
        pd.DataFrame(claim_rows),
        caption=f"ToR uplinks; simulated: mean of {findings.seeds} seeds at {len(LOADS)} loads, the closed form at "
        "more; in between, a straight line.",
    )
    wide = pd.DataFrame([row.to_row() for row in findings.by_load]).assign(
        design=lambda rows: rows["split"].map({True: "with", False: "no"})
    )
    wide = wide[wide["hash"].isin(["closed form", HASH]) & wide["load"].isin(LOADS)]
    table = wide.pivot_table(index=["hash", "load"], columns="design", values=list(DEFINITIONS), sort=False)
    ordered = [(key, design) for key in DEFINITIONS for design in ("no", "with")]
    table = table[ordered]
    table.columns = pd.Index([f"{DEFINITIONS[key]}, {design} split" for key, design in ordered])
    formats = {**dict.fromkeys(table.columns, ".2%"), "load": ".1%"}
    section.table(table.reset_index(), caption="The shares themselves, without and with the split.", formats=formats)
    section.code(repeat)


def _distributions(report: Report, findings: Findings) -> None:
    """Add the section on how many flows collide, over seeds, with the split and without."""
    section = report.section(
        "Collisions with and without the split" if findings.split_has_effect else "Collisions on ToR uplinks",
        f"A random permutation at full load, {HASH}, {findings.seeds} seeds from {findings.seed}.",
        source="simulated",
    )
    tors = _designs(findings, findings.tor_collisions)
    section.chart(
        charts.histogram(
            tors.loc[tors.index.repeat(tors["tors"])],
            Axis("flows_in_collision", "Flows of a ToR in collision"),
            colour="design",
            counted="ToRs",
            share=True,
            bins=32,
        ),
        name="collision_histogram",
        caption=f"The ToRs of all seeds; on average {_mean_collisions(tors)}.",
    )
    links = _designs(findings, findings.link_use)
    fabric = findings.fabric
    links = links[links["tier"] == fabric.tier_labels[fabric.hashed_tiers[0]]]
    used = [use for use in USES if links.loc[links["use"] == use, "links"].any()]
    section.chart(
        charts.bars(
            links[links["use"].isin(used)],
            Axis("use", "Demand over capacity"),
            Axis("share", "Uplinks", "share"),
            colour="design",
        ),
        name="uplink_use",
        caption=f"Uplinks by demand over capacity; above 100%: {_over(links)}.",
    )
    if findings.clos is None:  # `ecmp --fabric` draws its permutation among hosts of one ToR too
        section.code(_REPEAT.format("link_use.csv, tor_collisions.csv") + findings.repeat())
        return
    options = ("--traffic", "permutation", "--hash", HASH, "--seeds", findings.seeds)
    section.code("# tables tor_collisions and link_use of the record\n" + findings.command("ecmp", *options))


def _loads(report: Report, findings: Findings) -> None:
    """Add the section on how full the links of each tier are."""
    section = report.section(
        "Link utilisation by tier",
        f"Demand over capacity of every link, {HASH}, seed {findings.seed}, ranks placed as given.",
        source="simulated",
    )
    rows = pd.DataFrame(use_rows(findings.loads))
    for traffic in findings.loads:
        section.chart(
            charts.heatmap(
                rows[rows["traffic"] == traffic],
                Axis("use", "Utilisation"),
                Axis("tier", "Tier"),
                Axis("share", "Share of the tier's links", "share"),
                title=f"{traffic}: links of each tier by utilisation",
            ),
            name=f"tiers_{traffic}",
            caption=f"{traffic.capitalize()}: a link above 100% has flows in collision.",
        )
    if findings.clos is None:
        section.code(_REPEAT.format("tiers.csv") + findings.repeat())
        return
    busiest = "pipeline" if "pipeline" in findings.loads else "permutation"
    uplinks = pd.DataFrame(uplink_rows(findings.clos, findings.loads[busiest]))
    first_sets = uplinks[uplinks["tor_set"] < _SHOWN_SETS]
    least, most = uplinks["utilisation"].min(), uplinks["utilisation"].max()
    section.chart(
        _uplink_chart(first_sets),
        name="uplinks",
        caption=f"{busiest.capitalize()}: each uplink of each ToR set, the fullest of the set's ToRs, in percent of "
        f"capacity: {least:.0%} to {most:.0%}; white is 100%, red is above it"
        + (f", the first {_SHOWN_SETS} sets." if len(first_sets) < len(uplinks) else "."),
    )
    options = [word for name in findings.loads for word in ("--traffic", name)]
    section.code("# links.csv\n" + findings.command("ecmp", *options, "--hash", HASH, "--seeds", 1))


def _uplink_chart(rows: pd.DataFrame) -> Chart:
    """A cell an uplink; blue below its capacity, white at it, red above."""
    rows = rows.assign(percent=(rows["utilisation"] * 100).round().astype(int))
    sets, uplinks = rows["tor_set"].nunique(), rows["uplink"].nunique()
    reach = max(1.0, float(rows["utilisation"].max()) - 1)
    base = alt.Chart(rows).encode(
        x=alt.X("uplink:O", axis=alt.Axis(title="Uplink", labelAngle=0, ticks=False)),
        y=alt.Y("tor_set:O", axis=alt.Axis(title="ToR set", ticks=False)),
        tooltip=[
            alt.Tooltip("tor_set:O", title="ToR set"),
            alt.Tooltip("uplink:O", title="uplink"),
            alt.Tooltip("utilisation:Q", title="fullest of its rails", format=".0%"),
        ],
    )
    scale = alt.Scale(domain=[0, 1, 1 + reach], range=["#2166ac", "#f7f7f7", "#b2182b"])
    legend = alt.Legend(title="Demand over capacity, fullest of the rails", titleLimit=400, format=".0%")
    layers: list[Any] = [base.mark_rect().encode(color=alt.Color("utilisation:Q", scale=scale, legend=legend))]
    if uplinks <= 40:
        dark = (alt.datum.utilisation < 0.35) | (alt.datum.utilisation > 1 + 0.65 * reach)
        ink = alt.when(dark).then(alt.value("#fdfdfd")).otherwise(alt.value(ON_BRIGHT))
        layers.append(base.mark_text(fontSize=9).encode(text="percent:Q", color=ink))
    drawn: Any = alt.layer(*layers)
    return drawn.properties(width="container", height=min(900, max(140, 22 * sets)))  # type: ignore[no-any-return]


def _designs(findings: Findings, rows: list[dict[str, Any]]) -> pd.DataFrame:
    """The rows with a column `design`: those of one alone where both are the same fabric."""
    frame = pd.DataFrame(rows)
    if findings.clos is None:
        return frame.assign(design="as cabled")
    if findings.split_has_effect:
        return frame.assign(design=frame["split"].map(_DESIGNS))
    return frame[frame["split"]].assign(design=_EITHER)


def _mean_collisions(tors: pd.DataFrame) -> str:
    weighed = tors.assign(flows=tors["flows_in_collision"] * tors["tors"]).groupby("design", sort=False)
    means = weighed["flows"].sum() / weighed["tors"].sum()
    return ", ".join(f"{mean:.1f} {design}" for design, mean in means.items())


def _over(links: pd.DataFrame) -> str:
    over = links[links["use"].isin(USES[USES.index("to 100%") + 1 :])]
    shares = over.groupby("design", sort=False)["share"].sum()
    return ", ".join(f"{share:.1%} {design}" for design, share in shares.items()) or "none"


def _placements(report: Report, findings: Findings) -> None:
    """Add the section on placements: bytes that cross ToRs and pods, a step's communication time, and collisions."""
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
    """Draw the bytes between pods of each placement, without those that would flatten the rest."""
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
    """Add the section on failures: the worst of each kind, alone and several together."""
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


def _improvements(report: Report, findings: Findings) -> None:
    """Add the section on what lowers collisions: planned ports, and the switches' seeds, offsets and functions."""
    section = report.section(
        "What lowers collisions",
        "A UDP source port for each queue pair, planned against the switches' hash; and switch seeds, offsets and "
        f"queue pairs a connection on a grid. {_polarisation(findings)}",
        source="simulated",
    )
    improvements = pd.DataFrame(findings.improvements)
    commands = []
    if not improvements.empty:
        bars = improvements.melt(
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
        table = improvements[list(columns)].rename(columns=columns)
        section.table(table, formats={name: ".1%" for name in table.columns if "before" in name or "after" in name})
        options = [word for name in improvements["traffic"] for word in ("--traffic", name)]
        commands.append(findings.command("optimize ports", *options, "--hash", HASH))
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
    commands.append(findings.command("optimize knobs", "--hash", HASH, "--seeds", KNOB_SEEDS))
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


def _levels(report: Report, fabric: Fabric) -> None:
    """The levels of an imported fabric."""
    assert isinstance(fabric, ImportedFabric)
    section = report.section("The fabric", f"{fabric.describe()}.", source="predicted")
    levels = pd.DataFrame(describe(fabric.graph)).drop(columns=["ports_min", "ports_max"])
    for column in ("up_link_bps_min", "up_link_bps_max", "up_bps"):
        levels[column] = [format_rate(value) if value else "-" for value in levels[column]]
    named = {"up_links": "uplinks", "up_link_bps_min": "slowest", "up_link_bps_max": "fastest", "up_bps": "capacity up"}
    section.table(levels.rename(columns=named), caption="Heights over the hosts; links of the level upwards.")


def _definitions(report: Report, findings: Findings) -> None:
    section = report.section("Definitions and limits")
    section.text(
        "A collision is a flow on a link whose hashed demand exceeds its capacity; its size, the excess, is the demand "
        "above capacity over total demand. Sharing a link alone is no collision. A NIC shares its rate among the flows "
        "that it sends or receives at one time. Load is the share of a ToR's NICs that send at full rate."
    )
    section.note(
        "Nothing here is measured. The hash of real switches is not public in all parts, times omit what "
        "computation hides, congestion control and latency. Where a time is `at most`, no rate rises as others end."
    )
    cluster = {"cluster": findings.config.cluster.model_dump(mode="json")} if findings.config and findings.clos else {}
    section.keyvalues({**cluster, "seed": findings.seed})
    section.code(findings.command("report", "--seeds", findings.seeds))

"""The sections of the report about collisions: what the ToR split does to them, and how full the links are."""

from __future__ import annotations

from typing import Any

import altair as alt
import pandas as pd

from netlayer.report import Axis, Chart, Report, Threshold, charts
from netlayer.report.theme import ON_BRIGHT
from topology.ecmp.distribution import USES
from topology.ecmp.split_verdict import DEFINITIONS, LOADS, verdict
from topology.report.data import HASH, Findings, uplink_rows, use_rows

_DESIGNS = {True: "with split", False: "without"}
_EITHER = "with split or without"
_SHOWN_SETS = 48
_REPEAT = "# {}\n"


def write(report: Report, findings: Findings) -> None:
    """Write the sections on the split, collisions and loads."""
    if findings.clos is not None:
        _split(report, findings)
    _distributions(report, findings)
    _loads(report, findings)


def _split(report: Report, findings: Findings) -> None:
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
    frame = pd.DataFrame([row for row in findings.ratios if row["ratio"] is not None])
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
    wide = pd.DataFrame(findings.by_load).assign(design=lambda rows: rows["split"].map({True: "with", False: "no"}))
    wide = wide[wide["hash"].isin(["closed form", HASH]) & wide["load"].isin(LOADS)]
    table = wide.pivot_table(index=["hash", "load"], columns="design", values=list(DEFINITIONS), sort=False)
    ordered = [(key, design) for key in DEFINITIONS for design in ("no", "with")]
    table = table[ordered]
    table.columns = pd.Index([f"{DEFINITIONS[key]}, {design} split" for key, design in ordered])
    formats = {**dict.fromkeys(table.columns, ".2%"), "load": ".1%"}
    section.table(table.reset_index(), caption="The shares themselves, without and with the split.", formats=formats)
    section.code(repeat)


def _distributions(report: Report, findings: Findings) -> None:
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

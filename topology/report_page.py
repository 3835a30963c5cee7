"""The page of `netlayer topology report`: the fabric, its collisions, placements and failures, and what follows.

Every claim is computed from the rows of `report_data`, and every section says by which command and seed to repeat it.
"""

from __future__ import annotations

import pandas as pd

from netlayer.report import Axis, Figure, Report, Threshold, charts
from netlayer.units import format_rate
from topology import fabric_picture
from topology.report_data import DRAWS, HASH, SINGLES, Findings, tier_rows, uplink_rows
from topology.split_verdict import DEFINITIONS, LOADS, verdict


def build_page(findings: Findings, config_file: str) -> Report:
    """The report; `Report.write` puts it into a folder. `config_file`: as the commands to repeat should name it."""
    cluster = findings.config.cluster
    report = Report(
        f"Fabric {cluster.name}",
        f"{cluster.num_gpus:,} GPUs, {cluster.servers:,} servers, {cluster.rails} rails; job "
        f"{findings.config.job.name}; seed {findings.seed}",
    )
    word, sentence = verdict(findings.claims)
    report.verdict("PASS" if word == "PASS" else "FAIL" if word == "FAIL" else "WARN", sentence)
    _overview(report, findings)
    _fabric(report, findings, config_file)
    _split(report, findings, config_file)
    _distributions(report, findings, config_file)
    _loads(report, findings)
    _placements(report, findings, config_file)
    _failures(report, findings, config_file)
    _cures(report, findings, config_file)
    _definitions(report, findings, config_file)
    return report


def _overview(report: Report, findings: Findings) -> None:
    fabric, summary = findings.fabric, findings.fabric.summary()
    section = report.section("At a glance")
    section.figures(
        Figure(
            "Switches", summary["switches"], "", f"{fabric.design.num_tors} ToRs, {fabric.design.num_spines} spines"
        ),
        Figure("Directed links", summary["links"], "", "a cable is two"),
        Figure("Bisection", format_rate(summary["bisection_bps"]), "", "each way"),
        source="predicted",
    )
    rows = {row["placement"]: row for row in findings.placements}
    given, best = rows["given"], findings.cures[0] if findings.cures else None
    figures = [Figure("Communication of a step", f"{given['time_s']:.3f}", "s", "nothing hidden, max-min rates")]
    if "pipeline_collision_share" in given:
        share = f"{given['pipeline_collision_share']:.1%}"
        figures.append(
            Figure("Pipeline flows in collision", share, "", f"excess {given['pipeline_excess']:.1%}, {HASH}")
        )
    if best:
        best = max(findings.cures, key=lambda row: row["excess_before"])
        hint = f"{best['traffic']}: from {best['excess_before']:.1%}, ports of {best['changed']:,} QPs changed"
        figures.append(Figure("Excess with planned UDP ports", f"{best['excess_after']:.1%}", "", hint))
    section.figures(*figures, source="simulated")


def _fabric(report: Report, findings: Findings, config_file: str) -> None:
    fabric = findings.fabric
    shown = "pipeline" if "pipeline" in findings.loads else "permutation"
    section = report.section("The fabric", f"Coloured by the load of one phase: {shown}.", source="simulated")
    section.chart(
        fabric_picture.fabric_chart(fabric, findings.loads[shown]),
        name="fabric",
        caption=fabric_picture.caption(fabric),
    )
    levels = pd.DataFrame(fabric.describe())
    for column in ("up_link_bps", "up_bps"):
        levels[column] = [format_rate(value) if value else "-" for value in levels[column]]
    named = {"up_links": "uplinks", "up_link_bps": "uplink rate", "up_bps": "capacity up", "path_hops": "path hops"}
    section.table(levels.rename(columns={**named, "ports_down": "ports down", "ports_up": "up", "ports_left": "left"}))
    section.code(f"netlayer topology describe --config {config_file}")


def _split(report: Report, findings: Findings, config_file: str) -> None:
    section = report.section(
        "Does the ToR split halve hash collisions?",
        verdict(findings.claims)[1]
        + ". In collision: on an uplink with more demand than capacity; excess: how much more; "
        "sharing: in company on an uplink at all. Both designs have the same NICs and the same uplink capacity.",
        source=["simulated", "predicted"],
    )
    frame = pd.DataFrame([row for row in findings.ratios if row["ratio"] is not None])
    if frame.empty:
        section.note("No uplink is shared at any load: there is nothing to compare.")
        return
    ideal = frame[frame["source"] == "predicted"]
    section.chart(
        charts.line(
            ideal,
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
    said = [
        {"definition": claim.definition, "hash": claim.hash_name, "with the split": claim.words}
        for claim in findings.claims
    ]
    section.table(
        pd.DataFrame(said), caption=f"By definition and hash, ToR uplinks; simulated: mean of {findings.seeds} seeds."
    )
    wide = pd.DataFrame(findings.by_load).assign(
        design=lambda rows: rows["split"].map({True: "with", False: "without"})
    )
    wide = wide[wide["hash"].isin(["closed form", HASH]) & wide["load"].isin(LOADS)]
    table = wide.pivot_table(index=["hash", "load"], columns="design", values=list(DEFINITIONS), sort=False)
    ordered = [(key, design) for key in DEFINITIONS for design in ("without", "with")]
    table = table[ordered]
    table.columns = pd.Index([DEFINITIONS[key] + (", split" if design == "with" else "") for key, design in ordered])
    formats = {**dict.fromkeys(table.columns, ".2%"), "load": ".1%"}
    section.table(table.reset_index(), caption="The shares themselves, without and with the split.", formats=formats)
    section.code(_again(findings, config_file))


def _distributions(report: Report, findings: Findings, config_file: str) -> None:
    section = report.section(
        "Collisions with and without the split",
        f"A random permutation at full load, {HASH}, {findings.seeds} seeds from {findings.seed}.",
        source="simulated",
    )
    section.chart(
        charts.histogram(
            pd.DataFrame(findings.per_tor),
            Axis("flows", "Flows of a ToR in collision"),
            colour="design",
            counted="ToRs",
            share=True,
            bins=32,
        ),
        name="collision_histogram",
        caption=f"The ToRs of all seeds; on average {_mean_of(findings.per_tor, 'flows')}.",
    )
    links = pd.DataFrame(findings.on_links)
    links["use"] = [f"{value:.0%}" for value in links["utilisation"]]
    links = links.groupby(["design", "use"], sort=False).agg(utilisation=("utilisation", "max"), links=("links", "sum"))
    links = links.reset_index()
    links["share"] = links["links"] / links.groupby("design")["links"].transform("sum")
    links = links.sort_values("utilisation")
    section.chart(
        charts.bars(
            links[links["share"] > 5e-4],
            Axis("use", "Demand over capacity"),
            Axis("share", "Uplinks", "share"),
            colour="design",
        ),
        name="uplink_use",
        caption=f"Uplinks by demand over capacity; above 100%: {_over(links)}.",
    )
    section.code(
        f"netlayer topology ecmp --config {config_file} --traffic permutation --hash {HASH} --seed {findings.seed} "
        f"--seeds {findings.seeds}"
    )


def _loads(report: Report, findings: Findings) -> None:
    section = report.section(
        "Link utilisation by tier",
        f"Demand over capacity of every link, {HASH}, seed {findings.seed}, ranks placed as given.",
        source="simulated",
    )
    rows = pd.DataFrame(tier_rows(findings.loads))
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
    busiest = "pipeline" if "pipeline" in findings.loads else "permutation"
    uplinks = pd.DataFrame(uplink_rows(findings.loads[busiest]))
    shown = uplinks["tor_set"].isin([f"set {row}" for row in range(48)])
    section.chart(
        charts.heatmap(
            uplinks[shown],
            Axis("uplink", "Uplink"),
            Axis("tor_set", "ToR set"),
            Axis("utilisation", "Fullest of its rails", "share"),
        ),
        name="uplinks",
        caption=f"{busiest.capitalize()}: each uplink of each ToR set, the fullest of the set's ToRs"
        + (", the first 48 sets." if not shown.all() else "."),
    )


def _placements(report: Report, findings: Findings, config_file: str) -> None:
    rows = pd.DataFrame(findings.placements)
    least = {key: rows["placement"].iloc[int(rows[key].argmin())] for key in ("cross_pod_ring_bytes", "mean_hops")}
    section = report.section(
        "Where the ranks stand",
        "`given` is rank order, `packed` fills the roomiest ToR sets first, `paper` keeps each data-parallel group in "
        "as few pods and ToR sets as it can (MegaScale 3.2, 3.6), `pipeline-first` puts the stages of one pipeline "
        f"side by side. Fewest bytes of data-parallel rings between pods: {least['cross_pod_ring_bytes']}. Fewest hops "
        f"a byte, all traffic: {least['mean_hops']}.",
        source="simulated",
    )
    across = rows.melt(
        id_vars="placement",
        value_vars=["cross_pod_ring_bytes", "cross_pod_pipeline_bytes"],
        var_name="traffic",
        value_name="bytes",
    )
    across["traffic"] = across["traffic"].map(
        {"cross_pod_ring_bytes": "data-parallel rings", "cross_pod_pipeline_bytes": "pipeline"}
    )
    across["bytes"] /= 1e12
    section.chart(
        charts.bars(
            across,
            Axis("placement", "Placement"),
            Axis("bytes", "Bytes between pods a step", "TB"),
            colour="traffic",
            stacked=True,
        ),
        name="placement_bytes",
        caption="Bytes a step that cross between pods.",
    )
    section.chart(
        charts.bars(rows, Axis("placement", "Placement"), Axis("time_s", "Communication of a step", "s")),
        name="placement_time",
        caption="Each phase until its slowest flow is done at max-min fair rates, phases after one another.",
    )
    shown = {
        "placement": "placement",
        "mean_hops": "hops a byte",
        "cross_tor_bytes": "TB, ToRs",
        "cross_pod_bytes": "TB, pods",
        "ring_collision_share": "ring",
        "ring_excess": "excess ",
        "pipeline_collision_share": "pipeline",
        "pipeline_excess": "excess",
        "time_s": "time s",
    }
    table = rows[[key for key in shown if key in rows]].copy()
    table[["cross_tor_bytes", "cross_pod_bytes"]] /= 1e12
    shares = [words for key, words in shown.items() if key in rows and ("share" in key or "excess" in key)]
    section.table(
        table.rename(columns=shown),
        formats={**dict.fromkeys(shares, ".1%"), "hops a byte": ".3f", "time s": ".3f"},
        caption="TB a step between ToRs and between pods; flows of the ring and of the pipeline in collision.",
    )
    section.code(
        f"netlayer topology place --config {config_file} --seed {findings.seed}\n"
        f"netlayer topology place --config {config_file} --seed {findings.seed} --strategy random  # and improve it"
    )


def _failures(report: Report, findings: Findings, config_file: str) -> None:
    rows = pd.DataFrame(findings.failures)
    rows["together"] = [len(text.split()) for text in rows["failed"]]
    alone, several = rows[rows["together"] == 1], rows[rows["together"] > 1]
    section = report.section(
        "Failures",
        "ECMP groups shrink to the members that still lead to the destination. Slowdown: communication of a step over "
        "the same without failures, among flows that still have a path; a NIC, its optic, a ToR or a rail that is gone "
        "leaves flows without any, and the job stops until its ranks are moved.",
        source="simulated",
    )
    table = alone.groupby("kind", sort=False).agg(
        cases=("failed", "size"),
        lost=("lost_bps", "max"),
        of_tier=("lost_share", "max"),
        cut=("unreachable_share", "max"),
        stopped=("stopped_flows", "max"),
        slowdown=("slowdown", "max"),
    )
    table["lost"] = [format_rate(value) for value in table["lost"]]
    titles = {"kind": "fails", "lost": "capacity lost", "of_tier": "of a tier", "cut": "NIC pairs cut off"}
    titles |= {"stopped": "flows stopped", "slowdown": "worst slowdown"}
    section.table(
        table.reset_index().rename(columns=titles),
        caption=f"One part at a time, the worst of the cases of each kind, drawn by seed {findings.seed}.",
        formats={"of a tier": ".3%", "NIC pairs cut off": ".3%", "worst slowdown": ".3f"},
    )
    if not several.empty:
        grouped = several.groupby(["kind", "together"], sort=False)["slowdown"].max().reset_index()
        section.chart(
            charts.line(
                grouped,
                Axis("together", "Parts that fail at one time", log=True),
                Axis("slowdown", "Worst slowdown"),
                colour="kind",
                threshold=Threshold(1.0, "whole fabric"),
            ),
            name="failures_together",
            caption="Random parts at one time, the worst of four draws. Below 1 smaller groups happen to hash better.",
        )
    section.code(
        f"netlayer topology whatif --config {config_file} --seed {findings.seed} --sample {SINGLES}\n"
        f"netlayer topology whatif --config {config_file} --seed {findings.seed} --sample {DRAWS} --fail spine "
        "--together 8"
    )


def _cures(report: Report, findings: Findings, config_file: str) -> None:
    section = report.section(
        "What lowers collisions",
        "A UDP source port for each queue pair, planned against the switches' hash; and switch seeds, offsets and "
        f"queue pairs a connection on a grid. {_polarisation(findings)}",
        source="simulated",
    )
    cures = pd.DataFrame(findings.cures)
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
        columns |= {f"max_utilisation_{when}": f"fullest {when}" for when in ("before", "after")}
        table = cures[list(columns)].rename(columns=columns)
        section.table(table, formats={name: ".1%" for name in table.columns if "before" in name or "after" in name})
    knobs = pd.DataFrame(findings.knobs).drop(columns=["hash", "excess"])
    formats = {name: ".2%" for name in knobs.columns if name.endswith(("share", "excess", "used"))}
    section.table(
        knobs.rename(columns=_plain),
        formats={_plain(name): text for name, text in formats.items()},
        max_rows=12,
        caption="Seeds, offsets and queue pairs a connection, least excess first.",
    )
    section.code(
        f"netlayer topology whatif --config {config_file} --cure ports --seed {findings.seed}\n"
        f"netlayer topology whatif --config {config_file} --cure knobs --seeds 2 --seed {findings.seed}"
    )


def _definitions(report: Report, findings: Findings, config_file: str) -> None:
    section = report.section("Definitions and limits")
    section.text(
        "A collision is a flow on a link whose hashed demand exceeds its capacity; its size, the excess, is the demand "
        "above capacity over total demand. Sharing a link alone is no collision. A NIC shares its rate among the flows "
        "that it sends or receives at one time."
    )
    section.note(
        "Nothing here is measured. The hash of real switches is not public in all parts, times leave out what "
        "computation hides, congestion control and latency; rates do not rise as flows end, so times are upper bounds."
    )
    section.keyvalues({"cluster": findings.config.cluster.model_dump(mode="json"), "seed": findings.seed})
    section.code(_again(findings, config_file))


def _again(findings: Findings, config_file: str) -> str:
    return f"netlayer topology report --config {config_file} --seed {findings.seed} --seeds {findings.seeds}"


def _mean_of(rows: list[dict[str, object]], column: str) -> str:
    means = pd.DataFrame(rows).groupby("design", sort=False)[column].mean()
    return ", ".join(f"{mean:.1f} {design}" for design, mean in means.items())


def _over(links: pd.DataFrame) -> str:
    shares = links[links["utilisation"] > 1.0].groupby("design", sort=False)["share"].sum()
    return ", ".join(f"{share:.1%} {design}" for design, share in shares.items()) or "none"


def _polarisation(findings: Findings) -> str:
    """What the grid says of offsets, in words; nothing where there is no core."""
    knobs = pd.DataFrame(findings.knobs)
    column = "pipeline_core_links_used"
    if knobs.empty or column not in knobs or not knobs[column].any():
        return ""
    used = knobs[knobs["qps"] == 1].groupby("offsets")[column].mean()
    return (
        f"Of the core links that pipeline flows could take, {used[True]:.0%} are used with an offset a stage, "
        f"{used[False]:.0%} without (polarisation)."
    )


def _plain(name: str) -> str:
    return name.replace("_", " ").replace("collision share", "colliding")

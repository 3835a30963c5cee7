"""The page of `netlayer topology report`: the fabric in short and drawn, and the sections that others write.

Every claim is computed from the rows of `report_data`, and every section says by which command and seed to repeat it.
"""

from __future__ import annotations

import pandas as pd

from netlayer.report import Figure, Report
from netlayer.units import format_rate
from topology.ecmp.split_verdict import verdict
from topology.fabric import picture as fabric_picture
from topology.fabric.graph import describe
from topology.fabric.imported import ImportedFabric
from topology.fabric.interface import Fabric
from topology.report import collisions as report_collisions
from topology.report import costs as report_costs
from topology.report.data import HASH, Findings

LEFT_OUT = (
    "An imported fabric, its tiers inferred from heights over the hosts. Left out are what only a plan has: the ToR "
    "split, bisection, optics that fail, the picture of the fabric and of its uplinks."
)


def build_page(findings: Findings) -> Report:
    """The report; `Report.write` puts it into a folder."""
    report = Report(f"Fabric {findings.name}", f"{_size(findings)}; seed {findings.seed}")
    _overview(report, findings)
    _fabric(report, findings)
    report_collisions.write(report, findings)
    report_costs.write(report, findings)
    _definitions(report, findings)
    return report


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
    if findings.cures:
        best = max(findings.cures, key=lambda row: float(row["excess_before"]))
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
        *([findings.command("cure ports", "--traffic", best["traffic"], "--hash", HASH)] if findings.cures else []),
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
        "Nothing here is measured. The hash of real switches is not public in all parts, times leave out what "
        "computation hides, congestion control and latency. Where a time is `at most`, no rate rises as others end."
    )
    cluster = {"cluster": findings.config.cluster.model_dump(mode="json")} if findings.config and findings.clos else {}
    section.keyvalues({**cluster, "seed": findings.seed})
    section.code(findings.command("report", "--seeds", findings.seeds))

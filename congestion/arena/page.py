"""The arena's page: verdict, table of all laws, ratios with intervals, completion against pauses, tails, pauses.

Every sentence is computed from the rows. Charts of flows, tiers and samples stand there where those were kept. Not
covered: running anything, and who the laws are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from congestion.arena import charts as arena_charts
from congestion.arena.headroom import headroom, headroom_sentence, over_bound
from congestion.arena.protocol import SUITE, Suite
from congestion.arena.verdict import VERDICTS, check, claims, compare, is_whole, over_cases, standing, verdict
from congestion.simulation.statistics import pareto_front
from netlayer.report import Axis, Figure, Report, charts

_MOST_CASES = 6
_MOST_ROWS = 1_000
_ON_TOP = "Where laws do alike their lines lie upon each other, and the last one's is seen."


@dataclass(frozen=True, eq=False)
class Findings:
    """Input of the page; the frames next to `rows` may be omitted.

    Args:
        rows: one a run, as `arena.verdict` says.
        candidate: the law that the claims are about.
        flows: one a flow: law, case, fct_us.
        tiers: law, tier, pause_share: port-time paused, over all cases.
        samples: law, case, time_us, rate_bps (all senders), queue_bytes (the longest).
        buffers: workload, condition, buffer_bytes, pause_share: what published DCQCN pauses there.
        command: that ran it.
    """

    rows: pd.DataFrame
    candidate: str
    flows: pd.DataFrame | None = None
    tiers: pd.DataFrame | None = None
    samples: pd.DataFrame | None = None
    buffers: pd.DataFrame | None = None
    command: str = ""
    suite: Suite = SUITE

    @property
    def laws(self) -> list[str]:
        """Laws in the rows' order, the candidate first."""
        return [self.candidate, *(law for law in self.rows["law"].unique() if law != self.candidate)]

    @cached_property
    def comparison(self) -> pd.DataFrame:
        """`arena.verdict.compare` of the completion times: two sections show it, and its intervals take seconds."""
        return compare(self.rows, self.candidate, suite=self.suite)


def build_page(findings: Findings) -> Report:
    """The report; `Report.write` puts it into a folder.

    Raises:
        ValueError: the rows do not make a comparison.
    """
    check(findings.rows)
    runs = findings.rows.groupby("law").size().max()
    report = Report(
        "Arena of control laws",
        f"{', '.join(findings.laws)}; {runs:,} runs each, suite {findings.suite.digest[:12]}",
    )
    sections = [_overview, _ratios, _headroom, _front, _tails, _pauses, _samples, _every_case, _definitions]
    return report.fill(findings, sections)


def _overview(report: Report, findings: Findings) -> None:
    all_claims = claims(findings.rows, findings.candidate, findings.suite)
    word, sentences = verdict(all_claims, is_whole(findings.rows, findings.suite))
    report.verdict(word, f"{sentences} {headroom_sentence(findings.rows, findings.candidate, findings.suite)}.")
    section = report.section("At a glance", source="simulated")
    table = standing(findings.rows)
    best, calm = table.iloc[0], table.sort_values("pause_share", kind="stable").iloc[0]
    seeds = findings.rows["seed"].nunique()
    section.figures(
        Figure("Fastest law", best["law"], "", f"{best['completion']:.3f} of the best of each case, geometric mean"),
        Figure("Fewest pauses", calm["law"], "", f"{calm['pause_share']:.2%} of port-time"),
        Figure("Cases", len(findings.rows.drop_duplicates(["workload", "condition"])), "", f"{seeds} paired seeds"),
    )
    rows = [{"asked": claim.text, "holds": claim.holds, "found": claim.sentence} for claim in all_claims]
    section.table(pd.DataFrame(rows), caption=f"What is asked of {findings.candidate}.")
    section.table(
        table.assign(goodput_gbps=table["goodput_bps"] / 1e9).drop(columns="goodput_bps").rename(columns=_TITLES),
        formats={"paused": ".2%", **dict.fromkeys(_TIMES, ".3f")},
        caption="Times over the best law's of each case, geometric mean over the cases; 1 is the best everywhere. Over "
        "the bound: completion time over what no law can be faster than. The other columns are means: the victim's "
        "slowdown against an idle fabric, the share of port-time paused, and goodput.",
    )


_TITLES = {
    "over_bound": "over the bound",
    "fct_p99": "p99 FCT",
    "fct_max": "max FCT",
    "goodput_gbps": "goodput (Gb/s)",
    "victim_slowdown": "victim",
    "pause_share": "paused",
}
_TIMES = ("completion", "p99 FCT", "max FCT", "over the bound")


def _ratios(report: Report, findings: Findings) -> None:
    """Add the section on the candidate's completion times over each rival's, with intervals over seeds."""
    rows, candidate, rules = findings.rows, findings.candidate, findings.suite.rules
    section = report.section(
        f"{candidate} against each law",
        f"Completion time (the last flow's) over the rival's, paired by seed, {rules.level:.0%} bootstrap intervals.",
        source="simulated",
    )
    ratios = [
        {"workload": workload, "rival": rival, "ratio": ratio.value, "low": ratio.low, "high": ratio.high}
        for workload, runs in rows.groupby("workload", sort=False)
        for rival in findings.laws[1:]
        for ratio in [over_cases(runs, candidate, rival, "completion_us", "geometric", findings.suite)]
    ]
    section.chart(
        arena_charts.intervals(pd.DataFrame(ratios), findings.laws, rules.no_worse),
        name="completion_ratio",
        caption=f"Geometric mean over the conditions of a workload. Left of 1, {candidate} is faster; an interval that "
        f"ends left of the dashed line, {rules.no_worse}, is no worse.",
    )
    table = findings.comparison
    counts = table.groupby(["rival", "verdict"], sort=False).size().unstack(fill_value=0)
    counts = counts.reindex(columns=VERDICTS, fill_value=0)
    section.table(
        counts, caption="Cases by verdict; better and worse after Holm's correction over all cases and rivals."
    )


def _headroom(report: Report, findings: Findings) -> None:
    """The lower bound next to each law."""
    rows, candidate = findings.rows, findings.candidate
    section = report.section("Completion time against the lower bound", source="simulated")
    section.chart(
        arena_charts.over_bound(_by_law(over_bound(rows), findings.laws), findings.laws),
        name="over_bound",
        caption="1 is the time that the most loaded link needs for what is routed over it, or the longest chain of "
        "flows alone: the same for all laws, and not always reachable. Geometric mean over conditions and seeds.",
    )
    cases = headroom(rows, candidate, findings.suite)
    tight = cases[cases["least_ratio"] > findings.suite.rules.faster]
    section.table(
        cases.rename(
            columns={
                "best_rival": "best rival",
                "its_over_bound": "its time",
                "candidate_over_bound": candidate,
                "least_ratio": "at best",
            }
        ),
        formats=dict.fromkeys(("its time", candidate, "at best"), ".3f"),
        max_rows=_MOST_ROWS,
        caption=f"Mean times over the bound's. At best: the bound over the best rival, below which no law's ratio can "
        f"be; it is above {findings.suite.rules.faster} in {len(tight)} of {len(cases)} cases.",
    )


def _front(report: Report, findings: Findings) -> None:
    table = standing(findings.rows)
    table["on_front"] = pareto_front(table[["completion", "pause_share"]])
    members = ", ".join(table.loc[table["on_front"], "law"])
    section = report.section("Completion time against pauses", f"On the front: {members}.", source="simulated")
    section.chart(
        arena_charts.front(table, findings.laws),
        name="front",
        caption="Lower is faster, left is calmer; no law is both faster and calmer than one on the dashed line.",
    )


def _tails(report: Report, findings: Findings) -> None:
    if findings.flows is None:
        return
    section = report.section("Flow completion times", f"One seed. {_ON_TOP}", source="simulated")
    flows = _by_law(findings.flows, findings.laws).assign(fct_s=lambda frame: frame["fct_us"] / 1e6)
    for number, (case, case_flows) in enumerate(_first_cases(flows)):
        section.chart(
            charts.cdf(
                case_flows, Axis("fct_s", "Flow completion time", "s"), colour="law", counted="flows", title=case
            ),
            name=f"fct_{number}",
            caption=f"All flows of {case}.",
        )


def _pauses(report: Report, findings: Findings) -> None:
    if findings.tiers is None and findings.buffers is None:
        return
    section = report.section("Where it pauses", source="simulated")
    if findings.tiers is not None:
        share = Axis("pause_share", "Port-time paused", "share")
        section.chart(
            charts.heatmap(_by_law(findings.tiers, findings.laws), Axis("tier", "Ports of"), Axis("law", "Law"), share),
            name="pause_tiers",
            caption="Share of the time in which a port of the tier may not send, over all cases.",
        )
    if findings.buffers is not None:
        section.table(
            findings.buffers.assign(buffer_bytes=findings.buffers["buffer_bytes"] / 2**20).rename(
                columns={"buffer_bytes": "buffer (MiB)", **_TITLES}
            ),
            formats={_TITLES["pause_share"]: ".2%"},
            caption="The tight buffers, and the port-time that published DCQCN is paused with them.",
        )


def _samples(report: Report, findings: Findings) -> None:
    if findings.samples is None:
        return
    section = report.section("Over time", f"One seed. {_ON_TOP}", source="simulated")
    samples = _by_law(findings.samples, findings.laws).assign(time_s=lambda frame: frame["time_us"] / 1e6)
    time = Axis("time_s", "Time", "s")
    for number, (case, case_samples) in enumerate(_first_cases(samples)):
        rate, queue = (
            Axis("rate_bps", "Rate", "b/s", zero=True),
            Axis("queue_bytes", "Longest queue", "bytes", zero=True),
        )
        section.chart(
            charts.line(case_samples, time, rate, colour="law", title=f"{case}: rate"),
            name=f"rate_{number}",
            caption="All senders together.",
        )
        section.chart(
            charts.line(case_samples, time, queue, colour="law", title=f"{case}: queue"),
            name=f"queue_{number}",
            caption="The longest queue of any switch port.",
        )


def _every_case(report: Report, findings: Findings) -> None:
    """Each case against each law: a long table, so it stands at the end of the page."""
    rows = findings.comparison.itertuples(index=False)
    table = findings.comparison.assign(
        words=[f"{row.ratio:.3f} ({row.low:.3f} to {row.high:.3f}), {row.verdict}" for row in rows]
    )
    cases = table.pivot_table(
        index=["workload", "condition"], columns="rival", values="words", aggfunc="first", sort=False
    )
    report.section("Every case", source="simulated").table(
        cases.reset_index(),
        max_rows=_MOST_ROWS,
        caption=f"Completion time of {findings.candidate} over each law's: ratio of means over seeds, its interval.",
    )


def _definitions(report: Report, findings: Findings) -> None:
    section = report.section("Definitions and limits")
    section.text(
        "Completion time is from the first start to the last flow's last ACK; a run that has not ended at the limit "
        "counts as the limit. Port-time paused is the time in which ports may not send, over ports times time. The "
        "protocol, written down before the first comparison, is `congestion/arena/ARENA.md`."
    )
    section.note("Nothing here is measured: it is a packet simulation, checked against ns-3 where that can be done.")
    section.keyvalues({"suite": findings.suite.digest, "version": findings.suite.version, **_rules(findings.suite)})
    if findings.command:
        section.code(findings.command)


def _rules(suite: Suite) -> dict[str, object]:
    rules = suite.rules
    return {"seeds": len(suite.test.seeds), "resamples": rules.resamples, "limit_ms": rules.limit_ms}


def _by_law(frame: pd.DataFrame, laws: list[str]) -> pd.DataFrame:
    """Rows in the page's order of laws, so that a law has one colour in every chart."""
    return frame.assign(law=pd.Categorical(frame["law"], laws)).sort_values("law", kind="stable")


def _first_cases(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    return [(str(case), rows) for case, rows in frame.groupby("case", sort=False)][:_MOST_CASES]

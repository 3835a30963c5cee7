"""`netlayer observe report`: verdicts on a run from all its evidence, as text, record and page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from netlayer.layout import describe_ranks
from netlayer.observe.blame import Blame
from netlayer.observe.events import Mark
from netlayer.observe.readers import EvidenceFiles
from netlayer.observe.verdicts.judge import judge
from netlayer.observe.verdicts.run import Run, collect
from netlayer.observe.verdicts.straggler import Detection
from netlayer.observe.verdicts.timeline import timeline_of
from netlayer.observe.verdicts.verdict import Verdict
from netlayer.observe.verdicts.what_if import WhatIf, analyse
from netlayer.printing import printable

if TYPE_CHECKING:
    from netlayer.report import Report

# A page's chart carries at most 20,000 cells.
_MAP_RANKS, _MAP_STEPS = 96, 160
_MOST_MARKS = 50


@dataclass(frozen=True)
class RunReport:
    """All that is said of a run.

    Args:
        run: its tables.
        verdicts: answers, in the order of the page.
        detection: what the stragglers were judged by.
        what_if: S, M_S and M_W of a pipeline- and data-parallel job; None with the reason in `no_what_if`.
        blame: of Flight Recorder dumps and RAS output, if there are any.
        kinds: number of files by kind.
        notes: what could not be read.
    """

    run: Run
    verdicts: Sequence[Verdict]
    detection: Detection
    what_if: WhatIf | None
    no_what_if: str
    blame: Blame | None
    kinds: dict[str, int]
    notes: Sequence[str]

    @property
    def alarms(self) -> list[Verdict]:
        """Verdicts that a person should act on."""
        acted_on = ("straggler", "slow link", "drift", "traffic")
        return [verdict for verdict in self.verdicts if verdict.state == "found" and verdict.subject in acted_on]


def judge_run(evidence: EvidenceFiles, last_steps: int | None = None, link_gbps: float | None = None) -> RunReport:
    """Read the evidence of a run once (twice for the replay of a pipeline), and judge it.

    Args:
        last_steps: look at the last steps alone; None: at all.
        link_gbps: rate of a rank's link, Gb/s each direction.
    """
    run = collect(evidence, last_steps)
    kinds, notes, hang = dict(evidence.kinds), [*evidence.notes, *run.notes], list(evidence.hang)
    verdicts, detection = judge(run, link_gbps)
    what_if, reason = None, "the job has one pipeline stage"
    if len({stage for stage in run.stages if stage is not None}) > 1:
        try:
            what_if, reason = analyse(timeline_of(evidence)), ""
        except ValueError as exc:
            reason = str(exc)
    blame = None
    if hang:
        from netlayer.observe.files import read_files

        blame = read_files(hang)
    return RunReport(run, verdicts, detection, what_if, reason, blame, kinds, notes)


def lines_of(report: RunReport) -> Iterator[str]:
    """The report as lines of text; nothing in them steers a terminal."""
    for verdict in report.verdicts:
        yield printable(f"{verdict.subject}: {verdict.state}: {verdict.line}")
    if report.what_if:
        yield printable(f"what if: {what_if_line(report.what_if)}")
    if report.blame:
        from netlayer.observe.command import headlines

        # Each begins with what was seen, which need not be a hang.
        yield from (line if line.startswith("hang: ") else f"hang: {line}" for line in headlines(report.blame))


def what_if_line(what_if: WhatIf) -> str:
    """S, M_S and M_W in one line."""
    line = f"S {what_if.slowdown:.3f}: steps of {what_if.step_s:.4g} s would take {what_if.ideal_s:.4g} s"
    if math.isnan(what_if.slowest_share):
        return line
    slowest = ", ".join(map(str, what_if.slowest[:8]))
    shares = f"M_S {what_if.last_stage_share:.3f} (last stage), M_W {what_if.slowest_share:.3f}"
    return f"{line}; {shares} (ranks {slowest})"


def record_rows(report: RunReport) -> list[dict[str, Any]]:
    """Rows of the record: one a verdict, and one a rank, link or cause that a verdict names."""
    rows: list[dict[str, Any]] = [
        {"table": "verdict", "subject": verdict.subject, "state": verdict.state, "line": verdict.line}
        for verdict in report.verdicts
    ]
    rows += [{"table": verdict.subject, **asdict(row)} for verdict in report.verdicts for row in verdict.rows]
    if report.what_if:
        what_if = report.what_if
        rows.append({
            "table": "what if",
            "slowdown": what_if.slowdown,
            "last_stage_share": _finite(what_if.last_stage_share),
            "slowest_share": _finite(what_if.slowest_share),
            "slowest": list(what_if.slowest),
            "step_s": what_if.step_s,
            "ideal_s": what_if.ideal_s,
        })  # fmt: skip
    return rows


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def build_page(report: RunReport, title: str) -> Report:
    """The page of a run: verdicts, heat map rank x step, step times, causes, links, starts, marks."""
    from netlayer.report import Report

    run = report.run
    page = Report(f"Run {printable(title)}", f"{len(run.ranks)} ranks, {len(run.steps)} steps")
    alarms = report.alarms
    if alarms:
        page.verdict("WARN", "; ".join(printable(verdict.line) for verdict in alarms)[:400])
    elif suspected := [verdict for verdict in report.verdicts if verdict.state == "suspected"]:
        page.verdict("NO VERDICT", "; ".join(printable(verdict.line) for verdict in suspected)[:400])
    elif any(verdict.state == "cannot tell" and verdict.subject == "straggler" for verdict in report.verdicts):
        page.verdict("NO VERDICT", "which rank is slow cannot be told from this evidence")
    else:
        page.verdict("PASS", "no straggler, slow link, drift or fallen traffic is seen")
    return page.fill(report, (_verdict_section, _map_section, _time_section, _what_if_section, _table_sections, _end))


def _verdict_section(page: Report, report: RunReport) -> None:
    import pandas as pd

    rows = [(verdict.subject, verdict.state, printable(verdict.line)) for verdict in report.verdicts]
    section = page.section("Verdicts", "What the events show, and what they cannot.", source="measured")
    section.table(pd.DataFrame(rows, columns=["subject", "state", "answer"]))
    if report.blame:
        from netlayer.observe.command import headlines

        for line in headlines(report.blame):
            section.text(f"Hang: {line}")


def _map_section(page: Report, report: RunReport) -> None:
    """Add the heat map: own time of each rank and step against its peers."""
    import pandas as pd

    from netlayer.report import Axis, charts

    run, relative = report.run, report.detection.relative
    if not np.isfinite(relative).any():
        return
    columns = _ranks_on_map(report)
    stride = -(-len(run.steps) // _MAP_STEPS)
    cells = [
        {
            "step": str(run.steps[row]),
            "rank": printable(run.name(column, run.steps[0])),
            "slower": float(np.nanmedian(relative[row : row + stride, column])),
        }
        for column in columns
        for row in range(0, len(run.steps), stride)
        if np.isfinite(relative[row : row + stride, column]).any()
    ]
    section = page.section(
        "Heat map",
        "Own time of each rank (its step without waits for others or for a processor) against the median of the ranks "
        "with equal work.",
        source="measured",
    )
    omitted = f"{len(columns)} of {len(run.ranks)} ranks, the slowest first" if len(columns) < len(run.ranks) else ""
    thin = f"Each cell is the median of {stride} steps" if stride > 1 else ""
    chart = charts.heatmap(
        pd.DataFrame(cells),
        Axis("step", "Step"),
        Axis("rank", "Rank"),
        Axis("slower", "Slower than its peers", unit="share"),
        title="Own time by rank and step",
        height=max(140, min(900, 14 * len(columns))),
    )
    caption = ". ".join(
        filter(None, ("Bright rows are slow ranks, bright columns slow steps of few ranks", omitted, thin))
    )
    section.chart(chart, name="heat_map", caption=caption + ".")


def _ranks_on_map(report: RunReport) -> list[int]:
    """Columns on the map: all in order, or of many the slowest."""
    num = len(report.run.ranks)
    if num <= _MAP_RANKS:
        return list(range(num))
    level = np.nan_to_num(np.nanmedian(np.nan_to_num(report.detection.relative), axis=0))
    return [int(column) for column in np.argsort(-level)[:_MAP_RANKS]]


def _time_section(page: Report, report: RunReport) -> None:
    import pandas as pd

    from netlayer.report import Axis, charts

    run = report.run
    if not len(run.steps) or not np.isfinite(run.step_s).any():
        return
    series = {"step, median rank": np.nanmedian(run.step_s, axis=1), "own time, slowest rank": _row_max(run.own_s)}
    series["own time, median rank"] = np.nanmedian(run.own_s, axis=1)
    rows = [
        {"step": step, "seconds": float(value), "series": name}
        for name, values in series.items()
        for step, value in zip(run.steps, values, strict=True)
        if np.isfinite(value)
    ]
    section = page.section(
        "Step times", "A step is as long as the slowest rank's own time, and its collectives.", source="measured"
    )
    chart = charts.line(pd.DataFrame(rows), "step", Axis("seconds", "Time", unit="s"), colour="series")
    section.chart(chart, name="step_times", caption="Median step, and own times of the median and the slowest rank.")


def _row_max(times: Any) -> Any:
    return np.nanmax(np.where(np.isfinite(times), times, -np.inf), axis=1)


def _what_if_section(page: Report, report: RunReport) -> None:
    from netlayer.report import Figure

    if not report.what_if:
        return
    what_if = report.what_if
    section = page.section(
        "What if nobody were slow",
        "The traced steps replayed with every operation at the mean (communication: median) of its kind.",
        source="simulated",
    )
    section.figures(
        Figure("S", what_if.slowdown, hint="traced over ideal step"),
        Figure("M_S", _finite(what_if.last_stage_share), hint="share that the last stage causes"),
        Figure("M_W", _finite(what_if.slowest_share), hint="share that the slowest 3% of ranks cause"),
    )
    section.text(what_if_line(what_if))


def _table_sections(page: Report, report: RunReport) -> None:
    import pandas as pd

    titles = {
        "straggler": "Stragglers",
        "slow link": "Slow links",
        "drift": "Why steps became longer",
        "traffic": "Traffic off its period",
        "link limit": "Links and their limit",
        "effective time": "Starts of the run",
    }
    for verdict in report.verdicts:
        if verdict.rows:
            frame = pd.DataFrame([{key: _text(value) for key, value in asdict(row).items()} for row in verdict.rows])
            page.section(titles[verdict.subject], printable(verdict.line), source="measured").table(frame)


def _end(page: Report, report: RunReport) -> None:
    import pandas as pd

    run = report.run
    # What all ranks say alike is one row.
    ranks: dict[tuple[Any, ...], list[int]] = {}
    for mark in run.marks:
        text = printable((mark.text or _reason(mark))[:300])
        key = mark.name, mark.step, mark.origin.attempt, printable(mark.origin.host or ""), text
        ranks.setdefault(key, []).extend([] if mark.origin.rank is None else [mark.origin.rank])
    mark_rows = [
        (name, step, describe_ranks(sorted(set(of))) if of else "", host, text)
        for (name, step, _, host, text), of in list(ranks.items())[:_MOST_MARKS]
    ]
    section = page.section("Evidence", "Where this comes from, and what could not be read.", source="measured")
    section.keyvalues({"files": report.kinds or "none", "marks": dict(run.num_marks) or "none"})
    if mark_rows:
        section.table(pd.DataFrame(mark_rows, columns=["mark", "step", "ranks", "host", "text"]))
    for note in report.notes[:_MOST_MARKS]:
        section.note(printable(note))


def _reason(mark: Mark) -> str:
    facts = mark.attributes or {}
    return ", ".join(f"{key} {value}" for key, value in facts.items() if value is not None)


def _text(value: Any) -> Any:
    return printable(value) if isinstance(value, str) else value


def write_page(report: RunReport, title: str, folder: Path) -> Path:
    """Write report.html and its pictures; returns the page's path."""
    return build_page(report, title).write(folder)

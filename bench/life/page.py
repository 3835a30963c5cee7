"""The page of `netlayer run whatif`: published runs beside the model, policies ranked, what moves the result."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt
import pandas as pd

from bench.life.cases import WIDEST
from bench.life.model import PARTS, TRAINING
from bench.life.study import Study
from netlayer.report import Axis, Figure, Report, charts
from netlayer.report.theme import PALETTE
from netlayer.results import write_text

_BARS = 8


@dataclass(frozen=True)
class _Page:
    study: Study
    prefix: str


def study_page(study: Study, command: str, commit: str, prefix: str = "") -> Report:
    """Return the page.

    Args:
        command: that makes it again.
        commit: of the code that ran.
        prefix: of the names of its pictures, which lie with those of other pages.
    """
    if study.life:
        gpus = study.life.servers * study.life.gpus_per_server
        report = Report("A run's life", f"{gpus:,} GPUs for {study.life.days:g} days, simulated", commit=commit)
    else:
        report = Report("A run's life", "published runs beside the event model", commit=commit)
    if study.cases:
        met = sum(result.is_met for result in study.cases)
        report.verdict(
            "PASS" if met == len(study.cases) else "WARN",
            f"{met} of {len(study.cases)} published runs are met by an interval of at most {100 * WIDEST:g} points",
        )
    sections = [(_policies, study.policies), (_curve, study.points), (_swings, study.swings), (_cases, study.cases)]
    report.fill(_Page(study, prefix), [section for section, has_rows in sections if has_rows])
    report.section("How it was run").text(_METHOD).code(command)
    return report


def write_page(path: Path, report: Report) -> None:
    """Write the page to a file or to stdout, and the pictures of its charts to the folder `plots` next to a file."""
    with tempfile.TemporaryDirectory() as folder:
        report.write(folder)
        write_text(path, (Path(folder) / "report.html").read_text(encoding="utf-8"))
        if str(path) != "-":
            shutil.copytree(Path(folder) / "plots", path.resolve().parent / "plots", dirs_exist_ok=True)


_METHOD = (
    "Every second of a run is in one account: training that counts, saves, work done again, detection, diagnosis, "
    "waiting for servers, restarts. Numbers that are not known are ranges, drawn anew for each run; the interval is "
    "the middle 90% of the runs. The closed form (Daly) takes the middle of each range, one kind of failure, standbys "
    "that are always there and saves that are safe at once."
)


def _policies(report: Report, page: _Page) -> None:
    """Open the section of the ranking: the best policy, where the time goes, a table of all."""
    study = page.study
    best, *_ = study.policies
    section = report.section("Policies", source="simulated")
    section.figures(
        Figure("Best policy", f"{best.of_all:.1%}", "", "effective training time of all servers, standbys among them"),
        Figure("Interval", f"{best.low:.1%} to {best.high:.1%}", "", "of the servers that train: middle 90%"),
        Figure("Interruptions", f"{best.interruptions:,.0f}", "", "mean, of a run"),
        Figure("Closed form", f"{best.closed:.1%}", "", "null model, of the servers that train"),
    )
    rows = [
        {"policy": result.policy.label, "share": share, "part": part}
        for result in study.policies[:_BARS]
        for part, share in result.shares.items()
        if part != TRAINING and share > 0
    ]
    if rows:
        order = {part: position for position, part in enumerate(PARTS)}
        frame = pd.DataFrame(rows).sort_values("part", key=lambda parts: parts.map(order), kind="stable")
        section.chart(
            _lost(frame, [result.policy.label for result in study.policies[:_BARS]]),
            name=f"{page.prefix}policies",
            caption="Where the time goes that does not count, best policy first.",
        )
    table = [
        {
            "policy": result.policy.label,
            "of all servers": result.of_all,
            "ETTR": result.ettr,
            "low": result.low,
            "high": result.high,
            "closed form": result.closed,
            "interruptions": result.interruptions,
            "loses by (points)": result.loses_by,
        }
        for result in study.policies
    ]
    formats = dict.fromkeys(("of all servers", "ETTR", "low", "high", "closed form"), ".2%") | {"interruptions": ",.0f"}
    section.table(pd.DataFrame(table), caption="Ranked by what all servers together do.", formats=formats)


def _lost(frame: pd.DataFrame, order: Sequence[str]) -> Any:
    parts = list(dict.fromkeys(frame["part"]))
    return (
        alt.Chart(frame)
        .mark_bar()
        .encode(
            y=alt.Y("policy:N", sort=list(order), axis=alt.Axis(title=None, labelLimit=340, ticks=False)),
            x=alt.X("share:Q", axis=alt.Axis(title="Share of the time", format=".1%")),
            color=alt.Color(
                "part:N", scale=alt.Scale(domain=parts, scheme="tableau10"), legend=alt.Legend(title=None, orient="top")
            ),
            order=alt.Order("rank:Q"),
            tooltip=["policy:N", "part:N", alt.Tooltip("share:Q", format=".2%")],
        )
        .transform_calculate(rank=f"indexof({parts!r}, datum.part)")
        .properties(width="container", height=36 * frame["policy"].nunique())
    )


def _curve(report: Report, page: _Page) -> None:
    study = page.study
    section = report.section("The interval of saves", source=("simulated", "predicted"))
    rows = [
        {"every": point.checkpoint_s, "ettr": value, "model": name}
        for name, field in (
            ("event model", "ettr"),
            ("low (5% of runs)", "low"),
            ("high (95%)", "high"),
            ("closed form", "closed"),
        )
        for point in study.points
        for value in (getattr(point, field),)
    ]
    section.chart(
        charts.line(
            pd.DataFrame(rows),
            Axis("every", "Training between two saves / s", log=True),
            Axis("ettr", "Effective training time", unit="share"),
            colour="model",
        ),
        name=f"{page.prefix}interval",
        caption="The best policy's other settings held.",
    )


def _swings(report: Report, page: _Page) -> None:
    """Open the section of sensitivity: a tornado, and the numbers."""
    study = page.study
    section = report.section("What moves the result", source="simulated")
    section.text(
        "The best policy; each input that is not known from one end of its range to the other, the rest in the middle."
    )
    largest = [one for one in study.swings if one.swing >= 5e-5][:12] or list(study.swings[:1])
    rows = [
        {"input": one.path, "points": 100 * (value - one.ettr_middle), "end": end, "value": at}
        for one in largest
        for end, value, at in (("low end", one.ettr_low, one.low), ("high end", one.ettr_high, one.high))
    ]
    section.chart(
        alt.Chart(pd.DataFrame(rows))
        .mark_bar()
        .encode(
            y=alt.Y(
                "input:N", sort=[one.path for one in largest], axis=alt.Axis(title=None, labelLimit=340, ticks=False)
            ),
            x=alt.X("points:Q", stack=None, axis=alt.Axis(title="Change of effective training time / points")),
            color=alt.Color(
                "end:N",
                scale=alt.Scale(domain=["low end", "high end"], range=list(PALETTE[:2])),
                legend=alt.Legend(title="Input at its", orient="top"),
            ),
            tooltip=[
                "input:N",
                "end:N",
                alt.Tooltip("value:Q", format=",.4~g"),
                alt.Tooltip("points:Q", format="+.2f"),
            ],
        )
        .properties(width="container", height=30 * len(largest)),
        name=f"{page.prefix}sensitivity",
        caption="Tornado: the longest bar is the input worth measuring first.",
    )
    table = [
        {
            "input": one.path,
            "low": one.low,
            "high": one.high,
            "ETTR at low": one.ettr_low,
            "ETTR at high": one.ettr_high,
            "swing / points": 100 * one.swing,
        }
        for one in study.swings
    ]
    formats = {"low": ",.5g", "high": ",.5g", "ETTR at low": ".2%", "ETTR at high": ".2%", "swing / points": ".2f"}
    section.table(pd.DataFrame(table), formats=formats)


def _cases(report: Report, page: _Page) -> None:
    """Open the section of published runs: a chart, verdicts, notes, every input with its source."""
    study = page.study
    section = report.section("Published runs", source="simulated")
    names = [result.case.name for result in study.cases]
    frame = pd.DataFrame(
        [
            {
                "run": result.case.name,
                "low": result.low,
                "high": result.high,
                "middle": result.middle,
                "closed": result.closed,
                "from": result.case.published.low,
                "to": result.case.published.high,
                "published": result.case.published.text,
            }
            for result in study.cases
        ]
    )
    y = alt.Y("run:N", sort=names, axis=alt.Axis(title=None, labelLimit=340, ticks=False))
    scale = alt.Scale(domain=[float(frame[["low", "from"]].min().min()) - 0.02, 1.0], zero=False, nice=False)
    base = alt.Chart(frame).encode(y=y)
    x = alt.X("low:Q", scale=scale, axis=alt.Axis(title="Effective training time ratio", format=".0%"))
    hints = ["run:N", "published:N", *(alt.Tooltip(f"{name}:Q", format=".1%") for name in ("low", "middle", "high"))]
    section.chart(
        alt.layer(
            base.mark_bar(height=22, opacity=0.35, color=PALETTE[1]).encode(x=alt.X("from:Q", scale=scale), x2="to:Q"),
            base.mark_bar(height=7, color=PALETTE[0]).encode(x=x, x2="high:Q", tooltip=hints),
            base.mark_point(shape="diamond", size=70, color=PALETTE[2], filled=True, opacity=1).encode(
                x=alt.X("closed:Q", scale=scale)
            ),
        ).properties(width="container", height=40 * len(names)),
        name=f"{page.prefix}published",
        caption="Bar: the model's middle 90%. Pale: the published figure, rounded, or its bound. Diamond: closed form.",
    )
    table = [
        {
            "run": result.case.name,
            "published": f"{result.case.published.text} ({result.case.published.by})",
            "verdict": result.verdict + ("" if result.is_narrow else ", too wide"),
            "low": result.low,
            "median": result.middle,
            "high": result.high,
            "width / points": 100 * result.width,
            "closed form": result.closed,
            "runs that agree": result.share,
        }
        for result in study.cases
    ]
    formats = dict.fromkeys(("low", "median", "high", "closed form"), ".1%")
    section.table(
        pd.DataFrame(table), formats=formats | {"width / points": ".1f", "runs that agree": ".0%"}, caption=_AGREE
    )
    notes = [{"run": one.case.name, "note": one.case.note, "source": one.case.source} for one in study.cases]
    section.table(pd.DataFrame(notes))
    inputs = [
        {
            "run": result.case.name,
            "input": path,
            "low": one.low,
            "high": one.high,
            "drawn": f"per {one.per}",
            "source": one.source or "none",
            "reason of the range": one.reason,
        }
        for result in study.cases
        for path, one in result.case.life.ranges()
        if one.source or one.reason
    ]
    section.table(pd.DataFrame(inputs), formats={"low": ",.4g", "high": ",.4g"}, caption="Every input and its source.")


_AGREE = (
    "`holds`: the interval holds the published figure, or lies within the published bound as a whole; `in part`: they "
    "overlap. No input is taken from the figure that it predicts."
)

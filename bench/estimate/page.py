"""The arena's page: verdict, scores beside the nulls, every row measured and predicted, and what was fitted."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from bench.estimate.arena import CARRIED, CONSTANT, OURS, Bar, Prediction, Score, on_rows_of
from bench.estimate.devices import NUMBERS
from bench.estimate.search import describe
from bench.estimate.step import MFU_FORMULA
from netlayer.report import Axis, Figure, Report, charts
from netlayer.results import RunRecord


@dataclass(frozen=True)
class _Arena:
    predictions: Mapping[str, Sequence[Prediction]]
    scores: Mapping[str, Sequence[Score]]
    bars: Sequence[Bar]
    record: RunRecord
    aside: Mapping[str, Sequence[Score]]


def arena_page(
    predictions: Mapping[str, Sequence[Prediction]],
    scores: Mapping[str, Sequence[Score]],
    bars: Sequence[Bar],
    record: RunRecord,
    aside: Mapping[str, Sequence[Score]] | None = None,
) -> Report:
    """Return the page; `Report.write` puts it into a folder."""
    report = Report(
        "Estimator arena",
        f"{len(predictions[OURS])} public rows of measured steps, each family predicted from the others alone",
        commit=str(record.environment.get("commit", "")),
    )
    missed = [bar for bar in bars if not bar.is_met]
    text = f"{len(bars) - len(missed)} of {len(bars)} bars met"
    if missed:
        text += "; missed: " + "; ".join(f"{bar.name} ({bar.value:.2f}, limit {bar.limit:.2f})" for bar in missed)
    report.verdict("PASS" if not missed else "WARN", text)
    return report.fill(
        _Arena(predictions, scores, bars, record, aside or {}), [_scores, _bars, _aside, _rows, _numbers]
    )


def _scores(report: Report, arena: _Arena) -> None:
    """Open the section of errors: totals, a chart of ours and the constant, a table of all estimators."""
    section = report.section("Errors by family", source="predicted")
    total = {name: scores[0] for name, scores in arena.scores.items()}
    section.figures(
        *(
            Figure(name, f"{score.predicted:.2f}", "points", f"skip one family, {_rows_told(arena, name)}")
            for name, score in total.items()
            if score.predicted is not None
        ),
        *(
            Figure(name, f"{score.scaled:.2f}", "points", "from the smallest row of a series")
            for name, score in total.items()
            if score.scaled is not None and name in (OURS, CARRIED)
        ),
    )
    rows = [
        {"family": score.family, "estimator": name, "points": score.predicted}
        for name, scores in arena.scores.items()
        for score in scores[1:]
        if score.predicted is not None and name in (OURS, CONSTANT)
    ]
    section.chart(
        charts.bars(pd.DataFrame(rows), Axis("family", "Family"), Axis("points", "MFU points"), colour="estimator"),
        name="families",
        caption="Mean absolute error of predicted MFU, each family omitted from the fit.",
    )
    table = [
        {
            "family": scores[0].family,
            "rows": scores[0].num_rows,
            **{score.estimator: score.predicted for score in scores if score.predicted is not None},
            "ours, fitted": next(score.fitted for score in scores if score.estimator == OURS),
            "ours, from the smallest row": next(score.scaled for score in scores if score.estimator == OURS),
            CARRIED: next(score.scaled for score in scores if score.estimator == CARRIED),
        }
        for scores in zip(*arena.scores.values(), strict=True)
    ]
    frame = pd.DataFrame(table)
    numbers = {name: ".2f" for name in frame.columns if name not in ("family", "rows")}
    section.table(
        frame,
        caption="Mean absolute errors, points of MFU. All but `fitted` predict rows that the fit did not see.",
        formats=numbers,
    )


def _rows_told(arena: _Arena, name: str) -> str:
    """Return of how many rows an estimator's error is the mean."""
    number, total = on_rows_of(arena.predictions, name)[0], len(arena.predictions[name])
    return "all rows" if number == total else f"the {number} of {total} rows that it can tell"


def _aside(report: Report, arena: _Arena) -> None:
    """Open the section of the rows that no fit saw, where there are any."""
    if not arena.aside:
        return
    rows = [
        {
            "source": scores[0].family,
            "rows": scores[0].num_rows,
            **{score.estimator: score.predicted for score in scores},
        }
        for scores in zip(*arena.aside.values(), strict=True)
    ]
    section = report.section("Rows kept aside", source="predicted")
    section.table(
        pd.DataFrame(rows),
        caption="Mean absolute errors, points of MFU, from a fit to all rows above: rows that no fit sees.",
        formats=dict.fromkeys(arena.aside, ".2f"),
    )


def _bars(report: Report, arena: _Arena) -> None:
    section = report.section("Bars", source="predicted")
    rows = [
        {"bar": bar.name, "reached": bar.value, "limit": bar.limit, "": "met" if bar.is_met else "missed"}
        for bar in arena.bars
    ]
    section.table(pd.DataFrame(rows), caption="Points of MFU.", formats={"reached": ".2f", "limit": ".2f"})


def _rows(report: Report, arena: _Arena) -> None:
    """Open the section of rows: a chart of measured and predicted MFU, and the table with the sources."""
    section = report.section("Every row", source=("measured", "predicted"))
    rows = [
        {
            "family": one.row.family,
            "release": one.row.release,
            "precision": one.row.plan.precision,
            "GPUs": one.row.gpus,
            "layout": describe(one.row.plan),
            "step / s, measured": one.row.step_s,
            "MFU, measured": one.row.mfu,
            "MFU, predicted": one.predicted,
            "error": one.error,
            "MFU, from the smallest row": one.scaled,
            "MFU, fitted": one.fitted,
        }
        for one in arena.predictions[OURS]
    ]
    frame = pd.DataFrame(rows)
    scatter = frame.rename(columns={"MFU, measured": "measured", "MFU, predicted": "predicted"})
    lines = [
        {"row": index + 1, "mfu": value, "kind": kind}
        for kind in ("measured", "predicted")
        for index, value in enumerate(scatter[kind])
    ]
    section.chart(
        charts.line(pd.DataFrame(lines), Axis("row", "Row of the table"), Axis("mfu", "MFU / %"), colour="kind"),
        name="rows",
        caption="MFU of every row, attention in full: measured by its source, and predicted by ours from the other "
        "families alone.",
    )
    formats = {"GPUs": ",.0f", "step / s, measured": ".3f", "error": "+.1f"}
    formats |= {name: ".1f" for name in frame.columns if name.startswith("MFU")}
    section.table(frame, caption="Percent and points; peak of the precision of the GEMMs.", formats=formats)
    sources = sorted({f"{one.row.source}" for one in arena.predictions[OURS]})
    section.text("Sources: " + "; ".join(sources) + ".")


def _numbers(report: Report, arena: _Arena) -> None:
    section = report.section("What is fitted", source="predicted")
    section.table(
        pd.DataFrame([{"generation": name, **dataclasses.asdict(numbers)} for name, numbers in NUMBERS.items()]),
        caption="The six numbers of a generation that `netlayer estimate step` takes; Hopper's are fitted to all rows, "
        "Ampere's are published figures. In the arena they are fitted anew without each family.",
        formats={field.name: ".3f" for field in dataclasses.fields(NUMBERS["Hopper"])},
    )
    section.text(MFU_FORMULA + ".")
    estimator = str(arena.record.arguments.get("estimator") or "")
    section.code(f"netlayer estimate arena {estimator}".strip())

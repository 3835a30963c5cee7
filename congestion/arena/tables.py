"""The arena's records in short, and the Markdown tables that a report is filled with from them.

`python -m congestion.arena.tables RECORD.json... [--into REPORT.md]`: a table, or several, for each record that it
knows, printed, or put into the report between `<!-- table NAME -->` and `<!-- end -->`. Not covered: the report's
words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import pandas as pd

from congestion.arena.protocol import SUITE, Suite
from congestion.arena.verdict import METRICS, VERDICTS, claims, compare, is_whole, verdict
from netlayer.errors import ConfigError
from netlayer.results import Row, load_record, write_text

CASES, CLAIMS, TUNED = "congestion.arena.cases", "congestion.arena.claims", "congestion.arena.tuned"
ROBUSTNESS, PARTS = "congestion.arena.robustness", "congestion.arena.parts"

_CASE = ["workload", "condition"]
_MOST_CHANGES = 12  # rows of the table of robustness


def case_rows(frame: pd.DataFrame, candidate: str, suite: Suite = SUITE) -> list[Row]:
    """A row a case and law: means over the seeds, and the candidate's ratio to that law, its interval and verdict."""
    means = frame.groupby([*_CASE, "scenario", "law"], sort=False)[[*METRICS, "bound_us", "buffer_bytes"]].mean()
    ratios = compare(frame, candidate, suite=suite).rename(columns={"rival": "law"})
    rows = means.reset_index().merge(ratios.drop(columns="pairs"), how="left", on=[*_CASE, "law"])
    rows["seeds"] = frame["seed"].nunique()
    return _rows(rows.round(6))


def claim_rows(frame: pd.DataFrame, candidate: str, suite: Suite = SUITE) -> list[Row]:
    """A row a claim, and one of the verdict on all."""
    all_claims = claims(frame, candidate, suite)
    word, _ = verdict(all_claims, is_whole(frame, suite))
    rows = [{"asked": one.text, "holds": one.holds, "found": one.sentence} for one in all_claims]
    return [*rows, {"asked": "all of it, on the whole suite", "holds": word == "PASS", "found": word}]


def markdown(rows: Sequence[Mapping[str, Any]], titles: Mapping[str, str] | None = None) -> str:
    """A table of texts and numbers, the keys in the first row's order or `titles`'."""
    titles = titles or {key: key for key in rows[0]}
    lines = [list(titles.values()), ["---"] * len(titles), *([_text(row[key]) for key in titles] for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def law_table(rows: pd.DataFrame) -> list[Row]:
    """A row a law over all cases, fastest first: geometric means of times, means of shares."""
    best = rows.groupby(_CASE)["completion_us"].transform("min")
    wide = rows.assign(
        completion=np.log(rows["completion_us"] / best), over_bound=np.log(rows["completion_us"] / rows["bound_us"])
    )
    times = wide.groupby("law")[["completion", "over_bound"]].mean().apply(np.exp).round(3)
    shares = wide.groupby("law")[["victim_slowdown", "pause_share"]].mean()
    table = times.join(shares).sort_values("completion").reset_index()
    table["pause_share"] = [f"{share:.2%}" for share in table["pause_share"]]
    return _rows(table.round(3))


def workload_table(rows: pd.DataFrame) -> list[Row]:
    """A row a workload: each law's time over the bound, geometric mean over the conditions."""
    logs = rows.assign(over_bound=np.log(rows["completion_us"] / rows["bound_us"]))
    table = logs.pivot_table(index="workload", columns="law", values="over_bound", sort=False).apply(np.exp)
    return _rows(table.round(3).reset_index())


def case_table(rows: pd.DataFrame, scenario: str) -> list[Row]:
    """A row a case of a scenario: mean times in us, and port-time paused."""
    made: list[Row] = []
    for (workload, condition), laws in rows[rows["scenario"] == scenario].groupby(_CASE, sort=False):
        cells = {
            row["law"]: f"{row['completion_us']:.0f} ({row['pause_share']:.1%})" for row in laws.to_dict("records")
        }
        bound = f"{laws['bound_us'].iloc[0]:.0f}"
        made.append({"workload": workload, "condition": condition, "bound": bound, **cells})
    return made


def _of_cases(rows: Sequence[Row]) -> dict[str, Sequence[Row]]:
    frame = pd.DataFrame(rows)
    counts = frame.dropna(subset="verdict").groupby(["law", "verdict"], sort=False).size().unstack(fill_value=0)
    counts = counts.reindex(columns=VERDICTS, fill_value=0)
    return {
        "laws": law_table(frame),
        "workloads": workload_table(frame),
        "asked": case_table(frame, SUITE.rules.asked_of),
        "verdicts": _rows(counts.reset_index()),
    }


def _of_changes(rows: Sequence[Row]) -> dict[str, Sequence[Row]]:
    """Per law how many changes cost it at least 2%; and the changes that cost most."""
    frame = pd.DataFrame(rows)
    spread = frame.groupby("law", sort=False)["completion"].agg(["count", "min", "median", "max"]).round(3)
    spread["2% and more"] = (frame["completion"] >= SUITE.rules.no_worse).groupby(frame["law"]).sum()
    worst = frame.sort_values("completion", ascending=False).head(_MOST_CHANGES)
    return {"robustness": _rows(spread.reset_index()), "changes": _changes(worst)}


def _changes(frame: pd.DataFrame) -> list[Row]:
    return [
        {
            "law": row["law"],
            "change": row["change"],
            "completion": f"{row['completion']:.3f} ({row['low']:.3f} to {row['high']:.3f})",
            "paused": f"{row['changed_pause_share']:.2%} (before {row['pause_share']:.2%})",
        }
        for row in frame.to_dict("records")
    ]


def _rows(frame: pd.DataFrame) -> list[Row]:
    """Return rows with None where the frame has no value, as JSON has it."""
    return [
        {str(key): None if value is None or value != value else value for key, value in row.items()}
        for row in frame.to_dict("records")
    ]


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    return f"{value:#.4g}" if isinstance(value, float) else str(value)


_TABLES: dict[str, Callable[[Sequence[Row]], dict[str, Sequence[Row]]]] = {
    CASES: _of_cases,
    CLAIMS: lambda rows: {"claims": rows},
    TUNED: lambda rows: {"tuned": rows},
    ROBUSTNESS: _of_changes,
    PARTS: lambda rows: {"parts": _changes(pd.DataFrame(rows))},
}


def filled(report: str, tables: Mapping[str, str]) -> str:
    """The report's text with its tables anew.

    Raises:
        ConfigError: it has no place for one of them.
    """
    for name, table in tables.items():
        before, begin, rest = report.partition(f"<!-- table {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not (begin and end):
            remedy = f"write <!-- table {name} --> and <!-- end --> on lines of their own"
            raise ConfigError("--into", name, "has no place in the report", remedy)
        report = f"{before}{begin}\n{table}\n\n{end}{after}"
    return report


@click.command()
@click.argument("records", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--into", type=click.Path(path_type=Path), help="A report whose tables they replace.")
def command(records: tuple[Path, ...], into: Path | None) -> None:
    """Print the Markdown tables of the arena's RECORDs, or put them into a report."""
    tables: dict[str, str] = {}
    for path in records:
        record = load_record(path)
        if record.name not in _TABLES:
            raise ConfigError("RECORDS", path, f"is of {record.name}", f"give one of {', '.join(_TABLES)}")
        tables |= {name: markdown(rows) for name, rows in _TABLES[record.name](record.rows).items() if rows}
    if into:
        write_text(into, filled(into.read_text(encoding="utf-8"), tables))
        return
    for name, table in tables.items():
        click.echo(f"{name}\n\n{table}\n")


if __name__ == "__main__":
    from netlayer.cli import run

    run(command, "python -m congestion.arena.tables")

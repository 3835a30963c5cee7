"""Outputs of the arena's rows: the table of all laws, the page, and the record. Not covered: what they say
(arena.verdict), how it looks (arena.page).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from congestion.arena.page import Findings, build_page
from congestion.arena.run import Contender
from congestion.arena.runner import Plan, Results
from congestion.arena.tables import CASES, CLAIMS, case_rows, claim_rows
from congestion.arena.verdict import METRICS, check, is_whole, standing
from netlayer.environ import snapshot
from netlayer.printing import print_rows
from netlayer.report import Report
from netlayer.results import RunRecord, utc_now

_COLUMNS = {
    "law": "law",
    "completion": "completion",
    "over_bound": "over the bound",
    "fct_p99": "p99 FCT",
    "fct_max": "max FCT",
    "goodput_bps": "goodput",
    "victim_slowdown": "victim's slowdown",
    "pause_share": "port-time paused",
    "unfinished": "runs at the limit",
}
_FOOT = "Times over the best law's of each case, and completion over its lower bound: geometric means; others: means."
_SERIES = ("fct_us", "samples")


def frame_of(results: Results) -> pd.DataFrame:
    """The rows as `arena.verdict` takes them."""
    frame = pd.DataFrame(results.rows)
    return frame.astype(dict.fromkeys(METRICS, float)).drop(columns=list(_SERIES), errors="ignore")


def not_run_words(plan: Plan) -> str:
    """Describe the cases that were requested and cannot run yet; empty where all did."""
    reasons = dict.fromkeys(reason for _, reason in plan.not_run)
    return f"not run: {len(plan.not_run)} cases, for the engine lacks {' and '.join(reasons)}" if reasons else ""


def print_table(results: Results) -> None:
    """One row a law, best first, on stdout."""
    frame = frame_of(results)
    at_limit = frame[frame["unfinished"] > 0].groupby("law").size()
    table = standing(frame)
    table["unfinished"] = table["law"].map(at_limit).fillna(0).astype(int)
    rows = [
        {str(key): None if pd.isna(value) else value for key, value in row.items()} for row in table.to_dict("records")
    ]
    part = "" if is_whole(frame, results.plan.suite) else ", a part of the suite"
    title = f"simulated: {len(results.plan.cases)} cases, {len(results.plan.seeds)} seeds{part}"
    print_rows(title, rows, _COLUMNS, _FOOT)


def page_of(results: Results, candidate: str, command: str) -> Report:
    """The page on `candidate`.

    Raises:
        ValueError: the claims cannot be put to these rows: a rival or a second seed is missing, or all-to-all.
    """
    frame = frame_of(results)
    report = build_page(
        Findings(
            frame,
            candidate,
            flows=_flows(results),
            samples=_samples(results),
            tiers=_tiers(frame),
            buffers=_buffers(results),
            command=command,
            suite=results.plan.suite,
        )
    )
    _add_notes(report, results, frame)
    return report


def record_of(results: Results, started_utc: str, arguments: Mapping[str, Any]) -> RunRecord:
    """All rows without their flows; the suite's digest and every law's settings in it."""
    plan = results.plan
    return RunRecord(
        name="congestion.arena",
        source="simulated",
        rows=[{key: value for key, value in row.items() if key not in _SERIES} for row in results.rows],
        started_utc=started_utc,
        ended_utc=utc_now(),
        arguments={**arguments, "suite": plan.suite.digest, "not_run": [case.name for case, _ in plan.not_run]},
        config={one.name: one.settings().model_dump(mode="json") for one in plan.contenders},
        environment=snapshot(),
    )


def short_records(record: RunRecord, results: Results, candidate: str) -> list[RunRecord]:
    """Return the tables of the record that a report keeps: a row a case and law, and a row a claim on the candidate.

    Raises:
        ValueError: as `page_of`.
    """
    frame, suite = frame_of(results), results.plan.suite
    check(frame)
    rows = {CASES: case_rows(frame, candidate, suite), CLAIMS: claim_rows(frame, candidate, suite)}
    return [replace(record, name=name, rows=its) for name, its in rows.items()]


def _flows(results: Results) -> pd.DataFrame | None:
    frames = [
        pd.DataFrame({"fct_us": row["fct_us"]}).assign(law=row["law"], case=f"{row['workload']}/{row['condition']}")
        for row in results.rows
        if "fct_us" in row
    ]
    return pd.concat(frames, ignore_index=True) if frames else None


def _samples(results: Results) -> pd.DataFrame | None:
    frames = [
        pd.DataFrame(row["samples"]).assign(law=row["law"], case=f"{row['workload']}/{row['condition']}")
        for row in results.rows
        if "samples" in row
    ]
    return pd.concat(frames, ignore_index=True) if frames else None


def _buffers(results: Results) -> pd.DataFrame | None:
    columns = ["workload", "condition", "buffer_bytes", "pause_share"]
    return pd.DataFrame(results.buffers)[columns] if results.buffers else None


def _tiers(frame: pd.DataFrame) -> pd.DataFrame:
    shares = pd.DataFrame(frame["pause_share_by_tier"].tolist()).assign(law=frame["law"])
    long = shares.melt("law", var_name="tier", value_name="pause_share")
    return long.groupby(["law", "tier"], sort=False)["pause_share"].mean().reset_index()


def _add_notes(report: Report, results: Results, frame: pd.DataFrame) -> None:
    """Add what a reader must know of these runs: settings that differ from those published, what did not run or end."""
    section = report.section("These runs", source="simulated")
    section.table(pd.DataFrame([_contender(one) for one in results.plan.contenders]), caption="Who ran, and with what.")
    not_run = not_run_words(results.plan)
    if not_run:
        section.note(f"{not_run[0].upper()}{not_run[1:]}.")
    stuck = frame[frame["unfinished"] > 0]
    if len(stuck):
        section.table(
            stuck[["law", "workload", "condition", "seed", "unfinished"]],
            caption=f"Runs that had not ended at the limit, {results.plan.suite.rules.limit_ms} ms, and flows left.",
        )


def _contender(one: Contender) -> dict[str, str]:
    changed = ", ".join(override.removeprefix("congestion.") for override in one.overrides)
    return {
        "law": one.name,
        "preset": one.preset,
        "changed": changed or "nothing: as published",
        "file": str(one.file or ""),
    }

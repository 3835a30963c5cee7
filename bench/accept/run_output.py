"""Output formats of an acceptance run: text table, record, JUnit XML, page with heat map, drain lists and tickets.

The results themselves are in `trial`.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bench.accept.agents.faults import InjectedFault
from bench.accept.judge import output
from bench.accept.judge.logs import SEVERITY, Judgement
from bench.accept.phases.confirm import NOT_QUIET
from bench.accept.phases.trial import NAME, Trial, suspect_rows
from bench.accept.run import Result, Settings
from netlayer.results import RunRecord
from netlayer.verdict import Finding, Verdict

if TYPE_CHECKING:
    from netlayer.report import Report


def judgement_of(result: Result) -> Judgement:
    """Return the findings as a judgement, the worst first, with phases as files. An interrupted run is not a PASS."""
    findings = [*result.trial.findings, *_interruption(result)]
    ordered = sorted(findings, key=lambda finding: SEVERITY.index(finding.verdict))
    phases = {finding.file: finding.file for finding in ordered}
    return Judgement(tuple(ordered), (), phases)


def _interruption(result: Result) -> list[Finding]:
    if not result.stopped:
        return []
    subject, figure = (
        f"{len(result.trial.members)} ranks",
        f"{result.stopped} after {', '.join(result.done) or 'no phase'}",
    )
    return [Finding("WARN", subject, "whole run", figure, "all phases", "run it again, to its end", "run")]


def junit(result: Result) -> str:
    """Format as JUnit XML; an interrupted run is an error."""
    lines = tuple(f"{one.check}: {one.figure}; {one.next_step}" for one in _interruption(result))
    return output.junit(replace(judgement_of(result), damaged=lines), "netlayer accept")


def format_run(result: Result) -> Iterator[str]:
    """Yield the lines of the verdict table, the drain lists, and a final line with verdict and summary."""
    judgement = judgement_of(result)
    *table, _ = output.format_table(judgement, where="phase")
    yield from table
    for system, lines in drain_lists(result.trial).items():
        yield ""
        yield f"drain list for {system}:"
        yield from (f"  {line}" for line in lines)
    if result.trial.dry_run and any(one.verdict == "FAIL" and one.kind == "node" for one in result.trial.suspects):
        yield ""
        yield "no drain list for ranks: this was a dry run, with virtual nodes or injected faults"
    if unknown := _unreachable(result.trial):
        yield ""
        yield f"not reached, and in no drain list: {', '.join(unknown)}; correct the hosts file, then run it again"
    yield f"{judgement.verdict}: {sentence(result)}"


def sentence(result: Result) -> str:
    """Summarise the run in a sentence: `faulty: node3 (gemm); 8 ranks, 9 phases`."""
    trial = result.trial
    faulty, suspicious = (_list_suspects(trial, word) for word in ("FAIL", "WARN"))
    text = f"faulty: {faulty}; " if faulty else ""
    text += f"without an address: {', '.join(unknown)}; " if (unknown := _unreachable(trial)) else ""
    text += f"to look at: {suspicious}; " if suspicious else ""
    if not text and not result.stopped:
        text = _no_suspect_phrase(result)
    phases = len(result.done)
    text += f"{len(trial.members)} ranks, {phases} phase{'s' * (phases != 1)}"
    return text + (f"; stopped early ({result.stopped}): results are partial" if result.stopped else "")


def missed_faults(result: Result, faults: Sequence[InjectedFault]) -> str:
    """Name the injected faults that no finding shows, and why; empty if there are none.

    A fault is found by a finding for its ranks, for more than these (a group that they are in), or for one of them (a
    node whose links are slow).
    """
    suspects = [set(one.ranks) for one in result.trial.suspects if one.ranks and one.kind != NAME]
    missed = [each for each in faults if not any(set(each.ranks) <= one or one <= set(each.ranks) for one in suspects)]
    if not missed:
        return ""
    text = ", ".join(f"{one.kind}:{'-'.join(map(str, one.ranks))}:{one.amount:g}" for one in missed)
    if any(finding.figure.startswith(NOT_QUIET) for finding in result.trial.findings):
        return f"{text}; {NOT_QUIET}: inject more of it, or run it again while nothing else runs on this machine"
    return f"{text}; no phase of {', '.join(result.done) or 'this run'} shows it: inject more of it, or run all phases"


def _no_suspect_phrase(result: Result) -> str:
    """Return the summary of a run without suspects: all ranks may share a fault, or nothing could be judged."""
    if judgement_of(result).verdict == "PASS":
        return "no outlier; "
    bad = [finding for finding in result.trial.findings if finding.verdict in ("FAIL", "WARN")]
    common = [finding for finding in bad if not finding.figure.startswith(NOT_QUIET)]
    if common:
        return f"to look at: {', '.join(dict.fromkeys(f'{one.subject} ({one.file})' for one in common))}; "
    return f"{NOT_QUIET}; " if bad else "nothing could be judged; "


def _unreachable(trial: Trial) -> list[str]:
    """Return the names in the hosts file that have no address."""
    return [one.label for one in trial.suspects if one.kind == NAME]


def _list_suspects(trial: Trial, verdict: Verdict) -> str:
    """List suspects with their phases: `node3 (gemm, copy), node5 (pairs)`; warnings on faulty ones are omitted."""
    faulty = {one.label for one in trial.suspects if one.verdict == "FAIL"} if verdict == "WARN" else set()
    phases: dict[str, list[str]] = {}
    for one in trial.suspects:
        if one.verdict == verdict and one.label not in faulty and one.kind != NAME:
            phases.setdefault(one.label, []).append(one.phase)
    return ", ".join(f"{name} ({', '.join(dict.fromkeys(phase_names))})" for name, phase_names in phases.items())


def drain_lists(trial: Trial) -> dict[str, list[str]]:
    """Return the commands that take faulty hosts out of service, by scheduler.

    A host is drained for a faulty rank, NIC or other part, and for a faulty link inside it. It is not drained for a
    link between hosts, a warning, or a name without an address; nor for a rank in a dry run, since virtual nodes and
    injected faults belong to no real host.
    """
    kinds = ("NIC", "part") if trial.dry_run else ("NIC", "part", "node")
    reasons: dict[str, str] = {}
    for one in trial.suspects:
        hosts = {trial.members[rank].host for rank in one.ranks}
        inside = one.kind == "link" and len(hosts) == 1 and not trial.dry_run
        if one.verdict == "FAIL" and (one.kind in kinds or inside):
            for rank in one.ranks:
                member = trial.members[rank]
                label = member.label if one.kind == "node" else one.label
                reasons.setdefault(_node_name(member.host), f"netlayer accept: {one.phase} of {label}")
    if not reasons:
        return {}
    slurm = [f'scontrol update nodename={name} state=drain reason="{why}"' for name, why in reasons.items()]
    return {"Slurm": slurm, "Kubernetes": [f"kubectl cordon {name}  # {why}" for name, why in reasons.items()]}


def _node_name(host: str) -> str:
    """Return the host's name for Slurm and Kubernetes, without the ssh user."""
    name = host.rpartition("@")[2]
    return os.uname().nodename if name in ("localhost", "127.0.0.1", "::1") else name


def tickets(result: Result) -> dict[str, str]:
    """Return a ticket text for each suspect: checks, measured and expected values, and next steps."""
    findings_by_subject: dict[str, list[Finding]] = {}
    unknown = _unreachable(result.trial)
    suspect_labels = {one.label for one in result.trial.suspects}
    for finding in result.trial.findings:
        warned = finding.verdict == "WARN" and finding.subject in suspect_labels
        if (finding.verdict == "FAIL" or warned) and finding.subject not in unknown:
            findings_by_subject.setdefault(finding.subject, []).append(finding)
    texts = {}
    for subject, subject_findings in findings_by_subject.items():
        word = (
            "failed acceptance"
            if any(one.verdict == "FAIL" for one in subject_findings)
            else "to be looked at, not drained:"
        )
        lines = [f"{subject}: {word} in {', '.join(dict.fromkeys(one.file for one in subject_findings))}", ""]
        for one in subject_findings:
            lines += [f"Check:    {one.check}", f"Found:    {one.figure}", f"Expected: {one.expected}"]
            lines += [f"Next:     {one.next_step}", ""]
        lines.append(f"Measured by netlayer accept over {len(result.trial.members)} ranks; the record has every row.")
        texts[subject] = "\n".join(lines) + "\n"
    return texts


def record(
    result: Result, arguments: Mapping[str, Any], environment: Mapping[str, Any], started: str, ended: str
) -> RunRecord:
    """Build the record: verdict, findings, suspects, drain lists, tickets, scores, evidence, and all measured rows."""
    trial, judgement = result.trial, judgement_of(result)
    rows: list[dict[str, Any]] = [
        {"table": "overall", "verdict": judgement.verdict, "summary": sentence(result), "stopped": result.stopped}
    ]
    rows += [{"table": "finding", "phase": one.file, **_finding_row(one)} for one in judgement.findings]
    rows += suspect_rows(trial)
    rows += [{"table": "drain", "system": name, "lines": lines} for name, lines in drain_lists(trial).items()]
    rows += [{"table": "ticket", "subject": name, "text": text} for name, text in tickets(result).items()]
    rows += [{"table": "score", **row} for row in trial.scores]
    rows += [{"table": "evidence", **row} for row in trial.evidence]
    rows += [{"table": "measured", **row} for row in trial.rows]
    devices = sorted({row["device"] for row in trial.rows if "device" in row})
    return RunRecord(
        "bench.accept", "measured", rows, started, ended, arguments, environment=environment, devices=devices
    )


def page(result: Result, settings: Settings, commit: str, name: str) -> Report:
    """Build the page: faults with next steps, the matrix of pairs, device speeds, then all other checks.

    Args:
        result: result of the run.
        settings: settings of the run.
        commit: commit of this program.
        name: prefix of the picture files.
    """
    import pandas as pd

    from netlayer.report import Report

    judgement = judgement_of(result)
    title = f"{len(settings.members)} ranks on {settings.backend}"
    report: Report = Report("Acceptance", title, commit=commit)
    report.verdict(judgement.verdict, f"{sentence(result)}.")
    bad = [finding for finding in judgement.findings if finding.verdict in ("FAIL", "WARN")]
    if bad:
        section = report.section("Faults and warnings", "What was found, and what to do next.", source="measured")
        section.table(pd.DataFrame([output.finding_cells(one) for one in bad]), max_rows=500)
    if result.bandwidth:
        _heat_map(report, result, name)
    _device_speeds(report, result.trial, name)
    for system, lines in drain_lists(result.trial).items():
        report.section(f"Drain list for {system}").code("\n".join(lines))
    for subject, text in tickets(result).items():
        report.section(f"Ticket: {subject}").code(text)
    good = [_without_file(output.table_cells(one)) for one in judgement.findings if one.verdict not in ("FAIL", "WARN")]
    if good:
        lead = "Without a verdict: nothing to compare it with (no expectation, too few peers), or not read or run."
        report.section("Passed, or without a verdict", lead, source="measured").table(pd.DataFrame(good), max_rows=500)
    return report


def _heat_map(report: Any, result: Result, prefix: str) -> None:
    """Add the section with the bandwidth from each rank to each other, suspects named."""
    import pandas as pd

    from netlayer.report import Axis, charts

    trial, ranks = result.trial, sorted({rank for pair in result.bandwidth for rank in pair})
    rows = [
        {"from": trial.label([src]), "to": trial.label([dst]), "bw": result.bandwidth.get((src, dst))}
        for src in ranks
        for dst in ranks
    ]
    axes = (Axis("to", title="To"), Axis("from", title="From"), Axis("bw", title="Bandwidth", unit="GB/s"))
    frame = pd.DataFrame(rows).dropna()
    slow = [one for one in trial.suspects if one.kind == "link"]
    names = dict.fromkeys(trial.label(one.ranks) for one in slow)
    note = f" Suspects: {', '.join(names)}." if slow else ""
    section = report.section(
        "Pairs", "Messages one way between every two ranks, in rounds of disjoint pairs.", source="measured"
    )
    chart = charts.heatmap(frame, *axes, title="Bandwidth from each rank to each other")
    for layer in chart.layer:  # else labels are sorted by first appearance, and no row has all columns
        layer.encoding.x.sort = [trial.label([rank]) for rank in ranks]
    section.chart(
        chart,
        name=f"{prefix}-pairs",
        caption=f"A slow node is a dark row and column, a slow link one dark pair of cells.{note}",
    )


def _device_speeds(report: Any, trial: Trial, prefix: str) -> None:
    import pandas as pd

    from netlayer.report import Axis, charts

    rates: dict[str, list[float]] = {}
    for row in trial.rows:
        if row["check"] == "gemm" and row["phase"] == "gemm" and row["size_bytes"] == _largest_gemm(trial):
            operations = row["tflops"] * row["p50_us"]  # of the time that counts on such devices
            rates.setdefault(trial.label([row["rank"]]), []).append(operations / trial.work.time_us(row))
    if not rates:
        return
    pick = max if trial.work.shared else statistics.median
    rows = [{"rank": name, "tflops": pick(each)} for name, each in rates.items()]
    section = report.section("Devices", "Product of two matrices on every rank.", source="measured")
    section.chart(
        charts.bars(pd.DataFrame(rows), "rank", Axis("tflops", title="GEMM", unit="TFLOP/s")),
        name=f"{prefix}-gemm",
        caption="Each rank's GEMM rate; a slow device is a short bar.",
    )


def _largest_gemm(trial: Trial) -> int:
    return max((int(row["size_bytes"]) for row in trial.rows if row["check"] == "gemm"), default=0)


def _without_file(row: dict[str, str]) -> dict[str, str]:
    """Drop the file column, which phases do not have."""
    return {name: cell for name, cell in row.items() if name != "file"}


def _finding_row(finding: Finding) -> dict[str, Any]:
    row = output.plain_row(finding)
    return {key: value for key, value in row.items() if key not in ("file", "line", "kind")}

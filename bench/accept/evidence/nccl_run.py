"""Run of nccl-tests, as parsed from text or JSON, and its findings: data, end of the run, bandwidth by size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from bench.accept.evidence import nccl_table
from bench.accept.evidence.log import Figure, Log, Text
from bench.accept.evidence.nccl_debug import Ending
from bench.accept.evidence.nccl_table import Side
from netlayer.units import format_size
from netlayer.verdict import Finding, Verdict

KIND = "nccl-tests"
RUN = "run"
ALONE = "run netlayer accept --hosts with this node alone, then with one neighbour"
_CORRUPT = "drain the node; run each of its GPUs and NICs alone with -c 1 to find the one that corrupts"
_NO_END = f"where it hung, {ALONE}; where it still ran, was killed, or the log was cut at a line, take it again"
_UNKNOWN = "collective of unknown name"


@dataclass
class Run:
    """A run, from text or JSON.

    Args:
        collective: its name; empty if not known.
        hosts: host of each rank.
        facts: facts for expectations and peers (`facts_of`).
        sides: measurements, one for each size and in/out of place.
        possible: collectives that match the rows, if the name is not known.
        lost: unreadable rows, as (reason, line).
        out_of_bounds: nccl-tests' own count of wrong values, as (count, line), if above 0.
        bounds_known: True if nccl-tests printed that count.
        too_slow: mean bandwidth below NCCL_TESTS_MIN_BW, as (figure, line).
        unended: for a table without an end, its last state as (description, line).
        ending: reason of an early end, or a failure after the end.
        findings: other findings from its log.
        is_measurement: True if its bandwidths are those of one run over links.
        is_part: True if the end is missing because the file is only a part of the log.
        has_all_rows: True if only the closing lines are missing.
    """

    collective: str
    hosts: list[str]
    facts: dict[str, str | int | bool]
    sides: list[Side]
    possible: tuple[str, ...] = ()
    lost: list[tuple[str, int]] = field(default_factory=list)
    out_of_bounds: tuple[str, int] | None = None
    bounds_known: bool = False
    too_slow: tuple[str, int] | None = None
    unended: tuple[str, int] | None = None
    ending: Ending | None = None
    findings: list[Finding] = field(default_factory=list)
    is_measurement: bool = True
    is_part: bool = False
    has_all_rows: bool = False


def to_log(text: Text, run: Run, number: int = 0) -> Log:
    """Convert a run to a log with its findings and figures.

    Args:
        text: text of the file.
        run: the run.
        number: 1, 2, ... if the file has several runs; 0 if it has one.
    """
    subject = subject_of(run.hosts, text)
    name = run.collective or " or ".join(run.possible) or _UNKNOWN
    findings = [_data_finding(text, subject, name, run)] if run.sides else []
    if run.unended:
        findings.insert(0, _unended_finding(text, subject, run))
    if run.too_slow:
        figure, line = run.too_slow
        expected = "0.9 of NCCL_TESTS_MIN_BW, as its user set it"
        findings.append(
            Finding("FAIL", subject, f"{name} mean bus bandwidth", figure, expected, ALONE, text.file, line)
        )
    has_failure = any(finding.verdict == "FAIL" for finding in findings)
    if not run.unended and run.ending and run.ending.verdict == "FAIL" and not has_failure:
        # A process of nccl-tests that has found wrong data, or too little bandwidth, ends with an error of its own.
        end, step = run.ending, "read the lines around it: the table is whole, its process did not end well"
        findings.append(Finding("WARN", subject, RUN, end.text, "a process that ends well", step, text.file, end.line))
    hosts = tuple(dict.fromkeys(run.hosts))
    series = f"{name} {{}}, {_where(run)}"
    if not {"collective", "ranks", "hosts"} <= set(run.facts):
        # Without these facts it may be another collective, or over other links, so it must not become a peer.
        series += f" of {text.stem} alone" + (f", run {number}" if number else "")
    figures = tuple(
        Figure(
            series.format(side.what),
            f"{format_size(side.size)} {side.place}",
            subject,
            side.bus_bw,
            "GB/s bus",
            side.line,
            parts=hosts if len(hosts) > 1 else (),
            facts={**run.facts, "bytes": side.size},
        )
        for side in run.sides
        if side.bus_bw > 0 and run.is_measurement
    )
    host = hosts[0] if len(hosts) == 1 else ""
    return Log(KIND, (*findings, *run.findings), figures, host=host, run=number)


def _where(run: Run) -> str:
    num_ranks, num_hosts = run.facts.get("ranks", 0), int(run.facts.get("hosts", 1))
    return f"{num_ranks or 'unknown'} ranks" + (f" on {num_hosts} hosts" if num_hosts > 1 else "")


def _unended_finding(text: Text, who: str, run: Run) -> Finding:
    where, line = run.unended or ("", 0)
    end = run.ending
    if end is None and (run.is_part or run.has_all_rows):
        # There is no evidence of a hang; a hang after the last row is possible but rare.
        figure = f"{where}: a part of a log, or a run that did not end"
        verdict: Verdict | None = None if run.is_part else "WARN"
        return Finding(verdict, who, RUN, figure, "its closing lines", "give the whole log", text.file, line)
    if end is None:
        return Finding("FAIL", who, RUN, where, "a run that ends", _NO_END, text.file, line)
    # Point to the program's own failure message; else to the last state of the run.
    figure, line = (f"{end.text}; the run {where}", line) if end.reason else (end.line_text, end.line)
    return Finding(end.verdict, who, RUN, figure, "a run that ends", end.step, text.file, line)


def _data_finding(text: Text, who: str, name: str, run: Run) -> Finding:
    """Return whether a run's data was right: FAIL for wrong elements, WARN if it was not checked, else PASS."""
    sides = run.sides
    bad = [side for side in sides if side.wrong]
    check, note = f"{name} data", _lost_note(run)
    if bad:
        first = bad[0]
        figure = f"{sum(side.wrong or 0 for side in bad):g} wrong elements in {len(bad)} of {len(sides)} measurements"
        figure += f", first at {format_size(first.size)} {first.place}{note}"
        return Finding("FAIL", who, check, figure, "#wrong = 0", _CORRUPT, text.file, first.line)
    deviating = _deviating(run)
    if deviating and (run.out_of_bounds or not run.bounds_known):
        first = deviating[0]
        figure = f"differs by {first.deviation:g} in {len(deviating)} of {len(sides)} measurements"
        figure += f", first at {format_size(first.size)} {first.place}{note}"
        return Finding("FAIL", who, check, figure, "what nccl-tests accepts", _CORRUPT, text.file, first.line)
    if run.out_of_bounds:
        count, line = run.out_of_bounds
        figure = f"{count} out-of-bounds values, though no row tells of a wrong element{note}"
        return Finding("FAIL", who, check, figure, "out of bounds values: 0 OK", _CORRUPT, text.file, line)
    checked = [side for side in sides if side.wrong is not None or side.deviation is not None]
    if not checked:
        step = "run again with -c 1: a bandwidth counts only where the data was right"
        return Finding("WARN", who, check, f"not checked (-c 0){note}", "#wrong = 0", step, text.file, sides[0].line)
    largest = max((side.deviation for side in checked if side.deviation is not None), default=None)
    figure, expected = f"0 wrong in {len(checked)} measurements", "#wrong = 0"
    if largest is not None:
        figure, expected = f"differs by {largest:g} at most in {len(checked)} measurements", "what nccl-tests accepts"
    return Finding("PASS", who, check, f"{figure}{note}", expected, "", text.file, sides[0].line)


def _deviating(run: Run) -> list[Side]:
    """Return the measurements of old tables with a deviation marked as too large, or above those versions' limit."""
    num_ranks = int(run.facts.get("ranks", 0))
    return [
        side
        for side in run.sides
        if side.deviation is not None
        and (
            side.too_large
            or (num_ranks > 0 and side.deviation > nccl_table.accepted_deviation(side.what.split()[0], num_ranks))
        )
    ]


def _lost_note(run: Run) -> str:
    if not run.lost:
        return ""
    reason, line = run.lost[0]
    rows = "1 row was" if len(run.lost) == 1 else f"{len(run.lost)} rows were"
    return f"; {rows} not read, the first at line {line} ({reason})"


def subject_of(hosts: Iterable[str], text: Text) -> str:
    """Return the subject of a run: its host or hosts, else the name of its writer or file."""
    names = list(dict.fromkeys(hosts))
    if not names:
        return text.printed_by.host or text.printed_by.task or text.stem
    return names[0] if len(names) == 1 else f"{names[0]}..{names[-1]} ({len(names)} hosts)"


def facts_of(collective: str, num_ranks: int, devices: Iterable[str], version: int) -> dict[str, str | int | bool]:
    """Return the facts for expectations, as far as the log tells them; a mix of devices gives no device."""
    facts: dict[str, str | int | bool] = {"quantity": "bus_bw_gbs"}
    if collective:
        facts["collective"] = collective
    if num_ranks:
        facts["ranks"] = num_ranks
    names = set(devices)
    if len(names) == 1:
        facts["device"] = names.pop()
    if version:
        facts["nccl"] = version
    return facts

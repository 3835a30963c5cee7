"""A judgement as a table, a record, JUnit's XML and a page."""

from __future__ import annotations

import textwrap
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from bench.accept.evidence.log import one_line, printable
from bench.accept.judge import Judgement
from netlayer.results import RunRecord
from netlayer.verdict import Finding

if TYPE_CHECKING:
    from netlayer.report import Report

_HEADS = ("verdict", "subject", "check", "figure", "expected", "file")
# Of a row, on a terminal or not, so that a file is the same everywhere. Where a row would be wider, cells are broken
# between words into several lines, and a path goes below its row, so that it can be copied whole.
_WIDTH = 120
_GAP = "  "
_WIDEST_PLACE = 20


def format_table(judgement: Judgement, where: str = "file") -> Iterator[str]:
    """The lines of the table, each next step below its row; then the damaged files, and the verdict."""
    heads: tuple[str, ...] = (*_HEADS[:-1], where)
    rows = [_cells(finding) for finding in judgement.findings]
    places = _places_below([heads, *rows])
    if places:
        heads, *rows = (row[:-1] for row in (heads, *rows))
    widths = _widths([heads, *rows])
    margin = " " * widths[0] + _GAP
    if rows:
        yield from _lines(heads, widths)
    for at, (finding, row) in enumerate(zip(judgement.findings, rows, strict=True), 1):
        yield from _lines(row, widths)
        if places:
            yield f"{margin}{where}: {places[at]}"
        if finding.next_step:
            yield from _wrapped(f"{margin}next: {one_line(finding.next_step)}", _WIDTH, f"{margin}      ")
    yield from (f"not judged: {line}" for line in judgement.damaged)
    yield f"{judgement.verdict}: {summary(judgement)}"


def summary(judgement: Judgement) -> str:
    """`2 faults and 1 warning in 12 files; 1 file not judged`."""
    counts = {word: sum(finding.verdict == word for finding in judgement.findings) for word in ("FAIL", "WARN")}
    words = f"{_count(counts['FAIL'], 'fault')} and {_count(counts['WARN'], 'warning')} in "
    words += _count(len(judgement.kinds), "file")
    unknown = sum(finding.verdict is None for finding in judgement.findings)
    words += f"; {_count(unknown, 'figure')} without expectation" if unknown else ""
    return words + (f"; {_count(len(judgement.damaged), 'file')} not judged" if judgement.damaged else "")


def record(
    judgement: Judgement, arguments: Mapping[str, Any], environment: Mapping[str, Any], started: str, ended: str
) -> RunRecord:
    """The findings as rows, one row for each file that was not judged, and first one for all of it."""
    overall = Finding(judgement.verdict, "all", "overall", summary(judgement))
    lost = [Finding(None, "", "not judged", line) for line in judgement.damaged]
    rows = [_row(finding, judgement.kinds) for finding in (overall, *judgement.findings, *lost)]
    return RunRecord("bench.accept.judge", "measured", rows, started, ended, arguments, environment=environment)


def junit(judgement: Judgement, suite_name: str = "netlayer accept judge") -> str:
    """A test case for each finding: FAIL is a failure, what was not judged is skipped, a damaged file is an error."""
    findings, damaged = judgement.findings, judgement.damaged
    suite = ET.Element(
        "testsuite",
        name=suite_name,
        tests=str(len(findings) + len(damaged)),
        failures=str(sum(finding.verdict == "FAIL" for finding in findings)),
        errors=str(len(damaged)),
        skipped=str(sum(finding.verdict is None for finding in findings)),
    )
    for finding in findings:
        name = f"{finding.check}: {finding.subject}" + (f" ({finding.file}:{finding.line})" if finding.line else "")
        case = ET.SubElement(
            suite, "testcase", classname=printable(judgement.kinds.get(finding.file, "judge")), name=printable(name)
        )
        words = f"{finding.figure}; expected {finding.expected}"
        if finding.verdict == "FAIL":
            failure = ET.SubElement(case, "failure", message=printable(words))
            failure.text = printable(f"{words}; next: {finding.next_step}")
        elif finding.verdict is None:
            ET.SubElement(case, "skipped", message=printable(words))
        else:
            ET.SubElement(case, "system-out").text = printable(f"{finding.verdict}: {words}; {finding.next_step}")
    for line in damaged:
        case = ET.SubElement(suite, "testcase", classname="judge", name=printable(line.partition(": ")[0]))
        ET.SubElement(case, "error", message=printable(line))
    ET.indent(suite)
    return ET.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def page(judgement: Judgement, commit: str) -> str:
    """One page: what is wrong and what to do, then all that was looked at."""
    import pandas as pd

    from netlayer.report import Report

    report: Report = Report("Acceptance: verdicts from logs", summary(judgement), commit=commit)
    report.verdict(judgement.verdict, f"{summary(judgement)}.")
    bad = [finding for finding in judgement.findings if finding.verdict in ("FAIL", "WARN")]
    if bad:
        lead = "What was found, what it was held against, and what to do next."
        rows = [told(finding) for finding in bad]
        report.section("Faults and warnings", lead, source="measured").table(pd.DataFrame(rows), max_rows=500)
    if judgement.damaged:
        rows = [{"what could not be read, and what to do": line} for line in judgement.damaged]
        report.section("Files that were not judged").table(pd.DataFrame(rows), max_rows=500)
    good = [finding for finding in judgement.findings if finding.verdict not in ("FAIL", "WARN")]
    if good:
        rows = [shown(finding) for finding in good]
        lead = "Without a verdict: no expectation is known for it, and too few peers did the same work."
        report.section("Passed, or without expectation", lead, source="measured").table(
            pd.DataFrame(rows), max_rows=500
        )
    files = [{"file": printable(file), "written by": kind} for file, kind in judgement.kinds.items()]
    if files:
        report.section("Files").table(pd.DataFrame(files), max_rows=500)
    return report.html()


def plain_row(finding: Finding) -> dict[str, Any]:
    """Its fields, without control characters."""
    return {key: printable(value) if isinstance(value, str) else value for key, value in asdict(finding).items()}


def _row(finding: Finding, kinds: Mapping[str, str]) -> dict[str, Any]:
    return {**plain_row(finding), "kind": kinds.get(finding.file, "")}


def _cells(finding: Finding) -> tuple[str, ...]:
    where = f"{finding.file}:{finding.line}" if finding.line else finding.file
    cells = (finding.verdict or "-", finding.subject, finding.check, finding.figure, finding.expected, where)
    return tuple(one_line(cell) for cell in cells)


def shown(finding: Finding) -> dict[str, str]:
    """Its cells by the heads of the table."""
    return dict(zip(_HEADS, _cells(finding), strict=True))


def told(finding: Finding) -> dict[str, str]:
    """As `shown`, in few columns, so that a page shows them side by side: what was found, and what to do."""
    verdict, subject, check, figure, expected, where = _cells(finding)
    words = f"{check}: {figure}" + (f"; expected {expected}" if expected else "")
    found = {"verdict": verdict, "where": f"{subject}, {where}", "found": words}
    return {**found, "next step": printable(finding.next_step)}


def _places_below(rows: Sequence[Sequence[str]]) -> list[str]:
    """The last cells, where rows have no room for them."""
    places = [row[-1] for row in rows]
    wide = sum(_natural(rows)) + len(_GAP) * (len(rows[0]) - 1) > _WIDTH
    return places if wide and max(map(len, places)) > _WIDEST_PLACE else []


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """Of the columns; where a row would be too wide, the widest of them give way."""
    widths = _natural(rows)
    most = max(widths)
    while sum(min(width, most) for width in widths) > _WIDTH - len(_GAP) * (len(widths) - 1):
        most -= 1
    return [min(width, most) for width in widths]


def _natural(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _lines(cells: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    """A row, and what is left of the cells that are too wide for it."""
    columns = [_wrapped(cell, width) for cell, width in zip(cells, widths, strict=True)]
    for parts in zip_longest(*columns, fillvalue=""):
        yield _GAP.join(f"{part:<{width}}" for part, width in zip(parts, widths, strict=True)).rstrip()


def _wrapped(text: str, width: int, margin: str = "") -> list[str]:
    """Its lines, later ones behind the margin."""
    if len(text) <= width:
        return [text]
    return textwrap.wrap(text, width, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"

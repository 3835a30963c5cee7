"""Output formats of a judgement: text table, verdict for each node, record, JUnit XML and HTML page."""

from __future__ import annotations

import textwrap
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from bench.accept.evidence.log import one_line
from bench.accept.judge.logs import Judgement
from bench.accept.judge.nodes import NodeVerdict
from bench.junit import finish_suite, open_suite
from netlayer.printing import printable_text
from netlayer.results import RunRecord
from netlayer.verdict import Finding

if TYPE_CHECKING:
    from netlayer.report import Report

_HEADS = ("verdict", "subject", "check", "figure", "expected", "file")
# Line width without a terminal, so that a file is the same everywhere. In wider rows, cells are wrapped between words,
# and the path is put below the row, so that it can be copied in one piece.
WIDTH = 120
_LEAST_WIDTH = 72
# Below this width, "expected" gets its own line: five very narrow columns would be unreadable.
_NARROW = 100
_GAP = "  "
_WIDEST_PLACE = 20
# Words up to this length (the names of two hosts) are not broken.
_LONGEST_WORD, _LEAST_COLUMN = 34, 6
_MARGIN = 7
_MOST_OTHERS = 6
_MOST_SKIPPED = 3


def format_table(judgement: Judgement, where: str = "file", width: int = WIDTH) -> Iterator[str]:
    """Yield the lines of the table, each next step below its row; then the damaged files, and the verdict.

    Args:
        judgement: the judgement to print.
        where: heading of the last column.
        width: line width in characters.
    """
    width = max(width, _LEAST_WIDTH)
    heads: tuple[str, ...] = (*_HEADS[:-1], where)
    rows = [_cells(finding) for finding in judgement.findings]
    narrow = width < _NARROW
    places = [row[-1] for row in (heads, *rows)] if narrow else _places_below([heads, *rows], width)
    if places:
        heads, *rows = (row[:-1] for row in (heads, *rows))
    below = [row[-1] for row in (heads, *rows)] if narrow else []
    if below:
        heads, *rows = (row[:-1] for row in (heads, *rows))
    widths = _widths([heads, *rows], width)
    margin = " " * min(widths[0], _MARGIN) + _GAP
    if rows:
        yield from _lines(heads, widths)
    for at, (finding, row) in enumerate(zip(judgement.findings, rows, strict=True), 1):
        yield from _lines(row, widths)
        if below and below[at]:
            yield from _wrapped(f"{margin}expected: {below[at]}", width, f"{margin}          ")
        if places:
            yield f"{margin}{where}: {places[at]}"
        if finding.next_step:
            yield from _wrapped(f"{margin}next: {one_line(finding.next_step)}", width, f"{margin}      ")
    yield from (f"no log: {line}" for line in judgement.skipped[:_MOST_SKIPPED])
    if len(judgement.skipped) > _MOST_SKIPPED:
        yield f"no log: {len(judgement.skipped) - _MOST_SKIPPED} more things in the folders"
    yield from (f"not judged: {line}" for line in judgement.damaged)
    yield f"{judgement.verdict}: {summary(judgement)}"


def format_nodes(judgement: Judgement, width: int = WIDTH) -> Iterator[str]:
    """Yield lines for each node with several findings: verdict, decisive evidence, other evidence, one next step.

    A node with a single finding from a single file only has its row in the table.
    """
    for node in judgement.nodes:
        if not node.findings or (len(node.findings) == 1 and len(node.files) < 2):
            continue
        first, *others = node.findings
        yield from _wrapped(one_line(f"{node.node}: {node.verdict}: {_evidence(first)}"), width, "    ")
        if others:
            yield from _wrapped(one_line(f"  also: {_also(others)}"), width, "        ")
        yield from _wrapped(one_line(f"  read: {_read(node)}"), width, "        ")
        if node.next_step:
            yield from _wrapped(one_line(f"  next: {node.next_step}"), width, "        ")


def _evidence(finding: Finding) -> str:
    where = f" ({finding.file}:{finding.line})" if finding.line else f" ({finding.file})" if finding.file else ""
    return f"{finding.check}: {finding.figure}{where}"


def _also(others: Sequence[Finding]) -> str:
    """List the other evidence, each check once: `FAIL XID 94, FAIL throttling, WARN VBIOS Version`."""
    checks: dict[str, None] = dict.fromkeys(f"{one.verdict} {one.check}" for one in others)
    listed = ", ".join(list(checks)[:_MOST_OTHERS])
    return listed + (f" and {len(checks) - _MOST_OTHERS} more" if len(checks) > _MOST_OTHERS else "")


def _read(node: NodeVerdict) -> str:
    files = f"{len(node.files)} file{'s' * (len(node.files) != 1)}"
    return f"{', '.join(node.kinds) or 'no file of its own'} in {files}, known by {node.known_by}"


def summary(judgement: Judgement) -> str:
    """Summarise a judgement: `2 faults and 1 warning in 12 files; ...; 1 file not judged`."""
    counts = {word: sum(finding.verdict == word for finding in judgement.findings) for word in ("FAIL", "WARN")}
    text = f"{_count(counts['FAIL'], 'fault')} and {_count(counts['WARN'], 'warning')} in "
    text += _count(len(judgement.kinds), "file")
    unjudged = sum(finding.verdict == "NO VERDICT" for finding in judgement.findings)
    if unjudged:
        text += f"; nothing to hold the figures of {_count(unjudged, 'run')} against"
    unknown = sum(finding.verdict is None for finding in judgement.findings)
    text += f"; {_count(unknown, 'figure')} without expectation" if unknown else ""
    return text + (f"; {_count(len(judgement.damaged), 'file')} not judged" if judgement.damaged else "")


def record(
    judgement: Judgement, arguments: Mapping[str, Any], environment: Mapping[str, Any], started: str, ended: str
) -> RunRecord:
    """Build the record: an overall row with the nodes, one row for each finding, and one for each damaged file."""
    overall = Finding(judgement.verdict, "all", "overall", summary(judgement))
    damaged = [Finding(None, "", "not judged", line) for line in judgement.damaged]
    rows = [_row(finding, judgement.kinds) for finding in (overall, *judgement.findings, *damaged)]
    rows[0] |= {"nodes": [_node_row(node) for node in judgement.nodes]}
    return RunRecord("bench.accept.judge", "measured", rows, started, ended, arguments, environment=environment)


def junit(
    judgement: Judgement, suite_name: str = "netlayer accept judge", started: str = "", seconds: float = 0.0
) -> str:
    """Format as JUnit XML, one test case a finding: FAIL is a failure, NO VERDICT skipped, a damaged file an error.

    Warnings are listed in the suite's output, since a passed test case of the common schema has no text.

    Args:
        judgement: the judgement to format.
        suite_name: name of the test suite.
        started: start time, ISO 8601 UTC; empty: now.
        seconds: duration of the judging.
    """
    suite = open_suite(suite_name, started, seconds)
    notes = []
    for finding in judgement.findings:
        name = f"{finding.check}: {finding.subject}" + (f" ({finding.file}:{finding.line})" if finding.line else "")
        kind = printable_text(judgement.kinds.get(finding.file, "judge"))
        case = ET.SubElement(suite, "testcase", classname=kind, name=printable_text(name), time="0")
        text = f"{finding.figure}; expected {finding.expected}"
        if finding.verdict == "FAIL":
            failure = ET.SubElement(case, "failure", type=printable_text(finding.check), message=printable_text(text))
            failure.text = printable_text(f"{text}; next: {finding.next_step}")
        elif finding.verdict in (None, "NO VERDICT"):
            ET.SubElement(case, "skipped", message=printable_text(f"{finding.verdict or 'not judged'}: {text}"))
        elif finding.verdict == "WARN":
            notes.append(printable_text(f"WARN {name}: {text}; next: {finding.next_step}"))
    for line in judgement.damaged:
        name = printable_text(line.partition(": ")[0])
        case = ET.SubElement(suite, "testcase", classname="judge", name=name, time="0")
        ET.SubElement(case, "error", type="unreadable", message=printable_text(line))
    notes += [printable_text(line) for line in format_nodes(judgement)]
    return finish_suite(suite, "\n".join([*notes, f"{judgement.verdict}: {summary(judgement)}"]))


def page(judgement: Judgement, commit: str) -> str:
    """Build the HTML page: faults and next steps first, then everything that was checked."""
    import pandas as pd

    from netlayer.report import Report

    report: Report = Report("Acceptance: verdicts from logs", summary(judgement), commit=commit)
    report.verdict(judgement.verdict, f"{summary(judgement)}.")
    nodes = [node_cells(node) for node in judgement.nodes if node.findings]
    if nodes:
        lead = "All evidence on a node together: what decides first, and the one thing to do."
        report.section("Nodes", lead, source="measured").table(pd.DataFrame(nodes), max_rows=500)
    open_figures = [finding for finding in judgement.findings if finding.verdict == "NO VERDICT"]
    bad = [finding for finding in judgement.findings if finding.verdict in ("FAIL", "WARN")]
    if bad:
        lead = "What was found, what it was held against, and what to do next."
        rows = [finding_cells(finding) for finding in bad]
        report.section("Faults and warnings", lead, source="measured").table(pd.DataFrame(rows), max_rows=500)
    if judgement.damaged:
        rows = [{"what could not be read, and what to do": line} for line in judgement.damaged]
        report.section("Files that were not judged").table(pd.DataFrame(rows), max_rows=500)
    if open_figures:
        lead = "Measured, and no expectation is known for it. That data was right says nothing of the speed."
        rows = [finding_cells(finding) for finding in open_figures]
        report.section("No verdict", lead, source="measured").table(pd.DataFrame(rows), max_rows=500)
    good = [finding for finding in judgement.findings if finding.verdict in ("PASS", None)]
    if good:
        rows = [table_cells(finding) for finding in good]
        lead = "Without a verdict: figures beside others of the same run that were judged."
        report.section("Passed", lead, source="measured").table(pd.DataFrame(rows), max_rows=500)
    files = [{"file": printable_text(file), "written by": kind} for file, kind in judgement.kinds.items()]
    if files:
        report.section("Files").table(pd.DataFrame(files), max_rows=500)
    return report.html()


def plain_row(finding: Finding) -> dict[str, Any]:
    """Return the finding's fields without control characters."""
    return {key: printable_text(value) if isinstance(value, str) else value for key, value in asdict(finding).items()}


def node_cells(node: NodeVerdict) -> dict[str, str]:
    """Return a node as a table row of the page."""
    first, *others = node.findings
    also = f"; also {_also(others)}" if others else ""
    cells = {"verdict": node.verdict, "node": f"{node.node} ({_read(node)})"}
    cells |= {"evidence": f"{_evidence(first)}{also}", "next step": node.next_step}
    return {name: one_line(cell) for name, cell in cells.items()}


def _node_row(node: NodeVerdict) -> dict[str, Any]:
    """Return a node as a row of the record, with its evidence in order."""
    row = {"node": node.node, "known_by": node.known_by, "verdict": node.verdict, "next_step": node.next_step}
    evidence = [plain_row(finding) for finding in node.findings]
    return {name: printable_text(value) for name, value in row.items()} | {
        "files": [printable_text(file) for file in node.files],
        "kinds": list(node.kinds),
        "evidence": evidence,
    }


def _row(finding: Finding, kinds: Mapping[str, str]) -> dict[str, Any]:
    return {**plain_row(finding), "kind": kinds.get(finding.file, "")}


def _cells(finding: Finding) -> tuple[str, ...]:
    where = f"{finding.file}:{finding.line}" if finding.line else finding.file
    cells = (finding.verdict or "-", finding.subject, finding.check, finding.figure, finding.expected, where)
    return tuple(one_line(cell) for cell in cells)


def table_cells(finding: Finding) -> dict[str, str]:
    """Return the finding's cells by table heading."""
    return dict(zip(_HEADS, _cells(finding), strict=True))


def finding_cells(finding: Finding) -> dict[str, str]:
    """Return the finding in four columns, which fit side by side on a page: verdict, where, found, next step."""
    verdict, subject, check, figure, expected, where = _cells(finding)
    text = f"{check}: {figure}" + (f"; expected {expected}" if expected else "")
    cells = {"verdict": verdict, "where": f"{subject}, {where}", "found": text}
    return {**cells, "next step": printable_text(finding.next_step)}


def _places_below(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return the last cells, to be printed below their rows; empty if they fit in the rows."""
    places = [row[-1] for row in rows]
    wide = sum(_natural(rows)) + len(_GAP) * (len(rows[0]) - 1) > width
    return places if wide and max(map(len, places)) > _WIDEST_PLACE else []


def _widths(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return the column widths; if rows are too wide, shrink the widest columns down to their longest word."""
    widths, longest_words = _natural(rows), [_longest_word(column) for column in zip(*rows, strict=True)]
    room = width - len(_GAP) * (len(widths) - 1)
    for floors in (longest_words, [0] * len(longest_words)):
        for limit in range(max(widths), _LEAST_COLUMN - 1, -1):
            fitted = [max(min(one, limit), floor) for one, floor in zip(widths, floors, strict=True)]
            if sum(fitted) <= room:
                return fitted
    return [min(one, max(1, room // len(widths))) for one in widths]


def _longest_word(column: Sequence[str]) -> int:
    return min(_LONGEST_WORD, max((len(word) for cell in column for word in cell.split()), default=0))


def _natural(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _lines(cells: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    """Yield the lines of a row, with the cells wrapped to their column widths."""
    columns = [_wrapped(cell, width, breaks=True) for cell, width in zip(cells, widths, strict=True)]
    for parts in zip_longest(*columns, fillvalue=""):
        yield _GAP.join(f"{part:<{width}}" for part, width in zip(parts, widths, strict=True)).rstrip()


def _wrapped(text: str, width: int, margin: str = "", *, breaks: bool = False) -> list[str]:
    """Wrap a text, later lines indented by `margin`; `breaks` allows breaking words longer than a line."""
    if len(text) <= width:
        return [text]
    return textwrap.wrap(text, width, subsequent_indent=margin, break_long_words=breaks, break_on_hyphens=False)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"

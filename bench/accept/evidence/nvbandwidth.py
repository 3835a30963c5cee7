"""Parser of nvbandwidth output, text or JSON (`-j`): every cell of every matrix, and test cases that failed.

Format: github.com/NVIDIA/nvbandwidth, output.cpp, json_output.cpp and testcase.h (0.4 to 0.10). The cells of a matrix
are peers of each other, so that a slow GPU or pair is an outlier within a single file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bench.accept.evidence.log import Figure, Log, Text, mapping, number, sequence, word
from netlayer.verdict import Finding

KIND = "nvbandwidth"
_RUNNING = re.compile(r"^\s*Running (\w+)\.\s*$")
# `memcpy CE GPU(row) <- GPU(column) bandwidth (GB/s)`; with a single row: `memcpy local GPU(column) bandwidth`.
_MATRIX = re.compile(
    r"^(?P<what>.{0,80}?)(?:(?P<row>\w{1,9})\(row\) (?P<arrow>\S{1,5}) )?(?P<column>\w{1,9})\(column\) "
)
# 72 GPUs have 5,184 pairs in each of some ten matrices.
_MAX_CELLS = 100_000
_TIMES = ("ns", "us")
_UNIT = re.compile(r"\(([^()]{1,16})\)\s*$")
_DEVICE = re.compile(r"^(?:Device \d{1,6}|.{0,100}: device \d{1,6}): ([^(]{1,80}?)(?: \([0-9a-fA-F:.]{1,30}\))?\s*$")
# Builds for several nodes name each process's host.
_PROCESS = re.compile(r"^Process \d{1,6} \(([\w.-]{1,80})\): device \d")
_ERROR = re.compile(r"^\s*(?:ERROR|Error)\b|\b(?:CUDA|NVML)_ERROR_|Invalid value when checking the pattern")
_STEP = "read nvidia-smi -q and the kernel log of this node, then run the test case alone: nvbandwidth -t {}"


def is_text(content: str) -> bool:
    return "nvbandwidth Version" in content or bool(
        re.search(r"\w\(column\) .{0,30}\([GMK]?i?B/s\)|\(column\) \(ns\)", content)
    )


def is_json(tree: Mapping[str, Any]) -> bool:
    return "nvbandwidth" in tree


def parse_text(text: Text) -> Log:
    """Parse every matrix of the file.

    Raises:
        ConfigError: a matrix is truncated, or there is none.
    """
    findings: list[Finding] = []
    figures: list[Figure] = []
    case, open_case, device, lines = "", 0, _device(text), text.lines
    for at, row in enumerate(lines):
        if running := _RUNNING.match(row):
            case, open_case = running[1], at + 1
        elif _ERROR.search(row):
            findings.append(_failed(text, case, row.strip(), at + 1))
            open_case = 0
        elif matrix := _MATRIX.match(row):
            figures += _matrix(text, case or matrix["what"].strip(), matrix, _unit(row), device, at + 1)
            open_case = 0
        elif row.lstrip().lower().startswith("waived"):
            open_case = 0
    if open_case:
        raise text.damaged(open_case, f"{case} has no matrix: it hung, or the log was cut")
    hosts = {match[1] for row in lines if (match := _PROCESS.match(row))}
    return replace(_log(text, findings, figures), host=hosts.pop() if len(hosts) == 1 else "")


def parse_json(text: Text, tree: Mapping[str, Any]) -> Log:
    """Parse the JSON of `-j`.

    Raises:
        ConfigError: there is no matrix, or a cell is not a number.
    """
    root = mapping(tree["nvbandwidth"])
    findings: list[Finding] = []
    figures: list[Figure] = []
    if word(root.get("error")):
        findings.append(_failed(text, "", word(root["error"]), text.line_of('"error"')))
    for case in map(mapping, sequence(root.get("testcases"))):
        text.check_rows(len(figures), _MAX_CELLS)
        name, status = word(case.get("name")), word(case.get("status"))
        line = text.line_of(f'"{name}"')
        if status.lower() not in ("passed", "waived", "running", "") or word(case.get("error")):
            findings.append(_failed(text, name, word(case.get("error")) or status, line))
        description = word(case.get("bandwidth_description"))
        matrix = _MATRIX.match(description)
        rows = [[word(cell) for cell in sequence(row)] for row in sequence(case.get("bandwidth_matrix"))]
        if matrix:
            numbered = [(str(at), row, line) for at, row in enumerate(rows)]
            columns = [str(at) for at in range(len(rows[0]) if rows else 0)]
            figures += _cells(text, name, matrix, _unit(description), "", columns, numbered)
    return _log(text, findings, figures)


def _log(text: Text, findings: list[Finding], figures: list[Figure]) -> Log:
    if not findings and not figures:
        rule = "has no matrix such as 'memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)' with its cells"
        raise text.damaged(len(text.lines), rule, "see whether nvbandwidth ran to its end, then take the log again")
    text.check_rows(len(figures), _MAX_CELLS)
    cases = len({figure.series for figure in figures})
    done = Finding(
        "PASS",
        text.stem,
        "nvbandwidth",
        f"{cases} matrices, {len(figures)} cells, no error",
        "no error",
        "",
        text.file,
        1,
    )
    return Log(KIND, tuple(findings) or (done,), tuple(figures))


def _failed(text: Text, case: str, error: str, line: int) -> Finding:
    return Finding(
        "FAIL",
        text.stem,
        f"nvbandwidth {case}".rstrip(),
        error[:200],
        "no error",
        _STEP.format(case or "CASE"),
        text.file,
        line,
    )


def _device(text: Text) -> str:
    names = {match[1].strip() for row in text.lines if (match := _DEVICE.match(row))}
    return names.pop() if len(names) == 1 else ""


def _unit(row: str) -> str:
    match = _UNIT.search(row)
    return match[1] if match else ""


def _matrix(text: Text, case: str, matrix: re.Match[str], unit: str, device: str, line: int) -> Iterator[Figure]:
    """Parse the matrix below a description in line `line` (from 1): a line of column numbers, then one for each row."""
    columns = text.lines[line].split() if line < len(text.lines) else []
    if not columns or not all(cell.isdecimal() for cell in columns):
        raise text.damaged(line + 1, f"the column numbers of {case} are expected")
    rows = []
    for at in range(line + 1, len(text.lines)):
        cells = text.lines[at].split()
        if not cells or not cells[0].isdecimal():
            break
        text.check_ended(at + 1)
        rows.append((cells[0], cells[1:], at + 1))
    return _cells(text, case, matrix, unit, device, columns, rows)


def _cells(
    text: Text,
    case: str,
    matrix: re.Match[str],
    unit: str,
    device: str,
    columns: Sequence[str],
    rows: Sequence[tuple[str, Sequence[str], int]],
) -> Iterator[Figure]:
    """Yield a figure for each cell of a matrix; cells that are N/A or 0 are skipped.

    Args:
        rows: (name, cells, line number) of each row.

    Raises:
        ConfigError: a row or a cell is missing or no number.
    """
    if not rows or (matrix["row"] == matrix["column"] and len(rows) != len(columns)):
        raise text.damaged(
            rows[-1][2] if rows else 0,
            f"the matrix of {case} breaks off: {len(columns)} columns need {'as many rows' if rows else 'a row'}",
        )
    facts = {"quantity": "nvbandwidth_gbs", "case": case} | ({"device": device} if device else {})
    for row, cells, line in rows:
        if len(cells) != len(columns):
            raise text.damaged(line, f"row {row} of {case} has {len(cells)} cells, {len(columns)} are expected")
        for column, cell in zip(columns, cells, strict=True):
            if cell == "N/A":
                continue
            value = number(cell)
            if value is None:
                raise text.damaged(
                    line, f"cell ({row}, {column}) of {case} is {cell[:40]!r}, a number or N/A is expected"
                )
            parts = tuple(
                f"{matrix[end]} {at}"
                for end, at in (("row", row), ("column", column))
                if matrix[end] not in (None, "CPU")
            )
            subject = f"{matrix['row']} {row} {matrix['arrow']} " if matrix["row"] else ""
            subject += f"{matrix['column']} {column}"
            if value > 0:
                yield Figure(case, "", subject, value, unit, line, unit not in _TIMES, parts, facts)

"""Parser of `dcgmi diag`, as table or JSON (`-j`), and `dcgmi health -c`: result of each test on each part.

Formats: docs.nvidia.com/datacenter/dcgm (DCGM Diagnostics) and github.com/NVIDIA/DCGM, dcgmi/Diag.cpp and Health.cpp.
The table of DCGM 2 and 3 lists parts after a result (`Fail - GPU: 3`) and messages below a test; from version 4 on
every part has a line of its own (`GPU0: Fail`). JSON: `DCGM GPU Diagnostic` with `gpu_id` or `gpu_ids` up to version 3,
`DCGM Diagnostic` with entities from 4 on. Severities: dcgmErrorSeverity_t in dcgmlib/dcgm_errors.h; tables have none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench.accept.evidence.log import Log, Text, mapping, sequence, word
from netlayer.verdict import Finding, Verdict

KIND = "dcgmi diag"
HEALTH = "dcgmi health"
_ROOTS = ("DCGM Diagnostic", "DCGM GPU Diagnostic")
_VERDICTS: Mapping[str, Verdict] = {"pass": "PASS", "warn": "WARN", "warning": "WARN", "fail": "FAIL"}
_SKIPPED = ("skip", "skipped", "not run", "notrun")
_STEPS = {
    1: "watch {}: it can stay in use",
    2: "drain the node and return {}: DCGM says it must be isolated",
    4: "triage {}: run dcgmi diag -r 3 on it alone, and read its XID errors in the kernel log",
    5: "correct the setting that is named: DCGM does not class it as a hardware fault",
    6: "drain the node and reset {} (nvidia-smi -r), then run dcgmi diag again",
}
_UNKNOWN_STEP = "drain the node and run dcgmi diag -r 3 on {} alone"
_FABRIC_STEP = (
    "start nvidia-fabricmanager and read its log: CUDA waits for the NVLink fabric; no drain is asked for yet"
)
_NO_RUN = "see whether nv-hostengine runs and the driver answers, then run dcgmi diag again"
# Software tests, whose failure DCGM classes as a wrong setting; tables do not print the class.
_SETTINGS = (
    "persistence mode", "environment variables", "denylist", "blacklist", "permissions and os blocks",
    "graphics processes",
)  # fmt: skip
_DEPLOYMENT = "deployment"

_CELLS = re.compile(r"^\s*\|(?P<name>[^|]{0,60})\|(?P<info>[^|]{0,200})\|?\s*$")
_SECTION = re.compile(r"^\s*[|+]-{3,9}\s+(\w[\w ]{0,30}?)\s+-{3,}")
_RESULT = re.compile(r"^(Pass|Warn|Warning|Fail|Skip|Skipped|Not Run)\b\s*(?:-\s*(.{0,180}))?$")
_ENTITY = re.compile(r"^([A-Za-z]{2,12}) ?(\d{1,6}): (Pass|Warn|Fail|Skip|Not Run)\b")
_HEAD = re.compile(r"^\s*\| ?Diagnostic\s+\| ?Result\s", re.MULTILINE)
_FRAGMENT = re.compile(r"^\s*\|[^|\n]{1,60}\| (?:Pass|Fail|Warn|Skip) - (?:All|GPU)", re.MULTILINE)
_TEXTS = ("Warning", "Error", "Info", "Warning/Error")
_ERROR = re.compile(r"^\s*Error:? (.{3,300})$|^\s*(Error when executing the diagnostic.{0,300})$", re.MULTILINE)
_HEALTHS: Mapping[str, Verdict] = {"healthy": "PASS", "warning": "WARN", "failure": "FAIL"}


@dataclass
class _Result:
    """Result of one test on one part, or on the node if no part is named."""

    category: str
    name: str
    part: str
    status: str
    line: int
    texts: list[str] = field(default_factory=list)
    severity: int = 0


def is_text(content: str) -> bool:
    if _HEAD.search(content) or _FRAGMENT.search(content):
        return True
    return "Health Monitor Report" in content or ("host engine" in content and bool(_ERROR.search(content)))


def is_json(tree: Mapping[str, Any]) -> bool:
    return any(root in tree for root in _ROOTS)


def parse_text(text: Text) -> Log:
    """Return a finding for each test of the table that did not pass, and one for all others.

    Raises:
        ConfigError: it has no results, or is truncated.
    """
    if "Health Monitor Report" in text.content:
        return _health(text)
    results = list(_rows(text))
    text.check_rows(len(results))
    if results:
        if _HEAD.search(text.content) and not _is_closed(text):
            raise text.damaged(len(text.lines), "ends inside the table of dcgmi diag: it hung, or the log was cut")
        return _log(text, results, _traits(text))
    error = next((match for match in map(_ERROR.search, text.lines) if match), None)
    if error is None:
        raise text.damaged(0, "has the head of dcgmi diag's table, and no results", "take it when dcgmi has ended")
    return _failed_run(text, word(error[1] or error[2]), text.line_of("Error"))


def parse_json(text: Text, tree: Mapping[str, Any]) -> Log:
    """Return the same findings for the JSON of `-j`.

    Raises:
        ConfigError: it has no results.
    """
    root = next(mapping(tree[name]) for name in _ROOTS if name in tree)
    error = word(root.get("runtime_error")) or word(tree.get("runtime_error"))
    if error:
        return _failed_run(text, error, text.line_of("runtime_error"))
    text.check_rows(sum(len(sequence(mapping(one).get("tests"))) for one in sequence(root.get("test_categories"))))
    results = [
        result for category in sequence(root.get("test_categories")) for result in _tests(text, mapping(category))
    ]
    if not results:
        line = text.line_of("test_categories")
        raise text.damaged(
            line, "must hold 'test_categories' with tests and their results", "take it with dcgmi diag -j"
        )
    return _log(text, results, {})


def _failed_run(text: Text, error: str, line: int) -> Log:
    """Return a warning for a run that tested nothing, which says nothing about the node."""
    return Log(
        KIND, (Finding("WARN", text.stem, "dcgmi diag", error, "a diagnosis that ends", _NO_RUN, text.file, line),)
    )


def _log(text: Text, results: Sequence[_Result], traits: Mapping[tuple[str, str], str]) -> Log:
    reported = [
        result for result in results if result.status in _VERDICTS and (result.status != "pass" or result.texts)
    ]
    findings = [_finding(text, result) for result in reported]
    passed = [result for result in results if result.status == "pass"]
    skipped = [result for result in results if result.status in _SKIPPED]
    # If the level includes hardware tests and all of them were skipped, nothing is known about the hardware.
    only_software = {result.category.lower() for result in passed} <= {_DEPLOYMENT} and any(
        result.category.lower() != _DEPLOYMENT for result in skipped
    )
    figure = f"{len(passed)} results passed" + (f", {len(skipped)} skipped" if skipped else "")
    if only_software and not any(finding.verdict == "FAIL" for finding in findings):
        step = (
            "run dcgmi diag with a level (-r 3) and a GPU for which the tests are not skipped: no hardware was tested"
        )
        findings.append(Finding("WARN", text.stem, "dcgmi diag", figure, "hardware tests that ran", step, text.file, 1))
    elif passed:
        findings.append(Finding("PASS", text.stem, "dcgmi diag", figure, "Pass", "", text.file, 1))
    elif not findings:
        step = "run dcgmi diag with a level at which the tests are not skipped"
        findings.append(Finding("WARN", text.stem, "dcgmi diag", figure, "Pass", step, text.file, 1))
    return Log(KIND, tuple(findings), traits=traits)


def _finding(text: Text, result: _Result) -> Finding:
    """Return the finding of a result that failed, or passed with a warning."""
    errors = "; ".join(result.texts)
    is_setting = result.name.lower() in _SETTINGS or re.search(r"[Pp]ersistence mode .{0,40}disabled", errors)
    severity = result.severity or (5 if is_setting else 0)
    step = _FABRIC_STEP if "system not yet initialized" in errors else _STEPS.get(severity, _UNKNOWN_STEP)
    who = result.part or text.stem
    verdict = _VERDICTS[result.status]
    # A test may pass with a warning, for example if it could not allocate its memory. A wrong setting, or a part to be
    # watched, does not prevent use by DCGM's classes: DCGM 4 reports the former as a warning.
    if verdict == "PASS" or severity in (1, 5):
        verdict = "WARN"
    figure = (errors or result.status)[:300]
    return Finding(verdict, who, f"dcgmi {result.name}", figure, "Pass", step.format(who), text.file, result.line)


def _tests(text: Text, category: Mapping[str, Any]) -> Iterator[_Result]:
    heading = word(category.get("category"))
    for test in map(mapping, sequence(category.get("tests"))):
        name = word(test.get("name")) or "test without a name"
        line = text.line_of(f'"{name}"')
        for result in map(mapping, sequence(test.get("results")) or [mapping(test.get("test_summary"))]):
            status = word(result.get("status")).lower()
            if status not in _VERDICTS and status not in _SKIPPED:
                rule = f"test {name!r} has the status {status[:40]!r}: Pass, Warn, Fail or Skip are expected"
                raise text.damaged(line, rule)
            texts, severity = _warnings(result)
            yield _Result(heading, name, _part(result), status, line, texts, severity)


def _part(result: Mapping[str, Any]) -> str:
    number = next((word(result[key]) for key in ("entity_id", "gpu_id", "gpu_ids") if key in result), "")
    return f"{word(result.get('entity_group')) or 'GPU'} {number}" if number else ""


def _warnings(result: Mapping[str, Any]) -> tuple[list[str], int]:
    """Return DCGM's messages and the worst severity (0 if none is given). Older versions have a single message."""
    warnings = result.get("warnings", "")
    listed = sequence(warnings) or [warnings]
    texts = [word(mapping(item).get("warning")) or word(item) for item in listed]
    severities = [mapping(item).get("error_severity") for item in listed]
    order = (1, 5, 4, 6, 2)
    severities_known = [severity for severity in severities if isinstance(severity, int) and severity in order]
    return list(filter(None, texts)), max(severities_known, key=order.index, default=0)


@dataclass
class _Test:
    """Parser state of one test of a table: results of parts, and messages with the index of the result above them."""

    category: str
    name: str
    results: list[_Result] = field(default_factory=list)
    texts: list[tuple[str, int, str]] = field(default_factory=list)

    def finish(self) -> list[_Result]:
        """Return the results with their messages; `Fail - All` is split by the parts that the messages name."""
        last_sum = next((one for one in reversed(self.results) if not one.part), None)
        # From DCGM 4 on the line of the test itself summarises the lines of its parts below it.
        is_sum = last_sum is self.results[0] and len(self.results) > 1 if self.results else False
        if is_sum and not any(kind != "Info" and at == 0 for kind, at, _ in self.texts):
            self.results = self.results[1:]
            self.texts = [(kind, at - 1, message) for kind, at, message in self.texts]
        split: dict[str, _Result] = {}
        for kind, at, message in self.texts:
            if kind == "Info" or not self.results:
                continue
            match = re.match(r"GPU (\d{1,4})\b", message)
            part = f"GPU {match[1]}" if match else ""
            bad = [one for one in self.results if one.status != "pass"]
            target = next((one for one in bad if part and one.part == part), None)
            if target is None and part and bad and not bad[0].part:
                first = bad[0]
                target = split.setdefault(part, _Result(first.category, first.name, part, first.status, first.line))
            (target or self.results[min(max(at, 0), len(self.results) - 1)]).texts.append(message.strip())
        if split:
            self.results = [one for one in self.results if one.part or one.status == "pass" or one.texts]
        return [*self.results, *split.values()]


def _rows(text: Text) -> Iterator[_Result]:
    """Yield the results of every table; a long message continues in lines without a name, broken anywhere."""
    test = _Test("", "")
    for line, row in enumerate(text.lines, 1):
        if section := _SECTION.match(row):
            yield from test.finish()
            test = _Test(section[1].strip(), "")
            continue
        cells = _CELLS.match(row)
        if cells is None or test.category.lower() == "metadata":
            continue
        name_cell, info = cells["name"].strip(), cells["info"]
        entity, result = _ENTITY.match(info.strip()), _RESULT.match(info.strip())
        if name_cell in _TEXTS:
            if name_cell == "Error" and not test.results:  # a fragment of a table
                test.results.append(_Result(test.category, test.name or "test", "", "fail", line))
            test.texts.append((name_cell, len(test.results) - 1, _cell_text(info)))
        elif entity and not name_cell:
            part = f"{entity[1]} {entity[2]}"
            test.results.append(_Result(test.category, test.name, part, entity[3].lower(), line))
        elif result and name_cell:
            yield from test.finish()
            test = _Test(test.category, name_cell)
            test.results = [
                _Result(test.category, name_cell, part, result[1].lower(), line) for part in _parts(result[2])
            ]
        elif result and not test.texts:
            test.results += [
                _Result(test.category, test.name, part, result[1].lower(), line) for part in _parts(result[2])
            ]
        elif not name_cell and test.texts:
            kind, at, begun = test.texts[-1]
            test.texts[-1] = (kind, at, begun + _cell_text(info))
    yield from test.finish()


def _cell_text(info: str) -> str:
    """Return the text of a cell with its trailing blanks: DCGM breaks messages after 45 letters, even within a word."""
    return info[1:46] if len(info) >= 46 else info[1:].rstrip()


def _parts(listed: str | None) -> list[str]:
    """Return the GPUs of `GPUs: 0, 3` or `GPU 3`; one empty name for `All` and for a test of the node."""
    numbers = re.findall(r"\d{1,4}", listed) if listed and listed.upper().startswith("GPU") else []
    return [f"GPU {number}" for number in numbers] or [""]


def _is_closed(text: Text) -> bool:
    """Return True if the last table is closed by a line `+---+---+`."""
    marks = [line.strip() for line in text.lines if line.strip().startswith(("|", "+"))]
    return bool(marks) and bool(re.fullmatch(r"\+-{5,}\+-{5,}\+?", marks[-1]))


def _traits(text: Text) -> dict[tuple[str, str], str]:
    versions = {}
    for row in text.lines:
        cells = _CELLS.match(row)
        if cells and cells["name"].strip() in ("DCGM Version", "Driver Version Detected"):
            versions[cells["name"].strip(), text.stem] = cells["info"].strip()
    return versions


def _health(text: Text) -> Log:
    """Parse `dcgmi health -c`: overall state, and each part that is not healthy with its messages."""
    findings: list[Finding] = []
    part, check, overall, line_overall = text.stem, "", "", 0
    for line, row in enumerate(text.lines, 1):
        cells = _CELLS.match(row)
        if cells is None:
            continue
        name_cell, info = cells["name"].strip(" ->"), cells["info"].strip()
        if name_cell.startswith("Overall Health"):
            overall, line_overall = info, line
        elif number := re.fullmatch(r"(?:GPU(?: ID)?:? ?)?(\d{1,4})", name_cell):
            part = f"GPU {number[1]}"
        verdict = _HEALTHS.get(info.lower())
        if (
            verdict in ("WARN", "FAIL")
            and name_cell
            and not name_cell.startswith("Overall")
            and not re.fullmatch(r".*\d", name_cell)
        ):
            check = name_cell
            step = _UNKNOWN_STEP.format(part) if verdict == "FAIL" else f"watch {part}: DCGM warns of it"
            findings.append(Finding(verdict, part, f"health: {check}", info, "Healthy", step, text.file, line))
        elif findings and check and verdict is None and (info or name_cell) and not name_cell.startswith("Overall"):
            last = findings[-1]
            figure = f"{last.figure} {info or name_cell}".strip()
            findings[-1] = replace(last, figure=figure[:300])
    verdict = _HEALTHS.get(overall.lower())
    if verdict is None:
        raise text.damaged(line_overall, "must hold 'Overall Health' with Healthy, Warning or Failure")
    if not findings:
        step = "" if verdict == "PASS" else "run dcgmi diag -r 3: the table names no part"
        findings.append(Finding(verdict, text.stem, "health", overall, "Healthy", step, text.file, line_overall))
    return Log(HEALTH, tuple(findings))

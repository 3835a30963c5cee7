"""`dcgmi diag -r N -j`: every test of every GPU, with DCGM's own words and what its severity asks for.

Format: docs.nvidia.com/datacenter/dcgm (DCGM Diagnostics) and github.com/NVIDIA/DCGM, dcgmi/Diag.cpp: `DCGM GPU
Diagnostic` with `gpu_id` or `gpu_ids` up to DCGM 3, `DCGM Diagnostic` with entities from 4 on. Severities:
dcgmErrorSeverity_t in dcgmlib/dcgm_errors.h.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bench.accept.evidence.log import Log, Text, mapping, sequence, word
from netlayer.verdict import Finding, Verdict

KIND = "dcgmi diag"
_ROOTS = ("DCGM Diagnostic", "DCGM GPU Diagnostic")
_VERDICTS: Mapping[str, Verdict] = {"pass": "PASS", "warn": "WARN", "warning": "WARN", "fail": "FAIL"}
_SKIPPED = ("skip", "skipped", "not run", "notrun")
_STEPS = {
    1: "watch {}: it can work on",
    2: "drain the node and return {}: DCGM says it must be isolated",
    4: "triage {}: run dcgmi diag -r 3 on it alone, and read its XID errors in the kernel log",
    5: "correct the setting that is named: no hardware fault by DCGM's own class",
    6: "drain the node and reset {} (nvidia-smi -r), then run dcgmi diag again",
}
_UNKNOWN_STEP = "drain the node and run dcgmi diag -r 3 on {} alone"


def is_json(tree: Mapping[str, Any]) -> bool:
    return any(root in tree for root in _ROOTS)


def parse_json(text: Text, tree: Mapping[str, Any]) -> Log:
    """Each test that did not pass on its own, the others as one finding.

    Raises:
        ConfigError: it holds no results.
    """
    root = next(mapping(tree[name]) for name in _ROOTS if name in tree)
    error = word(root.get("runtime_error")) or word(tree.get("runtime_error"))
    if error:
        step = "see whether nv-hostengine runs and the driver answers, then run dcgmi diag again"
        return Log(
            KIND,
            (
                Finding(
                    "FAIL",
                    text.stem,
                    "dcgmi diag",
                    error,
                    "a diagnosis that ends",
                    step,
                    text.file,
                    text.line_of("runtime_error"),
                ),
            ),
        )
    text.check_rows(sum(len(sequence(mapping(one).get("tests"))) for one in sequence(root.get("test_categories"))))
    found = [result for category in sequence(root.get("test_categories")) for result in _results(text, category)]
    passed = sum(finding.verdict == "PASS" for finding in found)
    skipped = sum(finding.verdict is None for finding in found)
    if not found:
        line = text.line_of("test_categories")
        raise text.damaged(
            line, "must hold 'test_categories' with tests and their results", "take it with dcgmi diag -j"
        )
    rest = [finding for finding in found if finding.verdict in ("WARN", "FAIL")]
    words = f"{passed} results passed" + (f", {skipped} skipped" if skipped else "")
    if passed:
        rest.append(Finding("PASS", text.stem, "dcgmi diag", words, "Pass", "", text.file, 1))
    elif not rest:
        step = "run dcgmi diag with a level at which the tests are not skipped"
        rest.append(Finding("WARN", text.stem, "dcgmi diag", words, "Pass", step, text.file, 1))
    return Log(KIND, tuple(rest))


def _results(text: Text, category: object) -> Iterator[Finding]:
    for test in map(mapping, sequence(mapping(category).get("tests"))):
        name = word(test.get("name")) or "test without a name"
        results = sequence(test.get("results")) or [mapping(test.get("test_summary"))]
        for result in map(mapping, results):
            yield _finding(text, name, result)


def _finding(text: Text, name: str, result: Mapping[str, Any]) -> Finding:
    status = word(result.get("status")).lower()
    line = text.line_of(f'"{name}"')
    if status not in _VERDICTS and status not in _SKIPPED:
        raise text.damaged(line, f"test {name!r} has the status {status[:40]!r}: Pass, Warn, Fail or Skip are expected")
    who = _who(text, result)
    said, severity = _warnings(result)
    verdict = _VERDICTS.get(status)
    step = "" if verdict in (None, "PASS") else _STEPS.get(severity, _UNKNOWN_STEP).format(who)
    return Finding(verdict, who, f"dcgmi {name}", said or status, "Pass", step, text.file, line)


def _who(text: Text, result: Mapping[str, Any]) -> str:
    number = next((word(result[key]) for key in ("entity_id", "gpu_id", "gpu_ids") if key in result), "")
    return f"{word(result.get('entity_group')) or 'GPU'} {number}" if number else text.stem


def _warnings(result: Mapping[str, Any]) -> tuple[str, int]:
    """DCGM's words, and its gravest severity; 0 where it gives none. Older versions give a single text."""
    warnings = result.get("warnings", "")
    listed = sequence(warnings) or [warnings]
    said = [word(mapping(item).get("warning")) or word(item) for item in listed]
    severities = [mapping(item).get("error_severity") for item in listed]
    order = (1, 5, 4, 6, 2)
    known = [severity for severity in severities if isinstance(severity, int) and severity in order]
    return "; ".join(filter(None, said)), max(known, key=order.index, default=0)

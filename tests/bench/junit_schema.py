"""Checker of JUnit XML by the rules of the stricter common schema, windyroad's JUnit.xsd."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

_INTEGER, _DECIMAL = re.compile(r"\d+"), re.compile(r"\d+(\.\d+)?")
_SUITE = {
    "name": re.compile(r".+"),
    "timestamp": re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}"),
    "hostname": re.compile(r"\S.*"),
    "tests": _INTEGER,
    "failures": _INTEGER,
    "errors": _INTEGER,
    "time": _DECIMAL,
}
_CASE = {"name": re.compile(r".+", re.S), "classname": re.compile(r".+"), "time": _DECIMAL}
_OUTCOMES = {"failure": {"type", "message"}, "error": {"type", "message"}, "skipped": {"message"}}


def problems(text: str) -> list[str]:
    """Return the violations of the schema; empty if the file is valid."""
    suite = ET.fromstring(text)
    violations = [] if suite.tag == "testsuite" else [f"root is {suite.tag}"]
    violations += _attributes(suite, _SUITE, {"skipped"})
    cases = suite.findall("testcase")
    order = [child.tag for child in suite]
    if order != ["properties", *["testcase"] * len(cases), "system-out", "system-err"]:
        violations.append(f"children of the suite are out of order: {order}")
    for case in cases:
        violations += _attributes(case, _CASE, set())
        outcomes = list(case)
        if len(outcomes) > 1 or any(outcome.tag not in _OUTCOMES for outcome in outcomes):
            violations.append(f"{case.get('name')}: holds {[outcome.tag for outcome in outcomes]}")
        for outcome in outcomes:
            if set(outcome.attrib) - _OUTCOMES.get(outcome.tag, set()) or len(outcome):
                violations.append(f"{outcome.tag}: {outcome.attrib}")
            if outcome.tag != "skipped" and not outcome.get("type"):
                violations.append(f"{outcome.tag} without type")
    for name, tag in (("tests", "."), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        count = len(cases) if tag == "." else len(suite.findall(f"testcase/{tag}"))
        if suite.get(name) is not None and suite.get(name) != str(count):
            violations.append(f"{name} = {suite.get(name)}, there are {count}")
    return violations


def _attributes(element: ET.Element, needed: dict[str, re.Pattern[str]], optional: set[str]) -> list[str]:
    violations = [f"{element.tag} lacks {name}" for name in needed if name not in element.attrib]
    violations += [
        f"{element.tag} has {name}" for name in element.attrib if name not in needed and name not in optional
    ]
    for name, pattern in needed.items():
        if name in element.attrib and not pattern.fullmatch(element.attrib[name]):
            violations.append(f"{element.tag}: {name} = {element.attrib[name]!r}")
    return violations

"""The rules of JUnit's common schemas (windyroad's JUnit.xsd, the stricter one) as a checker for tests."""

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
    """What of the file breaks the schema; empty where it is valid."""
    suite = ET.fromstring(text)
    found = [] if suite.tag == "testsuite" else [f"root is {suite.tag}"]
    found += _attributes(suite, _SUITE, {"skipped"})
    cases = suite.findall("testcase")
    order = [child.tag for child in suite]
    if order != ["properties", *["testcase"] * len(cases), "system-out", "system-err"]:
        found.append(f"children of the suite are out of order: {order}")
    for case in cases:
        found += _attributes(case, _CASE, set())
        outcomes = list(case)
        if len(outcomes) > 1 or any(outcome.tag not in _OUTCOMES for outcome in outcomes):
            found.append(f"{case.get('name')}: holds {[outcome.tag for outcome in outcomes]}")
        for outcome in outcomes:
            if set(outcome.attrib) - _OUTCOMES.get(outcome.tag, set()) or len(outcome):
                found.append(f"{outcome.tag}: {outcome.attrib}")
            if outcome.tag != "skipped" and not outcome.get("type"):
                found.append(f"{outcome.tag} without type")
    for name, tag in (("tests", "."), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        count = len(cases) if tag == "." else len(suite.findall(f"testcase/{tag}"))
        if suite.get(name) is not None and suite.get(name) != str(count):
            found.append(f"{name} = {suite.get(name)}, there are {count}")
    return found


def _attributes(element: ET.Element, needed: dict[str, re.Pattern[str]], optional: set[str]) -> list[str]:
    found = [f"{element.tag} lacks {name}" for name in needed if name not in element.attrib]
    found += [f"{element.tag} has {name}" for name in element.attrib if name not in needed and name not in optional]
    for name, pattern in needed.items():
        if name in element.attrib and not pattern.fullmatch(element.attrib[name]):
            found.append(f"{element.tag}: {name} = {element.attrib[name]!r}")
    return found

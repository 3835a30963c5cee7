"""JUnit XML: the common test suite element, and the conversion of a benchmark record.

Valid against the schemas in common use: windyroad's JUnit.xsd (Ant), which requires every attribute of a suite and
allows no output in a test case, and Jenkins' junit-10.xsd. So figures and warnings are in the output of the suite, not
in passed test cases.
"""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from bench.perf.options import MIN_BW_VARIABLE
from bench.perf.table import MIN_BW_SHARE, fast_enough, mean_bus_bw
from netlayer.printing import printable_text
from netlayer.results import RunRecord


def open_suite(name: str, started_utc: str = "", seconds: float = 0.0) -> ET.Element:
    """Create a suite without test cases.

    Args:
        name: name of the suite.
        started_utc: start time, ISO 8601, empty for now; fraction and zone are dropped as the schema requires.
        seconds: duration of the suite.
    """
    started = started_utc or datetime.now(UTC).isoformat()
    suite = ET.Element("testsuite", name=name, timestamp=started[:19], hostname=os.uname().nodename or "localhost")
    suite.set("time", f"{max(seconds, 0.0):.3f}")
    ET.SubElement(suite, "properties")
    return suite


def finish_suite(suite: ET.Element, output: str = "") -> str:
    """Add counts and output to the suite and return the XML file as text."""
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(len(suite.findall(f"testcase/{tag}"))))
    suite.set("tests", str(len(suite.findall("testcase"))))
    ET.SubElement(suite, "system-out").text = output
    ET.SubElement(suite, "system-err").text = ""
    ET.indent(suite)
    return ET.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def junit(record: RunRecord, stopped: str = "") -> str:
    """Convert a record: one test case for each size and kind of buffer, and one for the mean bandwidth.

    Wrong data is a failure, unchecked data is skipped, and an aborted run (`stopped`: its reason) is an error.
    """
    name = f"{record.name.removeprefix('bench.')}_perf"
    suite = open_suite(name, record.started_utc, _seconds(record))
    figures = [_add_row(suite, row) for row in record.rows]
    fast = fast_enough(record)
    if fast is not None:
        case = ET.SubElement(suite, "testcase", classname=name, name="mean bus bandwidth", time="0")
        if not fast:
            min_bw_gbs = MIN_BW_SHARE * record.arguments["min_bw_gbs"]
            message = (
                f"{mean_bus_bw(record):.4g} GB/s is below {MIN_BW_SHARE:g} x {MIN_BW_VARIABLE} = {min_bw_gbs:.4g} GB/s"
            )
            ET.SubElement(case, "failure", type="bandwidth", message=message)
    if stopped:
        case = ET.SubElement(suite, "testcase", classname=name, name="run to the end", time="0")
        ET.SubElement(case, "error", type="stopped", message=printable_text(" ".join(stopped.split())))
    return finish_suite(suite, "\n".join(figures))


def _seconds(record: RunRecord) -> float:
    try:
        return (datetime.fromisoformat(record.ended_utc) - datetime.fromisoformat(record.started_utc)).total_seconds()
    except ValueError:  # the record has no end time
        return 0.0


def _add_row(suite: ET.Element, row: Mapping[str, Any]) -> str:
    """Add the test case of a row; return the line with its figures."""
    place = "in place" if row["in_place"] else "out of place"
    name = f"{row['size_bytes']} B {row['dtype']} {row['op']} root {row['root']} {place}, cycle {row['cycle']}"
    seconds = f"{row['time_us'] / 1e6:.9f}"
    case = ET.SubElement(suite, "testcase", classname=suite.attrib["name"], name=name, time=seconds)
    if row["wrong"]:
        message = f"{row['wrong']} elements arrived wrong"
        ET.SubElement(case, "failure", type="wrong data", message=message).text = message
    elif row["wrong"] is None:
        ET.SubElement(case, "skipped", message="the data was not checked")
    return f"{name}: algbw {row['alg_bw_gbs']:.4g} GB/s, busbw {row['bus_bw_gbs']:.4g} GB/s"

"""A record of a bench as JUnit's XML: a test case for each size and kind of buffer, one for the mean bandwidth."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Mapping
from typing import Any

from bench.accept.evidence.log import printable
from bench.options import MIN_BW_VARIABLE
from bench.table import MIN_BW_SHARE, fast_enough, mean_bus_bw
from netlayer.results import RunRecord


def junit(record: RunRecord, stopped: str = "") -> str:
    """The whole file. Wrong data is a failure, data that was not checked is skipped, an early end is an error."""
    suite = ET.Element(
        "testsuite", name=f"{record.name.removeprefix('bench.')}_perf", timestamp=record.started_utc[:19]
    )
    for row in record.rows:
        _add_row(suite, row)
    fast = fast_enough(record)
    if fast is not None:
        case = ET.SubElement(suite, "testcase", classname=suite.attrib["name"], name="mean bus bandwidth")
        if not fast:
            least = MIN_BW_SHARE * record.arguments["min_bw_gbs"]
            words = f"{mean_bus_bw(record):.4g} GB/s is below {MIN_BW_SHARE:g} x {MIN_BW_VARIABLE} = {least:.4g} GB/s"
            ET.SubElement(case, "failure", message=words)
    if stopped:
        case = ET.SubElement(suite, "testcase", classname=suite.attrib["name"], name="run to the end")
        ET.SubElement(case, "error", message=printable(" ".join(stopped.split())))
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(len(suite.findall(f"testcase/{tag}"))))
    suite.set("tests", str(len(suite)))
    ET.indent(suite)
    return ET.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _add_row(suite: ET.Element, row: Mapping[str, Any]) -> None:
    place = "in place" if row["in_place"] else "out of place"
    name = f"{row['size_bytes']} B {row['dtype']} {row['op']} root {row['root']} {place}, cycle {row['cycle']}"
    seconds = f"{row['time_us'] / 1e6:.9f}"
    case = ET.SubElement(suite, "testcase", classname=suite.attrib["name"], name=name, time=seconds)
    if row["wrong"]:
        ET.SubElement(case, "failure", message=f"{row['wrong']} elements arrived wrong")
    elif row["wrong"] is None:
        ET.SubElement(case, "skipped", message="the data was not checked")
    figures = f"algbw {row['alg_bw_gbs']:.4g} GB/s, busbw {row['bus_bw_gbs']:.4g} GB/s"
    ET.SubElement(case, "system-out").text = figures

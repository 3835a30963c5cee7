"""JUnit's XML of a bench: well-formed, and a failure where data was wrong or the bandwidth too low."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from bench.junit import junit
from tests.bench.canned import record, row


def test_each_row_is_a_case_with_its_time() -> None:
    suite = ET.fromstring(junit(record([row(False), row(True, wrong=None), row(False, wrong=7), row(True)])))
    counts = {name: suite.attrib[name] for name in ("name", "tests", "failures", "skipped", "errors")}
    assert counts == {"name": "all_reduce_perf", "tests": "4", "failures": "1", "skipped": "1", "errors": "0"}
    first, _, third, _ = suite.findall("testcase")
    assert first.attrib["name"] == "1048576 B float sum root -1 out of place, cycle 0"
    assert float(first.attrib["time"]) == 15.015e-6
    assert [each.attrib["message"] for each in third.findall("failure")] == ["7 elements arrived wrong"]


def test_a_missed_bandwidth_is_a_failure() -> None:
    for least, failures in ((100.0, 0), (200.0, 1)):
        suite = ET.fromstring(junit(record(min_bw_gbs=least)))
        assert suite.attrib["failures"] == str(failures)
        assert suite.findall("testcase")[-1].attrib["name"] == "mean bus bandwidth"


def test_a_run_that_broke_off_is_an_error_whatever_its_words() -> None:
    suite = ET.fromstring(junit(record(), stopped='rank 1 <said> "\x1b[31m"\n& died'))
    assert suite.attrib["errors"] == "1"
    assert "rank 1 <said>" in suite.findall("testcase/error")[0].attrib["message"]

"""Output of a judgement: JUnit by its schema, tables at two widths, the page, verdicts on nodes, exit codes."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bench.accept.cli import accept
from bench.accept.evidence.log import Log
from bench.accept.judge.logs import Judgement, judge_files
from bench.accept.judge.nodes import judge_nodes, place_logs
from bench.accept.judge.output import format_nodes, format_table, junit, page
from bench.junit import junit as bench_junit
from netlayer.verdict import Finding, Verdict, worst
from tests.bench.canned import record, row
from tests.bench.junit_schema import problems

LOGS = Path(__file__).parent / "logs"


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(accept, ["judge", *map(str, arguments)])


def finding(verdict: Verdict | None, subject: str, file: str, check: str = "run", step: str = "look") -> Finding:
    return Finding(verdict, subject, check, "a figure", "another", step, file, 3)


def test_no_verdict_lies_between_a_pass_and_a_warning() -> None:
    assert worst(["PASS", "NO VERDICT"]) == "NO VERDICT"
    assert worst(["WARN", "NO VERDICT", "PASS"]) == "WARN"


def test_no_verdict_is_shown_in_every_format(tmp_path: Path) -> None:
    out = {name: tmp_path / f"out.{name}" for name in ("json", "junit", "html")}
    result = invoke(LOGS / "nccl_own_gloo.txt", *(word for name in out for word in (f"--{name}", out[name])))
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1].startswith("NO VERDICT: 0 faults and 0 warnings in 1 file; nothing to hold")
    rows = json.loads(out["json"].read_text())["rows"]
    assert [one["verdict"] for one in rows] == ["NO VERDICT", "NO VERDICT", "PASS"]
    suite = ET.parse(out["junit"]).getroot()
    assert [suite.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["2", "0", "0", "1"]
    assert '<p class="verdict NO-VERDICT"><b>NO VERDICT</b>' in out["html"].read_text()
    assert invoke(LOGS / "nccl_own_gloo.txt", "--strict").exit_code == 1


@pytest.mark.parametrize("names", ["nccl_own_gloo.txt", "nccl_wrong_data.txt kernel_xid.txt", "dcgmi4_good.json"])
def test_the_xml_of_a_judgement_is_valid(names: str, tmp_path: Path) -> None:
    (tmp_path / "not a log").write_text("\x1b[31m<& no log\n")
    judgement = judge_files([*(LOGS / name for name in names.split()), tmp_path / "not a log"])
    text = junit(judgement, started="2026-11-26T10:00:00.1")
    assert problems(text) == []
    suite = ET.fromstring(text)
    assert (suite.get("timestamp"), suite.get("errors")) == ("2026-11-26T10:00:00", "1")
    for failure in suite.iter("failure"):
        assert "next:" in (failure.text or "")


def test_the_xml_of_a_bench_is_valid() -> None:
    for text in (
        bench_junit(record([row(False), row(True, wrong=None), row(False, wrong=7)], min_bw_gbs=200.0)),
        bench_junit(record(), stopped="a rank died"),
    ):
        assert problems(text) == []


def test_the_checker_of_the_schema_finds_what_is_wrong() -> None:
    good = bench_junit(record())
    for old, new in (
        (' hostname="', ' host="'),
        ("<system-err />", ""),
        ('<testcase classname="', '<testcase class="'),
        ('tests="', 'tests="9'),
        ("<properties />", "<system-out /><properties />"),
    ):
        assert old in good
        assert problems(good.replace(old, new, 1)) != []


@pytest.mark.parametrize("width", [72, 80, 99, 100, 120, 200])
def test_a_table_fits_the_terminal_and_keeps_every_word(width: int) -> None:
    judgement = judge_files([LOGS / "nccl_own_gloo.txt", LOGS / "nvidia_smi_bad.txt", LOGS / "kernel_xid.txt"])
    *table, last = format_table(judgement, width=width)
    lines = [*table, *format_nodes(judgement, width)]
    # What can be copied whole is not broken: the place of a finding.
    assert [line for line in lines if len(line) > width and str(LOGS) not in line] == []
    assert last.startswith("FAIL: ")
    printed_words = " ".join(lines).split()
    for one in judgement.findings:
        assert all(word in printed_words for word in one.next_step.split())


def test_the_width_of_the_terminal_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = invoke(LOGS / "dcgmi4_bad.json").stdout.splitlines()
        assert 60 < max(map(len, lines)) <= columns


def test_the_evidence_on_a_node_is_one_verdict_with_its_cause_first() -> None:
    logs = [
        ("a/nccl.txt", Log("nccl-tests", (finding("FAIL", "n7", "a/nccl.txt"),), host="n7")),
        ("a/n7_dmesg.txt", Log("kernel log", (finding("FAIL", "GPU 3", "a/n7_dmesg.txt", "XID 79", "drain it"),))),
        ("a/smi_n7.txt", Log("nvidia-smi -q", (finding("WARN", "GPU 3", "a/smi_n7.txt", "row remapping"),))),
        ("a/other.txt", Log("nccl-tests", (finding("PASS", "n8", "a/other.txt"),), host="n8")),
    ]
    places = place_logs(logs)
    assert places["a/smi_n7.txt"] == ("n7", "its file's name")
    kinds = {file: log.kind for file, log in logs}
    first, other = judge_nodes([one for _, log in logs for one in log.findings], places, kinds)
    assert (first.node, first.verdict, first.next_step) == ("n7", "FAIL", "drain it")
    assert [one.check for one in first.findings] == ["XID 79", "run", "row remapping"]
    assert first.files == ("a/nccl.txt", "a/n7_dmesg.txt", "a/smi_n7.txt")
    assert (other.node, other.verdict, other.findings) == ("n8", "PASS", ())


def test_a_warning_beside_a_pass_fails_no_node() -> None:
    logs = [("n1.txt", Log("nvidia-smi -q", (finding("WARN", "GPU 1", "n1.txt"), finding("PASS", "GPU 0", "n1.txt"))))]
    [node] = judge_nodes(logs[0][1].findings, place_logs(logs), {"n1.txt": "nvidia-smi -q"})
    assert (node.node, node.verdict, node.known_by) == ("n1", "WARN", "its file")


@pytest.mark.parametrize(
    ("logs", "nodes"),
    [
        # The log's own word goes first.
        ({"x/n1.txt": "n9"}, {"x/n1.txt": "n9"}),
        # A folder a node: the one host that its logs name is the silent ones', too.
        ({"a/nccl": "n1", "a/dmesg": "", "b/nccl": "n2", "b/dmesg": ""}, {"a/dmesg": "n1", "b/dmesg": "n2"}),
        # A folder that bears the host's name.
        ({"n1/nccl": "n1", "n1/dmesg": ""}, {"n1/dmesg": "n1"}),
        # One folder for a whole fleet belongs to nobody, though one log in it names its host.
        ({"logs/nccl": "n1", "logs/dmesg": ""}, {"logs/dmesg": "dmesg"}),
        (
            {"logs/nccl": "n1", "logs/dmesg-n2": "", "logs/smi.n1": ""},
            {"logs/dmesg-n2": "dmesg-n2", "logs/smi.n1": "n1"},
        ),
        # The same names in each folder: the folders are the nodes.
        ({"n1/dmesg": "", "n2/dmesg": ""}, {"n1/dmesg": "n1", "n2/dmesg": "n2"}),
        # n1 is no part of n10.
        ({"l/nccl": "n1", "l/dmesg_n10": ""}, {"l/dmesg_n10": "dmesg_n10"}),
    ],
)
def test_files_are_assigned_to_nodes(logs: dict[str, str], nodes: dict[str, str]) -> None:
    places = place_logs([(file, Log("kernel log", host=host)) for file, host in logs.items()])
    assert {file: places[file].node for file in nodes} == nodes


def test_nodes_are_in_the_text_the_record_and_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "node7"
    folder.mkdir()
    for name in ("nccl_wrong_data.txt", "nvidia_smi_bad.txt", "kernel_xid.txt"):
        (folder / name).write_bytes((LOGS / name).read_bytes())
    result = invoke(folder, "--json", tmp_path / "out.json", "--html", tmp_path / "out.html")
    [line] = [line for line in result.stdout.splitlines() if line.startswith("node7: FAIL:")]
    assert "XID" in line
    nodes = json.loads((tmp_path / "out.json").read_text())["rows"][0]["nodes"]
    assert [(node["node"], node["verdict"], len(node["files"])) for node in nodes] == [("node7", "FAIL", 3)]
    assert "What decides first" not in (tmp_path / "out.html").read_text()
    assert "All evidence on a node together" in (tmp_path / "out.html").read_text()


def test_things_in_a_folder_that_are_no_logs_are_no_error(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("mpirun all_reduce_perf\n")
    (tmp_path / "nccl.txt").write_bytes((LOGS / "nccl_h200x8.json").read_bytes())
    result = invoke(tmp_path)
    assert (result.exit_code, "no log: " in result.stdout) == (0, True)
    assert invoke(tmp_path / "run.sh").exit_code == 2


def test_a_page_without_findings_has_its_verdict() -> None:
    assert "NO VERDICT" in page(Judgement((), (), {}), "abc")

"""Verdicts on logs of eight tools, healthy and faulty; damaged and hostile files give one error line."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.accept.cli import accept
from bench.accept.evidence.log import MAX_LINE, MAX_STREAM_BYTES
from bench.accept.judge import expectations
from bench.accept.judge.logs import Judgement, judge_files
from bench.perf.table import PerfRow, format_head, format_row, format_table
from netlayer.errors import ConfigError
from netlayer.verdict import Finding, peers_of, worst
from tests.bench import canned

LOGS = Path(__file__).parent / "logs"
# No program waits there: nccl-tests writes line by line.
CUT_ROW = b"    67108864      16777216     float    "
CUT_FRONT = (
    b"".join(line for line in (LOGS / "nccl_hung.txt").read_bytes().splitlines(True) if line[:1] == b"#") + CUT_ROW
)
NODES = [LOGS / f"nccl_node{number}.txt" for number in range(5)]


def judged(*names: str | Path, **said: object) -> Judgement:
    return judge_files([LOGS / name for name in names], said)


def bad(judgement: Judgement) -> list[Finding]:
    return [finding for finding in judgement.findings if finding.verdict in ("WARN", "FAIL")]


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(accept, ["judge", *map(str, arguments)])


# file -> the tool that wrote it, the verdict, and (subject, word of the check, word of the next step) of each fault.
CASES = {
    "nccl_h200x8.json": ("nccl-tests", "PASS", []),
    # Its data is right, and nothing is known of four CPU ranks: no verdict on the speed.
    "nccl_own_gloo.txt": ("nccl-tests", "NO VERDICT", []),
    "nccl_h200x8_slow.json": ("nccl-tests", "FAIL", [("node6", "reduce_scatter", "alone")]),
    "nccl_mpirun_nvls_off.txt": ("nccl-tests", "WARN", [("node1", "reduce_scatter", "alone")]),
    "nccl_wrong_data.txt": ("nccl-tests", "FAIL", [("node7", "all_gather data", "corrupts")]),
    "nccl_failed.txt": (
        "nccl-tests",
        "FAIL",
        [("node5", "run", "netlayer accept --hosts"), ("node5 GPU 3", "NCCL warning: GPU", "XID")],
    ),
    "nccl_hung.txt": ("nccl-tests", "FAIL", [("node9", "run", "where it hung, run netlayer accept --hosts")]),
    "perftest_rails.txt": ("perftest", "FAIL", [("mlx5_3", "RDMA_Write BW", "swap cable and transceiver of mlx5_3")]),
    "perftest_write_lat.txt": ("perftest", "FAIL", [("mlx5_4", "RDMA_Write Latency", "mlx5_4")]),
    "perftest_send_error.txt": ("perftest", "FAIL", [("mlx5_5", "run", "cable")] * 2),
    "dcgmi4_good.json": ("dcgmi diag", "PASS", []),
    "dcgmi4_bad.json": (
        "dcgmi diag",
        "FAIL",
        [("GPU 2", "memory", "return GPU 2"), ("GPU 0", "software", "correct the setting")],
    ),
    "dcgmi3_bad.json": ("dcgmi diag", "FAIL", [("GPU 1", "PCIe", "GPU 1")]),
    "nvbandwidth_good.txt": ("nvbandwidth", "PASS", []),
    "nvbandwidth_error.json": ("nvbandwidth", "FAIL", [("nvbandwidth_error", "device_to_device", "alone")]),
    "nvbandwidth_gpu5_slow.txt": (
        "nvbandwidth",
        "FAIL",
        [("CPU 0 -> GPU 6", "host_to_device", "GPU 6"), ("GPU 5", "device_to_device", "GPU 5")],
    ),
    "nvidia_smi_good.txt": ("nvidia-smi -q", "PASS", []),
    # Printed by driver 580.159 on a host of H200; serial numbers and names of devices are taken out.
    "nvidia_smi_h200_real.txt": ("nvidia-smi -q", "PASS", []),
    "nvlink_h200x4_real.txt": ("nvidia-smi nvlink -s", "PASS", []),
    "nvlink_down.txt": ("nvidia-smi nvlink -s", "FAIL", [("GPU 1", "NVLink", "reset"), ("GPU 1", "NVLinks up", "")]),
    "kernel_xid.txt": (
        "kernel log",
        "FAIL",
        [
            ("GPU 0000:1b:00", "XID 79", "drain"),
            ("GPU 0000:52:00", "XID 94", "application"),
            ("GPU 0000:52:00", "XID 63", "reset"),
            ("GPU 0000:43:00", "XID 13", "application"),
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_log_gets_its_verdict_its_culprits_and_the_next_step(name: str, tmp_path: Path) -> None:
    kind, verdict, faults = CASES[name]
    nameless = tmp_path / "log"  # known by its content, not by its name
    nameless.write_bytes((LOGS / name).read_bytes())
    judgement = judge_files([nameless])
    assert judgement.damaged == ()
    assert (list(judgement.kinds.values()), judgement.verdict) == ([kind], verdict)
    findings = bad(judgement)
    assert len(findings) == len(faults)
    for finding, (subject, check, step) in zip(findings, faults, strict=True):
        assert finding.subject == subject.replace("nvbandwidth_error", "log")
        assert check in finding.check
        assert step in finding.next_step
        assert finding.figure
        assert finding.expected
        assert finding.line > 0


def test_nvidia_smi_names_every_fault_of_every_gpu() -> None:
    verdicts = {(finding.subject[:5], finding.check): finding.verdict for finding in bad(judged("nvidia_smi_bad.txt"))}
    assert verdicts == {
        ("GPU 1", "throttling"): "FAIL",
        ("GPU 1", "power limit"): "WARN",
        ("GPU 1", "Current Power Limit"): "WARN",
        ("GPU 2", "ECC errors since the reset"): "FAIL",
        ("GPU 2", "ECC errors in its life"): "WARN",
        ("GPU 2", "row remapping"): "FAIL",
        ("GPU 2", "PCIe width"): "FAIL",
        ("GPU 2", "VBIOS Version"): "WARN",
        ("GPU 3", "NVLink fabric"): "FAIL",
    }


def test_an_idle_gpu_may_lower_its_link(tmp_path: Path) -> None:
    log = (LOGS / "nvidia_smi_good.txt").read_text()
    idle = log.replace("Performance State                     : P0", "Performance State                     : P8")
    slow = "                Current                   : "
    for text, verdict in ((log, "FAIL"), (idle, "PASS")):
        (tmp_path / "smi").write_text(text.replace(f"{slow}5", f"{slow}1"))
        assert judge_files([tmp_path / "smi"]).verdict == verdict


def test_the_slow_node_stands_out_among_its_peers() -> None:
    judgement = judged(*NODES)
    finding, expectation = bad(judgement)
    assert {(one.verdict, one.subject) for one in (finding, expectation)} == {("FAIL", "node3")}
    assert "whether NVLS was on or off" in expectation.expected  # the logs are silent, and it fails in both states
    assert "peers: median 36" in finding.expected
    assert "MAD" in finding.expected
    assert "--hosts with node3 alone" in finding.next_step
    assert not any(finding.verdict in (None, "NO VERDICT") for finding in judgement.findings)


def test_a_file_given_twice_is_no_peer_of_itself() -> None:
    assert not any("peers:" in finding.expected for finding in judged(NODES[3], NODES[3], NODES[3], NODES[0]).findings)


def test_what_no_entry_fits_has_no_expectation_until_the_user_says_what_lacks() -> None:
    [finding] = [finding for finding in judged("nccl_node0.txt").findings if finding.verdict == "NO VERDICT"]
    assert finding.expected.startswith("no expectation")
    assert "--nvls off or --nvls on" in finding.next_step  # PASS with NVLS off, FAIL with it on
    assert judged("nccl_node0.txt", nvls=False).verdict == "PASS"
    assert judged("nccl_node0.txt", nvls=True).verdict == "FAIL"
    [finding] = bad(judged("nccl_node3.txt", nvls=False))
    assert "8 x NVIDIA H200" in finding.expected


@pytest.mark.parametrize(
    ("old", "new"),
    [("22809", "22709"), ("22809", "22900"), ("NVIDIA H200", "NVIDIA H200 NVL"), ("float", "half"), ("[1,0]", "[1,1]")],
)
def test_an_expectation_holds_for_its_own_case_alone(old: str, new: str, tmp_path: Path) -> None:
    text = (LOGS / "nccl_mpirun_nvls_off.txt").read_text()
    (tmp_path / "log").write_text(text.replace(old, new))
    known = judge_files([tmp_path / "log"]).verdict != "NO VERDICT"
    assert known == (old in ("float", "[1,0]"))  # bytes count, whatever their type


def test_every_shipped_expectation_has_a_source_and_a_case() -> None:
    entries = expectations.load()
    assert len(entries) >= 10
    assert all(entry.source and "device" in entry.keys and entry.value > 0 for entry in entries)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("machine = 'm'\n[source.x]\ndate = 2026-01-01\ntext = 'y'\n[[expect]]\nfigure = {z = 1}\n", "lacks 'z'"),
        ("machine = 'm'\n[source.x]\ndate = 2026-01-01\ntext = 'y'\n[[expect]]\nfigure = {x = -1}\n", "above 0"),
        (
            "machine = 'm'\nkeys = {quantity = 'q'}\n[source.x]\ndate = 2026-01-01\ntext = 'y'\n"
            + "[[expect]]\nfigure = {x = 1}\n" * 2,
            "two entries",
        ),
        ("machine = 'm'\n[source.x]\ndate = 'May'\ntext = 'y'\n[[expect]]\nfigure = {x = 1}\n", "must be a date"),
        ("machine = 'm'\nsource = {}\n[[expect]]\nfigures = {x = 1}\n", "did you mean 'figure'"),
        ("expect = 3", "cannot be used"),
    ],
)
def test_expectations_that_cannot_be_used_are_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        expectations.load(tmp_path / "bad.toml")


def test_older_and_wider_tables_are_read(tmp_path: Path) -> None:
    """Read per-iteration columns and timestamps, a table without the collective's name, and a replayed trace."""
    wide = "".join(f"  {cell}" for cell in ("15.01", "69.84", "122.2", "0", "14.0", "17.5", "17.5", "6.66"))
    front = "     1048576        262144     float     sum      -1"
    rows = {
        "wide": f"{front}{wide}{wide}  2026-11-20 10:00:00",
        "old": f"{front}    15.01   69.84  122.22  0e+00    15.01   69.84  122.22  N/A",
        "replay": f"{front}                                    15.01   69.84  122.22      0",
    }
    for name, row in rows.items():
        (tmp_path / name).write_text(f"# nThread 1 nGpus 1\n#\n{row}\n# Avg bus bandwidth    : 122 \n")
    judgement = judge_files([tmp_path / name for name in rows])
    assert judgement.damaged == ()
    assert judgement.verdict == "NO VERDICT"
    assert {finding.figure for finding in judgement.findings if finding.check.endswith("data")} == {
        "0 wrong in 2 measurements",
        "0 wrong in 1 measurements",
        "differs by 0 at most in 1 measurements",
    }


def test_unchecked_data_warns_and_a_missed_minimum_fails(tmp_path: Path) -> None:
    text = (LOGS / "nccl_own_gloo.txt").read_text()
    head, _, rest = text.partition("(GB/s)         \n")
    lines = [line[: line.rindex(" ")] + " N/A" for line in rest.split("# Out")[0].splitlines()]
    unchecked = [line.replace("       0  ", "     N/A  ", 1) for line in lines]
    (tmp_path / "c0").write_text(f"{head}\n" + "\n".join(unchecked) + "\n# Avg bus bandwidth    : 0.5 \n")
    [finding] = bad(judge_files([tmp_path / "c0"]))
    assert (finding.verdict, finding.figure) == ("WARN", "not checked (-c 0)")
    average = next(line for line in text.splitlines() if line.startswith("# Avg"))
    (tmp_path / "slow").write_text(text.replace(average, average + "FAILED"))
    [finding] = bad(judge_files([tmp_path / "slow"]))
    assert (finding.verdict, "NCCL_TESTS_MIN_BW" in finding.expected) == ("FAIL", True)


def test_values_that_nccl_tests_itself_counts_out_of_bounds_fail(tmp_path: Path) -> None:
    text = (LOGS / "nccl_own_gloo.txt").read_text()
    (tmp_path / "text").write_text(text.replace("values : 0 OK", "values : 7 FAILED"))
    tree = json.loads((LOGS / "nccl_h200x8.json").read_text())
    (tmp_path / "json").write_text(json.dumps(tree | {"out_of_bounds": {"count": 5, "okay": "false"}}))
    for name, count in (("text", "7"), ("json", "5")):
        [finding] = bad(judge_files([tmp_path / name]))
        assert (finding.verdict, finding.figure.split()[0]) == ("FAIL", count)
        assert finding.line > 0


def test_a_second_table_that_breaks_off_is_not_taken_for_whole(tmp_path: Path) -> None:
    whole = (LOGS / "nccl_own_gloo.txt").read_text()
    (tmp_path / "log").write_text(whole + whole.partition("# Out")[0])
    assert [finding.check for finding in bad(judge_files([tmp_path / "log"]))] == ["run"]
    (tmp_path / "log").write_text(whole + whole.partition("# Out")[0][:-1])
    cut = [finding for finding in judge_files([tmp_path / "log"]).findings if finding.check == "run"]
    assert ["is cut within a line" in finding.figure for finding in cut] == [True]
    (tmp_path / "log").write_text(whole * 2)
    assert bad(judge_files([tmp_path / "log"])) == []


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("# NVLS used: no (multicast: available)", False),
        ("# NVLS used: yes (multicast: available)", True),
        ("# NVLS used: unknown (multicast: unknown)", None),
        ("# NVLS used: unknown (multicast: not available)", False),
        ("node0:1:1 [0] NCCL INFO NCCL_NVLS_ENABLE set by environment to 0.", False),
        ("node0:1:1 [0] NCCL INFO NCCL_NVLS_ENABLE set by environment to 1.", None),
        ("node0:1:1 [0] NCCL INFO NVLS multicast support is available on dev 0", True),
        ("# NVLS used: no (x)\n# NVLS used: yes (x)", None),
    ],
)
def test_what_the_log_says_of_nvls_is_not_asked_for(line: str, state: bool | None, tmp_path: Path) -> None:
    text = (LOGS / "nccl_node0.txt").read_text()
    (tmp_path / "log").write_text(text.replace("# Avg", f"{line}\n# Avg"))
    judgement = judge_files([tmp_path / "log"])
    asks_for_nvls = any("--nvls" in finding.next_step for finding in judgement.findings)
    assert asks_for_nvls == (state is None)
    expectations = [finding.expected for finding in judgement.findings if "8 x NVIDIA H200" in finding.expected]
    assert [f"NVLS {'on' if state else 'off'}" in expectation for expectation in expectations] == [True] * (
        state is not None
    )


@pytest.mark.parametrize(
    ("nvls", "known"),
    [({"used": False, "multicast": "available"}, True), ({"used": True}, False),
     ({"used": None, "multicast": "not available"}, True), ({"used": None, "multicast": "unknown"}, False), (7, False)],
)  # fmt: skip
def test_our_json_tells_of_nvls(nvls: object, known: bool, tmp_path: Path) -> None:
    tree = json.loads((LOGS / "nccl_h200x8.json").read_text())
    (tmp_path / "log").write_text(json.dumps(tree | {"env": [], "netlayer": {"nvls": nvls}}))
    findings = judge_files([tmp_path / "log"]).findings
    assert any("NVLS off" in finding.expected for finding in findings) == known


def test_what_is_known_of_one_host_is_not_held_against_two(tmp_path: Path) -> None:
    text, tree = (LOGS / "nccl_mpirun_nvls_off.txt").read_text(), (LOGS / "nccl_h200x8_slow.json").read_text()
    for number, (whole, name) in enumerate(((text, r"(Rank  [4-7].* )node1 "), (tree, r'("rank": [4-7],[^}]*)node6'))):
        for apart, known in ((whole, True), (re.sub(name, r"\g<1>other ", whole), False)):
            (tmp_path / str(number)).write_text(apart)
            findings = judge_files([tmp_path / str(number)]).findings
            assert any("8 x NVIDIA H200" in finding.expected for finding in findings) == known


def test_a_log_without_the_name_of_its_collective_says_so(tmp_path: Path) -> None:
    tree = json.loads((LOGS / "nccl_h200x8.json").read_text())
    for result in tree["results"]:  # as all_gather and alltoall both write them
        result |= {"redop": "none", "count": result["size"] // 4 // 8}
        for key in ("out_of_place", "in_place"):
            result[key]["bus_bw"] = result[key]["alg_bw"] * 7 / 8
    (tmp_path / "log").write_text(json.dumps(tree | {"args": ["./a.out"]}))
    [finding] = [finding for finding in judge_files([tmp_path / "log"]).findings if finding.verdict == "NO VERDICT"]
    assert "does not name its collective" in finding.next_step


BOOT = {
    "dmesg": "[    0.000000] Linux version 6.8.0\n[   12.345678] nvidia: module license 'NVIDIA' taints kernel.\n",
    "dmesg -x": "kern  :info  : [    0.000000] Linux version 6.8.0\nkern  :warn  : [    1.000000] NVRM: loading\n",
    "dmesg -T": "[Sun Nov 22 06:20:22 2026] Linux version 6.8.0\n[Sun Nov  1 06:20:22 2026] NVRM: loading\n",
    "journalctl -k": "Nov 22 06:20:22 node7 kernel: Linux version 6.8.0\nNov  2 06:20:22 node7 kernel: NVRM: loading\n",
    "iso": "2026-11-22T06:20:22+00:00 node7 kernel: Linux\n2026-11-22T06:20:22.123456+00:00 n kernel: NVRM: loading\n",
}


@pytest.mark.parametrize("what", BOOT)
def test_a_kernel_log_without_xid_passes(what: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(BOOT[what])
    judgement = judge_files([tmp_path / "log"])
    [finding] = judgement.findings
    assert (judgement.verdict, finding.figure) == ("PASS", "no XID in 2 lines")
    (tmp_path / "log").write_text(BOOT[what].replace("NVRM", "eth0").replace("nvidia: module license 'NVIDIA'", "md"))
    [finding] = judge_files([tmp_path / "log"]).findings
    assert finding.figure == "no XID in 2 lines, none of them from NVIDIA's driver"


def test_a_fatal_switch_and_a_gpu_that_does_not_start_are_no_healthy_kernel_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        "[    1.000000] nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 46 LTSSM Fault Up\n"
        "[    2.000000] nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Non-fatal, Link 46 MC TS crumbstore MCTO\n"
        "[    3.000000] NVRM: GPU 0000:1b:00.0: RmInitAdapter failed! (0x26:0x56:1474)\n"
    )
    faults = [(finding.verdict, finding.subject, finding.check) for finding in bad(judge_files([tmp_path / "log"]))]
    assert faults == [
        ("FAIL", "NVSwitch 3", "SXid 20034"),
        ("FAIL", "GPU 0000:1b:00", "driver"),
        ("WARN", "NVSwitch 3", "SXid 28006"),
    ]


def test_a_part_of_nvidia_smi_is_judged_where_it_tells_of_health(tmp_path: Path) -> None:
    """Judge the output of `-d ECC` and `-d UTILIZATION`, which has no product name."""
    head = "==============NVSMI LOG==============\n\nAttached GPUs : 1\nGPU 00000000:1B:00.0\n"
    for section, kinds in (
        ("    ECC Mode\n        Current : Enabled\n", 1),
        ("    Utilization\n        GPU : 0 %\n", 0),
    ):
        (tmp_path / "log").write_text(head + section)
        assert len(judge_files([tmp_path / "log"]).kinds) == kinds


def test_errors_that_the_json_lists_fail(tmp_path: Path) -> None:
    tree = json.loads((LOGS / "nccl_h200x8.json").read_text())
    (tmp_path / "log").write_text(json.dumps(tree | {"errors": ["remote process exited"]}))
    [finding] = bad(judge_files([tmp_path / "log"]))
    assert (finding.verdict, finding.subject, finding.figure) == ("FAIL", "node2", "remote process exited")


def test_healthy_fleets_with_noise_are_never_accused_and_a_slow_member_always_is(tmp_path: Path) -> None:
    head = "                    RDMA_Write BW Test\n Device         : mlx5_{}\n #bytes #iterations BW peak[Gb/sec] BW average[Gb/sec] MsgRate[Mpps]\n"  # noqa: E501
    for seed in range(40):
        dice = random.Random(seed)
        size, culprit = dice.randint(4, 32), seed % 2
        rates = [dice.gauss(392, 6) * (0.75 if culprit and device == size - 1 else 1) for device in range(size)]
        for device, rate in enumerate(rates):
            row = f" 65536 5000 {rate:.2f} {rate:.2f} 0.1\n"
            (tmp_path / str(device)).write_text(head.format(device) + row)
        faults = bad(judge_files([tmp_path / str(device) for device in range(size)]))
        assert [finding.subject for finding in faults] == ([f"mlx5_{size - 1}"] if culprit else []), seed


DAMAGE = {
    "empty": (b"", "is empty"),
    "blank": (b" \n\n", "is empty"),
    "binary": (b"# nThread 1\n\x00\x01\x02", ":2: must be text"),
    "gzip": (b"\x1f\x8b\x08\x00" + bytes(30), "unpack it first"),
    "utf16": ("# nThread 1".encode("utf-16"), "save it as UTF-8"),
    "latin": (b"\xe9t\xe9\n", "is of no known form"),
    "pickle": (pickle.dumps({"nccl_version": 1}, protocol=0), "is of no known form"),
    "prose": (b"all fine here\n", "give a log of nccl-tests"),
    "deep": (b'{"nccl_version":' + b"[" * 100_000, "is no JSON that can be used"),
    "nan": (b'{"nccl_version":1,"results":NaN}', "NaN is no number"),
    "digits": (b'{"nccl_version":' + b"9" * 5000 + b"}", "is no JSON that can be used"),
    "types": (b'{"nccl_version":[],"results":{"a":1},"end_time":3}', "at least one measurement"),
    "no end": (b'{"nccl_version":1,"results":[]}', "did not end"),
    "status": (
        b'{"DCGM Diagnostic":{"test_categories":[{"tests":[{"name":"a","results":[7]}]}]}}',
        "Skip are expected",
    ),
    "no tests": (b'{"DCGM Diagnostic":[]}', "'test_categories'"),
    "no matrix": (b'{"nvbandwidth":{"testcases":[{"name":1}]}}', "has no matrix"),
    "long line": (b"# nThread 1\n" + b"a" * (MAX_LINE + 1), ":2: has 16,385 characters"),
    "xml": (b"<nvidia_smi_log>\n", "is no whole XML"),
    "no gpu": (b"=====NVSMI LOG=====\n\nAttached GPUs   : 8\n", "GPU 00000000:1B:00.0"),
    "no row": (b"    RDMA_Write BW Test\n #bytes #iterations BW average[Gb/sec]\n", ":1: the table"),
    "bad link": (b"GPU 0: H200 (UUID: x)\n\t Link 0: 26.\n", ":2: link 0"),
    "no name": (b"GPU 0: " + b"x" * 200 + b"\n\t Link 0:\n", ":1: must hold a line 'GPU 0"),
    "no gpu line": (
        b"\xffPU 0: H200\n\t Link 0: 26.562 GB/s\nGPU 1: H200\n\t Link 0: 26.562 GB/s\n",
        ":2: a line 'GPU 0",
    ),
    "cut front": (CUT_FRONT, "a row ends"),
    "cut smi": ((LOGS / "nvidia_smi_good.txt").read_bytes()[:16000], "was cut"),
    "cut alone": ((LOGS / "nvidia_smi_h200_real.txt").read_bytes()[:1500], "ends before its section 'Clocks"),
    "cut late": ((LOGS / "nvidia_smi_h200_real.txt").read_bytes().partition(b"    Fabric")[0], "section 'Processes'"),
    "cut links": (b"".join((LOGS / "nvlink_h200x4_real.txt").read_bytes().splitlines(True)[:30]), "has 10 lines"),
    "cut row": ((LOGS / "nvbandwidth_good.txt").read_bytes()[:1500], "ends inside a row"),
    "cut matrix": ((LOGS / "nvbandwidth_good.txt").read_bytes().rpartition(b"         7")[0], "breaks off"),
    "cut case": ((LOGS / "nvbandwidth_good.txt").read_bytes().partition(b"memcpy CE GPU")[0], "has no matrix"),
    "cut perftest": ((LOGS / "perftest_write_lat.txt").read_bytes()[:-120], "ends inside a row"),
    "cut xid": (b"NVRM: Xid (PCI:00", ":1: must read"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_file_costs_one_line_and_exit_2_and_the_others_are_judged(what: str, tmp_path: Path) -> None:
    content, message = DAMAGE[what]
    (tmp_path / "damaged.log").write_bytes(content)
    result = invoke(tmp_path / "damaged.log", LOGS / "nccl_wrong_data.txt")
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert line.startswith(f"error: {tmp_path / 'damaged.log'}:")
    assert message in line
    assert "4096 wrong elements" in result.stdout


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(MAX_STREAM_BYTES + 1)
    (tmp_path / "empty").mkdir()
    judgement = judge_files(
        [tmp_path / "pipe", tmp_path / "empty", tmp_path / "none", tmp_path / "huge", Path("a\x00b")]
    )
    for expected, line in zip(("a file", "No such", "8 GiB", "null"), judgement.damaged, strict=True):
        assert expected in line
    assert "holds no file" in judgement.skipped[0]
    assert judgement.verdict == "NO VERDICT"
    assert "holds no file" in judge_files([tmp_path / "empty"]).damaged[0]


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path}/ran",)

    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / "log.pkl").write_bytes(pickle.dumps(Evil(), protocol=protocol))
        assert invoke(tmp_path / "log.pkl").exit_code == 2
    assert not (tmp_path / "ran").exists()


def test_a_log_cannot_write_to_the_terminal_or_the_page(tmp_path: Path) -> None:
    text = (LOGS / "nccl_own_gloo.txt").read_text().replace(" vm ", " \x1b[31m<script>\x07 ")
    (tmp_path / "log").write_text(text)
    out = {option: tmp_path / f"out.{option}" for option in ("json", "junit", "html")}
    result = invoke(tmp_path / "log", *(word for option in out for word in (f"--{option}", out[option])))
    assert result.exit_code == 0
    assert "\x1b" not in result.output
    assert "<script>?" not in out["html"].read_text()
    assert all("\x1b" not in path.read_text() for path in out.values())
    ET.parse(out["junit"])


_CONTENTS = {path.name: path.read_bytes() for path in sorted(LOGS.iterdir())}


@settings(max_examples=250)
@given(
    name=st.sampled_from(sorted(_CONTENTS)),
    cut=st.floats(0, 1),
    flips=st.lists(st.tuples(st.floats(0, 0.999999), st.integers(0, 255)), max_size=12),
)
def test_no_damage_ends_in_a_traceback(
    name: str, cut: float, flips: list[tuple[float, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(_CONTENTS[name][: int(cut * len(_CONTENTS[name])) + 1])
    for where, byte in flips:
        content[int(where * len(content))] = byte
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(content)
    judgement = judge_files([path, LOGS / "nccl_h200x8.json"])
    assert str(LOGS / "nccl_h200x8.json") in judgement.kinds
    assert len(judgement.kinds) + len(judgement.damaged) == 2
    assert all("\n" not in line for line in judgement.damaged)


@settings(max_examples=100)
@given(st.sampled_from(["nccl_h200x8.json", "dcgmi4_bad.json", "nvbandwidth_error.json"]), st.data())
def test_no_json_of_another_shape_ends_in_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    tree = json.loads(_CONTENTS[name])
    odd = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=5,
    )
    node = tree
    while True:
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if not isinstance(node[key], dict | list) or not node[key] or data.draw(st.booleans()):
            node[key] = data.draw(odd)
            break
        node = node[key]
    path = tmp_path_factory.getbasetemp() / "odd"
    path.write_text(json.dumps(tree))
    judgement = judge_files([path])
    assert len(judgement.kinds) + len(judgement.damaged) == 1


def test_where_a_run_stands_that_has_no_end_is_said(tmp_path: Path) -> None:
    whole = (LOGS / "nccl_hung.txt").read_text()
    head, rows = "".join(whole.splitlines(keepends=True)[:16]), "its last figures are of 4 MiB"
    ended = (LOGS / "nccl_own_gloo.txt").read_text()
    for content, figure in (
        (whole, rows),
        (head, "nor a row of figures"),
        (whole + "slurmstepd: error: *** STEP 7.0 ON node9 CANCELLED DUE TO TIME LIMIT ***\n", rows),
        (whole + ended, rows),
        (ended + whole, rows),
    ):
        (tmp_path / "log").write_text(content)
        judgement = judge_files([tmp_path / "log"])
        [finding] = [finding for finding in bad(judgement) if finding.check == "run"]
        assert figure in finding.figure
        assert finding.line == content.count("\n", 0, content.index(head)) + (18 if figure == rows else 3)
        assert judgement.damaged == ()


@pytest.mark.parametrize("options", [{}, {"check": 0}, {"per_iter": 1}, {"per_iter": 1, "check": 0}])
def test_ours_that_hangs_in_place_is_told_from_a_log_that_was_cut(options: dict[str, int], tmp_path: Path) -> None:
    record = canned.record(**options)
    row = canned.row(False) | ({} if options.get("check", 1) else {"wrong": None})
    half = format_head(record) + format_row(PerfRow.from_row(row), record)
    (tmp_path / "log").write_text(half)
    [finding] = [finding for finding in judge_files([tmp_path / "log"]).findings if finding.check == "run"]
    assert finding.figure == "has no end; its last figures are of 1 MiB out of place"
    (tmp_path / "log").write_text(half[:-1])
    assert len(judge_files([tmp_path / "log"]).damaged) == 1
    (tmp_path / "log").write_text(format_table(record))
    assert "run" not in {finding.check for finding in judge_files([tmp_path / "log"]).findings}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("nccl_h200x8.json",), 0),
        (("nccl_mpirun_nvls_off.txt",), 0),
        (("nccl_mpirun_nvls_off.txt", "--strict"), 1),
        (("nccl_wrong_data.txt",), 1),
        (("nccl_node3.txt", "--nvls", "off"), 1),
        (("nccl_node3.txt", "--nvls", "on"), 1),
        (("nccl_own_gloo.txt",), 0),
        (("nccl_own_gloo.txt", "--strict"), 1),
        (("nccl_hung.txt",), 1),
    ],
)
def test_exit_codes(arguments: tuple[str, ...], code: int) -> None:
    name, *options = arguments
    assert invoke(LOGS / name, *options).exit_code == code


def test_whole_rows_of_a_log_that_was_cut_are_judged(tmp_path: Path) -> None:
    (tmp_path / "hung.log").write_bytes((LOGS / "nccl_hung.txt").read_bytes() + CUT_ROW)
    (tmp_path / "wrong.log").write_bytes((LOGS / "nccl_wrong_data.txt").read_bytes().partition(b"# Out")[0][:-3])
    hung = judged(tmp_path / "hung.log")
    [cut] = [finding for finding in hung.findings if finding.check == "run"]
    assert cut.verdict is None  # no program waits within a line: it was cut, and may have gone on
    assert "is cut within a line; its last whole figures are of" in cut.figure
    assert hung.verdict == "NO VERDICT"
    assert judged(tmp_path / "wrong.log").verdict == "FAIL"


def test_record_and_junit_say_what_the_table_says(tmp_path: Path) -> None:
    (tmp_path / "cut").write_bytes(CUT_FRONT)
    result = invoke(*NODES, tmp_path / "cut", "--json", tmp_path / "a.json", "--junit", tmp_path / "a.xml")
    record = json.loads((tmp_path / "a.json").read_text())
    overall, *rows = record["rows"]
    assert (record["name"], record["source"]) == ("bench.accept.judge", "measured")
    assert (overall["verdict"], overall["check"]) == ("FAIL", "overall")
    assert [row["subject"] for row in rows if row["verdict"] == "FAIL"] == ["node3"] * 2
    assert next((node["node"], node["verdict"]) for node in overall["nodes"]) == ("node3", "FAIL")
    assert [row["check"] for row in rows].count("not judged") == 1
    suite = ET.parse(tmp_path / "a.xml").getroot()
    assert [suite.get(key) for key in ("failures", "errors", "skipped")] == ["2", "1", "0"]
    assert len(suite.findall("testcase")) == int(suite.get("tests") or 0)
    assert "node3" in result.stdout.splitlines()[1]
    assert result.stdout.splitlines()[-1].startswith("FAIL: 2 faults and 0 warnings in 5 files; 1 file not judged")
    only = invoke(NODES[0], "--json", "-")
    assert json.loads(only.stdout)["rows"][0]["verdict"] == "NO VERDICT"


def test_the_page_holds_every_fault_and_its_next_step(tmp_path: Path) -> None:
    invoke(LOGS / "perftest_rails.txt", "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "mlx5_3" in page
    assert "swap cable and transceiver of mlx5_3" in page


def test_help_has_examples() -> None:
    text = CliRunner().invoke(accept, ["judge", "--help"]).output
    assert "netlayer accept judge node*.log" in text


def test_judging_imports_no_heavy_library() -> None:
    """Check the imports that would make a verdict on a hundred files take longer than a second."""
    code = (
        "import sys; from pathlib import Path; import netlayer.cli, bench.accept.cli, bench.accept.judge.output;"
        "from bench.accept.judge.logs import judge_files;"
        f"found = judge_files(sorted(Path({str(LOGS)!r}).iterdir()));"
        "list(bench.accept.judge.output.format_table(found)), bench.accept.judge.output.junit(found);"
        "print(len(found.kinds), {'torch', 'numpy', 'pandas', 'altair'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == [str(len(_CONTENTS)), "set()"]


def test_the_worst_verdict_and_the_peers() -> None:
    assert worst([None, "PASS", "WARN"]) == "WARN"
    assert worst([None]) is None
    peers = peers_of([10.0, 10.1, 9.9, 10.0, 5.0])
    assert peers.median == 10.0
    assert peers.mad == pytest.approx(0.1)
    assert [peers.judge(value) for value in (10.2, 9.5, 9.1, 5.0)] == ["PASS", "PASS", "WARN", "FAIL"]
    with pytest.raises(ValueError, match="at least one"):
        peers_of([])


def test_every_form_of_matrix_is_read(tmp_path: Path) -> None:
    """Read matrices of a single row, totals, latencies (higher is worse), and cells that do not apply."""
    (tmp_path / "log").write_text(
        "nvbandwidth Version: v0.8\n\n"
        "Running device_local_copy.\nmemcpy local GPU(column) bandwidth (GB/s)\n           0         1\n"
        " 0   2100.51   2099.80\n\nSUM device_local_copy 4200.31\n\n"
        "Running host_to_all_memcpy_ce.\nmemcpy CE CPU(row) -> All GPU(column) total bandwidth (GB/s)\n"
        "           0\n 0     55.00\n\n"
        "Running host_device_latency_sm.\nmemory latency SM CPU(row) <-> GPU(column) (ns)\n"
        "           0         1         2         3\n 0    800.10    801.30   1302.00    799.90\n\n"
        "Running multinode_device_to_device_memcpy_read_ce.\nWaived: \n"
    )
    judgement = judge_files([tmp_path / "log"])
    [finding] = bad(judgement)
    assert (finding.subject, finding.figure) == ("CPU 0 <-> GPU 2", "1302 ns")
    assert judgement.damaged == ()
    assert {finding.check for finding in judgement.findings} >= {"device_local_copy", "host_to_all_memcpy_ce"}

"""The preflight: what a host says of itself, and what is made of it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import pytest

from bench.accept.agents.fleet import Fleet
from bench.accept.phases import preflight
from bench.accept.phases.preflight_rules import judge_hosts
from bench.accept.phases.trial import Trial
from bench.accept.phases.work import work_for
from bench.accept.run import members_of
from netlayer.config.tree import ClusterConfig
from netlayer.verdict import Finding

LOGS = Path(__file__).parent / "logs"
NODES = ("n0", "n1", "n2", "n3")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A file system as Linux shows an RDMA NIC and NVIDIA's driver."""
    card, nic = tmp_path / "sys/devices/card", tmp_path / "sys/class/infiniband/mlx5_0"
    for name, text in {
        "current_link_width": "16",
        "max_link_width": "16",
        "current_link_speed": "32.0 GT/s PCIe",
        "max_link_speed": "32.0 GT/s PCIe",
        "net/ib0/x": "",
    }.items():
        write(card / name, text)
    for name, text in {
        "fw_ver": "28.39.1002",
        "ports/1/state": "4: ACTIVE",
        "ports/1/rate": "400 Gb/sec (4X NDR)",
        "ports/1/link_layer": "InfiniBand",
        "ports/1/counters/symbol_error": "0",
    }.items():
        write(nic / name, text)
    (nic / "device").symlink_to(card)
    write(tmp_path / "proc/driver/nvidia/version", "NVRM version: 570.1")
    write(tmp_path / "proc/modules", "nvidia_peermem 16384 0")
    write(tmp_path / "sys/class/net/ib0/mtu", "4092")
    return tmp_path


@pytest.fixture(autouse=True)
def _quiet_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel of this machine has logged, a crash of another program say, is no matter of these tests."""
    ask = preflight._output
    monkeypatch.setattr(preflight, "_output", lambda words: ("", "not asked") if words == ["dmesg"] else ask(words))


def judged(facts: dict[str, Any], **changed: dict[str, Any]) -> list[Finding]:
    """Judge four hosts with these facts, except those in `changed`, and return the findings that are WARN or FAIL."""
    members = members_of([(node, 1) for node in NODES])
    trial = Trial(cast(Fleet, None), members, work_for("gloo", None), list(range(len(NODES))))
    facts_by_host = {node: changed.get(node, facts) for node in NODES if changed.get(node, facts)}
    cluster = ClusterConfig(servers=4, gpus_per_server=1, nic_bps=400_000_000_000)
    findings = judge_hosts(facts_by_host, cluster, trial)
    bad = [finding for finding in findings if finding.verdict in ("WARN", "FAIL")]
    assert [(one.label, one.verdict) for one in trial.suspects] == [(one.subject, one.verdict) for one in bad]
    assert all(one.label.startswith(trial.members[one.ranks[0]].host) for one in trial.suspects)
    return bad


def changed(facts: dict[str, Any], **nic: Any) -> dict[str, Any]:
    other = copy.deepcopy(facts)
    other["nics"][0] |= nic
    return other


def test_what_is_there_is_read_and_what_is_not_is_said(root: Path) -> None:
    facts = preflight.look(root)
    [nic] = facts["nics"]
    assert (nic["name"], nic["rate"], nic["width"], nic["net"]) == ("mlx5_0", "400 Gb/sec (4X NDR)", "16", "ib0")
    assert facts["traits"]["GPUDirect RDMA"] == "nvidia_peermem loaded"
    assert facts["traits"]["ib0 mtu"] == "4092"
    bare = preflight.look(root / "none")
    assert bare["nics"] == []
    assert {"RDMA NICs", "kernel driver", "GPUDirect RDMA"} <= set(bare["unread"])


def test_hosts_alike_and_good_are_not_accused(root: Path) -> None:
    assert judged(preflight.look(root)) == []


def test_each_fault_of_a_nic_is_named_with_its_host(root: Path) -> None:
    facts = preflight.look(root)
    for change, check in (
        ({"state": "1: DOWN"}, "NIC state"),
        ({"width": "8"}, "PCIe width"),
        ({"speed": "16.0 GT/s PCIe"}, "PCIe speed"),
        ({"counters": {"link_downed": "3"}}, "NIC link_downed"),
        ({"firmware": "28.0"}, "NIC firmware"),
    ):
        [finding] = judged(facts, n2=changed(facts, **change))
        assert (finding.check, finding.subject.partition(":")[0]) == (check, "n2")
        assert finding.next_step
    slow = judged(facts, n2=changed(facts, rate="200 Gb/sec (4X HDR)"))
    assert {finding.check for finding in slow} == {"NIC rate"}


def test_versions_are_held_against_the_majority_and_parts_against_the_cluster_file(root: Path) -> None:
    facts = preflight.look(root)
    other = copy.deepcopy(facts)
    other["traits"]["torch"] = "1.0"
    other["nics"].append({**other["nics"][0], "name": "mlx5_1"})
    verdicts = {(finding.check, finding.verdict) for finding in judged(facts, n1=other)}
    assert verdicts == {("torch", "WARN"), ("number of NICs", "FAIL")}


def test_the_tools_output_goes_through_the_parsers_of_judge(root: Path) -> None:
    facts = preflight.look(root)
    other = copy.deepcopy(facts)
    other["texts"] = {"dmesg": "[1.0] NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus.\n"}
    [finding] = judged(facts, n3=other)
    assert (finding.check, finding.verdict) == ("XID 79", "FAIL")
    assert finding.subject.startswith("n3: GPU")
    other["texts"] = {"nvidia-smi -q": "garbage"}
    assert {finding.check for finding in judged(facts, n3=other)} == {"nvidia-smi -q"}


@pytest.mark.parametrize(
    ("line", "subject", "verdict"),
    [
        ("nvidia-nvswitch2: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up", "n3: NVSwitch 2", "FAIL"),
        ("nvidia-nvswitch0: SXid (PCI:0000:c0:00.0): 12028, Non-fatal, Link 32 egress", "n3: NVSwitch 0", "WARN"),
        ("NVRM: GPU 0000:1b:00.0: RmInitAdapter failed! (0x26:0x56:1474)", "n3: GPU 0000:1b:00", "FAIL"),
        ("NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus.", "n3: GPU 0000:1b:00", "FAIL"),
    ],
)
@pytest.mark.parametrize("stamp", ["[    1.000000] ", ""])
def test_what_the_driver_says_in_the_kernel_log_is_a_finding(
    root: Path, line: str, subject: str, verdict: str, stamp: str
) -> None:
    facts = preflight.look(root)
    facts["texts"] = {"dmesg": f"{stamp}Linux version 6.8.0\n{stamp}eth0: link up\n"}
    assert judged(facts) == []
    other = copy.deepcopy(facts)
    other["texts"]["dmesg"] += f"{stamp}{line}\n"
    [finding] = judged(facts, n3=other)
    assert (finding.subject, finding.verdict) == (subject, verdict)


def test_a_gpu_has_one_name_whoever_says_what_is_wrong_with_it(root: Path) -> None:
    facts = preflight.look(root)
    facts["texts"] = {"nvidia-smi -q": (LOGS / "nvidia_smi_bad.txt").read_text()}
    subjects = {
        finding.subject for finding in judged(facts) if finding.subject.startswith("n1") and "GPU 2" in finding.subject
    }
    assert subjects == {"n1: GPU 2 (00000000:52:00.0)"}


def test_a_host_that_says_nothing_is_a_finding(root: Path) -> None:
    [finding] = judged(preflight.look(root), n1={})
    assert (finding.subject, finding.figure) == ("n1", "no answer")
